"""When parameters are gathered.

All buckets, dense and expert, stand in one order. Gathers are only ever issued along it: a bucket
that is needed early drags those before it along. So every rank issues the same collectives in the
same order whatever its own forward does, and a wrong order costs time, never correctness.

After an optimizer step every bucket is stale. The step itself issues the first gathers; from then
on a module's forward pre-hook waits for the module's own buckets and issues the next
``prefetch_depth`` ones. Waiting comes first: a bucket that is still on its way should not share
the wires with one that is needed later. For an expert layer with depth 1 this means that the
pre-hook of fc1_weight issues the gather of fc2_weight before stage1 is enqueued, and that the
pre-hook of fc2_weight only waits.

A bucket much smaller than the next one brings too little compute to hide that: the next one is then
issued with it. So a handful of router weights at the front does not keep the step from issuing the
first expert weight.

The order starts as the order of registration and is replaced, at the first optimizer step, by the
order of first use that rank 0 has seen until then.
"""

from __future__ import annotations

from collections.abc import Sequence

from overlap.bucket import Bucket, ParamState, Slot
from overlap.errors import StaleParameterError
from overlap.streams import Streams

__all__ = ["GatherSchedule"]

SMALL = 16  # times smaller than the next bucket: its own compute does not count


class GatherSchedule:
    """Issues and waits for the gathers of ``buckets``.

    Attributes:
        order: The buckets in the order in which they are gathered.
        iteration: How many optimizer steps there have been.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        streams: Streams,
        *,
        depth: int,
        overlap: bool,
        serialize: bool,
    ) -> None:
        self.order = list(buckets)
        self.iteration = 0
        self._streams = streams
        self._depth = depth
        self._overlap = overlap
        self._serialize = serialize
        self._position = {bucket: index for index, bucket in enumerate(self.order)}
        self._issued = len(self.order)  # the gathers of order[: _issued] have been issued
        self._unready = 0  # buckets that are not READY
        self._started = False  # the first gathers of the step under way have been issued
        self._untouched = False  # no forward hook has run since the step
        self._late: dict[Bucket, int] = {}  # the last iteration with a gather that ended in a hook
        self._first_uses: dict[Bucket, None] | None = {}  # in order; None once learned
        self._eager: dict[Bucket, None] = {}  # waited for before anything else

    # The forward

    def before_forward(self, slots: Sequence[Slot], buckets: Sequence[Bucket]) -> None:
        """Make ``buckets`` safe to read: the pre-hook of the module that owns ``slots``."""
        for slot in slots:
            slot.forward = self.iteration
        if self._first_uses is not None:
            self._first_uses.update(dict.fromkeys(buckets))
        if self._unready:
            self._gather_for(buckets)
        for bucket in buckets:
            assert bucket.param_state is ParamState.READY, (bucket.name, bucket.param_state)
            self._streams.after(bucket.ready)

    def before_read(self, slot: Slot) -> None:
        """Make one parameter safe to read outside the forward of its module."""
        if slot.forward == self.iteration:
            return
        slot.forward = self.iteration
        if slot.bucket.param_state is not ParamState.READY:
            self._fetch(slot.bucket)
            self._late[slot.bucket] = self.iteration
        self._streams.after(slot.bucket.ready)

    def _gather_for(self, buckets: Sequence[Bucket]) -> None:
        if self._untouched:
            self._untouched = False
            for bucket in self._eager:
                self._fetch(bucket)
        for bucket in buckets:
            if bucket.param_state is not ParamState.READY:
                self._fetch(bucket)
                self._late[bucket] = self.iteration
        for bucket in buckets:
            self._issue_through(self._reach(self._position[bucket] + self._depth))

    def _reach(self, position: int) -> int:
        """Where to stop issuing, if all up to ``position`` is meant to be."""
        if self._depth:
            while position + 1 < len(self.order):
                this, following = self.order[position : position + 2]
                if this.layout.nbytes * SMALL > following.layout.nbytes:
                    break
                position += 1
        return position

    def _fetch(self, bucket: Bucket) -> None:
        self._issue_through(self._position[bucket])
        self._wait(bucket)

    def _issue_through(self, position: int) -> None:
        while self._issued <= position and self._issued < len(self.order):
            bucket = self.order[self._issued]
            bucket.issue_gather()
            self._issued += 1
            if self._serialize:
                self._wait(bucket)

    def _wait(self, bucket: Bucket) -> None:
        if bucket.param_state is not ParamState.READY:
            bucket.finish_gather()
            self._unready -= 1

    def issue_all(self) -> None:
        """Issue what is left, so that another collective may follow on the same groups: ranks
        whose forwards skipped different modules have issued different numbers of gathers."""
        self._issue_through(len(self.order) - 1)

    def finish(self) -> None:
        """Issue and wait for all that is left. A collective: every rank has to come here, or to
        run its forward, before any of them gets on."""
        if self._unready:
            self.issue_all()
            self.finish_issued()

    def finish_issued(self) -> None:
        """Wait for what is on its way, and issue nothing."""
        for bucket in self.order[: self._issued]:
            self._wait(bucket)

    # The optimizer step

    def first(self) -> list[Bucket]:
        """The buckets that the step should write, and gather, before the others."""
        return self.order[: self._reach(max(1, self._depth) - 1) + 1] if self._overlap else []

    def issuer(self, position: int) -> int | None:
        """Whose pre-hook, by its place in the order, issues the gather at ``position``; None where
        the step does."""
        if position < len(self.first()):
            return None
        return next(p for p in range(position + 1) if self._reach(p + self._depth) >= position)

    def invalidate(self, buckets: Sequence[Bucket]) -> None:
        """The optimizer has written its shards of ``buckets``."""
        for bucket in buckets:
            bucket.stepped()
        self._unready += len(buckets)

    def start(self) -> None:
        """Issue the gathers of `first`, which have been invalidated."""
        self.iteration += 1
        self._started = True
        self._issued = 0
        self._untouched = True
        self._issue_through(len(self.first()) - 1)

    def finish_step(self) -> None:
        """All buckets have been invalidated."""
        if not self._started:
            self.start()
        self._started = False
        if not self._overlap:
            self.finish()

    # What the first iteration teaches

    @property
    def learning(self) -> bool:
        return self._first_uses is not None

    def observed(self) -> list[Bucket]:
        """The order of first use; buckets that were not used come last, in the order guessed."""
        assert self._first_uses is not None
        return list(dict.fromkeys((*self._first_uses, *self.order)))

    def adopt(self, order: Sequence[Bucket]) -> None:
        """Use ``order``, the same on all ranks, from the next step on."""
        assert set(order) == set(self.order)
        assert not self._unready
        self.order = list(order)
        self._position = {bucket: index for index, bucket in enumerate(self.order)}
        self._first_uses = None

    def used_outside_forward(self, slot: Slot) -> None:
        """A gradient of ``slot`` arrived, yet no module that owns it ran its forward or was asked
        for it: somebody keeps the parameter itself.

        In the first iteration that is a lesson: from then on its bucket is waited for before any
        forward. Later it is an error, where the parameter can have been read too early.
        """
        bucket = slot.bucket
        late = self._late.get(bucket) == self.iteration
        if bucket.param_state is ParamState.READY and not late:
            if self._first_uses is not None:
                self._eager[bucket] = None
            return
        raise StaleParameterError(
            f"{slot.name} was used, but not through its module, and may have been read before its "
            "all-gather had finished. Read it as an attribute of its module, or use it like this "
            "from the first iteration on, or call ddp.finish_param_sync() before the forward"
        )
