"""Speed of one model on one device, in llama-bench's terms; loading and peak memory beside it."""

from __future__ import annotations

import json
import statistics
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

from zoo.errors import UsageError


@dataclass(frozen=True)
class Test:
    """One of llama-bench's tests: `pp512` is a prompt of 512 tokens, `tg128 @ d512` 128 tokens made
    after 512. Speeds in tokens per second: a sample per repetition, their mean and deviation.
    """

    test: str
    n_prompt: int
    n_gen: int
    n_depth: int
    samples_ts: list[float]
    avg_ts: float = field(init=False)
    stddev_ts: float = field(init=False)

    def __post_init__(self) -> None:
        spread = statistics.stdev(self.samples_ts) if len(self.samples_ts) > 1 else 0.0
        object.__setattr__(self, "avg_ts", statistics.fmean(self.samples_ts))
        object.__setattr__(self, "stddev_ts", spread)


@dataclass(frozen=True)
class Result:
    """Speeds in tokens per second, times in seconds, memory in MB (10^6 bytes).

    `first_token_s` is the first prompt of the process up to its first token, compiling included;
    the speeds, means of all repetitions, are measured after that. `peak_memory_mb` is None where
    the system won't tell.
    """

    model: str
    device: str
    prompt_tokens: int
    gen_tokens: int
    prefill_tokens_per_s: float
    decode_tokens_per_s: float
    first_token_s: float
    load_s: float
    peak_memory_mb: float | None
    tests: tuple[Test, ...] = ()

    def json(self) -> str:
        """One line of JSON."""
        return json.dumps(_rounded(asdict(self)))

    def text(self) -> str:
        """A few lines for people."""
        memory = "unknown" if self.peak_memory_mb is None else f"{self.peak_memory_mb:.0f} MB"
        speeds = (
            f"  {each.test:13}{each.avg_ts:8.1f} ± {each.stddev_ts:.1f} tokens/s"
            for each in self.tests
        )
        return "\n".join(
            (
                f"{self.model} on {self.device}",
                f"  load         {self.load_s:8.2f} s",
                f"  first token  {self.first_token_s:8.2f} s",
                *speeds,
                f"  peak memory  {memory:>8}",
            )
        )


def _rounded(value):
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(item) for item in value]
    return round(value, 4) if isinstance(value, float) else value


def measure(
    name: str,
    prompt_tokens: int = 512,
    gen_tokens: int = 128,
    device: str | None = None,
    dtype: str = "auto",
    ctx: int | None = None,
    seed: int | None = None,
    tune: bool = False,
    repetitions: int = 5,
) -> Result:
    """Load a model and time it on random tokens, which cost what any text costs.

    `tune` looks for faster kernels before anything is timed; only the peak memory shows it.
    UsageError when prompt and reply don't fit the context together.
    """
    if tune:
        from zoo.llama.loading import load

        load(name, device, dtype, ctx, tune=True)
    begun = time.perf_counter()
    from zoo.llama.loading import load  # starting the engine is part of loading

    model = load(name, device, dtype, ctx)
    load_s = time.perf_counter() - begun
    context = model.context
    if prompt_tokens + gen_tokens > context.size:
        raise UsageError(_too_long(prompt_tokens, gen_tokens, model))
    random = np.random.default_rng(0 if seed is None else seed)
    prompt = random.integers(0, model.tokenizer.vocab_size, prompt_tokens).tolist()

    first_token_s = _prefill(context, prompt)
    ids = [*prompt, int(random.integers(0, model.tokenizer.vocab_size))]
    context.next_logits(ids)  # compiles the step that is timed below
    _prefill(context, prompt)  # a short prompt's first time has its own way, and compiles another
    prefills, decodes = [], []
    for _ in range(repetitions):
        prefills.append(prompt_tokens / _prefill(context, prompt))
        decodes.append(gen_tokens / _decode(context, ids, gen_tokens))
    tests = (
        Test(f"pp{prompt_tokens}", prompt_tokens, 0, 0, prefills),
        Test(f"tg{gen_tokens} @ d{prompt_tokens}", 0, gen_tokens, prompt_tokens, decodes),
    )
    return Result(
        model=model.name,
        device=_device_name(device),
        prompt_tokens=prompt_tokens,
        gen_tokens=gen_tokens,
        prefill_tokens_per_s=tests[0].avg_ts,
        decode_tokens_per_s=tests[1].avg_ts,
        first_token_s=first_token_s,
        load_s=load_s,
        peak_memory_mb=peak_memory_mb(),
        tests=tests,
    )


def _too_long(prompt_tokens: int, gen_tokens: int, model) -> str:
    total, most = prompt_tokens + gen_tokens, model.config.max_context
    wanted = f"{prompt_tokens} + {gen_tokens} = {total} tokens"
    if total > most:
        return f"{wanted} are too many for the model, which takes at most {most}"
    return f"{wanted} don't fit the context of {model.context.size}; --ctx {total} makes room"


def _prefill(context, prompt: list[int]) -> float:
    """Seconds from an empty context to the first token after `prompt`."""
    context.reset()
    begun = time.perf_counter()
    context.next_logits(prompt).argmax()
    return time.perf_counter() - begun


def _decode(context, ids: list[int], count: int) -> float:
    """Seconds that `count` tokens after `ids` take, of which the last is new to the context."""
    ids = list(ids)
    begun = time.perf_counter()
    for _ in range(count):
        ids.append(int(context.next_logits(ids).argmax()))
    return time.perf_counter() - begun


def _device_name(device: str | None) -> str:
    from engine import get_device

    return str(getattr(get_device(device), "name", device))


def peak_memory_mb() -> float | None:
    """The most memory that this process has held, in MB."""
    try:
        # getrusage counts what the parent held when it forked, this does not.
        status = Path("/proc/self/status").read_text()
        return int(status.split("VmHWM:")[1].split()[0]) * 1024 / 1e6
    except (OSError, IndexError):
        pass
    try:
        import resource
    except ImportError:  # Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 1e6 if sys.platform == "darwin" else peak * 1024 / 1e6
