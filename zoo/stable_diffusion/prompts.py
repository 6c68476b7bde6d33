"""Prompts with weights, as A1111's webui writes them, cut to what a text encoder takes.

    (word)  1.1 times the attention     (word:1.3)  1.3 times       BREAK  a new chunk of 75 tokens
    [word]  1 / 1.1 times               \\( \\) \\[ \\]  the character itself

Brackets nest, and their factors multiply. One that has no other end counts to the end of the
prompt; one that has no beginning is text.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from zoo.stable_diffusion.tokenizer import ROOM, Tokenizer

UP, DOWN = 1.1, 1 / 1.1
BREAK = "BREAK"
_MOST = 100.0  # times the attention; far beyond what still makes a picture
_DEPTH = 100  # brackets in brackets; more are text
_BACK = 20  # tokens that a chunk may leave free so that it ends with a comma
# An escape, a weight that closes a bracket, a bracket, or text up to the next of them.
_PIECES = re.compile(
    r"\\(?P<escaped>[()\[\]\\])"
    r"|:\s*(?P<weight>[+-]?(?:\d{1,6}(?:\.\d{0,9})?|\.\d{1,9}))\s*\)"
    r"|(?P<bracket>[()\[\]])|(?P<text>[^\\()\[\]:]+|[\\:])"
)
_BREAK = re.compile(r"\s*\bBREAK\b\s*")


@dataclass(frozen=True)
class Chunk:
    """77 token ids with a weight each; 1.0 for the begin, the end and the padding."""

    ids: tuple[int, ...]
    weights: tuple[float, ...]


def parse(prompt: str) -> list[tuple[str, float]]:
    """(text, weight) pieces of a prompt; a piece that is BREAK stands for itself alone."""
    pieces: list[list] = []
    opened: dict[str, list[int]] = {"(": [], "[": []}  # which piece each bracket began at

    def close(kind: str, factor: float) -> None:
        for piece in pieces[opened[kind].pop() :]:
            piece[1] *= factor

    for match in _PIECES.finditer(prompt):
        kind, bracket = match.lastgroup, match["bracket"]
        if bracket in opened and len(opened[bracket]) < _DEPTH:
            opened[bracket].append(len(pieces))
        elif bracket == ")" and opened["("]:
            close("(", UP)
        elif bracket == "]" and opened["["]:
            close("[", DOWN)
        elif kind == "weight" and opened["("]:
            close("(", float(match["weight"]))
        else:
            text = match[0] if kind == "weight" else match[kind]
            for i, part in enumerate(_BREAK.split(text) if kind == "text" else [text]):
                pieces += [[BREAK, 1.0]] if i else []
                pieces.append([part, 1.0])
    for kind, factor in (("(", UP), ("[", DOWN)):
        while opened[kind]:
            close(kind, factor)
    return _joined(pieces)


def _joined(pieces: Sequence[Sequence]) -> list[tuple[str, float]]:
    """The pieces that have text, neighbours of one weight made one."""
    out: list[tuple[str, float]] = []
    for text, weight in pieces:
        weight = min(max(weight, -_MOST), _MOST)
        if text == BREAK:
            out.append((BREAK, 1.0))
        elif text and out and out[-1][0] != BREAK and out[-1][1] == weight:
            out[-1] = (out[-1][0] + text, weight)
        elif text:
            out.append((text, weight))
    return out


def chunks(tokenizer: Tokenizer, prompt: str, weighted: bool = True) -> list[Chunk]:
    """The prompt in chunks of 75 tokens, each framed to 77; at least one.

    A chunk that is full ends after its last comma, if that is among its last 20 tokens.
    `weighted` False takes brackets and BREAK for text.
    """
    comma = tuple(tokenizer.encode(","))
    done: list[list[tuple[int, float]]] = [[]]
    for text, weight in parse(prompt) if weighted else [(prompt, 1.0)]:
        if weighted and text == BREAK:
            done.append([])
            continue
        for ids in tokenizer.groups(text):
            if len(done[-1]) == ROOM and ids != comma:
                done.append(_after_comma(done[-1], comma))
            elif len(done[-1]) + len(ids) > ROOM:
                done.append([])
            done[-1] += ((id, weight) for id in ids)
    return [_framed(tokenizer, tokens) for tokens in done]


def _after_comma(full: list[tuple[int, float]], comma: tuple[int, ...]) -> list[tuple[int, float]]:
    """Take what follows the last comma off a full chunk, to begin the next one with."""
    commas = [i for i in range(ROOM - _BACK, ROOM) if (full[i][0],) == comma]
    at = commas[-1] + 1 if commas else ROOM
    rest = full[at:]
    del full[at:]
    return rest


def _framed(tokenizer: Tokenizer, tokens: Sequence[tuple[int, float]]) -> Chunk:
    ids = tokenizer.framed([id for id, _ in tokens])
    weights = [1.0, *(weight for _, weight in tokens[:ROOM])]
    return Chunk(tuple(ids), tuple(weights + [1.0] * (len(ids) - len(weights))))


def level(tokenizer: Tokenizer, *prompts: Sequence[Chunk]) -> list[list[Chunk]]:
    """The prompts' chunks, made equal in number by empty ones at the end."""
    most = max(map(len, prompts))
    empty = _framed(tokenizer, [])
    return [[*prompt, *[empty] * (most - len(prompt))] for prompt in prompts]


def emphasise(embedding: np.ndarray, weights: Sequence[float]) -> np.ndarray:
    """A chunk's embedding (77, dim) with each token's vector times its weight.

    Then the whole is scaled so that its mean is what it was, as A1111 does; unless weights have
    left next to nothing of the mean.
    """
    if all(weight == 1.0 for weight in weights):
        return embedding
    before = embedding.mean(dtype=np.float64)
    weighted = embedding * np.asarray(weights, embedding.dtype)[:, None]
    after = weighted.mean(dtype=np.float64)
    if abs(after) * _MOST <= abs(before):
        return weighted
    return (weighted * (before / after)).astype(embedding.dtype)
