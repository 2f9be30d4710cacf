"""The two engines that train a model's chunks: Megatron-core's, wired by us, and our own.

Both hand out the same: a step over the microbatches of a batch, the time that compute waited for
collectives, and checkpoints.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import overlap
import overlap.megatron
from overlap import OverlapConfig, ProcessGroups

Batch = dict[str, Tensor]

_CHECKPOINT = {  # a form that any expert-parallel size can read
    "distrib_optim_sharding_type": "fully_reshardable",
    "chained_optim_avoid_prefix": True,
}


class MegatronEngine:
    """Megatron-core's DDP and DistributedOptimizer under its own schedules."""

    def __init__(self, args: argparse.Namespace, config: Any, chunks: list[nn.Module]) -> None:
        from megatron.core.distributed import finalize_model_grads
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

        self.args, self.config = args, config
        options = overlap.megatron.ddp_config(
            overlap_param_gather=args.overlap_param_gather,
            overlap_grad_reduce=args.overlap_grad_reduce,
            bucket_size=args.ddp_bucket_size,
        )
        self.chunks = overlap.megatron.wrap(
            chunks,
            options,
            config=config,
            own_buckets=args.own_expert_buckets,
            strict=args.strict_overlap,
            measure_waits=True,
        )
        self.optimizer = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=args.lr,
                min_lr=args.lr,
                weight_decay=args.weight_decay,
                clip_grad=args.clip_grad,
                bf16=args.bf16,
                params_dtype=config.params_dtype,
                use_distributed_optimizer=True,
                overlap_param_gather=args.overlap_param_gather,
            ),
            self.chunks,
        )
        config.no_sync_func = [chunk.no_sync for chunk in self.chunks]
        if len(self.chunks) == 1:
            config.no_sync_func = config.no_sync_func[0]
        config.finalize_model_grads_func = finalize_model_grads
        config.grad_scale_func = self.optimizer.scale_loss

    def train_step(self, batches: Iterator[Batch], microbatches: int) -> tuple[float, float]:
        """Return (mean loss of this rank's sequences, gradient norm); the loss is that of the last
        pipeline stage, 0 elsewhere."""
        from megatron.core.pipeline_parallel import get_forward_backward_func

        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        losses = get_forward_backward_func()(
            forward_step_func=_forward_step,
            data_iterator=batches,
            model=self.chunks,
            num_microbatches=microbatches,
            seq_length=self.args.seq_length,
            micro_batch_size=self.args.micro_batch_size,
        )
        succeeded, norm, _ = self.optimizer.step()
        assert succeeded, "the optimizer skipped a step"
        return sum(float(loss) for loss in losses) / microbatches, float(norm)

    def settle(self) -> None:
        overlap.megatron.finish_in_flight(self.chunks)

    def take_waited_ms(self) -> float:
        return overlap.megatron.take_waited_ms(self.chunks)

    def plan(self) -> str:
        return "\n".join(str(overlap.megatron.explain(chunk)) for chunk in self.chunks)

    def save(self, folder: Path, iteration: int) -> None:
        """Write a distributed checkpoint, which any expert-parallel size can load."""
        from megatron.core import dist_checkpointing

        for chunk in self.chunks:  # weights may still be on their way to this rank
            chunk.start_param_sync(force_sync=True)
        target = folder / f"iter_{iteration:07d}"
        if dist.get_rank() == 0:
            target.mkdir(parents=True, exist_ok=True)
        dist.barrier()
        dist_checkpointing.save({**self._sharded(), "iteration": iteration}, str(target))
        if dist.get_rank() == 0:
            (folder / "latest").write_text(target.name)
        dist.barrier()

    def load(self, folder: Path) -> int:
        """Read the latest checkpoint in ``folder``; return its iteration."""
        from megatron.core import dist_checkpointing

        # Megatron has two optimizers where experts are spread, else one.
        parts = getattr(self.optimizer, "chained_optimizers", [self.optimizer])
        for part in parts:
            _init_state(part)
        target = folder / (folder / "latest").read_text()
        state = dist_checkpointing.load(self._sharded(is_loading=True), str(target))
        iteration = int(state["iteration"])
        for index, chunk in enumerate(self.chunks):
            _inner(chunk).load_state_dict(state[_key(index)])
        saved = state["optimizer"]
        for index, part in enumerate(parts):
            _load_state(part, saved if len(parts) == 1 else saved[index], iteration)
        return iteration

    def _sharded(self, is_loading: bool = False) -> dict[str, Any]:
        metadata = dict(_CHECKPOINT)  # Megatron writes into it
        model = {
            _key(index): _inner(chunk).sharded_state_dict(metadata=metadata)
            for index, chunk in enumerate(self.chunks)
        }
        with overlap.megatron.padding_kept(self.chunks):
            optimizer = self.optimizer.sharded_state_dict(
                model, is_loading=is_loading, metadata=metadata
            )
        return {**model, "optimizer": optimizer}


