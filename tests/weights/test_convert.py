"""Conversions: what becomes of names, types, bytes and metadata, and of files when they fail."""

from __future__ import annotations

import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import weights
from tests.weights import build as b
from tests.zoo.llama import tiny, vocab
from weights import WeightError, config, gguf_write, load, whole
from weights.__main__ import main
from weights.checkpoint import Checkpoint, Entry, TensorInfo
from weights.convert import write_as
from weights.gguf_llama import llama3_factors
from weights.quantise import encode
from zoo import llama

ROOT = Path(__file__).parents[2]


def big_gguf(path: Path, kind: str = "F32", rows: int = 64, columns: int = 256) -> Path:
    """A GGUF of one matrix and one vector; the model is none that we know."""
    draw = np.random.default_rng(0).normal(size=(rows, columns)).astype(np.float32)
    raw, norm = encode(draw, kind), np.ones(columns, np.float32).view(np.uint8)
    tensors = [
        ("a.weight", TensorInfo(draw.shape, kind, raw.nbytes), lambda: [raw]),
        ("norm.weight", TensorInfo((columns,), "F32", norm.nbytes), lambda: [norm]),
    ]
    gguf_write.write(path, tensors, {"general.architecture": "other", "x": 1})
    return path


def left_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def types(path: Path) -> dict[str, str]:
    checkpoint = load(path, device="reference")
    return {name: checkpoint.info(name).type for name in checkpoint}


def test_bytes_stay_where_the_type_stays(tmp_path):
    source = big_gguf(tmp_path / "a.gguf", "Q4_K")
    weights.convert(source, tmp_path / "b.gguf")
    assert (tmp_path / "b.gguf").read_bytes() == source.read_bytes()


@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
def test_quantised_tensors_become_f16_where_the_format_has_no_such_type(suffix, tmp_path):
    source, target = big_gguf(tmp_path / "a.gguf", "Q8_0"), tmp_path / f"b{suffix}"
    weights.convert(source, target)
    assert types(target) == {"a.weight": "F16", "norm.weight": "F32"}
    before, after = (load(p, device="reference")["a.weight"].numpy() for p in (source, target))
    np.testing.assert_array_equal(after, before.astype(np.float16))


@pytest.mark.parametrize(
    ("option", "columns", "expected"),
    [
        ("q8_0", 256, "Q8_0"),
        ("q4_0", 256, "Q4_0"),
        ("q4_1", 256, "Q4_1"),
        ("q4_k", 256, "Q4_K"),
        ("q4_k", 96, "Q5_0"),  # rows that are not whole blocks
        ("q4_k", 40, "F16"),
        ("q8_0", 40, "F16"),
    ],
)
def test_matrices_are_quantised_and_vectors_are_not(option, columns, expected, tmp_path):
    source = big_gguf(tmp_path / "a.gguf", columns=columns)
    weights.convert(source, tmp_path / "b.gguf", quantize=option)
    assert types(tmp_path / "b.gguf") == {"a.weight": expected, "norm.weight": "F32"}
    assert load(tmp_path / "b.gguf").metadata["general.quantization_version"] == 2


@pytest.mark.parametrize("option", ["f16", "bf16", "f32"])
def test_dtype_is_what_all_floats_become(option, tmp_path):
    source = big_gguf(tmp_path / "a.gguf", "Q4_1")
    weights.convert(source, tmp_path / "b.safetensors", dtype=option)
    assert set(types(tmp_path / "b.safetensors").values()) == {option.upper()}


def test_safetensors_package_reads_what_is_written(tmp_path):
    oracle = pytest.importorskip("safetensors.numpy", reason="the package is the oracle")
    source = big_gguf(tmp_path / "a.gguf")
    weights.convert(source, tmp_path / "b.safetensors")
    read = oracle.load_file(tmp_path / "b.safetensors")
    checkpoint = load(source, device="reference")
    assert read.keys() == set(checkpoint)
    for name, values in read.items():
        np.testing.assert_array_equal(values, checkpoint[name].numpy())


CHAINS = ["a.gguf", "a.safetensors", "a.pt", "a.safetensors b.gguf", "a.pt b.safetensors"]


@pytest.mark.parametrize("chain", [chain.split() for chain in CHAINS])
def test_folder_becomes_a_file_that_chats_the_same(chain, tmp_path):
    path = folder = tiny.write_folder(tmp_path / "hf")
    for name in chain:
        weights.convert(path, tmp_path / name)
        path = tmp_path / name
    before, after = (llama.load(p, device="reference", dtype="f32") for p in (folder, path))
    ids = before.tokenizer.encode("Hello <|im_start|> 12 naïve", special=True)
    assert after.tokenizer.encode("Hello <|im_start|> 12 naïve", special=True) == ids
    assert after.tokenizer.stop_ids == before.tokenizer.stop_ids
    np.testing.assert_array_equal(after.logits(ids), before.logits(ids))


