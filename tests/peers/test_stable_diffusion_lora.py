"""LoRA and textual inversion as diffusers has them: the weights and states that files lead to.

Tolerance of weights: float32 products of rank 4 in another order, some units in the last place of
values around 1. Of states: what the text encoders differ by anyway, see test_stable_diffusion.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import weights
from tests.peers import pipelines
from weights import names

pytestmark = pytest.mark.peers

RANK = 4
STRENGTH = 0.7
PIPES = {"1": "StableDiffusionPipeline", "2": "StableDiffusionPipeline"}
PIPES["xl"] = "StableDiffusionXLPipeline"
# Of each part the ends of names of layers: linear ones, convolutions of 1x1 and of 3x3.
LAYERS = {
    "unet": ("to_q", "to_k", "to_v", "to_out.0", "ff.net.0.proj", "ff.net.2", "proj_in", "conv1",
             "conv2", "conv_shortcut", "time_emb_proj", "downsamplers.0.conv"),
    "text_encoder": ("q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2"),
}  # fmt: skip
LAYERS["text_encoder_2"] = LAYERS["text_encoder"]
KOHYA = {"unet": "lora_unet", "text_encoder": "lora_te"}
KOHYA_XL = {"unet": "lora_unet", "text_encoder": "lora_te1", "text_encoder_2": "lora_te2"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> Callable[[str], Path]:
    """A version -> a folder with a random model of it, made once."""
    made: dict[str, Path] = {}

    def get(version: str) -> Path:
        if version not in made:
            made[version] = pipelines.folder(tmp_path_factory.mktemp("sd"), version)
        return made[version]

    return get


Pairs = dict[str, dict[str, tuple[np.ndarray, np.ndarray, float]]]


def pairs_of(pipe: Any, alike: bool) -> Pairs:
    """Part -> layer -> random down and up, and alpha; `alike` has one alpha for all of a part.

    Else that of each layer differs, but for the UNet's attention: for those diffusers loses all
    alphas but the most frequent one, since peft doesn't find the names that it gives them.
    """
    draw, made = np.random.default_rng(0), {}
    for part, ends in LAYERS.items():
        alpha = float(draw.integers(1, 9))
        for name, module in getattr(pipe, part).named_modules() if hasattr(pipe, part) else ():
            if name.endswith(ends):
                out, *ins = module.weight.shape
                shapes = (RANK, *ins), (out, RANK, *[1] * (len(ins) - 1))
                down, up = (draw.normal(size=s).astype(np.float32) / 4 for s in shapes)
                lost = part == "unet" and ".to_" in name
                own = alpha if alike or lost else float(draw.integers(1, 9))
                made.setdefault(part, {})[name] = down, up, own
    return made


def kohya(pairs: Pairs, path: Path, pipe: Any) -> Path:
    """A file as kohya's scripts write it, with an alpha for each pair."""
    from safetensors.numpy import save_file

    tensors = {}
    for part, layers in pairs.items():
        for name, (down, up, alpha) in layers.items():
            before = (KOHYA_XL if hasattr(pipe, "text_encoder_2") else KOHYA)[part]
            inner = name if part == "unet" or "text_model" in name else f"text_model.{name}"
            key = f"{before}_{inner.replace('.', '_')}"
            tensors |= {f"{key}.lora_down.weight": down, f"{key}.lora_up.weight": up}
            tensors[f"{key}.alpha"] = np.array(alpha, np.float32)
    save_file(tensors, path)
    return path


def peft(pairs: Pairs, path: Path, pipe: Any) -> Path:
    """A file as diffusers writes it: peft's names, and one alpha for each part in the metadata."""
    import torch
    from peft import LoraConfig

    given: dict[str, Any] = {}
    for part, layers in pairs.items():
        (alpha,) = {alpha for _, _, alpha in layers.values()}
        config = LoraConfig(r=RANK, lora_alpha=alpha, target_modules=list(layers))
        given[f"{part}_lora_adapter_metadata"] = config.to_dict()
        given[f"{part}_lora_layers"] = {
            f"{name}.lora_{role}.weight": torch.tensor(value)
            for name, (down, up, _) in layers.items()
            for role, value in (("A", down), ("B", up))
        }
    pipe.save_lora_weights(path.parent, weight_name=path.name, **given)
    return path


def merge(module: Any, layers: dict[str, tuple[np.ndarray, np.ndarray, float]]) -> None:
    """W + strength * alpha / rank * up @ down, in torch."""
    import torch

    with torch.no_grad():
        for name, (down, up, alpha) in layers.items():
            change = torch.tensor(up).flatten(1) @ torch.tensor(down).flatten(1)
            weight = module.get_submodule(name).weight
            weight += STRENGTH * alpha / RANK * change.reshape(weight.shape)


