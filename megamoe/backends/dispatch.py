"""Which row goes where: the routing tables and the exchange of rows between ranks, in plain torch.

Vocabulary: a *slot* is one of the T * K (token, k) pairs of this rank, numbered token * K + k.
A slot with a negative expert id is dropped; every other slot is one *sent row*, and the sent rows
lie in the order of their global expert (ties in slot order). What a rank gets are *received rows*,
rank by rank; it works on them in *expert-major* order: by local expert, then source rank, then
the order in which they were sent. Nothing here depends on timing, so the same input gives the
same bits.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["Routes", "combine", "dispatch", "dispatch_slots", "plan_routes", "undispatch"]


class Routes(NamedTuple):
    """The routing tables of one forward: S sent rows, P received rows, g local experts, R ranks.

    The last three live on the CPU: they steer loops and split sizes.
    """

    row_of_slot: Tensor  # [T, K] int64: the sent row of each slot; S for a dropped one
    slot_of_row: Tensor  # [S] int64: the slot of each sent row
    received: Tensor  # [P] int64: the received row at each expert-major place
    expert_rows: Tensor  # [g] int64, CPU: rows per local expert
    send_rows: Tensor  # [R] int64, CPU: rows sent to each rank
    receive_rows: Tensor  # [R] int64, CPU: rows received from each rank


def plan_routes(topk_idx: Tensor, local_experts: int, group: dist.ProcessGroup | None) -> Routes:
    """Build the tables; with a group, one all-to-all tells each rank how many rows it gets."""
    ranks = 1 if group is None else dist.get_world_size(group)
    slots = topk_idx.reshape(-1)
    order = torch.argsort(slots, stable=True)
    slot_of_row = order[int((slots < 0).sum()) :]  # negative ids sort to the front
    sent = slot_of_row.numel()
    row_of_slot = torch.full_like(slots, sent)
    row_of_slot[slot_of_row] = torch.arange(sent, device=slots.device)
    send_counts = torch.bincount(slots[slot_of_row], minlength=ranks * local_experts)
    send_counts = send_counts.view(ranks, local_experts)
    receive_counts = send_counts
    if group is not None:
        receive_counts = torch.empty_like(send_counts)
        dist.all_to_all_single(receive_counts, send_counts, group=group)
    # Received rows come by (rank, expert); a stable sort by expert makes them expert-major.
    expert = torch.arange(local_experts, device=slots.device).repeat(ranks)
    expert_of_received = torch.repeat_interleave(expert, receive_counts.reshape(-1))
    receive_counts, send_counts = receive_counts.cpu(), send_counts.cpu()
    return Routes(
        row_of_slot.view_as(topk_idx),
        slot_of_row,
        torch.argsort(expert_of_received, stable=True),
        receive_counts.sum(0),
        send_counts.sum(1),
        receive_counts.sum(1),
    )


def dispatch(tokens: Tensor, routes: Routes, group: dist.ProcessGroup | None) -> Tensor:
    """Bring each token's row ([T, ...]) to its experts: [P, ...] in expert-major order."""
    top_k = routes.row_of_slot.shape[1]
    return _send(tokens, routes.slot_of_row // top_k, routes, group)


def dispatch_slots(values: Tensor, routes: Routes, group: dist.ProcessGroup | None) -> Tensor:
    """Bring one value per slot ([T, K]) to the experts: [P] in expert-major order."""
    return _send(values.reshape(-1), routes.slot_of_row, routes, group)


def undispatch(rows: Tensor, routes: Routes, group: dist.ProcessGroup | None) -> Tensor:
    """Bring expert-major rows ([P, ...]) back to where they came from: [S + 1, ...].

    The last row is zero and belongs to the dropped slots, so ``result[routes.row_of_slot]`` is
    defined for every slot without multiplying anything by a mask (0 * NaN is NaN).
    """
    sent = routes.slot_of_row.numel()
    returned = rows.new_empty((sent + 1, *rows.shape[1:]))
    returned[sent:].zero_()
    if group is None:
        returned[:sent] = rows  # one rank: received order, sent order and expert-major order agree
        return returned
    received = torch.empty_like(rows)
    received[routes.received] = rows
    dist.all_to_all_single(
        returned[:sent],
        received,
        output_split_sizes=routes.send_rows.tolist(),
        input_split_sizes=routes.receive_rows.tolist(),
        group=group,
    )
    return returned


def combine(
    returned: Tensor, routes: Routes, weights: Tensor | None, math_dtype: torch.dtype
) -> Tensor:
    """Return sum over k of weight * row for each token: [T, H] in the rows' dtype.

    ``returned`` is what `undispatch` gave. The sum runs in ``math_dtype`` and in the order of k,
    and is rounded once. Weights of dropped slots are not read.
    """
    tokens, top_k = routes.row_of_slot.shape
    if weights is not None:
        dropped = routes.row_of_slot == returned.shape[0] - 1
        weights = weights.to(math_dtype).masked_fill(dropped, 0)
    total = returned.new_zeros((tokens, returned.shape[1]), dtype=math_dtype)
    for k in range(top_k):
        rows = returned.index_select(0, routes.row_of_slot[:, k]).to(math_dtype)
        if weights is None:
            total += rows
        else:
            total.addcmul_(rows, weights[:, k, None])
    return total.to(returned.dtype)


def _send(source: Tensor, index: Tensor, routes: Routes, group: dist.ProcessGroup | None) -> Tensor:
    rows = source.index_select(0, index)
    if group is None:
        return rows
    received = rows.new_empty((routes.received.numel(), *rows.shape[1:]))
    dist.all_to_all_single(
        received,
        rows,
        output_split_sizes=routes.receive_rows.tolist(),
        input_split_sizes=routes.send_rows.tolist(),
        group=group,
    )
    return received.index_select(0, routes.received)
