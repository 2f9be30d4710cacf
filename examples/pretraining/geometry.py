"""The geometry of a run, without GPUs: who works with whom, which buckets there are, what they move
and whether that can hide."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from examples.pretraining import model
from examples.pretraining.flags import FlagError, has_transformer_engine
from examples.pretraining.shapes import (
    DECODER,
    EMBEDDING,
    LOSS,
    MTP,
    is_split,
    moe_pattern,
    stage_parameters,
)
from megamoe.errors import MegaMoEError
from megamoe.megatron.options import MegaMoEOptions, require_supported
from overlap.megatron import Chunk, Finding, Reason, default_bucket_size, diagnose, plan_buckets
from overlap.nccl import PRESETS


@dataclass(frozen=True)
class Stage:
    """One pipeline stage: its layers from 0 over all stages, what else it holds, its buckets."""

    number: int
    layers: tuple[int, ...]
    parts: tuple[str, ...]
    chunk: Chunk
    findings: tuple[Finding, ...]


@dataclass(frozen=True)
class Geometry:
    """What a run with these flags on ``world_size`` ranks looks like. ``str()`` is for people."""

    args: argparse.Namespace
    world_size: int
    data_parallel: int
    expert_data_parallel: int
    microbatches: int
    stages: tuple[Stage, ...]

    @property
    def findings(self) -> tuple[Finding, ...]:
        """Each problem once, as the first stage that has it tells it."""
        found: dict[Reason, Finding] = {}
        for stage in self.stages:
            for finding in stage.findings:
                found.setdefault(finding.reason, finding)
        return tuple(found.values())

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        args = self.args
        yield (
            f"ranks {self.world_size} = PP {args.pipeline_model_parallel_size} x "
            f"DP {self.data_parallel}; experts: EP {args.expert_model_parallel_size} x "
            f"EDP {self.expert_data_parallel}, "
            f"{args.num_experts // args.expert_model_parallel_size} of {args.num_experts} experts "
            "per rank"
        )
        yield (
            f"batch {args.global_batch_size} = {self.microbatches} microbatches x "
            f"{args.micro_batch_size} x DP {self.data_parallel}, {args.seq_length} tokens each"
        )
        yield f"MoE layer: {_layer(args)}"
        yield f"NCCL of gathers and reductions: {_nccl(args)}"
        for stage in self.stages:
            yield from self._stage_lines(stage)
        if args.external_cuda_graph:
            yield f"CUDA graphs of {_scope(args)} after {args.cuda_graph_warmup_steps} steps"
            if args.cuda_graph_scope == "full":
                yield (
                    "  (before the graph of a whole layer is replayed, both expert weights are "
                    "waited for: the gather of fc2 can hide under the layer before, not under its "
                    "own stage 1)"
                )
            if not has_transformer_engine():
                yield "  (transformer-engine captures them, and is not installed here)"
        for finding in self.findings:
            yield f"PROBLEM {finding}"
            if finding.reason is Reason.SHARED_BUCKET:
                yield "  (this script does the former with --own_expert_buckets true)"
        if not self.findings:
            yield "every expert weight's collectives can hide, from the second iteration on"

    def _stage_lines(self, stage: Stage) -> Iterator[str]:
        chunk, moe = stage.chunk, moe_pattern(self.args)
        experts = sum(moe[layer] for layer in stage.layers)
        extras = "".join(f", {part}" for part in stage.parts)
        where = f"{stage.layers[0]}-{stage.layers[-1]}" if stage.layers else "none"
        yield f"stage {stage.number}: layers {where} ({experts} with experts){extras}"
        size = "no bucketing" if chunk.bucket_size is None else f"{chunk.bucket_size:,} elements"
        for expert in (False, True):
            buckets = [bucket for bucket in chunk.buckets if bucket.expert is expert]
            moving = [bucket for bucket in buckets if bucket.group_size > 1]
            if not buckets:
                continue
            elements = sum(bucket.numel for bucket in buckets)
            largest = max(bucket.numel for bucket in buckets)
            group = f"{'EDP' if expert else 'DP'} {buckets[0].group_size}"
            yield (
                f"  {'expert' if expert else 'dense'} buckets: {len(buckets)} over {group}, "
                f"{elements:,} elements, the largest {largest:,} (bucket size: {size})"
            )
            yield (
                f"    per step and rank {len(moving)} all-gathers ({_gigabytes(moving, 2)}) and "
                f"{len(moving)} reduce-scatters ({_gigabytes(moving, 4)})"
            )


def _gigabytes(buckets: list[Any], width: int) -> str:
    return f"{sum(bucket.numel for bucket in buckets) * width / 1e9:.3f} GB"


def _layer(args: argparse.Namespace) -> str:
    if not is_split(args):
        asked_for = args.enable_primus_turbo and args.use_turbo_mega_moe
        return "MoELayer, since bf16 is not set" if asked_for else "MoELayer"
    return f"{'unsplit' if args.mega_moe_fused else 'split'}, backend {args.mega_moe_backend}"


def _nccl(args: argparse.Namespace) -> str:
    if args.nccl_communicator_config_path:
        return f"as {args.nccl_communicator_config_path} says"
    ctas = PRESETS[args.nccl_preset].max_ctas
    shown = f"at most {ctas} CTAs, and as many SMs left free" if ctas else "its own choice of CTAs"
    return f"preset {args.nccl_preset}, {shown}"


def _scope(args: argparse.Namespace) -> str:
    return "whole layers" if args.cuda_graph_scope == "full" else args.cuda_graph_scope


def geometry(args: argparse.Namespace) -> Geometry:
    """Return the geometry of a run; every flag is checked, Megatron-core's part by itself.

    Raises FlagError.
    """
    config = _checked_config(args)
    world_size = args.world_size or int(os.environ.get("WORLD_SIZE", "0"))
    if world_size < 1:
        raise FlagError("give world_size: a dry run has no launch to take it from")
    pipeline, ep = args.pipeline_model_parallel_size, args.expert_model_parallel_size
    if world_size % (pipeline * ep):
        raise FlagError(
            f"world_size {world_size} does not divide by pipeline_model_parallel_size {pipeline} x "
            f"expert_model_parallel_size {ep}"
        )
    data_parallel = world_size // pipeline
    per_microbatch = args.micro_batch_size * data_parallel
    if args.global_batch_size % per_microbatch:
        raise FlagError(
            f"global_batch_size {args.global_batch_size} does not divide by micro_batch_size "
            f"{args.micro_batch_size} x data-parallel size {data_parallel}"
        )
    stages = tuple(
        _stage(args, number, layers, parts, data_parallel, data_parallel // ep)
        for number, (layers, parts) in enumerate(split_layers(args, config))
    )
    return Geometry(
        args,
        world_size,
        data_parallel,
        data_parallel // ep,
        args.global_batch_size // per_microbatch,
        stages,
    )


def _checked_config(args: argparse.Namespace) -> Any:
    """The configuration that Megatron-core and our layer agree to."""
    try:
        config = model.transformer_config(args)
    except (AssertionError, ValueError) as error:
        raise FlagError(f"Megatron-core refuses the flags: {error}") from error
    except KeyError as error:  # it looks some names up
        raise FlagError(f"Megatron-core refuses the flags: it knows no {error}") from error
    if is_split(args):
        alone = SimpleNamespace(size=lambda: 1)  # a group of what this script has no size for
        groups = SimpleNamespace(tp=alone, expt_tp=alone, tp_cp=alone)
        try:
            require_supported(config, MegaMoEOptions.from_args(args), groups)
        except MegaMoEError as error:
            raise FlagError(str(error)) from error
    return config


def split_layers(
    args: argparse.Namespace, config: Any
) -> list[tuple[tuple[int, ...], tuple[str, ...]]]:
    """Return the layers of each pipeline stage, and what else it holds.

    Raises FlagError.
    """
    pipeline = args.pipeline_model_parallel_size
    layout = config.pipeline_model_parallel_layout
    if layout is None:
        if args.num_layers % pipeline:
            raise FlagError(
                f"num_layers {args.num_layers} does not divide by pipeline_model_parallel_size "
                f"{pipeline}: say which stage has which with pipeline_model_parallel_layout"
            )
        kinds = [[DECODER] * (args.num_layers // pipeline) for _ in range(pipeline)]
        kinds[0].insert(0, EMBEDDING)
        kinds[-1] += [MTP] * (args.mtp_num_layers or 0) + [LOSS]
    else:
        if any(len(chunks) > 1 for chunks in layout.layout):
            raise FlagError(
                f"pipeline_model_parallel_layout has {len(layout.layout[0])} chunks per stage; "
                "this script has no interleaved schedule: give one per stage"
            )
        kinds = [[kind.name for kind in chunks[0]] for chunks in layout.layout]
    stages, first = [], 0
    for own in kinds:
        count = own.count(DECODER)
        parts = tuple(part for part in (EMBEDDING, MTP, LOSS) if part in own)
        stages.append((tuple(range(first, first + count)), parts))
        first += count
    return stages


def _stage(
    args: argparse.Namespace,
    number: int,
    layers: tuple[int, ...],
    parts: tuple[str, ...],
    data_parallel: int,
    expert_data_parallel: int,
) -> Stage:
    parameters = stage_parameters(args, layers, parts)
    bucket_size: int | None = args.ddp_bucket_size or default_bucket_size(data_parallel)
    if number > 0 or not args.overlap_grad_reduce:
        bucket_size = None  # Megatron buckets on the first stage only
    buckets = plan_buckets(
        parameters,
        bucket_size=bucket_size,
        dense_group_size=data_parallel,
        expert_group_size=expert_data_parallel,
        own_buckets=args.own_expert_buckets,
    )
    chunk = Chunk(
        buckets=buckets,
        bucket_size=bucket_size,
        overlap_param_gather=args.overlap_param_gather,
        overlap_grad_reduce=args.overlap_grad_reduce,
        stage=number,
        fused=args.mega_moe_fused and any(bucket.weight_modules for bucket in buckets),
    )
    return Stage(number, layers, parts, chunk, diagnose(chunk))
