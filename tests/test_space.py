"""The app on a Hugging Face Space: its metadata, its files, its readiness, and models that the owner names."""

from __future__ import annotations

import asyncio
import importlib
import importlib.machinery
import importlib.util
import re
import subprocess
from pathlib import Path
from types import ModuleType
from typing import Any

import gradio
import httpx
import pytest
import yaml
from gradio.routes import App
from visual_helpers import FakeEngine, FakeSettings, in_loop, synthetic

from eagle2 import hub, models
from eagle2.hub import Repo
from eagle2.models import PRESETS

app = in_loop(lambda: importlib.import_module("app"))
ROOT = Path(__file__).parent.parent
ON_HUB = [name for name, preset in PRESETS.items() if isinstance(preset.source, Repo)]

# Spaces Configuration Reference (huggingface.co/docs/hub/spaces-config-reference); the hub refuses a push with other values.
COLOURS = {"red", "yellow", "green", "blue", "indigo", "purple", "pink", "gray"}
HARDWARE = {
    "cpu-basic", "cpu-upgrade", "t4-small", "t4-medium", "l4x1", "l4x4", "a10g-small", "a10g-large", "a10g-largex2",
    "a10g-largex4", "a100-large", "zero-a10g",
}  # fmt: skip
KINDS: dict[str, type] = {
    "title": str, "emoji": str, "colorFrom": str, "colorTo": str, "sdk": str, "sdk_version": str, "python_version": str,
    "app_file": str, "pinned": bool, "license": str, "short_description": str, "models": list, "tags": list,
    "suggested_hardware": str, "startup_duration_timeout": str,
}  # fmt: skip


