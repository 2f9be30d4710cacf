"""Every error that this package raises on purpose, in one tree under `OverlapError`."""

from __future__ import annotations

__all__ = [
    "CheckpointMismatchError",
    "CollectiveError",
    "GradientOrderError",
    "ModelMismatchError",
    "NonFiniteGradientError",
    "OverlapError",
    "SplitLostError",
    "StaleParameterError",
    "TransportError",
    "UnusedParameterError",
    "WrapError",
]


class OverlapError(RuntimeError):
    """Base of this package's errors."""


class WrapError(OverlapError):
    """The model cannot be wrapped, was wrapped before, or changed after it was wrapped."""


class ModelMismatchError(OverlapError):
    """The ranks wrapped models whose parameters differ in name, shape or dtype."""


class CollectiveError(OverlapError):
    """A collective failed: a peer died, timed out or issued something else."""


class TransportError(OverlapError):
    """The transport that was asked for cannot run here."""


class GradientOrderError(OverlapError):
    """A gradient arrived when its bucket had been reduced already."""


class UnusedParameterError(OverlapError):
    """Parameters got no gradient in this iteration."""


class StaleParameterError(OverlapError):
    """A parameter may have been read before its gather had finished."""


class NonFiniteGradientError(OverlapError):
    """A reduced gradient holds a NaN or an infinity."""


class CheckpointMismatchError(OverlapError):
    """A checkpoint was written by a run of another layout."""


class SplitLostError(OverlapError):
    """A Megatron-core wrapper is set up so that an expert weight's collective cannot hide."""
