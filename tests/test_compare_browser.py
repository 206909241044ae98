"""Static against dynamic in a real browser: both drawings equal their traces, the words equal Python's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from test_compare import hand_made
from visual_helpers import synthetic

from eagle2.trace import Trace
from visual import compare, player, theme, tree

pytestmark = pytest.mark.browser
TRACES = Path(__file__).parents[1] / "assets" / "traces"


def recorded(name: str) -> compare.Pair:
    dynamic, static = (Trace.load(TRACES / f"{name}{end}.json.gz") for end in ("", "-static"))
    return compare.Pair(name, dynamic, static)


PAIRS = [
    recorded("sum-open"),
    recorded("sum-asked"),
    compare.Pair("<b>made</b> by hand", *hand_made(), look="${1+1} <i>this</i>"),
    compare.Pair("60 of 510", synthetic(4), synthetic(4)),
]


def written(folder: Path, pairs: list[compare.Pair], hidden: bool = False) -> Path:
    """A page as the app's: the scripts in its head, plotly.js on its own, the message shown by `JS_ON_LOAD`."""
    path = folder / f"{len(pairs)}{hidden}.html"
    path.write_text(
        f"""<!doctype html><html lang="en"><head><meta charset="utf-8"><title>compare</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
{player.head(player.plotly_js().as_uri())}</head><body class="e2-standalone"><main class="e2-page"><h1>Compare</h1>
<div id="host"{' style="display:none"' if hidden else ""}>{compare.HTML_TEMPLATE}</div></main><script>
const told = [];
window.props = {{ value: "" }};
window.changed = value => {{ window.props.value = JSON.stringify(value); told.forEach(show => show()); }};
window.first = {player.to_json(compare.message(pairs, player.payload))};
(function (element, props, watch) {{ {compare.JS_ON_LOAD} }})(
  document.getElementById("host"), window.props, (name, show) => told.push(show));
window.changed(window.first);
</script></body></html>""",
        encoding="utf-8",
    )
    return path


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("compare"), PAIRS)


@contextmanager
def opened(browser: Any, path: Path, width: int = 1440, drawn: str | None = "0:0:accept:light") -> Iterator[Any]:
    """On leaving, nothing may have been logged, asked, or fetched from elsewhere."""
    context = browser.new_context(
        viewport={"width": width, "height": 900}, reduced_motion="reduce", color_scheme="light"
    )
    page = context.new_page()
    bad: list[str] = []
    page.on("console", lambda line: bad.append(line.text))
    page.on("pageerror", lambda error: bad.append(str(error)))
    page.on("dialog", lambda dialog: (bad.append("dialog: " + dialog.message), dialog.dismiss()))
    page.on("request", lambda request: None if request.url.startswith(("file:", "data:")) else bad.append(request.url))
    page.goto(path.as_uri())
    try:
        if drawn:
            settled(page, drawn)
        yield page
        assert bad == []
    finally:
        context.close()


def settled(page: Any, drawn: str) -> None:
    page.wait_for_selector(f"[data-testid=compare][data-drawn='{drawn}']")


def text(page: Any, testid: str) -> str:
    return str(page.text_content(f"[data-testid={testid}]"))


def drawn_nodes(page: Any, side: str) -> list[list[Any]]:
    script = f"[...document.querySelectorAll('[data-testid=compare-{side}] [data-node]')]"
    return sorted(page.evaluate(script + ".map(p => [+p.dataset.node, p.dataset.verdict])"))


def expected_nodes(trace: Trace, number: int) -> list[list[Any]]:
    step = trace.steps[number]
    verdicts = dict(enumerate(tree.verdicts(step))) | {len(step.token_ids): step.next_kind}
    seen = [i for i, node in enumerate(tree.info(trace, number).nodes) if node.y is not None]
    return [[i, verdicts[i]] for i in (*seen, len(step.token_ids))]


def columns_of(page: Any, side: str) -> list[float]:
    script = (
        f"document.querySelector('[data-testid=compare-{side}] .e2-compare-plot').data.find(t => t.name === 'nodes').x"
    )
    return sorted(set(page.evaluate(script)))


