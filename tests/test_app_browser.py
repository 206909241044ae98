"""The app in a real browser with an engine that replays a trace: run, step through phases, Stop, closed tab."""

from __future__ import annotations

import importlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from visual_helpers import FakeEngine, FakeSettings, in_loop, synthetic

from eagle2.trace import Trace
from visual import theme

app = in_loop(lambda: importlib.import_module("app"))
pytestmark = [
    pytest.mark.browser,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # pandas, in Gradio's own statistics
]
PLAYER = "[data-testid=player]"


class Served:
    """A running app; `engine` may be swapped between tests, `gate` holds back the first load."""

    def __init__(self) -> None:
        self.engine = FakeEngine(synthetic(8, depth=3, top_k=4, total=5, seed=4), delay=0.02)
        self.gate = threading.Event()
        self.host = app.EngineHost(self.load)
        self.demo = app.build(app.Actions(self.host, FakeSettings))
        options = app.launch_options()
        self.demo.launch(server_name="127.0.0.1", prevent_thread_lock=True, quiet=True, **options)

    def load(self, progress: Any) -> FakeEngine:
        progress("reading weights", 1, 2)
        assert self.gate.wait(60)
        return self.engine

    def use(self, engine: FakeEngine) -> FakeEngine:
        self.gate.set()
        self.engine = self.host.engine = engine
        return engine


@pytest.fixture(scope="module")
def served(chromium: Any) -> Iterator[Served]:
    made = Served()
    yield made
    made.demo.close()


@contextmanager
def opened(browser: Any, served: Served, **options: Any) -> Iterator[Any]:
    context = browser.new_context(viewport={"width": options.pop("width", 1280), "height": 900}, **options)
    page = context.new_page()
    page.set_default_timeout(60_000)
    bad: list[str] = []
    page.on("console", lambda line: bad.append(line.text) if line.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: bad.append(str(error)))
    page.on("dialog", lambda dialog: (bad.append("dialog: " + dialog.message), dialog.dismiss()))
    page.on(
        "request",
        lambda request: (
            None if "127.0.0.1" in request.url or request.url[:5] in ("data:", "blob:") else bad.append(request.url)
        ),
    )
    page.goto(served.demo.local_url)
    page.wait_for_selector("[data-testid=run]")
    try:
        yield page
        assert bad == []
    finally:
        context.close()


def finished(page: Any) -> None:
    page.wait_for_selector(".e2[data-kind=run]")
    page.wait_for_selector("[data-testid=run]:enabled")


