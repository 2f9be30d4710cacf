"""Verdicts on the traces of two H200 with NCCL between them and on pulled collectives.

`benchmarks/multi_gpu.py --only profiles` recorded them: two layers, nine iterations, the first of
which rank 1 joined 0.3 s late. Nothing was emulated. clock.json has the step times of the same run
without a profiler.
"""

import json
from functools import cache
from pathlib import Path

import pytest

import profiling
from profiling import Verdict
from profiling.effectiveness import effective
from profiling.evidence import JOINED_LATE
from profiling.peers import Transfers

DATA = Path(__file__).parent / "data" / "nccl"
CLOCK = json.loads((DATA / "clock.json").read_text(encoding="utf-8"))["step_ms"]
SCHEDULES = sorted(CLOCK)
PASSING = ["pulled", "split"]


@cache
def read(schedule):
    return profiling.read(DATA / schedule)


def judge(schedule):
    report = profiling.check(read(schedule))
    assert report.ranks == 2
    assert [row.layer for row in report.rows] == 2 * ["layers.0.experts", "layers.1.experts"]
    for row in report.rows:
        assert row.occurrences + sum(row.set_aside.values()) == 18
    return report


@pytest.mark.parametrize("schedule", PASSING)
def test_both_collectives_hide(schedule):
    report = judge(schedule)
    assert report.verdict is Verdict.PASS
    assert all(row.hidden > 0.95 for row in report.rows)


@pytest.mark.parametrize("schedule", ["late", "fused", "serialised", "pulled_serialised"])
def test_other_schedules_fail(schedule):
    report = judge(schedule)
    assert report.verdict is Verdict.FAIL
    assert all(row.hidden == 0 for row in report.rows[:2])


def test_late_gathers_are_no_reason_to_fail_the_reductions():
    rows = judge("late").rows
    assert [row.verdict for row in rows] == 2 * [Verdict.FAIL] + 2 * [Verdict.PASS]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_rank_that_joined_late_is_seen(schedule):
    """It kept the other waiting for 300 ms, inside the first collective."""
    reading = read(schedule)
    assert reading.transfers.joined_late == 2
    waited = [
        sum(end - start for start, end in subject.found.busy.tolist())
        for rank in reading.ranks
        for subject in rank.subjects
        if subject.iteration == 2
    ]
    assert max(waited) > 290e6
    assert all(row.set_aside[JOINED_LATE] >= 1 for row in judge(schedule).rows)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_joining_late_does_not_change_a_verdict(schedule, monkeypatch):
    """Whatever it does to the first iteration, the rule only sets that one aside."""
    expected = judge(schedule).verdict
    later = profiling.check(read(schedule), iterations=profiling.Iterations.parse("3-"))
    assert later.verdict is expected
    assert not any(JOINED_LATE in row.set_aside for row in later.rows)
    monkeypatch.setattr(Transfers, "joined_late", None)
    without = profiling.check(profiling.read(DATA / schedule))
    assert not any(JOINED_LATE in row.set_aside for row in without.rows)
    assert sum(row.occurrences for row in without.rows) > sum(
        row.occurrences for row in judge(schedule).rows
    )


@pytest.mark.parametrize(
    ("serial", "overlapped"), [("serialised", "split"), ("pulled_serialised", "pulled")]
)
def test_effective_is_what_the_clock_said(serial, overlapped):
    result = effective(read(serial), read(overlapped))
    communication = sum(result.serial.communication_ms) / len(result.serial.communication_ms)
    clock = (CLOCK[serial] - CLOCK[overlapped]) / communication
    assert len(result.serial.step_ms) == len(result.overlapped.step_ms) == 8
    assert result.interval[0] < clock < result.interval[1]
    assert result.value == pytest.approx(clock, abs=0.06)


def test_pulled_collectives_are_copies_between_the_signals():
    """Signals alone would last microseconds."""
    for subject in (one for rank in read("pulled").ranks for one in rank.subjects):
        if subject.collective is not None and "fc2" in subject.name:
            names = {
                subject.rank.trace.names[n] for n in subject.rank.trace.name[subject.found.events]
            }
            assert any("PtoP" in name for name in names)
            assert any("barrier_kernel" in name for name in names)


def test_clocks_of_one_host_are_close():
    offsets = profiling.check(read("split")).clocks
    assert offsets["rank 0"].ns == 0
    assert abs(offsets["rank 1"].ns) < 1e6


def test_of_a_whole_step_nothing_is_left_exposed():
    """Four layers of DeepSeek-V3's shape with our defaults, recorded by `--only step`: three steps,
    of 158 ms. The last reduction, of 5.7 ms, travels under the first part of the optimizer."""
    report = profiling.check(DATA.parent / "nccl_step")
    assert report.verdict is Verdict.PASS
    assert all(row.hidden > 0.99 for row in report.rows)
    assert len(report.rows) == 2 * 4
    assert max(report.every_exposed_ms) < 1.0
    forward, _, backward = report.bounds
    assert forward.least_ms == backward.least_ms == 0
    assert forward.exposed_ms < 0.5
    assert backward.exposed_ms < 0.5
