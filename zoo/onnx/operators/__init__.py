"""The operators, by theme; importing this package fills the table of `registry.py`."""

from zoo.onnx.operators import (  # noqa: F401
    activations,
    attention,
    casts,
    control,
    convolution,
    elementwise,
    indexing,
    linear,
    loss,
    movement,
    normalisation,
    pooling,
    quantised,
    recurrent,
    reductions,
    resize,
    sequences,
    signal,
    sources,
    vision,
)
