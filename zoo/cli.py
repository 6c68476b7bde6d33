"""What the commands share: flags, one-line errors with their exit codes, and notes to stderr."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NoReturn

import zoo

# 128 + the number of the signal
EXIT_INTERRUPTED, EXIT_BROKEN_PIPE, EXIT_TERMINATED = 130, 141, 143


class Parser(argparse.ArgumentParser):
    """argparse with one-line errors, flags spelt with `-` or `_`, and examples kept as written.

    `takes_text`: its argument is a text, which a user may have left without quotes.
    """

    def __init__(self, takes_text: bool = False, **options) -> None:
        options.setdefault("formatter_class", _HelpFormatter)
        options.setdefault("allow_abbrev", False)
        super().__init__(**options)
        self.takes_text = takes_text
        self.set_defaults(parser=self)  # a subcommand's takes the place of the one above it

    def error(self, message: str) -> NoReturn:
        note(f"{self.prog}: {one_line(message)}; see {self.prog} --help")
        raise SystemExit(2)

    def parse_args(self, args=None, namespace=None):
        parsed, left = self.parse_known_args(args, namespace)
        if left:
            parsed.parser.unrecognized(left)
        return parsed

    def unrecognized(self, left: Sequence[str]) -> NoReturn:
        """Refuse arguments that nothing takes, in the name of this very command."""
        hint = ""
        if self.takes_text and not left[0].startswith("-"):
            hint = "; a text of several words goes in quotes"
        known = [flag for flag in self._option_string_actions if flag.startswith("--")]
        near = difflib.get_close_matches(left[0].partition("=")[0], known, n=1, cutoff=0.75)
        if near:
            hint = f"; did you mean {near[0]}?"
        self.error(f"unrecognized arguments: {' '.join(left)}{hint}")

    def parse_known_args(self, args=None, namespace=None):
        out = dashed(sys.argv[1:] if args is None else args)
        # `--vad talk.wav` as `--vad=True talk.wav`: a switch takes no file for its value.
        for i in range(out.index("--") if "--" in out else len(out)):
            action = self._option_string_actions.get(out[i])
            if action and action.type is switch and (out[i + 1 :] or [""])[0] not in _SWITCH:
                out[i] = f"{out[i]}=True"
        return super().parse_known_args(out, namespace)


class _HelpFormatter(argparse.RawDescriptionHelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=28)


def dashed(args: Sequence[str]) -> list[str]:
    """`--max_tokens=5` as `--max-tokens=5`; nothing after a bare `--` is touched."""
    out = list(args)
    for i, arg in enumerate(out):
        if arg == "--":
            break
        if arg.startswith("--"):
            flag, equals, value = arg.partition("=")
            out[i] = flag.replace("_", "-") + equals + value
    return out


def add_flags(
    parser: argparse.ArgumentParser,
    groups: Mapping[str, Iterable[tuple]],
    names: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """The flags of a table: by group, rows of flag, type (None: a switch), metavar, default, help.

    A flag whose default is a list may be given several times. `names`: what a flag's value is
    called if not as the flag is.
    """
    for title, rows in groups.items():
        group = parser.add_argument_group(title)
        for flag, kind, metavar, default, text in rows:
            if default not in (None, False, "", []):
                text = f"{text} (default: %(default)s)"
            how = {"type": kind, "metavar": metavar, "dest": names.get(flag)}
            if kind is None:
                how |= {"type": switch, "nargs": "?", "const": True, "metavar": "True|False"}
            elif isinstance(default, list):
                how["action"] = "append"
            group.add_argument(*flag.split(), default=default, help=text, **how)


def add_model_flags(
    parser: argparse.ArgumentParser,
    default_model: str,
    seed: str = "make a random result repeatable (default: a new one each time)",
) -> None:
    """--model, --device, --dtype, --seed, --tune and --version, which every model's commands take.

    `seed` is the help text of --seed.
    """
    version = f"menagerie {zoo.__version__}"
    parser.add_argument("--version", action="version", version=version, help="say it, and exit")
    group = parser.add_argument_group("model and device")
    group.add_argument(
        "-m",
        "--model",
        metavar="NAME|PATH",
        default=default_model,
        help="a name from `python -m weights list`, ORG/REPO of the Hugging Face hub, a file or a "
        "folder (default: %(default)s)",
    )
    group.add_argument(
        "--device",
        metavar="NAME",
        help="opencl, opencl:1, cuda, reference, … (default: ZOO_DEVICE, else the best)",
    )
    group.add_argument(
        "--dtype",
        choices=("auto", "f32"),
        default="auto",
        help="auto: multiply in bf16 where that is fast; f32: exact (default: auto)",
    )
    group.add_argument("--seed", type=integer(0), metavar="N", help=seed)
    group.add_argument(
        "--tune",
        action="store_true",
        help="first look for faster kernels on this device, for a minute or two; later starts "
        "use them by themselves",
    )


_SWITCH = {"True": True, "true": True, "False": False, "false": False}


def switch(text: str) -> bool:
    """An argparse type: True or False."""
    if text not in _SWITCH:
        raise argparse.ArgumentTypeError(f"must be True or False, got {text!r}")
    return _SWITCH[text]


def integer(low: int, high: int | None = None) -> Callable[[str], int]:
    """An argparse type: a whole number from `low` to `high`."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
        return _within(value, low, high)

    return parse


