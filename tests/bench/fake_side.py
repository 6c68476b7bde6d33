"""A side that needs no model, to test workers with."""

from __future__ import annotations

import os

import numpy as np

from bench import sd_sides, whisper_sides
from bench.llama_sides import Side


class Counting(Side):
    """The next token is always the last one plus `step_by`."""

    def load(self, path: str, threads: int, step_by: int = 1, **options: object) -> None:
        print("libraries print things")  # must not mix with the answers
        self.step_by, self.threads = step_by, threads

    def encode(self, text: str) -> list[int]:
        return [len(text)]

    def begin(self, ids: list[int]) -> int:
        return ids[-1] + self.step_by

    def step(self, token: int) -> int:
        return token + self.step_by

    def environment(self) -> list[str | int]:
        return [os.environ["OMP_NUM_THREADS"], self.threads]

    def fail(self) -> None:
        raise ValueError("no such\nthing")

    def crash(self) -> None:
        os._exit(7)


class Unloadable(Side):
    def load(self, path: str, threads: int, **options: object) -> None:
        raise OSError(f"{path}: no such file")


class Hearing(whisper_sides.Side):
    """Hears `text` in any recording."""

    def load(self, heard: str = "Two cats.", **options: object) -> None:
        self.heard = heard

    def text(self, samples: np.ndarray) -> str:
        if not len(samples):
            raise ValueError("nothing to hear")
        return self.heard


class Painting(sd_sides.Side):
    """Paints one number everywhere."""

    def load(self, colour: float = 1.0, **options: object) -> None:
        self.colour = colour

    def version(self) -> str:
        return "1"

    def unet(self) -> np.ndarray:
        return np.full((1, 4, 8, 8), self.colour, np.float32)

    vae = unet

    def peak_memory_mb(self) -> float:
        return 1000 * self.colour
