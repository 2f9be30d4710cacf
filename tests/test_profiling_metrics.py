"""Wait, lead, skew and the ranks' clocks on built traces; the wait against a plain search."""

import itertools
import json

import numpy as np
import pytest

import profiling
from profiling import Verdict
from profiling.intervals import intersect, total
from profiling.metrics import measure
from profiling.ranges import Kind
from tests.kineto import ALL_GATHER, COMMUNICATION, COMPUTE, TraceBuilder, gpu_iteration

EXPERTS = "layers.0.mlp.experts"
NAME = f"{EXPERTS}.fc2_weight"


def group(*ranks, **args):
    return {
        "Collective name": "_allgather_base",
        "Process Group Name": "7",
        "Process Group Ranks": json.dumps(list(ranks)),
        "Group size": len(ranks),
        **args,
    }


def gathers(built, tmp_path):
    """Return the measured occurrences of a trace, in the order of their iterations."""
    built.write(tmp_path)
    reading = profiling.read(tmp_path)
    (rank,) = reading.ranks
    runs = list(rank.attribution.stages)
    at_work = np.concatenate([run.busy for run in runs])
    return [measure(one, at_work, runs, reading.transfers) for one in rank.subjects]


# Wait


@pytest.mark.parametrize(
    ("following", "launched", "wait", "why"),
    [
        (1310, 85, 200, "enqueued before the gather ended, begins after it"),
        (9000, 85, 200, "however long after"),
        (1290, 85, 0, "began before the gather ended"),
        (1310, 1305, 0, "the thread was late, not the gather"),
    ],
)
def test_wait_is_idle_time_that_the_collective_ended(tmp_path, following, launched, wait, why):
    built = TraceBuilder()
    gpu_iteration(built, 0, 1e6, gather=(1000, 1300))  # the stage ends at 1100
    built.kernel("next", 1e6 + launched, 1e6 + following, 1e6 + following + 100)
    (one,) = gathers(built, tmp_path)
    assert one.wait == 1000 * wait, why


def test_a_thread_that_stood_in_the_wait_was_not_late(tmp_path):
    built = TraceBuilder()
    gpu_iteration(built, 0, 1e6, gather=(1000, 1300))
    built.range(Kind.PARAM_WAIT, NAME, 1e6 + 1200, 1e6 + 1302)
    built.kernel("next", 1e6 + 1305, 1e6 + 1310, 1e6 + 1400)
    (one,) = gathers(built, tmp_path)
    assert one.wait == 200_000


def test_idle_time_belongs_to_the_collective_that_ended_last(tmp_path):
    built = TraceBuilder()
    gpu_iteration(built, 0, 1e6, gather=(1000, 1300))
    built.kernel(ALL_GATHER, 1e6 + 60, 1e6 + 1300, 1e6 + 1500, stream=COMMUNICATION)
    built.kernel("next", 1e6 + 85, 1e6 + 1510, 1e6 + 1600)
    first, last = gathers(built, tmp_path)
    assert (first.wait, last.wait) == (0, 400_000)


def test_a_busy_stream_beside_does_not_end_the_wait_of_the_stage_s(tmp_path):
    built = TraceBuilder()
    gpu_iteration(built, 0, 1e6, gather=(1000, 1300))
    built.kernel("next", 1e6 + 85, 1e6 + 1310, 1e6 + 1400)
    built.kernel("elsewhere", 1e6 + 82, 1e6 + 1000, 1e6 + 1350, stream=COMPUTE + 1)
    (one,) = gathers(built, tmp_path)
    assert one.wait == 200_000
    assert one.exposed == 0


