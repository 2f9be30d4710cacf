"""The optimizer on this rank's shards."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from overlap import collectives
from overlap.bucket import Bucket, Slot
from overlap.ddp import DistributedDataParallel
from overlap.errors import NonFiniteGradientError, WrapError
from profiling import ranges
from profiling.ranges import Kind

__all__ = ["DistributedOptimizer"]


class _Shard:
    """The fp32 master weights of one bucket's shard, in pieces: one per parameter it holds.

    Attributes:
        master: [layout.shard_numel] fp32; the bucket's own memory where the parameters are fp32.
        names: The parameter of each piece.
        pieces: Views of ``master``, what the inner optimizer steps.
    """

    def __init__(self, bucket: Bucket) -> None:
        self.bucket = bucket
        self.master = bucket.param_shard.float()
        offset = bucket.layout.shard(bucket.rank).start
        self.names: list[str] = []
        self.pieces: list[nn.Parameter] = []
        self.places: list[slice] = []
        for piece in bucket.layout.pieces(bucket.rank):
            place = slice(piece.start - offset, piece.stop - offset)
            self.names.append(piece.member.spec.name)
            self.places.append(place)
            self.pieces.append(nn.Parameter(self.master[place]))

    def give_grads(self) -> None:
        """Let the pieces' ``grad`` be the reduced gradients, as fp32."""
        reduced = self.bucket.grad_shard.float()
        for piece, place in zip(self.pieces, self.places, strict=True):
            piece.grad = reduced[place]

    def take_grads(self) -> list[Tensor | None]:
        grads = [piece.grad for piece in self.pieces]
        for piece in self.pieces:
            piece.grad = None
        return grads

    def put_grads(self, grads: Sequence[Tensor | None]) -> None:
        for piece, grad in zip(self.pieces, grads, strict=True):
            piece.grad = grad

    def publish(self) -> None:
        """Round the masters into the bucket's parameters."""
        if self.master.dtype != self.bucket.param_shard.dtype:
            self.bucket.param_shard.copy_(self.master)


