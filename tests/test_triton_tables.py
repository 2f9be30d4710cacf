"""The parts under the stages: routing tables, the draws of the tile counter, the tile choices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from tests.triton_cases import DEVICE, poison, triton

# isort: split
import triton.language as tl

from megamoe.backends.triton import draws, schedule, tuning
from megamoe.backends.triton.tables import ROW_ALIGN, build_tables, max_rows


@pytest.mark.parametrize(
    ("tokens", "top_k", "experts"),
    [(100, 2, 4), (50, 8, 7), (1, 1, 4), (0, 2, 4), (300, 2, 1)],
)
def test_tables_equal_a_stable_sort(tokens: int, top_k: int, experts: int) -> None:
    ids = torch.randint(-1, experts, (tokens, top_k), device=DEVICE)
    weights = torch.rand(tokens, top_k, device=DEVICE)
    poison(1 << 8, 1 << 10)
    tables, row_weight = build_tables(ids, weights, experts)
    counts = torch.bincount(ids[ids >= 0], minlength=experts)
    runs = (counts + ROW_ALIGN - 1) // ROW_ALIGN * ROW_ALIGN
    starts = torch.nn.functional.pad(runs.cumsum(0), (1, 0))
    assert torch.equal(tables.counts.long(), counts)
    assert torch.equal(tables.starts.long(), starts)
    assert (tables.slot_row[ids < 0] == -1).all()
    for expert in range(experts):
        first, last = int(starts[expert]), int(starts[expert + 1])
        slots = (ids.flatten() == expert).nonzero().flatten()
        rows = tables.slot_row.flatten()[slots].long()
        assert torch.equal(rows, first + torch.arange(len(slots), device=DEVICE))
        assert torch.equal(tables.row_token[rows].long(), slots // top_k)
        assert torch.equal(row_weight[rows], weights.flatten()[slots])
        padding = slice(first + len(slots), last)
        assert (tables.row_token[padding] == -1).all()
        assert (row_weight[padding] == 0).all()
        assert (tables.tile_expert[first // ROW_ALIGN : last // ROW_ALIGN] == expert).all()


def test_an_expert_window_takes_its_own_ids() -> None:
    ids = torch.tensor([[0, 5], [3, 4], [2, -1]], device=DEVICE)
    tables, _ = build_tables(ids, torch.ones(3, 2, device=DEVICE), 2, first_expert=3, all_experts=6)
    assert tables.slot_row.tolist() == [[-1, -1], [0, ROW_ALIGN], [-1, -1]]


@pytest.mark.parametrize("experts", [1, 3, 64])
@pytest.mark.parametrize("slots", [0, 1, 127, 128, 129, 1000])
def test_max_rows_is_reached_and_never_passed(slots: int, experts: int) -> None:
    def rows(counts: list[int]) -> int:
        return sum(-(-count // ROW_ALIGN) * ROW_ALIGN for count in counts)

    spread = min(experts, slots)
    # The worst routing puts one slot on all experts but one.
    worst = rows([1] * max(spread - 1, 0) + [slots - max(spread - 1, 0)])
    even = rows([slots // experts + (e < slots % experts) for e in range(experts)])
    assert max(worst, even) <= max_rows(slots, experts)
    assert max_rows(slots, experts) - max(worst, even) <= ROW_ALIGN


@triton.jit
def _list_draws(out_ptr, tiles, most):
    index = tl.program_id(0)
    while index < tiles:  # as if every program drew in turn
        first, end, step = draws.draw_tiles(index, tiles, tl.num_programs(0), most)
        for tile in range(first, end, step):
            tl.atomic_add(out_ptr + tile, 1, mask=tile < tiles)
        index += tl.num_programs(0)


@pytest.mark.parametrize("most", [1, 4, 8, 16])
@pytest.mark.parametrize("tiles", [1, 7, 12, 16, 24, 25, 61, 100, 311])
def test_draws_cover_every_tile_once(tiles: int, most: int) -> None:
    counts = torch.zeros(tiles, dtype=torch.int32, device=DEVICE)
    _list_draws[(3,)](counts, tiles, most)
    assert (counts == 1).all()


@triton.jit
def _sizes(out_ptr, tiles, grid, most):
    first, end, step = draws.draw_tiles(tl.program_id(0), tiles, grid, most)
    tl.store(out_ptr + tl.program_id(0), tl.where(first < tiles, tl.cdiv(end - first, step), 0))


def test_draws_get_smaller_and_the_launch_knows_how_many_there_are() -> None:
    sizes = torch.zeros(200, dtype=torch.int32, device=DEVICE)
    _sizes[(200,)](sizes, 100, 3, 8)
    # A round of three draws takes 24, 12, 6 or 3 tiles, and one more of its size fits behind it.
    assert sizes.tolist()[:36] == [8] * 9 + [4] * 3 + [2] * 3 + [1] * 10 + [0] * 11
    grid = schedule.Grid(3, 1)
    assert grid.programs(100, 8) == 3 + 7  # a quarter of the 25 draws, rounded up


@pytest.mark.parametrize(
    ("steps", "tiles"), [(1, 16), (8, 16), (24, 8), (32, 8), (112, 4), (999, 4)]
)
def test_tiles_of_few_steps_are_drawn_more_at_a_time(steps: int, tiles: int) -> None:
    assert schedule.tiles_per_draw(steps) == tiles


@triton.jit
def _draw_again(out_ptr, next_draw_ptr, tiles, resident):
    tl.store(out_ptr + tl.program_id(0), draws.next_draw(next_draw_ptr, tiles, resident))


def test_programs_past_the_resident_ones_take_no_second_draw() -> None:
    drawn = torch.full((5,), -1, dtype=torch.int32, device=DEVICE)
    counter = torch.full((1,), 7, dtype=torch.int32, device=DEVICE)
    _draw_again[(5,)](drawn, counter, 100, 3)
    assert sorted(drawn[:3].tolist()) == [7, 8, 9]
    assert drawn[3:].tolist() == [100, 100]  # which is past the last tile
    assert counter.item() == 10


def test_tuned_choices_are_kept_and_found_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEGAMOE_CACHE_DIR", str(tmp_path))
    tuning.forget()
    device = torch.device(DEVICE)
    shape = tuning.Shape("fc1", 0, 4096, 7168, 32, 65536, "torch.bfloat16")
    other = tuning.Shape("fc1", 0, 4096, 7168, 32, 32768, "torch.bfloat16")
    default = tuning.choose(shape, device)
    assert default == tuning.candidates("fc1")[0]
    wanted = tuning.candidates("fc1")[2]

    def tune(shape: tuning.Shape, of_default: float) -> None:
        def measure(runs: Sequence[Callable[[], object]]) -> list[float]:
            return [of_default if run() == wanted else 1.0 for run in runs]

        tuning.tune([(shape, lambda config: config)], measure, device)

    tune(shape, 0.9)
    tuning.forget()
    assert tuning.choose(shape, device) == wanted
    assert tuning.choose(other, device) == default
    tune(other, 0.99)  # too little to leave the default for
    assert tuning.choose(other, device) == default
    assert tuning.choose(shape, device) == wanted  # the table grows
    tuning.cache_file(device).unlink()
    tuning.forget()
    assert tuning.choose(shape, device) == default
