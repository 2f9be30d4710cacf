"""The two stages and their fused twin against the loop over tokens, on 1, 2 and 4 ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megamoe import fused_mega_moe, mega_moe_stage1, mega_moe_stage2
from tests.megamoe_cases import (
    CASES,
    SEED,
    TOLERANCE,
    Case,
    Problem,
    Result,
    assert_close,
    assert_same_bits,
    assert_tensor_close,
    draw_experts,
    draw_tokens,
    runs,
    solve,
)
from tests.ranks import Ranks

CASES_AND_DTYPES = [
    pytest.param(case, dtype, id=f"{case.name}-{str(dtype)[6:]}")
    for case in CASES
    for dtype in TOLERANCE
    if runs(case, dtype)
]


Stages = Callable[..., Tensor]


def staged(
    x: Tensor,
    topk_idx: Tensor,
    topk_weights: Tensor,
    w1: Tensor,
    w2: Tensor,
    group: dist.ProcessGroup | None,
    *,
    clamp: float | None = None,
) -> Tensor:
    """Both stages in a row: the call shape of fused_mega_moe."""
    l1_out, dispatch_weights, handle = mega_moe_stage1(x, topk_idx, topk_weights, w1, group)
    return mega_moe_stage2(
        l1_out, dispatch_weights, handle, topk_idx, topk_weights, w2, group, clamp=clamp
    )


def run(
    function: Stages,
    case: Case,
    problem: Problem,
    w1: Tensor,
    w2: Tensor,
    group: dist.ProcessGroup | None = None,
) -> Result:
    x, ids, weights, dy = problem
    leaves = [t.detach().clone().requires_grad_() for t in (x, weights, w1, w2)]
    x, weights, w1, w2 = leaves
    y = function(x, ids, weights, w1, w2, group, clamp=case.clamp)
    y.backward(dy)
    dx, d_weights, dw1, dw2 = (leaf.grad for leaf in leaves)
    return Result(y.detach(), dx, d_weights, dw1, dw2)


@contextlib.contextmanager
def poisoned_memory() -> Iterator[None]:
    """Uninitialised memory holds NaN inside: whatever reads it shows."""
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(3).isnan().all(), "the poison does not work"
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def check_on_rank(case: Case, dtype: torch.dtype, seed: int) -> None:
    group, rank, ranks = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    local = slice(rank * case.experts // ranks, (rank + 1) * case.experts // ranks)
    w1, w2 = (w[local] for w in draw_experts(case, dtype, seed))
    problem = draw_tokens(case, dtype, seed, rank)
    with poisoned_memory():
        split = run(staged, case, problem, w1, w2, group)
        fused = run(fused_mega_moe, case, problem, w1, w2, group)
    assert split.y.dtype == split.dx.dtype == split.dw1.dtype == split.dw2.dtype == dtype
    assert split.d_topk_weights.dtype == problem.topk_weights.dtype
    assert_close(split, solve(case, dtype, seed, ranks)[rank], dtype, f"{case.name}, rank {rank}")
    assert_same_bits(fused, split, "the fused node")


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize(("case", "dtype"), CASES_AND_DTYPES)
def test_against_the_oracle(ranks: Ranks, case: Case, world_size: int, dtype: torch.dtype) -> None:
    ranks.run(world_size, check_on_rank, case, dtype, SEED)


def sample(
    case: Case, dtype: torch.dtype = torch.float64, seed: int = SEED
) -> tuple[Problem, Tensor, Tensor]:
    """One rank's problem with all experts."""
    return (draw_tokens(case, dtype, seed, 0), *draw_experts(case, dtype, seed))


SMALL = Case("small", tokens=(5,), experts=4, hidden=4, ffn=3, topk=2, ids="some-negative")


@pytest.mark.parametrize("clamp", [None, 0.8])
@pytest.mark.parametrize("function", [staged, fused_mega_moe])
def test_gradcheck(function: Stages, clamp: float | None) -> None:
    # The clamp has kinks, and finite differences across one are wrong: no kink near this seed.
    (x, ids, weights, _), w1, w2 = sample(SMALL, seed=SEED if clamp is None else 0)
    leaves = [t.nan_to_num(0.5).requires_grad_() for t in (x, weights, w1, w2)]
    assert torch.autograd.gradcheck(
        lambda x, weights, w1, w2: function(x, ids, weights, w1, w2, None, clamp=clamp), leaves
    )


