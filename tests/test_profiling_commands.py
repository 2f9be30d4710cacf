"""The command line as its users meet it: help, exit codes, files, one sentence for each error."""

import json
import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from profiling.cli import main
from profiling.writing import WriteError, replacing
from tests.corpus import assume_lines, build
from tests.corpus_runs import PLAIN, Case
from tests.kineto import TraceBuilder, gpu_iteration
from tests.programs import run_module

COMMANDS = ["ls", "check", "report", "diff", "effective", "annotate"]
GOOD, BAD = (150, 650), (1150, 1350)
TRACES = Path(__file__).parents[2] / "shared" / "traces"


def write(folder, gather=GOOD, name=None, rank=0, size=1, count=6):
    trace = TraceBuilder(rank, size)
    for number in range(count):
        gpu_iteration(trace, number, 1e6 + 2000 * number, gather=gather)
    return str(trace.write(folder, name))


def rules(folder, **bounds):
    path = folder / "rules.toml"
    lines = ["[[rule]]", 'name = "r"', 'collective = "*"', 'stage = "any"']
    bounds = bounds or {"min_hidden": 0.9}
    path.write_text("\n".join(lines + [f"{key} = {value}" for key, value in bounds.items()]))
    return str(path)


# Help


@pytest.mark.parametrize("command", [None, *COMMANDS])
def test_help_fits_and_holds_an_example(capsys, command):
    with pytest.raises(SystemExit) as stop:
        main([command, "--help"] if command else ["--help"])
    assert stop.value.code == 0
    lines = capsys.readouterr().out.splitlines()
    assert f"example: moe-trace {command or 'check'} runs/" in " ".join(lines)
    assert max(map(len, lines)) <= 100


@pytest.mark.parametrize("command", COMMANDS)
def test_the_example_in_the_help_is_understood(capsys, tmp_path, monkeypatch, command):
    """Every example parses: what fails is only that its profile is not there."""
    with pytest.raises(SystemExit):
        main([command, "--help"])
    text = " ".join(capsys.readouterr().out.split())
    example = text.partition("example: moe-trace ")[2].split()
    monkeypatch.chdir(tmp_path)
    assert main(example) == 2
    assert "does not exist" in capsys.readouterr().err


# Exit codes


def test_check_and_report(tmp_path, capsys):
    good, bad = write(tmp_path, GOOD, "good.json"), write(tmp_path, BAD, "bad.json")
    chosen = ["--rules", rules(tmp_path)]
    for command in ("check", "report"):
        assert main([command, good, *chosen]) == 0
        assert capsys.readouterr().out.splitlines()[-1] == "verdict: PASS"
        assert main([command, bad, *chosen]) == 1
        assert capsys.readouterr().out.splitlines()[-1] == "verdict: FAIL"
        assert main([command, good]) == 2  # the second built-in check has nothing to judge
        assert capsys.readouterr().out.splitlines()[-1] == "verdict: INCONCLUSIVE"


def test_a_profile_without_communication_is_inconclusive(tmp_path, capsys):
    trace = TraceBuilder()
    trace.kernel("gemm", 10, 20, 30)
    path = str(trace.write(tmp_path))
    for command in ("check", "report"):
        for chosen in ([], ["--rules", rules(tmp_path)]):
            assert main([command, path, *chosen]) == 2
            assert capsys.readouterr().out.splitlines()[-1] == "verdict: INCONCLUSIVE"


@pytest.mark.parametrize(
    "name", ["cpu_only_rank-34", "mi250_minitoy", "mi300_compile_triton", "a100_nccl_rank0"]
)
def test_public_traces_without_our_ranges_are_inconclusive(name, capsys):
    path = TRACES / f"{name}.json.gz"
    if not path.exists():
        pytest.skip(f"{path} is not here: public traces lie beside the checkout")
    assert main(["report", str(path)]) == 2
    assert capsys.readouterr().out.splitlines()[-1] == "verdict: INCONCLUSIVE"


