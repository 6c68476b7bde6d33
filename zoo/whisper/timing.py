"""When each word is said: dynamic time warping over what some attention heads look at.

Source: openai/whisper, `timing.py` and `transcribe.py`, whose numbers are kept. Times are seconds.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from typing import Any

import numpy as np

from weights import WeightError
from zoo.whisper import model
from zoo.whisper.audio import WINDOW_S
from zoo.whisper.tokenizer import Tokenizer
from zoo.whisper.transcript import Segment, Word

TOKENS_PER_SECOND = 50  # positions of the encoder's output
_MEDIAN = 7  # width of the filter along time, in such positions
_LONGEST_MEDIAN = 0.7  # however slowly one speaks
_SENTENCE_ENDS = ".。!！?？"
_PUNCTUATION = "\"'“¿([{-\"'.。,，!！?？:：”)]}、"

_SIZES = {(4, 6): "tiny", (6, 8): "base", (12, 12): "small", (24, 16): "medium", (32, 20): "large",
          (4, 20): "large-v3-turbo"}  # fmt: skip

Heads = tuple[tuple[int, int], ...]  # (layer, head) of those that follow the audio
Attend = Callable[[Sequence[int]], tuple[np.ndarray, np.ndarray]]


@dataclass
class WordTiming(Word):
    """One word of an alignment with its tokens; seconds from the window's begin."""

    tokens: list[int]


def align(
    attention: np.ndarray,
    token_probs: np.ndarray,
    text_tokens: Sequence[int],
    tokenizer: Tokenizer,
    language: str | None = None,
) -> list[WordTiming]:
    """The words of a text and their times.

    `attention` (heads, T, frames) are the weights of the alignment heads on positions of 20 ms, one
    row for each token of what comes before the text, of `text_tokens`, and for the end token.
    """
    words = tokenizer.split_to_words([*text_tokens, tokenizer.eot], language)
    if len(words) < 2 or not attention.shape[-1]:
        return []
    spread = attention.std(-2, keepdims=True)
    normal = (attention - attention.mean(-2, keepdims=True)) / np.where(spread > 0, spread, 1)
    matrix = median_filter(normal, _MEDIAN).mean(0)
    before = len(matrix) - len(text_tokens) - 2  # rows that show another token than the text's
    text_path, time_path = warp(-matrix[before:-1])
    begins = time_path[np.diff(text_path, prepend=-1) > 0] / TOKENS_PER_SECOND  # of each token
    bounds = np.cumsum([0, *(len(tokens) for _, tokens in words[:-1])]).tolist()
    return [
        WordTiming(word, float(begins[a]), float(begins[b]), float(token_probs[a:b].mean()), tokens)
        for (word, tokens), (a, b) in zip(words, itertools.pairwise(bounds))
    ]


def median_filter(x: np.ndarray, width: int) -> np.ndarray:
    """The median of `width` neighbours along the last axis, mirrored at its ends."""
    half = width // 2
    if x.shape[-1] <= half:
        return x
    padded = np.pad(x, [(0, 0)] * (x.ndim - 1) + [(half, half)], mode="reflect")
    windows = np.lib.stride_tricks.sliding_window_view(padded, width, -1)
    return np.partition(windows, half, -1)[..., half]


