"""What GGUF files and Hugging Face folders have in common: vocabularies made into encoders."""

from __future__ import annotations

from pathlib import Path

from weights import WeightError
from weights.hf_vocabulary import UNKNOWN
from zoo import bpe
from zoo.llama import spm
from zoo.llama.tokenizer import SpecialTokens

# Names by which models end a turn, a message or a text.
STOP_NAMES = (
    "<|im_end|>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end|>",
    "<|endofturn|>",
    "<end_of_turn>",
    "<｜end▁of▁sentence｜>",
    "</s>",
)


def byte_level(
    tokens: list[str],
    merges: list[str],
    special: SpecialTokens,
    pattern: str,
    whole_words: bool,
    file: Path | str | None,
) -> tuple[bpe.BytePairEncoder, list[bytes]]:
    """The encoder of a byte-level vocabulary and the bytes of each token."""
    token_bytes = bpe.to_bytes(tokens)
    for text, token in {**special.control, **special.added}.items():
        token_bytes[token] = text.encode("utf-8", "replace")
    try:
        encoder = bpe.BytePairEncoder(tokens, token_bytes, merges, pattern, whole_words)
    except KeyError as error:
        problem = f"a merge gives {error}, which is no token"
        raise WeightError(problem, file=file) from None
    return encoder, token_bytes


def sentencepiece(
    tokens: list[str],
    scores: list[float],
    types: list[int],
    unknown_id: int | None,
    prefix: bool,
    file: Path | str | None,
    unless_spaced: bool = False,
) -> tuple[spm.SentencePieceEncoder, list[bytes]]:
    """The encoder of a SentencePiece vocabulary and the bytes of each piece."""
    unknown = next((i for i, kind in enumerate(types) if kind == UNKNOWN), unknown_id)
    if unknown is None:
        raise WeightError("the vocabulary has no unknown token", file=file)
    try:
        encoder = spm.SentencePieceEncoder(tokens, scores, types, unknown, prefix, unless_spaced)
        return encoder, spm.piece_bytes(tokens, types)
    except (RuntimeError, ValueError) as error:
        raise WeightError(f"broken SentencePiece vocabulary: {error}", file=file) from None


def special_tokens(
    control: dict[str, int],
    added: dict[str, int],
    stop: set[int],
    bos: int | None,
    eos: int | None,
    add_bos: bool,
) -> SpecialTokens:
    """Special tokens with the known stop names among them put where they belong."""
    for name in STOP_NAMES:
        if name in added:
            control[name] = added.pop(name)
        if name in control:
            stop.add(control[name])
    return SpecialTokens(control, added, bos, eos, frozenset(stop), add_bos and bos is not None)
