"""Loading: formats, where ranks come from, damaged files; the two decoders agree."""

import gzip
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import zstandard

from profiling import decoding
from profiling.loading import LoadError, load, load_trace
from profiling.trace import Category, Details
from tests.kineto import TraceBuilder, cpu_iteration, gpu_iteration

TRACES = Path(__file__).parents[2] / "shared" / "traces"


PACK = {".json": bytes, ".gz": gzip.compress, ".zst": zstandard.ZstdCompressor().compress}


def sample(rank=0, **kwargs):
    trace = TraceBuilder(rank, **kwargs)
    for number in range(20):
        cpu_iteration(trace, number, 1e6 + 2000 * number, gather=(150, 650))
        gpu_iteration(trace, number, 2e6 + 2000.25 * number, gather=(150, 650))
    return trace


def columns(trace):
    return {
        "start": trace.start.tolist(),
        "end": trace.end.tolist(),
        "name": [trace.names[index] for index in trace.name],
        "category": trace.category.tolist(),
        "lane": [trace.lanes[index] for index in trace.lane],
        "device": trace.device.tolist(),
        "stream": trace.stream.tolist(),
        "correlation": trace.correlation.tolist(),
        "details": trace.details,
        "metadata": trace.metadata,
    }


def expected(trace):
    """The columns, straight from the builder's events."""
    events = trace.events
    times = [(round(event["ts"] * 1000), round(event["dur"] * 1000)) for event in events]
    return {
        "start": [start for start, _ in times],
        "end": [start + duration for start, duration in times],
        "name": [event["name"] for event in events],
        "lane": [(event["pid"], event["tid"]) for event in events],
        "device": [event["args"].get("device", -1) for event in events],
        "correlation": [event["args"].get("correlation", -1) for event in events],
    }


@pytest.mark.parametrize("name", ["a.json", "a.json.gz", "a.pt.trace.json.gz", "a.json.zst"])
def test_every_event_arrives_with_its_columns(tmp_path, name):
    trace = sample()
    path = tmp_path / name
    path.write_bytes(PACK[path.suffix](trace.text().encode()))
    loaded = load_trace(path)
    assert loaded.complete
    got = columns(loaded)
    for column, values in expected(trace).items():
        assert got[column] == values, column
    assert loaded.notes == ()
    assert loaded.metadata == trace.metadata


@pytest.mark.parametrize("indent", [None, 0, 2], ids=["compact", "lines", "indented"])
@pytest.mark.parametrize("piece", [600, 5000], ids=["tiny-pieces", "some-pieces"])
def test_pieces_change_nothing(tmp_path, monkeypatch, piece, indent):
    trace = sample()
    # An argument that looks like the border between two events, and one like the end of the list.
    trace.add("cpu_op", "},{]}", 5e6, 5e6 + 1, 1, odd=[{"ph": 1}, {"ph": 2}], x=[{"a": [{}]}])
    path = tmp_path / "a.json"
    entry = {"traceEvents": trace.events, "after": [{"name": 1}, {"name": 2}], **trace.metadata}
    path.write_text(json.dumps(entry, indent=indent))
    whole = columns(load_trace(path))
    monkeypatch.setattr(decoding, "PIECE", piece)
    assert columns(load_trace(path)) == whole
    assert len(whole["start"]) == len(trace.events)
    assert whole["metadata"]["after"] == entry["after"]


def test_the_slow_decoder_agrees_with_the_typed_one(tmp_path, monkeypatch):
    path = sample().write(tmp_path)
    monkeypatch.setattr(decoding, "PIECE", 5000)
    typed = columns(load_trace(path))
    monkeypatch.setattr(decoding, "_decode", lambda piece: None)
    assert columns(load_trace(path)) == typed


def test_a_bare_list_of_events(tmp_path):
    trace = sample()
    path = tmp_path / "rank3.json"
    path.write_text(json.dumps(trace.events))
    loaded = load_trace(path)
    assert len(loaded) == len(trace.events)
    assert loaded.rank == 3


