"""`python -m bench serve`: concurrent chats with the server beside the same chats one at a time.

Each chat has a prompt of its own and is asked for greedily. The texts that came one at a time are
what those that came together must equal.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from bench.measure import SideError, machine, say

SUBJECTS = ("foxes", "rivers", "bread", "the moon", "trains", "glass", "winter", "maps")
VERBS = ("Describe", "Explain", "Praise", "Tell a story about")
START_S = 600  # the first start may compile and fetch


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="smollm2-135m-instruct", help="name or GGUF file")
    parser.add_argument("--chats", type=int, default=32, metavar="N", help="at the same time")
    parser.add_argument("--seconds", type=int, default=120, metavar="S", help="to go on for")
    parser.add_argument("--max-tokens", type=int, default=64, metavar="N", help="of each reply")
    parser.add_argument("--slots", type=int, help="of the server (default: as many as chats)")
    parser.add_argument("--ctx", type=int, default=512, metavar="N")


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure and return the report; progress goes to stderr."""
    prompts = [f"{verb} {subject}." for subject in SUBJECTS for verb in VERBS]
    with _server(arguments) as address:
        say(f"{len(prompts)} chats one at a time, twice")
        alone: dict[str, str] = {}
        for _ in range(2):  # the first time kernels are compiled
            begun, tokens = time.perf_counter(), 0
            for prompt in prompts:
                alone[prompt], count = _chat(address, prompt, arguments.max_tokens)
                tokens += count
            solo = tokens / (time.perf_counter() - begun)
        _together(address, prompts, alone, arguments, arguments.seconds // 10)
        before = _memory(address)
        say(f"{arguments.chats} chats at the same time for {arguments.seconds} s")
        result = _together(address, prompts, alone, arguments, arguments.seconds)
        after = _memory(address)
    together = result["tokens"] / result["wall_s"]
    report = {"machine": machine(), "model": arguments.model, "chats": arguments.chats}
    report |= {"solo_tokens_per_s": solo, "together_tokens_per_s": together}
    report |= {"ratio": together / solo, **result, "memory_mb": [before, after]}
    return report | {"wrong": result["lost"] + result["mixed_up"]}


def to_json(report: dict[str, Any]) -> str:
    return json.dumps(report)


def text(report: dict[str, Any]) -> str:
    before, after = report["memory_mb"]
    return (
        f"{report['replies']} replies, {report['lost']} lost, {report['mixed_up']} mixed up\n"
        f"one at a time {report['solo_tokens_per_s']:.1f} tokens/s, {report['chats']} together "
        f"{report['together_tokens_per_s']:.1f}: {report['ratio']:.2f} times\n"
        f"memory {before:.0f} MB before, {after:.0f} MB after"
    )


def _together(
    address: str, prompts: list[str], alone: dict[str, str], given: Any, seconds: int
) -> dict[str, Any]:
    """Chat after chat in as many threads, until the time is over."""
    lock, counts = threading.Lock(), {"replies": 0, "lost": 0, "mixed_up": 0, "tokens": 0}
    begun = time.perf_counter()

    def work(n: int) -> None:
        for prompt in itertools.islice(itertools.cycle(prompts), n, None):
            if time.perf_counter() - begun > seconds:
                return
            try:
                said, tokens = _chat(address, prompt, given.max_tokens)
            except OSError as error:
                say(f"lost: {error}")
                said, tokens = None, 0
            with lock:
                counts["replies"] += 1
                counts["lost"] += said is None
                counts["mixed_up"] += said is not None and said != alone[prompt]
                counts["tokens"] += tokens

    threads = [threading.Thread(target=work, args=(n,)) for n in range(given.chats)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return counts | {"wall_s": time.perf_counter() - begun}


def _chat(address: str, prompt: str, most: int) -> tuple[str, int]:
    """A greedy reply and its number of tokens."""
    messages = [{"role": "user", "content": prompt}]
    body = {"messages": messages, "temperature": 0, "max_tokens": most}
    headers = {"Content-Type": "application/json"}
    content = json.dumps(body).encode()
    request = urllib.request.Request(f"{address}/v1/chat/completions", content, headers)
    with urllib.request.urlopen(request, timeout=START_S) as answer:
        told = json.load(answer)
    return told["choices"][0]["message"]["content"], told["usage"]["completion_tokens"]


def _memory(address: str) -> float:
    with urllib.request.urlopen(f"{address}/metrics", timeout=60) as answer:
        found = re.search(r"^process_resident_memory_bytes (\S+)", answer.read().decode(), re.M)
    return float(found[1]) / 2**20


@contextmanager
def _server(given: argparse.Namespace) -> Iterator[str]:
    """The address of a server in a process of its own."""
    slots = str(given.slots or given.chats)
    flags = ["--port", "0", "--model", given.model, "--ctx", str(given.ctx), "--slots", slots]
    command = [sys.executable, "-m", "zoo", "serve", *flags]
    command += ["--whisper-model", "none", "--sd-model", "none", "--load-at-start"]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
    try:
        for line in process.stderr:
            if found := re.search(r"\((http://\S+) ", line):
                break
            print(line, end="", file=sys.stderr)
        else:
            raise SideError("the server didn't start")
        threading.Thread(target=process.stderr.read, daemon=True).start()
        yield found[1]
    finally:
        process.terminate()
        process.wait(60)