class DistributedOptimizer(Optimizer):
    """Any elementwise torch optimizer, each rank stepping its own shards in fp32 (ZeRO-1).

    It is a real `torch.optim.Optimizer`: ``param_groups`` are those of the inner optimizer, so that
    schedulers work; they hold this rank's fp32 pieces, not the model's parameters.

    Args:
        ddp: The wrapped model.
        optimizer_class: For example ``torch.optim.AdamW``. It must treat each element by itself.
        params: As for any torch optimizer, model parameters or groups of them with options of
            their own; by default all trainable ones in one group.
        defaults: Handed to the optimizer class.

    Raises:
        ValueError: ``params`` misses a trainable parameter or names an unknown one.
    """

    def __init__(
        self,
        ddp: DistributedDataParallel,
        optimizer_class: type[Optimizer],
        params: Iterable[nn.Parameter] | Iterable[dict[str, Any]] | None = None,
        **defaults: Any,
    ) -> None:
        self._ddp = ddp
        self._shards = {bucket: _Shard(bucket) for bucket in ddp.buckets}
        self._round = 0
        self.inner = optimizer_class(self._groups(params), **defaults)
        super().__init__(self.inner.param_groups, self.inner.defaults)
        self.param_groups = self.inner.param_groups
        self.state = self.inner.state

    def _groups(
        self, params: Iterable[nn.Parameter] | Iterable[dict[str, Any]] | None
    ) -> list[dict[str, Any]]:
        """The groups of ``params`` with this rank's pieces in place of the parameters."""
        slots: dict[Any, Slot] = {
            slot.param: slot for bucket in self._ddp.buckets for slot in bucket.slots
        }
        given: list[Any] = list(slots) if params is None else list(params)
        groups = given if given and isinstance(given[0], dict) else [{"params": given}]
        pieces: dict[str, nn.Parameter] = {}
        for shard in self._shards.values():
            pieces.update(zip(shard.names, shard.pieces, strict=True))
        result = []
        for group in groups:
            own = group["params"]
            members = [own] if isinstance(own, Tensor) else list(own)
            unknown = [tuple(p.shape) for p in members if p not in slots]
            if unknown:
                raise ValueError(
                    f"params holds tensors of shape {unknown} that are no trainable parameters of "
                    "the wrapped model"
                )
            names = [slots.pop(p).name for p in members]
            result.append({**group, "params": [pieces[n] for n in names if n in pieces]})
        if slots:
            raise ValueError(
                f"params misses trainable parameters: {[slot.name for slot in slots.values()]}; "
                "freeze what should not be trained before wrapping"
            )
        return result

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the model's gradients; call it once per iteration."""
        self._ddp.zero_grad()

    @torch.no_grad()
    def clip_grad_norm(self, max_norm: float) -> Tensor:
        """Scale all gradients so that their joint 2-norm is at most ``max_norm``.

        Returns the norm before scaling, a scalar on the model's device, the same on every rank: the
        norm over every dense and every expert parameter of the whole model, each counted once.
        """
        grads = self._finish_grads()
        squares = [torch.linalg.vector_norm(grad).square() for grad in grads]
        total = torch.stack(squares).sum() if grads else torch.zeros((), device=self._ddp.device)
        # With EP x EDP = DP each element of any parameter lies in one shard of one rank.
        collectives.all_reduce(total, self._ddp.groups.dp, "the sum of the gradient norm")
        norm = total.sqrt()
        scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        for grad in grads:
            grad.mul_(scale)
        return norm

    def _finish_grads(self) -> list[Tensor]:
        """Wait for the gradients; return this rank's pieces of them."""
        if not self._ddp.attached:
            raise WrapError("the model was unwrapped with remove(): this optimizer is of no use")
        current = self._ddp.finish_grad_sync()
        if current != self._round:
            self._round = current
            for shard in self._shards.values():
                shard.give_grads()
            if self._ddp.config.check_for_nan:
                self._check_for_nan()
        return [
            p.grad for shard in self._shards.values() for p in shard.pieces if p.grad is not None
        ]

    def _check_for_nan(self) -> None:
        names = [slot.name for bucket in self._ddp.buckets for slot in bucket.slots]
        number = {name: index for index, name in enumerate(names)}
        bad = torch.zeros(len(names), device=self._ddp.device)
        for shard in self._shards.values():
            for name, piece in zip(shard.names, shard.pieces, strict=True):
                assert piece.grad is not None
                bad[number[name]] = (~piece.grad.isfinite().all()).float()
        collectives.all_reduce(bad, self._ddp.groups.dp, "the check for NaN", dist.ReduceOp.MAX)
        culprits = [name for name, flag in zip(names, bad.tolist(), strict=True) if flag]
        if culprits:
            raise NonFiniteGradientError(
                f"NaN or infinity in the reduced gradients of {', '.join(culprits)}"
            )

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step the shards and start to gather the parameters."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with ranges.span(Kind.OPTIMIZER_STEP), torch.no_grad():
            self._step()
        return loss

    def _step(self) -> None:
        self._finish_grads()
        gather = self._ddp.begin_step()
        first = gather.first()
        rest = [bucket for bucket in gather.order if bucket not in first]
        # The first buckets are stepped by themselves, so that their gathers travel during the rest.
        held = {bucket: self._shards[bucket].take_grads() for bucket in rest}
        self._step_buckets(first)
        gather.invalidate(first)
        gather.start()
        for bucket, grads in held.items():
            self._shards[bucket].put_grads(grads)
        held = {bucket: self._shards[bucket].take_grads() for bucket in first}
        self._step_buckets(rest)
        gather.invalidate(rest)
        gather.stepped()
        for bucket, grads in held.items():
            self._shards[bucket].put_grads(grads)

    def _step_buckets(self, buckets: Sequence[Bucket]) -> None:
        if buckets:
            self.inner.step()
        for bucket in buckets:
            self._shards[bucket].publish()
