"""Which files, which rank: names, what the user says, several ranks in one file, jobs."""

import copy
import io
import json
import os
import signal
from pathlib import Path

import numpy as np
import pytest

from profiling import loading, parallel, progress
from profiling.loading import LoadError, load, load_trace
from profiling.trace import Category
from tests.kineto import MAIN, TraceBuilder, cpu_iteration, gpu_iteration

TRACES = Path(__file__).parents[2] / "shared" / "traces"


def sample(rank=0, **kwargs):
    trace = TraceBuilder(rank, **kwargs)
    for number in range(3):
        start = 1e6 + 2000 * number + 10 * rank
        gpu_iteration(trace, number, start, gather=(150 + rank, 650))
    return trace


def equal(a, b):
    """Whether two traces hold the same events, wherever their processes are drawn."""
    columns = ("start", "end", "device", "stream", "correlation", "category")
    return (
        a.rank == b.rank
        and all(np.array_equal(getattr(a, name), getattr(b, name)) for name in columns)
        and [a.names[name] for name in a.name] == [b.names[name] for name in b.name]
        and a.details == b.details
    )


def write(folder, events, name="merged.json", **metadata):
    path = folder / name
    path.write_text(json.dumps({"traceEvents": events, **metadata}))
    return path


# Files


def test_a_directory_a_pattern_a_file_and_several_give_ranks_in_order(tmp_path):
    for rank in (10, 9, 0):
        sample(rank, world_size=11).write(tmp_path, f"r{rank}.json.gz")
    (tmp_path / "notes.txt").write_text("not a trace")
    assert [trace.rank for trace in load(tmp_path).traces] == [0, 9, 10]
    assert [trace.rank for trace in load(str(tmp_path / "r*0.json.gz")).traces] == [0, 10]
    assert [trace.rank for trace in load(tmp_path / "r9.json.gz").traces] == [9]
    two = [tmp_path / "r9.json.gz", tmp_path / "r*0.json.gz", tmp_path / "r9.json.gz"]
    assert [trace.rank for trace in load(two).traces] == [0, 9, 10]


def test_a_directory_for_each_rank(tmp_path):
    for rank in (1, 0):
        (tmp_path / f"rank{rank}").mkdir()
        trace = sample(rank, world_size=2)
        del trace.metadata["distributedInfo"]
        trace.write(tmp_path / f"rank{rank}", "trace_step19.json")
    assert [trace.rank for trace in load(tmp_path).traces] == [0, 1]


def test_what_cannot_be_one_run_is_refused_by_name(tmp_path):
    sample(1).write(tmp_path, "a.json")
    sample(1).write(tmp_path, "b.json")
    with pytest.raises(LoadError, match=r"rank 1 is in both .*a\.json and .*b\.json"):
        load(tmp_path)
    sample(2, world_size=4).write(tmp_path, "b.json")
    with pytest.raises(LoadError, match="runs with 1 and 4 ranks"):
        load(tmp_path)


# The rank of a file


@pytest.mark.parametrize(
    ("name", "rank", "world_size"),
    [
        ("rank7-of-8.123.pt.trace.json", 7, 8),
        ("sampled_rank-12.json", 12, None),
        ("x_rank3_y.json", 3, None),
        ("rank_03.json", 3, None),
        ("Rank3.json", 3, None),
        ("trace.rank.3.json", 3, None),
        ("global_rank3_local_rank1.json", 3, None),
        ("node0-rank11.json", 11, None),
        ("trace.json", None, None),
        ("local_rank3.json", None, None),
        ("tp_rank1.json", None, None),
        ("rank1_to_rank3.json", None, None),
        ("host_4711.1700000000.pt.trace.json", None, None),
        ("rank99999999999.json", None, None),
    ],
)
def test_rank_from_the_file_name_where_the_trace_has_none(tmp_path, name, rank, world_size):
    trace = sample()
    del trace.metadata["distributedInfo"]
    loaded = load_trace(trace.write(tmp_path, name))
    assert (loaded.rank, loaded.world_size) == (rank, world_size)


def test_the_trace_comes_before_its_name_and_the_user_before_both(tmp_path):
    path = sample(2).write(tmp_path, "rank5.json")
    assert load_trace(path).rank == 2
    (trace,) = load(path, ranks=7).traces
    assert trace.rank == 7
    assert trace.notes == ("taken as rank 7, though it says that it is rank 2",)
    (trace,) = load(path, ranks=2).traces
    assert trace.notes == ()