def test_folders_vocabulary_is_gguf_s(tmp_path):
    weights.convert(tiny.write_folder(tmp_path / "hf"), tmp_path / "a.gguf")
    metadata = load(tmp_path / "a.gguf").metadata
    expected = vocab.tiny()
    assert all(metadata[key] == value for key, value in expected.items())
    assert metadata["tokenizer.ggml.add_bos_token"] is False
    assert metadata["llama.attention.head_count_kv"] == 2 and metadata["llama.vocab_size"] == len(
        expected["tokenizer.ggml.tokens"]
    )


def test_hugging_face_names_come_back_bit_for_bit(tmp_path):
    folder = tiny.write_folder(tmp_path / "hf")
    weights.convert(folder, tmp_path / "a.gguf")
    weights.convert(tmp_path / "a.gguf", tmp_path / "b.safetensors", layout="hf")
    before, after = (load(p, device="reference") for p in (folder, tmp_path / "b.safetensors"))
    assert set(after) == set(before)
    for name in before:
        assert after.entries[name].raw().tobytes() == before.entries[name].raw().tobytes()


def test_llama3_factors_equal_the_published_ones():
    scaling = {"factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 8192}  # fmt: skip
    factors = llama3_factors(64, 5e5, scaling)
    frequencies = 5e5 ** -(np.arange(0, 64, 2) / 64) / factors
    assert (factors[:15] == 1).all() and (factors[18:] == 32).all()
    # Three digits more than float32 has would be wrong in the last of the nine published ones.
    expected = [1.29054793e-3, 4.29556797e-4, 9.7082878e-5]
    np.testing.assert_allclose(frequencies[15:18], expected, rtol=1e-6)


@pytest.mark.parametrize("chain", [("a.safetensors",), ("a.pt",), ("a.pt", "b.safetensors")])
def test_metadata_and_tensors_come_back_through_other_formats(chain, smollm2, tmp_path):
    """The real model, widened to float32 so that nothing is rounded."""
    path = smollm2
    for name in chain:
        weights.convert(path, tmp_path / name, dtype="f32")
        path = tmp_path / name
    before, after = load(smollm2, device="reference"), load(path, device="reference")
    assert dict(after.metadata) == dict(before.metadata)
    ours = weights.names.canonical(before)
    assert set(after) == set(ours)
    for name in ("layers.0.attention.wq.weight", "layers.29.ffn_norm.weight"):
        np.testing.assert_array_equal(after[name].numpy(), ours[name].numpy())


def test_back_in_gguf_everything_is_as_it_was(smollm2, tmp_path):
    weights.convert(smollm2, tmp_path / "a.safetensors")
    weights.convert(tmp_path / "a.safetensors", tmp_path / "b.gguf")
    before, after = load(smollm2), load(tmp_path / "b.gguf")
    assert set(after) == set(before)
    kept = before.metadata.keys() - {"general.file_type"}
    assert all(after.metadata[key] == before.metadata[key] for key in kept)
    kinds = {key: np.asarray(before.metadata.typed(key)).dtype.kind for key in kept}
    assert all(np.asarray(after.metadata.typed(key)).dtype.kind in (kind, *"ui") for key, kind in
               kinds.items())  # fmt: skip


def test_whispers_dims_are_those_of_openais_tiny(tmp_path):
    shapes = {
        "encoder.conv1.weight": (384, 80, 3),
        "encoder.positional_embedding": (1500, 384),
        "decoder.token_embedding.weight": (51865, 384),
        "decoder.positional_embedding": (448, 384),
    }
    shapes |= {f"{side}.blocks.{n}.mlp_ln.bias": (384,) for side in ("encoder", "decoder")
               for n in range(4)}  # fmt: skip
    entries = {name: Entry(TensorInfo(shape, "F16", 0), None, None) for name, shape in
               shapes.items()}  # fmt: skip
    dims = config.whisper_dims(Checkpoint(tmp_path, "pytorch", {}, entries))
    audio = {"n_audio_ctx": 1500, "n_audio_state": 384, "n_audio_head": 6, "n_audio_layer": 4}
    text = {"n_text_ctx": 448, "n_text_state": 384, "n_text_head": 6, "n_text_layer": 4}
    assert dims == {"n_mels": 80, "n_vocab": 51865} | audio | text


# --- what may go wrong ------------------------------------------------------------------------


def test_existing_file_is_kept_without_force(tmp_path):
    source, target = big_gguf(tmp_path / "a.gguf"), tmp_path / "b.gguf"
    target.write_bytes(b"precious")
    with pytest.raises(WeightError, match="b.gguf: it exists already; --force replaces it"):
        weights.convert(source, target)
    assert target.read_bytes() == b"precious"
    weights.convert(source, target, force=True)
    assert target.read_bytes() == source.read_bytes() and left_in(tmp_path) == {"a.gguf", "b.gguf"}


def test_file_made_at_the_last_moment_is_kept(tmp_path, monkeypatch):
    source, target = big_gguf(tmp_path / "a.gguf"), tmp_path / "b.gguf"
    monkeypatch.setattr(whole, "check_target", lambda path, force: None)  # it was not there yet

    def late(done: int, total: int) -> None:
        target.write_bytes(b"precious")

    with pytest.raises(WeightError, match="it exists already"):
        write_as(load(source, device="reference"), target, progress=late)
    assert target.read_bytes() == b"precious" and left_in(tmp_path) == {"a.gguf", "b.gguf"}


@pytest.mark.parametrize("link", [False, True])
def test_source_is_never_its_own_target(link, tmp_path):
    source = target = big_gguf(tmp_path / "a.gguf")
    if link:
        target = tmp_path / "b.gguf"
        target.hardlink_to(source)
    before = source.read_bytes()
    with pytest.raises(WeightError, match="it is what is being read"):
        weights.convert(source, target, force=True)
    assert source.read_bytes() == before


def test_failure_half_way_leaves_nothing(tmp_path):
    source, target = big_gguf(tmp_path / "a.gguf"), tmp_path / "b.gguf"

    def fails(done: int, total: int) -> None:
        assert any(name.endswith(".partial") for name in left_in(tmp_path))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_as(load(source, device="reference"), target, progress=fails)
    assert left_in(tmp_path) == {"a.gguf"}


@pytest.mark.parametrize(
    ("target", "problem"),
    [
        ("absent/b.gguf", "its folder does not exist"),
        ("two words/b.gguf", "two words'\n"),
        ("folder.gguf", "it is a folder"),
    ],
)
def test_impossible_target_is_one_line_and_exit_code_1(target, problem, tmp_path, capsys):
    source = big_gguf(tmp_path / "a.gguf")
    (tmp_path / "folder.gguf").mkdir()
    assert main(["convert", str(source), str(tmp_path / target)]) == 1
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and problem in err and target in err


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (["a.gguf", "b.onnx"], "b.onnx"),
        (["a.gguf", "b"], "suffix"),
        (["a.gguf", "b.safetensors", "--quantize", "q8_0"], "only GGUF"),
        (["a.gguf", "b.gguf", "--quantize", "q3_x"], "q3_x"),
        (["a.gguf", "b.gguf", "--dtype", "f16", "--quantize", "q8_0"], "not allowed with"),
        (["a.gguf"], "DST"),
    ],
)
def test_wrong_usage_is_exit_code_2(argv, named, capsys):
    with pytest.raises(SystemExit) as caught:
        main(["convert", *argv])
    err = capsys.readouterr().err
    assert caught.value.code == 2 and err.count("\n") == 1 and named in err


