"""When gradients are reduced.

A parameter's post-accumulate-grad hook moves its gradient into the bucket. When all members of a
bucket have reported on the last microbatch, the bucket is ready and its reduce-scatter is issued
from that very hook, before autograd goes on to the next node.

As for the gathers, there is one order, the same on every rank, and reduce-scatters are issued only
along it, after the last gather: a ready bucket waits for those before it. The first guess is the
order of registration reversed; from the second iteration on it is the order in which rank 0 saw the
buckets become ready. In a model without branches either is the order of backward, so nobody waits.
A parameter that gets no gradient holds its bucket, and all after it, until `finish`; buckets that
were not ready in the first iteration are therefore put last.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from overlap.bucket import Bucket, Slot
from overlap.errors import UnusedParameterError
from overlap.gather import GatherSchedule

__all__ = ["ReduceSchedule"]


class ReduceSchedule:
    """Issues and waits for the reduce-scatters of ``buckets``.

    Attributes:
        order: The buckets in the order in which they are reduced.
        sync: This backward is the iteration's last (False inside no_sync).
        rounds: How many times all gradients have been reduced.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        gather: GatherSchedule,
        *,
        overlap: bool,
        serialize: bool,
        zero_unused: bool,
    ) -> None:
        self.order = list(reversed(buckets))
        self.sync = True
        self.rounds = 0
        self._gather = gather
        self._overlap = overlap
        self._serialize = serialize
        self._zero_unused = zero_unused
        self._issued = 0  # order[: _issued] have been issued
        self._started = False  # a gradient of the last microbatch has arrived
        self._finished = False
        self._readied: dict[Bucket, None] | None = {}  # in order; None once learned

    # The backward

    def on_grad(self, slot: Slot) -> None:
        """Take in the gradient that autograd has just left in ``slot.param.grad``."""
        bucket = slot.bucket
        # Taken away first: left behind by an error below, it would be added to the next one.
        grad, slot.param.grad = slot.param.grad, None
        assert grad is not None
        if slot.forward != self._gather.iteration:
            self._gather.used_outside_forward(slot)
        bucket.accumulate(slot, grad)
        if self.sync and not slot.reported:
            slot.reported = self._started = True
            bucket.missing -= 1
            if not bucket.missing:
                self._on_ready(bucket)

    def _on_ready(self, bucket: Bucket) -> None:
        if self._readied is not None:
            self._readied[bucket] = None
        if self._overlap:
            while self._issued < len(self.order) and not self.order[self._issued].missing:
                self._issue_next()

    def _issue_next(self) -> None:
        if not self._issued:
            self._gather.issue_all()
        bucket = self.order[self._issued]
        bucket.issue_reduce()
        self._issued += 1
        if self._serialize:
            bucket.finish_reduce()

    def finish(self) -> None:
        """Issue and wait for all that is left; after that the shards hold the reduced gradients.

        Raises:
            UnusedParameterError: A parameter got no gradient since the last reset, and that was
                not allowed.
        """
        if not self._finished:
            self.issue()
            self._finish()

    def issue(self) -> list[Bucket]:
        """Issue what is left, and return the buckets to wait for, and step, before the others: the
        half of the bytes that was issued first, so that the other half can travel meanwhile. None
        where nothing travels.

        Raises:
            UnusedParameterError: As `finish`.
        """
        if self._finished:
            return []
        if not self._zero_unused:
            self._check_all_used()
        self._issue_all()
        early = self.first_half() if self._overlap else []
        return early if any(bucket.reducing for bucket in self.order[len(early) :]) else []

    def first_half(self) -> list[Bucket]:
        """The buckets that hold the half of the bytes which is issued first."""
        reached = itertools.accumulate(bucket.layout.nbytes for bucket in self.order)
        half = sum(bucket.layout.nbytes for bucket in self.order) / 2
        return [b for b, so_far in zip(self.order, reached, strict=True) if so_far <= half]

    def _check_all_used(self) -> None:
        unused = [slot.name for bucket in self.order for slot in bucket.slots if not slot.arrived]
        if unused:
            raise UnusedParameterError(
                f"{len(unused)} trainable parameter(s) got no gradient in this iteration: "
                f"{_some(unused)}. Freeze them (requires_grad=False before wrapping), let them "
                'take part in the loss, or set unused_parameters="zero"'
            )

    def _issue_all(self) -> None:
        while self._issued < len(self.order):
            self._issue_next()

    def _finish(self) -> None:
        self._issue_all()
        for bucket in self.order:
            bucket.finish_reduce()
        self._finished = True
        self.rounds += 1

    def reset(self) -> None:
        """Drop all gradients. Where some have been reduced, the rest is reduced first, since the
        other ranks count on it."""
        if (self._started or self._issued) and not self._finished:
            self._finish()
        for bucket in self.order:
            bucket.reset_grads()
        self._issued = 0
        self._started = self._finished = False

    # What the first iteration teaches

    def observed(self) -> list[Bucket]:
        """The order in which buckets became ready; the others come last, in the order guessed."""
        return list(dict.fromkeys((*(self._readied or ()), *self.order)))

    def adopt(self, order: Sequence[Bucket]) -> None:
        """Use ``order``, the same on all ranks; nothing may be under way."""
        assert set(order) == set(self.order)
        self.order = list(order)
        self._issued = len(order) if self._finished else 0
        self._readied = None


def _some(names: Sequence[str], most: int = 8) -> str:
    """The first few names."""
    rest = len(names) - most
    return ", ".join(names[:most]) + (f" and {rest} more" if rest > 0 else "")
