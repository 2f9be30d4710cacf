"""How many SMs compute should leave to the collectives that are under way right now.

A product that fills the chip and a collective that needs a few SMs run one after the other. So the
kernels ask, at every launch, what to leave free. The answer is taken from the host's books, and the
device is never waited for: a collective is under way from its issue until somebody's wait for it
was enqueued (nothing launched after that can run beside it), or until its event says that it has
ended. A gather is therefore counted from the pre-hook that issues it to the pre-hook that waits; a
reduce-scatter, which is waited for at the end of backward, until the device has got past it.

The collectives of one transport run one after the other, those of different groups side by side:
each transport with something under way counts once.

While a graph is captured the answer is what the replays need, should a collective run beside
them, since a graph keeps the grids it was captured with.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from typing import Protocol

from torch import nn

from overlap.streams import Streams

__all__ = ["Flight", "SmBudget", "Transport", "attach", "detach"]


class Transport(Protocol):
    """What carries collectives one after the other."""

    @property
    def sms(self) -> int:
        """How many SMs they take."""
        ...


class Flight(Protocol):
    """A collective on its way."""

    def done(self) -> bool:
        """Whether it has finished, as far as the device tells without being waited for."""
        ...


class SmBudget:
    """The books. Calling it returns the SMs to leave free at this moment."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._at_capture = 0
        self._under_way: dict[Transport, deque[Flight]] = {}

    def expect(self, *transports: Transport) -> None:
        """Collectives of these may run beside the replays of a graph."""
        self._at_capture = max([self._at_capture, *(transport.sms for transport in transports)])

    def issued(self, transport: Transport, flight: Flight) -> None:
        """A collective has been issued."""
        if transport.sms:
            self._under_way.setdefault(transport, deque()).append(flight)

    def waited(self, transport: Transport, flight: Flight) -> None:
        """The current stream waits for it, and so for all that the transport began before it."""
        flights = self._under_way.get(transport)
        if flights and flight in flights:
            while flights.popleft() is not flight:
                pass

    def __call__(self) -> int:
        if self._streams.capturing():  # events may not be asked for during a capture
            return self._at_capture
        total = 0
        for transport, flights in self._under_way.items():
            while flights and flights[0].done():
                flights.popleft()
            total += transport.sms if flights else 0
        return total


def attach(budget: SmBudget, owner: nn.Module, module: nn.Module) -> None:
    """Hand ``budget`` to every module of ``module`` that has a ``set_sm_budget``, as one and the
    same callable; it answers 0 once ``owner``, whose collectives these are, is gone."""
    reference = weakref.ref(owner)

    def reserved() -> int:
        return 0 if reference() is None else budget()

    _hand(module, reserved)


def detach(module: nn.Module) -> None:
    """Take it back."""
    _hand(module, None)


def _hand(module: nn.Module, budget: Callable[[], int] | None) -> None:
    for child in module.modules():
        setter = getattr(child, "set_sm_budget", None)
        if callable(setter):
            setter(budget)