def test_the_user_tells_the_ranks_of_files_that_do_not(tmp_path):
    for name in ("a.json", "b.json"):
        trace = sample()
        del trace.metadata["distributedInfo"]
        trace.write(tmp_path, name)
    with pytest.raises(LoadError, match=r"a\.json does not say its rank: tell it \(FILE=RANK\)"):
        load(tmp_path)
    told = {"a.json": 4, str(tmp_path / "b.json"): 1}
    profile = load(tmp_path, ranks=told)
    assert [(trace.rank, Path(trace.path).name) for trace in profile.traces] == [
        (1, "b.json"),
        (4, "a.json"),
    ]
    assert profile.notes == ()


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        (3, "rank 3 was given for 2 files: say for which"),
        ({"c.json": 3}, r"rank 3 was given for c\.json, which is 0 of the 2 files"),
        ({"a.json": -1}, "a rank is at least 0"),
    ],
)
def test_ranks_that_make_no_sense_are_refused(tmp_path, ranks, message):
    for rank, name in enumerate(("a.json", "b.json")):
        sample(rank, world_size=2).write(tmp_path, name)
    with pytest.raises(LoadError, match=message):
        load(tmp_path, ranks=ranks)


# Several ranks in one file


def merged_by_argument(traces):
    """Every event names its rank; pid and correlation are moved apart."""
    for rank, trace in enumerate(traces):
        for event in copy.deepcopy(trace.events):
            event["pid"] += 1000 * rank
            event["args"]["rank"] = rank
            yield event


def merged_by_process(name):
    """Metadata events name each process, which are moved apart."""

    def merge(traces):
        for rank, trace in enumerate(traces):
            for event in copy.deepcopy(trace.events):
                event["pid"] += 1000 * rank
                yield event
            for pid in (0, 1):
                args = {"name": name.format(rank=rank)}
                yield {"ph": "M", "name": "process_name", "pid": 1000 * rank + pid, "args": args}

    return merge


def merged_by_pid(traces):
    for rank, trace in enumerate(traces):
        for event in trace.events:
            yield event | {"pid": f"[rank{rank}] {event['pid']}"}


MERGED = {
    "rank in the arguments": merged_by_argument,
    "Rank 0 - GPU": merged_by_process("Rank {rank} - GPU"),
    "python (rank 0)": merged_by_process("python (rank {rank})"),
    "[rank0] pid": merged_by_pid,
}


@pytest.mark.parametrize("style", MERGED)
def test_ranks_that_a_file_tells_apart_are_separated(tmp_path, style):
    traces = [sample(rank, world_size=3) for rank in range(3)]
    info = {"distributedInfo": {"rank": 0, "world_size": 3}}  # of the first, as merge tools keep it
    path = write(tmp_path, list(MERGED[style](traces)), **info)
    loaded = load(path).traces
    own = [load_trace(trace.write(tmp_path, "one.json")) for trace in traces]
    assert [trace.rank for trace in loaded] == [0, 1, 2]
    assert all(trace.world_size == 3 for trace in loaded)
    assert all(equal(one, other) for one, other in zip(loaded, own, strict=True))
    assert not any(trace.notes for trace in loaded)
    with pytest.raises(LoadError, match="holds 3 ranks, so it cannot be told to be rank 1"):
        load(path, ranks=1)
    with pytest.raises(LoadError, match=r"holds 3 ranks: load\(\) reads them all"):
        load_trace(path)


