"""Infos are compared literally; figures are merely rendered; hostile text stays text."""

from __future__ import annotations

import dataclasses
import gzip
import itertools
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from visual_helpers import GOLDEN, synthetic, with_copies

from eagle2.race import LaneProgress, RaceUpdate
from eagle2.trace import StepTrace, Trace
from visual import player, race, theme, tree
from visual.__main__ import main as visual_command

ROOT = Path(__file__).parents[1]
HOSTILE = [
    "<b>bold</b>",
    "${1+1}",
    "<img src=x onerror=alert(1)>",
    "\u202edrow",
    "</script>",
    "%{x}&lt;",
    "a" * 200,
    "\ud800",
]


@pytest.fixture(scope="module")
def golden() -> Trace:
    return Trace.load(GOLDEN)


@pytest.fixture(scope="module")
def paper() -> Trace:
    """Trees of the paper's size: 60 kept of 510."""
    return synthetic(20)


def test_info_of_the_golden_tree(golden: Trace) -> None:
    info = tree.info(golden, 0)
    assert [node._replace(value=round(node.value, 6)) for node in info.nodes] == [
        tree.NodeInfo(0, -1, 0, "The", "The", 1.0, 1.0, 0.0, -1, False, None, None, "␣light", 0.55, None, "root", 22.0, 26.0),
        tree.NodeInfo(1, 0, 1, "␣light", "␣light", 0.6, 0.6, -0.510826, 0, True, 0.55, 0, "house", 0.9, None, "accepted", 186.0, 26.0),
        tree.NodeInfo(2, 0, 1, "␣old", "␣old", 0.3, 0.3, -1.203973, 0, True, 0.25, 1, "␣lamp", 0.4, None, "rejected", 186.0, 66.0),
        tree.NodeInfo(3, 1, 2, "house", "house", 0.8, 0.48, -0.733969, 1, True, 0.9, 0, "␣stood", 0.7, None, "accepted", 350.0, 26.0),
        tree.NodeInfo(4, 1, 2, "er", "er", 0.1, 0.06, -2.813411, 1, False, None, None, None, None, None, "cut", 350.0, 42.0),
        tree.NodeInfo(5, 2, 2, "␣man", "␣man", 0.5, 0.15, -1.89712, 1, True, 0.05, 3, ".", 0.35, None, "not reached", 350.0, 66.0),
        tree.NodeInfo(6, 2, 2, "␣lamp", "␣lamp", 0.2, 0.06, -2.813411, 1, False, None, None, None, None, None, "cut", 350.0, 82.0),
    ]  # fmt: skip
    assert info.next == tree.NextInfo("␣stood", "␣stood", "bonus", 3, True, 514.0, 26.0)
    assert info.order == (0, 1, 3, 7, 4, 2, 5, 6)
    assert (info.passes, info.accepted, info.emitted, info.stubs) == (((0,), (1, 2)), (1, 3), 3, ())
    assert info.lowest_kept == pytest.approx(0.15)
    assert info.highest_cut == pytest.approx(0.06)
    assert (info.width, info.height) == (618.0, 113.0)


def test_copies_are_marked_and_told() -> None:
    trace = with_copies()
    first, second = (tree.info(trace, number) for number in range(2))
    assert [node.node for node in first.nodes if node.copied] == [1, 5]
    said = tree.sentences(first)
    assert said["draft 1"].endswith(
        "the head reads the root; 2 tokens are proposed, 1 of them (⧉) copied from earlier text."
    )
    assert said["draft 2"].endswith("; 4 tokens are proposed, 1 of them (⧉) copied from earlier text.")
    assert "confidence 0.6000 (prompt lookup's: copied from earlier text)" in tree.hover(first.nodes[1])
    assert "prompt lookup" not in tree.hover(first.nodes[2])
    drawn = {trace.name: trace for trace in tree.figure(first, "rerank").data}
    assert [text for text in drawn["confidences"].text if text.startswith("⧉")] == ["⧉.60", "⧉.50"]
    drafted = len(second.nodes) - 1
    assert second.passes == ()
    assert {node.drafted_in for node in second.nodes[1:]} == {0}
    assert tree.sentences(second)["draft 1"] == (
        f"Draft: the head is not asked; {drafted} tokens are copied from earlier text."
    )


