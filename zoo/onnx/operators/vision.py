"""Boxes and sampling in pictures."""

from __future__ import annotations

import numpy as np

from zoo.onnx import values as v
from zoo.onnx.operators.resize import _cubic
from zoo.onnx.registry import operator
from zoo.onnx.values import Known


@operator("NonMaxSuppression")
def non_max_suppression(boxes: Known, scores: Known, max_output: Known = None,
                        iou_threshold: Known = None, score_threshold: Known = None, *,
                        center_point_box: int = 0):  # fmt: skip
    """The best boxes that don't overlap better ones: rows of (batch, class, box)."""
    limit = int(max_output.reshape(-1)[0]) if max_output is not None else 0
    overlap = float(iou_threshold.reshape(-1)[0]) if iou_threshold is not None else 0.0
    least = -np.inf if score_threshold is None else float(score_threshold.reshape(-1)[0])
    rows = []
    for b, (box, classes) in enumerate(zip(boxes, scores)):
        corners = _corners(box, center_point_box)
        for c, score in enumerate(classes):
            kept = _suppressed(corners, score, limit, overlap, least)
            rows += [(b, c, i) for i in kept]
    return np.array(rows, np.int64).reshape(-1, 3)


def _corners(box: np.ndarray, center: int) -> np.ndarray:
    """(y1, x1, y2, x2) with the smaller first."""
    if center:
        x, y, w, h = box.T
        return np.stack([y - h / 2, x - w / 2, y + h / 2, x + w / 2], -1)
    low, high = np.minimum(box[:, :2], box[:, 2:]), np.maximum(box[:, :2], box[:, 2:])
    return np.concatenate([low, high], -1)


def _suppressed(box: np.ndarray, score: np.ndarray, limit: int, overlap: float, least: float):
    order = [i for i in np.argsort(-score, kind="stable") if score[i] > least]
    area = (box[:, 2] - box[:, 0]) * (box[:, 3] - box[:, 1])
    kept, left = [], np.array(order, int)
    while len(left) and len(kept) < limit:
        best, left = left[0], left[1:]
        kept.append(int(best))
        low, high = (
            np.maximum(box[left, :2], box[best, :2]),
            np.minimum(box[left, 2:], box[best, 2:]),
        )
        common = np.prod(np.maximum(high - low, 0), -1)
        left = left[common <= overlap * (area[left] + area[best] - common)]
    return kept


@operator("RoiAlign")
def roi_align(x: Known, rois: Known, batch: Known, *, mode: str = "avg", output_height: int = 1,
              output_width: int = 1, sampling_ratio: int = 0, spatial_scale: float = 1.0,
              coordinate_transformation_mode: str = "half_pixel", call):  # fmt: skip
    """Means or maxima of bilinear samples within boxes (He et al. 2017)."""
    half = coordinate_transformation_mode == "half_pixel" and call.opset >= 16
    out = np.zeros((len(rois), x.shape[1], output_height, output_width), x.dtype)
    for i, (roi, b) in enumerate(zip(rois.astype(np.float64), batch)):
        x1, y1, x2, y2 = roi * spatial_scale - (0.5 if half else 0)
        wide, high = x2 - x1, y2 - y1
        if not half:
            wide, high = max(wide, 1.0), max(high, 1.0)
        ys, ny = _samples(y1, high, output_height, sampling_ratio)
        xs, nx = _samples(x1, wide, output_width, sampling_ratio)
        parts = _bilinear(x[int(b)], ys, xs, mode)
        parts = parts.reshape(*parts.shape[:1], output_height, ny, output_width, nx, -1)
        out[i] = parts.mean((2, 4, 5)) * parts.shape[-1] if mode == "avg" else parts.max((2, 4, 5))
    return out


def _samples(start: float, size: float, bins: int, ratio: int) -> tuple[np.ndarray, int]:
    each = ratio or max(1, int(np.ceil(size / bins)))
    step = size / bins
    at = np.arange(bins)[:, None] * step + (np.arange(each) + 0.5) * step / each
    return start + at.reshape(-1), each


