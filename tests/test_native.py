"""The compiled products and passes: right for all shapes, the same bits in any company, and never needed."""

from __future__ import annotations

import copy
import logging
import math
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from eagle2 import native
from eagle2.engine import Engine, Settings
from eagle2.generate import Step
from eagle2.lean import LeanWeights
from eagle2.native import NativeError, NativeLayers, NativeLinear, library
from eagle2.target import Target
from eagle2.tree import DraftTree
from tests.test_target import PROMPT, TREE, path
from tests.tiny import byte_tokenizer, tiny_head, tiny_model

LIBRARY: Any = library()
needs_native = pytest.mark.skipif(LIBRARY is None, reason="no native code here")
PAIRS = LIBRARY is not None and bool(LIBRARY.eagle2_pairs())
needs_pairs = pytest.mark.skipif(not PAIRS, reason="no products in bfloat16 here, which need AVX512-BF16")


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_it_is_there_wherever_it_can_be() -> None:
    able = native._processor_flags().issuperset(native.NEEDS) and (shutil.which("cc") or shutil.which("gcc"))
    if not able or os.environ.get("EAGLE2_NATIVE") == "0":
        pytest.skip("this machine cannot compile it")
    native._check(native._load(native._compiled()))  # raises with the reason
    assert LIBRARY is not None


@needs_native
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize(("outputs", "inputs"), [(96, 40), (17, 1), (5, 1100), (64, 512)])
def test_products(outputs: int, inputs: int, dtype: torch.dtype) -> None:
    """More inputs than are summed at a visit, more rows than one reading of the weights serves, panels that are not full."""
    torch.manual_seed(0)
    weight, bias = torch.randn(outputs, inputs).to(dtype), torch.randn(outputs)
    linear, biased = NativeLinear(LIBRARY, weight), NativeLinear(LIBRARY, weight, bias, 0.25)
    for rows in (0, 1, 5, 6, 7, 13, 200):
        x = torch.randn(rows, inputs)
        exact = x.double() @ weight.double().T
        bound = (inputs + 4) * 2.0**-24 * (x.abs().double() @ weight.abs().double().T + bias.abs())
        assert ((linear(x) - exact).abs() <= bound).all()
        assert ((biased(x) - (exact / 4 + bias)).abs() <= bound).all()


@needs_native
def test_a_rows_product_has_the_same_bits_in_any_company(threads: None) -> None:
    torch.manual_seed(0)
    linear, x = NativeLinear(LIBRARY, torch.randn(96, 600).half()), torch.randn(100, 600)
    together = linear(x)
    for rows in (1, 2, 3, 5, 7, 12, 31):
        assert torch.equal(linear(x[:rows]), together[:rows])
    torch.set_num_threads(1)
    assert torch.equal(linear(x), together)


@needs_native
def test_products_take_rows_as_they_come_and_refuse_others() -> None:
    linear = NativeLinear(LIBRARY, torch.randn(16, 8))
    x = torch.randn(8, 3).double().T
    torch.testing.assert_close(linear(x), linear(x.float().contiguous()))
    with pytest.raises(ValueError, match="rows of 8 numbers"):
        linear(torch.randn(3, 9))
    with pytest.raises(ValueError, match="no native products of weights"):
        NativeLinear(LIBRARY, torch.randn(4, 4).double())
    with pytest.raises(ValueError, match="float16 with inputs in bfloat16"):
        NativeLinear(LIBRARY, torch.randn(4, 4).half(), pairs=True)
    if not PAIRS:
        with pytest.raises(ValueError, match="bfloat16 with inputs in bfloat16"):
            NativeLinear(LIBRARY, torch.randn(4, 4).bfloat16())


@needs_native
def test_eight_bits_per_weight_round_each_output_by_its_own_scale() -> None:
    torch.manual_seed(0)
    weight, bias = torch.randn(37, 600) * torch.logspace(-20, 20, 37)[:, None], torch.randn(37)
    weight[5] = 0
    scales = weight.abs().amax(-1) / 127
    linear = NativeLinear.rounded(LIBRARY, weight, bias)
    stored = torch.where(scales[:, None] > 0, (weight / scales[:, None]).round() * scales[:, None], 0.0)
    assert ((stored - weight).abs() <= 0.51 * scales[:, None]).all()
    for rows in (1, 3, 6, 8, 20):
        x = torch.randn(rows, 600)
        exact = (x.bfloat16() if PAIRS else x).double() @ stored.double().T + bias
        bound = 610 * 2.0**-24 * (x.abs().double() @ stored.abs().double().T + bias.abs())
        assert ((linear(x) - exact).abs() <= bound).all()
        assert torch.equal(linear(x[:1]), linear(x)[:1])


