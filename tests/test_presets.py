"""Presets: the file is whole, sizes and memory are right, each fails for want of the hub, memory or a token alone."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig, Qwen2Config

from eagle2 import hub, models
from eagle2.__main__ import main
from eagle2.eagle import TreeSettings
from eagle2.engine import Engine
from eagle2.head import HeadConfig
from eagle2.hub import ModelError, Repo
from eagle2.models import PRESETS
from eagle2.presets import CHATS, FILE, read_presets
from tests.test_models import _tiny_tokenizer

ON_HUB = [name for name, preset in PRESETS.items() if isinstance(preset.source, Repo)]
WANTED = {  # parameters in billions: of the target as published, of the head as EAGLE's README lists it
    "vicuna-7b": (6.738, 0.24), "vicuna-13b": (13.016, 0.37), "llama2-7b-chat": (6.738, 0.24),
    "llama2-13b-chat": (13.016, 0.37), "llama2-70b-chat": (68.977, 0.99), "llama3-8b-instruct": (8.030, 0.25),
    "llama3-70b-instruct": (70.554, 0.99), "qwen2-7b-instruct": (7.616, 0.26), "qwen2-72b-instruct": (72.706, 1.05),
    "mixtral-8x7b-instruct": (46.703, 0.28),
}  # fmt: skip


def _transformers_config(name: str, layers: int) -> Any:
    shape = PRESETS[name].shape
    sizes: dict[str, Any] = {
        "vocab_size": shape.vocabulary, "hidden_size": shape.hidden, "intermediate_size": shape.intermediate,
        "num_hidden_layers": layers, "num_attention_heads": shape.heads, "num_key_value_heads": shape.kv_heads,
        "max_position_embeddings": shape.context, "tie_word_embeddings": shape.tied,
    }  # fmt: skip
    if shape.experts > 1:
        return MixtralConfig(**sizes, num_local_experts=shape.experts)
    return Qwen2Config(**sizes) if shape.qkv_biases else LlamaConfig(**sizes)


def test_the_ten_of_the_paper_and_the_embedded_one() -> None:
    assert set(ON_HUB) == set(WANTED)
    assert set(PRESETS) - set(ON_HUB) == {models.DEFAULT_PRESET}
    assert models.default_head(models.DEFAULT_PRESET) is not None
    for name in ON_HUB:
        preset = PRESETS[name]
        assert isinstance(preset.head, Repo)
        assert preset.head.id.startswith("yuhuili/EAGLE-")
        assert preset.licence
        assert TreeSettings("dynamic", preset.tree.depth, preset.tree.top_k, preset.tree.total_tokens)
        size = float(re.findall(r"(\d+)b", name)[-1])
        expected = 59 if size < 10 else 49 if size < 20 else 47
        assert preset.tree.total_tokens == (47 if "mixtral" in name else expected)
        assert (preset.tree.depth, preset.tree.top_k) == (6, 10)


@pytest.mark.parametrize("name", PRESETS)
def test_parameters_are_those_of_the_models(name: str) -> None:
    """Against transformers' model of these sizes (two layers tell what one costs), published counts and the head's format."""
    shape = PRESETS[name].shape
    counts = []
    for layers in (1, 2):
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(_transformers_config(name, layers))
        counts.append(sum(value.numel() for value in model.parameters()))
    assert shape.parameters == counts[0] + (shape.layers - 1) * (counts[1] - counts[0])
    head = {
        "hidden_size": shape.hidden, "intermediate_size": shape.intermediate, "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.head_kv_heads or shape.kv_heads, "vocab_size": shape.vocabulary,
    }  # fmt: skip
    shapes = HeadConfig.from_dict(head, fc_bias=shape.head_biases, attention_bias=shape.head_biases).tensor_shapes
    assert shape.head_parameters == sum(torch.Size(size).numel() for size in shapes.values())
    if name in WANTED:
        target, published = WANTED[name]
        assert shape.parameters / 1e9 == pytest.approx(target, abs=0.001)
        assert shape.head_parameters / 1e9 == pytest.approx(published, rel=0.05)


def test_memory_by_hand() -> None:
    """Vicuna 7B in float16: 6.74e9 + 0.236e9 numbers; a token has 2 x 32 x 128 numbers in each of 2 x 32 + 1 layers."""
    shape = PRESETS["vicuna-7b"].shape
    rows = 2048 * 2 * 32 * 128 * (2 * 32 + 1)
    assert shape.memory("float16") == 2 * (shape.parameters + shape.head_parameters + rows) + 2**30
    assert shape.memory("float32") - 2**30 == 2 * (shape.memory("bfloat16") - 2**30)
    assert 16e9 < shape.memory("float16") < 18e9


@pytest.mark.parametrize("name", ON_HUB)
def test_each_fails_for_want_of_memory_then_of_the_hub(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In this order, without a byte from the hub; a missing token is tested in test_hub."""
    monkeypatch.setattr(hub, "unreachable", lambda: pytest.fail("asked the hub before the memory was checked"))
    monkeypatch.setattr(models, "free_memory", lambda device: 4 * 10**9)
    with pytest.raises(
        ModelError, match=r"needs \d+ GB of memory in float32, and cpu has 4\.0 GB free; choose a smaller"
    ):
        Engine.load(name, device="cpu")
    with pytest.raises(ModelError, match=r"needs \d+ GB of memory in float32"):
        models.load_model(name, dtype=torch.float32, device="cpu")
    dtype = PRESETS[name].dtype
    monkeypatch.setattr(models, "free_memory", lambda device: PRESETS[name].shape.memory(dtype))
    with pytest.raises(ModelError, match=f"; --dtype {dtype} would fit"):
        Engine.load(name, device="cpu")
    monkeypatch.setattr(hub, "unreachable", lambda: True)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", "/nonexistent/hub")
    with pytest.raises(ModelError, match=r"the hub \(.*\) cannot be reached, and \S+ is not in /nonexistent/hub"):
        Engine.load(name, dtype=dtype, device="cpu")


