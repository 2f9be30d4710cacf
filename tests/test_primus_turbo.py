"""The adapter over the simulator of Primus-Turbo: equal to the oracle, or a sentence why not.

Nothing here has run on AMD hardware: the simulator stands for the ops as their source reads.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megamoe import (
    MegaMoEConfig,
    MegaMoEExperts,
    MegaMoELayer,
    fused_mega_moe,
    mega_moe_stage1,
    mega_moe_stage2,
)
from megamoe.backends import get_backend
from megamoe.backends.primus_turbo import limits
from megamoe.backends.primus_turbo.limits import device_problem
from megamoe.errors import BackendUnavailableError, InputError
from tests import primus_turbo_simulator as simulator
from tests.megamoe_cases import (
    SEED,
    Case,
    Problem,
    Result,
    assert_close,
    assert_tensor_close,
    draw_experts,
    draw_tokens,
    solve,
)
from tests.ranks import RankError, Ranks

SIZES = {"hidden": 512, "ffn": 32, "experts": 4, "topk": 2}
CASES = [
    Case("whole", tokens=(128,), **SIZES),
    Case("T100", tokens=(100,), **SIZES),
    Case("ragged", tokens=(70, 0, 128, 1), **SIZES),
    Case("past-128-on-one-rank", tokens=(40, 150), **SIZES),
    Case("dropped-slots", tokens=(100,), ids="some-negative", **SIZES),
    Case("all-dropped", tokens=(5,), ids="all-negative", **SIZES),
    Case("idle-experts", tokens=(64,), ids="two-experts", **SIZES),
    Case("zero-and-negative-weights", tokens=(64,), weights="zero-and-negative", **SIZES),
]
BF16 = torch.bfloat16


def staged(
    x: Tensor,
    topk_idx: Tensor,
    topk_weights: Tensor,
    w1: Tensor,
    w2: Tensor,
    group: dist.ProcessGroup,
    backend: str = "primus_turbo",
) -> Tensor:
    l1_out, dispatch_weights, handle = mega_moe_stage1(
        x, topk_idx, topk_weights, w1, group, backend=backend
    )
    return mega_moe_stage2(
        l1_out, dispatch_weights, handle, topk_idx, topk_weights, w2, group, backend=backend
    )


def fused(*args: object) -> Tensor:
    return fused_mega_moe(*args, backend="primus_turbo")


def draw(case: Case, seed: int = SEED) -> tuple[Problem, Tensor, Tensor]:
    """This rank's tokens and experts, in bf16."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    local = slice(rank * case.experts // ranks, (rank + 1) * case.experts // ranks)
    w1, w2 = (w[local].clone() for w in draw_experts(case, BF16, seed))
    return draw_tokens(case, BF16, seed, rank), w1, w2


def run(function, problem: Problem, w1: Tensor, w2: Tensor) -> Result:
    x, ids, weights, dy = problem
    leaves = [t.detach().clone().requires_grad_() for t in (x, weights, w1, w2)]
    y = function(leaves[0], ids, *leaves[1:], dist.group.WORLD)
    y.backward(dy)
    return Result(y.detach(), *(leaf.grad for leaf in leaves))


def check_case(case: Case, seed: int) -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    problem, w1, w2 = draw(case, seed)
    want = solve(case, BF16, seed, ranks)[rank]
    with simulator.installed():
        for function in (staged, fused):
            got = run(function, problem, w1, w2)
            assert_close(got, want, BF16, f"{function.__name__} {case.name}, rank {rank}")
    assert got.d_topk_weights.dtype == torch.float32
    for e in range(w1.shape[0]):
        idle = not any(
            (draw_tokens(case, BF16, seed, r).topk_idx == rank * w1.shape[0] + e).any()
            for r in range(ranks)
        )
        assert not idle or got.dw1[e].eq(0).all()


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_against_the_oracle(ranks: Ranks, case: Case, world_size: int) -> None:
    ranks.run(world_size, check_case, case, SEED)


def check_without_the_adapter(seed: int) -> None:
    """The defects that the adapter is for, seen in the ops themselves."""
    group = dist.group.WORLD
    (x, ids, weights, _), w1, w2 = draw(Case("", tokens=(100,), **SIZES), seed)
    with simulator.installed():
        from primus_turbo.pytorch.ops.moe import fused_mega_moe as ops

        y = ops.fused_mega_moe(group, x, ids, weights, w1, w2)
        assert y.isnan().any()
        big, big_ids, big_weights, _ = draw_tokens(
            Case("", tokens=(256,), **SIZES), BF16, seed, dist.get_rank()
        )
        x = big[:128].requires_grad_()
        first = ops.fused_mega_moe(group, x, big_ids[:128], big_weights[:128], w1, w2)
        ops.fused_mega_moe(group, big, big_ids, big_weights, w1, w2)
        first.sum().backward()
        assert x.grad.isnan().all()
        l1_out, _, handle = ops.fused_mega_moe_stage1(big, big_ids, big_weights, w1, group)
        assert len(handle) == 13
        assert l1_out.isnan().any(dim=1).sum() == l1_out.shape[0] - int((handle[12] >= 0).sum())


