"""Causal attention by torch, for Megatron-core without transformer-engine.

Megatron's own DotProductAttention takes one head size for keys and values, so multi-latent
attention, which has two, would need transformer-engine.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F


class CausalAttention(nn.Module):
    """forward(query [S, B, N, D], key [S, B, N, D], value [S, B, N, V], ...) -> [S, B, N V].

    Every position sees itself and those before it; a mask is not looked at, packed sequences and
    fewer key than query heads are not taken.
    """

    def __init__(self, *, softmax_scale: float | None = None, **_: Any) -> None:
        super().__init__()
        self.softmax_scale = softmax_scale

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Any = None,
        *,
        packed_seq_params: Any = None,
        **_: Any,
    ) -> Tensor:
        assert packed_seq_params is None
        q, k, v = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.softmax_scale)
        return y.permute(2, 0, 1, 3).flatten(2)


def with_causal_attention(block_spec: Any) -> Any:
    """Return a copy of a transformer block's spec whose layers attend with `CausalAttention`."""

    def of_layer(layer: Any) -> Any:
        attention = layer.submodules.self_attention
        inner = dataclasses.replace(attention.submodules, core_attention=CausalAttention)
        attention = dataclasses.replace(attention, submodules=inner)
        return dataclasses.replace(
            layer, submodules=dataclasses.replace(layer.submodules, self_attention=attention)
        )

    return dataclasses.replace(
        block_spec, layer_specs=[of_layer(layer) for layer in block_spec.layer_specs]
    )
