"""Whisper: `load(name_or_path)` gives a model that writes down what is said in a recording.

model = zoo.whisper.load("base")
print(model.transcribe("talk.mp3").text)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zoo.whisper.loading import load
    from zoo.whisper.transcript import Segment, Transcript, Word
    from zoo.whisper.whisper import Whisper

__all__ = ["Segment", "Transcript", "Whisper", "Word", "load"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # Only now: `transcribe --help` should not have to start the engine.
    from zoo.whisper import loading, transcript, whisper

    return next(getattr(m, name) for m in (loading, transcript, whisper) if hasattr(m, name))