def test_folded_children_become_counted_stubs(golden: Trace) -> None:
    info = tree.info(golden, 0, unfold=False)
    assert info.stubs == (tree.StubInfo(1, 1, 1, 186.0, 26.0, True), tree.StubInfo(2, 1, 1, 186.0, 59.0, True))
    assert [node.y for node in info.nodes] == [26.0, 26.0, 59.0, 26.0, None, 59.0, None]
    one = tree.info(golden, 0, unfold={2})
    assert [stub.node for stub in one.stubs] == [1]
    assert [node.node for node in one.nodes if node.y is None] == [4]


def test_correction_hangs_below_the_rejected_children(golden: Trace) -> None:
    info = tree.info(golden, 1)
    assert info.next == tree.NextInfo("<0xE2>", "<0xE2>", "correction", 2, True, 350.0, 122.0)
    assert [node.verdict for node in info.nodes] == [
        "root", "rejected", "accepted", "not reached", "not reached", "rejected", "rejected",
    ]  # fmt: skip


def test_sentences(golden: Trace) -> None:
    assert tree.sentences(tree.info(golden, 0)) == {
        "draft 1": "Draft, pass 1 of 2: the head reads the root and proposes 2 tokens.",
        "draft 2": "Draft, pass 2 of 2: the head reads the 2 nodes of highest value and proposes 4 tokens.",
        "rerank": "Rerank: the 4 nodes of highest value are kept, 2 are cut."
        " The lowest kept value is .15, the highest cut value .060.",
        "flatten": "Flatten: the root and 4 nodes become 5 rows of one pass, parents first. Each row sees the text so far,"
        " its ancestors and itself, nothing else. Position ids run from 3 to 5, one for each depth.",
        "verify": "Verify: one pass of the target over the root and 4 nodes."
        " A ring marks the target's first choice: 2 of 4 drafted tokens.",
        "accept": "Accept: 2 drafted tokens, then the target's own token ␣stood, a bonus after a whole path."
        " This step gives 3 tokens.",
    }


def test_the_pass_over_the_root_counts_whether_recorded_or_not(golden: Trace) -> None:
    step = golden.steps[0]
    assert step.selected == ((1, 2),)
    assert tree.passes(step) == ((0,), (1, 2))
    assert tree.passes(dataclasses.replace(step, selected=((0,), (1, 2)))) == ((0,), (1, 2))
    assert tree.drafted_in(step) == (-1, 0, 0, 1, 1, 1, 1)
    # A drafter that tells no passes: layer by layer.
    assert tree.drafted_in(dataclasses.replace(step, selected=())) == (-1, 0, 0, 1, 1, 1, 1)


def test_a_step_without_drafts_is_drawn_too() -> None:
    step = StepTrace(
        token_ids=(1,), parents=(-1,), confidence=(1.0,), log_value=(0.0,), selected=(), kept=(), target_probs=(),
        target_ranks=(), choice_ids=(2,), choice_probs=(0.5,), accepted=(), next_id=2, next_kind="bonus", decisions=(),
        emitted=1, draft_seconds=0.0, verify_seconds=0.02, commit_seconds=0.0,
    )  # fmt: skip
    info = tree.step_info(step, {1: "a"})
    assert info.next.token == "⟨2⟩"
    assert list(tree.sentences(info)) == ["draft 1", "rerank", "flatten", "verify", "accept"]
    assert tree.sentences(info)["flatten"] == "Flatten: the root alone becomes the one row of the target's pass."
    tree.figure(info).to_json()


def test_race_info(golden: Trace) -> None:
    info = race.info(golden)
    assert info.eagle2.tokens == (1, 4, 6)
    assert info.eagle2.seconds == pytest.approx((0.03, 0.055, 0.081))
    assert info.autoregressive is not None
    assert info.autoregressive.tokens == (1, 2, 3, 4, 5, 6)
    assert info.autoregressive.seconds == pytest.approx((0.028, 0.046, 0.064, 0.082, 0.1, 0.118))
    assert info.speedup == pytest.approx(0.118 / 0.081)
    assert (info.tau, info.equal, info.same, info.clock) == (2.5, True, "yes, all 6", "measured")
    race.figure(info).to_json()


@pytest.mark.parametrize("palette", theme.PALETTES.values(), ids=list(theme.PALETTES))
@pytest.mark.parametrize("phase", tree.PHASES)
def test_figures_render(golden: Trace, paper: Trace, phase: tree.Phase, palette: theme.Palette) -> None:
    for info in (tree.info(golden, 1), tree.info(paper, 3), tree.info(paper, 3, unfold=True)):
        figure = tree.figure(info, phase, palette)
        json.loads(figure.to_json())
        assert [trace.name for trace in figure.data] == list(tree.LAYERS)