def _bilinear(x: np.ndarray, ys: np.ndarray, xs: np.ndarray, mode: str) -> np.ndarray:
    """The four weighted neighbours of each place: (C, Y, X, 4); places outside are 0."""
    h, w = x.shape[1:]
    outside = ((ys < -1) | (ys > h))[:, None] | ((xs < -1) | (xs > w))[None]
    ys, xs = np.clip(ys, 0, h - 1), np.clip(xs, 0, w - 1)
    y0, x0 = ys.astype(int), xs.astype(int)
    y1, x1 = np.minimum(y0 + 1, h - 1), np.minimum(x0 + 1, w - 1)
    fy, fx = (ys - y0)[:, None], (xs - x0)[None]
    parts = [x[:, a[:, None], b[None]] * (s * t * ~outside) for a, s in ((y0, 1 - fy), (y1, fy))
             for b, t in ((x0, 1 - fx), (x1, fx))]  # fmt: skip
    return np.stack(parts, -1)


@operator("AffineGrid")
def affine_grid(theta: Known, size: Known, *, align_corners: int = 0):
    """Places in -1 … 1 moved by affine maps: (N, *space, rank)."""
    n, _, *space = v.ints(size)
    axes = [_line(m, align_corners) for m in space]
    mesh = np.meshgrid(*axes, indexing="ij")[::-1]
    ones = np.stack([*mesh, np.ones(space)], -1).reshape(-1, len(space) + 1)
    out = ones @ np.swapaxes(theta.astype(np.float64), 1, 2)
    return out.reshape(n, *space, len(space)).astype(theta.dtype)


def _line(n: int, corners: int) -> np.ndarray:
    if corners:
        return np.linspace(-1, 1, n)
    return (2 * np.arange(n) + 1) / n - 1


@operator("GridSample")
def grid_sample(x: Known, grid: Known, *, align_corners: int = 0, mode: str = "linear",
                padding_mode: str = "zeros"):  # fmt: skip
    """Samples of x (N, C, *space) at places in -1 … 1, last axis first."""
    space, rank = x.shape[2:], x.ndim - 2
    places = grid[..., ::-1].astype(np.float64)
    at = [(places[..., i] + 1) / 2 * (n - 1) if align_corners
          else ((places[..., i] + 1) * n - 1) / 2 for i, n in enumerate(space)]  # fmt: skip
    mode = {"bilinear": "linear", "bicubic": "cubic"}.get(mode, mode)
    taps = {"nearest": range(1), "linear": range(2), "cubic": range(-1, 3)}[mode]
    first = [np.rint(a) if mode == "nearest" else np.floor(a) for a in at]
    out = np.zeros((x.shape[0], x.shape[1], *grid.shape[1:-1]))
    for offsets in np.ndindex(*(len(taps),) * rank):
        share, index = 1.0, []
        inside = True
        for a, f, k, n in zip(at, first, (taps[o] for o in offsets), space):
            t = np.abs(a - (f + k))
            share = share * (1 if mode == "nearest" else np.maximum(0, 1 - t) if mode == "linear"
                             else _cubic(t, -0.75))  # fmt: skip
            place, within = _within(f + k, n, padding_mode, align_corners)
            index.append(place)
            inside = inside & within
        batch = np.arange(x.shape[0]).reshape(-1, *(1,) * rank)
        values = np.moveaxis(x[(batch, slice(None), *index)], -1, 1)
        out += values * (share * inside)[:, None]
    return out.astype(x.dtype)


def _within(place: np.ndarray, n: int, mode: str, corners: int):
    """Whole places brought into 0 … n-1, and whether they count."""
    if mode == "zeros":
        return np.clip(place, 0, n - 1).astype(int), (place >= 0) & (place <= n - 1)
    if mode == "reflection":
        low, high = (0.0, n - 1.0) if corners else (-0.5, n - 0.5)
        span = high - low
        if span > 0:
            over = np.abs(place - low) % (2 * span)
            place = np.where(over > span, 2 * span - over, over) + low
    return np.clip(np.rint(place), 0, n - 1).astype(int), True
