"""Vocabularies for the tests: excerpts of published ones, and a small one trained here."""

from __future__ import annotations

import random
from collections import Counter

from zoo import bpe

ALPHABET = {byte: chr(point) for point, byte in bpe.byte_alphabet().items()}

# Llama 2: every piece that is part of a tested string, as (piece, id, score).
LLAMA2 = (
    ("▁▁", 259, -1e9), ("▁▁▁▁", 268, -1e9), ("or", 272, -13), ("▁w", 281, -22), ("el", 295, -36),
    ("▁H", 379, -120), ("lo", 417, -158), ("▁▁▁▁▁", 418, -1e9), ("ld", 430, -171),
    ("ell", 514, -255), ("ll", 645, -386), ("wo", 827, -568), ("▁He", 940, -681),
    ("orld", 1613, -1354), ("▁▁▁", 1678, -1e9), ("rl", 2096, -1837), ("ello", 3156, -2897),
    ("▁world", 3186, -2927), ("He", 3868, -3609), ("▁Hel", 6162, -5903), ("▁wor", 6365, -6106),
    ("Hel", 7658, -7399), ("▁wo", 8879, -8620), ("Hello", 10994, -10735),
    ("world", 11526, -11267), ("wor", 13762, -13503), ("▁Hello", 15043, -14784),
    ("▁Hell", 19339, -19080), ("▁", 29871, -1e9), ("e", 29872, -29613), ("o", 29877, -29618),
    ("r", 29878, -29619), ("l", 29880, -29621), ("d", 29881, -29622), ("w", 29893, -29634),
    ("H", 29950, -29691),
)  # fmt: skip

# Llama 3: the same for its byte-level BPE, and the merges that lead to these tokens, in order.
LLAMA3_TOKENS = {
    ".": 13, "3": 18, "<": 27, ">": 29, "H": 39, "_": 62, "b": 65, "c": 66, "d": 67, "e": 68,
    "f": 69, "g": 70, "h": 71, "i": 72, "l": 75, "n": 77, "o": 78, "p": 79, "r": 81, "s": 82,
    "t": 83, "w": 86, "x": 87, "|": 91, "¦": 99, "ð": 172, "Ċ": 198, "Ġ": 220, "Ļ": 247, "Ł": 253,
    "in": 258, "Ġt": 259, "or": 269, "Ġth": 270, "ĊĊ": 271, "is": 285, "Ġw": 289, "el": 301,
    "th": 339, "Ġis": 374, "lo": 385, "Ġthis": 420, "ld": 509, ".c": 522, "this": 576, "Ġi": 602,
    "pp": 604, "ell": 616, "ll": 657, "wo": 1146, "orld": 1410, "ĊĊĊ": 1432, "He": 1548,
    "33": 1644, "Ġworld": 1917, "rl": 2438, "Ġwor": 4191, "cp": 4777, "ello": 4896, "hi": 6151,
    ".cpp": 7356, "333": 8765, "ðŁ": 9468, "Hello": 9906, "cpp": 11055, "ĠðŁ": 11410,
    "world": 14957, "Ġwo": 24670, "his": 26301, "Hel": 33813, "wor": 50810, "Ġthi": 62428,
    ".cp": 67360, "Hell": 81394, "Ġð": 109697, "<|begin_of_text|>": 128000,
    "<|end_of_text|>": 128001, "<|start_header_id|>": 128006, "<|end_header_id|>": 128007,
    "<|eom_id|>": 128008, "<|eot_id|>": 128009,
}  # fmt: skip
LLAMA3_MERGES = (
    "i n|Ġ t|o r|Ġ th|Ġt h|Ċ Ċ|i s|Ġ w|e l|t h|Ġ is|Ġi s|l o|Ġ this|Ġt his|Ġth is|Ġthi s|l d|. c"
    "|t his|th is|Ġ i|p p|e ll|el l|l l|w o|or ld|Ċ ĊĊ|ĊĊ Ċ|H e|3 3|Ġ world|Ġw orld|Ġwor ld|r l"
    "|Ġ wor|Ġw or|Ġwo r|c p|el lo|ell o|h i|. cpp|.c pp|.cp p|3 33|33 3|ð Ł|H ello|Hel lo|Hell o"
    "|c pp|cp p|Ġ ðŁ|Ġð Ł|w orld|wor ld|Ġ wo|Ġw o|h is|hi s|H el|He l|w or|wo r|Ġt hi|Ġth i|. cp"
    "|.c p|H ell|He ll|Hel l|Ġ ð"
).split("|")

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)

