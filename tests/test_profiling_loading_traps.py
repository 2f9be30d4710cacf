"""Every trap of real traces that loading has to get right: a right figure or one sentence."""

import copy
import itertools
import json
import random

import numpy as np
import pytest

from profiling import decoding
from profiling.loading import LoadError, load, load_trace
from profiling.trace import Category
from tests.kineto import ALL_GATHER, COMMUNICATION, MAIN, TraceBuilder, gpu_iteration


def sample(rank=0, base=1e6, **kwargs):
    trace = TraceBuilder(rank, **kwargs)
    for number in range(3):
        gpu_iteration(trace, number, base + 2000 * number, gather=(150, 650))
    return trace


def rows(trace):
    """What the events are, whatever order they are in."""
    return sorted(
        (
            int(trace.start[event]),
            int(trace.end[event]),
            trace.names[trace.name[event]],
            int(trace.category[event]),
            str(trace.lanes[trace.lane[event]]),
            int(trace.device[event]),
            int(trace.stream[event]),
            int(trace.correlation[event]),
        )
        for event in range(len(trace))
    )


def write(folder, events, name="rank0.json", **metadata):
    path = folder / name
    path.write_text(json.dumps({"traceEvents": events, **metadata}))
    return path


# Pairs


def as_pairs(events, nameless_ends=False):
    """The same events as pairs of ph B and E, in order of time as tracers write them."""
    halves = []
    for event in events:
        begin = {key: value for key, value in event.items() if key != "dur"} | {"ph": "B"}
        end = {"ph": "E", "pid": event["pid"], "tid": event["tid"]}
        end["ts"] = event["ts"] + event["dur"]
        if not nameless_ends:
            end |= {"name": event["name"], "cat": event["cat"]}
        halves.append((begin["ts"], 1, -event["dur"], begin))
        halves.append((end["ts"], 0, event["dur"], end))
    halves.sort(key=lambda half: half[:3])
    return [half[3] for half in halves]


@pytest.mark.parametrize("nameless", [False, True], ids=["named ends", "nameless ends"])
def test_pairs_of_begin_and_end_are_whole_events(tmp_path, nameless):
    trace = sample()
    trace.op("aten::outer", 1e6 + 100, 1e6 + 500)
    trace.op("aten::inner", 1e6 + 200, 1e6 + 300)
    whole = load_trace(trace.write(tmp_path, "whole.json"))
    paired = load_trace(write(tmp_path, as_pairs(trace.events, nameless), "pairs.json"))
    assert rows(paired) == rows(whole)
    assert paired.notes == ()


def test_pairs_do_not_depend_on_their_order_in_the_file(tmp_path):
    trace = sample()
    whole = load_trace(trace.write(tmp_path, "whole.json"))
    # Of halves at the same instant their order says which is first.
    instants = [
        list(group)
        for _, group in itertools.groupby(as_pairs(trace.events), key=lambda half: half["ts"])
    ]
    random.Random(5).shuffle(instants)
    events = [half for instant in instants for half in instant]
    assert rows(load_trace(write(tmp_path, events))) == rows(whole)


def test_halves_without_the_other_are_dropped_and_counted(tmp_path):
    lane = {"cat": "cpu_op", "pid": 1, "tid": MAIN}
    events = [
        {"ph": "B", "name": "outer", "ts": 10, **lane},
        {"ph": "B", "name": "never closed", "ts": 20, **lane},
        {"ph": "E", "name": "never opened", "ts": 25, **lane},
        {"ph": "E", "name": "outer", "ts": 30, **lane},
        {"ph": "B", "name": "cut off", "ts": 40, **lane},
    ]
    loaded = load_trace(write(tmp_path, events))
    assert [row[:3] for row in rows(loaded)] == [(10_000, 30_000, "outer")]
    (note,) = loaded.notes
    assert note == (
        "3 events dropped: half of a pair (ph B and E) without the other; "
        "the first is 'never closed'"
    )


def test_pairs_of_a_category_that_is_not_read_close_their_own(tmp_path):
    lane = {"pid": 1, "tid": MAIN}
    events = [
        {"ph": "B", "cat": "cpu_op", "name": "aten::mm", "ts": 10, **lane},
        {"ph": "B", "cat": "python_function", "name": "f", "ts": 12, **lane},
        {"ph": "E", "ts": 14, **lane},
        {"ph": "E", "ts": 30, **lane},
    ]
    loaded = load_trace(write(tmp_path, events))
    assert [row[:3] for row in rows(loaded)] == [(10_000, 30_000, "aten::mm")]
    assert loaded.notes == ()


