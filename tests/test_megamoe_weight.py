"""The weight module: what it returns, the mark on its parameter, and initial values."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megamoe import MegaMoEConfig, MegaMoEExperts, MegaMoELayer, MegaMoEWeightModule
from profiling.ranges import name_modules
from tests.ranks import Ranks


def module(expert_parallel: bool) -> MegaMoEWeightModule:
    return MegaMoEWeightModule((2, 3, 4), expert_parallel=expert_parallel)


def test_forward_returns_the_parameter_itself() -> None:
    weight = module(False)
    assert weight() is weight.weight
    assert [name for name, _ in weight.named_parameters()] == ["weight"]
    assert weight.backward_dw() is None


DOORS = {
    "new": lambda m: m,
    "deepcopy": copy.deepcopy,
    "pickle": lambda m: pickle.loads(pickle.dumps(m)),
    "to dtype": lambda m: m.to(torch.bfloat16),
    "meta and back": lambda m: m.to("meta").to_empty(device="cpu"),
    "load with assign": lambda m: (
        m.load_state_dict({"weight": torch.zeros(2, 3, 4)}, assign=True) and m
    ),
    "new parameter": lambda m: setattr(m, "weight", nn.Parameter(torch.zeros(2, 3, 4))) or m,
}


@pytest.mark.parametrize("expert_parallel", [False, True])
@pytest.mark.parametrize("door", DOORS)
def test_the_mark_survives(door: str, expert_parallel: bool) -> None:
    weight = DOORS[door](module(expert_parallel))
    assert isinstance(weight.weight, nn.Parameter)
    assert weight.weight.allreduce is not expert_parallel


CONFIG = MegaMoEConfig(
    hidden_size=6, moe_ffn_hidden_size=5, num_moe_experts=8, moe_shared_expert_intermediate_size=4
)


def build(dtype: torch.dtype) -> tuple[dict[str, Tensor], Tensor]:
    """Two layers from seed 7 on this rank, and what is drawn after them."""
    torch.manual_seed(7)
    group = dist.group.WORLD if dist.is_initialized() else None
    layers = nn.ModuleList(MegaMoELayer(CONFIG, group, dtype=dtype) for _ in range(2))
    copies = copy.deepcopy(layers)
    assert all(c.experts.ep_group is group for c in copies)
    for param, copied in zip(layers.parameters(), copies.parameters(), strict=True):
        assert torch.equal(param, copied)
        assert getattr(param, "allreduce", True) == getattr(copied, "allreduce", True)
    parallel = group is not None and dist.get_world_size() > 1
    for name, param in layers.named_parameters():
        assert getattr(param, "allreduce", True) is not (parallel and "experts" in name)
    return {name: p.detach() for name, p in layers.named_parameters()}, torch.rand(3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_initial_values_do_not_depend_on_the_ep_size(
    ranks: Ranks, world_size: int, dtype: torch.dtype
) -> None:
    want, after = build(dtype)
    got = ranks.run(world_size, build, dtype)
    for name, value in want.items():
        parts = [parameters[name] for parameters, _ in got]
        if ".experts." in name:
            assert torch.equal(torch.cat(parts), value), name
        else:
            assert all(torch.equal(part, value) for part in parts), name
    assert all(torch.equal(drawn, after) for _, drawn in got)


def test_layers_and_experts_start_different_and_as_told() -> None:
    want, _ = build(torch.float32)
    fc1 = [want[f"{layer}.experts.fc1_weight.weight"] for layer in range(2)]
    experts = torch.cat(fc1).flatten(1)
    assert len(experts.unique(dim=0)) == 16
    torch.manual_seed(3)
    big = MegaMoEExperts(64, 64, 4, init_std=0.3)
    for weight in big.parameters():
        assert weight.std().item() == pytest.approx(0.3, rel=0.05)
        assert weight.mean().item() == pytest.approx(0, abs=0.02)


def test_meta_device_allocates_and_draws_nothing() -> None:
    layer = MegaMoELayer(CONFIG, device="meta")
    assert all(param.is_meta for param in layer.parameters())


def test_range_names_reach_the_experts() -> None:
    model = nn.ModuleDict({"mlp": MegaMoELayer(CONFIG)})
    name_modules(model)
    assert model["mlp"].experts.range_name == "mlp.experts"
