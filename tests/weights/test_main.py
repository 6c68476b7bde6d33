"""`python -m weights`: results on stdout, one line on stderr for a mistake, exit codes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.weights import build as b
from tests.weights import build_binary
from weights.__main__ import main

ROOT = Path(__file__).parents[2]


@pytest.fixture
def model(tmp_path) -> str:
    path = tmp_path / "small.gguf"
    path.write_bytes(b.small_gguf())
    return str(path)


def test_inspect_shows_what_the_file_holds(model, capsys):
    assert main(["inspect", model]) == 0
    out, err = capsys.readouterr()
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert err == ""
    assert {"format gguf", "architecture llama", "parameters 9 in 2 tensors"} <= set(lines)
    assert "quantisation F32 66.7%, F16 33.3%" in lines
    assert "x F32 2x3 24" in lines and "y F16 3 6" in lines


def test_inspect_names_the_model_and_cuts_long_texts(tmp_path, capsys):
    pairs = [b.string("general.architecture", "llama"), b.string("template", "x" * 5000)]
    headers = [b.header("token_embd.weight", (1, 8), b.F32, 0)]
    (tmp_path / "m").write_bytes(b.gguf(pairs, headers, bytes(32)))
    assert main(["inspect", str(tmp_path / "m"), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["model"] == "llama, names of gguf" and len(facts["metadata"]["template"]) < 1100


def test_inspect_json_is_one_object(model, capsys):
    assert main(["inspect", model, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["architecture"] == "llama" and facts["parameters"] == 9
    assert facts["metadata"]["tokenizer.ggml.tokens"] == ["a", "é", "", "🦙"]
    assert facts["tensors"][0] == {"name": "x", "type": "F32", "shape": [2, 3], "bytes": 24}


def test_inspect_knows_types_that_it_cannot_read(tmp_path, capsys):
    path = tmp_path / "m"
    path.write_bytes(b.gguf([], [b.header("w", (256,), 34, 0)], bytes(54)))
    assert main(["inspect", str(path)]) == 0
    assert "quantisation  TQ1_0 100.0%" in capsys.readouterr().out


def test_inspect_counts_a_tensor_with_two_names_once(tmp_path, capsys):
    variables = [build_binary.of_array("embeddings", np.zeros((2, 3), np.float32))]
    (tmp_path / "model.bin").write_bytes(
        build_binary.ctranslate2(variables, {"projection": "embeddings"})
    )
    assert main(["inspect", str(tmp_path)]) == 0
    assert "parameters    6 in 2 tensors" in capsys.readouterr().out


@pytest.mark.parametrize(
    "argument", ["absent.gguf", "absent.pt", "no-such-model", "~no-such-user/m.pt"]
)
def test_wrong_file_or_name_is_one_line_and_exit_code_1(argument, capsys):
    assert main(["inspect", argument]) == 1
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1
    assert err.startswith("python -m weights inspect: ") and argument in err


def test_unknown_name_to_fetch_is_no_matter_of_files(capsys):
    assert main(["fetch", "smolm2"]) == 1
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and "file" not in err
    assert err.startswith("python -m weights fetch: no model is called 'smolm2'; did you mean")


@pytest.mark.parametrize(
    ("argv", "command", "named"),
    [
        ([], "", "COMMAND"),
        (["frobnicate"], "", "frobnicate"),
        (["fetch"], " fetch", "NAME"),
        (["inspect"], " inspect", "PATH"),
        (["inspect", " "], " inspect", "empty"),
        (["inspect", "a", "b\nc"], " inspect", "b c"),
        (["list", "--no-such-flag"], " list", "--no-such-flag"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_code_2(argv, command, named, capsys):
    with pytest.raises(SystemExit) as caught:
        main(argv)
    out, err = capsys.readouterr()
    prog = f"python -m weights{command}"
    assert caught.value.code == 2 and out == "" and err.count("\n") == 1
    assert err.startswith(f"{prog}: ") and err.endswith(f"; see {prog} --help\n")
    assert named in err


def test_list_names_size_and_licence(capsys):
    assert main(["list"]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == "NAME ALIASES SIZE LICENCE FETCHED GATED DESCRIPTION"
    assert any("smollm2-135m-instruct smollm2, " in line for line in lines)
    assert any("98.4 MB Apache-2.0" in line for line in lines)
    assert any("2.48 GB Llama 3.2 Community no yes" in line for line in lines)


def test_list_json_says_what_is_fetched(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("ZOO_CACHE", str(tmp_path))
    assert main(["list", "--json"]) == 0
    models = {model["name"]: model for model in json.loads(capsys.readouterr().out)}
    first = models["smollm2-135m-instruct"]
    description = first.pop("description")
    assert description.startswith("SmolLM2 135M")
    assert first == {
        "name": "smollm2-135m-instruct",
        "aliases": ["smollm2", "smollm2-135m"],
        "size": 98_362_432,
        "licence": "Apache-2.0",
        "fetched": False,
        "gated": False,
    }


@pytest.mark.parametrize(
    ("argv", "description"),
    [([], "List, fetch, inspect and convert"), (["inspect"], "show what a checkpoint holds")],
)
def test_help_has_a_description_and_examples(argv, description, capsys):
    with pytest.raises(SystemExit) as caught:
        main([*argv, "--help"])
    out = capsys.readouterr().out
    assert caught.value.code == 0
    assert description in out and "python -m weights fetch smollm2" in out


def test_reader_that_stops_early_is_no_error(model):
    """As in `python -m weights inspect FILE | head -1`."""
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "weights", "inspect", model]
    ended = subprocess.run(command, cwd=ROOT, stdout=write, stderr=subprocess.PIPE, text=True)
    os.close(write)
    assert ended.returncode == 0 and "Traceback" not in ended.stderr
    assert "BrokenPipe" not in ended.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_full_disk_behind_stdout_is_one_line(model):
    command = [sys.executable, "-m", "weights", "inspect", model]
    with open("/dev/full", "w") as full:
        ended = subprocess.run(command, cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True)
    assert ended.returncode != 0
    assert ended.stderr.startswith("python -m weights inspect: No space left on device\n")
