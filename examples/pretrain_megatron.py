"""Pretrain a GPT with mixture-of-experts layers on Megatron-core, its collectives hidden.

    torchrun --nproc-per-node 8 examples/pretrain_megatron.py --config deepseek_v2_lite --mock_data
    python examples/pretrain_megatron.py --config deepseek_v3 --dry_run --world_size 512 ...
    python examples/pretrain_megatron.py --config tiny --mock_data --device cpu --world_size 4

The last one starts its ranks itself, for a trial without GPUs. `--dry_run` checks every flag and
prints the geometry without GPUs. See docs/megatron.md.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a script, from anywhere

from examples.pretraining import flags

# Every rank would say each of them several times; docs/megatron.md has what happens without these.
warnings.filterwarnings("ignore", message=".*Apex (is|are) not installed")
warnings.filterwarnings("ignore", message="full scope is deprecated")
warnings.filterwarnings("ignore", message="`torch.distributed", category=FutureWarning)


def main(argv: Sequence[str]) -> int:
    """Run the script and return its exit code: 2 for flags that make no run, 1 for a dry run with
    ``--strict_overlap`` in which something cannot hide."""
    try:
        args = flags.parse(argv)
        if importlib.util.find_spec("megatron") is None:
            raise flags.FlagError("megatron-core is not installed: pip install -e '.[megatron]'")
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
    import torch

    if args.device == "cuda":
        if not torch.cuda.is_available():
            raise flags.FlagError(
                f"torch {torch.__version__} sees no GPU: give device cpu and a world_size for a "
                "trial without, or dry_run"
            )
        if not {"LOCAL_RANK", "SLURM_LOCALID"} & os.environ.keys():
            raise flags.FlagError("no launcher has started this: use torchrun or srun")
        _run(args)
    elif "RANK" in os.environ:
        _run_on_cpu(int(os.environ["RANK"]), args)
    else:
        from examples.pretraining.geometry import geometry

        args.world_size = ranks = args.world_size or 1
        geometry(args)  # refuses sizes that do not divide
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # its notices would cut into the progress
        with tempfile.TemporaryDirectory() as folder:
            store = {"init_method": f"file://{folder}/store", "world_size": ranks}
            torch.multiprocessing.spawn(_run_on_cpu, (args, store), nprocs=ranks)
    return 0


def _run_on_cpu(
    rank: int, args: argparse.Namespace, store: Mapping[str, Any] | None = None
) -> None:
    """Train as one rank, started by torchrun or, with a ``store``, by this script."""
    from examples.train_moe import share_cores
    from tests import megatron_shim  # Megatron-core itself asks for a GPU

    share_cores(store["world_size"] if store else int(os.environ["LOCAL_WORLD_SIZE"]))
    with megatron_shim.on_cpu():
        _run(args, **({"rank": rank, **store} if store else {}))


def _run(args: argparse.Namespace, **launch: Any) -> None:
    import torch.distributed as dist

    from examples.pretraining import training

    training.initialize(args, **launch)
    try:
        training.train(args)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
