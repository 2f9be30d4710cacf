"""The least exposed time: the formulas against a simulated schedule, and on built profiles."""

import itertools

import numpy as np
import pytest

import profiling
from profiling.bounds import backward_bound, bounds, forward_bound, forward_bound_unlimited
from profiling.ranges import Kind
from tests.kineto import ALL_GATHER, COMMUNICATION, TraceBuilder


def simulate_forward(gathers, compute, depth):
    """Run the forward event by event and return how long compute stood still.

    Gather j may be issued once the compute before the first use of bucket j - depth is done; the
    communicator takes them in order; the compute after a use waits for its gather.
    """
    idle, now, free = 0, 0, 0
    done = [0.0] * len(gathers)
    issued = 0
    for j, (gather, before) in enumerate(zip(gathers, compute, strict=True)):
        while issued < len(gathers) and issued <= j + depth - 1:
            free = max(free, now) + gathers[issued]
            done[issued] = free
            issued += 1
        now += before
        assert issued > j
        if done[j] > now:
            idle += done[j] - now
            now = done[j]
        assert gather >= 0
    return idle


def simulate_backward(reductions, ready, needed):
    """Run what follows the backward: it stands still wherever a result that it needs has not come.

    Results are needed in any order.
    """
    free, done = 0, []
    for reduction, at in zip(reductions, ready, strict=True):
        free = max(free, at) + reduction
        done.append(free)
    idle = 0
    for at, end in sorted(zip(needed, done, strict=True)):
        idle += max(0, end - (at + idle))
    return idle


@pytest.mark.parametrize("seed", range(20))
def test_the_formulas_are_what_the_best_schedule_leaves(seed):
    random = np.random.default_rng(seed)
    count = int(random.integers(1, 9))
    gathers, compute = random.integers(1, 100, (2, count)).tolist()
    assert forward_bound(gathers, compute) == simulate_forward(gathers, compute, 1)
    assert forward_bound_unlimited(gathers, compute) == simulate_forward(gathers, compute, count)
    assert forward_bound_unlimited(gathers, compute) <= forward_bound(gathers, compute)
    ready = np.cumsum(random.integers(0, 100, count)).tolist()
    needed = (ready[-1] + random.integers(0, 150, count)).tolist()
    assert backward_bound(gathers, ready, needed) == simulate_backward(gathers, ready, needed)


def test_as_engine_texts_have_them():
    """No compute before the first use: E_f is at least the first gather, E_b the last reduction."""
    assert forward_bound([30, 20, 50], [0, 40, 40]) == 30 + 0 + 10
    assert forward_bound_unlimited([30, 20, 50], [0, 40, 40]) == 30
    assert backward_bound([30, 20], [100, 140], [140, 140]) == 20
    assert backward_bound([60, 20], [100, 140], [140, 140]) == 40


def forward_run(*, exposed, waits=True):
    """Three steps: gathers of 300 and 500 us; 200 us of compute before the first use, then 400."""
    trace = TraceBuilder()
    for number, (name, at) in itertools.product(range(3), (("a", 0), ("b", 20))):
        start = 1e6 + 3000 * number
        first = name == "a"
        if first:
            trace.range(Kind.ITERATION, str(number), start, start + 3000)
            trace.kernel("dense", start + 1, start + 200, start + 400)
        trace.range(Kind.PARAM_GATHER, f"{name}.fc2_weight", start + at + 4, start + at + 8)
        gather = (400, 700) if first else (700, 1200) if not exposed else (1100, 1600)
        begin, end = (start + edge for edge in gather)
        trace.kernel(ALL_GATHER, start + at + 5, begin, end, stream=COMMUNICATION)
        if waits:
            trace.range(Kind.PARAM_WAIT, f"{name}.fc2_weight", start + at + 10, start + at + 12)
        last = gather[1]
        trace.kernel("gemm", start + at + 15, start + last, start + last + 400)
    return trace


def test_of_a_profile(tmp_path):
    forward_run(exposed=False).write(tmp_path)
    depth1, unlimited, backward = bounds(profiling.read(tmp_path))
    # Before the first use 200 us of compute, then 400: max(0, 300 - 200) + max(0, 500 - 400).
    assert depth1.least_ms == pytest.approx(0.2)
    assert unlimited.least_ms == pytest.approx(0.2)
    assert depth1.exposed_ms == pytest.approx(0.3 + 0.1)
    assert depth1.ratio == pytest.approx(2.0)
    assert (backward.least_ms, backward.ratio) == (None, None)
    assert backward.missing


def test_waiting_does_not_move_a_bound(tmp_path):
    forward_run(exposed=True).write(tmp_path)
    depth1, *_ = bounds(profiling.read(tmp_path))
    assert depth1.least_ms == pytest.approx(0.2)
    assert depth1.exposed_ms == pytest.approx(0.3 + 0.5)


def test_without_waits_there_is_no_bound_and_a_reason(tmp_path):
    forward_run(exposed=False, waits=False).write(tmp_path)
    for bound in bounds(profiling.read(tmp_path)):
        assert bound.least_ms is None
        assert "no wait" in bound.missing


