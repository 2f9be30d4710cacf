"""What the kernels' benchmarks compare is the same work, and their readers read what is there."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import Tensor

from tests.triton_cases import DEVICE, DTYPE, TOLERANCE  # isort: skip  (switches gaps off first)

from benchmarks import counters, peers
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


def test_a_layer_that_cannot_is_named_and_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    def fails(inputs: Inputs) -> Tensor:
        raise RuntimeError("too large")

    inputs = Inputs(SHAPE, DEVICE, DTYPE)

    def reference(inputs: Inputs) -> Tensor:
        return inputs.forward("reference")

    found = peers.able({"reference": reference, "broken": fails}, inputs)
    assert list(found) == ["reference"]
    assert "broken: cannot" in capsys.readouterr().out


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
