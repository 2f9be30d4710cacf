"""Annotated traces: still the same profile, valid whatever the source was, and right to the ns."""

import gzip
import itertools
import json
import random
from collections import defaultdict
from pathlib import Path

import pytest
import zstandard

import profiling
from profiling import splicing
from profiling.annotate import AnnotateError, annotate
from profiling.attribution import attribute
from profiling.files import open_trace
from profiling.ranges import Kind
from profiling.writing import WriteError
from tests.kineto import TraceBuilder, cpu_iteration, gpu_iteration

DATA = Path(__file__).parent / "data"
GPU = ["split", "late", "fused", "serialised"]
EXPERTS = "layers.0.mlp.experts"


def read(path):
    data = path.read_bytes()
    return json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)


def added(entry):
    """(slices, arrows, other metadata) that are ours."""
    ours = [event for event in entry["traceEvents"] if event.get("cat") == "overlap"]
    named = [event for event in entry["traceEvents"] if event["pid"] in {e["pid"] for e in ours}]
    return [e for e in ours if e["ph"] == "X"], [e for e in ours if e["ph"] in "sf"], named


def tracks(slices, entry):
    """Title of the track -> its slices."""
    titles = {
        (event["pid"], event["tid"]): event["args"]["name"]
        for event in entry["traceEvents"]
        if event["ph"] == "M" and event["name"] == "thread_name"
    }
    found = defaultdict(list)
    for one in slices:
        found[titles[one["pid"], one["tid"]]].append(one)
    return found


def originals(entry):
    """The events that are not ours, as the source has them."""
    own = {event["pid"] for event in entry["traceEvents"] if event.get("cat") == "overlap"}
    threads = {pid for pid in own if isinstance(pid, int) and pid >= 2_000_000_000}
    return [
        event
        for event in entry["traceEvents"]
        if event.get("cat") != "overlap" and event["pid"] not in threads
    ]


@pytest.mark.parametrize("variant", GPU)
def test_the_copy_is_the_same_profile_with_the_same_verdicts(tmp_path, variant):
    source = DATA / f"gpu_{variant}.pt.trace.json.gz"
    (done,) = annotate(source, tmp_path / "out.json")
    before, after = read(source), read(done.path)
    assert after.pop("annotatedBy") == "moe-trace"
    assert originals(after) == before["traceEvents"]
    assert {**after, "traceEvents": 0} == {**before, "traceEvents": 0}
    first, second = profiling.check(source), profiling.check(done.path)
    assert second.rows == first.rows
    assert second.exposed_ms == first.exposed_ms
    assert not done.notes


@pytest.mark.parametrize("variant", GPU)
def test_tracks_hold_the_figures(tmp_path, variant):
    """Summed over a track, hidden and exposed time are what the report has, to the nanosecond."""
    source = DATA / f"gpu_{variant}.pt.trace.json.gz"
    (done,) = annotate(source, tmp_path / "out.json.gz")
    entry = read(done.path)
    slices, _, _ = added(entry)
    assert done.slices == len(slices) > 0
    found = tracks(slices, entry)
    for row in profiling.check(source).rows:
        gathers = "gather" in row.check
        kind = "overlap::param_gather" if gathers else "overlap::grad_reduce"
        stage = f"under stage1.{'forward' if gathers else 'backward'}[{row.layer}]"

        def own(title, moves=(kind, f"{row.layer}.fc2_weight")):
            titles = [name for name in found if name.startswith(title)]
            each = [one for name in titles for one in found[name]]
            return [one for one in each if (one["args"]["kind"], one["args"]["name"]) == moves]

        hidden = sum(one["dur"] for one in own("hidden") if one["args"]["how"] == stage)
        exposed = sum(one["dur"] for one in own("exposed"))
        waits = sum(one["dur"] for one in own("compute waits"))
        transfers = {}
        for one in own("hidden") + own("exposed"):
            transfers[one["args"]["iteration"]] = one["args"]["transfer_us"]
        assert len(transfers) == row.occurrences
        assert hidden / sum(transfers.values()) == pytest.approx(row.hidden, abs=1e-6)
        assert exposed / row.occurrences / 1000 == pytest.approx(row.exposed_ms, abs=1e-6)
        assert waits / row.occurrences / 1000 == pytest.approx(row.wait_ms, abs=1e-6)


