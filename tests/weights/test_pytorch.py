"""PyTorch files: what torch wrote is read as torch reads it, what it never writes is refused."""

from __future__ import annotations

import struct
import time
import tracemalloc
import zipfile
from pathlib import Path

import numpy as np
import pytest

from tests.weights import build_torch as t
from weights import WeightError, load

DATA = Path(__file__).parent / "data"
BASE = np.arange(24, dtype=np.float32).reshape(4, 6)
EXPECTED = {
    "base": BASE,
    "transposed": BASE.T,
    "part": BASE[1:3, ::2],
    "expanded": np.full((3, 2), 7, np.float32),
    "scalar": np.float32(3.5),
    "empty": np.zeros((0, 4), np.float32),
    "parameter": np.array([1, -1], np.float32),
}
TYPES = {  # how 0, 1, 2 are spelled: by NumPy, or as the bits of types that it lacks
    "F64": "f8", "F16": "f2", "I8": "i1", "I16": "i2", "I32": "i4", "I64": "i8", "U8": "u1",
    "U16": "u2", "U32": "u4", "U64": "u8", "C64": "c8", "C128": "c16",
    "BOOL": (b"\0\1\1", "bool"), "BF16": (b"\0\0\x80\x3f\0\x40", "bfloat16"),
    "F8_E4M3": (b"\0\x38\x40", "float8_e4m3fn"), "F8_E5M2": (b"\0\x3c\x40", "float8_e5m2"),
}  # fmt: skip
FORMATS = ("zip", "legacy")


def opened(tmp_path, raw: bytes):
    path = tmp_path / "model.pt"
    path.write_bytes(raw)
    return load(path, device="reference")


def bits(checkpoint, name: str) -> bytes:
    raw = checkpoint.entries[name].raw()
    assert raw.dtype == np.uint8 and raw.shape == (checkpoint.info(name).nbytes,)
    return raw.tobytes()


@pytest.mark.parametrize("form", FORMATS)
def test_tensors_that_torch_saved_keep_shape_bits_and_values(form):
    checkpoint = load(DATA / f"state_{form}.pt", device="reference")
    assert checkpoint.format == "pytorch" and checkpoint.metadata == {}
    assert [name for name in checkpoint if "." not in name] == list(EXPECTED)
    for name, values in EXPECTED.items():
        assert checkpoint.info(name).shape == values.shape and checkpoint.info(name).type == "F32"
        assert bits(checkpoint, name) == values.tobytes()  # row by row, whatever the strides
        np.testing.assert_array_equal(checkpoint[name].numpy(), values)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("kind", TYPES)
def test_every_element_type_keeps_its_bits(kind, form):
    checkpoint = load(DATA / f"state_{form}.pt", device="reference")
    spelled = TYPES[kind]
    if isinstance(spelled, str):
        values = np.arange(3).astype(spelled)
        spelled = values.tobytes(), values.dtype.name
    raw, name = spelled
    assert checkpoint.info(f"type.{name}").type == kind
    assert bits(checkpoint, f"type.{name}") == raw


@pytest.mark.parametrize("form", FORMATS)
def test_complex_tensor_is_listed_but_not_decoded(form):
    with pytest.raises(WeightError, match="tensor 'type.complex64': its type C64 can't be read"):
        load(DATA / f"state_{form}.pt", device="reference")["type.complex64"]


@pytest.mark.parametrize("form", FORMATS)
def test_training_run_gives_its_model_and_the_plain_values_beside_it(form):
    checkpoint = load(DATA / f"training_{form}.ckpt")
    assert set(EXPECTED) < set(checkpoint) and not any("exp_avg" in name for name in checkpoint)
    assert checkpoint.metadata == {
        "epoch": 3,
        "loss": 0.25,
        "seeds": [[0, 1], [2, 3]],
        "options": {"lr": 0.5, "betas": [0.9, 0.999]},
        "kind": "float16",
        "shape": [2, 3],
        "device": "cpu",
        "milestones": [1, 2],
    }


def test_contiguous_tensor_is_the_mapped_bytes_themselves():
    entry = load(DATA / "state_zip.pt").entries["base"]
    first, again = entry.raw(), entry.raw()
    assert not first.flags.writeable and first.ctypes.data == again.ctypes.data


