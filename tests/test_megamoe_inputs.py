"""What the stages refuse: one clear sentence, raised before the rank issues a collective."""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megamoe import MegaMoEExperts, errors, fused_mega_moe, mega_moe_stage1, mega_moe_stage2
from tests.megamoe_cases import SEED, Case, draw_experts, draw_tokens
from tests.ranks import Ranks

CASE = Case("plain", tokens=(6,), experts=8, hidden=24, ffn=20, topk=3)


def inputs() -> dict[str, Tensor]:
    x, ids, weights, _ = draw_tokens(CASE, torch.float32, SEED, 0)
    w1, w2 = draw_experts(CASE, torch.float32, SEED)
    return {"x": x, "topk_idx": ids, "topk_weights": weights, "w1": w1, "w2": w2}


def put(tensor: Tensor, value: int) -> Tensor:
    tensor = tensor.clone()
    tensor[4, 1] = value
    return tensor


STAGE1 = {
    "x is 3-D": ("x", lambda t: t[None], r"x has shape \[1, 6, 24\]; expected \[any, any\]"),
    "x is fp16": ("x", Tensor.half, r"x is torch.float16; expected torch.bfloat16 or .*: convert"),
    "x is elsewhere": ("x", lambda t: t.to("meta"), r"topk_idx is on cpu, the tokens are on meta"),
    "fewer ids than tokens": ("topk_idx", lambda t: t[1:], r"topk_weights has shape \[6, 3\]"),
    "more tokens than ids": ("x", lambda t: torch.cat([t, t]), r"topk_idx has .*\[12, any\]"),
    "ids are int32": ("topk_idx", Tensor.int, r"topk_idx is torch.int32; expected torch.int64"),
    "no slot": ("topk_idx", lambda t: t[:, :0], r"at least one slot"),
    "weights are bf16": ("topk_weights", Tensor.bfloat16, r"topk_weights is torch.bfloat16; exp"),
    "weights are fp64": ("topk_weights", Tensor.double, r"topk_weights is torch.float64; exp"),
    "id out of range": (
        "topk_idx",
        lambda t: put(t, 8),
        r"topk_idx\[4, 1\] is 8, but the weights hold 8 experts \(8 on each of 1 ranks\); "
        r"ids go from 0 to 7",
    ),
    "w1 is 2-D": ("w1", lambda t: t[0], r"weight has shape \[40, 24\]; expected \[any, any, any\]"),
    "w1 is for another H": (
        "w1",
        lambda t: t[..., 1:],
        r"w1 has shape \[8, 40, 23\]; expected .*24",
    ),
    "w1 is odd": ("w1", lambda t: t[:, 1:], r"w1 has 39 rows per expert; it needs an even number"),
    "w1 is bf16": ("w1", Tensor.bfloat16, r"w1 is torch.bfloat16 on cpu, but x is torch.float32"),
    "half of the experts": ("w1", lambda t: t[:4], r"holds 4 experts on each of the 1 ranks.* 8"),
}
STAGE2 = {
    "w2 is for another I": (
        "w2",
        lambda t: t[..., 1:],
        r"w2 has shape \[8, 24, 19\]; expected .*20",
    ),
    "w2 is fp64": ("w2", Tensor.double, r"w2 is torch.float64 on cpu, but .* is torch.float32"),
}
FUSED = {
    "w2 has fewer experts": (
        "w2",
        lambda t: t[1:],
        r"w2 has shape \[7, 24, 20\]; expected \[8, 24",
    ),
    "w2 is for another H": (
        "w2",
        lambda t: t[:, 1:],
        r"w2 has shape \[8, 23, 20\]; expected \[8, 24",
    ),
}