def test_the_defects_show_without_the_adapter(ranks: Ranks) -> None:
    ranks.run(2, check_without_the_adapter, SEED)


def check_a_smaller_forward_in_between(seed: int) -> None:
    """Two layers' forwards before any backward: the second is padded to the first's buffer."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    cases = [Case("", tokens=(t,), **SIZES) for t in (200, 100)]
    with simulator.installed():
        drawn = [draw(case, seed) for case in cases]
        made = simulator.made
        leaves, ys = [], []
        for (x, ids, weights, _), w1, w2 in drawn:
            leaf = [t.requires_grad_() for t in (x, weights, w1, w2)]
            ys.append(staged(leaf[0], ids, *leaf[1:], dist.group.WORLD))
            leaves.append(leaf)
        for case, y, leaf, (problem, *_) in zip(cases, ys, leaves, drawn, strict=True):
            y.backward(problem.dy)
            got = Result(y.detach(), *(t.grad for t in leaf))
            assert_close(got, solve(case, BF16, seed, ranks)[rank], BF16, f"{case.tokens} tokens")
        assert simulator.made == made + 1


def test_a_smaller_forward_before_the_backward_of_the_first(ranks: Ranks) -> None:
    ranks.run(2, check_a_smaller_forward_in_between, SEED)


def check_a_larger_forward_in_between(seed: int) -> None:
    group = dist.group.WORLD
    (x, ids, weights, dy), w1, w2 = draw(Case("", tokens=(100,), **SIZES), seed)
    (big, big_ids, big_weights, _), *_ = draw(Case("", tokens=(200,), **SIZES), seed)
    w1.requires_grad_()
    with simulator.installed():
        y = staged(x, ids, weights, w1, w2, group)
        with pytest.raises(InputError, match=r"its shared buffer .128 tokens.* 200 tokens"):
            staged(big, big_ids, big_weights, w1, w2, group)
        y.backward(dy)  # the refusal broke nothing
        assert w1.grad.isfinite().all()
        assert w1.grad.ne(0).any()
        assert staged(big, big_ids, big_weights, w1, w2, group).shape == big.shape
        # A graph that is dropped without a backward holds the buffer no longer.
        dropped = staged(big, big_ids, big_weights, w1, w2, group)
        more = torch.cat((big, big))
        more_ids, more_weights = torch.cat((big_ids, big_ids)), torch.cat((big_weights,) * 2)
        del dropped
        assert staged(more, more_ids, more_weights, w1, w2, group).isfinite().all()


def test_a_larger_forward_before_the_backward_is_refused(ranks: Ranks) -> None:
    ranks.run(2, check_a_larger_forward_in_between, SEED)


def check_stale_use(seed: int) -> None:
    """What the count of unfinished backwards cannot see is refused when it comes."""
    group = dist.group.WORLD
    (x, ids, weights, dy), w1, w2 = draw(Case("", tokens=(100,), **SIZES), seed)
    (big, big_ids, big_weights, _), *_ = draw(Case("", tokens=(200,), **SIZES), seed)
    with simulator.installed():
        w1.requires_grad_()
        y = staged(x, ids, weights, w1, w2, group)
        y.backward(dy, retain_graph=True)
        with torch.no_grad():
            l1_out, rows, handle = mega_moe_stage1(
                x, ids, weights, w1, group, backend="primus_turbo"
            )
            dispatched = handle[6].sum()
            dist.all_reduce(dispatched)
            assert int(dispatched) == ids.numel() * dist.get_world_size()  # no padding among them
            with pytest.raises(InputError, match="made for 100 tokens, but topk_idx has 99"):
                mega_moe_stage2(
                    l1_out, rows, handle, ids[1:], weights[1:], w2, group, backend="primus_turbo"
                )
            staged(big, big_ids, big_weights, w1, w2, group)
        with pytest.raises(InputError, match=r"128 tokens. has been replaced"):
            y.backward(dy)
        with pytest.raises(InputError, match=r"128 tokens. has been replaced"):
            mega_moe_stage2(l1_out, rows, handle, ids, weights, w2, group, backend="primus_turbo")
        with pytest.raises(InputError, match="not from backend 'primus_turbo'"):
            mega_moe_stage2(
                l1_out, rows, tuple(handle), ids, weights, w2, group, backend="primus_turbo"
            )


def test_stale_buffers_are_refused(ranks: Ranks) -> None:
    ranks.run(2, check_stale_use, SEED)


def check_another_shape(seed: int) -> None:
    (x, ids, weights, dy), w1, w2 = draw(Case("", tokens=(100,), **SIZES), seed)
    wide = Case("", tokens=(100,), **{**SIZES, "hidden": 1024})
    with simulator.installed():
        w1.requires_grad_()
        y = staged(x, ids, weights, w1, w2, dist.group.WORLD)
        other, *experts = draw(wide, seed)
        with pytest.raises(InputError, match=r"give all layers one shape"):
            staged(other.x, other.topk_idx, other.topk_weights, *experts, dist.group.WORLD)
        y.backward(dy)
        got = staged(other.x, other.topk_idx, other.topk_weights, *experts, dist.group.WORLD)
        assert got.isfinite().all()


def test_another_shape_waits_for_the_backward(ranks: Ranks) -> None:
    ranks.run(2, check_another_shape, SEED)


def check_hosts(seed: int) -> None:
    problem, w1, w2 = draw(Case("", tokens=(8,), **SIZES), seed)
    with (
        simulator.installed(),
        mock.patch("socket.gethostname", return_value=f"node{dist.get_rank()}"),
        pytest.raises(BackendUnavailableError, match=r"in one node, they are on .'node0', 'node1'"),
    ):
        staged(*problem[:3], w1, w2, dist.group.WORLD)


def test_ranks_on_two_nodes_are_refused(ranks: Ranks) -> None:
    ranks.run(2, check_hosts, SEED)


def check_growing_alone(seed: int) -> None:
    """One rank outgrows the buffer and the others do not: it is told so instead of a hang."""
    rank = dist.get_rank()
    (x, ids, weights, _), w1, w2 = draw(Case("", tokens=(100,), **SIZES), seed)
    (big, big_ids, big_weights, _), *_ = draw(Case("", tokens=(200,), **SIZES), seed)
    with simulator.installed():
        staged(x, ids, weights, w1, w2, dist.group.WORLD)
        if rank == 1:
            with (
                mock.patch.object(dist, "all_gather_object", side_effect=RuntimeError("timeout")),
                pytest.raises(InputError, match="this rank has 200 tokens, more than"),
            ):
                staged(big, big_ids, big_weights, w1, w2, dist.group.WORLD)


def test_growing_on_one_rank_alone_is_an_error(ranks: Ranks) -> None:
    ranks.run(2, check_growing_alone, SEED)


def check_limits(seed: int) -> None:
    group = dist.group.WORLD
    problem, w1, w2 = draw(Case("", tokens=(8,), **SIZES), seed)
    with simulator.installed():
        for dtype in (torch.float32, torch.float64):
            wide = [t.to(dtype) for t in (problem.x, w1, w2)]
            with pytest.raises(BackendUnavailableError, match=r"computes in torch\.bfloat16"):
                staged(wide[0], *problem[1:3], *wide[1:], group)
        narrow, *experts = draw(Case("", tokens=(8,), **{**SIZES, "hidden": 24}), seed)
        with pytest.raises(BackendUnavailableError, match="multiple of 512, it is 24"):
            staged(*narrow[:3], *experts, group)
        with pytest.raises(BackendUnavailableError, match="the group has 1"):
            staged(*problem[:3], w1, w2, None)
        with pytest.raises(BackendUnavailableError, match="clamp_value is 3"):
            fused_mega_moe(*problem[:3], w1, w2, group, clamp=3.0, backend="primus_turbo")
        for clamp, hidden in ((3.0, 512), (10.0, 100)):
            with pytest.raises(BackendUnavailableError):
                MegaMoEExperts(hidden, 32, 4, group, clamp=clamp, backend="primus_turbo")


def test_limits_are_errors_before_a_launch(ranks: Ranks) -> None:
    ranks.run(2, check_limits, SEED)


def check_clamp(seed: int) -> None:
    """At the kernels' clamp they agree with the reference, without one they are not the same."""
    group = dist.group.WORLD
    problem, w1, w2 = draw(Case("", tokens=(64,), **SIZES), seed)
    w1 = w1 * 8  # gates and ups far past 10
    args = (*problem[:3], w1, w2, group)
    with simulator.installed():
        got = fused_mega_moe(*args, clamp=10.0, backend="primus_turbo")
        same = fused_mega_moe(*args, clamp=None, backend="primus_turbo")
    assert torch.equal(got, same)
    want = fused_mega_moe(*args, clamp=10.0)
    assert_tensor_close(got, want, 6e-2, "clamped y")
    free = fused_mega_moe(*args, clamp=None)
    assert (got.float() - free.float()).abs().max() > 0.5 * want.float().abs().max()


