"""The network at work: windows of audio that were listened to, and rows of tokens after them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial

import numpy as np

from engine import Tensor, program
from engine.dtype import float16, float32
from engine.functional import softmax
from weights import Params
from zoo.errors import UserError
from zoo.whisper import model

SMALL = 768  # width up to which a model is small
FEW = 16  # tokens of a prompt without earlier text: quicker as rows than as tiles


@dataclass(eq=False)
class Network:
    """A checkpoint's programs, compiled on first use; one `Context` per number of windows."""

    params: Params
    config: model.Config
    alignment_heads: Sequence[tuple[int, int]]
    device: str | None = None
    dtype: str = "f32"

    def __post_init__(self) -> None:
        # The texts of small models hang on the last digits: two terms for each number.
        small = self.config.n_audio_state <= SMALL
        self.precision = "high" if self.dtype == "auto" and small else self.dtype
        encode = partial(model.encode, self.params.encoder, self.config)
        self._encoder = cache(lambda precision: program(encode, precision=precision))
        # The context of so many windows at once; there is one of each number.
        self.context: Callable[[int], Context] = cache(partial(Context, self))

    def tensor(self, values: np.ndarray | Sequence) -> Tensor:
        """An array on this network's device: integers as int32, others as float32."""
        array = np.asarray(values)
        kind = np.int32 if array.dtype.kind in "iu" else np.float32
        return Tensor.from_numpy(np.ascontiguousarray(array, kind), device=self.device)

    def empty(self, *shape: int) -> list[Tensor]:
        """A tensor of zeros for every decoder layer, in the type that keys and values have."""
        kind = float32 if self.dtype == "f32" else float16  # half the memory to read each token
        zeros = [Tensor.zeros(*shape, dtype=kind, device=self.device).contiguous()
                 for _ in range(self.config.n_text_layer)]  # fmt: skip
        zeros[0].realize(*zeros[1:])
        return zeros

    def encode(self, mel: np.ndarray, quick: bool = False) -> np.ndarray:
        """Audio features (F, C) of one window's frames (n_mels, up to 2 F).

        `quick`: in half the time, with fewer digits, unless the network's type forbids it.
        """
        frames = np.zeros((1, self.config.n_mels, 2 * self.config.n_audio_ctx), np.float32)
        frames[0, :, : mel.shape[1]] = mel
        encode = self._encoder(self.dtype if quick else self.precision)
        return np.array(encode(self.tensor(frames)).numpy()[0])


