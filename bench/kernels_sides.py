"""The sides that `bench kernels` compares: each turns a case into something to call.

A side lives in its own process (see bench.worker). For each case it is asked to `prepare` it, for
the `error` of its result, and then, in turns with the others, to `measure` it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from bench.kernels_cases import CASES, Case, draw

Arrays = dict[str, np.ndarray]
STARTS = 500  # of a program, to time one


class Side:
    """`build` makes a function that does all copies of a case once and keeps the last result."""

    def load(self, threads: int, **options: Any) -> None:
        raise NotImplementedError

    def build(self, case: Case, given: list[Arrays], weights: Arrays) -> Callable[[], Any]:
        raise NotImplementedError

    def array(self, result: Any) -> np.ndarray:
        """What the function returned, as a float32 array of the case's shape."""
        raise NotImplementedError

    def prepare(self, name: str) -> None:
        """Draw the numbers of a case, lay out or compile what it needs, run it once."""
        self.run = None  # frees what the case before it held
        self.case = next(case for case in CASES if case.name == name)
        given, weights = draw(self.case)
        self.run = self.build(self.case, given, weights)
        self.result = self.array(self.run())

    def save(self, path: str) -> None:
        """Keep the result as what others are compared with."""
        np.save(path, self.result)

    def error(self, path: str) -> float:
        """The largest difference from a saved result, as a part of that one's largest value."""
        expected = np.load(path)
        if expected.shape != self.result.shape:
            raise ValueError(f"the result has shape {self.result.shape}, not {expected.shape}")
        return float(np.abs(self.result - expected).max() / np.abs(expected).max())

    def measure(self, seconds: float) -> float:
        """Microseconds of one copy, over as many calls as fill `seconds`, after one to warm up."""
        self.run()
        calls = 0
        begun = time.perf_counter()
        while (taken := time.perf_counter() - begun) < seconds:
            self.run()
            calls += 1
        return taken / calls / self.case.copies * 1e6


class Menagerie(Side):
    """This project: all copies are steps of one program."""

    def load(self, threads: int, device: str | None = None) -> None:
        from engine import default_device, get_device

        # the engine takes as many threads by itself: both count the cores that may be used
        self.device = device or default_device()
        get_device(self.device)

    def start_us(self) -> float:
        """Microseconds to start a program: what one takes that does next to nothing."""
        from engine import Tensor, program

        given = Tensor(np.zeros(1, np.float32), device=self.device)
        step = program(lambda: given + 1)
        step()
        begun = time.perf_counter()
        for _ in range(STARTS):
            step()
        return (time.perf_counter() - begun) / STARTS * 1e6

    def build(self, case: Case, given: list[Arrays], weights: Arrays) -> Callable[[], Any]:
        from engine import Tensor, program

        held = [{k: self._activation(x, case) for k, x in one.items()} for one in given]
        constant = {k: self._weight(x, case) for k, x in weights.items()}
        out = Tensor.zeros(*case.result, dtype=_dtype(case.held), device=self.device)
        out = out.contiguous().realize()
        function = OPERATIONS[case.kind]

        def steps() -> None:
            for one in held:  # into one place, so that each waits for the one before
                out[...] = function(**one, **constant, **case.options).cast(out.dtype)

        step = program(steps, precision="f32" if case.dtype == "f32" else "auto")

        def run() -> Any:
            step()
            return out

        return run

    def array(self, result: Any) -> np.ndarray:
        return result.numpy().astype(np.float32, copy=False)

    def _activation(self, x: np.ndarray, case: Case) -> Any:
        """A tensor that a program can't take for a weight, already on the device."""
        from engine import Tensor

        held = Tensor(x, device=self.device).cast(_dtype(case.held))
        return held.contiguous().realize()  # in memory of the device's own, as from a kernel

    def _weight(self, x: np.ndarray, case: Case) -> Any:
        """A tensor as `weights` reads it from a file."""
        from engine import Tensor
        from engine.dtype import bfloat16, float32_to_bfloat16
        from weights.quant import BY_NAME

        if case.is_quantised:
            shape = (*x.shape[:-2], x.shape[-2] * 32)
            return BY_NAME[case.dtype.upper()].decode(x.reshape(-1), shape, self.device)
        if case.dtype == "bf16":
            return Tensor.from_numpy(float32_to_bfloat16(x), self.device, bfloat16)
        return Tensor.from_numpy(x, self.device)


def _dtype(name: str) -> Any:
    from engine import dtype

    return {"f32": dtype.float32, "bf16": dtype.bfloat16}[name]


# --- ours, as functions of Tensors -------------------------------------------------------------


def gemm(x: Any, weight: Any) -> Any:
    return x.float() @ weight.float()


def linear(x: Any, weight: Any, bias: Any = None, silu: bool = False) -> Any:
    from engine import functional

    out = x.float() @ weight.transpose().float()
    out = out if bias is None else out + bias.float()
    return functional.silu(out) if silu else out


def conv(x: Any, weight: Any, bias: Any, stride: int) -> Any:
    """3x3, padded by 1; channels lie last, though the engine's axes are (B, C, H, W)."""
    from engine.convolution import conv2d

    x = x.float().permute(0, 3, 1, 2)
    out = conv2d(x, weight.float(), bias.float(), stride=stride, padding=1)
    return out.permute(0, 2, 3, 1)


def attention(q: Any, k: Any, v: Any, causal: bool) -> Any:
    """(B, T, H, D) queries, (B, S, K, D) keys and values -> (B, T, H, D)."""
    from engine import functional

    def heads(x: Any) -> Any:
        b, t, h, d = x.shape
        return x.float().permute(0, 2, 1, 3).reshape(b * h, t, d)

    b, t, h, d = q.shape
    mask = functional.causal_mask(t, k.shape[1], 0) if causal else None
    out = functional.attention(heads(q), heads(k), heads(v), mask)
    return out.reshape(b, h, t, d).permute(0, 2, 1, 3)


def softmax(x: Any) -> Any:
    from engine import functional

    return functional.softmax(x)


def rmsnorm(x: Any, weight: Any) -> Any:
    from engine import functional

    return functional.rms_norm(_Weights(weight=weight.float()), x, 1e-5)


def layernorm(x: Any, weight: Any, bias: Any) -> Any:
    from engine import functional

    return functional.layer_norm(_Weights(weight=weight.float(), bias=bias.float()), x, 1e-5)


def groupnorm_silu(x: Any, weight: Any, bias: Any) -> Any:
    """32 groups; channels lie last, though functional's axes are (B, C, H, W)."""
    from engine import functional

    p = _Weights(weight=weight.float(), bias=bias.float())
    out = functional.group_norm(p, x.float().permute(0, 3, 1, 2), 32, 1e-5)
    return functional.silu(out).permute(0, 2, 3, 1)


def gelu(x: Any, y: Any) -> Any:
    from engine import functional

    x, y = x.float(), y.float()
    return functional.gelu(x * y + 1, approximate=True) * x


class _Weights(dict):
    """Named weights as functional takes them."""

    def __getattr__(self, name: str) -> Any:
        return self[name]


OPERATIONS: dict[str, Callable[..., Any]] = {
    "gemm": gemm,
    "linear": linear,
    "conv": conv,
    "attention": attention,
    "softmax": softmax,
    "rmsnorm": rmsnorm,
    "layernorm": layernorm,
    "groupnorm-silu": groupnorm_silu,
    "gelu": gelu,
}
