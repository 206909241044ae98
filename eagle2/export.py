"""A trained head in the layouts that other programs load: EAGLE's official code, and vLLM.

Neither program is installed here: the layouts follow their sources, which the tests state again.

**official** (SafeAILab/EAGLE; read: ``eagle/model/ea_model.py`` at 2320d52e (EAGLE-1), bfeb532e (EAGLE-2) and 47de7b0e
(both, beside EAGLE-3), ``cnets1.py`` at c9292914, ``configs.py`` at 08dc06cc).  ``EaModel.from_pretrained`` reads
``config.json`` and ``pytorch_model.bin``; only the newest tries ``model.safetensors`` after it.  EAGLE-1 and EAGLE-2 load
strictly, so ``embed_tokens.weight [V, H]`` must be in the file and ``lm_head.weight`` must not.  The newest is not strict,
and reads the embedding from the base model's sharded checkpoint first.  From the config come ``bias`` (of ``fc``;
missing means true), ``qkv_bias``, ``rope_theta`` and ``rope_scaling`` (exactly ``type`` and ``factor``, and then without
``rope_theta``), ``pad_token_id`` (may be missing) and the sizes; ``head_dim`` is always ``hidden_size / heads``.

**vllm** (vllm-project/vllm; read: ``vllm/model_executor/models/llama_eagle.py`` at e1c4a552, and a later state of it in
intellistream/vllm-hust at c59a5391; ``vllm/config/speculative.py`` at 002e77c1, ``transformers_utils/configs/eagle.py``
at 23c5aa92).  A plain Llama config is enough: ``SpeculativeConfig`` wraps it and prefixes its architecture,
``EagleLlamaForCausalLM``.  Names get the prefix ``model.``; q, k, v and gate, up are stacked while loading; layer 0 has
no input norm.  ``embed_tokens`` and ``lm_head`` that the file lacks are shared with the target.  ``fc`` has no bias there,
and the key ``bias`` means the attention's, output projection included, so it is left out; ``qkv_bias`` is the one of q, k, v.
"""

from __future__ import annotations

import errno
import io
import json
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from . import models
from .head import EagleHead, HeadConfig

LAYOUTS = ("official", "vllm")
MARKER = "eagle2-export.json"
WEIGHTS = {"official": "pytorch_model.bin", "vllm": "model.safetensors"}
OURS = frozenset({"config.json", MARKER, *WEIGHTS.values()})
EXTRAS = ("draft_token_ids",)  # tensors of our own heads that neither loader knows
EMBEDDING = "embed_tokens.weight"


class ExportError(ValueError):
    """The head cannot be written in this layout; the message is one sentence."""


@dataclass(frozen=True, slots=True)
class Exported:
    """What was written: bytes by file name, shapes by tensor name, and what differs from the head's own folder."""

    folder: Path
    layout: str
    files: dict[str, int]
    tensors: dict[str, tuple[int, ...]]
    copied: tuple[str, ...]
    left_out: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "folder": str(self.folder), "layout": self.layout, "dtype": "float16", "bytes": sum(self.files.values()),
            "files": self.files, "tensors": {name: list(shape) for name, shape in self.tensors.items()},
            "copied_from_target": list(self.copied), "left_out": list(self.left_out),
        }  # fmt: skip


def export_head(
    head: str | Path, out: str | Path, layout: str, *, model: str | None = None, progress: models.Progress | None = None
) -> Exported:
    """Read a head folder and write it in ``layout`` into the folder ``out``.

    ``model`` names the target, which the head must fit.  The official layout needs it, for the embedding.
    """
    head, out = Path(head), Path(out).resolve()
    if layout not in LAYOUTS:
        raise ExportError(f"the layout must be one of {', '.join(LAYOUTS)}, not {layout!r}")
    if layout == "official" and model is None:
        raise ExportError("the official layout holds a copy of the target's embedding: name the target with --model")
    if not head.is_dir():
        raise ExportError(f"the head folder {head} does not exist")
    _check_folder(out)  # before minutes of loading, not after
    _config(EagleHead.load(head).config, layout)  # refuses what the layout cannot say
    target_config, embedding = None, None
    if model is not None and layout == "official":
        target, _ = models.load_model(model, dtype=torch.float16, device="cpu", progress=progress)
        target_config, embedding = target.config.get_text_config(), target.get_input_embeddings().weight
    elif model is not None:
        target_config = _target_config(model, progress)
    return write_layout(EagleHead.load(head, target_config=target_config), out, layout, embedding)