def warp(cost: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The cheapest monotonic path through `cost` (N, M), as its row and column numbers.

    Sums are float32 and equals are decided as the reference does, so that paths are the same.
    Computed along anti-diagonals, whose cells depend on the two before only.
    """
    rows, columns = cost.shape
    # [i + j, i]: whether the best way to cell (i, j) comes from (i-1, j-1), (i-1, j) or (i, j-1).
    origin = np.zeros((rows + columns + 1, rows + 1), np.int8)
    older, old = np.full((2, rows + 1), np.inf, np.float32)
    older[0] = 0  # cell (0, 0), outside the matrix as all of row 0 and column 0 is
    for diagonal in range(2, rows + columns + 1):
        i = np.arange(max(1, diagonal - columns), min(rows, diagonal - 1) + 1)
        both, up, left = older[i - 1], old[i - 1], old[i]
        choice = np.where((both < up) & (both < left), 0, np.where((up < both) & (up < left), 1, 2))
        origin[diagonal, i] = choice
        new = np.full(rows + 1, np.inf, np.float32)
        new[i] = np.choose(choice, (both, up, left)) + cost[i - 1, diagonal - i - 1]
        older, old = old, new
    i, j, path = rows, columns, []
    while i or j:
        path.append((i - 1, j - 1))
        step = 2 if not i else 1 if not j else origin[i + j, i]
        i, j = i - (step != 2), j - (step != 1)
    text, time = np.array(path[::-1]).T
    return text, time


def merge_punctuation(
    alignment: Sequence[WordTiming], prepend: str, append: str
) -> list[WordTiming]:
    """The words, of which punctuation marks before or after them have become part."""

    def joined(first: WordTiming, second: WordTiming, times: WordTiming) -> WordTiming:
        return replace(times, word=first.word + second.word, tokens=first.tokens + second.tokens)

    backwards: list[WordTiming] = []
    for word in reversed(alignment):
        if backwards and word.word.startswith(" ") and word.word.strip() in prepend:
            after = backwards.pop()
            word = joined(word, after, after)
        backwards.append(word)
    words: list[WordTiming] = []
    for word in reversed(backwards):
        if words and not words[-1].word.endswith(" ") and word.word in append:
            before = words.pop()
            word = joined(before, word, before)
        words.append(word)
    return words


def add_words(
    segments: Sequence[Segment],
    attend: Attend,
    tokenizer: Tokenizer,
    language: str | None,
    prepend: str,
    append: str,
    last_speech: float,
) -> float:
    """Give the segments of one window their words, and begin and end where their words do.

    `attend(text tokens)` returns the attention and probabilities that `align` takes; `last_speech`
    is where the last word before the window ends, and where it ends now is returned.
    """
    texts = [[t for t in segment.tokens if t < tokenizer.eot] for segment in segments]
    text = list(itertools.chain.from_iterable(texts))
    alignment = align(*attend(text), text, tokenizer, language) if text else []
    durations = [t.duration for t in alignment if t.duration]
    typical = min(_LONGEST_MEDIAN, float(np.median(durations))) if durations else 0.0
    _shorten_at_sentences(alignment, 2 * typical)
    rest = iter(merge_punctuation(alignment, prepend, append))
    for segment, tokens in zip(segments, texts):
        offset, seen, segment.words = segments[0].seek / 100, 0, []
        while seen < len(tokens) and (timing := next(rest, None)):
            seen += len(timing.tokens)
            times = (round(offset + t, 2) for t in (timing.start, timing.end))
            segment.words.append(Word(timing.word, *times, timing.probability))
        if segment.words:
            _shorten_after_pause(segment.words, last_speech, typical)
            _fit(segment, segment.words, typical)
            last_speech = segment.end
    return last_speech


def _shorten_at_sentences(alignment: Sequence[WordTiming], limit: float) -> None:
    """A long word at a sentence's end holds the pause that follows, one at its begin another's."""
    for before, word in itertools.pairwise(alignment):
        if word.duration > limit:
            if word.word in _SENTENCE_ENDS:
                word.end = word.start + limit
            elif before.word in _SENTENCE_ENDS:
                word.start = word.end - limit


def _shorten_after_pause(words: Sequence[Word], last_speech: float, typical: float) -> None:
    """The first two words after a pause last twice the typical time at most."""
    first, second, limit = words[0], words[min(1, len(words) - 1)], 2 * typical
    too_long = first.duration > limit or second.end - first.start > 2 * limit
    if first.end - last_speech > 4 * typical and too_long:
        if second is not first and second.duration > limit:
            first.end = second.start = max(second.end / 2, second.end - limit)
        first.start = max(0, first.end - limit)


def _fit(segment: Segment, words: Sequence[Word], typical: float) -> None:
    """Let segment and words begin and end together: at the words, unless these are too long."""
    first, last = words[0], words[-1]
    if segment.start < first.end and segment.start - 0.5 > first.start:
        first.start = max(0, min(first.end - typical, segment.start))
    else:
        segment.start = first.start
    if segment.end > last.start and segment.end + 0.5 < last.end:
        last.end = max(last.start + typical, segment.end)
    else:
        segment.end = last.end


# What a model makes up where nothing is said has words that are too long, too short or unlikely.


def anomaly(word: Word) -> float:
    """How odd a word is: 0 for a usual one."""
    too_short, too_long = max(0, 0.133 - word.duration), max(0, word.duration - 2.0)
    return (word.probability < 0.15) + too_short * 15 + too_long


def is_anomaly(segment: Segment | None) -> bool:
    """Whether a segment's first words are so odd that they are probably made up."""
    if segment is None or not segment.words:
        return False
    words = [word for word in segment.words if word.word not in _PUNCTUATION][:8]
    score = sum(map(anomaly, words))
    return score >= 3 or score + 0.01 >= len(words)


def next_with_words(segments: Sequence[Segment]) -> Segment | None:
    """The first of the segments that has words."""
    return next((segment for segment in segments if segment.words), None)


def end_of(segments: Sequence[Segment]) -> float | None:
    """Where the last word ends, or the last segment when there are no words."""
    spoken = next_with_words(segments[::-1])
    if spoken:
        return spoken.words[-1].end
    return segments[-1].end if segments else None


def first_made_up(
    segments: Sequence[Segment], last_speech: float, begin: float, end: float, threshold: float
) -> int | None:
    """The number of the first odd segment that lies between silences or other odd ones, if any.

    `last_speech`: where speech before the window ended; `begin` and `end` of the window's audio;
    `threshold`: how long a silence is.
    """
    for number, segment in enumerate(segments):
        if is_anomaly(segment):
            following = next_with_words(segments[number + 1 :])
            start, stop = segment.start, segment.end
            next_start = following.words[0].start if following else end
            before = start - last_speech > threshold or start < threshold or start - begin < 2
            after = next_start - stop > threshold or begin + WINDOW_S - stop < 2
            if before and (after or is_anomaly(following)):
                return number
        if segment.words:
            last_speech = segment.end
    return None


def measured() -> dict[str, Heads]:
    """What OpenAI measured for its models, by name. Source: openai/whisper, `__init__.py`."""
    text = (resources.files("zoo.whisper") / "data" / "heads.json").read_text("utf-8")
    return {name: tuple(map(tuple, pairs)) for name, pairs in json.loads(text).items()}


def heads_of(config: model.Config, metadata: Mapping[str, Any], name: str = "") -> Heads:
    """The alignment heads that the metadata name, or else those of OpenAI's model of that size.

    `name` (of the file) tells large-v1 from large-v2. A model of another size has all heads of the
    last half of its layers, as in the reference. WeightError for metadata whose heads are none of
    this model.
    """
    layers, heads = config.n_text_layer, config.n_text_head
    every = list(itertools.product(range(layers), range(heads)))
    if named := metadata.get("alignment_heads"):
        known = {repr([*pair]): pair for pair in every}  # True is no 1 here
        if isinstance(named, list) and len(named) <= len(every):
            pairs = tuple(known.get(repr(pair)) for pair in named)
            if None not in pairs:
                return pairs
        expected = f"pairs of a layer below {layers} and a head below {heads}"
        problem = "alignment_heads are not heads of this model"
        raise WeightError(problem, expected=expected, got=named)
    size = _SIZES.get((layers, heads))
    if size == "large":
        size += "-v3" if config.n_vocab > 51865 else "-v1" if "v1" in name else "-v2"
    if config.n_vocab == 51864:
        size = f"{size}.en"
    return measured().get(size, tuple(every[layers // 2 * heads :]))
