"""Models from the hub, through its own client against a small hub on this machine: fetching, resuming, every refusal."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from eagle2 import hub, models
from eagle2.engine import Engine, Settings
from eagle2.hub import ModelError, Repo
from eagle2.presets import CHATS, Preset, Shape, Tree
from tests.checkpoints import official_config, official_tensors, write_head
from tests.tiny import byte_tokenizer, reference, tiny_model

ROOT = Path(__file__).parent.parent
COMMIT = "c0ffee" + 34 * "0"
TARGET, HEAD = "someone/tiny-chat", "someone/EAGLE-tiny-chat"


class Hub(ThreadingHTTPServer):
    """A hub with the repositories of a folder.  ``refuse``: what its files answer with instead of their bytes."""

    daemon_threads = True

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.folder = folder
        self.refuse: dict[str, tuple[int, str]] = {}  # repository: status and X-Error-Code
        self.requests: list[str] = []
        self.stop_after: int | None = None  # bytes of a file that are sent before the server hangs
        self.reached, self.released = threading.Event(), threading.Event()

    def handle_error(self, *_: object) -> None:
        pass  # a killed client

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def fetched(self, name: str) -> int:
        return sum(request.startswith("GET") and request.endswith(name) for request in self.requests)


class _Handler(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        self.server.requests.append(f"{self.command} {path}")
        if found := re.fullmatch(r"/api/models/([^/]+/[^/]+)/tree/(\w+)", path):
            files = sorted((self.server.folder / found[1]).iterdir())
            self._answer(
                json.dumps(
                    [
                        {"type": "file", "path": file.name, "size": file.stat().st_size, "oid": _etag(file)}
                        for file in files
                    ]
                ).encode()
            )
            return
        found = re.fullmatch(r"/([^/]+/[^/]+)/resolve/(\w+)/([^/]+)", path)
        repo, revision, name = found.groups() if found else ("", "", "")
        file = self.server.folder / repo / name
        if repo in self.server.refuse:
            status, code = self.server.refuse[repo]
            self._answer(b"", status, {"X-Error-Code": code})
        elif not file.parent.is_dir():
            self._answer(b"", 404, {"X-Error-Code": "RepoNotFound"})
        elif revision not in ("main", COMMIT):
            self._answer(b"", 404, {"X-Error-Code": "RevisionNotFound"})
        elif not file.is_file():
            self._answer(b"", 404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT})
        else:
            self._answer(file.read_bytes(), 200, {"ETag": f'"{_etag(file)}"', "X-Repo-Commit": COMMIT})

    def _answer(self, body: bytes, status: int = 200, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for key, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            if value:
                self.send_header(key, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        if self.server.stop_after is not None and len(body) > self.server.stop_after:
            self.wfile.write(body[: self.server.stop_after])
            self.wfile.flush()
            self.server.reached.set()
            self.server.released.wait(60)  # the client is killed meanwhile
            return
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


def _etag(file: Path) -> str:
    return hashlib.sha1(file.read_bytes()).hexdigest()


def _use(url: str, cache: Path) -> dict[str, Any]:
    """Settings of the hub's client, which it reads from the environment when it is imported."""
    return {
        "ENDPOINT": url,
        "HUGGINGFACE_CO_URL_TEMPLATE": url + "/{repo_id}/resolve/{revision}/{filename}",
        "HF_HUB_CACHE": str(cache),
        "HF_HUB_DISABLE_XET": True,
        "HF_TOKEN_PATH": str(cache.parent / "token"),
        "HF_STORED_TOKENS_PATH": str(cache.parent / "tokens"),
    }


