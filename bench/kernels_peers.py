"""The other sides of `bench kernels`: torch, and NumPy, which also says what is right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from bench.kernels_cases import BLOCK_FORMATS, Case
from bench.kernels_sides import Arrays, Side


class Torch(Side):
    """torch in one type; `packed` lays weights out ahead for oneDNN, as its compiler would.

    Plain conv2d and linear lay them out again at every call.
    """

    def load(self, threads: int, dtype: str, packed: bool = False) -> None:
        import torch

        torch.set_num_threads(threads)
        torch.set_grad_enabled(False)
        self.torch, self.f, self.packed = torch, torch.nn.functional, packed
        self.dtype = getattr(torch, dtype)

    def build(self, case: Case, given: list[Arrays], weights: Arrays) -> Callable[[], Any]:
        if case.is_quantised:
            weights = {k: BLOCK_FORMATS[case.dtype].values(x) for k, x in weights.items()}
        held = [{k: self._tensor(x) for k, x in one.items()} for one in given]
        constant = {k: self._tensor(x) for k, x in weights.items()}
        make = getattr(self, case.kind.replace("-", "_"))
        functions = [make(**one, **constant, **case.options) for one in held]

        def run() -> Any:
            with self.torch.inference_mode():
                for function in functions:
                    result = function()
            return result

        return run

    def array(self, result: Any) -> np.ndarray:
        if result.ndim == 4:  # (B, C, H, W) and (B, H, T, D): the case has that axis elsewhere
            order = (0, 2, 1, 3) if self.case.kind == "attention" else (0, 2, 3, 1)
            result = result.permute(order)
        return result.float().contiguous().numpy()

    def _tensor(self, x: np.ndarray) -> Any:
        return self.torch.from_numpy(x).to(self.dtype, copy=True)  # aligned, as torch's own are

    # Each takes tensors and returns a function of none: what is timed.

    def gemm(self, x: Any, weight: Any) -> Callable[[], Any]:
        if self.packed:
            return self.linear(x, weight.T.contiguous())
        return lambda: x @ weight

    def linear(
        self, x: Any, weight: Any, bias: Any = None, silu: bool = False
    ) -> Callable[[], Any]:
        if self.packed:
            ops = self.torch.ops.mkldnn
            laid = ops._reorder_linear_weight(weight, x.shape[0])
            after = "swish" if silu else "none"
            return lambda: ops._linear_pointwise(x, laid, bias, after, [], "")
        if silu:
            return lambda: self.f.silu(self.f.linear(x, weight, bias))
        return lambda: self.f.linear(x, weight, bias)

    def conv(self, x: Any, weight: Any, bias: Any, stride: int) -> Callable[[], Any]:
        x, weight = self._channels_first(x), weight.to(memory_format=self.torch.channels_last)
        if self.packed:
            ops = self.torch.ops.mkldnn
            how = ([1, 1], [stride, stride], [1, 1], 1)  # padding, stride, dilation, groups
            laid = ops._reorder_convolution_weight(weight, *how, list(x.shape))
            return lambda: ops._convolution_pointwise(x, laid, bias, *how, "none", [], "")
        return lambda: self.f.conv2d(x, weight, bias, stride=stride, padding=1)

    def attention(self, q: Any, k: Any, v: Any, causal: bool) -> Callable[[], Any]:
        q, k, v = (x.transpose(1, 2).contiguous() for x in (q, k, v))
        how = {"is_causal": causal, "enable_gqa": q.shape[1] != k.shape[1]}
        return lambda: self.f.scaled_dot_product_attention(q, k, v, **how)

    def softmax(self, x: Any) -> Callable[[], Any]:
        return lambda: self.f.softmax(x, -1)

    def rmsnorm(self, x: Any, weight: Any) -> Callable[[], Any]:
        return lambda: self.f.rms_norm(x, weight.shape, weight, 1e-5)

    def layernorm(self, x: Any, weight: Any, bias: Any) -> Callable[[], Any]:
        return lambda: self.f.layer_norm(x, weight.shape, weight, bias, 1e-5)

    def groupnorm_silu(self, x: Any, weight: Any, bias: Any) -> Callable[[], Any]:
        x = self._channels_first(x)
        return lambda: self.f.silu(self.f.group_norm(x, 32, weight, bias, 1e-5))

    def gelu(self, x: Any, y: Any) -> Callable[[], Any]:
        return lambda: self.f.gelu(x * y + 1, approximate="tanh") * x

    @staticmethod
    def _channels_first(x: Any) -> Any:
        """The same memory as (B, C, H, W): torch's channels-last format."""
        return x.permute(0, 3, 1, 2)