def test_the_embedded_preset_is_tried_whatever_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "free_memory", lambda device: 0)
    models.check_memory(models.DEFAULT_PRESET, dtype="float32", device="cpu")
    models.check_memory("owner/name", dtype="float32", device="cpu")


def test_a_device_that_is_not_there_is_named_before_memory() -> None:
    with pytest.raises(ModelError, match="the device 'cuda:99' cannot be used"):
        Engine.load("vicuna-7b", device="cuda:99")


def test_free_memory_is_that_of_the_container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert 0 < models.free_memory("cpu") < 1 << 50
    for name, text in {
        "memory.max": "3000", "memory.current": "2500", "memory.stat": "anon 1\ninactive_file 700\nx 2\n",
    }.items():  # fmt: skip
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(models, "CGROUPS", ((tmp_path / "memory.max", tmp_path / "memory.current"),))
    assert models.free_memory("cpu") == 3000 - 2500 + 700
    (tmp_path / "memory.max").write_text("max\n")
    assert models.free_memory("cpu") > 3000


def test_auto_dtype() -> None:
    assert models.auto_dtype("vicuna-7b", "cuda") == "float16"
    assert models.auto_dtype("qwen2-7b-instruct", "cuda:1") == "bfloat16"
    assert models.auto_dtype("owner/name", "cuda") == "bfloat16"
    assert models.auto_dtype("vicuna-7b", "cpu") == models.auto_dtype("owner/name", "cpu") == "float32"