@pytest.mark.parametrize("seed", range(10))
def test_wait_against_a_plain_search(tmp_path, seed):
    """All enqueued at once, so every gap of the compute stream that a gather ends is waiting."""
    random = np.random.default_rng(seed)
    built = TraceBuilder()
    built.range(Kind.STAGE1_FORWARD, EXPERTS, 0, 1000)
    edges = 2000 + np.cumsum(random.integers(1, 60, 60))
    kernels = edges.reshape(-1, 2).tolist()
    for index, (start, end) in enumerate(kernels):
        built.kernel("gemm", 10 + index, start, end)
    moved = 2000 + np.cumsum(random.integers(1, 80, 30)).reshape(-1, 2)
    for index, (start, end) in enumerate(moved.tolist()):
        built.range(Kind.PARAM_GATHER, NAME, 1000 + 10 * index, 1005 + 10 * index)
        built.kernel(ALL_GATHER, 1001 + 10 * index, start, end, stream=COMMUNICATION)
    ends = moved[:, 1].tolist()
    for one, end in zip(gathers(built, tmp_path), ends, strict=True):
        wait = 0
        before = [b for a, b in kernels if a < end and b > a]
        after = [a for a, b in kernels if a >= end and b > a]
        if before and after and max(before) < end:
            begin = min(after)
            if not any(end < other <= begin for other in ends):
                wait = end - max(before)
        assert one.wait == 1000 * wait


# Lead


def test_lead_is_to_the_launch_not_to_the_start(tmp_path):
    built = TraceBuilder()
    gpu_iteration(built, 0, 1e6, gather=(150, 650))
    (one,) = gathers(built, tmp_path)
    assert one.lead == 40_000  # issued at 10, launched at 50, running from 100 on


# Clocks and skew


def pair(tmp_path, begins, *, shift=0.0, key=group, ranks=(0, 1), **kwargs):
    """Ranks of one group, whose gathers begin when they arrive and end together at 900."""
    for rank, begin in zip(ranks, begins, strict=True):
        built = TraceBuilder(rank, len(ranks))
        for number in range(5):
            start = 1e6 + 2000 * number + shift * rank
            args = key(*ranks, **kwargs)
            gpu_iteration(built, number, start, gather=(begin, 900), **args)
        built.write(tmp_path)
    return profiling.read(tmp_path)


@pytest.mark.parametrize("shift", [0, 7000, -123456])
def test_a_clock_s_offset_comes_from_the_ends(tmp_path, shift):
    reading = pair(tmp_path, (200, 600), shift=shift)  # rank 1 arrives 400 us late
    offsets = reading.transfers.offsets
    assert (offsets[0].ns, offsets[1].ns) == (0, 1000 * shift)
    assert (offsets[1].scatter_ns, offsets[1].collectives) == (0, 5)
    row, _ = profiling.check(reading).rows
    assert row.skew_ms == pytest.approx(0.0)  # what counts is the late rank, which waits for nobody
    assert row.set_aside == {"the stage ran while the collective waited for a late rank": 5}


def test_skew_is_the_time_beyond_the_shortest_rank(tmp_path):
    reading = pair(tmp_path, (580, 600))
    row, _ = profiling.check(reading).rows
    assert row.occurrences == 10
    assert row.skew_ms == pytest.approx(0.01)  # 20 us on one of two ranks


def test_without_a_peer_there_is_no_skew(tmp_path):
    row, _ = profiling.check(pair(tmp_path, (580,), ranks=(0,))).rows
    assert row.skew_ms is None


def test_an_outlier_does_not_move_a_clock(tmp_path):
    pair(tmp_path, (200, 600), shift=7000)
    path = tmp_path / "rank1.pt.trace.json"
    entry = json.loads(path.read_text())
    moved = [event for event in entry["traceEvents"] if event["name"] == ALL_GATHER]
    moved[2]["dur"] += 500
    path.write_text(json.dumps(entry))
    assert profiling.read(tmp_path).transfers.offsets[1].ns == 7_000_000


def test_clocks_are_linked_through_a_third_rank(tmp_path):
    # 0 and 1 share a group, and 1 and 2 do; 3 shares none.
    for rank, groups in enumerate([[(0, 1)], [(0, 1), (1, 2)], [(1, 2)], [(3, 4)]]):
        built = TraceBuilder(rank, 5)
        for number, ranks in itertools.product(range(3), groups):
            start = 1e6 + 4000 * number + 2000 * (ranks == (1, 2)) + 100 * rank
            name = f"layers.{ranks[0]}.mlp.experts"
            args = group(*ranks)
            gpu_iteration(built, number, start, gather=(100, 900), experts=name, **args)
        built.write(tmp_path)
    offsets = profiling.read(tmp_path).transfers.offsets
    assert [None if one is None else one.ns for one in offsets.values()] == [
        0,
        100_000,
        200_000,
        None,
    ]