def test_accepted_path_of_the_figure(golden: Trace) -> None:
    nodes = next(trace for trace in tree.figure(tree.info(golden, 0)).data if trace.name == "nodes")
    coloured = [key for key, color in zip(nodes.ids, nodes.marker.color) if color == theme.LIGHT.accepted]
    assert coloured == ["0", "1", "3"]
    assert nodes.marker.symbol[-1] == "star"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (" lamp", "␣lamp"), ("\n\n", "⏎⏎"), ("\t", "⇥"), ("\r", "␍"), ("\x00", "␀"), ("\x1b[0m", "␛[0m"), ("\x7f", "␡"),
        ("\u00a0", "⍽"), ("\u202edrow", "⟨202E⟩drow"), ("\u2066x", "⟨2066⟩x"), ("\u200b", "⟨200B⟩"), ("\ufeff", "⟨FEFF⟩"),
        ("\u0301", "◌\u0301"), ("\ud800", "\ufffd"), ("\ue000", "⟨E000⟩"), ("", "∅"), ("<0xE2>", "<0xE2>"), ("日本", "日本"),
        ("\u3000", "⟨3000⟩"), ("<b>", "<b>"),
    ],
)  # fmt: skip
def test_glyphs(text: str, shown: str) -> None:
    assert theme.glyphs(text) == shown


def test_running_text_keeps_blanks_and_loses_controls() -> None:
    assert theme.plain("a b\n\tc\r\n\u202ed") == "a b\n\tc\n⟨202E⟩d"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("lighthouse", "lighthouse"), (" extraordinarily", "␣extraordin…"), ("日本語日本語", "日本語日本語"),
        ("日本語日本語日", "日本語日本…"), ("a" * 200, "a" * 11 + "…"), (" שלום", "\u2068␣שלום\u2069"),
        ("e" + "\u0301" * 500, "\u2068" * 0 + "e" + "\u0301" * 47),
    ],
)  # fmt: skip
def test_labels_are_cut_to_a_width(text: str, shown: str) -> None:
    assert theme.label(text) == shown


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (1.0, "1.0"),
        (0.996, "1.0"),
        (0.83, ".83"),
        (0.0999, ".10"),
        (0.042, ".042"),
        (0.001, ".001"),
        (1e-4, "1e-4"),
        (0, "0"),
    ],
)
def test_short_numbers(value: float, shown: str) -> None:
    assert theme.short(value) == shown


@pytest.mark.parametrize(
    ("value", "shown"),
    [(1.0, "1"), (0.57789, "0.578"), (9.3e-6, "0.0000093"), (9.32e-7, "9.32e-7"), (1e-10, "1e-10"), (0, "0")],
)
def test_digits_as_a_browser_writes_them(value: float, shown: str) -> None:
    assert theme.digits(value) == shown


def test_hostile_tokens_are_escaped_for_plotly() -> None:
    trace = synthetic(3, depth=2, top_k=3, total=6, words=HOSTILE)
    for number, phase in itertools.product(range(3), tree.PHASES):
        for drawn in tree.figure(tree.info(trace, number), phase).data:
            for text in (*(drawn.text or ()), *(drawn.hovertext or ())):
                bare = text
                for tag in ("<b>", "</b>", "<br>", "</span>"):
                    bare = bare.replace(tag, "")
                assert "<img" not in bare
                assert "<script" not in bare
                assert "\u202e" not in bare
                assert bare.count("<") == bare.count('<span style="')


def test_payload_is_safe_inside_a_script_and_small(paper: Trace) -> None:
    hostile = player.to_json(player.payload(synthetic(3, depth=2, top_k=3, total=6, words=HOSTILE)))
    assert not set("<>&\u2028") & set(hostile)
    assert "<img src=x onerror=alert(1)>" in json.loads(hostile)["lanes"]["eagle2"]["pieces"] + HOSTILE
    long = synthetic(64)
    text = player.to_json(player.payload(long)).encode()
    assert len(text) < 1_000_000
    assert len(gzip.compress(text)) < 400_000


