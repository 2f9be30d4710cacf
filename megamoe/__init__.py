"""The MoE layer whose two expert weights live in two modules and whose compute is two stages."""

from megamoe import errors
from megamoe.config import MegaMoEConfig
from megamoe.experts import MegaMoEExperts
from megamoe.layer import MegaMoELayer
from megamoe.router import MegaMoERouter
from megamoe.stages import fused_mega_moe, mega_moe_stage1, mega_moe_stage2
from megamoe.weight import MegaMoEWeightModule

__all__ = [
    "MegaMoEConfig",
    "MegaMoEExperts",
    "MegaMoELayer",
    "MegaMoERouter",
    "MegaMoEWeightModule",
    "errors",
    "fused_mega_moe",
    "mega_moe_stage1",
    "mega_moe_stage2",
]
