"""Pretrain a GPT with mixture-of-experts layers on Megatron-core, its collectives hidden.

    torchrun --nproc-per-node 8 examples/pretrain_megatron.py --config deepseek_v2_lite --mock_data
    python examples/pretrain_megatron.py --config deepseek_v3 --dry_run --world_size 512 ...

`--dry_run` checks every flag and prints the geometry without GPUs. See docs/megatron.md.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a script, from anywhere

from examples.pretraining import flags


def main(argv: Sequence[str]) -> int:
    """Run the script and return its exit code: 2 for flags that make no run, 1 for a dry run with
    ``--strict_overlap`` in which something cannot hide."""
    try:
        args = flags.parse(argv)
        return _dry_run(args) if args.dry_run else _train(args)
    except flags.FlagError as error:
        print(f"pretrain_megatron: {error}", file=sys.stderr)
        return 2


def _dry_run(args: argparse.Namespace) -> int:
    from examples.pretraining.geometry import geometry

    found = geometry(args)
    print(found)
    return 1 if args.strict_overlap and found.findings else 0


def _train(args: argparse.Namespace) -> int:
    import torch.distributed as dist

    from examples.pretraining import training

    training.initialize(args)
    try:
        training.train(args)
    finally:
        dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