@needs_native
def test_drafts_with_eight_bits_per_weight_leave_the_output_as_it_is() -> None:
    tokenizer = byte_tokenizer()
    model = tiny_model(vocab_size=len(tokenizer))
    head = tiny_head(model).with_draft_tokens(torch.arange(3, 200))
    settings = Settings(max_new_tokens=40, depth=3, top_k=3, total_tokens=8)
    made = [
        Engine(model, tokenizer, head, name="tiny", head_name="tiny", costs=None, exact_draft=exact)
        for exact in (False, True)
    ]
    assert [engine.metadata(settings)["draft_weights"] for engine in made] == ["int8", "float32"]
    steps = [[item for item in engine.run([5, 6, 7], settings) if isinstance(item, Step)] for engine in made]
    ids = [[token for step in run for token in step.emitted] for run in steps]
    plain = [token for item in made[0].run([5, 6, 7], settings, drafted=False) if isinstance(item, Step)
             for token in item.emitted]  # fmt: skip
    assert ids[0] == ids[1] == plain
    one, other = (run[0].proposal.expanded for run in steps)
    assert not torch.equal(one.confidence, other.confidence)
    torch.testing.assert_close(one.confidence[:4], other.confidence[:4], rtol=0.05, atol=0.005)


@needs_native
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("threads_", [1, 2, 3, 7])
def test_passes_have_the_same_bits_for_any_number_of_threads(threads: None, threads_: int, dtype: torch.dtype) -> None:
    def logits() -> Tensor:
        target = Target(tiny_model(head_dim=16).to(dtype))
        assert target.forward_name == "native"
        target.prefill(PROMPT, 64)
        return target.forward(TREE).logits

    before = logits()
    torch.set_num_threads(threads_)
    assert torch.equal(logits(), before)


@needs_pairs
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8])
@pytest.mark.parametrize(("outputs", "inputs"), [(96, 40), (17, 1), (5, 1101), (64, 576)])
def test_products_in_pairs(outputs: int, inputs: int, dtype: torch.dtype, threads: None) -> None:
    """Inputs are rounded to bfloat16, their products are exact, and a row's bits do not depend on its company."""
    torch.manual_seed(0)
    weight, bias = (torch.randn(outputs, inputs) * 40).to(dtype), torch.randn(outputs)
    linear = NativeLinear(LIBRARY, weight, bias, 0.25, pairs=True)
    for rows in (0, 1, 2, 5, 6, 7, 11, 12, 13, 200):
        x = torch.randn(rows, inputs)
        exact = x.bfloat16().double() @ weight.double().T
        bound = (inputs + 4) * 2.0**-24 * (x.abs().double() @ weight.abs().double().T + bias.abs())
        found = linear(x)
        assert ((found - (exact / 4 + bias)).abs() <= bound).all()
        assert torch.equal(linear(x[:1]), found[:1])
        torch.set_num_threads(1 + rows % 2)
        assert torch.equal(linear(x), found)


def in_pairs(**changes: Any) -> Any:
    return tiny_model(hidden_size=64, vocab_size=500, **changes).bfloat16()


