"""`python -m zoo`: the server and the devices; else where the other commands are."""

from __future__ import annotations

import sys

from zoo import cli


def main(args: list[str] | None = None) -> int:
    """Run `serve` or `devices`, or say where other commands are: 2, or 0 if help was asked for."""
    args = sys.argv[1:] if args is None else args
    if args[:1] == ["serve"]:
        from zoo.serve import command

        return command.main(args[1:])
    if args[:1] == ["devices"]:
        from zoo import devices

        return devices.main(args[1:])
    where = (
        "python -m zoo serve starts the server, python -m zoo devices lists what it can run on; "
        "each model has its own commands, see python -m zoo.llama --help"
    )
    if args and args[0] in ("-h", "--help"):
        print(where)
        return 0
    cli.note(f"python -m zoo: {where}")
    return 2


if __name__ == "__main__":
    raise SystemExit(main())
