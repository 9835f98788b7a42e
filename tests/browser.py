"""MLflow's own pages in a real browser: Debian's Chromium, driven through its protocol."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from playwright.sync_api import Page

KIND = "workflowType=machine_learning"  # else the page comes up among the tools for language-model applications
PATIENCE_MS = 120_000.0  # of a machine that is busy with other things
SIZE = {"width": 1400, "height": 1250}

LAPTOP = {"width": 1280, "height": 800}


def chromium() -> str | None:
    """Where the browser is; None if it is not installed."""
    return shutil.which("chromium")


class Console:
    """A person with a browser, who looks at one run."""

    def __init__(self, page: Page, address: str, experiment_id: str, run_id: str) -> None:
        self.page = page
        self._address = address
        self._run = f"experiments/{experiment_id}/runs/{run_id}"
        page.set_default_timeout(PATIENCE_MS)

    def first_screen(self, picture: Path) -> None:
        """Open the page of a run as on the first visit, and press nothing."""
        assert self.page.context.browser is not None
        first_visit = self.page.context.browser.new_context(viewport=LAPTOP)  # type: ignore[arg-type]
        page = first_visit.new_page()
        page.goto(f"{self._address}/#/{self._run}?{KIND}")
        page.get_by_text("Description").first.wait_for(timeout=PATIENCE_MS)
        page.get_by_text("resilience.status").first.wait_for(timeout=PATIENCE_MS)
        page.wait_for_timeout(1000)
        page.screenshot(path=picture)
        first_visit.close()

    def overview(self) -> None:
        """Look at the run's overview, and read its description to the end."""
        self.page.goto(f"{self._address}/#/{self._run}?{KIND}")
        self.page.get_by_text("Show more").first.click()
        self.page.locator("li", has_text=re.compile(r"^incident \d+")).first.wait_for()

    def alone(self) -> None:
        close = self.page.get_by_role("button", name="Close", exact=True)
        if close.count():
            close.first.click()

    def picture(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.page.wait_for_timeout(500)  # until what moves has come to rest
        self.page.screenshot(path=path)


@contextmanager
def console(address: str, experiment_id: str, run_id: str) -> Iterator[Console]:
    """Start the browser and open nothing yet."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium(), args=["--no-sandbox"])
        try:
            page = browser.new_page(viewport=SIZE, color_scheme="light")  # type: ignore[arg-type]
            yield Console(page, address, experiment_id, run_id)
        finally:
            browser.close()
