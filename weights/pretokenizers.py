"""How byte-level vocabularies cut text into words: regular expressions, and GGUF's names for them.

Each pattern matches one word after the other, as the `regex` package reads it. Source of the
names: llama.cpp, `llama-vocab.cpp`.
"""

from __future__ import annotations

_CONTRACTION = r"'(?:[sdmt]|ll|ve|re)"
_CONTRACTION_ANY_CASE = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


def _words(digits: str) -> str:
    return (
        rf"{_CONTRACTION_ANY_CASE}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}"
        rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|{_SPACES}"
    )


def _cased_words(digits: str, suffix: str) -> str:
    first = r"[^\r\n\p{L}\p{N}]?"
    return (
        rf"{first}{_UPPER}*{_LOWER}+{suffix}|{first}{_UPPER}+{_LOWER}*{suffix}|{digits}"
        rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|\s*[\r\n]+|{_SPACES}"
    )


GPT2 = rf"{_CONTRACTION}| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|{_SPACES}"
# Digits are cut out first and GPT2 runs on what lies between them, so spaces before a digit end
# a piece just as spaces at the end of the text do.
SINGLE_DIGITS = rf"{_CONTRACTION}| ?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+|\s+(?![^\s\p{{N}}])|\s+"
LLAMA3 = _words(r"\p{N}{1,3}")
QWEN2 = _words(r"\p{N}")
TEKKEN = _cased_words(r"\p{N}", "")
GPT4O = _cased_words(r"\p{N}{1,3}", rf"{_CONTRACTION_ANY_CASE}?")

# The names that GGUF files give their pre-tokenizer (`tokenizer.ggml.pre`).
PRE_TOKENIZERS = {
    "default": GPT2,
    "gpt-2": GPT2,
    "phi-2": GPT2,
    "mpt": GPT2,
    "olmo": GPT2,
    "jais": GPT2,
    "exaone4": GPT2,
    "granite-docling": GPT2,
    "smollm": SINGLE_DIGITS,
    "starcoder": SINGLE_DIGITS,
    "refact": SINGLE_DIGITS,
    "command-r": SINGLE_DIGITS,
    "codeshell": SINGLE_DIGITS,
    "exaone": SINGLE_DIGITS,
    "minerva-7b": SINGLE_DIGITS,
    "llama3": LLAMA3,
    "llama-v3": LLAMA3,
    "llama-bpe": LLAMA3,
    "falcon3": LLAMA3,
    "falcon-h1": LLAMA3,
    "pixtral": LLAMA3,
    "lfm2": LLAMA3,
    "dbrx": LLAMA3,
    "smaug-bpe": LLAMA3,
    "chatglm-bpe": LLAMA3,
    "glm4": LLAMA3,
    "qwen2": QWEN2,
    "deepseek-r1-qwen": QWEN2,
    "stablelm2": QWEN2,
    "hunyuan": QWEN2,
    "megrez": QWEN2,
    "tekken": TEKKEN,
    "gpt-4o": GPT4O,
    "llama4": GPT4O,
}
