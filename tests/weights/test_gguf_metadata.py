"""Vocabularies and sizes of Hugging Face folders in GGUF's terms."""

from __future__ import annotations

import json

import numpy as np
import pytest

from tests.zoo.llama import vocab
from weights import WeightError, gguf_metadata, hf_vocabulary
from weights.checkpoint import Checkpoint
from zoo.llama import gguf_tokenizer, hf_tokenizer, spm


def in_gguf(files: dict[str, bytes], tmp_path, rows: int) -> dict:
    checkpoint = Checkpoint(tmp_path, "huggingface", {}, {})
    made = gguf_metadata.vocabulary(hf_vocabulary.read(files, tmp_path), rows, checkpoint)
    return {k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in made.items()}


def test_sentencepiece_model_gives_the_same_ids(tmp_path):
    words = vocab.llama2()
    tokens, scores = words["tokenizer.ggml.tokens"], words["tokenizer.ggml.scores"]
    types = words["tokenizer.ggml.token_type"]
    proto = spm.model_proto(tokens, scores, types, 0, space_prefix=True)
    files = {"tokenizer.model": proto}
    made = in_gguf(files, tmp_path, len(tokens) + 3)
    assert len(made["tokenizer.ggml.tokens"]) == len(tokens) + 3  # as the embedding has rows
    ours, theirs = gguf_tokenizer.from_gguf(made), hf_tokenizer.from_files(files, tmp_path)
    for text in ("Hello world", " Hello", "    Hello\n    Hello", "", "é🦙"):
        assert ours.encode(text, add_bos=True) == theirs.encode(text, add_bos=True)
    assert ours.encode("Hello world", add_bos=True) == [1, 15043, 3186]
    assert (ours.bos_id, ours.eos_id, ours.add_bos) == (1, 2, True)


def test_pre_tokenizer_without_a_name_in_gguf_is_refused(tmp_path):
    steps = [
        {"type": "Split", "pattern": {"Regex": r"\w+|\W"}},
        {"type": "ByteLevel", "use_regex": False},
    ]
    tokenizer = {
        "model": {"type": "BPE", "vocab": {"a": 0}, "merges": []},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
    }
    with pytest.raises(WeightError, match=r"GGUF has no name for the pre-tokenizer \\w"):
        in_gguf({"tokenizer.json": json.dumps(tokenizer).encode()}, tmp_path, 1)
