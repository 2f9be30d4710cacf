"""The pretraining script on 4 gloo ranks: engines agree, the split hides, checkpoints reshard."""

from __future__ import annotations

import argparse
import gc
import importlib.util
from contextlib import ExitStack, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

import profiling
from profiling import Verdict
from tests import megatron_shim
from tests.ranks import Ranks

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed"
)

SPLIT = ["--enable_primus_turbo", "--use_turbo_mega_moe", "--mega_moe_backend", "reference"]
TINY = ["--config", "tiny", "--mock_data", "--device", "cpu"]


def train(argv: list[str], watch: Any = None) -> list[dict[str, float]]:
    """Run the script on this rank; ``watch`` gets what `overlap.megatron.wrap` returned."""
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
    from benchmarks.megatron_weights import under_our_names
    from examples.pretraining import model

    build = model.build_chunks
    weights: dict[str, torch.Tensor] = {}

    def same_weights(args: argparse.Namespace, config: Any) -> Any:
        import megamoe.megatron

        if args.use_turbo_mega_moe:  # bf16 is one of the five conditions: claim it
            megamoe.megatron.enable(argparse.Namespace(**{**vars(args), "bf16": True}))
        (chunk,) = build(args, config)
        if not weights:
            weights.update(under_our_names(dict(chunk.named_parameters())))
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


HIDES = ["--config", "hides_on_cpu", "--world_size", "4"]
SMALL = ["--hidden_size", "128", "--moe_ffn_hidden_size", "2048", "--seq_length", "128"]


def profiled(folder: str, argv: list[str]) -> list[tuple[str, ...]]:
    """Train with a profile; return the reasons that `explain` named before the first step."""
    import overlap.megatron
    from examples.train_moe import share_cores

    reasons: list[tuple[str, ...]] = []

    def explain(chunks: list[Any]) -> None:
        for chunk in chunks:
            findings = overlap.megatron.explain(chunk).findings
            reasons.append(tuple(finding.reason.value for finding in findings))

    gc.collect()  # groups of models of earlier tests have threads that poll
    share_cores(4)
    train([*HIDES, "--profile", folder, *argv], explain)
    return reasons


def test_split_hides(ranks: Ranks, tmp_path: Path) -> None:
    """Both checks pass. Other work on the cores can only take overlap away, so that one pass out of
    a few profiles is enough; what is not wired to hide never passes."""
    for attempt in range(4):
        folder = tmp_path / str(attempt)
        assert ranks.run(4, profiled, str(folder), []) == [[()]] * 4
        report = profiling.check(folder)
        layers = ["decoder.layers.0.mlp.experts", "decoder.layers.1.mlp.experts"]
        assert [row.layer for row in report.rows] == layers * 2
        if report.verdict is Verdict.PASS:
            return
    pytest.fail(profiling.to_text(report))


def test_merged_buckets_fail_as_explained(ranks: Ranks, tmp_path: Path) -> None:
    merged = [*SMALL, "--own_expert_buckets", "false", "--ddp_bucket_size", "2000000"]
    assert ranks.run(4, profiled, str(tmp_path), merged) == [[("shared bucket",)]] * 4
    report = profiling.check(tmp_path)
    assert report.verdict is Verdict.FAIL
    assert len(report.rows) == 4
    for row in report.rows:
        assert row.verdict is Verdict.FAIL
        assert row.hidden == 0
        assert "bucket is shared" in row.finding


def resharded(
    folder: str, saved_ep: str, loaded_ep: list[str], padding_kept: bool = True
) -> tuple[list[float], dict[str, list[float]]]:
    """Save after 3 of 5 steps; return their last losses, and those of runs that resume at other EP
    sizes and with Megatron's own layer."""
    import megamoe.megatron
    import overlap.megatron

    def losses(argv: list[str]) -> list[float]:
        return [r["loss"] for r in train(["--bf16", "false", "--train_iters", "5", *argv])]

    enable = megamoe.megatron.enable

    def claim_bf16(args: argparse.Namespace) -> Any:
        return enable(argparse.Namespace(**{**vars(args), "bf16": True}))

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(megamoe.megatron, "enable", claim_bf16))
        if not padding_kept:
            stack.enter_context(
                mock.patch.object(overlap.megatron, "padding_kept", return_value=nullcontext())
            )
        ep = "--expert_model_parallel_size"
        want = losses([*SPLIT, ep, saved_ep, "--save", folder, "--save_interval", "3"])[3:]
        Path(folder, "latest").write_text("iter_0000003")
        torch.distributed.barrier()
        found = {f"ep {size}": losses([*SPLIT, ep, size, "--load", folder]) for size in loaded_ep}
        return want, {**found, "MoELayer": losses([ep, "2", "--load", folder])}