def test_nanoseconds_count_from_the_files_base_time(tmp_path):
    trace = TraceBuilder()
    trace.metadata["baseTimeNanoseconds"] = 1_790_857_026_000_000_000
    trace.op("aten::mm", 5110381546344.740, 5110381546344.740 + 0.9)
    loaded = load_trace(trace.write(tmp_path))
    assert loaded.start[0] == 1_790_857_026_000_000_000 + 5110381546344740
    assert abs(loaded.end[0] - loaded.start[0] - 900) <= 1


def test_thread_names_of_metadata_events(tmp_path):
    trace = sample()
    trace.events.append(
        {"ph": "M", "name": "thread_name", "pid": 1, "tid": 200, "args": {"name": "pt_gloo"}}
    )
    loaded = load_trace(trace.write(tmp_path))
    assert [loaded.thread_names[i] for i, lane in enumerate(loaded.lanes) if lane.tid == 200] == [
        "pt_gloo"
    ]


DAMAGE = {
    "time as text": ('"ts": 1000000.0', '"ts": "1000000.0"', 0),
    "control character in a name": ("aten::mm", "aten\x01::mm", 0),
    "not UTF-8": ("aten::mm", "aten\udcff::mm", 0),
    "NaN duration": ('"dur": 2000.0', '"dur": NaN', 20),
    "negative duration": ('"dur": 2000.0', '"dur": -5', 20),
    "absurd duration": ('"dur": 2000.0', '"dur": 9e15', 20),
    "no duration": ('"dur": 2000.0', '"gone": 1', 20),
    "null arguments": ('"args": {}', '"args": null', 0),
    "no JSON": ('"ts": 1000000.0,', '"ts": 1000000.0 1,', 4),
    "time that is none": ('"ts": 1000000.0', '"ts": "soon"', 4),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_costs_only_the_events_it_hits_and_is_reported(tmp_path, kind):
    trace = TraceBuilder()
    for number in range(20):
        cpu_iteration(trace, number, 1e6 + 2000 * number, gather=(150, 650))
    old, new, lost = DAMAGE[kind]
    text = trace.text()
    assert old in text
    path = tmp_path / "a.json"
    path.write_bytes(text.replace(old, new).encode("utf-8", "surrogateescape"))
    loaded = load_trace(path)
    if kind in ("no JSON", "time that is none"):
        lost = text.count(old)
    assert len(loaded) == len(trace.events) - lost
    assert loaded.rank == 0
    if lost:
        assert loaded.notes[0].startswith(f"{lost} event{'s' * (lost > 1)} dropped: ")
    else:
        assert loaded.notes == ()


def test_compression_is_told_by_the_first_bytes(tmp_path):
    """Files get renamed: a .json that is gzip, a .gz that is zstd or not compressed at all."""
    text = sample().text().encode()
    for name, pack in (("a.json", gzip.compress), ("b.json.gz", PACK[".zst"]), ("c.gz", bytes)):
        path = tmp_path / name
        path.write_bytes(pack(text))
        assert columns(load_trace(path)) == columns(load_trace(sample().write(tmp_path, "s.json")))


def test_several_members_or_frames_are_one_file(tmp_path):
    """As bgzip and zstd's parallel mode write them; zeros behind them are padding."""
    text = sample().text().encode()
    for pack, padding in ((gzip.compress, b"\0" * 512), (PACK[".zst"], b"")):
        path = tmp_path / "a.json"
        path.write_bytes(pack(text[:999]) + pack(text[999:5000]) + pack(text[5000:]) + padding)
        loaded = load_trace(path)
        assert len(loaded) == len(sample().events)
        assert loaded.notes == ()


@pytest.mark.parametrize("pack", PACK.values(), ids=PACK)
def test_a_truncated_file_is_read_up_to_the_cut_and_says_so(tmp_path, pack):
    trace = sample()
    path = tmp_path / "a.json"
    # Compressors write in blocks, so that a short file has none before its end.
    text = trace.text().encode()
    half = len(text) // 2
    data = pack(text) if pack is bytes else pack(text[:half]) + pack(text[half:])
    path.write_bytes(data[: len(data) * 2 // 3])
    loaded = load_trace(path)
    assert 0 < len(loaded) < len(trace.events)
    assert columns(loaded)["start"] == expected(trace)["start"][: len(loaded)]
    assert not loaded.complete
    assert "cut off" in loaded.notes[0]
    assert loaded.metadata == trace.metadata, "what stands before the events is kept"


def test_text_behind_the_trace_is_not_read_and_says_so(tmp_path):
    trace = sample()
    path = tmp_path / "a.json"
    events = json.dumps(json.loads(trace.text())["traceEvents"])
    whole = '{"traceEvents": ' + events
    cases = {
        trace.text() + "\n" + trace.text(): trace.text()[:30],  # two files in one
        events + " ]": "]",
        whole + ', "distributedInfo": {"rank"': ', "distributedInfo": {"rank"',  # cut off
    }
    for text, unread in cases.items():
        path.write_text(text)
        loaded = load_trace(path)
        assert len(loaded) == len(trace.events)
        (note,) = loaded.notes
        assert "no part of the trace" in note
        assert unread in note.replace("\\n", "\n")
    for text in (trace.text() + " \n", events, whole + "}"):
        path.write_text(text)
        assert load_trace(path).notes == ()


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_damaged_compression_is_read_up_to_the_damage_and_says_so(tmp_path, suffix):
    trace = sample()
    text = trace.text().encode()
    half = len(text) // 2
    pack = PACK[suffix]
    path = tmp_path / "a.json"
    broken = bytearray(pack(text[half:]))
    broken[2:] = b"\xff" * (len(broken) - 2)
    path.write_bytes(pack(text[:half]) + bytes(broken))
    loaded = load_trace(path)
    assert 0 < len(loaded) < len(trace.events)
    assert not loaded.complete
    assert "damaged" in loaded.notes[0]
    path.write_bytes(pack(text)[:4] + b"\xff" * 500)
    with pytest.raises(LoadError, match=r"a\.json cannot be read"):
        load(path)


def test_a_wrong_checksum_marks_the_trace_incomplete(tmp_path):
    """All of the text is there, but nobody can say that it is what was written."""
    path = tmp_path / "a.json.gz"
    data = bytearray(gzip.compress(sample().text().encode()))
    data[-8] ^= 1
    path.write_bytes(data)
    loaded = load_trace(path)
    assert len(loaded) == len(sample().events)
    assert not loaded.complete
    assert "damaged" in loaded.notes[0]


def test_no_events_is_a_trace(tmp_path):
    loaded = load_trace(TraceBuilder().write(tmp_path))
    assert len(loaded) == 0
    assert loaded.notes == ()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "no list of traceEvents"),
        (b"hello", "no list of traceEvents"),
        (b'{"a": 1}', "no list of traceEvents"),
        (b'{"traceEvents": 5}', "no list of traceEvents"),
    ],
)
def test_what_is_no_trace_is_refused_by_name(tmp_path, content, message):
    path = tmp_path / "a.json"
    path.write_bytes(content)
    with pytest.raises(LoadError, match=rf"a\.json is not a PyTorch profiler trace: .*{message}"):
        load(path)


