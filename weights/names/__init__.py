"""Tensor names: every layout of our models' checkpoints, to one canonical set and back.

Canonical are the names of each model's reference implementation: Meta's for LLaMA, OpenAI's for
Whisper, CompVis's for Stable Diffusion. One table of `table.Row` per other layout serves both
directions; a key that no row matches is an error.
"""

from __future__ import annotations

from weights.checkpoint import Checkpoint, WeightError
from weights.names import llama as _llama
from weights.names import stable_diffusion, whisper
from weights.names.table import translate

__all__ = ["LAYOUTS", "canonical", "in_layout", "llama", "recognise"]

# Per model: its module, and which of its layouts is the canonical one.
_MODELS = {
    "llama": (_llama, "meta"),
    "whisper": (whisper, "openai"),
    "stable_diffusion": (stable_diffusion, "compvis"),
}
LAYOUTS = {model: tuple(module.LAYOUTS) for model, (module, _) in _MODELS.items()}


def recognise(checkpoint: Checkpoint) -> tuple[str, str] | None:
    """(model, layout) by the keys, e.g. ("llama", "gguf"); None for a model we don't know."""
    for model, (module, _) in _MODELS.items():
        layout = module.recognise(checkpoint)
        if layout is not None:
            return model, layout
    return None


def canonical(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint under canonical names, shapes and row order, still lazy; metadata stays.

    WeightError when no table knows its model, or one of its keys.
    """
    found = recognise(checkpoint)
    if found is None:
        expected = "; ".join(f"{model} ({', '.join(of)})" for model, of in LAYOUTS.items())
        raise WeightError("no name table knows it", file=checkpoint.path, expected=expected)
    return _MODELS[found[0]][0].canonical(checkpoint, found[1])


def in_layout(checkpoint: Checkpoint, layout: str) -> Checkpoint:
    """The checkpoint under the names, shapes and row order of `layout`, from any other.

    WeightError when its model has no such layout, or when something needed isn't in metadata.
    """
    ours = canonical(checkpoint)
    model, _ = recognise(ours)
    module, reference = _MODELS[model]
    if layout not in module.LAYOUTS:
        problem, expected = f"{model} has no layout '{layout}'", ", ".join(module.LAYOUTS)
        raise WeightError(problem, file=checkpoint.path, expected=expected)
    return ours if layout == reference else module.in_layout(ours, layout)


def llama(checkpoint: Checkpoint, n_heads: int, n_kv_heads: int) -> Checkpoint:
    """A LLaMA checkpoint of any layout under Meta's names and row order, still lazy.

    A file without `output.weight` ties it to the embedding: the key stays absent.
    WeightError for a layout or key that no table knows.
    """
    layout = _llama.layout_of(checkpoint)
    if layout is None:
        expected = "one of " + ", ".join(_llama.MARKERS)
        raise WeightError("not a LLaMA checkpoint", file=checkpoint.path, expected=expected)
    counts = {"n_heads": n_heads, "n_kv_heads": n_kv_heads}
    return translate(checkpoint, _llama.LAYOUTS[layout], True, counts)