def test_a_second_derivative_is_refused() -> None:
    (x, ids, weights, _), w1, w2 = sample(Case("plain"))
    x.requires_grad_()
    y = staged(x, ids, weights, w1, w2, None)
    (dx,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx.sum().backward()


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_ten_runs_give_the_same_bits(dtype: torch.dtype) -> None:
    case = Case("plain", tokens=(64,))
    problem, *weights = sample(case, dtype)
    first = run(staged, case, problem, *weights)
    for _ in range(9):
        assert_same_bits(run(staged, case, problem, *weights), first, "another run")


def test_idle_experts_get_exactly_zero() -> None:
    case = Case("idle", ids="two-experts")
    problem, *weights = sample(case, torch.bfloat16)
    with poisoned_memory():
        result = run(staged, case, problem, *weights)
    idle = [e for e in range(case.experts) if e not in problem.topk_idx]
    assert len(idle) == case.experts - 2
    for grad in (result.dw1, result.dw2):
        assert grad[idle].eq(0).all()
        assert grad.isfinite().all()


def test_nothing_of_a_token_that_is_dropped_is_read() -> None:
    """0 * NaN is NaN, so a dropped slot must be left out, not multiplied by zero."""
    case = Case("plain")
    (x, ids, weights, dy), *experts = sample(case)
    ids[2] = -1
    clean = run(staged, case, Problem(x, ids, weights, dy), *experts)
    for tensor in (x, weights, dy):
        tensor[2] = float("nan")
    result = run(staged, case, Problem(x, ids, weights, dy), *experts)
    assert_same_bits(result, clean, "the run with NaN in the dropped token")
    assert result.y[2].eq(0).all()
    assert result.dx[2].eq(0).all()
    assert result.d_topk_weights[2].eq(0).all()


def test_the_order_of_the_slots_does_not_matter_to_the_experts() -> None:
    case = Case("plain")
    (x, ids, weights, dy), *experts = sample(case)
    result = run(staged, case, Problem(x, ids, weights, dy), *experts)
    flipped = run(staged, case, Problem(x, ids.flip(1), weights.flip(1), dy), *experts)
    flipped = flipped._replace(d_topk_weights=flipped.d_topk_weights.flip(1))
    assert_close(flipped, result, torch.float64, "flipped slots")


def test_strided_inputs() -> None:
    case = Case("plain")
    (x, ids, weights, dy), w1, w2 = sample(case)
    want = run(staged, case, Problem(x, ids, weights, dy), w1, w2)
    x, ids, weights, dy = (t.t().contiguous().t() for t in (x, ids, weights, dy))
    w1, w2 = (w.transpose(1, 2).contiguous().transpose(1, 2) for w in (w1, w2))
    assert not any(t.is_contiguous() for t in (x, ids, weights, w1, w2))
    got = run(staged, case, Problem(x, ids, weights, dy), w1, w2)
    assert_close(got, want, torch.float64, "strided inputs")


def test_fp32_weights_beside_fp64_tokens() -> None:
    case = Case("plain")
    (x, ids, weights, dy), *experts = sample(case)
    got = run(staged, case, Problem(x, ids, weights.float(), dy), *experts)
    want = run(staged, case, Problem(x, ids, weights.float().double(), dy), *experts)
    assert got.d_topk_weights.dtype == torch.float32
    rounded = want._replace(d_topk_weights=want.d_topk_weights.float())
    assert_same_bits(got, rounded, "fp32 weights")


def test_calls_of_different_sizes_before_any_backward() -> None:
    """T changes between the calls, and their backwards run in the order of the forwards."""
    case = Case("plain")
    _, w1, w2 = sample(case)
    problems = [draw_tokens(Case("", tokens=(t,)), torch.float64, SEED, 0) for t in (100, 3, 41)]
    separate = [run(staged, case, problem, w1, w2) for problem in problems]
    w1, w2 = (w.clone().requires_grad_() for w in (w1, w2))
    xs = [problem.x.clone().requires_grad_() for problem in problems]
    ys = [
        staged(x, p.topk_idx, p.topk_weights, w1, w2, None)
        for x, p in zip(xs, problems, strict=True)
    ]
    for y, problem in zip(ys, problems, strict=True):
        y.backward(problem.dy)
    for x, y, result in zip(xs, ys, separate, strict=True):
        assert torch.equal(y, result.y)
        assert torch.equal(x.grad, result.dx)
    assert_tensor_close(w1.grad, sum(r.dw1 for r in separate), 1e-14, "dw1 of three calls")
    assert_tensor_close(w2.grad, sum(r.dw2 for r in separate), 1e-14, "dw2 of three calls")


@pytest.mark.parametrize("frozen", ["x", "topk_weights", "w1", "w2", "all but w1", "all but w2"])
@pytest.mark.parametrize("function", [staged, fused_mega_moe])
def test_frozen_inputs(function: Stages, frozen: str) -> None:
    case = Case("plain")
    problem, *experts = sample(case)
    want = run(function, case, problem, *experts)
    grads = dict(zip(("x", "topk_weights", "w1", "w2"), want[1:], strict=True))
    x, ids, weights, dy = problem
    leaves = dict(zip(grads, (x, weights, *experts), strict=True))
    for name, leaf in leaves.items():
        wanted = name == frozen[8:] if frozen.startswith("all but") else name != frozen
        leaf.requires_grad_(wanted)
    y = function(leaves["x"], ids, leaves["topk_weights"], leaves["w1"], leaves["w2"], None)
    y.backward(dy)
    for name, leaf in leaves.items():
        assert (leaf.grad is not None) == leaf.requires_grad, name
        assert leaf.grad is None or torch.equal(leaf.grad, grads[name]), name


def test_without_gradients_nothing_is_kept() -> None:
    (x, ids, weights, _), w1, w2 = sample(Case("plain"))
    with torch.no_grad():
        y = staged(x, ids, weights, w1.requires_grad_(), w2, None)
    assert not y.requires_grad


def test_the_gradient_of_the_routing_weights_rides_the_dispatch_weights() -> None:
    case = Case("plain")
    (x, ids, weights, dy), w1, w2 = sample(case)
    weights.requires_grad_()
    l1_out, dispatch_weights, handle = mega_moe_stage1(x, ids, weights, w1, None)
    assert l1_out.shape == (ids.numel(), 2 * case.ffn)
    assert dispatch_weights.sort().values.equal(weights.detach().reshape(-1).sort().values)
    l1_out, dispatch_weights = (t.detach().requires_grad_() for t in (l1_out, dispatch_weights))
    y = mega_moe_stage2(l1_out, dispatch_weights, handle, ids, weights, w2, None)
    y.backward(dy)
    assert weights.grad is None
    # <dy, expert output> of every row, in the order of dispatch_weights
    want = run(staged, case, Problem(x, ids, weights.detach(), dy), w1, w2).d_topk_weights
    got = dispatch_weights.grad
    order = dispatch_weights.detach().argsort()
    assert got[order].equal(want.reshape(-1)[weights.detach().reshape(-1).argsort()])


def test_the_dispatched_tokens_are_not_kept() -> None:
    """Saved: x, the weights, l1_out, dispatch_weights and tables; no other [P, ...] tensor."""
    case = Case("plain", tokens=(64,))
    (x, ids, weights, _), w1, w2 = sample(case)
    leaves = [t.requires_grad_() for t in (x, weights, w1, w2)]
    floats: list[tuple[int, ...]] = []

    def pack(tensor: Tensor) -> Tensor:
        if tensor.is_floating_point():
            floats.append(tuple(tensor.shape))
        return tensor

    rows = ids.numel()
    allowed = [tuple(t.shape) for t in (x, w1, w2)] + [(rows, 2 * case.ffn), (rows,)]
    for function in (staged, fused_mega_moe):
        floats.clear()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            function(leaves[0], ids, *leaves[1:], None)
        assert sorted(floats) == sorted(allowed)
