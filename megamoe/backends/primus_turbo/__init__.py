"""Backend `primus_turbo`: an adapter over Primus-Turbo's two-stage ops for AMD gfx950.

The stages are Primus-Turbo's own autograd nodes and open its own profiler ranges. What is added
here is what those ops ask of their caller: limits checked before anything is launched, tokens
padded to a size that they compute correctly, and their one shared buffer kept from being replaced
while a backward still needs it. Importing this does not import primus_turbo; `load` does. Nothing
of it has run on AMD hardware yet: see docs/amd.md.
"""

from megamoe.backends.primus_turbo.limits import check_layer, check_stage1, unsupported
from megamoe.backends.primus_turbo.package import operations as load
from megamoe.backends.primus_turbo.router import fused_router
from megamoe.backends.primus_turbo.stages import fused, stage1, stage2

__all__ = [
    "check_layer",
    "check_stage1",
    "fused",
    "fused_router",
    "load",
    "stage1",
    "stage2",
    "unsupported",
]
