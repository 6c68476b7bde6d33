"""From the logits of the decoder to the text of a window: rules, sampling, beam search.

Source: Radford et al. 2022, section 4.5; option names, defaults and results are openai/whisper's
(decoding.py). Rows are candidates: `group` of them for each window, one after another.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Integral

import numpy as np

from zoo.errors import UsageError, UserError
from zoo.whisper.audio import WINDOW_S
from zoo.whisper.context import Context
from zoo.whisper.options import DecodingOptions
from zoo.whisper.search import NEVER, Beam, Sampling, log_sum
from zoo.whisper.tokenizer import Tokenizer

Rule = Callable[[np.ndarray, list[list[int]]], None]  # changes logits (rows, n_vocab) in place


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


@dataclass
class _Text:
    """The text of one window so far, in rows that go on from those of `source`."""

    search: Beam | Sampling
    left: int  # how many tokens may follow
    silence: float
    source: Sequence[int] = ()

    @property
    def done(self) -> bool:
        return self.search.done or self.left == 0

    def advance(self, logits: np.ndarray, restrict: Rule) -> None:
        """One more token in each row, of logits (rows, n_vocab), which are changed."""
        restrict(logits, self.search.rows)
        self.source = self.search.advance(logits)
        self.left -= 1


@dataclass(eq=False)
class Decoder:
    """Texts of a context's windows, found side by side; each begins when its window is heard.

    `options.language` is a code.
    """

    context: Context
    tokenizer: Tokenizer
    options: DecodingOptions
    random: np.random.Generator

    def __post_init__(self) -> None:
        config, options = self.context.network.config, self.options
        self.limit = config.n_text_ctx
        self.start = initial_tokens(self.tokenizer, options, self.limit)
        self.restrict = _rules(self.tokenizer, options, config.n_audio_ctx)
        self.group = int(options.beam_size or options.best_of or 1)
        self.rows = self.context.rows(self.group)
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
        silence = float(np.exp(at_sot[tokenizer.no_speech] - log_sum(at_sot)))
        text = self.texts[window] = _Text(search, most, silence)
        text.advance(np.repeat(logits[None], group, axis=0), self.restrict)
        text.source = [0] * group  # the row that was given the prompt

    def step(self) -> dict[int, DecodingResult]:
        """The windows whose texts have ended, after one more token for each unless some have."""
        if self.texts and not any(text.done for text in self.texts.values()):
            self.rows.reorder({window: text.source for window, text in self.texts.items()})
            last = {w: [row[-1] for row in text.search.rows] for w, text in self.texts.items()}
            for window, logits in self.rows.step(last).items():
                self.texts[window].advance(logits, self.restrict)
        ended = [window for window, text in self.texts.items() if text.done]
        return {window: self._result(self.texts.pop(window)) for window in ended}

    def _result(self, text: _Text) -> DecodingResult:
        """The best of a window's candidates."""
        penalty = self.options.length_penalty

        def score(candidate: tuple[list[int], float]) -> float:
            length, total = len(candidate[0]), candidate[1]
            if penalty is None:
                return total / max(length, 1)
            return total / ((5 + length) / 6) ** penalty  # Wu et al. 2016, section 7

        tokens, total = max(text.search.finished(), key=score)
        said = self.tokenizer.decode(tokens).strip()
        return DecodingResult(
            language=self.options.language,
            tokens=tokens,
            text=said,
            avg_logprob=float(total) / (len(tokens) + 1),
            no_speech_prob=text.silence,
            temperature=float(self.options.temperature),
            compression_ratio=compression_ratio(said),
        )


def decode(
    context: Context, tokenizer: Tokenizer, options: DecodingOptions, random: np.random.Generator
) -> DecodingResult:
    """The text of the first window that the context has listened to; options.language is a code."""
    decoder = Decoder(context, tokenizer, options, random)
    decoder.begin(0)
    while True:
        if ended := decoder.step():
            return ended[0]


def detect_language(context: Context, tokenizer: Tokenizer) -> dict[str, float]:
    """The probability of each language, by code, of the first window that was listened to."""
    logits = context.rows(1).prompt(0, [tokenizer.sot], [0])[0, list(tokenizer.language_ids)]
    return dict(zip(tokenizer.languages, np.exp(logits - log_sum(logits)).tolist()))


def initial_tokens(tokenizer: Tokenizer, options: DecodingOptions, n_text_ctx: int) -> list[int]:
    """What the decoder is given to begin with: earlier text, the task, the text's first words."""
    half = n_text_ctx // 2
    prompt, prefix = (_ids(tokenizer, options, name) for name in ("prompt", "prefix"))
    timestamps = not options.without_timestamps
    begin = [*tokenizer.sequence(options.language, options.task, timestamps)]
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


def _rules(tokenizer: Tokenizer, options: DecodingOptions, n_audio_ctx: int) -> Rule:
    never = _suppressed(tokenizer, options.suppress_tokens)
    blank = [*tokenizer.encode(" "), tokenizer.eot]
    latest = options.max_initial_timestamp
    latest = round(latest / (WINDOW_S / n_audio_ctx)) if latest else None

    def restrict(logits: np.ndarray, rows: list[list[int]]) -> None:
        logits[:, never] = NEVER
        if options.suppress_blank and not rows[0]:
            logits[:, blank] = NEVER
        if not options.without_timestamps:
            _timestamps(logits, rows, tokenizer, latest)
        logits[logits.max(-1) == NEVER, tokenizer.eot] = 0  # nothing may come: the text ends

    return restrict


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
