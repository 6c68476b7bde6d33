"""The lock between processes."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path

from weights.lock import hold

ROOT = Path(__file__).parents[2]


def test_only_one_holds_it_at_a_time(tmp_path):
    path, inside, most, waited = tmp_path / "l", [], [], []

    def work(name: int) -> None:
        with hold(path, on_wait=lambda: waited.append(name)):
            inside.append(name)
            most.append(len(inside))
            time.sleep(0.02)
            inside.remove(name)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1] * 6 and len(waited) == len(set(waited)) and waited
    assert not path.exists()


def test_killed_holder_frees_it(tmp_path):
    path = tmp_path / "l"
    code = (
        "import pathlib, sys, time; from weights.lock import hold\n"
        f"with hold(pathlib.Path({str(path)!r}), print): print('held', flush=True); time.sleep(60)"
    )
    pipe = subprocess.PIPE
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=pipe, text=True)
    assert process.stdout.readline() == "held\n"
    process.kill()
    process.communicate()
    with hold(path, on_wait=lambda: None):
        assert path.exists()
    assert not path.exists()
