"""Word times: the path through the attention, words and punctuation, and what is odd about them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from weights import WeightError
from zoo.whisper import timing
from zoo.whisper.timing import WordTiming, heads_of, measured
from zoo.whisper.tokenizer import Tokenizer, packaged
from zoo.whisper.transcript import Segment, Word

PREPEND, APPEND = "\"'“¿([{-", "\"'.。,，!！?？:：”)]}、"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(packaged(True), 51865)


def path_by_cells(cost: np.ndarray) -> tuple[list[int], list[int]]:
    """The same path, one cell after the other."""
    n, m = cost.shape
    total = np.full((n + 1, m + 1), np.inf, np.float32)
    total[0, 0] = 0
    origin = {}
    for i in range(1, n + 1):
        for j in range(1, m + 1):
            both, up, left = total[i - 1, j - 1], total[i - 1, j], total[i, j - 1]
            if both < up and both < left:
                origin[i, j], best = (1, 1), both
            elif up < both and up < left:
                origin[i, j], best = (1, 0), up
            else:
                origin[i, j], best = (0, 1), left
            total[i, j] = cost[i - 1, j - 1] + best
    i, j, path = n, m, []
    while i or j:
        path.append((i - 1, j - 1))
        a, b = (0, 1) if not i else (1, 0) if not j else origin[i, j]
        i, j = i - a, j - b
    rows, columns = zip(*path[::-1])
    return list(rows), list(columns)


def matrices(count: int) -> list[np.ndarray]:
    """Random ones of all shapes; every other one of small whole numbers, which are often equal."""
    random = np.random.default_rng(0)
    out = []
    for number in range(count):
        shape = random.integers(1, 25, 2)
        whole = number % 2
        values = random.integers(0, 3, shape) if whole else random.normal(size=shape)
        out.append(values.astype(np.float32))
    return out


def test_the_path_is_that_of_the_plain_algorithm() -> None:
    for cost in matrices(60):
        rows, columns = timing.warp(cost)
        assert (rows.tolist(), columns.tolist()) == path_by_cells(cost)


@pytest.mark.parametrize("shape", [(3,), (4,), (7,), (2, 50), (2, 3, 50)])
def test_the_median_filter_mirrors_at_the_ends(shape: tuple[int, ...]) -> None:
    x = np.random.default_rng(1).normal(size=shape).astype(np.float32)
    found = timing.median_filter(x, 7)
    if shape[-1] <= 3:
        np.testing.assert_array_equal(found, x)  # nothing to mirror
        return
    n = shape[-1]
    for at in range(n):
        near = [abs(i) if i < n else 2 * (n - 1) - i for i in range(at - 3, at + 4)]
        np.testing.assert_array_equal(found[..., at], np.median(x[..., near], axis=-1))


def staircase(bounds: list[int], before: int = 3, heads: int = 2) -> np.ndarray:
    """Attention of a text whose token k looks at the positions from bounds[k] to bounds[k+1].

    The token that comes before each looks there: it is what predicts it.
    """
    attention = np.full((heads, before + len(bounds) + 1, bounds[-1]), 1e-4, np.float32)
    for k, (a, b) in enumerate(zip(bounds, bounds[1:])):
        attention[:, before + k, a:b] = 1
    attention[:, before + len(bounds) - 1, bounds[-1] - 20 :] = 1
    return attention / attention.sum(-1, keepdims=True)


def attend_to(bounds: list[int], probability: float = 0.9) -> Callable:
    def attend(text: list[int]) -> tuple[np.ndarray, np.ndarray]:
        assert len(text) == len(bounds) - 1
        return staircase(bounds), np.full(len(text), probability, np.float32)

    return attend


def test_words_begin_where_their_first_token_looks(tokenizer: Tokenizer) -> None:
    text = tokenizer.encode(" Hello, wonderful world")
    assert len(text) == 4
    probabilities = np.array([0.5, 0.25, 1.0, 0.75], np.float32)
    attention = staircase([0, 50, 60, 110, 170], before=2)
    found = timing.align(attention, probabilities, text, tokenizer, "en")
    assert [t.word for t in found] == [" Hello", ",", " wonderful", " world"]
    assert [t.tokens for t in found] == [[token] for token in text]
    assert [t.probability for t in found] == [0.5, 0.25, 1.0, 0.75]
    starts = [t.start for t in found]
    # the median filter moves an edge by less than its half width of 3 positions (0.06 s)
    np.testing.assert_allclose(starts, [0, 1.0, 1.2, 2.2], atol=0.06)
    assert [t.end for t in found[:-1]] == starts[1:]


@pytest.mark.parametrize("frames", [0, 1, 3, 5])
def test_a_very_short_window_gives_finite_times(tokenizer: Tokenizer, frames: int) -> None:
    attention = np.full((2, 6, frames), 1 / max(frames, 1), np.float32)  # and nothing stands out
    found = timing.align(attention, np.ones(2, np.float32), [2425, 1002], tokenizer, "en")
    assert len(found) == (2 if frames else 0)
    assert all(0 <= t.start <= t.end <= frames / 50 for t in found)


def timed(*words: str) -> list[WordTiming]:
    return [WordTiming(word, n, n + 1, 1.0, [n]) for n, word in enumerate(words)]


def test_punctuation_joins_the_word_it_belongs_to() -> None:
    alignment = timed(" He", " said", " (", "very", " loud", ")", ",", " “", "No", "!", "”", " -")
    found = timing.merge_punctuation(alignment, PREPEND, APPEND)
    assert [t.word for t in found] == [" He", " said", " (very", " loud),", " “No!”", " -"]
    assert [(t.start, t.end) for t in found] == [(n, n + 1) for n in (0, 1, 3, 4, 8, 11)]
    assert [t.tokens for t in found] == [
        [0],
        [1],
        [2, 3],
        [4, 5, 6],
        [7, 8, 9, 10],
        [11],
    ]
    alignment = timed(" a", ".", " (", "b")
    assert [t.word for t in timing.merge_punctuation(alignment, "", "")] == [" a", ".", " (", "b"]


def segment(start: float, end: float, tokens: list[int], seek: int = 0, **more: Any) -> Segment:
    return Segment(0, seek, start, end, "", tokens, 0.0, -0.5, 1.0, 0.1, **more)


def words_of(
    tokenizer: Tokenizer, segments: list[Segment], bounds: list[int], last_speech: float = 0.0
) -> float:
    return timing.add_words(
        segments, attend_to(bounds), tokenizer, "en", PREPEND, APPEND, last_speech
    )


def test_words_are_shared_out_and_segments_begin_and_end_with_them(tokenizer: Tokenizer) -> None:
    first, second = tokenizer.encode(" One two."), tokenizer.encode(" Three")
    begin = tokenizer.timestamp_begin
    segments = [
        segment(10.2, 11.4, [begin, *first, begin + 70], seek=1000),
        segment(11.4, 12.4, [begin + 70, *second, begin + 120], seek=1000),
    ]
    last = words_of(tokenizer, segments, [0, 30, 60, 70, 110], last_speech=10.0)
    assert [[w.word for w in s.words] for s in segments] == [[" One", " two."], [" Three"]]
    spoken = [w for s in segments for w in s.words]
    np.testing.assert_allclose([w.start for w in spoken], [10.0, 10.6, 11.4], atol=0.06)
    assert segments[0].start == spoken[0].start and segments[0].end == spoken[1].end
    assert segments[1].start == spoken[2].start
    assert last == segments[1].end == spoken[2].end
    assert all(type(w.start) is float and type(w.probability) is float for w in spoken)


def test_a_first_word_that_swallows_the_pause_before_it_is_cut(tokenizer: Tokenizer) -> None:
    text = tokenizer.encode(" One two three four")
    segments = [segment(8.0, 9.4, text)]
    words_of(tokenizer, segments, [0, 415, 430, 445, 470])
    first = segments[0].words[0]
    assert first.end == pytest.approx(8.3, abs=0.06)
    # at most twice the median of 0.3 to 0.5 s, instead of 8 s
    assert 0 < first.end - first.start <= 1.0
    assert segments[0].start == first.start


def test_a_word_at_a_sentence_s_end_does_not_hold_the_pause(tokenizer: Tokenizer) -> None:
    text = tokenizer.encode(" One two. Three four")
    segments = [segment(0.0, 9.0, text)]
    words_of(tokenizer, segments, [0, 20, 40, 400, 420, 440])  # "." lasts 7.2 s
    assert segments[0].words[1].word == " two."
    assert segments[0].words[1].end < 2
    assert segments[0].words[2].start == pytest.approx(8.0, abs=0.06)


def test_segments_without_text_have_no_words(tokenizer: Tokenizer) -> None:
    def attend(text: list[int]) -> tuple:
        raise AssertionError("there is nothing to align")

    segments = [segment(0.0, 1.0, [tokenizer.timestamp_begin])]
    assert timing.add_words(segments, attend, tokenizer, "en", PREPEND, APPEND, 3.0) == 3.0
    assert segments[0].words == []
    assert timing.add_words([], attend, tokenizer, "en", PREPEND, APPEND, 3.0) == 3.0


# Hallucinations.


def word(start: float, end: float, probability: float = 0.9, text: str = " word") -> Word:
    return Word(text, start, end, probability)


@pytest.mark.parametrize(
    ("given", "score"),
    [
        (word(0, 0.5), 0.0),
        (word(0, 0.5, 0.1), 1.0),
        (word(0, 0.033), 1.5),
        (word(0, 3.5), 1.5),
        (word(0, 5.0, 0.0), 4.0),
    ],
)
def test_an_odd_word_is_short_long_or_unlikely(given: Word, score: float) -> None:
    assert timing.anomaly(given) == pytest.approx(score, abs=1e-9)


def test_a_segment_is_odd_when_its_words_are() -> None:
    good, odd = word(0, 0.5), word(0, 0.5, 0.05)
    mark = word(0, 9, 0.0, ",")
    anomalous = {
        "all": [odd],
        "three of many": [odd, odd, odd, good, good],
        "all but marks": [odd, mark],
    }
    usual = {"one": [good, odd], "only the first eight count": [good] * 8 + [odd] * 8, "none": []}
    for words in anomalous.values():
        assert timing.is_anomaly(segment(0, 1, [], words=words))
    for words in usual.values():
        assert not timing.is_anomaly(segment(0, 1, [], words=words))
    assert not timing.is_anomaly(None)


def test_the_end_is_that_of_the_last_word() -> None:
    spoken = segment(0, 3, [], words=[word(0, 1), word(1, 2)])
    silent = segment(3, 4, [], words=[])
    assert timing.end_of([spoken, silent]) == 2
    assert timing.end_of([silent]) == 4
    assert timing.end_of([]) is None
    assert timing.next_with_words([silent, spoken]) is spoken
    assert timing.next_with_words([silent]) is None


def test_what_is_odd_between_silences_is_made_up() -> None:
    def said(start: float, probability: float = 0.9) -> Segment:
        words = [word(start + n, start + n + 0.5, probability) for n in range(2)]
        return segment(start, start + 1.5, [], words=words)

    def made_up(*segments: Segment) -> int | None:
        return timing.first_made_up(segments, 0.0, 0.0, 30.0, threshold=2.0)

    assert made_up(said(3), said(10), said(20)) is None
    assert made_up(said(3), said(10, 0.01), said(20)) == 1
    assert made_up(said(3), said(5, 0.01), said(7)) is None  # no silence around it
    assert made_up(said(3), said(10, 0.01), said(12, 0.01)) == 1  # another odd one follows
    assert made_up(said(3), segment(5, 6, [], words=[]), said(26.9, 0.01)) == 2
    assert made_up() is None


# Alignment heads.


def sized(layers: int, heads: int, n_vocab: int = 0) -> Any:
    return SimpleNamespace(n_text_layer=layers, n_text_head=heads, n_vocab=n_vocab)


def test_heads_that_the_file_names_are_used() -> None:
    assert heads_of(sized(6, 8), {"alignment_heads": [[3, 1], [5, 6]]}) == ((3, 1), (5, 6))
    for wrong in ([[6, 0]], [[0, 8]], [[-1, 0]], [[1]], "ab", [1, 2], [[True, 0]], {"a": 1}, 7):
        with pytest.raises(WeightError, match="not heads of this model"):
            heads_of(sized(6, 8), {"alignment_heads": wrong})


@pytest.mark.parametrize(
    ("name", "sizes", "n_vocab", "known"),
    [
        ("tiny.en.pt", (4, 6), 51864, "tiny.en"),
        ("model.pt", (4, 6), 51865, "tiny"),
        ("ggml-base.bin", (6, 8), 51865, "base"),
        ("x", (12, 12), 51864, "small.en"),
        ("x", (24, 16), 51865, "medium"),
        ("large-v1.pt", (32, 20), 51865, "large-v1"),
        ("whisper-large-v2", (32, 20), 51865, "large-v2"),
        ("large.pt", (32, 20), 51866, "large-v3"),
        ("turbo.pt", (4, 20), 51866, "large-v3-turbo"),
    ],
)
def test_openai_s_models_are_known_by_their_size(
    name: str, sizes: tuple[int, int], n_vocab: int, known: str
) -> None:
    heads = heads_of(sized(*sizes, n_vocab), {}, name)
    assert heads == measured()[known]
    assert all(layer < sizes[0] and head < sizes[1] for layer, head in heads)


def test_another_size_has_all_heads_of_its_last_layers() -> None:
    assert heads_of(sized(2, 3), {}) == ((1, 0), (1, 1), (1, 2))
    assert heads_of(sized(3, 1), {"alignment_heads": []}) == ((1, 0), (2, 0))


# openai/whisper itself, given the same attention.


@pytest.mark.peers
def test_paths_and_medians_equal_openai_s() -> None:
    import torch
    from whisper.timing import dtw_cpu, median_filter

    for cost in matrices(60):
        rows, columns = dtw_cpu(cost.astype(np.float64))
        found = timing.warp(cost)
        np.testing.assert_array_equal(found[0], rows)
        np.testing.assert_array_equal(found[1], columns)
    for length in (2, 3, 4, 9, 200):
        x = np.random.default_rng(length).normal(size=(2, 5, length)).astype(np.float32)
        expected = median_filter(torch.from_numpy(x), 7).numpy()
        np.testing.assert_array_equal(timing.median_filter(x, 7), expected)


@pytest.mark.peers
def test_heads_equal_openai_s() -> None:
    import base64
    import gzip

    import whisper

    for name, packed in whisper._ALIGNMENT_HEADS.items():
        mask = np.frombuffer(gzip.decompress(base64.b85decode(packed)), bool)
        heads = measured()[{"large": "large-v3", "turbo": "large-v3-turbo"}.get(name, name)]
        width = {24: 6, 48: 8, 144: 12, 384: 16, 640: 20, 80: 20}[len(mask)]
        assert [layer * width + head for layer, head in heads] == np.flatnonzero(mask).tolist()


class Recorded:
    """A model of openai/whisper's whose attention scores and logits are given."""

    device = "cpu"

    def __init__(self, scores: np.ndarray, logits: np.ndarray) -> None:
        import torch

        self.scores, self.output = torch.from_numpy(scores), torch.from_numpy(logits)
        self.hooks: list[Callable] = []
        hook = SimpleNamespace(register_forward_hook=self.register)
        self.dims = SimpleNamespace(n_text_layer=1)
        self.decoder = SimpleNamespace(blocks=[SimpleNamespace(cross_attn=hook)])
        heads = torch.tensor([[0] * len(scores), list(range(len(scores)))])
        self.alignment_heads = SimpleNamespace(indices=lambda: heads)

    def register(self, hook: Callable) -> SimpleNamespace:
        self.hooks.append(hook)
        return SimpleNamespace(remove=lambda: None)

    def __call__(self, mel: Any, tokens: Any) -> Any:
        for hook in self.hooks:
            hook(None, None, (None, self.scores[None]))
        return self.output[None]


