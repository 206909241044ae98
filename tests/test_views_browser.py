"""The side views in a real browser: they draw what Python draws, and the pointer links them with the tree."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from test_player_browser import opened, settled, state
from test_visual import HOSTILE
from visual_helpers import GOLDEN, exported, synthetic

from eagle2.cost import CostModel
from eagle2.trace import Trace
from visual import theme, tree, views, why
from visual.player import export_html, payload

pytestmark = pytest.mark.browser


def as_sent(trace: Trace) -> Trace:
    """The trace with a message's six digits: among 510 values some are equal then, which sorts them by the rule for ties."""
    return dataclasses.replace(
        trace,
        steps=tuple(
            dataclasses.replace(step, log_value=tuple(float(f"{value:.6g}") for value in step.log_value))
            for step in trace.steps
        ),
    )


COSTS = CostModel((1, 2, 4, 8, 16), (0.04013, 0.0421, 0.0453, 0.0502, 0.0701), (1, 4), (0.00213, 0.0031), 0.00107)


def costly(trace: Trace) -> Trace:
    """With a cost model, and its third step without drafts."""
    steps = list(trace.steps)
    old = steps[2]
    steps[2] = dataclasses.replace(
        old, token_ids=old.token_ids[:1], parents=(-1,), confidence=(1.0,), log_value=(0.0,), selected=(), kept=(),
        target_probs=(), target_ranks=(), accepted=(), decisions=(), next_id=old.emitted_ids[-1], next_kind="bonus",
        emitted=1, choice_ids=(old.emitted_ids[-1],), choice_probs=(0.5,),
    )  # fmt: skip
    output = (trace.output_ids[0], *(token for step in steps for token in step.emitted_ids))
    return dataclasses.replace(
        trace, steps=tuple(steps), output_ids=output, output_pieces=tuple(trace.vocabulary[i] for i in output),
        autoregressive=None, metadata={**trace.metadata, "costs": COSTS.to_dict()},
    )  # fmt: skip


RUNS = {
    "golden": lambda: Trace.load(GOLDEN),
    "default": lambda: synthetic(6, depth=3, top_k=4, total=5, seed=4),
    "paper": lambda: as_sent(synthetic(3)),
    "hostile": lambda: synthetic(3, depth=2, top_k=3, total=6, words=HOSTILE),
    "large": lambda: synthetic(2, total=128),
    "costs": lambda: costly(synthetic(6, depth=3, top_k=4, total=5, seed=4)),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Trace, Path]]:
    return exported(tmp_path_factory.mktemp("views"), RUNS)


def show(page: Any, number: int, phase: str) -> None:
    page.evaluate(f"window.eagle2.context.go({number}, '{phase}')")
    settled(page)
    page.wait_for_selector(f"[data-testid=mask][data-drawn='{number}:{phase}']")


def drawn(page: Any, name: str) -> dict[str, Any]:
    return dict(
        page.evaluate(
            f"(() => {{ const d = document.querySelector('[data-testid={name}]');"
            " return JSON.parse(JSON.stringify({data: d.data, layout: d.layout, said: d.getAttribute('aria-label')})); })()"
        )
    )


def width(page: Any, name: str) -> int:
    return int(page.evaluate(f"document.querySelector('[data-testid={name}-box]').clientWidth"))


def same(ours: Any, theirs: Any, where: str) -> None:
    """All that Python sets is set in the browser too, floats within the six digits of a message."""
    if isinstance(ours, dict):
        for key, value in ours.items():
            assert key in theirs, (where, key)
            same(value, theirs[key], f"{where}.{key}")
    elif isinstance(ours, list):
        assert len(ours) == len(theirs), where
        for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            same(a, b, f"{where}[{i}]")
    elif isinstance(ours, float):
        assert theirs == pytest.approx(ours, rel=2e-5, abs=1e-9), where
    else:
        assert ours == theirs, where


