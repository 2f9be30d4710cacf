"""Takes the pictures of docs/images from recorded profiles, in a real browser without a window.

    python scripts/screenshots.py --cpu out/demo/split      # or: make screenshots

Needs playwright and a Chromium (the system's, or `playwright install chromium`).
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from pathlib import Path

from playwright.sync_api import Browser, Page, sync_playwright

import profiling
from profiling.html import write_html

ROOT = Path(__file__).resolve().parent.parent
GPU = ROOT / "tests" / "data"
DESKTOP, PHONE = (1440, 900), (390, 844)
LIMIT = 300_000  # bytes of a picture


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--cpu", type=Path, default=ROOT / "out/demo/split", help="demo's profile")
    parser.add_argument("--out", type=Path, default=ROOT / "docs/images")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as driver, tempfile.TemporaryDirectory() as folder:
        found = shutil.which("chromium") or shutil.which("google-chrome")
        # No sandbox: continuous integration runs as root, and the pages are our own.
        browser = driver.chromium.launch(executable_path=found, args=["--no-sandbox"])
        split = written(GPU / "gpu_split.pt.trace.json.gz", Path(folder) / "split.html")
        fused = written(GPU / "gpu_fused.pt.trace.json.gz", Path(folder) / "fused.html")
        demo = written(options.cpu, Path(folder) / "demo.html")

        page = opened(browser, fused, DESKTOP)
        page.screenshot(path=options.out / "report-desktop.png")

        page = opened(browser, split, (1200, 700))
        page.add_style_tag(content="body > :not(header, #when, #when ~ *) { display: none }")
        zoomed(page, clicks=3, at=0.06)
        where = page.locator("#lanes").bounding_box()
        assert where is not None
        page.mouse.move(where["x"] + 720, where["y"] + where["height"] - 20)
        page.screenshot(path=options.out / "report-timeline.png")

        page = opened(browser, fused, PHONE)
        page.screenshot(path=options.out / "report-phone.png")
        page.locator("[data-action=next]").scroll_into_view_if_needed()
        zoomed(page, clicks=2, at=0.05)
        page.evaluate("document.querySelector('#when').scrollIntoView()")
        page.screenshot(path=options.out / "report-phone-timeline.png")

        page = opened(browser, demo, DESKTOP, scheme="dark")
        page.evaluate("document.querySelector('#when').scrollIntoView()")
        page.screenshot(path=options.out / "report-dark.png")
        browser.close()
    for picture in sorted(options.out.glob("*.png")):
        size = picture.stat().st_size
        print(f"{picture.relative_to(ROOT)}: {size / 1000:.0f} kB")
        if size > LIMIT:
            raise SystemExit(f"{picture} has {size} bytes, over the {LIMIT} of a picture")


def written(profile: Path, page: Path) -> Path:
    """Write a profile's report; it is called by its name, wherever it lies."""
    reading = profiling.read(profile)
    write_html(profiling.check(reading), reading, page)
    shown = page.read_text(encoding="utf-8").replace(str(profile), profile.name)
    page.write_text(shown, encoding="utf-8")
    return page


def opened(browser: Browser, page: Path, size: tuple[int, int], scheme: str = "light") -> Page:
    """Open a page and make sure that it runs without an error and does not scroll sideways."""
    width, height = size
    view = {"width": width, "height": height}
    shown = browser.new_context(viewport=view, color_scheme=scheme).new_page()
    errors: list[str] = []
    shown.on("pageerror", lambda error: errors.append(str(error)))
    shown.on("console", lambda message: errors.append(message.text))
    shown.goto(page.as_uri())
    assert not errors, errors
    assert shown.evaluate("document.documentElement.scrollWidth") <= width
    return shown


def zoomed(page: Page, clicks: int, at: float) -> None:
    """Zoom in and go to a share of the whole time."""
    for _ in range(clicks):
        page.locator("[data-action=zoom-in]").click()
    strip = page.locator("#overview")
    box = strip.bounding_box()
    assert box is not None
    strip.click(position={"x": at * box["width"], "y": box["height"] / 2})


if __name__ == "__main__":
    main()
