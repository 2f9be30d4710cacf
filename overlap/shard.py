"""The fp32 master weights of one bucket's shard."""

from __future__ import annotations

from torch import Tensor, nn

from overlap.bucket import Bucket
from overlap.layout import Piece

__all__ = ["MasterShard"]


class MasterShard:
    """What an optimizer steps of one bucket: a master tensor for each piece of the shard.

    Attributes:
        master: [layout.shard_numel] fp32; the bucket's own memory where the parameters are fp32.
        pieces: Where each master lies (empty where this rank's shard is all padding).
        masters: Views of ``master``, one per piece, flat; leaf tensors for the optimizer.
    """

    def __init__(self, bucket: Bucket) -> None:
        self.bucket = bucket
        self.master = bucket.param_shard.float()
        self.pieces = bucket.layout.pieces(bucket.rank)
        self.masters = [nn.Parameter(self.master[self._place(piece)]) for piece in self.pieces]
        self._held: list[Tensor | None] = []

    def _place(self, piece: Piece) -> slice:
        offset = self.bucket.layout.shard(self.bucket.rank).start
        return slice(piece.start - offset, piece.stop - offset)

    def take_grads(self) -> None:
        """Let the masters' ``grad`` be the reduced gradients, as fp32."""
        reduced = self.bucket.grad_shard.float()
        for piece, master in zip(self.pieces, self.masters, strict=True):
            master.grad = reduced[self._place(piece)]

    def hold_grads(self) -> None:
        """Hide the gradients, so that a step leaves these masters alone."""
        self._held = [master.grad for master in self.masters]
        for master in self.masters:
            master.grad = None

    def release_grads(self) -> None:
        """Put the gradients back."""
        for master, grad in zip(self.masters, self._held, strict=True):
            master.grad = grad
        self._held = []  # the next gradients replace these

    def publish(self) -> None:
        """Round the masters into the bucket's parameters."""
        if self.master.dtype != self.bucket.param_shard.dtype:
            self.bucket.param_shard.copy_(self.master)

    def adopt(self) -> None:
        """Take the bucket's parameters as the masters: somebody has written to them."""
        if self.master.dtype != self.bucket.param_shard.dtype:
            self.master.copy_(self.bucket.param_shard)
