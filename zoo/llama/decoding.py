"""How a reply is computed: what happens where the context is full, and guesses that save time."""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Integral

from zoo.errors import UsageError
from zoo.llama.lookup import MOST
from zoo.llama.sampling import checked


@dataclass(frozen=True)
class Decoding:
    """UsageError for a value of another type or out of range.

    `lookup`: how many tokens at once are foretold from what the text says already, 0 to 31; the
    text is the same, only sooner there if it repeats itself. `context_shift`: a full context is no
    end, half of its tokens are forgotten, but for the first `keep` and the beginning token before
    them (-1: the whole prompt).
    """

    lookup: int = 0
    context_shift: bool = False
    keep: int = 0

    def __post_init__(self) -> None:
        checked("lookup", self.lookup, Integral, 0, MOST)
        checked("keep", self.keep, Integral, -1, math.inf)
        if not isinstance(self.context_shift, bool):
            raise UsageError(f"context_shift must be True or False, got {self.context_shift!r}")

    def shift(self, ids: list[int], prompt: int, first: int) -> int:
        """Forget tokens of a text that no longer fits; how many.

        Half of those behind the kept ones, of which there are never so many that nothing can go.
        `prompt`: tokens of the prompt; `first`: 1 if it starts with a beginning token, which stays.
        """
        keep = prompt if self.keep < 0 else first + self.keep
        keep = max(0, min(keep, prompt, len(ids) - 5))
        dropped = max(1, (len(ids) - keep) // 2)
        del ids[keep : keep + dropped]
        return dropped
