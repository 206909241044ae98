"""Official EAGLE-1/2 checkpoints: every layout that is published loads, everything else is named in one sentence."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig, Qwen2Config

from eagle2.engine import Engine, Settings
from eagle2.head import EagleHead, HeadConfig, HeadFormatError
from tests.checkpoints import official_config, official_tensors, write_head
from tests.tiny import EOS, byte_tokenizer, reference, tiny_model

SIZES: dict[str, Any] = {
    "vocab_size": 259, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "bos_token_id": 1, "eos_token_id": EOS, "pad_token_id": 0,
    "initializer_range": 0.3,
}  # fmt: skip
TARGETS: dict[str, Any] = {
    "llama": LlamaConfig(**SIZES),
    "qwen2": Qwen2Config(**SIZES, tie_word_embeddings=True, use_sliding_window=False),
    "mixtral": MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2),
}
# What the official heads of these families are like: Qwen2's has all biases, Mixtral's has as many KV heads as heads.
HEADS: dict[str, tuple[dict[str, Any], dict[str, bool]]] = {
    "llama": ({"rope_theta": 500000.0, "bias": False}, {}),
    "qwen2": ({"rope_theta": 1000000.0, "bias": True, "qkv_bias": True}, {"fc_bias": True, "qkv_bias": True}),
    "mixtral": ({"rope_theta": 1000000.0, "num_key_value_heads": None}, {"fc_bias": True}),
}


def target(family: str = "llama") -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(TARGETS[family]).eval()
    model.generation_config.eos_token_id = EOS
    return model


def values(head: EagleHead) -> dict[str, Tensor]:
    return {name: value.float() for name, value in head.state_dict().items()}


@pytest.fixture
def made() -> tuple[Any, dict[str, Any], dict[str, Tensor]]:
    model = target()
    config = official_config(model)
    return model, config, official_tensors(model, config)


@pytest.mark.parametrize("family", TARGETS)
def test_official_head_races_on_its_target(tmp_path: Path, family: str) -> None:
    """From the folders on disk to the race: the same tokens as Hugging Face's own generate."""
    model = target(family)
    model.save_pretrained(tmp_path / "target")
    byte_tokenizer().save_pretrained(tmp_path / "target")
    changes, biases = HEADS[family]
    config = official_config(model, **changes)
    write_head(tmp_path / "head", config, official_tensors(model, config, **biases))
    engine = Engine.load(str(tmp_path / "target"), str(tmp_path / "head"), dtype="float32", device="cpu")
    assert engine.head.config.num_key_value_heads == (4 if family == "mixtral" else 2)
    assert engine.head.config.rope["rope_theta"] == changes["rope_theta"]
    *_, last = engine.race("hello", Settings(max_new_tokens=12, depth=2, top_k=3, total_tokens=5))
    assert last.trace is not None
    assert last.trace.equal
    assert list(last.trace.output_ids) == reference(model, engine.encode("hello"), 12)


@pytest.mark.parametrize(
    "layout",
    ["bin", "legacy", "safetensors", "bin sharded", "safetensors sharded", "bin unindexed", "safetensors unindexed"],
)
def test_layouts_on_disk_hold_the_same_head(made: Any, tmp_path: Path, layout: str) -> None:
    model, config, tensors = made
    head = EagleHead.load(write_head(tmp_path, config, tensors, layout), target=model)
    assert set(values(head)) == set(tensors) - {"embed_tokens.weight"}
    for name, value in values(head).items():
        assert torch.equal(value, tensors[name].float()), name


@pytest.mark.parametrize("prefix", ["module.", "model.", "ea_layer.", "module.ea_layer."])
def test_prefixes_are_taken_off(made: Any, tmp_path: Path, prefix: str) -> None:
    model, config, tensors = made
    expected = values(EagleHead.load(write_head(tmp_path / "plain", config, tensors)))
    prefixed = {prefix + name: value for name, value in tensors.items()}
    found = values(EagleHead.load(write_head(tmp_path / "prefixed", config, prefixed), target=model))
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    with pytest.raises(HeadFormatError, match=r"fc\.weight twice"):
        EagleHead.load(write_head(tmp_path / "twice", config, prefixed | {"fc.weight": tensors["fc.weight"]}))


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("wanted", [torch.float32, torch.bfloat16, torch.float16])
def test_dtype_on_disk_and_in_use(made: Any, tmp_path: Path, stored: torch.dtype, wanted: torch.dtype) -> None:
    model, config, tensors = made
    folder = write_head(tmp_path, config, {name: value.to(stored) for name, value in tensors.items()})
    head = EagleHead.load(folder, target=model.to(wanted), dtype=wanted)
    assert {value.dtype for value in head.state_dict().values()} == {wanted}
    assert torch.equal(head.fc.weight, tensors["fc.weight"].to(stored).to(wanted))


