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
from zoo.whisper.context import Context
from zoo.whisper.options import DecodingOptions
from zoo.whisper.search import NEVER, Beam, Sampling, log_sum

if TYPE_CHECKING:
    from zoo.whisper.tokenizer import Tokenizer

WINDOW_S = 30.0
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


def decode(
    context: Context, tokenizer: Tokenizer, options: DecodingOptions, random: np.random.Generator
) -> list[DecodingResult]:
    """The text of each window that the context has listened to; options.language is a code."""
    limit = context.network.config.n_text_ctx
    begin = initial_tokens(tokenizer, options, limit)
    restrict = _rules(tokenizer, options, context.network.config.n_audio_ctx)
    group = int(options.beam_size or options.best_of or 1)
    rows = context.rows(group)
    if options.beam_size:
        search = Beam(context.windows, group, tokenizer.eot, options.patience or 1.0)
    else:
        search = Sampling(rows.count, options.temperature, tokenizer.eot, random)
    places = begin.index(tokenizer.sot), len(begin) - 1
    at_sot, logits = rows.prompt([begin] * context.windows, places).swapaxes(0, 1)
    if not np.isfinite(at_sot).all():
        raise UserError("the model computes infinities or NaN: its weights are damaged")
    silent = _softmax(at_sot)[:, tokenizer.no_speech]
    logits = np.repeat(logits, group, axis=0)
    source = [row // group for row in range(rows.count)]  # the rows that were given the prompt
    end = min(len(begin) + int(options.sample_len or limit // 2), limit + 1)
    for place in range(len(begin), end):  # of the token that is looked for
        if search.rows[0]:
            rows.reorder(source, place - 1)
            logits = np.array(rows.step([row[-1] for row in search.rows], place - 1))
            source = range(rows.count)
        restrict(logits, search.rows)
        source = [source[row] for row in search.advance(logits)]
        if search.done:
            break
    return [
        _result(tokenizer, options, candidates, float(silence))
        for candidates, silence in zip(search.finished(group), silent)
    ]


def detect_language(context: Context, tokenizer: Tokenizer) -> dict[str, float]:
    """The probability of each language, by code, for the one window that was listened to."""
    logits = context.rows(1).prompt([[tokenizer.sot]], [0])[0]
    chances = _softmax(logits[:, list(tokenizer.language_ids)])[0]
    return dict(zip(tokenizer.languages, chances.tolist()))


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


def _result(tokenizer, options, candidates, silence) -> DecodingResult:
    """The best of a window's candidates, each its tokens and the log of its probability."""

    def score(candidate: tuple[list[int], float]) -> float:
        length, total = len(candidate[0]), candidate[1]
        if options.length_penalty is None:
            return total / max(length, 1)
        return total / ((5 + length) / 6) ** options.length_penalty  # Wu et al. 2016, section 7

    tokens, total = max(candidates, key=score)
    text = tokenizer.decode(tokens).strip()
    return DecodingResult(
        language=options.language,
        tokens=tokens,
        text=text,
        avg_logprob=float(total) / (len(tokens) + 1),
        no_speech_prob=silence,
        temperature=float(options.temperature),
        compression_ratio=compression_ratio(text),
    )


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


def _softmax(logits: np.ndarray) -> np.ndarray:
    shifted = np.exp(logits - logits.max(-1, keepdims=True))
    return shifted / shifted.sum(-1, keepdims=True)
