"""ZeroGPU through the real ``spaces`` package: outside of it nothing changes, inside runs happen in a fork."""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
import torch
from visual_helpers import in_loop

from eagle2 import models
from eagle2.engine import Parts, Settings
from eagle2.graphs import Graphs, Status
from eagle2.race import RaceUpdate
from eagle2.trace import Trace
from eagle2.zero import LentEngine, on_zero_gpu
from tests.tiny import byte_tokenizer, tiny_head, tiny_model

spaces = pytest.importorskip("spaces", reason="the package `spaces` is in requirements-dev.txt")
ROOT = Path(__file__).parent.parent
SETTINGS = Settings(max_new_tokens=12, depth=3, top_k=3, total_tokens=6)


def parts() -> Parts:
    tokenizer = byte_tokenizer()
    model = tiny_model(vocab_size=len(tokenizer), max_position_embeddings=256)
    return Parts(
        model=model, tokenizer=tokenizer, head=tiny_head(model), name="tiny", head_name="tiny-head", dtype="float32"
    )


def values(value: Any) -> Iterator[Any]:
    """Everything inside of a value."""
    yield value
    if dataclasses.is_dataclass(value):
        value = [getattr(value, field.name) for field in dataclasses.fields(value)]
    elif isinstance(value, dict):
        value = [*value, *value.values()]
    if isinstance(value, list | tuple):
        for item in value:
            yield from values(item)


def test_the_variable_is_read_as_the_package_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from spaces.config import boolean

    for text in ("1", "t", "true", "True", "0", "false", "", "yes"):
        monkeypatch.setenv("SPACES_ZERO_GPU", text)
        assert on_zero_gpu() is boolean(text)
    monkeypatch.delenv("SPACES_ZERO_GPU")
    assert on_zero_gpu() is boolean(None) is False


def test_outside_of_zero_gpu_the_decorator_changes_nothing() -> None:
    def task() -> None: ...

    assert spaces.GPU(duration=len)(task) is task


def test_a_lent_engine_runs_as_the_engine_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eagle2.zero.SEND_SECONDS", 0.0)
    lent = LentEngine(spaces.GPU, device="cpu").use(parts())

    def run(engine: Any) -> tuple[int, int, Trace]:
        made = list(engine.race("Hello", SETTINGS))
        return len(made), [update.lane for update in made].count("eagle2"), made[-1].trace

    (count, steps, ours), (plain_count, plain_steps, plain) = run(lent), run(parts().engine())
    assert (count, steps) == (plain_count, plain_steps)  # in what order the lanes advance is a matter of time
    assert [step.token_ids for step in ours.steps] == [step.token_ids for step in plain.steps]
    assert ours.output_ids == plain.output_ids
    *_, followed = lent.follow("Hello", SETTINGS)
    assert followed.output_ids == ours.output_ids
    assert (lent.name, lent.head_name, lent.dtype) == ("tiny", "tiny-head", "float32")


