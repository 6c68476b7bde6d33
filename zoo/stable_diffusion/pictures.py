"""Files of pictures: saved whole or not at all, with the parameters that they were made with.

Those stand in the text chunk `parameters` of a PNG, or in the Exif user comment of a JPEG or WebP,
where A1111's webui has them.
"""

from __future__ import annotations

import struct
import tempfile
import warnings
import zlib
from pathlib import Path
from typing import TYPE_CHECKING

from weights.whole import check_target, whole_file
from zoo.bpe import scrub
from zoo.cli import note
from zoo.errors import UsageError, UserError
from zoo.stable_diffusion.parameters import Parameters, parse, write

if TYPE_CHECKING:
    from PIL import Image

FORMATS = {".png": "PNG", ".jpg": "JPEG", ".jpeg": "JPEG", ".webp": "WEBP"}
_EXIF, _USER_COMMENT = 0x8769, 0x9286  # tags: the block of the camera's settings, a comment in it
_LONGEST = 65_000  # bytes of Exif that a JPEG holds
# What Pillow raises for damaged files.
_DAMAGED = (OSError, ValueError, SyntaxError, EOFError, LookupError, TypeError, OverflowError,
            MemoryError, struct.error, zlib.error)  # fmt: skip


def read_picture(path: str | Path) -> Parameters:
    """The parameters that a PNG, JPEG or WebP carries.

    UserError, in one line, for a file that is no picture, damaged, or has no parameters.
    """
    from PIL import Image

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about large pictures: this one is not decoded
            with Image.open(path, formats=("PNG", "JPEG", "WEBP")) as image:
                text = image.info.get("parameters") or _user_comment(image)
    except Image.DecompressionBombError:
        raise UserError(f"{path}: too large a picture to be one of ours") from None
    except _DAMAGED as error:
        reason = getattr(error, "strerror", None) or "not a PNG, JPEG or WebP, or damaged"
        raise UserError(f"{path}: {reason}") from None
    if not isinstance(text, str) or not text.strip():
        raise UserError(f"{path}: the picture carries no parameters of how it was made")
    return parse(text)


def _user_comment(image: Image.Image) -> str | None:
    raw = image.getexif().get_ifd(_EXIF).get(_USER_COMMENT)
    if not isinstance(raw, bytes):
        return None
    coding = {b"UNICODE\0": "utf-16-be", b"ASCII\0\0\0": "ascii"}.get(raw[:8], "utf-8")
    return raw[8:].decode(coding, "replace")


def check_output(path: str | Path, force: bool = False) -> Path:
    """The path, if a picture can be saved there; else an error before any work is done.

    UsageError for an extension that names no format; WeightError and OSError for a file that is
    there and may not be replaced without `force`, or a folder that can't be written to.
    """
    path = Path(path)
    if path.suffix.lower() not in FORMATS:
        raise UsageError(f"{path}: a picture's name ends in {', '.join(FORMATS)}")
    check_target(path, force)
    try:
        tempfile.TemporaryFile(dir=path.parent).close()
    except OSError as error:
        raise UserError(f"{path.parent}: can't be written to: {error.strerror}") from None
    return path


def read_image(path: str | Path) -> Image.Image:
    """A picture of any format that Pillow knows, whole. UserError, in one line, for other files."""
    from PIL import Image

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with Image.open(path) as image:
                image.load()
                return image
    except Image.DecompressionBombError:
        raise UserError(f"{path}: too large a picture") from None
    except _DAMAGED as error:
        reason = getattr(error, "strerror", None) or "not a picture, or damaged"
        raise UserError(f"{path}: {reason}") from None


def targets(
    output: str | Path | None, name: str, count: int, force: bool = False
) -> tuple[list[Path], Path | None]:
    """Where `count` pictures go, and for more than one their grid; errors as in `check_output`.

    NAME.png, or NAME-1.png, … with NAME-grid.png. Without `output` NAME is `name`, or the first of
    `name-2`, `name-3`, … of which no file is there.
    """
    path, n = Path(output or f"{name}.png"), 1
    while True:
        stem = path.stem if n == 1 else f"{path.stem}-{n}"
        ends = [f"-{i}" for i in range(1, count + 1)] + ["-grid"] if count > 1 else [""]
        paths = [path.with_name(f"{stem}{end}{path.suffix}") for end in ends]
        if output is not None or not any(each.exists() for each in paths):
            break
        n += 1
    for each in paths:
        check_output(each, force)
    return (paths[:-1], paths[-1]) if count > 1 else (paths, None)


def numbered(path: Path) -> Path:
    """`path`, or where that is taken the first of `NAME-2.png`, `NAME-3.png`, … that is free."""
    free, n = path, 1
    while free.exists():
        n += 1
        free = path.with_name(f"{path.stem}-{n}{path.suffix}")
    return free


def save_image(
    image: Image.Image, path: str | Path, parameters: Parameters | None = None, force: bool = False
) -> None:
    """Save a picture, whole or not at all, in the format that its name says; see `check_output`."""
    from PIL import Image, PngImagePlugin

    path = Path(path)
    kind = FORMATS.get(path.suffix.lower())
    if kind is None:
        raise UsageError(f"{path}: a picture's name ends in {', '.join(FORMATS)}")
    text = scrub(write(parameters)) if parameters else ""
    options: dict = {} if kind == "PNG" else {"quality": 95}
    if text and kind == "PNG":
        options["pnginfo"] = PngImagePlugin.PngInfo()
        options["pnginfo"].add_text("parameters", text)
    elif text:
        exif = Image.Exif()
        exif.get_ifd(_EXIF)[_USER_COMMENT] = b"UNICODE\0" + text.encode("utf-16-be")
        if kind == "JPEG" and len(exif.tobytes()) > _LONGEST:
            note(f"{path}: saved without parameters, which are too long for a JPEG")
        else:
            options["exif"] = exif.tobytes()
    with whole_file(path, force) as partial:
        image.save(partial, kind, **options)
