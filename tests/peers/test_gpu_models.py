"""The models on GPUs that this machine doesn't have.

Their kernels, in CUDA C and Metal, run on the CPU behind headers that stand in for the languages;
and NVRTC compiles them for real processors.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import pytest

import zoo.llama
import zoo.stable_diffusion
import zoo.whisper
from engine.render import assemble, entry_points
from tests.engine.gpu.devices import opened
from tests.engine.gpu.nvrtc import compiled
from tests.engine.gpu.recorder import CUDA, recording
from tests.zoo.llama.test_smollm2 import PROMPT_IDS, QUESTION, REPLY_IDS
from tests.zoo.stable_diffusion import tiny

pytestmark = pytest.mark.peers

TEAM = 4  # fibers are slow
LANGUAGES = ("cuda", "metal")
SAME = 1e-4  # of the largest number: float32 sums in another order, through all layers


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A diffusers folder of a small random SD 1."""
    unit = {"attention_head_dim": 8, "sample_size": 8}
    folder = tmp_path_factory.mktemp("sd") / "tiny"
    return tiny.with_tokenizer(tiny.folder(folder, tiny.weights_of(), unet=unit))


@pytest.mark.parametrize("language", LANGUAGES)
def test_smollm2_answers_as_the_reference_does(smollm2, language):
    model = zoo.llama.load(smollm2, device=opened(language, TEAM), dtype="f32", ctx=64)
    reply = model.chat(QUESTION)
    assert "".join(reply)
    assert reply.stats.ids == REPLY_IDS


@pytest.mark.parametrize("language", LANGUAGES)
def test_whisper_hears_the_same_in_a_window(language):
    mel = np.random.default_rng(0).standard_normal((80, 3000)).astype(np.float32)
    tokens = [50257, 50362, 843]
    got, wanted = (
        zoo.whisper.load("tiny.en", device=device, dtype="f32").logits(mel, tokens)
        for device in (opened(language, TEAM), "opencl")
    )
    np.testing.assert_allclose(got, wanted, rtol=0, atol=SAME * np.abs(wanted).max())


@pytest.mark.parametrize("language", LANGUAGES)
def test_a_small_unet_predicts_the_same_noise(small, language):
    draw = np.random.default_rng(0)
    latent = draw.standard_normal((2, 4, 8, 8)).astype(np.float32)
    seen = []
    for device in (opened(language, TEAM), "reference"):
        model = zoo.stable_diffusion.load(small, device=device, dtype="f32")
        context = model.encode_text(["a cat", ""])
        noise = model.unet(latent, 500, context)
        seen.append((context, noise, model.decode(latent)))
    for got, wanted in zip(*seen):
        np.testing.assert_allclose(got, wanted, rtol=0, atol=SAME * np.abs(wanted).max())


def _llama(path, dtype: str) -> None:
    model = zoo.llama.load(path, device="recorder", dtype=dtype, ctx=256)
    model.logits(PROMPT_IDS)
    "".join(model.generate(PROMPT_IDS, max_tokens=2))


def _whisper(dtype: str) -> None:
    model = zoo.whisper.load("tiny.en", device="recorder", dtype=dtype)
    model.logits(np.zeros((80, 3000), np.float32), [50257])
    model.transcribe(np.zeros(16000, np.float32))


def _diffusion(folder, dtype: str) -> None:
    model = zoo.stable_diffusion.load(folder, device="recorder", dtype=dtype)
    latent = np.zeros((1, 4, 8, 8), np.float32)
    model.unet(latent, 500, model.encode_text(["a cat"]))
    model.encode(model.decode(latent))


@pytest.mark.parametrize("dtype", ["auto", "f32"])
def test_nvrtc_compiles_every_kernel_of_the_models(smollm2, small, dtype, capsys):
    runs: dict[str, Callable] = {
        "llama": partial(_llama, smollm2),
        "whisper": _whisper,
        "stable diffusion": partial(_diffusion, small),
        "emoji": partial(_diffusion, "stable-diffusion-emoji"),
    }
    for name, run in runs.items():
        with recording(CUDA) as device:
            run(dtype)
        functions = list(device.functions)
        assert functions
        source = assemble(functions, CUDA) + "\n" + entry_points(functions, CUDA)
        for processor in ("sm_80", "sm_90"):
            report = compiled(source, processor)
            assert not report.complaints, report.complaints[:5]
            assert {f"{f.name}_" for f in functions} == report.kernels.keys()
            most = max(k.registers for k in report.kernels.values())
            shared = max(k.shared for k in report.kernels.values())
            spilled = sum(k.spilled for k in report.kernels.values())
            with capsys.disabled():
                print(
                    f"\n{name}, {dtype}, {processor}: {len(functions)} kernels, registers <= "
                    f"{most}, shared <= {shared} bytes, spilled {spilled} bytes"
                )
            assert shared <= 48 << 10, "more than a block may have without asking"
            assert spilled == 0
