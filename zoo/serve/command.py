"""`python -m zoo serve`: flags, and the server's life from its socket to its last answer."""

from __future__ import annotations

import argparse
import ipaddress
import logging
import os
import socket
import sys

from zoo import cli
from zoo.errors import UsageError, UserError

PROG = "python -m zoo serve"
MISSING = "the server needs more packages: pip install 'menagerie[serve]'"
_EXAMPLES = f"""examples:
  {PROG}                                  then open http://127.0.0.1:8080
  {PROG} --model FILE.gguf --ctx 8192 --slots 4
  {PROG} --host 0.0.0.0 --api-key-file KEYS      for others: over HTTPS, by a proxy in front

  curl http://127.0.0.1:8080/v1/chat/completions -H 'Content-Type: application/json' \\
    -d '{{"messages": [{{"role": "user", "content": "Hello"}}]}}'
  curl http://127.0.0.1:8080/v1/audio/transcriptions -F file=@talk.mp3

  from openai import OpenAI
  client = OpenAI(base_url="http://127.0.0.1:8080/v1", api_key="any")
"""
_MODELS = (
    ("--model", "chat", "smollm2-135m-instruct", "chats, continues text and gives embeddings"),
    ("--whisper-model", "speech", "base", "transcribes"),
    ("--sd-model", "pictures", "stable-diffusion-1.5", "draws"),
)
_NONE = "none"


def main(args: list[str] | None = None) -> int:
    """Run the server until a signal ends it; return its exit code."""
    arguments = parser().parse_args(args)
    return cli.run(lambda: serve(arguments), PROG)


def parser() -> cli.Parser:
    """The command line."""
    top = cli.Parser(
        prog=PROG,
        description="Chat, transcription and pictures over OpenAI's HTTP interface, with a page.",
        epilog=_EXAMPLES,
    )
    _add_network_flags(top.add_argument_group("network"))
    about = (
        "NAME from `python -m weights list`, ORG/REPO of the Hugging Face hub, or a path; "
        "each flag may be given several times; `none` serves none"
    )
    group = top.add_argument_group("models", about)
    for flag, dest, default, does in _MODELS:
        text = f"a model that {does} (default: {default})"
        group.add_argument(flag, dest=dest, action="append", metavar="NAME|PATH", help=text)
    early = "load all models before the first request, instead of each at its first"
    group.add_argument("--load-at-start", action="store_true", help=early)
    ctx = "most tokens of prompt and reply together (default: the model's limit, at most 4096)"
    group.add_argument("--ctx", type=cli.integer(1), metavar="N", help=ctx)
    slots = "chats that go on at the same time; each needs memory for --ctx (default: %(default)s)"
    group.add_argument("--slots", type=cli.integer(1, 256), default=8, metavar="N", help=slots)
    queue = "requests to a model that may wait; more are told to come back (default: %(default)s)"
    group.add_argument("--queue", type=cli.integer(0), default=64, metavar="N", help=queue)
    group.add_argument(
        "--device", metavar="NAME", help="opencl, reference, … (default: ZOO_DEVICE, else the best)"
    )
    exact = "auto: multiply in bf16 where that is fast; f32: exact (default: auto)"
    group.add_argument("--dtype", choices=("auto", "f32"), default="auto", help=exact)
    return top


def _add_network_flags(group: argparse._ArgumentGroup) -> None:
    host = "address to listen at; 0.0.0.0 is all of the machine's (default: %(default)s)"
    group.add_argument("--host", default="127.0.0.1", metavar="ADDRESS", help=host)
    port = "0 takes a free one (default: %(default)s)"
    group.add_argument("--port", type=cli.integer(0, 65535), default=8080, metavar="N", help=port)
    key = "ask for this key; may be given several times (default: ZOO_API_KEY, else none)"
    group.add_argument("--api-key", action="append", default=[], metavar="KEY", help=key)
    file = "ask for one of the keys in a file, a line each, which other users don't see in `ps`"
    group.add_argument("--api-key-file", metavar="FILE", help=file)
    cors = "let pages of this site call the server; `*` all; may be given several times"
    group.add_argument("--cors", action="append", default=[], metavar="ORIGIN", help=cors)
    most = "the largest body of a request, such as a recording (default: %(default)s)"
    group.add_argument(
        "--max-body-mb", type=cli.integer(1, 4096), default=25, metavar="MB", help=most
    )
    grace = "seconds that requests have to end after Ctrl-C or SIGTERM (default: %(default)s)"
    group.add_argument("--grace", type=cli.integer(0), default=10, metavar="S", help=grace)
    group.add_argument("--log", action="store_true", help="a line on stderr for each request")


