"""The names that are recognised: of kernels, copies, calls and launches.

`KERNELS` is the one table; docs/traces-recognised.md lists its rows, and a test compares the two.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from profiling.ranges import Kind, parse

__all__ = [
    "CALLS",
    "COPIES",
    "GRAPHS",
    "KERNELS",
    "SIGNALS",
    "Name",
    "is_collective_call",
    "is_communication_kernel",
    "is_graph_launch",
    "is_peer_copy",
    "is_signal",
    "is_within_devices",
]


class Name(NamedTuple):
    """A kind of name: a regular expression that is searched for, and one that it matches."""

    what: str
    pattern: str
    example: str


# Kernels that move data between ranks. DeepEP's layout kernel moves nothing and is not among them.
KERNELS = (
    Name("NCCL, RCCL before 2.18", "ncclKernel", "ncclKernel_AllReduce_RING_LL_Sum_float()"),
    Name("NCCL, RCCL", "ncclDevKernel", "ncclDevKernel_AllGather_RING_LL()"),
    Name("RCCL, one kernel for all", "ncclDevKernel", "ncclDevKernel_Generic_1()"),
    Name("RCCL, older", "rcclGenericKernel|rcclDevKernel", "rcclGenericKernel()"),
    Name("NCCL on symmetric memory", "ncclSymk?DevKernel", "ncclSymkDevKernel_AllGather_LL()"),
    Name("MSCCL", "mscclKernel", "mscclKernel_Sum_half_Simple_false()"),
    Name("MSCCL++", "mscclpp", "void allreduce7<__half>(mscclpp::DeviceHandle*)"),
    Name(
        "DeepEP within a node",
        r"\bintranode::\w",
        "void deep_ep::intranode::dispatch<8, 768, 8192>(int4*)",
    ),
    Name(
        "DeepEP between nodes",
        r"\binternode::\w",
        "void deep_ep::internode::combine<__nv_bfloat16>(int4*)",
    ),
    Name(
        "DeepEP, low latency",
        r"\binternode_ll::\w",
        "void deep_ep::internode_ll::dispatch<true, 7168>(void*)",
    ),
    Name(
        "DeepEP hybrid",
        r"\bhybrid_ep::(?:dispatch|combine)",
        "void hybrid_ep::dispatch_kernel<4>(hybrid_ep::dispatch_kernel_param_t)",
    ),
    Name("NVSHMEM", "nvshmem", "nvshmemi_transfer_rma_put_kernel()"),
    Name("rocSHMEM", "rocshmem", "rocshmem_putmem_kernel()"),
    Name(
        "torch symmetric memory",
        "symm_mem|symmetric_memory",
        "void c10d::symmetric_memory::put_signal_kernel(unsigned int**)",
    ),
    Name(
        "torch symmetric memory, multicast",
        "multimem_",
        "void (anonymous namespace)::multimem_all_gather_kernel<16>(char*)",
    ),
    Name(
        "torch symmetric memory, all-reduce",
        "(?:one|two)_shot_all_reduce",
        "void (anonymous namespace)::two_shot_all_reduce_kernel<c10::BFloat16, 16>()",
    ),
    Name(
        "torch within a node",
        "intra_node_comm|(?:one|two)ShotAllReduce",
        "void c10d::intra_node_comm::oneShotAllReduceKernel<8u>()",
    ),
    Name(
        "custom all-reduce of vLLM and aiter",
        "cross_device_reduce",
        "void vllm::cross_device_reduce_1stage<__nv_bfloat16, 8>()",
    ),
)
# Copies that can carry a collective. Between peers it must be one; within a device it may pack.
COPIES = (
    Name("copy between devices", "PtoP|PeerToPeer", "Memcpy PtoP (Device -> Device)"),
    Name("copy on a device", "DtoD|DeviceToDevice", "Memcpy DtoD (Device -> Device)"),
)
# Ranges whose launches are a collective's.
CALLS = (
    Name("c10d's own record", r"\Arecord_param_comms\Z", "record_param_comms"),
    Name("c10d operator", r"\Ac10d::(?!wait)", "c10d::_allgather_base_"),
    Name("c10d on NCCL or RCCL", r"\Anccl:", "nccl:_all_gather_base"),
    Name(
        "gather by copy engines",
        r"\Asymm_mem::_low_contention",
        "symm_mem::_low_contention_all_gather",
    ),
)
# Kernels of those above that only signal: what the copies between them move is the collective.
SIGNALS = (
    Name(
        "signals of torch symmetric memory",
        r"symmetric_memory::(?:barrier|put_signal|wait_signal)_kernel",
        "void c10d::symmetric_memory::barrier_kernel(unsigned int**)",
    ),
)
GRAPHS = (
    Name("CUDA graph", r"\Acu(?:da)?GraphLaunch", "cudaGraphLaunch"),
    Name("HIP graph", r"\AhipGraphLaunch", "hipGraphLaunch"),
)


def _any_of(names: tuple[Name, ...]) -> re.Pattern[str]:
    return re.compile("|".join(dict.fromkeys(f"(?:{name.pattern})" for name in names)))


_KERNELS, _CALLS, _GRAPHS = _any_of(KERNELS), _any_of(CALLS), _any_of(GRAPHS)
_SIGNALS = _any_of(SIGNALS)
_PEER, _WITHIN = _any_of(COPIES[:1]), _any_of(COPIES)


def is_communication_kernel(name: str) -> bool:
    """Return whether a device kernel of this name moves data between ranks."""
    return _KERNELS.search(name) is not None


def is_signal(name: str) -> bool:
    """Return whether a kernel of this name only signals to its peers and moves nothing."""
    return _SIGNALS.search(name) is not None


def is_peer_copy(name: str) -> bool:
    """Return whether a copy of this name goes from one device to another."""
    return _PEER.search(name) is not None


def is_within_devices(name: str) -> bool:
    """Return whether a copy of this name has no part in the host's memory."""
    return _WITHIN.search(name) is not None


def is_collective_call(name: str) -> bool:
    """Return whether what a CPU range of this name launches belongs to a collective."""
    if _CALLS.search(name) is not None:
        return True
    label = parse(name)
    return label is not None and label.kind in (Kind.PARAM_GATHER, Kind.GRAD_REDUCE)


def is_graph_launch(name: str) -> bool:
    """Return whether a call of this name launches a whole graph."""
    return _GRAPHS.search(name) is not None
