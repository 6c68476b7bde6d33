"""Pictures (B, C, *space) whose channels lie last in memory, and what keeps them so.

A convolution leaves its channels beside each other. Its result is a view, (B, *space, C) permuted;
what only looks at elements is done on what lies below, so that nothing is turned round in between.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from engine import Tensor


def channels_last(x: Tensor) -> Tensor:
    """(B, C, *space) -> (B, *space, C)."""
    return x.permute(0, *range(2, x.ndim), 1)


def channels_first(x: Tensor) -> Tensor:
    """(B, *space, C) -> (B, C, *space)."""
    return x.permute(0, x.ndim - 1, *range(1, x.ndim - 1))


def lies_last(x: Any) -> bool:
    """Whether x is (B, C, *space) with its channels last in memory."""
    if not isinstance(x, Tensor) or x.ndim < 3 or x.node.op.name != "PERMUTE":
        return False
    return x.node.arg == (0, x.ndim - 1, *range(1, x.ndim - 1))


def stored(x: Tensor) -> Tensor:
    """x in a buffer, in the order in which it lies; nothing may write to it."""
    if lies_last(x):
        return channels_first(stored(channels_last(x)))
    return x if x.node.op.name in ("BUFFER", "ASSIGN", "CONTIGUOUS") else x.contiguous()


def as_it_lies(function: Callable[..., Any], arguments: Sequence[Any], **options: Any) -> Any:
    """function(*arguments), of broadcast elements each by itself, with channels last if one of the
    arguments has all axes and lies so."""
    rank = max((x.ndim for x in arguments if isinstance(x, Tensor)), default=0)
    if not any(lies_last(x) and x.ndim == rank for x in arguments):
        return function(*arguments, **options)
    return channels_first(function(*(_beneath(x, rank) for x in arguments), **options))


def _beneath(x: Any, rank: int) -> Any:
    """An argument with channels last; one number fits as it is."""
    if not isinstance(x, Tensor) or x.numel == 1:
        return x
    return channels_last(x.reshape(*(1,) * (rank - x.ndim), *x.shape))
