"""How NCCL runs the collectives of Megatron-core's DDP: through Megatron's own configuration.

Megatron makes its groups in initialize_model_parallel, and takes the options from a file whose keys
are its names of groups.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from overlap.nccl import NcclOptions, resolve

__all__ = ["environment", "write_nccl_config"]

# What DDP gathers and reduces in; the two "intra" ones with several optimizer instances.
_GROUPS = ("dp_cp", "intra_dp_cp", "ep_dp", "intra_ep_dp")


def write_nccl_config(path: str | Path, options: NcclOptions | str = "balanced") -> str:
    """Write the file for initialize_model_parallel's ``nccl_communicator_config_path``; return its
    path.

    Args:
        path: Is replaced; every rank may write it, and read it at once: nobody sees half a file.
        options: As in `overlap.ProcessGroups.build`. Groups whose collectives nothing hides, such
            as the exchange of tokens, keep NCCL's choice.

    Raises:
        ValueError: There is no preset of that name.
    """
    chosen = resolve(options)
    entry = {
        "is_high_priority_stream": chosen.high_priority,
        "min_ctas": chosen.min_ctas,
        "max_ctas": chosen.max_ctas,
        "cga_cluster_size": chosen.cluster_size,
    }
    given = {name: value for name, value in entry.items() if value is not None}
    text = json.dumps(dict.fromkeys(_GROUPS, given), indent=2)  # JSON is YAML, which Megatron reads
    with tempfile.NamedTemporaryFile(
        "w", encoding="utf-8", dir=Path(path).parent, prefix=Path(path).name, delete=False
    ) as draft:
        draft.write(text)
    Path(draft.name).replace(path)
    return str(path)


def environment(options: NcclOptions | str = "balanced") -> str:
    """Return the same as NCCL's environment variables, which act on every group of the process."""
    chosen = resolve(options)
    return " ".join(
        f"{name}={value}"
        for name, value in (
            ("NCCL_MIN_CTAS", chosen.min_ctas),
            ("NCCL_MAX_CTAS", chosen.max_ctas),
            ("NCCL_CGA_CLUSTER_SIZE", chosen.cluster_size),
        )
        if value is not None
    )