def write_layout(head: EagleHead, out: Path, layout: str, embedding: Tensor | None = None) -> Exported:
    """Write ``head`` into the folder ``out``; ``embedding [V, H]`` is the target's, for the official layout."""
    _check_folder(out)
    config = _config(head.config, layout)
    tensors = {name: value for name, value in head.state_dict().items() if name not in EXTRAS}
    copied: tuple[str, ...] = ()
    if layout == "official":
        expected = (head.config.vocab_size, head.config.hidden_size)
        if embedding is None or tuple(embedding.shape) != expected:
            found = "none" if embedding is None else list(embedding.shape)
            raise ExportError(f"the target's embedding must have the shape {list(expected)} for this head, not {found}")
        tensors[EMBEDDING], copied = embedding, (EMBEDDING,)
    halves = {name: value.detach().to("cpu", torch.float16).contiguous() for name, value in tensors.items()}
    for name, half in halves.items():
        if not torch.isfinite(half).all():
            raise ExportError(f"{name} holds values beyond the range of float16, in which heads are published")
    left_out = tuple(name for name in EXTRAS if getattr(head, name, None) is not None)
    note = {"format": "eagle2-export", "layout": layout, "copied_from_target": copied, "left_out": left_out}
    files = {
        WEIGHTS[layout]: _packed(halves) if layout == "official" else save(halves, {"format": "pt"}),
        "config.json": (json.dumps(config, indent=2) + "\n").encode(),
        MARKER: (json.dumps(note, indent=2) + "\n").encode(),
    }
    _write_folder(out, files)
    return Exported(
        out, layout, {name: len(data) for name, data in files.items()},
        {name: tuple(value.shape) for name, value in sorted(halves.items())}, copied, left_out,
    )  # fmt: skip


def _packed(tensors: dict[str, Tensor]) -> bytes:
    buffer = io.BytesIO()  # a full disk in the midst of torch.save is no OSError
    torch.save(tensors, buffer)
    return buffer.getvalue()


def _config(config: HeadConfig, layout: str) -> dict[str, Any]:
    """The layout's ``config.json``; raises where its loader would build another head than this one."""
    rope = dict(config.rope)
    kind = str(rope.pop("rope_type", rope.pop("type", "default")))
    theta = float(rope.pop("rope_theta", 10000.0))
    rope.pop("type", None)
    data: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama",
        "hidden_size": config.hidden_size, "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_attention_heads, "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim, "num_hidden_layers": 1, "vocab_size": config.vocab_size,
        "rms_norm_eps": config.rms_norm_eps, "max_position_embeddings": config.max_position_embeddings,
        "hidden_act": config.hidden_act, "rope_theta": theta, "tie_word_embeddings": False, "torch_dtype": "float16",
    }  # fmt: skip
    if config.attention_bias:
        data["qkv_bias"] = True
    if layout == "vllm":
        if config.fc_bias:
            raise ExportError("this head has a bias in fc, for which vLLM's EAGLE model has no place")
        data["attention_bias"] = False
        data["rope_parameters"] = {"rope_type": kind, "rope_theta": theta, **rope}  # transformers 5
        if kind != "default":
            data["rope_scaling"] = {"rope_type": kind, **rope}  # transformers 4
        return data
    data["bias"] = config.fc_bias
    if config.head_dim * config.num_attention_heads != config.hidden_size:
        raise ExportError(
            f"EAGLE's official code takes hidden_size / heads as the width of an attention head; this head has "
            f"{config.num_attention_heads} of width {config.head_dim} at hidden_size {config.hidden_size}"
        )
    if kind == "linear" and theta == 10000.0 and float(rope["factor"]) > 1:
        data["rope_scaling"] = {"type": "linear", "factor": float(rope["factor"])}
    elif kind != "default":
        raise ExportError(
            f"EAGLE's official code cannot express this head's rotary embedding "
            f"(rope_type {kind!r} with rope_theta {theta:g}); export it for vLLM"
        )
    return data


def _target_config(name: str, progress: models.Progress | None) -> Any:
    """The target's config without its weights."""
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(models.model_files(name, progress, weights=False)).get_text_config()
    except (OSError, ValueError) as error:
        raise ExportError(f"the target {name} cannot be read: {models._line(error)}") from error


def _check_folder(out: Path) -> None:
    """Only a new folder, an empty one or an earlier export may be written to."""
    if out.exists() and not out.is_dir():
        raise ExportError(f"{out} exists and is no folder")
    names = {entry.name for entry in out.iterdir()} if out.exists() else set()
    if names and (MARKER not in names or not names <= OURS):
        foreign = sorted(names - OURS) or sorted(names)
        raise ExportError(f"{out} holds files that no export wrote ({foreign[0]}): choose another folder")


def _write_folder(out: Path, files: dict[str, bytes]) -> None:
    """All files or none: they are written beside ``out`` and moved there at the end."""
    building: Path | None = None
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        building = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
        new, old = building / "new", building / "old"
        new.mkdir()  # not mkdtemp's own folder, which is private
        for name, data in files.items():
            with open(new / name, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
        if out.exists():
            os.rename(out, old)
        try:
            os.rename(new, out)
        except OSError:
            if old.exists():
                os.rename(old, out)
            raise
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            needed = sum(map(len, files.values())) / 1e6
            raise ExportError(f"the disk of {out} is full: the export needs {needed:.1f} MB") from error
        raise ExportError(f"{out} cannot be written: {error.strerror or error}") from error
    finally:
        if building is not None:
            shutil.rmtree(building, ignore_errors=True)
