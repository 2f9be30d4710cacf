"""From ranges to launches to kernels, against plain searches over random traces."""

import random

import numpy as np
import pytest

from profiling.launches import EARLY, Launches
from profiling.loading import load
from profiling.nesting import Outermost
from profiling.trace import Category
from tests.kineto import AUTOGRAD, COMMUNICATION, COMPUTE, MAIN, TraceBuilder


def read(trace, tmp_path):
    return load(trace.write(tmp_path)).traces[0]


def launch(trace, at, correlation, tid=MAIN, name="cudaLaunchKernel", last=2):
    trace.add("cuda_runtime", name, at, at + last, tid, correlation=correlation)


def kernel(trace, start, correlation, stream=COMPUTE, name="k"):
    args = {"device": 0, "stream": stream}
    if correlation is not None:
        args["correlation"] = correlation
    trace.add("kernel", name, start, start + 1, stream, **args)


def started(trace, events):
    return sorted((trace.start[events] // 1000).tolist())


def test_200_random_traces_against_a_plain_search(tmp_path):
    """Distinct correlations, graphs of several kernels, driver calls inside, lost launches."""
    dice = random.Random()
    for _ in range(200):
        trace = TraceBuilder()
        launched, kernels = [], []
        for correlation in range(1, dice.randint(2, 40)):
            at, tid = dice.randrange(1000), dice.choice([MAIN, AUTOGRAD])
            if dice.random() < 0.8:
                launch(trace, at, correlation, tid)
                launched.append((at, tid, correlation))
                if dice.random() < 0.3:
                    launch(trace, at + 0.5, correlation, tid, "cuLaunchKernel", 1)
            for _ in range(dice.choice([1, 1, 1, 3])):
                start = 2000 + len(kernels)
                kernel(trace, start, correlation)
                kernels.append((start, correlation))
        read_back = read(trace, tmp_path)
        index = Launches(read_back)
        lane = {lane.tid: place for place, lane in enumerate(read_back.lanes)}
        for _ in range(10):
            start, tid = dice.randrange(1000), dice.choice([MAIN, AUTOGRAD])
            end = start + dice.randrange(400)
            inside = {c for at, t, c in launched if start <= at < end and t == tid}
            anywhere = {c for at, _, c in launched if start <= at < end}
            span = start * 1000, end * 1000
            assert started(read_back, index.inside(lane.get(tid, 99), *span)) == [
                at for at, correlation in kernels if correlation in inside
            ]
            assert started(read_back, index.anywhere(*span)) == [
                at for at, correlation in kernels if correlation in anywhere
            ]
        known = {correlation for *_, correlation in launched}
        assert started(read_back, index.missing) == [
            at for at, correlation in kernels if correlation not in known
        ]


def owners(tmp_path, trace):
    """Launch -> the kernels that it has, by their starts in microseconds."""
    read_back = read(trace, tmp_path)
    calls, events = Launches(read_back).pairs()
    found = {}
    for call, event in zip(calls.tolist(), events.tolist(), strict=True):
        at = int(read_back.start[call]) // 1000
        found.setdefault(at, []).append(int(read_back.start[event]) // 1000)
    return {at: sorted(kernels) for at, kernels in found.items()}


def filler(trace):
    for index in range(50):
        launch(trace, 10_000 + 3 * index, 100 + index)


def test_two_launches_of_one_correlation_on_one_stream_go_by_order(tmp_path):
    trace = TraceBuilder()
    filler(trace)
    for at in (0, 10):
        launch(trace, at, 5)
    for start in (300, 200):
        kernel(trace, start, 5)
    assert owners(tmp_path, trace) == {0: [200], 10: [300]}


def test_what_began_before_a_launch_is_not_its_own(tmp_path):
    late = 1000 + EARLY // 1000
    trace = TraceBuilder()
    filler(trace)
    for at in (0, late):
        launch(trace, at, 5)
    kernel(trace, 900, 5, COMMUNICATION)
    kernel(trace, late + 10, 5, COMPUTE)
    assert owners(tmp_path, trace) == {0: [900], late: [late + 10]}


def test_what_nothing_tells_apart_is_of_both(tmp_path):
    trace = TraceBuilder()
    filler(trace)
    for at in (0, 10):
        launch(trace, at, 5)
    kernel(trace, 200, 5, COMMUNICATION)
    kernel(trace, 300, 5, COMPUTE)
    assert owners(tmp_path, trace) == {0: [200, 300], 10: [200, 300]}


@pytest.mark.parametrize("correlation", [None, -1, 77])
def test_without_a_launch_an_event_is_missing(tmp_path, correlation):
    trace = TraceBuilder()
    launch(trace, 0, 5)
    kernel(trace, 100, 5)
    kernel(trace, 200, correlation)
    read_back = read(trace, tmp_path)
    index = Launches(read_back)
    assert started(read_back, index.missing) == [200]
    assert len(index.in_company) == 0


def test_nothing_at_all(tmp_path):
    trace = TraceBuilder()
    index = Launches(read(trace, tmp_path))
    assert len(index.inside(0, 0, 10)) == len(index.anywhere(0, 10)) == len(index.missing) == 0


def test_the_outermost_range_against_a_plain_search(tmp_path):
    dice = random.Random()
    for _ in range(50):
        trace = TraceBuilder()
        ranges = []
        for tid in (MAIN, AUTOGRAD):
            at = 0
            for _ in range(dice.randint(0, 8)):
                at += dice.randrange(20)
                length = dice.randint(3, 30)
                ranges.append((tid, at, at + length))
                if dice.random() < 0.5:  # one inside, with one edge in common or none
                    ranges.append((tid, at + dice.randint(0, 1), at + length - dice.randint(0, 1)))
                at += length
        dice.shuffle(ranges)
        for tid, start, end in ranges:
            trace.add("user_annotation", "r", start, end, tid)
        trace.op("aten::mm", 0, 1, MAIN)
        trace.op("aten::mm", 0, 1, AUTOGRAD)
        read_back = read(trace, tmp_path)
        lanes = {lane.tid: place for place, lane in enumerate(read_back.lanes)}
        cover = Outermost(read_back, np.flatnonzero(read_back.category == Category.ANNOTATION))
        for tid in (MAIN, AUTOGRAD):
            times = np.arange(0, 300)
            rows = cover.at(np.full(300, lanes[tid], np.int32), times * 1000)
            for time, row in zip(times.tolist(), rows.tolist(), strict=True):
                holding = [one for one in ranges if one[0] == tid and one[1] <= time < one[2]]
                if row < 0:
                    assert not holding
                    continue
                event = cover.events[row]
                start, end = read_back.start[event] // 1000, read_back.end[event] // 1000
                assert (tid, start, end) == max(holding, key=lambda one: one[2] - one[1])