def test_comms_ids_match_collectives_whose_order_differs(tmp_path):
    """Two foreign collectives swap places on rank 1: by order each would be taken for the other."""
    for rank, order in enumerate([("a", "b"), ("b", "a")]):
        built = TraceBuilder(rank, 2)
        for number in range(3):
            for index, name in enumerate(order):
                start = 1e6 + 4000 * number + 1000 * index
                length = 100 if name == "a" else 500
                args = group(0, 1, **{"Comms Id": 100 * number + ord(name)})
                built.kernel(ALL_GATHER, start, start + 10, start + 10 + length, **args)
        built.write(tmp_path)
    reading = profiling.read(tmp_path)
    skews = [
        measure(subject, np.zeros((0, 2), np.int64), [], reading.transfers).skew
        for rank in reading.ranks
        for subject in rank.subjects
    ]
    assert skews == [0] * 12


def test_foreign_collectives_match_by_their_order_in_the_group(tmp_path):
    for rank in (0, 1):
        built = TraceBuilder(rank, 2)
        if rank == 1:  # of another group, which rank 0 is not in: not counted in the order
            built.kernel(ALL_GATHER, 1e6 - 900, 1e6 - 800, 1e6 - 700, **group(1, 2))
        for number in range(3):
            start = 1e6 + 4000 * number
            begin = 100 + 50 * rank
            built.kernel(ALL_GATHER, start, start + begin, start + 700 + number, **group(0, 1))
        built.write(tmp_path)
    reading = profiling.read(tmp_path)
    found = [
        measure(subject, np.zeros((0, 2), np.int64), [], reading.transfers).skew
        for subject in (*reading.ranks[0].subjects, *reading.ranks[1].subjects)
    ]
    assert found == [50_000] * 3 + [None] + [0] * 3


def test_groups_are_inferred_across_clocks_that_differ(tmp_path):
    """Without the group's ranks in the trace, whoever met is told by the corrected times."""
    described = [{"pg_name": "5", "pg_desc": "ours_edp", "ranks": [0, 1]}]
    for rank in (0, 1):
        built = TraceBuilder(rank, 2, groups=((0, 1),))
        built.metadata["distributedInfo"]["pg_config"] += described
        for number in range(3):
            start = 1e6 + 2000 * number + 1e5 * rank
            gpu_iteration(built, number, start, gather=(850 + 10 * rank, 900))
        built.write(tmp_path)
    row, _ = profiling.check(tmp_path).rows
    assert row.verdict is Verdict.PASS
    assert row.skew_ms == pytest.approx(0.0) or row.skew_ms == pytest.approx(0.005)


@pytest.mark.parametrize("seed", range(5))
def test_time_under_each_stage_against_sets(tmp_path, seed):
    """Stages of three layers that overlap each other and the gathers at random."""
    random = np.random.default_rng(seed)
    built = TraceBuilder()
    for index in range(24):
        layer = f"layers.{index % 3}.mlp.experts"
        built.range(Kind.STAGE1_FORWARD, layer, 10 * index, 10 * index + 5)
        start = int(random.integers(1000, 2000))
        end = start + int(random.integers(1, 90))
        built.kernel("gemm", 10 * index + 1, start, end, stream=index % 5)
    reading = profiling.read(built.write(tmp_path))
    (rank,) = reading.ranks
    edges = np.sort(random.choice(np.arange(900_000, 2_100_000), 8, replace=False))
    when = edges.reshape(-1, 2)
    expected = {
        key: total(intersect(when, busy)) for key, busy in rank.attribution.stage_busy.items()
    }
    assert rank.under(when) == {key: length for key, length in expected.items() if length}
    assert rank.under(when[:0]) == {}
