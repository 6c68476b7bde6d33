"""Params: the tree over a checkpoint's keys, and `check`."""

from __future__ import annotations

import copy

import pytest

from weights import Params, WeightError, check


class Fake:
    """Stands for a Tensor; Params never looks inside one."""

    def __init__(self, *shape: int) -> None:
        self.shape = shape


SHAPES = {
    "tok_embeddings.weight": (8, 4),
    "layers.0.attention.wq.weight": (4, 4),
    "layers.1.attention.wq.weight": (4, 4),
    "layers.10.attention.wq.weight": (4, 4),
    "norm.weight": (4,),
    "norm.bias": (4,),
}


@pytest.fixture
def tensors() -> dict[str, Fake]:
    return {key: Fake(*shape) for key, shape in SHAPES.items()}


def test_reached_by_attribute_index_and_item(tensors):
    p = Params(tensors)
    wanted = tensors["layers.1.attention.wq.weight"]
    assert p.layers[1].attention.wq.weight is wanted
    assert p["layers"]["1"]["attention.wq"]["weight"] is wanted
    assert p["layers.1.attention.wq.weight"] is wanted


def test_numbered_children_are_counted_and_come_in_order(tensors):
    layers = Params(tensors).layers
    assert len(layers) == 3
    wanted = [tensors[f"layers.{n}.attention.wq.weight"] for n in (0, 1, 10)]
    assert [layer.attention.wq.weight for layer in layers] == wanted
    assert layers[-1].attention.wq.weight is wanted[-1]
    assert len(Params(tensors).norm) == 0 and list(Params(tensors).norm) == []
    assert bool(Params(tensors).norm)


def test_contains_tells_what_exists(tensors):
    p = Params(tensors)
    assert "bias" in p.norm and "bias" not in p.tok_embeddings
    assert "norm" in p and "norm.weight" in p and "norm.w" not in p and "output" not in p
    assert hasattr(p.norm, "bias") and not hasattr(p.norm, "scale")
    assert getattr(p, "output", None) is None


def test_missing_key_names_file_full_key_and_near_matches(tensors):
    p = Params(tensors, file="model.gguf")
    with pytest.raises(WeightError) as caught:
        _ = p.layers[0].attention.wk.weight
    assert str(caught.value).startswith("model.gguf: no key 'layers.0.attention.wk'; near matches:")
    assert "layers.0.attention.wq.weight" in str(caught.value)
    with pytest.raises(KeyError, match="no key 'layers.2'"):
        _ = p.layers[2]
    with pytest.raises(IndexError):
        _ = p.layers[-4]


def test_a_tensor_is_made_once_and_on_access():
    made = []

    class Lazy(dict):
        def __getitem__(self, key):
            made.append(key)
            return Fake(1)

    p = Params(Lazy(SHAPES))
    assert made == []
    assert p.norm.weight is p.norm.weight
    assert p["norm.weight"] is p.norm.weight
    assert made == ["norm.weight"]


def test_unused_reports_what_nothing_asked_for(tensors):
    p = Params(tensors)
    _ = p.norm.weight, p.layers[0].attention.wq.weight, p.tok_embeddings
    assert "bias" in p.norm  # asking whether it exists is not using it
    assert p.norm.unused() == ["norm.bias"]
    assert set(p.unused()) == SHAPES.keys() - {"norm.weight", "layers.0.attention.wq.weight"}


def test_tree_is_read_only_and_can_be_copied(tensors):
    p = Params(tensors)
    with pytest.raises(AttributeError):
        p.norm = 5
    with pytest.raises(TypeError):
        p["norm"] = 5
    assert copy.copy(p).norm.weight is p.norm.weight


def test_a_component_that_only_looks_like_a_number_is_no_index():
    p = Params({"a.٣": Fake(1), "a.01": Fake(1), "a.2": Fake(1), "a." + "9" * 5000: Fake(1)})
    assert len(p.a) == 1 and p.a[2] is p.a["2"]


def test_check_accepts_what_it_expects_and_ignores(tensors):
    check(tensors, SHAPES)
    tensors["layers.0.rotary.inv_freq"] = Fake(2)
    check(tensors, SHAPES, ignore=[r"layers\.\d+\.rotary\.inv_freq"])
    with pytest.raises(WeightError, match="f: unexpected key 'layers.0.rotary.inv_freq'"):
        check(tensors, SHAPES, ignore=[r"rotary", r"layers"], file="f")


def test_check_names_wrong_shape_and_missing_key(tensors):
    with pytest.raises(WeightError) as caught:
        check(tensors, SHAPES | {"norm.weight": (5,)}, file="f")
    assert str(caught.value) == (
        "f: tensor 'norm.weight': wrong shape (expected shape (5,), got (4,))"
    )
    more = {f"layers.{n}.ffn_norm.weight": (4,) for n in range(30)}
    with pytest.raises(WeightError, match="no key 'layers.0.ffn_norm.weight'.* and 27 more"):
        check(tensors, SHAPES | more, file="f")