PHRASES = (" Hello, world!", " It's (really) late.", " “No”, she said:", " 12 - 3", " naïve…",
           " 日本語。", " one two three four five", ".", " A? B! C.")  # fmt: skip


@pytest.mark.peers
@pytest.mark.parametrize("seed", range(40))
def test_words_equal_openai_s(tokenizer: Tokenizer, seed: int) -> None:
    import torch
    from whisper.timing import add_word_timestamps
    from whisper.tokenizer import get_tokenizer

    random = np.random.default_rng(seed)
    language = ("en", "ja")[seed % 2]
    theirs = get_tokenizer(True, num_languages=99, language=language, task="transcribe")
    segments, text, begin, seek = [], [], tokenizer.timestamp_begin, int(random.integers(0, 9000))
    for _ in range(random.integers(1, 4)):
        tokens = tokenizer.encode("".join(random.choice(PHRASES, random.integers(0, 4))))
        start, end = np.sort(random.uniform(0, 30, 2)) + seek / 100
        segments.append(segment(float(start), float(end), [begin, *tokens, begin + 9], seek=seek))
        text += tokens
    frames, rows = int(random.integers(20, 3000)), len(text) + 5
    scores = random.normal(size=(3, rows, 1500)).astype(np.float32)
    for row, place in enumerate(np.sort(random.integers(0, frames // 2, rows))):
        scores[:, row, place : place + random.integers(1, 40)] += 6
    logits = random.normal(size=(rows, 51865)).astype(np.float32)
    logits[np.arange(3, 3 + len(text)), text] += random.uniform(5, 15, len(text))
    last_speech = float(random.uniform(0, 1)) * seek / 100
    dicts = [{**vars(s)} for s in segments]
    add_word_timestamps(
        segments=dicts, model=Recorded(scores, logits), tokenizer=theirs, mel=torch.zeros(80, 3000),
        num_frames=frames, last_speech_timestamp=last_speech,
    )  # fmt: skip

    def attend(tokens: list[int]) -> tuple[np.ndarray, np.ndarray]:
        assert tokens == text
        chances = softmax(logits[3:, : tokenizer.eot])[np.arange(len(text)), text]
        return softmax(scores[:, :, : frames // 2]), chances

    ours = [replace(s) for s in segments]
    timing.add_words(ours, attend, tokenizer, language, PREPEND, APPEND, last_speech)
    for mine, other in zip(ours, dicts):
        words = other["words"]
        assert [w.word for w in mine.words] == [w["word"] for w in words]
        times = [(w.start, w.end) for w in (mine, *mine.words)]
        expected = [(w["start"], w["end"]) for w in (other, *words)]
        # one position: sums in another order choose otherwise between paths that cost the same
        np.testing.assert_allclose(times, expected, atol=0.0201)
        # float32 softmax of two libraries
        chances = [w["probability"] for w in words]
        np.testing.assert_allclose([w.probability for w in mine.words], chances, rtol=1e-4)


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)
