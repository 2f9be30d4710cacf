"""What is recognised by name, row by row; the documentation lists the same rows."""

import re
from pathlib import Path

import pytest

from profiling import names
from profiling.names import CALLS, COPIES, GRAPHS, KERNELS

PAGE = Path(__file__).parents[1] / "docs" / "traces-recognised.md"
TABLES = {
    "Communication kernels": (KERNELS, names.is_communication_kernel),
    "Copies that can carry a collective": (COPIES, names.is_within_devices),
    "Ranges whose launches are a collective's": (CALLS, names.is_collective_call),
    "Launches of graphs": (GRAPHS, names.is_graph_launch),
}
ROWS = [(row, test) for table, test in TABLES.values() for row in table]


@pytest.mark.parametrize(("row", "test"), ROWS, ids=[row.what for row, _ in ROWS])
def test_a_row_is_recognised_by_its_own_pattern(row, test):
    assert re.search(row.pattern, row.example)
    assert test(row.example)


@pytest.mark.parametrize(("row", "test"), ROWS, ids=[row.what for row, _ in ROWS])
def test_every_row_is_needed(row, test):
    """Without its pattern, no other row of its table would take its example."""
    (table,) = (table for table, _ in TABLES.values() if row in table)
    others = [other for other in table if other.pattern != row.pattern]
    assert not any(re.search(other.pattern, row.example) for other in others)


@pytest.mark.parametrize(
    "name",
    [
        "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm>",
        "void deep_ep::layout::get_dispatch_layout<256, 4, 128>(long const*)",
        "void at::native::vectorized_elementwise_kernel<4>",
        "_mega_moe_stage1_kernel",
        "moe_dispatch_kernel",
        "ncc_lookalike",
        "__amd_rocclr_copyBuffer",
    ],
)
def test_what_computes_is_no_communication(name):
    assert not names.is_communication_kernel(name)


@pytest.mark.parametrize("name", ["c10d::wait_tensor", "aten::all", "overlap::param_wait[a.b]"])
def test_what_only_waits_is_no_call(name):
    assert not names.is_collective_call(name)


def test_our_own_issues_are_calls():
    assert names.is_collective_call("overlap::param_gather[layers.0.experts.fc2_weight]")


def test_the_page_lists_just_these_rows():
    page = PAGE.read_text(encoding="utf-8")
    for title, (table, _) in TABLES.items():
        section = page.split(f"## {title}\n")[1].split("\n## ")[0]
        cells = [
            tuple(cell.strip().strip("`") for cell in re.split(r"(?<!\\)\|", line)[1:-1])
            for line in section.splitlines()
            if line.startswith("| ")
        ]
        assert [tuple(cell.replace(r"\|", "|") for cell in row) for row in cells[1:]] == [
            tuple(row) for row in table
        ]