def number(low: float, high: float | None = None) -> Callable[[str], float]:
    """An argparse type: a finite number from `low` to `high`."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
        if value != value or value in (float("inf"), float("-inf")):
            raise argparse.ArgumentTypeError(f"{text!r} is not a finite number")
        return _within(value, low, high)

    return parse


def _within(value, low, high):
    if value < low or (high is not None and value > high):
        span = f"{low} or more" if high is None else f"from {low} to {high}"
        raise argparse.ArgumentTypeError(f"must be {span}, got {value}")
    return value


def note(message: str) -> None:
    """A line on stderr; a closed stderr is no reason to fail."""
    try:
        print(message, file=sys.stderr, flush=True)
    except (OSError, ValueError):
        pass


def say(text: object) -> None:
    """A line on stdout, above any progress bar."""
    from tqdm import tqdm

    with tqdm.external_write_mode():
        print(text, flush=True)


def load(loader: Callable, arguments: argparse.Namespace, **more: Any) -> Any:
    """What a model's `loader` gives for the flags of `add_model_flags`; sets the default device."""
    from engine import set_default_device

    if arguments.device is not None:
        set_default_device(arguments.device)
    flags = {name: getattr(arguments, name) for name in ("device", "dtype", "tune")}
    return loader(arguments.model, **flags, **more)


@contextlib.contextmanager
def tuning(device: str | None) -> Iterator[None]:
    """Kernels of programs captured meanwhile are tuned; a line on stderr says what came of it.

    An interrupt ends it, and keeps what was found by then.
    """
    from tqdm import tqdm

    from engine import get_device, tuned

    if get_device(device).target is None:
        note(f"(nothing to tune: the device {get_device(device).name} generates no kernels)")
        yield
        return

    def shown(kernels: Sequence) -> Iterator:
        bar = tqdm(kernels, "tuning", file=sys.stderr, leave=False, disable=None, unit="kernel")
        with bar:
            yield from bar

    with tuned(device, shown) as found:
        try:
            yield
        finally:
            note(
                f"({found.faster} of {len(found.tried)} kernels got faster; saved in {found.path})"
            )


def one_line(error: object) -> str:
    """An error's text on one line."""
    return " ".join(str(error).split()) or type(error).__name__


def main(
    parser: Parser, args: Sequence[str] | None, command: Callable[[argparse.Namespace], int | None]
) -> int:
    """Run a command with the arguments that `parser` finds; its exit code, as `run` gives it."""
    arguments = parser.parse_args(args)
    return run(lambda: command(arguments), arguments.parser.prog)


def run(command: Callable[[], int | None], name: str) -> int:
    """Run a command; return its exit code, with a user's mistakes told in one line.

    2 for bad flags, 1 for anything else a user can mend, 130 after Ctrl-C, 141 when the reader of
    stdout has gone. A bug still gives its traceback.
    """
    _open_standard_streams()
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a console that lacks a character shows "?"
    with contextlib.suppress(ValueError):  # only the main thread may
        signal.signal(signal.SIGTERM, _terminated)
    try:
        code = command() or 0
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        note("")
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # Python flushes stdout once more as it ends, and would complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_BROKEN_PIPE
    except user_errors() as error:
        note(f"{name}: {describe(error)}")
        return getattr(error, "exit_code", 1)


def _open_standard_streams() -> None:
    """Give a closed stdin, stdout or stderr the null device.

    Otherwise the next file opened would take its number, and be written to by whatever library
    prints a warning.
    """
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number, which is this one
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, mode, closefd=False))


def _terminated(*_: object) -> NoReturn:
    """End as after Ctrl-C, so that what is half done gets cleaned up."""
    raise SystemExit(EXIT_TERMINATED)


def user_errors() -> tuple[type[BaseException], ...]:
    """The errors that are told in one line; looked up only once one has been raised."""
    from zoo.errors import UserError

    found: list[type[BaseException]] = [UserError, OSError, MemoryError]
    # A package that was never imported can't have raised.
    for module, names in (
        ("weights", ("WeightError", "FetchError")),
        ("engine", ("DeviceError",)),
    ):
        if module in sys.modules:
            found += [getattr(sys.modules[module], name) for name in names]
    return tuple(found)


def describe(error: BaseException) -> str:
    """What a user's mistake was, on one line, with the file it is about."""
    if isinstance(error, MemoryError):
        return "out of memory; a smaller model, context, picture or input needs less"
    if isinstance(error, OSError) and error.strerror:
        where = f"{error.filename}: " if error.filename else ""
        return one_line(f"{where}{error.strerror}")
    return one_line(error)
