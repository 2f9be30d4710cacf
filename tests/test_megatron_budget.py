"""The SM budget through Megatron-core's DDP, and how its groups get NCCL's options."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from overlap.megatron import write_nccl_config
from overlap.nccl import NcclOptions, ctas_of_group
from tests import megatron_shim
from tests.megatron_cases import config as transformer_config
from tests.overlap_models import Model, own_batch
from tests.ranks import Ranks

needs_megatron = pytest.mark.skipif(
    importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed"
)


class Layer(nn.Module):
    """An expert layer whose stages write down the budget where they are launched."""

    def __init__(self, inner: nn.Module, log: list[tuple[str, int]]) -> None:
        super().__init__()
        self.inner, self.log = inner, log
        self.accumulates: list[Any] = []
        self.budget: Callable[[], int] | None = None
        experts: Any = inner.experts
        experts.fc1_weight.register_forward_hook(lambda *_: self.note("stage1"))
        experts.fc2_weight.register_forward_hook(lambda *_: self.note("stage2"))

    def set_sm_budget(self, budget: Callable[[], int] | None) -> None:
        self.budget = budget

    def note(self, moment: str) -> None:
        assert self.budget is not None
        self.log.append((moment, self.budget()))

    def watch_backward(self) -> None:
        """Look after every gradient hook that is there by now."""
        experts: Any = self.inner.experts
        for name, moment in (("fc2_weight", "after dW2"), ("fc1_weight", "after dW1")):
            weight = getattr(experts, name).weight
            accumulate = weight.expand_as(weight).grad_fn.next_functions[0][0]
            self.accumulates.append(accumulate)  # torch keeps it for no longer than we do
            accumulate.register_hook(lambda *_, m=moment: self.note(m))

    def forward(self, x: Tensor) -> Any:
        return self.inner(x)


def moments(ep: int, sms: int | None, **options: Any) -> list[tuple[str, int]]:
    """The budget at each launch of the third step of a model with two expert layers."""
    import overlap.megatron

    log: list[tuple[str, int]] = []
    model = Model(megatron_shim.initialize(ep))
    model.config = transformer_config(ep)
    layers = [Layer(block.moe, log) for block in model.blocks]
    for block, layer in zip(model.blocks, layers, strict=True):
        block.moe = layer
    with megatron_shim.on_cpu():
        (ddp,) = overlap.megatron.wrap(
            model, overlap.megatron.ddp_config(**options), collective_sms=sms
        )
    for layer in layers:
        layer.watch_backward()
    gathers = ddp.ddp_config.overlap_param_gather
    optimizer = megatron_shim.adamw(ddp, lr=1e-3, overlap_param_gather=gathers)
    with megatron_shim.on_cpu():
        # gloo may end a collective by itself at any moment: here only a wait does.
        with mock.patch("overlap.megatron.wiring._Handle.done", return_value=False):
            for step in range(3):  # the first reduces nothing early
                log.clear()
                tokens, targets = own_batch(step)
                ddp.zero_grad_buffer()
                optimizer.zero_grad()
                F.cross_entropy(ddp(tokens), targets).backward()
                ddp.finish_grad_sync()
                layers[0].note("reduced")
                optimizer.step()
            overlap.megatron.finish_in_flight([ddp])
            layers[0].note("all waited for")
        assert layers[0].budget is layers[1].budget  # one and the same: it counts once
        before = layers[0].budget
        overlap.megatron.wrap(ddp.module, collective_sms=sms)
        assert layers[0].budget is not before
    return log


@needs_megatron
def test_stages_find_the_collectives_that_run_beside_them(ranks: Ranks) -> None:
    for log in ranks.run(4, moments, 2, 8):
        assert [moment for moment, _ in log[:4]] == ["stage1", "stage2"] * 2
        assert [moment for moment, _ in log[4:8]] == ["after dW2", "after dW1"] * 2
        # Dense and expert groups run side by side. The chains of gathers end before the model.
        assert log[0][1] in (8, 16)
        assert all(sms >= 8 for _, sms in log[:3])
        assert all(sms >= 8 for _, sms in log[4:8])
        assert log[8:] == [("reduced", 0), ("all waited for", 0)]


@needs_megatron
@pytest.mark.parametrize(
    ("ep", "sms", "options"),
    [
        (2, 0, {}),
        (2, None, {}),  # gloo takes no SM
        (2, 8, {"overlap_param_gather": False, "overlap_grad_reduce": False}),
    ],
    ids=["nothing reserved", "gloo", "synchronous"],
)
def test_no_sm_is_given_away(
    ranks: Ranks, ep: int, sms: int | None, options: dict[str, Any]
) -> None:
    for log in ranks.run(4, moments, ep, sms, **options):
        assert len(log) == 10
        assert all(reserved == 0 for _, reserved in log)


@needs_megatron
def test_a_group_of_one_gives_no_sm_away(ranks: Ranks) -> None:
    [log] = ranks.run(1, moments, 1, 8)
    assert len(log) == 10
    assert all(reserved == 0 for _, reserved in log)


class FakeNccl:
    """torch's NCCL backend, as far as its options go: a CPU build has none."""

    class Options:
        def __init__(self, is_high_priority_stream: bool = False) -> None:
            self.is_high_priority_stream = is_high_priority_stream
            unset = -(2**31)
            self.config = SimpleNamespace(min_ctas=unset, max_ctas=unset, cga_cluster_size=unset)