@pytest.mark.parametrize(("width", "scheme"), [(1440, "light"), (390, "dark")])
def test_both_trees_equal_their_traces(chromium: Any, path: Path, width: int, scheme: str) -> None:
    with opened(chromium, path, width) as page:
        if scheme == "dark":
            page.evaluate("document.body.classList.add('dark')")
        for number, pair in enumerate(PAIRS):
            page.click(f"[data-testid=compare-pair-{number}]")
            info = compare.info(pair.dynamic, pair.static)
            assert page.locator("[data-testid=compare-slider]").is_visible() is (len(info.contexts) > 1)
            for i, context in enumerate(info.contexts):
                if i:
                    page.fill("[data-testid=compare-slider]", str(i + 1))
                settled(page, f"{number}:{i}:accept:{scheme}")
                assert drawn_nodes(page, "dynamic") == expected_nodes(pair.dynamic, context.dynamic.step)
                assert drawn_nodes(page, "static") == expected_nodes(pair.static, context.static.step)
                assert text(page, "compare-sentence") == compare.sentence(context)
                for side in ("static", "dynamic"):
                    assert text(page, f"compare-{side}-line") == compare.line(getattr(context, side))
                assert text(page, "compare-prompt") == theme.plain(pair.dynamic.prompt_text)
                said = "".join(pair.dynamic.output_pieces[: context.position])
                assert text(page, "compare-output") == theme.plain(said)
                shared = min(map(len, (columns_of(page, "static"), columns_of(page, "dynamic"))))
                assert columns_of(page, "static")[:shared] == columns_of(page, "dynamic")[:shared]
            cells = page.locator("[data-testid=compare-totals] tbody tr").all()
            assert [tuple(row.locator("th, td").all_text_contents()) for row in cells] == list(compare.rows(info))
            assert page.evaluate("document.scrollingElement.scrollWidth") <= width
        caption = page.locator("[data-testid=compare-totals] caption").inner_text()
        assert (
            "model made-up; draft head made-up; device cpu, 2 threads; dtype float32; tree dynamic, depth 6" in caption
        )
        color = page.evaluate(
            "document.querySelector('.e2-compare-plot').data.find(t => t.name === 'accepted').line.color"
        )
        assert color == theme.PALETTES[scheme].accepted
        boxes = [page.locator(f"[data-testid=compare-{side}]").bounding_box() for side in ("static", "dynamic")]
        assert (boxes[0]["y"] == boxes[1]["y"]) is (width > 900)


def test_phases_change_what_is_marked(chromium: Any, path: Path) -> None:
    def marks() -> list[int]:
        script = (
            "[...document.querySelectorAll('.e2-compare-plot')].map(p => p.data.find(t => t.name === '{}').x.length)"
        )
        return [sum(page.evaluate(script.replace("{}", name))) for name in ("marks", "rings")]

    pair = PAIRS[0]
    context = compare.info(pair.dynamic, pair.static).contexts[0]
    firsts = sum(
        rank == 0
        for step in (pair.dynamic.steps[context.dynamic.step], pair.static.steps[context.static.step])
        for rank in step.target_ranks
    )
    with opened(chromium, path) as page:
        judged = [verdict for side in ("static", "dynamic") for _, verdict in drawn_nodes(page, side)]
        assert marks() == [sum(verdict in ("root", "accepted", "rejected") for verdict in judged), 0]
        for phase, wanted in (("rerank", [0, 0]), ("verify", [0, firsts])):
            page.click(f"[data-testid=compare-phase-{phase}]")
            settled(page, f"0:0:{phase}:light")
            assert marks() == wanted
            assert page.get_attribute(f"[data-testid=compare-phase-{phase}]", "aria-pressed") == "true"
            assert page.get_attribute("[data-testid=compare-phase-accept]", "aria-pressed") == "false"
        assert text(page, "compare-number") == "Beside a token: the target's probability."
        # Another pair keeps the phase.
        page.click("[data-testid=compare-pair-1]")
        settled(page, "1:0:verify:light")


def test_keyboard_alone_is_enough(chromium: Any, path: Path) -> None:
    def focused() -> str:
        return str(page.evaluate("document.activeElement.dataset.testid || document.activeElement.className"))

    with opened(chromium, path) as page:
        order = []
        for _ in range(12):
            page.keyboard.press("Tab")
            order.append(focused())
            assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
        assert order == [
            "compare-pair-0", "compare-pair-1", "compare-pair-2", "compare-pair-3", "compare-context", "compare-previous",
            "compare-slider", "compare-next", "compare-phase-rerank", "compare-phase-verify", "compare-phase-accept",
            "e2-compare-scroll",
        ]  # fmt: skip
        page.focus("[data-testid=compare-pair-0]")
        page.keyboard.press("Tab")
        page.keyboard.press("Enter")
        settled(page, "1:0:accept:light")
        page.focus("[data-testid=compare-slider]")
        page.keyboard.press("ArrowRight")
        settled(page, "1:1:accept:light")
        assert text(page, "compare-place") == "Context 2 of 3"
        page.keyboard.press("Tab")
        page.keyboard.press("Enter")
        settled(page, "1:2:accept:light")
        assert page.get_attribute("[data-testid=compare-next]", "aria-disabled") == "true"
        page.keyboard.press("Enter")  # at the end, nothing moves and the focus stays
        assert focused() == "compare-next"
        assert text(page, "compare-place") == "Context 3 of 3"
        page.keyboard.press("Tab")
        page.keyboard.press("Space")
        settled(page, "1:2:rerank:light")
        page.focus("[data-testid=compare-static] summary")
        page.keyboard.press("Enter")
        page.wait_for_selector("[data-testid=compare-static-table] tbody tr:nth-child(25)")
        page.click("[data-testid=compare-previous]")
        settled(page, "1:1:rerank:light")
        step = PAIRS[1].static.steps[compare.info(PAIRS[1].dynamic, PAIRS[1].static).contexts[1].static.step]
        rows = page.locator("[data-testid=compare-static-table] tbody tr").evaluate_all(
            "rows => rows.map(row => [+row.dataset.node, row.dataset.verdict])"
        )
        verdicts = tree.verdicts(step)
        assert rows == [[node, verdicts[node]] for node in step.kept]


