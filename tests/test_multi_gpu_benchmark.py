"""The benchmark between GPUs, run on two gloo ranks at toy size."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import multi_gpu


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
