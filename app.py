"""The app: a prompt, two lanes that race, and the draft tree of every step.  Wiring only; see eagle2/ and visual/."""

from __future__ import annotations

try:  # before all that may import torch, parts of which it replaces on ZeroGPU
    import spaces
except ImportError:  # anywhere but on a Space
    spaces = None

import argparse
import atexit
import dataclasses
import logging
import math
import os
import re
import shutil
import sys
import tempfile
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import gradio as gr
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from eagle2.gallery import FOLDER, GalleryError, Recording, read_gallery
from eagle2.hub import Repo
from eagle2.models import DEFAULT_PRESET, PRESETS, auto_dtype, check_memory
from eagle2.trace import Trace, TraceError
from eagle2.zero import LentEngine, on_zero_gpu
from visual import chat, compare, gallery, player
from visual.tree import PHASES

log = logging.getLogger("eagle2.app")

MAX_PROMPT = 2000
MAX_SYSTEM = 1000  # characters of a system prompt
MAX_TURNS = 20  # questions of one conversation
# name: what a person calls it, lowest, highest, whole numbers only
LIMITS = {
    "max_new_tokens": ("max new tokens", 1, 512, True),
    "temperature": ("the temperature", 0, 2, False),
    "top_p": ("top-p", 0.01, 1, False),
    "seed": ("the seed", 0, 2**31 - 1, True),
    "depth": ("the depth", 1, 8, True),
    "top_k": ("top_k", 1, 16, True),
    "total_tokens": ("total_tokens", 1, 128, True),
}
AUTOMATIC, BY_HAND = "automatic", "by hand"  # who sizes the tree
HAND_SIZES = {"depth": 3, "total_tokens": 5}  # what the sliders show where a run says nothing of them
YOUR_RUN, YOUR_FILE = "your-run", "your-file"
STEPS = "steps"  # id of the player's tab
RACING = "-"  # what is on screen while a race goes on; no run has this id
PAINT_SECONDS = 3.0  # what a page takes to be drawn; loading the model would slow it down on the same machine
LOAD_AFTER_SECONDS = 15.0  # the model's loading waits for the first page view, but not for ever
LINK = ("run", "step", "phase")  # what an address may name
COMPARED = 64  # tokens of each run where both trees run on a visitor's prompt
STOPPED = "Stopped. What was made so far stays on screen."
STOP_SECONDS = 10.0  # a step takes less
MAX_STOPPED = 16  # stopped runs kept for sessions that have gone without fetching theirs
# Errors whose message is meant for a person: bad settings, models that cannot be had, logits that are not numbers.
USER_ERRORS = (ValueError, RuntimeError, ArithmeticError)
PAYLOADS_PER_SECOND = 5  # each costs time in Gradio and in the browser, which may be on the model's own cores
YIELD_SECONDS = 0.25  # so soon Gradio learns that Stop was pressed or the tab closed, which it does only at a yield
MAX_UPLOAD = gallery.MAX_UNPACKED  # a trace that is not packed; the rest is checked where it is opened
KEEP_FILES_SECONDS = 3600
STATUS_TEMPLATE = '<p class="e2 status" role="status" data-testid="model-status"></p>'
COMPARE_STATUS_TEMPLATE = STATUS_TEMPLATE.replace("model-status", "compare-status")
COMPARE_STOPPED = '{"state": "", "text": "Stopped."}'
STATUS_JS = """
const line = element.querySelector(".status");
const show = () => {
  const state = JSON.parse(props.value || "{}");
  line.textContent = state.text || "";
  line.dataset.state = state.state || "";
};
watch("value", show);
show();
"""
# The page comes with the first run in it, so that it plays without another request; a link's run is fetched instead.
THEATRE_JS = (
    "if (/[?&](run|step|phase)=/.test(location.search) && !window.eagle2Opened) props.value = '';\n"
    "window.eagle2Opened = true;\n" + player.JS_ON_LOAD
)
# Gradio has no way to give an element a data-testid, and builds elements late.
TEST_IDS = {
    "prompt": "#prompt textarea",
    "run": "button#run",
    "stop": "button#stop",
    "download": "#download",
    "upload-button": "button#upload",
    "upload": "#upload-column input[type=file]",
    "tree-kind": "#tree-kind",
    "tree-size": "#tree-size",
    "compare-run": "button#compare-run",
    "compare-stop": "button#compare-stop",
    **{f"chat-{name}": f"button#chat-{name}" for name in ("send", "stop", "clear")},
    **{f"chat-{name}": f"#chat-{name} textarea" for name in ("message", "system")},
    **{name.replace("_", "-"): f"#{name.replace('_', '-')} input[type=number]" for name in LIMITS},
}
PAGE = """
<style>
.gradio-container { max-width: 1400px !important; margin: 0 auto !important; }
#about .html-container, #theatre .html-container, #status .html-container, #gallery .html-container, #chat .html-container { padding: 0; }
#theatre, #status, #gallery, #chat { overflow: visible !important; }
/* What people came for lies below all this: it takes as little room as it can. */
.gradio-container .main { padding-top: 10px !important; } .gradio-container .main > .wrap > .column, .gradio-container .column { gap: 10px; }
@media (min-width: 900px) { #top .e2.status { text-align: right; padding-top: 10px; } }
#about h1 { margin: 0 0 2px; font-size: 24px; font-weight: 600; } #about p { margin: 0; }
#settings > button { padding: 6px 10px; } #settings { padding: 0 2px; }
#views .tab-container { height: 34px; } #views .tabitem { padding: 8px 0 0; }
footer, footer a, footer button { color: var(--body-text-color-subdued) !important; }
#views button.selected { color: var(--e2-accepted, #0072b2); }
.dark #views button.selected { color: #56b4e9; }
#prompt { padding: 6px 10px 8px; } #prompt label > span { margin-bottom: 2px; }
@media (max-width: 600px) { .gradio-container .main { padding: 12px !important; } }
#compare-row { flex-grow: 0; } #compare-row button { flex-grow: 0; width: auto; }
.e2.status:empty { display: none; }
.e2.status { margin: 0; font-size: 13px; color: var(--e2-dim); }
.status::before { content: "○ "; } .status[data-state="ready"]::before { content: "● "; color: var(--e2-accepted); }
.status[data-state="failed"]::before { content: "✕ "; color: var(--e2-own-ink); }
</style>
<script>
(() => {
  const ids = %s;
  let due = false;
  const tag = () => {
    due = false;
    for (const [id, selector] of Object.entries(ids)) {
      const found = document.querySelector(selector);
      if (found && found.dataset.testid !== id) found.dataset.testid = id;
    }
  };
  new MutationObserver(() => { if (!due) { due = true; requestAnimationFrame(tag); } })
    .observe(document.documentElement, { childList: true, subtree: true });
})();
</script>
"""