def cpu_run(folder, seed):
    """Two ranks whose collectives overlap each other and wait for late ranks."""
    random_ = random.Random(seed)
    for rank in range(2):
        trace = TraceBuilder(rank, 2, groups=((0, 1),))
        trace.metadata["baseTimeNanoseconds"] = 1_790_857_026_000_000_000
        for number in range(3):
            begin, length = random_.randint(1000, 1050), random_.randint(100, 400)
            gather = begin, begin + length
            cpu_iteration(trace, number, 1e6 + 2000 * number, gather=gather)
        trace.write(folder)


@pytest.mark.parametrize("seed", range(5))
def test_slices_of_a_track_never_overlap_and_arrows_have_two_ends(tmp_path, seed):
    cpu_run(tmp_path, seed)
    done = annotate(tmp_path, tmp_path / "out")
    assert [one.path.name for one in done] == [f"rank{n}.pt.trace.json" for n in range(2)]
    for one in done:
        entry = read(one.path)
        slices, ends, named = added(entry)
        assert slices
        by_track = defaultdict(list)
        for each in slices:
            by_track[each["pid"], each["tid"]].append((each["ts"], each["ts"] + each["dur"]))
        for when in by_track.values():
            when.sort()
            assert all(a[1] <= b[0] + 1e-6 for a, b in itertools.pairwise(when))
        starts = [end for end in ends if end["ph"] == "s"]
        finishes = {end["id"]: end for end in ends if end["ph"] == "f"}
        assert len(starts) == len(finishes) == one.arrows == 3
        assert len({start["id"] for start in starts}) == len(starts)
        for start in starts:
            finish = finishes[start["id"]]
            assert finish["bp"] == "e"
            assert start["ts"] < finish["ts"]
            assert enclosing(entry, start) == f"overlap::param_gather[{EXPERTS}.fc2_weight]"
            assert enclosing(entry, finish) == "gloo:all_gather"
        # Every process and track that is put in has a name and a place.
        for what, key in (("process", "pid"), ("thread", "tid")):
            for kind in ("name", "sort_index"):
                told = {e[key] for e in named if e["name"] == f"{what}_{kind}"}
                assert {e[key] for e in slices} <= told


def enclosing(entry, end):
    """The name of the innermost slice of the source that an arrow's end is in."""
    around = [
        event
        for event in originals(entry)
        if event["ph"] == "X"
        and (event["pid"], event["tid"]) == (end["pid"], end["tid"])
        and event["ts"] <= end["ts"] < event["ts"] + event["dur"]
    ]
    return min(around, key=lambda event: event["dur"])["name"]


@pytest.mark.parametrize("variant", GPU)
def test_arrows_of_real_traces_end_in_the_collectives_kernel(tmp_path, variant):
    (done,) = annotate(DATA / f"gpu_{variant}.pt.trace.json.gz", tmp_path / "out.json")
    entry = read(done.path)
    _, ends, _ = added(entry)
    (trace,) = profiling.load(done.path).traces
    assert done.arrows == len(ends) / 2 == len(attribute(trace).collectives)
    kernels = {enclosing(entry, end) for end in ends if end["ph"] == "f"}
    issues = {enclosing(entry, end).split("[")[0] for end in ends if end["ph"] == "s"}
    assert len(kernels) == 1
    assert issues == {Kind.PARAM_GATHER.value, Kind.GRAD_REDUCE.value}


def test_collectives_at_once_get_tracks_of_their_own(tmp_path):
    trace = TraceBuilder()
    gpu_iteration(trace, 0, 1e6, gather=(1000, 1300))
    at = 1e6
    trace.range(Kind.PARAM_GATHER, "other.fc2_weight", at + 31, at + 36)
    trace.kernel("ncclDevKernel_AllGather", at + 32, at + 1150, at + 1400, stream=21)
    (done,) = annotate(trace.write(tmp_path), tmp_path / "out.json")
    entry = read(done.path)
    found = tracks(added(entry)[0], entry)
    assert {title: [(s["ts"] - at, s["dur"]) for s in found[title]] for title in found} == {
        "hidden": [(1000, 100)],
        "exposed": [(1100, 200)],
        "exposed 2": [(1150, 250)],
    }


