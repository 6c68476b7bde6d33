"""Whisper: a loaded model that writes down what is said in a recording."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

import weights
from weights import Params, WeightError, names
from weights.names import whisper as whisper_names
from zoo import cli
from zoo.errors import UsageError
from zoo.opening import open_model
from zoo.options import names_of, refuse_unknown
from zoo.whisper import decode as decoding
from zoo.whisper import model, timing
from zoo.whisper.audio import N_FRAMES, record
from zoo.whisper.context import Context, Network
from zoo.whisper.languages import code_of
from zoo.whisper.options import DecodingOptions, TranscribeOptions
from zoo.whisper.tokenizer import Tokenizer, tokenizer_of
from zoo.whisper.transcribe import Run
from zoo.whisper.transcript import Segment, Transcript

_SCORED = 32  # positions a call when the logits of all are wanted


class Whisper:
    """A model with its tokenizer. By mel log-mel frames are meant, as `audio.log_mel` gives."""

    def __init__(self, network: Network, tokenizer: Tokenizer, name: str = "model") -> None:
        self.network, self.tokenizer, self.name = network, tokenizer, name
        self.config = network.config

    def transcribe(
        self,
        audio: Any,
        on_segment: Callable[[Segment], None] | None = None,
        progress: Callable[[float, float], None] | None = None,
        on_language: Callable[[str], None] | None = None,
        **options: Any,
    ) -> Transcript:
        """The text of a recording: a path, "-" for stdin, or samples (1-D float32, 16 kHz).

        `on_segment` is called with each segment as it is found, `progress` with the seconds done
        and in all, `on_language` with the code of the language that was heard. `options` are the
        fields of `TranscribeOptions`, such as language, task, beam_size, word_timestamps,
        batch_size. UsageError for options that are unknown or contradict each other, AudioError
        for what can't be read as audio.
        """
        refuse_unknown(options, names_of(TranscribeOptions), "transcribe")
        given = TranscribeOptions(**options)
        recording = record(audio, self.config.n_mels, self.network.device)
        run = Run(self.network, self.tokenizer, recording, given, on_segment, progress)
        begin = run.clips[0][0] if run.clips else 0
        first = recording.mel[:, begin : begin + N_FRAMES]
        run.language = self._language(given.language, lambda: self._listening(first))
        if on_language and given.language is None and self.tokenizer.multilingual:
            on_language(run.language)
        run.work()
        text = "".join(segment.text for segment in run.segments)
        return Transcript(text, run.language, run.segments, recording.duration)

    def encode(self, mel: np.ndarray) -> np.ndarray:
        """Audio features of one window or several: (…, n_mels, up to 3000) -> (…, 1500, C)."""
        mel = self._checked(mel)
        if mel.ndim == 2:
            return self.network.encode(mel)
        return np.stack([self.network.encode(window) for window in mel])

    def logits(self, mel: np.ndarray, tokens: Sequence[int]) -> np.ndarray:
        """The decoder's logits after each of `tokens`, (len(tokens), n_vocab) float32, all from
        one window of mel. UsageError for no tokens, too many, or ids outside the vocabulary."""
        ids = [int(token) for token in tokens]
        if not 0 < len(ids) <= self.config.n_text_ctx:
            raise UsageError(f"tokens are 1 to {self.config.n_text_ctx} ids, got {len(ids)}")
        if not all(0 <= token < self.config.n_vocab for token in ids):
            raise UsageError(f"token ids are from 0 to {self.config.n_vocab - 1}")
        rows = self._listening(mel).rows(1)
        parts = []
        for first in range(0, len(ids), _SCORED):
            places = [min(first + n, len(ids) - 1) for n in range(_SCORED)]
            parts.append(np.array(rows.prompt(0, ids, places)))
        return np.concatenate(parts)[: len(ids)]

    def detect_language(self, mel: np.ndarray) -> dict[str, float]:
        """The probability of each language of one window, by code; only a multilingual model."""
        if not self.tokenizer.multilingual:
            raise UsageError(f"{self.name} knows English only, so it can't tell languages")
        return decoding.detect_language(self._listening(mel), self.tokenizer)

    def decode(self, mel: np.ndarray, seed: int = 0, **options: Any) -> decoding.DecodingResult:
        """The text of one window; `options` are the fields of `DecodingOptions`."""
        refuse_unknown(options, names_of(DecodingOptions), "decode")
        given = DecodingOptions(**options)
        context = self._listening(mel)
        given = replace(given, language=self._language(given.language, lambda: context))
        return decoding.decode(context, self.tokenizer, given, np.random.default_rng(seed))

    def rehearse(self) -> None:
        """Run every program that a transcription with default options uses, on silence."""
        mel = np.zeros((self.config.n_mels, N_FRAMES), np.float32)
        for options in ({}, {"beam_size": 5}, {"temperature": 1.0, "best_of": 5}):
            self.decode(mel, sample_len=4, **options)

    def _language(self, given: str | None, listening: Callable[[], Context]) -> str:
        """The code of the language that is given, or else of the likeliest that is spoken."""
        code = "en" if given is None else code_of(given)
        if not self.tokenizer.multilingual:
            return "en"
        if given is None:
            chances = decoding.detect_language(listening(), self.tokenizer)
            code = max(chances, key=chances.__getitem__)
        return code

    def _listening(self, mel: np.ndarray) -> Context:
        mel = self._checked(mel)
        if mel.ndim != 2:
            raise UsageError(f"mel is one window, (n_mels, frames), got {mel.shape}")
        context = self.network.context(1)
        context.listen(self.network.encode(mel))
        return context

    def _checked(self, mel: np.ndarray) -> np.ndarray:
        mel, bands = np.asarray(mel, np.float32), self.config.n_mels
        if mel.ndim not in (2, 3) or mel.shape[-2] != bands or mel.shape[-1] > N_FRAMES:
            raise UsageError(f"mel is (…, {bands}, up to {N_FRAMES}), got {mel.shape}")
        return mel


def load(
    name_or_path: str | os.PathLike[str] = "base",
    device: str | None = None,
    dtype: str = "auto",
    tune: bool = False,
) -> Whisper:
    """A model by registry or hub name, or by path: OpenAI's `.pt`, a Hugging Face or CTranslate2
    folder, a whisper.cpp file, or what `weights convert` makes of one.

    `tune` looks for faster kernels on this device, for a minute or two: they are kept, and later
    loads use them without it. WeightError for a file that can't be used, DeviceError without the
    device, UsageError for an empty name.
    """
    checkpoint = open_model(name_or_path, device, dtype)
    kind = names.recognise(checkpoint)
    if kind is None or kind[0] != "whisper":
        got = kind[0] if kind else checkpoint.architecture or "something else"
        raise WeightError("not a Whisper model", file=checkpoint.path, got=got)
    tensors = names.canonical(checkpoint)
    config = model.Config(**whisper_names.dims(tensors))
    weights.check(tensors, model.expected_shapes(config))
    tokenizer = tokenizer_of(checkpoint, config.n_vocab)
    heads = timing.heads_of(config, checkpoint.metadata, checkpoint.path.name)
    network = Network(Params(tensors), config, heads, device, dtype)
    whisper = Whisper(network, tokenizer, checkpoint.path.name)
    if tune:
        with cli.tuning(device):
            whisper.rehearse()
    return whisper
