"""The page: it parses, holds the verdicts, fetches nothing, and no name in a trace can break it."""

import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

import profiling
from profiling.drawing import draw
from profiling.html import write_html
from profiling.timeline import encode
from tests.kineto import TraceBuilder, gpu_iteration

DATA = Path(__file__).parent / "data"
EVIL = "layers.0</script><script>alert('1')</script>\"'&lt;$x${y}<!--"


class Page(HTMLParser):
    """Elements, attributes and the text in each kind of element; asserts that tags match."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.open, self.tags, self.attributes, self.texts = [], [], [], {}
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, name, value) for name, value in attrs]
        if tag not in {"meta", "path", "circle"}:
            self.open.append(tag)
        self.identity = dict(attrs).get("id")

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        key = self.identity if self.open and self.open[-1] == "script" else None
        where = key or (self.open[-1] if self.open else "")
        self.texts[where] = self.texts.get(where, "") + data

    @property
    def words(self):
        return " ".join(text for where, text in self.texts.items() if where not in {"style"})


def written(path, tmp_path):
    reading = profiling.read(path)
    out = tmp_path / "report.html"
    report = profiling.check(reading)
    write_html(report, reading, out)
    text = out.read_text(encoding="utf-8")
    return text, Page(text), report, draw(reading)


@pytest.mark.parametrize("variant", ["split", "fused"])
def test_it_holds_the_verdicts_and_the_timeline(tmp_path, variant):
    path = DATA / f"gpu_{variant}.pt.trace.json.gz"
    _, page, report, shown = written(path, tmp_path)
    assert page.texts["title"].startswith(report.verdict.value)
    assert page.texts["h1"].strip() == report.verdict.value
    for row in report.rows:
        assert row.check in page.texts["h3"]
        assert row.layer in page.texts["th"]
        assert f"{row.hidden:.1%}" in page.texts["span"]
        for finding in row.findings:
            assert finding.text in page.texts["p"]
            assert finding.kind.value in page.texts["span"]
    # The overall verdict, one per check, one per row: each with an icon beside the word.
    assert page.texts["span"].count(report.verdict.value) == 2 + len(report.rows)
    assert page.tags.count("svg") >= 3 + len(report.rows)
    assert json.loads(page.texts["timeline-data"]) == json.loads(encode(shown))
    assert "exposed: nothing computed" in page.words


def test_it_fetches_nothing_and_runs_only_its_own_script(tmp_path):
    text, page, *_ = written(DATA / "gpu_split.pt.trace.json.gz", tmp_path)
    assert not re.search(r"https?:|//[a-z]|url\(|@import|@font-face", text.replace("// ", ""))
    assert not [name for _, name, _ in page.attributes if name in {"src", "onclick", "onload"}]
    assert all(value.startswith("#") for _, name, value in page.attributes if name == "href")
    (policy,) = [value for _, _, value in page.attributes if value and "default-src" in value]
    script = text.rsplit("<script>", 1)[1].split("</script>")[0]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert "default-src 'none'" in policy
    assert f"script-src 'sha256-{digest}'" in policy


def test_names_from_a_trace_stay_text(tmp_path):
    trace = TraceBuilder()
    for number in range(2):
        gpu_iteration(trace, number, 1e6 + 2000 * number, gather=(150, 650), experts=EVIL)
    trace.kernel(EVIL, 1e6 + 60, 1e6 + 1210, 1e6 + 1300)
    text, page, report, _ = written(trace.write(tmp_path), tmp_path)
    assert report.rows[0].layer == EVIL
    assert EVIL in page.texts["th"]
    read = json.loads(page.texts["timeline-data"])
    assert EVIL in read["layers"]
    assert EVIL in read["names"]
    assert page.tags.count("script") == 2
    assert "alert('1')</script>" not in text


def test_whole_trace_figures_of_each_device(tmp_path):
    trace = TraceBuilder()
    gpu_iteration(trace, 0, 1e6, gather=(1000, 1200))
    trace.kernel("void gemm()", 1e6 + 60, 1e6 + 100, 1e6 + 200, device=1)
    _, page, report, _ = written(trace.write(tmp_path), tmp_path)
    assert "rank 0, GPU 0" in page.texts["th"]
    assert "rank 0, GPU 1" in page.texts["th"]
    assert "0.20 ms" in page.texts["td"]
    assert "50.0%" in page.texts["td"]
    for bound in report.bounds:
        assert bound.name in page.texts["th"]


def test_input_that_was_damaged_is_noted(tmp_path):
    trace = TraceBuilder()
    gpu_iteration(trace, 0, 1e6, gather=(150, 650))
    whole = trace.text()
    path = tmp_path / "rank0.json"
    path.write_text(whole[: len(whole) - 300])
    _, page, report, _ = written(path, tmp_path)
    assert report.notes
    for note in report.notes:
        assert note in page.texts["li"]
    _, page, *_ = written(trace.write(tmp_path, "whole.json"), tmp_path)
    assert "cut off" not in page.words


def test_a_profile_with_nothing_to_draw(tmp_path):
    trace = TraceBuilder()
    trace.add("user_annotation", "idle", 1e6, 2e6, 1)
    _, page, *_ = written(trace.write(tmp_path), tmp_path)
    assert "canvas" not in page.tags
    assert "INCONCLUSIVE" in page.texts["h1"]


def luminance(colour):
    """Of a colour as WCAG 2 has it."""
    digits = colour.lstrip("#")
    digits = "".join(2 * digit for digit in digits) if len(digits) == 3 else digits
    parts = [int(digits[at : at + 2], 16) / 255 for at in (0, 2, 4)]
    linear = [
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
    ]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
def test_text_can_be_read_on_what_it_stands_on(theme):
    """Contrast of at least 4.5 to 1, which is level AA."""
    style = (Path(profiling.__file__).parent / "page" / "page.css").read_text(encoding="utf-8")
    pairs = re.findall(r"--([\w-]+): light-dark\((#\w+), (#\w+)\)", style)
    colours = {name: both[theme] for name, *both in pairs}
    tones = ("pass", "fail", "inconclusive")
    on = {"link": ("back", "card")}
    on |= {tone: ("back", "card", f"{tone}-back") for tone in tones}
    on["soft"] = on["text"] = ("back", "card", "track", *(f"{tone}-back" for tone in tones))
    for name, grounds in on.items():
        for ground in grounds:
            low, high = sorted((luminance(colours[name]), luminance(colours[ground])))
            assert (high + 0.05) / (low + 0.05) >= 4.5, (name, ground)
