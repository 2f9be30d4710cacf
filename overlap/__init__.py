"""The distributed optimizer's collectives, hidden under compute."""

from overlap.config import OverlapConfig
from overlap.ddp import DistributedDataParallel
from overlap.errors import (
    CheckpointMismatchError,
    CollectiveError,
    GradientOrderError,
    ModelMismatchError,
    NonFiniteGradientError,
    OverlapError,
    SplitLostError,
    StaleParameterError,
    TransportError,
    UnusedParameterError,
    WrapError,
)
from overlap.groups import ProcessGroups
from overlap.nccl import NcclOptions
from overlap.optimizer import DistributedOptimizer
from overlap.plan import BucketPlan, Plan

__all__ = [
    "BucketPlan",
    "CheckpointMismatchError",
    "CollectiveError",
    "DistributedDataParallel",
    "DistributedOptimizer",
    "GradientOrderError",
    "ModelMismatchError",
    "NcclOptions",
    "NonFiniteGradientError",
    "OverlapConfig",
    "OverlapError",
    "Plan",
    "ProcessGroups",
    "SplitLostError",
    "StaleParameterError",
    "TransportError",
    "UnusedParameterError",
    "WrapError",
]
