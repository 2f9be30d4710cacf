"""One allocation that buckets are slices of: storage and views, nothing else."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from overlap.layout import BucketLayout, Member

__all__ = ["FlatBuffer", "member_view"]


class FlatBuffer:
    """Contiguous zeroed storage for some buckets, one after the other.

    Args:
        allocate: Called with the number of elements; returns them, whatever they hold.

    Attributes:
        storage: [sum of the buckets' numel].
        slices: One view [layout.numel] per layout, in the order given.
    """

    def __init__(self, layouts: Sequence[BucketLayout], allocate: Callable[[int], Tensor]) -> None:
        sizes = [layout.numel for layout in layouts]
        self.storage = allocate(sum(sizes)).zero_()
        self.slices = self.storage.split(sizes)


def member_view(bucket: Tensor, member: Member) -> Tensor:
    """The member of a bucket's tensor, in the parameter's shape."""
    return bucket[member.start : member.stop].view(member.spec.shape)