def test_payload_holds_the_traces_numbers(golden: Trace) -> None:
    data = player.payload(golden)
    step, raw = golden.steps[0], data["steps"][0]
    assert [data["tokens"][i] for i in raw["t"]] == ["The", "␣light", "␣old", "house", "er", "␣man", "␣lamp"]
    assert list(itertools.accumulate(raw["p"])) == list(step.parents)
    assert tuple(itertools.accumulate(raw["o"])) == tree.drawing_order(step)
    assert (raw["k"], raw["a"], raw["j"]) == ([1, 2, 3, 5], [1, 3], [2])
    assert (raw["c"], raw["q"], raw["r"]) == (list(step.confidence), list(step.target_probs), list(step.target_ranks))
    assert raw["v"] == pytest.approx(step.log_value, rel=1e-5)
    assert (raw["b"], raw["e"], data["tokens"][raw["n"]]) == ("bonus", 3, "␣stood")
    assert data["lanes"]["eagle2"]["origins"] == "fddbdc"
    assert data["speedup"] == golden.speedup
    assert len(raw["say"]) == len(raw["s"]) + len(tree.PHASES) - 1
    assert data["first_position"] == len(golden.prompt_ids) == tree.info(golden, 0).root_position
    assert (data["id"], data["at"], data["play"]) == ("", None, False)
    opened = player.payload(golden, run_id="story", at=(1, "verify"), play=True)
    assert (opened["id"], opened["at"], opened["play"]) == ("story", {"step": 1, "phase": "verify"}, True)


def test_facts_say_how_a_run_was_made(golden: Trace) -> None:
    assert player.facts(golden) == (
        ("model", "hand-made"), ("draft head", "hand-made"), ("device", "cpu, 2 threads"), ("dtype", "float32"),
        ("tree", "dynamic, depth 2, top_k 2, total_tokens 4"), ("decoding", "greedy"), ("clock", "measured"),
        ("recorded", "2026-11-29T12:00:00Z"),
    )  # fmt: skip
    sampled = {"sampling": {"temperature": 0.7, "top_p": 0.9}, "versions": {"torch": "2.13.0"}}
    told = dict(player.facts(dataclasses.replace(golden, metadata={**golden.metadata, **sampled})))
    assert (told["decoding"], told["versions"]) == ("temperature 0.7, top-p 0.9, seed 0", "torch 2.13.0")
    odd = dataclasses.replace(golden, metadata={**golden.metadata, "tree": "?", "sampling": 3, "versions": None})
    assert dict(player.facts(odd))["tree"] == "?, depth ?, top_k ?, total_tokens ?"


def test_positions_follow_the_tokens(golden: Trace) -> None:
    first = len(golden.prompt_ids)
    assert tree.root_positions(golden) == (first, first + golden.steps[0].emitted)
    assert tree.info(golden, 0).rows == (0, *golden.steps[0].kept)


def test_live_message(golden: Trace) -> None:
    lane = LaneProgress([10, 11], ["The", " light"], ["prefill", "drafted"], 0.05, 1)
    other = LaneProgress([10], ["The"], ["prefill"], 0.028)
    update = RaceUpdate("eagle2", lane, other, golden.steps[0], golden.vocabulary, lambda: golden)
    data = player.live(update, 0)
    assert data["lanes"]["eagle2"] == {"pieces": ["The", " light"], "origins": "fd", "seconds": 0.05}
    assert data["step"]["a"] == [1, 3]
    assert data["tau"] == 1.0
    json.loads(player.to_json(data))


def test_messages_survive_lone_surrogates() -> None:
    assert json.loads(player.to_json(player.message("\ud800 <b>")))["note"] == "? <b>"


def test_export_is_one_page_without_links(golden: Trace) -> None:
    page = player.export_html(golden)
    ours = page.replace(player.plotly_js().read_text(encoding="utf-8").replace("</script", "<\\/script"), "")
    for named in ("http://www.w3.org/2000/svg", "https://arxiv.org/abs/"):  # a name, and links to follow
        ours = ours.replace(named, "")
    assert "http" not in ours
    assert "<b>hostile" not in page
    inside = re.search('<script type="application/json" id="run">(.*?)</script>', page)
    assert inside is not None
    assert json.loads(inside[1]) == player.payload(golden)
    assert player.page().count(player.RUN_MARK) == 1
    assert page.count("<script") == 4 + player.plotly_js().read_text(encoding="utf-8").count("<script")
    assert 4_000_000 < len(page) < 6_000_000