def test_spellings_that_people_use_are_understood(tmp_path, monkeypatch):
    """`~` in quotes, which no shell expands, and capitals."""
    monkeypatch.setenv("HOME", str(tmp_path))
    source = big_gguf(tmp_path / "a.gguf")
    assert main(["convert", str(source), "~/B.GGUF", "--quantize", "Q8_0"]) == 0
    types = load(tmp_path / "B.GGUF", device="reference").entries.values()
    assert "Q8_0" in {entry.info.type for entry in types}


def command(source: Path, target: Path, *options: str) -> list[str]:
    return [sys.executable, "-m", "weights", "convert", str(source), str(target), *options]


def test_full_disk_is_one_line_and_leaves_nothing(tmp_path):
    source = big_gguf(tmp_path / "a.gguf", rows=4096)

    def limited() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))

    ended = subprocess.run(
        command(source, tmp_path / "b.gguf"), cwd=ROOT, preexec_fn=limited, capture_output=True,
        text=True,
    )  # fmt: skip
    assert ended.returncode == 1 and ended.stderr.count("\n") == 1
    assert "b.gguf: the disk is full" in ended.stderr and left_in(tmp_path) == {"a.gguf"}


def test_terminated_conversion_leaves_nothing(tmp_path):
    source = big_gguf(tmp_path / "a.gguf", rows=1 << 16)  # seconds of work for q4_k
    running = subprocess.Popen(
        command(source, tmp_path / "b.gguf", "--quantize", "q4_k"), cwd=ROOT,
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    for _ in range(600):
        if len(left_in(tmp_path)) > 1 or running.poll() is not None:
            break
        time.sleep(0.05)
    running.terminate()
    _, err = running.communicate(timeout=60)
    assert running.returncode == 143 and "Traceback" not in err
    assert left_in(tmp_path) == {"a.gguf"}


def test_value_that_a_type_cannot_hold_is_named(tmp_path):
    raw = np.full((1, 32), 1e6, "<f4").tobytes()
    (tmp_path / "a.gguf").write_bytes(b.gguf([], [b.header("w", (1, 32), b.F32, 0)], raw))
    with pytest.raises(WeightError, match="tensor 'w': it can't become F16: 1e.06 is beyond"):
        weights.convert(tmp_path / "a.gguf", tmp_path / "b.safetensors", dtype="f16")
    assert left_in(tmp_path) == {"a.gguf"}


def test_quantising_again_is_said_to_lose_more(tmp_path, capsys):
    plain, once, again = (tmp_path / name for name in ("a.gguf", "b.gguf", "c.gguf"))
    big_gguf(plain)
    assert main(["convert", str(plain), str(once), "--quantize", "q8_0"]) == 0
    assert "quantised already" not in capsys.readouterr().err
    assert main(["convert", str(once), str(again), "--quantize", "q4_0"]) == 0
    assert "quantised already (Q8_0)" in capsys.readouterr().err
