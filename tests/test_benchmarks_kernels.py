"""What the kernels' benchmarks compare is the same work, and their readers read what is there."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.triton_cases import DEVICE, DTYPE, TOLERANCE  # isort: skip  (switches gaps off first)

from benchmarks import counters, effective_overlap, peers, stages
from benchmarks.stages import Inputs, Shape

SHAPE = Shape(tokens=40, top_k=3, hidden=128, ffn=64, experts=5)


def test_gathered_beforehand_or_in_the_product_gives_the_same() -> None:
    inputs = Inputs(SHAPE, DEVICE, DTYPE)
    by_product = counters.ours(inputs)
    x, w1 = inputs.x.detach().double(), inputs.w1.detach().double()
    gathering = [runs for runs in by_product.values() if "rows" in runs]
    assert len(gathering) == 3
    for runs in gathering:
        ours, rows = runs["ours"](), runs["rows"]()
        assert torch.equal(ours, rows[: len(ours)])
    l1 = by_product["fc1"]["ours"]().double()
    expected = sum(float((x[t] @ w1[e].T).sum()) for t, row in enumerate(inputs.ids) for e in row)
    assert float(l1.sum()) == pytest.approx(expected, rel=1e-2, abs=1.0)
    dw1 = by_product["d_w1"]["ours"]()
    assert dw1.shape == inputs.w1.shape


def test_counters_are_read_in_order_without_what_prepares() -> None:
    names = ["gpu__time_duration.sum", "dram__bytes_read.sum"]
    head = ",".join(f'"{name}"' for name in ["ID", "Kernel Name", *names])
    page = "\n".join(
        [
            "==PROF== Connected",
            head,
            '"","","ns","byte"',
            '"0","_weight_grad","2,500,000","1,000,000"',
            '"1","prepare_grouped_gemm_data","900,000","1"',
            '"2","small","4,000","1"',
            '"3","cutlass::device_kernel","2,000,000","n/a"',
        ]
    )
    first, second = counters.parse(page)
    assert first == {"time, us": pytest.approx(2500.0), "DRAM read, MB": pytest.approx(1.0)}
    assert second == {"time, us": pytest.approx(2000.0)}
    assert counters.parse("==ERROR== ERR_NVGPUCTRPERM") == []
    assert "ERR_NVGPUCTRPERM" in counters._reason("==ERROR== ERR_NVGPUCTRPERM - no permission")


def test_an_absent_peer_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("liger_kernel", "liger_kernel.ops", "liger_kernel.ops.fused_moe"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert peers.load() == {}
    said = capsys.readouterr().out
    assert "liger: absent" in said
    assert "scattermoe: absent" in said


def in_turn(runs: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Every run in its turns, as on a GPU; the times are made up: 1, 2, 3 ms ..."""
    for _ in range(rounds + 1):
        for run in runs.values():
            run()
    return {name: 1.0 + index for index, name in enumerate(runs)}


def test_a_layer_that_fails_is_named_and_the_others_are_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def reference(inputs: Inputs) -> Tensor:
        return inputs.forward("reference")

    def fails_at_once(inputs: Inputs) -> Tensor:
        raise RuntimeError("too large")

    calls = 0
    broken: list[Tensor] = []

    def overwritten(dy: Tensor) -> None:
        broken.append(dy)
        raise RuntimeError("saved tensor changed")

    def fails_in_backward_later(inputs: Inputs) -> Tensor:
        nonlocal calls
        calls += 1
        y = reference(inputs)
        if calls > 2:
            y.register_hook(overwritten)
        return y

    layers = {
        "triton": reference,
        "broken": fails_at_once,
        "later": fails_in_backward_later,
        "reference": reference,
    }
    monkeypatch.setattr(peers, "in_turn", in_turn)
    peers.report(layers, Inputs(SHAPE, DEVICE, DTYPE), rounds=3)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "  broken: cannot: RuntimeError('too large')"
    errors, later, *rows = (line.split() for line in lines[3:])
    assert errors[0] == "later"  # its errors were printed before it failed
    assert later[:3] == ["later:", "cannot:", "RuntimeError('saved"]
    assert len(broken) == 1  # not called again
    assert [row[0] for row in rows] == ["ms", "triton", "reference"]
    # Forward 1 and forward + backward 2; the reference's are 5 and 6, after the failed one's.
    assert [float(cell) for cell in rows[1][1:]] == [1, 1, 2, 1, 1, 1]
    assert [float(cell) for cell in rows[2][1:]] == [5, 1, 6, 5, 1, 3]
    assert len(layers) == 4  # the next shape's begin anew


def test_a_backward_that_overwrites_what_it_saved_is_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Overwrites(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, y: Tensor) -> Tensor:
            ctx.save_for_backward(kept := torch.ones_like(y))
            return y * kept

        @staticmethod
        def backward(ctx: Any, dy: Tensor) -> Tensor:
            (kept,) = ctx.saved_tensors
            return kept.mul_(dy)

    layers: dict[str, peers.Layer] = {
        "reference": lambda inputs: inputs.forward("reference"),
        "overwrites": lambda inputs: Overwrites.apply(inputs.forward("reference")),
    }
    monkeypatch.setattr(peers, "in_turn", in_turn)
    peers.report(layers, Inputs(SHAPE, DEVICE, DTYPE), rounds=3)
    said = capsys.readouterr().out
    assert "cannot" not in said
    assert said.count("  overwrites") == 2


def test_errors_tell_a_right_layer_from_a_wrong_one() -> None:
    inputs = Inputs(SHAPE, DEVICE, DTYPE)
    layers: dict[str, peers.Layer] = {
        "reference": lambda inputs: inputs.forward("reference"),
        "triton": lambda inputs: inputs.forward("triton"),
        "wrong": lambda inputs: inputs.forward("reference") * 1.5,
    }
    errors = peers.relative_errors(layers, inputs)
    assert max(errors["triton"]) < TOLERANCE
    assert min(errors["wrong"]) == pytest.approx(0.5, rel=1e-2)


@pytest.mark.parametrize("script", [counters, effective_overlap, peers, stages])
def test_without_a_gpu_a_sentence_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], script: Any
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["script"])
    with pytest.raises(SystemExit, match="2"):
        script.main()
    assert "needs a CUDA GPU" in capsys.readouterr().err
