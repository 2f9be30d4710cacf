"""A profile's traces again, with what was found drawn in: tracks and arrows for Perfetto.

For each rank and device there is a process of its own with tracks of hidden, exposed, waiting and
late time. On a track nothing overlaps; what would goes to a second one. An arrow leads from each
collective's issue to its first kernel.
"""

from __future__ import annotations

import gzip
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec

from profiling.assume import Assumptions
from profiling.attribution import Attribution
from profiling.files import open_trace
from profiling.parts import Parts, cut_up
from profiling.splicing import splice
from profiling.trace import Profile
from profiling.tracks import Tracks
from profiling.understanding import read
from profiling.writing import replacing

__all__ = ["AnnotateError", "Annotated", "annotate"]

MARK = "annotatedBy"  # the top-level entry that tells a copy from its source
LEVEL = 5  # of gzip; higher ones take twice as long and save a few per cent
SUFFIXES = (".json", ".json.gz")


class AnnotateError(ValueError):
    """The output cannot be written as asked. The message is one sentence for the user."""


@dataclass(frozen=True)
class Annotated:
    """A file that `annotate` wrote.

    Attributes:
        slices, arrows: How many were added.
        notes: What of the source could not be copied, one sentence each.
    """

    source: Path
    path: Path
    slices: int
    arrows: int
    notes: tuple[str, ...]


def annotate(
    profile: Profile | str | Path,
    output: str | Path,
    *,
    assumptions: Assumptions | None = None,
) -> tuple[Annotated, ...]:
    """Write the traces of ``profile`` again, with tracks of hidden, exposed and waiting time.

    The events, their times and the other entries of a trace are copied as they stand in the file.

    Args:
        profile: What `load` returned, or a path for it.
        output: A file (.json, .json.gz) for a profile of one file; otherwise a directory, in which
            each trace gets its source's name.
        assumptions: What `read_assumptions` returned, for traces without our ranges.

    Returns:
        One entry per file written.

    Raises:
        LoadError: The path holds no usable profile.
        AnnotateError: The output would replace a source, is one file for several, or a source is
            annotated already.
        WriteError: An output cannot be written.
    """
    reading = read(profile, assumptions=assumptions)
    found: defaultdict[Path, list[tuple[Attribution, list[Parts]]]] = defaultdict(list)
    for rank, parts in zip(reading.ranks, cut_up(reading), strict=True):
        if MARK in rank.trace.metadata:
            raise AnnotateError(f"{rank.trace.path} is annotated already: give its source")
        found[Path(rank.trace.path)].append((rank.attribution, parts))
    outputs = _outputs(list(found), Path(output))
    return tuple(
        _write(source, path, ranks)
        for (source, ranks), path in zip(found.items(), outputs, strict=True)
    )


def _outputs(sources: Sequence[Path], output: Path) -> list[Path]:
    """Return where each source's copy goes."""
    if output.name.endswith(SUFFIXES):
        if len(sources) > 1:
            raise AnnotateError(
                f"{output} is one file, and the profile has {len(sources)}: name a directory"
            )
        outputs = [output]
    else:
        outputs = [output / _renamed(source.name) for source in sources]
    for source, path in itertools.product(sources, outputs):
        if path.exists() and path.samefile(source):
            raise AnnotateError(f"{path} is the profile itself: name another output")
    try:
        if outputs != [output]:
            output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise AnnotateError(f"{output} cannot be made: {error.strerror}") from None
    return outputs


def _renamed(name: str) -> str:
    """Return the name of a source's copy, which is written plain or with gzip."""
    if name.endswith(SUFFIXES):
        return name
    return name.removesuffix(".zst").removesuffix(".json") + ".json.gz"


def _write(
    source: Path, path: Path, ranks: Sequence[tuple[Attribution, Sequence[Parts]]]
) -> Annotated:
    tracks = Tracks()
    for rank, parts in ranks:
        tracks.add(rank, parts)
    events = map(msgspec.json.encode, tracks.events)
    with replacing(path) as part, _compressed(part) as write, closing(open_trace(source)) as stream:
        done = splice(stream, {MARK: "moe-trace"}, events, write)
    notes = []
    if not done.complete:
        notes.append("the source is cut off: copied up to the cut")
    if done.dropped:
        notes.append(f"{done.dropped:,} events left out: they are not JSON")
    if not done.metadata:
        notes.append("entries beside the events left out: they are not JSON")
    return Annotated(source, path, tracks.slices, tracks.arrows, tuple(notes))


@contextmanager
def _compressed(path: Path) -> Iterator[Callable[[bytes], object]]:
    """Give a function that writes to ``path``, with gzip where its name says so."""
    with path.open("wb") as file:
        if not path.name.endswith(".gz"):
            yield file.write
            return
        with gzip.GzipFile("", "wb", LEVEL, file, mtime=0) as compressed:
            yield compressed.write
