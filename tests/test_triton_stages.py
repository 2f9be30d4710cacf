"""The Triton stages against the float64 loop, and every trap of grouped kernels."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megamoe import MegaMoEExperts, backends, fused_mega_moe, mega_moe_stage1, mega_moe_stage2
from megamoe.errors import BackendUnavailableError
from tests import oracle
from tests.triton_cases import (
    DEVICE,
    DTYPE,
    ON_GPU,
    TOLERANCE,
    Case,
    assert_close,
    make_case,
    poison,
    relative_error,
)

# isort: split
from megamoe.backends.triton import add_sm_budget
from megamoe.backends.triton.ops import ops


def forward(case: Case, clamp: float | None = None) -> Tensor:
    l1, dispatch_weights, handle = mega_moe_stage1(
        case.x, case.ids, case.weights, case.w1, None, backend="triton"
    )
    return mega_moe_stage2(
        l1,
        dispatch_weights,
        handle,
        case.ids,
        case.weights,
        case.w2,
        None,
        clamp=clamp,
        backend="triton",
    )


def run(case: Case, clamp: float | None = None) -> tuple[Tensor, ...]:
    y = forward(case, clamp)
    return y, *torch.autograd.grad(y, case.leaves, case.dy)


def exact(case: Case, clamp: float | None = None) -> tuple[Tensor, ...]:
    leaves = tuple(leaf.detach().cpu().double().requires_grad_() for leaf in case.leaves)
    x, weights, w1, w2 = leaves
    y = oracle.experts(x, case.ids.cpu(), weights, w1, w2, clamp)
    grads = torch.autograd.grad(y, leaves, case.dy.cpu().double(), materialize_grads=True)
    return tuple(t.to(DEVICE) for t in (y, *grads))


@pytest.mark.parametrize(
    ("tokens", "top_k", "experts", "hidden", "ffn"),
    [
        pytest.param(100, 2, 3, 64, 48, id="100 tokens"),
        pytest.param(37, 3, 5, 72, 40, id="hidden 72, ffn 40: no multiple of a tile"),
        pytest.param(1, 1, 4, 64, 32, id="one token"),
        pytest.param(70, 1, 2, 8, 8, id="narrower than a tile"),
    ],
)
def test_stages_equal_the_loop(
    tokens: int, top_k: int, experts: int, hidden: int, ffn: int
) -> None:
    case = make_case(tokens, top_k, experts, hidden, ffn, seed=tokens)
    poison(1 << 12, 1 << 16)
    assert_close(run(case), exact(case))


@pytest.mark.parametrize("clamp", [0.5, 7.0])
def test_clamp(clamp: float) -> None:
    case = make_case(40, 2, 3, 32, 16)
    assert_close(run(case, clamp), exact(case, clamp))


@pytest.mark.parametrize("count", [1, 127, 128, 129])
def test_counts_around_a_tile(count: int) -> None:
    case = make_case(count + 5, 1, 3, 16, 8)
    ids = torch.full((count + 5, 1), 2, device=DEVICE)
    ids[count:] = 0  # expert 1 has no token
    case = case._replace(ids=ids)
    poison(1 << 12, 1 << 14)
    got = run(case)
    assert_close(got, exact(case))
    assert not got[3][1].any()
    assert not got[4][1].any()


@pytest.mark.parametrize("tokens", [0, 3])
def test_no_token_at_all_gives_exact_zeros(tokens: int) -> None:
    case = make_case(tokens, 2, 3, 16, 8)
    case = case._replace(ids=torch.full_like(case.ids, -1))
    poison(1 << 12, 1 << 14)
    for tensor in run(case):
        assert not tensor.any()


def test_all_slots_of_a_token_on_one_expert() -> None:
    case = make_case(30, 4, 3, 32, 16)
    case = case._replace(ids=(torch.arange(30, device=DEVICE) % 3)[:, None].repeat(1, 4))
    assert_close(run(case), exact(case))


def test_weight_zero_has_the_gradient_of_its_output() -> None:
    case = make_case(20, 2, 3, 32, 16)
    weights = torch.zeros_like(case.weights).requires_grad_()
    case = case._replace(weights=weights)
    got = run(case)
    assert_close(got, exact(case))
    assert got[2][case.ids >= 0].all()


def test_repeated_runs_give_the_same_bits() -> None:
    case = make_case(60, 2, 3, 32, 16)
    first = run(case)
    for _ in range(9 if ON_GPU else 2):
        assert all(torch.equal(a, b) for a, b in zip(first, run(case), strict=True))


def test_fused_and_staged_give_the_same_bits() -> None:
    case = make_case(50, 2, 3, 32, 16)
    y = fused_mega_moe(case.x, case.ids, case.weights, case.w1, case.w2, None, backend="triton")
    fused = (y, *torch.autograd.grad(y, case.leaves, case.dy))
    assert all(torch.equal(a, b) for a, b in zip(fused, run(case), strict=True))


def test_tokens_change_between_forward_and_backward() -> None:
    first, second = make_case(100, 2, 3, 32, 16, seed=1), make_case(41, 2, 3, 32, 16, seed=2)
    y = forward(first)
    run(second)
    assert_close((y, *torch.autograd.grad(y, first.leaves, first.dy)), exact(first))


def test_strided_inputs() -> None:
    case = make_case(24, 2, 3, 32, 16)
    strided = case._replace(
        x=case.x.detach().T.contiguous().T.requires_grad_(),
        w1=case.w1.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_(),
        dy=case.dy.repeat(1, 2)[:, :32],
    )
    assert not strided.x.is_contiguous()
    assert not strided.w1.is_contiguous()
    assert_close(run(strided), exact(case))


def test_weight_that_starts_off_a_16_byte_boundary() -> None:
    case = make_case(24, 2, 3, 32, 16)
    flat = torch.empty(case.w2.numel() + 1, dtype=DTYPE, device=DEVICE)
    w2 = flat[1:].view_as(case.w2)
    w2.copy_(case.w2.detach())
    assert w2.data_ptr() % 16
    assert_close(run(case._replace(w2=w2.requires_grad_())), exact(case))


@pytest.mark.parametrize("reserved", [3])
def test_sm_budget_changes_no_bit(reserved: int) -> None:
    case = make_case(300, 2, 3, 32, 16)
    alone = run(case)
    remove = add_sm_budget(lambda: reserved)
    try:
        shared = run(case)
    finally:
        remove()
    assert all(torch.equal(a, b) for a, b in zip(alone, shared, strict=True))


@pytest.mark.parametrize("reserved", [0, 2])
def test_weight_gradients_of_experts_with_many_few_and_no_rows(reserved: int) -> None:
    """A program's tiles are one loop: experts of no step's rows, of a part and of several."""
    x, _, weights, w1, *_ = (leaf.detach() for leaf in make_case(500, 1, 11, 264, 152))
    share = torch.tensor([0.0, 0.6, 0, 0, 0.02, 0.2, 0, 0, 0, 0.1, 0])
    ids = share.multinomial(500, replacement=True, generator=torch.Generator().manual_seed(1))
    ids[::7] = -1
    ids = ids.to(DEVICE)
    x[ids < 0] = torch.nan  # which no expert may see
    poison(1 << 16, 1 << 20)
    remove = add_sm_budget(lambda: reserved)
    try:
        l1, _, tables = ops.stage1_forward(x, ids[:, None], weights, w1)
        got = [ops.weight_grad(x, l1, tables, tokens_first) for tokens_first in (False, True)]
    finally:
        remove()
    for expert in range(11):
        rows = (x[ids == expert] @ w1[expert].T).double()  # in the dtype of l1
        want = rows.T @ x[ids == expert].double()
        for gradient in (got[0][expert], got[1][expert].T):
            if len(rows):
                assert relative_error(gradient, want) < TOLERANCE
            else:
                assert not gradient.any()


def test_sm_budgets_add_up_and_are_read_at_every_launch() -> None:
    from megamoe.backends.triton.schedule import grid_for, multiprocessors

    device = torch.device(DEVICE)
    total, reserved = multiprocessors(device), 1
    removes = [add_sm_budget(lambda: reserved), add_sm_budget(lambda: 2)]
    assert grid_for(device) == (total - 3, 3)
    reserved = 0
    assert grid_for(device) == (total - 2, 2)
    removes.pop()()
    assert grid_for(device) == (total, 0)
    reserved = total
    with pytest.raises(ValueError, match=f"{total} SMs of {total}"):
        grid_for(device)
    removes.pop()()
    assert grid_for(device) == (total, 0)


def test_reserved_sms_get_enough_programs_of_one_draw() -> None:
    from megamoe.backends.triton.schedule import Grid

    assert not Grid(8).dynamic
    assert Grid(8).programs(800, 4) == 8
    assert Grid(6, 2).dynamic
    # By six programs 32 rounds of fours, one of twos, and 20 single tiles; a quarter for two SMs.
    assert Grid(6, 2).programs(800, 4) == 6 + 55
    assert Grid(6, 2).programs(1, 4) == 7
    assert Grid(6, 2).programs(0, 4) == 6


def test_layers_share_one_budget() -> None:
    from megamoe.backends.triton.schedule import grid_for, multiprocessors

    device = torch.device(DEVICE)
    total = multiprocessors(device)
    layers = [MegaMoEExperts(8, 8, 2, backend=name) for name in ("triton", "auto", "reference")]

    def budget() -> int:
        return 2

    for layer in layers:
        layer.set_sm_budget(budget)
    assert grid_for(device).resident == total - 2
    layers[0].set_sm_budget(None)
    assert grid_for(device).resident == total - 2
    layers[1].set_sm_budget(lambda: 1)
    assert grid_for(device).resident == total - 1
    for layer in layers:
        layer.set_sm_budget(None)
    assert grid_for(device).resident == total


def test_unneeded_gradients_are_not_computed() -> None:
    case = make_case(20, 2, 3, 32, 16)
    w2 = case.w2.detach()
    y = forward(case._replace(w2=w2, x=case.x.detach()))
    dw1, dweights = torch.autograd.grad(y, (case.w1, case.weights), case.dy)
    _, _, want_dweights, want_dw1, _ = exact(case)
    assert relative_error(dw1, want_dw1) < TOLERANCE
    assert relative_error(dweights, want_dweights) < TOLERANCE


def test_what_cannot_run_says_so() -> None:
    narrow = make_case(4, 1, 2, 18, 8)
    with pytest.raises(BackendUnavailableError, match="hidden size is 18; use 'reference'"):
        forward(narrow)
    case = make_case(4, 1, 2, 16, 8)
    wide = case._replace(x=case.x.double(), w1=case.w1.double(), w2=case.w2.double())
    with pytest.raises(BackendUnavailableError, match=r"the tokens are torch\.float64"):
        forward(wide)


def test_a_missing_triton_is_named_and_auto_goes_on(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backends, "_announced", set())
    monkeypatch.setattr(backends, "_loaded", {})
    monkeypatch.setitem(backends.BACKENDS, "triton", "megamoe.backends.absent")
    caplog.set_level("INFO", logger="megamoe")
    with pytest.raises(BackendUnavailableError, match=r"No module named.*needs Triton 3\.4"):
        MegaMoEExperts(8, 8, 2, backend="triton")
    MegaMoEExperts(8, 8, 2, backend="auto").to(DEVICE)(
        torch.ones(1, 8, device=DEVICE),
        torch.zeros(1, 1, dtype=torch.int64, device=DEVICE),
        torch.ones(1, 1, device=DEVICE),
    )
    assert "reference, because triton is missing" in caplog.text


def test_auto_takes_triton_where_it_runs_and_says_so_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backends, "_announced", set())
    caplog.set_level("INFO", logger="megamoe")
    case, narrow = make_case(4, 1, 2, 16, 8), make_case(4, 1, 2, 18, 8)
    for inputs in (case, case, narrow, narrow):
        y = mega_moe_stage2(
            *mega_moe_stage1(inputs.x, inputs.ids, inputs.weights, inputs.w1, None, backend="auto"),
            inputs.ids,
            inputs.weights,
            inputs.w2,
            None,
            backend="auto",
        )
        assert torch.isfinite(y).all()
    first, second = [record.getMessage() for record in caplog.records]
    assert first == "backend 'auto': triton"
    assert second.startswith("backend 'auto': reference, because triton needs rows of")


def test_compiled_without_a_break_and_once_for_ragged_steps() -> None:
    compiled = torch.compile(forward, fullgraph=True, dynamic=True, backend="aot_eager")
    counters = torch._dynamo.utils.counters["stats"]
    before = counters["unique_graphs"]
    for tokens in (20, 33, 41, 57, 64, 90, 21, 77, 50, 38)[: None if ON_GPU else 3]:
        case = make_case(tokens, 2, 3, 16, 8, seed=tokens)
        y = compiled(case)
        grads = torch.autograd.grad(y, case.leaves, case.dy)
        assert all(torch.equal(a, b) for a, b in zip((y, *grads), run(case), strict=True))
    assert counters["unique_graphs"] == before + 1


@pytest.mark.parametrize("dropped", [False, True], ids=["held", "dropped"])
def test_operators_and_their_fakes_agree(dropped: bool) -> None:
    case = make_case(20, 2, 3, 16, 8)
    ids = torch.full_like(case.ids, -1) if dropped else case.ids
    x, weights, w1, w2 = (leaf.detach() for leaf in case.leaves)
    first = (x, ids, weights, w1)
    l1, dispatch_weights, tables = ops.stage1_forward(*first)
    calls = {
        "stage1_forward": first,
        "stage2_forward": (l1, weights, w2, tables, None),
        "stage2_backward": (case.dy, l1, dispatch_weights, w2, tables, None),
        "rows_to_tokens": (l1, w1, tables),
        "weight_grad": (x, l1, tables, False),
        "slot_values": (dispatch_weights, tables[0]),
    }
    for name, arguments in calls.items():
        torch.library.opcheck(
            getattr(ops, name).default,
            arguments,
            test_utils=("test_schema", "test_faketensor") if ON_GPU else "test_faketensor",
        )