def test_open_wait_for_the_model_run_and_step_through(chromium: Any, served: Served) -> None:
    trace = served.engine.trace
    with opened(chromium, served) as page:
        page.wait_for_function("document.querySelector('[data-testid=model-status]').dataset.state === 'loading'")
        assert page.input_value("[data-testid=prompt]") == app.EXAMPLES[0]
        page.get_by_text("10+2=", exact=True).click()
        page.wait_for_function("document.querySelector('[data-testid=prompt]').value === '10+2='")
        page.click("[data-testid=run]")
        page.wait_for_function(
            "document.querySelector('[data-testid=note]').textContent.includes('as soon as it is ready')"
        )
        assert page.is_enabled("[data-testid=stop]")
        served.gate.set()
        page.wait_for_selector(".e2[data-kind=live] [data-node]")
        finished(page)
        assert served.engine.prompts[-1] == ("10+2=", FakeSettings())
        page.wait_for_function("document.querySelector('[data-testid=model-status]').dataset.state === 'ready'")
        assert page.text_content("[data-testid=speedup]") == f"{trace.speedup:.2f}×"
        assert page.text_content("[data-testid=tau]") == f"{trace.tau:.2f}"
        assert page.text_content("[data-testid=same-tokens]") == f"yes, all {len(trace.output_ids)}"
        for lane, pieces in (("eagle2", trace.output_pieces), ("autoregressive", trace.autoregressive.pieces)):  # type: ignore[union-attr]
            shown = page.locator(f"[data-testid=lane-{lane}] .e2-token")
            assert shown.count() == len(pieces)
            assert page.text_content(f"[data-testid=text-{lane}]") == "".join(map(theme.plain, pieces))
        assert page.locator("[data-testid=lane-eagle2] [data-origin=drafted]").count() == trace.origins.count("drafted")
        for number, step in enumerate(trace.steps):
            page.fill("[data-testid=step-slider]", str(number + 1))
            for phase in ("draft", "rerank", "verify", "accept"):
                page.click(f"[data-testid=phase-{phase}]")
                assert page.get_attribute(PLAYER, "data-phase") == phase
                assert page.text_content("[data-testid=phase]").lower().startswith(phase)
            assert page.get_attribute(PLAYER, "data-accepted") == ",".join(map(str, step.accepted))
            path = ",".join(map(str, sorted(step.accepted)))
            page.wait_for_function(
                "([path, kind]) => [...document.querySelectorAll('.e2-plot [data-verdict=accepted]')].map(p => +p.dataset.node)"
                ".sort((a, b) => a - b).join() === path && document.querySelector(`.e2-plot [data-verdict=${kind}]`)",
                arg=[path, step.next_kind],
            )
        with page.expect_download() as download:
            page.click("[data-testid=download]")
        assert download.value.suggested_filename.endswith(".json.gz")
        assert Trace.load(download.value.path()) == trace
        page.click("[data-testid=run]")  # again, on the same page
        page.wait_for_selector(".e2[data-kind=live]")
        finished(page)


def test_stop_ends_the_run_at_the_next_step(chromium: Any, served: Served) -> None:
    engine = served.use(FakeEngine(synthetic(200, depth=3, top_k=4, total=5), delay=0.1))
    with opened(chromium, served) as page:
        page.click("[data-testid=run]")
        page.wait_for_selector(".e2[data-kind=live] [data-node]")
        page.click("[data-testid=stop]")
        assert engine.closed.wait(5)
        page.wait_for_selector("[data-testid=run]:enabled")
        assert page.text_content("[data-testid=note]").startswith("Stopped.")
        assert page.text_content("[data-testid=text-eagle2]")
        finished(page)  # what was made is a run like any other: all its steps, and the download
        page.fill("[data-testid=step-slider]", "1")
        page.click("[data-testid=phase-rerank]")
        assert page.get_attribute(PLAYER, "data-phase") == "rerank"
        with page.expect_download() as download:
            page.click("[data-testid=download]")
        stopped = Trace.load(download.value.path())
        assert stopped.finish_reason == "stopped"
        assert 0 < len(stopped.steps) < 200
        served.use(FakeEngine(synthetic(3, depth=3, top_k=4, total=5)))
        page.click("[data-testid=run]")
        finished(page)


def test_a_closed_tab_ends_the_run_and_frees_the_device(chromium: Any, served: Served) -> None:
    engine = served.use(FakeEngine(synthetic(200, depth=3, top_k=4, total=5), delay=0.1))
    with opened(chromium, served) as page:
        page.click("[data-testid=run]")
        page.wait_for_selector(".e2[data-kind=live] [data-node]")
    assert engine.closed.wait(10)
    assert engine.most_running == 1


def test_one_run_at_a_time_and_visitors_do_not_see_each_other(chromium: Any, served: Served) -> None:
    engine = served.use(FakeEngine(synthetic(5, depth=3, top_k=4, total=5), delay=0.05))
    with opened(chromium, served) as one, opened(chromium, served) as two:
        one.fill("[data-testid=prompt]", "first")
        two.fill("[data-testid=prompt]", "second")
        one.click("[data-testid=run]")
        one.wait_for_selector(".e2[data-kind=live]")
        assert two.get_attribute(".e2[data-kind]", "data-kind") == "empty"
        two.click("[data-testid=run]")
        finished(one)
        finished(two)
    assert [prompt for prompt, _ in engine.prompts] == ["first", "second"]
    assert engine.most_running == 1


