"""The app: a prompt, two lanes that race, and the draft tree of every step.  Wiring only; see eagle2/ and visual/."""

from __future__ import annotations

import argparse
import atexit
import logging
import shutil
import sys
import tempfile
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gradio as gr

from eagle2.trace import Trace
from visual import player

log = logging.getLogger("eagle2.app")

MAX_PROMPT = 2000
EXAMPLES = (
    "Write a short story about a lighthouse keeper.",
    "10+2=",
    "Write a Python function that reverses a string.",
    "Explain in three sentences why the sky is blue.",
    "List ten animals that live in the sea, one per line.",
)
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
STOPPED = "Stopped. What was made so far stays on screen."
STOP_SECONDS = 10.0  # a step takes less
MAX_STOPPED = 16  # stopped runs kept for sessions that have gone without fetching theirs
# Errors whose message is meant for a person: bad settings, models that cannot be had, logits that are not numbers.
USER_ERRORS = (ValueError, RuntimeError, ArithmeticError)
PAYLOADS_PER_SECOND = 8
KEEP_FILES_SECONDS = 3600
STATUS_TEMPLATE = '<p class="e2 status" role="status" data-testid="model-status"></p>'
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
# Gradio has no way to give an element a data-testid, and builds elements late.
TEST_IDS = {
    "prompt": "#prompt textarea",
    "run": "button#run",
    "stop": "button#stop",
    "download": "#download",
    "tree-kind": "#tree-kind",
    **{name.replace("_", "-"): f"#{name.replace('_', '-')} input[type=number]" for name in LIMITS},
}
PAGE = """
<style>
.gradio-container { max-width: 1400px !important; margin: 0 auto !important; }
#theatre .html-container, #status .html-container { padding: 0; }
#theatre, #status { overflow: visible !important; }
@media (max-width: 600px) { .gradio-container .main { padding: 12px !important; } }
#download { width: auto; align-self: flex-start; }
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
        self.status = Status("waiting", "The model is not loaded yet.")

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
    return text[0][0].upper() + text[0][1:]


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
    return good


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


class Actions:
    """What the widgets do, on one engine host.  Nothing of a run is kept here: visitors share only the engine."""

    def __init__(self, host: EngineHost, settings: Callable[..., Any] = make_settings) -> None:
        self.host, self.settings = host, settings
        self.files = Path(tempfile.mkdtemp(prefix="eagle2-traces-"))
        atexit.register(shutil.rmtree, self.files, ignore_errors=True)
        self._running: set[str | None] = set()  # sessions whose run is under way
        self._stopped: OrderedDict[str | None, Trace] = OrderedDict()  # a stopped run, until its own session fetches it

    def run(self, request: gr.Request, prompt: str, *form: Any) -> Iterator[Sequence[Any]]:
        """Race, and say at every step so: only at a yield does Gradio learn that the tab was closed or Stop pressed."""
        session = request.session_hash
        update = None
        busy = (gr.Button(interactive=False), gr.Button(interactive=True), gr.DownloadButton(visible=False))
        idle = (gr.Button(interactive=True), gr.Button(interactive=False))
        nothing = gr.skip()
        self._running.add(session)
        try:
            values = checked(prompt, dict(zip(FORM, form)))
            chosen = self.settings(**values)
            yield player.to_json(player.message("Starting …", kind="clear")), *busy
            for status in ready_engine(self.host):
                note = f"{status.text.rstrip(' .…')}; your run starts as soon as it is ready."
                yield player.to_json(player.message(note)), nothing, nothing, nothing
            steps, shown, pause, trace = 0, 0.0, 0.0, None
            with closing(self.host.engine.race(prompt, chosen)) as updates:
                for update in updates:
                    steps += update.lane == "eagle2" and update.step is not None
                    trace = update.trace
                    began = time.monotonic()
                    if began - shown < pause:
                        yield nothing, nothing, nothing, nothing
                        continue
                    text = player.to_json(player.live(update, max(steps - 1, 0)))
                    shown = time.monotonic()
                    # Making the picture's data may cost an eighth of the time at most.
                    pause = max(1 / PAYLOADS_PER_SECOND, 7 * (shown - began))
                    yield text, nothing, nothing, nothing
            if trace is None:
                raise RuntimeError("The run ended without a result.")
            file = gr.DownloadButton(value=save_trace(self.files, trace), visible=True)
            yield player.to_json(player.payload(trace)), *idle, file
        except GeneratorExit:
            if update is not None:  # what was made is not lost: `stopped` fetches it
                self._stopped[session] = update.snapshot()
                while len(self._stopped) > MAX_STOPPED:
                    self._stopped.popitem(last=False)
            raise
        except USER_ERRORS as error:
            log.warning("run refused: %s", error)
            yield player.to_json(player.message(sentence(error), level="error")), *idle, nothing
        except Exception:
            log.exception("run failed")
            note = "Something went wrong in this run; the log has the details."
            yield player.to_json(player.message(note, level="error")), *idle, nothing
        finally:
            self._running.discard(session)

    def stopped(self, request: gr.Request) -> Sequence[Any]:
        """After Stop: the visitor's own run as far as it got, once its current step is over."""
        idle = (gr.Button(interactive=True), gr.Button(interactive=False))
        deadline = time.monotonic() + STOP_SECONDS
        while request.session_hash in self._running and time.monotonic() < deadline:
            time.sleep(0.05)
        trace = self._stopped.pop(request.session_hash, None)
        if trace is None:  # it was still waiting, or had just ended
            return player.to_json(player.message(STOPPED, kind="stopped")), *idle, gr.skip()
        file = gr.DownloadButton(value=save_trace(self.files, trace), visible=True)
        return player.to_json(player.payload(trace, STOPPED)), *idle, file

    def race(
        self,
        prompt: str,
        max_new_tokens: int = 96,
        temperature: float = 0.0,
        top_p: float = 1.0,
        seed: int = 0,
        tree: str = "dynamic",
        depth: int = 3,
        top_k: int = 4,
        total_tokens: int = 5,
    ) -> dict[str, Any]:
        """Race EAGLE-2 against plain decoding; returns both texts, tokens per second, tau, speed-up and equality."""
        form = (max_new_tokens, temperature, top_p, seed, tree, depth, top_k, total_tokens)
        try:
            chosen = self.settings(**checked(prompt, dict(zip(FORM, form))))
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

    def tick(self) -> Sequence[Any]:
        self.host.start()
        status = self.host.status
        over = status.state in ("ready", "failed")
        return player.to_json({"state": status.state, "text": status.text}), gr.Timer(active=not over)


