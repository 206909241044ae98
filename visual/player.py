"""The player's data and parts: a run or a live state as compact JSON, and the page that plays it.

Columns of a step are single letters, since a run has up to 64 steps of 510 nodes and is to stay under 1 MB:
``t`` token (index into ``tokens``), ``p`` parent (differences), ``c`` confidence, ``v`` log value, ``o`` drawing order
(differences), ``s`` nodes fed pass by pass, ``k`` kept, ``q`` target probability, ``r`` target rank, ``h`` and ``w`` the
target's choice after each row and its probability, ``a`` accepted, ``j`` rejected, ``d`` draws, ``n`` the target's own
token, ``b`` its kind, ``e`` tokens emitted, ``ms`` seconds of drafting, verifying, committing, ``say`` one sentence per phase.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from itertools import accumulate
from pathlib import Path
from typing import Any, Protocol

from eagle2.trace import StepTrace, Trace, precision
from visual import compare, lessons, race, tree, views, why
from visual.theme import PALETTES, SIZES, css_variables, glyphs, label, plain

HERE = Path(__file__).parent
SCRIPTS = ("player.js", "views.js", "why.js", "race.js", "lessons.js", "compare.js")  # in loading order
STYLES = ("player.css", "views.css", "race.css", "lessons.css", "compare.css")
RUN_MARK = "/*EAGLE2-RUN*/"  # where the run's JSON goes in `page`
HTML_TEMPLATE = '<div class="e2-host"></div>'  # no data in it: a template is evaluated
JS_ON_LOAD = """
const player = window.Eagle2Player.mount(element.querySelector(".e2-host"), window.Eagle2Setup);
const show = () => { if (props.value) player.show(JSON.parse(props.value)); };
watch("value", show);
show();
"""
EMPTY = "Run a prompt, and the draft tree of each step is drawn here."
_ORIGINS = {"prefill": "f", "drafted": "d", "bonus": "b", "correction": "c", "plain": "p"}


class LaneState(Protocol):
    """What a live lane tells of itself (`eagle2.race.LaneProgress`)."""

    @property
    def pieces(self) -> Sequence[str]: ...
    @property
    def origins(self) -> Sequence[str]: ...
    @property
    def seconds(self) -> float: ...


class LiveState(Protocol):
    """What a live race tells of itself (`eagle2.race.RaceUpdate`)."""

    @property
    def eagle2(self) -> LaneState: ...
    @property
    def autoregressive(self) -> LaneState: ...
    @property
    def step(self) -> StepTrace | None: ...
    @property
    def vocabulary(self) -> Mapping[int, str]: ...
    @property
    def speedup(self) -> float | None: ...
    @property
    def tau(self) -> float: ...


class _Tokens:
    """Table of the tokens that a message shows: each once, with its shortened label where that differs."""

    def __init__(self, vocabulary: Mapping[int, str]) -> None:
        self.vocabulary = vocabulary
        self.index: dict[int, int] = {}
        self.table: list[str | list[str]] = []

    def __call__(self, token_id: int) -> int:
        if token_id not in self.index:
            text = self.vocabulary.get(token_id, f"⟨{token_id}⟩")
            full, short = glyphs(text), label(text)
            self.index[token_id] = len(self.table)
            self.table.append(full if full == short else [full, short])
        return self.index[token_id]


def _round(values: Sequence[float], digits: int = 6) -> list[float]:
    return [float(f"{value:.{digits}g}") for value in values]


def _steps(values: Sequence[int]) -> list[int]:
    """Differences from one to the next: mostly 0 and 1, so half the length of the numbers themselves."""
    return [value - before for before, value in zip((0, *values), values)]


def step_columns(step: StepTrace, tokens: _Tokens, number: int, root_position: int | None = None) -> dict[str, Any]:
    """One step for the player."""
    info = tree.step_info(step, tokens.vocabulary, number, unfold=False, root_position=root_position)
    said = tree.sentences(info)
    return {
        "t": [tokens(i) for i in step.token_ids],
        "p": _steps(step.parents),
        "c": _round(step.confidence, 5),
        "v": [round(value, 5) for value in step.log_value],
        "o": _steps(tree.drawing_order(step)),
        "s": [list(nodes) for nodes in tree.passes(step)],
        "k": list(step.kept),
        "y": list(step.copied),
        "q": _round(step.target_probs),
        "r": list(step.target_ranks),
        "h": [tokens(i) for i in step.choice_ids],
        "w": _round(step.choice_probs, 5),
        "a": list(step.accepted),
        "j": [node for node, verdict in enumerate(tree.verdicts(step)) if verdict == "rejected"],
        "d": [[decision.node, round(decision.draw, 4)] for decision in step.decisions if decision.draw is not None],
        "n": tokens(step.next_id),
        "b": step.next_kind,
        "e": step.emitted,
        "ms": _round((step.draft_seconds, step.verify_seconds, step.commit_seconds)),
        "say": list(said.values()),
    }


def payload(
    trace: Trace, note: str = "", *, run_id: str = "", at: tuple[int, str] | None = None, play: bool = False
) -> dict[str, Any]:
    """A whole run for the player.

    ``run_id`` names a run of the gallery, which a link can open; ``at`` = (step from 0, phase or "") where to open it;
    ``play``: start to play at once, from the first step.
    """
    tokens, told = _Tokens(trace.vocabulary), race.info(trace)
    lane = trace.autoregressive
    other = None
    if lane is not None:
        times = list(accumulate(lane.step_seconds, initial=lane.prefill_seconds)) if lane.token_ids else []
        other = {
            "pieces": [plain(piece) for piece in lane.pieces],
            "origins": "f" + "p" * (len(lane.pieces) - 1) if lane.pieces else "",
            "times": _round(times),
        }
    roots = tree.root_positions(trace)
    return {
        "kind": "run",
        "id": run_id,
        "at": None if at is None else {"step": at[0], "phase": at[1]},
        "play": play,
        "prompt": plain(trace.prompt_text),
        "about": [list(fact) for fact in facts(trace)],
        "first_position": len(trace.prompt_ids),  # position id of the first step's root
        "steps": [step_columns(step, tokens, number, roots[number]) for number, step in enumerate(trace.steps)],
        "tokens": tokens.table,
        "lanes": {
            "eagle2": {
                "pieces": [plain(piece) for piece in trace.output_pieces],
                "origins": "".join(_ORIGINS[origin] for origin in trace.origins),
            },
            "autoregressive": other,
        },
        "prefill": trace.prefill_seconds,
        "clock": told.clock,
        "speedup": told.speedup,
        "tau": told.tau if trace.steps else None,
        "equal": told.equal,
        "same": told.same,
        "race": race.data(trace),
        "costs": why.data(trace),
        "note": note,
    }


def live(update: LiveState, number: int, note: str = "") -> dict[str, Any]:
    """The state of a race that is still running; ``number`` counts the EAGLE-2 steps from 0."""
    tokens = _Tokens(update.vocabulary)
    return {
        "kind": "live",
        "step": None if update.step is None else step_columns(update.step, tokens, number),
        "number": number,
        "tokens": tokens.table,
        "lanes": {
            name: {
                "pieces": [plain(piece) for piece in lane.pieces],
                "origins": "".join(_ORIGINS[origin] for origin in lane.origins),
                "seconds": round(lane.seconds, 4),
            }
            for name, lane in (("eagle2", update.eagle2), ("autoregressive", update.autoregressive))
        },
        "speedup": update.speedup,
        "tau": None if update.step is None else update.tau,
        "equal": None,
        "same": "",
        "note": note,
    }


def facts(trace: Trace) -> tuple[tuple[str, str], ...]:
    """What a run's figures must be shown with: name and value, in plain text."""
    meta = trace.metadata
    shape, sampling = _mapping(meta["tree"]), _mapping(meta["sampling"])
    how = "greedy"
    if sampling.get("temperature"):
        how = f"temperature {sampling['temperature']}, top-p {sampling.get('top_p', 1)}, seed {meta['seed']}"
    versions = _mapping(meta["versions"])
    said = [
        ("model", meta["target"]),
        ("draft head", meta["head"]),
        ("draft weights", meta.get("draft_weights", "")),
        ("device", f"{meta['device']}, {meta['threads']} thread{'s' * (meta['threads'] != 1)}"),
        ("dtype", precision(meta)),
        ("tree", f"{shape.get('kind', '?')}, {_tree_size(shape)}"),
        ("decoding", how),
        ("forward", meta.get("forward", "")),
        ("clock", meta["clock"]),
        ("recorded", meta["created"]),
        ("versions", ", ".join(f"{name} {version}" for name, version in versions.items())),
    ]
    return tuple((name, plain(str(value))) for name, value in said if value not in ("", None))