CORPUS = (
    "the quick brown fox jumps over the lazy dog. It's what you'd expect, isn't it? "
    "Numbers like 12, 345 and 67890; code() { return x == y; }  über naïve café résumé "
    "日本語のテキスト 中文文本 мир и война الكتاب हिन्दी 한국어 🦙🦙 🙂 \n\n\t  spaces   here  \r\n"
)


def llama2() -> dict:
    """GGUF metadata of the Llama 2 excerpt: ids as in the whole vocabulary."""
    tokens = [f"<unused {i}>" for i in range(32000)]
    scores, types = [0.0] * 32000, [UNUSED] * 32000
    rows = [("<unk>", 0, 0.0, UNKNOWN), ("<s>", 1, 0.0, CONTROL), ("</s>", 2, 0.0, CONTROL)]
    rows += [(f"<0x{byte:02X}>", 3 + byte, 0.0, BYTE) for byte in range(256)]
    rows += [(*row, NORMAL) for row in LLAMA2]
    for text, i, score, kind in rows:
        tokens[i], scores[i], types[i] = text, float(score), kind
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }


def llama3() -> dict:
    """GGUF metadata of the Llama 3 excerpt: ids as in the whole vocabulary."""
    tokens = [f"unused {i}" for i in range(128256)]
    types = [UNUSED] * len(tokens)
    for text, i in LLAMA3_TOKENS.items():
        tokens[i], types[i] = text, CONTROL if i >= 128000 else NORMAL
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "llama-bpe",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": LLAMA3_MERGES,
        "tokenizer.ggml.bos_token_id": 128000,
        "tokenizer.ggml.eos_token_id": 128001,
    }


def tiny(
    pre: str = "smollm",
    control: tuple[str, ...] = ("<|im_start|>", "<|im_end|>"),
    added: tuple[str, ...] = (),
    merges: int = 200,
    missing: bytes = b"",
    seed: int = 0,
) -> dict:
    """GGUF metadata of a small BPE trained on CORPUS, its ids shuffled.

    Ids in another order than the merges are what a loader must not stumble over. The bytes in
    `missing` have no token; the last two control tokens are the beginning and the end.
    """
    pairs = train(CORPUS, merges)
    texts = [ALPHABET[byte] for byte in range(256) if byte not in missing]
    texts += dict.fromkeys(a + b for a, b in pairs)
    random.Random(seed).shuffle(texts)
    tokens = [*control, *added, *texts]
    kinds = [CONTROL] * len(control) + [USER_DEFINED] * len(added) + [NORMAL] * len(texts)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": [f"{a} {b}" for a, b in pairs],
        "tokenizer.ggml.bos_token_id": tokens.index(control[-2]),
        "tokenizer.ggml.eos_token_id": tokens.index(control[-1]),
    }


def train(text: str, count: int) -> list[tuple[str, str]]:
    """The first `count` merges of BPE on the words of `text`, each word with its space."""
    words = [[ALPHABET[byte] for byte in (" " + word).encode()] for word in text.split(" ")]
    merges = []
    while len(merges) < count:
        pairs = Counter(pair for word in words for pair in zip(word, word[1:]))
        if not pairs:
            break
        best = min(pairs, key=lambda pair: (-pairs[pair], pair))
        merges.append(best)
        words = [merge(word, best) for word in words]
    return merges


def merge(word: list[str], pair: tuple[str, str]) -> list[str]:
    """`word` with every occurrence of `pair` joined, from the left."""
    out: list[str] = []
    for part in word:
        if out and (out[-1], part) == pair:
            out[-1] += part
        else:
            out.append(part)
    return out
