"""The player in a real browser, standalone: what it draws equals the trace, and a keyboard is enough to use it."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from visual_helpers import GOLDEN, exported, synthetic, with_copies

from eagle2.trace import Trace
from visual import theme, tree
from visual.player import facts, payload

pytestmark = pytest.mark.browser
PLAYER = "[data-testid=player]"
RUNS = {
    "golden": lambda: Trace.load(GOLDEN),
    "default": lambda: synthetic(6, depth=3, top_k=4, total=5, seed=4),
    "paper": lambda: synthetic(4),
    "copies": with_copies,
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Trace, Path]]:
    return exported(tmp_path_factory.mktemp("player"), RUNS)


@contextmanager
def opened(browser: Any, path: Path, width: int = 1440, **options: Any) -> Iterator[Any]:
    """A page on the run; on leaving, nothing may have been logged, asked, or fetched."""
    options.setdefault("reduced_motion", "reduce")
    context = browser.new_context(viewport={"width": width, "height": 900}, **options)
    page = context.new_page()
    bad: list[str] = []
    page.on("console", lambda line: bad.append(line.text))
    page.on("pageerror", lambda error: bad.append(str(error)))
    page.on("dialog", lambda dialog: (bad.append("dialog: " + dialog.message), dialog.dismiss()))
    page.on(
        "request",
        lambda request: None if request.url.startswith(("file:", "blob:", "data:")) else bad.append(request.url),
    )
    page.goto(path.as_uri())
    page.wait_for_selector("[data-drawn]")
    page.focus(PLAYER)
    try:
        yield page
        assert bad == []
    finally:
        context.close()


def state(page: Any) -> dict[str, str]:
    return dict(page.evaluate("document.querySelector('[data-testid=player]').dataset"))


def settled(page: Any) -> None:
    page.evaluate("window.eagle2.settled()")


@pytest.mark.parametrize(
    ("name", "width", "scheme"),
    [
        ("golden", 390, "dark"), ("default", 390, "light"), ("default", 1440, "dark"), ("paper", 390, "dark"),
        ("paper", 1440, "light"),
    ],
)  # fmt: skip
def test_what_is_drawn_equals_the_trace(chromium: Any, runs: Any, name: str, width: int, scheme: str) -> None:
    trace, path = runs[name]
    with opened(chromium, path, width, color_scheme=scheme) as page:
        page.keyboard.press("Home")
        for number, step in enumerate(trace.steps):
            page.fill("[data-testid=step-slider]", str(number + 1))
            settled(page)
            now = state(page)
            assert (now["step"], now["phase"], now["accepted"]) == (
                str(number),
                "accept",
                ",".join(map(str, step.accepted)),
            )
            drawn = page.evaluate(
                "[...document.querySelectorAll('.e2-plot [data-node]')].map(p => [+p.dataset.node, p.dataset.verdict])"
            )
            verdicts = dict(enumerate(tree.verdicts(step))) | {len(step.token_ids): step.next_kind}
            seen = [i for i, node in enumerate(tree.info(trace, number).nodes) if node.y is not None]
            assert sorted(drawn) == [[i, verdicts[i]] for i in (*seen, len(step.token_ids))]
            assert sorted(i for i, verdict in drawn if verdict == "accepted") == sorted(step.accepted)
            own = page.evaluate("document.querySelector('.e2-plot').data.find(t => t.name === 'labels').text.at(-1)")
            assert own == f"<b>{theme.escape(theme.label(trace.vocabulary[step.next_id]))}</b>"
        assert page.evaluate("document.querySelector('.e2').dataset.scheme") == scheme
        assert page.evaluate("document.scrollingElement.scrollWidth") <= width
        assert page.text_content("[data-testid=text-eagle2]") == "".join(map(theme.plain, trace.output_pieces))
        assert page.text_content("[data-testid=speedup]") == f"{trace.speedup:.2f}×"
        assert page.text_content("[data-testid=tau]") == f"{trace.tau:.2f}"


@pytest.mark.parametrize("name", ["golden", "paper", "copies"])
def test_browser_and_python_draw_the_same(chromium: Any, runs: Any, name: str) -> None:
    """At 390 px the columns are not stretched, so all coordinates can be compared."""
    trace, path = runs[name]
    with opened(chromium, path, 390) as page:
        for number in range(min(len(trace.steps), 2)):
            for phase in tree.PHASES[1:]:
                page.fill("[data-testid=step-slider]", str(number + 1))
                page.click(f"[data-testid=phase-{phase}]")
                settled(page)
                drawn = page.evaluate(
                    "document.querySelector('.e2-plot').data.map(t => ({name: t.name, x: t.x, y: t.y, text: t.text,"
                    " hovertext: t.hovertext, color: t.marker && t.marker.color, size: t.marker && t.marker.size}))"
                )
                for ours, theirs in zip(tree.figure(tree.info(trace, number), phase).data, drawn, strict=True):
                    assert ours.name == theirs["name"]
                    for key in ("x", "y"):
                        assert theirs[key] == pytest.approx(list(ours[key])), (ours.name, key)
                    for key in ("text", "hovertext"):
                        if ours[key] is not None or theirs[key] is not None:
                            assert tuple(theirs[key]) == ours[key], (ours.name, key)
                    if ours.name == "nodes":
                        assert (theirs["color"], theirs["size"]) == (list(ours.marker.color), list(ours.marker.size))


def test_hostile_tokens_are_text(chromium: Any, runs: Any) -> None:
    _, path = runs["golden"]
    with opened(chromium, path) as page:
        page.keyboard.press("End")
        settled(page)
        labels = page.evaluate("[...document.querySelectorAll('.tracee2labels text')].map(t => t.textContent)")
        shown = " ".join(labels)
        for text in ("<b>bold</b>", "${1+1}", "<img␣src=x␣…", "⟨202E⟩drow", "⏎", "<0xE2>"):
            assert text in shown
        assert page.locator("img").count() == 0
        assert page.text_content("h1") == "A <b>hostile</b> prompt: ${1+1}"
        page.click(".e2-player .e2-details summary")
        # The table is filled when the browser tells of its opening, which is after the click has returned.
        page.wait_for_selector("[data-testid=node-table] tbody tr:nth-child(6)")
        cells = page.locator("[data-testid=node-table] tbody tr").all_inner_texts()
        assert len(cells) == 6
        assert "<img␣src=x␣onerror=alert(1)>" in cells[2]


def test_keyboard_alone_is_enough(chromium: Any, runs: Any) -> None:
    trace, path = runs["default"]
    with opened(chromium, path) as page:
        page.keyboard.press("Home")
        seen = []
        for _ in range(14):
            now = state(page)
            seen.append((now["step"], now["phase"]))
            page.keyboard.press("ArrowRight")
        phases = ["draft", "draft", "draft", *tree.PHASES[1:]]
        assert seen == [("0", phase) for phase in phases] + [("1", phase) for phase in phases]
        page.keyboard.press("ArrowLeft")
        assert (state(page)["step"], state(page)["phase"]) == ("1", "accept")
        page.keyboard.press("PageDown")
        assert (state(page)["step"], state(page)["phase"]) == ("2", "accept")
        page.keyboard.press("ArrowUp")
        assert state(page)["step"] == "1"
        page.keyboard.press("End")
        assert state(page)["step"] == str(len(trace.steps) - 1)
        page.keyboard.press("Home")
        assert page.text_content("[data-testid=phase]").startswith("Draft, pass 1 of 3: the head reads the root")
        page.select_option("[data-testid=speed]", "4")
        page.focus(PLAYER)
        page.keyboard.press("Space")
        assert state(page)["playing"] == "true"
        page.wait_for_function(
            "document.querySelector('[data-testid=player]').dataset.phase === 'accept'", timeout=20_000
        )
        page.keyboard.press("Space")
        stopped = state(page)
        assert stopped["playing"] == "false"
        page.wait_for_timeout(900)
        assert state(page) == stopped
        page.keyboard.press("Tab")  # focus goes to the first button, and can be seen
        assert page.evaluate("document.activeElement.dataset.testid") == "previous-step"
        assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
        assert page.get_attribute("[data-testid=phase]", "aria-live") == "polite"


def test_drafting_appears_layer_by_layer(chromium: Any, runs: Any) -> None:
    trace, path = runs["default"]
    step = trace.steps[0]
    with opened(chromium, path) as page:
        page.keyboard.press("Home")
        for number, fed in enumerate(tree.passes(step)):
            settled(page)
            drawn = set(
                page.evaluate("[...document.querySelectorAll('.e2-plot [data-node]')].map(p => +p.dataset.node)")
            )
            assert drawn == {i for i, born in enumerate(tree.drafted_in(step)) if born <= number}
            rings = page.evaluate("document.querySelector('.e2-plot').data.find(t => t.name === 'rings').x.length")
            assert rings == len(fed)
            page.keyboard.press("ArrowRight")


def test_a_stub_opens_and_closes(chromium: Any, runs: Any) -> None:
    trace, path = runs["default"]
    step = trace.steps[-1]
    drawn = "document.querySelectorAll('.e2-plot [data-node]').length"
    with opened(chromium, path) as page:
        page.keyboard.press("End")
        settled(page)
        assert page.evaluate(drawn) == len(step.token_ids) + 1
        page.click("[data-testid=fold]")
        settled(page)
        folded = page.evaluate(drawn)
        assert folded == len(step.kept) + 2
        box = page.locator(".tracee2stubs text").first.bounding_box()
        page.mouse.move(box["x"] + 3, box["y"] + 5)
        page.wait_for_timeout(150)
        page.mouse.click(box["x"] + 3, box["y"] + 5)
        page.wait_for_timeout(400)
        settled(page)
        assert page.evaluate(drawn) > folded
        page.click("[data-testid=fold]")
        settled(page)
        assert page.evaluate(drawn) == len(step.token_ids) + 1


def test_a_click_on_a_token_goes_to_its_step(chromium: Any, runs: Any) -> None:
    trace, path = runs["default"]
    with opened(chromium, path) as page:
        index = len(trace.output_ids) // 2
        page.click(f"[data-testid=text-eagle2] [data-i='{index}']")
        assert state(page)["step"] == str(trace.step_of(index))


def test_moves_are_animated_unless_reduced(chromium: Any, runs: Any) -> None:
    _, path = runs["default"]
    for motion, moving in (("no-preference", True), ("reduce", False)):
        with opened(chromium, path, reduced_motion=motion) as page:
            page.keyboard.press("Home")
            page.keyboard.press("ArrowRight")
            settled(page)
            page.wait_for_timeout(600)
            assert bool(page.evaluate("document.querySelector('.e2-plot').layout.transition !== undefined")) is moving
            half = page.evaluate(
                "[...document.querySelectorAll('.e2-plot .js-line, .e2-plot .point, .e2-plot .textpoint text')]"
                ".filter(e => getComputedStyle(e).opacity < 1).length"
            )
            assert half == 0


def test_the_page_follows_gradios_dark_class(chromium: Any, runs: Any) -> None:
    _, path = runs["golden"]
    with opened(chromium, path) as page:
        page.evaluate("document.body.classList.add('dark')")
        page.wait_for_function("document.querySelector('.e2').dataset.scheme === 'dark'")
        settled(page)
        assert page.evaluate("document.querySelector('.e2-plot').data.find(t => t.name === 'accepted').line.color") == (
            theme.DARK.accepted
        )


def test_a_token_its_node_and_its_step_belong_together(chromium: Any, runs: Any) -> None:
    trace, path = runs["default"]
    number, step = next((i, step) for i, step in enumerate(trace.steps) if step.accepted)
    start = 1 + sum(step.emitted for step in trace.steps[:number])
    with opened(chromium, path) as page:
        page.click(f"[data-testid=text-eagle2] [data-i='{start}']")  # its first token was drafted
        settled(page)
        linked = "[...document.querySelectorAll('.e2-plot .e2-linked')].map(p => +p.dataset.node)"
        assert state(page)["step"] == str(number)
        assert page.evaluate(linked) == [step.accepted[0]]
        # The target's own token; Plotly's layer for the pointer lies over all nodes.
        page.hover(f".e2-plot .point[data-node='{len(step.token_ids)}']", force=True)
        own = start + len(step.accepted)
        page.wait_for_function(f"document.querySelector('[data-i=\"{own}\"]').classList.contains('e2-linked')")
        assert page.evaluate(linked) == [len(step.token_ids)]
        assert page.locator(".e2-token.e2-linked").count() == 1
        page.hover("[data-testid=clock]")
        page.wait_for_function(f"document.querySelector('[data-i=\"{start}\"]').classList.contains('e2-linked')")
        page.focus(PLAYER)
        page.keyboard.press("PageDown")  # another step: nothing is pointed at any more
        settled(page)
        assert page.evaluate(linked) == []


def test_zoom_is_kept_between_steps(chromium: Any, runs: Any) -> None:
    _, path = runs["paper"]
    with opened(chromium, path) as page:
        size = "document.querySelector('.e2-plot .js-plotly-plot, .e2-plot').layout.height"
        page.keyboard.press("Home")
        page.keyboard.press("End")
        settled(page)
        before = page.evaluate(size)
        page.keyboard.press("+")
        page.click("[data-testid=zoom-in]")
        settled(page)
        assert page.text_content("[data-testid=zoom-reset]") == "150 %"
        assert page.evaluate(size) == pytest.approx(1.5 * before)
        page.focus(PLAYER)
        page.keyboard.press("PageUp")
        settled(page)
        assert page.text_content("[data-testid=zoom-reset]") == "150 %"
        assert page.evaluate(size) == pytest.approx(1.5 * before)
        labels = "document.querySelector('.e2-plot').data.find(t => t.name === 'labels').textfont.size"
        assert max(page.evaluate(labels)) == 1.5 * theme.SIZES.label_font
        for _ in range(5):
            page.keyboard.press("+")
        assert page.is_disabled("[data-testid=zoom-in]")
        page.keyboard.press("0")
        settled(page)
        assert page.evaluate(size) == pytest.approx(before)


@pytest.mark.parametrize("kind", ["svg", "png"])
def test_the_tree_is_saved_as_a_picture(chromium: Any, runs: Any, kind: str) -> None:
    trace, path = runs["golden"]
    with opened(chromium, path) as page:
        page.keyboard.press("End")
        page.click("[data-testid=save]")
        with page.expect_download() as download:
            page.click(f"[data-testid=save-tree-{kind}]")
        assert download.value.suggested_filename == f"eagle2-step-{len(trace.steps)}-accept-tree.{kind}"
        saved = Path(download.value.path()).read_bytes()
        if kind == "png":
            assert saved[:8] == b"\x89PNG\r\n\x1a\n"
            return
        root = ElementTree.fromstring(saved)
        shown = " ".join("".join(text.itertext()) for text in root.iter("{http://www.w3.org/2000/svg}text"))
        for text in (
            "<b>bold</b>",
            "${1+1}",
            "⟨202E⟩drow",
            "Tree, step 2 of 2, accept",
            "A <b>hostile</b> prompt",
            "hand-made",
        ):
            assert text in shown
        assert not list(root.iter("{http://www.w3.org/2000/svg}image"))


def test_another_run_opens_where_it_says(chromium: Any, runs: Any) -> None:
    _, path = runs["default"]
    other = runs["golden"][0]
    with opened(chromium, path) as page:
        page.evaluate("run => window.eagle2.show(run)", payload(other, at=(1, "flatten")))
        settled(page)
        assert (state(page)["step"], state(page)["phase"], state(page)["playing"]) == ("1", "flatten", "false")
        assert page.is_hidden("[data-testid=copy-link]")  # a page of its own has no link
        marks = page.evaluate("document.querySelector('.e2-plot').data.find(t => t.name === 'marks').text")
        assert sorted(marks, key=int) == [str(row) for row in range(len(other.steps[1].kept) + 1)]
        page.evaluate("run => window.eagle2.show(run)", payload(other, at=(99, "nonsense")))
        assert (state(page)["step"], state(page)["phase"]) == ("1", "accept")
        # Reduced motion: it opens at the start, and waits.
        page.evaluate("run => window.eagle2.show(run)", payload(other, play=True))
        assert (state(page)["step"], state(page)["phase"], state(page)["playing"]) == ("0", "draft", "false")
    with opened(chromium, path, reduced_motion="no-preference") as page:
        page.evaluate("run => window.eagle2.show(run)", payload(other, play=True))
        assert (state(page)["step"], state(page)["phase"], state(page)["playing"]) == ("0", "draft", "true")
        page.wait_for_function("document.querySelector('[data-testid=player]').dataset.phase === 'rerank'")


def test_how_a_run_was_made_is_told(chromium: Any, runs: Any) -> None:
    trace, path = runs["golden"]
    with opened(chromium, path, 390) as page:
        page.click("[data-testid=run-about] summary")
        told = page.locator("[data-testid=run-facts] dd").all_text_contents()
        assert told == [value for _, value in facts(trace)]
        assert page.evaluate("document.scrollingElement.scrollWidth") <= 390


def test_ten_numbers_at_random_equal_the_traces(chromium: Any, runs: Any) -> None:
    """Read from the page's own text elements: on edges, beside tokens, in the table and in the line of times."""
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")  # shown where the test fails
    rng = random.Random(seed)
    trace, path = runs["paper"]
    drawn = """layer => {
      const div = document.querySelector('.e2-plot'), trace = div.data.find(t => t.name === layer);
      return [...div.querySelectorAll('.tracee2' + layer + ' text')].map(text =>
        [trace.ids[text.__data__.i], text.querySelector('tspan:last-child')?.textContent ?? text.textContent]);
    }"""

    def shown(value: float) -> set[str]:
        """A message carries six digits: a value between two short forms may be written as either."""
        return {theme.short(value * (1 + off)) for off in (-2e-5, 0, 2e-5)}

    with opened(chromium, path) as page:
        page.evaluate("document.querySelector('.e2-player .e2-details').open = true")
        for _ in range(10):
            number, kind = (
                rng.randrange(len(trace.steps)),
                rng.choice(["confidence", "value", "target", "table", "times"]),
            )
            step = trace.steps[number]
            page.fill("[data-testid=step-slider]", str(number + 1))
            page.click(f"[data-testid=phase-{'verify' if kind in ('target', 'table') else 'rerank'}]")
            settled(page)
            if kind == "times":
                told = page.text_content("[data-testid=clock]")
                draft, verify, commit = re.findall(r"([0-9.]+) ms", told)
                seconds = (step.draft_seconds, step.verify_seconds, step.commit_seconds)
                assert (draft, verify, commit) == tuple(f"{1000 * part:.1f}" for part in seconds)
                continue
            row = rng.randrange(len(step.kept))
            node = step.kept[row]
            if kind == "table":
                cells = page.locator(f"[data-testid=node-table] tr[data-node='{node}'] td").all_text_contents()
                assert cells[3] == theme.probability(step.confidence[node])
                assert cells[5:7] == [theme.probability(step.target_probs[row]), str(step.target_ranks[row] + 1)]
                continue
            texts = dict(page.evaluate(drawn, "confidences" if kind == "confidence" else "labels"))
            wanted = {
                "confidence": step.confidence[node],
                "value": math.exp(step.log_value[node]),
                "target": step.target_probs[row],
            }[kind]
            assert texts[f"s{number}n{node}"].strip() in shown(wanted), (number, node, kind)
