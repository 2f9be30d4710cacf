"""The build hook, run for real against a local repository; only Python's pip is a stand-in."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

HOOK = Path(__file__).parents[1] / "scripts" / "rebuild_primus_turbo.sh"

# Stands for a ROCm Python: it notes what pip is asked to install, with the ref and architectures.
PYTHON = """#!/usr/bin/env bash
case "$*" in
    "-c import sys, torch; sys.exit("*) exit "${FAKE_NO_ROCM:-0}" ;;
    "-c "*) echo "/environment 2.9.0+rocm7.0" ;;
    "-m pip show "*) [[ -e $STATE/package ]] ;;
    "-m pip install -r requirements.txt") test -f requirements.txt ;;
    "-m pip install "*)
        test -f 3rdparty/kernels/kernel.txt || { echo "no submodule"; exit 1; }
        mkdir "$STATE/building" || exit 9
        sleep "${FAKE_SECONDS:-0}"
        echo "$(git rev-parse HEAD) $GPU_ARCHS" >> "$STATE/builds"
        rmdir "$STATE/building"
        [[ -z ${FAKE_BROKEN:-} ]] || { echo "error: no such kernel"; exit 1; }
        touch "$STATE/package" ;;
    *) echo "unexpected: $*"; exit 7 ;;
esac
"""


class Place:
    """An upstream with a submodule and two commits, and an environment to build it in."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.state, self.build = folder, folder / "state", folder / "build"
        self.state.mkdir()
        self.env = {
            **os.environ,
            "GIT_CONFIG_COUNT": "1",  # git refuses local submodules unless told otherwise
            "GIT_CONFIG_KEY_0": "protocol.file.allow",
            "GIT_CONFIG_VALUE_0": "always",
            **{f"GIT_{who}_{what}": "test@example.org"
               for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")},
            "REBUILD_PRIMUS_TURBO": "1",
            "PRIMUS_TURBO_REPO": str(folder / "upstream"),
            "PRIMUS_TURBO_BUILD_DIR": str(self.build),
            "PRIMUS_TURBO_REF": "main",
            "PYTHON": self.executable("python", PYTHON),
            "ROCM_PATH": str(folder / "rocm"),
            "STATE": str(self.state),
        }  # fmt: skip
        self.env.pop("GPU_ARCHS", None)
        self.executable("rocm/bin/hipcc", "")
        self.commit_file("kernels", "kernel.txt")
        self.commit_file("upstream", "requirements.txt")
        self.git("submodule", "add", str(folder / "kernels"), "3rdparty/kernels")
        self.git("commit", "-m", "kernels")
        self.git("tag", "v1")
        self.first = self.git("rev-parse", "HEAD")

    def executable(self, name: str, text: str) -> str:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        path.chmod(0o755)
        return str(path)

    def commit_file(self, repository: str, name: str) -> str:
        """Commit a file and return the commit; the repository is made if there is none."""
        folder = self.folder / repository
        folder.mkdir(exist_ok=True)
        if not (folder / ".git").exists():
            self.git("init", "-b", "main", repository=repository)
        (folder / name).write_text(name, encoding="utf-8")
        self.git("add", name, repository=repository)
        self.git("commit", "-m", name, repository=repository)
        return self.git("rev-parse", "HEAD", repository=repository)

    def git(self, *words: str, repository: str = "upstream") -> str:
        run = subprocess.run(
            ["git", *words],
            cwd=self.folder / repository,
            env=self.env,
            capture_output=True,
            text=True,
            check=True,
        )
        return run.stdout.strip()

    def start(self, *words: str, **env: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [str(HOOK), *words],
            env={**self.env, **env},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def hook(self, *words: str, code: int = 0, **env: str) -> str:
        """Run the hook, expect its exit code and return all that it said."""
        process = self.start(*words, **env)
        out, err = process.communicate(timeout=60)
        assert process.returncode == code, out + err
        return out + err

    @property
    def builds(self) -> list[str]:
        path = self.state / "builds"
        return path.read_text(encoding="utf-8").splitlines() if path.exists() else []


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def test_nothing_happens_unless_it_is_asked_for(place: Place) -> None:
    assert place.hook(REBUILD_PRIMUS_TURBO="0") == ""
    assert not place.build.exists()
    assert "set it to 1" in place.hook(REBUILD_PRIMUS_TURBO="yes", code=2)


def test_a_dry_run_says_what_it_would_do_and_does_nothing(place: Place) -> None:
    said = place.hook("--dry-run", GPU_ARCHS="gfx942;gfx950", ROCM_PATH="/nowhere")
    for part in ("ref     main", "archs   gfx942;gfx950", str(place.build), "upstream"):
        assert part in said
    assert not place.build.exists()
    assert "unknown argument '--dryrun'" in place.hook("--dryrun", code=2)


def test_the_default_folder_carries_the_host_name(place: Place) -> None:
    place.env.pop("PRIMUS_TURBO_BUILD_DIR")
    place.env.pop("PRIMUS_TURBO_REF")
    said = place.hook("--dry-run", TMPDIR="/local")
    assert f"in      /local/primus-turbo-{os.popen('id -un').read().strip()}-" in said
    assert os.uname().nodename in said
    assert "9b5d3092efcbc087657b233d8e9ae662cee6ec6b" in said
    assert "gfx950" in said


def test_the_same_ref_is_built_once_and_another_one_anew(place: Place) -> None:
    place.hook()
    assert place.builds == [f"{place.first} gfx950"]
    assert "installed already" in place.hook()
    assert "installed already" in place.hook(PRIMUS_TURBO_REF="v1")  # the same commit
    assert len(place.builds) == 1
    second = place.commit_file("upstream", "more.txt")
    place.hook()  # the branch has moved on
    assert place.builds[1:] == [f"{second} gfx950"]
    place.hook(PRIMUS_TURBO_REF=place.first, GPU_ARCHS="gfx942;gfx950")
    assert place.builds[2:] == [f"{place.first} gfx942;gfx950"]
    (place.state / "package").unlink()  # somebody removed the package
    place.hook(PRIMUS_TURBO_REF=place.first, GPU_ARCHS="gfx942;gfx950")
    assert len(place.builds) == 4


def test_a_commit_that_is_here_needs_no_network(place: Place) -> None:
    place.hook()
    (place.folder / "upstream").rename(place.folder / "elsewhere")
    assert "installed already" in place.hook(PRIMUS_TURBO_REF=place.first)
    assert "cannot fetch from" in place.hook(code=1)


def test_callers_of_one_node_build_once(place: Place) -> None:
    processes = [place.start(FAKE_SECONDS="0.5") for _ in range(4)]
    said = [process.communicate(timeout=60)[1] for process in processes]
    assert [process.returncode for process in processes] == [0] * 4, said
    assert len(place.builds) == 1
    assert sum("installed already" in text for text in said) == 3
    assert any("waiting for it" in text for text in said)


@pytest.mark.parametrize("broken", ["empty folder", "no objects", "half a clone", "stale lock"])
def test_a_clone_that_broke_off_is_taken_up_again(place: Place, broken: str) -> None:
    source = place.build / "source"
    if broken == "half a clone":
        (place.build / "source.partial" / ".git").mkdir(parents=True)
    elif broken == "empty folder":
        source.mkdir(parents=True)
    else:
        place.hook()
        if broken == "stale lock":
            place.commit_file("upstream", "more.txt")
            (source / ".git" / "index.lock").touch()
            (source / "requirements.txt").unlink()
        else:
            subprocess.run(["rm", "-rf", str(source / ".git" / "objects")], check=True)
            (place.build / "installed").unlink()
    before = len(place.builds)
    place.hook()
    assert len(place.builds) == before + 1


def test_a_failed_build_is_reported_and_tried_again(place: Place) -> None:
    said = place.hook(code=1, FAKE_BROKEN="1")
    assert "error: no such kernel" in said
    assert "build.log" in said
    place.hook()
    assert len(place.builds) == 2


@pytest.mark.parametrize(
    ("env", "said"),
    [
        ({"PRIMUS_TURBO_REF": "no-such-ref"}, "'no-such-ref' is no commit, tag or branch of"),
        ({"PRIMUS_TURBO_REF": "0" * 40}, "is no commit, tag or branch of"),
        ({"PRIMUS_TURBO_REF": "--help"}, "give a commit, a tag or a branch"),
        ({"PRIMUS_TURBO_REPO": "/nowhere"}, "cannot clone /nowhere"),
        ({"ROCM_PATH": "/nowhere"}, "no ROCm compiler at /nowhere/bin/hipcc"),
        ({"FAKE_NO_ROCM": "1"}, "has no ROCm build of torch"),
        ({"GPU_ARCHS": "gfx942,gfx950"}, "separated by semicolons"),
        ({"PRIMUS_TURBO_BUILD_DIR": "/proc/no"}, "cannot create the build folder /proc/no"),
    ],
)
def test_errors_are_one_sentence(place: Place, env: dict[str, str], said: str) -> None:
    assert said in place.hook(code=1, **env)
    assert place.builds == []


def test_git_must_be_there(place: Place, tmp_path: Path) -> None:
    tools = tmp_path / "tools"
    tools.mkdir()
    for tool in ("bash", "hostname", "id"):
        path = subprocess.run(["which", tool], capture_output=True, text=True).stdout.strip()
        (tools / tool).symlink_to(path)
    assert "git is not in PATH; install it" in place.hook(code=1, PATH=str(tools))
