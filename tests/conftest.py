"""Fixtures that several test files share."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from typing import Any

import pytest

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
BROWSER_FLAGS = (
    "--no-sandbox",  # CI runs as root
    "--disable-gpu",
    "--disable-background-networking",
    "--no-first-run",
    "--disable-component-update",
    "--disable-sync",
    "--disable-quic",
)


if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell starts its background jobs so; tests send themselves Ctrl-C.
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    """A headless browser (Playwright's ``Browser``) with a profile of its own, for tests marked ``browser``.

    Module scope: Playwright keeps an event loop running in this thread, in which other files' tests could not run one.
    """
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        reason = f"no browser found ({', '.join(BROWSERS)}); Debian: apt-get install chromium"
        if os.environ.get("CI", "").lower() in ("1", "true"):
            pytest.fail(reason, pytrace=False)
        pytest.skip(reason)
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found, headless=True, args=list(BROWSER_FLAGS))
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def embedded_model() -> tuple[Any, Any]:
    """The embedded target in float32 and its tokenizer, for tests marked ``slow``; the first use ever downloads it."""
    import torch

    from eagle2.models import DEFAULT_PRESET, load_model

    return load_model(DEFAULT_PRESET, dtype=torch.float32, device="cpu")