def test_views_share_one_storage(tmp_path):
    two = {"a": t.tensor((3,), (1,), 0), "b": t.tensor((3,), (1,), 3), "all": t.tensor((6,), (1,))}
    checkpoint = opened(tmp_path, t.archive(t.mapping(**two)))
    assert [checkpoint[name].tolist() for name in two] == [[0, 1, 2], [3, 4, 5], [0, 1, 2, 3, 4, 5]]


STRIDES = {
    "row by row": ((2, 3), (3, 1), 0, [[0, 1, 2], [3, 4, 5]]),
    "column by column": ((2, 3), (1, 2), 0, [[0, 2, 4], [1, 3, 5]]),
    "every other": ((3,), (2,), 1, [1, 3, 5]),
    "overlapping windows": ((4, 3), (1, 1), 0, [[0, 1, 2], [1, 2, 3], [2, 3, 4], [3, 4, 5]]),
    "repeated": ((2, 2), (0, 1), 4, [[4, 5], [4, 5]]),
    "axes of length 1": ((1, 2, 1), (99, 1, 77), 2, [[[2], [3]]]),
    "scalar": ((), (), 5, 5),
    "empty, whatever its strides": ((0, 3), (10**9, 5), 0, []),
    "empty at the end": ((2, 0), (1, 1), 6, [[], []]),
}


@pytest.mark.parametrize("case", STRIDES)
@pytest.mark.parametrize("make", [t.archive, t.legacy])
def test_strides_and_offsets(case, make, tmp_path):
    shape, strides, offset, values = STRIDES[case]
    checkpoint = opened(tmp_path, make(t.mapping(x=t.tensor(shape, strides, offset))))
    assert checkpoint.info("x").shape == shape and checkpoint["x"].tolist() == values


@pytest.mark.parametrize(
    ("kind", "storage"),
    [("f4", "FloatStorage"), ("i2", "ShortStorage"), ("u1", "ByteStorage"),
     ("c8", "ComplexFloatStorage"), ("f8", "DoubleStorage")],
)  # fmt: skip
def test_file_of_a_big_endian_machine_is_turned_around(kind, storage, tmp_path):
    value = t.mapping(x=t.tensor(where=t.storage(kind=storage)))
    raw, expected = np.arange(6).astype(f">{kind}").tobytes(), np.arange(6).astype(f"<{kind}")
    files = (
        t.archive(value, {"0": raw}, {"byteorder": b"big"}),
        t.legacy(value, {"0": (6, raw)}, little=False),
    )
    for file in files:
        assert bits(opened(tmp_path, file), "x") == expected.tobytes()


def test_legacy_view_of_a_storage_begins_inside_it(tmp_path):
    where = t.text("storage"), t.name("torch", "FloatStorage"), t.text("0"), t.text("cpu")
    view = t.sequence(t.text("1"), t.integer(2), t.integer(4))
    whole = t.sequence(*where, t.integer(6), view) + t.PERSISTENT
    value = t.mapping(x=t.tensor((2,), (1,), 1, whole))
    assert opened(tmp_path, t.legacy(value))["x"].tolist() == [3, 4]


ROOTS = ("archive/", "sd-v1-4/", "model é/", "")


@pytest.mark.parametrize("root", ROOTS)
def test_archive_may_have_any_root(root, tmp_path):
    checkpoint = opened(tmp_path, t.archive(t.mapping(x=t.tensor()), root=root))
    assert checkpoint["x"].tolist() == [[0, 1, 2], [3, 4, 5]]


