"""Targets of many architectures: tree logits equal causal logits, and EAGLE-2's greedy ids equal those of ``generate``.

Also targets whose weights lie on several devices, on the disk, or are quantized.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import dispatch_model
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BitsAndBytesConfig,
    BloomConfig,
    CohereConfig,
    FalconConfig,
    Gemma2Config,
    GemmaConfig,
    GPT2Config,
    GPTJConfig,
    GPTNeoXConfig,
    GraniteConfig,
    LlamaConfig,
    MambaConfig,
    MiniCPM3Config,
    MistralConfig,
    MixtralConfig,
    MptConfig,
    OPTConfig,
    Phi3Config,
    Qwen2Config,
    Qwen3Config,
)

from eagle2.draft import Drafter, RootOnly
from eagle2.eagle import DraftVocabulary, EagleDrafter, TreeSettings
from eagle2.engine import Engine, Settings
from eagle2.generate import Prefill, Step, Stops, generate
from eagle2.head import EagleHead, HeadConfig
from eagle2.target import ContextLengthError, HuggingFaceForward, Target, UnsupportedModelError
from eagle2.tree import DraftTree
from eagle2.verify import SamplingParams
from tests.tiny import EOS, VOCAB, byte_tokenizer, oracle, reference, tiny_head, tiny_model

PROMPT = [5, 9, 41, 33, 8, 20]
COUNT = 24
TREE = DraftTree(
    torch.tensor([7, 11, 12, 13, 14, 15, 16]),
    (-1, 0, 0, 1, 1, 2, 4),
    torch.full((7,), 0.5),
    -torch.arange(7).float(),
)


def small(kind: type, **more: Any) -> Any:
    """A random model in float32; several of them stop at `EOS`."""
    torch.manual_seed(4)
    common: dict[str, Any] = {
        "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "max_position_embeddings": 128, "initializer_range": 0.3,
        "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": EOS,
    }  # fmt: skip
    return AutoModelForCausalLM.from_config(kind(**(common | more))).eval()


GROUPED = {"num_key_value_heads": 2, "head_dim": 8}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
FULL = {"layer_types": ["full_attention"] * 2, "sliding_window": 8}  # the kinds decide, not the window
MODELS: dict[str, Callable[[], Any]] = {
    "llama": lambda: small(LlamaConfig, num_key_value_heads=2),
    "llama tied, biased": lambda: small(LlamaConfig, tie_word_embeddings=True, attention_bias=True, mlp_bias=True),
    "mistral": lambda: small(MistralConfig, sliding_window=None, **GROUPED),
    "mistral, window of the context": lambda: small(MistralConfig, sliding_window=128, **GROUPED),
    "qwen2": lambda: small(Qwen2Config, num_key_value_heads=2),
    "qwen2 tied": lambda: small(Qwen2Config, num_key_value_heads=2, tie_word_embeddings=True),
    "qwen3": lambda: small(Qwen3Config, **GROUPED),
    "qwen3 tied": lambda: small(Qwen3Config, tie_word_embeddings=True, **GROUPED),
    "phi-3": lambda: small(Phi3Config, num_key_value_heads=2),
    "gemma": lambda: small(GemmaConfig, num_key_value_heads=1, head_dim=16),  # wide heads, scaled embeddings, tied
    "gemma-2, full attention": lambda: small(Gemma2Config, query_pre_attn_scalar=8, **GROUPED, **FULL),
    "mixtral": lambda: small(MixtralConfig, num_local_experts=4, sliding_window=None, **GROUPED),
    "gpt-2": lambda: small(GPT2Config),  # tied, absolute positions
    "gpt-2 untied": lambda: small(GPT2Config, tie_word_embeddings=False),
    "gpt-neox": lambda: small(GPTNeoXConfig),
    "gpt-neox tied": lambda: small(GPTNeoXConfig, tie_word_embeddings=True, use_parallel_residual=False),
    "gpt-j": lambda: small(GPTJConfig, rotary_dim=4),  # its LM head has a bias
    "opt": lambda: small(OPTConfig, ffn_dim=48, word_embed_proj_dim=16),  # embeddings narrower than the layers
    "cohere": lambda: small(CohereConfig, num_key_value_heads=2, logit_scale=0.25),  # scaled logits
    "granite": lambda: small(GraniteConfig, num_key_value_heads=2, logits_scaling=8.0, embedding_multiplier=3.0),
    "minicpm-3": lambda: small(MiniCPM3Config, num_key_value_heads=4, dim_model_base=8, **LATENT),  # scaled features
}


@pytest.mark.parametrize("name", MODELS)
def test_tree_logits_equal_causal_logits_of_every_branch(name: str) -> None:
    model = MODELS[name]()
    target = Target(model, lean=False)
    seen = features_of(model)
    prefill = target.prefill(PROMPT, 64)
    output = target.forward(TREE)
    target.commit((0, 1, 4))
    later = target.forward(TREE)
    for start, rows in ((PROMPT, output), ([*PROMPT, 7, 11, 14], later)):
        for node in range(len(TREE)):
            path = [node]
            while path[0]:
                path.insert(0, TREE.parents[path[0]])
            with torch.inference_mode():
                expected = model(torch.tensor([[*start, *TREE.token_ids[path].tolist()]])).logits[0, -1]
            torch.testing.assert_close(rows.logits[node], expected, rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(rows.hidden[node], seen[-1][0, -1], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(prefill.hidden, seen[-1][0, : len(PROMPT)], rtol=1e-4, atol=1e-4)


def features_of(model: Any) -> list[Tensor]:
    """Fills with what the LM head is given."""
    seen: list[Tensor] = []
    model.get_output_embeddings().register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    return seen


@pytest.mark.parametrize("name", MODELS)
def test_features_do_not_depend_on_how_the_prompt_was_cut(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target = Target(MODELS[name](), lean=False)
    whole = target.fork().prefill(PROMPT, 16)
    monkeypatch.setattr("eagle2.target.PREFILL_CHUNK", 4)
    parts = target.prefill(PROMPT, 16)
    torch.testing.assert_close(parts.hidden, whole.hidden, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(parts.logits, whole.logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", MODELS)
def test_greedy_ids_equal_those_of_generate(name: str) -> None:
    model = MODELS[name]()
    expected = reference(model, PROMPT, COUNT)
    target = Target(model)
    drafters: list[Drafter] = [oracle(expected), RootOnly()]
    if target.hidden_size == target.config.hidden_size == model.get_input_embeddings().weight.shape[1]:
        drafters.append(EagleDrafter(tiny_head(model), target, TreeSettings("dynamic", 3, 4, 9)))
    else:
        assert name == "opt"  # a head takes embeddings and features of one width
    for drafter in drafters:
        assert run(drafter, target, PROMPT, COUNT)[0] == expected


def ids_of(items: Iterable[Prefill | Step]) -> list[int]:
    return [token for item in items for token in ([item.token] if isinstance(item, Prefill) else item.emitted)]


def run(drafter: Drafter, target: Target, prompt: list[int], count: int) -> tuple[list[int], str | None]:
    """Greedy ids and why the run ended."""
    items = list(generate(target, drafter, prompt, sampling=SamplingParams(), stops=Stops(count, frozenset([EOS]))))
    return ids_of(items), items[-1].finish_reason


def test_absolute_positions_end_with_the_context() -> None:
    """GPT-2 has a row of its embedding matrix for each position: one too many would be an index error."""
    model = small(GPT2Config)
    target = Target(model)
    prompt = torch.randint(3, VOCAB, (120,), generator=torch.Generator().manual_seed(0)).tolist()
    expected = reference(model, prompt, 9)
    assert EOS not in expected
    head = EagleDrafter(tiny_head(model), target, TreeSettings("dynamic", 6, 4, 20))
    for drafter in (oracle(expected), head, RootOnly()):
        assert run(drafter, target, prompt, 50) == (expected, "context")
    with pytest.raises(ContextLengthError, match="128 tokens"):
        target.prefill([5] * 128, 129)


def test_angles_that_change_with_the_length_bound_the_context() -> None:
    rope = {
        "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 4, "long_factor": [4.0] * 4,
        "original_max_position_embeddings": 40,
    }  # fmt: skip
    model = small(Phi3Config, num_key_value_heads=2, rope_parameters=rope, original_max_position_embeddings=40)
    target = Target(model)
    assert target.max_length == 40
    prompt = PROMPT * 5
    expected = reference(model, prompt, 10)
    for drafter in (oracle(expected), RootOnly()):
        assert run(drafter, target, prompt, 10)[0] == expected


@pytest.mark.parametrize(
    ("config", "inner"),
    [
        (GPT2Config(), 3072), (GPTJConfig(), 16384), (GPTNeoXConfig(), 24576), (GemmaConfig(), 24576),
        (Phi3Config(), 8192), (MixtralConfig(), 14336),
    ],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_a_new_head_is_of_the_llama_family_whatever_the_target_is(config: Any, inner: int) -> None:
    head = HeadConfig.for_target(config)
    assert (head.hidden_size, head.num_attention_heads) == (config.hidden_size, config.num_attention_heads)
    assert (head.intermediate_size, head.hidden_act, head.vocab_size) == (inner, "silu", config.vocab_size)
    assert head.max_position_embeddings == config.max_position_embeddings


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "gemma-2": (lambda: small(Gemma2Config, **GROUPED), "Gemma2ForCausalLM has layers of kind sliding_attention"),
    "mistral": (lambda: small(MistralConfig, sliding_window=127, **GROUPED), "sliding window of 127"),
    "phi-3": (lambda: small(Phi3Config, num_key_value_heads=2, sliding_window=16), "sliding window of 16"),
    "mixtral": (lambda: small(MixtralConfig, sliding_window=16, **GROUPED), "sliding window of 16"),
    "bloom": (lambda: small(BloomConfig, n_head=4), "does not take position ids"),
    "mpt": (lambda: small(MptConfig, d_model=32, n_heads=4, n_layers=2), "does not take position ids"),
    "falcon, alibi": (lambda: small(FalconConfig, alibi=True), "does not take position ids"),
    "bert": (lambda: small(BertConfig), "attends to later tokens"),
    "mamba": (lambda: small(MambaConfig), "full attention everywhere"),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.filterwarnings("ignore")  # transformers' own, on running an encoder as a decoder
def test_models_that_cannot_verify_a_tree_are_refused(name: str) -> None:
    make, message = REFUSED[name]
    with pytest.raises(UnsupportedModelError, match=message):
        Target(make())


def test_an_attention_without_tree_masks_is_refused() -> None:
    model = tiny_model()
    model.config._attn_implementation = "flex_attention"
    with pytest.raises(UnsupportedModelError, match="'flex_attention', which takes no tree mask"):
        Target(model)


# --- several devices ---------------------------------------------------------------------------------------------------

SPLITS = {
    "last layer and LM head": {"model.embed_tokens": "cpu", "model.layers.0": "cpu", "model.layers.1": "disk",
                               "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "disk"},
    "everything": {"model": "disk", "lm_head": "disk"},
    "embeddings": {"model.embed_tokens": "disk", "model.layers": "cpu", "model.norm": "cpu",
                   "model.rotary_emb": "cpu", "lm_head": "cpu"},
}  # fmt: skip


@pytest.mark.parametrize(("split", "tied"), [*((split, False) for split in SPLITS), ("everything", True)])
def test_weights_on_the_disk(split: str, tied: bool, tmp_path: Path) -> None:
    original = tiny_model(tie_word_embeddings=tied, vocab_size=259)
    original.save_pretrained(tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", device_map=SPLITS[split], offload_folder=tmp_path / "offload", dtype=torch.float32
    )
    assert any(parameter.device.type == "meta" for parameter in model.parameters())
    target, whole = Target(model), Target(original, lean=False)
    assert target.why_not_lean is not None
    assert target.device == target.feature_device == torch.device("cpu")
    for one in (target, whole):
        one.prefill(PROMPT, 64)
    torch.testing.assert_close(target.forward(TREE).logits, whole.forward(TREE).logits, rtol=1e-4, atol=1e-4)
    assert isinstance(target._runs, HuggingFaceForward)
    assert {layer.keys.device.type for layer in target._runs.layers} == {"cpu"}
    expected = reference(original, PROMPT, COUNT)
    head = tiny_head(original).with_draft_tokens(torch.arange(0, 259, 2))  # rows of an LM head that is not there
    for full in (True, False):
        engine = Engine(
            model, byte_tokenizer(), head, name="tiny", head_name="random", full_vocabulary=full, costs=None
        )
        assert ids_of(engine.run(PROMPT, Settings(COUNT))) == expected
    assert engine.vocabulary.size == 130


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a second device")
def test_layers_on_two_devices() -> None:
    original = tiny_model(tie_word_embeddings=False, vocab_size=259)
    expected = reference(original, PROMPT, COUNT)
    places: dict[str, str | int] = {
        "model.embed_tokens": "cpu", "model.layers.0": "cpu", "model.layers.1": 0, "model.norm": 0,
        "model.rotary_emb": "cpu", "lm_head": 0,
    }  # fmt: skip
    head = tiny_head(original)
    # As the main device the CPU computes its part; it would only keep the weights otherwise.
    model = dispatch_model(original, places, main_device="cpu", skip_keys=list(original._skip_keys_device_placement))
    engine = Engine(model, byte_tokenizer(), head, name="tiny", head_name="random", costs=None)
    assert engine.head.fc.weight.device == engine.target.feature_device == torch.device("cuda:0")
    for drafted in (True, False):
        assert ids_of(engine.run(PROMPT, Settings(COUNT), drafted=drafted)) == expected
    engine.target.prefill(PROMPT, 16)
    assert isinstance(engine.target._runs, HuggingFaceForward)
    assert [layer.keys.device.type for layer in engine.target._runs.layers] == ["cpu", "cuda"]


# --- quantized weights -------------------------------------------------------------------------------------------------


class Packed(nn.Module):
    """A linear map with two 4-bit weights in each byte, in one column: what bitsandbytes keeps, without its kernels."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features, self.bias = linear.in_features, linear.out_features, linear.bias
        weight = linear.weight.detach()
        self.scale = weight.abs().amax(1, keepdim=True) / 7
        codes = ((weight / self.scale).round() + 8).to(torch.uint8).reshape(-1, 2)
        self.weight = nn.Parameter((codes[:, :1] << 4) | codes[:, 1:], requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        codes = torch.cat((self.weight >> 4, self.weight & 15), 1).reshape(self.out_features, self.in_features)
        return nn.functional.linear(x, (codes.to(x.dtype) - 8) * self.scale, self.bias)


@pytest.mark.parametrize("whole", [True, False])
def test_quantized_linear_layers(whole: bool) -> None:
    """``whole``: the LM head too, which bitsandbytes leaves alone unless it is told otherwise."""
    model = tiny_model(tie_word_embeddings=False, vocab_size=259)
    config_of_head = tiny_head(model).config
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and (whole or name != "lm_head"):
            model.set_submodule(name, Packed(module))
    expected = reference(model, PROMPT, COUNT)
    head = EagleHead(config_of_head).eval().requires_grad_(False).with_draft_tokens(torch.arange(0, 259, 2))
    for full in (True, False):
        engine = Engine(
            model, byte_tokenizer(), head, name="tiny", head_name="random", full_vocabulary=full, costs=None
        )
        target = engine.target
        assert target.why_not_lean == "its linear layers are quantized or adapted"
        assert (target.vocab_size, target.hidden_size) == (259, 32)
        assert target.feature_dtype == torch.float32
        for drafted in (True, False):
            assert ids_of(engine.run(PROMPT, Settings(COUNT), drafted=drafted)) == expected


class Float32Head(nn.Linear):
    """An LM head that was left in float32 in a half-precision model."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.float())


def test_an_lm_head_of_another_dtype_than_the_model() -> None:
    model = tiny_model(tie_word_embeddings=False).bfloat16()
    lm_head = Float32Head(32, VOCAB, bias=False)
    model.set_output_embeddings(lm_head)
    target = Target(model)
    assert target.why_not_lean == "its weights have several dtypes"
    assert (target.dtype, target.feature_dtype) == (torch.bfloat16, torch.float32)
    features = target.prefill(PROMPT, 64).hidden
    assert features.dtype == torch.bfloat16
    vocabulary = DraftVocabulary(target, torch.arange(0, VOCAB, 3))
    torch.testing.assert_close(vocabulary.logits(features), (features.float() @ lm_head.weight.T)[:, ::3])
    drafter = EagleDrafter(tiny_head(model).bfloat16(), target, TreeSettings("dynamic", 3, 4, 9), vocabulary)
    assert len(run(drafter, target, PROMPT, COUNT)[0]) == COUNT


@pytest.mark.skipif(
    importlib.util.find_spec("bitsandbytes") is None, reason="bitsandbytes, which is optional, is not installed"
)
@pytest.mark.parametrize("bits", [8, 4])
def test_bitsandbytes(bits: int, tmp_path: Path) -> None:
    original = tiny_model(tie_word_embeddings=False, vocab_size=259, hidden_size=64, intermediate_size=128, head_dim=16)
    original.save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path, quantization_config=BitsAndBytesConfig(**{f"load_in_{bits}bit": True}), dtype=torch.float32
    )
    expected = reference(model, PROMPT, COUNT)
    engine = Engine(model, byte_tokenizer(), tiny_head(original), name="tiny", head_name="random", costs=None)
    assert engine.target.why_not_lean is not None
    for drafted in (True, False):
        assert ids_of(engine.run(PROMPT, Settings(COUNT), drafted=drafted)) == expected