def _tree_size(shape: Mapping[str, Any]) -> str:
    depth, top_k, total = (shape.get(name, "?") for name in ("depth", "top_k", "total_tokens"))
    if depth == total == "auto":
        return f"automatic size, top_k {top_k}"
    return f"depth {depth}, top_k {top_k}, total_tokens {total}"


def _mapping(value: object) -> Mapping[str, Any]:
    """An uploaded trace may hold anything in its metadata."""
    return value if isinstance(value, Mapping) else {}


def message(note: str, *, kind: str = "note", level: str = "info") -> dict[str, Any]:
    """A sentence for the person; kind ``clear`` also empties the player, ``stopped`` ends a live run."""
    return {"kind": kind, "note": note, "level": level}


def to_json(data: Mapping[str, Any]) -> str:
    """JSON that may stand inside a script element and that no HTML parser sees a tag in."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    for char in "<>&\u2028\u2029":
        text = text.replace(char, f"\\u{ord(char):04x}")
    # A lone surrogate cannot be sent as UTF-8; glyphs() leaves none, a note from elsewhere might.
    return text.encode("utf-8", "replace").decode("utf-8")


def setup(*, standalone: bool = False, page_url: str = "") -> dict[str, Any]:
    """What the player needs once: colours, sizes and the figures' traces without data."""
    return {
        "standalone": standalone,
        "page_url": page_url,
        "run_mark": "" if standalone else RUN_MARK,
        "palettes": {name: palette._asdict() for name, palette in PALETTES.items()},
        "templates": {name: tree.template(palette) for name, palette in PALETTES.items()},
        "layouts": {name: tree.layout(palette) for name, palette in PALETTES.items()},
        "nodesLayer": tree.LAYERS.index("nodes"),
        "sizes": SIZES._asdict(),
        "empty": EMPTY,
        "views": views.setup(),
        "why": why.setup(),
        "race": race.setup(),
        "lessons": lessons.setup(),
        "compare": compare.setup(),
    }