def test_what_a_file_of_several_ranks_lost_is_said_for_all_of_them(tmp_path):
    events = list(merged_by_argument([sample(0), sample(1)]))
    events[1]["dur"] = -1
    profile = load(write(tmp_path, events))
    assert [len(trace) for trace in profile.traces] == [len(events) // 2 - 1, len(events) // 2]
    assert profile.notes[1].startswith("rank 1 (merged.json): 1 event dropped: without a start")
    assert profile.notes[1].endswith("(of all 2 ranks in the file)")


def mixed_pids(traces):
    for rank, trace in enumerate(traces):
        for event in trace.events:
            yield event | {"pid": event["pid"] + 1000 * rank}


def mixed_everything(traces):
    for trace in traces:
        yield from trace.events


def mixed_without_steps(traces):
    for event in mixed_everything(traces):
        if event["cat"] != "user_annotation":
            yield event


def mixed_parallelism(traces):
    """As inference servers merge: the labels are not ranks of the run."""
    for rank, trace in enumerate(traces):
        for event in trace.events:
            yield event | {"pid": f"[TP{rank:02d}-DP00-PP00] {event['pid']}"}


def partly_named(traces):
    for event in merged_by_process("Rank {rank}")(traces):
        if event["ph"] != "M" or event["pid"] != 1000:
            yield event


MIXED = {
    "other processes": (mixed_pids, r"2 processes that launch work .*\(pids 1, 1001\)"),
    "the same step": (mixed_everything, r"in 'overlap::iteration\[0\]' twice at once"),
    "the same correlations": (mixed_without_steps, "launches have the correlation of another one"),
    "labels that are no rank": (mixed_parallelism, r"2 processes .*\[TP00-DP00-PP00\] 1"),
    "a process without a name": (partly_named, "ranks 0, 1, but 6 events are of none of them"),
}


@pytest.mark.parametrize("style", MIXED)
def test_ranks_that_nobody_can_tell_apart_are_refused_in_one_sentence(tmp_path, style):
    merge, message = MIXED[style]
    path = write(tmp_path, list(merge([sample(0), sample(1)])))
    with pytest.raises(LoadError, match=message) as error:
        load(path)
    said = str(error.value)
    assert said.startswith(str(path))
    assert "\n" not in said
    assert said.endswith("give every rank's own file instead")


def test_mixed_cpu_ranks_are_refused(tmp_path):
    traces = []
    for rank in range(2):
        trace = TraceBuilder(rank)
        cpu_iteration(trace, 0, 1e6, gather=(150, 650))
        traces.append(trace)
    with pytest.raises(LoadError, match=r"2 processes that launch work or call collectives"):
        load(write(tmp_path, list(mixed_pids(traces))))


def test_one_rank_with_workers_and_many_devices_is_one_rank(tmp_path):
    """A data loader's processes, eight devices, and the rows that the profiler adds."""
    trace = sample()
    for device in range(8):
        trace.kernel("gemm", 1e6 + 1900, 1e6 + 1950, 1e6 + 1960, device=device)
    for worker in (501, 502):
        trace.add("cpu_op", "aten::stack", 1e6, 1e6 + 5, MAIN)
        trace.add("user_annotation", "collate", 1e6, 1e6 + 5, MAIN)
        trace.events[-2]["pid"] = trace.events[-1]["pid"] = worker
    for pid, label in [(1, "CPU"), *((device, f"GPU {device}") for device in range(8))]:
        trace.events += [
            {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": "python3"}},
            {"ph": "M", "name": "process_labels", "pid": pid, "args": {"labels": label}},
        ]
    for pid in ("Spans", "Traces"):
        trace.events.append(
            {"ph": "X", "cat": "Trace", "name": "PyTorch Profiler (0)", "pid": pid, "tid": "x"}
            | {"ts": 1e6, "dur": 5}
        )
    (loaded,) = load(trace.write(tmp_path)).traces
    assert int((loaded.category == Category.KERNEL).sum()) == 6 + 8
    assert loaded.notes == ()


def test_a_process_name_may_tell_the_rank_of_the_whole_file(tmp_path):
    (trace,) = load(write(tmp_path, list(merged_by_process("Rank 5")([sample()])))).traces
    assert trace.rank == 5


@pytest.mark.skipif(not TRACES.is_dir(), reason="the public traces are not on this machine")
@pytest.mark.parametrize("path", sorted(TRACES.glob("*.gz")), ids=lambda path: path.name)
def test_every_public_trace_is_one_rank(path):
    (trace,) = load(path).traces
    assert trace.complete
    assert trace.notes == ()


# Jobs and progress


@pytest.mark.parametrize("jobs", [1, 2, None])
def test_any_number_of_jobs_gives_the_same(tmp_path, monkeypatch, jobs):
    for rank in range(3):
        sample(rank, world_size=3).write(tmp_path)
    serial = load(tmp_path).traces
    monkeypatch.setattr(loading, "LEAST", 0)
    seen = []
    loaded = load(tmp_path, jobs=jobs, progress=lambda done, total: seen.append((done, total)))
    assert [trace.rank for trace in loaded.traces] == [0, 1, 2]
    assert all(equal(one, other) for one, other in zip(loaded.traces, serial, strict=True))
    size = sum(path.stat().st_size for path in tmp_path.iterdir())
    assert seen == sorted(seen)
    assert seen[-1] == (size, size)


def test_jobs_pass_on_errors(tmp_path, monkeypatch):
    monkeypatch.setattr(loading, "LEAST", 0)
    sample(0).write(tmp_path, "a.json")
    (tmp_path / "b.json").write_text("{}")
    with pytest.raises(LoadError, match=r"b\.json is not a PyTorch profiler trace"):
        load(tmp_path, jobs=2)
    with pytest.raises(LoadError, match="jobs is 0"):
        load(tmp_path, jobs=0)


def die(file, rank):
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_process_that_is_killed_ends_in_one_sentence(tmp_path, monkeypatch):
    monkeypatch.setattr(loading, "LEAST", 0)
    monkeypatch.setattr(parallel, "_load", die)
    for rank in range(2):
        sample(rank, world_size=2).write(tmp_path)
    with pytest.raises(LoadError, match="a process that read one of the 2 files died"):
        load(tmp_path, jobs=2)


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_the_bar_is_for_long_loads_on_a_terminal(tmp_path, monkeypatch):
    path = sample().write(tmp_path)

    def shown(stream):
        with progress.progress_bar(stream) as show:
            load(path, progress=show)
        return stream.getvalue()

    assert shown(Terminal()) == "", "a short load"
    monkeypatch.setattr(progress, "LEAST", 0)
    assert "reading: " in shown(Terminal())
    assert shown(io.StringIO()) == "", "no terminal"
