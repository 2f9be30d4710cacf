"""Why an expert weight's collective can or cannot hide in a Megatron-core run, before it runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from overlap.megatron.checkpoint import padded_inside
from overlap.megatron.layout import Chunk, MegatronBucket, Parameter, bucket_name
from overlap.megatron.nccl import environment
from overlap.nccl import ctas_of_group
from overlap.parameters import is_expert, is_weight_module

__all__ = [
    "Explanation",
    "Finding",
    "Reason",
    "buckets_of_groups",
    "describe",
    "diagnose",
    "explain",
    "module_paths",
    "process_group",
    "watch_order",
]


class Reason(str, Enum):
    """What takes the time away in which a collective could hide."""

    NOT_SPLIT = "no expert weight module"
    SHARED_BUCKET = "shared bucket"
    GATHERS_OFF = "parameter gathers are not overlapped"
    REDUCTIONS_OFF = "gradient reductions are not overlapped"
    ALIGNED = "gathers are aligned over the pipeline"
    GROUP_OF_ONE = "group of one"
    ORDER = "order of use"


@dataclass(frozen=True)
class Finding:
    """One reason, with where it holds and what to do about it."""

    reason: Reason
    text: str

    def __str__(self) -> str:
        return f"{self.reason.value}: {self.text}"


@dataclass(frozen=True)
class Explanation:
    """A model chunk's buckets in the order of their gathers, and what is wrong with them.

    ``str()`` lists both. `findings` is empty where nothing stands in the way of hiding; `notes`
    say what else to look after.
    """

    chunk: Chunk
    findings: tuple[Finding, ...]
    notes: tuple[str, ...] = ()

    @property
    def hides(self) -> bool:
        return not self.findings

    def __str__(self) -> str:
        lines = [f"pipeline stage {self.chunk.stage}, {len(self.chunk.buckets)} buckets:"]
        for number, bucket in enumerate(self.chunk.buckets):
            count = len(bucket.parameters)
            lines.append(
                f"  #{number} {bucket.name}: {bucket.numel:,} elements, {count} parameter"
                f"{'s' * (count > 1)}, {'edp' if bucket.expert else 'dp'} x{bucket.group_size}"
            )
        lines += [f"  PROBLEM {finding}" for finding in self.findings]
        lines += [f"  NOTE {note}" for note in self.notes]
        if not any(bucket.weight_modules for bucket in self.chunk.buckets):
            lines.append("  it has no split MoE layer, and nothing that could hide")
        elif self.hides:
            lines.append("  every expert weight's collectives can hide")
        lines.append(
            "  the first iteration reduces nothing early (Megatron-core counts gradients in it): "
            "profile from the third on"
        )
        return "\n".join(lines)


def diagnose(chunk: Chunk) -> tuple[Finding, ...]:
    """Return everything in ``chunk`` that keeps an expert weight's collective from hiding."""
    return tuple(_findings(chunk))


def _findings(chunk: Chunk) -> Iterator[Finding]:
    unsplit = [
        parameter.name
        for bucket in chunk.buckets
        for parameter in bucket.parameters
        if _is_experts(parameter) and parameter.weight_module is None
    ]
    if unsplit:
        yield Finding(
            Reason.NOT_SPLIT,
            f"{unsplit[-1]} and {len(unsplit) - 1} more belong to MoE layers that take all weights "
            "at once: call megamoe.megatron.enable before the specs are built",
        )
    with_weights = [bucket for bucket in chunk.buckets if bucket.weight_modules]
    if not with_weights:
        return
    if chunk.fused:
        yield Finding(
            Reason.NOT_SPLIT,
            "the MoE layers are the unsplit twins, which take both weights at once: leave "
            "mega_moe_fused (MegaMoEOptions.fused) out",
        )
    if not (chunk.overlap_param_gather and chunk.distributed_optimizer):
        yield Finding(
            Reason.GATHERS_OFF,
            "set overlap_param_gather and use_distributed_optimizer (ddp_config() does)",
        )
    if not chunk.overlap_grad_reduce:
        yield Finding(Reason.REDUCTIONS_OFF, "set overlap_grad_reduce (ddp_config() does)")
    if chunk.align_param_gather:
        yield Finding(
            Reason.ALIGNED,
            "align_param_gather gathers every bucket at the start of the forward: unset it",
        )
    yield from _shared(chunk, with_weights)
    alone = [bucket for bucket in with_weights if bucket.group_size == 1]
    if alone:
        kind = "expert-data-parallel" if alone[0].expert else "data-parallel"
        yield Finding(
            Reason.GROUP_OF_ONE,
            f"the {kind} size is 1, so the collectives of {alone[0].name} and "
            f"{len(alone) - 1} more move nothing and there is nothing to hide: take more ranks or "
            "a smaller expert-parallel size",
        )
    yield from _order(chunk, with_weights)