def bad(*tables: dict[str, tuple[str, Callable[[Tensor], Tensor], str]]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(
        ("name", "spoil", "message"),
        [pytest.param(*row, id=title) for table in tables for title, row in table.items()],
    )


@bad(STAGE1)
def test_stage1(name: str, spoil: Callable[[Tensor], Tensor], message: str) -> None:
    given = inputs()
    del given["w2"]
    mega_moe_stage1(**given, group=None, num_experts=8)
    with pytest.raises(errors.InputError, match=message):
        mega_moe_stage1(**(given | {name: spoil(given[name])}), group=None, num_experts=8)


@bad(STAGE1, STAGE2, FUSED)
def test_fused(name: str, spoil: Callable[[Tensor], Tensor], message: str) -> None:
    given = inputs()
    with pytest.raises(errors.InputError, match=message):
        fused_mega_moe(**(given | {name: spoil(given[name])}), group=None, num_experts=8)


@bad(
    STAGE2,
    {
        "rows and weights differ": (
            "dispatch_weights",
            lambda t: t[1:],
            r"dispatch_weights has shape \[17\]; expected \[18\]",
        ),
        "another routing": ("topk_idx", lambda t: t[1:], r"topk_weights has shape \[6, 3\]; exp"),
        "fewer experts": (
            "w2",
            lambda t: t[1:],
            r"handle is from another stage 1: .*\(6, 3, 8\), ",
        ),
    },
)
def test_stage2(name: str, spoil: Callable[[Tensor], Tensor], message: str) -> None:
    given = inputs()
    w1, w2 = given.pop("w1"), given.pop("w2")
    l1_out, dispatch_weights, handle = mega_moe_stage1(**given, w1=w1, group=None)
    del given["x"]
    given |= {"l1_out": l1_out, "dispatch_weights": dispatch_weights, "w2": w2}
    mega_moe_stage2(**given, handle=handle, group=None)
    with pytest.raises(errors.InputError, match=message):
        mega_moe_stage2(**(given | {name: spoil(given[name])}), handle=handle, group=None)


def test_a_handle_of_other_tokens() -> None:
    given = inputs()
    w1, w2 = given.pop("w1"), given.pop("w2")
    l1_out, dispatch_weights, handle = mega_moe_stage1(**given, w1=w1, group=None)
    ids, weights = given["topk_idx"][1:], given["topk_weights"][1:]
    with pytest.raises(errors.InputError, match=r"made for .* \(6, 3, 8\), but .* \(5, 3, 8\)"):
        mega_moe_stage2(l1_out, dispatch_weights, handle, ids, weights, w2, None)


def test_an_unknown_backend_names_the_known_ones() -> None:
    with pytest.raises(
        errors.UnknownBackendError, match=r"'cuda' is unknown.*'auto', .*'reference', 'triton'"
    ):
        mega_moe_stage1(
            **{k: v for k, v in inputs().items() if k != "w2"}, group=None, backend="cuda"
        )
    with pytest.raises(errors.UnknownBackendError, match="reference"):
        MegaMoEExperts(4, 4, 2, backend="triton2")


def test_every_error_has_one_root_and_a_builtin_parent() -> None:
    for error in (errors.InputError, errors.ConfigError, errors.UnsupportedFeatureError):
        assert issubclass(error, errors.MegaMoEError)
        assert issubclass(error, ValueError)
    assert issubclass(errors.ExpertBiasError, NotImplementedError)


def refuse_before_any_collective() -> list[str]:
    group = dist.group.WORLD
    given = inputs()
    w2 = given.pop("w2")[:4]
    given["w1"] = given["w1"][:4]
    l1_out, dispatch_weights, handle = mega_moe_stage1(**given, group=group, num_experts=8)
    alone = dist.new_group([0])
    said = []
    real = dist.all_to_all_single
    with mock.patch.object(dist, "all_to_all_single", wraps=real) as collective:
        for change in (
            {"topk_idx": put(given["topk_idx"], 8)},
            {"w1": given["w1"].double()},
            {"w1": given["w1"][:3]},
            {"x": given["x"][:, 1:]},
            {"group": None},
        ):
            with pytest.raises(errors.InputError) as caught:
                mega_moe_stage1(**({"group": group, "num_experts": 8} | given | change))
            said.append(str(caught.value))
        ids, weights = given["topk_idx"], given["topk_weights"]
        with pytest.raises(errors.InputError, match="handle"):
            mega_moe_stage2(l1_out, dispatch_weights, handle, ids[1:], weights[1:], w2, group)
        if dist.get_rank() == 1:
            with pytest.raises(errors.InputError, match="this rank is not in the expert-parallel"):
                mega_moe_stage1(**given, group=alone)
            with pytest.raises(errors.ConfigError, match="this rank is not in the expert-parallel"):
                MegaMoEExperts(4, 4, 2, alone)
        with pytest.raises(
            errors.ConfigError, match="num_experts 7 does not divide by the 2 ranks"
        ):
            MegaMoEExperts(4, 4, 7, group)
        assert collective.call_count == 0
        mega_moe_stage1(**given, group=group)  # the watch sees a collective where there is one
        assert collective.call_count > 0
    return said


def test_refused_before_any_collective(ranks: Ranks) -> None:
    for said in ranks.run(2, refuse_before_any_collective):
        assert "8 experts (4 on each of 2 ranks)" in said[0]
        assert "3 experts on each of the 2 ranks" in said[2]
        assert "4 experts on each of the 1 ranks" in said[4]
