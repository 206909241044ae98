"""The lean forward: the same logits as the model's own code, for every family that it takes; the rest is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig

from eagle2.head import DraftHead, EagleHead, HeadConfig
from eagle2.lean import (
    MOST_ROWS,
    Lean,
    LeanHead,
    LeanWeights,
    half_linear,
    lean_linear,
    multiplies_halves,
    packed_linear,
)
from eagle2.native import library
from eagle2.target import HuggingFaceForward, Target
from eagle2.trace import precision
from eagle2.tree import DraftTree
from tests.test_target import MODELS, PROMPT, TREE, small
from tests.tiny import tiny_head, tiny_model

FAMILIES = [name for name in MODELS if name != "gpt-neox"]
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
MORE = {
    "llama, mlp bias": lambda: small(LlamaConfig, num_key_value_heads=1, mlp_bias=True, attention_bias=True),
    "llama3 rotary": lambda: small(LlamaConfig, num_key_value_heads=2, rope_parameters=LLAMA3),
    "linear rotary": lambda: small(
        LlamaConfig, rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
    ),
}  # fmt: skip


@pytest.fixture(params=["native", "torch"], autouse=True)
def native(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[bool]:
    """All of it with `eagle2.native`, where this machine can compile it, and without."""
    wanted: bool = request.param == "native"
    if not wanted:
        monkeypatch.setattr("eagle2.lean.library", lambda: None)
    elif library() is None:
        pytest.skip("no native code here; test_native says whether there should be")
    multiplies_halves.cache_clear()
    yield wanted
    multiplies_halves.cache_clear()


def made(name: str) -> Any:
    """A model whose biases and norms do something."""
    model = (MODELS | MORE)[name]()
    for parameter in model.parameters():
        if parameter.dim() == 1:
            nn.init.normal_(parameter, 1.0, 0.2)
    return model


def run(target: Target) -> list[tuple[Tensor, Tensor]]:
    """Logits and features of a prefill, trees with commits out of order, and a single row."""
    outputs = [target.prefill(PROMPT, 64)]
    for rows in ((0, 2, 5), (0, 1, 4, 6), (0,)):
        outputs.append(target.forward(TREE))
        target.commit(rows)
    outputs.append(target.forward(TREE.select(())))
    assert target.length == len(PROMPT) + 8
    return [(output.logits.float(), output.hidden.float()) for output in outputs]


@pytest.mark.parametrize("name", [*FAMILIES, *MORE])
def test_passes_equal_the_models_own(name: str, native: bool) -> None:
    model = made(name)
    lean, own = Target(model), Target(model, lean=False)
    assert isinstance(lean._runs, Lean)
    assert (lean.forward_name, lean.row_invariant) == (("native", True) if native else ("lean", False))
    assert not own.row_invariant
    assert isinstance(own._runs, HuggingFaceForward)
    for mine, theirs in zip(run(lean), run(own), strict=True):
        for one, other in zip(mine, theirs):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", [*FAMILIES, *MORE])
def test_in_bfloat16_it_is_as_near_to_the_truth_as_the_models_own(name: str) -> None:
    model = made(name).to(torch.bfloat16)
    truth = run(Target(copy.deepcopy(model).float(), lean=False))

    def error(target: Target) -> float:
        parts = [(one - other).abs().mean() for mine, true in zip(run(target), truth) for one, other in zip(mine, true)]
        return float(torch.stack(parts).mean())

    assert error(Target(model)) <= 1.25 * error(Target(model, lean=False))


def test_a_long_prompt_goes_in_chunks() -> None:
    model = tiny_model(max_position_embeddings=1024)
    prompt = [7 + i % 50 for i in range(700)]
    lean, own = Target(model).prefill(prompt, 710), Target(model, lean=False).prefill(prompt, 710)
    torch.testing.assert_close(lean.hidden, own.hidden, rtol=1e-4, atol=1e-4)


def test_forks_share_weights_and_nothing_else() -> None:
    target = Target(tiny_model())
    other = target.fork()
    assert isinstance(target._runs, Lean)
    assert isinstance(other._runs, Lean)
    assert other._runs.weights is target._runs.weights
    target.prefill(PROMPT, 64)
    other.prefill(PROMPT[::-1], 64)
    alone = Target(tiny_model())
    alone.prefill(PROMPT, 64)
    torch.testing.assert_close(target.forward(TREE).logits, alone.forward(TREE).logits)


def test_what_it_cannot_run_is_refused_and_goes_the_other_way() -> None:
    odd: dict[str, Any] = {
        "GPTNeoXForCausalLM": MODELS["gpt-neox"](),
        "activation is gelu": small(LlamaConfig, hidden_act="gelu"),
        "of type dynamic": small(
            LlamaConfig, rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
        ),
    }
    mixed = tiny_model()
    mixed.model.norm.to(torch.float64)
    odd["several dtypes"] = mixed
    hooked = tiny_model()
    hooked.model.layers[0].register_forward_hook(lambda *_: None)
    odd["hooks"] = hooked
    adapted = tiny_model()
    adapted.model.layers[0].mlp.up_proj = type("Adapted", (nn.Linear,), {})(32, 48, bias=False)
    odd["quantized or adapted"] = adapted
    capped = tiny_model(tie_word_embeddings=False)
    capped.lm_head = type("Capped", (nn.Linear,), {})(32, 96, bias=False)
    odd["LM head is a Capped"] = capped
    for why, model in odd.items():
        assert why in (Lean.refusal(model) or ""), why
        target = Target(model)
        assert target.why_not_lean == Lean.refusal(model)
        assert isinstance(target._runs, HuggingFaceForward)


def test_a_model_that_does_not_fit_twice_is_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eagle2.lean.available_memory", lambda: 1 << 10)
    assert "MB are free" in (Lean.refusal(tiny_model()) or "")
    monkeypatch.setattr("eagle2.lean.available_memory", lambda: None)
    assert Lean.refusal(tiny_model()) is None


@pytest.mark.parametrize("rows", [1, 2, 7, 64])
def test_packed_linear_equals_linear(rows: int) -> None:
    torch.manual_seed(0)
    weight, bias, x = torch.randn(96, 40), torch.randn(96), torch.randn(rows, 40)
    torch.testing.assert_close(packed_linear(weight, bias)(x), nn.functional.linear(x, weight, bias))
    torch.testing.assert_close(packed_linear(weight)(x), nn.functional.linear(x, weight))


def test_half_precision_without_instructions_for_it_runs_rows_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eagle2.lean.packs", lambda dtype: False)
    monkeypatch.setattr("eagle2.lean.multiplies_halves", lambda: False)
    monkeypatch.setattr("eagle2.lean._for_pairs", lambda weight: None)
    torch.manual_seed(0)
    weight, bias, x = (torch.randn(*size).bfloat16() for size in ((96, 40), (96,), (5, 40)))
    linear = packed_linear(weight, bias)
    assert torch.equal(linear(x), nn.functional.linear(x.float(), weight.float(), bias.float()).bfloat16())
    assert torch.equal(linear(x[:1]), nn.functional.linear(x[:1], weight, bias))
    model = tiny_model().bfloat16()
    assert LeanWeights(model).invariant_rows == 2
    monkeypatch.setattr("eagle2.lean.available_memory", lambda: 2 * sum(p.numel() * 2 for p in model.parameters()))
    assert "MB are free" in (Lean.refusal(model) or "")


@pytest.fixture
def halves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half precision where inputs are not rounded to it: without AVX512-BF16."""
    monkeypatch.setattr("eagle2.lean._for_pairs", lambda weight: None)
    if not multiplies_halves():
        pytest.skip("neither native code nor FBGEMM here")