X = t.tensor()
NESTED = {
    "flat": (t.mapping(a=X, b=X), ["a", "b"], {}),
    "state_dict": (t.mapping(state_dict=t.mapping(a=X), step=t.integer(5)), ["a"], {"step": 5}),
    "Whisper": (
        t.mapping(dims=t.mapping(n_mels=t.integer(80)), model_state_dict=t.mapping(a=X)),
        ["a"],
        {"dims": {"n_mels": 80}},
    ),
    "model in a model": (
        t.mapping(model=t.mapping(module=t.mapping(a=X), best=t.TRUE), epoch=t.integer(1)),
        ["a"],
        {"best": True, "epoch": 1},
    ),
    "a model that is a name": (
        t.mapping(model=t.text("llama"), net=t.mapping(a=X)),
        ["net.a"],
        {"model": "llama", "net": {}},
    ),
    "nested, joined by dots": (
        t.mapping(encoder=t.mapping(w=X), decoder=t.mapping(layer=t.mapping(w=X))),
        ["encoder.w", "decoder.layer.w"],
        {},
    ),
    "a tensor beside `model`": (t.mapping(model=t.mapping(a=X), b=X), ["model.a", "b"], {}),
    "class as a key": (
        t.mapping(
            state_dict=t.mapping(a=X),
            callbacks=t.EMPTY_DICT
            + t.name("pytorch_lightning.callbacks.model_checkpoint", "ModelCheckpoint")
            + t.mapping(monitor=t.text("loss"))
            + t.SET_ITEM,
        ),
        ["a"],
        {
            "callbacks": {
                "pytorch_lightning.callbacks.model_checkpoint.ModelCheckpoint": {"monitor": "loss"}
            }
        },
    ),
}


@pytest.mark.parametrize("case", NESTED)
def test_model_is_found_among_what_was_saved(case, tmp_path):
    value, names, metadata = NESTED[case]
    checkpoint = opened(tmp_path, t.archive(value))
    assert list(checkpoint) == names
    got = {key: value for key, value in checkpoint.metadata.items() if value != {}}
    assert got == {key: value for key, value in metadata.items() if value != {}}


def deep(levels: int) -> bytes:
    return (t.EMPTY_DICT + t.text("a")) * levels + X + t.SET_ITEM * levels


