"""Emoji as training data: pictures of Noto Color Emoji's glyphs with captions of what they show.

Names are those of the `emoji` package (Unicode CLDR's, and the aliases people type) and Unicode's
own. Left out, so that a small model can spend itself on things that people ask for: sequences
(flags of countries, skin tones, professions), clock faces, zodiac signs, buttons and arrows.
Every picture with one clear colour is there in seven colours, people excepted, with captions that
say which; one pair of colour and thing in four is held out, to see later what the model makes of
it.
"""

from __future__ import annotations

import re
import unicodedata
import zlib
from dataclasses import dataclass
from functools import cache

import emoji
import numpy as np
from PIL import Image, ImageDraw, ImageFont

FONT = "/usr/share/fonts/truetype/noto/NotoColorEmoji.ttf"
GLYPH = 109  # the only size that the font's bitmaps have
SIZE = 64
_CANVAS = 136

# Colour word -> (hue in degrees, factor of saturation, factor of value).
COLOURS = {
    "red": (358, 1.1, 0.95),
    "orange": (28, 1.1, 1.05),
    "yellow": (50, 1.0, 1.2),
    "green": (125, 1.0, 0.85),
    "blue": (212, 1.0, 1.0),
    "purple": (275, 0.9, 0.9),
    "pink": (330, 0.6, 1.2),
}
_COLOUR_WORDS = {*COLOURS, "black", "white", "brown", "grey", "gray", "golden", "dark", "light"}
_LEFT_OUT = re.compile(
    r"\b(button|arrow|o'clock|thirty|keycap|symbol for|input|sign|symbol|prohibited|suit|"
    r"medium-small|small square|medium square|information|trade mark|registered|copyright|"
    r"aries|taurus|gemini|cancer|leo|virgo|libra|scorpio|sagittarius|capricorn|aquarius|pisces|"
    r"ophiuchus|hair|mark|squared|ideograph|medium skin|loop|not|no one|chart|mobile phone off|"
    r"eject|play|pause|fast|skip|trigram|wheelchair|potable)\b|^no "
)
_PEOPLE = re.compile(r"\b(person|people|man|woman|couple|kiss|family|zombie|genie|wrestlers)\b")
_KEPT = re.compile(r"question mark|exclamation mark|check mark|cross mark|stop sign|peace symbol")

TEMPLATES = ("{}", "{}", "a {}", "an emoji of a {}", "{} emoji", "the {}", "a picture of a {}")


@dataclass(frozen=True)
class Thing:
    """One emoji: its characters, its names (best first), and its picture (SIZE, SIZE, 3) uint8."""

    text: str
    names: tuple[str, ...]
    picture: np.ndarray


@dataclass(frozen=True)
class Sample:
    """A picture, which thing it shows, its names, and the colour it was given, if any."""

    picture: np.ndarray
    thing: int
    names: tuple[str, ...]
    colour: str | None
    held_out: bool = False


def _clean(name: str) -> str:
    name = name.strip(":").replace("_", " ").replace("’", "'")
    return re.sub(r"\s+", " ", re.sub(r"[^a-z0-9' -]", "", name.lower())).strip()


def _names(text: str, entry: dict) -> tuple[str, ...]:
    """All names of an emoji, without repetition; empty for those that are left out."""
    official = _clean(entry["en"])
    if _LEFT_OUT.search(official) and not _KEPT.search(official):
        return ()
    names = [official, *map(_clean, entry.get("alias", ()))]
    names.append(_clean(unicodedata.name(text[0], "")))
    for name in list(names):
        if name.endswith(" face") and name.count(" ") == 1:  # "cat face" is what a cat is
            names.append(name.removesuffix(" face"))
    return tuple(dict.fromkeys(name for name in names if re.search("[a-z]{2}", name)))