def _boxes(figure: object) -> list[tuple[str, float, float, float, float]]:
    """Left, top, right, bottom of all text, from the widths of a monospace font."""
    boxes = []
    for drawn in figure.data:  # type: ignore[attr-defined]
        if drawn.name not in ("labels", "confidences", "stubs") or not drawn.x:
            continue
        sizes = drawn.textfont.size
        for i, (x, y, text) in enumerate(zip(drawn.x, drawn.y, drawn.text)):
            size = sizes if isinstance(sizes, (int, float)) else sizes[i]
            token, _, tail = text.partition(" <span")
            number = tail.partition(">")[2].removesuffix("</span>")
            token = (
                token.replace("<b>", "")
                .replace("</b>", "")
                .replace("&lt;", "<")
                .replace("&gt;", ">")
                .replace("&amp;", "&")
            )
            width = 0.61 * size * len(token) + (0.61 * (theme.SIZES.number_font * len(number) + size) if number else 0)
            left = x - width if drawn.name == "confidences" else x
            boxes.append((text, left, y - size * 0.45, left + width, y + size * 0.45))
    return boxes


@pytest.mark.parametrize("phase", tree.PHASES)
@pytest.mark.parametrize(("depth", "top_k", "total"), [(3, 4, 5), (6, 10, 60), (5, 8, 40)])
def test_no_label_overlaps_another(depth: int, top_k: int, total: int, phase: tree.Phase) -> None:
    trace = synthetic(8, depth=depth, top_k=top_k, total=total, seed=3)
    for number in range(len(trace.steps)):
        info = tree.info(trace, number)
        boxes = _boxes(tree.figure(info, phase))
        for (a, l1, t1, r1, b1), (b, l2, t2, r2, b2) in itertools.combinations(boxes, 2):
            assert not (l1 < r2 - 0.5 and l2 < r1 - 0.5 and t1 < b2 - 0.5 and t2 < b1 - 0.5), (number, a, b)
        assert max(r for _, _, _, r, _ in boxes) <= info.width
        assert max(b for _, _, _, _, b in boxes) <= info.height


def test_one_row_per_leaf_and_the_best_child_straight_ahead(paper: Trace) -> None:
    info = tree.info(paper, 0)
    for node in info.nodes:
        children = [child for child in info.nodes if child.parent == node.node and child.kept]
        if children:
            assert max(children, key=lambda child: child.log_value).y == node.y
    leaves = [
        node.y for node in info.nodes if node.kept and not any(c.parent == node.node and c.kept for c in info.nodes)
    ]
    assert len(set(leaves)) == len(leaves)


def _luminance(color: str) -> float:
    parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear))


def _contrast(one: str, other: str) -> float:
    low, high = sorted((_luminance(one), _luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("palette", theme.PALETTES.values(), ids=list(theme.PALETTES))
def test_colours_have_enough_contrast(palette: theme.Palette) -> None:
    for text in (palette.ink, palette.dim, palette.own_ink):
        assert _contrast(text, palette.paper) >= 4.5
        assert _contrast(text, palette.panel) >= 4.5
    for soft in (palette.accepted_soft, palette.own_soft):
        assert _contrast(palette.ink, soft) >= 4.5
    assert _contrast(palette.accepted_ink, palette.accepted) >= 4.5
    for drawn in (palette.accepted, palette.own, palette.focus):
        assert _contrast(drawn, palette.paper) >= 3


def test_style_sheet_has_no_colours_of_its_own() -> None:
    for name in ("player.css", "player.js"):
        text = (ROOT / "visual" / name).read_text(encoding="utf-8")
        assert not re.findall(r"#[0-9a-fA-F]{3,8}\b(?!\")", text), name


def test_visual_works_where_torch_cannot_be_imported() -> None:
    code = (
        "import sys\n"
        "for name in ('torch', 'transformers', 'gradio'): sys.modules[name] = None\n"
        "from eagle2.trace import Trace\n"
        "from visual import player, race, tree\n"
        f"trace = Trace.load({str(GOLDEN)!r})\n"
        "tree.figure(tree.info(trace, 0)).to_json(); race.figure(race.info(trace)).to_json()\n"
        "print(len(player.export_html(trace)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 4_000_000


def test_command_makes_the_page(tmp_path: Path, golden: Trace, capsys: pytest.CaptureFixture[str]) -> None:
    golden.save(tmp_path / "run.json.gz")
    assert visual_command([str(tmp_path / "run.json.gz")]) == 0
    assert (tmp_path / "run.html").read_text(encoding="utf-8") == player.export_html(golden)
    (tmp_path / "bad.json").write_text("{}")
    assert visual_command([str(tmp_path / "bad.json"), "-o", str(tmp_path / "no.html")]) == 1
    assert capsys.readouterr().err == "error: this file is not an EAGLE-2 trace\n"
    assert not (tmp_path / "no.html").exists()
