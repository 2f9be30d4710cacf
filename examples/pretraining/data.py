"""Batches: mock sequences that follow a rule, or windows of an indexed dataset."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor


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
    """[B, S + 1] int64: a token is an affine function of the one before; one in eight is noise."""
    generator = torch.Generator().manual_seed(args.seed * 1000 + rank)
    shape = (args.micro_batch_size, args.seq_length + 1)
    while True:
        tokens = torch.randint(args.vocab_size, shape, generator=generator)
        noisy = torch.rand(shape, generator=generator) < 0.125
        for i in range(1, shape[1]):
            follow = (tokens[:, i - 1] * 5 + 7) % args.vocab_size
            tokens[:, i] = torch.where(noisy[:, i], tokens[:, i], follow)
        yield tokens


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