@pytest.fixture(scope="module")
def repositories(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hub")
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = None
    model = tiny_model(vocab_size=len(tokenizer), head_dim=None, max_position_embeddings=256)
    model.save_pretrained(folder / TARGET)
    tokenizer.save_pretrained(folder / TARGET)
    config = official_config(model)
    write_head(folder / HEAD, config, official_tensors(model, config))
    # Files that must stay where they are: weights of another kind, code, and what looks like neither.
    for name in ("pytorch_model.bin", "modeling_evil.py", "consolidated.safetensors", "README.md", "model.gguf"):
        (folder / TARGET / name).write_bytes(b"not for us")
    return folder


@pytest.fixture
def served(repositories: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    from huggingface_hub import constants

    shutil.copytree(repositories, tmp_path / "repositories")
    server = Hub(tmp_path / "repositories")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    for name, value in _use(server.url, tmp_path / "cache").items():
        monkeypatch.setattr(constants, name, value)
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "http_proxy", "HTTP_PROXY", "https_proxy", "HTTPS_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setitem(models.PRESETS, "tiny", PRESET)
    yield server
    server.released.set()
    server.shutdown()
    server.server_close()
    thread.join()


PRESET = Preset(
    name="tiny", title="Tiny chat", licence="none", dtype="float16", tree=Tree(depth=2, top_k=2, total_tokens=3),
    shape=Shape(hidden=32, intermediate=48, layers=2, heads=4, kv_heads=2, vocabulary=259, context=256, tied=True),
    source=Repo(TARGET, COMMIT), head=Repo(HEAD), chat_template="{% for m in messages %}<s>{{ m['content'] }}{% endfor %}",
)  # fmt: skip


def quiet(what: str, done: int, total: int) -> None:
    pass


def refused(repo: str = TARGET, revision: str | None = None) -> str:
    with pytest.raises(ModelError) as caught:
        hub.fetch(Repo(repo, revision), quiet)
    message = str(caught.value)
    assert "\n" not in message
    assert repo in message
    return message


def test_a_preset_from_the_hub_races(served: Hub, capfd: pytest.CaptureFixture[str]) -> None:
    seen: list[tuple[str, int, int]] = []
    engine = Engine.load("tiny", device="cpu", progress=lambda *event: seen.append(event))
    assert (engine.name, engine.head_name, engine.dtype) == ("tiny", HEAD, "float32")
    ids = engine.encode("hello")
    assert ids[0] == 1, "the preset's own chat template"
    *_, last = engine.race("hello", Settings(max_new_tokens=8, depth=2, top_k=2, total_tokens=3))
    assert last.trace is not None
    assert list(last.trace.output_ids) == reference(engine.target.model, ids, 8)
    for repo in (TARGET, HEAD):
        events = [event for event in seen if event[0] == f"Downloading {repo}"]
        assert events[-1][1] == events[-1][2] > 0
    unwanted = ("pytorch_model.bin", "modeling_evil.py", "consolidated.safetensors", "README.md", "model.gguf")
    assert not any(served.fetched(f"{TARGET}/resolve/{COMMIT}/{name}") for name in unwanted)
    assert capfd.readouterr() == ("", "")


def test_second_start_fetches_nothing_and_needs_no_hub(served: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = hub.fetch(Repo(TARGET), quiet)
    served.requests.clear()
    assert hub.fetch(Repo(TARGET, COMMIT), quiet) == folder
    assert not any(request.startswith("GET") for request in served.requests)
    monkeypatch.setattr(hub, "unreachable", lambda: True)
    served.requests.clear()
    assert hub.fetch(Repo(TARGET), quiet) == folder == models.model_files(TARGET)
    assert served.requests == []


def test_settings_alone(served: Hub) -> None:
    folder = models.model_files(TARGET, quiet, weights=False)
    assert (folder / "config.json").is_file()
    assert not (folder / "model.safetensors").exists()
    assert (models.model_files(TARGET, quiet) / "model.safetensors").is_file()


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json"])
def test_a_damaged_cache_is_mended(served: Hub, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = hub.fetch(Repo(TARGET), quiet)
    whole = (folder / name).read_bytes()
    os.truncate((folder / name).resolve(), len(whole) // 2)
    with monkeypatch.context() as patch:
        patch.setattr(hub, "unreachable", lambda: True)
        message = refused()
        assert "cannot be reached, and 1 of the" in message
        assert "not whole; connect once" in message
    hub.fetch(Repo(TARGET), quiet)
    assert (folder / name).read_bytes() == whole
    assert served.fetched(name) == 2
    (folder / name).unlink()
    hub.fetch(Repo(TARGET), quiet)
    assert (folder / name).read_bytes() == whole


def test_damage_that_the_size_does_not_show(served: Hub) -> None:
    import torch

    folder = hub.fetch(Repo(TARGET), quiet)
    weights = folder / "model.safetensors"
    weights.resolve().write_bytes(bytes(weights.stat().st_size))
    with pytest.raises(ModelError, match=r"could not be loaded .*; if it fails again, delete ") as caught:
        models.load_model(TARGET, dtype=torch.float32, device="cpu", progress=quiet)
    found = re.search("delete (.*) and it will be fetched anew", str(caught.value))
    assert found
    shutil.rmtree(found[1])
    models.load_model(TARGET, dtype=torch.float32, device="cpu", progress=quiet)


@pytest.mark.parametrize(
    ("refusal", "token", "message"),
    [
        ((401, "GatedRepo"), "", r"is gated: accept its terms on http.*someone/tiny-chat, then give a token .* HF_TOKEN"),
        ((403, "GatedRepo"), "hf_x", "is gated, and the account of the token given has no access to it"),
        ((401, "RepoNotFound"), "", "there is no model .* or it is private and no token was given in HF_TOKEN"),
        ((404, "RepoNotFound"), "hf_x", "there is no model .* or it is private and the token given does not open it"),
        ((401, ""), "hf_x", r"does not accept the token given for someone/tiny-chat \(HTTP status 401\)"),
        ((403, ""), "", r"wants a token in HF_TOKEN for someone/tiny-chat \(HTTP status 403\)"),
        ((410, ""), "", r"cannot give someone/tiny-chat now \(HTTP status 410\); try again later"),
    ],
)  # fmt: skip
def test_refusals_of_the_hub_are_one_sentence(
    served: Hub, refusal: tuple[int, str], token: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    served.refuse[TARGET] = refusal
    if token:
        monkeypatch.setenv("HF_TOKEN", token)
    assert re.search(message, refused())
    assert served.fetched("model.safetensors") == 0


def test_what_is_not_there_is_named(served: Hub) -> None:
    assert "there is no model" in refused("someone/else")
    assert "has no revision" in refused(revision="1" * 40)
    (served.folder / TARGET / "model.safetensors").unlink()
    (served.folder / TARGET / "pytorch_model.bin").unlink()
    assert "holds no weights that this program reads" in refused()
    (served.folder / HEAD / "config.json").unlink()
    assert "holds no config.json" in refused(HEAD)


def test_hub_out_of_reach(served: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert hub.unreachable()
    assert "the hub (http://127.0.0.1:9) cannot be reached" in refused()
    monkeypatch.setattr(constants, "ENDPOINT", "https://no-such-hub.invalid")
    assert hub.unreachable()
    monkeypatch.setattr(constants, "ENDPOINT", served.url)
    assert not hub.unreachable()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE is set, and someone/tiny-chat is not in" in refused()
    assert served.requests == []


def test_proxies_look_names_up_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub.socket, "create_connection", lambda *_, **__: pytest.fail("went to the network"))
    monkeypatch.setattr(hub.urllib.request, "getproxies", lambda: {"https": "http://proxy"})
    assert not hub.unreachable()


def test_full_disk_before_and_within_the_download(served: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        usage = shutil.disk_usage("/")._replace(free=1000)
        patch.setattr(hub.shutil, "disk_usage", lambda _: usage)
        assert re.search(
            r"too full for .* \(0\.0 GB are needed, 0\.0 GB are free\); make room or set HF_HOME", refused()
        )
        assert served.fetched("model.safetensors") == 0

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr("huggingface_hub.file_download.http_get", full)
        assert "too full for" in refused()
    assert (hub.fetch(Repo(TARGET), quiet) / "model.safetensors").stat().st_size > 1000


def test_cache_that_cannot_be_used(served: Hub, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    assert "cannot be put into the hub's cache" in refused()
    (tmp_path / "cache").unlink()
    hub.fetch(Repo(TARGET), quiet)


def test_next_start_after_a_killed_download(served: Hub, tmp_path: Path) -> None:
    served.stop_after = 20_000
    code = f"from eagle2 import hub; hub.fetch(hub.Repo({TARGET!r}), print)"
    cache = {"HF_HUB_CACHE": str(tmp_path / "cache"), "HF_HOME": str(tmp_path)}
    environment = os.environ | cache | {"HF_ENDPOINT": served.url, "HF_HUB_DISABLE_XET": "1"}
    process = subprocess.Popen([sys.executable, "-c", code], env=environment, cwd=ROOT, stdout=subprocess.DEVNULL)
    assert served.reached.wait(120)
    process.kill()
    process.wait()
    served.stop_after = None
    served.released.set()
    halves = list((tmp_path / "cache").glob("*/blobs/*.incomplete"))
    assert halves
    os.utime(halves[0], (0, 0))
    folder = hub.fetch(Repo(TARGET), quiet)
    assert not halves[0].exists()
    assert all(half.exists() for half in halves[1:]), "another process may still be writing them"
    for name in ("model.safetensors", "config.json"):
        assert (folder / name).read_bytes() == (served.folder / TARGET / name).read_bytes()


def test_code_of_a_repository_is_never_run(served: Hub, tmp_path: Path) -> None:
    import torch

    mark = tmp_path / "ran"
    for name in ("configuration_evil.py", "modeling_evil.py"):
        (served.folder / TARGET / name).write_text(f"open({str(mark)!r}, 'w')")
    path = served.folder / TARGET / "config.json"
    settings = json.loads(path.read_text()) | {
        "auto_map": {"AutoConfig": "configuration_evil.Evil", "AutoModelForCausalLM": "modeling_evil.Evil"}
    }
    path.write_text(json.dumps(settings))
    models.load_model(TARGET, dtype=torch.float32, device="cpu", progress=quiet)  # by transformers' own Llama
    path.write_text(json.dumps(settings | {"model_type": "evil"}))
    with pytest.raises(ModelError, match="could not be loaded"):
        models.load_model(str(served.folder / TARGET), dtype=torch.float32, device="cpu", progress=quiet)
    assert not mark.exists()


def test_no_head_is_fetched_for_a_target_that_cannot_be_had(served: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    served.refuse[TARGET] = (401, "GatedRepo")
    with pytest.raises(ModelError, match="is gated"):
        Engine.load("tiny", device="cpu", progress=quiet)
    monkeypatch.setattr(models, "free_memory", lambda device: 10**9)
    with pytest.raises(
        ModelError, match=r"Tiny chat needs 1 GB of memory in float32, and cpu has 1\.0 GB free; choose"
    ):
        Engine.load("tiny", device="cpu", progress=quiet)
    assert not any(HEAD in request for request in served.requests)


def test_head_by_hub_id_for_a_local_target(served: Hub) -> None:
    local = str(served.folder / TARGET)
    (served.folder / TARGET / "pytorch_model.bin").unlink()
    engine = Engine.load(local, HEAD, device="cpu", progress=quiet)
    assert (engine.name, engine.head_name) == (local, HEAD)
    with pytest.raises(ModelError, match="has no draft head of its own; name one with --head"):
        Engine.load(local, device="cpu", progress=quiet)
    with pytest.raises(ModelError, match=r"there is no folder '\./none' for the draft head"):
        Engine.load(local, "./none", device="cpu", progress=quiet)


def test_sentencepiece_is_asked_for_before_the_weights(served: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    (served.folder / TARGET / "tokenizer.json").rename(served.folder / TARGET / "tokenizer.model")
    monkeypatch.setattr(models, "_installed", lambda module: False)
    with pytest.raises(ModelError, match="needs two more packages: pip install sentencepiece protobuf"):
        models.model_files(TARGET, quiet)
    assert served.fetched("model.safetensors") == 0


def test_tokenizer_of_sentencepiece_alone(tmp_path: Path) -> None:
    """Vicuna and LLaMA 2 have no tokenizer.json: transformers makes one of tokenizer.model, with these two packages."""
    if os.environ.get("CI", "").lower() not in ("1", "true"):
        pytest.importorskip("sentencepiece")
        pytest.importorskip("google.protobuf")
    import sentencepiece
    from transformers import AutoTokenizer

    assert all(map(models._installed, ("sentencepiece", "google.protobuf")))
    with open(tmp_path / "tokenizer.model", "wb") as file:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(["A chat between USER: and ASSISTANT: hello world"] * 50), model_writer=file,
            vocab_size=300, hard_vocab_limit=False, model_type="bpe", byte_fallback=True, bos_id=1, eos_id=2, unk_id=0,
            pad_id=-1, normalization_rule_name="identity", minloglevel=2,
        )  # fmt: skip
    settings = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings | {"legacy": False}))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path, local_files_only=True)
    assert tokenizer.chat_template is None
    tokenizer.chat_template = CHATS["vicuna"]
    ids = models.encode_chat(tokenizer, [{"role": "user", "content": "hello </s> world"}])
    assert (ids[0], ids.count(1), ids.count(2)) == (1, 1, 0)
    assert tokenizer.decode(ids[1:]).endswith("USER: hello </s> world ASSISTANT:")


def test_hub_ids() -> None:
    for good in ("gpt2", "owner/model-1.5B_x", "Qwen/Qwen2-7B-Instruct", "a/b"):
        assert hub.is_id(good), good
    for bad in (
        "",
        "a/b/c",
        "../x",
        "a/..",
        "-a",
        "a--b/c",
        "a/b.git",
        "a b",
        "a/b\n",
        "a/" + 96 * "b",
        "ä/b",
        ".a/b",
        "a/b.",
    ):
        assert not hub.is_id(bad), bad
        with pytest.raises(ValueError, match="no hub id"):
            Repo(bad)
    with pytest.raises(ValueError, match="no commit"):
        Repo("a/b", "main")
