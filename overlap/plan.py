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
        gather_issued, gather_waited, reduce_issued: Where each happens, in words.
    """

    name: str
    parameters: tuple[str, ...]
    param_bytes: int
    grad_bytes: int
    padding: int
    group: str
    group_size: int
    gather_issued: str
    gather_waited: str
    reduce_issued: str

    @property
    def silent(self) -> bool:
        """A group of one has nothing to move."""
        return self.group_size == 1


@dataclass(frozen=True)
class Plan:
    """All buckets in the order of their gathers. ``str()`` is a table."""

    buckets: tuple[BucketPlan, ...]
    reduce_order: tuple[str, ...]
    learned: bool

    def __str__(self) -> str:
        head = ("bucket", "params", "gather", "reduce", "padding", "group", "gather issued in")
        rows: list[tuple[str, ...]] = [(*head, "waited for in", "reduce issued in")]
        for b in self.buckets:
            rows.append(
                (
                    b.name,
                    str(len(b.parameters)),
                    _bytes(b.param_bytes),
                    _bytes(b.grad_bytes),
                    str(b.padding),
                    f"{b.group} x{b.group_size}",
                    *(
                        ("no collective: a group of one", "-", "-")
                        if b.silent
                        else (b.gather_issued, b.gather_waited, b.reduce_issued)
                    ),
                )
            )
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in rows
        ]
        source = "as first used" if self.learned else "as registered (a guess until the first step)"
        return "\n".join(
            [f"gather order: {source}; reduce order: {' > '.join(self.reduce_order)}", *lines]
        )


def _bytes(count: int) -> str:
    size = float(count)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:.4g} GiB"