def test_other_phases_are_no_work(tmp_path):
    """Flows, instants, counters and asynchronous pairs have no time of their own."""
    trace = sample()
    whole = load_trace(trace.write(tmp_path, "whole.json"))
    other = {"pid": 1, "tid": MAIN, "ts": 1e6 + 5, "id": 1}
    events = [
        *trace.events,
        *({"ph": ph, "cat": "ac2g", "name": "ac2g", **other} for ph in "stf"),
        *({"ph": ph, "cat": "fwdbwd", "name": "fwdbwd", **other} for ph in "be"),
        {"ph": "i", "name": "Record Window End", **other},
        {"ph": "C", "name": "memory", "args": {"bytes": 5}, **other},
    ]
    loaded = load_trace(write(tmp_path, events))
    assert rows(loaded) == rows(whole)
    assert loaded.notes == ()
    odd = {"ph": "b", "cat": "kernel", "name": "gemm", **other}
    loaded = load_trace(write(tmp_path, [*events, odd]))
    assert rows(loaded) == rows(whole)
    assert loaded.notes == (
        "1 event dropped: of a phase (b) that says no duration; the first is 'gemm'",
    )


# Duplicates


def test_events_written_twice_count_once(tmp_path):
    trace = sample()
    whole = load_trace(trace.write(tmp_path, "whole.json"))
    twice = trace.events + copy.deepcopy(trace.events[::2])
    loaded = load_trace(write(tmp_path, twice))
    assert rows(loaded) == rows(whole)
    lost = len(trace.events[::2])
    assert loaded.notes == (
        f"{lost} events dropped: written twice; the first is {trace.events[0]['name']!r}",
    )


@pytest.mark.parametrize(
    "change",
    [
        {"args": {"correlation": 78}},
        {"args": {"External id": 8}},
        {"args": {"stream": 8}},
        {"args": {"Collective name": "_allgather_base", "In msg nelems": 5}},
        {"ts": 10.001},
        {"dur": 1.001},
        {"tid": 8},
        {"name": "tinier"},
    ],
    ids=str,
)
def test_tiny_events_that_differ_in_anything_are_two(tmp_path, change):
    args = {"correlation": 77, "External id": 7, "device": 0, "stream": 7}
    event = {"ph": "X", "cat": "kernel", "name": "tiny", "pid": 0, "tid": 7, "ts": 10.0, "dur": 1.0}
    other = event | change | {"args": args | change.get("args", {})}
    loaded = load_trace(write(tmp_path, [event | {"args": args}, other]))
    assert len(loaded) == 2
    assert loaded.notes == ()


def test_kernels_of_one_graph_launch_share_a_correlation_and_all_count(tmp_path):
    trace = TraceBuilder()
    trace.kernel("gemm", 10, 20, 30)
    launched = trace.events[-1]
    trace.events += [launched | {"ts": ts, "dur": 10} for ts in (30, 40)]
    trace.events.append(launched | {"tid": 8, "args": launched["args"] | {"stream": 8}})
    loaded = load_trace(trace.write(tmp_path))
    assert int((loaded.category == Category.KERNEL).sum()) == 4
    assert loaded.notes == ()


# Times


@pytest.mark.parametrize("digits", ["integers", "nanoseconds", "strings"])
def test_timestamps_in_every_form_give_the_same_times(tmp_path, digits):
    trace = sample()
    whole = load_trace(trace.write(tmp_path, "whole.json"))
    form = {"integers": int, "nanoseconds": float, "strings": lambda us: f"{us:.3f}"}[digits]
    events = [
        event | {"ts": form(event["ts"]), "dur": form(event["dur"])} for event in trace.events
    ]
    loaded = load_trace(write(tmp_path, events))
    assert rows(loaded) == rows(whole)
    assert loaded.notes == ()


def test_kernels_below_a_microsecond_keep_their_length(tmp_path):
    trace = TraceBuilder()
    for number in range(499):
        trace.kernel("tiny", 10 + number, 5e12 + 2 * number, 5e12 + 2 * number + 0.9)
    loaded = load_trace(trace.write(tmp_path))
    kernels = loaded.category == Category.KERNEL
    # A float of 5e12 microseconds has steps of one nanosecond.
    assert np.abs((loaded.end - loaded.start)[kernels] - 900).max() <= 1


