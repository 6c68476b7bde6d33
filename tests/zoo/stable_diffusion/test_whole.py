"""From files to a picture: small random models through the real networks and commands.

On the reference device and with a tiny decoder, since compiling a whole model takes long; `slow`
tests do without.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.zoo.stable_diffusion import test_taesd, tiny
from weights import WeightError
from zoo.stable_diffusion import load
from zoo.stable_diffusion.__main__ import txt2img_main

ROOT = Path(__file__).resolve().parents[3]
QUERY = "lora_unet_down_blocks_0_attentions_0_transformer_blocks_0_attn2_to_k"
UNIT = {"attention_head_dim": 8, "sample_size": 8}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A diffusers folder of SD 1 for pictures of 64 x 64."""
    where = tmp_path_factory.mktemp("sd") / "tiny"
    return tiny.with_tokenizer(tiny.folder(where, tiny.weights_of(), unet=UNIT))


@pytest.fixture(scope="module")
def lora(folder) -> Path:
    draw = np.random.default_rng(0)
    pair = {f"{QUERY}.lora_{role}.weight": draw.normal(size=shape).astype(np.float32)
            for role, shape in (("down", (4, tiny.TEXT)), ("up", (tiny.WIDE, 4)))}  # fmt: skip
    save_file(pair, folder.parent / "style.safetensors")
    return folder.parent / "style.safetensors"


@pytest.fixture(scope="module")
def decoder(folder) -> Path:
    """A TAESD file."""
    save_file(test_taesd.tensors(1, ""), folder.parent / "taesd.safetensors")
    return folder.parent / "taesd.safetensors"


@pytest.fixture(scope="module")
def model(folder, decoder):
    return load(folder, "reference", taesd_file=decoder)