@needs_pairs
@pytest.mark.parametrize("size", [16, 80, 128])
def test_attention_in_pairs(size: int) -> None:
    """Panels of slots that are full, begun and gathered along paths; more queries than share a reading of the keys."""
    model = in_pairs(num_attention_heads=8, num_key_value_heads=2, head_dim=size)
    prompt = [1 + (7 * i) % 490 for i in range(77)]
    parents = (-1, *((node - 1) // 2 for node in range(1, 40)))
    tree = DraftTree(torch.arange(40) * 7 % 490, parents, torch.ones(40), torch.zeros(40))

    def passes(target: Target) -> Tensor:
        return torch.cat((target.prefill(prompt, 200).hidden, target.forward(tree).hidden)).float()

    mine = Target(model)
    assert (mine.forward_name, mine.arithmetic, mine.feature_dtype) == ("native", torch.bfloat16, torch.float32)
    truth = passes(Target(copy.deepcopy(model).float(), lean=False))
    assert (passes(mine) - truth).abs().mean() < (passes(Target(model, lean=False)) - truth).abs().mean()
    in_tree = mine.forward(tree)
    for node in (0, 1, 6, 39):
        mine.prefill(prompt, 200)
        for row in path(tree, node):
            alone = mine.forward(DraftTree.root_only(int(tree.token_ids[row])))
            mine.commit((0,))
        assert torch.equal(alone.logits[0], in_tree.logits[node]), node


@needs_pairs
@pytest.mark.parametrize("length", [3, 13, 16, 30])
def test_what_is_kept_of_a_pass_in_pairs_is_as_if_it_had_been_the_prompt(length: int) -> None:
    """The kept slots move within a panel and into another one; a cache that has grown holds the same."""
    target = Target(in_pairs(head_dim=32))
    prompt = [3 + i % 60 for i in range(length)]
    for rows in ((0,), (0, 2, 5), (0, 1, 4, 6)):
        target.prefill(prompt, length + 8)
        target.forward(TREE)
        target.commit(rows)
        text = [*prompt, *(int(TREE.token_ids[row]) for row in rows)]
        found = target.extend([9, 8, 7], length + 60)
        fresh = target.fork()
        fresh.prefill(text, length + 60)
        again = fresh.extend([9, 8, 7], length + 60)
        assert torch.equal(found.logits, again.logits)
        assert torch.equal(found.hidden, again.hidden)


@needs_pairs
def test_numbers_that_are_none_and_old_ones_behind_the_prefix_do_not_spread_in_pairs() -> None:
    model = in_pairs(head_dim=16)
    target = Target(model)
    clean = target.prefill(PROMPT, 64).logits.clone()
    for name in ("self_attn.q_proj", "input_layernorm"):  # scores alone, then all that follows
        broken = copy.deepcopy(model)
        with torch.no_grad():
            broken.get_submodule(f"model.layers.0.{name}").weight.view(-1)[3] = float("nan")
        assert torch.isnan(Target(broken).prefill(PROMPT, 64).logits).all()
    runs: Any = target._runs
    with torch.inference_mode():
        runs._kv.fill_(float("nan"))  # what a longer sequence may have left
    assert torch.equal(target.prefill(PROMPT, 64).logits, clean)
    assert torch.isfinite(target.forward(TREE).logits).all()


@needs_pairs
def test_a_cache_that_passes_in_pairs_cannot_use_is_refused() -> None:
    weights = LeanWeights(in_pairs(head_dim=16))
    run = weights.native
    assert run is not None
    x, turns, sees = torch.zeros(3, weights.width), weights.turns(torch.arange(3)), torch.ones(3, 3).bool().tril()
    shape = (len(weights.layers), 2 * weights.kv_heads, 32, weights.head_dim)
    assert run.new_cache(17).shape == shape
    run.run(x.clone(), turns, sees, torch.zeros(shape), 3)  # float32 is no pairs, and will do
    for wrong in (torch.zeros(shape).half(), torch.zeros(shape).bfloat16()[:, :, :17]):
        with pytest.raises(ValueError, match="cannot be used here"):
            run.run(x, turns, sees, wrong, 3)
    narrow = LeanWeights(in_pairs(head_dim=8)).native  # a head is less than a panel
    assert narrow is not None
    assert narrow.new_cache(17).dtype == torch.float32
    with pytest.raises(ValueError, match="cannot be used here"):
        narrow.run(x, torch.ones(3, 4).cfloat(), sees, torch.zeros(*shape[:3], 8).bfloat16(), 3)


@needs_native
def test_attention_over_several_blocks_of_queries_and_keys() -> None:
    """More rows than share a reading of the keys, on a prompt that is no multiple of a vector, with heads of 128."""
    model = tiny_model(hidden_size=256, num_attention_heads=8, num_key_value_heads=1, head_dim=128, vocab_size=500)
    prompt = [1 + (7 * i) % 490 for i in range(77)]
    parents = (-1, *((node - 1) // 2 for node in range(1, 40)))
    tree = DraftTree(torch.arange(40) * 7 % 490, parents, torch.ones(40), torch.zeros(40))

    def passes(target: Target) -> Tensor:
        return torch.cat((target.prefill(prompt, 200).logits, target.forward(tree).logits))

    assert Target(model).forward_name == "native"
    mine, own = passes(Target(model)), passes(Target(model, lean=False))
    truth = passes(Target(copy.deepcopy(model).double(), lean=False))
    assert (mine - truth).abs().mean() <= 1.5 * (own - truth).abs().mean()
    assert (mine - truth).abs().max() <= 1e-3


@needs_native
def test_large_and_missing_numbers_go_through() -> None:
    """Scores beyond the exponential's range, and NaN, which must not turn into a token."""
    model = tiny_model()
    with torch.no_grad():
        model.model.layers[0].self_attn.q_proj.weight.mul_(3e3)
        model.model.layers[0].mlp.gate_proj.weight.mul_(1e4)
    mine, own = (Target(model, lean=lean).prefill(PROMPT, 64).logits for lean in (True, False))
    assert torch.isfinite(mine).all()
    torch.testing.assert_close(mine, own, rtol=1e-3, atol=1e-3)
    for name in ("self_attn.q_proj", "input_layernorm"):  # scores alone, then all that follows
        broken = copy.deepcopy(model)
        with torch.no_grad():
            broken.get_submodule(f"model.layers.0.{name}").weight.view(-1)[3] = float("nan")
        assert torch.isnan(Target(broken).prefill(PROMPT, 64).logits).all()


@needs_native
def test_odd_shapes_run_on_torchs_operations() -> None:
    narrow, odd = tiny_model(intermediate_size=50), tiny_model(hidden_size=36, num_attention_heads=3, head_dim=12)
    for model, why in ((narrow, "multiple of 16"), (odd, "multiples of 8")):
        weights = LeanWeights(model)
        assert weights.native is None
        assert why in (NativeLayers.refusal(weights.layers, weights.head_dim) or "")
        assert Target(model).forward_name == "lean"
        with pytest.raises(ValueError, match=why):
            NativeLayers(weights.layers, heads=2, kv_heads=1, head_dim=weights.head_dim, eps=1e-6)
    other = [SimpleNamespace(qkv=nn.Identity(), out=None, gate_up=None, down=None)]
    assert "not native" in (NativeLayers.refusal(other, 8) or "")


@needs_native
def test_a_pass_of_the_wrong_shape_is_refused_before_it_writes_anywhere() -> None:
    weights = LeanWeights(tiny_model())
    run, size = weights.native, weights.head_dim
    assert run is not None
    kv = torch.zeros(len(weights.layers), 2 * weights.kv_heads, 8, size)
    x, turns, sees = torch.zeros(3, weights.width), weights.turns(torch.arange(3)), torch.ones(3, 3).bool().tril()
    run.run(x.clone(), turns, sees, kv, 3)
    for wrong in (
        (x, turns, sees, kv, 9),  # beyond the cache
        (x, turns, sees, kv, 2),  # fewer slots than rows
        (x[:2], turns, sees, kv, 3),
        (x, turns[:2], sees, kv, 3),
        (x, turns, sees, kv[:1], 3),
        (x, turns, sees, kv[..., :-1], 3),
        (x.double(), turns, sees, kv, 3),
        (x.T.contiguous().T, turns, sees, kv, 3),
        (x, turns, sees[:, :2], kv, 3),
        (x, turns, sees.long(), kv, 3),
        (x, turns.real, sees, kv, 3),
    ):
        with pytest.raises(ValueError, match="pass"):
            run.run(*wrong)


@pytest.mark.parametrize("here", [pytest.param(True, marks=needs_native), False], ids=["native", "torch"])
def test_the_highest_of_a_row(here: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not here:
        monkeypatch.setattr(native, "library", lambda: None)
    torch.manual_seed(0)
    for rows, n, k in ((1, 1, 1), (3, 5, 5), (2, 8, 3), (7, 1001, 10), (4, 8192, 64), (0, 9, 2)):
        x = torch.randn(rows, n) * 10
        for softmax in (False, True):
            values, ids = native.top(x, k, softmax=softmax)
            expected = (x.double().log_softmax(-1) if softmax else x.double()).topk(k, -1)
            assert ids == expected.indices.tolist()
            torch.testing.assert_close(
                torch.tensor(values).view(rows, k), expected.values.float(), rtol=1e-5, atol=2e-6
            )
    tied = torch.zeros(2, 50)
    tied[1, 20] = tied[1, 40] = 1
    assert native.top(tied, 1)[1] == [[0], [20]]
    few = torch.full((1, 50), -torch.inf)  # a masked vocabulary
    few[0, 33] = 2.0
    values, ids = native.top(few, 3, softmax=True)
    assert (values[0][0], ids[0][0], len(set(ids[0]))) == (0.0, 33, 3)
    assert values[0][1] == values[0][2] == -torch.inf
    for odd in (torch.nan, torch.inf):
        for at in (0, 13, 49):
            x = torch.randn(2, 50)
            x[1, at] = odd
            for softmax in (False, True):
                values, _ = native.top(x, 2, softmax=softmax)
                assert math.isfinite(values[0][0])
                assert not math.isfinite(values[1][0]), (odd, at, softmax)
    assert not math.isfinite(native.top(torch.full((1, 50), -torch.inf), 1)[0][0][0])


@pytest.mark.parametrize("here", [pytest.param(True, marks=needs_native), False], ids=["native", "torch"])
def test_how_many_are_above(here: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not here:
        monkeypatch.setattr(native, "library", lambda: None)
    torch.manual_seed(0)
    for n in (1, 7, 8, 1003):
        x = torch.randn(4, n).round(decimals=1)  # some are equal
        x[2, n // 2] = -torch.inf
        rows, columns = [0, 3, 2, 2, 0], [0, n - 1, n // 2, 0, n // 3]
        assert native.above(x, rows, columns) == [int((x[r] > x[r, c]).sum()) for r, c in zip(rows, columns)]
        assert native.above(x.T.contiguous().T, rows, columns) == native.above(x, rows, columns)
    assert native.above(x, [], []) == []
    for row, column in ((4, 0), (0, 1003), (-1, 0), (0, -1)):
        with pytest.raises(ValueError, match="does not lie within 4 x 1003"):
            native.above(x, [row], [column])


@needs_native
def test_no_more_than_there_is_can_be_highest() -> None:
    for k in (0, 6):
        with pytest.raises(ValueError, match="between 1 and 5"):
            native.top(torch.zeros(2, 5), k)


# --- where it cannot be had ---------------------------------------------------------------------------------------------


def compiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("EAGLE2_CACHE", str(tmp_path))
    return native._compiled()


needs_compiler = pytest.mark.skipif(
    not native._processor_flags().issuperset(native.NEEDS) or not shutil.which("cc"), reason="nothing to compile with"
)


@needs_compiler
def test_it_is_compiled_once_and_only_this_user_may_have_written_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = compiled(monkeypatch, tmp_path)
    made = path.stat().st_mtime_ns
    assert [each.suffix for each in sorted(path.parent.iterdir())] == [".lock", ".so"]
    assert compiled(monkeypatch, tmp_path).stat().st_mtime_ns == made
    path.chmod(path.stat().st_mode | stat.S_IWOTH)
    with pytest.raises(NativeError, match="others than this user"):
        compiled(monkeypatch, tmp_path)


@needs_compiler
def test_a_compiler_that_fails_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(native, "FLAGS", ("--no-such-flag",))
    with pytest.raises(NativeError, match=r"failed: .*no-such-flag"):
        compiled(monkeypatch, tmp_path)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(NativeError, match="no C compiler"):
        compiled(monkeypatch, tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(NativeError, match="cannot be used"):
        compiled(monkeypatch, tmp_path / "file")


def test_other_machines_are_left_alone(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.delenv("EAGLE2_NATIVE", raising=False)
    monkeypatch.setattr(native.platform, "machine", lambda: "aarch64")
    monkeypatch.setattr(native, "_compiled", pytest.fail)
    with caplog.at_level(logging.INFO):
        assert library.__wrapped__() is None
    assert "no x86-64 Linux machine with avx2" in caplog.text
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_what_cannot_be_loaded_or_is_wrong_is_not_used(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "bad.so").write_bytes(b"no library")
    monkeypatch.delenv("EAGLE2_NATIVE", raising=False)
    monkeypatch.setattr(native, "_compiled", lambda: tmp_path / "bad.so")
    monkeypatch.setattr(native, "_processor_flags", lambda: frozenset(native.NEEDS))
    assert library.__wrapped__() is None
    (said,) = caplog.messages
    assert said.startswith("no native code: what was compiled cannot be loaded")
    assert said.endswith("Decoding runs on torch's operations, at about half of the speed.")
    if LIBRARY is not None:
        monkeypatch.setattr(NativeLinear, "few", lambda self, x: torch.zeros(len(x), self.outputs))
        with pytest.raises(NativeError, match="wrong results"):
            native._check(LIBRARY)


def test_it_can_be_turned_off() -> None:
    code = (
        "import torch\n"
        "from eagle2.target import Target\n"
        "from tests.tiny import tiny_model\n"
        "print(Target(tiny_model()).forward_name)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"EAGLE2_NATIVE": "0"}, capture_output=True, text=True,
        check=True, timeout=120, cwd=Path(__file__).parent.parent,
    )  # fmt: skip
    assert done.stdout.strip() == "lean"
