"""`python -m weights`: list the known models, fetch one, look into a checkpoint, convert it."""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from tqdm import tqdm

from weights import cache, load, names
from weights.checkpoint import Checkpoint, WeightError, printable
from weights.convert import DTYPES, QUANTISED, TARGETS, check_options, target_of, write_as
from weights.download import fetch, resolve
from weights.quant import BY_NAME
from weights.registry import MODELS, find, from_hub

_PROG = "python -m weights"
_EXAMPLES = """examples:
  python -m weights list
  python -m weights fetch smollm2
  python -m weights fetch ORG/REPO             any repository of the Hugging Face hub
  python -m weights fetch ORG/REPO/FILE.gguf   one file of it
  python -m weights inspect smollm2
  python -m weights inspect model.safetensors --json
  python -m weights convert model.gguf model.safetensors
  python -m weights convert folder model.gguf --quantize q4_k
"""
CONVERTS = """Write a checkpoint in the format that DST's suffix names.

Tensors keep their types bit for bit, but for what the format lacks: quantised ones become f16 in
safetensors and PyTorch files (or what --dtype says), vectors become f32 in GGUF. --quantize
changes matrices only, embedding and output included; where rows are not whole blocks, q4_k falls
back to q5_0 (rows of 32), all types to f16. Nothing is left behind by a conversion that fails."""
_SOURCE = "a file, a folder, a name from `list` or ORG/REPO[/FILE]"
_LONG_TEXT = 1000  # characters of a text
_LONG = 16  # entries of an array that `inspect` still writes out


class _Parser(argparse.ArgumentParser):
    """argparse with errors of one line, each in the name of the command that it is about."""

    def __init__(self, **options: Any) -> None:
        options["formatter_class"] = argparse.RawDescriptionHelpFormatter
        super().__init__(epilog=_EXAMPLES, allow_abbrev=False, **options)
        self.set_defaults(parser=self)  # a subcommand's takes the place of the one above it

    def parse_args(self, args=None, namespace=None):
        parsed, left = self.parse_known_args(args, namespace)
        if left:
            parsed.parser.error(f"unrecognized arguments: {' '.join(left)}")
        return parsed

    def error(self, message: str) -> NoReturn:
        _say(f"{self.prog}: {message}; see {self.prog} --help")
        raise SystemExit(2)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code: 0, or 1 with one line on stderr.

    Wrong usage is one line and SystemExit with code 2.
    """
    args = _parser().parse_args(argv)
    for stream in (sys.stdout, sys.stderr):  # a file's own text may not fit the terminal's encoding
        if stream is not None:  # closed by who started us
            stream.reconfigure(errors="backslashreplace")
    name = f"{_PROG} {args.command}"
    try:
        signal.signal(signal.SIGTERM, _terminated)  # so that a fetch cleans up, and ends pip
        args.run(args)
        if sys.stdout is not None:
            sys.stdout.flush()
    except WeightError as error:
        _say(f"{name}: {error}")
        return 1
    except KeyboardInterrupt:
        _say(f"{name}: interrupted; run the same command again to go on")
        return 130
    except BrokenPipeError:  # the reader, `head` for one, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as error:  # a full disk behind stdout
        where = f"{error.filename}: " if error.filename else ""
        _say(f"{name}: {where}{error.strerror or error}")
        return 1
    return 0


def _terminated(*_: object) -> NoReturn:
    raise SystemExit(143)


def _say(message: str) -> None:
    print(" ".join(message.split()), file=sys.stderr)


def _parser() -> argparse.ArgumentParser:
    top = _Parser(prog=_PROG, description="List, fetch, inspect and convert checkpoints.")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    command = _command(commands, "list", "show the models known by name", _list)
    command.add_argument("--json", action="store_true", help="a JSON array instead of a table")
    command = _command(
        commands, "fetch", "download a model into the cache, and print its path", _fetch
    )
    command.add_argument(
        "name", type=_text, metavar="NAME", help="a name or alias from `list`, or ORG/REPO[/FILE]"
    )
    command = _command(commands, "inspect", "show what a checkpoint holds", _inspect)
    command.add_argument("path", type=_text, metavar="PATH", help=_SOURCE)
    command.add_argument("--json", action="store_true", help="one JSON object instead of tables")
    _convert_command(commands)
    return top


def _convert_command(commands) -> None:
    command = _command(commands, "convert", "write a checkpoint in another format", _convert)
    command.description = CONVERTS
    command.add_argument("src", type=_text, metavar="SRC", help=_SOURCE)
    command.add_argument(
        "dst", type=_text, metavar="DST", help=f"a file that ends in {', '.join(TARGETS)}"
    )
    types = command.add_mutually_exclusive_group()
    types.add_argument("--dtype", type=str.lower, choices=DTYPES, help="what all floats become")
    types.add_argument(
        "--quantize",
        type=str.lower,
        choices=QUANTISED,
        help="what matrices become (GGUF only)",
    )
    command.add_argument(
        "--layout",
        type=_text,
        help="whose names the tensors get, such as hf (default: llama.cpp's in GGUF where it knows "
        "the model, else those of the model's authors)",
    )
    command.add_argument("--force", action="store_true", help="replace DST if it exists")


def _command(commands, name: str, what: str, run) -> argparse.ArgumentParser:
    command = commands.add_parser(name, prog=f"{_PROG} {name}", help=what, description=what)
    command.set_defaults(run=run)
    return command


def _text(argument: str) -> str:
    if not argument.strip():
        raise argparse.ArgumentTypeError("it is empty")
    return argument


def _fetch(args: argparse.Namespace) -> None:
    try:
        model = from_hub(args.name) or find(args.name)
    except WeightError as error:
        # The registry's own message is for `inspect`, which takes files too.
        problem = f"no model is called '{printable(args.name)}'"
        raise WeightError(problem, remedy=error.remedy) from None
    print(fetch(model))


def _convert(args: argparse.Namespace) -> None:
    dst = Path(os.path.expanduser(args.dst))
    try:
        check_options(dst, args.dtype, args.quantize)
        target_of(dst)
    except WeightError as error:
        args.parser.error(str(error))
    source = load(resolve(args.src))
    if args.quantize and (kinds := _quantised(source)):
        _say(
            f"{printable(source.path)} is quantised already ({', '.join(kinds)}): quantised again "
            "it loses more than its f16 or f32 version would"
        )
    shown = sys.stderr is not None and sys.stderr.isatty()
    with tqdm(unit="B", unit_scale=True, disable=not shown, desc=printable(dst.name)) as bar:

        def progress(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        write_as(
            source,
            dst,
            dtype=args.dtype,
            quantize=args.quantize,
            layout=args.layout,
            force=args.force,
            progress=progress,
        )


def _quantised(checkpoint: Checkpoint) -> list[str]:
    """The types of blocks that a checkpoint's tensors have."""
    types = {entry.info.type for entry in checkpoint.entries.values()}
    return sorted(name for name in types if BY_NAME[name].block > 1)


