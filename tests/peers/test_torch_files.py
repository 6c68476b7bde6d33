"""Files that torch writes, read by us; files that we write, read by torch."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from weights import load
from weights.pytorch_write import write
from weights.stand_ins import TORCH_NAMES

pytestmark = pytest.mark.peers

KINDS = sorted(name for name, _ in TORCH_NAMES.values())
OURS = {torch_name: ours for ours, (torch_name, _) in TORCH_NAMES.items()}
SETTINGS = settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


def random_tensor(kind: str, shape: tuple[int, ...], seed: int):
    """A contiguous tensor of random bits; a bool's are 0 and 1."""
    import torch

    dtype = getattr(torch, kind)
    if 0 in shape:
        return torch.zeros(shape, dtype=dtype)
    count = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    raw = np.random.default_rng(seed).integers(0, 2 if kind == "bool" else 256, count, np.uint8)
    return torch.from_numpy(raw).view(dtype).reshape(shape)


def bits(tensor) -> bytes:
    import torch

    flat = tensor.detach().clone(memory_format=torch.contiguous_format).reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


@st.composite
def views(draw):
    """A base tensor and a few views of it, which share its storage."""
    kind = draw(st.sampled_from(KINDS))
    shape = tuple(draw(st.lists(st.integers(0, 5), max_size=4)))
    base = random_tensor(kind, shape, draw(st.integers(0, 99)))
    found = {"base": base}
    for number in range(draw(st.integers(0, 4))):
        view = draw(st.sampled_from(list(found.values())))
        if view.ndim:
            axis = draw(st.integers(0, view.ndim - 1))
            length = view.shape[axis]
            change = draw(st.sampled_from("transpose slice step select expand unsqueeze".split()))
            if change == "transpose":
                view = view.transpose(axis, draw(st.integers(0, view.ndim - 1)))
            elif change == "slice":
                view = view.narrow(axis, start := draw(st.integers(0, length)), length - start)
            elif change == "step":
                view = view[(slice(None),) * axis + (slice(None, None, 2),)]
            elif change == "select" and length:
                view = view.select(axis, draw(st.integers(0, length - 1)))
            elif change == "unsqueeze":
                view = view.unsqueeze(axis)
            elif change == "expand":
                view = view.unsqueeze(0).expand(3, *view.shape)
        found[f"view.{number}"] = view
    return found


def assert_same(checkpoint, tensors) -> None:
    assert list(checkpoint) == list(tensors)
    for name, tensor in tensors.items():
        info = checkpoint.info(name)
        kind = str(tensor.dtype).removeprefix("torch.")
        assert (info.shape, info.type) == (tuple(tensor.shape), OURS[kind])
        assert checkpoint.entries[name].raw().tobytes() == bits(tensor)


@pytest.mark.parametrize("zip_format", [True, False])
@given(tensors=views())
@SETTINGS
def test_what_torch_saves_is_read_bit_for_bit(zip_format, tensors, tmp_path):
    import torch

    path = tmp_path / "model.pt"
    torch.save(tensors, path, _use_new_zipfile_serialization=zip_format)
    assert_same(load(path, device="reference"), tensors)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("zip_format", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_each_type_in_each_pickle_protocol(kind, zip_format, protocol, tmp_path):
    import torch

    path, tensors = tmp_path / "model.pt", {"x": random_tensor(kind, (3, 4), 0)}
    tensors["t"] = tensors["x"].t()
    options = {"_use_new_zipfile_serialization": zip_format, "pickle_protocol": protocol}
    torch.save({"state_dict": tensors, "step": 5}, path, **options)
    checkpoint = load(path, device="reference")
    assert checkpoint.metadata == {"step": 5}
    assert_same(checkpoint, tensors)


@pytest.mark.parametrize(
    "kind", "float32 float16 bfloat16 float64 float8_e4m3fn float8_e5m2 int8 uint8 int64".split()
)
def test_values_equal_torchs(kind, tmp_path):
    import torch

    values = torch.arange(256, dtype=torch.uint8).view(getattr(torch, kind))
    torch.save({"x": values}, tmp_path / "model.pt")
    got = load(tmp_path / "model.pt", device="reference")["x"].numpy()
    expected = (values.float() if values.dtype.is_floating_point else values).numpy()
    np.testing.assert_array_equal(got, expected)


def test_module_and_its_parameters(tmp_path):
    import torch

    module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    state = module.state_dict()
    torch.save(state, tmp_path / "state.pt")
    torch.save(dict(module.named_parameters()), tmp_path / "parameters.pt")
    assert_same(load(tmp_path / "state.pt"), state)
    assert_same(load(tmp_path / "parameters.pt"), dict(module.named_parameters()))


def test_whole_module_is_refused_by_name(tmp_path):
    import torch

    from weights import WeightError

    torch.save(torch.nn.Linear(3, 4), tmp_path / "model.pt")
    with pytest.raises(WeightError, match="names torch.nn.modules.linear.Linear, which no"):
        load(tmp_path / "model.pt")


@pytest.mark.filterwarnings("ignore")
def test_torchscript_is_refused(tmp_path):
    import torch

    from weights import WeightError

    torch.jit.save(torch.jit.script(torch.nn.Linear(3, 4)), tmp_path / "model.pt")
    with pytest.raises(WeightError, match="a TorchScript program, not a checkpoint"):
        load(tmp_path / "model.pt")


@pytest.mark.parametrize("mapped", [True, False])
@pytest.mark.parametrize("metadata", [{}, {"dims": {"n_mels": 80, "rate": 0.5}, "step": -(2**40)}])
@given(tensors=views())
@SETTINGS
def test_what_we_write_torch_loads_with_weights_only(metadata, mapped, tensors, tmp_path):
    import torch

    first, second = tmp_path / "first.pt", tmp_path / "second.pt"
    torch.save(tensors, first)
    checkpoint = load(first)
    stored = [(n, e.info, lambda e=e: [e.raw()]) for n, e in checkpoint.entries.items()]
    write(second, stored, metadata)
    got = torch.load(second, weights_only=True, mmap=mapped)
    if metadata:
        assert {key: value for key, value in got.items() if key in metadata} == metadata
        got = got["model_state_dict"]
    assert list(got) == list(tensors)
    for name, tensor in tensors.items():
        assert got[name].dtype == tensor.dtype and got[name].shape == tensor.shape
        assert got[name].is_contiguous() and bits(got[name]) == bits(tensor)


def test_what_we_write_is_a_state_dict_of_the_module(tmp_path):
    import torch

    module = torch.nn.Linear(3, 4)
    torch.save(module.state_dict(), tmp_path / "first.pt")
    entries = load(tmp_path / "first.pt").entries
    write(
        tmp_path / "second.pt", [(n, e.info, lambda e=e: [e.raw()]) for n, e in entries.items()], {}
    )
    other = torch.nn.Linear(3, 4)
    other.load_state_dict(torch.load(tmp_path / "second.pt", weights_only=True))
    assert all(torch.equal(a, b) for a, b in zip(module.parameters(), other.parameters()))