class Context:
    """The audio of `windows` windows as the decoder sees it, and searches over their text."""

    def __init__(self, network: Network, windows: int) -> None:
        self.network, self.windows = network, windows
        c = network.config
        shape = (windows * c.n_text_head, c.n_audio_ctx, c.n_text_state // c.n_text_head)
        self.xk, self.xv = network.empty(*shape), network.empty(*shape)
        states = model.Cache([], [], self.xk, self.xv)
        self._listen = program(
            partial(model.listen, network.params.decoder, c, states),
            precision=network.precision if windows == 1 else network.dtype,  # as in `encode`
            window=(0, windows - 1),
        )
        # The token rows of a search with so many candidates a window; one of each number.
        self.rows: Callable[[int], Rows] = cache(partial(Rows, self))

    def listen(self, features: np.ndarray, window: int = 0) -> None:
        """Take in the audio features (F, C) that a window's rows attend to from now on."""
        self._listen(self.network.tensor(features[None]), window=window)


class Rows:
    """The key/value cache of `group` rows of tokens for each window of a context.

    The texts of all windows end in the same column, and each begins in its own; so windows come
    and go as they like, while one program adds a token to each.
    """

    def __init__(self, context: Context, group: int) -> None:
        network, config = context.network, context.network.config
        self.network, self.windows, self.group = network, context.windows, group
        self.count = context.windows * group
        self.column, self.begins = 0, {}  # where the next token goes; where each window's text is
        heads, length = config.n_text_head, config.n_text_ctx
        size = config.n_text_state // heads
        self._columns = 2 * length
        k, v = (network.empty(self.count * heads, self._columns, size) for _ in "kv")
        cache = model.Cache(k, v, context.xk, context.xv)
        p = network.params.decoder

        def prompt(ids: Tensor, places: Tensor, length: int, first: int, window: int) -> Tensor:
            place = model.Place(first, first, row=window * group, window=window)
            x = model.extend(p, config, ids[:, :length], 1, place, cache)
            return model.logits(p, x[0, places])

        def step(ids: Tensor, begins: Tensor, first: int, text: int) -> Tensor:
            place = model.Place(first + text, first, begins if self.windows > 1 else None)
            return model.logits(p, model.extend(p, config, ids, self.windows, place, cache)[:, 0])

        def move(source: Tensor, first: int, to: int, length: int) -> None:
            for state in (*k, *v):
                rows = state.reshape(self.count, heads, self._columns, size)
                taken = rows[source][:, :, first : first + length]
                taken = taken.reshape(self.count * heads, length, size).contiguous()
                state[:, to : to + length] = taken

        def align(ids: Tensor, following: Tensor, length: int, words: int) -> tuple:
            asked: list[Tensor] = []
            x = model.extend(p, config, ids[:, :length], 1, model.Place(0), cache, asked)
            every = Tensor.arange(config.n_vocab)
            logits = Tensor.where(every < Tensor(words), model.logits(p, x[0]), -float("inf"))
            chosen = every == following[:length].unsqueeze(-1)
            chances = (softmax(logits) * chosen).sum(-1)
            scores = model.alignment(asked, cache, network.alignment_heads)
            rest = (0, config.n_text_ctx - length)  # what is read has one size
            return scores.pad([(0, 0), rest, (0, 0)]), chances.pad([rest])

        captured = partial(program, precision=network.precision)
        self._align = captured(align, length=(2, length), words=(1, config.n_vocab))
        # Prompts are multiplied in float32: over the copy of the weights that single steps use.
        exact = partial(program, prompt, precision="f32")
        place = {"first": (0, length), "window": (0, self.windows - 1)}
        self._prompts = {n: exact(length=(1, n), **place) for n in (FEW, length)}
        self._step = captured(step, first=(0, length), text=(0, length - 1))
        bounds = {"first": (0, length), "to": (0, length), "length": (1, length)}
        self._move = captured(move, **bounds)

    def prompt(self, window: int, ids: Sequence[int], places: Sequence[int]) -> np.ndarray:
        """Start the first row of a window with `ids`.

        Returns the logits after the tokens at `places`: (places, n_vocab) float32.
        """
        self.begins.pop(window, None)
        self._make_room(len(ids))
        self.begins[window] = first = self.column - len(ids)
        size = next(size for size in self._prompts if size >= len(ids))
        padded = np.zeros((1, size), np.int32)
        padded[0, : len(ids)] = ids
        where = {"length": len(ids), "first": first, "window": window}
        tensor = self.network.tensor
        return self._prompts[size](tensor(padded), tensor(places), **where).numpy()

    def step(self, ids: Mapping[int, Sequence[int]]) -> dict[int, np.ndarray]:
        """Add a token to each row of some windows, those that go on; their logits (group, n_vocab).

        The texts of other windows are given up.
        """
        self.begins = {window: self.begins[window] for window in ids}
        first = min(self.begins.values())
        tokens = np.zeros((self.windows, self.group), np.int32)
        begins = np.full((self.windows, self.group), self.column, np.int32)
        for window, row in ids.items():
            tokens[window], begins[window] = row, self.begins[window]
        tensor, text = self.network.tensor, self.column - first
        inputs = tensor(tokens.reshape(-1, 1)), tensor(begins.reshape(-1))
        logits = self._step(*inputs, first=first, text=text).numpy()
        self.column += 1
        return {w: np.array(logits[w * self.group : (w + 1) * self.group]) for w in ids}

    def reorder(self, sources: Mapping[int, Sequence[int]]) -> None:
        """Row i of a window becomes what its row sources[window][i] was."""
        source = np.arange(self.count).reshape(self.windows, self.group)
        for window, rows in sources.items():
            source[window] = window * self.group + np.asarray(rows)
        if (source.reshape(-1) != np.arange(self.count)).any():
            first = min(self.begins.values())
            self._moved(first, first, source.reshape(-1))

    def _make_room(self, length: int) -> None:
        """Move the texts so that one more with `length` tokens can end where they do, and that all
        may become as long as the model allows."""
        first = min(self.begins.values(), default=self.column)
        text = self.column - first
        if text < length or self.column + self._columns // 2 > self._columns + length:
            self._moved(first, max(0, length - text), np.arange(self.count))

    def _moved(self, first: int, to: int, source: np.ndarray) -> None:
        if length := self.column - first:
            where = {"first": first, "to": to, "length": length}
            self._move(self.network.tensor(source), **where)
        self.column += to - first
        self.begins = {window: begin + to - first for window, begin in self.begins.items()}

    def align(
        self, begin: Sequence[int], text: Sequence[int], eot: int, frames: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """How a text lies on the audio of the context's one window.

        Returns how much each alignment head looks at the first `frames` positions of the audio for
        each token of `begin`, `text` and the end, (heads, tokens, frames), and the probability of
        each token of `text` among those of words (ids below `eot`).
        """
        ids = [*begin, *text, eot]
        if len(ids) > self.network.config.n_text_ctx:
            raise UserError(f"{len(ids)} tokens are too many to align")
        padded = np.zeros((2, self.network.config.n_text_ctx), np.int32)
        padded[0, : len(ids)] = ids
        padded[1, : len(ids) - 1] = ids[1:]  # what comes after each
        tensor = self.network.tensor
        out = self._align(tensor(padded[:1]), tensor(padded[1]), length=len(ids), words=eot)
        scores, chances = (t.numpy() for t in out)
        scores = scores[:, : len(ids), :frames]
        scores = np.exp(scores - scores.max(-1, keepdims=True))
        first = len(begin) - 1
        return scores / scores.sum(-1, keepdims=True), chances[first : first + len(text)]