def test_the_clamp_of_the_kernels(ranks: Ranks) -> None:
    ranks.run(2, check_clamp, SEED)


def check_layer(seed: int) -> None:
    """A layer and its reference twin: loss, every gradient, and the balancing loss."""
    group = dist.group.WORLD
    config = {
        "hidden_size": 512,
        "moe_ffn_hidden_size": 32,
        "num_moe_experts": 8,
        "moe_router_score_function": "sigmoid",
        "moe_aux_loss_coeff": 0.1,
        "activation_func_clamp_value": 10.0,
        "bf16": True,
        "init_method_std": 0.1,
    }
    torch.manual_seed(seed)
    reference = MegaMoELayer(MegaMoEConfig(**config), group)
    x = torch.randn(100 + dist.get_rank(), 512, dtype=BF16)
    dy = torch.randn_like(x)
    with simulator.installed():
        layer = MegaMoELayer(MegaMoEConfig(**config, mega_moe_backend="primus_turbo"), group)
        layer.load_state_dict(reference.state_dict())
        for module in (layer, reference):
            y, aux_loss = module(x)
            ((y * dy).sum() + aux_loss).backward()
    for (name, got), want in zip(layer.named_parameters(), reference.parameters(), strict=True):
        assert_tensor_close(got.grad, want.grad, 6e-2, name)
    assert layer.experts.fc1_weight.weight.grad.ne(0).any()


