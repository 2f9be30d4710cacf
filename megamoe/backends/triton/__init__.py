"""Backend `triton`: the stages as Triton kernels for NVIDIA Hopper GPUs.

    stage 1 forward    tables | x gathered into the A loads of GEMM1
    stage 2 forward    SwiGLU | GEMM2 | weighted gather-and-sum to the tokens
    stage 2 backward   dy gathered into the A loads of dy @ W2 | SwiGLU backward | dW2
    stage 1 backward   x gathered again, dW1 | d_l1 @ W1 | gather-and-sum to dx

Nothing waits for the device, no launch depends on a count, and every result has the same bits in
every run. Rows are expert-major with each expert's run padded to a multiple of ROW_ALIGN; rows past
the last run hold whatever the allocation held.
"""

from megamoe.backends.triton.schedule import add_sm_budget
from megamoe.backends.triton.stages import (
    fused_router,
    stage1_backward,
    stage1_forward,
    stage2_backward,
    stage2_forward,
)
from megamoe.backends.triton.support import check_stage1, unsupported

__all__ = [
    "add_sm_budget",
    "check_stage1",
    "fused_router",
    "stage1_backward",
    "stage1_forward",
    "stage2_backward",
    "stage2_forward",
    "unsupported",
]