def test_vicunas_template_is_fastchats() -> None:
    tokenizer = _tiny_tokenizer(template=CHATS["vicuna"])
    start = (
        "<|im_start|>A chat between a curious user and an artificial intelligence assistant. The assistant gives helpful, "
        "detailed, and polite answers to the user's questions. USER: hi ASSISTANT:"
    )
    turn = [{"role": "user", "content": "hi"}]
    assert tokenizer.decode(models.encode_chat(tokenizer, turn)) == start
    both = [*turn, {"role": "assistant", "content": "yes"}, {"role": "user", "content": "why"}]
    assert tokenizer.decode(models.encode_chat(tokenizer, both)) == f"{start} yes<|im_end|>USER: why ASSISTANT:"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("depth = 6", "deep = 6"), r"presets\.toml, smollm2-135m: .*deep"),
        (("yuhuili/EAGLE-Vicuna-7B-v1.3", "yuhuili/../x"), "vicuna-7b: 'yuhuili/../x' is no hub id"),
        (("236eeeab", "main"), "is no commit of 40 hex digits"),
        (('licence = "Apache-2.0"', 'license = "Apache-2.0"'), "smollm2-135m: .*license"),
        (('dtype = "float16"', 'dtype = "int4"'), "vicuna-7b: 'int4' is no dtype"),
        (("[vicuna-7b]", '["Vicuna 7B"]'), "is no name of a preset"),
        (("heads = 32, kv_heads = 32", "heads = 32, kv_heads = 5"), "4096 / 32 / 5 do not divide"),
    ],
)
def test_mistakes_in_the_file_are_named(tmp_path: Path, change: tuple[str, str], message: str) -> None:
    text = FILE.read_text(encoding="utf-8")
    assert change[0] in text
    (tmp_path / "presets.toml").write_text(text.replace(*change), encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        read_presets(tmp_path / "presets.toml")


def test_models_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(models, "free_memory", lambda device: 24 * 10**9)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["models", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["devices"] == [{"device": "cpu", "name": "RAM", "free_bytes": 24 * 10**9}]
    rows = {row["name"]: row for row in result["presets"]}
    assert list(rows) == list(PRESETS)
    assert rows["smollm2-135m"]["fits"] == {"cpu": "float32"}
    assert rows["vicuna-7b"]["fits"] == {"cpu": "float16"}
    assert rows["llama2-70b-chat"]["fits"] == {"cpu": None}
    assert rows["llama2-70b-chat"]["gated"] is True
    vicuna = rows["vicuna-7b"]
    assert vicuna["memory_bytes"] == {kind: PRESETS["vicuna-7b"].shape.memory(kind) for kind in ("float32", "float16")}
    assert vicuna["head"] == "yuhuili/EAGLE-Vicuna-7B-v1.3"
    assert vicuna["tree"] == {"depth": 6, "top_k": 10, "total_tokens": 59}
    assert main(["models"]) == 0
    out = capsys.readouterr().out
    lines = {line.split()[0]: line for line in out.splitlines() if line.strip()}
    assert "cpu, float32" in lines["smollm2-135m"]
    assert "cpu with --dtype float16" in lines["vicuna-7b"]
    assert "no, too large" in lines["llama2-70b-chat"]
    assert "gated" in lines["llama2-70b-chat"]
    for part in ("24.0 GB free", "4096 tokens", "yuhuili/EAGLE-mixtral-instruct-8x7B", "6/10/59"):
        assert part in out


def test_models_command_with_gpus(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(models, "free_memory", lambda device: {"cpu": 8, "cuda:0": 24, "cuda:1": 141}[device] * 10**9)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda number: f"GPU {number}")
    assert main(["models", "--json"]) == 0
    rows = {row["name"]: row["fits"] for row in json.loads(capsys.readouterr().out)["presets"]}
    assert rows["llama3-8b-instruct"] == {"cuda:0": "bfloat16", "cuda:1": "bfloat16", "cpu": None}
    assert rows["mixtral-8x7b-instruct"] == {"cuda:0": None, "cuda:1": "bfloat16", "cpu": None}
    assert main(["models"]) == 0
    out = capsys.readouterr().out
    assert "GPU 1" in out
    (line,) = (line for line in out.splitlines() if line.startswith("mixtral"))
    assert "cuda:1, bfloat16" in line
