"""A module's parameters, made safe to read at any time.

`nn.Module` looks parameters up in its ``_parameters`` mapping: for ``module.weight``, for
``parameters()``, for ``state_dict()`` and for a deep copy. In a wrapped model that mapping first
waits for the gather of what is read, so that code which reads weights outside a forward (a moving
average, a norm to log, attention that uses its output projection's weight itself) sees the values
of the last step. What it cannot see is a parameter that somebody keeps in a list of his own; see
`GatherSchedule.used_outside_forward` for those.

Reading is then a collective wherever a gather is still to come: every rank has to get to the same
gather, by a read or by a forward, before any of them gets on.
"""

from __future__ import annotations

import weakref
from collections.abc import ItemsView, ValuesView
from typing import Any

from torch import nn

from overlap.bucket import Slot
from overlap.gather import GatherSchedule

__all__ = ["GuardedParameters"]


class GuardedParameters(dict[str, "nn.Parameter | None"]):
    """The ``_parameters`` of one module; ``slots`` are those of them that lie in buckets."""

    def __init__(
        self,
        parameters: dict[str, nn.Parameter | None],
        schedule: GatherSchedule,
        slots: dict[str, Slot],
    ) -> None:
        super().__init__(parameters)
        self._schedule = weakref.ref(schedule)
        self._slots = slots

    def _wait(self) -> None:
        schedule = self._schedule()
        if schedule is not None:
            for slot in self._slots.values():
                schedule.before_read(slot)

    def __getitem__(self, name: str) -> nn.Parameter | None:
        slot = self._slots.get(name)
        if slot is not None:
            schedule = self._schedule()
            if schedule is not None:
                schedule.before_read(slot)
        return super().__getitem__(name)

    def values(self) -> ValuesView[nn.Parameter | None]:  # type: ignore[override]
        self._wait()
        return super().values()

    def items(self) -> ItemsView[str, nn.Parameter | None]:  # type: ignore[override]
        self._wait()
        return super().items()

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Copies and pickles are plain: they are of a model that nobody wraps."""
        self._wait()
        return dict, (dict(self),)