BAD = {
    "missing dur": ({"dur": None}, "a time that is not a number"),
    "no dur": ({}, "without a start and a duration of at least 0"),
    "negative dur": ({"dur": -1}, "without a start and a duration of at least 0"),
    "NaN dur": ({"dur": float("nan")}, "without a start and a duration of at least 0"),
    "absurd dur": ({"dur": 9e15}, "longer than a day, or in another century"),
    "time in words": ({"dur": 5, "ts": "soon"}, "a time that is not a number"),
    "a number with 400 digits": ({"dur": 10**400}, "a time that is not a number"),
    "time 0": ({"dur": 5, "ts": 0}, "at time 0, days before the others"),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_kernel_with_an_impossible_time_is_named_and_costs_nothing_else(tmp_path, kind):
    change, reason = BAD[kind]
    trace = sample(base=1e15)
    whole = load_trace(trace.write(tmp_path, "whole.json"))
    bad = {"ph": "X", "cat": "kernel", "name": "bad kernel", "pid": 0, "tid": 7, "ts": 1e15 + 5}
    bad |= {"args": {"device": 0, "stream": 7}} | change
    profile = load(write(tmp_path, [*trace.events, bad]))
    assert rows(profile.traces[0]) == rows(whole)
    (note,) = profile.notes
    assert note == f"rank 0 (rank0.json): 1 event dropped: {reason}; the first is 'bad kernel'"


def test_time_0_and_duration_0_are_fine_where_the_clock_starts_there(tmp_path):
    trace = sample(base=0)
    trace.op("aten::empty", 0, 0)
    loaded = load_trace(trace.write(tmp_path))
    assert len(loaded) == len(trace.events)
    assert loaded.notes == ()


# Text


def test_missing_arguments_are_unknown_values(tmp_path):
    events = [
        {"ph": "X", "cat": "kernel", "name": "gemm", "ts": 10, "dur": 5},
        {"ph": "X", "cat": "kernel", "name": "gemm", "ts": 20, "dur": 5, "args": None},
        {"ph": "X", "cat": "kernel", "ts": 30, "dur": 5, "args": {"stream": None}},
    ]
    loaded = load_trace(write(tmp_path, events))
    assert (
        loaded.device.tolist() == loaded.stream.tolist() == loaded.correlation.tolist() == [-1] * 3
    )
    assert loaded.notes == ()


def test_control_characters_and_halves_of_surrogates_in_names(tmp_path):
    trace = TraceBuilder()
    trace.op("aten::mm", 10, 20)
    text = trace.text()
    for raw in ("\x00", "\x1f", "\n", "\\ud800"):
        path = tmp_path / "a.json"
        path.write_text(text.replace("aten::mm", f"aten::{raw}mm"))
        loaded = load_trace(path)
        assert len(loaded) == 1
        loaded.names[0].encode()  # can be printed


def test_metadata_may_follow_the_events(tmp_path):
    trace = sample(3, world_size=8)
    before = load_trace(trace.write(tmp_path, "before.json"))
    after = load_trace(write(tmp_path, trace.events, "after.json", **trace.metadata))
    assert (after.rank, after.world_size) == (before.rank, before.world_size) == (3, 8)
    assert after.metadata == before.metadata


def test_a_byte_order_mark_is_no_text(tmp_path):
    path = tmp_path / "a.json"
    path.write_bytes(b"\xef\xbb\xbf" + sample().text().encode())
    assert len(load_trace(path)) == len(sample().events)


@pytest.mark.parametrize(
    ("old", "new"),
    [("kernel", "Kernel"), ("cuda_runtime", "Runtime"), ("cuda_runtime", "hip_runtime")],
)
def test_categories_of_old_and_amd_traces(tmp_path, old, new):
    trace = sample()
    whole = load_trace(trace.write(tmp_path, "whole.json"))
    events = [event | {"cat": event["cat"].replace(old, new)} for event in trace.events]
    assert rows(load_trace(write(tmp_path, events))) == rows(whole)


def test_spans_on_the_device_are_not_work(tmp_path):
    trace = sample()
    whole = load_trace(trace.write(tmp_path, "whole.json"))
    trace.kernel(ALL_GATHER, 1, 2, 3, stream=COMMUNICATION, category="gpu_user_annotation")
    del trace.events[-2]  # its launch
    assert rows(load_trace(trace.write(tmp_path))) == rows(whole)


def test_what_is_not_json_names_the_file(tmp_path):
    path = tmp_path / "report.json"
    path.write_text('{"traceEvents": "none"}')
    with pytest.raises(LoadError, match=r"report\.json is not a PyTorch profiler trace: .*"):
        load(path)


def test_damage_before_an_event_longer_than_a_piece_costs_one_event(tmp_path, monkeypatch):
    trace = sample()
    trace.op("aten::mm", 1e6, 1e6 + 5)
    trace.op("aten::cat", 1e6, 1e6 + 5, dims=[[[1] * 5000]])
    text = trace.text()
    damaged = text.replace('"aten::mm",', '"aten::mm"')
    assert damaged != text
    monkeypatch.setattr(decoding, "PIECE", 600)
    path = tmp_path / "a.json"
    path.write_text(damaged)
    loaded = load_trace(path)
    assert len(loaded) == len(trace.events) - 1
    assert loaded.complete
    assert loaded.notes == ("1 event dropped: not JSON; the first is 'aten::mm'",)


@pytest.mark.parametrize("key", ["device", "inDevice"])
def test_a_copy_between_peers_is_on_the_device_that_it_names(tmp_path, key):
    built = TraceBuilder()
    built.kernel("Memcpy PtoP (Device -> Device)", 10, 20, 30, device=3, category="gpu_memcpy")
    args = built.events[-1]["args"]
    args |= {key: args.pop("device"), "fromDevice": 1}
    trace = load_trace(built.write(tmp_path))
    assert trace.device[trace.category == Category.MEMCPY].tolist() == [3]


def test_a_text_that_begins_with_a_bracket_is_no_trace(tmp_path):
    file = tmp_path / "setup.json"
    file.write_text("[metadata]\nname = x\n")
    with pytest.raises(LoadError, match="is not a PyTorch profiler trace"):
        load_trace(file)
    file.write_text('[\n {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 1, "dur": 2}\n]')
    assert len(load_trace(file)) == 1
