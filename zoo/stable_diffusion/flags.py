"""The flags of `txt2img`, `img2img` and `inpaint`, and what they come to."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from zoo import cli

if TYPE_CHECKING:
    from zoo.stable_diffusion.parameters import Parameters
    from zoo.stable_diffusion.settings import Settings

TINY = "stable-diffusion-emoji"  # comes with this package: draws at once, and little
FULL_SIZE = "sd1.5"
HINT = (
    "(drawn by a tiny model, which knows emoji and no more; "
    f"`--model {FULL_SIZE}` is Stable Diffusion 1.5, once a download of 2.1 GB)"
)
EVERY = 5  # calls of the UNet between previews


def _weighted(text: str) -> tuple[str, float]:
    """FILE or FILE:SCALE."""
    file, colon, scale = text.rpartition(":")
    if not colon or not re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)", scale):
        file, scale = text, "1"
    if not file:
        raise argparse.ArgumentTypeError(f"no file in {text!r}")
    return file, cli.number(-100, 100)(scale)


def _preview(text: str) -> tuple[str | None, int]:
    """FILE, every=N or FILE,every=N."""
    match = re.fullmatch(r"(?P<file>.*?)(?:(?:^|,)every=(?P<every>\w*))?", text)
    every = cli.integer(1)(match["every"]) if match["every"] is not None else EVERY
    return match["file"] or None, every


# By group: flag, type (None: a switch), metavar, default, help. The names are those of Settings.
_FLAGS = {
    "picture": (
        ("--negative-prompt", str, "TEXT", "", "what not to show"),
        ("--width", cli.integer(1), "N", None, "in pixels, a multiple of 8 (default: the model's)"),
        ("--height", cli.integer(1), "N", None, "the same"),
        ("--batch", cli.integer(1), "N", 1, "pictures, of seeds that follow each other"),
        ("--clip-skip", cli.integer(1), "N", None, "layer of the text encoder; 1 is its last"),
    ),
    "steps": (
        ("--steps", cli.integer(1), "N", 20, "calls of the UNet"),
        ("--sampler", str, "NAME", None, "DDIM, PLMS, Euler, Euler a, Heun, DPM++ 2M, DPM++ 2M SDE,"
         " LCM, UniPC (default: DPM++ 2M)"),
        ("--scheduler", str, "NAME", None, "noise levels: default, karras, exponential"),
        ("--cfg-scale", cli.number(0), "X", 7.0, "how closely to follow the prompt; 1: no guidance,"
         " twice as fast"),
        ("--guidance-rescale", cli.number(0, 1), "X", 0.0, "0 to 1, against glaring colours"),
        ("--eta", cli.number(0, 1), "X", None, "noise made anew in DDIM, Euler, DPM++; 0 to 1"),
        ("--rng", str, "NAME", "counter", "torch: the noise that others make from a seed"),
    ),
    "second pass at a larger size": (
        ("--hires", cli.number(1), "SCALE", 1.0, "times the size; 1: none"),
        ("--hires-strength", cli.number(0, 1), "X", 0.7, "how much is made anew"),
        ("--hires-steps", cli.integer(1), "N", None, "its steps (default: as many)"),
    ),
    "additions to the model": (
        ("--lora", _weighted, "FILE[:SCALE]", [], "may be given several times"),
        ("--embedding", str, "FILE", [], "a word of textual inversion, which is called as its file"
         " is; may be given several times"),
        ("--taesd", str, "FILE", None, "a tiny decoder: pictures come quicker and less fine"),
        ("--taesd-preview-only", None, None, False, "use that for --preview alone"),
        ("--tiled", None, None, None, "decode in tiles, which takes less memory (default: where it"
         " is short)"),
    ),
}  # fmt: skip
_EXAMPLE = {
    "txt2img": (
        'txt2img "red apple"                                   an emoji, by a tiny model',
        'txt2img "a lighthouse in a storm, oil painting" --model sd1.5',
        'txt2img "a (red:1.3) fox" -o fox.png --seed 7 --sampler "Euler a" --steps 30',
        'txt2img "a harbour" --batch 4 --scheduler karras -o harbour.png    also a grid of them',
        'txt2img "a castle" --model sd1.5 --hires 1.5 --preview every=5',
        "txt2img --from-png fox.png --seed 8                   as before, but for the seed",
        "(`txt2img` is the same as `python -m zoo.stable_diffusion txt2img`)",
    ),
    "img2img": (
        'python -m zoo.stable_diffusion img2img "an oil painting" --image photo.jpg',
        'python -m zoo.stable_diffusion img2img "in winter" --image a.png --strength 0.5',
    ),
    "inpaint": (
        'python -m zoo.stable_diffusion inpaint "a hat" --image me.png --mask head.png',
        "white in the mask is made anew; any model will do, one for inpainting does it better",
    ),
}


def about(command: str) -> dict[str, str]:
    """Description and examples of a command, or of all for ""."""
    what = {
        "txt2img": "Make pictures from a text.",
        "img2img": "Make a picture into another, as a text says.",
        "inpaint": "Make a part of a picture anew, as a text says.",
        "": "Stable Diffusion: pictures from text.",
    }
    rows = _EXAMPLE[command] if command else [row for rows in _EXAMPLE.values() for row in rows]
    examples = "\n".join(f"  {row}" for row in rows)
    return {"description": what[command], "epilog": f"examples:\n{examples}\n"}


def add_flags(parser: cli.Parser, command: str) -> cli.Parser:
    """All flags of a command; returns the parser."""
    parser.set_defaults(command=command)
    add = parser.add_argument
    add("prompt", nargs="?", metavar="PROMPT", help="the text, in quotes; (word:1.2) weighs it")
    text = (
        f"the file, .png, .jpg or .webp (default: {command}.png, or the next number that is free)"
    )
    add("-o", "--output", metavar="OUT.png", help=text)
    add("--force", action="store_true", help="replace files that are there")
    add("--from-png", metavar="FILE", help="all as in this picture but for flags that are given")
    text = f"show the picture so far in FILE, every N calls (default: OUT-preview.png, {EVERY})"
    add("--preview", type=_preview, metavar="[FILE,]every=N", help=text)
    if command != "txt2img":
        add("--image", metavar="FILE", required=True, help="the picture to begin with")
        strength = 0.75 if command == "img2img" else 1.0
        text = f"how much of it is made anew, 0 to 1 (default: {strength})"
        add("--strength", type=cli.number(0, 1), metavar="X", help=text)
    if command == "inpaint":
        add("--mask", metavar="FILE", required=True, help="white where it is to be made anew")
    groups = dict(_FLAGS)
    if command != "txt2img":
        del groups["second pass at a larger size"]
    cli.add_flags(parser, groups, {"--hires": "hires_scale"})
    default = TINY if command == "txt2img" else FULL_SIZE
    cli.add_model_flags(parser, default, "of the first picture (default: a new one)")
    return parser


def repeated(
    parser: cli.Parser, arguments: argparse.Namespace, args: Sequence[str] | None
) -> argparse.Namespace:
    """The arguments with what a picture of --from-png was made with, where they say nothing."""
    if arguments.from_png is None:
        return arguments
    from zoo.stable_diffusion.pictures import read_picture

    found = of_picture(read_picture(arguments.from_png), arguments.from_png, arguments.command)
    # argparse would add to a list that is there, instead of replacing it.
    given = {name for name in ("lora", "embedding") if getattr(arguments, name)}
    arguments.parser.set_defaults(**{k: v for k, v in found.items() if k not in given})
    return parser.parse_args(args)


# What A1111's webui calls differently.
_SPELLED = {"scheduler": {"automatic": "default"}, "rng": {"cpu": "torch"}}


def of_picture(made: Parameters, file: object, command: str) -> dict[str, Any]:
    """Arguments by name, from the parameters of a picture.

    UserError, naming the file, for values that can't be.
    """
    from zoo.errors import UserError
    from zoo.stable_diffusion.parameters import flags_of

    found = flags_of(made, file)
    if "sigmas" in found:
        found["scheduler"] = found.pop("sigmas")
    # One label has the strength of img2img, or else of the second pass.
    strength = found.pop("strength", None)
    if command == "txt2img" and "hires_scale" in found:
        found["hires_strength"] = strength
    elif command != "txt2img":
        found["strength"] = None if "hires_scale" in found else strength
        found = {name: value for name, value in found.items() if not name.startswith("hires")}
    for name, spelled in _SPELLED.items():
        if name in found:
            plain = str(found[name]).lower()
            found[name] = spelled.get(plain, plain)
    try:
        found["lora"] = [_weighted(text) for text in numbered(made.settings, "LoRA")]
    except argparse.ArgumentTypeError as error:
        raise UserError(f"{file}: its parameters have no usable LoRA: {error}") from None
    found["embedding"] = numbered(made.settings, "Embedding")
    found["taesd"] = made.settings.get("TAESD")
    texts = {"prompt": made.prompt, "negative_prompt": made.negative_prompt}
    return {name: value for name, value in {**found, **texts}.items() if value is not None}


def numbered(settings: Mapping[str, str], label: str) -> list[str]:
    """The values of `label 1`, `label 2`, …"""
    found = (settings.get(f"{label} {n}") for n in range(1, len(settings) + 1))
    return [text for text in found if text]


def settings_of(arguments: argparse.Namespace) -> Settings:
    """Checked settings; UsageError for what can't be."""
    from dataclasses import fields

    from zoo.bpe import scrub
    from zoo.stable_diffusion.settings import Settings, settings

    if arguments.prompt is None:
        arguments.parser.error("give a PROMPT, or --from-png")
    if arguments.prompt == "-":
        arguments.prompt = sys.stdin.buffer.read().decode("utf-8", "replace").removesuffix("\n")
    if arguments.taesd_preview_only and not (arguments.taesd and arguments.preview):
        arguments.parser.error("--taesd-preview-only needs --taesd and --preview")
    names = {field.name for field in fields(Settings)} - {"prompt"}
    options = {name: value for name, value in vars(arguments).items() if name in names}
    options["negative_prompt"] = scrub(options["negative_prompt"])
    return settings(scrub(arguments.prompt), options)


def parameters_of(chosen: Settings, arguments: argparse.Namespace, index: int) -> Parameters:
    """What picture `index` of complete settings is made with, as its file will say."""
    from dataclasses import asdict

    from zoo.stable_diffusion.parameters import Parameters, describe

    said: dict[str, Any] = {**asdict(chosen), "sigmas": chosen.scheduler, "model": arguments.model}
    said["seed"] = chosen.seed + index
    said["rng"] = None if chosen.rng == "counter" else chosen.rng
    said["guidance_rescale"] = chosen.guidance_rescale or None
    if chosen.hires_size:
        said["strength"] = chosen.hires_strength
    else:
        said["hires_scale"] = said["hires_steps"] = None
    labels = describe(said)
    for n, (file, scale) in enumerate(arguments.lora, 1):
        labels[f"LoRA {n}"] = f"{file}:{scale:g}"
    for n, file in enumerate(arguments.embedding, 1):
        labels[f"Embedding {n}"] = file
    if arguments.taesd and not arguments.taesd_preview_only:
        labels["TAESD"] = arguments.taesd
    return Parameters(chosen.prompt, chosen.negative_prompt, labels)
