"""Meta's folders: shards of one model, cut as fairscale cuts them, become whole again."""

from __future__ import annotations

import json

import numpy as np
import pytest

from weights import WeightError, load
from weights.checkpoint import TensorInfo
from weights.pytorch_write import write

DIM, HIDDEN, VOCAB = 8, 12, 6
# Name -> shape of the whole and the axis along which it is cut; None where each shard has all.
TENSORS = {
    "tok_embeddings.weight": ((VOCAB, DIM), 1),
    "layers.0.attention.wq.weight": ((DIM, DIM), 0),
    "layers.0.attention.wk.weight": ((4, DIM), 0),
    "layers.0.attention.wo.weight": ((DIM, DIM), 1),
    "layers.0.feed_forward.w1.weight": ((HIDDEN, DIM), 0),
    "layers.0.feed_forward.w2.weight": ((DIM, HIDDEN), 1),
    "layers.0.attention_norm.weight": ((DIM,), None),
    "rope.freqs": ((2,), None),
    "output.weight": ((VOCAB, DIM), 0),
}
RNG = np.random.default_rng(0)
WHOLE = {name: RNG.normal(size=shape).astype("<f4") for name, (shape, _) in TENSORS.items()}


def put(path, tensors: dict[str, np.ndarray]) -> None:
    rows = [(n, TensorInfo(x.shape, "F32", x.nbytes), lambda x=x: [x]) for n, x in tensors.items()]
    write(path, rows, {})


def folder(path, count: int, axes: dict[str, int] | None = None, **params):
    """A model in `count` shards; `axes` overrides where tensors are cut."""
    for k in range(count):
        parts = {}
        for name, (_, axis) in TENSORS.items():
            axis = (axes or {}).get(name, axis)
            whole = WHOLE[name]
            part = whole if axis is None else np.split(whole, count, axis)[k]
            parts[name] = np.ascontiguousarray(part)
        put(path / f"consolidated.{k:02}.pth", parts)
    (path / "params.json").write_text(json.dumps({"dim": DIM, "n_heads": 2} | params))
    return path


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("axis", [0, 1], ids=["as LLaMA 3", "as LLaMA 1 and 2"])
def test_shards_become_the_whole(axis, count, tmp_path):
    checkpoint = load(folder(tmp_path, count, {"tok_embeddings.weight": axis}), device="reference")
    assert checkpoint.format == "meta" and checkpoint.metadata == {"dim": DIM, "n_heads": 2}
    assert list(checkpoint) == list(TENSORS)
    for name, whole in WHOLE.items():
        assert checkpoint.info(name).shape == whole.shape
        assert checkpoint.entries[name].raw().tobytes() == whole.tobytes()
        np.testing.assert_array_equal(checkpoint[name].numpy(), whole)


def test_missing_shard_is_named(tmp_path):
    folder(tmp_path, 2)
    (tmp_path / "consolidated.00.pth").unlink()
    with pytest.raises(WeightError, match="consolidated.00.pth: a shard is missing"):
        load(tmp_path)


def test_folder_without_params_is_named(tmp_path):
    folder(tmp_path, 1)
    (tmp_path / "params.json").unlink()
    with pytest.raises(WeightError, match="params.json: can't be read: No such file"):
        load(tmp_path)


def test_last_shard_missing_is_noticed_by_the_embedding(tmp_path):
    folder(tmp_path, 4, {"layers.0.attention.wk.weight": 0, "tok_embeddings.weight": 1,
                         "output.weight": 1})  # fmt: skip
    (tmp_path / "consolidated.03.pth").unlink()
    with pytest.raises(WeightError, match=r"its columns do not fit `dim` of params.json"):
        load(tmp_path)


def test_last_shard_missing_is_noticed_by_the_vocabulary(tmp_path):
    folder(tmp_path, 2, {"tok_embeddings.weight": 0}, vocab_size=VOCAB)
    assert load(tmp_path).info("tok_embeddings.weight").shape == (VOCAB, DIM)
    folder(tmp_path, 2, {"tok_embeddings.weight": 0}, vocab_size=2 * VOCAB)
    with pytest.raises(WeightError, match="`vocab_size` of params.json; is a shard missing"):
        load(tmp_path)


def test_shards_of_different_models_are_refused(tmp_path):
    folder(tmp_path, 2)
    put(tmp_path / "consolidated.01.pth", {"tok_embeddings.weight": WHOLE["tok_embeddings.weight"]})
    with pytest.raises(WeightError, match="consolidated.01.pth: .*hold different tensors"):
        load(tmp_path)


def test_parts_that_do_not_fit_are_named(tmp_path):
    folder(tmp_path, 2)
    parts = {n: np.zeros((3, 3) if len(s) == 2 else s, "<f4") for n, (s, _) in TENSORS.items()}
    put(tmp_path / "consolidated.01.pth", parts)
    with pytest.raises(WeightError, match="tensor 'tok_embeddings.weight': parts of these shapes"):
        load(tmp_path)
