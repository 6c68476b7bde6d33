"""Continuous batching: replies join and leave a batch of slots while the others go on.

Source: Yu et al. 2022 (Orca), for batching by the step.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from zoo.errors import UserError
from zoo.serve.metrics import Metrics

if TYPE_CHECKING:
    from zoo.llama.batch import Batch
    from zoo.llama.generate import Llama
    from zoo.llama.reply import Reply
    from zoo.llama.sampling import TokenLogprobs


@dataclass(frozen=True)
class Piece:
    """What a step added to a reply: text, often none, and the logprobs of its tokens.

    `finish` says why the reply ended, or `error` what ended it; the last piece has one of them.
    """

    text: str = ""
    logprobs: Sequence[TokenLogprobs] = ()
    finish: str | None = None
    error: Exception | None = None


@dataclass(eq=False)
class Ticket:
    """One reply on its way. `post` is called with each piece, in the scheduler's thread; whoever
    sets `cancelled` wants no more of them."""

    reply: Reply
    post: Callable[[Piece], None]
    cancelled: bool = False
    asked: float = field(default_factory=time.monotonic)
    told: int = 0  # logprobs handed out


class Scheduler:
    """The chats of one model. It belongs to the thread of the model's worker, which calls `add`
    for each that comes and `step` as long as that says that there is more to do."""

    def __init__(
        self, llama: Llama, batch: Batch, embed: Callable[[list[int]], np.ndarray], metrics: Metrics
    ) -> None:
        self.llama, self.batch, self.embed, self.metrics = llama, batch, embed, metrics
        self.waiting: deque[Ticket] = deque()
        self.active: dict[int, Ticket] = {}  # by slot

    def add(self, ticket: Ticket) -> None:
        """Take a ticket in; it waits until there is a slot."""
        self.waiting.append(ticket)

    def step(self) -> bool:
        """Free the slots of who has gone, fill those that are free, and add a token to each reply
        (or a piece of a prompt to the cache); whether there is more to do."""
        for slot in [slot for slot, ticket in self.active.items() if ticket.cancelled]:
            self._leave(slot)
        while self.waiting and len(self.active) < len(self.batch.slots):
            ticket = self.waiting.popleft()
            if not ticket.cancelled:
                self._enter(ticket)
        if self.active:
            self._advance()
        self.metrics.busy.set(len(self.active), self.llama.name)
        return bool(self.active or self.waiting)

    def _enter(self, ticket: Ticket) -> None:
        try:
            slot = self.batch.add(ticket.reply.ids)
        except Exception as error:  # noqa: BLE001 - this reply is told, the others go on
            ticket.post(Piece(error=error))
            return
        self.active[slot] = ticket
        ticket.reply.stats.reused_tokens = self.batch.slots[slot].done

    def _leave(self, slot: int) -> None:
        self.batch.free(slot)
        ticket = self.active.pop(slot)
        stats, name = ticket.reply.stats, self.llama.name
        for kind, count in (
            ("prompt", stats.prompt_tokens),
            ("cached", stats.reused_tokens),
            ("reply", len(stats.ids)),
        ):
            self.metrics.tokens.add(count, name, kind)

    def _advance(self) -> None:
        try:
            rows = self.batch.step()
        except Exception as error:  # noqa: BLE001 - each reply is told, and its owner logs it
            for slot in list(self.active):
                self.active[slot].post(Piece(error=error))
                self._leave(slot)
            return
        self.metrics.steps.add(1, self.llama.name)
        for slot, logits in rows.items():
            self._feed(slot, self.active[slot], logits)

    def _feed(self, slot: int, ticket: Ticket, logits: np.ndarray) -> None:
        reply = ticket.reply
        try:
            token = reply.feed(logits)
        except Exception as error:  # noqa: BLE001 - this reply is told, the others go on
            ticket.post(Piece(error=error))
            self._leave(slot)
            return
        if len(reply.stats.ids) == 1:
            reply.stats.prefill_s = time.monotonic() - ticket.asked
            self.metrics.first_token.add(reply.stats.prefill_s, self.llama.name)
        if reply.finish is None and len(reply.ids) > self.llama.ctx:
            reply.end("context")
        if reply.finish is not None:
            self._leave(slot)
        else:
            self.batch.feed(slot, token)
        new = reply.logprobs[ticket.told :]
        ticket.told += len(new)
        if reply.piece or new or reply.finish:
            ticket.post(Piece(reply.piece, new, reply.finish))


def checked_prompt(llama: Llama, ids: Sequence[int]) -> None:
    """UserError where no token fits behind a prompt."""
    if len(ids) >= llama.ctx:
        raise UserError(
            f"the prompt has {len(ids)} tokens and the context holds {llama.ctx}, "
            "which leaves no room for a reply"
        )
