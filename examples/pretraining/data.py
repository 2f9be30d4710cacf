"""Batches: mock sequences that follow a rule, or windows of an indexed dataset."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from examples.train_moe import mock_tokens


def batches(
    args: argparse.Namespace, rank: int, ranks: int, device: torch.device
) -> Iterator[dict[str, Tensor]]:
    """Yield microbatches of data-parallel rank ``rank``: tokens, labels and positions, [B, S]."""
    make = _mock if args.mock_data else _indexed
    positions = torch.arange(args.seq_length, device=device)
    positions = positions.expand(args.micro_batch_size, -1)
    for sequences in make(args, rank, ranks):
        sequences = sequences.to(device)
        yield {
            "tokens": sequences[:, :-1].contiguous(),
            "labels": sequences[:, 1:].contiguous(),
            "position_ids": positions,
        }


def _mock(args: argparse.Namespace, rank: int, ranks: int) -> Iterator[Tensor]:
    shape = args.micro_batch_size, args.seq_length + 1
    return mock_tokens(args.vocab_size, shape, args.seed * 1000 + rank)


def _indexed(args: argparse.Namespace, rank: int, ranks: int) -> Iterator[Tensor]:
    """Windows of S + 1 tokens over all documents, shuffled anew in every epoch, dealt to ranks."""
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    dataset: Any = IndexedDataset(args.data_path)
    stream = np.concatenate([dataset[i] for i in range(len(dataset))]).astype(np.int64)
    windows = (len(stream) - 1) // args.seq_length
    per_batch = args.micro_batch_size * ranks
    if windows < per_batch:
        raise ValueError(
            f"{args.data_path} holds {len(stream)} tokens, {windows} sequences of "
            f"{args.seq_length}; one microbatch of all ranks takes {per_batch}"
        )
    epoch = 0
    while True:
        order = np.random.default_rng((args.seed, epoch)).permutation(windows)
        for start in range(0, windows - per_batch + 1, per_batch):
            own = order[start : start + per_batch][rank::ranks]
            rows = [stream[i * args.seq_length : (i + 1) * args.seq_length + 1] for i in own]
            yield torch.from_numpy(np.stack(rows))
        epoch += 1