@pytest.mark.parametrize(
    ("name", "screen", "scheme"),
    [("golden", 1440, "light"), ("default", 390, "dark"), ("paper", 390, "light"), ("hostile", 1440, "dark")],
)
def test_browser_and_python_draw_the_same(chromium: Any, runs: Any, name: str, screen: int, scheme: str) -> None:
    trace, path = runs[name]
    positions = tree.root_positions(trace)
    infos = [views.values_info(step, trace.vocabulary) for step in trace.steps]
    span, palette = views.values_span(infos), theme.PALETTES[scheme]
    with opened(chromium, path, screen, color_scheme=scheme) as page:
        for number in range(2):
            mask = views.mask_info(trace.steps[number], trace.vocabulary, positions[number])
            for phase in tree.PHASES:
                show(page, number, phase)
                ours = {
                    "values": views.values_figure(
                        infos[number], phase, palette, drafted_in=0, span=span, width=width(page, "values")
                    ),
                    "mask": views.mask_figure(mask, phase, palette, width=width(page, "mask")),
                }
                said = {
                    "values": views.values_words(infos[number], phase, 0),
                    "mask": views.mask_words(mask, phase),
                }
                for view, figure in ours.items():
                    theirs, plain = drawn(page, view), json.loads(figure.to_json())
                    assert len(theirs["data"]) == len(plain["data"])
                    for a, b in zip(plain["data"], theirs["data"], strict=True):
                        same(a, b, f"{number} {phase} {view} {a['name']}")
                    for key in ("width", "height", "shapes", "xaxis", "yaxis", "margin"):
                        if key in plain["layout"]:
                            same(plain["layout"][key], theirs["layout"][key], f"{number} {phase} {view} {key}")
                    assert theirs["said"] == said[view]
                    assert page.get_attribute(f"[data-testid={view}]", "role") == "img"


def test_draft_passes_show_what_is_drafted_so_far(chromium: Any, runs: Any) -> None:
    trace, path = runs["default"]
    step = trace.steps[0]
    born = tree.drafted_in(step)
    with opened(chromium, path) as page:
        page.keyboard.press("Home")
        for number in range(len(tree.passes(step))):
            settled(page)
            traces = {item["name"]: item for item in drawn(page, "values")["data"]}
            assert sorted(traces["drafted"]["customdata"]) == [i for i, b in enumerate(born) if 0 <= b <= number]
            assert (traces["line"]["x"], traces["kept"]["x"], traces["cut"]["x"]) == ([], [], [])
            page.keyboard.press("ArrowRight")
        assert state(page)["phase"] == "rerank"
        traces = {item["name"]: item for item in drawn(page, "values")["data"]}
        assert sorted(traces["kept"]["customdata"]) == list(step.kept)
        lowest = min(step.log_value[i] for i in step.kept)
        assert page.text_content("[data-testid=values] .tracee2values-words text") == (
            f"cut: the 5th of 36 values, {theme.short(2.718281828459045**lowest)}"
        )


def test_numbers_on_the_page_are_the_traces(chromium: Any, runs: Any) -> None:
    trace, path = runs["default"]
    positions = tree.root_positions(trace)
    with opened(chromium, path) as page:
        for number, step in enumerate(trace.steps):
            show(page, number, "accept")
            texts = {
                layer: page.locator(f"[data-testid=mask] .tracee2mask-{layer} text").all_text_contents()
                for layer in ("labels", "columns", "checks")
            }
            rows = [0, *step.kept]
            assert texts["columns"] == [str(i) for i in range(len(rows))]
            assert [text.replace("\u00a0", " ").split() for text in texts["labels"]] == [
                [
                    str(i),
                    f"@{positions[number] + step.depths[node]}",
                    theme.label(trace.vocabulary[step.token_ids[node]]),
                ]
                for i, node in enumerate(rows)
            ]
            assert texts["checks"] == ["✓"] * (len(step.accepted) + 1)
            assert page.locator("[data-testid=values] .point").count() == len(step.token_ids) - 1
            assert page.locator("[data-testid=values] .tracee2values-checks text").count() == len(step.accepted)
            assert page.locator("[data-testid=mask] image").count() == 1


LINKED = "[...document.querySelectorAll('.e2-plot .e2-linked')].map(p => +p.dataset.node)"


