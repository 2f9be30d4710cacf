"""A training run: set-up, the loop over steps, and what it prints."""

from __future__ import annotations

import argparse
import math
import os
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import megamoe.megatron
import overlap.megatron
import profiling
from examples.pretraining import model
from examples.pretraining.data import batches
from examples.pretraining.engines import MegatronEngine, NativeEngine
from examples.pretraining.flags import FlagError
from examples.pretraining.shapes import flops_per_token


def train(args: argparse.Namespace) -> list[dict[str, float]]:
    """Train on this rank; the default process group and Megatron's are set up.

    Returns one record per step: loss, grad_norm, ms, tokens_per_s, tflops, exposed_ms.
    """
    from megatron.core import parallel_state

    rank = parallel_state.get_data_parallel_rank()
    ranks = parallel_state.get_data_parallel_world_size()
    per_microbatch = args.micro_batch_size * ranks
    if args.global_batch_size % per_microbatch:
        raise FlagError(
            f"global_batch_size {args.global_batch_size} does not divide by micro_batch_size "
            f"{args.micro_batch_size} x data-parallel size {ranks}"
        )
    microbatches = args.global_batch_size // per_microbatch
    on_gpu = args.device == "cuda"
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    speaks = dist.get_rank() == dist.get_world_size() - 1  # it holds the loss

    config = model.transformer_config(args)
    engine = _build(args, config, speaks)
    first = engine.load(Path(args.load)) if args.load else 0
    data = batches(args, rank, ranks, device)
    for _ in range(first * microbatches):  # where the loaded run left off
        next(data)
    records = []
    graphs = _CudaGraphs(args, config, engine)
    with _recording(args, engine) as recorder:
        for iteration in range(first, args.train_iters):
            _set_rates(engine.optimizer, args, iteration)
            graphs.capture_when_due(iteration - first)
            start = time.perf_counter()
            loss, norm = engine.train_step(data, microbatches)
            seconds = time.perf_counter() - start
            records.append(_record(args, loss, norm, seconds, engine.take_waited_ms(), device))
            if recorder is not None:
                recorder.step()
            if speaks:
                _say(iteration + 1, args, records[-1])
            if _saves_after(args, iteration + 1):
                engine.save(Path(args.save), iteration + 1)
    return records


def _build(args: argparse.Namespace, config: Any, speaks: bool) -> Any:
    """The model, with our layer if the five conditions hold, in the engine."""
    decision = megamoe.megatron.enable(args)
    try:
        chunks = model.build_chunks(args, config)
    finally:
        megamoe.megatron.disable()
    engine = (MegatronEngine if args.engine == "megatron" else NativeEngine)(args, config, chunks)
    if speaks:
        print(f"{decision}\n{engine.plan()}", flush=True)
    return engine


def _recording(args: argparse.Namespace, engine: Any) -> Any:
    if not args.profile:
        return nullcontext()
    return profiling.record(
        args.profile,
        wait=max(args.profile_start - 1, 0),
        warmup=min(args.profile_start, 1),
        active=args.profile_steps,
        settle=engine.settle,
    )


def _saves_after(args: argparse.Namespace, steps: int) -> bool:
    if not args.save:
        return False
    return steps == args.train_iters or bool(args.save_interval and steps % args.save_interval == 0)


def _record(
    args: argparse.Namespace,
    loss: float,
    norm: float,
    seconds: float,
    waited_ms: float,
    device: torch.device,
) -> dict[str, float]:
    from megatron.core import parallel_state

    total = torch.tensor([loss], device=device)
    dist.all_reduce(total)  # only the last stage's ranks have one
    tokens = args.global_batch_size * args.seq_length
    world_size = dist.get_world_size()
    return {
        "loss": float(total) / parallel_state.get_data_parallel_world_size(),
        "grad_norm": norm,
        "ms": seconds * 1e3,
        "tokens_per_s": tokens / seconds,
        "tflops": tokens * flops_per_token(args) / seconds / world_size / 1e12,
        "exposed_ms": waited_ms,
    }


