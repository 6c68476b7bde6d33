"""Commands: chat, complete and bench."""

from __future__ import annotations

import argparse
import sys

from zoo import cli

PROG = "python -m zoo.llama"
DEFAULT_MODEL = "smollm2-135m-instruct"
_EXAMPLES = f"""examples:
  {PROG} chat "What is the capital of France?"
  {PROG} chat                          a conversation; Ctrl-D leaves
  {PROG} chat --system "Answer in one word." --temperature 0.7 --seed 1
  {PROG} chat < question.txt           the whole of stdin is one prompt
  {PROG} complete "Once upon a time" --max-tokens 100
  {PROG} bench --prompt-tokens 512 --gen-tokens 128 --json
"""


def main(args: list[str] | None = None) -> int:
    """Run a command; return its exit code."""
    arguments = parser().parse_args(args)
    name = f"{PROG} {arguments.command}"
    return cli.run(lambda: arguments.run(arguments), name)


def parser() -> cli.Parser:
    """The command line, flags as in DESIGN: they may be written with `-` or `_` inside."""
    top = cli.Parser(
        prog=PROG, description="Chat with LLaMA-family models, or continue text.", epilog=_EXAMPLES
    )
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    chat = _command(commands, "chat", "answer a prompt, or hold a conversation without one", _chat)
    chat.add_argument("prompt", nargs="?", metavar="PROMPT", help="`-` reads it from stdin")
    chat.add_argument("--system", metavar="TEXT", help="the system message of the conversation")
    _add_generation_flags(chat, None)
    complete = _command(commands, "complete", "continue raw text", _complete)
    complete.add_argument("prompt", metavar="PROMPT", help="`-` reads it from stdin")
    _add_generation_flags(complete, 256)
    bench = _command(commands, "bench", "measure prompt and reply speed", _bench)
    bench.add_argument("--prompt-tokens", type=cli.integer(1), default=512, metavar="N")
    bench.add_argument("--gen-tokens", type=cli.integer(1), default=128, metavar="N")
    bench.add_argument("--ctx", type=cli.integer(1), metavar="N", help="context length in tokens")
    bench.add_argument("--json", action="store_true", help="one JSON line on stdout")
    for each in (chat, complete, bench):
        cli.add_model_flags(each, DEFAULT_MODEL)
    return top


def _command(commands, name: str, what: str, run) -> cli.Parser:
    command = commands.add_parser(
        name, prog=f"{PROG} {name}", help=what, description=what, epilog=_EXAMPLES
    )
    command.set_defaults(run=run)
    return command


def _add_generation_flags(parser: argparse.ArgumentParser, max_tokens: int | None) -> None:
    group = parser.add_argument_group("generation")
    limit = "until the model ends" if max_tokens is None else "%(default)s"
    rows = (
        ("--max-tokens", cli.integer(1), max_tokens, f"most tokens to make (default: {limit})"),
        ("--ctx", cli.integer(1), None, "context in tokens (default: the model's, at most 4096)"),
        ("--temperature", cli.number(0), 0.0, "0: the likeliest token, always (default: 0)"),
        ("--top-k", cli.integer(0), 40, "draw from the K likeliest; 0: all (default: %(default)s)"),
        ("--top-p", cli.number(0, 1), 0.95, "… of the likeliest that reach P (default: 0.95)"),
        ("--min-p", cli.number(0, 1), 0.05, "… of those with P of the best's chance (0.05)"),
        ("--repeat-penalty", cli.number(1e-6), 1.0, "above 1: repeat less (default: 1)"),
    )
    for flag, kind, default, text in rows:
        group.add_argument(flag, type=kind, default=default, help=text, metavar=flag[2:].upper())
    group.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="end here; may be repeated"
    )
    group.add_argument(
        "--stats", action="store_true", help="tokens/s on stderr even if it is no terminal"
    )


def _chat(arguments: argparse.Namespace) -> None:
    from zoo.llama import chat

    prompt = arguments.prompt
    interactive = prompt is None and sys.stdin.isatty()
    if not interactive and prompt in (None, "-"):
        prompt = _stdin()
    if prompt is not None and not prompt.strip():
        _usage(arguments, "the prompt is empty")
    model = _load(arguments)
    if model.template.note:
        cli.note(f"({model.template.note})")
    options, stats = _options(arguments), arguments.stats or sys.stderr.isatty()
    if interactive:
        chat.converse(model, arguments.system, options, arguments.stats)
    else:
        chat.reply_once(model, prompt, arguments.system, options, stats)


def _complete(arguments: argparse.Namespace) -> None:
    from zoo.llama import chat

    prompt = _stdin() if arguments.prompt == "-" else arguments.prompt
    generation = _load(arguments).generate(prompt, **_options(arguments))
    chat.finish(generation, arguments.stats or sys.stderr.isatty())


def _bench(arguments: argparse.Namespace) -> None:
    from zoo.llama.benchmark import measure

    result = measure(
        arguments.model,
        prompt_tokens=arguments.prompt_tokens,
        gen_tokens=arguments.gen_tokens,
        device=arguments.device,
        dtype=arguments.dtype,
        ctx=arguments.ctx,
        seed=arguments.seed,
    )
    print(result.json() if arguments.json else result.text())


def _load(arguments: argparse.Namespace):
    from engine import set_default_device
    from zoo.llama.loading import load

    if arguments.device is not None:
        set_default_device(arguments.device)
    return load(arguments.model, arguments.device, arguments.dtype, arguments.ctx)


def _options(arguments: argparse.Namespace) -> dict:
    names = ("max_tokens", "stop", "seed", "temperature", "top_k", "top_p", "min_p")
    return {name: getattr(arguments, name) for name in (*names, "repeat_penalty")}


def _stdin() -> str:
    """All of stdin as text; what is not UTF-8 becomes U+FFFD."""
    return sys.stdin.buffer.read().decode("utf-8", "replace").removesuffix("\n")


def _usage(arguments: argparse.Namespace, problem: str) -> None:
    from zoo.errors import UsageError

    raise UsageError(f"{problem}; see {PROG} {arguments.command} --help")


if __name__ == "__main__":
    raise SystemExit(main())
