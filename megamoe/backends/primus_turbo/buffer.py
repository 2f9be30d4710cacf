"""The one symmetric buffer that Primus-Turbo holds per process, as its callers must treat it.

Primus-Turbo makes the buffer for one group, one layer shape and one number of tokens per rank. A
forward that differs in any of them replaces it, collectively, and every backward still to come
would then read the wrong one without a word. So all forwards are padded to the number of tokens
that the buffer was made for; it grows, never shrinks, and all ranks agree before it does.
"""

from __future__ import annotations

import socket
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.autograd.graph import Node

from megamoe.errors import BackendUnavailableError, InputError

__all__ = ["SHARED", "Shape", "SharedBuffer", "Ticket"]

TOKEN_MULTIPLE = 128  # the outputs are wrong for other numbers of tokens


class Shape(NamedTuple):
    """What a buffer is made for, besides the group and the tokens."""

    experts: int  # over all ranks
    topk: int
    hidden: int
    ffn: int


class Ticket(NamedTuple):
    """Which buffer a forward used."""

    tokens: int  # per rank, as padded
    generation: int


class _Ask(NamedTuple):
    """What one rank tells the others before the buffer is replaced."""

    host: str
    shape: Shape
    tokens: int
    unfinished: int


class SharedBuffer:
    """Knows what Primus-Turbo's buffer is made for, and which backwards still need it."""

    def __init__(self) -> None:
        self._group: dist.ProcessGroup | None = None
        self._shape: Shape | None = None
        self._tokens = 0
        self._generation = 0
        self._unfinished: set[object] = set()

    def reserve(self, group: dist.ProcessGroup, shape: Shape, tokens: int) -> Ticket:
        """Return what a forward of ``tokens`` tokens must pad to.

        Free of communication while the buffer fits. Otherwise the ranks of the group exchange what
        they want, and wait for each other: every rank must outgrow the buffer in the same forward.

        Raises InputError, on every rank, where replacing the buffer would break a backward or the
        ranks disagree on the shape; BackendUnavailableError where they are not in one node.
        """
        fits = group is self._group and shape == self._shape and tokens <= self._tokens
        if not fits:
            mine = _Ask(socket.gethostname(), shape, tokens, len(self._unfinished))
            self._tokens = self._agree(mine, _exchange(group, mine))
            self._group, self._shape = group, shape
            self._generation += 1
        return Ticket(self._tokens, self._generation)

    def watch(self, node: Node | None, ticket: Ticket) -> None:
        """Keep the buffer for the backward of ``node`` until it has run or its graph is gone; None
        where there is no backward."""
        if node is None:
            return
        mark = object()
        self._unfinished.add(mark)
        node.register_prehook(_checking(self, ticket))
        node.register_hook(_discarding(self._unfinished, mark))
        weakref.finalize(node, self._unfinished.discard, mark).atexit = False

    def check(self, ticket: Ticket) -> None:
        """Raise InputError if the buffer of that forward has been replaced."""
        if ticket.generation != self._generation:
            raise InputError(
                "backend 'primus_turbo': the shared buffer of this forward "
                f"({ticket.tokens} tokens) has been replaced by a later one's; finish a forward "
                "and its backwards before one with more tokens, another group or another shape"
            )

    def _agree(self, mine: _Ask, asks: list[_Ask]) -> int:
        hosts = sorted({ask.host for ask in asks})
        if len(hosts) > 1:
            raise BackendUnavailableError(
                "backend 'primus_turbo' needs all ranks of the expert-parallel group in one node, "
                f"they are on {hosts}; make expert_model_parallel_size the GPUs of one node"
            )
        if len({ask.shape for ask in asks}) > 1:
            raise InputError(
                "backend 'primus_turbo': the ranks of the expert-parallel group call different "
                f"layers, rank by rank {[tuple(ask.shape) for ask in asks]} (experts, k, hidden, "
                "ffn)"
            )
        if any(ask.unfinished for ask in asks):
            wanted = max(ask.tokens for ask in asks)
            raise InputError(
                f"backend 'primus_turbo' would have to replace its shared buffer ({self._tokens} "
                f"tokens, shape {self._shape and tuple(self._shape)}) by one for {wanted} tokens, "
                f"shape {tuple(mine.shape)}, while the backward of an earlier forward still needs "
                "it; run the forward with the most tokens first, give all layers one shape, or "
                "run that backward before"
            )
        most = max(1, *(ask.tokens for ask in asks))
        return -(-most // TOKEN_MULTIPLE) * TOKEN_MULTIPLE


def _exchange(group: dist.ProcessGroup, mine: _Ask) -> list[_Ask]:
    """Every rank's wish. On a GPU it also waits for what all ranks have launched so far, so nothing
    still writes to the buffer that is then replaced."""
    asks: list[Any] = [None] * dist.get_world_size(group)
    try:
        dist.all_gather_object(asks, mine, group=group)
    except RuntimeError as error:
        raise InputError(
            f"backend 'primus_turbo': this rank has {mine.tokens} tokens, more than the shared "
            "buffer was made for, and not every rank of the expert-parallel group came to enlarge "
            "it in this forward; run the forward with the most tokens first on all ranks"
        ) from error
    return asks


# These must not hold the node, or its graph would never be freed.
def _checking(buffer: SharedBuffer, ticket: Ticket) -> Callable[..., None]:
    return lambda *_: buffer.check(ticket)


def _discarding(unfinished: set[object], mark: object) -> Callable[..., None]:
    return lambda *_: unfinished.discard(mark)


SHARED = SharedBuffer()
"""One, since Primus-Turbo's own is one per process."""