ONE = t.mapping(x=X)
REFUSED = {
    "missing storage": (t.archive(ONE, {}), "tensor 'x': its storage '0' is missing"),
    "short storage": (
        t.archive(ONE, {"0": bytes(23)}),
        "tensor 'x': its storage is cut short (expected 24 bytes, got 23)",
    ),
    "storage of 2^60 floats": (
        t.archive(t.mapping(x=t.tensor(where=t.storage(count=2**60)))),
        "its storage is cut short",
    ),
    "storage of -1 floats": (
        t.archive(t.mapping(x=t.tensor(where=t.storage(count=-1)))),
        "not a storage",
    ),
    "one row too many": (
        t.archive(t.mapping(x=t.tensor((3, 3)))),
        "it reaches past the end of its storage (expected 36 bytes, got 24)",
    ),
    "one step too far": (t.archive(t.mapping(x=t.tensor(offset=1))), "past the end of its storage"),
    "negative offset": (t.archive(t.mapping(x=t.tensor(offset=-1))), "an offset: not"),
    "negative stride": (t.archive(t.mapping(x=t.tensor((6,), (-1,), 5))), "strides: not"),
    "negative axis": (t.archive(t.mapping(x=t.tensor((-2, 3)))), "a shape: not"),
    "axis of 2^63": (t.archive(t.mapping(x=t.tensor((2**63, 3)))), "a shape: not"),
    "a hundred axes": (t.archive(t.mapping(x=t.tensor((1,) * 100, (1,) * 100))), "a shape: not"),
    "one stride too few": (t.archive(t.mapping(x=t.tensor((2, 3), (3,)))), "of different lengths"),
    "expanded to 2^100 values": (
        t.archive(t.mapping(x=t.tensor((2**50, 2**50), (0, 0)))),
        "its strides repeat values beyond all measure",
    ),
    "conjugated view": (
        t.archive(t.mapping(x=t.tensor((2, 3), (3, 1), 0, None, t.mapping(conj=t.TRUE)))),
        "a conjugated or negated view",
    ),
    "one tensor": (t.archive(X), "not a state_dict (expected a dict, got one tensor)"),
    "no tensors": (t.archive(t.mapping(a=t.NONE)), "it holds no tensors"),
    "same name in two ways": (
        t.archive(t.EMPTY_DICT + t.MARK + t.text("a.b") + X + t.text("a") + t.mapping(b=X) + b"u"),
        "tensor 'a.b': two nested keys spell the same name",
    ),
    "dicts 1000 deep": (t.archive(deep(1000)), "are nested deeper than 24"),
    "no data.pkl": (t.zipped({"a/b": b""}), "a zip archive, but not one of torch.save"),
    "two pickles": (
        t.zipped({"a/data.pkl": b"", "b/data.pkl": b""}),
        "expected one data.pkl in its top folder, got 2",
    ),
    "TorchScript": (
        t.zipped(dict.fromkeys(("a/data.pkl", "a/constants.pkl"), b"N."), zipfile.ZIP_DEFLATED),
        "a TorchScript program, not a checkpoint; save the state_dict of the module instead",
    ),
    "compressed archive": (
        t.zipped({"a/data.pkl": t.pickled(ONE), "a/data/0": t.SIX}, zipfile.ZIP_DEFLATED),
        "has 'a/data.pkl' compressed; unpack it, and pack it again without compression",
    ),
    "unknown byte order": (t.archive(ONE, others={"byteorder": b"pdp"}), "unknown byte order"),
    "pickle of something else": (t.pickled(ONE[:1]), "a pickle, but not one of torch.save"),
    "legacy of the future": (
        t.pickled(t.integer(t.MAGIC_NUMBER)) + t.pickled(t.integer(1002)),
        "unknown version (expected 1001, got 1002)",
    ),
    "legacy cut in its data": (t.legacy(ONE)[:-1], "a storage runs past the end of the file"),
    "legacy cut before its data": (t.legacy(ONE)[:-28], "a storage runs past the end of the file"),
    "legacy with -1 floats": (t.legacy(ONE, {"0": (-1, t.SIX)}), "a storage runs past the end"),
    "legacy with an unknown storage": (
        t.legacy(ONE, {"1": (6, t.SIX)}),
        "its list of storages does not fit its tensors",
    ),
    "legacy storage of two types": (
        t.legacy(t.mapping(x=X, y=t.tensor(where=t.storage(kind="IntStorage")))),
        "one storage of two types",
    ),
    "legacy without its data": (t.legacy(ONE, {}), "tensor 'x': its storage '0' is missing"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_file_that_torch_never_writes_is_refused(case, tmp_path):
    raw, message = REFUSED[case]
    with pytest.raises(WeightError) as caught:
        opened(tmp_path, raw)
    line = str(caught.value)
    assert message in line and "model.pt: " in line and line.isprintable(), line


def cyclic() -> bytes:
    return t.EMPTY_DICT + b"q\x00" + t.text("a") + b"h\x00" + t.SET_ITEM


def laughing(value: bytes) -> bytes:
    """Dicts in dicts, each holding the one below under ten keys: 10^20 ways to the innermost."""
    for _ in range(20):
        keys = b"".join(t.text(str(n)) + b"j\0\0\0\0" for n in range(10))
        value += b"r\0\0\0\0" + t.POP + t.EMPTY_DICT + t.MARK + keys + t.SET_ITEMS
    return value


@pytest.mark.parametrize("value", [cyclic(), laughing(ONE), t.mapping(model=laughing(ONE))])
def test_walk_through_shared_and_cyclic_values_ends(value, tmp_path):
    with pytest.raises(WeightError, match="nested deeper|far more objects"):
        opened(tmp_path, t.archive(value))
    laughing_list = t.mapping(x=X, y=t.EMPTY_LIST + b"q\x00" + b"2a")
    with pytest.raises(WeightError, match="nested deeper|far more objects"):
        opened(tmp_path, t.archive(laughing_list))


@pytest.mark.parametrize("make", [t.archive, t.legacy])
def test_pickle_that_calls_os_system_is_refused_by_name_and_not_run(make, tmp_path):
    mark = tmp_path / "ran"
    value = t.mapping(x=X, y=t.call("os", "system", t.text(f"touch {mark}")))
    with pytest.raises(WeightError, match="model.pt: its pickle names os.system, which no check"):
        opened(tmp_path, make(value))
    with pytest.raises(WeightError, match="its pickle names posix.system"):
        opened(tmp_path, t.pickled(t.call("posix", "system", t.text(f"touch {mark}"))))
    assert not mark.exists()


@pytest.mark.parametrize("make", [t.archive, t.legacy])
def test_truncated_anywhere_is_one_clear_error(make, tmp_path):
    whole = make(ONE)
    for size in range(1, len(whole) - 1, 5):
        with pytest.raises(WeightError) as caught:
            opened(tmp_path, whole[:size])
        assert str(caught.value).isprintable()


def test_opening_a_huge_file_reads_none_of_its_data(tmp_path):
    path, nbytes = tmp_path / "big.pt", 2**32 + 2**20  # more than 32 bits hold
    value = t.mapping(x=t.tensor((nbytes // 4,), (1,), 0, t.storage(count=nbytes // 4)))
    head = t.legacy(value, {"0": (nbytes // 4, b"")})
    with open(path, "wb") as file:
        file.write(head)
        file.truncate(len(head) + nbytes)  # a sparse file: it takes no room on the disk
    tracemalloc.start()
    entry = load(path, device="reference").entries["x"]
    assert entry.info.nbytes == nbytes and entry.raw()[-4:].tobytes() == struct.pack("<f", 0)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1e6  # bytes


def array(shape: tuple[int, ...], raw: bytes) -> bytes:
    """A NumPy array of bytes."""
    rebuild = (t.name("numpy", "ndarray"), t.integers(0), b"C\x01b")
    kind = t.call("numpy", "dtype", t.text("u1"), t.FALSE, t.TRUE)
    data = b"B" + struct.pack("<I", len(raw)) + raw
    state = t.sequence(t.integer(1), t.integers(*shape), kind, t.FALSE, data)
    return t.call("numpy.core.multiarray", "_reconstruct", *rebuild) + state + t.BUILD


def keyed(count: int) -> bytes:
    """Dicts that share one key of bytes, which as text is four times as long."""
    key = b"B" + struct.pack("<I", 1000) + bytes(1000) + b"q\0" + t.POP
    return key + t.EMPTY_LIST + t.MARK + b"}h\0Ns" * count + t.APPENDS


def rebuilt(count: int) -> bytes:
    """Tensors that share one long dict of metadata: it must not be walked for each."""
    flags = b"".join(b"J" + struct.pack("<i", n) + t.NONE for n in range(10**5))
    flags = t.EMPTY_DICT + t.MARK + flags + t.SET_ITEMS
    args = t.storage(), t.integer(0), t.integers(2, 3), t.integers(3, 1), t.FALSE, t.ORDERED, flags
    rebuild = t.name("torch._utils", "_rebuild_tensor_v2")
    call = t.sequence(rebuild, t.NONE, t.sequence(*args), t.NONE) + b"q\x01" + t.POP
    of_type = t.name("torch._tensor", "_rebuild_from_type_v2") + b"q\0" + t.POP
    return of_type + call + t.EMPTY_LIST + t.MARK + b"h\0h\x01R" * count + t.APPENDS


@pytest.mark.parametrize(
    "value",
    [array((4096, *[1] * 15), bytes(4096)), keyed(1500), rebuilt(5000)],
    ids=["lists of one", "bytes as keys", "metadata of tensors"],
)
def test_value_that_grows_when_it_is_read_stays_small(value, tmp_path):
    raw = t.archive(t.mapping(x=X, y=value), {"0": t.SIX, "1": bytes(3 * len(value))})
    tracemalloc.start()
    start = time.process_time()
    with pytest.raises(WeightError):
        opened(tmp_path, raw)
    took, peak = time.process_time() - start, tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert took < 1 and peak < 10 * len(raw) + 2e6


def test_stride_of_an_axis_of_length_1_may_be_any(tmp_path):
    checkpoint = opened(tmp_path, t.archive(t.mapping(x=t.tensor((1, 3), (2**62, 2)))))
    assert checkpoint["x"].tolist() == [[0, 2, 4]]


def test_nothing_of_a_shape_that_no_array_has_is_refused(tmp_path):
    with pytest.raises(WeightError, match="larger than any array"):
        opened(tmp_path, t.archive(t.mapping(x=t.tensor((0, 2**62), (1, 1)))))


@pytest.mark.parametrize("levels", [9, 200])
def test_wrong_value_is_not_spelled_in_full(levels, tmp_path):
    value = t.EMPTY_LIST + b"q\0"
    for _ in range(levels):
        value += t.POP + t.EMPTY_LIST + t.MARK + b"h\0" * 10 + t.APPENDS + b"q\0"
    raw = t.pickled(t.integer(t.MAGIC_NUMBER)) + t.pickled(value)
    with pytest.raises(WeightError) as caught:
        opened(tmp_path, raw)
    assert "unknown version" in str(caught.value) and len(str(caught.value)) < 2000
