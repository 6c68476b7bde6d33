"""Whisper: `load(name_or_path)` gives a model that writes down what is said in a recording.

model = zoo.whisper.load("base")
print(model.transcribe("talk.mp3").text)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from zoo import lazily
from zoo.whisper.transcript import Segment, Transcript, Word

if TYPE_CHECKING:
    from zoo.whisper.whisper import Whisper, load

__all__ = ["Segment", "Transcript", "Whisper", "Word", "load"]
__getattr__ = lazily(__name__, Whisper="whisper", load="whisper")
