"""`python -m zoo`: the server; without it, where the other commands are."""

from __future__ import annotations

import sys

from zoo import cli


def main(args: list[str] | None = None) -> int:
    """Run `serve`, or point to the models' own commands: 2, or 0 when help was asked for."""
    args = sys.argv[1:] if args is None else args
    if args[:1] == ["serve"]:
        from zoo.serve import command

        return command.main(args[1:])
    where = (
        "python -m zoo serve starts the server; "
        "each model has its own commands, see python -m zoo.llama --help"
    )
    if args and args[0] in ("-h", "--help"):
        print(where)
        return 0
    cli.note(f"python -m zoo: {where}")
    return 2


if __name__ == "__main__":
    raise SystemExit(main())
