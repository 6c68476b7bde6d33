"""The runtimes that `bench llama` compares, each behind the same few methods.

Imports of a runtime happen in `load`, in that side's own process.
"""

from __future__ import annotations

import inspect
import time
from pathlib import Path
from typing import Any

from bench.measure import peak_memory_mb

CONTEXT = 1024  # tokens; room for the prompt and the reply that are timed


class Side:
    """A loaded model: `begin` takes a prompt, `step` a token, both give the likeliest next one."""

    def load(self, path: str, threads: int, **options: Any) -> None:
        raise NotImplementedError

    def begin(self, ids: list[int]) -> int:
        raise NotImplementedError

    def step(self, token: int) -> int:
        raise NotImplementedError

    def greedy(self, ids: list[int], count: int) -> list[int]:
        """The `count` likeliest tokens after a prompt, one after the other."""
        out = [self.begin(ids)]
        while len(out) < count:
            out.append(self.step(out[-1]))
        return out

    def prefill(self, ids: list[int]) -> float:
        """Seconds from a prompt to its first token."""
        begun = time.perf_counter()
        self.begin(ids)
        return time.perf_counter() - begun

    def decode(self, ids: list[int], count: int) -> float:
        """Seconds for `count` tokens after the first one."""
        token = self.begin(ids)
        begun = time.perf_counter()
        for _ in range(count):
            token = self.step(token)
        return time.perf_counter() - begun

    def peak_memory_mb(self) -> float | None:
        """The most memory this process has held, in MB (10^6 bytes)."""
        return peak_memory_mb()


class Menagerie(Side):
    """This project."""

    def load(self, path: str, threads: int, device: str | None = None, dtype: str = "auto") -> None:
        import zoo.llama

        self.model = zoo.llama.load(path, device=device, dtype=dtype, ctx=CONTEXT)
        self.ids: list[int] = []

    def encode(self, text: str) -> list[int]:
        return [int(i) for i in self.model.tokenizer.encode(text)]

    def begin(self, ids: list[int]) -> int:
        self.ids = list(ids)
        self.model.context.reset()
        return int(self.model.context.next_logits(self.ids).argmax())

    def step(self, token: int) -> int:
        self.ids.append(token)
        return int(self.model.context.next_logits(self.ids).argmax())


class Transformers(Side):
    """transformers on torch, from the same GGUF file, dequantised as it loads."""

    def load(self, path: str, threads: int, dtype: str = "float32") -> None:
        import torch
        from transformers import AutoModelForCausalLM, DynamicCache

        torch.set_num_threads(threads)
        file = Path(path)
        self.torch, self.new_cache = torch, DynamicCache
        self.model = AutoModelForCausalLM.from_pretrained(
            file.parent, gguf_file=file.name, dtype=getattr(torch, dtype)
        ).eval()
        # Newer releases renamed the argument and warn about the old name.
        parameters = inspect.signature(self.model.forward).parameters
        self.cache_name = "cache" if "cache" in parameters else "past_key_values"

    def begin(self, ids: list[int]) -> int:
        self.cache = self.new_cache(config=self.model.config)
        return self._next(ids)

    def step(self, token: int) -> int:
        return self._next([token])

    def _next(self, ids: list[int]) -> int:
        with self.torch.inference_mode():
            out = self.model(
                self.torch.tensor([ids]),
                use_cache=True,
                logits_to_keep=1,
                **{self.cache_name: self.cache},
            )
        return int(out.logits[0, -1].argmax())


class LlamaCpp(Side):
    """llama.cpp through llama-cpp-python."""

    def load(self, path: str, threads: int) -> None:
        import llama_cpp

        self._without_repacking(llama_cpp.llama_cpp)
        self.library = llama_cpp
        self.model = llama_cpp.Llama(
            path, n_ctx=CONTEXT, n_batch=512, n_threads=threads, n_threads_batch=threads,
            verbose=False,
        )  # fmt: skip

    @staticmethod
    def _without_repacking(binding: Any) -> None:
        """Leave weights in the file's layout: repacked for AMX, Q4_1 crashes on some versions."""
        defaults = binding.llama_model_default_params
        if "use_extra_bufts" not in dict(binding.llama_model_params._fields_):
            return

        def changed() -> Any:
            parameters = defaults()
            parameters.use_extra_bufts = False
            return parameters

        binding.llama_model_default_params = changed

    def begin(self, ids: list[int]) -> int:
        self.model.reset()
        return self._next(ids)

    def step(self, token: int) -> int:
        return self._next([token])

    def _next(self, ids: list[int]) -> int:
        import numpy as np

        self.model.eval(ids)
        logits = self.library.llama_get_logits_ith(self.model.ctx, -1)
        return int(np.ctypeslib.as_array(logits, (self.model.n_vocab(),)).argmax())
