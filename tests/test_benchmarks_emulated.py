"""The benchmarks on emulated collectives run as toys on a CPU and write what they print."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import engine_emulated, graphs, memory

CPU = ("--device", "cpu")


def test_steps_through_the_engine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--layers", "2", "--steps", "2", "--rounds", "1", "--edp", "4", "--bandwidth", "0.5")
    engine_emulated.main([*CPU, *flags, "--json", str(tmp_path / "engine.json")])
    assert "EMULATED collectives: 0.5 GB/s, 10 us, 8 CTAs; rank 0 of 4" in capsys.readouterr().out
    figures = json.loads((tmp_path / "engine.json").read_text())
    assert figures["emulated"] == "0.5 GB/s, 10 us, 8 CTAs"
    variants = figures["variants"]
    assert variants["serialised"]["verdict"] == "FAIL"
    assert variants["serialised"]["gather_hidden"] == 0
    assert variants["serialised"]["effective"] == 0
    assert all(variants[name]["gather_hidden"] > 0.3 for name in ("split", "budget"))
    # 2 layers x 4 experts x 3 x 128 x 512 fp32 both ways, 3 / 4 of them over 0.5 GB/s, and 2 x 5
    # latencies; the routers are 4 KiB.
    assert figures["communication_ms"] == pytest.approx(18.99, abs=0.02)


def test_memory_of_a_layer(tmp_path: Path) -> None:
    memory.main([*CPU, "--layers", "2", "--json", str(tmp_path / "memory.json")])
    figures = json.loads((tmp_path / "memory.json").read_text())["bytes"]["tiny"]["reference"]
    dispatched = 512 * 2 * 128 * 4
    assert figures["keep x"] - figures["held"] == dispatched
    # l1_out [1024, 1024], and x with its normed form at least.
    assert 1024 * 1024 * 4 < figures["held"] < 2 * 1024 * 1024 * 4


def test_one_compiled_graph() -> None:
    pytest.importorskip("triton")
    assert graphs.main([*CPU, "--rounds", "1"]) == 0
