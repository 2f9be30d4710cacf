"""The plan of a wrapped model, for people: which bucket moves when, by whom, and who waits."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["BucketPlan", "Plan"]


@dataclass(frozen=True)
class BucketPlan:
    """One bucket's row.

    Attributes:
        parameters: Names of the members.
        param_bytes, grad_bytes: What one all-gather and one reduce-scatter move, padding included.
        padding: Elements that belong to no parameter.
        group: "dp" or "edp".
        gather_by, reduce_by: The transports, in words.
        gather_issued, gather_waited, reduce_issued: Where each happens, in words; "#3" is the
            bucket that comes fourth in the order of the gathers.
    """

    name: str
    parameters: tuple[str, ...]
    param_bytes: int
    grad_bytes: int
    padding: int
    group: str
    group_size: int
    gather_by: str
    reduce_by: str
    gather_issued: str
    gather_waited: str
    reduce_issued: str

    @property
    def silent(self) -> bool:
        """A group of one has nothing to move."""
        return self.group_size == 1


@dataclass(frozen=True)
class Plan:
    """All buckets in the order of their gathers. ``str()`` lists them, four lines each.

    Attributes:
        emulated: The link that stands in for a network; empty where collectives are real.
    """

    buckets: tuple[BucketPlan, ...]
    reduce_order: tuple[str, ...]
    learned: bool
    emulated: str = ""

    def __str__(self) -> str:
        number = {bucket.name: index for index, bucket in enumerate(self.buckets)}
        source = "as first used" if self.learned else "as registered (a guess until the first step)"
        lines = [f"EMULATED collectives: {self.emulated}"] if self.emulated else []
        lines.append(f"gather order: {source}")
        for bucket in self.buckets:
            count = len(bucket.parameters)
            lines += [
                f"#{number[bucket.name]} {bucket.name}",
                f"    {bucket.group} x{bucket.group_size}, {count} parameter{'s' * (count > 1)}, "
                f"padding {bucket.padding}",
            ]
            if bucket.silent:
                lines.append("    a group of one: nothing to move")
                continue
            lines += [
                f"    gather {_bytes(bucket.param_bytes)} by {bucket.gather_by} from "
                f"{bucket.gather_issued}, waited for in {bucket.gather_waited}",
                f"    reduce {_bytes(bucket.grad_bytes)} by {bucket.reduce_by} from "
                f"{bucket.reduce_issued}, "
                "waited for in finish_grad_sync",
            ]
        order = " > ".join(f"#{number[name]}" for name in self.reduce_order)
        return "\n".join([*lines, f"reduce order: {order}"])


def _bytes(count: int) -> str:
    size = float(count)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:.4g} GiB"
