"""`python -m training.emoji`: train both parts, or go on where it was broken off, and export.

About an hour and a half on two CPU cores with AMX. Checkpoints are written twice a minute, and a
folder for diffusers, in float16, at the end; `--export` writes one of what there is.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import numpy as np
import torch

from training.emoji import data, model, sampling, train
from training.emoji.sampling import Drawer
from training.emoji.train import Run

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
OUT = ROOT / "zoo" / "stable_diffusion" / "data" / "emoji"
KNOWN = ROOT / "tests" / "zoo" / "stable_diffusion" / "emoji.npz"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m training.emoji", description=__doc__)
    parser.add_argument("--work", type=Path, default=Path("build/emoji"), help="checkpoints")
    parser.add_argument("--out", type=Path, default=OUT, help="the diffusers folder")
    parser.add_argument("--references", type=Path, default=KNOWN, help="what tests compare with")
    parser.add_argument("--autoencoder-steps", type=int, default=2900)
    parser.add_argument("--diffusion-steps", type=int, default=8700)
    parser.add_argument("--decoder-steps", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--score", action="store_true", help="train nothing, say how good it is")
    parser.add_argument("--export", action="store_true", help="train nothing, write the folder")
    chosen = parser.parse_args()
    torch.set_num_threads(chosen.threads)
    torch.manual_seed(chosen.seed)
    chosen.work.mkdir(parents=True, exist_ok=True)
    shown = [s for s in data.samples() if not s.held_out]
    tokenizer = model.tokenizer(
        [*(name for s in shown for name in s.names), *data.TEMPLATES, *data.COLOURS]
    )
    vae = model.autoencoder().to(memory_format=torch.channels_last)
    parts = {"vae": vae, "norm": torch.nn.BatchNorm2d(4, affine=False)}
    first = Run(chosen.work / "autoencoder.pt", parts, 1e-3, chosen.autoencoder_steps, 100)
    learns = not (chosen.export or chosen.score)
    if learns:
        train.train_autoencoder(first, batch=16, seed=chosen.seed)
    vae = first.averages["vae"]
    latents = train.encoded(vae, train.pictures())
    vae = train.finished(vae, latents)
    mean, deviation = latents.mean((0, 2, 3), keepdim=True), latents.std((0, 2, 3), keepdim=True)
    latents = (latents - mean) / deviation
    parts = {
        "unet": model.unet().to(memory_format=torch.channels_last),
        "text_encoder": model.text_encoder(len(tokenizer.vocab)),
    }
    second = Run(chosen.work / "diffusion.pt", parts, 1e-3, chosen.diffusion_steps, 500)
    if learns:
        train.train_diffusion(second, latents, tokenizer, batch=64, seed=chosen.seed)
    parts = {name: vae.get_submodule(name) for name in ("post_quant_conv", "decoder")}
    third = Run(chosen.work / "decoder.pt", parts, 1e-3, chosen.decoder_steps, 300)
    if learns:
        train.train_decoder(third, latents, batch=16, seed=chosen.seed)
    for name, average in third.averages.items():
        vae.get_submodule(name).load_state_dict(average.state_dict())
    vae.register_to_config(scaling_factor=1.0)
    if chosen.score:
        score(Drawer(vae, **second.averages, tokenizer=tokenizer, scale=1.0), latents)
        return
    export(chosen.out, {"vae": vae, **second.averages}, tokenizer)
    names = [thing.names[0] for thing in data.things()]
    known = (latents[: len(names)] * 32).round().clamp(-127, 127).to(torch.int8)
    np.savez_compressed(chosen.references, names=names, latents=known.numpy())


def score(drawer: Drawer, latents: torch.Tensor) -> None:
    """Print how many of 100 things that were asked for are nearest, or among the 5 nearest."""
    asked, known = sampling.seen(), latents[: len(data.things())]
    made = drawer.latents([data.things()[i].names[0] for i in asked])
    for top in (1, 5):
        print(f"right among the {top} nearest: {sampling.share_right(made, asked, known, top):.0%}")


def export(out: Path, parts: dict[str, torch.nn.Module], tokenizer: model.Tokenizer) -> None:
    """Write a folder that diffusers and `zoo.stable_diffusion` load, in float16."""
    for name, module in parts.items():
        shutil.rmtree(out / name, ignore_errors=True)
        module.to(torch.float16).save_pretrained(out / name)
    model.save_tokenizer(tokenizer, out / "tokenizer")
    (out / "scheduler").mkdir(exist_ok=True)
    index = {
        "_class_name": "StableDiffusionPipeline",
        "scheduler": ["diffusers", "PNDMScheduler"],
        "text_encoder": ["transformers", "CLIPTextModel"],
        "tokenizer": ["transformers", "CLIPTokenizer"],
        "unet": ["diffusers", "UNet2DConditionModel"],
        "vae": ["diffusers", "AutoencoderKL"],
        "feature_extractor": [None, None],
        "image_encoder": [None, None],
        "safety_checker": [None, None],
        "requires_safety_checker": False,
    }
    written = {"model_index": index, "scheduler/scheduler_config": model.SCHEDULER}
    for name, values in written.items():
        (out / f"{name}.json").write_text(json.dumps(values, indent=2) + "\n")
    shutil.copyfile(HERE / "MODEL_CARD.md", out / "README.md")
    shutil.copyfile(HERE / "OFL.txt", out / "OFL.txt")
    for file in out.rglob("*.safetensors"):
        file.chmod(0o644)  # safetensors makes them the user's own


if __name__ == "__main__":
    main()
