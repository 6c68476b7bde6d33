"""Prompt lookup: foretell a text from itself, so that several tokens are verified in one call.

Source: Saxena, "Prompt Lookup Decoding" (2023); llama.cpp's `lookup` does the like.
"""

from __future__ import annotations

from collections.abc import Sequence

MOST = 31  # tokens at once: with the one before them as many rows as a call multiplies exactly
MATCH = 3  # tokens that must have come in this order before


class Lookup:
    """What came after the last three tokens when they came before. For one text, as it grows."""

    def __init__(self, most: int) -> None:
        self._most, self._known = most, MATCH
        self._after: dict[tuple[int, ...], int] = {}  # three tokens -> where they last ended

    def guess(self, ids: Sequence[int]) -> list[int]:
        """The tokens that `ids` may go on with: as many as were asked for, or none."""
        for end in range(self._known, len(ids)):  # the very last have nothing behind them yet
            self._after[tuple(ids[end - MATCH : end])] = end
        self._known = max(self._known, len(ids))
        start = self._after.get(tuple(ids[-MATCH:]))
        if start is None or not self._most:
            return []
        # A copy that reaches its own beginning goes on with that: "ab ab ab".
        period = len(ids) - start
        return [ids[start + i % period] for i in range(self._most)]
