"""`python -m bench whisper`: how long a recording takes, beside openai/whisper and faster-whisper.

Sides get the same weights, samples and options. Their texts are compared before anything is timed;
the report says how many words differ from ours, since sides compute in different precisions.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench.measure import (
    ROOT,
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
RATE = 16000  # samples a second
SPEECH = ROOT / "tests/zoo/whisper/data"
SENTENCES = ("jfk.flac", "austen-0870.wav", "austen-0890.wav")  # of a long recording
PAUSES_S = (0.7, 4.0)  # shortest and longest silence between them
PEERS = (
    Peer("openai/whisper f32", "bench.whisper_sides:OpenAI", ("torch", "whisper"), True),
    Peer("faster-whisper int8", "bench.whisper_sides:FasterWhisper", ("faster_whisper",), False,
         {"compute_type": "int8"}),
    Peer("faster-whisper f32", "bench.whisper_sides:FasterWhisper", ("faster_whisper",), False,
         {"compute_type": "float32"}),
)  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="tiny.en", help="name, or CTranslate2 folder")
    parser.add_argument("--audio", default=str(SPEECH / SENTENCES[0]), metavar="FILE")
    parser.add_argument(
        "--long", type=float, metavar="MINUTES", help="speech and silence in turn, instead of FILE"
    )
    parser.add_argument("--batch", type=int, default=1, metavar="N", help="windows at once")
    parser.add_argument("--language", default="en", help="code of the language that is spoken")
    parser.add_argument("--rounds", type=int, default=5, metavar="N")
    parser.add_argument("--device", help="of our side; the peers run on the CPU")
    parser.add_argument("--dtype", default="auto", choices=("auto", "f32"), help="of our side")


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure and return the report; progress goes to stderr. Raises SideError if ours fails."""
    import weights

    path = weights.resolve(arguments.model)
    threads = usable_cores()
    if (load := machine().get("load", 0)) > 0.5 * threads:
        say(f"the machine is busy (load {load} on {threads} cores): figures will be low and uneven")
    samples = recording(arguments)
    shared = {"path": str(path), "language": arguments.language, "batch": arguments.batch}
    own = {"device": arguments.device, "dtype": arguments.dtype}
    workers: list[Worker] = []
    skipped: dict[str, str] = {}
    try:
        say(f"{OURS}: loading")
        workers.append(Worker(OURS, "bench.whisper_sides:Menagerie", threads, **shared, **own))
        if arguments.peers:
            as_openai = str(_as_openai(path))
            skipped = start_peers(workers, PEERS, threads, **shared, openai=as_openai)
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "samples.npy"
            np.save(file, samples)
            return _measure(workers, skipped, str(file), arguments)
    finally:
        for worker in workers:
            worker.close()


def recording(arguments: argparse.Namespace) -> np.ndarray:
    """The samples to transcribe, float32 at 16 kHz."""
    from zoo.whisper.audio import load_audio

    if not arguments.long:
        return load_audio(arguments.audio)
    sentences = [load_audio(str(SPEECH / name)) for name in SENTENCES]
    return speech_and_silence(sentences, round(arguments.long * 60 * RATE))


def speech_and_silence(sentences: Sequence[np.ndarray], length: int) -> np.ndarray:
    """Sentences one after the other with silence of random length between, `length` samples."""
    random = np.random.default_rng(0)
    out = np.zeros(length, np.float32)
    at = number = 0
    while at + len(sentence := sentences[number % len(sentences)]) <= length:
        out[at : at + len(sentence)] = sentence
        at += len(sentence) + int(random.uniform(*PAUSES_S) * RATE)
        number += 1
    return out


def _as_openai(path: Path) -> Path:
    """The same weights as openai/whisper reads them; converted once, kept in the cache."""
    import weights
    from weights.cache import user_cache

    if path.suffix == ".pt":
        return path
    made = user_cache() / "bench" / f"{path.name}.pt"
    if not made.exists():
        say(f"converting {path.name} for openai/whisper")
        made.parent.mkdir(parents=True, exist_ok=True)
        weights.convert(path, made)
    return made


