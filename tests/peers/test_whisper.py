"""Our Whisper against openai/whisper's, on small random models of every vocabulary.

Tolerance: float32 sums of a thousand terms in another order, through eight layers; 1e-4 of the
largest value is ten times what was seen.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import zoo.whisper

pytestmark = pytest.mark.peers

CLOSE = 1e-4  # of the largest value
# vocabulary -> mel bands, layers of the decoder (large-v3-turbo has fewer than its encoder)
SIZES = {51864: (80, 3), 51865: (80, 3), 51866: (128, 1)}


@pytest.fixture(scope="module", params=SIZES, ids=str)
def pair(request, tmp_path_factory) -> tuple[Any, zoo.whisper.Whisper]:
    """openai/whisper's model of random weights, and ours of the same file."""
    import torch
    from whisper.model import ModelDimensions, Whisper

    n_mels, layers = SIZES[request.param]
    torch.manual_seed(0)
    sizes = ModelDimensions(n_mels, 1500, 128, 2, 3, request.param, 448, 128, 2, layers)
    theirs = Whisper(sizes).eval()
    with torch.no_grad():
        for name, weight in theirs.named_parameters():
            if weight.ndim < 2:  # fresh norms and biases are ones and zeros
                weight.add_(torch.randn_like(weight) * 0.1)
            elif "positional" in name:  # a fresh one is whatever memory held
                weight.normal_(0, 0.1)
    path: Path = tmp_path_factory.mktemp("whisper") / "random.pt"
    torch.save({"dims": vars(sizes), "model_state_dict": theirs.state_dict()}, path)
    return theirs, zoo.whisper.load(path, dtype="f32")


def mel_of(model: zoo.whisper.Whisper, seed: int = 0) -> np.ndarray:
    shape = model.config.n_mels, 3000
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32) * 0.5


def near(ours: np.ndarray, theirs: Any) -> None:
    theirs = theirs.detach().numpy()
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=CLOSE * np.abs(theirs).max())


def test_encoder_states(pair) -> None:
    import torch

    theirs, ours = pair
    mels = np.stack([mel_of(ours, seed) for seed in range(2)])
    with torch.no_grad():
        near(ours.encode(mels), theirs.encoder(torch.tensor(mels)))


def test_logits_of_a_prompt_of_any_length(pair) -> None:
    import torch

    theirs, ours = pair
    mel = mel_of(ours)
    for length in (1, 7, 100, 448):
        ids = np.random.default_rng(length).integers(0, ours.config.n_vocab, length)
        with torch.no_grad():
            expected = theirs.logits(
                torch.tensor(ids)[None], theirs.encoder(torch.tensor(mel)[None])
            )
        near(ours.logits(mel, ids), expected[0])


@pytest.mark.parametrize("options", [{}, {"beam_size": 3}, {"without_timestamps": True}])
def test_decoded_tokens(pair, options: dict) -> None:
    import torch
    from whisper.decoding import DecodingOptions, decode

    theirs, ours = pair
    for seed in range(2):
        mel = mel_of(ours, seed)
        given = {"language": "en", "sample_len": 24, "prompt": " and so", **options}
        expected = decode(theirs, torch.tensor(mel), DecodingOptions(fp16=False, **given))
        got = ours.decode(mel, **given)
        assert got.tokens == expected.tokens
        assert got.text == expected.text
        assert got.avg_logprob == pytest.approx(expected.avg_logprob, abs=1e-3)
        assert got.no_speech_prob == pytest.approx(expected.no_speech_prob, rel=1e-3)


def test_languages(pair) -> None:
    import torch
    from whisper.decoding import detect_language

    theirs, ours = pair
    if not ours.tokenizer.multilingual:
        return
    mel = mel_of(ours)
    _, expected = detect_language(theirs, torch.tensor(mel))
    got = ours.detect_language(mel)
    assert got.keys() == expected.keys()
    for code, chance in got.items():
        assert chance == pytest.approx(expected[code], rel=1e-3)