def _say(number: int, args: argparse.Namespace, record: dict[str, float]) -> None:
    print(
        f"step {number:>4}/{args.train_iters}  loss {record['loss']:8.5f}"
        f"  grad norm {record['grad_norm']:8.4f}  {record['ms']:8.1f} ms"
        f"  {record['tokens_per_s']:9.0f} tokens/s  {record['tflops']:7.2f} TFLOP/s/GPU"
        f"  exposed {record['exposed_ms']:6.1f} ms",
        flush=True,
    )


def _set_rates(optimizer: Any, args: argparse.Namespace, iteration: int) -> None:
    """Linear warm-up, then a cosine from lr to min_lr."""
    low = args.lr if args.min_lr is None else args.min_lr
    if iteration < args.lr_warmup_iters:
        lr = args.lr * (iteration + 1) / args.lr_warmup_iters
    else:
        span = max(args.train_iters - args.lr_warmup_iters, 1)
        progress = (iteration - args.lr_warmup_iters) / span
        lr = low + (args.lr - low) * (1 + math.cos(math.pi * progress)) / 2
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_mult", 1.0)
        group["weight_decay"] = args.weight_decay * group.get("wd_mult", 1.0)


class _CudaGraphs:
    """Captures whole layers once the warm-up steps are over, with transformer-engine's graphs."""

    def __init__(self, args: argparse.Namespace, config: Any, engine: Any) -> None:
        self.warmup_steps = args.cuda_graph_warmup_steps
        self.engine = engine
        self.helper: Any = None
        if not args.external_cuda_graph:
            return
        from megatron.core.transformer.cuda_graphs import TECudaGraphHelper

        self.helper = TECudaGraphHelper(
            model=engine.chunks,
            config=config,
            seq_length=args.seq_length,
            micro_batch_size=args.micro_batch_size,
            optimizers=[engine.optimizer],
        )

    def capture_when_due(self, steps_done: int) -> None:
        if self.helper is None or steps_done != self.warmup_steps:
            return
        hooked = [c for c in self.engine.chunks if c.remove_forward_pre_hook_handles]
        for chunk in hooked:
            chunk.disable_forward_pre_hook(param_sync=True)
        self.helper.create_cudagraphs()
        for chunk in hooked:
            chunk.enable_forward_pre_hook()
        self.helper.cuda_graph_set_manual_hooks()


def initialize(args: argparse.Namespace, **launch: Any) -> None:
    """Set up the process groups and generators of a rank that torchrun or srun has launched, or
    else of what ``launch`` says, in the terms of init_process_group."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    for name, by_slurm in (
        ("RANK", "SLURM_PROCID"),
        ("WORLD_SIZE", "SLURM_NTASKS"),
        ("LOCAL_RANK", "SLURM_LOCALID"),
    ):
        if by_slurm in os.environ:  # where srun launches, not torchrun
            os.environ.setdefault(name, os.environ[by_slurm])
    if args.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if args.device == "cuda" else "gloo", **launch)
    with tempfile.TemporaryDirectory() as folder:
        own_file = Path(folder, "nccl.yaml")
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=args.tensor_model_parallel_size,
            pipeline_model_parallel_size=args.pipeline_model_parallel_size,
            expert_model_parallel_size=args.expert_model_parallel_size,
            expert_tensor_parallel_size=1,
            nccl_communicator_config_path=_nccl_config(args, own_file),
        )
    torch.manual_seed(args.seed)
    model_parallel_cuda_manual_seed(args.seed)


def _nccl_config(args: argparse.Namespace, own_file: Path) -> str | None:
    if args.device != "cuda" or args.nccl_communicator_config_path:
        return args.nccl_communicator_config_path
    return overlap.megatron.write_nccl_config(own_file, args.nccl_preset)
