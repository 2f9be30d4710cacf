"""Recorded directories open in TensorBoard: the real server with torch-tb-profiler, over HTTP."""

import gzip
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from profiling.ranges import Kind, span
from profiling.recording import record

DATA = Path(__file__).parent / "data"
DEADLINE = 120  # seconds to give up after; it takes a few

pytestmark = pytest.mark.skipif(
    find_spec("tensorboard") is None or find_spec("torch_tb_profiler") is None,
    reason="needs pip install '.[tensorboard]'",
)


@contextmanager
def tensorboard(logdir, log):
    """Run the server on a free port and give its address; it and its children always end."""
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", str(logdir), "--port", "0"]
    environment = {**os.environ, "TMPDIR": str(log.parent)}  # the plugin keeps copies
    with log.open("wb") as output:
        server = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,  # so that the plugin's processes end with it
        )
    try:
        yield f"http://localhost:{wait_for(lambda: port(server, log))}"
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def port(server, log):
    text = log.read_text(errors="replace")
    assert server.poll() is None, text
    found = re.search(r"TensorBoard \S+ at http://localhost:(\d+)", text)
    return found and found[1]


def wait_for(condition):
    deadline = time.monotonic() + DEADLINE
    while time.monotonic() < deadline:
        if value := condition():
            return value
        time.sleep(0.2)
    raise AssertionError(f"nothing after {DEADLINE} s")


class Plugin:
    """What the profiler's plugin answers."""

    def __init__(self, address):
        self.address = f"{address}/data/plugin/pytorch_profiler"

    def __call__(self, route, **query):
        url = f"{self.address}/{route}?{urllib.parse.urlencode(query)}"
        with urllib.request.urlopen(url, timeout=30) as answer:
            data = answer.read()
        return json.loads(gzip.decompress(data) if data.startswith(b"\x1f\x8b") else data)

    def runs(self):
        answer = self("runs")
        return None if answer["loading"] else answer["runs"]


def record_two_ranks(folder):
    x = torch.ones(64, 64)
    with record(folder, wait=0, warmup=1, active=2) as recorder:
        for _ in range(3):
            with span(Kind.STAGE1_FORWARD, "layers.0.mlp.experts"):
                x = x @ x / 64
            dist.all_reduce(x)
            recorder.step()


def test_a_recorded_directory_has_its_run_workers_and_views(ranks, tmp_path):
    logdir = tmp_path / "runs"
    ranks.run(2, record_two_ranks, str(logdir / "profile"))
    with tensorboard(logdir, tmp_path / "log") as address:
        plugin = Plugin(address)
        assert wait_for(plugin.runs) == ["profile"]
        assert plugin("views", run="profile") == ["Overview", "Operator", "Trace", "Distributed"]
        workers = ["rank0-of-2", "rank1-of-2"]
        for view in ("Overview", "Operator", "Trace"):
            assert plugin("workers", run="profile", view=view) == workers
        assert plugin("workers", run="profile", view="Distributed") == ["All"]
        where = {"run": "profile", "worker": workers[0]}
        (only,) = plugin("spans", **where)  # one recording, whatever the time in the file's name
        steps = plugin("overview", **where, span=only)["steps"]["rows"]
        assert [row[0] for row in steps] == ["1", "2"]
        operators = plugin("operation/table", **where, span=only, group_by="Operation")
        assert "aten::mm" in {row["name"] for row in operators["data"]}
        trace = plugin("trace", **where, span=only)
        names = {event.get("name") for event in trace["traceEvents"]}
        assert "megamoe::stage1.forward[layers.0.mlp.experts]" in names


def test_a_gpu_recording_has_its_kernels(tmp_path):
    run = tmp_path / "runs" / "gpu"
    run.mkdir(parents=True)
    (run / "rank0-of-1.1.pt.trace.json.gz").symlink_to(DATA / "gpu_split.pt.trace.json.gz")
    with tensorboard(run.parent, tmp_path / "log") as address:
        plugin = Plugin(address)
        assert wait_for(plugin.runs) == ["gpu"]
        assert plugin("views", run="gpu") == ["Overview", "Operator", "Kernel", "Trace"]
        kernels = plugin(
            "kernel/table", run="gpu", worker="rank0-of-1", span="1", group_by="Kernel"
        )
        assert any("emulated_collective" in str(row) for row in kernels["data"]["rows"])