def test_communication_of_a_foreign_trace_has_its_tracks(tmp_path):
    trace = TraceBuilder()
    at = 1e6
    trace.kernel("void gemm()", at, at + 100, at + 1000)
    trace.kernel("ncclDevKernel_AllReduce", at + 5, at + 900, at + 1200, stream=21)
    (done,) = annotate(trace.write(tmp_path), tmp_path / "out.json")
    entry = read(done.path)
    slices, arrows, _ = added(entry)
    found = tracks(slices, entry)
    assert {title: [(s["ts"] - at, s["dur"]) for s in found[title]] for title in found} == {
        "hidden": [(900, 100)],
        "exposed": [(1000, 200)],
    }
    assert slices[0]["name"] == "ncclDevKernel_AllReduce under other compute"
    assert not arrows  # it has no range around its issue; the source's own arrows stay


def test_a_nanosecond_since_1970_survives(tmp_path):
    """Also where a float of absolute microseconds could not tell it from the next."""
    trace = TraceBuilder()
    trace.metadata["baseTimeNanoseconds"] = 1_790_857_026_000_000_000
    at = 117595555000.171
    trace.range(Kind.PARAM_GATHER, "a.fc2_weight", at, at + 5)
    trace.kernel("ncclDevKernel_AllGather", at + 1, at + 100.001, at + 200.003)
    (done,) = annotate(trace.write(tmp_path), tmp_path / "out.json")
    assert '"ts":117595555100.172,"dur":100.002' in done.path.read_text()
    trace.metadata.pop("baseTimeNanoseconds")
    (done,) = annotate(trace.write(tmp_path), tmp_path / "out.json")
    assert '"ts":117595555100.172,"dur":100.002' in done.path.read_text()


# Sources that are not sound


def spliced(text, tmp_path, events=(b'{"ph":"X","pid":1,"ts":1,"dur":1,"name":"new"}',)):
    path = tmp_path / "source.json"
    path.write_bytes(text)
    parts = []
    done = splicing.splice(open_trace(path), {"mark": 1}, events, parts.append)
    copy = json.loads(b"".join(parts))
    assert copy["mark"] == 1
    assert copy["traceEvents"][0]["name"] == "new"
    copy["traceEvents"] = copy["traceEvents"][1:]
    return copy, done


@pytest.fixture(params=[64, 1 << 22], ids=["small pieces", "one piece"])
def _pieces(request, monkeypatch):
    monkeypatch.setattr(splicing, "PIECE", request.param)


EVENTS = [
    {"ph": "X", "name": f"n{i} }} , {{", "pid": 1, "ts": i, "args": {"l": [{"name": 1}, {"id": 2}]}}
    for i in range(20)
]


@pytest.mark.usefixtures("_pieces")
def test_a_cut_anywhere_leaves_what_was_whole(tmp_path):
    text = json.dumps({"first": [{"a": 1}, {"b": 2}], "traceEvents": EVENTS, "last": {"c": [{}]}})
    head = text.index("[", text.index("traceEvents")) + 1
    end = text.index('], "last"')
    for cut in range(head, len(text) + 1):
        copy, done = spliced(text[:cut].encode(), tmp_path)
        whole = [
            event
            for event in EVENTS
            if head + len(json.dumps(EVENTS[: event["ts"] + 1])) - 2 <= cut
        ]
        assert copy["traceEvents"] == whole
        assert copy["first"] == [{"a": 1}, {"b": 2}]
        assert done.complete is (cut > end)
        lacks_brace = cut in (end + 1, len(text) - 1)  # and nothing else: it is put there
        assert done.metadata is (cut <= end or lacks_brace or cut == len(text))
        assert copy.get("last") == ({"c": [{}]} if cut >= len(text) - 1 else None)


@pytest.mark.usefixtures("_pieces")
@pytest.mark.parametrize(
    ("bad", "kept"),
    [
        (b'{"ph": "X", "name": "a\x01b", "ts": 1}', {"ph": "X", "name": "a\x01b", "ts": 1}),
        (b'{"ph": "X", "name": "\xff", "ts": 1}', {"ph": "X", "name": "\ufffd", "ts": 1}),
        (b'{"ph": "X", "dur": NaN}', None),
        (b'{"ph": "X", "dur": tru}', None),
        (b'{"ph": "X", "name": "\\q"}', None),
        (b"17", None),
        (b"null", None),
    ],
)
def test_an_event_that_is_no_json_is_mended_or_left_out(tmp_path, bad, kept):
    good = [json.dumps(event).encode() for event in EVENTS]
    for at in (0, 10, 20):
        events = [*good[:at], bad, *good[at:]]
        text = b'{"traceEvents": [' + b" ,\n".join(events) + b'], "last": 1}'
        copy, done = spliced(text, tmp_path)
        expected = [*EVENTS[:at], *([kept] if kept else []), *EVENTS[at:]]
        if bad in (b"17", b"null") or at < 20 or kept:
            assert copy["traceEvents"] == expected
            assert copy["last"] == 1
            assert done.dropped == (kept is None)
        else:  # nothing tells the end of a last event that is no JSON
            assert copy["traceEvents"] == EVENTS


