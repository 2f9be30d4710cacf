"""The optimizer's state as plain data, one part per rank, and back.

    format                1
    sizes                 {"data_parallel", "expert_data_parallel", "rank"}
    pieces                by parameter name: the range [start, stop) of the flattened parameter that
                          this rank owns, its fp32 "master" and the inner optimizer's "state" of it
    param_groups          the options of each group and the "names" of all its parameters

A piece says by itself what it is a part of, so that other layouts can be assembled from the parts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from overlap.errors import CheckpointMismatchError
from overlap.layout import Piece

if TYPE_CHECKING:
    from overlap.optimizer import DistributedOptimizer

__all__ = ["load", "save"]

FORMAT = 1


def save(optimizer: DistributedOptimizer) -> dict[str, Any]:
    """Return this rank's part."""
    pieces = {}
    for name, (piece, master) in optimizer.pieces().items():
        start, stop = _range(piece)
        pieces[name] = {
            "start": start,
            "stop": stop,
            # A copy: fp32 masters are views, and saving a view saves all it is a view of.
            "master": master.detach().clone(),
            "state": dict(optimizer.inner.state.get(master, {})),
        }
    groups = [
        {**{key: value for key, value in group.items() if key != "params"}, "names": list(names)}
        for group, names in zip(optimizer.param_groups, optimizer.group_names, strict=True)
    ]
    return {"format": FORMAT, "sizes": _sizes(optimizer), "pieces": pieces, "param_groups": groups}


def load(optimizer: DistributedOptimizer, state: dict[str, Any]) -> None:
    """Put one rank's part into its masters and its inner optimizer."""
    if state.get("format") != FORMAT:
        raise CheckpointMismatchError(
            f"not an optimizer state of this library: format {state.get('format')!r}, "
            f"expected {FORMAT}"
        )
    _check("sizes", state["sizes"], _sizes(optimizer))
    own = optimizer.pieces()
    saved = state["pieces"]
    _check(
        "the parts of parameters on this rank",
        {name: (part["start"], part["stop"]) for name, part in saved.items()},
        {name: _range(piece) for name, (piece, _) in own.items()},
    )
    _check(
        "the parameters of the groups",
        dict(enumerate(group["names"] for group in state["param_groups"])),
        dict(enumerate(optimizer.group_names)),
    )
    # torch's own loader casts and moves the state; it counts parameters through the groups.
    names = {master: name for name, (_, master) in own.items()}
    inner = optimizer.inner.state_dict()
    inner["state"] = {}
    for saved_group, group, numbered in zip(
        state["param_groups"], optimizer.param_groups, inner["param_groups"], strict=True
    ):
        numbered.update({key: value for key, value in saved_group.items() if key != "names"})
        for number, master in zip(numbered["params"], group["params"], strict=True):
            if saved[names[master]]["state"]:
                inner["state"][number] = saved[names[master]]["state"]
    optimizer.inner.load_state_dict(inner)
    with torch.no_grad():
        for name, (_, master) in own.items():
            master.copy_(saved[name]["master"])


def _range(piece: Piece) -> tuple[int, int]:
    """The piece within its own parameter, flattened."""
    return piece.start - piece.member.start, piece.stop - piece.member.start


def _sizes(optimizer: DistributedOptimizer) -> dict[str, int]:
    groups = optimizer.ddp.groups
    return {
        "data_parallel": dist.get_world_size(groups.dp),
        "expert_data_parallel": dist.get_world_size(groups.edp),
        "rank": dist.get_rank(groups.dp),
    }


def _check(what: str, saved: dict[Any, Any], own: dict[Any, Any]) -> None:
    """Raise where the checkpoint differs from this run, showing the first difference."""
    for key in dict.fromkeys((*saved, *own)):
        if saved.get(key) != own.get(key):
            raise CheckpointMismatchError(
                f"{what} differ at {key!r}: {saved.get(key)} in the checkpoint, {own.get(key)} "
                "here. Resume with the sizes, the model and the bucket_bytes it was written with"
            )
