"""Pictures of prompts, made by networks of no weights: what they are asked, and what comes out."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from tests.zoo.stable_diffusion.fake import DIM, fake
from zoo.errors import UsageError, UserError
from zoo.stable_diffusion import guidance, pixels, samplers
from zoo.stable_diffusion.noise import CounterNoise, TorchNoise
from zoo.stable_diffusion.settings import settings

EVERY_SAMPLER = tuple(samplers.SAMPLERS)


def array(image: Image.Image) -> np.ndarray:
    return np.asarray(image).astype(int)


def gradient(width: int = 64, height: int = 64) -> Image.Image:
    """A picture that differs everywhere."""
    across, down = np.meshgrid(np.linspace(0, 255, width), np.linspace(0, 255, height))
    whole = np.stack([across, down, (across + down) / 2], axis=-1)
    return Image.fromarray(whole.astype(np.uint8))


def half_mask(width: int = 64, height: int = 64) -> Image.Image:
    """White on the right side."""
    mask = np.zeros((height, width), np.uint8)
    mask[:, width // 2 :] = 255
    return Image.fromarray(mask)


# --- txt2img ---------------------------------------------------------------------------------


@pytest.mark.parametrize("sampler", EVERY_SAMPLER)
@pytest.mark.parametrize("steps", [1, 2, 5, 20])
def test_steps_are_calls_of_the_unet(sampler: str, steps: int) -> None:
    model, seen = fake(), []
    (picture,) = model.txt2img("a cat", seen.append, sampler=sampler, steps=steps, seed=1)
    assert picture.size == (64, 64) and len(model.networks.asked) == steps
    assert seen[-1].done == seen[-1].total == steps and seen[-1].index == 0
    assert all(a.done < b.done and a.sigma > b.sigma for a, b in zip(seen, seen[1:]))
    assert all(step.latent.shape == step.picture.shape == (1, 4, 8, 8) for step in seen)


def test_a_picture_is_its_seeds() -> None:
    model = fake()
    one, again, other = (model.txt2img("a cat", steps=3, seed=s)[0] for s in (1, 1, 2))
    assert (array(one) == array(again)).all() and (array(one) != array(other)).any()
    drawn = model.txt2img("a cat", steps=1), model.txt2img("a cat", steps=1)
    assert (array(drawn[0][0]) != array(drawn[1][0])).any()


@pytest.mark.parametrize("rng", ["counter", "torch"])
@pytest.mark.parametrize("sampler", EVERY_SAMPLER)
def test_a_picture_of_a_batch_is_the_one_of_its_seed_alone(sampler: str, rng: str) -> None:
    options = {"steps": 4, "sampler": sampler, "rng": rng}
    batch = fake().txt2img("a cat", seed=7, batch=3, **options)
    assert len(batch) == 3
    for i, picture in enumerate(batch):
        (alone,) = fake().txt2img("a cat", seed=7 + i, **options)
        np.testing.assert_array_equal(array(picture), array(alone))


@pytest.mark.parametrize(("rng", "source"), [("counter", CounterNoise), ("torch", TorchNoise)])
def test_the_first_latent_is_the_seeds_noise(rng: str, source: type) -> None:
    model = fake()
    model.txt2img("", steps=1, sampler="DDIM", seed=5, rng=rng, width=72, height=80)
    latent, time, *_ = model.networks.asked[0]
    # DDIM begins with noise of variance 1, within a rounding to float32
    np.testing.assert_allclose(latent[0], source(5).normal((1, 4, 10, 9))[0], rtol=1e-6)
    assert time == 1


# --- what the UNet is told -------------------------------------------------------------------


def test_guidance_asks_for_both_in_one_call_the_negative_first() -> None:
    model = fake()
    model.txt2img("a cat", negative_prompt="dogs", steps=2, seed=1)
    latent, _, context, pooled, _ = model.networks.asked[0]
    assert latent.shape == (2, 4, 8, 8) and context.shape == (2, 77, DIM) and pooled is None
    np.testing.assert_array_equal(latent[0], latent[1])
    np.testing.assert_array_equal(context, model.encode_text(["dogs", "a cat"]))
    model.txt2img("a cat", cfg_scale=1, steps=2, seed=1)
    latent, _, context, *_ = model.networks.asked[-1]
    assert len(latent) == len(context) == 1


def test_guidance_goes_past_what_is_wanted_and_rescaling_keeps_its_spread() -> None:
    draw = np.random.default_rng(0)
    without, wanted = draw.normal(size=(2, 1, 4, 8, 8)).astype(np.float32)
    plain = guidance.guided(without, wanted, 7.5, 0)
    np.testing.assert_allclose(plain, without + 7.5 * (wanted - without), rtol=1e-6)
    full = guidance.guided(without, wanted, 7.5, 1)
    assert full.std() == pytest.approx(wanted.std(), rel=1e-5)
    np.testing.assert_allclose(full / full.std(), plain / plain.std(), rtol=1e-4)
    half = guidance.guided(without, wanted, 7.5, 0.5)
    np.testing.assert_allclose(half, (full + plain) / 2, rtol=1e-4)
    flat = np.zeros_like(without)
    assert (guidance.guided(flat, flat, 7.5, 0.7) == 0).all()


@pytest.mark.parametrize(
    "options",
    [
        {"negative_prompt": "dogs"},
        {"cfg_scale": 3.0},
        {"guidance_rescale": 0.7},
        {"clip_skip": 2},
        {"scheduler": "karras"},
        {"sampler": "Euler a"},
        {"sampler": "DDIM", "eta": 0.5},
        {"prompt": "a (cat:1.3)"},
        {"prompt": "a [cat]"},
        {"prompt": "a cat, " * 40},
    ],
    ids=str,
)
def test_every_option_makes_another_picture(options: dict) -> None:
    asked = {"prompt": "a cat", "steps": 4, "seed": 1}
    plain, other = (fake().txt2img(**{**asked, **more})[0] for more in ({}, options))
    assert (array(plain) != array(other)).any()


def test_a_weight_of_one_is_none() -> None:
    plain, weighed = (fake().txt2img(p, steps=2, seed=1)[0] for p in ("a cat", "a (cat:1.0)"))
    np.testing.assert_array_equal(array(plain), array(weighed))


def test_a_weighted_prompt_keeps_each_encoders_mean() -> None:
    model = fake("xl")
    plain, weighed = (model.encode_text(text)[0] for text in ("a cat", "a (cat:1.5)"))
    ratio = weighed[2] / plain[2]
    for part in (slice(0, DIM), slice(DIM, 2 * DIM)):
        # float32 sums of 77 x 8 values around 1
        assert weighed[:, part].mean() == pytest.approx(plain[:, part].mean(), abs=1e-6)
        assert ratio[part] == pytest.approx(ratio[part][0], rel=1e-5)


def test_long_prompts_are_told_in_chunks_and_the_shorter_one_filled_up() -> None:
    model = fake()
    model.txt2img("cat " * 100, negative_prompt="a dog", steps=1, seed=1)
    context = model.networks.asked[0][2]
    assert context.shape == (2, 154, DIM)
    ids = model.networks.texts[0][0]
    assert (ids[:, 0] == 49406).all() and (ids[:, 77] == 49406).all() and ids[0, 78] == 49407


def test_clip_skip_reaches_the_text_encoder() -> None:
    model = fake()
    model.txt2img("a cat", steps=1, seed=1, clip_skip=2)
    assert model.networks.texts[0][1] == 2


def test_xl_is_told_sizes_and_zeros_for_no_negative_prompt() -> None:
    model = fake("xl")
    model.txt2img("a cat", steps=1, seed=1, width=72, height=64)
    _, _, context, pooled, sizes = model.networks.asked[0]
    assert (context[0] == 0).all() and (pooled[0] == 0).all() and (context[1] != 0).any()
    np.testing.assert_array_equal(sizes, [[64, 72, 0, 0, 64, 72]] * 2)
    model.txt2img("a cat", negative_prompt="dogs", steps=1, seed=1)
    assert (model.networks.asked[1][2][0] != 0).any()


def test_a_result_that_is_not_finite_is_no_picture() -> None:
    model = fake()
    model.networks.unet = lambda x, *_: np.full_like(x, np.nan)
    with pytest.raises(UserError, match="UNet's result isn't finite"):
        model.txt2img("a cat", steps=2)


# --- a second pass ---------------------------------------------------------------------------


def test_a_second_pass_is_larger_and_begins_with_the_first() -> None:
    model, seen = fake(), []
    options = {"steps": 4, "seed": 3, "hires_scale": 1.5, "hires_strength": 0.5}
    (picture,) = model.txt2img("a cat", seen.append, hires_steps=10, **options)
    assert picture.size == (96, 96)
    assert [latent.shape[2] for latent, *_ in model.networks.asked] == [8] * 4 + [12] * 5
    assert seen[-1].done == seen[-1].total == 9
    (small,) = fake().txt2img("a cat", steps=4, seed=3)
    none = {**options, "hires_strength": 0}
    (upscaled,) = fake().txt2img("a cat", **none)
    # the latent between its own values: the corners are as they were
    assert np.abs(array(upscaled)[0, 0] - array(small)[0, 0]).max() <= 1
    assert upscaled.size == (96, 96)


def test_sizes_of_the_second_pass_are_whole_latent_pixels() -> None:
    assert settings("", {"width": 64, "height": 72, "hires_scale": 1.3}).hires_size == (80, 96)
    assert settings("", {"width": 64, "height": 72}).hires_size is None


# --- from a picture --------------------------------------------------------------------------


@pytest.mark.parametrize("sampler", EVERY_SAMPLER)
def test_strength_is_the_share_of_the_steps(sampler: str) -> None:
    for steps, strength, calls in ((50, 0.75, 37), (10, 0.05, 1), (4, 0, 0), (3, 1, 3)):
        model = fake()
        model.img2img(gradient(), "a cat", steps=steps, strength=strength, sampler=sampler, seed=1)
        assert len(model.networks.asked) == calls


def test_without_strength_a_picture_is_encoded_and_decoded() -> None:
    model = fake()
    (picture,) = model.img2img(gradient(), "a cat", strength=0, seed=1)
    expected = model.decode(model.encode(pixels.of_image(gradient(), 64, 64)))
    # the encoder's own noise is 0.01 of 2, which is 255
    assert np.abs(array(picture) - array(pixels.to_image(expected))).max() < 8


def test_a_given_picture_shows_more_the_less_is_made_anew() -> None:
    def distance(strength: float) -> float:
        (made,) = fake().img2img(gradient(), "a cat", steps=20, strength=strength, seed=1)
        return np.abs(array(made) - array(gradient())).mean()

    assert distance(0.1) < distance(0.4) < distance(0.9)


def test_a_picture_gives_the_size_and_is_scaled_to_another() -> None:
    model = fake()
    assert model.img2img(gradient(70, 99), "", steps=1)[0].size == (64, 96)
    assert model.img2img(gradient(70, 99), "", steps=1, width=80, height=64)[0].size == (80, 64)
    assert model.img2img(gradient(1000, 500), "", steps=1)[0].size == (128, 64)
    assert model.img2img(gradient(9, 9), "", steps=1)[0].size == (64, 64)


@pytest.mark.parametrize("sampler", EVERY_SAMPLER)
@pytest.mark.parametrize("strength", [1.0, 0.5, 0])
def test_outside_of_the_mask_pixels_stay(sampler: str, strength: float) -> None:
    options = {"steps": 6, "sampler": sampler, "strength": strength, "seed": 1}
    for channels in (4, 9):
        (made,) = fake(channels=channels).inpaint(gradient(), half_mask(), "a cat", **options)
        same = (array(made) == array(gradient())).all(axis=2)
        assert same[:, :32].all()
        assert same[:, 32:].mean() < 0.1 or strength == 0


def test_the_latent_outside_of_the_mask_is_the_pictures_own_with_its_noise() -> None:
    model, seen = fake(), []
    options = {"steps": 6, "sampler": "Euler", "seed": 1}
    model.inpaint(gradient(), half_mask(), "a cat", seen.append, **options)
    source = CounterNoise(1)
    latent = model.encode(
        pixels.of_image(gradient(), 64, 64), source.normal((1, 4, 8, 8), "encode")
    )
    noise = source.normal((1, 4, 8, 8))
    for step in seen:
        kept = (latent + step.sigma * noise)[..., :4]
        # float32 sums at noise levels of up to 15
        np.testing.assert_allclose(step.latent[..., :4], kept, atol=1e-5)
        assert np.abs(step.latent[..., 4:] - (latent + step.sigma * noise)[..., 4:]).min() > 1e-3


def test_an_inpainting_model_sees_the_mask_and_what_is_around() -> None:
    model = fake(channels=9)
    model.inpaint(gradient(), half_mask(), "a cat", steps=1, seed=1)
    latent = model.networks.asked[0][0]
    assert (latent[:, 4, :, :4] == 0).all() and (latent[:, 4, :, 4:] == 1).all()
    around = model.encode(pixels.of_image(gradient(), 64, 64))
    # the encoder's noise is 0.01 wide
    np.testing.assert_allclose(latent[:1, 5:, :, :4], around[..., :4], atol=0.06)
    assert np.abs(latent[:, 5:, :, 4:]).max() < 0.06  # grey
    model.txt2img("a cat", steps=1, seed=1)
    assert (model.networks.asked[-1][0][:, 4] == 1).all()


def test_a_batch_from_a_picture_is_of_its_seeds() -> None:
    for ask in ("img2img", "inpaint"):
        given = (gradient(), half_mask())[: 1 + (ask == "inpaint")]
        for rng in ("counter", "torch"):
            options = {"prompt": "a cat", "steps": 3, "rng": rng, "sampler": "Euler a"}
            batch = getattr(fake(), ask)(*given, seed=4, batch=2, **options)
            (alone,) = getattr(fake(), ask)(*given, seed=5, **options)
            np.testing.assert_array_equal(array(batch[1]), array(alone))


# --- previews and options --------------------------------------------------------------------


def test_previews_are_of_the_finished_size_and_by_the_tiny_decoder_where_there_is_one() -> None:
    latent = np.random.default_rng(0).normal(size=(1, 4, 8, 12))
    for version in ("1", "2", "xl"):
        assert fake(version).preview(latent).size == (96, 64)
    model = fake(tiny=lambda z: np.ones((1, 3, 8, 8), np.float32))
    assert model.preview(latent).getpixel((0, 0)) == (255, 255, 255)
    assert model.txt2img("", steps=1)[0].size == (64, 64)
    model.tiny_only = True
    assert model.txt2img("", steps=1)[0].size == (8, 8)


def test_what_is_left_open_is_the_models() -> None:
    made = fake().complete(settings("a cat", {}))
    assert (made.width, made.height, made.sampler, made.strength) == (64, 64, "DPM++ 2M", None)
    assert made.seed is not None
    assert fake(_class_name="LCMScheduler").complete(settings("", {})).sampler == "LCM"
    image, mask = gradient(), half_mask()
    assert fake().complete(settings("", {}), image).strength == 0.75
    assert fake().complete(settings("", {}), image, mask).strength == 1


WRONG = [
    ({"width": 500}, "multiple of 8, got 500; 496 and 504"),
    ({"height": 8}, "from 64 to 8192"),
    ({"steps": 0}, "steps must be from 1"),
    ({"steps": 2.5}, "steps must be a whole number"),
    ({"steps": "20"}, "steps must be a whole number, got '20'"),
    ({"steps": None}, "steps must be a whole number"),
    ({"batch": True}, "batch must be a whole number"),
    ({"cfg_scale": float("nan")}, "cfg_scale must be from 0"),
    ({"seed": float("inf")}, "seed must be a whole number"),
    ({"seed": -1}, "seed must be from 0"),
    ({"sampler": "Eular"}, "unknown sampler 'Eular'; there are DDIM, PLMS"),
    ({"sampler": 3}, "sampler must be a text"),
    ({"negative_prompt": None}, "negative_prompt must be a text"),
    ({"scheduler": "carras"}, "unknown scheduler 'carras'; there are default, karras"),
    ({"sampler": "LCM", "steps": 51}, "at most 50 steps"),
    ({"rng": "gpu"}, "unknown rng 'gpu'"),
    ({"clip_skip": 0}, "clip_skip must be from 1"),
    ({"strength": 1.5}, "strength must be from 0 to 1"),
    ({"strength": 0.5}, "strength is for img2img"),
    ({"width": 4096, "height": 64, "hires_scale": 3}, "more than 8192"),
    ({"hight": 64}, "unknown option of txt2img, img2img or inpaint: hight"),
]


@pytest.mark.parametrize(("options", "message"), WRONG, ids=lambda o: str(o)[:30])
def test_a_wrong_option_is_one_line_before_any_work(options: dict, message: str) -> None:
    model = fake()
    with pytest.raises(UsageError) as error:
        model.txt2img("a cat", **options)
    assert message in str(error.value) and "\n" not in str(error.value)
    assert not model.networks.asked and not model.networks.texts


def test_a_second_pass_is_for_txt2img() -> None:
    with pytest.raises(UsageError, match="hires_scale is for txt2img"):
        fake().img2img(gradient(), "", hires_scale=2)