def _is_experts(parameter: Parameter) -> bool:
    return parameter.expert or ".experts." in parameter.name  # not so marked at EP 1


def _shared(chunk: Chunk, buckets: list[MegatronBucket]) -> Iterator[Finding]:
    if chunk.single_group:
        yield Finding(
            Reason.SHARED_BUCKET,
            "bucketing is off for this model chunk (disable_bucketing), so all its collectives "
            "are issued together: wrap every chunk with overlap.megatron.wrap",
        )
        return
    shared = [bucket for bucket in buckets if len(bucket.parameters) > 1]
    if not shared:
        return
    first = shared[0]
    names = [p.weight_module or p.name for p in reversed(first.parameters)]
    shown = ", ".join(names[:2]) + (f" and {len(names) - 2} more" if len(names) > 2 else "")
    if chunk.bucket_size is not None:
        cause = f"bucket_size is {chunk.bucket_size:,} elements"
        smallest = min(p.numel for bucket in buckets for p in bucket.parameters if p.weight_module)
        remedy = f"wrap with overlap.megatron.wrap, or set bucket_size to at most {smallest:,}"
    else:
        cause = (
            "overlap_grad_reduce is off, and with it bucketing"
            if not chunk.overlap_grad_reduce
            else f"Megatron-core does not bucket on pipeline stage {chunk.stage}"
        )
        remedy = "wrap with overlap.megatron.wrap"
    yield Finding(
        Reason.SHARED_BUCKET,
        f"{shown} share a bucket ({first.numel:,} elements; {len(shared)} such), because {cause}: "
        f"{remedy}",
    )


def _order(chunk: Chunk, buckets: list[MegatronBucket]) -> Iterator[Finding]:
    gathered = [name for bucket in buckets for name in bucket.weight_modules]
    used = [name for name in chunk.use_order if name in set(gathered)]
    if not used or used == gathered[: len(used)]:
        return
    at = next(i for i, (want, got) in enumerate(zip(used, gathered, strict=False)) if want != got)
    yield Finding(
        Reason.ORDER,
        f"the forward uses {used[at]} where the gathers, which follow the order of registration, "
        f"bring {gathered[at]}: register the modules in the order of their use",
    )


def explain(ddp: Any, forward: Callable[[], Any] | None = None) -> Explanation:
    """Return what Megatron-core's DDP around a model chunk does to its expert weights.

    It takes any DistributedDataParallel of megatron-core, made by `overlap.megatron.wrap` or not.
    Print the result.

    Args:
        forward: Runs one forward of ``ddp`` (without gradients), to see in which order the expert
            weights are used. Without it the first forward since `wrap` is looked at, if any.
    """
    order = tuple(getattr(ddp, "observed_order", ()))
    if forward is not None:
        with watch_order(ddp) as seen, torch.no_grad():
            forward()
        order = tuple(seen)
    chunk = describe(ddp, order)
    return Explanation(chunk, diagnose(chunk), tuple(_notes(ddp)))


def _notes(ddp: Any) -> Iterator[str]:
    if ddp.ddp_config.use_distributed_optimizer and padded_inside([ddp]):
        yield (
            "buckets end in padding, over which Megatron-core's fully_reshardable checkpoints of "
            "the optimizer stumble: call its sharded_state_dict inside "
            "overlap.megatron.padding_kept(model_chunks)"
        )
    groups = (*ddp.bucket_groups, *ddp.expert_parallel_bucket_groups)
    if any(ctas_of_group(process_group(group)) is None for group in groups):
        yield (
            "NCCL chooses how many CTAs the collectives take, so the stages cannot leave as many "
            "SMs free: give initialize_model_parallel(nccl_communicator_config_path=...) the file "
            f"of overlap.megatron.write_nccl_config, or set {environment()} for every group"
        )


