"""Commands: run, inspect and bench."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zoo import cli

if TYPE_CHECKING:
    import numpy as np

    from zoo.onnx.model import Model

PROG = "python -m zoo.onnx"
_EXAMPLES = f"""examples:
  {PROG} run detector.onnx --input images=picture.npy -o boxes.npz
  {PROG} run adder.onnx --input a=a.npy --input b=b.npy    a line for each output
  {PROG} inspect detector.onnx                             inputs, outputs, operators
  {PROG} bench detector.onnx --shape images=1,3,640,640 --peers
"""


def main(args: list[str] | None = None) -> int:
    """Run a command; return its exit code."""
    arguments = parser().parse_args(args)
    return cli.run(lambda: arguments.run(arguments), f"{PROG} {arguments.command}")


def parser() -> cli.Parser:
    """The command line."""
    top = cli.Parser(prog=PROG, description="Run ONNX models.", epilog=_EXAMPLES)
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    run = _command(commands, "run", "run a model on arrays", _run)
    _add_inputs(run)
    _add_device(run)
    npz = "write the outputs, by name, instead of a line for each"
    run.add_argument("-o", "--output", metavar="OUT.npz", help=npz)
    inspect = _command(commands, "inspect", "say what a model takes, gives and needs", _inspect)
    inspect.add_argument("--json", action="store_true", help="one JSON line instead of text")
    bench = _command(commands, "bench", "measure how long a run takes", _bench)
    _add_inputs(bench)
    shape = "a random input of that shape; axes that the model leaves open are 1 by default"
    bench.add_argument("--shape", action="append", default=[], metavar="NAME=1,3,…", help=shape)
    runs = "how many runs are measured, after the first (default: %(default)s)"
    bench.add_argument("-r", "--runs", type=cli.integer(1), default=10, metavar="N", help=runs)
    bench.add_argument("--peers", action="store_true", help="also onnxruntime, if it is there")
    bench.add_argument("--json", action="store_true", help="one JSON line instead of text")
    _add_device(bench)
    return top


def _command(commands: Any, name: str, what: str, run: Any) -> cli.Parser:
    command = commands.add_parser(
        name, prog=f"{PROG} {name}", help=what, description=what, epilog=_EXAMPLES
    )
    command.add_argument("model", metavar="MODEL", help="an .onnx file")
    command.set_defaults(run=run)
    return command


def _add_inputs(command: argparse.ArgumentParser) -> None:
    text = "an input, an array as numpy.save writes it; may be given several times"
    command.add_argument(
        "-i", "--input", action="append", default=[], metavar="NAME=FILE.npy", help=text
    )


def _add_device(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--device", metavar="NAME", help="opencl, reference, … (default: ZOO_DEVICE, else the best)"
    )
    command.add_argument(
        "--dtype",
        choices=("f32", "high", "auto"),
        default="f32",
        help="f32: as exact as other runtimes; auto: multiply in bf16 where that is fast; high: "
        "nearly as exact as f32 (default: f32)",
    )


def _run(arguments: argparse.Namespace) -> None:
    import numpy as np

    from weights.checkpoint import printable

    inputs = _inputs(arguments)
    outputs = _load(arguments).run(inputs)
    if arguments.output is None:
        for name, value in outputs.items():
            print(f"{printable(name)} {_kind(value)}: {_shown(value)}")
        return
    with open(arguments.output, "wb") as file:  # np.savez would add an ending to a bare name
        np.savez(file, **outputs)


def _shown(value: Any) -> str:
    """The numbers in a line, each with as many digits as its type has."""
    import numpy as np

    array = value if isinstance(value, np.ndarray) else np.asarray(value, object)
    how = {} if array.dtype == object else {"all": str}
    text = np.array2string(array, threshold=16, separator=", ", formatter=how)
    return " ".join(text.split())


def _kind(value: Any) -> str:
    import numpy as np

    return f"{value.dtype} {list(value.shape)}" if isinstance(value, np.ndarray) else "sequence"


def _inspect(arguments: argparse.Namespace) -> None:
    import json

    from zoo.onnx.inspection import inspection, text

    found = inspection(arguments.model)
    print(json.dumps(found) if arguments.json else text(found))


def _bench(arguments: argparse.Namespace) -> None:
    import json

    from zoo.onnx import benchmark

    given = _inputs(arguments)
    shapes = dict(map(_shape, arguments.shape))
    model = _load(arguments)
    inputs = benchmark.random_inputs(model, shapes) | given
    found = benchmark.measure(model, inputs, arguments.runs, arguments.peers)
    print(json.dumps(found) if arguments.json else benchmark.text(found))


def _load(arguments: argparse.Namespace) -> Model:
    from zoo.onnx.model import load

    return load(arguments.model, arguments.device, arguments.dtype)


def _inputs(arguments: argparse.Namespace) -> dict[str, np.ndarray]:
    out = {}
    for text in arguments.input:
        name, file = _pair(text, "--input", "NAME=FILE.npy")
        out[name] = _array(Path(file).expanduser())
    return out


def _array(file: Path) -> np.ndarray:
    """What numpy.save wrote; as a map, since that is checked against the file's size."""
    from tokenize import TokenError

    import numpy as np

    from weights.mapped import open_file
    from zoo.errors import UserError

    with open_file(file) as opened:  # a pipe would be waited for
        if opened.read(4) == b"PK\x03\x04":
            raise UserError(
                f"{file}: not an array of numpy.save but an .npz; save one of its arrays"
            )
    try:
        return np.array(np.lib.format.open_memmap(file, mode="r"))
    except (ValueError, OverflowError, EOFError, TokenError, RecursionError) as error:
        raise UserError(f"{file}: not an array of numpy.save: {error}") from None


def _shape(text: str) -> tuple[str, tuple[int, ...]]:
    from zoo.errors import UsageError

    name, sizes = _pair(text, "--shape", "NAME=1,3,…")
    try:
        return name, tuple(int(n) for n in sizes.split(",") if n)
    except ValueError:
        raise UsageError(f"--shape {text!r} has a size that is no whole number") from None


def _pair(text: str, flag: str, form: str) -> tuple[str, str]:
    from zoo.errors import UsageError

    name, equals, value = text.partition("=")
    if not equals or not name or not value:
        raise UsageError(f"{flag} must be {form}, got {text!r}")
    return name, value


if __name__ == "__main__":
    raise SystemExit(main())