def _measure(
    workers: list[Worker], skipped: dict[str, str], file: str, arguments: argparse.Namespace
) -> dict[str, Any]:
    duration = len(np.load(file, mmap_mode="r")) / RATE
    texts = _texts(workers, skipped, file)

    def timed(worker: Worker, number: int) -> float:
        say(f"round {number + 1} of {arguments.rounds}: {worker.name}")
        return worker.call("transcribe")["seconds"]

    seconds = in_turn(workers, timed, arguments.rounds)
    sides = {
        w.name: {
            "seconds": Summary.of(seconds[w.name]).json(),
            "times_real_time": Summary.of([duration / s for s in seconds[w.name]]).json(),
            "load_s": round(w.ready_s, 4),
            "peak_memory_mb": w.call("peak_memory_mb"),
            "words_that_differ": round(_differing(texts[w.name], texts[OURS]), 4),
            "text": texts[w.name].strip(),
        }
        for w in workers
    }
    others = [name for name in sides if name != OURS]
    return {
        "subject": "whisper",
        "model": Path(arguments.model).name,
        "audio": f"{arguments.long:g} minutes" if arguments.long else Path(arguments.audio).name,
        "duration_s": round(duration, 2),
        "batch": arguments.batch,
        "rounds": arguments.rounds,
        "machine": machine(),
        "sides": sides,
        # how many times as fast ours is
        "ratios": {name: ratios(seconds[name], seconds[OURS]).json() for name in others},
        "skipped": skipped,
    }


def _texts(workers: list[Worker], skipped: dict[str, str], file: str) -> dict[str, str]:
    """What each side hears, which also compiles, fills caches and wakes threads.

    A peer that fails here goes to `skipped`. Raises SideError when ours fails or hears nothing.
    """
    exact = {peer.name for peer in PEERS if peer.exact}
    texts: dict[str, str] = {}
    for worker in list(workers):
        say(f"{worker.name}: first run")
        try:
            worker.call("hear", file=file)
            texts[worker.name] = worker.call("transcribe")["text"]
        except SideError as error:
            if worker.name == OURS:
                raise
            skipped[worker.name] = str(error)
            workers.remove(worker)
            worker.close()
            continue
        differ = _differing(texts[worker.name], texts[OURS])
        if worker.name in exact and differ:
            say(f"{worker.name}: {differ:.1%} of the words differ from ours")
    if not texts[OURS].strip():
        raise SideError(f"{OURS}: no words in this recording")
    return texts


def _differing(text: str, ours: str) -> float:
    """The words that differ from ours, as a part of ours, whatever their spelling."""
    from bench.wer import wer

    return wer(ours, text)


def text(report: dict[str, Any]) -> str:
    """The report as a table for people."""
    facts = report["machine"]
    batch = f", {report['batch']} windows at once" if report["batch"] > 1 else ""
    lines = [
        f"{report['model']}, {report['audio']} ({report['duration_s']:g} s){batch}: greedy, median "
        f"of {report['rounds']} rounds (smallest … largest)",
        f"{facts.get('processor', facts['architecture'])}, {facts['cores']} usable cores, "
        f"{' '.join(facts.get('flags', []))}",
        "",
        f"{'':20} {'seconds':>26} {'x real time':>12} {'load':>8} {'memory':>9} "
        f"{'words that differ':>18}",
    ]
    for name, side in report["sides"].items():
        memory = side["peak_memory_mb"]
        lines.append(
            f"{name:20} {spelled(side['seconds']):>26} {side['times_real_time']['median']:>12.4g} "
            f"{side['load_s']:>6.2f} s {'?' if memory is None else f'{memory:.0f} MB':>9} "
            f"{side['words_that_differ']:>18.1%}"
        )
    for name, ratio in report["ratios"].items():
        lines.append(f"{OURS} / {name}: {spelled(ratio)} times as fast")
    lines += [f"{name}: skipped, {reason}" for name, reason in report["skipped"].items()]
    return "\n".join(lines)


def to_json(report: dict[str, Any]) -> str:
    """The report as one line of JSON."""
    return json.dumps(report)