def fused(pipe: Any, pairs: Pairs, written: Callable, where: Path) -> dict[str, np.ndarray]:
    """The weights that diffusers makes of the UNet's part of a file, and torch of the others'.

    Transformers wants a newer peft for text encoders than there is.
    """
    pipe.load_lora_weights(written({"unet": pairs["unet"]}, where / "unet.safetensors", pipe))
    pipe.fuse_lora(lora_scale=STRENGTH, components=["unet"])
    pipe.unload_lora_weights()
    for part in pairs.keys() - {"unet"}:
        merge(getattr(pipe, part), pairs[part])
    for part in (*pairs, "vae"):
        getattr(pipe, part).save_pretrained(where / part)
    index = {part: ["diffusers", "Any"] for part in (*pairs, "vae")}
    (where / "model_index.json").write_text(json.dumps(index))
    theirs = names.canonical(weights.load(where))
    return {key: theirs[key].numpy() for key in theirs}


@pytest.mark.parametrize("version", ["1", "2", "xl"])
@pytest.mark.parametrize("written", [kohya, peft])
def test_a_file_changes_the_weights_as_in_diffusers(written, version, folders, tmp_path) -> None:
    from zoo.stable_diffusion.lora import Lora, merged

    folder = folders(version)
    pipe = pipelines.pipeline(PIPES[version], folder)
    pairs = pairs_of(pipe, alike=written is peft)
    file = written(pairs, tmp_path / "all.safetensors", pipe)
    theirs = fused(pipe, pairs, written, tmp_path)
    plain, notes = names.canonical(weights.load(folder)), []
    ours = merged(plain, [Lora.load(file, STRENGTH)], notes.append)
    assert not notes and set(ours) == set(theirs)
    differ = 0
    for key, wanted in theirs.items():
        np.testing.assert_allclose(ours[key].numpy(), wanted, rtol=0, atol=2e-6, err_msg=key)
        differ += (wanted != plain[key].numpy()).any()
    # OpenCLIP has three of CLIP's layers in one.
    joined = sum(name.endswith(("q_proj", "v_proj")) for part in pairs.values() for name in part)
    joined = {"1": 0, "2": joined, "xl": joined // 2}[version]
    assert differ == sum(map(len, pairs.values())) - joined


def prompt_of(pipe: Any, prompt: str) -> list[np.ndarray]:
    """What a diffusers pipeline tells the UNet of a prompt, and XL of it as a whole."""
    import torch

    with torch.no_grad():
        said = pipe.encode_prompt(prompt, device="cpu", num_images_per_prompt=1,
                                  do_classifier_free_guidance=False)  # fmt: skip
    return [said[n].numpy() for n in ((0, 2) if len(said) == 4 else (0,))]


def vectors(seed: int, count: int = 3) -> Any:
    import torch

    return torch.randn(count, pipelines.TEXT, generator=torch.Generator().manual_seed(seed)) * 0.1


def embedding(kind: str, folder: Path) -> Path:
    """A file of textual inversion for the word `my-word`."""
    import torch
    from safetensors.torch import save_file

    path = folder / f"my-word{kind[kind.index('.') :]}"
    if kind == "webui.pt":
        torch.save({"string_to_token": {"*": 265}, "string_to_param": {"*": vectors(0)},
                    "name": "my-word", "step": 9}, path)  # fmt: skip
    elif kind == "webui.safetensors":
        save_file({"emb_params": vectors(0)}, path)
    elif kind == "diffusers.bin":
        torch.save({"my-word": vectors(0, 1)[0]}, path)
    else:
        save_file({"my-word": vectors(0)}, path)
    return path


PROMPT = "a cat, my-word, in red"
KINDS = ("webui.pt", "webui.safetensors", "diffusers.bin", "diffusers.safetensors")


@pytest.mark.parametrize("version", ["1", "2"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_word_of_textual_inversion_says_what_it_does_in_diffusers(
    kind, version, folders, tmp_path
) -> None:
    from zoo.stable_diffusion import load

    folder, file = folders(version), embedding(kind, tmp_path)
    pipe = pipelines.pipeline(PIPES[version], folder)
    (before,) = prompt_of(pipe, PROMPT)
    pipe.load_textual_inversion(file, token="my-word")
    (wanted,) = prompt_of(pipe, PROMPT)
    got = load(folder, "reference", "f32", embeddings=[file]).encode_text(PROMPT)
    assert np.abs(wanted - before).max() > 0.1
    np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-4 * np.abs(wanted).max())


def test_a_word_has_vectors_for_both_encoders_of_xl(folders, tmp_path) -> None:
    from safetensors.torch import save_file

    from zoo.stable_diffusion import guidance, load

    folder, file = folders("xl"), tmp_path / "my-word.safetensors"
    said = {"clip_l": vectors(1), "clip_g": vectors(2)}
    save_file(said, file)
    pipe = pipelines.pipeline(PIPES["xl"], folder)
    for key, end in (("clip_l", ""), ("clip_g", "_2")):
        pipe.load_textual_inversion(
            said[key], token="my-word", text_encoder=getattr(pipe, f"text_encoder{end}"),
            tokenizer=getattr(pipe, f"tokenizer{end}"),
        )  # fmt: skip
    model = load(folder, "reference", "f32", embeddings=[file])
    got = guidance.encode(model.networks, model.tokenizer, [PROMPT], None, model.extra)
    for ours, wanted in zip(got, prompt_of(pipe, PROMPT)):
        np.testing.assert_allclose(ours, wanted, rtol=0, atol=1e-4 * np.abs(wanted).max())
