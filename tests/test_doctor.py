"""`python -m megamoe doctor`: each way in which a backend cannot be used has its own sentence."""

from __future__ import annotations

import json
from contextlib import ExitStack
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from megamoe.__main__ import main
from megamoe.doctor import Finding, examine
from tests import primus_turbo_simulator as simulator


def machine(stack: ExitStack, *, hip=None, cuda=None, gpus=0, arch="gfx950", capability=(9, 0)):
    """Have torch look like another machine's."""
    patches = [
        mock.patch.object(torch.version, "hip", hip),
        mock.patch.object(torch.version, "cuda", cuda),
        mock.patch("torch.cuda.device_count", return_value=gpus),
        mock.patch("torch.cuda.is_available", return_value=gpus > 0),
        mock.patch("torch.cuda.current_device", return_value=0),
        mock.patch("torch.cuda.get_device_capability", return_value=capability),
        mock.patch(
            "torch.cuda.get_device_properties", return_value=SimpleNamespace(gcnArchName=arch)
        ),
    ]
    for patch in patches:
        stack.enter_context(patch)


def finding(name: str, ranks: int | None = None) -> Finding:
    return next(found for found in examine(ranks) if found.backend == name)


@pytest.mark.parametrize(
    ("looks", "ranks", "without", "reason", "remedy"),
    [
        ({}, None, (), "is no ROCm build", "install a ROCm build"),
        ({"hip": "7.0"}, None, (), "no AMD GPU", "rocminfo"),
        ({"hip": "7.0", "gpus": 8, "arch": "gfx942"}, None, (), "cuda:0 is gfx942", "reference"),
        ({"hip": "7.0", "gpus": 8}, None, ("fused_mega_moe",), "commit 555", "REBUILD_PRIMUS"),
        ({"hip": "7.0", "gpus": 1}, None, (), "the group has 1", "2 to 8"),
        ({"hip": "7.0", "gpus": 8}, 16, (), "the group has 16", "2 to 8"),
        ({"hip": "7.0", "gpus": 8}, 8, (), None, None),
        ({"hip": "7.0", "gpus": 8}, None, (), None, None),
    ],
)
def test_primus_turbo(looks, ranks, without, reason, remedy) -> None:
    with ExitStack() as stack:
        machine(stack, **looks)
        stack.enter_context(simulator.installed(without=without, device=False))
        found = finding("primus_turbo", ranks)
    assert found.usable == (reason is None)
    assert reason is None or reason in found.reason
    assert remedy is None or remedy in found.remedy


def test_primus_turbo_without_the_package() -> None:
    with ExitStack() as stack:
        machine(stack, hip="7.0", gpus=8)
        found = finding("primus_turbo")
    assert "which is not installed; build commit 9b5d3092" in found.reason


@pytest.mark.parametrize(
    ("looks", "reason"),
    [
        ({}, "is no CUDA build"),
        ({"cuda": "13.0"}, "sees no CUDA device"),
        ({"cuda": "13.0", "gpus": 1, "capability": (8, 0)}, "compute capability 8.0"),
        ({"cuda": "13.0", "gpus": 2}, "expert-parallel size is 2"),
        ({"cuda": "13.0", "gpus": 1}, None),
    ],
)
def test_triton(looks, reason) -> None:
    pytest.importorskip("triton")
    with ExitStack() as stack:
        machine(stack, **looks)
        found = finding("triton")
    assert found.usable == (reason is None)
    assert reason is None or reason in found.reason


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    with ExitStack() as stack:
        machine(stack)
        assert main(["doctor"]) == 0
        text = capsys.readouterr().out
        assert main(["doctor", "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert main(["doctor", "--backend", "reference"]) == 0
        assert main(["doctor", "--backend", "primus_turbo"]) == 1
        with pytest.raises(SystemExit) as stopped:
            main(["doctor", "--backend", "cutlass"])
    assert stopped.value.code == 2
    assert "reference     usable" in text
    assert "remedy: install a ROCm build" in text
    assert [one["backend"] for one in found] == ["reference", "triton", "primus_turbo"]
    assert [one["usable"] for one in found] == [True, False, False]
    assert found[0]["reason"] is None
    assert all(one["remedy"] for one in found[1:])