def of_two_chunks() -> list[int]:
    """The budget while gathers of two model chunks are issued one by one, and after their waits."""
    import overlap.megatron

    group = megatron_shim.initialize(2)
    models = [Model(group), Model(group)]
    layers = []
    for model in models:
        model.config = transformer_config(2)
        for block in model.blocks:
            block.moe = Layer(block.moe, [])
            layers.append(block.moe)
    with (
        megatron_shim.on_cpu(),
        mock.patch("overlap.megatron.wiring._Handle.done", return_value=False),
    ):
        chunks = overlap.megatron.wrap(models, collective_sms=8)
        (budget,) = {layer.budget for layer in layers}
        seen = [budget()]
        for groups in ("expert_parallel_bucket_groups", "bucket_groups"):
            for chunk in chunks:
                getattr(chunk, groups)[-1].start_param_sync()
                seen.append(budget())
        overlap.megatron.finish_in_flight(chunks[1:])
        seen.append(budget())
        overlap.megatron.finish_in_flight(chunks[:1])
    return [*seen, budget()]


@needs_megatron
def test_chunks_share_one_budget(ranks: Ranks) -> None:
    # The second chunk's wait covers what the same groups began before; dense and expert add up.
    assert ranks.run(4, of_two_chunks) == [[0, 8, 8, 16, 16, 0, 0]] * 4


class WrappedGroup:
    """A group under TORCH_DISTRIBUTED_DEBUG=DETAIL."""

    def size(self) -> int:
        return 4

    def _get_backend(self, device: torch.device) -> Any:
        return object()


class FakeGroup:
    def __init__(self, size: int, **config: int) -> None:
        self._size = size
        self.options = FakeNccl.Options()
        vars(self.options.config).update(config)

    def size(self) -> int:
        return self._size

    def _get_backend(self, device: torch.device) -> Any:
        assert device.type == "cuda"
        return self


@pytest.mark.parametrize(
    ("backend", "group", "variable", "ctas"),
    [
        ("cuda:nccl", FakeGroup(4, max_ctas=16), None, 16),
        ("cpu:gloo,cuda:nccl", FakeGroup(4), None, None),
        ("cuda:nccl", FakeGroup(4, max_ctas=16), "8", 8),
        ("cuda:nccl", FakeGroup(4), "many", None),
        ("cuda:nccl", FakeGroup(1, max_ctas=16), "8", 0),
        ("cpu:gloo", FakeGroup(4, max_ctas=16), "8", 0),
        ("cuda:nccl", WrappedGroup(), None, None),
    ],
    ids=["its options", "NCCL's choice", "variable", "no number", "alone", "gloo", "wrapped"],
)
def test_ctas_of_a_group(
    monkeypatch: pytest.MonkeyPatch,
    backend: str,
    group: Any,
    variable: str | None,
    ctas: int | None,
) -> None:
    monkeypatch.setattr(dist, "get_backend_config", lambda _: backend)
    monkeypatch.delenv("NCCL_MAX_CTAS", raising=False)
    if variable is not None:
        monkeypatch.setenv("NCCL_MAX_CTAS", variable)
    assert ctas_of_group(group) == ctas


