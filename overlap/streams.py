"""The order between streams, for one device.

`torch.cpu` answers for a single stream that needs no ordering, so one code path serves every
device; only events are left out there (torch 2.6 has none for it).
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch

__all__ = ["Mark", "Streams"]


class Mark(NamedTuple):
    """A point in the work of one stream."""

    stream: Any
    event: Any

    def reached(self) -> bool:
        """Whether the device has got there; the host does not wait."""
        return self.event is None or bool(self.event.query())


class Streams:
    """The streams of ``device``, seen from the calling thread."""

    def __init__(self, device: torch.device) -> None:
        module = torch.get_device_module(device)
        self.current = module.current_stream
        self._module = module
        self._sides: dict[str, Any] = {}
        self._has_events = device.type != "cpu"
        self._capturing = getattr(module, "is_current_stream_capturing", None)

    def side(self, name: str) -> Any:
        """The stream of that name beside the current one, whose kernels are placed first (on a CPU:
        the only stream there is). Few of them: streams share the hardware's queues."""
        if not self._has_events:
            return self.current()
        if name not in self._sides:
            self._sides[name] = self._module.Stream(priority=-1)
        return self._sides[name]

    def on(self, stream: Any) -> AbstractContextManager[object]:
        """Make ``stream`` the current one meanwhile."""
        if not self._has_events:
            return nullcontext()
        context: AbstractContextManager[object] = self._module.stream(stream)
        return context

    def mark(self) -> Mark:
        """Remember what the current stream has been given so far."""
        stream = self.current()
        return Mark(stream, stream.record_event() if self._has_events else None)

    def after(self, mark: Mark) -> None:
        """Order the current stream after ``mark``."""
        stream = self.current()
        if stream != mark.stream:
            stream.wait_event(mark.event)

    def capturing(self) -> bool:
        """Whether the current stream is being captured into a graph."""
        return self._capturing is not None and self._capturing()