def test_wrong_paths(tmp_path):
    with pytest.raises(LoadError, match="nowhere does not exist"):
        load(tmp_path / "nowhere")
    with pytest.raises(LoadError, match="holds no trace"):
        load(tmp_path)
    (tmp_path / "a.txt").write_text("")
    with pytest.raises(LoadError, match="matches no trace"):
        load(tmp_path / "*.txt")
    with pytest.raises(LoadError, match="no path"):
        load([])


def test_reading_imports_no_torch(tmp_path):
    path = sample().write(tmp_path)
    code = (
        "import sys, profiling.cli; profiling.cli.main(sys.argv[1:]); print('torch' in sys.modules)"
    )
    run = [sys.executable, "-c", code, "check", str(path)]
    assert subprocess.run(run, capture_output=True, text=True).stdout.endswith("False\n")


@pytest.mark.skipif(not TRACES.is_dir(), reason="the public traces are not on this machine")
@pytest.mark.parametrize(
    ("name", "kernels", "rank"),
    [
        ("a100_nccl_rank0.json.gz", 2700, 0),
        ("mi300_resnet_rccl.json.gz", 2995, 0),
        ("sampled_rank-1.json.gz", 1104, 1),
        ("cpu_only_rank-34.json.gz", 0, 34),
        ("mi250_minitoy.json.gz", 14, None),
    ],
)
def test_public_traces(name, kernels, rank):
    loaded = load_trace(TRACES / name)
    assert int((loaded.category == Category.KERNEL).sum()) == kernels
    assert loaded.rank == rank
    assert loaded.notes == ()
    with gzip.open(TRACES / name) as file:
        events = json.load(file)["traceEvents"]
    durations = [event["dur"] for event in events if event.get("cat") == "kernel"]
    chosen = loaded.category == Category.KERNEL
    assert np.allclose((loaded.end - loaded.start)[chosen], np.array(durations) * 1000, atol=1)