def serve(arguments: argparse.Namespace) -> int:
    """Listen until a signal comes; 0 after Ctrl-C or SIGTERM, when what was asked is answered."""
    try:
        import python_multipart  # noqa: F401 - Starlette needs it for uploads
        import uvicorn

        from zoo.serve import app, guard, metrics, models
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("uvicorn", "starlette", "python_multipart"):
            raise
        raise UserError(MISSING) from None
    if arguments.device is not None:
        from engine import set_default_device

        set_default_device(arguments.device)
    counts = metrics.Metrics()
    served = models.Models(_options(arguments, models.Options), counts)
    listener = _listener(arguments.host, arguments.port)
    rules = guard.Rules(
        keys=_keys(arguments),
        hosts=(*guard.LOOPBACK, arguments.host) if _is_loopback(arguments.host) else (),
        origins=tuple(arguments.cors),
        most=arguments.max_body_mb << 20,
    )
    if not _is_loopback(arguments.host) and not rules.keys:
        cli.note("(anyone who can reach this machine may use the server; --api-key asks for a key)")
    if arguments.load_at_start and not served.load():
        return 1
    logging.basicConfig(stream=sys.stderr, format="%(message)s")
    level = "info" if arguments.log else "warning"
    config = uvicorn.Config(
        app.application(served, rules, counts),
        http="h11",
        ws="none",
        lifespan="on",
        log_config=None,
        log_level=level,
        access_log=arguments.log,
        server_header=False,
        timeout_graceful_shutdown=arguments.grace,
    )
    cli.note(f"(http://{_address(listener)} - Ctrl-C ends the server)")
    try:
        uvicorn.Server(config).run(sockets=[listener])
    except (KeyboardInterrupt, SystemExit):
        pass  # uvicorn passes on the signal that it has ended for
    return 0


def _options(arguments: argparse.Namespace, kind: type):
    chosen = {}
    for _, dest, default, _ in _MODELS:
        given = getattr(arguments, dest) or [default]
        chosen[dest] = tuple(name for name in given if name != _NONE)
        if not all(name.strip() for name in chosen[dest]):
            raise UsageError("a model's name is empty")
    if not any(chosen.values()):
        raise UsageError("no model is left to be served")
    rest = ("ctx", "slots", "queue", "device", "dtype")
    return kind(**chosen, **{name: getattr(arguments, name) for name in rest})


def _keys(arguments: argparse.Namespace) -> tuple[str, ...]:
    keys = list(arguments.api_key) or [key for key in (os.environ.get("ZOO_API_KEY"),) if key]
    if arguments.api_key_file is not None:
        with open(arguments.api_key_file, encoding="utf-8") as file:
            found = [line.strip() for line in file]
        keys += [key for key in found if key]
        if not keys:
            raise UserError(f"{arguments.api_key_file}: holds no key")
    if not all(key.strip() for key in keys):
        raise UsageError("--api-key is empty")
    return tuple(keys)


def _listener(host: str, port: int) -> socket.socket:
    """A socket that listens; UserError, in one line, where that can't be."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind)
        if os.name != "nt":  # where it would let two servers share a port
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(512)
    except OSError as error:
        reason = error.strerror or error
        raise UserError(f"can't listen at {host}:{port}: {reason}; --port takes another") from None
    return listener


def _address(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
