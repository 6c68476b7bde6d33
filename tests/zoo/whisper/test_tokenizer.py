"""Whisper's tokenizer: ids, special tokens, words, and where vocabularies come from."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import weights
from weights import Checkpoint, FetchError, WeightError
from zoo.bpe import to_bytes
from zoo.errors import UsageError
from zoo.whisper.languages import LANGUAGES, code_of
from zoo.whisper.tokenizer import Tokenizer, packaged, tokenizer_of

SIZES = {51864: 99, 51865: 99, 51866: 100}  # languages by size of the vocabulary
JFK = (
    " And so my fellow Americans, ask not what your country can do for you, ask what you can do for"
    " your country."
)
JFK_IDS = [400, 370, 452, 7177, 6280, 11, 1029, 406, 437, 428, 1941, 393, 360, 337, 291, 11, 1029,
           437, 291, 393, 360, 337, 428, 1941, 13]  # fmt: skip


@pytest.fixture(scope="module", params=SIZES)
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return of({}, request.param)


@pytest.fixture(scope="module")
def multilingual() -> Tokenizer:
    return of({}, 51865)


def of(metadata: dict[str, Any], n_vocab: int, path: Path = Path("model.pt")) -> Tokenizer:
    return tokenizer_of(Checkpoint(path, "pytorch", metadata, {}), n_vocab)


@pytest.mark.parametrize(
    ("n_vocab", "ids"),
    [
        (51864, {"eot": 50256, "sot": 50257, "no_speech": 50361, "no_timestamps": 50362,
                 "timestamp_begin": 50363}),
        (51865, {"eot": 50257, "sot": 50258, "translate": 50358, "transcribe": 50359,
                 "sot_lm": 50360, "sot_prev": 50361, "no_speech": 50362, "no_timestamps": 50363,
                 "timestamp_begin": 50364}),
        (51866, {"translate": 50359, "transcribe": 50360, "sot_prev": 50362, "no_speech": 50363,
                 "no_timestamps": 50364, "timestamp_begin": 50365}),
    ],
)  # fmt: skip
def test_special_ids_follow_from_the_size(n_vocab: int, ids: dict[str, int]) -> None:
    tokenizer = of({}, n_vocab)
    assert {name: getattr(tokenizer, name) for name in ids} == ids
    assert len(tokenizer.languages) == len(tokenizer.language_ids) == SIZES[n_vocab]
    assert tokenizer.language_ids[tokenizer.languages.index("en")] == tokenizer.sot + 1
    assert tokenizer.multilingual == (n_vocab != 51864)
    last = n_vocab - 1
    assert tokenizer.decode_with_timestamps([tokenizer.timestamp_begin + 54]) == "<|1.08|>"
    assert tokenizer.decode_with_timestamps([last]) == "<|30.00|>"


def test_a_known_text(multilingual: Tokenizer) -> None:
    assert multilingual.encode(JFK) == JFK_IDS
    assert multilingual.decode([50364, *JFK_IDS, 50864]) == JFK
    with_times = f"<|0.00|>{JFK}<|10.00|>"
    assert multilingual.decode_with_timestamps([50364, *JFK_IDS, 50864]) == with_times


def test_sequences_begin_a_transcription(multilingual: Tokenizer) -> None:
    assert multilingual.sequence("en", "transcribe") == (50258, 50259, 50359)
    assert multilingual.sequence("de", "translate", False) == (50258, 50261, 50358, 50363)
    english = of({}, 51864)
    assert english.sequence("en", "transcribe") == (50257,)
    assert english.sequence(None, None, timestamps=False) == (50257, 50362)


def test_text_that_looks_special_is_text(tokenizer: Tokenizer) -> None:
    for text in ("<|endoftext|>", "<|0.00|>", "<|en|>"):
        ids = tokenizer.encode(text)
        assert max(ids) < tokenizer.eot
        assert tokenizer.decode(ids) == text


def split(tokenizer: Tokenizer, ids: list[int], language: str | None = None) -> tuple:
    """The words of a text, and the ids of each."""
    words = tokenizer.split_to_words(ids, language)
    return [text for text, _ in words], [own for _, own in words]


@settings(max_examples=200, deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_decoding_undoes_encoding(text: str) -> None:
    for multi in (False, True):
        tokenizer = TOKENIZERS[multi]
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        words, groups = split(tokenizer, ids)
        assert [i for group in groups for i in group] == ids
        assert "".join(words) == text or "\ufffd" in "".join(words)


TOKENIZERS = [Tokenizer(packaged(multi), 51864 + multi) for multi in (False, True)]


def test_words_of_spaced_and_unspaced_languages(multilingual: Tokenizer) -> None:
    ids = [8404, 871, 287, 6, 246, 526, 3210, 20378]
    words, groups = split(multilingual, ids, "ja")
    assert words == [" elle", " est", " l", "'", "\ufffd", "é", "rit", "oire"]
    assert groups == [[i] for i in ids]
    words, groups = split(multilingual, ids, "fr")
    assert words == [" elle", " est", " l", "'\ufffdéritoire"]
    assert groups == [[8404], [871], [287], ids[3:]]
    ids = [*multilingual.encode(" Hello, world! It's"), multilingual.eot]
    words = [" Hello", ",", " world", "!", " It's", "<|endoftext|>"]
    assert split(multilingual, ids, "en")[0] == words


def test_broken_bytes_that_join_across_tokens_are_words(multilingual: Tokenizer) -> None:
    ids = [156, 94]  # two replacement characters apart, one together
    assert len(multilingual.decode(ids)) < sum(len(multilingual.decode([i])) for i in ids)
    assert split(multilingual, ids, "ja")[1] == [[156], [94]]


def test_non_speech_tokens_are_symbols_only(tokenizer: Tokenizer) -> None:
    ids = tokenizer.non_speech_tokens
    assert set(ids) >= {
        i for text in ("[", " (", "♪", " -", " '") for i in tokenizer.encode(text)[:1]
    }
    assert not set(ids) & {i for text in (",", "-", "'", "?", ".") for i in tokenizer.encode(text)}
    assert not any(char.isalnum() for char in tokenizer.decode(ids))
    assert ids == tuple(sorted(set(ids)))


# Every kind of file holds its vocabulary in its own way.


def test_a_bare_file_uses_the_packaged_vocabulary(multilingual: Tokenizer, tmp_path: Path) -> None:
    assert of({}, 51865, tmp_path / "model.pt").encode(JFK) == JFK_IDS


def alphabet_list(n_vocab: int) -> list[str]:
    return [*packaged(n_vocab > 51864), "<|endoftext|>", "<|startoftranscript|>"]


@pytest.mark.parametrize("n_vocab", SIZES)
def test_a_ctranslate2_list_is_the_vocabulary(n_vocab: int) -> None:
    same_as_packaged(of({"vocabulary": alphabet_list(n_vocab)}, n_vocab))


@pytest.mark.parametrize("n_vocab", SIZES)
def test_a_ggml_list_of_bytes_is_the_vocabulary(n_vocab: int) -> None:
    raw = to_bytes(packaged(n_vocab > 51864))
    same_as_packaged(
        of({"vocabulary": [t.decode("utf-8", "surrogateescape") for t in raw]}, n_vocab)
    )


@pytest.mark.parametrize("carried", [False, True])
def test_tokenizer_json_is_the_vocabulary(carried: bool, tmp_path: Path) -> None:
    tokens = alphabet_list(51865)
    added = [{"id": i, "content": t, "special": True} for i, t in enumerate(tokens) if i > 50256]
    data = {
        "added_tokens": added,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False},
        "model": {"type": "BPE", "vocab": {t: i for i, t in enumerate(tokens) if i < 50256}},
    }  # without the empty token, as some are
    text = json.dumps(data)
    if carried:
        same_as_packaged(of({"tokenizer_files": {"tokenizer.json": text}}, 51865))
    else:
        (tmp_path / "tokenizer.json").write_text(text)
        same_as_packaged(of({}, 51865, tmp_path))


def test_vocab_json_is_the_vocabulary(tmp_path: Path) -> None:
    vocab = {token: i for i, token in enumerate(packaged(False))}
    (tmp_path / "vocab.json").write_text(json.dumps(vocab))
    same_as_packaged(of({}, 51864, tmp_path))
    (tmp_path / "vocab.json").write_text(json.dumps(vocab | {"one more": 7}))
    with pytest.raises(WeightError, match=r"vocab\.json: not a vocabulary"):
        of({}, 51864, tmp_path)


def test_a_tokenizer_of_another_model_beside_a_file_is_left_alone(tmp_path: Path) -> None:
    data = {"pre_tokenizer": {"type": "ByteLevel"}, "model": {"type": "BPE", "vocab": {"a": 0}}}
    (tmp_path / "tokenizer.json").write_text(json.dumps(data))
    same_as_packaged(of({}, 51865, tmp_path / "tiny.pt"))
    with pytest.raises(WeightError, match="lacks some bytes"):
        of({}, 51865, tmp_path)


def same_as_packaged(tokenizer: Tokenizer) -> None:
    packed = Tokenizer(packaged(tokenizer.multilingual), tokenizer.n_vocab)
    text = JFK + " naïve 日本語 🙂\n\n  £3.50 <|en|>"
    assert tokenizer.encode(text) == packed.encode(text)
    every = [*range(tokenizer.n_vocab)]
    assert tokenizer.decode_with_timestamps(every) == packed.decode_with_timestamps(every)
    assert vars(tokenizer).keys() == vars(packed).keys()
    assert tokenizer.timestamp_begin == packed.timestamp_begin


@pytest.mark.parametrize(
    ("vocabulary", "problem"),
    [
        (7, "isn't a list of texts"),
        ([1, 2], "isn't a list of texts"),
        ([], "lacks some bytes"),
        (packaged(False)[1:], "lacks some bytes"),
        ([*packaged(False), "Ġthe"], "a token twice"),
        (packaged(False)[:50000], "not Whisper's vocabulary"),
        ([*packaged(False), *map("Ġ!{}".format, range(99))], "not Whisper's vocabulary"),
    ],
)
def test_a_hostile_vocabulary_is_refused(vocabulary: Any, problem: str) -> None:
    with pytest.raises(WeightError, match=f"model.pt: .*{problem}") as caught:
        of({"vocabulary": vocabulary}, 51864)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "n_vocab"),
    [("whisper-tiny.en", 51864), pytest.param("whisper-base", 51865, marks=pytest.mark.slow)],
)
def test_the_registry_s_files_have_openai_s_vocabulary(
    name: str, n_vocab: int, tmp_path: Path
) -> None:
    try:
        path = weights.resolve(name)
    except FetchError as error:
        pytest.skip(f"needs {name}: {error}")
    checkpoint = weights.load(path, "reference")
    assert "vocabulary" in checkpoint.metadata
    same_as_packaged(tokenizer_of(checkpoint, n_vocab))


# Languages.


def test_languages_are_in_the_order_of_their_tokens() -> None:
    assert len(LANGUAGES) == 100
    assert list(LANGUAGES)[:3] == ["en", "zh", "de"]
    assert list(LANGUAGES.items())[-1] == ("yue", "cantonese")
    assert LANGUAGES["ht"] == "haitian creole"


@pytest.mark.parametrize(
    ("language", "code"),
    [("en", "en"), ("Welsh", "cy"), (" GERMAN ", "de"), ("Burmese", "my"), ("castilian", "es"),
     ("mandarin", "zh"), ("haitian creole", "ht"), ("moldovan", "ro")],
)  # fmt: skip
def test_a_language_goes_by_code_name_or_other_name(language: str, code: str) -> None:
    assert code_of(language) == code


def test_an_unknown_language_is_a_usage_error_with_what_is_near() -> None:
    with pytest.raises(UsageError, match="'germna'; did you mean german?"):
        code_of("germna")
    with pytest.raises(UsageError, match="no language called '克'$"):
        code_of("克")


# openai/whisper itself.


@pytest.mark.peers
@pytest.mark.parametrize("n_vocab", SIZES)
def test_equals_openai_s_tokenizer(n_vocab: int) -> None:
    from whisper.tokenizer import LANGUAGES as THEIRS
    from whisper.tokenizer import TO_LANGUAGE_CODE, get_tokenizer

    assert list(LANGUAGES.items()) == list(THEIRS.items())
    assert {name: code_of(name) for name in TO_LANGUAGE_CODE} == TO_LANGUAGE_CODE
    ours = of({}, n_vocab)
    multi, count = n_vocab > 51864, SIZES[n_vocab]
    theirs = get_tokenizer(multi, num_languages=count, language="ja", task="translate")
    same = ("eot", "sot", "translate", "transcribe", "sot_lm", "sot_prev", "no_speech",
            "no_timestamps", "timestamp_begin", "non_speech_tokens")  # fmt: skip
    for name in same:
        assert getattr(ours, name) == getattr(theirs, name), name
    assert theirs.encoding.n_vocab == ours.n_vocab
    ids_of = dict(zip(theirs.all_language_codes, theirs.all_language_tokens))  # in no order
    assert dict(zip(ours.languages, ours.language_ids)) == ids_of
    assert ours.sequence("ja", "translate") == theirs.sot_sequence
    with_no_times = theirs.sot_sequence_including_notimestamps
    assert ours.sequence("ja", "translate", timestamps=False) == with_no_times

    spaced = get_tokenizer(multi, num_languages=count, language="en", task="transcribe")
    texts = st.text(st.characters(), max_size=60)
    ids = st.lists(st.integers(0, n_vocab - 1), max_size=20)

    @settings(max_examples=300, deadline=None)
    @given(texts, ids)
    def check(text: str, drawn: list[int]) -> None:
        found = ours.encode(text)
        assert found == theirs.encode(text, disallowed_special=())
        for some in (found, drawn):
            assert ours.decode(some) == theirs.decode(some)
            assert ours.decode_with_timestamps(some) == theirs.decode_with_timestamps(some)
            for code, other in (("ja", theirs), ("en", spaced)):
                words = split(ours, some, code)
                with suppress(IndexError):  # theirs, when broken bytes join across tokens
                    assert words == other.split_to_word_tokens(some)

    check()
