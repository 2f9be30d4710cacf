"""The optimizer on this rank's shards."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from overlap import checkpoint, collectives
from overlap.bucket import Bucket, GradState, Slot
from overlap.ddp import DistributedDataParallel
from overlap.errors import NonFiniteGradientError
from overlap.layout import Piece
from overlap.shard import MasterShard
from profiling import ranges
from profiling.ranges import Kind

__all__ = ["DistributedOptimizer"]

# These look at more than one element at a time: on a shard they would compute something else.
_NOT_ELEMENTWISE = ("Adafactor", "LBFGS", "Muon", "SparseAdam")

Params = Iterable[nn.Parameter] | Iterable[dict[str, Any]]


class DistributedOptimizer(Optimizer):
    """Any elementwise torch optimizer, each rank stepping its own shards in fp32 (ZeRO-1).

    It is a real `torch.optim.Optimizer`: ``param_groups`` are those of the inner optimizer, so that
    schedulers work; they hold this rank's fp32 masters (flat), not the model's parameters.

    After `step` the model's weights are on their way. Forwards wait for what they need; any other
    code that reads weights (a moving average, a norm to log) calls ``ddp.finish_param_sync()``
    first.

    Args:
        ddp: The wrapped model.
        optimizer_class: For example ``torch.optim.AdamW``. It must treat each element by itself.
        params: As for any torch optimizer, model parameters or groups of them with options of
            their own; by default all trainable ones in one group.
        defaults: Handed to the optimizer class.

    Raises:
        TypeError: The optimizer class is not elementwise.
        ValueError: ``params`` misses a trainable parameter or names an unknown one.
    """

    def __init__(
        self,
        ddp: DistributedDataParallel,
        optimizer_class: type[Optimizer],
        params: Params | None = None,
        **defaults: Any,
    ) -> None:
        if optimizer_class.__name__ in _NOT_ELEMENTWISE:
            raise TypeError(
                f"{optimizer_class.__name__} looks at whole parameters (or needs sparse gradients) "
                "and would compute something else on shards; use an elementwise optimizer"
            )
        self.ddp = ddp
        self.shards = {bucket: MasterShard(bucket) for bucket in ddp.buckets}
        self.group_names: list[list[str]] = []
        self._round = 0  # the reduction whose gradients the masters have
        # An optimizer from elsewhere may keep a count in its groups, which stepping the first
        # buckets by themselves would advance twice.
        self._step_apart = optimizer_class.__module__.startswith("torch.optim")
        self.inner = optimizer_class(self._groups(params), **defaults)
        super().__init__(self.inner.param_groups, self.inner.defaults)
        self.relink()

    def relink(self) -> None:
        """Share groups and state with the inner optimizer (its load_state_dict replaces them)."""
        self.param_groups = self.inner.param_groups
        self.state = self.inner.state

    def pieces(self) -> dict[str, tuple[Piece, nn.Parameter]]:
        """This rank's pieces and their fp32 masters by the name of the parameter they are of."""
        return {
            piece.member.spec.name: (piece, master)
            for shard in self.shards.values()
            for piece, master in zip(shard.pieces, shard.masters, strict=True)
        }

    def _groups(self, params: Params | None) -> list[dict[str, Any]]:
        """The groups of ``params`` with this rank's masters in place of the parameters."""
        slots: dict[Any, Slot] = {
            slot.param: slot for bucket in self.ddp.buckets for slot in bucket.slots
        }
        given: list[Any] = list(slots) if params is None else list(params)
        groups = given if given and isinstance(given[0], dict) else [{"params": given}]
        masters = {name: master for name, (_, master) in self.pieces().items()}
        result = []
        for group in groups:
            if "params" not in group:
                raise ValueError(f"a group of params has no 'params', only {sorted(group)}")
            own = group["params"]
            members = [own] if isinstance(own, Tensor) else list(own)
            names = []
            for param in members:
                if param not in slots:
                    shape = f" of shape {tuple(param.shape)}" if isinstance(param, Tensor) else ""
                    raise ValueError(
                        f"params holds a {type(param).__name__}{shape} that is not a trainable "
                        "parameter of the wrapped model, or is there twice: give parameters, or "
                        "dicts of them under 'params', each once"
                    )
                names.append(slots.pop(param).name)
            self.group_names.append(names)
            result.append({**group, "params": [masters[n] for n in names if n in masters]})
        if slots:
            raise ValueError(
                f"params misses trainable parameters: {[slot.name for slot in slots.values()]}; "
                "freeze what should not be trained before wrapping"
            )
        return result

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused once constructed: the buckets are laid out. Pass all groups as ``params``."""
        if getattr(self, "param_groups", None) is self.inner.param_groups:
            raise ValueError("a group cannot be added later: pass all groups to the constructor")
        super().add_param_group(param_group)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the model's gradients; call it once per iteration."""
        self.ddp.zero_grad()

    @torch.no_grad()
    def clip_grad_norm(self, max_norm: float) -> Tensor:
        """Scale all gradients so that their joint 2-norm is at most ``max_norm``. A collective.

        Returns the norm before scaling, a scalar on the model's device, the same on every rank: the
        norm over every dense and every expert parameter of the whole model, each counted once.
        """
        grads = self._finish_grads()
        total = torch.zeros((), device=self.ddp.device)
        for norm in torch._foreach_norm(grads) if grads else ():
            total += norm.square()
        # With EP x EDP = DP each element of any parameter lies in one shard of one rank.
        collectives.all_reduce(total, self.ddp.groups.dp, "the sum of the gradient norms")
        norm = total.sqrt()
        scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        # The masters' gradients only: in the padding a NaN would stay for ever.
        for grad in grads:
            grad.mul_(scale)
        return norm

    def _finish_grads(self) -> list[Tensor]:
        """Wait for the gradients; return the masters' ones."""
        current = self.ddp.finish_grad_sync()
        if current != self._round:
            for shard in self.shards.values():
                shard.take_grads()
            if self.ddp.config.check_for_nan:
                self._check_for_nan()
            self._round = current  # only now: whoever catches the error cannot step on with NaN
        return [m.grad for s in self.shards.values() for m in s.masters if m.grad is not None]

    def _check_for_nan(self) -> None:
        names = [slot.name for bucket in self.ddp.buckets for slot in bucket.slots]
        masters = {name: master for name, (_, master) in self.pieces().items()}
        bad = torch.zeros(len(names), device=self.ddp.device)
        for index, name in enumerate(names):
            if name in masters:
                grad = masters[name].grad
                assert grad is not None
                bad[index] = ~grad.isfinite().all()
        collectives.all_reduce(bad, self.ddp.groups.dp, "the check for NaN", dist.ReduceOp.MAX)
        culprits = [name for name, flag in zip(names, bad.tolist(), strict=True) if flag]
        if culprits:
            raise NonFiniteGradientError(
                f"NaN or infinity in the reduced gradient of {', '.join(culprits)}"
            )

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step the shards and start to gather the parameters.

        Raises:
            UnusedParameterError, NonFiniteGradientError: As the config asks for.
            WrapError: The model was moved, cast or unwrapped.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with ranges.span(Kind.OPTIMIZER_STEP), torch.no_grad():
            self._step()
        return loss

    def _step(self) -> None:
        early = self._early()
        in_parts = bool(early)
        if not in_parts:
            self._finish_grads()
        for bucket in self.ddp.begin_step():
            self.shards[bucket].adopt()
        gather = self.ddp.gather
        # The first buckets are stepped by themselves, so that their gathers travel during the rest.
        first = gather.first() if self._step_apart else []
        early = [bucket for bucket in early if bucket not in first]
        rest = [bucket for bucket in gather.order if bucket not in (*early, *first)]
        for part in (early, first, rest):
            if in_parts:
                for bucket in part:
                    bucket.finish_reduce()
                    self.shards[bucket].take_grads()
            self._step_buckets(part)
            if part is first and first:
                gather.start()
        self._round = self.ddp.finish_grad_sync()
        gather.finish_step()

    def _early(self) -> list[Bucket]:
        """The buckets to step while the others are still being reduced, if there are some; then
        nothing has been waited for. Whoever has to see all gradients first has none."""
        whole = self.ddp.config.check_for_nan or self.ddp.gather.learning or not self._step_apart
        return [] if whole else self.ddp.issue_grad_sync()

    def _step_buckets(self, buckets: Sequence[Bucket]) -> None:
        """Step these and no others, whose gradients may not have come yet."""
        if not buckets:
            return
        assert all(bucket.grad_state is GradState.REDUCED for bucket in buckets)
        others = [shard for bucket, shard in self.shards.items() if bucket not in buckets]
        for shard in others:
            shard.hold_grads()
        self.inner.step()
        for shard in others:
            shard.release_grads()
        for bucket in buckets:
            self.shards[bucket].publish()
        self.ddp.gather.invalidate(buckets)

    def state_dict(self) -> dict[str, Any]:
        """This rank's part of the optimizer, fp32 masters included; each rank saves its own.

        See `overlap.checkpoint` for the form.
        """
        return checkpoint.save(self)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume, bit for bit, from the same rank's `state_dict`. A collective.

        The model's trainable parameters follow from the masters; they need not be loaded before.

        Raises:
            CheckpointMismatchError: It was written at other sizes, by another rank, or for another
                model.
        """
        self.ddp.finish_param_sync()  # masters may lie in the buckets that are being gathered
        checkpoint.load(self, state_dict)
        self.relink()
        for shard in self.shards.values():
            shard.publish()
        self.ddp.gather.invalidate(self.ddp.buckets)
        self.ddp.gather.finish_step()
        self.ddp.finish_param_sync()