@pytest.mark.parametrize("world_size", [2, 4])
def test_a_layer_equals_its_reference_twin(ranks: Ranks, world_size: int) -> None:
    ranks.run(world_size, check_layer, SEED)


@pytest.mark.parametrize(
    ("without", "said"),
    [
        (
            ("fused_mega_moe_stage1",),
            r"\(commit 5{40}\) has no fused_mega_moe_stage1; build commit",
        ),
        (("fused_group_topk_routing_with_aux_score",), "has no fused_group_topk_routing"),
    ],
)
def test_a_package_that_is_too_old_names_the_commit(without: tuple[str, ...], said: str) -> None:
    with (
        simulator.installed(without=without),
        pytest.raises(BackendUnavailableError, match=said) as caught,
    ):
        get_backend("primus_turbo")
    assert "9b5d3092efcbc087657b233d8e9ae662cee6ec6b" in str(caught.value)
    assert "REBUILD_PRIMUS_TURBO=1 scripts/rebuild_primus_turbo.sh" in str(caught.value)


def test_a_clamp_that_nobody_set_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    limits._warn_of_clamp.cache_clear()
    limits.check_clamp(10.0)
    assert not caplog.records
    limits.check_clamp(None)
    limits.check_clamp(None)
    assert ["set activation_func_clamp_value to 10" in text for text in caplog.messages] == [True]


def test_which_device_it_takes() -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda:0")
    assert "needs a ROCm build of torch" in str(device_problem(cpu))
    with mock.patch.object(torch.version, "hip", "7.0"):
        assert "the tokens are on cpu" in str(device_problem(cpu))
        for name, problem in (("gfx942:sramecc+", "cuda:0 is gfx942"), ("gfx950:xnack-", None)):
            properties = SimpleNamespace(gcnArchName=name)
            with mock.patch("torch.cuda.get_device_properties", return_value=properties):
                found = device_problem(gpu)
            assert found is None if problem is None else problem in str(found)


def test_a_missing_package_says_how_to_build_it() -> None:
    assert "primus_turbo" not in sys.modules
    with pytest.raises(BackendUnavailableError, match="is not installed; build commit 9b5d3092"):
        get_backend("primus_turbo")


def test_rank_errors_are_seen(ranks: Ranks) -> None:
    """The simulator's own hang: ranks with different tokens, without the adapter."""
    with pytest.raises(RankError, match="the ranks ask for different buffers"):
        ranks.run(2, check_hang, SEED)


def check_hang(seed: int) -> None:
    (x, ids, weights, _), w1, w2 = draw(Case("", tokens=(128, 256), **SIZES), seed)
    with simulator.installed():
        simulator.fused_mega_moe(dist.group.WORLD, x, ids, weights, w1, w2)
