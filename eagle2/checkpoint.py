"""The files of a draft head: single or sharded, safetensors or pickled, under the official names or with a prefix.

What is read is data only: pickles go through ``weights_only``, names of shards must lie in the folder.  A file that holds
another kind of model is named.  The official layout is ``config.json`` and ``pytorch_model.bin`` (SafeAILab/EAGLE,
``eagle/model/ea_model.py``); vLLM's converter wraps the config (``{"model_type": "eagle", "model": {...}}``) and adds the
target's ``lm_head.weight``.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

WEIGHTS = ("model.safetensors", "pytorch_model.bin")  # the first that is there is read
PREFIXES = ("module.", "model.", "ea_layer.")  # of DistributedDataParallel, vLLM's layout, EAGLE's own EaModel
POINTER = b"version https://git-lfs"
EXPECTED = (
    "this program runs EAGLE-1 and EAGLE-2 heads, which have one decoder layer behind an fc over embedding and feature"
)


class HeadFormatError(ValueError):
    """The folder does not hold a usable EAGLE-1/2 head for this target; the message says what was found and expected."""


def read_config(folder: Path) -> dict[str, Any]:
    """The settings in ``config.json``, out of vLLM's wrapping where they have it."""
    try:
        data = json.loads((folder / "config.json").read_text())
    except FileNotFoundError:
        raise HeadFormatError(f"{folder} has no config.json") from None
    except (OSError, RecursionError) as error:
        raise HeadFormatError(f"{folder}/config.json cannot be read: {error}") from error
    except ValueError as error:
        raise HeadFormatError(f"{folder}/config.json is not valid JSON: {error}") from error
    if isinstance(data, dict) and data.get("model_type") == "eagle" and isinstance(data.get("model"), dict):
        data = data["model"]
    if not isinstance(data, dict):
        raise HeadFormatError(f"{folder}/config.json is not a JSON object")
    return data


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of the folder by their official names; raises `HeadFormatError` unless they are those of such a head."""
    if not folder.is_dir():
        raise HeadFormatError(f"the head folder {folder} does not exist")
    found: dict[str, Tensor] = {}
    files, promised = _files(folder)
    for file in files:
        for name, value in _read(file).items():
            short = _without_prefixes(name)
            if short in found:
                raise HeadFormatError(f"the head in {folder} has {short} twice, in {file.name} as {name}")
            found[short] = value
    lost = sorted(promised - set(found))
    if lost:
        raise HeadFormatError(f"the head in {folder} lacks {', '.join(lost)}, which its index names")
    _check_kind(folder, found)
    for name, value in found.items():
        if name != "draft_token_ids" and not value.is_floating_point():
            kind = str(value.dtype).split(".")[-1]
            raise HeadFormatError(f"the head's {name} is of dtype {kind}; quantised heads are not supported")
    return found


def _files(folder: Path) -> tuple[list[Path], set[str]]:
    """Files of weights, and the tensors that an index promises."""
    for name in WEIGHTS:
        if (folder / name).is_file():
            return [folder / name], set()
        if (folder / f"{name}.index.json").is_file():
            return _indexed(folder, name)
        stem, _, suffix = name.partition(".")
        shards = sorted(folder.glob(f"{stem}-*-of-*.{suffix}"))
        if shards:
            return _counted(shards), set()
    raise HeadFormatError(f"{folder} has neither {WEIGHTS[0]} nor {WEIGHTS[1]}, whole or in shards")


def _indexed(folder: Path, name: str) -> tuple[list[Path], set[str]]:
    index = folder / f"{name}.index.json"
    try:
        places = dict(json.loads(index.read_text())["weight_map"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise HeadFormatError(f"{index} is no index of shards: {error!r}") from error
    shards = sorted(set(map(str, places.values())))
    for shard in shards:
        if Path(shard).name != shard or not shard.endswith(Path(name).suffix):
            raise HeadFormatError(f"{index} names {shard!r}, which is no {Path(name).suffix} file of this folder")
    lost = [shard for shard in shards if not (folder / shard).is_file()]
    if lost or not shards:
        raise HeadFormatError(f"{index} names {len(shards)} shards, of which {', '.join(lost) or 'none'} is missing")
    return [folder / shard for shard in shards], {_without_prefixes(key) for key in places}


def _counted(shards: list[Path]) -> list[Path]:
    """Shards without an index say themselves how many they are: ``model-00001-of-00002.safetensors``."""
    counts = {re.sub(r"\D", "", path.stem.rpartition("-of-")[2]) for path in shards}
    if len(counts) != 1 or len(shards) != int(counts.pop() or 0):
        names = ", ".join(path.name for path in shards)
        raise HeadFormatError(f"{shards[0].parent} has no index of shards and not all of them, only {names}")
    return shards


def _read(path: Path) -> dict[str, Tensor]:
    try:
        with open(path, "rb") as file:
            if file.read(len(POINTER)) == POINTER:
                raise HeadFormatError(
                    f"{path} is a pointer of Git LFS, not the weights; fetch them with `git lfs pull`"
                )
        if path.suffix == ".safetensors":
            return load_file(path)
        loaded = torch.load(path, map_location="cpu", weights_only=True)
    except HeadFormatError:
        raise
    except Exception as error:  # torch.load raises many kinds for a damaged or unsafe pickle
        line = (str(error).splitlines() or [""])[0] or type(error).__name__
        if line.startswith("Weights only load failed"):  # what follows is advice to trust the file
            line = "it is damaged, or holds more than tensors, of which nothing was run"
        size = f"{path.stat().st_size} bytes" if path.is_file() else "not there"
        raise HeadFormatError(f"the head's weights in {path} ({size}) cannot be read: {line}") from error
    if not isinstance(loaded, dict) or not all(isinstance(value, Tensor) for value in loaded.values()):
        raise HeadFormatError(f"{path} does not hold a dictionary of tensors")
    return {str(name): value for name, value in loaded.items()}


def _without_prefixes(name: str) -> str:
    for prefix in PREFIXES:
        if name.startswith(prefix):
            return _without_prefixes(name.removeprefix(prefix))
    return name


def _check_kind(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Raise for heads of other kinds and for whole models, by their keys."""
    fc = tensors.get("fc.weight")
    third = [
        name for name in tensors if name in ("d2t", "t2d") or name.startswith("midlayer.") or "hidden_norm" in name
    ]
    if not third and fc is not None and fc.dim() == 2 and fc.shape[1] == 3 * fc.shape[0]:
        third = [f"an fc over three features, {list(fc.shape)}"]
    layers = {int(match[1]) for name in tensors if (match := re.match(r"layers\.(\d+)\.", name))}
    if third:
        found = f"an EAGLE-3 head (it has {sorted(third)[0]})"
    elif any(re.match(r"(medusa_head\.)?\d+\.\d+\.", name) for name in tensors):
        found = "a Medusa head"
    elif fc is None and "norm.weight" in tensors and layers:
        found = f"a whole language model of {len(layers)} layers"
    elif layers - {0}:
        found = f"a head of {max(layers) + 1} decoder layers"
    else:
        return
    raise HeadFormatError(f"{folder} holds {found}; {EXPECTED}")


__all__ = ["HeadFormatError", "read_config", "read_tensors"]
