"""MLflow's own pages in a real browser: Debian's Chromium, driven through its protocol."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

KIND = "workflowType=machine_learning"  # else the page comes up among the tools for language-model applications
PATIENCE_MS = 120_000.0  # of a machine that is busy with other things
SIZE = {"width": 1400, "height": 1250}

LAPTOP = {"width": 1280, "height": 800}

# The words of which every letter is on the screen: neither cut off by a box around them nor covered by another.
_IN_VIEW = """() => {
    const shown = [], walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    for (let node = walker.nextNode(); node; node = walker.nextNode()) {
        for (const word of node.data.matchAll(/\\S+/g)) {
            const range = document.createRange();
            range.setStart(node, word.index);
            range.setEnd(node, word.index + word[0].length);
            const box = range.getBoundingClientRect();
            const corners = [[box.left + 2, box.top + 2], [box.right - 2, box.bottom - 2]];
            if (box.width && corners.every(([x, y]) => node.parentElement.contains(document.elementFromPoint(x, y))))
                shown.push(word[0]);
        }
    }
    return shown.join(" ");
}"""

# What MLflow's own pages complain of on a server without accounts, whatever it shows.
_ITS_OWN = ("/mlflow/users/current", "ResizeObserver loop")


def chromium() -> str | None:
    """Where the browser is; None if it is not installed."""
    return shutil.which("chromium")


class Console:
    """A person with a browser, who looks at one run."""

    def __init__(self, page: Page, address: str, experiment_id: str, run_id: str) -> None:
        self.page, self.errors = page, list[str]()
        self._address = address
        self._run = f"experiments/{experiment_id}/runs/{run_id}"
        page.set_default_timeout(PATIENCE_MS)
        page.on("pageerror", lambda error: self._note(str(error)))
        page.on("response", lambda one: self._note(f"{one.status} {one.url}") if one.status >= 400 else None)
        page.on("console", lambda said: self._note(said.text) if said.type == "error" else None)

    def _note(self, error: str) -> None:
        # That a file failed to load is said twice: by its answer, with the address, and here, without.
        if not error.startswith("Failed to load resource") and not any(one in error for one in _ITS_OWN):
            self.errors.append(error)

    def _open(self, path: str) -> None:
        self.page.goto("about:blank")  # else only what is behind the # changes, and the old page is still there
        self.page.goto(f"{self._address}/#/{path}")

    def first_screen(self, picture: Path) -> str:
        """Open the page of a run as on the first visit, press nothing, and return the words in view."""
        assert self.page.context.browser is not None
        first_visit = self.page.context.browser.new_context(viewport=LAPTOP)  # type: ignore[arg-type]
        page = first_visit.new_page()
        page.goto(f"{self._address}/#/{self._run}?{KIND}")
        page.get_by_text("Description").first.wait_for(timeout=PATIENCE_MS)
        page.get_by_text("resilience.status").first.wait_for(timeout=PATIENCE_MS)
        page.wait_for_timeout(1000)
        page.screenshot(path=picture)
        words = str(page.evaluate(_IN_VIEW))
        first_visit.close()
        return words

    def overview(self) -> Locator:
        """Look at the run's overview, and read its description to the end."""
        self._open(f"{self._run}?{KIND}")
        self.page.get_by_text("Show more").first.click()
        lines = self.page.locator("li", has_text=re.compile(r"^incident \d+"))
        lines.first.wait_for()
        return lines

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
