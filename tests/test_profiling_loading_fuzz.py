"""Whatever is done to a trace's bytes or values: a sound profile or one sentence, no traceback."""

import gzip
import json
from unittest import mock

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

import profiling
from profiling import decoding
from profiling.loading import LoadError, load
from profiling.trace import Category, Profile
from tests.kineto import TraceBuilder, cpu_iteration, gpu_iteration


def sample():
    trace = TraceBuilder(1, world_size=2, groups=((0, 1),))
    for number in range(2):
        cpu_iteration(trace, number, 1e6 + 2000 * number, gather=(150, 650))
    args = {"Collective name": "_allgather_base", "Process Group Ranks": "[0, 1]", "Group size": 2}
    gpu_iteration(trace, 2, 1e6 + 4000, gather=(150, 650), **args)
    trace.events += [
        {"ph": "B", "cat": "cpu_op", "name": "aten::relu", "pid": 1, "tid": 100, "ts": 8e6},
        {"ph": "E", "pid": 1, "tid": 100, "ts": 9e6},
        {"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "python"}},
        {"ph": "i", "name": "Record Window End", "pid": "", "tid": "", "ts": 9e6},
    ]
    return trace


TRACE = sample()
TEXT = json.dumps(
    {
        **TRACE.metadata,
        "traceEvents": TRACE.events,
        "baseTimeNanoseconds": 1_790_000_000_000_000_000,
    }
).encode()
PACK = {"plain": bytes, "gzip": gzip.compress, "zstd": zstandard.ZstdCompressor().compress}

places = st.floats(0, 1, exclude_max=True)
edits = st.one_of(
    st.tuples(st.just("cut"), places),
    st.tuples(st.just("flip"), places, st.integers(1, 255)),
    st.tuples(st.just("delete"), places, st.integers(1, 300)),
    st.tuples(st.just("insert"), places, st.binary(min_size=1, max_size=8)),
    st.tuples(st.just("repeat"), places, st.integers(1, 300)),
)


def edited(data, edit):
    kind, place, *what = edit
    at = int(place * len(data))
    before, after = data[:at], data[at:]
    if kind == "cut":
        return before
    if kind == "insert":
        return before + what[0] + after
    if kind == "delete":
        return before + after[what[0] :]
    if kind == "repeat":
        return before + after[: what[0]] + after
    return before + bytes([after[0] ^ what[0]]) + after[1:] if after else before


def look(path):
    """Load and judge; what comes of it is sound."""
    try:
        profile = load(path)
    except LoadError as error:
        said = str(error)
    else:
        return sound(profile)
    assert str(path) in said
    assert "\n" not in said
    return None


def sound(profile):
    assert isinstance(profile, Profile)
    for trace in profile.traces:
        columns = (trace.end, trace.name, trace.category, trace.lane, trace.device, trace.stream)
        assert all(len(column) == len(trace) for column in columns)
        assert (trace.end >= trace.start).all()
        assert np.isin(trace.category, list(Category)).all()
        assert all(0 <= event < len(trace) for event in trace.details)
        if len(trace):
            assert 0 <= trace.name.min() <= trace.name.max() < len(trace.names)
            assert 0 <= trace.lane.min() <= trace.lane.max() < len(trace.lanes)
        assert trace.complete or trace.notes
        "".join((*trace.names, *trace.notes)).encode()  # can be printed
    profiling.check(profile)
    return profile


def test_undamaged_it_is_read_whole(tmp_path):
    path = tmp_path / "a.json"
    path.write_bytes(TEXT)
    (trace,) = look(path).traces
    assert len(trace) == sum(event["ph"] in "XB" for event in TRACE.events)
    assert trace.complete
    assert trace.notes == ()


@pytest.mark.parametrize("pack", PACK)
@pytest.mark.parametrize("piece", [decoding.PIECE, 700], ids=["one piece", "many pieces"])
@settings(max_examples=150, deadline=None)
@given(changes=st.lists(edits, min_size=1, max_size=4))
def test_any_damage_to_the_bytes(tmp_path_factory, pack, piece, changes):
    path = tmp_path_factory.mktemp("fuzz") / "a.json"
    data = PACK[pack](TEXT)
    for change in changes:
        data = edited(data, change)
    path.write_bytes(data)
    with mock.patch.object(decoding, "PIECE", piece):
        look(path)


@settings(max_examples=60, deadline=None)
@given(place=places)
def test_any_cut_keeps_what_is_before_it(tmp_path_factory, place):
    path = tmp_path_factory.mktemp("cut") / "a.json"
    first = TEXT.index(b"[", TEXT.index(b"traceEvents"))
    last = TEXT.index(b', "baseTime')
    at = first + 1 + int(place * (last - first - 1))
    path.write_bytes(TEXT[:at])
    profile = look(path)
    (trace,) = profile.traces
    assert not trace.complete
    whole = json.loads(TEXT)["traceEvents"]
    before = [event for event in whole if json.dumps(event).encode() in TEXT[:at]]
    # Every event that ended before the cut is there; of pairs, those with both halves.
    assert len(trace) >= sum(event["ph"] == "X" for event in before)


# Any JSON value where another was

values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from(["X", "B", "E", "M", "kernel", "cpu_op", "", "rank1", "[0, 1]", "[", "NaN"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=4,
)
keys = st.sampled_from(
    ["ph", "cat", "name", "pid", "tid", "ts", "dur", "args"]
    + [field.encode_name for field in decoding._FIELDS]
    + ["distributedInfo", "baseTimeNanoseconds", "rank", "world_size", "pg_config", "ranks"]
)


@settings(max_examples=300, deadline=None)
@given(
    changes=st.lists(
        st.tuples(st.integers(-1, len(TRACE.events) - 1), keys, values), min_size=1, max_size=4
    )
)
def test_any_value_anywhere(tmp_path_factory, changes):
    path = tmp_path_factory.mktemp("values") / "a.json"
    trace = json.loads(TEXT)
    for place, key, value in changes:
        target = trace if place < 0 else trace["traceEvents"][place]
        if key in ("rank", "world_size", "pg_config", "ranks"):
            target = trace.get("distributedInfo") if place < 0 else target.get("args")
            if place < 0 and key == "ranks" and isinstance(target, dict):
                group = (target.get("pg_config") or [None])[0]
                target = group if isinstance(group, dict) else None
        elif place >= 0 and key not in ("ph", "cat", "name", "pid", "tid", "ts", "dur", "args"):
            target = target.get("args")
        if isinstance(target, dict):
            target[key] = value
    path.write_text(json.dumps(trace))
    look(path)
