"""axe-core over all that people see: no serious or critical finding, light and dark, phone and desk."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from visual_helpers import GOLDEN, synthetic

from eagle2.trace import Trace
from visual.player import export_html

pytestmark = pytest.mark.browser
VIEWS = [(390, "light"), (390, "dark"), (1440, "light"), (1440, "dark")]


def serious(page: Any) -> list[str]:
    """What axe-core finds serious or critical on the page as it stands: rule, elements, why."""
    found = Axe().run(page).response["violations"]
    return [
        f"{rule['id']}: {node['target']} {node['failureSummary']}"
        for rule in found
        if rule["impact"] in ("serious", "critical")
        for node in rule["nodes"][:5]
    ]


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("a11y")
    runs = {
        "golden": Trace.load(GOLDEN),
        "default": synthetic(6, depth=3, top_k=4, total=5, seed=4),
        "paper": synthetic(4),
    }
    for name, trace in runs.items():
        (folder / f"{name}.html").write_text(export_html(trace), encoding="utf-8")
    return {name: folder / f"{name}.html" for name in runs}


@contextmanager
def opened(browser: Any, path: Path, width: int, scheme: str) -> Iterator[Any]:
    context = browser.new_context(
        viewport={"width": width, "height": 900}, color_scheme=scheme, reduced_motion="reduce"
    )
    page = context.new_page()
    page.goto(path.as_uri())
    page.wait_for_selector("[data-drawn]")
    try:
        yield page
    finally:
        context.close()


@pytest.mark.parametrize(("width", "scheme"), VIEWS)
@pytest.mark.parametrize("name", ["golden", "default", "paper"])
def test_a_run(chromium: Any, pages: dict[str, Path], name: str, width: int, scheme: str) -> None:
    with opened(chromium, pages[name], width, scheme) as page:
        for details in page.locator("details").all():
            details.evaluate("node => { node.open = true; }")
        for phase in ("draft", "rerank", "flatten", "verify", "accept"):
            page.locator(f"[data-testid=phase-{phase}]").evaluate("node => node.click()")
            page.evaluate("window.eagle2.settled()")
            if phase in ("draft", "accept"):
                assert serious(page) == []