def test_float32_values_beyond_float16_are_refused(made: Any, tmp_path: Path) -> None:
    _, config, tensors = made
    tensors = {name: value.float() for name, value in tensors.items()}
    tensors["fc.weight"][0, 0] = 1e6
    write_head(tmp_path, config, tensors)
    with pytest.raises(HeadFormatError, match=r"fc\.weight holds values beyond the range of float16; use bfloat16"):
        EagleHead.load(tmp_path, dtype=torch.float16)
    assert EagleHead.load(tmp_path, dtype=torch.bfloat16).fc.weight[0, 0] > 9e5


def test_vllms_converted_files_load(made: Any, tmp_path: Path) -> None:
    """Its converter wraps the config and adds the target's LM head; a placeholder norm of ones does no harm."""
    model, config, tensors = made
    extra = {
        "lm_head.weight": model.lm_head.weight.detach().half(),
        "layers.0.input_layernorm.weight": torch.ones(32),
        "layers.0.self_attn.rotary_emb.inv_freq": 10000.0 ** (-torch.arange(0, 8, 2) / 8),
    }
    wrapped = {"model_type": "eagle", "model": config | {"eagle_fc_bias": True}}
    head = EagleHead.load(write_head(tmp_path, wrapped, tensors | extra, "safetensors"), target=model)
    assert set(head.state_dict()) == set(tensors) - {"embed_tokens.weight"}


def test_without_a_copy_of_the_embedding(made: Any, tmp_path: Path) -> None:
    model, config, tensors = made
    del tensors["embed_tokens.weight"]
    EagleHead.load(write_head(tmp_path, config, tensors), target=model)


@pytest.mark.parametrize("name", ["embed_tokens", "lm_head"])
def test_a_copy_of_another_targets_matrix_is_refused(made: Any, tmp_path: Path, name: str) -> None:
    """Vicuna 7B and LLaMA2-Chat 7B have the same sizes: only the copy tells their heads apart."""
    model, config, tensors = made
    write_head(tmp_path, config, tensors | {f"{name}.weight": torch.randn(259, 32)})
    with pytest.raises(HeadFormatError, match=rf"{name}\.weight that differs from this target's by .*another target"):
        EagleHead.load(tmp_path, target=model)
    write_head(tmp_path, config, tensors | {f"{name}.weight": torch.randn(258, 32)})
    with pytest.raises(HeadFormatError, match=rf"{name}\.weight has shape \[258, 32\].*\[259, 32\]"):
        EagleHead.load(tmp_path)


