"""The two-stage MoE layer for Megatron-core (0.16 to 0.19); needs megatron-core installed."""

from megamoe.megatron.layer import MegaMoEMegatronLayer
from megamoe.megatron.options import MegaMoEOptions

__all__ = ["MegaMoEMegatronLayer", "MegaMoEOptions"]