def test_pointing_links_the_tree_the_strip_and_the_mask(chromium: Any, runs: Any) -> None:
    trace, path = runs["default"]
    number = next(i for i, step in enumerate(trace.steps) if step.accepted)
    step = trace.steps[number]
    node, row = step.accepted[0], step.kept.index(step.accepted[0]) + 1
    frame_top, high = views.SIZES.head, views.mask_frame(6, 10).high
    band, ring = "[data-testid=mask-band]", "[data-testid=values-ring]"
    with opened(chromium, path) as page:
        show(page, number, "accept")
        assert not any(page.is_visible(part) for part in (band, ring))
        # tree -> strip and mask
        page.locator(f".e2-plot [data-node='{node}']").hover(force=True)
        page.wait_for_selector(band)
        assert page.get_attribute(band, "data-node") == str(node)
        assert page.get_attribute(ring, "data-node") == str(node)
        box, plot = page.locator(band).bounding_box(), page.locator("[data-testid=mask]").bounding_box()
        assert box["y"] + box["height"] / 2 - plot["y"] == pytest.approx(frame_top + (row + 0.5) * high, abs=1)
        circle = page.locator(ring).bounding_box()
        at = next(item for item in drawn(page, "values")["data"] if item["name"] == "accepted")["customdata"].index(
            node
        )
        accepted = page.locator("[data-testid=values] .tracee2values-accepted .point").nth(at).bounding_box()
        assert circle["x"] + circle["width"] / 2 == pytest.approx(accepted["x"] + accepted["width"] / 2, abs=1.5)
        assert circle["y"] + circle["height"] / 2 == pytest.approx(accepted["y"] + accepted["height"] / 2, abs=1.5)
        # mask -> tree; away: nothing
        other = step.kept[-1]
        at = {"x": plot["x"] + 200, "y": plot["y"] + frame_top + (len(step.kept) + 0.5) * high}
        page.mouse.move(at["x"], at["y"])
        page.wait_for_function(f"({LINKED})[0] === {other}")
        assert page.evaluate(LINKED) == [other]
        page.mouse.move(at["x"], plot["y"] - 60)
        page.wait_for_function(f"({LINKED}).length === 0")
        assert not any(page.is_visible(part) for part in (band, ring))
        # a cut node has no row
        cut = next(i for i in range(1, len(step.token_ids)) if i not in step.kept)
        page.evaluate(f"window.eagle2.context.link({{step: {number}, node: {cut}}})")
        assert page.get_attribute(ring, "data-node") == str(cut)
        assert not page.is_visible(band)
        page.evaluate("window.eagle2.context.link(null)")
        # a click holds it, a second lets go
        page.mouse.click(at["x"], at["y"])
        page.mouse.move(at["x"], plot["y"] - 60)
        page.wait_for_timeout(100)
        assert page.evaluate(LINKED) == [other]
        assert page.get_attribute(band, "data-node") == str(other)
        page.mouse.click(at["x"], at["y"])
        page.mouse.move(at["x"], plot["y"] - 60)
        page.wait_for_function(f"({LINKED}).length === 0")


def test_a_mark_of_the_strip_links_the_tree(chromium: Any, runs: Any) -> None:
    trace, path = runs["default"]
    with opened(chromium, path) as page:
        show(page, 1, "rerank")
        point = page.locator("[data-testid=values] .tracee2values-kept .point").first.bounding_box()
        best = views.values_info(trace.steps[1], trace.vocabulary).marks[0].node
        page.mouse.move(point["x"] + point["width"] / 2, point["y"] + point["height"] / 2)
        page.wait_for_function(f"({LINKED})[0] === {best}")
        assert not page.is_visible("[data-testid=mask-band]")  # no rows before Flatten
        label = page.text_content("[data-testid=values] .hoverlayer")
        value = theme.digits(views.values_info(trace.steps[1], trace.vocabulary).marks[0].value)
        assert f"value {value}, 1st of 36" in label
        page.mouse.move(5, 5)
        page.wait_for_function(f"({LINKED}).length === 0")