def _rope(**config: Any) -> dict[str, Any]:
    sizes = {key: SIZES[key] for key in ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")}
    return HeadConfig.from_dict(sizes | config, fc_bias=False, attention_bias=False).rope


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, {"rope_type": "default", "rope_theta": 10000.0}),
        ({"rope_theta": None, "rope_scaling": None}, {"rope_type": "default", "rope_theta": 10000.0}),
        ({"rope_theta": 5e5}, {"rope_type": "default", "rope_theta": 5e5}),
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0}},
            {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0},
        ),
        (
            {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", "type": "llama3", **LLAMA3}},
            {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3},
        ),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, {"rope_type": "default", "rope_theta": 1e6}),
        ({"rope_theta": 1e6, "rope_parameters": {"rope_type": "default"}}, {"rope_type": "default", "rope_theta": 1e6}),
    ],
)
def test_rope_settings_old_and_new(config: dict[str, Any], expected: dict[str, Any]) -> None:
    assert _rope(**config) == expected


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_scaling": {"type": "mrope"}}, "asks for the rotary embedding 'mrope'; known are default, dynamic"),
        ({"rope_scaling": {"type": "llama3", "factor": 8.0}}, "rotary settings .* cannot be used: .*low_freq_factor"),
        ({"rope_scaling": {"type": "linear"}}, "cannot be used: .*factor"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e6}}}, "rotary settings for several kinds of layers"),
        ({"rope_theta": "many"}, "garbles a setting"),
        ({"rope_scaling": "linear"}, "garbles a setting"),
        ({"num_hidden_layers": 32}, r"config\.json speaks of 32 layers; an EAGLE-1 or EAGLE-2 head has 1"),
        ({"num_attention_heads": 0}, "garbles a setting|must be at least 1"),
        ({"hidden_size": -32}, "hidden_size -32; it must be at least 1"),
        ({"intermediate_size": 10**12}, "its config.json calls for"),
        ({"num_key_value_heads": 4}, r"k_proj\.weight has shape \[16, 32\]; its config.json calls for \[32, 32\]"),
        ({"vocab_size": 300}, r"embed_tokens\.weight has shape \[259, 32\]; its config.json calls for \[300, 32\]"),
        ({"hidden_size": None}, "lacks or garbles a setting: 'hidden_size'"),
    ],
)
def test_wrong_configs_are_one_sentence(made: Any, tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    model, _, tensors = made
    write_head(tmp_path, official_config(model, **changes), tensors)
    _refused(tmp_path, message)


def _refused(folder: Path, message: str, **arguments: Any) -> None:
    with pytest.raises(HeadFormatError, match=message) as caught:
        EagleHead.load(folder, **arguments)
    assert "\n" not in str(caught.value)


def test_stored_rotary_frequencies_must_be_those_of_the_config(made: Any, tmp_path: Path) -> None:
    _, config, tensors = made
    extra = {"layers.0.self_attn.rotary_emb.inv_freq": 500000.0 ** (-torch.arange(0, 8, 2) / 8)}
    write_head(tmp_path, config, tensors | extra)
    _refused(tmp_path, "rotary frequencies that are not those of its config.json")
    write_head(tmp_path, config | {"rope_theta": 500000.0}, tensors | extra)
    EagleHead.load(tmp_path)


def test_other_kinds_are_named(made: Any, tmp_path: Path) -> None:
    model, config, tensors = made
    layer = {name: value for name, value in tensors.items() if name.startswith("layers.0.")}
    second = {name.replace("layers.0.", "layers.1."): value for name, value in layer.items()}
    third = {name.replace("layers.0.", "midlayer."): value for name, value in layer.items()}
    for kind, found in {
        r"an EAGLE-3 head \(it has d2t\)": third | {"d2t": torch.zeros(16, dtype=torch.long), "fc.weight": torch.zeros(32, 96)},
        r"an EAGLE-3 head \(it has an fc over three features, \[32, 96\]\)": tensors | {"fc.weight": torch.zeros(32, 96)},
        r"an EAGLE-3 head \(it has layers\.0\.hidden_norm\.weight\)": tensors | {"layers.0.hidden_norm.weight": torch.ones(32)},
        "a head of 2 decoder layers": tensors | second,
        "a whole language model of 2 layers": {k: v.contiguous() for k, v in model.state_dict().items()},
        "a Medusa head": {"0.0.linear.weight": torch.zeros(32, 32), "0.1.weight": torch.zeros(259, 32)},
    }.items():  # fmt: skip
        write_head(tmp_path, config, found)
        _refused(tmp_path, f"holds {kind}.*; this program runs EAGLE-1 and EAGLE-2 heads")


def test_missing_unused_and_partial_tensors_are_named(made: Any, tmp_path: Path) -> None:
    model, _, _ = made
    config = official_config(model, bias=True, qkv_bias=True)
    tensors = official_tensors(model, config, fc_bias=True, qkv_bias=True)
    for name in [name for name in tensors if name not in ("embed_tokens.weight", "fc.bias", "fc.weight")]:
        write_head(tmp_path, config, {key: value for key, value in tensors.items() if key != name})
        # Without the query's bias the others are unknown.
        _refused(
            tmp_path, "lacks|does not: layers.0.self_attn.k_proj.bias" if "q_proj.bias" in name else f"lacks {name}"
        )
    write_head(tmp_path, config, tensors | {"layers.0.self_attn.o_proj.bias": torch.zeros(32)})
    _refused(tmp_path, r"an EAGLE-2 head does not: layers\.0\.self_attn\.o_proj\.bias")
    write_head(tmp_path, config, tensors | {"fc.weight": torch.zeros(32, 64, dtype=torch.int8)})
    _refused(tmp_path, r"fc\.weight is of dtype int8; quantised heads are not supported")
    write_head(tmp_path, config, tensors | {"embed_tokens.weight": torch.full((259, 32), float("nan"))})
    _refused(tmp_path, "differs from this target's by nan", target=model)


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def _index(folder: Path, change: Callable[[dict[str, str]], Any]) -> None:
    path = folder / "model.safetensors.index.json"
    data = json.loads(path.read_text())
    data["weight_map"] = change(data["weight_map"])
    path.write_text(json.dumps(data))


DAMAGE: dict[str, tuple[str, Callable[[Path], Any], str]] = {
    "zip cut": ("bin", lambda f: _cut(f / "pytorch_model.bin"), r"pytorch_model\.bin \(\d+ bytes\) cannot be read"),
    "legacy cut": ("legacy", lambda f: _cut(f / "pytorch_model.bin"), "cannot be read"),
    "safetensors cut": ("safetensors", lambda f: _cut(f / "model.safetensors"), "cannot be read"),
    "empty": ("bin", lambda f: (f / "pytorch_model.bin").write_bytes(b""), r"\(0 bytes\) cannot be read"),
    "no dictionary": ("bin", lambda f: torch.save([1], f / "pytorch_model.bin"), "not hold a dictionary of tensors"),
    "pointer": (
        "bin",
        lambda f: (f / "pytorch_model.bin").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n"),
        "pointer of Git LFS, not the weights; fetch them with `git lfs pull`",
    ),
    "shard missing": (
        "safetensors sharded",
        lambda f: (f / "model-00002-of-00003.safetensors").unlink(),
        r"names 3 shards, of which model-00002-of-00003\.safetensors is missing",
    ),
    "shard missing, no index": (
        "bin unindexed",
        lambda f: (f / "pytorch_model-00003-of-00003.bin").unlink(),
        r"not all of them, only pytorch_model-00001-of-00003\.bin, pytorch_model-00002-of-00003\.bin",
    ),
    "index leaves the folder": (
        "safetensors sharded",
        lambda f: _index(f, lambda places: places | {"fc.weight": "../other.safetensors"}),
        r"names '\.\./other\.safetensors', which is no \.safetensors file of this folder",
    ),
    "index names a pickle": (
        "safetensors sharded",
        lambda f: _index(f, lambda places: places | {"fc.weight": "evil.bin"}),
        "names 'evil.bin', which is no .safetensors file",
    ),
    "index promises more": (
        "safetensors sharded",
        lambda f: _index(f, lambda places: places | {"fc.bias": places["fc.weight"]}),
        "lacks fc.bias, which its index names",
    ),
    "index without files": ("safetensors sharded", lambda f: _index(f, lambda _: {}), "names 0 shards"),
    "index garbled": (
        "safetensors sharded", lambda f: (f / "model.safetensors.index.json").write_text("[]"), "is no index of shards",
    ),
    "config missing": ("bin", lambda f: (f / "config.json").unlink(), "has no config.json"),
    "config a list": ("bin", lambda f: (f / "config.json").write_text("[]"), "not a JSON object"),
    "weights missing": ("bin", lambda f: (f / "pytorch_model.bin").unlink(), "has neither model.safetensors nor"),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_folders_are_one_sentence(made: Any, tmp_path: Path, damage: str) -> None:
    _, config, tensors = made
    layout, break_, message = DAMAGE[damage]
    break_(write_head(tmp_path, config, tensors, layout))
    _refused(tmp_path, message)


def test_no_folder(tmp_path: Path) -> None:
    _refused(tmp_path / "none", "the head folder .*none does not exist")


def test_a_pickle_is_never_run(made: Any, tmp_path: Path) -> None:
    import os

    _, config, tensors = made

    class Bomb:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "boom"),)

    for layout in ("bin", "legacy"):
        write_head(tmp_path, config, tensors | {"fc.bias": Bomb()}, layout)  # type: ignore[dict-item]
        _refused(tmp_path, "holds more than tensors, of which nothing was run")
        assert not (tmp_path / "boom").exists()


def test_shapes_of_the_format_are_those_of_the_module() -> None:
    for biases in (False, True):
        config = HeadConfig.from_dict(
            official_config(tiny_model()) | {"head_dim": 8}, fc_bias=biases, attention_bias=biases
        )
        head = EagleHead(config)
        assert config.tensor_shapes == {name: tuple(value.shape) for name, value in head.state_dict().items()}
