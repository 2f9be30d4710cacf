"""Which parameter lands in which bucket of Megatron-core's DDP: its rule, as arithmetic.

Nothing of Megatron-core is imported: the rule can be asked about a run of any size, before there is
one. Megatron lays parameters out from the last registered to the first, in one buffer for dense and
one for expert parameters, and closes a bucket once it holds ``bucket_size`` elements. A parameter
marked ``shared_embedding`` has a bucket to itself, whatever the size; `overlap.megatron.wrap` uses
that mark. Gathers run through each buffer's buckets from the last to the first.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Chunk", "MegatronBucket", "Parameter", "default_bucket_size", "plan_buckets"]

_PARAMETER_ALIGNMENT = 64  # elements
_BUCKET_ALIGNMENT = 128


@dataclass(frozen=True)
class Parameter:
    """What the rule looks at.

    Attributes:
        name: Its path in the model.
        expert: It belongs to the expert-data-parallel group (Megatron's ``allreduce`` is False).
        weight_module: Path of the expert weight module that owns it, or None.
        shared_embedding: Megatron has marked it: two pipeline stages hold it.
    """

    name: str
    numel: int
    expert: bool = False
    weight_module: str | None = None
    shared_embedding: bool = False


@dataclass(frozen=True)
class MegatronBucket:
    """The parameters that one collective moves each way.

    Attributes:
        name: What its ranges are called (see profiling.ranges).
        numel: Elements, padding included; divides by ``group_size``.
        group_size: Ranks of its data-parallel or expert-data-parallel group.
    """

    name: str
    parameters: tuple[Parameter, ...]
    numel: int
    expert: bool
    group_size: int

    @property
    def weight_modules(self) -> tuple[str, ...]:
        return tuple(p.weight_module for p in self.parameters if p.weight_module)


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """One model chunk as its DDP holds it.

    Attributes:
        buckets: In the order of their gathers, dense ones before expert ones.
        bucket_size: In elements; None where Megatron does not bucket.
        stage: Its pipeline stage, from 0.
        fused: Its MoE layers take both expert weights at one call site.
        single_group: Every collective is issued together (Megatron's ``disable_bucketing``).
        use_order: Paths of the weight modules in the order of a forward, or () if none was seen.
    """

    buckets: tuple[MegatronBucket, ...]
    bucket_size: int | None
    overlap_param_gather: bool = True
    overlap_grad_reduce: bool = True
    distributed_optimizer: bool = True
    align_param_gather: bool = False
    stage: int = 0
    fused: bool = False
    single_group: bool = False
    use_order: tuple[str, ...] = ()


def default_bucket_size(data_parallel_size: int) -> int:
    """Megatron's bucket size, in elements, where none is given."""
    return max(40_000_000, 1_000_000 * data_parallel_size)


def plan_buckets(
    parameters: Sequence[Parameter],
    *,
    bucket_size: int | None,
    dense_group_size: int,
    expert_group_size: int,
    own_buckets: bool,
) -> tuple[MegatronBucket, ...]:
    """Sort ``parameters``, in registration order, all of one dtype, into Megatron's buckets.

    Args:
        bucket_size: In elements; None for one bucket per buffer.
        own_buckets: Give each weight module's parameter a bucket of its own, as `wrap` does.

    Returns them in the order of their gathers.
    """
    planned: list[MegatronBucket] = []
    for expert, group_size in ((False, dense_group_size), (True, expert_group_size)):
        own = [p for p in parameters if p.expert is expert]
        packs = _packs(own, bucket_size, own_buckets)
        planned += [
            MegatronBucket(
                bucket_name(pack, expert, index),
                tuple(pack),
                _padded(pack, group_size),
                expert,
                group_size,
            )
            for index, pack in reversed(list(enumerate(packs)))
        ]
    return tuple(planned)


def bucket_name(parameters: Sequence[Parameter], expert: bool, index: int) -> str:
    """Return the name of a bucket's ranges: its weight modules, or its kind and place."""
    weights = [p.weight_module for p in parameters if p.weight_module]
    if weights:
        return ",".join(reversed(weights))  # a bucket lists its parameters from the last
    return f"{'expert' if expert else 'dense'}.{index}"


def _packs(
    parameters: Sequence[Parameter], bucket_size: int | None, own_buckets: bool
) -> list[list[Parameter]]:
    packs: list[list[Parameter]] = []
    open_pack: list[Parameter] = []
    for parameter in reversed(parameters):
        alone = parameter.shared_embedding or (own_buckets and parameter.weight_module is not None)
        if alone and open_pack:
            packs.append(open_pack)
            open_pack = []
        open_pack.append(parameter)
        full = bucket_size is not None and _end(open_pack) >= bucket_size
        if alone or full:
            packs.append(open_pack)
            open_pack = []
    return [*packs, open_pack] if open_pack else packs


def _end(parameters: Sequence[Parameter]) -> int:
    """Where the last of ``parameters`` ends, in elements from the start of their bucket."""
    end = 0
    for parameter in parameters:
        end = -(-end // _PARAMETER_ALIGNMENT) * _PARAMETER_ALIGNMENT + parameter.numel
    return end


def _padded(parameters: Sequence[Parameter], group_size: int) -> int:
    unit = math.lcm(group_size, _BUCKET_ALIGNMENT)
    return -(-_end(parameters) // unit) * unit
