"""What only a GPU shows: no synchronisation, graphs, 64-bit offsets, the assertion on ids."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from tests.test_triton_stages import run
from tests.triton_cases import Case, make_case, relative_error

# isort: split
from megamoe.backends.triton.ops import ops


def _in_a_fresh_process(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True
    )


def test_no_synchronisation() -> None:
    case = make_case(300, 4, 8, 256, 128)
    run(case)
    torch.cuda.set_sync_debug_mode("error")
    try:
        run(case)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_graph_replays_other_tokens_and_routes() -> None:
    case = make_case(300, 4, 8, 256, 128)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run(case)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run(case)
    for seed in range(3):
        other = make_case(300, 4, 8, 256, 128, seed=seed + 1)
        with torch.no_grad():
            for mine, new in zip(case, other, strict=True):
                mine.copy_(new)
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(captured, run(other), strict=True))


def test_rows_past_2_to_the_31_elements() -> None:
    hidden, ffn, tokens = 64, 2304, 1 << 16
    case = make_case(tokens, 8, 4, hidden, ffn)
    case = case._replace(ids=case.ids.clamp_min(0))
    assert tokens * 8 * 2 * ffn > 2**31
    got = run(case)
    last = Case(
        *(t[-64:].detach() for t in (case.x, case.ids, case.weights)),
        case.w1,
        case.w2,
        case.dy[-64:],
    )
    last.x.requires_grad_()
    last.weights.requires_grad_()
    want = run(last)
    assert torch.equal(got[0][-64:], want[0])
    assert torch.equal(got[1][-64:], want[1])
    assert torch.equal(got[2][-64:], want[2])


def test_experts_past_2_to_the_31_elements() -> None:
    experts, hidden, ffn = 5, 16384, 16384
    assert (experts - 1) * 2 * ffn * hidden >= 2**31
    rng = torch.Generator("cuda").manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=rng, device="cuda", dtype=torch.bfloat16)

    x, w1 = normal(40, hidden), normal(experts, 2 * ffn, hidden)
    ids = torch.full((40, 1), experts - 1, device="cuda")
    weights = torch.ones(40, 1, device="cuda")
    l1, _, tables = ops.stage1_forward(x, ids, weights, w1)
    assert relative_error(l1[:40], x.float() @ w1[-1].float().T) < 1e-2
    d_l1 = torch.zeros_like(l1)
    d_l1[:40] = normal(40, 2 * ffn)
    dw1 = ops.weight_grad(x, d_l1, tables, False)
    assert relative_error(dw1[-1], d_l1[:40].float().T @ x.float()) < 1e-2
    assert not dw1[:-1].any()


SETUP = """
    import torch
    from megamoe import mega_moe_stage1, mega_moe_stage2
    x = torch.randn(64, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    w1 = torch.randn(4, 64, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    w2 = torch.randn(4, 64, 32, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    ids = torch.randint(0, 4, (64, 2), device="cuda")
    weights = torch.rand(64, 2, device="cuda")
"""


def test_an_id_out_of_range_stops_the_device_with_a_reason() -> None:
    program = (
        SETUP
        + """
    ids[3, 1] = 4
    mega_moe_stage1(x, ids, weights, w1, None, backend="triton")
    torch.cuda.synchronize()
    """
    )
    result = _in_a_fresh_process(program)
    assert result.returncode
    assert "topk_idx holds an id >= the number of experts" in result.stdout + result.stderr


def test_our_kernel_may_be_the_first_of_the_backward_thread() -> None:
    program = (
        SETUP
        + """
    l1, dispatch_weights, handle = mega_moe_stage1(x, ids, weights, w1, None, backend="triton")
    y = mega_moe_stage2(l1, dispatch_weights, handle, ids, weights, w2, None, backend="triton")
    torch.autograd.grad(y, (x, w1, w2), torch.ones_like(y))
    torch.cuda.synchronize()
    """
    )
    result = _in_a_fresh_process(program)
    assert not result.returncode, result.stderr