@pytest.mark.usefixtures("_pieces")
@pytest.mark.parametrize(
    "text",
    [
        b"[%s]",
        b'{"traceEvents":[%s]}',
        b'\n{ "a": "x\x01", "traceEvents" : [ %s ] , "b": [{"ph": 1}, {"ph": 2}]}\n\n',
    ],
    ids=["a list", "nothing else", "control characters before, objects after"],
)
def test_forms_of_a_file(tmp_path, text):
    for events in ([], EVENTS[:1], EVENTS):
        inner = json.dumps(events).encode()[1:-1]
        copy, done = spliced(text.replace(b"%s", inner), tmp_path)
        assert copy["traceEvents"] == events
        assert done.complete
        if b"before" in text:
            assert copy["a"] == "x\x01"
        if b'"b"' in text:
            assert copy["b"] == [{"ph": 1}, {"ph": 2}]


def test_a_cut_profile_is_annotated_up_to_the_cut(tmp_path):
    data = gzip.decompress((DATA / "gpu_split.pt.trace.json.gz").read_bytes())
    source = tmp_path / "cut.json"
    source.write_bytes(data[: len(data) * 2 // 3])
    (done,) = annotate(source, tmp_path / "out.json.gz")
    assert any("cut off" in note for note in done.notes)
    assert read(done.path)["baseTimeNanoseconds"]
    before, after = profiling.load(source).traces[0], profiling.load(done.path).traces[0]
    assert len(before) == len(after)
    assert (before.start == after.start).all()


# Where it is written


def test_a_source_is_never_replaced(tmp_path):
    source = TraceBuilder().write(tmp_path)
    content = source.read_bytes()
    with pytest.raises(AnnotateError, match="is the profile itself"):
        annotate(source, source)
    with pytest.raises(AnnotateError, match="is the profile itself"):
        annotate(tmp_path, tmp_path)
    (tmp_path / "link.json").symlink_to(source)
    with pytest.raises(AnnotateError, match="is the profile itself"):
        annotate(source, tmp_path / "link.json")
    assert source.read_bytes() == content


def test_a_directory_is_made_and_zstd_becomes_gzip(tmp_path):
    trace = TraceBuilder()
    for number in range(2):
        gpu_iteration(trace, number, 1e6 + 2000 * number, gather=(150, 650))
    source = tmp_path / "rank0.json.zst"
    source.write_bytes(zstandard.compress(trace.text().encode()))
    (done,) = annotate(source, tmp_path / "new" / "out")
    assert done.path == tmp_path / "new" / "out" / "rank0.json.gz"
    assert profiling.check(done.path).rows == profiling.check(source).rows


def test_several_files_need_a_directory(tmp_path):
    cpu_run(tmp_path, 0)
    with pytest.raises(AnnotateError, match="has 2: name a directory"):
        annotate(tmp_path, tmp_path / "out.json")


def test_an_annotated_profile_is_refused(tmp_path):
    (done,) = annotate(DATA / "gpu_split.pt.trace.json.gz", tmp_path / "out.json")
    with pytest.raises(AnnotateError, match="annotated already"):
        annotate(done.path, tmp_path / "again.json")


def test_what_fails_leaves_nothing_behind(tmp_path, monkeypatch):
    out = tmp_path / "new" / "out.json"
    out.parent.mkdir()
    out.write_text("before")

    def fails(*_):
        raise OSError("disk full")

    monkeypatch.setattr("profiling.annotate.splice", fails)
    with pytest.raises(WriteError, match="cannot be written: disk full"):
        annotate(DATA / "gpu_split.pt.trace.json.gz", out)
    assert [path.name for path in out.parent.iterdir()] == ["out.json"]
    assert out.read_text() == "before"