def test_pointing_draws_nothing_again(chromium: Any, runs: Any) -> None:
    trace, path = runs["paper"]
    with opened(chromium, path) as page:
        show(page, 1, "verify")
        page.evaluate(
            "window.draws = 0; for (const name of ['values', 'mask'])"
            " document.querySelector(`[data-testid=${name}]`).on('plotly_afterplot', () => window.draws++)"
        )
        for node in trace.steps[1].kept[:20]:
            page.evaluate(f"window.eagle2.context.link({{step: 1, node: {node}}})")
        page.evaluate("window.eagle2.context.link(null)")
        page.evaluate("window.eagle2.context.render()")  # the same step and phase again
        settled(page)
        assert page.evaluate("window.draws") == 0


@pytest.mark.parametrize("name", ["paper", "large"])
def test_many_rows_on_a_phone(chromium: Any, runs: Any, name: str) -> None:
    trace, path = runs[name]
    rows = len(trace.steps[0].kept) + 1
    with opened(chromium, path, 390) as page:
        show(page, 0, "accept")
        assert page.evaluate("document.scrollingElement.scrollWidth") <= 390
        first, second = (page.locator(f"[data-testid={view}]").bounding_box() for view in ("values", "mask"))
        assert second["y"] >= first["y"] + first["height"]  # one below the other
        frame = views.mask_frame(rows, tree.root_positions(trace)[0] + 6, width(page, "mask"))
        labels = page.locator("[data-testid=mask] .tracee2mask-labels text")
        boxes = [labels.nth(i).bounding_box() for i in range(0, labels.count(), 7)]
        assert labels.count() == -(-rows // frame.every_row)
        assert all(box["width"] > 4 and box["x"] >= second["x"] for box in boxes)
        # The linked row says its token, for which the labels have no room.
        node = trace.steps[0].kept[8]
        page.evaluate(f"window.eagle2.context.link({{step: 0, node: {node}}})")
        token = theme.label(trace.vocabulary[trace.steps[0].token_ids[node]])
        assert page.inner_text(".e2-bandname").startswith(f"9 {token} @")
        scrolls = page.get_attribute("[data-testid=mask-box]", "tabindex") == "0"
        assert scrolls is (frame.width > width(page, "mask"))
        if scrolls:  # its arrows scroll it and leave the phase alone
            page.focus("[data-testid=mask-box]")
            page.keyboard.press("ArrowRight")
            page.wait_for_function("document.querySelector('[data-testid=mask-box]').scrollLeft > 0")
            assert state(page)["phase"] == "accept"


def test_nothing_jumps_between_phases_and_steps(chromium: Any, runs: Any) -> None:
    _, path = runs["default"]
    with opened(chromium, path) as page:
        heights = set()
        for number, phase in [(0, "draft"), (0, "rerank"), (0, "flatten"), (1, "verify"), (2, "accept")]:
            show(page, number, phase)
            heights.add(page.evaluate("document.querySelector('.e2-slot-side').scrollHeight"))
        assert len(heights) == 1


def test_hostile_tokens_are_text(chromium: Any, runs: Any) -> None:
    trace, path = runs["hostile"]
    step = trace.steps[0]
    with opened(chromium, path) as page:
        show(page, 0, "accept")
        labels = page.locator("[data-testid=mask] .tracee2mask-labels text").all_text_contents()
        assert [text.split("\u00a0", 2)[2].strip("\u00a0") for text in labels] == [
            theme.label(trace.vocabulary[step.token_ids[i]]) for i in (0, *step.kept)
        ]
        for node in step.kept:
            page.evaluate(f"window.eagle2.context.link({{step: 0, node: {node}}})")
            assert (
                page.text_content(".e2-bandname")
                .split(" ", 1)[1]
                .startswith(theme.label(trace.vocabulary[step.token_ids[node]]))
            )
        assert page.locator(".e2-views img, .e2-views script, .e2-views b b").count() == 0


def test_both_follow_the_colour_scheme(chromium: Any, runs: Any) -> None:
    _, path = runs["golden"]
    with opened(chromium, path) as page:
        show(page, 0, "accept")
        page.evaluate("document.body.classList.add('dark')")
        page.wait_for_function(
            "document.querySelector('[data-testid=values]').data.find(t => t.name === 'accepted').marker.color"
            f" === '{theme.DARK.accepted}'"
        )
        scale = page.evaluate("document.querySelector('[data-testid=mask]').data[0].colorscale.at(-1)[1]")
        assert scale == theme.DARK.accepted


def test_a_step_without_drafts(chromium: Any, tmp_path: Path) -> None:
    trace = Trace.load(Path(__file__).parents[1] / "assets" / "traces" / "french.json.gz")
    number = next(i for i, step in enumerate(trace.steps) if len(step.token_ids) == 1)
    path = tmp_path / "run.html"
    path.write_text(export_html(trace), encoding="utf-8")
    with opened(chromium, path) as page:
        show(page, number, "accept")
        assert page.text_content("[data-testid=values] .tracee2values-words text") == views.NOTHING_DRAFTED
        assert drawn(page, "mask")["data"][0]["z"] == [[1, 3]]
        assert drawn(page, "mask")["said"].startswith(
            "Tree mask of 1 row: the root. Each row attends to the text so far"
        )


def test_both_can_be_saved(chromium: Any, runs: Any) -> None:
    _, path = runs["golden"]
    with opened(chromium, path) as page:
        show(page, 0, "accept")
        for name in ("values", "mask"):
            page.click("[data-testid=save]")
            with page.expect_download() as download:
                page.click(f"[data-testid=save-{name}-svg]")
            text = Path(download.value.path()).read_text(encoding="utf-8")
            assert "<svg" in text
            assert "step 1 of 2" in text


def test_why_this_tree(chromium: Any, runs: Any) -> None:
    """The browser draws and says what Python does, is linked with the tree, and hides where no costs were measured."""
    trace, path = runs["costs"]
    infos = why.infos(trace, COSTS)
    ends = why.span(infos)
    with opened(chromium, path, 390, color_scheme="dark") as page:
        wide = width(page, "why")
        for number, phase in [(0, "draft"), (0, "rerank"), (1, "accept"), (2, "accept"), (3, "accept")]:
            show(page, number, phase)
            page.wait_for_selector(f"[data-testid=why][data-drawn='{number}:{phase}']")
            info = infos[number][0 if phase == "draft" else -1]
            ours = json.loads(why.figure(info, COSTS, phase, theme.DARK, within=ends, width=wide).to_json())  # type: ignore[arg-type]
            theirs = drawn(page, "why")
            same(ours["data"], theirs["data"], f"{number} {phase}")
            for key in ("width", "height", "xaxis", "yaxis"):
                same(ours["layout"][key], theirs["layout"][key], f"{number} {phase} {key}")
            words = why.words(info, phase)  # type: ignore[arg-type]
            assert page.text_content("[data-testid=why-said]") == words
            assert theirs["said"] == "Why this tree. " + words
        assert page.evaluate("document.scrollingElement.scrollWidth") <= 390
        whole = infos[3][-1]
        page.evaluate(f"window.eagle2.context.link({{step: 3, node: {whole.nodes[1]}}})")
        ring, at = page.locator("[data-testid=why-ring]").bounding_box(), theirs["data"]
        curves = next(item for item in at if item["name"] == "curves")
        box = page.locator("[data-testid=why]").bounding_box()
        point = [i for i, node in enumerate(curves["customdata"]) if node == whole.nodes[1]][2]  # the third panel's
        assert ring["x"] + ring["width"] / 2 - box["x"] == pytest.approx(curves["x"][point], abs=1)
        assert ring["y"] + ring["height"] / 2 - box["y"] == pytest.approx(curves["y"][point], abs=1)
        page.mouse.move(box["x"] + curves["x"][point], box["y"] + curves["y"][point])
        page.wait_for_function(f"({LINKED})[0] === {whole.nodes[1]}")
        assert page.get_attribute("[data-testid=values-ring]", "data-node") == str(whole.nodes[1])
        page.click("[data-testid=save]")
        assert page.is_visible("[data-testid=save-why-svg]")
        message = json.dumps(payload(runs["golden"][0]))
        page.evaluate(f"window.eagle2.show({message})")
        settled(page)
        page.click("[data-testid=save]")
        assert not page.is_visible("[data-testid=why]")
        page.click("[data-testid=save]")
        assert not page.is_visible("[data-testid=save-why-svg]")
