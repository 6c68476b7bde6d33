"""The runtimes that `bench whisper` compares, each behind the same few methods.

All are given the same samples and options: greedy at temperature 0, without retries at others and
without earlier text as a prompt, timestamps included. Imports of a runtime happen in `load`.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from bench.measure import peak_memory_mb


class Side:
    """A loaded model."""

    def load(self, path: str, threads: int, language: str, batch: int, **options: Any) -> None:
        raise NotImplementedError

    def text(self, samples: np.ndarray) -> str:
        raise NotImplementedError

    def hear(self, file: str) -> None:
        """The samples to transcribe from now on: a .npy file of float32, 16 kHz."""
        self.samples = np.load(file)

    def transcribe(self) -> dict[str, Any]:
        """Seconds for the recording, and its text."""
        begun = time.perf_counter()
        text = self.text(self.samples)
        return {"seconds": time.perf_counter() - begun, "text": text}

    def peak_memory_mb(self) -> float | None:
        return peak_memory_mb()


class Menagerie(Side):
    """This project."""

    def load(
        self,
        path: str,
        threads: int,
        language: str,
        batch: int,
        device: str | None = None,
        dtype: str = "auto",
    ) -> None:
        import zoo.whisper

        self.model = zoo.whisper.load(path, device=device, dtype=dtype)
        self.options: dict[str, Any] = {"language": language, "temperature": 0.0}
        if batch > 1:
            self.options |= {"batch_size": batch, "vad": True}

    def text(self, samples: np.ndarray) -> str:
        options = {**self.options, "condition_on_previous_text": False}
        return self.model.transcribe(samples, **options).text


class OpenAI(Side):
    """openai/whisper on torch, in float32; it has no batches."""

    def load(self, openai: str, threads: int, language: str, **options: Any) -> None:
        import torch
        import whisper

        torch.set_num_threads(threads)
        self.model = whisper.load_model(openai, device="cpu")
        self.options = {"language": language, "temperature": 0.0, "fp16": False, "verbose": None}

    def text(self, samples: np.ndarray) -> str:
        options = {**self.options, "condition_on_previous_text": False}
        return self.model.transcribe(samples, **options)["text"]


class FasterWhisper(Side):
    """faster-whisper on CTranslate2, from the same folder."""

    def load(
        self, path: str, threads: int, language: str, batch: int, compute_type: str, **options: Any
    ) -> None:
        import faster_whisper

        model = faster_whisper.WhisperModel(
            path, device="cpu", compute_type=compute_type, cpu_threads=threads
        )
        self.options: dict[str, Any] = {"language": language, "temperature": 0.0, "beam_size": 1}
        self.model: Any = model
        if batch > 1:
            self.model = faster_whisper.BatchedInferencePipeline(model)
            self.options |= {"batch_size": batch, "vad_filter": True, "without_timestamps": False}

    def text(self, samples: np.ndarray) -> str:
        options = {**self.options, "condition_on_previous_text": False}
        return "".join(segment.text for segment in self.model.transcribe(samples, **options)[0])