def build(actions: Actions) -> gr.Blocks:
    """The interface."""
    with gr.Blocks(title="EAGLE-2 theatre", analytics_enabled=False, delete_cache=(600, KEEP_FILES_SECONDS)) as demo:
        gr.Markdown(
            "# EAGLE-2 theatre\n"
            "A draft head grows a tree of guesses; the model checks the whole tree in one pass and keeps the longest"
            " path it agrees with. Watch it race the same model without drafts, then look at every step."
        )
        status = gr.HTML(
            value=player.to_json({"state": "waiting", "text": "Looking for the model …"}),
            html_template=STATUS_TEMPLATE, js_on_load=STATUS_JS, apply_default_css=False,
            elem_id="status",
        )  # fmt: skip
        with gr.Row(equal_height=False):
            prompt = gr.Textbox(
                label="Prompt",
                lines=2,
                max_lines=8,
                max_length=MAX_PROMPT,
                value=EXAMPLES[0],
                elem_id="prompt",
                scale=6,
                min_width=300,
            )
            with gr.Column(scale=1, min_width=150):
                run_button = gr.Button("Run", variant="primary", elem_id="run")
                stop_button = gr.Button("Stop", elem_id="stop", interactive=False)
        examples = gr.Dataset(components=[prompt], samples=[[example] for example in EXAMPLES], label="Examples")
        with gr.Accordion("Settings", open=False, elem_id="settings"):
            with gr.Row():
                max_new_tokens = gr.Slider(1, 512, 96, step=1, label="Max new tokens", elem_id="max-new-tokens")
                temperature = gr.Slider(
                    0, 2, 0, step=0.05, label="Temperature", info="0: greedy", elem_id="temperature"
                )
                top_p = gr.Slider(0.01, 1, 1, step=0.01, label="Top-p", elem_id="top-p")
                seed = gr.Number(0, label="Seed", precision=0, minimum=0, elem_id="seed")
            with gr.Row():
                tree = gr.Radio(
                    [("dynamic (EAGLE-2)", "dynamic"), ("static (EAGLE-1)", "static")], value="dynamic",
                    label="Draft tree", elem_id="tree-kind",
                )  # fmt: skip
                depth = gr.Slider(1, 8, 3, step=1, label="Depth", info="layers of drafted tokens", elem_id="depth")
                top_k = gr.Slider(1, 16, 4, step=1, label="top_k", info="children per node", elem_id="top-k")
                total_tokens = gr.Slider(
                    1, 128, 5, step=1, label="total_tokens", info="nodes kept for the target", elem_id="total-tokens"
                )
        theatre = gr.HTML(
            html_template=player.HTML_TEMPLATE, js_on_load=player.JS_ON_LOAD, apply_default_css=False, elem_id="theatre"
        )
        download = gr.DownloadButton("Download the trace (.json.gz)", visible=False, size="sm", elem_id="download")

        outputs = [theatre, run_button, stop_button, download]
        form = [prompt, max_new_tokens, temperature, top_p, seed, tree, depth, top_k, total_tokens]
        running = gr.on(
            [run_button.click, prompt.submit], actions.run, form, outputs, concurrency_limit=1, concurrency_id="device",
            trigger_mode="once", show_progress="minimal", show_progress_on=status, api_visibility="private",
        )  # fmt: skip
        # One after the other: the page would send the cancellation only once a first handler had answered.
        cancelled = stop_button.click(None, cancels=[running], queue=False, api_visibility="private")
        cancelled.then(
            actions.stopped, None, outputs, queue=False, show_progress="hidden", api_visibility="private",
        )  # fmt: skip
        examples.click(
            lambda sample: sample[0], examples, prompt, queue=False, show_progress="hidden", api_visibility="private"
        )
        timer = gr.Timer(1.0)
        for event in (timer.tick, demo.load):
            event(actions.tick, None, [status, timer], queue=False, show_progress="hidden", api_visibility="private")
        gr.api(actions.race, api_name="race", concurrency_limit=1, concurrency_id="device")
    demo.queue(max_size=20)
    return demo


