"""The picture of the explorer: `python docs/figures/draw_explorer.py`, with chromium and playwright."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from playwright.sync_api import sync_playwright

from maclaurin.explorer.explorer_page import explorer_page

HERE = Path(__file__).parent
SETTING = "#head=3&order=6"


def main() -> None:
    """One screen of the page, as a reader first sees it."""
    page_file = Path(tempfile.mkdtemp()) / "explorer.html"
    page_file.write_text(explorer_page(), "utf-8")
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1180, "height": 1460})
        page.goto(page_file.as_uri() + SETTING)
        page.wait_for_selector("html[data-ready=true]", state="attached")
        page.screenshot(path=HERE / "explorer.png")
        browser.close()


if __name__ == "__main__":
    main()
