"""SentencePiece vocabularies out of any file: pieces and scores in, the sentencepiece library runs.

Source: Kudo and Richardson, "SentencePiece" (2018); `sentencepiece_model.proto` for the fields.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

from weights.hf_vocabulary import BYTE, CONTROL, UNKNOWN, UNUSED, USER_DEFINED

SPACE = "\u2581"  # what a space is written as inside a piece

_NEVER = "\ufdd0"  # one of Unicode's noncharacters, which no text has
_BPE = 2  # TrainerSpec.ModelType
_VARINT, _BYTES, _FLOAT = 0, 2, 5  # wire types


class SentencePieceEncoder:
    """Text -> ids; the merge of highest score first, unknown characters as bytes.

    `space_prefix` puts a space before text that begins, or that follows a special token;
    not before another space if `unless_spaced`.
    """

    def __init__(
        self,
        pieces: Sequence[str],
        scores: Sequence[float],
        types: Sequence[int],
        unknown_id: int,
        space_prefix: bool = True,
        unless_spaced: bool = False,
    ) -> None:
        import sentencepiece

        self.space_prefix, self.unless_spaced = space_prefix, unless_spaced
        self._processor = sentencepiece.SentencePieceProcessor()
        self._processor.LoadFromSerializedProto(model_proto(pieces, scores, types, unknown_id))

    def encode(self, text: str, after_special: bool = True) -> list[int]:
        """Token ids of `text`, which begins or follows a special token if `after_special`."""
        if not text:
            return []
        spaced = self.unless_spaced and text[0] in (" ", SPACE)
        prefix = " " if self.space_prefix and after_special and not spaced else ""
        return self._processor.EncodeAsIds(prefix + text)


def piece_bytes(pieces: Sequence[str], types: Sequence[int]) -> list[bytes]:
    """The bytes that each piece stands for; <0x0A> of type BYTE is one byte."""
    return [
        bytes([int(piece[3:5], 16)])
        if kind == BYTE
        else piece.replace(SPACE, " ").encode("utf-8", "replace")
        for piece, kind in zip(pieces, types)
    ]


def model_proto(
    pieces: Sequence[str],
    scores: Sequence[float],
    types: Sequence[int],
    unknown_id: int,
    space_prefix: bool = False,
) -> bytes:
    """The pieces as a serialised ModelProto: BPE, no normalisation."""
    body, seen = [], set()
    for i, (piece, score, kind) in enumerate(zip(pieces, scores, types)):
        if not piece or piece in seen or "\0" in piece:  # the library refuses these
            piece, kind = f"{_NEVER}{i}", UNUSED
        seen.add(piece)
        if i == unknown_id:
            kind = UNKNOWN
        elif kind in (UNKNOWN, USER_DEFINED):  # cut out of the text before it comes here
            kind = CONTROL
        raw = piece.encode("utf-8", "replace")
        inner = _field(1, raw) + _float(2, score) + _int(3, kind)
        body.append(_field(1, inner))
    has_bytes = sum(kind == BYTE for kind in types) == 256
    trainer = _int(3, _BPE) + _int(4, len(pieces)) + _int(35, has_bytes) + _int(40, unknown_id)
    normalizer = _field(1, b"identity") + _int(3, space_prefix) + _int(4, 0) + _int(5, 1)
    return b"".join(body) + _field(2, trainer) + _field(3, normalizer)


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])


def _field(number: int, raw: bytes) -> bytes:
    return _varint(number << 3 | _BYTES) + _varint(len(raw)) + raw


def _int(number: int, value: int) -> bytes:
    return _varint(number << 3 | _VARINT) + _varint(value)


def _float(number: int, value: float) -> bytes:
    return _varint(number << 3 | _FLOAT) + struct.pack("<f", value)
