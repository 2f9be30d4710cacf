"""The comparison with MoELayer: its processes at toy size, what it refuses, what it survives."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import pytest

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed"
)

TINY = [
    *("--config", "tiny", "--device", "cpu", "--num_layers", "2", "--moe_layer_freq", "1"),
    *("--num_experts", "8", "--moe_router_topk", "2", "--vocab_size", "64", "--train_iters", "4"),
]


def test_every_variant_trains_from_the_same_weights(capsys: pytest.CaptureFixture[str]) -> None:
    from benchmarks import megatron_layer

    assert megatron_layer.main(TINY) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = {line[:15].strip(): line for line in lines}
    off = {
        name: [float(word) for word in rows[name].split()[-3:-1]]
        for name in megatron_layer.VARIANTS
    }
    assert rows["MoELayer"].endswith("SequentialMLP")
    assert off["MoELayer"] == off["MoELayer, again"] == [0, 0]  # nothing is random on a CPU
    for name in ("ours, split", "ours, unsplit"):
        assert rows[name].endswith("MegatronExperts")
        first, most = off[name]
        assert first < most < 1e-3  # of bf16; other weights: 6e-3
        numbers = rows[name].removeprefix(name).replace("-", " ").split()
        whole, _, _, passes, optimizer = (float(word) for word in numbers[:5])
        assert passes + optimizer == pytest.approx(whole, rel=0.5)
        assert min(passes, optimizer) > 0
    assert lines[-1] == "CUDA graph: no GPU"


def test_a_size_that_does_not_fit_is_refused_with_the_largest_that_does() -> None:
    from benchmarks import megatron_layer
    from examples.pretraining import flags

    def sized(experts: int) -> Any:
        return flags.parse([*megatron_layer.DEFAULTS, "--num_experts", str(experts)])

    free = 139 * 2**30
    hidden, ffn, vocabulary = 7168, 2048, 32768
    attention = hidden * (1536 + 576 + 128 * 128) + 1536 * 128 * 192 + 512 * 128 * 256
    weights = 3 * 33 * 3 * hidden * ffn + 3 * hidden * 18432 + 2 * vocabulary * hidden
    # Norms and routers are left out of this count.
    expected = pytest.approx(22 * (weights + 4 * attention), rel=1e-3)
    assert megatron_layer.needed(sized(32)) == expected
    assert megatron_layer.refusal(flags.parse(megatron_layer.DEFAULTS), free) is None
    told = megatron_layer.refusal(sized(64), free)
    assert told is not None
    assert told.startswith("num_experts 64 needs ")
    fits = int(told.split()[-3])
    assert f"at most {fits} experts fit" in told
    assert megatron_layer.refusal(sized(fits), free) is None
    assert megatron_layer.refusal(sized(fits + 4), free) is not None
    none = megatron_layer.refusal(sized(64), 20 * 2**30)
    assert none is not None
    assert none.endswith("no number of experts fits, take fewer layers")


def test_a_variant_that_fails_is_named_and_the_others_follow(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from benchmarks import megatron_layer

    def alone(work: Callable[[], Any], args: Any) -> Any:
        if args.mega_moe_fused:
            return {
                "ms": [2.0],
                "optimizer_ms": [0.5],
                "gib": 1.0,
                "passes_gib": 0.5,
                "losses": [3.0],
                "path": "Experts",
            }
        raise MemoryError("too large")

    monkeypatch.setattr(megatron_layer, "alone", alone)
    assert megatron_layer.main(TINY) == 1
    said = capsys.readouterr().out
    assert "MoELayer        failed: MemoryError('too large')" in said
    assert "ours, split     failed" in said
    assert "ours, unsplit         2.0" in said


def test_a_run_without_a_timed_step_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    from benchmarks import megatron_layer

    assert megatron_layer.main([*TINY, "--train_iters", "3"]) == 2
    assert capsys.readouterr().out.startswith("train_iters 3 leaves no step to time")
