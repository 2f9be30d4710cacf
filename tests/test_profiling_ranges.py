"""Range labels: built and parsed by one file, and free of cost where nobody profiles."""

import pytest
import torch
from torch import nn

from profiling.ranges import Kind, is_dense, label, name_modules, parse, span


@pytest.mark.parametrize("kind", Kind, ids=lambda kind: kind.name)
@pytest.mark.parametrize("name", ["", "layers.0.mlp.experts", "a.fc1_weight,a.fc2_weight", "12"])
def test_what_is_built_is_parsed(kind, name):
    found = parse(label(kind, name))
    assert (found.kind, found.name) == (kind, name)
    assert found.modules == (tuple(name.split(",")) if name else ())


@pytest.mark.parametrize(
    "text", ["", "aten::mm", "overlap::unknown[x]", "overlap::param_gather[x", "megamoe::stage1"]
)
def test_what_is_not_ours_is_not_parsed(text):
    assert parse(text) is None


def test_dense_buckets():
    assert is_dense("dense.0")
    assert not is_dense("layers.0.dense.experts.fc2_weight")


def test_a_span_shows_in_a_profile_and_is_nothing_without_one():
    cpu = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=cpu) as profiler, span(Kind.PARAM_GATHER, "x"):
        torch.ones(2)
    assert "overlap::param_gather[x]" in {event.key for event in profiler.key_averages()}
    assert span(Kind.PARAM_GATHER, "x") is span(Kind.GRAD_REDUCE, "y")


def test_name_modules_tells_those_that_ask():
    inner, plain = nn.Linear(1, 1), nn.Linear(1, 1)
    inner.range_name = ""
    name_modules(nn.ModuleDict({"a": nn.Sequential(plain, inner)}))
    assert inner.range_name == "a.1"
    assert not hasattr(plain, "range_name")