def test_ls_lists_and_judges_nothing(tmp_path, capsys):
    assert main(["ls", write(tmp_path, BAD)]) == 0
    out = capsys.readouterr().out
    assert "overlap::param_gather[layers.*.mlp.experts.fc2_weight]: 6 issued" in out
    assert "verdict" not in out
    assert main(["ls", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["kind"] == "listing"


def test_diff(tmp_path, capsys):
    good, bad = write(tmp_path, GOOD, "good.json"), write(tmp_path, BAD, "bad.json")
    assert main(["diff", bad, good]) == 0
    assert "worse" in capsys.readouterr().out.splitlines()[-1]
    assert main(["diff", bad, good, "--fail-on-worse"]) == 0
    assert main(["diff", good, bad, "--fail-on-worse"]) == 1
    assert main(["diff", good, good, "--fail-on-worse"]) == 0
    capsys.readouterr()
    assert main(["diff", good, bad, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["kind"] == "diff"


def test_ranks_and_iterations_are_chosen(tmp_path, capsys):
    write(tmp_path, GOOD, rank=0, size=2)
    write(tmp_path, BAD, rank=1, size=2)
    chosen = ["--rules", rules(tmp_path), "--json"]

    def occurrences(*more):
        main(["check", str(tmp_path), *chosen, *more])
        (row,) = json.loads(capsys.readouterr().out)["rows"]
        return row["occurrences"], row["verdict"]

    assert occurrences() == (12, "FAIL")
    assert occurrences("--rank", "0") == (6, "PASS")
    assert occurrences("--rank", "1") == (6, "FAIL")
    assert occurrences("--rank", "0,1", "--iterations", "1-2,5") == (6, "FAIL")


def test_several_paths_and_a_rank_that_the_user_tells(tmp_path, capsys):
    paths = [write(tmp_path, GOOD, f"{name}.json", rank=0, size=2) for name in "ab"]
    assert main(["ls", *paths]) == 2
    assert "rank 0 is in both" in capsys.readouterr().err
    assert main(["ls", *paths, "--rank-of", "b.json=1", "--json"]) == 0
    ranks = json.loads(capsys.readouterr().out)["ranks"]
    assert [rank["rank"] for rank in ranks] == ["rank 0", "rank 1"]


@pytest.mark.parametrize(("place", "code"), [("inside", 0), ("after", 1)])
def test_rows_that_follow_from_an_assume_file_are_marked(tmp_path, capsys, place, code):
    case = Case(seed=3, places=(place, place), style=PLAIN)
    path = build(case).write(tmp_path)
    told = tmp_path / "assume.toml"
    told.write_text("\n".join(assume_lines(case)))
    assert main(["check", str(path), "--assume", str(told)]) == code
    out = capsys.readouterr().out
    assert out.count("inferred: which parameter it is was concluded") == 4
    assert main(["ls", str(path), "--assume", str(told)]) == 0
    assert "by assumed" in capsys.readouterr().out
    assert main(["check", str(path)]) == 2  # without it nobody knows
    assert "inferred" not in capsys.readouterr().out


# Files


def test_each_file_is_written_whole_beside_what_is_printed(tmp_path, capsys):
    path = write(tmp_path, BAD)
    files = {
        kind: tmp_path / f"report.{suffix}"
        for kind, suffix in (("markdown", "md"), ("junit", "xml"), ("html", "html"))
    }
    options = [part for kind, file in files.items() for part in (f"--{kind}", str(file))]
    assert main(["check", path, *options]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "verdict: FAIL"
    assert files["markdown"].read_text().splitlines()[-1] == "**verdict: FAIL**"
    assert ElementTree.parse(files["junit"]).getroot().attrib["failures"] == "1"
    assert "</html>" in files["html"].read_text()
    assert [one.name for one in tmp_path.iterdir() if one.name.startswith(".")] == []
    for file in files.values():
        assert file.stat().st_mode & 0o777 == 0o666 & ~umask()


def umask():
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_markdown_without_a_file_is_printed(tmp_path, capsys):
    assert main(["check", write(tmp_path, BAD), "--markdown"]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "**verdict: FAIL**"


def test_annotate(tmp_path, capsys):
    path, out = write(tmp_path, GOOD), tmp_path / "out" / "annotated.json"
    out.parent.mkdir()
    assert main(["annotate", path, str(out)]) == 0
    assert str(out) in capsys.readouterr().out
    assert json.loads(out.read_text())["traceEvents"]


@pytest.mark.parametrize("kind", ["markdown", "junit", "html"])
@pytest.mark.parametrize("where", ["missing/report", "taken"])
def test_a_file_that_cannot_be_written(tmp_path, capsys, kind, where):
    path = write(tmp_path, GOOD)
    (tmp_path / "taken").mkdir()
    target = tmp_path / where
    assert main(["check", path, f"--{kind}", str(target)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"moe-trace: {target} cannot be written: ")
    assert captured.err.count("\n") == 1
    assert sorted(one.name for one in tmp_path.iterdir()) == ["rank0.pt.trace.json", "taken"]


def test_a_failed_write_leaves_the_old_file(tmp_path):
    target = tmp_path / "report.html"
    target.write_text("old")

    def interrupted(error):
        with replacing(target) as temporary:
            temporary.write_text("half")
            raise error

    with pytest.raises(WriteError, match="No space"):
        interrupted(OSError(28, "No space left on device"))
    with pytest.raises(KeyError):
        interrupted(KeyError())
    assert target.read_text() == "old"
    assert [one.name for one in tmp_path.iterdir()] == ["report.html"]


# What is wrong is said in one sentence


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["check", "nowhere"], "nowhere does not exist"),
        (["check", "bad.txt"], "bad.txt is not a PyTorch profiler trace"),
        (["check", "t.json", "--threshold", "90"], "threshold is 90"),
        (["check", "t.json", "--threshold", "x"], "invalid float value: 'x'"),
        (["check", "t.json", "--rules", "none.toml"], "none.toml cannot be read"),
        (["check", "t.json", "--assume", "none.toml"], "none.toml"),
        (["check", "t.json", "--baseline", "none"], "none does not exist"),
        (["check", "t.json", "--baseline", "other.json"], "not of the same run"),
        (["check", "t.json", "--rank", "7"], "has no rank 7, only rank 0"),
        (["check", "t.json", "--rank", "a"], "'a' is not a list of ranks"),
        (["check", "t.json", "--rank-of", "a"], "'a' is not a file and its rank"),
        (["check", "t.json", "--rank-of", "a.json=1"], "a.json"),
        (["check", "t.json", "--iterations", "5-3"], "rising ranges"),
        (["effective", "t.json", "other.json"], "not of the same run"),
        (["diff", "t.json"], "AFTER"),
        (["diff", "t.json", "nowhere"], "nowhere does not exist"),
        (["annotate", "t.json", "t.json"], "t.json"),
        (["unheard-of"], "invalid choice: 'unheard-of'"),
        ([], "required"),
    ],
    ids=lambda value: " ".join(value) or "nothing" if isinstance(value, list) else "",
)
def test_one_sentence(tmp_path, capsys, monkeypatch, arguments, says):
    monkeypatch.chdir(tmp_path)
    write(Path(), GOOD, "t.json")
    other = TraceBuilder()
    for number in range(6):
        gpu_iteration(other, number, 1e6 + 2000 * number, gather=GOOD, experts="other.experts")
    other.write(Path(), "other.json")
    Path("bad.txt").write_text("hello")
    try:
        code = main(arguments)
    except SystemExit as stop:
        code = stop.code
    captured = capsys.readouterr()
    assert code == 2
    assert captured.out == ""
    assert says in captured.err
    assert captured.err.startswith("moe-trace")
    assert captured.err.count("\n") == 1
    assert "Traceback" not in captured.err


def test_an_odd_name_can_be_printed(tmp_path):
    trace = TraceBuilder()
    for number in range(3):
        gpu_iteration(trace, number, 1e6 + 2000 * number, gather=GOOD, experts="é.experts")
    done = moe_trace("check", str(trace.write(tmp_path)), encoding="ascii")
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert "\\xe9.experts" in done.stdout


def moe_trace(*arguments, encoding="utf-8"):
    return run_module("profiling", *arguments, PYTHONIOENCODING=encoding)


def test_a_reader_that_stops_is_no_traceback(tmp_path):
    path = write(tmp_path, GOOD)
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-m", "profiling", "report", path],
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[1],
        check=False,
    )
    os.close(writer)
    assert done.returncode == 2
    assert done.stderr == ("moe-trace: standard output was closed before everything was written\n")


def test_help_imports_neither_numpy_nor_torch():
    code = (
        "import sys\nfrom profiling.cli import main\n"
        "try: main(['check', '--help'])\n"
        "except SystemExit: print([m for m in ('numpy', 'torch') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[1],
        check=True,
    )
    assert done.stdout.splitlines()[-1] == "[]"


def test_closed_output_and_an_interruption_are_no_traceback(tmp_path, monkeypatch, capsys):
    trace = TraceBuilder()
    gpu_iteration(trace, 0, 1e6, gather=(200, 900))
    file = str(trace.write(tmp_path))
    command = [sys.executable, "-m", "profiling", "check", file]
    done = subprocess.run(
        ["sh", "-c", '"$@" >&-', "sh", *command], stderr=subprocess.PIPE, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (2, "")

    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr("profiling.commands.load", interrupt)
    assert main(["check", file]) == 130
    assert capsys.readouterr().err == "moe-trace: interrupted\n"


def test_a_link_stays_a_link_and_a_device_a_device(tmp_path):
    link, target = tmp_path / "latest.html", tmp_path / "1.html"
    target.write_text("old")
    link.symlink_to(target)
    with replacing(link) as path:
        path.write_text("new")
    assert link.is_symlink()
    assert target.read_text() == "new"
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(WriteError, match="it is no file"), replacing(pipe):
        pass
    assert pipe.is_fifo()


def test_text_fits_where_nothing_can_be_told(tmp_path, capsys):
    trace = TraceBuilder()
    gpu_iteration(trace, 0, 1e6, gather=(200, 900))
    assert main(["report", str(trace.write(tmp_path))]) == 2
    text = capsys.readouterr().out
    assert "INCONCLUSIVE" in text
    assert max(map(len, text.splitlines())) <= 100
