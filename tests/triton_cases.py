"""What the tests of the Triton backend share: the device, the interpreter's gaps, and cases.

On a GPU the kernels run compiled, in bf16. Elsewhere they run under Triton's interpreter, in fp32
(its bf16 product is wrong on a CPU); tests/conftest.py switches it on before anything imports
triton. Two gaps of the interpreter in Triton 3.6 are filled here, for the tests alone: NumPy 2.4
refuses int() of its one-element arrays, and it has no TMA reduction.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

triton = pytest.importorskip("triton")
interpreter = pytest.importorskip("triton.runtime.interpreter")

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
DTYPE = torch.bfloat16 if ON_GPU else torch.float32
TOLERANCE = 1e-2 if ON_GPU else 1e-5  # of a relative error, per tensor
NAMES = ("y", "dx", "d_topk_weights", "dW1", "dW2")

if ON_GPU and torch.cuda.get_device_capability()[0] != 9:
    pytest.skip("the Triton backend is written for Hopper", allow_module_level=True)


def _fill_gaps() -> None:
    patch_tensor = interpreter._patch_lang_tensor

    def patch(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    def reduce(builder: Any, kind: Any, desc: Any, value: Any, indices: Any) -> Any:
        pointers, mask = desc.materialize_pointers(indices)
        value.data = (
            value.data + builder.create_masked_load(pointers, mask, None, None, None, False).data
        )
        return builder.create_masked_store(pointers, value, mask, None, None)

    interpreter._patch_lang_tensor = patch
    interpreter.InterpreterBuilder.create_descriptor_reduce = reduce


if not ON_GPU:
    _fill_gaps()


class Case(NamedTuple):
    """Random inputs of the stages."""

    x: Tensor
    ids: Tensor
    weights: Tensor
    w1: Tensor
    w2: Tensor
    dy: Tensor

    @property
    def leaves(self) -> tuple[Tensor, ...]:
        return self.x, self.weights, self.w1, self.w2


def make_case(tokens: int, top_k: int, experts: int, hidden: int, ffn: int, seed: int = 0) -> Case:
    """Normal inputs with signed routing weights; an id may be -1, and may repeat in a token."""
    rng = torch.Generator().manual_seed(seed)

    def normal(*shape: int, scale: float = 1.0, dtype: torch.dtype = DTYPE) -> Tensor:
        return (torch.randn(shape, generator=rng) * scale).to(DEVICE, dtype)

    return Case(
        normal(tokens, hidden).requires_grad_(),
        torch.randint(-1, experts, (tokens, top_k), generator=rng).to(DEVICE),
        normal(tokens, top_k, dtype=torch.float32).requires_grad_(),
        normal(experts, 2 * ffn, hidden, scale=hidden**-0.5).requires_grad_(),
        normal(experts, hidden, ffn, scale=ffn**-0.5).requires_grad_(),
        normal(tokens, hidden),
    )


def poison(*sizes: int) -> None:
    """Leave NaN in the allocator's free blocks, so that what a kernel does not write shows."""
    for size in sizes:
        for _ in range(3):
            torch.full((size,), float("nan"), device=DEVICE)


def relative_error(got: Tensor, want: Tensor) -> float:
    got, want = got.detach().double(), want.detach().double()
    return float((got - want).norm() / want.norm().clamp_min(1e-300))


def assert_close(got: tuple[Tensor, ...], want: tuple[Tensor, ...]) -> None:
    for name, a, b in zip(NAMES, got, want, strict=True):
        assert a.shape == b.shape, name
        assert torch.isfinite(a).all(), name
        if b.abs().max() == 0:
            assert not a.any(), name
        else:
            error = relative_error(a, b)
            assert error < TOLERANCE, f"{name}: relative error {error:.1e}"
