"""Matching gloo's ranges to calls: sure, by order of issue, or in doubt - never a guess."""

import random

import pytest

from profiling.gloo import SLACK, Call, Run, match

GATHER = frozenset({"gloo:all_gather"})
MS = 1_000_000


def call(start, deadline=None, size=8, group="expert", operations=GATHER):
    sizes = frozenset() if size is None else frozenset({size, 2 * size})
    return Call(start * MS, None if deadline is None else deadline * MS, operations, sizes, group)


def run(start, end, size=8, operation="gloo:all_gather"):
    return Run(start * MS, end * MS, operation, frozenset() if size is None else frozenset({size}))


def matched(calls, runs):
    return [found.run for found in match(calls, runs)]


def test_sizes_and_operations_tell_runs_apart():
    calls = [
        call(0, 50, 8),
        call(1, 50, 16),
        call(2, 50, operations=frozenset({"gloo:all_reduce"})),
    ]
    runs = [run(3, 9, operation="gloo:all_reduce"), run(4, 9, 16), run(5, 9, 8)]
    assert matched(calls, runs) == [2, 1, 0]


def test_a_run_is_after_its_call_and_before_the_wait_ends():
    calls = [call(10, 20), call(30, 40)]
    runs = [run(5, 8), run(11, 19), run(32, 39), run(50, 60)]
    assert matched(calls, runs) == [1, 2]


def test_the_wait_may_be_back_a_little_before_gloo_notes_the_end():
    assert SLACK < 5 * MS
    assert matched([call(0, 20)], [Run(1, 20 * MS + SLACK, "gloo:all_gather", frozenset({8}))]) == [
        0
    ]
    assert matched([call(0, 20)], [run(1, 25)]) == [None]


def test_what_one_call_must_have_leaves_the_rest_to_the_other():
    calls = [call(0, 90), call(10, 90)]
    runs = [run(5, 30), run(12, 40)]  # the second call cannot have the first run
    assert matched(calls, runs) == [0, 1]


def test_the_order_of_issue_decides_within_a_group():
    assert matched([call(0, 90), call(1, 90)], [run(5, 30), run(6, 20)]) == [0, 1]


@pytest.mark.parametrize(
    ("calls", "runs", "doubt"),
    [
        (
            [call(0, 90, group="dense"), call(1, 90)],
            [run(5, 30), run(6, 20)],
            "2 process groups were in flight",
        ),
        ([call(0, 90, None), call(1, 90, None)], [run(i, 30) for i in (5, 6, 7)], "3 gloo ranges"),
        ([call(0, 90)], [run(5, 30, 9)], "no gloo range fits"),
    ],
    ids=["several-groups", "more-runs-than-calls", "no-run"],
)
def test_doubt_is_said(calls, runs, doubt):
    found = match(calls, runs)
    assert [one.run for one in found] == [None] * len(calls)
    assert all(doubt in one.doubt for one in found)


def test_a_recording_that_ends_early_is_no_doubt():
    found = match([call(0, 90), call(1, None), call(2, None)], [run(5, 30)])
    assert [(one.run, one.doubt) for one in found] == [(0, ""), (None, ""), (None, "")]


def test_a_run_from_before_the_recording_is_left_over():
    assert matched([call(10, 20)], [run(2, 9), run(11, 19)]) == [1]


def test_thousands_of_calls_that_nobody_waited_for():
    calls = [call(10 * i, None, 8 + i % 3) for i in range(5000)]
    runs = [run(10 * i + 1, 10 * i + 9, 8 + i % 3) for i in range(5000)]
    assert matched(calls, runs) == list(range(5000))


def test_200_random_schedules_are_matched_right_or_not_at_all():
    """A group with two threads, as torch has it, runs calls of two sizes in order of issue."""
    generator = random.Random()
    sure = 0
    for _ in range(200):
        calls, runs, free, now = [], [], [0, 0], 0
        for index in range(generator.randint(1, 12)):
            now += generator.randint(0, 30)
            size = generator.choice([8, 16])
            thread = free.index(min(free))
            start = max(now, free[thread]) + 1
            end = start + generator.randint(1, 60)
            free[thread] = end
            calls.append(call(now, end + generator.randint(0, 300), size))
            runs.append((run(start, end, size), index))
        runs.sort(key=lambda pair: pair[0].start)
        found = match(calls, [one for one, _ in runs])
        for index, one in enumerate(found):
            if one.run is None:
                assert one.doubt
            else:
                sure += 1
                true = next(place for place, (_, owner) in enumerate(runs) if owner == index)
                assert one.run == true
    assert sure > 800