def _list(args: argparse.Namespace) -> None:
    models = [
        {
            "name": model.name,
            "aliases": list(model.aliases),
            "size": model.size,
            "licence": model.licence,
            "fetched": cache.local(model) is not None,
            "gated": model.gated,
            "description": model.description,
        }
        for model in MODELS
    ]
    if args.json:
        print(json.dumps(models, indent=1))
        return
    rows = [[_cell(key, value) for key, value in model.items()] for model in models]
    _print_table([[key.upper() for key in models[0]], *rows])


def _cell(key: str, value: Any) -> str:
    match value:
        case bool():
            return "yes" if value else "no"
        case list():
            return ", ".join(value)
        case int():
            return cache.size_text(value)
    return value


def _inspect(args: argparse.Namespace) -> None:
    checkpoint = load(resolve(args.path))
    facts = summary(checkpoint)
    if args.json:
        print(json.dumps(facts))
        return
    mix = facts["quantisation"].items()
    print(f"file          {facts['file']}")
    print(f"format        {facts['format']}")
    print(f"architecture  {facts['architecture'] or 'not named'}")
    print(f"model         {facts['model'] or 'not recognised'}")
    print(f"parameters    {facts['parameters']:,} in {len(checkpoint)} tensors")
    print(f"quantisation  {', '.join(f'{kind} {share:.1%}' for kind, share in mix)}")
    print("\nmetadata")
    _print_table(
        (printable(key), printable(_brief(value), 80)) for key, value in facts["metadata"].items()
    )
    print("\ntensors")
    rows = (
        (printable(t["name"]), t["type"], "x".join(map(str, t["shape"])) or "scalar", t["bytes"])
        for t in facts["tensors"]
    )
    _print_table([("NAME", "TYPE", "SHAPE", "BYTES"), *rows])


def summary(checkpoint: Checkpoint) -> dict[str, Any]:
    """What `inspect` shows, as plain values; `quantisation` is each type's share of parameters.

    A tensor that has two names in the file, such as a tied embedding, counts once.
    """
    infos = {name: checkpoint.info(name) for name in checkpoint}
    counts: Counter[str] = Counter()
    for info in {id(entry): entry.info for entry in checkpoint.entries.values()}.values():
        counts[info.type] += math.prod(info.shape)
    total = sum(counts.values())
    model = names.recognise(checkpoint)
    return {
        "file": str(checkpoint.path),
        "format": checkpoint.format,
        "architecture": checkpoint.architecture,
        "model": model and f"{model[0]}, names of {model[1]}",
        "parameters": total,
        "quantisation": {kind: n / max(total, 1) for kind, n in counts.most_common()},
        "metadata": {key: _short(value) for key, value in checkpoint.metadata.items()},
        "tensors": [
            {"name": name, "type": i.type, "shape": list(i.shape), "bytes": i.nbytes}
            for name, i in infos.items()
        ],
    }


def _short(value: Any) -> Any:
    if isinstance(value, (list, dict)) and len(value) > _LONG:
        return f"[{len(value)} entries]"
    if isinstance(value, list):
        return [_short(item) for item in value]
    if isinstance(value, dict):
        return {key: _short(item) for key, item in value.items()}
    if isinstance(value, str) and len(value) > _LONG_TEXT:
        return f"{value[:_LONG_TEXT]}… [{len(value)} characters]"
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)  # JSON has no infinity
    return value


def _brief(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _print_table(rows: Iterable[Sequence[object]]) -> None:
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells)]
    for row in cells:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip())


if __name__ == "__main__":
    sys.exit(main())
