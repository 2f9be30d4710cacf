"""Megatron-core on the CPU, for tests and benchmarks only.

Megatron-core takes a GPU for granted. Under `on_cpu` what it asks of torch.cuda is answered for the
CPU: "cuda" as a device means the CPU, streams and events do nothing, a tensor's ``type()`` is the
name that a GPU tensor would have, and the CUDA generator is the CPU's. No arithmetic is touched.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")


def _cpu(device: Any) -> Any:
    return CPU if isinstance(device, (str, torch.device)) and "cuda" in str(device) else device


def _on_cpu(make: Any) -> Any:
    def on_cpu(*args: Any, device: Any = None, **kwargs: Any) -> Tensor:
        return make(*args, device=_cpu(device), **kwargs)

    return on_cpu


def _cuda_type(tensor: Tensor) -> str:
    return f"torch.cuda.{type_of(tensor).removeprefix('torch.')}"


type_of = Tensor.type


class CudaMeansCpu(TorchFunctionMode):
    """Sends what is asked of "cuda" to the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if "device" in kwargs:
            kwargs["device"] = _cpu(kwargs["device"])
        if func is Tensor.cuda:
            return args[0]
        if func is Tensor.type and len(args) == 1 and not kwargs:
            return _cuda_type(args[0])
        if func is Tensor.to:
            args = tuple(_cpu(argument) for argument in args)
        return func(*args, **kwargs)


class _Idle:
    """A stream or an event with nothing to do."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: _Idle()


def _splits_as_lists(all_to_all_single: Any) -> Any:
    """Megatron leaves the splits of an all-to-all tensors where they lie on no GPU."""

    def call(output: Tensor, input: Tensor, *args: Any, **kwargs: Any) -> Any:
        args = tuple(a.tolist() if isinstance(a, Tensor) else a for a in args)
        kwargs = {k: v.tolist() if isinstance(v, Tensor) else v for k, v in kwargs.items()}
        return all_to_all_single(output, input, *args, **kwargs)

    return call


class _InProcess:
    """Threads and their queues in the place of processes: a rank of a test may not fork."""

    Queue = JoinableQueue = queue.Queue

    def get_context(self, method: str) -> _InProcess:
        return self

    def Manager(self) -> _InProcess:
        return self

    def Process(self, **options: Any) -> threading.Thread:
        return threading.Thread(**options)


def _get_rng_state(*args: Any, **kwargs: Any) -> Tensor:
    return torch.get_rng_state()


def _set_rng_state(state: Tensor, *args: Any, **kwargs: Any) -> None:
    torch.set_rng_state(state)


@contextmanager
def on_cpu(intercept: bool = True) -> Iterator[None]:
    """Run Megatron-core without a GPU inside this block.

    ``intercept=False`` is for benchmarks: not every call of torch is intercepted, which costs time,
    but the few that a training step makes are replaced.
    """
    from megatron.core.dist_checkpointing.strategies import filesystem_async
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer import multi_latent_attention
    from megatron.core.transformer.moe import moe_utils

    answers: dict[str, Any] = {
        "current_device": lambda: CPU,
        "current_stream": lambda *_: _Idle(),
        "default_stream": lambda *_: _Idle(),
        "stream": lambda *_: nullcontext(),
        "synchronize": lambda *_: None,
        "empty_cache": lambda: None,
        "manual_seed": torch.manual_seed,
        "get_rng_state": _get_rng_state,
        "Stream": _Idle,
        "Event": _Idle,
    }
    with ExitStack() as stack:
        for name, answer in answers.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, answer))
        for name in ("range_push", "range_pop"):
            stack.enter_context(mock.patch.object(torch.cuda.nvtx, name))
        for name, replacement in (
            ("_get_cuda_rng_state", _get_rng_state),
            ("_set_cuda_rng_state", _set_rng_state),
        ):
            stack.enter_context(mock.patch.object(random, name, replacement))
        stack.enter_context(
            mock.patch.object(dist, "all_to_all_single", _splits_as_lists(dist.all_to_all_single))
        )
        # 0.16.1 without transformer-engine asks for a name that it has not bound.
        stack.enter_context(mock.patch.object(moe_utils, "te_general_gemm", None, create=True))
        # And it takes transformer-engine's classes, which are None then, for classes.
        stack.enter_context(mock.patch.object(multi_latent_attention, "HAVE_TE", False))
        stack.enter_context(mock.patch.object(filesystem_async, "mp", _InProcess()))
        if intercept:
            stack.enter_context(CudaMeansCpu())
        else:
            for name in ("zeros", "tensor"):
                make = _on_cpu(getattr(torch, name))
                stack.enter_context(mock.patch.object(torch, name, make))
            stack.enter_context(mock.patch.object(Tensor, "type", _cuda_type))
        yield


def initialize(expert_parallel_size: int, pipeline_parallel_size: int = 1, seed: int = 1) -> Any:
    """Set Megatron's process groups and generators up over the default process group.

    Returns the expert-parallel group.
    """
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe import moe_utils

    parallel_state.destroy_model_parallel()
    # Left by another test in this process, in the shape of that test's scale.
    moe_utils.MoEAuxLossAutoScaler.main_loss_backward_scale = None
    with on_cpu():
        parallel_state.initialize_model_parallel(
            pipeline_model_parallel_size=pipeline_parallel_size,
            expert_model_parallel_size=expert_parallel_size,
            expert_tensor_parallel_size=1,
        )
        before = torch.get_rng_state()
        random.model_parallel_cuda_manual_seed(seed, force_reset_rng=True)
        torch.set_rng_state(before)
    return parallel_state.get_expert_model_parallel_group()


def wrap(model: nn.Module, bucket_size: int | None = None, **ddp_options: Any) -> Any:
    """Megatron's DDP around ``model``, with both overlaps on.

    ``bucket_size`` is in elements; the default puts every expert weight into a bucket of its own.
    """
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
    )
    from megatron.core.transformer import TransformerConfig

    experts = [p.numel() for p in model.parameters() if not getattr(p, "allreduce", True)]
    options = {
        "grad_reduce_in_fp32": True,
        "overlap_grad_reduce": True,
        "overlap_param_gather": True,
        "use_distributed_optimizer": True,
        "bucket_size": bucket_size or min(experts, default=None),
        **ddp_options,
    }
    with on_cpu():
        return DistributedDataParallel(
            TransformerConfig(num_layers=1, hidden_size=64, num_attention_heads=1),
            DistributedDataParallelConfig(**options),
            model,
        )


def adamw(ddp: Any, **options: Any) -> Any:
    """Megatron's distributed optimizer (AdamW) over what `wrap` returned, one or several."""
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    chunks = list(ddp) if isinstance(ddp, Sequence) else [ddp]
    with on_cpu():
        config = OptimizerConfig(optimizer="adam", use_distributed_optimizer=True, **options)
        optimizer = get_megatron_optimizer(config, chunks)
    for group in optimizer.param_groups:  # what its scheduler does
        group["weight_decay"] = config.weight_decay * group["wd_mult"]
    return optimizer