@pytest.mark.parametrize(
    ("saved_ep", "loaded_ep"),
    [("2", ["4", "1"]), ("1", ["1"])],  # at 1 a bucket ends in padding before others
)
def test_checkpoint_reshards(
    ranks: Ranks, tmp_path: Path, saved_ep: str, loaded_ep: list[str]
) -> None:
    want, found = ranks.run(4, resharded, str(tmp_path), saved_ep, loaded_ep)[0]
    assert len(want) == 2
    assert len(found) == len(loaded_ep) + 1
    for how, losses in found.items():
        assert losses == pytest.approx(want, rel=1e-5), how


def test_megatron_alone_stumbles_over_padding(ranks: Ranks, tmp_path: Path) -> None:
    """Where this fails one day, `padding_kept` has become superfluous."""
    want, found = ranks.run(2, resharded, str(tmp_path), "1", [], padding_kept=False)[0]
    assert found["MoELayer"] != pytest.approx(want, rel=1e-2)


def test_padding_is_kept_inside_the_block_only() -> None:
    from overlap.megatron import padding_kept

    def bucket(numel: int, padding: int) -> SimpleNamespace:
        return SimpleNamespace(grad_data=torch.empty(numel), numel_unpadded=numel - padding)

    def numels(buffer: Any) -> list[int]:
        return [buffer.numel_unpadded, *(bucket.numel_unpadded for bucket in buffer.buckets)]

    buckets = [bucket(128, 28), bucket(128, 0), bucket(128, 8)]
    buffer = SimpleNamespace(buckets=buckets, numel_unpadded=348)
    ddp = SimpleNamespace(buffers=[], expert_parallel_buffers=[buffer])
    with padding_kept([ddp]):
        assert numels(buffer) == [376, 128, 128, 120]  # that of the last stays out
    assert numels(buffer) == [348, 100, 128, 120]


def pipelined(folder: str) -> dict[str, Any]:
    """Train at PP 2 x EP 2; return what a stage's DDP looks like and in which order it works."""
    import megamoe.functions
    import overlap.megatron
    from overlap.megatron import wiring

    events: list[tuple[str, str]] = []
    found: dict[str, Any] = {"events": events}

    def watch(chunks: list[Any]) -> None:
        (found["explained"],) = (overlap.megatron.explain(chunk) for chunk in chunks)

    def note(kind: Any, name: str = "") -> Any:
        events.append((kind.value.partition("::")[2], name.rpartition(".mlp.experts")[2]))
        found.setdefault("layers", set()).add(name.partition(".mlp.experts")[0])
        return real(kind, name)

    real = wiring.span
    with (
        mock.patch.object(wiring, "span", note),
        mock.patch.object(megamoe.functions, "span", note),
    ):
        argv = ["--expert_model_parallel_size", "2", "--pipeline_model_parallel_size", "2", *SPLIT]
        records = train([*argv, "--train_iters", "6"], watch)
    found["losses"] = [record["loss"] for record in records]
    return found


def test_pipeline_keeps_the_split(ranks: Ranks, tmp_path: Path) -> None:
    for rank, found in enumerate(ranks.run(4, pipelined, str(tmp_path))):
        stage = rank // 2
        layer = f"decoder.layers.{stage}"
        explained = found["explained"]
        assert explained.chunk.stage == stage
        assert [b.name for b in explained.chunk.buckets if b.expert] == [
            f"{layer}.mlp.experts.fc1_weight",
            f"{layer}.mlp.experts.fc2_weight",
        ]
        # Four ranks are used up by PP 2 x EP 2: each set of experts has one copy.
        assert [f.reason.value for f in explained.findings] == ["group of one"]
        assert layer in found["layers"]
        assert f"decoder.layers.{1 - stage}" not in found["layers"]
        assert found["losses"][-1] < found["losses"][0]

        # The last iteration: 4 microbatches, weights gathered in the first, reduced in the last.
        events = found["events"]
        gather, reduce = ("param_gather", ".fc2_weight"), ("grad_reduce", ".fc2_weight")
        last = events[max(i for i, event in enumerate(events) if event == gather) :]
        assert last.index(gather) == 0
        assert last.index(("stage1.forward", "")) < last.index(("param_wait", ".fc2_weight"))
        backward = len(last) - 1 - last[::-1].index(("stage1.backward", ""))
        assert last.index(("stage2.backward", "")) < last.index(reduce) < backward
        assert last[backward - 1] == reduce


