"""Megatron-core's DDP and distributed optimizer around the same layers, with its own defaults."""

from __future__ import annotations

import importlib.util
from contextlib import nullcontext
from unittest import mock

import torch
from torch import nn

from benchmarks.ranks.here import Here
from benchmarks.stages import Shape
from tests import megatron_shim

__all__ = ["MegatronTraining", "available"]


def available() -> bool:
    return importlib.util.find_spec("megatron") is not None


class MegatronTraining:
    """Wrapped and ready to step. Nothing takes its hooks off again: the model is lost to it."""

    def __init__(self, here: Here, model: nn.Module, shape: Shape) -> None:
        # On a GPU Megatron-core needs no shim.
        self._shim = nullcontext if here.cuda else megatron_shim.on_cpu
        with mock.patch.object(megatron_shim, "on_cpu", self._shim):
            megatron_shim.initialize(expert_parallel_size=1)
            self.ddp = megatron_shim.wrap(model)
            self.optimizer = megatron_shim.adamw(
                self.ddp, lr=1e-5, min_lr=1e-5, weight_decay=0.01, bf16=here.cuda
            )
        dtype = next(model.parameters()).dtype
        x = torch.randn(shape.tokens, shape.hidden, device=here.device)
        self.x = x.to(dtype).requires_grad_()
        self.dy = torch.randn_like(self.x)

    def step(self) -> None:
        with self._shim():
            self.ddp.zero_grad_buffer()
            self.optimizer.zero_grad()
            self.x.grad = None
            self.ddp(self.x).backward(self.dy)
            self.ddp.finish_grad_sync()
            self.optimizer.step()

    def close(self) -> None:
        from megatron.core import parallel_state

        parallel_state.destroy_model_parallel()
