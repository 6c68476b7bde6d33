"""`python -m bench SUBJECT`: measurements of this project, beside its peers with `--peers`."""

from __future__ import annotations

import argparse
import importlib
import sys

from bench.measure import SideError
from weights import WeightError

SUBJECTS = {
    "llama": "prompt and reply speed, start, memory of a language model",
    "whisper": "seconds for a recording, memory, texts of a speech recogniser",
    "kernels": "matrix products, convolutions, attention, norms, beside the machine's limits",
    "sd": "a step of Stable Diffusion and a decoded picture",
    "onnx": "a run of an exported model",
    "serve": "concurrent chats with the server, beside the same one at a time",
}


def main(args: list[str] | None = None) -> int:
    """Run one subject; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    commands = parser.add_subparsers(dest="subject", required=True, metavar="SUBJECT")
    for name, what in SUBJECTS.items():
        command = commands.add_parser(name, help=what, description=what)
        command.add_argument("--peers", action="store_true", help="measure other runtimes too")
        command.add_argument("--json", action="store_true", help="one JSON line on stdout")
        importlib.import_module(f"bench.{name}").add_arguments(command)
    arguments = parser.parse_args(args)
    subject = importlib.import_module(f"bench.{arguments.subject}")
    try:
        report = subject.run(arguments)
    except (SideError, WeightError, OSError) as error:
        print(f"bench: {error}", file=sys.stderr)
        return 1
    print(subject.to_json(report) if arguments.json else subject.text(report))
    return 1 if report.get("wrong") else 0


if __name__ == "__main__":
    raise SystemExit(main())