def describe(ddp: Any, use_order: tuple[str, ...] = ()) -> Chunk:
    """Read a Megatron-core DDP."""
    config = ddp.ddp_config
    buckets = buckets_of_groups(ddp)
    return Chunk(
        buckets=tuple(bucket for members in buckets.values() for bucket in members),
        bucket_size=ddp.bucket_size,
        overlap_param_gather=config.overlap_param_gather,
        overlap_grad_reduce=config.overlap_grad_reduce,
        distributed_optimizer=config.use_distributed_optimizer,
        align_param_gather=config.align_param_gather,
        stage=_stage(ddp.pp_group),
        fused=any(
            getattr(module, "fused", False) and any(map(is_weight_module, module.children()))
            for module in ddp.module.modules()
        ),
        single_group=any(len(members) > 1 for members in buckets.values()),
        use_order=use_order,
    )


def buckets_of_groups(ddp: Any) -> dict[Any, list[MegatronBucket]]:
    """Return DDP's bucket groups in the order of their gathers, with the buckets of each."""
    parameters = _parameters(ddp.module)
    found: dict[Any, list[MegatronBucket]] = {}
    for expert, chain in ((False, ddp.bucket_groups), (True, ddp.expert_parallel_bucket_groups)):
        for group in reversed(chain):
            found[group] = []
            for bucket in group.buckets:
                members = tuple(parameters[param] for param in bucket.params_list)
                name = bucket_name(members, expert, bucket.bucket_id)
                numel = bucket.grad_data.numel()
                size = process_group(group).size()
                found[group].append(MegatronBucket(name, members, numel, expert, size))
    return found


def process_group(bucket_group: Any) -> dist.ProcessGroup:
    """Return the group that a bucket group's collectives run in."""
    if hasattr(bucket_group, "intra_distributed_optimizer_instance_group"):
        group: dist.ProcessGroup = bucket_group.intra_distributed_optimizer_instance_group
    else:
        group = bucket_group.data_parallel_group
    return group


def _stage(pp_group: Any) -> int:
    group = pp_group[0] if isinstance(pp_group, list) else pp_group
    return int(group.rank())


def _parameters(module: nn.Module) -> dict[nn.Parameter, Parameter]:
    paths = module_paths(module)
    found: dict[nn.Parameter, Parameter] = {}
    for child, path in paths.items():
        weight = path if is_weight_module(child) else None
        for name, param in child.named_parameters(recurse=False):
            if param not in found:
                full = f"{path}.{name}" if path else name
                shared = bool(getattr(param, "shared_embedding", False))
                found[param] = Parameter(full, param.numel(), is_expert(param), weight, shared)
    return found


def module_paths(module: nn.Module) -> dict[nn.Module, str]:
    """Return each module of a chunk with its path in the whole model.

    A pipeline stage counts its own layers from 0; the path has the layer's number in the model
    instead, so that ranks of different stages do not speak of different layers by one name.
    """
    while isinstance(inner := getattr(module, "module", None), nn.Module):  # of another precision
        module = inner
    renamed: dict[str, str] = {}
    paths: dict[nn.Module, str] = {}
    for path, child in module.named_modules():
        head, _, tail = path.rpartition(".")
        name = renamed.get(head, head)
        own = f"{name}.{tail}" if name else tail
        if head.rpartition(".")[2] == "layers" and isinstance(
            getattr(child, "layer_number", None), int
        ):
            own = f"{name}.{child.layer_number - 1}"
        renamed[path] = own
        paths[child] = own
    return paths


@contextmanager
def watch_order(ddp: Any) -> Iterator[list[str]]:
    """Collect the paths of the weight modules as forwards inside the block first use them."""
    seen: dict[str, None] = {}

    def note(path: str) -> Callable[..., None]:
        return lambda *_: seen.setdefault(path)

    handles = [
        child.register_forward_pre_hook(note(path))
        for child, path in module_paths(ddp.module).items()
        if is_weight_module(child)
    ]
    order: list[str] = []
    try:
        yield order
    finally:
        for handle in handles:
            handle.remove()
        order.extend(seen)
