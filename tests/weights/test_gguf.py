"""The GGUF reader against good, broken and hostile files."""

from __future__ import annotations

import struct
import time
import tracemalloc

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.weights import build as b
from weights import WeightError, load

QUICK = 1.0  # seconds that any rejection may take


def opened(tmp_path, raw: bytes):
    path = tmp_path / "model.gguf"
    path.write_bytes(raw)
    return load(path, device="reference")


def read_everything(checkpoint) -> None:
    for key in checkpoint.metadata:
        checkpoint.metadata[key]
    for name in checkpoint:
        checkpoint.info(name)


def test_reads_metadata_of_every_value_type(tmp_path):
    meta = opened(tmp_path, b.small_gguf()).metadata
    assert meta["tokenizer.ggml.tokens"] == ["a", "é", "", "🦙"]
    assert meta["nested"] == [[1, 2], [3]]
    assert meta["llama.block_count"] == 1
    assert all(meta[f"number.{kind}"] == 1 for kind in (0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12))
    assert meta["number.7"] is True
    assert "absent" not in meta and meta.get("absent", 5) == 5


def test_tensor_shape_is_in_numpys_order(tmp_path):
    checkpoint = opened(tmp_path, b.small_gguf())
    assert list(checkpoint) == ["x", "y"]
    info = checkpoint.info("x")
    assert (info.shape, info.type, info.nbytes) == ((2, 3), "F32", 24)
    assert checkpoint["x"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert checkpoint["y"].tolist() == [0, 1, 2]
    assert checkpoint.architecture == "llama"


def test_name_of_the_file_does_not_matter(tmp_path):
    path = tmp_path / "weights.bin"
    path.write_bytes(b.small_gguf())
    assert load(str(path)).format == "gguf"


def test_vocabulary_only_file_opens(tmp_path):
    pairs = [b.string("general.architecture", "llama"), b.u32("llama.block_count", 32)]
    assert len(opened(tmp_path, b.gguf(pairs))) == 0


def test_a_wide_alignment_moves_the_data(tmp_path):
    pairs = [b.u32("general.alignment", 128)]
    raw = b.gguf(pairs, [b.header("x", (1,), b.F32, 0)], struct.pack("<f", 7), align=128)
    assert opened(tmp_path, raw)["x"].tolist() == [7]


def one(shape=(8,), kind=b.F32, offset=0, data=bytes(32), name="x") -> bytes:
    return b.gguf([], [b.header(name, shape, kind, offset)], data)


def two(first: int, second: int, name: str = "y") -> bytes:
    headers = [b.header("x", (8,), b.F32, first), b.header(name, (8,), b.F32, second)]
    return b.gguf([], headers, bytes(96))


def blocks(count: int) -> list[bytes]:
    return [b.string("general.architecture", "llama"), b.u32("llama.block_count", count)]


def deep(levels: int) -> bytes:
    value = b.array(0, 0, b"")
    for _ in range(levels):
        value = b.array(b.ARRAY, 1, value)
    return value


HOSTILE = {
    "array length 2^63 in a 43-byte file": (
        b.gguf([b.pair("a", b.ARRAY, struct.pack("<IQ", 0, 2**63))[:19]], align=1)[:43],
        "past the end",
    ),
    "array of 2^63 strings": (
        b.gguf([b.pair("a", b.ARRAY, b.array(b.STRING, 2**63, b""))]),
        "past the end",
    ),
    "array of 2^63 arrays": (
        b.gguf([b.pair("a", b.ARRAY, b.array(b.ARRAY, 2**63, b""))]),
        "past the end",
    ),
    "string longer than the file": (
        b.gguf([b.pair("a", b.STRING, struct.pack("<Q", 2**40))]),
        "past the end",
    ),
    "string whose end wraps around": (
        b.gguf([b.pair("a", b.STRING, struct.pack("<Q", 2**64 - 4))]),
        "past the end",
    ),
    "last string of an array past the end": (
        b.gguf([b.pair("a", b.ARRAY, b.array(b.STRING, 2, b.text("b") + b"\xff" * 8))]),
        "past the end",
    ),
    "key longer than the file": (
        b.gguf([struct.pack("<Q", 2**63) + bytes(16)]),
        "bad length",
    ),
    "empty key": (b.gguf([b.u32("", 1)]), "a metadata key has a bad length"),
    "key that is not UTF-8": (b.gguf([b.text(b"\xff\xff") + bytes(8)]), "not valid UTF-8"),
    "key twice": (b.gguf([b.u32("a", 1), b.u32("a", 1)]), "'a' appears twice"),
    "unknown value type": (b.gguf([b.pair("a", 13, bytes(8))]), "unknown value type"),
    "arrays nested too deep": (b.gguf([b.pair("a", b.ARRAY, deep(2000))]), "nests arrays deeper"),
    "2^64 - 1 pairs": (b.gguf(counts=(0, 2**64 - 1)), "the header runs past the end"),
    "2^64 - 1 tensors": (b.gguf(counts=(2**64 - 1, 0)), "the header runs past the end"),
    "block count 10^9": (b.gguf(blocks(10**9)), "llama.block_count can't be right"),
    "block count negative": (
        b.gguf([blocks(0)[0], b.pair("llama.block_count", 5, struct.pack("<i", -1))]),
        "llama.block_count can't be right",
    ),
    "first of several files": (
        b.gguf([b.u32("split.count", 3)]),
        "part 1 of 3 of a model, but its name doesn't say so",
    ),
    "alignment 0": (b.gguf([b.u32("general.alignment", 0)]), "general.alignment is wrong"),
    "alignment 48": (b.gguf([b.u32("general.alignment", 48)]), "general.alignment is wrong"),
    "alignment a string": (
        b.gguf([b.string("general.alignment", "32")]),
        "general.alignment is wrong",
    ),
    "axis of length 0": (one(shape=(8, 0)), "tensor 'x': an axis has length 0"),
    "axes whose product overflows": (one(shape=(2**32, 2**32)), "tensor 'x': its data runs past"),
    "nine axes": (one(shape=(1,) * 9), "too many axes"),
    "2^32 - 1 axes": (
        b.gguf([], [b.text("x") + b"\xff" * 4 + bytes(40)]),
        "too many axes",
    ),
    "unknown tensor type": (one(kind=4000), "tensor 'x': unknown tensor type"),
    "rows not whole blocks": (one(shape=(3, 31), kind=b.Q8_0), "its rows are not whole blocks"),
    "quantised scalar": (one(shape=(), kind=b.Q8_0), "its rows are not whole blocks"),
    "data cut short": (one(data=bytes(31)), "tensor 'x': its data runs past the end"),
    "offset past the end": (one(offset=2**63), "its data runs past the end"),
    "offset not aligned": (one(offset=4, data=bytes(64)), "its data is not aligned"),
    "same offset twice": (two(0, 0), "tensor 'y': its data overlaps that of 'x'"),
    "name twice": (two(0, 32, "x"), "tensor 'x': the name appears twice"),
    "empty tensor name": (one(name=""), "a tensor name has a bad length"),
    "version 1": (b.gguf(version=1), "unsupported GGUF version (expected 2 or 3, got 1)"),
    "version 4": (b.gguf(version=4), "unsupported GGUF version"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
    "only the magic": (b"GGUF", "past the end"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_file_is_refused_at_once(case, tmp_path):
    raw, message = HOSTILE[case]
    tracemalloc.start()
    start = time.perf_counter()
    with pytest.raises(WeightError) as caught:
        opened(tmp_path, raw)
    took, peak = time.perf_counter() - start, tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    line = str(caught.value)
    assert message in line and "model.gguf" in line and "\n" not in line
    assert took < QUICK
    assert peak < 4e6  # bytes


def test_names_in_errors_stay_on_one_line(tmp_path):
    raw = one(name="x\n\x1b[31m" + "y" * 60000, offset=4)
    with pytest.raises(WeightError) as caught:
        opened(tmp_path, raw)
    assert str(caught.value).isprintable() and len(str(caught.value)) < 1000


def test_bad_text_is_found_when_it_is_read(tmp_path):
    checkpoint = opened(tmp_path, b.gguf([b.string("a", b"\xff"), b.u32("b", 1)]))
    assert checkpoint.metadata["b"] == 1
    with pytest.raises(WeightError, match="metadata 'a' is not valid UTF-8"):
        checkpoint.metadata["a"]


def parts(folder, count: int = 3, **changes: bytes) -> list:
    """A model of one tensor per file; `changes` replaces whole files, by the letter of theirs."""
    paths = []
    for n in range(count):
        pairs = [b.u16("split.no", n), b.u16("split.count", count)]
        pairs += [b.i32("split.tensors.count", count)]
        pairs += [b.string("general.architecture", "llama")] if n == 0 else []
        name = "xyz"[n]
        data = struct.pack("<f", n) + bytes(28)
        raw = b.gguf(pairs, [b.header(name, (1,), b.F32, 0)], data)
        paths.append(folder / f"m-{n + 1:05}-of-{count:05}.gguf")
        paths[-1].write_bytes(changes.get(name, raw))
    return paths


@pytest.mark.parametrize("opens", [0, 1, 2])
def test_any_part_opens_the_whole_model(opens, tmp_path):
    checkpoint = load(parts(tmp_path)[opens], device="reference")
    assert [checkpoint[name].tolist() for name in "xyz"] == [[0], [1], [2]]
    assert checkpoint.architecture == "llama"


def test_missing_part_is_named(tmp_path):
    paths = parts(tmp_path)
    paths[1].unlink()
    with pytest.raises(WeightError, match="m-00002-of-00003.gguf: part 2 of 3 of the model is mis"):
        load(paths[2])


def test_part_under_another_parts_name_is_refused(tmp_path):
    paths = parts(tmp_path)
    paths[1].write_bytes(paths[2].read_bytes())
    with pytest.raises(WeightError, match="it is another part than its name says"):
        load(paths[0])


def test_tensor_in_two_parts_is_refused(tmp_path):
    pairs = [b.u16("split.no", 1), b.u16("split.count", 3)]
    again = b.gguf(pairs, [b.header("x", (1,), b.F32, 0)], bytes(32))
    with pytest.raises(WeightError, match="00002-of-00003.gguf: tensor 'x': another part has it"):
        load(parts(tmp_path, y=again)[0])


def test_part_without_its_tensors_is_noticed(tmp_path):
    empty = b.gguf([b.u16("split.no", 2), b.u16("split.count", 3)])
    with pytest.raises(WeightError, match="the parts don't have all tensors .expected 3, got 2"):
        load(parts(tmp_path, z=empty)[0])


@pytest.mark.parametrize("size", range(0, len(b.small_gguf()), 7))
def test_truncated_anywhere_is_one_clear_error(size, tmp_path):
    with pytest.raises(WeightError):
        opened(tmp_path, b.small_gguf()[:size])


def mutations(raw: bytes) -> st.SearchStrategy[bytes]:
    """`raw` with some bytes, or some 8-byte words, replaced."""
    byte = st.tuples(st.integers(0, len(raw) - 1), st.binary(min_size=1, max_size=1))
    words = st.sampled_from([0, 1, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1])
    word = st.tuples(st.integers(0, len(raw) - 8), words.map(lambda n: struct.pack("<Q", n)))

    def apply(edits: list[tuple[int, bytes]]) -> bytes:
        out = bytearray(raw)
        for at, value in edits:
            out[at : at + len(value)] = value
        return bytes(out)

    return st.lists(byte | word, min_size=1, max_size=4).map(apply)


@given(raw=mutations(b.small_gguf()))
@settings(
    max_examples=400,
    deadline=1000,  # milliseconds: CASES' limit for a hostile file
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_mutated_file_opens_or_raises_weight_error(raw, tmp_path):
    try:
        read_everything(opened(tmp_path, raw))
    except WeightError as error:
        assert "\n" not in str(error)


def test_real_model_opens_fast(smollm2):
    start = time.perf_counter()
    checkpoint = load(smollm2)
    took = time.perf_counter() - start
    assert len(checkpoint) == 272 and checkpoint.info("token_embd.weight").shape == (49152, 576)
    assert len(checkpoint.metadata["tokenizer.ggml.tokens"]) == 49152
    assert len(checkpoint.metadata["tokenizer.ggml.merges"]) == 48900
    assert took < 0.15  # seconds; 0.01 is usual, the rest is room for a busy machine


def test_real_models_metadata_equals_the_gguf_packages(smollm2):
    oracle = pytest.importorskip("gguf", reason="the gguf package (extra `test`) is the oracle")
    fields = oracle.GGUFReader(smollm2).fields
    metadata = load(smollm2).metadata
    assert {k for k in fields if not k.startswith("GGUF.")} == set(metadata)
    assert all(metadata[key] == fields[key].contents() for key in metadata)