def test_few_updates_are_sent_and_they_are_plain_data(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eagle2.zero.SEND_SECONDS", 1e9)
    lent = LentEngine(spaces.GPU, device="cpu").use(parts())
    first, last = lent.race("Hello", SETTINGS)
    kinds = {type(value) for update in (first, last) for value in values(update)}
    assert not {kind for kind in kinds if issubclass(kind, torch.Tensor)}
    read = pickle.loads(pickle.dumps(last))
    assert isinstance(read, RaceUpdate)
    assert isinstance(read.trace, Trace)
    assert read.snapshot() == read.trace == last.trace
    assert first.trace is None
    assert len(first.snapshot().output_ids) < len(last.trace.output_ids)


@pytest.mark.parametrize(("prompt", "said"), [("", "the prompt is empty"), ("x" * 500, "context")])
def test_what_is_wrong_with_a_run_comes_back_as_a_sentence(prompt: str, said: str) -> None:
    """Of an exception in the fork only the kind would."""
    lent = LentEngine(spaces.GPU, device="cpu").use(parts())
    with pytest.raises(RuntimeError, match=said):
        list(lent.race(prompt, SETTINGS))


def test_the_lenders_refusal_is_told() -> None:
    import gradio as gr

    def lend(duration: Any) -> Any:
        def refuse(*_: Any) -> Iterator[Any]:
            raise gr.Error("You have exceeded your ZeroGPU quota (20s requested vs. 3s left).")
            yield

        return lambda task: refuse

    with pytest.raises(RuntimeError, match=r"^ZeroGPU: You have exceeded your ZeroGPU quota \(20s requested"):
        list(LentEngine(lend).use(parts()).race("Hello", SETTINGS))


def test_seconds_asked_for_grow_with_the_request() -> None:
    lent = LentEngine(spaces.GPU).use(parts())
    asked = [
        lent.seconds("race", "Hello", Settings(max_new_tokens=tokens, **sizes))
        for tokens, sizes in ((16, {}), (96, {}), (512, {}), (512, {"depth": "auto", "total_tokens": "auto"}))
    ]
    assert asked == sorted(asked)
    assert asked[0] < asked[2] < asked[3]
    assert lent.seconds("follow", "Hello", Settings(max_new_tokens=512)) < asked[2]

    @dataclasses.dataclass
    class Vicuna:  # 7B in float16
        layers: int = 32
        weight_bytes: int = 14_000_000_000

    paper = Settings(max_new_tokens=96, depth=6, top_k=10, total_tokens=59)
    assert 10 < LentEngine(spaces.GPU).use(Vicuna()).seconds("race", "Hello", paper) < 25  # type: ignore[arg-type]


def test_nothing_is_captured_on_zero_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Status(torch.device("cuda")).failure is None
    monkeypatch.setenv("SPACES_ZERO_GPU", "true")
    status = Status(torch.device("cuda"))
    assert str(status) == "static shapes without graphs: on ZeroGPU a GPU is lent for one run"
    graphs = Graphs(torch.device("cuda"), status)
    assert graphs.run("key", lambda: 7) == 7
    assert len(graphs) == 0
    for file in ROOT.glob("eagle2/*.py"):
        assert "torch.compile" not in file.read_text(encoding="utf-8"), file.name


def test_the_app_loads_for_the_gpu_that_will_be_lent(monkeypatch: pytest.MonkeyPatch) -> None:
    app = in_loop(lambda: importlib.import_module("app"))
    lent = LentEngine(spaces.GPU)
    monkeypatch.setattr(app, "LENT", lent)
    monkeypatch.setattr(app.OPTIONS, "model", "llama3-8b-instruct")
    free = {"cuda": 4 * 10**9, "cpu": 1 << 50}
    monkeypatch.setattr(models, "free_memory", free.__getitem__)
    host = app.EngineHost(app.load_engine)
    assert not host.on_cpu
    with pytest.raises(RuntimeError, match=r"needs \d+ GB of memory in bfloat16, and cuda has 4\.0 GB free"):
        list(app.ready_engine(host))
    free["cuda"] = 1 << 50
    asked: dict[str, Any] = {}

    def load(*arguments: Any, **named: Any) -> Parts:
        asked.update(named)
        return parts()

    monkeypatch.setattr(Parts, "load", load)
    list(app.ready_engine(host))
    assert host.engine is lent
    assert (asked["device"], asked["dtype"]) == ("cpu", "bfloat16")
    assert host.status.text == "Ready: tiny with draft head tiny-head, float32 on cuda, lent for each run."
    assert not host.on_cpu


# Within ZeroGPU: the package's own wrapper and fork, against a small stand-in for the service that lends.

WITHIN = """
import json, sys
from contextlib import closing
sys.modules["torch"] = None  # without torch the package moves nothing to a GPU, which is not here
import spaces
del sys.modules["torch"]
import eagle2.zero
eagle2.zero.SEND_SECONDS = 0.0
import app
assert app.LENT is not None and app.host.on_cpu is False
app.LENT._device = "cpu"
sys.path.append("tests")
from tests.test_zero import SETTINGS, parts
lent = app.LENT.use(parts())
def tell(value): print("told", json.dumps(value))  # the package prints too
*_, last = lent.race("Hello", SETTINGS)
tell(last.trace.output_ids)
assert lent._engine is None  # it was made in the fork
try:
    list(lent.race("", SETTINGS))
except RuntimeError as error:
    tell(str(error))
with closing(lent.race("Hello", SETTINGS)) as updates:
    so_far = next(updates).snapshot()
tell(len(so_far.output_ids))
*_, followed = lent.follow("Hello", SETTINGS)
tell(followed.output_ids)
"""


class Lender(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.calls: list[tuple[str, dict[str, str]]] = []


class _Handler(BaseHTTPRequestHandler):
    server: Lender

    def do_POST(self) -> None:
        url = urlsplit(self.path)
        self.server.calls.append((url.path, {key: value[0] for key, value in parse_qs(url.query).items()}))
        body = json.dumps({"idle": True, "nvidiaIndex": 0, "nvidiaUUID": "GPU-0", "allowToken": "token"}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


def test_a_run_in_the_packages_own_fork(tmp_path: Path) -> None:
    (tmp_path / "cgroup").write_text("0::/space\n1:devices:/space\n")
    with Lender() as lender:
        threading.Thread(target=lender.serve_forever, daemon=True).start()
        environment = os.environ | {
            "SPACES_ZERO_GPU": "true", "SPACES_ZERO_DEVICE_API_URL": f"http://127.0.0.1:{lender.server_port}",
            "ZEROGPU_PROC_SELF_CGROUP_PATH": str(tmp_path / "cgroup"), "HOME": str(tmp_path), "OMP_NUM_THREADS": "1",
            "NO_PROXY": "127.0.0.1",
        }  # fmt: skip
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", WITHIN], cwd=ROOT, env=environment, capture_output=True, text=True,
            timeout=120,
        )  # fmt: skip
        lender.shutdown()
    assert done.returncode == 0, done.stderr[-3000:]
    told = [json.loads(line[5:]) for line in done.stdout.splitlines() if line.startswith("told ")]
    ids, mistake, so_far, followed = told
    *_, last = parts().engine().race("Hello", SETTINGS)
    assert ids == followed == list(last.trace.output_ids)
    assert mistake == "the prompt is empty; write something"
    assert so_far < len(last.trace.output_ids)
    scheduled = [call for path, call in lender.calls if path == "/schedule"]
    assert len(scheduled) == 4
    lent = LentEngine(spaces.GPU).use(parts())
    assert scheduled[0]["durationSeconds"] == str(lent.seconds("race", "Hello", SETTINGS))
    assert [path for path, _ in lender.calls].count("/allow") == 1  # one fork served all
    assert [call["fail"] for path, call in lender.calls if path == "/release"] == ["false"] * 4
