"""The benchmark between GPUs, run on two gloo ranks at toy size."""

from __future__ import annotations

import json
import math
import statistics
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from benchmarks import multi_gpu
from benchmarks.ranks.here import Here
from benchmarks.ranks.staging import TOY_STAGING
from benchmarks.ranks.step import LAYERS, OURS, SHAPES, VARIANTS
from benchmarks.ranks.training import Tower, Training
from overlap import collectives
from tests.ranks import Ranks


def test_a_part_runs_and_leaves_its_facts(tmp_path: Path) -> None:
    assert multi_gpu.main(["--out", str(tmp_path), "--device", "cpu", "--only", "effective"]) == 0
    results = json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))
    assert results["outcome"] == {"effective": "done"}
    rows = results["notes"]["effective"]
    assert {row["window"] for row in rows} == {"gather", "reduce bf16", "reduce fp32"}
    assert len(rows) == 3 * 7  # six ways for NCCL, and the copy engine
    for row in rows:
        ms = row["ms"]
        assert row["effective"]["budget 0"] == (ms["serial"] - ms["budget 0"]) / ms["alone"]


def test_staging_buffers_are_compared(tmp_path: Path) -> None:
    assert multi_gpu.main(["--out", str(tmp_path), "--device", "cpu", "--only", "staging"]) == 0
    results = json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))
    rows = results["notes"]["staging"]
    assert [row["staging_bytes"] for row in rows] == list(TOY_STAGING)
    for row in rows:
        assert min(row["alone_ms"], row["together_ms"], row["issue_host_ms"]) > 0


def test_whole_steps_are_compared_in_pairs(tmp_path: Path) -> None:
    assert multi_gpu.main(["--out", str(tmp_path), "--device", "cpu", "--only", "step"]) == 0
    results = json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))
    rows = {row["variant"]: row for row in results["notes"]["step"]}
    assert not [row for row in rows.values() if "error" in row]
    assert set(VARIANTS) <= set(rows)
    assert list(rows)[:2] == ["no collectives", OURS]
    assert {name for name, row in rows.items() if row["timeline"]} == {OURS}
    for kind in ("no_collectives", "our_defaults"):
        assert len(list((tmp_path / "profiles" / f"step_toy_{kind}").iterdir())) == 2
    for name, row in rows.items():
        if name.startswith("split"):
            assert len(row["paired_ms"]) == 2
            assert row["exposed_ms"] == statistics.median(row["paired_ms"])
            bound = row["bound_ms"]
            assert bound["fc1 reduce"] > 0
            assert bound["backward"] <= bound["backward, all needed at its end"]
        else:
            assert row["exposed_ms"] == row["step_ms"] - rows["no collectives"]["step_ms"]


def test_collectives_can_be_taken_out_between_steps(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(2, take_out_and_put_back, tmp_path)


def take_out_and_put_back(out: Path) -> None:
    here = Here(dist.get_rank(), 2, torch.device("cpu"), True, out, out / "notes", math.inf)
    shape = SHAPES["toy"]
    model = Tower(here, shape, "reference", LAYERS)
    training = Training(here, model, shape, VARIANTS["split, 16 CTAs"])
    weight = model.layers[0].experts.fc1_weight.weight

    def same_everywhere() -> bool:
        training.ddp.finish_param_sync()
        return torch.equal(*here.gathered(weight.detach().clone()))

    with (
        mock.patch.object(collectives, "all_gather", wraps=collectives.all_gather) as gather,
        mock.patch.object(
            collectives, "reduce_scatter", wraps=collectives.reduce_scatter
        ) as reduce,
    ):
        buckets = len(training.ddp.buckets)
        training.step()
        with training.moving_nothing():
            assert (gather.call_count, reduce.call_count) == (buckets, buckets)
            training.step()
            training.step()
            assert not same_everywhere()  # each rank has stepped its own shard
            assert (gather.call_count, reduce.call_count) == (buckets, buckets)
        training.step()
        assert same_everywhere()
        assert (gather.call_count, reduce.call_count) == (2 * buckets, 2 * buckets)


def test_losses_at_every_expert_parallel_size(tmp_path: Path) -> None:
    arguments = ["--out", str(tmp_path), "--device", "cpu", "--ranks", "4", "--only", "correct"]
    assert multi_gpu.main([*arguments, "--seconds", "correct=400"]) == 0  # on busy cores, too
    results = json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))
    rows = {row["check"]: row["good"] for row in results["notes"]["correct"]}
    assert all(rows.values())
    for split in ("EP 1 x EDP 4", "EP 2 x EDP 2", "EP 4 x EDP 1"):
        assert f"losses, {split}, overlap on, collective" in rows


def test_ranks_that_share_gpus_are_not_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    four = ["--out", str(tmp_path), "--ranks", "4", "--only"]
    assert multi_gpu.parse([*four, "correct"]).ranks == 4
    with pytest.raises(SystemExit):
        multi_gpu.parse([*four, "correct", "step"])
    assert "4 ranks share 2 GPU(s), over gloo" in capsys.readouterr().err


def test_a_part_that_fails_is_reported(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "effective.jsonl").mkdir()  # nothing can be noted
    args = multi_gpu.parse(["--out", str(tmp_path), "--device", "cpu", "--only", "effective"])
    assert multi_gpu.spawn_part("effective", args) == "failed"
    assert "IsADirectoryError" in capfd.readouterr().out


def test_a_part_that_hangs_is_ended(tmp_path: Path) -> None:
    args = multi_gpu.parse(
        ["--out", str(tmp_path), "--device", "cpu", "--only", "step", "--seconds", "step=-29.5"]
    )
    assert multi_gpu.spawn_part("step", args) == "out of time"


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (["--ranks", "1"], "1 rank"),
        (["--seconds", "steps=3"], "no part steps"),
        (["--seconds", "step"], "PART=SECONDS"),
    ],
)
def test_wrong_arguments(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], wrong: list[str], message: str
) -> None:
    with pytest.raises(SystemExit):
        multi_gpu.parse(["--out", str(tmp_path), "--device", "cpu", *wrong])
    assert message in capsys.readouterr().err
