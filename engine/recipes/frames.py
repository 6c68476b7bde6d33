"""Convolutions as products whose rows are counted through stored lines of pixels.

Zeros to the left of each line of pixels are also what lies to the right of the line above it. So an
element of the kernel (a tap) reads, for all outputs, the same stretch of pixels, moved by a number
of pixels of its own: the outputs are rows of a product, counted through lines and the few numbers
between two lines that nobody wants. Where the stride skips lines, the skipped ones lie apart.
"""

from __future__ import annotations

from typing import NamedTuple

from engine import graph as g
from engine.graph import Node
from engine.recipes.convolution import Convolution


class Slide(NamedTuple):
    """Along one axis, window i has the elements i * stride + k * apart - before of `size`."""

    size: int = 1
    places: int = 1
    taps: int = 1
    stride: int = 1
    apart: int = 1
    before: int = 0

    @property
    def last(self) -> int:
        """The last element of the last window."""
        return (self.places - 1) * self.stride + (self.taps - 1) * self.apart - self.before


def slides_of(found: Convolution) -> tuple[Node, tuple[Slide, Slide]]:
    """The input without padding, (B, C, H, W), and how the windows lie along H and W."""
    x, padding = found.unpadded()
    parts = (x.shape[2:], found.out, found.weight.shape[2:], found.stride, found.dilation)
    slides = [Slide(*each) for each in zip(*parts, (before for before, _ in padding[2:]))]
    if len(slides) == 1:
        slides = [Slide(), *slides]
    return g.reshape(x, (*x.shape[:2], *(s.size for s in slides))), tuple(slides)


class Frame(NamedTuple):
    """How many zeros are stored around the lines of a plane, and what follows from that.

    Lines that lie `apart` are neighbours. width: rows of the product per line of outputs.
    """

    above: int
    below: int
    left: int
    right: int
    apart: int
    width: int
    offsets: tuple[int, ...]


def frame_of(y: Slide, x: Slide, strip: int, slack: int) -> Frame:
    """The smallest frame in which no wanted tap meets anything but zeros outside of the picture,
    and rows, whole strips of them, read no more than `slack` pixels behind the last plane."""
    above = y.before
    beyond = max(0, x.last + 1 - x.size)
    lines = max(above + y.size, above + y.last + 1)
    right = 0
    if y.places == 1:
        left, right = x.before, beyond
    else:  # the zeros of the next line serve as well
        left, lines = max(x.before, beyond), lines + (beyond > 0)
    while True:
        lines += -lines % y.stride
        needed = max(left + x.size + right, (x.places - 1) * x.stride + 1)
        pitch = -(-needed // x.stride) * x.stride
        left = pitch - x.size - right
        offsets = tuple(
            (line % y.stride * (lines // y.stride) + line // y.stride) * pitch + pixel
            for line in _taps(above, y)
            for pixel in _taps(left, x)
        )
        width = pitch // x.stride if y.places > 1 else x.places
        strips = -(-y.places * width // strip)
        most = lines * pitch + slack
        excess = (strips * strip - 1) * x.stride + max(offsets) + 1 - most
        if excess <= 0:
            below = lines - above - y.size
            return Frame(above, below, left, right, y.stride, width, offsets)
        lines, right = (lines + 1, right) if y.places > 1 else (lines, right + excess)


def _taps(zeros: int, slide: Slide) -> range:
    """Where the elements of the first window lie behind so many zeros."""
    first = zeros - slide.before
    return range(first, first + slide.taps * slide.apart, slide.apart)


def framed(source: Node, frame: Frame) -> Node:
    """Pictures (…, H, W, channels) -> (…, lines, pixels, channels), zeros around them; where lines
    lie apart, these are an axis more."""
    before = len(source.shape) - 3
    sides = (frame.above, frame.below), (frame.left, frame.right)
    x = g.pad(source, (*((0, 0),) * before, *sides, (0, 0)))
    if frame.apart == 1:
        return x
    *outer, lines, pitch, channels = x.shape
    x = g.reshape(x, (*outer, lines // frame.apart, frame.apart, pitch, channels))
    order = (before + 1, before, before + 2, before + 3)
    return g.permute(x, (*range(before), *order))