def made(model, prompt: str, **options) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Pictures and latents of one step each."""
    seen: list = []
    pictures = model.txt2img(prompt, seen.append, steps=1, sampler="Euler", **options)
    return [np.asarray(picture) for picture in pictures], [step.latent for step in seen]


def in_two_processes(where: Path, *args: str) -> None:
    """The command twice, each in a process of its own; its files are the same."""
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    args = ("a cat", "--steps", "2", "--seed", "1", "--batch", "2", "--sampler", "Euler a", *args)
    for name in ("a", "b"):
        command = [sys.executable, "-m", "zoo.stable_diffusion", "txt2img", *args]
        done = subprocess.run(
            [*command, "-o", f"{name}.png"], capture_output=True, cwd=where, env=env
        )
        assert done.returncode == 0 and done.stderr == b"", done.stderr
        assert done.stdout.decode().split() == [f"{name}-{n}.png" for n in (1, 2, "grid")]
    for n in (1, 2, "grid"):
        same = [(where / f"{name}-{n}.png").read_bytes() for name in "ab"]
        assert same[0] == same[1]


def test_the_same_seed_is_the_same_file_in_another_process(folder, lora, decoder, tmp_path) -> None:
    given = ["--model", str(folder), "--lora", f"{lora}:0.5", "--taesd", str(decoder)]
    in_two_processes(tmp_path, *given, "--device", "reference")


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["auto", "f32"])
def test_the_same_seed_is_the_same_file_on_the_default_device(
    dtype, folder, lora, tmp_path
) -> None:
    given = ["--model", str(folder), "--lora", f"{lora}:0.5", "--dtype", dtype]
    in_two_processes(tmp_path, *given)


def test_pictures_of_a_batch_are_those_of_their_seeds(model) -> None:
    pictures, latents = made(model, "a cat", seed=4, batch=2)
    (alone,), (latent,) = made(model, "a cat", seed=5)
    np.testing.assert_array_equal(pictures[1], alone)
    np.testing.assert_array_equal(latents[1], latent)
    assert (latents[0] != latent).any()
    # A latent far from any that the decoder knows looks like many others: hence not the pictures.
    assert (made(model, "a dog", seed=5)[1][0] != latent).any()


def test_contract_of_the_networks(model) -> None:
    context = model.encode_text(["a cat", "a dog"])
    assert context.shape == (2, 77, tiny.TEXT) and context.dtype == np.float32
    latent = np.zeros((2, 4, 8, 8), np.float32)
    out = model.unet(latent, 5, context)
    assert out.shape == latent.shape and out.dtype == np.float32
    assert model.decode(latent[:1, :, :2, :2]).shape == (1, 3, 16, 16)
    assert model.encode(np.zeros((1, 3, 16, 16), np.float32)).shape == (1, 4, 2, 2)


def test_a_lora_changes_the_picture_and_strength_zero_does_not(
    folder, lora, decoder, model
) -> None:
    _, (plain,) = made(model, "a cat", seed=1)
    for strength, same in ((0.0, True), (1.0, False)):
        changed = load(folder, "reference", loras=[(lora, strength)], taesd_file=decoder)
        assert (made(changed, "a cat", seed=1)[1][0] == plain).all() == same


def test_a_word_of_textual_inversion_is_told_as_its_vectors(folder, tmp_path) -> None:
    table = tiny.weights_of()[
        "cond_stage_model.transformer.text_model.embeddings.token_embedding.weight"
    ]
    letters = load(folder, "reference").tokenizer.encode("ab")
    save_file({"emb_params": table[letters]}, tmp_path / "my-word.safetensors")
    model = load(folder, "reference", embeddings=[tmp_path / "my-word.safetensors"])
    said, meant = model.encode_text("c my-word d"), model.encode_text("c ab d")
    np.testing.assert_array_equal(said, meant)


def test_bad_files_are_one_line_before_the_model_is_read(folder, lora, tmp_path, capsys) -> None:
    (tmp_path / "cut.safetensors").write_bytes(lora.read_bytes()[:50])
    (tmp_path / "text.safetensors").write_text("no weights")
    wrong = {
        ("--model", lora): "not a Stable Diffusion model (got a LoRA)",
        ("--model", "nothing-here"): "nothing-here",
        ("--model", tmp_path / "none.safetensors"): "none.safetensors",
        ("--lora", tmp_path / "none.safetensors"): "none.safetensors",
        ("--lora", tmp_path / "cut.safetensors"): "cut.safetensors",
        ("--lora", folder / "vae" / "diffusion_pytorch_model.safetensors"): "no LoRA",
        ("--embedding", tmp_path / "text.safetensors"): "text.safetensors",
        ("--embedding", lora): "vectors of another shape",
        ("--taesd", lora): "no TAESD decoder",
    }
    for (flag, file), message in wrong.items():
        args = [
            "a",
            "--model",
            str(folder),
            "--device",
            "reference",
            "-o",
            str(tmp_path / "a.png"),
            flag,
            str(file),
        ]
        assert txt2img_main(args) == 1
        out, err = capsys.readouterr()
        assert out == "" and err.count("\n") == 1 and message in err, (flag, file, err)
    assert not (tmp_path / "a.png").exists()


def test_a_broken_lora_is_told_before_a_missing_model(lora, tmp_path) -> None:
    (tmp_path / "cut.safetensors").write_bytes(lora.read_bytes()[:50])
    for options in ({"loras": [(tmp_path / "cut.safetensors", 1.0)]},
                    {"embeddings": [tmp_path / "cut.safetensors"]}):  # fmt: skip
        with pytest.raises(WeightError, match="cut.safetensors"):
            load("nothing-here", **options)


def test_a_tokenizer_of_another_model_is_refused(folder, tmp_path) -> None:
    other = tiny.with_tokenizer(tiny.folder(tmp_path / "other", tiny.weights_of()), size=400)
    with pytest.raises(WeightError, match="the tokenizer is not the text encoder's"):
        load(other, "reference")
    assert json.loads((other / "tokenizer" / "vocab.json").read_text())["<|endoftext|>"] == 399