def fill_settings(page: Any, values: dict[str, str]) -> None:
    """Open the settings and type; a widget that is only just being built would put its first value back."""
    page.get_by_text("Settings", exact=True).first.click()
    for name in values:
        page.wait_for_selector(f"[data-testid={name}]")
    settled = 0
    for _ in range(100):
        wrong = [name for name, value in values.items() if page.input_value(f"[data-testid={name}]") != value]
        for name in wrong:
            page.fill(f"[data-testid={name}]", values[name])
            page.press(f"[data-testid={name}]", "Tab")
        settled = 0 if wrong else settled + 1
        if settled == 5:
            return
        page.wait_for_timeout(100)
    raise AssertionError(f"the settings do not keep what is typed: {wrong}")


def test_settings_reach_the_engine(chromium: Any, served: Served) -> None:
    engine = served.use(FakeEngine(synthetic(2, depth=3, top_k=4, total=5)))
    with opened(chromium, served) as page:
        fill_settings(page, {"max-new-tokens": "48", "temperature": "0.7", "depth": "2", "seed": "11"})
        page.get_by_label("static (EAGLE-1)").check()
        page.click("[data-testid=run]")
        finished(page)
    chosen = FakeSettings(max_new_tokens=48, temperature=0.7, seed=11, tree="static", depth=2)
    assert engine.prompts == [(app.EXAMPLES[0], chosen)]


def test_a_mistake_is_told_in_the_page(chromium: Any, served: Served) -> None:
    served.use(FakeEngine(synthetic(3, depth=3, top_k=4, total=5)))
    with opened(chromium, served, width=390, color_scheme="dark") as page:
        page.fill("[data-testid=prompt]", "fail")
        page.click("[data-testid=run]")
        page.wait_for_selector("[data-testid=note][data-level=error]")
        assert page.text_content("[data-testid=note]") == "The prompt is too long for this model."
        page.fill("[data-testid=prompt]", "${1+1} <img src=x onerror=alert(1)>")
        page.click("[data-testid=run]")
        finished(page)
        assert page.get_attribute(".e2[data-kind]", "data-scheme") == "dark"
        assert page.evaluate("document.scrollingElement.scrollWidth") <= 390


def test_hostile_tokens_do_nothing(chromium: Any, served: Served) -> None:
    words = [
        "<b>bold</b>",
        "${1+1}",
        "<img src=x onerror=alert(1)>",
        "{{value}}",
        "</script><script>alert(1)</script>",
        "`",
    ]
    trace = served.use(FakeEngine(synthetic(4, depth=2, top_k=3, total=6, words=words), delay=0.02)).trace
    with opened(chromium, served) as page:
        page.click("[data-testid=run]")
        finished(page)
        assert page.text_content("[data-testid=text-eagle2]") == trace.text
        assert page.locator("[data-testid=player] img, [data-testid=lane-eagle2] b").count() == 0


def test_the_endpoint_answers(served: Served) -> None:
    from urllib.request import Request, urlopen

    engine = served.use(FakeEngine(synthetic(3, depth=3, top_k=4, total=5)))
    base = served.demo.local_url + "gradio_api/call/race"
    ask = Request(
        base,
        json.dumps({"data": ["Hello", 96, 0, 1, 0, "dynamic", 3, 4, 5]}).encode(),
        {"Content-Type": "application/json"},
    )
    with urlopen(ask, timeout=30) as answer:
        event = json.load(answer)["event_id"]
    with urlopen(f"{base}/{event}", timeout=30) as answer:
        told = answer.read().decode()
    assert told.startswith("event: complete"), told
    assert json.loads(told.split("data: ", 1)[1])[0]["lanes"]["eagle2"]["token_ids"] == list(engine.trace.output_ids)
