"""A stand-in for the package `primus_turbo`: its MoE ops on the CPU, limits and defects included.

It honours the contract of primus_turbo.pytorch.ops.moe.fused_mega_moe as of its commit 9b5d3092,
in torch over the group's own collectives (the real kernels exchange tokens themselves), and the ops
share no code with megamoe. What is wrong there is wrong here, and as silently:

- one buffer per process, for one group and one (experts, tokens, k, hidden, ffn): a forward that
  differs replaces it, and the stages of earlier forwards then give NaN;
- rows past the last whole 128 tokens are NaN, in y and in dx;
- rows of l1_out that no token fills are NaN, and so are those of its gradient;
- gate and up are cut to +-10;
- ranks with different token counts hang: here that raises `Hang`, so that a test ends.

The device is not checked: `installed` makes the CPU pass for a gfx950.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

from megamoe import backends
from megamoe.backends.primus_turbo import limits, package, router, stages
from megamoe.backends.primus_turbo.buffer import SharedBuffer

CLAMP = 10.0
TILE = 256  # rows of an expert are padded to it
WHOLE = 128  # tokens beyond the last multiple are garbage


class Hang(RuntimeError):
    """Where the real kernels would wait for each other for ever."""


class _Buffer:
    """One generation of the shared buffer."""

    def __init__(self, group: dist.ProcessGroup, key: tuple[int, ...]) -> None:
        self.group, self.key = group, key
        self.experts, self.tokens, self.topk, self.hidden, self.ffn = key
        self.ranks, self.rank = dist.get_world_size(group), dist.get_rank(group)
        self.local = self.experts // self.ranks
        per_token = min(self.topk, self.local)
        most = self.ranks * self.tokens * per_token + self.local * (TILE - 1)
        self.rows = -(-most // TILE) * TILE


_current: _Buffer | None = None
made = 0  # buffers, over the life of the process


def _buffer_for(group: dist.ProcessGroup, key: tuple[int, ...]) -> _Buffer:
    global _current, made
    if _current is None or _current.group is not group or _current.key != key:
        _current = _Buffer(group, key)
        made += 1
        asked = _gather(torch.tensor(key), _current)
        if not asked.eq(asked[0]).all():
            raise Hang(f"the ranks ask for different buffers: {asked.tolist()}")
    return _current


def _gather(tensor: Tensor, buffer: _Buffer) -> Tensor:
    parts = [torch.empty_like(tensor) for _ in range(buffer.ranks)]
    dist.all_gather(parts, tensor.contiguous(), group=buffer.group)
    return torch.stack(parts)


class _Rows:
    """Who sits in which row of the pool, read from the handle."""

    def __init__(self, handle: tuple[Tensor, ...], buffer: _Buffer) -> None:
        assert len(handle) == 13
        counts, starts, slots = handle[6], handle[7], handle[12]
        self.runs = [
            slice(int(start), int(start + count))
            for start, count in zip(starts[:-1], counts, strict=True)
        ]
        self.real = (slots >= 0).nonzero()[:, 0]
        self.slot = slots[self.real].long()  # (rank * T + token) * K + k
        self.token = self.slot // buffer.topk

    def pool(self, values: Tensor, buffer: _Buffer) -> Tensor:
        """Values of the filled rows in a pool that is NaN elsewhere."""
        pool = values.new_full((buffer.rows, *values.shape[1:]), float("nan"))
        pool[self.real] = values
        return pool

    def times(self, pool: Tensor, weights: Tensor) -> Tensor:
        """rows @ weights[e].T of the filled rows, rounded to bf16, as a pool."""
        out = pool.new_full((pool.shape[0], weights.shape[1]), float("nan"))
        for run, weight in zip(self.runs, weights, strict=True):
            out[run] = (pool[run].float() @ weight.float().T).bfloat16()
        return out

    def outer(self, left: Tensor, right: Tensor) -> Tensor:
        """left.T @ right over the filled rows of every expert."""
        parts = [left[run].float().T @ right[run].float() for run in self.runs]
        return torch.stack(parts).bfloat16()

    def to_tokens(self, values: Tensor, buffer: _Buffer) -> Tensor:
        """Sum the filled rows' values [R, H] over their tokens, and fetch this rank's [T, H]."""
        total = values.new_zeros(buffer.ranks * buffer.tokens, values.shape[1])
        total.index_add_(0, self.token, values)
        dist.all_reduce(total, group=buffer.group)
        own = total.view(buffer.ranks, buffer.tokens, -1)[buffer.rank].bfloat16()
        own[buffer.tokens // WHOLE * WHOLE :] = float("nan")
        return own


def _prologue(topk_idx: Tensor, buffer: _Buffer) -> tuple[Tensor, ...]:
    ids = _gather(topk_idx, buffer).view(-1)
    first = buffer.rank * buffer.local
    counts, starts, tiles = [], [0], []
    slots = torch.full((buffer.rows,), -1, dtype=torch.int32)
    for expert in range(buffer.local):
        found = (ids == first + expert).nonzero()[:, 0]
        slots[starts[-1] : starts[-1] + len(found)] = found.int()
        blocks = -(-len(found) // TILE)
        counts.append(len(found))
        tiles += [expert] * blocks
        starts.append(starts[-1] + blocks * TILE)
    table = torch.zeros(buffer.experts, dtype=torch.int32)  # sending and receiving; unused here
    return (
        *(table.clone() for _ in range(4)),
        torch.zeros(buffer.tokens * buffer.topk, dtype=torch.int32),
        torch.tensor(tiles, dtype=torch.int32),
        torch.tensor(counts, dtype=torch.int32),
        torch.tensor(starts),
        torch.tensor([len(tiles)], dtype=torch.int32),
        *(table.clone() for _ in range(3)),
        slots,
    )


def _stage1(x, topk_idx, topk_weights, w1, group):
    assert (x.dim(), x.dtype) == (2, torch.bfloat16), f"x must be 2D bf16, got {x.dtype}"
    assert (w1.dim(), x.shape[1] % 512) == (3, 0)
    assert 2 <= dist.get_world_size(group) <= 8
    experts = w1.shape[0] * dist.get_world_size(group)
    key = (experts, x.shape[0], topk_idx.shape[1], x.shape[1], w1.shape[1] // 2)
    buffer = _buffer_for(group, key)
    handle = _prologue(topk_idx, buffer)
    rows = _Rows(handle, buffer)
    weights = rows.pool(_gather(topk_weights.float(), buffer).view(-1)[rows.slot], buffer)
    l1_out = rows.times(_dispatch(x, rows, buffer), w1)
    return l1_out, weights, handle, buffer


def _dispatch(x: Tensor, rows: _Rows, buffer: _Buffer) -> Tensor:
    return rows.pool(_gather(x, buffer).flatten(0, 1)[rows.token], buffer)


def _swiglu(l1_out: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    gate, up = l1_out.float().chunk(2, dim=1)
    gate, up = gate.clamp(-CLAMP, CLAMP), up.clamp(-CLAMP, CLAMP)
    return gate * torch.sigmoid(gate), gate, up


def _stage2(l1_out, w2, handle, topk_weights, buffer):
    rows = _Rows(handle, buffer)
    silu, _, up = _swiglu(l1_out)
    out = rows.times((silu * up).bfloat16(), w2)[rows.real].float()
    weights = _gather(topk_weights.float(), buffer).view(-1)[rows.slot]
    return rows.to_tokens(out * weights[:, None], buffer)


def _stage2_backward(dy, l1_out, dispatch_weights, w2, handle, buffer):
    rows = _Rows(handle, buffer)
    dy_rows = _dispatch(dy.contiguous().bfloat16(), rows, buffer)
    d_act = rows.times(dy_rows, w2.transpose(1, 2)).float()
    silu, gate, up = _swiglu(l1_out)
    weight = dispatch_weights[:, None]
    d_weights = (d_act * silu * up).sum(1)
    dw2 = rows.outer(dy_rows, (silu * up * weight).bfloat16())
    sigmoid = torch.sigmoid(gate)
    inside = (l1_out.float().abs() <= CLAMP).chunk(2, dim=1)
    d_gate = d_act * weight * up * sigmoid * (1 + gate * (1 - sigmoid)) * inside[0]
    d_up = d_act * weight * silu * inside[1]
    return torch.cat((d_gate, d_up), dim=1).bfloat16(), d_weights, dw2


def _stage1_backward(d_l1, d_weights, x, w1, handle, buffer):
    rows = _Rows(handle, buffer)
    dw1 = rows.outer(d_l1, _dispatch(x, rows, buffer))
    d_rows = rows.times(d_l1, w1.transpose(1, 2))[rows.real].float()
    dx = rows.to_tokens(d_rows, buffer)
    slots = torch.zeros(buffer.ranks * buffer.tokens * buffer.topk)
    if d_weights is not None:
        slots[rows.slot] = d_weights[rows.real]
    dist.all_reduce(slots, group=buffer.group)
    return dx, slots.view(buffer.ranks, buffer.tokens, buffer.topk)[buffer.rank], dw1


def _lost(buffer: _Buffer, *like: Tensor) -> tuple[Tensor, ...] | None:
    """What the kernels make of a buffer that is no longer theirs."""
    if buffer is _current:
        return None
    return tuple(torch.full_like(tensor, float("nan")) for tensor in like)


class _Stage1(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, topk_idx, topk_weights, w1, group):
        with record_function("fused_mega_moe_stage1_forward"):
            l1_out, weights, handle, buffer = _stage1(x, topk_idx, topk_weights, w1, group)
        ctx.set_materialize_grads(False)
        ctx.handle, ctx.buffer = handle, buffer
        ctx.save_for_backward(x, topk_weights, w1)
        ctx.mark_non_differentiable(*handle)
        return l1_out, weights, *handle

    @staticmethod
    def backward(ctx, d_l1, d_weights, *_):
        with torch.no_grad(), record_function("fused_mega_moe_stage1_backward"):
            if d_l1 is None:
                return (None,) * 5
            x, topk_weights, w1 = ctx.saved_tensors
            grads = _lost(ctx.buffer, x, topk_weights, w1) or _stage1_backward(
                d_l1, d_weights, x, w1, ctx.handle, ctx.buffer
            )
        return grads[0], None, grads[1], grads[2], None


class _Stage2(torch.autograd.Function):
    @staticmethod
    def forward(ctx, l1_out, dispatch_weights, topk_weights, w2, buffer, *handle):
        with record_function("fused_mega_moe_stage2_forward"):
            like = l1_out.new_empty(buffer.tokens, buffer.hidden)
            lost = _lost(buffer, like)
            y = lost[0] if lost else _stage2(l1_out, w2, handle, topk_weights, buffer)
        ctx.set_materialize_grads(False)
        ctx.handle, ctx.buffer = handle, buffer
        ctx.save_for_backward(l1_out, dispatch_weights, w2)
        return y

    @staticmethod
    def backward(ctx, dy):
        with torch.no_grad(), record_function("fused_mega_moe_stage2_backward"):
            if dy is None:
                return (None,) * (5 + len(ctx.handle))
            l1_out, weights, w2 = ctx.saved_tensors
            grads = _lost(ctx.buffer, l1_out, weights, w2) or _stage2_backward(
                dy, l1_out, weights, w2, ctx.handle, ctx.buffer
            )
        return grads[0], grads[1], None, grads[2], None, *(None for _ in ctx.handle)


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, topk_idx, topk_weights, w1, w2, group):
        with record_function("fused_mega_moe_forward"):
            l1_out, weights, handle, buffer = _stage1(x, topk_idx, topk_weights, w1, group)
            y = _stage2(l1_out, w2, handle, topk_weights, buffer)
        ctx.handle, ctx.buffer = handle, buffer
        ctx.save_for_backward(x, topk_weights, l1_out, weights, w1, w2)
        return y

    @staticmethod
    def backward(ctx, dy):
        with torch.no_grad(), record_function("fused_mega_moe_backward"):
            x, topk_weights, l1_out, weights, w1, w2 = ctx.saved_tensors
            lost = _lost(ctx.buffer, x, topk_weights, w1, w2)
            if lost:
                dx, d_weights, dw1, dw2 = lost
            else:
                d_l1, d_rows, dw2 = _stage2_backward(
                    dy, l1_out, weights, w2, ctx.handle, ctx.buffer
                )
                dx, d_weights, dw1 = _stage1_backward(d_l1, d_rows, x, w1, ctx.handle, ctx.buffer)
        return dx, None, d_weights, dw1, dw2, None


def fused_mega_moe_stage1(x, topk_idx, topk_weights, w1, group):
    l1_out, dispatch_weights, *handle = _Stage1.apply(x, topk_idx, topk_weights, w1, group)
    return l1_out, dispatch_weights, tuple(handle)


def fused_mega_moe_stage2(l1_out, dispatch_weights, handle, topk_idx, topk_weights, w2, group):
    buffer = _buffer_of(handle, topk_idx, w2, group)
    return _Stage2.apply(l1_out, dispatch_weights, topk_weights, w2, buffer, *handle)


def _buffer_of(handle, topk_idx, w2, group) -> _Buffer:
    """The buffer that a handle was made for; the real op just takes the current one."""
    experts = w2.shape[0] * dist.get_world_size(group)
    key = (experts, *topk_idx.shape, *w2.shape[1:])
    same = _current is not None and _current.group is group and _current.key == key
    return _current if same else _Buffer(group, key)


def fused_mega_moe(group, x, topk_idx, topk_weights, w1, w2):
    return _Fused.apply(x, topk_idx, topk_weights, w1, w2, group)


def fused_group_topk_routing_with_aux_score(
    logits, topk, groups=1, selected_groups=1, score_function="sigmoid", scaling_factor=1.0
):
    """(scores [T, E] normalised over all experts, probs [T, E], zero where not chosen, map)."""
    tokens, experts = logits.shape
    for size in (experts, groups, selected_groups, topk if groups > 1 else 1):
        assert size & (size - 1) == 0, f"{size} is no power of two"
    assert selected_groups <= groups
    raw = torch.sigmoid(logits) if score_function == "sigmoid" else torch.softmax(logits, 1)
    scores = raw / raw.sum(1, keepdim=True)
    grouped = raw.detach().view(tokens, groups, -1)
    best = grouped.topk(topk // selected_groups, dim=2).values.sum(2).topk(selected_groups).indices
    allowed = torch.zeros(tokens, groups, dtype=torch.bool).scatter(1, best, True)
    limited = grouped.masked_fill(~allowed[:, :, None], -1.0).view(tokens, experts)
    routing_map = torch.zeros_like(raw, dtype=torch.bool)
    routing_map = routing_map.scatter(1, limited.topk(topk).indices, True)
    probs = raw * routing_map
    if score_function == "sigmoid":
        probs = probs / probs.sum(1, keepdim=True)
    return scores, probs * scaling_factor, routing_map


@contextmanager
def installed(*, without: tuple[str, ...] = (), device: bool = True) -> Iterator[None]:
    """Have the simulator imported as `primus_turbo`, lacking the names in ``without``, and with
    ``device`` the CPU taken for one that it runs on."""
    global _current
    moe = _module("primus_turbo.pytorch.ops.moe.fused_mega_moe")
    ops = _module("primus_turbo.pytorch.ops")
    for function in (fused_mega_moe_stage1, fused_mega_moe_stage2, fused_mega_moe):
        setattr(moe, function.__name__, function)
    ops.fused_group_topk_routing_with_aux_score = fused_group_topk_routing_with_aux_score
    for module in (moe, ops):
        for name in without:
            module.__dict__.pop(name, None)
    info = _module("primus_turbo._build_info")
    info.__git_commit__ = "5" * 40
    fake = {module.__name__: module for module in (moe, ops, info)}
    for name in ("primus_turbo", "primus_turbo.pytorch", "primus_turbo.pytorch.ops.moe"):
        fake[name] = _module(name)
    assert not fake.keys() & sys.modules.keys()
    with mock.patch.dict(backends._loaded), ExitStack() as stack:
        # Not patch.dict: it would also forget what is imported in between.
        sys.modules.update(fake)
        for name in fake:
            stack.callback(sys.modules.pop, name)
        backends._loaded.pop("primus_turbo", None)
        stack.callback(package.operations.cache_clear)
        package.operations.cache_clear()
        _current = None
        stack.enter_context(mock.patch.object(stages, "SHARED", SharedBuffer()))
        if device:
            for module in (limits, router):
                patch = mock.patch.object(module, "device_problem", return_value=None)
                stack.enter_context(patch)
        yield


def _module(name: str) -> ModuleType:
    module = ModuleType(name)
    module.__path__ = []
    return module
