"""Speed of one model on one device: loading, prompt, reply, peak memory."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from zoo.errors import UsageError


@dataclass(frozen=True)
class Result:
    """Speeds in tokens per second, times in seconds, memory in MB (10^6 bytes).

    `first_token_s` is the first prompt of the process up to its first token, compiling included;
    the two speeds are measured after that. `peak_memory_mb` is None where the system won't tell.
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

    def json(self) -> str:
        """One line of JSON."""
        rounded = {k: round(v, 4) if isinstance(v, float) else v for k, v in asdict(self).items()}
        return json.dumps(rounded)

    def text(self) -> str:
        """A few lines for people."""
        memory = "unknown" if self.peak_memory_mb is None else f"{self.peak_memory_mb:.0f} MB"
        return "\n".join(
            (
                f"{self.model} on {self.device}",
                f"  load         {self.load_s:8.2f} s",
                f"  first token  {self.first_token_s:8.2f} s",
                f"  prompt       {self.prefill_tokens_per_s:8.1f} tokens/s",
                f"  reply        {self.decode_tokens_per_s:8.1f} tokens/s",
                f"  peak memory  {memory:>8}",
            )
        )


def measure(
    name: str,
    prompt_tokens: int = 512,
    gen_tokens: int = 128,
    device: str | None = None,
    dtype: str = "auto",
    ctx: int | None = None,
    seed: int | None = None,
    tune: bool = False,
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
    prefill_s = _prefill(context, prompt)
    begun = time.perf_counter()
    for _ in range(gen_tokens):
        ids.append(int(context.next_logits(ids).argmax()))
    decode_s = time.perf_counter() - begun
    return Result(
        model=model.name,
        device=_device_name(device),
        prompt_tokens=prompt_tokens,
        gen_tokens=gen_tokens,
        prefill_tokens_per_s=prompt_tokens / prefill_s,
        decode_tokens_per_s=gen_tokens / decode_s,
        first_token_s=first_token_s,
        load_s=load_s,
        peak_memory_mb=peak_memory_mb(),
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