@dataclass(frozen=True)
class Status:
    """Where the loading of the model stands."""

    state: str  # waiting, loading, ready, failed
    text: str


class EngineHost:
    """Loads the one engine of this process in a background thread; a failed load is tried again on the next run."""

    def __init__(self, load: Callable[[Callable[[str, int, int], None]], Any]) -> None:
        self._load = load
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self.engine: Any = None
        self.status = Status("waiting", "The model is not loaded yet; the recorded runs need none.")

    @property
    def on_cpu(self) -> bool:
        """Whether the model runs on a CPU; until it is loaded, whether that was asked for or left open."""
        if self.engine is not None:
            return str(self.engine.device).startswith("cpu")
        return OPTIONS.device in ("auto", "cpu") and LENT is None

    def health(self) -> dict[str, Any]:
        """What `/health` answers, as plain values."""
        state, text = self.status.state, self.status.text
        device = None if self.engine is None else str(self.engine.device)
        status = "loading" if state == "waiting" else state
        return {"status": status, "model": OPTIONS.model, "device": device, "sentence": text}

    def start(self) -> None:
        """Begin to load unless that is under way or done."""
        with self._lock:
            if self.engine is not None or (self._thread is not None and self._thread.is_alive()):
                return
            self.status = Status("loading", "Loading the model …")
            self._thread = threading.Thread(target=self._run, name="load-model", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        def progress(stage: str, done: int, total: int) -> None:
            share = f" {100 * done // total} %" if total else ""
            self.status = Status("loading", f"Loading the model: {stage}{share}")

        try:
            engine = self._load(progress)
            # Here and not when a run first needs it, or that run would begin with a pause of some seconds.
            self.status = Status("loading", "Measuring what passes cost here …")
            engine.calibrate()
        except Exception as error:  # shown to the person; the thread has nobody else to tell
            log.exception("the model could not be loaded")
            self.status = Status("failed", f"The model could not be loaded: {sentence(error)}")
            return
        where = f"{engine.dtype} on {engine.device}"
        self.status = Status("ready", f"Ready: {engine.name} with draft head {engine.head_name}, {where}.")
        self.engine = engine


def sentence(error: BaseException) -> str:
    """The error's own words where it is one of ours, else its kind; never a traceback."""
    text = str(error).strip().splitlines()
    if not text:
        return type(error).__name__
    name = "/" in text[0].split()[0]  # a hub id or a folder stays as it is written
    return text[0] if name else text[0][0].upper() + text[0][1:]


def checked(prompt: str | None, values: dict[str, Any]) -> dict[str, Any]:
    """Values of the form within the limits, whole numbers as int; ValueError with one sentence otherwise."""
    if not prompt or not prompt.strip():
        raise ValueError("Write a prompt first.")
    if len(prompt) > MAX_PROMPT:
        raise ValueError(f"The prompt has {len(prompt)} characters; the limit is {MAX_PROMPT:,}.")
    good = dict(values)
    for name, (called, low, high, whole) in LIMITS.items():
        value = values[name]
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not number or not low <= value <= high or (whole and value != int(value)):
            kind = "a whole number" if whole else "a number"
            raise ValueError(f"{called[0].upper()}{called[1:]} must be {kind} between {low} and {high}.")
        good[name] = int(value) if whole else float(value)
    if values["tree"] not in ("dynamic", "static"):
        raise ValueError("The tree must be dynamic or static.")
    if values["size"] not in (AUTOMATIC, BY_HAND):
        raise ValueError(f"The tree size must be {AUTOMATIC} or {BY_HAND}.")
    return good


def sized(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values of the form as `eagle2.engine.Settings` takes them; a static tree has the sizes chosen by hand."""
    plain = {name: value for name, value in values.items() if name != "size"}
    if values["size"] == AUTOMATIC and values["tree"] == "dynamic":
        plain |= {"depth": "auto", "total_tokens": "auto"}
    return plain


def size_widgets(tree: str, size: str) -> Sequence[Any]:
    """How the choice of the size, the depth and the total_tokens stand in the form."""
    static = tree == "static"
    # "hidden" keeps a slider in the page, with its value.
    visible: Any = True if static or size == BY_HAND else "hidden"
    choice = gr.Radio(interactive=not static, info=STATIC_SIZE if static else AUTOMATIC_SIZE)
    return choice, gr.Slider(visible=visible), gr.Slider(visible=visible)


def gpu_sizes(model: str) -> dict[str, Any]:
    """How the form begins on a GPU: sizes by hand, those of the paper where the model is one of the paper's."""
    preset = PRESETS.get(model)
    tree = dataclasses.asdict(preset.tree) if preset and isinstance(preset.source, Repo) else {}
    return {"size": BY_HAND, **tree}


AUTOMATIC_SIZE = "automatic: fits this machine, anew at every step"
STATIC_SIZE = "a static tree is always sized by hand"


def make_settings(**values: Any) -> Any:
    from eagle2.engine import Settings  # torch: only once a run needs it

    return Settings(**values)


def ready_engine(host: EngineHost) -> Iterator[Status]:
    """Yield the status while the model loads; RuntimeError where it cannot be loaded."""
    host.start()
    while host.engine is None:
        status = host.status
        if status.state == "failed":
            raise RuntimeError(status.text)
        yield status
        time.sleep(0.25)


def save_trace(folder: Path, trace: Trace) -> str:
    """Write the trace for download; files of runs long over are removed."""
    for old in folder.glob("*/*.json.gz"):
        if time.time() - old.stat().st_mtime > KEEP_FILES_SECONDS:
            shutil.rmtree(old.parent, ignore_errors=True)
    inside = Path(tempfile.mkdtemp(dir=folder))
    path = inside / time.strftime("eagle2-%Y%m%d-%H%M%S.json.gz")
    trace.save(path)
    return str(path)


def kept_file(path: str | Path) -> gr.DownloadButton:
    return gr.DownloadButton(value=str(path), visible=True)


def load_kept(path: Path) -> Trace:
    try:
        return Trace.load(path)
    except TraceError as error:
        raise TraceError("this run is no longer kept here; run it or open it again") from error


def refused(error: TraceError) -> list[Any]:
    """Outputs that leave all as it is but for a sentence."""
    note = gallery.cut(sentence(error), 240).rstrip(".") + "."  # it may quote the file
    told = player.to_json(player.message(note, level="error"))
    return [told, *[gr.skip()] * (3 + 1 + len(FORM))]


class Own(NamedTuple):
    """A visitor's own run or file: where its trace is kept, and its card."""

    path: str
    card: gallery.Card


class Chat(NamedTuple):
    """A visitor's conversation as plain data; the caches that make it quick are kept elsewhere, and can be made anew."""

    saved: dict[str, Any] | None = None  # `eagle2.chat.Conversation.saved`; None: nothing was said yet
    messages: tuple[chat.Message, ...] = ()
    traces: tuple[str, ...] = ()  # where each message's recording is kept; "" for questions


def checked_turn(state: Chat, text: str | None, system: str | None, values: dict[str, Any]) -> dict[str, Any]:
    """`checked` for the next message of a conversation."""
    if not text or not text.strip():
        raise ValueError("Write a message first.")
    if len(text) > MAX_PROMPT:
        raise ValueError(f"The message has {len(text)} characters; the limit is {MAX_PROMPT:,}.")
    if len(system or "") > MAX_SYSTEM:
        raise ValueError(f"The system prompt has {len(system or '')} characters; the limit is {MAX_SYSTEM:,}.")
    if len(state.messages) >= 2 * MAX_TURNS:
        raise ValueError(f"This conversation has {MAX_TURNS} questions, which is the limit; clear it to begin another.")
    return checked(text, values)


def answer_of(reply: Any, *, ended: bool = False, trees: bool = False) -> chat.Message:
    """What the page shows of an `eagle2.chat.Reply`."""
    progress = reply.progress
    return chat.answer(
        progress.pieces, progress.origins, tau=progress.tau, tokens_per_second=progress.tokens_per_second,
        reused=reply.turn.reused, prompt_tokens=len(reply.turn.prompt_ids),
        finish_reason=progress.finish_reason or ("stopped" if ended else None), trees=trees,
    )  # fmt: skip


class Link(NamedTuple):
    """What a page's address asks for: a run, the step (from 0) and phase at which to open it, and what was wrong."""

    recording: Recording
    at: tuple[int, str]
    note: str


def linked(query: Mapping[str, str], recordings: Mapping[str, Recording]) -> Link:
    """Read ``run``, ``step`` (from 1) and ``phase``; what does not exist is replaced and told in one sentence."""
    recording = next(iter(recordings.values()))
    if query.get("run", recording.entry.id) not in recordings:
        return Link(recording, (0, ""), "The link names a run that is not here; this is the first one.")
    recording = recordings[query.get("run", recording.entry.id)]
    steps, asked, phase, note = len(recording.trace.steps), query.get("step", "1"), query.get("phase", ""), ""
    number = int(asked) if re.fullmatch(r"[0-9]{1,9}", asked) else 0
    step = min(max(number, 1), max(steps, 1))
    if phase and phase not in PHASES:
        phase, note = "", "The link names a phase that does not exist; this is its step."
    if step != number:
        note = f"The link names a step that this run of {steps} does not have; this is step {step}."
    return Link(recording, (step - 1, phase), note)


def form_values(trace: Trace) -> dict[str, Any]:
    """The prompt and settings that run a trace again; empty where the form cannot say them."""
    meta = trace.metadata
    try:
        sampling, tree = meta["sampling"], meta["tree"]
        values = {"max_new_tokens": meta["max_new_tokens"], "seed": meta["seed"], "tree": tree["kind"]}
        values |= {name: sampling[name] for name in ("temperature", "top_p")}
        sizes = {name: tree[name] for name in HAND_SIZES}
        automatic = all(size == "auto" for size in sizes.values())
        values |= {"top_k": tree["top_k"], "size": AUTOMATIC if automatic else BY_HAND}
        values |= HAND_SIZES if automatic else sizes
        good = checked(trace.prompt_text, values)
    except (KeyError, TypeError, ValueError):  # a file may hold anything there
        return {}
    return {} if sampling.get("top_k") else {"prompt": trace.prompt_text} | good


def filled(trace: Trace) -> list[Any]:
    """`form_values` for the form's widgets, which stay as they are where there are none."""
    values = form_values(trace)
    return [values.get(name, gr.skip()) for name in ("prompt", *FORM)]


class Actions:
    """What the widgets do, on one engine host.  Nothing of a run is kept here: visitors share only the engine.

    A visitor's own run and file stay in files of their session, whose paths the page's state holds.
    """

    def __init__(
        self, host: EngineHost, settings: Callable[..., Any] = make_settings, recordings: Sequence[Recording] = ()
    ) -> None:
        self.host, self.settings = host, settings
        self.recordings = {recording.entry.id: recording for recording in recordings}
        self.cards = tuple(
            gallery.card(made.entry.id, made.entry.title, made.trace, made.entry.look)
            for made in recordings
            if not made.entry.against
        )
        self._answered = math.inf  # when a page was first given what it opens with
        self.files = Path(tempfile.mkdtemp(prefix="eagle2-traces-"))
        atexit.register(shutil.rmtree, self.files, ignore_errors=True)
        self._running: set[str | None] = set()  # sessions whose run is under way
        self._stopped: OrderedDict[str | None, Trace] = OrderedDict()  # a stopped run, until its own session fetches it
        self._answering: set[str | None] = set()  # sessions whose chat answer is under way
        self._cut_short: OrderedDict[str | None, Chat] = OrderedDict()  # as `_stopped`, of conversations

    def row(self, current: str, *own: Own | None, busy: bool = False) -> str:
        """The gallery's state for one visitor."""
        cards = (*self.cards, *(item.card for item in own if item is not None))
        return player.to_json(gallery.message(cards, current, busy=busy))

    def shown(self, recording: Recording, note: str = "", at: tuple[int, str] | None = None) -> str:
        """A run of the gallery for the player."""
        run_id = recording.entry.id
        return player.to_json(player.payload(recording.trace, note, run_id=run_id, at=at, play=at is None))

    def open(self, request: gr.Request) -> Sequence[Any]:
        """What a page shows first: a run that needs no model, the one that its address names."""
        query = request.query_params
        if not self.recordings or not set(LINK) & set(query):  # the page came with the first run
            self._answered = min(self._answered, time.monotonic())
            sizes = {} if self.host.on_cpu else gpu_sizes(OPTIONS.model)
            return [*[gr.skip()] * 5, *(sizes.get(name, gr.skip()) for name in FORM)]
        link = linked(query, self.recordings)
        first = link.recording is next(iter(self.recordings.values()))
        # The widgets begin with the first run's prompt and settings: what is typed at once is not overwritten.
        # Only the size does not, which is the machine's until a run is asked for.
        form = filled(link.recording.trace)
        if first:
            form[:-1] = [gr.skip()] * len(FORM)
        told = self.shown(link.recording, link.note, link.at)
        self._answered = min(self._answered, time.monotonic())
        run_id = link.recording.entry.id
        return told, kept_file(link.recording.path), self.row(run_id), run_id, *form

    def choose(self, event: gr.EventData, own_run: Own | None, own_file: Own | None) -> Sequence[Any]:
        """A card was clicked."""
        run_id = event._data.get("run") if isinstance(event._data, dict) else None
        run_id = run_id if isinstance(run_id, str) else ""  # anybody can send anything
        own = {YOUR_RUN: own_run, YOUR_FILE: own_file}.get(run_id)
        try:
            if own is not None:
                path = Path(own.path)
                trace = load_kept(path)
                told = player.to_json(player.payload(trace, play=True))
            elif run_id in self.recordings:
                recording = self.recordings[run_id]
                trace, path, told = recording.trace, recording.path, self.shown(recording)
            else:
                raise TraceError("there is no such run here")
        except TraceError as error:
            return refused(error)
        return told, kept_file(path), self.row(run_id, own_run, own_file), run_id, *filled(trace)

    def upload(self, path: str | None, own_run: Own | None) -> Sequence[Any]:
        """Show a file that the visitor brought; whatever is wrong with it is told, and the run on screen stays."""
        try:
            if path is None:
                raise TraceError("no file arrived here; try again")
            trace = gallery.open_file(path)
            try:
                told = player.to_json(player.payload(trace, play=True))
                # Written anew: of the visitor's bytes and file name nothing is kept.
                own = Own(save_trace(self.files, trace), gallery.card(YOUR_FILE, "Your file", trace))
            except (ValueError, TypeError, KeyError, AttributeError, ArithmeticError, LookupError) as error:
                log.warning("an uploaded trace cannot be shown: %r", error)
                raise TraceError("the trace is damaged: it cannot be shown") from error
        except TraceError as error:
            return *refused(error), gr.skip()
        return told, kept_file(own.path), self.row(YOUR_FILE, own_run, own), YOUR_FILE, *filled(trace), own

    def run(
        self, request: gr.Request, own_run: Own | None, own_file: Own | None, prompt: str, *form: Any
    ) -> Iterator[Sequence[Any]]:
        """Race, and show how it goes some times a second; in between only what `YIELD_SECONDS` asks for."""
        session = request.session_hash
        update = None
        nothing = gr.skip()
        rest = [nothing] * 7
        idle = (gr.Button(interactive=True), gr.Button(interactive=False))
        racing = False
        self._running.add(session)
        try:
            values = checked(prompt, dict(zip(FORM, form)))
            chosen = self.settings(**sized(values))
            busy = (gr.Button(interactive=False), gr.Button(interactive=True))
            yield player.to_json(player.message("Starting …")), *busy, *[nothing] * 5
            for status in ready_engine(self.host):  # the run on screen stays, and others can be looked at
                note = f"{status.text.rstrip(' .…')}; your run starts as soon as it is ready."
                yield player.to_json(player.message(note)), *rest
            racing = True
            row = self.row(RACING, own_run, own_file, busy=True)
            clear = player.to_json(player.message("Starting …", kind="clear"))
            hidden = gr.DownloadButton(visible=False)
            yield clear, nothing, nothing, hidden, row, gr.UploadButton(interactive=False), nothing, RACING
            shown, told, pause, trace = 0.0, 0.0, 0.0, None
            with closing(self.host.engine.race(prompt, chosen)) as updates:
                for update in updates:
                    trace = update.trace
                    began = time.monotonic()
                    if began - shown < pause:
                        if began - told >= YIELD_SECONDS:
                            told = began
                            yield nothing, *rest
                        continue
                    text = player.to_json(player.live(update, max(update.eagle2.target_passes - 1, 0)))
                    shown = time.monotonic()
                    # Making the picture's data may cost an eighth of the time at most.
                    pause = max(1 / PAYLOADS_PER_SECOND, 7 * (shown - began))
                    told = shown
                    yield text, *rest
            if trace is None:
                raise RuntimeError("The run ended without a result.")
            yield player.to_json(player.payload(trace)), *idle, *self.kept(trace, nothing)
        except GeneratorExit:
            if update is not None:  # what was made is not lost: `stopped` fetches it
                self._stopped[session] = update.snapshot()
                while len(self._stopped) > MAX_STOPPED:
                    self._stopped.popitem(last=False)
            raise
        except USER_ERRORS as error:
            log.warning("run refused: %s", error)
            yield player.to_json(player.message(sentence(error), level="error")), *idle, *self.failed(racing)
        except Exception:
            log.exception("run failed")
            note = "Something went wrong in this run; the log has the details."
            yield player.to_json(player.message(note, level="error")), *idle, *self.failed(racing)
        finally:
            self._running.discard(session)

    def kept(self, trace: Trace, row: Any) -> Sequence[Any]:
        """Outputs for a run that has ended: its file, the gallery, the upload button, its card, what is on screen."""
        own = Own(save_trace(self.files, trace), gallery.card(YOUR_RUN, "Your run", trace))
        return kept_file(own.path), row, gr.UploadButton(interactive=True), own, YOUR_RUN

    def failed(self, racing: bool) -> Sequence[Any]:
        """The same outputs where there is no run to keep; with a race begun the player is empty."""
        return gr.skip(), gr.skip(), gr.UploadButton(interactive=True), gr.skip(), "" if racing else gr.skip()

    def ended(self, own_run: Own | None, own_file: Own | None, current: str) -> Any:
        """The gallery after a run that ended by itself: with the cards as they are now, not as they were at its start."""
        if current == RACING:  # it was stopped: `stopped` is about to answer, and knows more
            return gr.skip()
        return self.row(current, own_run, own_file)

    def stopped(self, request: gr.Request, own_run: Own | None, own_file: Own | None, current: str) -> Sequence[Any]:
        """After Stop: the visitor's own run as far as it got, once its current step is over."""
        idle = (gr.Button(interactive=True), gr.Button(interactive=False))
        deadline = time.monotonic() + STOP_SECONDS
        while request.session_hash in self._running and time.monotonic() < deadline:
            time.sleep(0.05)
        trace = self._stopped.pop(request.session_hash, None)
        if trace is None:  # it was still waiting, or had just ended
            told = player.to_json(player.message("Stopped.", kind="stopped"))
            current = "" if current == RACING else current
            row = self.row(current, own_run, own_file)
            return told, *idle, gr.skip(), row, gr.UploadButton(interactive=True), gr.skip(), current
        file, _, upload, own, current = self.kept(trace, None)
        row = self.row(current, own, own_file)
        return player.to_json(player.payload(trace, STOPPED)), *idle, file, row, upload, own, current

    def race(
        self,
        prompt: str,
        max_new_tokens: int = 96,
        temperature: float = 0.0,
        top_p: float = 1.0,
        seed: int = 0,
        tree: str = "dynamic",
        depth: int | str = 3,
        top_k: int = 4,
        total_tokens: int | str = 5,
    ) -> dict[str, Any]:
        """Race EAGLE-2 against plain decoding; returns both texts, tokens per second, tau, speed-up and equality.

        A depth or total_tokens of "auto" is chosen at every step by what passes cost on this machine.
        """
        form = dict(zip(FORM, (max_new_tokens, temperature, top_p, seed, tree, depth, top_k, total_tokens, BY_HAND)))
        automatic = {name: "auto" for name in HAND_SIZES if form[name] == "auto"}
        try:
            values = checked(prompt, form | {name: HAND_SIZES[name] for name in automatic})
            chosen = self.settings(**sized(values) | automatic)
            for _ in ready_engine(self.host):
                pass
            trace = None
            with closing(self.host.engine.race(prompt, chosen)) as updates:
                for update in updates:
                    trace = update.trace
        except USER_ERRORS as error:
            raise gr.Error(sentence(error)) from error
        if trace is None:
            raise gr.Error("The run ended without a result.")
        return trace.summary()

    def pairs(self) -> list[compare.Pair]:
        """The recorded pairs of a dynamic and a static tree's run."""
        return [
            compare.Pair(dynamic.entry.title, dynamic.trace, made.trace, made.entry.look)
            for made in self.recordings.values()
            if (dynamic := self.recordings.get(made.entry.against)) is not None
        ]

    def compared(self, opened: bool) -> tuple[Any, bool]:
        """The view of both trees with what was recorded, once: a pair of the visitor's own stays."""
        return gr.skip() if opened else player.to_json(compare.message(self.pairs(), player.payload)), True

    def compare(self, prompt: str, *form: Any) -> Iterator[Sequence[Any]]:
        """Run a static and a dynamic tree on the visitor's prompt, without the plain lane."""

        def told(text: str, state: str = "loading") -> str:
            return player.to_json({"state": state, "text": text})

        nothing, idle = gr.skip(), (gr.Button(interactive=True), gr.Button(interactive=False))
        try:
            values = checked(prompt, dict(zip(FORM, form)))
            values["max_new_tokens"] = min(values["max_new_tokens"], COMPARED)
            # Both trees have the same budget, and a static tree's is fixed.
            why = ", a static tree cannot be automatic" if values["size"] == AUTOMATIC else ""
            sizes = f"depth {values['depth']}, top_k {values['top_k']}, total_tokens {values['total_tokens']}{why}"
            values["size"] = BY_HAND
            yield nothing, told("Starting …"), gr.Button(interactive=False), gr.Button(interactive=True)
            for status in ready_engine(self.host):
                yield nothing, told(status.text), nothing, nothing
            runs: dict[str, Trace] = {}
            for kind in ("static", "dynamic"):
                chosen = self.settings(**sized(values | {"tree": kind}))
                with closing(self.host.engine.follow(prompt, chosen)) as steps:
                    for number, made in enumerate(steps):
                        yield nothing, told(f"The {kind} tree runs: step {number} …"), nothing, nothing
                        if made is not None:
                            runs[kind] = made
            pair = compare.Pair("Your prompt", runs["dynamic"], runs["static"])
            pairs = [*self.pairs(), pair]
            shown = player.to_json(compare.message(pairs, player.payload, opened=len(pairs) - 1))
            text = f"Both trees on your prompt, up to {values['max_new_tokens']} tokens, sized by hand ({sizes})."
            yield shown, told(text, "ready"), *idle
        except USER_ERRORS as error:
            log.warning("comparison refused: %s", error)
            yield nothing, told(sentence(error), "failed"), *idle
        except Exception:
            log.exception("comparison failed")
            yield nothing, told("Something went wrong in this run; the log has the details.", "failed"), *idle

    @cached_property
    def chats(self) -> Any:
        """The conversations whose caches are kept, by session."""
        from eagle2.chat import Conversations  # torch: only once an answer needs it

        return Conversations()

    def chat(
        self, request: gr.Request, state: Chat | None, text: str, system: str, *form: Any
    ) -> Iterator[Sequence[Any]]:
        """Answer one message of a conversation, and show the answer as it comes."""
        session, nothing = request.session_hash, gr.skip()
        state = state or Chat()
        before = len(state.messages)
        self._answering.add(session)
        try:
            values = checked_turn(state, text, system, dict(zip(FORM, form)))
            chosen = self.settings(**sized(values))
            messages = [*state.messages, chat.question(text)]
            rest = [nothing] * 6
            off, on = gr.Button(interactive=False), gr.Button(interactive=True)
            fixed = gr.Textbox(interactive=False)  # it stands before all that is said
            told = player.to_json(chat.message(messages, note="Starting …", busy=True))
            yield told, nothing, gr.Textbox(value=""), fixed, off, on, off
            for status in ready_engine(self.host):
                note = f"{status.text.rstrip(' .…')}; the answer starts as soon as it is ready."
                yield player.to_json(chat.message(messages, note=note, busy=True)), *rest
            conversation, reply = self.conversation(session, state, system), None
            shown, told_at, pause = 0.0, 0.0, 0.0
            try:
                with closing(conversation.follow(text, chosen)) as replies:
                    for reply in replies:
                        began = time.monotonic()
                        if began - shown >= pause:
                            live = chat.message([*messages, answer_of(reply)], start=len(messages), busy=True)
                            yield player.to_json(live), *rest
                            shown = told_at = time.monotonic()
                            pause = max(1 / PAYLOADS_PER_SECOND, 7 * (shown - began))
                        elif began - told_at >= YIELD_SECONDS:
                            told_at = began
                            yield nothing, *rest
            finally:  # however it ended, the conversation stands as far as it came
                self.chats.put(session, conversation)
                if reply is not None:
                    state = self.with_answer(state, conversation, messages, reply)
            yield self.chatted(state)
        except GeneratorExit:
            self._cut_short[session] = state  # `chat_stopped` fetches it
            while len(self._cut_short) > MAX_STOPPED:
                self._cut_short.popitem(last=False)
            raise
        except USER_ERRORS as error:
            log.warning("message refused: %s", error)
            back = text if len(state.messages) == before else None
            yield self.chatted(state, sentence(error), "error", back)
        except Exception:
            log.exception("answer failed")
            yield self.chatted(state, "Something went wrong in this answer; the log has the details.", "error")
        finally:
            self._answering.discard(session)

    def conversation(self, session: str | None, state: Chat, system: str | None) -> Any:
        """The visitor's own conversation, with its caches where they are still kept."""
        from eagle2.chat import Conversation

        engine = self.host.engine
        if isinstance(engine, LentEngine):
            raise ValueError(
                "conversations keep their caches on the machine, which a lent GPU cannot do; race a prompt instead"
            )
        return self.chats.take(session, engine, state.saved or Conversation(engine, system or "").saved)

    def with_answer(self, state: Chat, conversation: Any, messages: Sequence[chat.Message], reply: Any) -> Chat:
        """The conversation as plain data, after an answer; its recording is kept for a while."""
        path = save_trace(self.files, reply.trace()) if reply.progress.target_passes else ""
        answer = answer_of(reply, ended=True, trees=bool(path))
        return Chat(conversation.saved, (*messages, answer), (*state.traces, "", path))

    def chatted(self, state: Chat, note: str = "", level: str = "info", text: str | None = None) -> Sequence[Any]:
        """Outputs for a conversation at rest; ``text`` goes back into the field where it was not answered."""
        idle = (gr.Button(interactive=True), gr.Button(interactive=False), gr.Button(interactive=True))
        told = player.to_json(chat.message(state.messages, note=note, level=level))
        system = gr.Textbox(interactive=not state.messages)
        return told, state, gr.skip() if text is None else gr.Textbox(value=text), system, *idle

    def chat_stopped(self, request: gr.Request, state: Chat | None) -> Sequence[Any]:
        """After Stop: the answer as far as it came, once the step under way is over."""
        deadline = time.monotonic() + STOP_SECONDS
        while request.session_hash in self._answering and time.monotonic() < deadline:
            time.sleep(0.05)
        return self.chatted(self._cut_short.pop(request.session_hash, None) or state or Chat(), "Stopped.")

    def chat_cleared(self, request: gr.Request) -> Sequence[Any]:
        """Begin anew."""
        self.chat_left(request)
        return self.chatted(Chat())

    def chat_left(self, request: gr.Request) -> None:
        """Forget the caches of a visitor who has gone or begins anew."""
        if "chats" in vars(self):
            self.chats.drop(request.session_hash)

    def chat_trees(self, event: gr.EventData, state: Chat | None, own_file: Own | None) -> Sequence[Any]:
        """Open an answer's recording in the player, as the visitor's own run."""
        number = event._data.get("answer") if isinstance(event._data, dict) else None
        state = state or Chat()
        known = isinstance(number, int) and 0 <= number < len(state.traces)  # anybody can send anything
        path = state.traces[number] if known else ""
        try:
            trace = load_kept(Path(path)) if path else None
            if trace is None:
                raise TraceError("there is no such answer here")
        except TraceError as error:
            told = chat.message(state.messages, note=sentence(error), level="error")
            return player.to_json(told), *[gr.skip()] * 6
        own = Own(path, gallery.card(YOUR_RUN, "Your run", trace))
        told = player.to_json(player.payload(trace, "An answer of your conversation."))
        return (
            gr.skip(),
            told,
            kept_file(path),
            self.row(YOUR_RUN, own, own_file),
            YOUR_RUN,
            own,
            gr.Tabs(selected=STEPS),
        )

    def tick(self) -> Sequence[Any]:
        if time.monotonic() >= self._answered + PAINT_SECONDS:
            self.host.start()
        status = self.host.status
        over = status.state in ("ready", "failed")
        return player.to_json({"state": status.state, "text": status.text}), gr.Timer(active=not over)


def build(actions: Actions) -> gr.Blocks:
    """The interface."""
    first = next(iter(actions.recordings.values()), None)
    begin = form_values(first.trace) if first else {}
    static = begin.get("tree") == "static"
    with gr.Blocks(title="EAGLE-2 theatre", analytics_enabled=False, delete_cache=(600, KEEP_FILES_SECONDS)) as demo:
        with gr.Row(equal_height=False, elem_id="top"):
            with gr.Column(scale=5, min_width=300):
                gr.HTML(  # not Markdown, whose code would be one more thing to wait for
                    "<h1>EAGLE-2 theatre</h1><p>A draft head grows a tree of guesses, and the model checks the whole tree in"
                    " one pass: watch it race the same model without drafts, then look at every step.</p>",
                    elem_id="about",
                )
            with gr.Column(scale=2, min_width=240):
                status = gr.HTML(
                    value=player.to_json({"state": "waiting", "text": actions.host.status.text}),
                    html_template=STATUS_TEMPLATE, js_on_load=STATUS_JS, apply_default_css=False,
                    elem_id="status",
                )  # fmt: skip
        row = gr.HTML(
            value=actions.row(first.entry.id if first else ""), html_template=gallery.HTML_TEMPLATE,
            js_on_load=gallery.JS_ON_LOAD, apply_default_css=False, elem_id="gallery",
        )  # fmt: skip
        with gr.Row(equal_height=False):
            prompt = gr.Textbox(
                label="Prompt", lines=1, max_lines=8, max_length=MAX_PROMPT, value=begin.get("prompt", ""),
                elem_id="prompt", scale=6, min_width=300,
            )  # fmt: skip
            with gr.Column(scale=1, min_width=170, elem_id="go"), gr.Row():
                run_button = gr.Button("Run", variant="primary", elem_id="run", min_width=70)
                stop_button = gr.Button("Stop", elem_id="stop", interactive=False, min_width=70)
        with gr.Accordion("Settings", open=False, elem_id="settings"):
            with gr.Row():
                max_new_tokens = gr.Slider(
                    1, 512, begin.get("max_new_tokens", 96), step=1, label="Max new tokens", elem_id="max-new-tokens"
                )
                temperature = gr.Slider(
                    0, 2, begin.get("temperature", 0), step=0.05, label="Temperature", info="0: greedy",
                    elem_id="temperature",
                )  # fmt: skip
                top_p = gr.Slider(0.01, 1, begin.get("top_p", 1), step=0.01, label="Top-p", elem_id="top-p")
                seed = gr.Number(begin.get("seed", 0), label="Seed", precision=0, minimum=0, elem_id="seed")
            with gr.Row():
                tree = gr.Radio(
                    [("dynamic (EAGLE-2)", "dynamic"), ("static (EAGLE-1)", "static")],
                    value=begin.get("tree", "dynamic"), label="Draft tree", elem_id="tree-kind",
                )  # fmt: skip
                size = gr.Radio(
                    [AUTOMATIC, BY_HAND], value=AUTOMATIC,
                    label="Tree size", info=STATIC_SIZE if static else AUTOMATIC_SIZE, interactive=not static,
                    elem_id="tree-size",
                )  # fmt: skip
                shown: Any = True if static else "hidden"
                depth = gr.Slider(
                    1, 8, begin.get("depth", HAND_SIZES["depth"]), step=1, label="Depth",
                    info="layers of drafted tokens", elem_id="depth", visible=shown,
                )  # fmt: skip
                top_k = gr.Slider(
                    1, 16, begin.get("top_k", 4), step=1, label="top_k", info="children per node", elem_id="top-k"
                )
                total_tokens = gr.Slider(
                    1, 128, begin.get("total_tokens", HAND_SIZES["total_tokens"]), step=1, label="total_tokens",
                    info="nodes kept for the target", elem_id="total-tokens", visible=shown,
                )  # fmt: skip
        with gr.Tabs(elem_id="views") as views:
            with gr.Tab("Step by step", id=STEPS):
                theatre = gr.HTML(
                    value=actions.shown(first) if first else None,
                    html_template=player.HTML_TEMPLATE,
                    js_on_load=THEATRE_JS,
                    apply_default_css=False,
                    elem_id="theatre",
                )
                with gr.Row(elem_id="files"):
                    download = gr.DownloadButton(
                        "Download the trace (.json.gz)",
                        value=str(first.path) if first else None,
                        visible=first is not None,
                        size="sm",
                        elem_id="download",
                    )
                    with gr.Column(elem_id="upload-column", min_width=160):
                        upload = gr.UploadButton(
                            "Open a trace (.json, .json.gz)", file_types=[".json", ".gz"], size="sm", elem_id="upload"
                        )
            with gr.Tab("Static against dynamic") as second:
                with gr.Row(elem_id="compare-row"):
                    compare_button = gr.Button(
                        "Run both trees on my prompt", size="sm", elem_id="compare-run", min_width=220
                    )
                    compare_stop = gr.Button("Stop", size="sm", elem_id="compare-stop", interactive=False, min_width=70)
                compare_status = gr.HTML(
                    value=player.to_json({"state": "", "text": ""}), html_template=COMPARE_STATUS_TEMPLATE,
                    js_on_load=STATUS_JS, apply_default_css=False, elem_id="compare-status",
                )  # fmt: skip
                both = gr.HTML(
                    html_template=compare.HTML_TEMPLATE, js_on_load=compare.JS_ON_LOAD, apply_default_css=False,
                    elem_id="both",
                )  # fmt: skip
            with gr.Tab("Chat"):
                talk = chat_widgets()
        own_run, own_file, current = gr.State(), gr.State(), gr.State(first.entry.id if first else "")

        form = [prompt, max_new_tokens, temperature, top_p, seed, tree, depth, top_k, total_tokens, size]
        opening = [theatre, download, row, current, *form]
        quiet: dict[str, Any] = {"show_progress": "hidden", "api_visibility": "private"}
        demo.load(actions.open, None, opening, queue=False, **quiet)
        row.click(actions.choose, [own_run, own_file], opening, queue=False, **quiet)
        # One after the other: opening a file that is as large as it may be takes memory.
        upload.upload(
            actions.upload,
            [upload, own_run],
            [*opening, own_file],
            concurrency_limit=1,
            concurrency_id="files",
            **quiet,
        )

        # A run that is opened sets them too.
        gr.on([tree.change, size.change], size_widgets, [tree, size], [size, depth, total_tokens], queue=False, **quiet)

        outputs = [theatre, run_button, stop_button, download, row, upload, own_run, current]
        running = gr.on(
            [run_button.click, prompt.submit], actions.run, [own_run, own_file, *form], outputs, concurrency_limit=1,
            concurrency_id="device", trigger_mode="once", show_progress="minimal", show_progress_on=status,
            api_visibility="private",
        )  # fmt: skip
        running.then(actions.ended, [own_run, own_file, current], row, queue=False, **quiet)
        # One after the other: the page would send the cancellation only once a first handler had answered.
        cancelled = stop_button.click(None, cancels=[running], queue=False, api_visibility="private")
        cancelled.then(actions.stopped, [own_run, own_file, current], outputs, queue=False, **quiet)
        opened = gr.State(False)
        second.select(actions.compared, opened, [both, opened], queue=False, **quiet)
        comparing = compare_button.click(
            actions.compare, form, [both, compare_status, compare_button, compare_stop], concurrency_limit=1,
            concurrency_id="device", trigger_mode="once", **quiet,
        )  # fmt: skip
        compare_stop.click(None, cancels=[comparing], queue=False, api_visibility="private").then(
            lambda: (COMPARE_STOPPED, gr.Button(interactive=True), gr.Button(interactive=False)),
            None, [compare_status, compare_button, compare_stop], queue=False, **quiet,
        )  # fmt: skip
        chat_events(actions, talk, form[1:], [theatre, download, row, current, own_run, views], own_file)
        demo.unload(actions.chat_left)
        timer = gr.Timer(1.0)
        for event in (timer.tick, demo.load):
            event(actions.tick, None, [status, timer], queue=False, **quiet)
        gr.api(actions.race, api_name="race", concurrency_limit=1, concurrency_id="device")
    demo.queue(max_size=20)
    return demo


class ChatWidgets(NamedTuple):
    """The chat's part of the page."""

    view: gr.HTML
    state: gr.State
    message: gr.Textbox
    system: gr.Textbox
    send: gr.Button
    stop: gr.Button
    clear: gr.Button


def chat_widgets() -> ChatWidgets:
    """The conversation, the field below it, its buttons, the system prompt."""
    # Not gr.Chatbot: it takes messages for Markdown and HTML, and has no place for where each token comes from.
    view = gr.HTML(
        value=player.to_json(chat.message(())), html_template=chat.HTML_TEMPLATE, js_on_load=chat.JS_ON_LOAD,
        apply_default_css=False, elem_id="chat",
    )  # fmt: skip
    with gr.Row(equal_height=False):
        message = gr.Textbox(
            label="Message", lines=1, max_lines=8, max_length=MAX_PROMPT, elem_id="chat-message", scale=6, min_width=300
        )
        with gr.Column(scale=2, min_width=290), gr.Row():
            send = gr.Button("Send", variant="primary", elem_id="chat-send", min_width=70)
            stop = gr.Button("Stop", elem_id="chat-stop", interactive=False, min_width=70)
            clear = gr.Button("Clear", elem_id="chat-clear", min_width=70)
    system = gr.Textbox(
        label="System prompt", lines=1, max_lines=4, max_length=MAX_SYSTEM, elem_id="chat-system",
        info="stands before all messages; clear the conversation to change it. Answers follow the settings above.",
    )  # fmt: skip
    return ChatWidgets(view, gr.State(), message, system, send, stop, clear)


def chat_events(
    actions: Actions, talk: ChatWidgets, form: Sequence[Any], opening: Sequence[Any], own_file: gr.State
) -> None:
    """Answers wait in the same line as races; ``opening`` is what an answer's trees are shown in."""
    quiet: dict[str, Any] = {"show_progress": "hidden", "api_visibility": "private"}
    outputs = [talk.view, talk.state, talk.message, talk.system, talk.send, talk.stop, talk.clear]
    answering = gr.on(
        [talk.send.click, talk.message.submit], actions.chat, [talk.state, talk.message, talk.system, *form], outputs,
        concurrency_limit=1, concurrency_id="device", trigger_mode="once", **quiet,
    )  # fmt: skip
    # One after the other: the page would send the cancellation only once a first handler had answered.
    cancelled = talk.stop.click(None, cancels=[answering], queue=False, api_visibility="private")
    cancelled.then(actions.chat_stopped, talk.state, outputs, queue=False, **quiet)
    talk.clear.click(actions.chat_cleared, None, outputs, queue=False, **quiet)
    talk.view.click(actions.chat_trees, [talk.state, own_file], [talk.view, *opening], queue=False, **quiet)


FORM = ("max_new_tokens", "temperature", "top_p", "seed", "tree", "depth", "top_k", "total_tokens", "size")


def launch_options() -> dict[str, Any]:
    """What `gr.Blocks.launch` needs for the look and the player."""
    plotly = player.plotly_js()
    page = Path(tempfile.mkdtemp(prefix="eagle2-page-")) / "page.html"
    atexit.register(shutil.rmtree, page.parent, ignore_errors=True)
    page.write_text(player.page(), encoding="utf-8")
    gr.set_static_paths([plotly, page, FOLDER])
    system = ["system-ui", "-apple-system", "Segoe UI", "DejaVu Sans", "sans-serif"]
    mono = ["ui-monospace", "Menlo", "Consolas", "DejaVu Sans Mono", "monospace"]
    head = player.head(f"gradio_api/file={plotly}", page_url=f"gradio_api/file={page}")
    return {
        # Fonts by name only: a theme's default fonts are fetched from elsewhere.
        "theme": gr.themes.Default(primary_hue="blue", neutral_hue="slate", font=system, font_mono=mono).set(
            # The theme's own are under 4.5:1.
            button_primary_background_fill="*primary_700",
            button_primary_background_fill_hover="*primary_800",
            button_primary_background_fill_dark="*primary_700",
            button_primary_background_fill_hover_dark="*primary_800",
            body_text_color_subdued="*neutral_600",
            body_text_color_subdued_dark="*neutral_400",
        ),
        "head": head + gallery.head() + chat.head() + PAGE % player.to_json(TEST_IDS),
        "footer_links": ["api", "gradio", "settings"],
        "max_file_size": MAX_UPLOAD,
    }


def parser() -> argparse.ArgumentParser:
    """The options.  A Space starts the app without any: there environment variables (`EAGLE2_PRESET` …) set the defaults."""
    made = argparse.ArgumentParser(description="Watch EAGLE-2 race plain decoding, with the draft tree of every step.")
    model = os.environ.get("EAGLE2_PRESET") or os.environ.get("EAGLE2_MODEL") or DEFAULT_PRESET
    made.add_argument("--model", default=model, help="preset, local folder or hub id (default: %(default)s)")
    made.add_argument(
        "--preset", choices=tuple(PRESETS), dest="model", default=argparse.SUPPRESS,
        help="the same as --model NAME; python -m eagle2 models lists them",
    )  # fmt: skip
    head = os.environ.get("EAGLE2_HEAD")
    made.add_argument("--head", default=head, help="folder or hub id of the draft head (default: the preset's own)")
    made.add_argument(
        "--full-vocabulary", action="store_true", help="draft over all tokens even if the head has a reduced vocabulary"
    )
    dtype = os.environ.get("EAGLE2_DTYPE") or "auto"
    made.add_argument("--dtype", default=dtype, choices=["auto", "float32", "bfloat16", "float16"])
    device = os.environ.get("EAGLE2_DEVICE") or "auto"
    made.add_argument("--device", default=device, help="auto, cpu, cuda, spread, … (default: %(default)s)")
    made.add_argument("--host", help="address to listen on (default: this machine only; on a Space all)")
    made.add_argument("--port", type=int, help="port (default: the first free one from 7860)")
    made.add_argument("--share", action="store_true", help="also make a public link")
    return made


OPTIONS = parser().parse_args([])
LENT = LentEngine(spaces.GPU) if spaces is not None and on_zero_gpu() else None


def load_engine(progress: Callable[[str, int, int], None]) -> Any:
    if OPTIONS.model == os.environ.get("EAGLE2_PRESET") and OPTIONS.model not in PRESETS:
        raise ValueError(f"EAGLE2_PRESET names no preset: {OPTIONS.model!r} is none of {', '.join(PRESETS)}.")
    from eagle2.engine import Engine, Parts

    if LENT is not None:  # loaded into this process's memory, to run on what is lent
        dtype = auto_dtype(OPTIONS.model, "cuda") if OPTIONS.dtype == "auto" else OPTIONS.dtype
        check_memory(OPTIONS.model, dtype=dtype, device="cuda")
        parts = Parts.load(
            OPTIONS.model, OPTIONS.head, dtype=dtype, device="cpu", progress=progress,
            full_vocabulary=OPTIONS.full_vocabulary,
        )  # fmt: skip
        return LENT.use(parts)
    return Engine.load(
        OPTIONS.model, OPTIONS.head, dtype=OPTIONS.dtype, device=OPTIONS.device, progress=progress,
        full_vocabulary=OPTIONS.full_vocabulary,
    )  # fmt: skip


def recorded() -> tuple[Recording, ...]:
    """The committed runs; without them the app still runs prompts."""
    try:
        return read_gallery()
    except GalleryError as error:
        log.error("the gallery is empty: %s", error)
        return ()


host = EngineHost(load_engine)
demo = build(Actions(host, recordings=recorded()))


def health(request: Request) -> JSONResponse:
    """Whether runs can start: 200 once they can, 503 until then."""
    told = host.health()
    return JSONResponse(told, 200 if told["status"] == "ready" else 503)


def server_options() -> dict[str, Any]:
    """What `gr.Blocks.launch` needs besides: the route `/health`, and no second server that renders pages."""
    return {"app_kwargs": {"routes": [Route("/health", health)]}, "ssr_mode": False}


def main(arguments: Sequence[str] | None = None) -> None:
    parser().parse_args(arguments, namespace=OPTIONS)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    later = threading.Timer(LOAD_AFTER_SECONDS, host.start)
    later.daemon = True
    later.start()
    demo.launch(
        server_name=OPTIONS.host, server_port=OPTIONS.port, share=OPTIONS.share, show_error=True, **server_options(),
        **launch_options(),
    )  # fmt: skip


if __name__ == "__main__":
    main(sys.argv[1:])