FORM = ("max_new_tokens", "temperature", "top_p", "seed", "tree", "depth", "top_k", "total_tokens")


def launch_options() -> dict[str, Any]:
    """What `gr.Blocks.launch` needs for the look and the player."""
    plotly = player.plotly_js()
    gr.set_static_paths([plotly])
    system = ["system-ui", "-apple-system", "Segoe UI", "DejaVu Sans", "sans-serif"]
    mono = ["ui-monospace", "Menlo", "Consolas", "DejaVu Sans Mono", "monospace"]
    return {
        # Fonts by name only: a theme's default fonts are fetched from elsewhere.
        "theme": gr.themes.Default(primary_hue="blue", neutral_hue="slate", font=system, font_mono=mono),
        "head": player.head(f"gradio_api/file={plotly}") + PAGE % player.to_json(TEST_IDS),
        "footer_links": ["api", "gradio", "settings"],
    }


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description="Watch EAGLE-2 race plain decoding, with the draft tree of every step.")
    made.add_argument("--model", default="smollm2-135m", help="preset, local folder or hub id (default: %(default)s)")
    made.add_argument("--head", help="folder of the draft head (default: the preset's own)")
    made.add_argument(
        "--full-vocabulary", action="store_true", help="draft over all tokens even if the head has a reduced vocabulary"
    )
    made.add_argument("--dtype", default="auto", choices=["auto", "float32", "bfloat16", "float16"])
    made.add_argument("--device", default="auto", help="auto, cpu, cuda, … (default: %(default)s)")
    made.add_argument("--host", help="address to listen on (default: this machine only; on a Space all)")
    made.add_argument("--port", type=int, help="port (default: the first free one from 7860)")
    made.add_argument("--share", action="store_true", help="also make a public link")
    return made


OPTIONS = parser().parse_args([])


def load_engine(progress: Callable[[str, int, int], None]) -> Any:
    from eagle2.engine import Engine

    return Engine.load(
        OPTIONS.model, OPTIONS.head, dtype=OPTIONS.dtype, device=OPTIONS.device, progress=progress,
        full_vocabulary=OPTIONS.full_vocabulary,
    )  # fmt: skip


host = EngineHost(load_engine)
demo = build(Actions(host))


def main(arguments: Sequence[str] | None = None) -> None:
    parser().parse_args(arguments, namespace=OPTIONS)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    host.start()
    demo.launch(
        server_name=OPTIONS.host, server_port=OPTIONS.port, share=OPTIONS.share, show_error=True, **launch_options()
    )


if __name__ == "__main__":
    main(sys.argv[1:])
