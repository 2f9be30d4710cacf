"""The options that NCCL groups are made with, on a fake of torch's: CPU builds have none."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from overlap import NcclOptions, ProcessGroups
from overlap.nccl import PRESETS, ctas_in_profile, resolve
from tests.ranks import Ranks


class FakeNCCL:
    class Options:
        def __init__(self, is_high_priority_stream: bool = False) -> None:
            self.is_high_priority_stream = is_high_priority_stream
            self.config = SimpleNamespace(min_ctas=-1, max_ctas=-1, cga_cluster_size=-1)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (NcclOptions(), (True, -1, -1, -1)),
        (NcclOptions(high_priority=False, max_ctas=4), (False, -1, 4, -1)),
        (NcclOptions(min_ctas=2, max_ctas=16, cluster_size=0), (True, 2, 16, 0)),
        (PRESETS["balanced"], (True, 16, 16, 0)),
    ],
    ids=["NCCL's choice", "low priority", "all", "preset"],
)
def test_options_reach_torch(
    monkeypatch: pytest.MonkeyPatch, options: NcclOptions, expected: tuple[Any, ...]
) -> None:
    monkeypatch.setattr(dist, "ProcessGroupNCCL", FakeNCCL, raising=False)
    built = options.backend_options()
    config = built.config
    got = (built.is_high_priority_stream, config.min_ctas, config.max_ctas, config.cga_cluster_size)
    assert got == expected
    assert options.backend_options() is not built


def test_a_torch_without_nccl_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(dist, "ProcessGroupNCCL", raising=False)
    with pytest.raises(RuntimeError, match="without NCCL"):
        NcclOptions().backend_options()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"max_ctas": 0}, "max_ctas must be at least 1.*: 0"),
        ({"min_ctas": 0}, "min_ctas must be at least 1.*: 0"),
        ({"min_ctas": 8, "max_ctas": 4}, "min_ctas 8 is more than max_ctas 4"),
        ({"cluster_size": 9}, "cluster_size must be 0 to 8, got 9"),
    ],
)
def test_wrong_options(wrong: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        NcclOptions(**wrong)


def test_sms_follow_from_the_ctas() -> None:
    assert NcclOptions(max_ctas=8, cluster_size=0).sms == 8
    assert NcclOptions(max_ctas=8).sms == 8
    assert NcclOptions().sms is None


def test_presets_by_name() -> None:
    assert resolve("narrow") is PRESETS["narrow"]
    own = NcclOptions(max_ctas=2)
    assert resolve(own) is own
    with pytest.raises(ValueError, match=r"'fast'; there are \['balanced', 'narrow', 'nccl'\]"):
        resolve("fast")


def made_groups(backend: str) -> list[tuple[str, list[int], Any]]:
    """What `ProcessGroups.build` asks torch for where the default group has this backend."""
    made = []
    real = dist.new_group

    def new_group(ranks: list[int], *, pg_options: Any, group_desc: str) -> Any:
        ctas = None if pg_options is None else pg_options.config.max_ctas
        made.append((group_desc, ranks, ctas))
        return real(ranks, group_desc=group_desc)

    with (
        mock.patch.object(dist, "ProcessGroupNCCL", FakeNCCL, create=True),
        mock.patch.object(dist, "new_group", new_group),
        mock.patch.object(dist, "get_backend_config", return_value=backend),
    ):
        groups = ProcessGroups.build(2, nccl=NcclOptions(max_ctas=4, cluster_size=0))
    made.append(("sms", [], groups.collective_sms))
    mesh = groups.mesh
    assert mesh.get_group("ep") is groups.ep
    assert mesh.get_group("edp") is groups.edp
    assert mesh.mesh.tolist() == [[0, 1], [2, 3]]
    dist.barrier()
    return made


@pytest.mark.parametrize("backend", ["cpu:gloo,cuda:nccl", "cpu:gloo"])
def test_only_hidden_groups_of_nccl_get_options(ranks: Ranks, backend: str) -> None:
    ctas = 4 if "nccl" in backend else None
    everyone = [0, 1, 2, 3]
    for made in ranks.run(4, made_groups, backend):
        assert made == [
            ("dp", everyone, ctas),
            ("ep", [0, 1], None),
            ("ep", [2, 3], None),
            ("edp", [0, 2], ctas),
            ("edp", [1, 3], ctas),
            ("sms", [], ctas or 0),
        ]


def kernel(name: str, *grid: int) -> dict[str, Any]:
    return {"ph": "X", "cat": "kernel", "name": name, "args": {"grid": [*grid, 1, 1]}}


GATHER = "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
SCATTER = "ncclDevKernel_ReduceScatter_Sum_bf16_RING_SIMPLE(ncclDevKernelArgsStorage<4096ul>)"


@pytest.mark.parametrize(
    ("events", "ctas"),
    [
        ([kernel(GATHER, 4), kernel(SCATTER, 24), kernel(GATHER, 16)], 24),
        ([kernel("ncclDevKernel_SendRecv(x)", 32), kernel("gemm_ReduceScatter", 132)], None),
        ([{"ph": "X", "cat": "cpu_op", "name": "nccl:AllGather"}, {"ph": "M", "name": "x"}], None),
    ],
    ids=["largest", "other kernels", "no kernel"],
)
@pytest.mark.parametrize("suffix", ["json", "json.gz"])
def test_ctas_of_a_profile(
    tmp_path: Path, events: list[dict[str, Any]], ctas: int | None, suffix: str
) -> None:
    path = tmp_path / f"trace.{suffix}"
    content = json.dumps({"traceEvents": events}).encode()
    path.write_bytes(gzip.compress(content) if suffix == "json.gz" else content)
    assert ctas_in_profile(path) == ctas