STRANGE = {
    "device out of range": {"args": {"device": 2**40}},
    "correlation out of range": {"args": {"correlation": 2**70}},
    "ranks that are a number": {"args": {"Collective name": "x", "Process Group Ranks": "5"}},
    "ranks that are null": {"args": {"Collective name": "x", "Process Group Ranks": "null"}},
    "a tensor larger than an integer": {"name": "gloo:x", "args": {"Input Dims": [[2**70, 2]]}},
}


@pytest.mark.parametrize("kind", STRANGE)
def test_strange_arguments_cost_no_event(tmp_path, kind):
    trace = sample()
    trace.op("aten::mm", 1, 2)
    trace.events[-1] |= STRANGE[kind]
    loaded = load_trace(trace.write(tmp_path))
    assert len(loaded) == len(trace.events)
    assert (loaded.device[-1], loaded.correlation[-1]) == (-1, -1)


@pytest.mark.parametrize(
    "metadata",
    [
        {"baseTimeNanoseconds": float("inf")},
        {"distributedInfo": {"rank": float("inf")}},
        {"distributedInfo": {"pg_config": 5}},
        {"distributedInfo": {"pg_config": True}},
    ],
    ids=str,
)
def test_strange_metadata_is_passed_over(tmp_path, metadata):
    trace = sample()
    trace.metadata = metadata
    loaded = load_trace(trace.write(tmp_path))
    assert len(loaded) == len(trace.events)
    assert loaded.groups == ()


@pytest.mark.parametrize("where", ["args", "top"])
def test_deep_nesting_ends_in_no_traceback(tmp_path, where):
    deep = "[" * 100_000 + "]" * 100_000
    trace = sample()
    trace.op("aten::mm", 1, 2, dims=[["deep"]])
    trace.metadata["more"] = "deep"
    text = trace.text().replace("aten::mm", "mm")
    if where == "args":
        text = text.replace('[\n     [\n      "deep"\n     ]\n    ]', deep)
    else:
        text = text.replace('"more": "deep"', f'"more": {deep}')
    assert deep in text
    path = tmp_path / "a.json"
    path.write_text(text)
    assert len(load_trace(path)) >= len(trace.events) - 1


@pytest.mark.parametrize("path", ["", "x" * 5000], ids=["empty", "long"])
def test_a_path_that_cannot_be_is_refused(path):
    with pytest.raises(LoadError):
        load(path)


@pytest.mark.parametrize("comms_id", [2**63 + 5, "9223372036854775813"], ids=["number", "text"])
def test_what_a_collective_says_about_itself(tmp_path, comms_id):
    trace = TraceBuilder()
    args = {"Collective name": "_allgather_base", "dtype": "BFloat16", "Seq": 7}
    args |= {"In msg nelems": 10, "Out msg nelems": 40, "Comms Id": comms_id, "Group size": 4}
    args |= {"Process Group Name": "3", "Process Group Ranks": "[0, 2, 4, 6]"}
    trace.kernel("ncclDevKernel_AllGather", 1, 5, 9, **args)
    trace.op("record_param_comms", 1, 2)
    trace.events[-1]["args"] = args
    loaded = load_trace(trace.write(tmp_path))
    said = Details(
        collective="_allgather_base",
        group="3",
        group_ranks=(0, 2, 4, 6),
        group_size=4,
        sizes=frozenset({10, 40}),
        dtype="BFloat16",
        in_elements=10,
        out_elements=40,
        sequence=7,
        comms_id="9223372036854775813",
    )
    assert loaded.details == {1: said, 2: said}
