"""`python -m bench llama`: speed and memory of one LLaMA model, beside its peers.

Sides read the same GGUF file and are given the same token ids. Before anything is timed, the
sides must agree on a greedy continuation; those that compute in a lower precision may differ, and
the report says after how many tokens.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any

from bench.measure import (
    Peer,
    SideError,
    Summary,
    Worker,
    in_turn,
    machine,
    ratios,
    say,
    spelled,
    start_peers,
    usable_cores,
)

OURS = "menagerie"
TEXT = "The capital of France is Paris, and the capital of Italy is"
AGREED = 16  # tokens compared before timing
DECODE_PROMPT = 32  # tokens of prompt before the reply that is timed


_TRANSFORMERS = ("torch", "transformers", "gguf")
PEERS = (
    Peer("transformers f32", "bench.llama_sides:Transformers", _TRANSFORMERS, True),
    Peer("transformers bf16", "bench.llama_sides:Transformers", _TRANSFORMERS, False,
         {"dtype": "bfloat16"}),
    Peer("llama.cpp", "bench.llama_sides:LlamaCpp", ("llama_cpp",), False),
)  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="smollm2-135m-instruct", help="name or GGUF file")
    parser.add_argument("--prompt-tokens", type=int, default=512, metavar="N")
    parser.add_argument("--gen-tokens", type=int, default=128, metavar="N")
    parser.add_argument("--rounds", type=int, default=5, metavar="N")
    parser.add_argument("--device", help="of our side; the peers run on the CPU")
    parser.add_argument("--dtype", default="auto", choices=("auto", "f32"), help="of our side")


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure and return the report; progress goes to stderr. Raises SideError if ours fails."""
    import weights

    path = str(weights.resolve(arguments.model))
    threads = usable_cores()
    if (load := machine().get("load", 0)) > 0.5 * threads:
        say(f"the machine is busy (load {load} on {threads} cores): figures will be low and uneven")
    say(f"{OURS}: loading")
    options = {"path": path, "device": arguments.device, "dtype": arguments.dtype}
    workers = [Worker(OURS, "bench.llama_sides:Menagerie", threads, **options)]
    skipped: dict[str, str] = {}
    try:
        if arguments.peers:
            skipped = start_peers(workers, PEERS, threads, path=path)
        return _measure(workers, skipped, arguments)
    finally:
        for worker in workers:
            worker.close()


def _measure(
    workers: list[Worker], skipped: dict[str, str], arguments: argparse.Namespace
) -> dict[str, Any]:
    text_ids = workers[0].call("encode", text=TEXT)
    first, agreement = _check(workers, skipped, text_ids)
    prompt = _some_ids(arguments.prompt_tokens)
    reply = {"ids": _some_ids(DECODE_PROMPT), "count": arguments.gen_tokens}
    for worker in workers:  # compiles, fills caches, wakes threads
        worker.call("prefill", ids=prompt)
        worker.call("decode", ids=reply["ids"], count=8)

    def timed(worker: Worker, number: int) -> float:
        say(f"round {number + 1} of {arguments.rounds}: {worker.name}")
        prefill[worker.name].append(arguments.prompt_tokens / worker.call("prefill", ids=prompt))
        return arguments.gen_tokens / worker.call("decode", **reply)

    prefill: dict[str, list[float]] = {w.name: [] for w in workers}
    decode = in_turn(workers, timed, arguments.rounds)
    sides = {
        w.name: {
            "prefill_tokens_per_s": Summary.of(prefill[w.name]).json(),
            "decode_tokens_per_s": Summary.of(decode[w.name]).json(),
            "first_token_s": round(first[w.name], 4),
            "load_s": round(w.ready_s, 4),
            "peak_memory_mb": w.call("peak_memory_mb"),
            "tokens_that_agree": agreement[w.name],
        }
        for w in workers
    }
    return {
        "subject": "llama",
        "model": Path(arguments.model).name,
        "prompt_tokens": arguments.prompt_tokens,
        "gen_tokens": arguments.gen_tokens,
        "rounds": arguments.rounds,
        "machine": machine(),
        "sides": sides,
        "ratios": {
            name: {
                "prefill": ratios(prefill[OURS], prefill[name]).json(),
                "decode": ratios(decode[OURS], decode[name]).json(),
            }
            for name in sides
            if name != OURS
        },
        "skipped": skipped,
    }


def _check(
    workers: list[Worker], skipped: dict[str, str], ids: list[int]
) -> tuple[dict[str, float], dict[str, int]]:
    """Seconds to each side's first token, and how many of its greedy tokens equal ours.

    A peer that fails here goes to `skipped`. Raises SideError when ours fails, or when a peer that
    computes in float32 disagrees: then one of the two is wrong, and speed means nothing.
    """
    exact = {peer.name for peer in PEERS if peer.exact}
    first: dict[str, float] = {}
    same: dict[str, int] = {}
    ours: list[int] = []
    for worker in list(workers):
        try:
            first[worker.name] = worker.call("prefill", ids=ids)
            tokens = worker.call("greedy", ids=ids, count=AGREED)
        except SideError as error:
            if worker.name == OURS:
                raise
            skipped[worker.name] = str(error)
            workers.remove(worker)
            worker.close()
            continue
        ours = ours or tokens
        same[worker.name] = common_prefix(ours, tokens)
        if worker.name in exact and same[worker.name] < AGREED:
            raise SideError(f"{worker.name}: greedy tokens differ: {tokens}, ours {ours}")
    return first, same


def common_prefix(a: list[int], b: list[int]) -> int:
    """How many tokens two lists share from the start."""
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))


def _some_ids(count: int) -> list[int]:
    """Token ids that any vocabulary has; the same ones each time."""
    source = random.Random(count)
    return [source.randrange(300, 20000) for _ in range(count)]


def text(report: dict[str, Any]) -> str:
    """The report as a table for people."""
    facts = report["machine"]
    lines = [
        f"{report['model']}: prompt of {report['prompt_tokens']} tokens, reply of "
        f"{report['gen_tokens']}, median of {report['rounds']} rounds (smallest … largest)",
        f"{facts.get('processor', facts['architecture'])}, {facts['cores']} usable cores, "
        f"{' '.join(facts.get('flags', []))}",
        "",
        f"{'':18} {'prefill tokens/s':>24} {'decode tokens/s':>24} {'first token':>12} "
        f"{'load':>8} {'memory':>9} {'agrees':>7}",
    ]
    for name, side in report["sides"].items():
        memory = side["peak_memory_mb"]
        lines.append(
            f"{name:18} {spelled(side['prefill_tokens_per_s']):>24} "
            f"{spelled(side['decode_tokens_per_s']):>24} {side['first_token_s']:>10.2f} s "
            f"{side['load_s']:>6.2f} s {'?' if memory is None else f'{memory:.0f} MB':>9} "
            f"{side['tokens_that_agree']:>4}/{AGREED}"
        )
    for name, ratio in report["ratios"].items():
        prefill, decode = spelled(ratio["prefill"]), spelled(ratio["decode"])
        lines.append(f"{OURS} / {name}: prefill {prefill}, decode {decode}")
    lines += [f"{name}: skipped, {reason}" for name, reason in report["skipped"].items()]
    return "\n".join(lines)


def to_json(report: dict[str, Any]) -> str:
    """The report as one line of JSON."""
    return json.dumps(report)
