"""Flags of the commands that make text; nothing heavy is imported here."""

from __future__ import annotations

import argparse
from pathlib import Path

from zoo import cli

CTX_HELP = "most tokens of prompt and reply together (default: the model's limit, at most 4096)"

# (flag and other spellings, metavar, type, default, help)
SAMPLING = (
    (
        ("--temperature", "--temp"),
        "T",
        cli.number(0),
        0.0,
        "0: always the likeliest token; higher: more varied",
    ),
    (("--top-k",), "N", cli.integer(0), 40, "choose among the N likeliest tokens; 0: among all"),
    (
        ("--top-p",),
        "P",
        cli.number(0, 1),
        0.95,
        "choose among the likeliest tokens whose chances add up to P; 1: among all",
    ),
    (
        ("--min-p",),
        "P",
        cli.number(0, 1),
        0.05,
        "leave out tokens with less than P times the likeliest one's chance; 0: keep all",
    ),
    (
        ("--typical-p", "--typical"),
        "P",
        cli.number(0, 1),
        1.0,
        "choose among the tokens nearest the expected surprise whose chances add up to P; 1: "
        "among all",
    ),
    (
        ("--repeat-penalty",),
        "X",
        cli.number(1e-6),
        1.0,
        "above 1: tokens that came up lately become less likely",
    ),
    (
        ("--frequency-penalty",),
        "X",
        cli.number(float("-inf")),
        0.0,
        "taken off a token's logit for each time it came up lately",
    ),
    (
        ("--presence-penalty",),
        "X",
        cli.number(float("-inf")),
        0.0,
        "taken off a token's logit if it came up lately",
    ),
    (("--repeat-last-n",), "N", cli.integer(-1), 64, "how many tokens are lately; -1: all"),
    (("--mirostat",), "2", cli.integer(0, 2), 0, "2: aim at a surprise instead of top-k and such"),
    (("--mirostat-tau", "--mirostat-ent"), "BITS", cli.number(0), 5.0, "the surprise to aim at"),
    (("--mirostat-eta", "--mirostat-lr"), "X", cli.number(0), 0.1, "how fast mirostat adapts"),
)
# the fields of Decoding
DECODING = (
    (
        ("--context-shift",),
        "True|False",
        cli.switch,
        False,
        "when the context is full go on without the older half of it (default: stop)",
    ),
    (
        ("--keep",),
        "N",
        cli.integer(-1),
        0,
        "the first N tokens stay when others are forgotten; -1: the whole prompt (default: 0)",
    ),
    (
        ("--lookup",),
        "N",
        cli.integer(0, 31),
        0,
        "guess N tokens at once from what was said before: the same text, sooner if it repeats "
        "itself (default: 0, off)",
    ),
)


def add_generation(parser: argparse.ArgumentParser, max_tokens: int) -> None:
    """--max-tokens and what else limits a reply."""
    group = parser.add_argument_group("generation")
    most = "most tokens to make (default: %(default)s)"
    group.add_argument(
        "--max-tokens", type=cli.integer(1), default=max_tokens, metavar="N", help=most
    )
    group.add_argument("--ctx", type=cli.integer(1), metavar="N", help=CTX_HELP)
    for names, metavar, kind, default, text in DECODING:
        how = {"type": kind, "metavar": metavar, "default": default, "help": text}
        if kind is cli.switch:
            how |= {"nargs": "?", "const": True}
        group.add_argument(*names, **how)
    group.add_argument(
        "--stop",
        action="append",
        default=[],
        metavar="TEXT",
        help="end the reply before TEXT; may be given several times",
    )
    group.add_argument(
        "--json-schema",
        metavar="FILE|TEXT",
        help="the reply is JSON that is valid by this schema; `object`: any JSON object",
    )
    group.add_argument(
        "--regex", metavar="PATTERN", help="the reply matches this from beginning to end"
    )
    group.add_argument(
        "--json", action="store_true", help="JSON events, one a line: start, piece …, end"
    )
    group.add_argument(
        "--stats", action="store_true", help="tokens/s on stderr even if it is no terminal"
    )


def add_sampling(parser: argparse.ArgumentParser) -> None:
    """The fields of SamplingOptions, as llama.cpp calls them."""
    group = parser.add_argument_group(
        "sampling", "which token comes next; most of it matters above temperature 0"
    )
    for names, metavar, kind, default, text in SAMPLING:
        shown = f"{text} (default: {default:g})"
        group.add_argument(*names, metavar=metavar, type=kind, default=default, help=shown)
    group.add_argument(
        "--logit-bias",
        action="append",
        default=[],
        type=bias,
        metavar="ID+X",
        help="make a token likelier (1234+2) or less likely (1234-2, 1234-inf: never); may be "
        "given several times",
    )


def options(arguments: argparse.Namespace) -> dict:
    """What `generate` and `chat` are to be called with."""
    names = ["max_tokens", "stop", "seed", "regex", *map(name, SAMPLING + DECODING)]
    out = {each: getattr(arguments, each) for each in names}
    given = arguments.json_schema
    out["json_schema"] = None if given is None else schema(given)
    return out | {"logit_bias": dict(arguments.logit_bias)}


def name(row: tuple) -> str:
    """The option that a row of SAMPLING or DECODING is about."""
    return row[0][0][2:].replace("-", "_")


def schema(text: str) -> str:
    """A JSON schema's text, given as such or as the name of a file."""
    if text == "object" or text.lstrip().startswith("{"):
        return text
    return Path(text).expanduser().read_text("utf-8", "replace")


def bias(text: str) -> tuple[int, float]:
    """An argparse type: ID+X or ID-X as a pair."""
    cut = max(text.find("+"), text.find("-"))
    token, bias = (text[:cut], text[cut:]) if cut > 0 else ("", "")
    try:
        return cli.integer(0)(token), -float("inf") if bias == "-inf" else cli.number(-1e9)(bias)
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(f"{text!r} is not like 1234+2 or 1234-2") from None
