"""Measure the tile candidates of one layer's six products on this GPU and keep the choices on disk.

python -m megamoe.backends.triton.tune --tokens 8192 --top-k 8 --hidden 7168 --ffn 2048 --experts 32
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence

import torch
import triton

from megamoe.backends.triton.gemm import rows_by_weight
from megamoe.backends.triton.schedule import grid_for
from megamoe.backends.triton.tables import build_tables
from megamoe.backends.triton.tuning import Shape, TileConfig, cache_file, tune
from megamoe.backends.triton.weight_gemm import weight_grad
from megamoe.timing import in_turn

__all__ = ["tune_shape"]


def tune_shape(
    tokens: int,
    top_k: int,
    hidden: int,
    ffn: int,
    experts: int,
    dtype: torch.dtype = torch.bfloat16,
) -> dict[str, TileConfig]:
    """Measure on random data with uniform routing; return the choices, which are then on disk."""
    device = torch.device("cuda", torch.cuda.current_device())

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(size, device=device).to(dtype)

    ids = torch.rand(tokens, experts, device=device).topk(top_k, dim=1).indices
    tables, _ = build_tables(ids, torch.rand(tokens, top_k, device=device), experts)
    rows = tables.row_token.shape[0]
    x, w1, w2 = (
        normal(tokens, hidden),
        normal(experts, 2 * ffn, hidden),
        normal(experts, hidden, ffn),
    )
    row_h, row_i, row_2i = normal(rows, hidden), normal(rows, ffn), normal(rows, 2 * ffn)
    grid = grid_for(device)
    slots = triton.next_power_of_2(max(tokens * top_k, 1))

    def shape(product: str, m: int, n: int, k: int) -> Shape:
        return Shape(product, m, n, k, experts, slots, str(dtype))

    def by_weight(
        a: torch.Tensor, weight: torch.Tensor, gather: bool, transposed: bool
    ) -> Callable[[TileConfig], object]:
        return lambda config: rows_by_weight(
            a, weight, tables, gather=gather, transposed=transposed, config=config, grid=grid
        )

    def summed(a: torch.Tensor, b: torch.Tensor, gather: bool) -> Callable[[TileConfig], object]:
        return lambda config: weight_grad(a, b, tables, gather=gather, config=config, grid=grid)

    return tune(
        [
            (shape("fc1", 0, 2 * ffn, hidden), by_weight(x, w1, True, True)),
            (shape("fc2", 0, hidden, ffn), by_weight(row_i, w2, False, True)),
            (shape("d_act", 0, ffn, hidden), by_weight(x, w2, True, False)),
            (shape("d_x", 0, hidden, 2 * ffn), by_weight(row_2i, w1, False, False)),
            (shape("d_w1", 2 * ffn, hidden, 0), summed(row_2i, row_h, False)),
            (shape("d_w2", hidden, ffn, 0), summed(x, row_i, True)),
        ],
        _times,
        device,
    )


def _times(runs: Sequence[Callable[[], object]]) -> list[float]:
    """Return the median of each in ms, infinity where the tile does not fit the device."""
    fitting = {}
    for index, run in enumerate(runs):
        try:
            run()  # all are compiled before any is measured
        except triton.runtime.errors.OutOfResources:
            continue
        fitting[index] = run
    ms = in_turn(fitting, 9)
    return [ms.get(index, math.inf) for index in range(len(runs))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name in ("tokens", "top-k", "hidden", "ffn", "experts"):
        parser.add_argument(f"--{name}", type=int, required=True)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error(f"this measures on a CUDA GPU, and torch {torch.__version__} sees none")
    chosen = tune_shape(args.tokens, args.top_k, args.hidden, args.ffn, args.experts)
    for key, config in chosen.items():
        print(f"{key}: {config}")
    print(f"kept in {cache_file(torch.device('cuda', torch.cuda.current_device()))}")


if __name__ == "__main__":
    main()
