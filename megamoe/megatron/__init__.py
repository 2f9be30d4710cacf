"""The two-stage MoE layer for Megatron-core (0.16 to 0.19); needs megatron-core installed.

if megamoe.megatron.enable(args):                      # all five conditions hold
    spec = get_gpt_decoder_block_spec(config, ...)     # Megatron's builder, our layer
"""

from megamoe.megatron.enabling import Decision, disable, enable, split_spec
from megamoe.megatron.layer import MegaMoEMegatronLayer
from megamoe.megatron.options import MegaMoEOptions

__all__ = [
    "Decision",
    "MegaMoEMegatronLayer",
    "MegaMoEOptions",
    "disable",
    "enable",
    "split_spec",
]