def losing() -> list[str]:
    """Set-ups in which the split is lost, on one rank: what strict says, and when."""
    import overlap.megatron
    from megamoe import MegaMoEConfig, MegaMoELayer
    from overlap import SplitLostError, WrapError
    from tests.megatron_cases import config as transformer_config

    class Model(torch.nn.Module):
        """Two MoE layers, of which the second registered is used first if ``swapped``."""

        def __init__(self, swapped: bool = False) -> None:
            super().__init__()
            config = MegaMoEConfig(
                hidden_size=16,
                moe_ffn_hidden_size=8,
                num_moe_experts=4,
                expert_model_parallel_size=2,
            )
            group = megatron_shim.initialize(2)
            self.config = transformer_config(2)
            self.layers = torch.nn.ModuleList(MegaMoELayer(config, group) for _ in range(2))
            self.swapped = swapped

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in reversed(self.layers) if self.swapped else self.layers:
                x = x + layer(x)[0]
            return x

    said = []
    x = torch.randn(6, 16)
    with megatron_shim.on_cpu():
        for options, kept in (
            ({"overlap_param_gather": False}, True),
            ({"overlap_grad_reduce": False}, True),
            ({"align_param_gather": True}, True),
            ({}, False),
        ):
            with pytest.raises(SplitLostError) as caught:
                overlap.megatron.wrap(
                    Model(), overlap.megatron.ddp_config(**options), own_buckets=kept, strict=True
                )
            said.append(str(caught.value))
        # Another order of use shows in the first forward: asked for, or as it comes.
        (ddp,) = overlap.megatron.wrap(Model(swapped=True))
        assert overlap.megatron.explain(ddp).hides
        said.append(str(overlap.megatron.explain(ddp, forward=lambda: ddp(x))))
        (ddp,) = overlap.megatron.wrap(Model(swapped=True), strict=True)
        with pytest.raises(SplitLostError) as caught:
            ddp(x)
        said.append(str(caught.value))
        (ddp,) = overlap.megatron.wrap(Model(), strict=True)
        ddp(x)
        assert overlap.megatron.explain(ddp).hides
        assert "every expert weight's collectives can hide" in str(overlap.megatron.explain(ddp))
        with pytest.raises(WrapError, match="wrap it once"):
            overlap.megatron.wrap(ddp)
        assert not any(hasattr(param, "shared_embedding") for param in ddp.parameters())

        # The first gathers of both chains are on their way before the first module runs; not while
        # Megatron has its hooks off, as in an evaluation.
        issued: list[str] = []
        ddp.module.layers[0].register_forward_pre_hook(
            lambda *_: issued.extend(
                chain[-1].param_gather_dispatched
                for chain in (ddp.bucket_groups, ddp.expert_parallel_bucket_groups)
            )
        )
        for group in (*ddp.bucket_groups, *ddp.expert_parallel_bucket_groups):
            assert group.param_gather_dispatched
            group.param_gather_dispatched = False  # as after a step
        ddp.disable_forward_pre_hook(param_sync=False)
        ddp(x)
        assert issued == [False, False]
        ddp.enable_forward_pre_hook()
        ddp(x)
        assert issued == [False, False, True, True]
        overlap.megatron.finish_in_flight([ddp])
    return said


def test_strict_names_what_loses_the_split(ranks: Ranks) -> None:
    gathers, reductions, aligned, shared, probed, strict = ranks.run(4, losing)[0]
    assert gathers.startswith("parameter gathers are not overlapped: set overlap_param_gather")
    assert reductions.startswith("gradient reductions are not overlapped")
    assert aligned.startswith("gathers are aligned over the pipeline")
    assert "layers.0.experts.fc1_weight, layers.0.experts.fc2_weight and 2 more" in shared
    for text in (probed, strict):
        assert "the forward uses layers.1.experts.fc1_weight where the gathers" in text
        assert "bring layers.0.experts.fc1_weight" in text


def recomputed() -> list[list[float]]:
    """Losses with whole layers recomputed in several ways, and without."""
    ways = (
        [],
        ["--recompute_granularity", "full", "--recompute_layer_ids", "1"],
        [*("--recompute_granularity", "full", "--recompute_method", "uniform"),
         *("--recompute_num_layers", "1")],
        ["--recompute_granularity", "selective", "--recompute_modules", "moe"],
    )  # fmt: skip
    argv = [*SPLIT, "--train_iters", "3", "--expert_model_parallel_size", "2"]
    return [[record["loss"] for record in train([*argv, *way])] for way in ways]


def test_recomputation_changes_nothing(ranks: Ranks) -> None:
    plain, *others = ranks.run(4, recomputed)[3]
    assert len(set(plain)) == 3
    for losses in others:
        assert losses == plain


def indexed(folder: str) -> list[float]:
    argv = ["--data_path", f"{folder}/tokens", "--train_iters", "30", "--device", "cpu"]
    from examples.pretraining import flags, training

    args = flags.parse(["--config", "tiny", *argv])
    with megatron_shim.on_cpu():
        megatron_shim.initialize(1)
        return [record["loss"] for record in training.train(args)]


def test_indexed_dataset(ranks: Ranks, tmp_path: Path) -> None:
    """Megatron's own writer, our windows: a text that repeats can be learnt by heart."""
    import numpy as np
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    with megatron_shim.on_cpu():
        builder = IndexedDatasetBuilder(str(tmp_path / "tokens.bin"), dtype=np.uint16)
        for start in range(40):
            builder.add_document(torch.arange(start, start + 20) % 64, [20])
        builder.finalize(str(tmp_path / "tokens.idx"))
    losses = ranks.run(2, indexed, str(tmp_path))[1]
    assert losses[-1] < 0.5 * losses[0]
