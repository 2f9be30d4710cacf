"""What changed between two profiles: by how much, against the scatter, for better or worse."""

import statistics

import numpy as np
import pytest

import profiling
from profiling.comparing import diff
from profiling.ranges import Kind
from profiling.rules import Iterations, Rule
from tests.kineto import ALL_GATHER, COMMUNICATION, TraceBuilder, gpu_iteration

EXPERTS = "layers.0.mlp.experts"
CHECK = "fc2 gather overlaps stage1 forward"


def run(folder, gathers, name, extra=None):
    trace = TraceBuilder()
    for number, gather in enumerate(gathers):
        start = 1e6 + 2000 * number
        gpu_iteration(trace, number, start, gather=gather)
        if extra is not None:
            trace.range(Kind.PARAM_GATHER, extra, start + 91, start + 93)
            begin = start + 1200
            trace.kernel(ALL_GATHER, start + 92, begin, begin + 100, stream=COMMUNICATION)
    return profiling.read(trace.write(folder, name))


def changes(tmp_path, before, after, **kwargs):
    found = diff(run(tmp_path, before, "a.json"), run(tmp_path, after, "b.json"), **kwargs)
    (entry,) = found.entries
    assert (entry.check, entry.name) == (CHECK, EXPERTS)
    return found, {change.figure: change for change in entry.changes}


def test_what_got_better_and_what_stayed(tmp_path):
    found, by = changes(tmp_path, [(1000, 1200)] * 4, [(400, 600)] * 4)
    assert (by["hidden"].before, by["hidden"].after) == pytest.approx((0.5, 1.0))
    assert (by["exposed_ms"].before, by["exposed_ms"].after) == pytest.approx((0.1, 0.0))
    assert by["hidden"].better
    assert by["exposed_ms"].better
    assert (by["duration_ms"].beyond, by["duration_ms"].better) == (False, None)
    assert not found.worse
    assert (found.only_before, found.only_after) == ((), ())


def test_what_got_worse(tmp_path):
    found, by = changes(tmp_path, [(400, 600)] * 4, [(1000, 1200)] * 4)
    assert by["hidden"].better is False
    assert by["exposed_ms"].better is False
    assert found.worse


def test_a_longer_collective_is_neither_better_nor_worse(tmp_path):
    found, by = changes(tmp_path, [(400, 600)] * 4, [(400, 700)] * 4)
    assert by["duration_ms"].beyond
    assert by["duration_ms"].better is None
    assert not found.worse


@pytest.mark.parametrize(("shift", "beyond"), [(10, False), (200, True)])
def test_a_change_within_the_scatter_is_none(tmp_path, shift, beyond):
    before = [(1000, 1120 + step) for step in (0, 20, 40, 60, 80)]
    after = [(1000, 1120 + shift + step) for step in (0, 20, 40, 60, 80)]
    found, by = changes(tmp_path, before, after)
    assert by["exposed_ms"].beyond is beyond
    assert by["exposed_ms"].spread == pytest.approx(0.04)
    assert found.worse is beyond


@pytest.mark.parametrize("seed", range(5))
def test_medians_and_spread_against_the_standard_library(tmp_path, seed):
    random = np.random.default_rng(seed)
    ends = [random.integers(1101, 1400, 9).tolist() for _ in range(2)]
    _, by = changes(tmp_path, *([(1000, end) for end in each] for each in ends))
    exposed = [[(end - 1100) / 1000 for end in each] for each in ends]
    change = by["exposed_ms"]
    assert change.before == pytest.approx(statistics.median(exposed[0]))
    assert change.after == pytest.approx(statistics.median(exposed[1]))
    quartiles = [statistics.quantiles(each, n=4, method="inclusive") for each in exposed]
    assert change.spread == pytest.approx(max(last - first for first, _, last in quartiles))


def test_an_iteration_can_be_left_out(tmp_path):
    later = Iterations.parse("1-")
    _, by = changes(tmp_path, [(1000, 1200), *[(400, 600)] * 3], [(400, 600)] * 3, iterations=later)
    assert not any(change.beyond for change in by.values())


def test_collectives_that_no_rule_is_about_are_compared_under_any_compute(tmp_path):
    before = run(tmp_path, [(400, 600)] * 3, "a.json", extra="dense.0")
    after = run(tmp_path, [(400, 600)] * 3, "b.json", extra="dense.0")
    found = diff(before, after)
    assert [(entry.check, entry.name) for entry in found.entries] == [
        (CHECK, EXPERTS),
        ("any compute", "overlap::param_gather[dense.0]"),
    ]
    covering = [Rule("all", "*", "any", min_hidden=0.5)]
    names = [(entry.check, entry.name) for entry in diff(before, after, rules=covering).entries]
    assert names == [("all", "dense.0"), ("all", EXPERTS)]


def test_what_is_in_one_only_is_named(tmp_path):
    before = run(tmp_path, [(400, 600)] * 3, "a.json", extra="dense.0")
    after = run(tmp_path, [(400, 600)] * 3, "b.json", extra="dense.1")
    found = diff(before, after)
    assert found.only_before == ("any compute: overlap::param_gather[dense.0]",)
    assert found.only_after == ("any compute: overlap::param_gather[dense.1]",)


def test_nothing_in_common_is_said(tmp_path):
    before = run(tmp_path, [(400, 600)], "a.json")  # once is no scatter
    after = run(tmp_path, [(400, 600)] * 3, "b.json")
    found = diff(before, after)
    assert (found.entries, found.step) == ((), None)
    assert "nothing can be compared" in profiling.to_text(found)


def test_text_fits_and_counts_what_changed(tmp_path):
    found, _ = changes(tmp_path, [(400, 600)] * 4, [(1000, 1200)] * 4)
    lines = profiling.to_text(found).splitlines()
    assert lines[-1] == "beyond the spread: 0 better, 2 worse, of 5 figures"
    assert max(map(len, lines)) <= 100
    assert sum(line.endswith("WORSE") for line in lines) == 2
