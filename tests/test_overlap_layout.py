"""Bucket layouts: pure arithmetic, checked on random parameter lists."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from overlap import OverlapConfig
from overlap.layout import ALIGNMENT, BucketLayout, ParamSpec, digest, plan_buckets

shapes = st.lists(st.integers(1, 40), min_size=0, max_size=3).map(tuple)
dtypes = st.sampled_from([torch.float32, torch.bfloat16])
kinds = st.sampled_from(["dense", "expert", "weight module", "expert weight module"])


@st.composite
def models(draw: st.DrawFn) -> list[ParamSpec]:
    specs = []
    for index in range(draw(st.integers(1, 12))):
        kind = draw(kinds)
        owner = f"layers.{draw(st.integers(0, 2))}.w{index}"
        specs.append(
            ParamSpec(
                f"{owner}.weight",
                draw(shapes),
                draw(dtypes),
                expert="expert" in kind,
                weight_module=owner if "module" in kind else None,
            )
        )
    return specs


sizes = st.integers(1, 5)


@given(models(), sizes, sizes, st.integers(1, 5000), st.booleans())
def test_every_element_has_one_place_and_one_owner(
    specs: list[ParamSpec], dense: int, expert: int, bucket_bytes: int, share: bool
) -> None:
    if share:  # one layer's weights are of one kind
        specs = [
            s for s in specs if s.weight_module is None or (s.expert and s.dtype is torch.float32)
        ]
    layouts = plan_buckets(
        specs,
        dense_group_size=dense,
        expert_group_size=expert,
        bucket_bytes=bucket_bytes,
        share_expert_buckets=share,
    )
    assert sorted(m.spec.name for la in layouts for m in la.members) == sorted(
        s.name for s in specs
    )
    assert len({layout.name for layout in layouts}) == len(layouts)
    for layout in layouts:
        assert layout.group_size == (expert if layout.expert else dense)
        assert layout.shard_numel * layout.group_size == layout.numel
        assert layout.shard_numel % ALIGNMENT == 0
        owners = [0] * layout.numel
        for member in layout.members:
            assert member.start % ALIGNMENT == 0
            for element in range(member.start, member.stop):
                owners[element] += 1
        assert max(owners) == 1
        assert owners.count(0) == layout.padding
        covered: list[int] = []
        for rank in range(layout.group_size):
            own = layout.shard(rank)
            for piece in layout.pieces(rank):
                assert own.start <= piece.start < piece.stop <= own.stop
                covered += range(piece.start, piece.stop)
        assert covered == [element for element, owner in enumerate(owners) if owner]


@given(models(), st.integers(1, 5000))
def test_weight_modules_are_alone_and_dense_buckets_close_in_time(
    specs: list[ParamSpec], bucket_bytes: int
) -> None:
    layouts = plan_buckets(
        specs, dense_group_size=2, expert_group_size=1, bucket_bytes=bucket_bytes
    )
    for layout in layouts:
        sizes = [m.spec.numel * layout.dtype.itemsize for m in layout.members]
        if layout.members[0].spec.weight_module is not None:
            assert len(layout.members) == 1
            assert layout.name == layout.members[0].spec.weight_module
        else:
            assert sum(sizes[:-1]) < bucket_bytes  # it was open when the last one came
            assert layout.name.startswith("expert." if layout.expert else "dense.")


def spec(name: str, numel: int = 10, weight_module: str | None = None) -> ParamSpec:
    return ParamSpec(name, (numel,), torch.float32, weight_module=weight_module)


def test_order_and_names() -> None:
    specs = [
        spec("embed.weight"),
        spec("l0.experts.fc1_weight.weight", weight_module="l0.experts.fc1_weight"),
        spec("l0.experts.fc2_weight.weight", weight_module="l0.experts.fc2_weight"),
        spec("l1.attention.weight"),
        spec("head.weight"),
    ]
    sizes = {"dense_group_size": 2, "expert_group_size": 2}
    layouts = plan_buckets(specs, **sizes, bucket_bytes=80)
    assert [(la.name, [m.spec.name for m in la.members]) for la in layouts] == [
        ("dense.1", ["embed.weight"]),
        ("l0.experts.fc1_weight", ["l0.experts.fc1_weight.weight"]),
        ("l0.experts.fc2_weight", ["l0.experts.fc2_weight.weight"]),
        ("dense.0", ["head.weight", "l1.attention.weight"]),
    ]
    shared = plan_buckets(specs, **sizes, bucket_bytes=80, share_expert_buckets=True)
    assert [la.name for la in shared] == [
        "dense.1",
        "l0.experts.fc1_weight,l0.experts.fc2_weight",
        "dense.0",
    ]


def test_a_rank_may_own_padding_only() -> None:
    layout = BucketLayout.pack("tiny", [spec("bias", 3)], 4)
    assert layout.numel == 4 * ALIGNMENT
    assert [len(layout.pieces(rank)) for rank in range(4)] == [1, 0, 0, 0]


def test_digest_is_the_same_in_every_process() -> None:
    assert digest(["a", "b"]) == 4543142032319551201 != digest(["ab"])


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"prefetch_depth": -1}, "prefetch_depth must be 0 or more, got -1"),
        ({"bucket_bytes": 0}, "bucket_bytes must be 1 or more, got 0"),
        ({"grad_dtype": torch.float16}, "grad_dtype must be .* got torch.float16"),
        ({"grad_dtype": None}, "grad_dtype must be .* got None"),
        ({"reduce_dtype": torch.int8}, "reduce_dtype must be .* got torch.int8"),
        ({"unused_parameters": "ignore"}, r"unused_parameters must be one of \('error', 'zero'\)"),
        ({"grad_reduction": "mean"}, r"grad_reduction must be one of \('average', 'sum'\)"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_config_errors_name_the_value_and_the_limit(options: dict, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        OverlapConfig(**options)
