"""Tokenizers of Hugging Face folders."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from weights import hf_vocabulary
from zoo.llama.tokenizer import Tokenizer
from zoo.llama.vocabulary import byte_level, sentencepiece, special_tokens


def from_folder(folder: Path) -> Tokenizer:
    """The tokenizer of a folder; WeightError when it holds none that can be read."""
    return from_files(hf_vocabulary.files_of(folder), folder)


def from_files(files: Mapping[str, bytes], where: Path) -> Tokenizer:
    """The tokenizer in a folder's files, of which `where` names the folder in errors."""
    v = hf_vocabulary.read(files, where)
    special = special_tokens(v.control, v.added, v.stop, v.bos, v.eos, v.add_bos)
    if v.scores is None:
        made = byte_level(v.tokens, v.merges, special, v.pattern, v.whole_words, where)
    else:
        made = sentencepiece(
            v.tokens, v.scores, v.types, v.unknown, v.prefix, where, v.unless_spaced
        )
    return Tokenizer(*made, special, v.prefix, v.template, v.prefix_once)
