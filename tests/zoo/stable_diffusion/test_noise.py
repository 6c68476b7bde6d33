"""Noise that a seed fixes: the counter-based source, and torch's."""

from __future__ import annotations

import numpy as np
import pytest

from zoo.stable_diffusion.noise import PURPOSES, CounterNoise, TorchNoise, sources

# torch.randn(16, generator=torch.Generator().manual_seed(42)), first four values
TORCH_42 = [1.9269153, 1.4872841, 0.9007172, -2.105521]


def test_counter_noise_is_pinned() -> None:
    """What a seed means must never change; the last place may differ with a machine's log."""
    noise = CounterNoise(42)
    expected = [0.69011146, 1.7191701, -1.585883, 1.2368302]
    np.testing.assert_allclose(noise.normal((4,)), expected, rtol=2e-7)


def test_counter_noise_is_normal() -> None:
    x = CounterNoise(1).normal((1000, 1001)).astype(np.float64)
    # 5 standard deviations of a million samples' moments
    for power, expected, deviation in ((1, 0, 1), (2, 1, 2**0.5), (3, 0, 15**0.5), (4, 3, 96**0.5)):
        assert abs((x**power).mean() - expected) < 5 * deviation / 1000
    assert np.isfinite(x).all()


def test_drawings_differ_and_do_not_depend_on_others() -> None:
    first, second = CounterNoise(3), CounterNoise(3)
    latent = first.normal((4, 8, 8))
    steps = [first.normal((4, 8, 8), "step") for _ in range(2)]
    np.testing.assert_array_equal(second.normal((4, 8, 8), "step"), steps[0])
    np.testing.assert_array_equal(second.normal((4, 8, 8)), latent)
    np.testing.assert_array_equal(second.normal((4, 8, 8), "step"), steps[1])
    all_of = [CounterNoise(3).normal((64,), purpose) for purpose in PURPOSES]
    all_of += [CounterNoise(4).normal((64,)), steps[1].reshape(-1)[:64]]
    assert len({tuple(x.tolist()) for x in all_of}) == len(all_of)


@pytest.mark.parametrize("rng", ["counter", "torch"])
def test_image_i_of_a_batch_has_seed_plus_i(rng) -> None:
    batch = [source.normal((4, 8, 8)) for source in sources(2**32 - 2, 4, rng)]
    for i, latent in enumerate(batch):
        (alone,) = sources(2**32 - 2 + i, 1, rng)
        np.testing.assert_array_equal(alone.normal((4, 8, 8)), latent)
    assert len({x.tobytes() for x in batch}) == 4


@pytest.mark.parametrize("seed", [0, 2**63, 2**64 - 1, -1])
def test_any_seed_serves(seed) -> None:
    for source in (CounterNoise(seed), TorchNoise(seed)):
        assert np.isfinite(source.normal((5, 5))).all()


def test_torch_noise_is_torchs() -> None:
    noise = TorchNoise(42)
    x = noise.normal((4, 4))
    assert x.dtype == np.float32
    assert x.reshape(-1)[:4].tolist() == np.array(TORCH_42, np.float32).tolist()


@pytest.mark.peers
@pytest.mark.parametrize("seed", [0, 42, 2**32 - 1, 2**33 + 7])
def test_torch_noise_is_torchs_drawing_by_drawing(seed) -> None:
    """Bit for bit where torch runs its AVX2 code, else within 3 units in the last place."""
    import torch

    capability = torch.backends.cpu.get_cpu_capability()
    exact = capability.startswith("AVX")
    generator, ours = torch.Generator().manual_seed(seed), TorchNoise(seed)
    for shape in ((4, 64, 64), (17,), (4, 8, 8), (1, 4, 33, 5), (16,), (4, 96, 96)):
        expected, x = torch.randn(shape, generator=generator).numpy(), ours.normal(shape)
        if exact:
            np.testing.assert_array_equal(x.view(np.int32), expected.view(np.int32))
        else:
            np.testing.assert_allclose(x, expected, rtol=0, atol=1e-6)