def megatron_groups(file: str, options: NcclOptions | str) -> tuple[dict[str, Any], str]:
    """What initialize_model_parallel makes of our file: the options of each of its groups, and what
    `explain` and the stages' budget then see, were the groups NCCL's."""
    from megatron.core import parallel_state

    import overlap.megatron

    made: dict[str, Any] = {}
    options_of: dict[Any, Any] = {}
    real = dist.new_group

    def new_group(*args: Any, pg_options: Any, **kwargs: Any) -> Any:
        group = real(*args, **kwargs)
        made[kwargs["group_desc"]] = pg_options
        options_of[group] = pg_options or FakeNccl.Options()
        return group

    def get_backend(group: Any, device: torch.device) -> Any:
        return SimpleNamespace(options=options_of[group])

    parallel_state.destroy_model_parallel()
    with (
        megatron_shim.on_cpu(),
        mock.patch.object(dist, "ProcessGroupNCCL", FakeNccl, create=True),
        mock.patch.object(dist, "new_group", new_group),
    ):
        parallel_state.initialize_model_parallel(
            expert_model_parallel_size=2,
            expert_tensor_parallel_size=1,
            nccl_communicator_config_path=overlap.megatron.write_nccl_config(file, options),
        )
        model = Model(parallel_state.get_expert_model_parallel_group())
        model.config = transformer_config(2)
        with (
            mock.patch.object(dist, "get_backend_config", return_value="cuda:nccl"),
            mock.patch.object(dist.ProcessGroup, "_get_backend", get_backend),
        ):
            (ddp,) = overlap.megatron.wrap(model)
            explained = str(overlap.megatron.explain(ddp))
    found = {
        name: None if given is None else (given.is_high_priority_stream, vars(given.config))
        for name, given in made.items()
    }
    return found, explained


@needs_megatron
def test_megatron_makes_its_groups_with_our_options(ranks: Ranks, tmp_path: Path) -> None:
    options = NcclOptions(min_ctas=4, max_ctas=12, cluster_size=0)
    found, explained = ranks.run(4, megatron_groups, str(tmp_path / "nccl.yaml"), options)[0]
    want = (True, {"min_ctas": 4, "max_ctas": 12, "cga_cluster_size": 0})
    hidden = {name for name, given in found.items() if given is not None}
    assert hidden == {"DATA_PARALLEL_GROUP_WITH_CP", "EXPERT_DATA_PARALLEL_GROUP"}
    assert all(found[name] == want for name in hidden)
    assert "EXPERT_MODEL_PARALLEL_GROUP" in found
    assert "NOTE" not in explained


@needs_megatron
def test_explain_says_how_to_bound_the_ctas(ranks: Ranks, tmp_path: Path) -> None:
    _, explained = ranks.run(4, megatron_groups, str(tmp_path / "nccl.yaml"), "nccl")[0]
    assert "NOTE NCCL chooses how many CTAs the collectives take" in explained
    assert "NCCL_MIN_CTAS=16 NCCL_MAX_CTAS=16 NCCL_CGA_CLUSTER_SIZE=0" in explained
    assert "every expert weight's collectives can hide" in explained  # it is no problem


def test_an_unknown_preset_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no NCCL preset is called 'fast'"):
        write_nccl_config(tmp_path / "nccl.yaml", "fast")
    assert not list(tmp_path.iterdir())


@needs_megatron
def test_who_reads_the_options_while_they_are_written_sees_a_whole_file(tmp_path: Path) -> None:
    """Every rank writes the file and reads it, all at the same path."""
    from overlap.megatron import write_nccl_config

    path = tmp_path / "nccl.yaml"
    write_nccl_config(path, "narrow")
    before = path.read_text(encoding="utf-8")
    with path.open(encoding="utf-8") as reader:
        write_nccl_config(path, "balanced")
        assert reader.read() == before
    assert json.loads(path.read_text(encoding="utf-8")) != json.loads(before)
    assert [file.name for file in tmp_path.iterdir()] == ["nccl.yaml"]
