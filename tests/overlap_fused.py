"""Weight modules on the CPU whose products take the engine's offer of main_grad, or break it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

WIDTH = 12


class Weight(nn.Module):
    """A weight module as the engine knows them."""

    def __init__(self, takes_main_grad: bool = True, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.takes_main_grad = takes_main_grad
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=dtype) / 2)

    def forward(self) -> nn.Parameter:
        return self.weight

    def backward_dw(self) -> None:
        pass


class Product(torch.autograd.Function):
    """x @ weight.T. ``taker`` gets the weight and its gradient in fp32; it returns what autograd
    is to be given, and writes down what it does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, taker: Taker) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.taker = taker
        return x @ weight.t()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        return dy @ weight, ctx.taker(weight, dy.t().float() @ x.float()), None


class Taker:
    """Takes the offer as the rules say.

    Attributes:
        log: "overwrite", "add" or "refused", once per gradient.
        fails: Raise after the next write.
    """

    def __init__(self) -> None:
        self.log: list[str] = []
        self.fails = False

    def __call__(self, weight: Any, gradient: Tensor) -> Tensor:
        main_grad = self.offered(weight)
        if main_grad is None:
            self.log.append("refused")
            return gradient.to(weight.dtype)
        overwrite = weight.overwrite_main_grad and not weight.grad_added_to_main_grad
        self.log.append("overwrite" if overwrite else "add")
        self.write(main_grad, gradient, overwrite)
        weight.grad_added_to_main_grad = True
        if self.fails:
            self.fails = False
            raise ZeroDivisionError
        return torch._efficientzerotensor(weight.shape, dtype=weight.dtype)

    def offered(self, weight: Any) -> Tensor | None:
        return weight.get_main_grad() if hasattr(weight, "get_main_grad") else None

    def write(self, main_grad: Tensor, gradient: Tensor, overwrite: bool) -> None:
        main_grad.copy_(gradient) if overwrite else main_grad.add_(gradient)


class ForgetfulTaker(Taker):
    """Says that it has written, and has not."""

    def write(self, main_grad: Tensor, gradient: Tensor, overwrite: bool) -> None:
        pass


class HastyTaker(Taker):
    """Writes without asking whether it may."""

    def offered(self, weight: Any) -> Tensor | None:
        return weight.main_grad


class Model(nn.Module):
    """[tokens, WIDTH] to [tokens]: per layer two weight modules, then a head."""

    def __init__(
        self,
        taker: Taker | None = None,
        dtype: torch.dtype = torch.float32,
        takes_main_grad: bool = True,
        layers: int = 2,
    ) -> None:
        super().__init__()
        self.taker = taker or Taker()
        self.used = 2 * layers  # weights that the forward comes to
        self.weights = nn.ModuleList(Weight(takes_main_grad, dtype) for _ in range(2 * layers))
        self.head = nn.Linear(WIDTH, 1, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights[: self.used]:
            x = x + torch.tanh(Product.apply(x, weight(), self.taker))
        return self.head(x).squeeze(-1).float()
