"""The pretraining script on 4 gloo ranks: engines agree, the split hides, checkpoints reshard."""

from __future__ import annotations

import argparse
import importlib.util
import multiprocessing
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import profiling
from profiling import Verdict
from tests import megatron_shim
from tests.ranks import Ranks

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("megatron.core") is None, reason="megatron-core is not installed"
)

SPLIT = ["--enable_primus_turbo", "--use_turbo_mega_moe", "--mega_moe_backend", "reference"]
TINY = ["--config", "tiny", "--mock_data", "--device", "cpu"]


def train(argv: list[str], watch: Any = None) -> list[dict[str, float]]:
    """Run the script on this rank. ``watch`` is called with what `overlap.megatron.wrap` returned."""
    import overlap.megatron
    from examples.pretraining import flags, training

    args = flags.parse([*TINY, *argv])
    wrap = overlap.megatron.wrap

    def watched(*positional: Any, **named: Any) -> Any:
        chunks = wrap(*positional, **named)
        if watch is not None:
            watch(chunks)
        return chunks

    with megatron_shim.on_cpu(), mock.patch.object(overlap.megatron, "wrap", watched):
        megatron_shim.initialize(
            args.expert_model_parallel_size, args.pipeline_model_parallel_size, args.seed
        )
        torch.manual_seed(args.seed)
        return training.train(args)


def curves(steps: int) -> list[list[dict[str, float]]]:
    """Train in fp32 from the same weights: MoELayer and ours on Megatron's engine, ours on ours."""
    from examples.pretraining import model

    build = model.build_chunks
    weights: dict[str, torch.Tensor] = {}

    def same_weights(args: argparse.Namespace, config: Any) -> Any:
        import megamoe.megatron

        if args.use_turbo_mega_moe:  # bf16 is one of the five conditions: claim it
            megamoe.megatron.enable(argparse.Namespace(**{**vars(args), "bf16": True}))
        (chunk,) = build(args, config)
        if not weights:
            weights.update(stack_experts(dict(chunk.named_parameters())))
        else:
            params = dict(chunk.named_parameters())
            assert params.keys() == weights.keys()
            for name, param in params.items():
                param.data.copy_(weights[name])
        return [chunk]

    sizes = ["--bf16", "false", "--train_iters", str(steps), "--expert_model_parallel_size", "2"]
    with mock.patch.object(model, "build_chunks", same_weights):
        return [
            train(sizes),
            train([*sizes, *SPLIT]),
            train([*sizes, *SPLIT, "--mega_moe_router", "fused", "--engine", "native"]),
        ]


def stack_experts(params: dict[str, torch.nn.Parameter]) -> dict[str, torch.Tensor]:
    """Copies of MoELayer's parameters under the names and shapes of ours."""
    result: dict[str, torch.Tensor] = {}
    experts: dict[str, list[torch.Tensor]] = {}
    for name, param in params.items():
        value = param.detach().clone()
        head, mark, tail = name.partition(".local_experts.")
        if mark:
            which = tail.split(".")[1].removeprefix("linear_")
            experts.setdefault(f"{head}.{which}_weight.weight", []).append(value)
        else:
            result[name] = value
    return {**result, **{name: torch.stack(parts) for name, parts in experts.items()}}


def test_engines_and_layers_agree(ranks: Ranks) -> None:
    theirs, ours, native = ranks.run(4, curves, 20)[3]
    assert len(theirs) == 20
    assert theirs[-1]["loss"] < 0.8 * theirs[0]["loss"]
    for figure in ("loss", "grad_norm"):
        want, *others = (
            torch.tensor([record[figure] for record in run], dtype=torch.float64)
            for run in (theirs, ours, native)
        )
        for got in others:
            torch.testing.assert_close(got, want, rtol=2e-5, atol=0)


SIZES = [
    *("--hidden_size", "128", "--moe_ffn_hidden_size", "2048", "--seq_length", "128"),
    *("--micro_batch_size", "2", "--moe_shared_expert_intermediate_size", "16"),
    *("--expert_model_parallel_size", "2", "--train_iters", "7", "--profile_start", "3"),
    *("--profile_steps", "4", *SPLIT),
]


def profiled(folder: str, argv: list[str]) -> list[tuple[str, ...]]:
    """Train with a profile; return the reasons that `explain` named before the first step."""
    import overlap.megatron

    reasons: list[tuple[str, ...]] = []

    def explain(chunks: list[Any]) -> None:
        for chunk in chunks:
            findings = overlap.megatron.explain(chunk).findings
            reasons.append(tuple(finding.reason.value for finding in findings))

    train([*SIZES, "--profile", folder, *argv], explain)
    return reasons


def test_split_hides(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks.run(4, profiled, str(tmp_path), []) == [[()]] * 4
    report = profiling.check(tmp_path)
    layers = ["decoder.layers.0.mlp.experts", "decoder.layers.1.mlp.experts"]
    assert [row.layer for row in report.rows] == layers * 2
    # On busy cores most occurrences of one row may be set aside, and single ones scatter.
    measured = [row for row in report.rows if row.hidden is not None]
    count = sum(row.occurrences for row in measured)
    assert count >= 4
    assert sum(row.hidden * row.occurrences for row in measured) / count > 0.5, report.rows


def test_merged_buckets_fail_as_explained(ranks: Ranks, tmp_path: Path) -> None:
    merged = ["--own_expert_buckets", "false", "--ddp_bucket_size", "1500000"]
    assert ranks.run(4, profiled, str(tmp_path), merged) == [[("shared bucket",)]] * 4
    report = profiling.check(tmp_path)
    assert report.verdict is Verdict.FAIL
    assert len(report.rows) == 4
    for row in report.rows:
        assert row.verdict is Verdict.FAIL
        assert row.hidden == 0
        assert "bucket is shared" in row.finding


def resharded(folder: str) -> dict[str, list[float]]:
    """Save at EP 2 after 3 of 5 steps; resume at EP 4 and EP 1, and into Megatron's own layer."""

    def losses(argv: list[str]) -> list[float]:
        return [r["loss"] for r in train(["--bf16", "false", "--train_iters", "5", *argv])]

    import megamoe.megatron

    enable = megamoe.megatron.enable

    def claim_bf16(args: argparse.Namespace) -> Any:
        return enable(argparse.Namespace(**{**vars(args), "bf16": True}))

    found = {}
    # Megatron writes checkpoints from processes of its own, which daemons may not have.
    not_daemon = mock.patch.dict(multiprocessing.current_process()._config, {"daemon": False})
    with not_daemon, mock.patch.object(megamoe.megatron, "enable", claim_bf16):
        ep = "--expert_model_parallel_size"
        save = ["--save", folder, "--save_interval", "3"]
        found["saved"] = losses([*SPLIT, ep, "2", *save])[3:]
        Path(folder, "latest").write_text("iter_0000003")
        torch.distributed.barrier()
        found["ep 4"] = losses([*SPLIT, ep, "4", "--load", folder])
        found["ep 1"] = losses([*SPLIT, ep, "1", "--load", folder])
        found["MoELayer"] = losses([ep, "2", "--load", folder])
    return found


def test_checkpoint_reshards(ranks: Ranks, tmp_path: Path) -> None:
    found = ranks.run(4, resharded, str(tmp_path))[0]
    assert len(found["saved"]) == 2
    for how, losses in found.items():
        assert losses == pytest.approx(found["saved"], rel=1e-5), how