def test_hostile_text_stays_text(chromium: Any, path: Path) -> None:
    with opened(chromium, path) as page:
        page.click("[data-testid=compare-pair-2]")
        settled(page, "2:0:accept:light")
        assert text(page, "compare-pair-2") == "<b>made</b> by hand"
        assert text(page, "compare-look") == "What to look at: ${1+1} <i>this</i>"
        assert text(page, "compare-prompt") == "10+2 <i>=</i> ${1+1}"
        labels = page.evaluate("[...document.querySelectorAll('.tracee2labels text')].map(t => t.textContent)")
        assert any(label.startswith("<img␣src=x␣…") for label in labels)
        page.fill("[data-testid=compare-slider]", "3")
        settled(page, "2:2:accept:light")
        page.click("[data-testid=compare-dynamic] summary")
        page.wait_for_selector("[data-testid=compare-dynamic-table] tbody tr:nth-child(3)")
        assert "${1+1}" in text(page, "compare-dynamic-table")
        assert page.locator("[data-testid=compare] img, [data-testid=compare] b, [data-testid=compare] i").count() == 0


def test_both_trees_scroll_together(chromium: Any, path: Path) -> None:
    with opened(chromium, path, 390) as page:
        page.evaluate("document.querySelectorAll('.e2-compare-scroll')[1].scrollLeft = 100")
        page.wait_for_function("document.querySelectorAll('.e2-compare-scroll')[0].scrollLeft === 100")
        page.fill("[data-testid=compare-slider]", "2")
        settled(page, "0:1:accept:light")
        # The ends of both paths have come into sight.
        for side in ("static", "dynamic"):
            star = page.locator(f"[data-testid=compare-{side}] [data-verdict=correction]").bounding_box()
            assert 0 < star["x"] < 390
        page.click("[data-testid=compare-phase-rerank]")
        settled(page, "0:1:rerank:light")
        assert page.evaluate("document.querySelectorAll('.e2-compare-scroll')[1].scrollLeft") == 0


def test_nothing_is_drawn_until_it_is_shown(chromium: Any, tmp_path: Path) -> None:
    with opened(chromium, written(tmp_path, PAIRS[:2], hidden=True), drawn=None) as page:
        page.wait_for_function("window.Plotly")
        page.wait_for_timeout(400)
        assert page.locator(".js-plotly-plot").count() == 0
        page.evaluate("document.getElementById('host').style.display = ''")
        settled(page, "0:0:accept:light")
        # What comes while it is hidden again, and new colours, are drawn when it is shown, at the same width.
        page.evaluate("document.getElementById('host').style.display = 'none'")
        page.wait_for_timeout(200)
        page.evaluate("document.body.classList.add('dark'); changed({...first, opened: 1})")
        page.wait_for_timeout(200)
        assert page.get_attribute("[data-testid=compare]", "data-drawn") == "0:0:accept:light"
        page.evaluate("document.getElementById('host').style.display = ''")
        settled(page, "1:0:accept:dark")


def test_it_follows_the_width_and_new_messages(chromium: Any, path: Path) -> None:
    width = "document.querySelector('.e2-compare-plot').layout.width"
    with opened(chromium, path) as page:
        before = page.evaluate(width)
        page.set_viewport_size({"width": 1000, "height": 900})
        page.wait_for_function(f"{width} < {before}")
        page.evaluate("changed({kind: 'compare', opened: 0, pairs: []})")
        assert text(page, "compare-note") == compare.setup()["empty"]
        assert not page.locator("[data-testid=compare-totals]").is_visible()
        page.evaluate("changed({...first, pairs: [{...first.pairs[0], contexts: []}]})")
        assert text(page, "compare-note") == compare.setup()["apart"]
        assert page.locator("[data-testid=compare-totals]").is_visible()
        assert not page.locator("[data-testid=compare-static]").is_visible()
        page.evaluate("changed({...first, opened: 1})")
        settled(page, "1:0:accept:light")
