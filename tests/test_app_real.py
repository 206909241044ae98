"""The app as a person starts it: ``python app.py`` in a process of its own, the embedded model, a real browser."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest

from eagle2.gallery import read_gallery
from eagle2.trace import Trace

pytestmark = [pytest.mark.slow, pytest.mark.browser]
ROOT = Path(__file__).parent.parent
PLAYER = "[data-testid=player]"
OWN = "[data-testid=gallery] [data-run=your-run][aria-current]"  # the card of what was run here


@pytest.fixture(scope="module")
def address(embedded_model: tuple[Any, Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A running app; the fixture ``embedded_model`` has seen to it that the model is in the cache."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = os.environ | {"GRADIO_ANALYTICS_ENABLED": "False"}
    log = tmp_path_factory.mktemp("app") / "log.txt"
    with log.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, "app.py", "--port", str(port)], cwd=ROOT, env=environment, stdout=file, stderr=file
        )
    url = f"http://127.0.0.1:{port}/"
    try:
        for _ in range(240):
            assert process.poll() is None, log.read_text()
            try:
                with urlopen(url, timeout=5):
                    break
            except OSError:
                time.sleep(0.5)
        yield url
    finally:
        process.terminate()
        process.wait(20)


def test_a_race_of_96_tokens_from_start_to_download(chromium: Any, address: str) -> None:
    page = chromium.new_page(viewport={"width": 1280, "height": 900})
    page.set_default_timeout(240_000)
    bad: list[str] = []
    page.on("console", lambda line: bad.append(line.text) if line.type == "error" else None)
    page.on("pageerror", lambda error: bad.append(str(error)))
    page.goto(address)
    # A recorded run plays, with no model.
    page.wait_for_selector(".e2[data-kind=run] [data-node]")
    first = read_gallery()[0]
    assert page.text_content("[data-testid=tau]") == f"{first.trace.tau:.2f}"
    assert page.get_attribute(f"[data-testid=gallery] [data-run={first.entry.id}]", "aria-current") == "true"
    page.fill("[data-testid=prompt]", "Write a short story about a lighthouse keeper.")
    page.click("[data-testid=run]")
    page.wait_for_selector(".e2[data-kind=live] [data-node]")
    page.wait_for_selector(OWN)
    assert page.text_content("[data-testid=same-tokens]") == "yes, all 96"
    assert float(page.text_content("[data-testid=tau]")) > 1.2
    assert re.fullmatch(r"\d+\.\d\d×", page.text_content("[data-testid=speedup]"))
    for lane in ("eagle2", "autoregressive"):
        assert page.locator(f"[data-testid=lane-{lane}] .e2-token").count() == 96
    with page.expect_download() as download:
        page.click("[data-testid=download]")
    trace = Trace.load(download.value.path())
    assert len(trace.output_ids) == 96
    drafted = [number for number, step in enumerate(trace.steps) if step.accepted]
    assert drafted
    for number in drafted[:3]:
        page.fill("[data-testid=step-slider]", str(number + 1))
        page.click("[data-testid=phase-accept]")
        accepted = trace.steps[number].accepted
        assert page.get_attribute(PLAYER, "data-accepted") == ",".join(map(str, accepted))
        page.wait_for_function(
            "path => [...document.querySelectorAll('.e2-plot [data-verdict=accepted]')].map(p => +p.dataset.node)"
            ".sort((a, b) => a - b).join() === path",
            arg=",".join(map(str, sorted(accepted))),
        )
    # Stop: the next run ends early and can be looked at.
    page.click("[data-testid=run]")
    page.wait_for_selector(".e2[data-kind=live] [data-node]")
    page.click("[data-testid=stop]")
    page.wait_for_selector(OWN)
    page.wait_for_selector(".e2[data-kind=run]")
    assert page.text_content("[data-testid=note]").startswith("Stopped.")
    assert 0 < page.locator("[data-testid=lane-eagle2] .e2-token").count() < 96
    page.wait_for_selector("[data-testid=run]:enabled")
    assert bad == []
    page.close()
