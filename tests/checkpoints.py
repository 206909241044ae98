"""Head folders as other people publish them: the official layout with its quirks, for tiny targets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from eagle2.head import EagleHead, HeadConfig


def official_config(target: Any, **changes: Any) -> dict[str, Any]:
    """``config.json`` with the keys of EAGLE's own (``eagle/train/EAGLE-LLaMA3-Instruct-8B.json``); None removes one.

    Official heads are dense Llama layers whatever the target, with ``hidden_size / heads`` as their ``head_dim``.
    """
    own = target.config.get_text_config()
    config = {
        "architectures": ["LlamaForCausalLM"], "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu",
        "hidden_size": own.hidden_size, "initializer_range": 0.02, "intermediate_size": own.intermediate_size,
        "max_position_embeddings": 2048, "model_type": "llama", "num_attention_heads": own.num_attention_heads,
        "num_key_value_heads": own.num_key_value_heads, "num_hidden_layers": 1, "pad_token_id": 0,
        "rms_norm_eps": 1e-05, "tie_word_embeddings": False, "torch_dtype": "float16",
        "transformers_version": "4.28.1", "use_cache": True, "vocab_size": own.vocab_size,
    } | changes  # fmt: skip
    return {key: value for key, value in config.items() if value is not None}


def official_tensors(
    target: Any, config: dict[str, Any], *, fc_bias: bool = False, qkv_bias: bool = False, dtype: torch.dtype = torch.float16
) -> dict[str, Tensor]:  # fmt: skip
    """Random tensors of a head by official name, with the copy of the target's embedding that official files hold."""
    head = EagleHead(HeadConfig.from_dict(config, fc_bias=fc_bias, attention_bias=qkv_bias))
    with torch.no_grad():
        for number, (name, value) in enumerate(sorted(head.state_dict().items())):
            generator = torch.Generator().manual_seed(number)
            value.copy_(torch.randn(value.shape, generator=generator) * 0.1 + name.endswith("norm.weight"))
    tensors = dict(head.state_dict()) | {"embed_tokens.weight": target.get_input_embeddings().weight.detach()}
    return {name: value.to(dtype).contiguous() for name, value in tensors.items()}


def write_head(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor], layout: str = "bin") -> Path:
    """``layout``: bin, legacy (torch's format before 1.6), safetensors, or either with " sharded" or " unindexed"."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    kind, _, spread = layout.partition(" ")
    stem, suffix = ("model", "safetensors") if kind == "safetensors" else ("pytorch_model", "bin")

    def write(path: Path, part: dict[str, Tensor]) -> None:
        if suffix == "safetensors":
            save_file(part, path)
        else:
            torch.save(part, path, _use_new_zipfile_serialization=kind != "legacy")

    if not spread:
        write(folder / f"{stem}.{suffix}", tensors)
        return folder
    names, places = sorted(tensors), {}
    for number in range(3):
        shard = f"{stem}-{number + 1:05d}-of-00003.{suffix}"
        part = names[number::3]
        write(folder / shard, {name: tensors[name] for name in part})
        places |= dict.fromkeys(part, shard)
    if spread == "sharded":
        (folder / f"{stem}.{suffix}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return folder
