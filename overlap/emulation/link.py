"""What is emulated: a link's bandwidth and latency, and what drives it."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["EmulatedLink"]

_CLUSTERS = (1, 2, 4, 8)  # Hopper's portable cluster sizes that are powers of two


@dataclass(frozen=True, kw_only=True)
class EmulatedLink:
    """The link between the emulated ranks. All groups that share it share its bandwidth.

    Attributes:
        bandwidth: Bus bandwidth in GB/s (1e9 bytes), as nccl-tests report it: a gather or a
            reduce-scatter over n ranks moves (n - 1) / n of its bytes, an all-reduce twice that.
        latency: Microseconds that a collective takes however few bytes it moves.
        ctas: CTAs of the copy kernel, each on an SM of its own; 0 is the copy engine, which takes
            no SM. More bandwidth than the CTAs can copy (roughly 20 GB/s each) is not reached.
        clusters: CTAs that are launched as one thread-block cluster; NCCL takes 4 on Hopper.

    Raises:
        ValueError: A value is out of range, or ``ctas`` does not divide by ``clusters``.
    """

    bandwidth: float
    latency: float = 10.0
    ctas: int = 8
    clusters: int = 1

    def __post_init__(self) -> None:
        if not self.bandwidth > 0:
            raise ValueError(f"bandwidth must be more than 0 GB/s, got {self.bandwidth}")
        if not self.latency >= 0:
            raise ValueError(f"latency must be 0 us or more, got {self.latency}")
        if self.ctas < 0:
            raise ValueError(f"ctas must be 1 or more, or 0 for the copy engine, got {self.ctas}")
        if self.clusters not in _CLUSTERS:
            raise ValueError(f"clusters must be one of {_CLUSTERS}, got {self.clusters}")
        if self.clusters > 1 and (not self.ctas or self.ctas % self.clusters):
            raise ValueError(
                f"{self.ctas} CTAs are no multiple of clusters {self.clusters}"
                + ("" if self.ctas else ": the copy engine has none, leave clusters at 1")
            )

    def seconds(self, wire_bytes: float) -> float:
        """How long a collective takes that moves ``wire_bytes`` over the link."""
        return self.latency * 1e-6 + wire_bytes / (self.bandwidth * 1e9)

    def __str__(self) -> str:
        if not self.ctas:
            driver = "copy engine"
        elif self.clusters == 1:
            driver = f"{self.ctas} CTAs"
        else:
            driver = f"{self.ctas} CTAs in clusters of {self.clusters}"
        return f"{self.bandwidth:g} GB/s, {self.latency:g} us, {driver}"
