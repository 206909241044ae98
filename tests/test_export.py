"""Exported heads against the loaders that they are for, stated again here from their sources (see `eagle2.export`)."""

from __future__ import annotations

import errno
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoConfig, PretrainedConfig

from eagle2 import export
from eagle2.__main__ import main
from eagle2.draft import Proposal
from eagle2.eagle import EagleDrafter, TreeSettings
from eagle2.export import ExportError, export_head, write_layout
from eagle2.generate import Stops, generate
from eagle2.head import EagleHead, HeadConfig, HeadFormatError
from eagle2.target import Target
from eagle2.verify import SamplingParams
from tests.tiny import byte_tokenizer, tiny_config, tiny_head, tiny_model

EMBEDDED = Path(__file__).parent.parent / "assets" / "head-smollm2-135m"


def make_head(**changes: Any) -> EagleHead:
    torch.manual_seed(3)
    head = EagleHead(replace(HeadConfig.for_target(tiny_config()), **changes)).eval().requires_grad_(False)
    for value in head.state_dict().values():
        value.copy_(value.half())  # as a head from the disk: float16 holds it exactly
    return head


HEADS = {
    "embedded": lambda: EagleHead.load(EMBEDDED),
    "fc bias": lambda: make_head(fc_bias=True),
    "attention bias, GQA": lambda: make_head(attention_bias=True),
    "every head its own keys": lambda: make_head(num_key_value_heads=4),
}


@pytest.fixture(params=list(HEADS))
def head(request: pytest.FixtureRequest) -> EagleHead:
    return HEADS[request.param]()


def embedding(head: EagleHead) -> Tensor:
    return torch.zeros(head.config.vocab_size, head.config.hidden_size, dtype=torch.float16)


# --- the official loader, stated again ---


class OfficialAttention(nn.Module):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        width, heads = config["hidden_size"], config["num_attention_heads"]
        dim = width // heads  # not the config's head_dim
        if dim * heads != width:
            raise ValueError("hidden_size must be divisible by num_heads")
        bias, kv = config.get("qkv_bias", False), config["num_key_value_heads"] * dim
        self.q_proj = nn.Linear(width, width, bias=bias)
        self.k_proj = nn.Linear(width, kv, bias=bias)
        self.v_proj = nn.Linear(width, kv, bias=bias)
        self.o_proj = nn.Linear(width, width, bias=False)


class OfficialMlp(nn.Module):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        width, inner = config["hidden_size"], config["intermediate_size"]
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)


class OfficialLayer(nn.Module):
    def __init__(self, config: dict[str, Any], index: int) -> None:
        super().__init__()
        self.self_attn, self.mlp = OfficialAttention(config), OfficialMlp(config)
        if index != 0:
            self.input_layernorm = nn.RMSNorm(config["hidden_size"])
        self.post_attention_layernorm = nn.RMSNorm(config["hidden_size"])


