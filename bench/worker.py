"""One side of a comparison in a process of its own: `python -m bench.worker MODULE:CLASS`.

Reads calls as JSON lines on stdin, answers each with one JSON line on stdout. Whatever libraries
print goes to stderr, so it can't mix with the answers.
"""

from __future__ import annotations

import importlib
import json
import os
import sys


def main(name: str) -> None:
    """Serve calls of the class's methods until stdin ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    module, _, attribute = name.partition(":")
    side = getattr(importlib.import_module(module), attribute)()
    for line in sys.stdin:
        call = json.loads(line)
        try:
            answer = {"result": getattr(side, call.pop("method"))(**call)}
        except Exception as error:  # noqa: BLE001 - whatever it is, the caller reports it
            text = " ".join(str(error).split()) or "no message"
            answer = {"error": f"{type(error).__name__}: {text[:300]}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main(sys.argv[1])