def plotly_js() -> Path:
    """The plotly.min.js that the plotly wheel carries, for the version of its figures."""
    spec = find_spec("plotly")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent / "package_data" / "plotly.min.js"


def css() -> str:
    """The style sheets of the player and its parts, with the theme's colours."""
    return css_variables() + "".join((HERE / name).read_text(encoding="utf-8") for name in STYLES)


def head(plotly_url: str, *, page_url: str = "") -> str:
    """Elements for a page's head, for a page that loads plotly.min.js from a URL.

    ``page_url``: where `page` is served, for the player's "Save as a page".
    """
    return (
        f"<style>{css()}</style>\n"
        f'<script src="{plotly_url}" async></script>\n'
        f"<script>window.Eagle2Setup={to_json(setup(page_url=page_url))};</script>\n"
        f"<script>{_script()}</script>\n"
    )


def page() -> str:
    """A page that plays one run without a server or a network, plotly.js inside; the run's JSON replaces `RUN_MARK`."""
    plotly = plotly_js().read_text(encoding="utf-8").replace("</script", "<\\/script")
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>EAGLE-2 theatre</title>
<style>{css()}</style>
</head>
<body class="e2-standalone">
<main class="e2-page">
<h1 class="e2-title" dir="auto">EAGLE-2 theatre</h1>
<div id="host"></div>
</main>
<script type="application/json" id="run">{RUN_MARK}</script>
<script>{plotly}</script>
<script>{_script()}</script>
<script>
(() => {{
  const run = JSON.parse(document.getElementById("run").textContent);
  document.title = "EAGLE-2: " + run.prompt.slice(0, 80);
  document.querySelector(".e2-title").textContent = run.prompt;
  window.eagle2 = Eagle2Player.mount(document.getElementById("host"), {to_json(setup(standalone=True))});
  window.eagle2.show(run);
}})();
</script>
</body>
</html>
"""


def export_html(trace: Trace) -> str:
    """`page` with a run in it: one file that works from a USB stick."""
    before, after = page().split(RUN_MARK)
    return before + to_json(payload(trace)) + after


def _script() -> str:
    return "\n".join((HERE / name).read_text(encoding="utf-8") for name in SCRIPTS)