class OfficialModel(nn.Module):
    """``cnets1.Model``: what has parameters, from the keys that ``EConfig`` and ``EaModel`` read."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        width = config["hidden_size"]
        self.embed_tokens = nn.Embedding(config["vocab_size"], width, config.get("pad_token_id"))
        self.layers = nn.ModuleList(OfficialLayer(config, index) for index in range(config["num_hidden_layers"]))
        self.fc = nn.Linear(2 * width, width, bias=config.get("bias", True))


def test_official_code_loads_it(head: EagleHead, tmp_path: Path) -> None:
    result = write_layout(head, tmp_path / "out", "official", embedding(head))
    config = json.loads((tmp_path / "out/config.json").read_text())
    tensors = torch.load(tmp_path / "out/pytorch_model.bin", map_location="cpu", weights_only=True)
    OfficialModel(config).load_state_dict(tensors, strict=True)  # EAGLE-1 and EAGLE-2
    loaded = OfficialModel(config).load_state_dict(tensors, strict=False)  # beside EAGLE-3
    assert not loaded.missing_keys
    assert not loaded.unexpected_keys
    assert {name: tuple(value.shape) for name, value in tensors.items()} == result.tensors
    assert all(value.dtype == torch.float16 for value in tensors.values())
    assert config.get("rope_scaling") is None
    assert config["rope_theta"] == head.config.rope["rope_theta"]
    assert config["rms_norm_eps"] == head.config.rms_norm_eps
    assert config["hidden_act"] == "silu"
    assert result.copied == ("embed_tokens.weight",)


# --- vLLM's loader, stated again ---
#
# From vllm-project/vllm (nothing of it is installed here):
#   config/speculative.py at f19b16d9: SpeculativeConfig.hf_config_override, and __post_init__ from "Replace hf_config for
#     EAGLE draft_model" on; transformers_utils/configs/eagle.py at 23c5aa92, lines 12-73: EAGLEConfig
#   model_executor/models/llama_eagle.py at e1c4a552: lines 26-40 (layer 0 has no input norm), 71-73 (fc has no bias), 81-92
#     (forward), 96-127 (stacked names), 154-165 (the prefix "model."); utils.process_eagle_weight, as in that model later on
#   v1/spec_decode/eagle.py at f7eef1b6: EagleProposer.load_model (whose embed_tokens and lm_head) and propose (the chain)


def vllm_parameters(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the parameters of ``llama_eagle.LlamaModel``, whose layer is ``llama.LlamaDecoderLayer``."""
    width, inner = config["hidden_size"], config["intermediate_size"]
    dim = config.get("head_dim") or width // config["num_attention_heads"]
    bias = config.get("attention_bias", False) or config.get("bias", False)
    bias_o_proj = bias
    if "qkv_bias" in config:
        bias = config["qkv_bias"]
    q, kv = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    found: dict[str, tuple[int, ...]] = {
        "embed_tokens.weight": (config["vocab_size"], width),
        "fc.weight": (width, 2 * width),  # bias=False
    }
    for index in range(config["num_hidden_layers"]):
        layer = f"layers.{index}"
        found[f"{layer}.self_attn.qkv_proj.weight"] = (q + 2 * kv, width)
        if bias:
            found[f"{layer}.self_attn.qkv_proj.bias"] = (q + 2 * kv,)
        found[f"{layer}.self_attn.o_proj.weight"] = (width, q)
        if bias_o_proj:
            found[f"{layer}.self_attn.o_proj.bias"] = (width,)
        found[f"{layer}.mlp.gate_up_proj.weight"] = (2 * inner, width)
        found[f"{layer}.mlp.down_proj.weight"] = (width, inner)
        if index != 0:  # disable_input_layernorm
            found[f"{layer}.input_layernorm.weight"] = (width,)
        found[f"{layer}.post_attention_layernorm.weight"] = (width,)
    return found


VLLM_STACKED = (
    (".qkv_proj", ".q_proj", 0), (".qkv_proj", ".k_proj", 1), (".qkv_proj", ".v_proj", 2),
    (".gate_up_proj", ".gate_proj", 0), (".gate_up_proj", ".up_proj", 1),
)  # fmt: skip


def vllm_name(name: str) -> tuple[str, int | None]:
    """Parameter of ``EagleLlamaForCausalLM`` for a name on disk, and the part of a stacked one that it fills."""
    if "lm_head" not in name:
        name = "model." + name
    for stacked, part, shard in VLLM_STACKED:
        if part in name:
            return name.replace(part, stacked), shard
    return name, None


