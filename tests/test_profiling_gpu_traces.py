"""Verdicts on real GPU traces, which `data/record_gpu_traces.py` recorded on one H200.

Two layers, ten iterations, so two checks of two layers with ten occurrences each.
"""

import json
from functools import cache
from pathlib import Path

import pytest

import profiling
from profiling import FindingKind, Verdict

DATA = Path(__file__).parent / "data"
CLOCK = json.loads((DATA / "gpu_clock.json").read_text(encoding="utf-8"))
LAYERS = ["layers.0.experts", "layers.1.experts"]


@cache
def read(variant):
    return profiling.read(DATA / f"gpu_{variant}.pt.trace.json.gz")


def judge(variant):
    report = profiling.check(read(variant))
    assert [row.layer for row in report.rows] == 2 * LAYERS
    assert [row.occurrences for row in report.rows] == [10, 10, 10, 10]
    assert not any(row.set_aside for row in report.rows)
    # What was still queued when the recorder opened; its launches came before.
    assert all("unattributed" in note for note in report.notes)
    return report


def test_split_hides_both_collectives_in_both_layers():
    report = judge("split")
    assert {row.verdict for row in report.rows} == {Verdict.PASS}
    assert all(row.spread[0] > 0.98 for row in report.rows)
    assert all(row.wait_ms == 0 for row in report.rows)


@pytest.mark.parametrize(
    ("variant", "gathers", "reductions"),
    [
        ("late", "late issue", "late issue"),
        ("fused", "serialised", "late issue"),
        ("serialised", "serialised", "serialised"),
    ],
)
def test_every_other_schedule_hides_nothing(variant, gathers, reductions):
    report = judge(variant)
    assert {row.verdict for row in report.rows} == {Verdict.FAIL}
    assert all(row.hidden == 0 for row in report.rows)
    kinds = [row.findings[0].kind.value for row in report.rows]
    assert kinds == [gathers, gathers, reductions, reductions]
    prefetch = [FindingKind.PREFETCH in {one.kind for one in row.findings} for row in report.rows]
    assert prefetch == [variant == "late"] * 2 + [False] * 2


def test_lead_says_who_was_enqueued_first():
    assert all(row.lead_ms > 0 for row in judge("split").rows)
    assert all(row.lead_ms < 0 for row in judge("late").rows)


def test_serialised_exposes_what_the_clock_measured_of_the_collectives_alone():
    one = CLOCK["communication_ms"] / CLOCK["collectives_per_step"]
    report = judge("serialised")
    rows = report.rows
    assert report.exposed_ms == {"rank 0": [pytest.approx(4 * one, rel=0.05)] * 10}
    assert [row.exposed_ms for row in rows] == [pytest.approx(one, rel=0.05)] * 4
    assert [row.wait_ms for row in rows] == [pytest.approx(one, rel=0.05)] * 4


@pytest.mark.parametrize("variant", ["late", "fused"])
def test_a_late_reduction_hides_under_the_wrong_stage(variant):
    """Layer 1's runs beside the backward of layer 0; after layer 0's there is nothing left."""
    one = CLOCK["communication_ms"] / CLOCK["collectives_per_step"]
    first, second = judge(variant).rows[2:]
    assert first.hidden == second.hidden == 0
    assert second.exposed_ms < 0.1 * one
    assert first.exposed_ms > one


def effective(variant, **kwargs):
    return profiling.effective(read("serialised"), read(variant), **kwargs)


def test_effective_is_what_the_clock_measured_without_a_profiler():
    result = effective("split")
    low, high = result.interval
    assert result.value == pytest.approx(CLOCK["effective"], abs=0.02)
    assert low <= CLOCK["effective"] <= high
    assert high - low < 0.05
    assert result.verdict is None
    assert effective("split", threshold=0.9).verdict is Verdict.PASS
    assert effective("split", threshold=0.99).verdict is Verdict.FAIL


@pytest.mark.parametrize("variant", ["late", "fused"])
def test_a_lost_overlap_is_not_effective(variant):
    assert effective(variant).interval[1] < 0
    assert effective(variant, threshold=0.1).verdict is Verdict.FAIL


def test_a_run_saves_nothing_against_itself():
    low, high = effective("serialised").interval
    assert low <= 0 <= high
