"""The commands txt2img, img2img and inpaint: pictures in files, their names on stdout."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from zoo import cli
from zoo.stable_diffusion import flags

if TYPE_CHECKING:
    from PIL import Image

    from zoo.stable_diffusion import StableDiffusion, Step

PROG = "python -m zoo.stable_diffusion"
COMMANDS = ("txt2img", "img2img", "inpaint")


def main(args: Sequence[str] | None = None) -> int:
    """`python -m zoo.stable_diffusion`; returns the exit code."""
    top = cli.Parser(prog=PROG, **flags.about(""))
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name in COMMANDS:
        about = flags.about(name)
        command = commands.add_parser(
            name, prog=f"{PROG} {name}", help=about["description"], takes_text=True, **about
        )
        flags.add_flags(command, name)
    return _main(top, args)


def txt2img_main(args: Sequence[str] | None = None) -> int:
    """The command `txt2img`; returns the exit code."""
    parser = cli.Parser(prog="txt2img", takes_text=True, **flags.about("txt2img"))
    return _main(flags.add_flags(parser, "txt2img"), args)


def _main(parser: cli.Parser, args: Sequence[str] | None) -> int:
    return cli.main(parser, args, lambda given: _make(flags.repeated(parser, given, args)))


def _make(arguments: argparse.Namespace) -> None:
    """Everything that can be wrong with flags and files is found before the model is loaded."""
    given = flags.settings_of(arguments)
    from zoo.stable_diffusion.making import calls
    from zoo.stable_diffusion.pictures import read_image, save_image, targets
    from zoo.stable_diffusion.pixels import grid as side_by_side

    paths, grid = targets(arguments.output, arguments.command, given.batch, arguments.force)
    image = mask = None
    if arguments.command != "txt2img":
        image = read_image(arguments.image)
    if arguments.command == "inpaint":
        mask = read_image(arguments.mask)
    preview = _preview_of(arguments, [*paths, *filter(None, [grid])])
    model = _load(arguments)
    chosen = model.complete(given, image, mask)
    made = []

    def save(picture: Image.Image, path: Path, index: int) -> None:
        parameters = flags.parameters_of(chosen, arguments, index)
        save_image(picture, path, parameters, arguments.force)
        cli.say(path)

    with contextlib.closing(_Screen(model, calls(model.kind, chosen), preview)) as screen:
        for i, picture in enumerate(model.pictures(chosen, image, mask, screen.on_step)):
            save(picture, paths[i], i)
            made.append(picture)
        if grid:
            save(side_by_side(made), grid, 0)


def _preview_of(arguments: argparse.Namespace, taken: Sequence[Path]) -> tuple[Path, int] | None:
    """File and distance of previews; UsageError for a file that is a picture's own."""
    from zoo.errors import UsageError
    from zoo.stable_diffusion.pictures import check_output

    if not arguments.preview:
        return None
    file, every = arguments.preview
    file = Path(file or taken[0].with_name(f"{taken[0].stem}-preview{taken[0].suffix}"))
    if file.resolve() in [path.resolve() for path in taken]:
        raise UsageError(f"{file}: the preview needs a name of its own")
    return check_output(file, arguments.force), every


def _load(arguments: argparse.Namespace) -> StableDiffusion:
    from zoo import stable_diffusion

    model = cli.load(
        stable_diffusion.load,
        arguments,
        loras=arguments.lora,
        embeddings=arguments.embedding,
        taesd_file=arguments.taesd,
        taesd_preview_only=arguments.taesd_preview_only,
    )
    if arguments.model == flags.TINY:
        cli.note(flags.HINT)
    return model


class _Screen:
    """How far it is, on a terminal's stderr, and in a file the picture so far."""

    def __init__(
        self, model: StableDiffusion, total: int, preview: tuple[Path, int] | None
    ) -> None:
        from tqdm import tqdm

        self.model, self.preview, self.shown = model, preview, 0
        self.bar = tqdm(total=total, file=sys.stderr, disable=None, unit="it")

    def on_step(self, step: Step) -> None:
        from zoo.stable_diffusion.pictures import save_image

        self.bar.update(step.done - self.bar.n)
        if self.preview and step.done - self.shown >= self.preview[1]:
            self.shown = step.done
            save_image(self.model.preview(step.picture), self.preview[0], force=True)

    def close(self) -> None:
        """The bar stays; the preview, which is of no more use, goes."""
        self.bar.close()
        if self.preview and self.shown:
            self.preview[0].unlink(missing_ok=True)


if __name__ == "__main__":
    raise SystemExit(main())
