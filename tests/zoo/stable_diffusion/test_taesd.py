"""TAESD under both of its names, against the same layers in NumPy; tolerances are for float32."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from weights import WeightError
from zoo.errors import UsageError
from zoo.stable_diffusion import taesd

WIDE = 4
LAYERS = ("in", "relu", *(("block",) * 3 + ("up", "conv")) * 3, "block", "out")


def tensors(first: int, prefix: str) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(0)
    made: dict[str, np.ndarray] = {}
    for n, kind in enumerate(LAYERS, first):
        ins, outs = (4 if kind == "in" else WIDE), (3 if kind == "out" else WIDE)
        names = [f".conv.{k}" for k in (0, 2, 4)] if kind == "block" else [""]
        for name in names if kind not in ("relu", "up") else ():
            shape = (outs, ins, 3, 3)
            made[f"{prefix}{n}{name}.weight"] = draw.normal(size=shape).astype(np.float32) / 6
            if kind != "conv":
                made[f"{prefix}{n}{name}.bias"] = draw.normal(size=outs).astype(np.float32)
    return made


def conv(w: dict, name: str, x: np.ndarray) -> np.ndarray:
    """A 3x3 convolution of one picture (C, H, W), zeros around."""
    padded = np.pad(x, ((0, 0), (1, 1), (1, 1)))
    seen = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), (1, 2))
    bias = w.get(f"{name}.bias", np.zeros(1, np.float32))
    return np.einsum("ihwkl,oikl->ohw", seen, w[f"{name}.weight"]) + bias[:, None, None]


def picture(w: dict, x: np.ndarray) -> np.ndarray:
    x = np.tanh(x / 3) * 3
    for n, kind in enumerate(LAYERS, 1):
        if kind == "relu":
            x = np.maximum(x, 0)
        elif kind == "up":
            x = x.repeat(2, 1).repeat(2, 2)
        elif kind == "block":
            h = np.maximum(conv(w, f"{n}.conv.0", x), 0)
            h = np.maximum(conv(w, f"{n}.conv.2", h), 0)
            x = np.maximum(conv(w, f"{n}.conv.4", h) + x, 0)
        else:
            x = conv(w, f"{n}", x)
    return x * 2 - 1


@pytest.mark.parametrize(("first", "prefix"), [(1, ""), (0, "decoder.layers."), (1, "decoder.")])
def test_a_preview_is_what_the_layers_say(first: int, prefix: str, tmp_path: Path) -> None:
    save_file(tensors(first, prefix), tmp_path / "t.safetensors")
    z = np.random.default_rng(1).normal(size=(2, 4, 2, 3)).astype(np.float32) * 3
    ours = taesd.load(tmp_path / "t.safetensors", "reference")(z)
    wanted = picture(tensors(1, ""), z[1])
    assert ours.shape == (2, 3, 16, 24)
    np.testing.assert_allclose(ours[1], wanted, atol=1e-5 * np.abs(wanted).max())


def test_another_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "t.safetensors"
    made = tensors(1, "")
    for broken, told in (
        ({"a.weight": np.zeros(3, np.float32)}, "no TAESD decoder"),
        ({k: w for k, w in made.items() if k != "9.conv.2.bias"}, "9.conv.2.bias"),
        (made | {"1.weight": np.zeros((4, 16, 3, 3), np.float32)}, "4 channels"),
    ):
        save_file(broken, file)
        with pytest.raises(WeightError, match=told):
            taesd.load(file, "reference")
    save_file(made, file)
    with pytest.raises(UsageError, match=r"\(B, 4, H, W\)"):
        taesd.load(file, "reference")(np.zeros((1, 3, 2, 2), np.float32))
