"""From the logits of the decoder to the text of a window: rules, sampling, beam search.

Source: Radford et al. 2022, section 4.5; option names, defaults and results are openai/whisper's
(decoding.py). Rows are candidates: `group` of them for each window, one after another.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import TYPE_CHECKING

import numpy as np

from zoo.errors import UsageError, UserError
from zoo.options import check, names_of
from zoo.whisper.context import Context
from zoo.whisper.search import NEVER, Beam, Sampling, log_sum

if TYPE_CHECKING:
    from zoo.whisper.tokenizer import Tokenizer

WINDOW_S = 30.0
Rule = Callable[[np.ndarray, list[list[int]]], None]  # changes logits (rows, n_vocab) in place

MOST = 128  # candidates, windows: more than make sense, and than fit into memory
_RANGES = {"temperature": (0, 1e6), "beam_size": (1, MOST), "best_of": (1, MOST),
           "patience": (1e-6, 1e3), "length_penalty": (0, 1), "sample_len": (1, 1e6),
           "max_initial_timestamp": (0, 1e6)}  # fmt: skip


@dataclass(frozen=True)
class DecodingOptions:
    """How the text of a window is found; UsageError for options that contradict each other.

    `best_of` candidates are drawn above temperature 0, `beam_size` are searched at 0. `sample_len`
    is the most tokens, half the context if None; `prompt` text or ids said before the window,
    `prefix` those it begins with; suppress_tokens "-1" means the symbols that aren't spoken.
    """

    task: str = "transcribe"
    language: str | None = None
    temperature: float = 0.0
    sample_len: int | None = None
    best_of: int | None = None
    beam_size: int | None = None
    patience: float | None = None
    length_penalty: float | None = None
    prompt: str | Sequence[int] | None = None
    prefix: str | Sequence[int] | None = None
    suppress_tokens: str | Sequence[int] | None = "-1"
    suppress_blank: bool = True
    without_timestamps: bool = False
    max_initial_timestamp: float | None = 1.0

    def __post_init__(self) -> None:
        check(self, _RANGES)
        wrong = (
            (self.task not in ("transcribe", "translate"), "task is transcribe or translate"),
            (self.beam_size and self.best_of, "beam_size and best_of exclude each other"),
            (self.beam_size and self.temperature, "beam_size is for temperature 0"),
            (self.best_of and not self.temperature, "best_of is for a temperature above 0"),
            (self.patience and not self.beam_size, "patience needs beam_size"),
        )
        for is_wrong, rule in wrong:
            if is_wrong:
                raise UsageError(rule)


OPTIONS = names_of(DecodingOptions)


@dataclass(frozen=True)
class DecodingResult:
    """The text of one window; avg_logprob is per token, the end of text included."""

    language: str
    tokens: list[int]
    text: str
    avg_logprob: float
    no_speech_prob: float
    temperature: float
    compression_ratio: float


class _Text:
    """The text of one window so far."""

    def __init__(self, search: Beam | Sampling, most: int, silence: float) -> None:
        self.search, self.left, self.silence = search, most, silence
        self.source: Sequence[int] = [0] * len(search.rows)  # at first the row that was given the prompt

    @property
    def done(self) -> bool:
        return self.search.done or self.left == 0

    def advance(self, logits: np.ndarray, rules: Sequence[Rule], eot: int) -> None:
        """One more token in each row, of logits (rows, n_vocab), which are changed."""
        for rule in rules:
            rule(logits, self.search.rows)
        logits[logits.max(-1) == NEVER, eot] = 0  # nothing may come: the text ends
        self.source = [self.source[row] for row in self.search.advance(logits)]
        self.left -= 1


class Decoder:
    """Texts of a context's windows, found side by side; each begins when its window is heard."""

    def __init__(
        self,
        context: Context,
        tokenizer: Tokenizer,
        options: DecodingOptions,
        language: str,
        random: np.random.Generator,
    ) -> None:
        config = context.network.config
        self.tokenizer, self.options, self.random = tokenizer, options, random
        self.language, self.limit = language, config.n_text_ctx
        self.start = initial_tokens(tokenizer, options, language, self.limit)
        self.rules = _rules(tokenizer, options, config.n_audio_ctx)
        self.group = int(options.beam_size or options.best_of or 1)
        self.rows = context.rows(self.group)
        self.texts: dict[int, _Text] = {}

    def begin(self, window: int) -> None:
        """Begin the text of a window that the context has listened to."""
        tokenizer, options, group = self.tokenizer, self.options, self.group
        places = self.start.index(tokenizer.sot), len(self.start) - 1
        at_sot, logits = self.rows.prompt(window, self.start, places)
        if not np.isfinite(at_sot).all():
            raise UserError("the model computes infinities or NaN: its weights are damaged")
        if options.beam_size:
            search = Beam(group, tokenizer.eot, options.patience or 1.0)
        else:
            search = Sampling(group, options.temperature, tokenizer.eot, self.random)
        most = min(int(options.sample_len or self.limit // 2), self.limit + 1 - len(self.start))
        text = _Text(search, most, float(_softmax(at_sot)[tokenizer.no_speech]))
        text.advance(np.repeat(logits[None], group, axis=0), self.rules, tokenizer.eot)
        self.texts[window] = text

    def step(self) -> dict[int, DecodingResult]:
        """The windows whose texts have ended, after one more token for each unless some have."""
        if self.texts and not any(text.done for text in self.texts.values()):
            self.rows.reorder({window: text.source for window, text in self.texts.items()})
            for text in self.texts.values():
                text.source = range(self.group)
            last = {w: [row[-1] for row in text.search.rows] for w, text in self.texts.items()}
            for window, logits in self.rows.step(last).items():
                self.texts[window].advance(logits, self.rules, self.tokenizer.eot)
        ended = [window for window, text in self.texts.items() if text.done]
        return {window: self._result(self.texts.pop(window)) for window in ended}

    def _result(self, text: _Text) -> DecodingResult:
        """The best of a window's candidates, each its tokens and the log of its probability."""

        def score(candidate: tuple[list[int], float]) -> float:
            length, total = len(candidate[0]), candidate[1]
            if self.options.length_penalty is None:
                return total / max(length, 1)
            # Wu et al. 2016, section 7
            return total / ((5 + length) / 6) ** self.options.length_penalty

        tokens, total = max(text.search.finished(), key=score)
        said = self.tokenizer.decode(tokens).strip()
        return DecodingResult(
            language=self.language,
            tokens=tokens,
            text=said,
            avg_logprob=float(total) / (len(tokens) + 1),
            no_speech_prob=text.silence,
            temperature=float(self.options.temperature),
            compression_ratio=compression_ratio(said),
        )


def decode(
    context: Context,
    tokenizer: Tokenizer,
    options: DecodingOptions,
    language: str,
    random: np.random.Generator,
) -> DecodingResult:
    """The text of the first window that the context has listened to."""
    decoder = Decoder(context, tokenizer, options, language, random)
    decoder.begin(0)
    while True:
        if ended := decoder.step():
            return ended[0]


def detect_language(context: Context, tokenizer: Tokenizer) -> dict[str, float]:
    """The probability of each language, by code, of the first window that was listened to."""
    logits = context.rows(1).prompt(0, [tokenizer.sot], [0])[0]
    chances = _softmax(logits[list(tokenizer.language_ids)])
    return dict(zip(tokenizer.languages, map(float, chances)))


def initial_tokens(
    tokenizer: Tokenizer, options: DecodingOptions, language: str, n_text_ctx: int
) -> list[int]:
    """What the decoder is given to begin with: earlier text, the task, the text's first words."""
    half = n_text_ctx // 2
    prompt, prefix = (_ids(tokenizer, options, name) for name in ("prompt", "prefix"))
    begin = [*tokenizer.sequence(language, options.task, not options.without_timestamps)]
    prefix = prefix[-(half - int(options.sample_len or half)) :]
    begin += prefix[len(begin) - half :]  # so that a prompt fits, too
    return [tokenizer.sot_prev, *prompt[-(half - 1) :], *begin] if prompt else begin


def compression_ratio(text: str) -> float:
    """How many times smaller zlib makes a text; text that repeats itself has a high ratio."""
    raw = text.encode()
    return len(raw) / len(zlib.compress(raw))


def _ids(tokenizer: Tokenizer, options: DecodingOptions, name: str) -> list[int]:
    """The tokens of an option that is text, ids, or None."""
    given = getattr(options, name)
    if isinstance(given, str):
        return tokenizer.encode(" " + given.strip())
    ids = [] if given is None else list(given)
    if not all(isinstance(i, Integral) and 0 <= i < tokenizer.n_vocab for i in ids):
        raise UsageError(f"{name} must be text, or ids from 0 to {tokenizer.n_vocab - 1}")
    return ids


# Rules: which tokens may come next.


def _rules(tokenizer: Tokenizer, options: DecodingOptions, n_audio_ctx: int) -> list[Rule]:
    rules: list[Rule] = []
    if options.suppress_blank:
        blank = [*tokenizer.blank, tokenizer.eot]

        def no_blank_start(logits: np.ndarray, rows: list[list[int]]) -> None:
            if not rows[0]:
                logits[:, blank] = NEVER

        rules.append(no_blank_start)
    never = _suppressed(tokenizer, options.suppress_tokens)
    if never:

        def suppress(logits: np.ndarray, rows: list[list[int]]) -> None:
            logits[:, never] = NEVER

        rules.append(suppress)
    if not options.without_timestamps:
        latest = options.max_initial_timestamp
        latest = round(latest / (WINDOW_S / n_audio_ctx)) if latest else None
        rules.append(lambda logits, rows: _timestamps(logits, rows, tokenizer, latest))
    return rules


def _suppressed(tokenizer: Tokenizer, given: str | Sequence[int] | None) -> list[int]:
    if given is None or len(given) == 0:
        return []
    try:
        ids = [int(i) for i in (given.split(",") if isinstance(given, str) else given) if i != ""]
    except (TypeError, ValueError):
        raise UsageError(f"suppress_tokens are numbers with commas, got {given!r}") from None
    if not all(-1 <= i < tokenizer.n_vocab for i in ids):
        raise UsageError(f"suppress_tokens are from -1 to {tokenizer.n_vocab - 1}, got {given!r}")
    spoken = set(ids) - {-1} | (set(tokenizer.non_speech_tokens) if -1 in ids else set())
    t = tokenizer
    return sorted(spoken | {t.transcribe, t.translate, t.sot, t.sot_prev, t.sot_lm, t.no_speech})


def _timestamps(
    logits: np.ndarray, rows: list[list[int]], tokenizer: Tokenizer, latest: int | None
) -> None:
    """Timestamps come in pairs, never go back, begin the text, and win when likelier than text."""
    begin = tokenizer.timestamp_begin
    logits[:, tokenizer.no_timestamps] = NEVER
    for row, said in zip(logits, rows):
        last = bool(said) and said[-1] >= begin
        pair = len(said) < 2 or said[-2] >= begin
        if last and pair:
            row[begin:] = NEVER  # after two of them comes text
        elif last:
            row[: tokenizer.eot] = NEVER  # a stretch has ended: another begins, or the text ends
        stamps = [token for token in said if token >= begin]
        if stamps:  # only the pair of an end may repeat it; a stretch is never empty
            row[begin : stamps[-1] + (0 if last and not pair else 1)] = NEVER
        if not said:
            row[:begin] = NEVER
            if latest is not None:
                row[begin + latest + 1 :] = NEVER
        if log_sum(row[begin:]) > row[:begin].max():
            row[:begin] = NEVER


def _softmax(logits: np.ndarray) -> np.ndarray:
    shifted = np.exp(logits - logits.max(-1, keepdims=True))
    return shifted / shifted.sum(-1, keepdims=True)
