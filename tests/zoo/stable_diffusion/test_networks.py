"""The captured networks of tiny models: chunks of prompts, sizes, tiles, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest

from engine import Tensor
from tests.weights import models
from tests.zoo.stable_diffusion import tiny
from weights import Checkpoint, Params
from zoo.errors import UsageError, UserError
from zoo.stable_diffusion import loading, tiles
from zoo.stable_diffusion.autoencoder import Runner, sample
from zoo.stable_diffusion.networks import Networks
from zoo.stable_diffusion.norms import Given, Kept

END, BEGIN = tiny.VOCAB - 1, tiny.VOCAB - 2
CLOSE = 2e-5  # of numbers around 1: another order of float32 sums in some twenty layers


def networks(version: str = "1", device: str | None = "reference") -> Networks:
    made = models.checkpoint(tiny.weights_of(version))
    made = Checkpoint(made.path, made.format, {}, made.entries, device)
    return Networks(Params(made), loading.kind_of(made, made, version), device, "f32")


def framed(*ids: int, pad: int = END) -> list[int]:
    out = [BEGIN, *ids, END]
    return out + [pad] * (77 - len(out))


@pytest.fixture(scope="module")
def plain() -> Networks:
    return networks()


@pytest.fixture(scope="module")
def xl() -> Networks:
    return networks("xl")


def test_long_prompts_are_encoded_chunk_by_chunk(plain: Networks) -> None:
    first, second = framed(3, 4), framed(5)
    both, pooled = plain.encode_text([first + second])
    assert both.shape == (1, 154, tiny.TEXT) and pooled is None
    for n, chunk in enumerate((first, second)):
        alone = plain.encode_text([chunk])[0]
        np.testing.assert_allclose(both[:, 77 * n : 77 * n + 77], alone, atol=CLOSE)


def test_each_encoder_pads_in_its_own_way(xl: Networks) -> None:
    states, pooled = xl.encode_text([framed(7, 8)])
    again, pooled_again = xl.encode_text([framed(7, 8, pad=0)])
    np.testing.assert_array_equal(states, again)
    np.testing.assert_array_equal(pooled, pooled_again)
    assert states.shape == (1, 77, 2 * tiny.TEXT) and pooled.shape == (1, tiny.TEXT)


def test_pooled_is_of_the_first_chunk(xl: Networks) -> None:
    pooled = xl.encode_text([framed(7) + framed(9)])[1]
    np.testing.assert_allclose(pooled, xl.encode_text([framed(7)])[1], atol=CLOSE)
    assert np.abs(pooled - xl.encode_text([framed(9)])[1]).max() > 0.01


def test_clip_skip_counts_from_the_end(plain: Networks, xl: Networks) -> None:
    ids = [framed(3, 4)]
    normal = plain.encode_text(ids)[0]
    np.testing.assert_array_equal(normal, plain.encode_text(ids, clip_skip=1)[0])
    assert np.abs(normal - plain.encode_text(ids, clip_skip=2)[0]).max() > 0.1
    np.testing.assert_array_equal(xl.encode_text(ids)[0], xl.encode_text(ids, clip_skip=2)[0])
    for wrong in (0, 4, -1):
        with pytest.raises(UsageError, match="clip skip"):
            plain.encode_text(ids, clip_skip=wrong)


def test_sd_2_without_its_last_layer_gives_the_same_state() -> None:
    """Diffusers leaves out the last layer and the projection, since the state before is used."""
    whole = tiny.weights_of("2")
    last = "cond_stage_model.model.transformer.resblocks.2."
    gone = {k: v for k, v in whole.items() if last not in k and "text_projection" not in k}
    made = models.checkpoint(gone)
    without = Networks(Params(made), loading.kind_of(made, made, "2"), "reference", "f32")
    ids = [framed(3)]
    state = networks("2").encode_text(ids)[0]
    np.testing.assert_array_equal(state, without.encode_text(ids)[0])
    with pytest.raises(UsageError, match="from 2 to"):
        without.encode_text(ids, clip_skip=1)


def test_vectors_of_textual_inversion_take_the_place_of_rows(xl: Networks) -> None:
    tables = [
        xl.params.conditioner.embedders[0].transformer.text_model.embeddings.token_embedding,
        xl.params.conditioner.embedders[1].model.token_embedding,
    ]
    extra = [table.weight.numpy()[[12, 13]] for table in tables]
    given = xl.encode_text([framed(5, tiny.VOCAB, tiny.VOCAB + 1)], extra=extra)
    for ours, wanted in zip(given, xl.encode_text([framed(5, 12, 13)])):
        np.testing.assert_array_equal(ours, wanted)
    with pytest.raises(UsageError, match="token ids"):
        xl.encode_text([framed(5, tiny.VOCAB + 2)], extra=extra)
    with pytest.raises(UsageError, match="shape"):
        xl.encode_text([[1, 2, 3]])


def test_the_unet_takes_latents_of_odd_sizes(xl: Networks) -> None:
    draw = np.random.default_rng(0)
    context, pooled = draw.normal(size=(2, 77, 2 * tiny.TEXT)), draw.normal(size=(2, tiny.TEXT))
    latent = draw.normal(size=(2, 4, 5, 7))
    out = xl.unet(latent, 981.0, context, pooled, np.ones((2, 6)))
    assert out.shape == latent.shape and np.isfinite(out).all()
    with pytest.raises(UsageError, match="pooled"):
        xl.unet(latent, 981.0, context)
    with pytest.raises(UsageError, match=r"\(B, 4, H, W\)"):
        xl.unet(latent[:, :3], 981.0, context, pooled, np.ones((2, 6)))


def test_a_device_computes_what_the_reference_does(plain: Networks) -> None:
    draw = np.random.default_rng(0)
    latent, context = draw.normal(size=(1, 4, 8, 8)), draw.normal(size=(1, 77, tiny.TEXT))
    wanted = plain.unet(latent, 21, context)
    np.testing.assert_allclose(
        networks(device=None).unet(latent, 21, context), wanted, atol=5e-5 * np.abs(wanted).max()
    )


def test_pictures_of_a_batch_are_those_alone(plain: Networks) -> None:
    z = np.random.default_rng(0).normal(size=(2, 4, 2, 3)).astype(np.float32)
    both = plain.decode(z)
    assert both.shape == (2, 3, 16, 24)
    np.testing.assert_array_equal(both[1:], plain.decode(z[1:]))


def test_latents_are_in_the_unets_scale(plain: Networks) -> None:
    """A sample is the mean and noise times the deviation, all of it scaled."""
    image = np.random.default_rng(0).normal(size=(1, 3, 16, 16)).astype(np.float32)
    mean = plain.encode(image)
    assert mean.shape == (1, 4, 2, 2)
    up, down = (plain.encode(image, noise=np.full(mean.shape, s, "f4")) for s in (1, -1))
    np.testing.assert_allclose((up + down) / 2, mean, atol=1e-6)
    assert (up > mean).all()
    with pytest.raises(UsageError, match="multiples of 8"):
        plain.encode(image[:, :, :12])


def test_tiles_are_taken_when_memory_is_short(plain: Networks, monkeypatch) -> None:
    z = np.zeros((1, 4, 2, 2), np.float32)
    done: list = []
    monkeypatch.setattr(tiles, "available_memory", lambda: 16 * 16 * 5400 * 2 + 1)
    plain.decode(z, progress=lambda *n: done.append(n))
    assert not done
    monkeypatch.setattr(tiles, "available_memory", lambda: 16 * 16 * 5400 * 2 - 1)
    plain.decode(z, progress=lambda *n: done.append(n))
    assert done == [(1, 1)]
    monkeypatch.setattr(tiles, "available_memory", lambda: None)
    plain.decode(z, progress=lambda *n: done.append(n))
    assert len(done) == 1


def test_a_result_that_is_not_finite_is_computed_again_or_refused() -> None:
    made = models.checkpoint(tiny.weights_of())
    broken = Networks(Params(made), loading.kind_of(made, made, "1"), "reference", "auto")
    z = np.zeros((1, 4, 2, 2), np.float32)
    wanted = broken.decode(z)
    fast, exact = broken.autoencoder.programs
    fast.decode = lambda z: np.full((1, 3, 16, 16), np.nan, np.float32)
    np.testing.assert_allclose(broken.decode(z), wanted, atol=CLOSE)
    exact.decode = fast.decode
    with pytest.raises(UserError, match="isn't finite"):
        broken.decode(z)


def smooth(*shape: int) -> np.ndarray:
    """Waves of some twenty pixels, another in each channel: (1, *shape)."""
    y, x = np.mgrid[0 : shape[1], 0 : shape[2]] / 20
    draw = np.random.default_rng(0)
    waves = [np.cos(a * y + b * x + 3 * c) for a, b, c in draw.normal(size=(shape[0], 3))]
    return np.stack(waves)[None].astype(np.float32)


def test_norms_by_given_statistics_are_the_whole_pictures() -> None:
    """Each half of a picture is normed as in the whole; tolerance: float32, some ten steps."""
    draw = np.random.default_rng(0)
    x = draw.normal(size=(1, 6, 4, 64)).astype(np.float32) * 3 + 1
    made = {"weight": draw.normal(size=64), "bias": draw.normal(size=64)}
    p = Params({k: Tensor(v.astype(np.float32), device="reference") for k, v in made.items()})
    kept = Kept()
    whole = [kept(p, Tensor(x * n, device="reference"), 1e-6).numpy() for n in (1, 2)]
    given = Given(kept.statistics())
    for n, wanted in enumerate(whole, 1):
        half = given(p, Tensor(x[:, :3] * n, device="reference"), 1e-6).numpy()
        np.testing.assert_allclose(half, wanted[:, :3], atol=1e-5)


def test_a_sample_is_no_larger_than_a_tile() -> None:
    x = np.arange(3 * 100 * 40).reshape(1, 3, 100, 40)
    np.testing.assert_array_equal(sample(x, 8), x)
    assert sample(x, 1).shape == (1, 3, 64, 40)
    assert sample(x, 1)[0, 0, -1, -1] == x[0, 0, -1, -1]


@pytest.mark.slow
@pytest.mark.parametrize("way", ["decode", "encode"])
def test_tiles_make_the_picture_without_seams(way: str, monkeypatch) -> None:
    """Tolerances: the statistics of every nth pixel are off by some percent, which changes tones
    all over (0.05 at most was seen) and neighbouring pixels less (0.04). Tiles with statistics of
    their own are off by 0.24 and 0.13 or more."""
    networks_ = networks(device=None)
    monkeypatch.setattr(tiles, "TILE", 24)
    x = smooth(4, 32, 44) if way == "decode" else smooth(3, 256, 352)
    run = getattr(networks_, way)
    told: list = []
    whole, parts = run(x, tiled=False), run(x, tiled=True, progress=lambda *n: told.append(n))
    apart = parts - whole
    assert told[-1] == (8, 8)
    assert np.sqrt(np.square(apart).mean() / np.square(whole).mean()) < 0.08
    assert np.abs(np.diff(apart)).max() < 0.06 * np.abs(whole).max()


def test_only_a_few_sizes_stay_compiled() -> None:
    runner = Runner("reference", "f32")
    run = runner(lambda x: x + 1)
    for width in (*range(1, 9), 1):
        np.testing.assert_array_equal(run(np.zeros(width)), np.ones(width))
    assert len(run.captures) <= 4