def front_matter() -> dict[str, Any]:
    found = re.match(r"---\n(.*?)\n---\n", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    assert found
    read: dict[str, Any] = yaml.safe_load(found[1])
    return read


def test_the_metadata_keeps_the_hubs_rules() -> None:
    told = front_matter()
    assert {key: type(value) for key, value in told.items()} == KINDS  # an unquoted 3.12 or 6.31 would be a number
    assert told["title"].strip()
    assert re.fullmatch("[\U0001f300-\U0001faff\u2600-\u27bf]\ufe0f?", told["emoji"])
    assert {told["colorFrom"], told["colorTo"]} <= COLOURS
    assert told["sdk"] == "gradio"
    assert len(told["short_description"]) <= 60
    assert told["suggested_hardware"] in HARDWARE
    assert re.fullmatch(r"\d+[smh]", told["startup_duration_timeout"])
    assert told["license"] == "apache-2.0"
    assert "Apache License" in (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert (ROOT / told["app_file"]).is_file()
    assert all(isinstance(tag, str) for tag in told["tags"])
    assert all(hub.is_id(model) and "/" in model for model in told["models"])


def test_versions_are_those_that_were_tested() -> None:
    told = front_matter()
    pins = dict(re.findall(r"^(\S+)==(\S+)$", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE))
    assert told["sdk_version"] == pins["gradio"]
    assert gradio.__version__ == told["sdk_version"]
    lowest = re.search(r'requires-python = ">=3\.(\d+)"', (ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    minor = re.fullmatch(r"3\.(\d+)(\.\d+)?", told["python_version"])
    assert lowest
    assert minor
    assert int(minor[1]) >= int(lowest[1])


# The files


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setattr("sys.dont_write_bytecode", True)
    loader = importlib.machinery.SourceFileLoader("space_check", str(ROOT / "scripts" / "space_check"))
    spec = importlib.util.spec_from_loader("space_check", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """This tree's names, committed, with what a commit does not have."""
    root = tmp_path / "repository"
    for name in ("README.md", "LICENSE", "app.py", "requirements.txt", "eagle2/a.py", "eagle2/presets.toml",
                 "visual/b.js", "assets/head/model.safetensors", "tests/test_a.py", "scripts/check", "CHANGELOG.md"):  # fmt: skip
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    git = ("git", "-C", str(root), "-c", "user.name=a", "-c", "user.email=a@b", "-c", "core.hooksPath=/dev/null")
    for command in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "all"]):
        subprocess.run([*git, *command], check=True)
    (root / "eagle2" / "secret.py").write_text("not committed")
    (root / "app.py").write_text("changed since")
    return root


def test_a_space_gets_what_is_committed_and_runs(script: ModuleType, repository: Path, tmp_path: Path) -> None:
    folder = tmp_path / "space"
    assert script.copy_files(folder, repository) == 8
    files = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert files == {
        "README.md", "LICENSE", "app.py", "requirements.txt", "eagle2/a.py", "eagle2/presets.toml", "visual/b.js",
        "assets/head/model.safetensors",
    }  # fmt: skip
    assert (folder / "app.py").read_text() == "app.py"
    with pytest.raises(script.Failed, match="is not empty"):
        script.copy_files(folder, repository)
    assert not list(tmp_path.glob("*.tar"))


def test_the_script_reads_the_metadata_as_yaml_does(script: ModuleType) -> None:
    told = front_matter()
    plain = {key: str(value) for key, value in told.items() if not isinstance(value, list | bool)}
    assert script.front_matter(ROOT).items() >= plain.items()


def test_a_failed_step_is_one_sentence(script: ModuleType, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    (tmp_path / "something").touch()
    monkeypatch.setattr("sys.argv", ["space_check", "--files", str(tmp_path)])
    assert script.main() == 1
    assert capsys.readouterr().err == f"space_check: {tmp_path} is not empty.\n"


def test_a_failed_model_ends_the_wait_with_its_sentence(script: ModuleType) -> None:
    assert script.ready(200, '{"status": "ready"}')
    assert not script.ready(503, '{"status": "loading"}')
    assert not script.ready(0, "")
    with pytest.raises(script.Failed, match=r"^the app says: No memory\.$"):
        script.ready(503, '{"status": "failed", "sentence": "No memory."}')


# Readiness


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine(synthetic(2, depth=2, top_k=2, total=3))


def test_health_tells_the_state(engine: FakeEngine, monkeypatch: Any) -> None:
    answers: list[Any] = [models.ModelError("the hub cannot be reached."), engine]

    def load(progress: Any) -> Any:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    host = app.EngineHost(load)
    monkeypatch.setattr(app, "host", host)
    demo = in_loop(lambda: app.build(app.Actions(host, FakeSettings)))
    server = in_loop(lambda: App.create_app(demo, app_kwargs=app.server_options()["app_kwargs"]))

    def health() -> tuple[int, dict[str, Any]]:
        async def ask() -> httpx.Response:
            async with httpx.AsyncClient(transport=httpx.ASGITransport(server), base_url="http://space") as client:
                return await client.get("/health")

        answer = asyncio.run(ask())
        return answer.status_code, answer.json()

    assert health() == (503, {
        "status": "loading", "model": "smollm2-135m", "device": None,
        "sentence": "The model is not loaded yet; the recorded runs need none.",
    })  # fmt: skip
    assert host.status.state == "waiting"  # asking starts nothing
    with pytest.raises(RuntimeError):
        list(app.ready_engine(host))
    status, told = health()
    assert (status, told["status"]) == (503, "failed")
    assert told["sentence"] == "The model could not be loaded: The hub cannot be reached."
    list(app.ready_engine(host))
    assert health() == (200, {
        "status": "ready", "model": "smollm2-135m", "device": "cpu",
        "sentence": "Ready: fake-target with draft head fake-head, float32 on cpu.",
    })  # fmt: skip


# Whose choice the model is


@pytest.fixture
def options(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Parses options into the app's own, which are put back afterwards."""
    before = dict(vars(app.OPTIONS))

    def parse(*arguments: str, **environment: str) -> Any:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        vars(app.OPTIONS).clear()
        return app.parser().parse_args(list(arguments), namespace=app.OPTIONS)

    yield parse
    vars(app.OPTIONS).clear()
    vars(app.OPTIONS).update(before)


def failure() -> str:
    """What the page says when the model of the options cannot be loaded."""
    host = app.EngineHost(app.load_engine)
    host.start()
    host._thread.join(60)
    assert host.health()["status"] == "failed"
    return str(host.health()["sentence"])


def one_sentence(text: str) -> bool:
    return "\n" not in text and "Traceback" not in text and len(text) < 400


@pytest.mark.parametrize("name", ON_HUB)
def test_a_preset_fails_for_want_of_memory_the_hub_or_a_token_alone(
    name: str, options: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    preset = PRESETS[name]
    options("--preset", name, "--device", "cpu")
    assert app.OPTIONS.model == name
    start = f"The model could not be loaded: {preset.title}"
    monkeypatch.setattr(models, "free_memory", lambda device: 4 * 10**9)
    said = failure()
    assert one_sentence(said)
    assert said.startswith(start)
    assert re.search(r"needs \d+ GB of memory in float32, and cpu has 4\.0 GB free; ", said)
    monkeypatch.setattr(models, "free_memory", lambda device: 1 << 50)
    monkeypatch.setattr(hub, "unreachable", lambda: True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", "/nonexistent/hub")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    said = failure()
    assert one_sentence(said)
    assert re.search(r"he hub \(.*\) cannot be reached, and \S+/\S+ is not in /nonexistent/hub", said)
    monkeypatch.setattr(hub, "unreachable", lambda: False)

    def gated(*_: Any, **__: Any) -> Any:
        from huggingface_hub.errors import GatedRepoError

        request = httpx.Request("GET", "https://huggingface.co")
        raise GatedRepoError("gated", response=httpx.Response(403, request=request))

    monkeypatch.setattr("huggingface_hub.hf_hub_download", gated)
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    said = failure()
    assert one_sentence(said)
    assert f"{preset.source.id} is gated: accept its terms on" in said  # type: ignore[union-attr]
    assert "HF_TOKEN" in said


def test_the_embedded_preset_is_the_default(options: Any) -> None:
    assert options().model == models.DEFAULT_PRESET
    assert options("--preset", models.DEFAULT_PRESET).model == models.DEFAULT_PRESET
    with pytest.raises(SystemExit):
        options("--preset", "gpt-2")


def test_variables_set_the_defaults_and_options_win(options: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    read = options(
        EAGLE2_MODEL="someone/model", EAGLE2_HEAD="someone/head", EAGLE2_DTYPE="float16", EAGLE2_DEVICE="cuda:1"
    )
    assert (read.model, read.head, read.dtype, read.device) == ("someone/model", "someone/head", "float16", "cuda:1")
    assert options(EAGLE2_PRESET="vicuna-7b").model == "vicuna-7b"
    assert options("--preset", "vicuna-13b", "--dtype", "bfloat16").model == "vicuna-13b"
    assert app.OPTIONS.dtype == "bfloat16"
    options(EAGLE2_PRESET="vicuna", EAGLE2_DEVICE="cpu")
    said = failure()
    assert one_sentence(said.partition(" is none of ")[0])
    assert said.startswith(
        "The model could not be loaded: EAGLE2_PRESET names no preset: 'vicuna' is none of smollm2-135m"
    )
    monkeypatch.delenv("EAGLE2_PRESET")
    options(EAGLE2_MODEL=models.DEFAULT_PRESET, EAGLE2_DTYPE="int3")
    assert "dtype must be auto or one of float32" in failure().replace("Dtype", "dtype")


def test_a_visitor_can_name_no_model(engine: FakeEngine) -> None:
    """Neither with what the page or the endpoint takes, nor with an address: the loader is called with nothing of it."""
    asked: list[tuple[Any, ...]] = []

    def load(*arguments: Any) -> FakeEngine:
        asked.append(arguments)
        return engine

    host = app.EngineHost(load)
    actions = app.Actions(host, FakeSettings)
    demo = in_loop(lambda: app.build(actions))
    endpoints = demo.get_api_info()["named_endpoints"]
    taken = {item["parameter_name"] for endpoint in endpoints.values() for item in endpoint["parameters"]}
    assert not {name for name in taken if re.search("model|head|preset|repo|path|revision", name)}

    class Visitor:
        session_hash = "a"
        query_params = {"model": "evil/model", "preset": "vicuna-7b", "run": "evil/model"}  # noqa: RUF012

    actions.open(Visitor())
    actions.race("evil/model", max_new_tokens=4)
    assert len(asked) == 1
    assert all(map(callable, asked[0]))  # the progress alone


@pytest.mark.parametrize(("name", "sizes"), [("vicuna-13b", [6, 10, 49]), (models.DEFAULT_PRESET, None)])
def test_a_page_on_a_gpu_begins_with_the_papers_tree(
    name: str, sizes: list[int] | None, engine: FakeEngine, options: Any
) -> None:
    options("--preset", name)
    host = app.EngineHost(lambda progress: engine)
    host.engine = engine

    class Visitor:
        query_params: dict[str, str] = {}  # noqa: RUF012

    def begins() -> dict[str, Any]:
        filled = dict(zip(app.FORM, app.Actions(host, FakeSettings).open(Visitor())[5:]))
        return {key: value for key, value in filled.items() if not isinstance(value, dict)}

    assert begins() == {}
    engine.device = "cuda:0"
    tree = dict(zip(("depth", "top_k", "total_tokens"), sizes)) if sizes else {}
    assert begins() == {"size": app.BY_HAND, **tree}