@pytest.mark.usefixtures("halves")
@pytest.mark.parametrize("size", [1.0, 1e-6, 3e5], ids=["usual", "tiny", "beyond float16"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_half_weights_are_multiplied_without_loss(dtype: torch.dtype, size: float) -> None:
    torch.manual_seed(0)
    if dtype == torch.float16:
        size = min(size, 1e3)
    weight, bias = torch.randn(96, 40) * size, torch.randn(96).to(dtype)
    weight[0, :5] = torch.tensor([0.0, 3.0, 2.0**-9, 2.0**-17, -(2.0**-20)]) * size
    weight = weight.to(torch.bfloat16).to(dtype)
    for rows in (1, 6, 70):
        x = torch.randn(rows, 40)
        linear = half_linear(weight, bias)
        assert linear is not None
        found, exact = linear(x), nn.functional.linear(x.double(), weight.double(), bias.double())
        assert found.dtype == torch.float32
        bound = 40 * 2.0**-24 * (x.abs().double() @ weight.abs().double().T + bias.abs())  # of any order of the sums
        assert ((found - exact).abs() <= bound).all()


@pytest.mark.usefixtures("halves")
def test_weights_that_half_precision_would_change_are_not_stored_in_it() -> None:
    weight = torch.ones(16, 16)
    assert half_linear(weight) is not None
    for odd in (1 + 2.0**-12, float("inf"), float("nan")):
        weight[3, 4] = odd
        assert half_linear(weight) is None
        if odd < 2:  # what runs instead knows the difference
            assert float(lean_linear(weight)(torch.eye(16))[4, 3]) == odd


@pytest.mark.usefixtures("halves")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_models_are_run_in_float32_and_equal_the_model_in_float32(dtype: torch.dtype) -> None:
    """Nothing but the weights is rounded, so both lanes agree as they do in float32, and with ``generate`` in float32."""
    model = tiny_model().to(dtype)
    mine, theirs = Target(model), Target(copy.deepcopy(model).float(), lean=False)
    assert (mine.dtype, mine.arithmetic, mine.fork().feature_dtype) == (dtype, torch.float32, torch.float32)
    said = {"dtype": str(dtype).split(".")[-1], "arithmetic": "float32"}
    assert precision(said) == f"{said['dtype']} (sums in float32)"
    assert precision({"dtype": "float32"} | {"arithmetic": "float32"}) == precision({"dtype": "float32"}) == "float32"
    for one, other in zip(run(mine), run(theirs), strict=True):
        for found, expected in zip(one, other):
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    head = tiny_head(model).to(dtype)
    assert LeanHead(head).dtype == torch.float32


@pytest.mark.usefixtures("halves")
def test_many_rows_use_the_processors_instructions_for_half_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eagle2.lean.packs", lambda dtype: True)
    torch.manual_seed(0)
    weight, x = torch.randn(96, 40).bfloat16(), torch.randn(MOST_ROWS + 1, 40)
    linear = lean_linear(weight)
    assert torch.equal(linear(x), nn.functional.linear(x.bfloat16(), weight).float())
    torch.testing.assert_close(linear(x[1:]), nn.functional.linear(x[1:], weight.float()))


def test_weights_are_those_of_the_model_at_that_time() -> None:
    """A copy is packed: changing the model afterwards does not reach it, making new weights does."""
    model = tiny_model()
    before = Target(model)
    first = before.prefill(PROMPT, 64).logits.clone()
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight.mul_(2)
    torch.testing.assert_close(before.prefill(PROMPT, 64).logits, first)
    changed = Target(model).prefill(PROMPT, 64).logits
    assert (changed - first).abs().max() > 1e-3
    assert LeanWeights(model).heads == model.config.num_attention_heads


# --- the draft head on the same blocks --------------------------------------------------------------------------------


def biased_head() -> EagleHead:
    """A head with all that official ones may have: biases of ``fc`` and of the attention, several key heads."""
    config = replace(HeadConfig.for_target(tiny_model().config), fc_bias=True, attention_bias=True)
    torch.manual_seed(2)
    head = EagleHead(config).eval().requires_grad_(False)
    nn.init.normal_(head.layers[0].post_attention_layernorm.weight, 1.0, 0.2)  # type: ignore[union-attr, arg-type]
    return head


@pytest.mark.parametrize("make", [lambda: tiny_head(tiny_model()), biased_head], ids=["plain", "biases"])
def test_the_lean_head_equals_the_head(make: Callable[[], EagleHead]) -> None:
    """Prompt, a layer of a tree whose rows do not see each other, the next layer, one row that does not see its siblings."""
    head = make()
    heads: list[DraftHead] = [head, LeanHead(head)]
    caches = [each.new_cache(64) for each in heads]
    generator = torch.Generator().manual_seed(0)
    eye = torch.eye(3, dtype=torch.bool)
    sees = [torch.ones(5, 5, dtype=torch.bool).tril(), eye, torch.cat((eye[[0, 0, 2]], eye), 1)]
    sees.append(torch.tensor([[True] + [False] * 2 + [True] + [False] * 2 + [True]]))
    for number, visible in enumerate(sees):
        n = len(visible)
        inputs = torch.randn(2, n, 32, generator=generator)
        positions = torch.arange(n) if number == 0 else torch.full((n,), 4 + number)
        one, other = (each.step(*inputs, positions, visible, cache) for each, cache in zip(heads, caches))
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
        assert (other[0] - head.fc(torch.cat((*inputs,), -1))[0]).abs().max() > 1e-2, "the layer does something"
        if number == 0:
            for cache in caches:
                cache.commit()
    with pytest.raises(ValueError, match="64 rows"):
        heads[1].step(torch.zeros(80, 32), torch.zeros(80, 32), torch.arange(80), torch.ones(80, 80).bool(), caches[1])


@pytest.mark.parametrize("make", [lambda: tiny_head(tiny_model()), biased_head], ids=["plain", "biases"])
def test_rows_whose_outputs_nobody_needs_leave_the_same_keys_and_values(make: Callable[[], EagleHead]) -> None:
    head = LeanHead(make())
    inputs, positions = torch.randn(2, 9, 32), torch.arange(4, 13)
    one, other = (head.new_cache(20) for _ in range(2))
    head.step(*inputs, positions, torch.ones(9, 9).bool().tril(), one)
    assert head.fill(*inputs, positions, other)
    torch.testing.assert_close(other.both[:, :9], one.both[:, :9], rtol=1e-5, atol=1e-5)
    assert (one.rows, one.length) == (other.rows, other.length) == (9, 0)
    head._blocks.layers *= 2  # of these the second sees what comes out of the first
    assert not head.fill(*inputs, positions, other)
    assert other.rows == 9


def test_heads_that_the_lean_blocks_cannot_run_are_refused() -> None:
    config = HeadConfig.for_target(tiny_model().config)
    dynamic = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    for why, odd in {
        "of type dynamic": EagleHead(replace(config, rope=dynamic)),
        "is on meta": EagleHead(config).to("meta"),
    }.items():
        assert why in (LeanHead.refusal(odd) or ""), why
    assert LeanHead.refusal(EagleHead(config)) is None


def test_after_the_prompt_only_the_last_rows_logits_are_computed() -> None:
    target = Target(tiny_model())
    own = Target(tiny_model(), lean=False)
    assert target.prefill(PROMPT, 64).logits.shape == own.prefill(PROMPT, 64).logits.shape == (1, 96)
    runs = target._runs
    runs.reset(64)
    n = len(PROMPT)
    causal = torch.ones(n, n, dtype=torch.bool).tril()
    with torch.inference_mode():
        logits, hidden = runs.forward(torch.tensor(PROMPT), causal, torch.arange(n), logit_rows=1)
    assert logits is not None
    assert (logits.shape, hidden.shape) == ((1, 96), (n, 32))
    torch.testing.assert_close(logits, own.prefill(PROMPT, 64).logits, rtol=1e-4, atol=1e-4)


# --- rows that do not depend on their company -------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("name", "length"), [("llama", 70), ("qwen3", 62)]
)  # 62: the tree lies across a multiple of 64
def test_row_invariant_passes_give_each_row_the_same_bits_alone_and_in_a_tree(
    name: str, length: int, dtype: torch.dtype, native: bool
) -> None:
    model = made(name).to(dtype)
    if not native and dtype != torch.float32 and LeanWeights(model).invariant_rows is None:
        pytest.skip("this processor's kernels for half precision do not allow it")
    target = Target(model, invariant=not native)  # native passes are so without being asked
    assert target.row_invariant
    prompt = [3 + i % 60 for i in range(length)]
    other = target.fork()
    other.prefill(prompt, 128)
    in_tree = other.forward(TREE)
    for node in range(len(TREE)):
        path = [node]
        while path[0]:
            path.insert(0, TREE.parents[path[0]])
        target.prefill(prompt, 128)
        for row in path:
            alone = target.forward(DraftTree.root_only(int(TREE.token_ids[row])))
            target.commit((0,))
        assert torch.equal(alone.logits[0], in_tree.logits[node]), node
        assert torch.equal(alone.hidden[0], in_tree.hidden[node]), node


@pytest.mark.parametrize("name", FAMILIES)
def test_products_in_bfloat16_are_said_to_be(name: str, native: bool) -> None:
    found = library()
    pairs = native and found is not None and bool(found.eagle2_pairs())
    target = Target(made(name).bfloat16())
    assert (target.arithmetic == torch.bfloat16) is (pairs or not multiplies_halves())
    if pairs:
        assert (target.forward_name, target.feature_dtype, target.row_invariant) == ("native", torch.float32, True)
        assert precision({"dtype": "bfloat16", "arithmetic": "bfloat16"}) == "bfloat16"


def test_row_invariant_passes_equal_the_models_own() -> None:
    model = made("llama")
    for mine, theirs in zip(run(Target(model, invariant=True)), run(Target(model, lean=False)), strict=True):
        for one, other in zip(mine, theirs):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


@torch.inference_mode()
def test_padding_makes_up_for_kernels_that_differ_by_the_number_of_rows() -> None:
    """As on processors that run 1 to 3 rows by another kernel than 4 and more."""
    weights = LeanWeights(made("llama"))
    weights.native = None
    plain = weights.lm_head
    weights.lm_head = lambda x: plain(x) if len(x) % 4 == 0 else plain(x) + 1e-3
    assert weights.invariant_rows == 4
    lean = Lean(weights, invariant=True)
    lean.reset(64)
    one, three = (
        lean.forward(torch.arange(9, 9 + n), torch.eye(n).bool(), torch.zeros(n).long(), logit_rows=n)[0]
        for n in (1, 3)
    )
    assert one is not None
    assert three is not None
    assert (one.shape, three.shape) == ((1, 96), (3, 96))
    assert torch.equal(one[0], three[0])
    never = LeanWeights(made("llama"))
    never.native = None
    never.lm_head = lambda x: plain(x) + len(x)
    with pytest.raises(ValueError, match="depend on the other rows"):
        Lean(never, invariant=True)


def test_row_invariance_needs_the_lean_forward() -> None:
    with pytest.raises(ValueError, match="need the lean forward, and GPTNeoXForCausalLM is not of"):
        Target(MODELS["gpt-neox"](), invariant=True)