def render(text: str, font: ImageFont.FreeTypeFont) -> np.ndarray | None:
    """A glyph on white, (SIZE, SIZE, 3) uint8; None for one that the font lacks."""
    canvas = Image.new("RGBA", (_CANVAS, _CANVAS), "white")
    draw = ImageDraw.Draw(canvas)
    draw.text((_CANVAS // 2, _CANVAS // 2), text, font=font, embedded_color=True, anchor="mm")
    picture = canvas.convert("RGB")
    inked = np.argwhere((np.asarray(picture) < 250).any(-1))
    if len(inked) < 50:
        return None
    (top, left), (bottom, right) = inked.min(0), inked.max(0) + 1
    shift = (_CANVAS - top - bottom) // 2, (_CANVAS - left - right) // 2
    centred = np.roll(np.asarray(picture), shift, (0, 1))
    return np.asarray(Image.fromarray(centred).resize((SIZE, SIZE), Image.Resampling.LANCZOS))


@cache
def things(path: str = FONT) -> tuple[Thing, ...]:
    """Every emoji that is drawn, in the order of Unicode."""
    font = ImageFont.truetype(path, GLYPH)
    blank = render("\U0001fffe", font)  # what the font has for characters that it lacks
    found, seen = [], set()
    for text, entry in sorted(emoji.EMOJI_DATA.items()):
        single = text.replace("\ufe0f", "")
        if len(single) != 1 or entry["status"] != emoji.STATUS["fully_qualified"]:
            continue
        names, picture = _names(text, entry), render(single, font)
        if not names or picture is None or picture.tobytes() in seen:
            continue
        if blank is not None and np.array_equal(picture, blank):
            continue
        seen.add(picture.tobytes())
        found.append(Thing(text, names, picture))
    return tuple(found)


def recoloured(picture: np.ndarray, colour: str) -> np.ndarray | None:
    """The picture with its main colour turned into another; None if it has no clear one."""
    hsv = np.asarray(Image.fromarray(picture).convert("HSV")).astype(np.float32)
    hue, saturation, value = hsv[..., 0] * (360 / 255), hsv[..., 1] / 255, hsv[..., 2] / 255
    coloured = (saturation > 0.25) & (value > 0.2)
    drawn = (picture < 245).any(-1)
    if coloured.sum() < 0.4 * drawn.sum():
        return None
    angle = np.exp(1j * np.deg2rad(hue))
    counts = np.histogram(hue[coloured], bins=36, range=(0, 360))[0]
    smooth = sum(np.roll(counts, k) for k in (-1, 0, 1))
    main = np.deg2rad(smooth.argmax() * 10 + 5)
    off = np.angle(angle * np.exp(-1j * main))
    near = coloured & (np.abs(off) < np.deg2rad(40))
    if near.sum() < 0.45 * drawn.sum():
        return None
    target, more, lighter = COLOURS[colour]
    # The edges of the main colour fade with it: what is pale there is turned too.
    turned = (np.abs(off) < np.deg2rad(40)) & (saturation > 0.04)
    new_hue = (target + np.rad2deg(off) * 0.5) % 360
    out = hsv.copy()
    out[..., 0] = np.where(turned, new_hue * (255 / 360), hsv[..., 0])
    out[..., 1] = np.where(turned, np.clip(hsv[..., 1] * more, 0, 255), hsv[..., 1])
    out[..., 2] = np.where(turned, np.clip(hsv[..., 2] * lighter, 0, 255), hsv[..., 2])
    return np.asarray(Image.fromarray(out.astype(np.uint8), "HSV").convert("RGB"))


def _is_person(thing: Thing) -> bool:
    """Whether it is one of those that Unicode gives skin tones, or people without them."""
    toned = thing.text.replace("\ufe0f", "") + "\U0001f3fd"
    return toned in emoji.EMOJI_DATA or bool(_PEOPLE.search(thing.names[0]))


def plain(name: str) -> str:
    """A name without its colours: "red apple" -> "apple"; itself if nothing is left."""
    return " ".join(w for w in name.split() if w not in _COLOUR_WORDS) or name


def held_out(colour: str, name: str) -> bool:
    """Whether this pair is one that training never shows."""
    return zlib.crc32(f"{colour} {name}".encode()) % 4 == 0 or (colour, name) == ("blue", "apple")


@cache
def samples() -> tuple[Sample, ...]:
    """Every picture: first the things as they are, in their order, then those in other colours."""
    all_things = things()
    taken = {name for thing in all_things for name in thing.names}
    made = [Sample(t.picture, i, t.names, None) for i, t in enumerate(all_things)]
    for i, thing in enumerate(all_things):
        if _is_person(thing):
            continue
        bases = tuple(dict.fromkeys(plain(name) for name in thing.names))
        for colour in COLOURS:
            names = tuple(f"{colour} {base}" for base in bases if f"{colour} {base}" not in taken)
            picture = recoloured(thing.picture, colour) if names else None
            if picture is not None and bases[0] not in _COLOUR_WORDS:
                out = held_out(colour, bases[0])
                made.append(Sample(picture, i, names, colour, out))
    return tuple(made)


def caption(names: tuple[str, ...], draw: np.random.Generator) -> str:
    """One caption: mostly the first name, in one of the templates."""
    name = names[0] if draw.random() < 0.5 else names[draw.integers(len(names))]
    made = TEMPLATES[draw.integers(len(TEMPLATES))].format(name)
    return re.sub(r"\ba (?=[aeiou])", "an ", made)