def gathers_of_the_step(*, length):
    """Two steps of 3000 us; the optimizer of each issues two gathers and then computes 500 us."""
    trace = TraceBuilder()
    for number in range(2):
        start = 1e6 + 3000 * number
        trace.range(Kind.ITERATION, str(number), start, start + 3000)
        if number:
            for at, name in ((10, "router"), (20, "fc1_weight")):
                trace.range(Kind.PARAM_WAIT, name, start + at, start + at + 2)
            trace.kernel("gemm", start + 25, start + 300, start + 700)
        else:
            for at, name in ((2000, "router"), (2010, "fc1_weight")):
                trace.range(Kind.PARAM_GATHER, name, start + at, start + at + 4)
                begin, end = (2300, 2320) if name == "router" else (2320, 2320 + length)
                edges = (start + begin, start + end)
                trace.kernel(ALL_GATHER, start + at + 1, *edges, stream=COMMUNICATION)
        trace.kernel("step", start + 2020, start + 2300, start + 2800)
    return trace


@pytest.mark.parametrize(("length", "exposed"), [(400, 0), (900, 0.42)])
def test_the_optimizer_hides_the_gathers_it_issues(tmp_path, length, exposed):
    gathers_of_the_step(length=length).write(tmp_path)
    depth1, unlimited, _ = bounds(profiling.read(tmp_path))
    assert depth1.exposed_ms == unlimited.exposed_ms == pytest.approx(exposed)
    assert unlimited.least_ms == pytest.approx(exposed)
    # Each by itself: that the router's gather goes before the other one is not in this formula.
    assert depth1.least_ms == pytest.approx(max(0, exposed - 0.02))


def backward_run(*, stepped_between):
    """Two steps: reductions of 600 and 300 us, ready after 400 and 800 us of compute.

    Args:
        stepped_between: Microseconds of an optimizer's kernel before the wait for the second.
    """
    trace = TraceBuilder()
    for number in range(2):
        start = 1e6 + 3000 * number
        trace.range(Kind.ITERATION, str(number), start, start + 3000)
        trace.kernel("gemm1", start + 1, start + 100, start + 500)
        trace.range(Kind.GRAD_REDUCE, "b.fc2_weight", start + 5, start + 9)
        trace.kernel(
            "ncclDevKernel_ReduceScatter",
            start + 6,
            start + 500,
            start + 1100,
            stream=COMMUNICATION,
        )
        trace.kernel("gemm2", start + 12, start + 500, start + 900)
        trace.range(Kind.GRAD_REDUCE, "a.fc2_weight", start + 15, start + 19)
        trace.kernel(
            "ncclDevKernel_ReduceScatter",
            start + 16,
            start + 1100,
            start + 1400,
            stream=COMMUNICATION,
        )
        trace.range(Kind.GRAD_WAIT, "b.fc2_weight", start + 30, start + 32)
        if stepped_between:
            trace.kernel("step b", start + 33, start + 1100, start + 1100 + stepped_between)
        trace.range(Kind.GRAD_WAIT, "a.fc2_weight", start + 34, start + 36)
        trace.kernel("step", start + 40, start + 1400, start + 1500)
    return trace


def test_backward_of_a_profile(tmp_path):
    backward_run(stepped_between=0).write(tmp_path)
    *_, backward = bounds(profiling.read(tmp_path))
    # Ready after 400 and 800 us of compute, which is all of it: max(400 + 900, 800 + 300) - 800.
    assert backward.least_ms == pytest.approx(0.5)
    assert backward.exposed_ms == pytest.approx(0.2 + 0.3)
    assert backward.ratio == pytest.approx(1.0)


def test_what_is_stepped_before_the_last_wait_may_hide_it(tmp_path):
    backward_run(stepped_between=200).write(tmp_path)
    *_, backward = bounds(profiling.read(tmp_path))
    # The first is 1000 - 800 late; the second comes at 1300 and is needed after 800 + 200.
    assert backward.least_ms == pytest.approx(0.3)
    assert backward.exposed_ms == pytest.approx(0.2 + 0.1)


def two_communicators(*, at):
    """A step of 400 us of compute, ``at`` which two reductions of 300 us run on one stream each."""
    trace = TraceBuilder()
    start = 1e6
    trace.range(Kind.ITERATION, "0", start, start + 3000)
    for number, name in enumerate(("b.fc2_weight", "dense")):
        trace.range(Kind.GRAD_REDUCE, name, start + 5 + 5 * number, start + 9 + 5 * number)
        trace.kernel(
            "ncclDevKernel_ReduceScatter",
            start + 6 + 5 * number,
            start + at,
            start + at + 300,
            stream=COMMUNICATION + number,
        )
    trace.kernel("gemm", start + 16, start + 100, start + 500)
    for number, name in enumerate(("b.fc2_weight", "dense")):
        trace.range(Kind.GRAD_WAIT, name, start + 30 + 5 * number, start + 32 + 5 * number)
    trace.kernel("step", start + 50, start + at + 300, start + at + 400)
    return trace


@pytest.mark.parametrize(("at", "exposed"), [(200, 0), (400, 2 * 0.2)])
def test_what_travels_at_the_same_time_counts_once(tmp_path, at, exposed):
    two_communicators(at=at).write(tmp_path)
    *_, backward = bounds(profiling.read(tmp_path))
    assert backward.least_ms == 0
    assert backward.exposed_ms == pytest.approx(exposed)
