"""Fuzz a parser: `python -m tests.weights.fuzz --parser pytorch --inputs 10000 [--seed 0]`.

Each input is a seed file with bytes changed, cut out, copied or put in. Opening it, and reading
all of it, must end in success or a WeightError of one line, within a second, without allocating
more than ten times the file and a constant. An input that does not is kept, and named.
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import tempfile
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.weights import build as b
from tests.weights import build_binary, build_onnx, fuzz_names
from tests.weights import build_torch as t
from weights import WeightError, load
from weights.pickled import OPCODES

SECONDS = 1.0  # of processor time, so that a busy machine is no failure
PER_BYTE, CONSTANT = 10, 2_000_000  # bytes of memory
_DATA = Path(__file__).parent / "data"
_NUMBERS = (0, 1, 2, 127, 128, 255, 2**15, 2**16 - 1, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**63)
_OPCODES = bytes([*OPCODES, ord(".")])


def read_everything(path: Path) -> None:
    """Open a checkpoint, and read its metadata and the bytes of its tensors."""
    checkpoint = load(path, device="reference")
    for key in checkpoint.metadata:
        checkpoint.metadata[key]
    for name in checkpoint:
        assert checkpoint.entries[name].raw().nbytes == checkpoint.info(name).nbytes


@dataclass(frozen=True)
class Parser:
    """What to fuzz: `seeds()` are good files; `open` reads one, given its bytes and a path."""

    seeds: Callable[[], list[bytes]]
    open: Callable[[bytes, Path], None]


def _file(wrap: Callable[[bytes], bytes] = bytes) -> Callable[[bytes, Path], None]:
    def read(raw: bytes, path: Path) -> None:
        path.write_bytes(wrap(raw))
        read_everything(path)

    return read


def _torch_files() -> list[bytes]:
    return [path.read_bytes() for path in sorted(_DATA.glob("*_*.[pc][tk]*"))]


def _torch_pickles() -> list[bytes]:
    """The pickles in those files, so that changes of length keep the archive around them sound."""
    zips = [raw for raw in _torch_files() if raw[:2] == b"PK"]
    starts = [raw.index(b"\x80\x02") for raw in zips]
    found = [raw[at : raw.index(b"PK", at)] for raw, at in zip(zips, starts)]
    return found + [t.pickled(t.mapping(x=t.tensor(), y=t.mapping(z=t.tensor((3,), (1,), 1))))]


def _in_archive(raw: bytes) -> bytes:
    storages = {str(n): bytes(96) for n in range(24)}
    return t.zipped({"a/data.pkl": raw} | {f"a/data/{k}": v for k, v in storages.items()})


SAFETENSORS = {"a": ("F32", (2, 3), bytes(24)), "b": ("BF16", (2,), bytes(4))}
CARRIED = {"format": "menagerie", "config": '{"a": [1, {"b": 2.5}], "tokenizer_files": {}}'}
PARSERS = {
    "pytorch": Parser(_torch_files, _file()),
    "pickle": Parser(_torch_pickles, _file(_in_archive)),
    "gguf": Parser(lambda: [b.small_gguf()], _file()),
    "safetensors": Parser(
        lambda: [b.safetensors(SAFETENSORS, {"format": "pt"}), b.safetensors(SAFETENSORS, CARRIED)],
        _file(),
    ),
    "ggml": Parser(lambda: [build_binary.small_ggml()], _file()),
    "ctranslate2": Parser(lambda: [build_binary.small_ctranslate2()], _file()),
    "onnx": Parser(lambda: [build_onnx.varied()], fuzz_names.open_onnx),
    "diffusers": Parser(fuzz_names.folder_texts, fuzz_names.open_folder),
    "names": Parser(fuzz_names.key_lists, fuzz_names.translate_keys),
}


def mutated(raw: bytes, rng: random.Random, seeds: list[bytes]) -> bytes:
    """`raw` with one to six changes."""
    out = bytearray(raw)
    for _ in range(rng.choice((1, 1, 2, 3, 6))):
        at = rng.randrange(len(out) + 1)
        length = min(int(rng.expovariate(0.1)) + 1, 200)
        kind = rng.randrange(9)
        if kind == 0 and at < len(out):
            out[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            out[at : at + 1] = rng.randbytes(1)
        elif kind == 2:
            size, order = rng.choice((1, 2, 4, 8)), rng.choice(("little", "big"))
            number = rng.choice(_NUMBERS) % 2 ** (8 * size)
            out[at : at + size] = number.to_bytes(size, order)
        elif kind == 3:
            del out[at : at + length]
        elif kind == 4:
            start = rng.randrange(len(out) + 1)
            out[at:at] = out[start : start + length] * rng.choice((1, 1, 1, 2, 50, 500))
        elif kind == 5:
            other = rng.choice(seeds)
            start = rng.randrange(len(other))
            out[at : at + length] = other[start : start + length]
        elif kind == 6:
            out[at:at] = bytes(rng.choices(_OPCODES, k=rng.choice((1, 1, 3, 20))))
        elif kind == 7 and at < len(out):
            out[at] = rng.choice(_OPCODES)
        elif rng.random() < 0.2:
            del out[at:]
    return bytes(out)


def inputs(parser: Parser, count: int, seed: int) -> Iterator[bytes]:
    """`count` inputs, the same for the same seed."""
    rng, seeds = random.Random(seed), parser.seeds()
    for _ in range(count):
        yield mutated(rng.choice(seeds), rng, seeds)


def verdict(parser: Parser, raw: bytes, path: Path) -> str:
    """What an input did: "opened", "refused", or what is wrong with that."""
    outcome = "opened"
    tracemalloc.start()
    start = time.process_time()
    try:
        parser.open(raw, path)
    except WeightError as error:
        outcome = "refused" if str(error).isprintable() else f"not one line: {error!r}"
    except Exception as error:  # noqa: BLE001 - any other is what we look for
        outcome = f"{type(error).__name__}: {error}"
    took, peak = time.process_time() - start, tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    if took > SECONDS:
        return f"took {took:.1f} s, {outcome}"
    if peak > PER_BYTE * len(raw) + CONSTANT:
        return f"allocated {peak} bytes for {len(raw)}, {outcome}"
    return outcome


def fuzz(name: str, count: int, seed: int, folder: Path) -> Counter[str]:
    """Run `count` inputs; counts of verdicts. Inputs that fail are kept in `folder`."""
    parser, counts = PARSERS[name], Counter()
    for number, raw in enumerate(inputs(parser, count, seed)):
        outcome = verdict(parser, raw, folder / "input")
        if outcome not in ("opened", "refused"):
            kept = folder / f"{name}-{seed}-{number}"
            kept.write_bytes(raw)
            outcome += f" ({kept})"
        counts[outcome] += 1
    return counts


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--parser", choices=PARSERS, action="append", help="default: all")
    options.add_argument("--inputs", type=int, default=1000, help="for each parser")
    options.add_argument("--seed", type=int, default=0)
    args = options.parse_args()
    failed, folder = 0, Path(tempfile.mkdtemp(prefix="fuzz-"))
    for name in args.parser or PARSERS:
        counts = fuzz(name, args.inputs, args.seed, folder)
        (folder / "input").unlink(missing_ok=True)
        bad = args.inputs - counts["opened"] - counts["refused"]
        failed += bad
        print(f"{name}: {counts['opened']} opened, {counts['refused']} refused, {bad} failed")
        for outcome in [o for o in counts if o not in ("opened", "refused")][:20]:
            print(f"  {outcome}", file=sys.stderr)
    if not failed:
        shutil.rmtree(folder)
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
