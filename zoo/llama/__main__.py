"""Commands: chat, complete, embed, perplexity and bench."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from zoo import cli
from zoo.llama import flags

if TYPE_CHECKING:
    from zoo.llama.output import Output

PROG = "python -m zoo.llama"
DEFAULT_MODEL = "smollm2-135m-instruct"
_EXAMPLES = f"""examples:
  {PROG} chat "What is the capital of France?"
  {PROG} chat                          a conversation; Ctrl-D leaves
  {PROG} chat --system "Answer in one word." --temperature 0.7 --seed 1
  {PROG} chat < question.txt           the whole of stdin is one prompt
  {PROG} complete "Once upon a time" --max-tokens 100
  {PROG} complete < story.txt          continues what stdin says
  {PROG} embed "A text" "Another" -o vectors.npy
  {PROG} perplexity book.txt --ctx 512
  {PROG} bench --prompt-tokens 512 --gen-tokens 128 --json
"""


def main(args: list[str] | None = None) -> int:
    """Run a command; return its exit code."""
    return cli.main(parser(), args, lambda arguments: arguments.run(arguments))


def parser() -> cli.Parser:
    """The command line, flags as in DESIGN: they may be written with `-` or `_` inside."""
    top = cli.Parser(
        prog=PROG, description="Chat with LLaMA-family models, or continue text.", epilog=_EXAMPLES
    )
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    chat = _command(commands, "chat", "answer a prompt, or hold a conversation without one", _chat)
    _add_prompt(chat, "without it piped stdin is the prompt, and a terminal a conversation")
    chat.add_argument("--system", metavar="TEXT", help="the system message of the conversation")
    flags.add_generation(chat, 1024)
    complete = _command(commands, "complete", "continue raw text", _complete)
    _add_prompt(complete, "without it piped stdin is the prompt")
    flags.add_generation(complete, 256)
    for each in (chat, complete):
        flags.add_sampling(each)
        cli.add_model_flags(each, DEFAULT_MODEL)
    _add_embed(_command(commands, "embed", "make vectors of texts", _embed))
    _add_perplexity(
        _command(commands, "perplexity", "measure how well the model foretells a text", _perplexity)
    )
    _add_bench(_command(commands, "bench", "measure prompt and reply speed", _bench))
    return top


def _add_embed(embed: cli.Parser) -> None:
    text = "the texts, each in quotes; `-`, or piped stdin without any, is one text"
    embed.add_argument("texts", nargs="*", metavar="TEXT", help=text)
    embed.add_argument("--ctx", type=cli.integer(1), metavar="N", help=flags.CTX_HELP)
    npy = "write an array (texts, size) of float32 instead of a line of JSON per text"
    embed.add_argument("-o", "--output", metavar="FILE.npy", help=npy)
    cli.add_model_flags(embed, DEFAULT_MODEL, seed=argparse.SUPPRESS)


def _add_perplexity(perplexity: cli.Parser) -> None:
    perplexity.add_argument("file", metavar="FILE", help="a text, UTF-8; `-` reads stdin")
    ctx = "tokens of a window, of which the second half is scored (default: 512)"
    perplexity.add_argument("--ctx", type=cli.integer(2), metavar="N", help=ctx)
    stride = "let windows overlap, N tokens on each time, and score what is new in each"
    perplexity.add_argument("--stride", type=cli.integer(1), metavar="N", help=stride)
    perplexity.add_argument("--json", action="store_true", help="one JSON line instead of text")
    cli.add_model_flags(perplexity, DEFAULT_MODEL, seed=argparse.SUPPRESS)


def _add_bench(bench: cli.Parser) -> None:
    rows = (
        (("--prompt-tokens", "-p"), 512, "length of the random prompt (default: %(default)s)"),
        (("--gen-tokens", "-n"), 128, "tokens to make after it (default: %(default)s)"),
        (("--repetitions", "-r"), 5, "times that each is measured (default: %(default)s)"),
        (("--ctx",), None, flags.CTX_HELP),
    )
    for names, default, text in rows:
        bench.add_argument(*names, type=cli.integer(1), default=default, metavar="N", help=text)
    bench.add_argument("--json", action="store_true", help="one JSON line instead of text")
    cli.add_model_flags(bench, DEFAULT_MODEL, seed="which random prompt to take (default: 0)")


def _command(commands, name: str, what: str, run) -> cli.Parser:
    command = commands.add_parser(
        name,
        prog=f"{PROG} {name}",
        help=what,
        description=what,
        epilog=_EXAMPLES,
        takes_text=name in ("chat", "complete"),
    )
    command.set_defaults(run=run)
    return command


def _add_prompt(parser: argparse.ArgumentParser, without: str) -> None:
    text = f"the text, in quotes; `-` reads it from stdin; {without}"
    parser.add_argument("prompt", nargs="?", metavar="PROMPT", help=text)


def _chat(arguments: argparse.Namespace) -> None:
    from engine.runtime.host import user_cache
    from zoo.llama import chat
    from zoo.llama.output import Text

    prompt = arguments.prompt
    interactive = prompt is None and sys.stdin.isatty()
    if not interactive and prompt in (None, "-"):
        prompt = _stdin()
    if prompt is not None and not prompt.strip():
        _usage(arguments, "the prompt is empty")
    model = _load(arguments)
    if model.template.note:
        cli.note(f"({model.template.note})")
    options = flags.options(arguments)
    if interactive:
        output = _output(arguments, Text(arguments.stats))
        chat.converse(model, arguments.system, options, output, user_cache() / "chat_history")
    else:
        output = _output(arguments, Text(arguments.stats or sys.stderr.isatty()))
        chat.reply_once(model, prompt, arguments.system, options, output)


def _complete(arguments: argparse.Namespace) -> None:
    from zoo.llama.output import Text, play

    prompt = arguments.prompt
    if prompt is None and sys.stdin.isatty():
        _usage(arguments, "no PROMPT, and no text piped into stdin")
    if prompt in (None, "-"):
        prompt = _stdin()
    if arguments.prompt is None and not prompt:
        _usage(arguments, "no PROMPT, and stdin is empty")
    generation = _load(arguments).generate(prompt, **flags.options(arguments))
    terminal = sys.stderr.isatty()
    output = _output(arguments, Text(arguments.stats or terminal, tell_limit=terminal))
    play(generation, output)


def _output(arguments: argparse.Namespace, text: Output) -> Output:
    from zoo.llama.output import Events

    return Events() if arguments.json else text


def _embed(arguments: argparse.Namespace) -> None:
    import json

    import numpy as np

    from zoo.llama.embedder import Embedder

    if not arguments.texts and sys.stdin.isatty():
        _usage(arguments, "no TEXT, and no text piped into stdin")
    texts = [_stdin() if text == "-" else text for text in arguments.texts or ["-"]]
    model = _load(arguments, make=Embedder)  # nothing is generated, so no other cache is made
    vectors = [model.embed(text) for text in texts]
    if arguments.output is not None:
        with open(arguments.output, "wb") as file:  # np.save would add an ending to a bare name
            np.save(file, np.stack(vectors))
        return
    for text, vector in zip(texts, vectors):
        print(json.dumps({"text": text, "embedding": [round(float(x), 8) for x in vector]}))


def _perplexity(arguments: argparse.Namespace) -> None:
    import json
    from pathlib import Path

    from tqdm import tqdm

    from zoo.llama.perplexity import measure

    name = arguments.file
    raw = sys.stdin.buffer.read() if name == "-" else Path(name).expanduser().read_bytes()
    model = _load(arguments)

    def shown(windows):
        return tqdm(windows, "windows", file=sys.stderr, leave=False, disable=None)

    text = raw.decode("utf-8", "replace")
    found = measure(model, text, arguments.ctx, arguments.stride, shown)
    print(json.dumps(found.json()) if arguments.json else found)


def _bench(arguments: argparse.Namespace) -> None:
    from zoo.llama.benchmark import measure

    result = measure(
        arguments.model,
        prompt_tokens=arguments.prompt_tokens,
        gen_tokens=arguments.gen_tokens,
        repetitions=arguments.repetitions,
        device=arguments.device,
        dtype=arguments.dtype,
        ctx=arguments.ctx,
        seed=arguments.seed,
        tune=arguments.tune,
    )
    print(result.json() if arguments.json else result.text())


def _load(arguments: argparse.Namespace, **more):
    from zoo.llama.loading import load

    return cli.load(load, arguments, ctx=arguments.ctx, **more)


def _stdin() -> str:
    """All of stdin as text; what is not UTF-8 becomes U+FFFD."""
    return sys.stdin.buffer.read().decode("utf-8", "replace").removesuffix("\n")


def _usage(arguments: argparse.Namespace, problem: str) -> None:
    from zoo.errors import UsageError

    raise UsageError(f"{problem}; see {PROG} {arguments.command} --help")


if __name__ == "__main__":
    raise SystemExit(main())