def vllm_load(config: dict[str, Any], tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """``EagleLlamaForCausalLM.load_weights`` on one rank: the model's parameters, all filled; raises as it would."""
    dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    kv = config["num_key_value_heads"] * dim
    sizes = {
        ".qkv_proj": (config["num_attention_heads"] * dim, kv, kv),
        ".gate_up_proj": (config["intermediate_size"], config["intermediate_size"]),
    }
    filled = {name: torch.full(shape, torch.nan) for name, shape in vllm_parameters(config).items()}
    own = set()
    for name, value in tensors.items():
        own |= {part for part in ("lm_head", "embed_tokens") if part in name}  # process_eagle_weight
        mapped, shard = vllm_name(name)
        module, parameter = mapped.split(".", 1)  # AutoWeightsLoader hands each child its weights
        assert module == "model"
        destination = filled[parameter]
        if shard is not None:
            parts = sizes[next(stacked for stacked in sizes if stacked in parameter)]
            destination = destination[sum(parts[:shard]) : sum(parts[: shard + 1])]
        assert destination.shape == value.shape, name
        destination.copy_(value)
    assert not own  # both are then the target's
    del filled["embed_tokens.weight"]
    for name, value in filled.items():
        assert not value.isnan().any(), f"{name} is not in the checkpoint"
    return filled


@pytest.mark.parametrize("name", [name for name in HEADS if name != "fc bias"])
def test_vllm_loads_it(name: str, tmp_path: Path) -> None:
    head = HEADS[name]()
    out = tmp_path / "out"
    result = write_layout(head, out, "vllm")
    config, tensors = json.loads((out / "config.json").read_text()), load_file(out / "model.safetensors")
    filled = vllm_load(config, tensors)
    own = head.state_dict()
    parts = [own[f"layers.0.self_attn.{part}_proj.weight"] for part in "qkv"]
    torch.testing.assert_close(filled["layers.0.self_attn.qkv_proj.weight"], torch.cat(parts), rtol=0, atol=0)
    parsed = VllmConfig(AutoConfig.from_pretrained(out), model_type="eagle")
    assert parsed.architectures == ["EagleLlamaForCausalLM"]
    assert parsed.rope_parameters == head.config.rope
    assert getattr(parsed, "qkv_bias", False) == head.config.attention_bias
    assert not hasattr(parsed, "bias")
    assert result.copied == ()


class VllmConfig(PretrainedConfig):
    """``EAGLEConfig`` with ``method="eagle"`` around a plain config, as ``SpeculativeConfig`` makes it."""

    model_type = "eagle"

    def __init__(self, model: Any = None, **kwargs: Any) -> None:
        if model is None:  # transformers makes one to compare with
            super().__init__(**kwargs)
            return
        self.model = model
        kwargs["architectures"] = [name if name.startswith("Eagle") else f"Eagle{name}" for name in model.architectures]
        super().__init__(**kwargs)
        for key, value in model.to_dict().items():
            if key not in kwargs:
                setattr(self, key, value)


def test_vllm_finds_its_model_and_no_setting_that_means_something_else(tmp_path: Path) -> None:
    target = tiny_config()
    write_layout(make_head(attention_bias=True), tmp_path / "out", "vllm")
    plain = AutoConfig.from_pretrained(tmp_path / "out")
    assert plain.model_type == "llama"  # of none of the kinds that hf_config_override makes something else of
    config = VllmConfig(plain, model_type="eagle")
    assert (config.model_type, config.architectures) == ("eagle", ["EagleLlamaForCausalLM"])
    for name in ("hidden_size", "vocab_size", "max_position_embeddings"):  # the last one bounds what is drafted at all
        assert getattr(config, name) == getattr(target, name), name
    assert config.num_hidden_layers == 1
    # n_predict bounds num_speculative_tokens, a draft_vocab_size other than V means a map of ids, add_para_norm norms
    # that this head lacks, logit_scale other logits than the target's LM head gives.
    for name in ("n_predict", "num_lookahead_tokens", "draft_vocab_size", "add_para_norm", "logit_scale",
                 "truncated_vocab_size", "eagle_config", "speculators_config", "quantization_config"):  # fmt: skip
        assert not hasattr(config, name), name


def vllm_forward(config: dict[str, Any], weights: dict[str, Tensor], embeds: Tensor, hidden: Tensor) -> Tensor:
    """``llama_eagle.LlamaModel.forward`` in float32: ``embeds``, ``hidden [n, H]`` at positions from 0 -> ``[n, H]``."""
    heads, groups, dim = (config[key] for key in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    n, layer = len(embeds), "layers.0."
    residual = nn.functional.linear(torch.cat((embeds, hidden), -1), weights["fc.weight"])  # no norm before the layer
    bias = weights.get(layer + "self_attn.qkv_proj.bias")
    qkv = nn.functional.linear(residual, weights[layer + "self_attn.qkv_proj.weight"], bias)
    queries, keys, values = (
        part.view(n, -1, dim).transpose(0, 1) for part in qkv.split([heads * dim, groups * dim, groups * dim], -1)
    )
    angles = torch.outer(torch.arange(n), config["rope_theta"] ** (-torch.arange(0, dim, 2) / dim)).repeat(1, 2)

    def rotated(x: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)  # neox style
        return x * angles.cos() + torch.cat((-second, first), -1) * angles.sin()

    keys, values = (x.repeat_interleave(heads // groups, 0) for x in (rotated(keys), values))
    attended = nn.functional.scaled_dot_product_attention(rotated(queries), keys, values, is_causal=True)
    joined = attended.transpose(0, 1).reshape(n, heads * dim)
    residual = residual + nn.functional.linear(joined, weights[layer + "self_attn.o_proj.weight"])
    scale = residual.pow(2).mean(-1, keepdim=True).add(config["rms_norm_eps"]).rsqrt()
    normed = residual * scale * weights[layer + "post_attention_layernorm.weight"]
    gate, up = nn.functional.linear(normed, weights[layer + "mlp.gate_up_proj.weight"]).chunk(2, -1)
    return residual + nn.functional.linear(nn.functional.silu(gate) * up, weights[layer + "mlp.down_proj.weight"])


class Chain(EagleDrafter):
    """Notes what it saw and drafted at each step."""

    def reset(self, capacity: int) -> None:
        super().reset(capacity)
        self.ids: list[int] = []
        self.features: list[Tensor] = []
        self.steps: list[tuple[int, int, list[int]]] = []  # tokens committed so far, root, drafts

    def observe(self, token_ids: Any, hidden: Tensor | None) -> None:
        assert hidden is not None
        self.ids += token_ids
        self.features += list(hidden)
        super().observe(token_ids, hidden)

    def propose(self, root: int, max_depth: int, max_nodes: int) -> Proposal:
        proposal = super().propose(root, max_depth, max_nodes)
        self.steps.append((len(self.ids), root, proposal.expanded.token_ids[1:].tolist()))
        return proposal


@pytest.mark.parametrize("name", ["attention bias, GQA", "every head its own keys"])
def test_vllm_drafts_the_chain_of_top_k_1(name: str, tmp_path: Path) -> None:
    """So ``eval --top-k 1`` tells the acceptance length to expect there: ``EagleProposer.propose`` on the file's tensors."""
    head, model = HEADS[name](), tiny_model()
    write_layout(head, tmp_path / "out", "vllm")
    config = json.loads((tmp_path / "out/config.json").read_text())
    weights = vllm_load(config, load_file(tmp_path / "out/model.safetensors"))
    target = Target(model)
    drafter = Chain(head, target, TreeSettings("dynamic", 4, 1, 4))
    prompt = [5, 9, 41, 33, 8, 20]
    list(generate(target, drafter, prompt, sampling=SamplingParams(), stops=Stops(24)))
    drafts = set()
    with torch.inference_mode():
        for length, root, drafted in drafter.steps:
            tokens, hidden = [*drafter.ids[1:length], root], torch.stack(drafter.features[:length])
            for token in drafted:
                embeds = model.get_input_embeddings()(torch.tensor(tokens))  # the target's, as is lm_head
                output = vllm_forward(config, weights, embeds, hidden)
                assert int(model.lm_head(output[-1]).argmax()) == token
                tokens, hidden = [*tokens, token], torch.cat((hidden, output[-1:]))
            drafts.add(tuple(drafted))
    assert len(drafts) > 3


def test_vllm_has_no_place_for_a_bias_of_fc(tmp_path: Path) -> None:
    head = make_head(fc_bias=True)
    with pytest.raises(ExportError, match="bias in fc"):
        write_layout(head, tmp_path / "out", "vllm")
    assert not list(tmp_path.iterdir())
    write_layout(make_head(), tmp_path / "out", "vllm")
    config = json.loads((tmp_path / "out/config.json").read_text())
    with pytest.raises(KeyError, match=r"fc\.bias"):  # what it would do
        vllm_load(config, dict(head.state_dict()))


# --- both ---


@pytest.mark.parametrize(
    ("name", "layout"),
    [(name, layout) for name in HEADS for layout in export.LAYOUTS if (name, layout) != ("fc bias", "vllm")],
)
def test_round_trip(name: str, layout: str, tmp_path: Path) -> None:
    head = HEADS[name]()
    write_layout(head, tmp_path / "out", layout, embedding(head))
    again = EagleHead.load(tmp_path / "out")
    assert again.config == head.config
    own, other = head.state_dict(), again.state_dict()
    assert list(own) == list(other)
    for key, value in own.items():
        assert torch.equal(value.half(), other[key].half()), key


def test_rotary_embeddings_that_a_loader_would_misread(tmp_path: Path) -> None:
    llama3 = {
        "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }  # fmt: skip
    head = make_head(rope=llama3)
    with pytest.raises(ExportError, match="'llama3'"):
        write_layout(head, tmp_path / "official", "official", embedding(head))
    write_layout(head, tmp_path / "vllm", "vllm")
    assert EagleHead.load(tmp_path / "vllm").config == head.config
    assert AutoConfig.from_pretrained(tmp_path / "vllm").rope_parameters == llama3

    linear = make_head(rope={"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0})
    write_layout(linear, tmp_path / "linear", "official", embedding(linear))
    config = json.loads((tmp_path / "linear/config.json").read_text())
    assert config["rope_scaling"] == {"type": "linear", "factor": 2.0}  # EConfig takes these two fields and no other
    again = EagleHead.load(tmp_path / "linear").config.rope
    assert {name: again[name] for name in linear.config.rope} == linear.config.rope
    shifted = make_head(rope={"rope_type": "linear", "rope_theta": 50000.0, "factor": 2.0})
    with pytest.raises(ExportError, match="rope_theta 50000"):  # a scaled one is built without it
        write_layout(shifted, tmp_path / "shifted", "official", embedding(shifted))


def test_width_of_attention_heads_that_only_vllm_reads(tmp_path: Path) -> None:
    head = make_head(head_dim=16)
    with pytest.raises(ExportError, match="width 16"):
        write_layout(head, tmp_path / "official", "official", embedding(head))
    write_layout(head, tmp_path / "vllm", "vllm")
    config = json.loads((tmp_path / "vllm/config.json").read_text())
    vllm_load(config, load_file(tmp_path / "vllm/model.safetensors"))


@pytest.mark.parametrize("layout", export.LAYOUTS)
def test_a_draft_vocabulary_is_left_out_and_told(layout: str, tmp_path: Path) -> None:
    head = make_head()
    plain = write_layout(head, tmp_path / "plain", layout, embedding(head))
    head.with_draft_tokens(torch.arange(5)).save(tmp_path / "head")
    result = write_layout(EagleHead.load(tmp_path / "head"), tmp_path / "out", layout, embedding(head))
    assert (plain.left_out, result.left_out) == ((), ("draft_token_ids",))
    assert result.tensors == plain.tensors
    assert EagleHead.load(tmp_path / "out").draft_token_ids is None


def test_values_beyond_float16(tmp_path: Path) -> None:
    head = make_head()
    head.fc.weight[0, 0] = 1e6
    with pytest.raises(ExportError, match=r"fc\.weight holds values beyond"):
        write_layout(head, tmp_path / "out", "vllm")


# --- from the command line, with a target on the disk ---


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("export")
    tokenizer = byte_tokenizer()
    for name, width in (("target", 32), ("other", 64)):
        model = tiny_model(vocab_size=len(tokenizer), hidden_size=width, head_dim=width // 4)
        model.save_pretrained(root / name)
        tokenizer.save_pretrained(root / name)
        tiny_head(model).save(root / f"{name}-head")
    return {name: root / name for name in ("target", "other", "target-head", "other-head")}


def test_official_from_the_command_line(
    folders: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "deeper" / "out"
    command = ["export", "--head", str(folders["target-head"]), "--model", str(folders["target"]), "--to", "official"]
    assert main([*command, "--out", str(out), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["copied_from_target"] == ["embed_tokens.weight"]
    assert result["bytes"] == sum(file.stat().st_size for file in out.iterdir())
    assert set(result["files"]) == {"config.json", "pytorch_model.bin", export.MARKER}
    tensors = torch.load(out / "pytorch_model.bin", weights_only=True)
    target = load_file(folders["target"] / "model.safetensors")["model.embed_tokens.weight"]
    assert torch.equal(tensors["embed_tokens.weight"], target.half())
    assert [entry.name for entry in out.parent.iterdir()] == ["out"]  # nothing left beside it
    assert main([*command, "--out", str(out)]) == 0
    assert "embed_tokens.weight" in capsys.readouterr().out
    # An earlier export may be replaced, as a whole.
    assert main(["export", "--head", str(folders["target-head"]), "--to", "vllm", "--out", str(out)]) == 0
    assert {file.name for file in out.iterdir()} == {"config.json", "model.safetensors", export.MARKER}


@pytest.mark.parametrize("layout", export.LAYOUTS)
def test_the_wrong_target(folders: dict[str, Path], layout: str, tmp_path: Path) -> None:
    with pytest.raises(HeadFormatError, match="hidden_size 64, the target 32"):
        export_head(folders["other-head"], tmp_path / "out", layout, model=str(folders["target"]))
    assert not list(tmp_path.iterdir())


def test_one_sentence_for_each_mistake(
    folders: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    head, foreign, file = folders["target-head"], tmp_path / "foreign", tmp_path / "file"
    foreign.mkdir()
    (foreign / "thesis.txt").write_text("years of work")
    file.write_text("")
    (tmp_path / "empty").mkdir()
    for arguments, message in (
        (("--head", head, "--to", "official", "--out", tmp_path / "o"), "name the target with --model"),
        (("--head", tmp_path / "none", "--to", "vllm", "--out", tmp_path / "o"), "does not exist"),
        (("--head", tmp_path / "empty", "--to", "vllm", "--out", tmp_path / "o"), "neither model.safetensors nor"),
        (("--head", folders["target"], "--to", "vllm", "--out", tmp_path / "o"), "holds a whole language model"),
        (("--head", head, "--to", "vllm", "--out", foreign), "thesis.txt"),
        (("--head", head, "--to", "vllm", "--out", head), "choose another folder"),
        (("--head", head, "--to", "vllm", "--out", file), "is no folder"),
    ):
        assert main(["export", *map(str, arguments)]) == 1
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1
    assert (foreign / "thesis.txt").read_text() == "years of work"
    assert not (tmp_path / "o").exists()


@pytest.mark.parametrize("earlier", [False, True])
def test_a_full_disk_leaves_nothing_half_done(earlier: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    if earlier:
        write_layout(make_head(), out, "vllm")
        before = (out / "model.safetensors").read_bytes()

    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(export.os, "fsync", full)
    with pytest.raises(ExportError, match=r"is full: the export needs \d"):
        write_layout(make_head(attention_bias=True), out, "vllm")
    assert [entry.name for entry in tmp_path.iterdir()] == (["out"] if earlier else [])
    if earlier:
        assert (out / "model.safetensors").read_bytes() == before