class Numpy(Side):
    """NumPy in float32, in the plainest way: the result that all sides are held to."""

    def load(self, threads: int) -> None:
        pass  # the number of threads is in the environment

    def build(self, case: Case, given: list[Arrays], weights: Arrays) -> Callable[[], Any]:
        if case.is_quantised:
            weights = {k: BLOCK_FORMATS[case.dtype].values(x) for k, x in weights.items()}
        function = NUMPY[case.kind]

        def run() -> np.ndarray:
            for one in given:
                result = function(**one, **weights, **case.options)
            return result

        return run

    def array(self, result: Any) -> np.ndarray:
        return result


def _gemm(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return x @ weight


def _linear(
    x: np.ndarray, weight: np.ndarray, bias: np.ndarray | None = None, silu: bool = False
) -> np.ndarray:
    out = x @ weight.T
    out = out if bias is None else out + bias
    return _silu(out) if silu else out


def _conv(x: np.ndarray, weight: np.ndarray, bias: np.ndarray, stride: int) -> np.ndarray:
    """A product for each of the nine taps."""
    b, h, w, _ = x.shape
    padded = np.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
    out = np.broadcast_to(bias, (b, h // stride, w // stride, len(bias))).copy()
    for i in range(3):
        for j in range(3):
            out += padded[:, i : i + h : stride, j : j + w : stride] @ weight[:, :, i, j].T
    return out


def _attention(q: np.ndarray, k: np.ndarray, v: np.ndarray, causal: bool) -> np.ndarray:
    """A head at a time."""
    out = np.empty_like(q)
    groups = q.shape[2] // k.shape[2]
    seen = np.tri(q.shape[1], k.shape[1], dtype=bool) if causal else None
    for b in range(q.shape[0]):
        for h in range(q.shape[2]):
            scores = q[b, :, h] @ k[b, :, h // groups].T / np.float32(np.sqrt(q.shape[3]))
            if seen is not None:
                scores = np.where(seen, scores, -np.inf)
            out[b, :, h] = _softmax(scores) @ v[b, :, h // groups]
    return out


def _softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def _rmsnorm(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    mean = np.square(x).mean(-1, keepdims=True)
    return x / np.sqrt(mean + np.float32(1e-5)) * weight


def _normalised(x: np.ndarray, axes: tuple[int, ...]) -> np.ndarray:
    centred = x - x.mean(axes, keepdims=True)
    return centred / np.sqrt(np.square(centred).mean(axes, keepdims=True) + np.float32(1e-5))


def _layernorm(x: np.ndarray, weight: np.ndarray, bias: np.ndarray) -> np.ndarray:
    return _normalised(x, (-1,)) * weight + bias


def _groupnorm_silu(x: np.ndarray, weight: np.ndarray, bias: np.ndarray) -> np.ndarray:
    grouped = x.reshape(x.shape[0], -1, 32, x.shape[-1] // 32)
    return _silu(_normalised(grouped, (1, 3)).reshape(x.shape) * weight + bias)


def _silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def _gelu(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    t = x * y + 1
    inner = np.float32(np.sqrt(2 / np.pi)) * t * (1 + np.float32(0.044715) * t * t)
    return 0.5 * t * (1 + np.tanh(inner)) * x


NUMPY: dict[str, Callable[..., np.ndarray]] = {
    "gemm": _gemm,
    "linear": _linear,
    "conv": _conv,
    "attention": _attention,
    "softmax": _softmax,
    "rmsnorm": _rmsnorm,
    "layernorm": _layernorm,
    "groupnorm-silu": _groupnorm_silu,
    "gelu": _gelu,
}