class NativeEngine:
    """Our own engine around one model chunk; no pipeline."""

    def __init__(self, args: argparse.Namespace, config: Any, chunks: list[nn.Module]) -> None:
        (model,) = chunks
        self.args = args
        groups = ProcessGroups.build(args.expert_model_parallel_size, nccl=args.nccl_preset)
        self.ddp = overlap.DistributedDataParallel(
            model,
            OverlapConfig(
                overlap_param_gather=args.overlap_param_gather,
                overlap_grad_reduce=args.overlap_grad_reduce,
                share_expert_buckets=not args.own_expert_buckets,
                measure_waits=True,
            ),
            groups,
        )
        params = [param for param in model.parameters() if param.requires_grad]
        self.optimizer = overlap.DistributedOptimizer(
            self.ddp,
            torch.optim.AdamW,
            [  # as Megatron does: no decay of biases and other vectors
                {"params": [p for p in params if p.ndim > 1], "wd_mult": 1.0},
                {"params": [p for p in params if p.ndim == 1], "wd_mult": 0.0},
            ],
            lr=args.lr,
            betas=(0.9, 0.999),
            weight_decay=args.weight_decay,
        )

    def train_step(self, batches: Iterator[Batch], microbatches: int) -> tuple[float, float]:
        """Return (mean loss of this rank's sequences, gradient norm)."""
        from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
        from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler

        self.optimizer.zero_grad()
        scale = torch.full((1,), 1 / microbatches, device=self.ddp.device)
        MoEAuxLossAutoScaler.set_loss_scale(scale)
        MTPLossAutoScaler.set_loss_scale(scale)
        total = 0.0
        for index in range(microbatches):
            with nullcontext() if index == microbatches - 1 else self.ddp.no_sync():
                output, loss_of = _forward_step(batches, self.ddp)
                loss, reported = loss_of(output)
                (loss / microbatches).backward()
                total += float(reported)
        norm = self.optimizer.clip_grad_norm(self.args.clip_grad)
        self.optimizer.step()
        return total / microbatches, float(norm)

    def settle(self) -> None:
        self.ddp.finish_in_flight()

    def take_waited_ms(self) -> float:
        return self.ddp.take_waited_ms()

    def plan(self) -> str:
        return str(self.ddp.plan())

    def save(self, folder: Path, iteration: int) -> None:
        """Write one file per rank, for a run of the same sizes."""
        folder.mkdir(parents=True, exist_ok=True)
        state = {"optimizer": self.optimizer.state_dict(), "iteration": iteration}
        torch.save(state, folder / f"native-rank{dist.get_rank()}.pt")
        dist.barrier()

    def load(self, folder: Path) -> int:
        """Read this rank's file; return its iteration."""
        path = folder / f"native-rank{dist.get_rank()}.pt"
        state = torch.load(path, map_location=self.ddp.device, weights_only=False)
        self.optimizer.load_state_dict(state["optimizer"])
        return int(state["iteration"])


def _forward_step(batches: Iterator[Batch], model: Any) -> tuple[Tensor, Any]:
    """One forward of a microbatch, in the form that Megatron's schedules take."""
    batch = next(batches)
    output = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])

    def loss_of(output: Tensor) -> tuple[Tensor, Tensor]:
        loss = output.float().mean()
        return loss, loss.detach().clone()

    return output, loss_of


def _inner(chunk: Any) -> Any:
    """The model inside its wrappers."""
    while isinstance(inner := getattr(chunk, "module", None), nn.Module):
        chunk = inner
    return chunk


def _key(index: int) -> str:
    return "model" if index == 0 else f"model{index}"


def _init_state(optimizer: Any) -> None:
    """Allocate the state that torch's AdamW makes in its first step only."""
    if isinstance(optimizer.optimizer, torch.optim.Optimizer):
        optimizer.init_state_fn(optimizer.optimizer, optimizer.config)
        for state in optimizer.optimizer.state.values():
            state.setdefault("step", torch.tensor(0.0))


def _load_state(optimizer: Any, saved: dict[str, Any], iteration: int) -> None:
    """Load one of Megatron's optimizers, whose groups may differ from those that were saved: of
    these only the tensors and the number of steps are state."""
    own = optimizer.state_dict()
    for group in own["optimizer"]["param_groups"]:
        group["step"] = iteration
    optimizer.load_state_dict(own)
    # Megatron looks for torch's "step" among the tensors, where it does not save it, and has given
    # one tensor to all parameters, which each of them would advance.
    with_step = [state for state in optimizer.optimizer.state.values() if "step" in state]
    for state in with_step:
        del state["step"]
    optimizer.load_parameter_state_from_fully_reshardable(saved["param_state"])
    for state in with_step:
        state["step"] = torch.tensor(float(iteration))
