"""The training example over the simulated Primus-Turbo, judged through its own range names."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

import profiling
from examples import train_moe
from profiling import Verdict
from profiling.cli import main as moe_trace
from tests import primus_turbo_simulator as simulator
from tests.ranks import Ranks

# hidden 512 is the least that the ops take; 2 * 100 tokens are padded to 256.
SIZES = (
    *("--hidden", "512", "--ffn", "1024", "--experts", "4", "--vocab", "64", "--dtype", "bf16"),
    *("--sequence", "100", "--micro-batch", "2", "--backend", "primus_turbo", "--ep", "2"),
)
LAYERS = ["layers.0.mlp.experts", "layers.1.mlp.experts"]  # as the collectives call them


def train(argv: list[str]) -> None:
    with simulator.installed():
        train_moe.train(train_moe.parse(argv))


def names(folder: Path) -> set[str]:
    found = set()
    for path in folder.glob("*.json*"):
        data = path.read_bytes()
        text = gzip.decompress(data) if path.suffix == ".gz" else data
        found |= {event.get("name", "") for event in json.loads(text)["traceEvents"]}
    return found


def test_it_trains_and_its_profile_is_judged(ranks: Ranks, tmp_path: Path, capfd) -> None:
    ranks.run(4, train, [*SIZES, "--steps", "5", "--warmup", "1", "--profile", str(tmp_path)])
    losses = [
        float(line.split("loss")[1].split()[0])
        for line in capfd.readouterr().out.splitlines()
        if line.startswith("step ")
    ]
    assert len(losses) == 5
    assert losses[-1] < losses[0]
    seen = names(tmp_path)
    assert not any(name.startswith("megamoe::") for name in seen)
    assert {
        f"fused_mega_moe_stage{stage}_{way}" for stage in (1, 2) for way in ("forward", "backward")
    } <= seen
    report = profiling.check(tmp_path)
    assert report.ranks == 4
    assert [row.layer for row in report.rows] == 2 * LAYERS
    measured = [row for row in report.rows if row.hidden is not None]
    count = sum(row.occurrences for row in measured)
    assert count >= 4, report.rows
    assert sum(row.hidden * row.occurrences for row in measured) / count > 0.5, report.rows


@pytest.mark.parametrize(
    "flags", [pytest.param(["--prefetch-depth", "0"], id="late"), ["--share-expert-buckets"]]
)
def test_losing_the_overlap_fails(ranks: Ranks, tmp_path: Path, flags: list[str]) -> None:
    argv = [*SIZES, "--steps", "3", "--warmup", "1", *flags, "--profile", str(tmp_path)]
    ranks.run(4, train, argv)
    report = profiling.check(tmp_path)
    assert report.verdict is Verdict.FAIL
    assert [row.hidden for row in report.rows[:2]] == [0, 0]


def test_the_single_op_has_no_stage_to_hide_under(ranks: Ranks, tmp_path: Path) -> None:
    argv = [*SIZES, "--steps", "3", "--warmup", "1", "--fused", "--profile", str(tmp_path)]
    ranks.run(4, train, argv)
    assert profiling.check(tmp_path).verdict is not Verdict.PASS


TRACE = Path(__file__).parents[2] / "shared" / "traces" / "mi300_resnet_rccl.json.gz"


@pytest.mark.skipif(not TRACE.exists(), reason=f"{TRACE} is public test data kept elsewhere")
def test_a_trace_of_mi300_is_read_and_not_passed(capsys: pytest.CaptureFixture[str]) -> None:
    assert moe_trace(["ls", str(TRACE)]) == 0
    assert "communication 17 (71.52 ms)" in capsys.readouterr().out
    assert moe_trace(["check", str(TRACE)]) == 2
