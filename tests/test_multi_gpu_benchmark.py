"""The benchmark between GPUs, run on two gloo ranks at toy size, and the bound that it prints."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import multi_gpu
from benchmarks.ranks.bound import exposed_backward, exposed_forward


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
    arguments = ["--out", str(tmp_path), "--device", "cpu", "--only", "effective"]
    with pytest.raises(OSError, match=r"effective\.jsonl"):
        multi_gpu.main(arguments)
    args = multi_gpu.parse(arguments)
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


@pytest.mark.parametrize(
    ("gathers", "computes", "ahead", "exposed"),
    [
        ([3, 3, 3], [5, 5, 5], 0, 3),  # only the first, which nothing hides
        ([3, 3, 3], [5, 5, 5], 2, 1),
        ([3, 7, 3], [5, 5, 5], 4, 2),  # the second outlasts the compute beside it
        ([], [], 0, 0),
    ],
)
def test_the_bound_of_the_forward(
    gathers: list[float], computes: list[float], ahead: float, exposed: float
) -> None:
    assert exposed_forward(gathers, computes, ahead) == exposed


@pytest.mark.parametrize(
    ("reduces", "computes", "exposed"),
    [
        ([2, 2], [5, 0], 2),  # only the last
        ([7, 2], [5, 0], 4),  # the last one waits for the first
        ([2, 2], [5, 3], 0),  # compute follows the last one, too
    ],
)
def test_the_bound_of_the_backward(
    reduces: list[float], computes: list[float], exposed: float
) -> None:
    assert exposed_backward(reduces, computes) == exposed
