"""The drafter on the device: the very proposals of `EagleDrafter`, ties included, without asking the host on the way."""

from __future__ import annotations

import dataclasses
import gc
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from eagle2.device import DeviceEagleDrafter
from eagle2.draft import Proposal
from eagle2.eagle import EagleDrafter, TreeSettings
from eagle2.engine import Engine, Settings
from eagle2.generate import Prefill, Step, Stops, generate
from eagle2.graphs import GraphForward
from eagle2.head import EagleHead
from eagle2.lean import Lean
from eagle2.target import PREFILL_CHUNK, Target
from eagle2.verify import NonFiniteLogitsError, SamplingParams
from tests.static_shapes import Watch, replayed
from tests.tiny import byte_tokenizer, reference, tiny_head, tiny_model

PROMPT = [5, 9, 41, 33, 8, 20]
SIZES = [(6, 10, 59), (3, 4, 5), (1, 3, 3), (2, 5, 12), (4, 1, 4), (2, 64, 512), (5, 3, 200), (1, 1, 1)]


def models(**changes: Any) -> tuple[Any, EagleHead]:
    """In float64 the passes' different shapes cannot change a float32 value, so that trees can be compared exactly."""
    model = tiny_model(**changes)
    return model.double(), tiny_head(model).double()


def tie(model: Any) -> None:
    """Tokens 3j, 3j + 1 and 3j + 2 become one: their logits, and all that follows them, are equal."""
    with torch.no_grad():
        weight = model.get_input_embeddings().weight
        weight.copy_(weight[torch.arange(len(weight)) // 3 * 3])


def run(target: Target, drafter: Any, count: int = 16, prompt: list[int] = PROMPT) -> list[Step]:
    items = generate(target, drafter, prompt, sampling=SamplingParams(), stops=Stops(count))
    return [item for item in items if isinstance(item, Step)]


def same(one: Proposal, other: Proposal) -> None:
    assert (one.kept, one.selected) == (other.kept, other.selected)
    for tree, twin in ((one.expanded, other.expanded), (one.verified, other.verified)):
        assert tree.parents == twin.parents
        assert torch.equal(tree.token_ids, twin.token_ids)
        torch.testing.assert_close(tree.confidence, twin.confidence)
        torch.testing.assert_close(tree.log_value, twin.log_value)
        assert torch.equal(tree.ancestor_mask(), twin.ancestor_mask())
        assert torch.equal(tree.depth_ids(), twin.depth_ids())


def be_sure(model: Any) -> None:
    """Confidences of exactly 1: a child's value ties with its parent's."""
    with torch.no_grad():
        model.lm_head.weight.mul_(1000)


@pytest.mark.parametrize("kind", ["plain", "ties", "sure", "reduced", "reduced, ties"])
@pytest.mark.parametrize(("depth", "top_k", "total"), SIZES)
def test_proposals_are_those_of_the_eagle_drafter(
    depth: int, top_k: int, total: int, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the end of the run, where there is room for fewer layers and nodes than the settings have."""
    if kind != "plain":
        replayed(monkeypatch)
    model, head = models(vocab_size=48, tie_word_embeddings=kind != "sure")
    if "ties" in kind:
        tie(model)
    if kind == "sure":
        be_sure(model)
    if "reduced" in kind:
        head.with_draft_tokens(torch.tensor([*range(3, 30), 44]))
    settings, target = TreeSettings("dynamic", depth, top_k, total), Target(model, lean=False)
    # Both by torch's topk, which leaves the order of equals open.
    monkeypatch.setattr("eagle2.native.library", lambda: None)
    expected = run(target, EagleDrafter(head, target, settings), count=9)
    made = run(target, DeviceEagleDrafter(head, target, settings), count=9)
    assert len(made) == len(expected) >= 3
    for step, twin in zip(made, expected):
        assert step.emitted == twin.emitted
        same(step.proposal, twin.proposal)
    tree = made[0].proposal.expanded
    if "ties" in kind and top_k > 1:
        assert len(tree.log_value.unique()) <= len(tree) / 2
    if kind == "sure" and depth > 1:
        assert any(
            tree.log_value[node] == tree.log_value[parent] for node, parent in enumerate(tree.parents) if parent > 0
        )


@pytest.mark.parametrize("max_nodes", [1, 2, 7, 512])
@pytest.mark.parametrize("max_depth", [1, 2, 3, 9])
def test_limits_cut_the_tree_as_they_do_there(max_depth: int, max_nodes: int) -> None:
    model, head = models()
    target, settings = Target(model, lean=False), TreeSettings("dynamic", 3, 4, 12)
    hidden = target.prefill(PROMPT, 64).hidden
    made = []
    for kind in (DeviceEagleDrafter, EagleDrafter):
        drafter = kind(head, target, settings)
        drafter.reset(64)
        drafter.observe(PROMPT, hidden)
        made.append(drafter.propose(7, max_depth, max_nodes))
    same(*made)


def test_no_room_drafts_nothing_and_the_next_step_catches_up() -> None:
    model, head = models()
    target, settings = Target(model, lean=False), TreeSettings("dynamic", 3, 4, 12)
    hidden = target.prefill([*PROMPT, 7], 64).hidden
    made = []
    for kind in (DeviceEagleDrafter, EagleDrafter):
        drafter = kind(head, target, settings)
        drafter.reset(64)
        drafter.observe(PROMPT, hidden[:6])
        assert drafter.propose(7, 0, 9).kept == drafter.propose(7, 9, 0).kept == ()
        drafter.observe([7], hidden[6:])
        made.append(drafter.propose(8, 9, 99))
    same(*made)


def test_a_long_prompt_is_fed_in_chunks() -> None:
    model, head = models(max_position_embeddings=1024)
    prompt = [3 + i * i % 90 for i in range(PREFILL_CHUNK + 70)]  # the second chunk is wider than any graph
    target, settings = Target(model, lean=False), TreeSettings("dynamic", 3, 4, 12)
    for step, twin in zip(
        run(target, DeviceEagleDrafter(head, target, settings), prompt=prompt),
        run(target, EagleDrafter(head, target, settings), prompt=prompt),
        strict=True,
    ):
        same(step.proposal, twin.proposal)


def test_with_the_static_target_in_float32_the_ids_are_the_models_own(monkeypatch: pytest.MonkeyPatch) -> None:
    replayed(monkeypatch)
    model = tiny_model()
    settings = Settings(depth=6, top_k=10, total_tokens=59, max_new_tokens=40)
    target = Target(model)
    target._runs = GraphForward.of(model)
    drafter = DeviceEagleDrafter(tiny_head(model), target, settings.tree_settings)
    items = generate(target, drafter, PROMPT, sampling=SamplingParams(), stops=Stops(40, frozenset({2})))
    ids = [t for item in items for t in ((item.token,) if isinstance(item, Prefill) else item.emitted)]
    assert ids == reference(model, PROMPT, 40)


def test_forks_share_weights_and_a_new_run_takes_over_the_buffers_of_one_that_is_gone() -> None:
    model, head = models()
    target, settings = Target(model, lean=False), TreeSettings("dynamic", 3, 4, 12)
    parent = DeviceEagleDrafter(head, target, settings)
    first, second = parent.fork(), parent.fork()
    expected = run(target, first)
    hidden = target.prefill(PROMPT, 64).hidden
    for drafter in (first, second):
        drafter.reset(64)
        drafter.observe(PROMPT, hidden)
    second.observe([4, 4], hidden[:2])
    made = first.propose(expected[0].proposal.expanded.token_ids[0].item(), 9, 99)
    second.propose(5, 9, 99)
    same(made, expected[0].proposal)
    assert first._buffers is not second._buffers is not None
    left = first._buffers
    assert left is not None
    with torch.inference_mode():
        for buffer in (left.keys, left.values, left.features):  # what padding rows see must not matter either
            buffer.fill_(float("nan"))
    del first, drafter
    gc.collect()
    third = parent.fork()
    for step, twin in zip(run(target, third), expected, strict=True):
        same(step.proposal, twin.proposal)
    assert third._buffers is left


def test_a_step_asks_the_host_once_and_its_shapes_depend_on_no_value(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the meta device, which has no values; the step's one transfer is given in their place."""
    model = tiny_model().to("meta")
    head = tiny_head(tiny_model()).with_draft_tokens(torch.arange(3, 60)).to("meta")
    target = Target(model, lean=False)
    settings = TreeSettings("dynamic", 3, 2, 4)
    drafter = DeviceEagleDrafter(head, target, settings)
    drafter.reset(64)
    read: list[int] = []

    def transfer(plain: Tensor) -> list[int]:
        read.append(len(plain))
        return [1, 1, 2, 3, 4, *(1, 2), *(3, 4)]  # finite; kept; fed

    monkeypatch.setattr(drafter, "_read", transfer)
    with Watch(monkeypatch) as watch:
        for rows, root in ((6, 7), (2, 8), (7, 9)):
            drafter.observe([5] * rows, torch.empty(rows, 32, device="meta"))
            proposal = drafter.propose(root, 3, 4)
    assert read == [9, 9, 9]
    assert proposal.selected == ((1, 2), (3, 4))
    assert proposal.verified.ancestor_mask().device.type == proposal.verified.depth_ids().device.type == "meta"
    assert [key for key, _ in watch.calls] == [8, "expansion"] * 3
    catch_up, expansion = watch.calls[0][1], watch.calls[1][1]
    assert all(operations == catch_up for _, operations in watch.calls[::2])
    assert all(operations == expansion for _, operations in watch.calls[1::2])
    assert len(expansion) > 100


def test_what_it_cannot_grow_is_refused() -> None:
    model = tiny_model()
    head, target = tiny_head(model), Target(model)
    for settings in (TreeSettings("static"), TreeSettings(depth="auto"), TreeSettings(total_tokens="auto")):
        with pytest.raises(ValueError, match="dynamic trees of fixed size"):
            DeviceEagleDrafter(head, target, settings)
    drafter = DeviceEagleDrafter(head, target, TreeSettings())
    with pytest.raises(ValueError, match="feature"):
        drafter.observe([1, 2], None)
    with pytest.raises(ValueError, match="nothing was observed"):
        drafter.propose(4, 3, 3)
    drafter.reset(8)
    drafter.observe([5] * 300, torch.zeros(300, 32))
    with pytest.raises(ValueError, match="cache has 256 rows, this pass needs 300"):
        drafter.propose(4, 3, 3)


def test_logits_that_are_not_numbers_are_named_with_their_step() -> None:
    model = tiny_model()
    head, target = tiny_head(model), Target(model)
    drafter = DeviceEagleDrafter(head, target, TreeSettings("dynamic", 3, 4, 5))
    items = generate(target, drafter, PROMPT, sampling=SamplingParams(), stops=Stops(30))
    next(items)
    next(items)
    nn.init.constant_(head.fc.weight, float("nan"))
    with pytest.raises(NonFiniteLogitsError, match="draft head gave logits that are not numbers at step 2"):
        next(items)


def test_the_engine_takes_it_on_gpus_for_dynamic_trees_of_fixed_size(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = byte_tokenizer()
    model = tiny_model(vocab_size=len(tokenizer), max_position_embeddings=256)
    head = tiny_head(model)
    settings = Settings(max_new_tokens=12, depth=3, top_k=4, total_tokens=9)
    assert "on cpu" in (DeviceEagleDrafter.refusal(head, settings.tree_settings) or "")
    plain = Engine(model, tokenizer, head, name="tiny", head_name="tiny", costs=None)
    assert isinstance(plain.drafter(settings, plain.target), EagleDrafter)
    expected = plain.trace("hello", settings)

    monkeypatch.setattr(GraphForward, "refusal", staticmethod(lambda model: Lean.refusal(model, copies=False)))
    monkeypatch.setattr(DeviceEagleDrafter, "refusal", staticmethod(lambda head, settings: None))
    engine = Engine(model, tokenizer, head, name="tiny", head_name="tiny", costs=None)
    one, other = (engine.drafter(settings, engine.target) for _ in range(2))
    assert isinstance(one, DeviceEagleDrafter)
    assert isinstance(other, DeviceEagleDrafter)
    assert one._shelf is other._shelf
    bigger = engine.drafter(dataclasses.replace(settings, top_k=5), engine.target)
    assert isinstance(bigger, DeviceEagleDrafter)
    assert bigger.top_k == 5
    metadata = engine.metadata(settings)
    assert metadata["forward"] == metadata["draft_forward"] == "static shapes without graphs: cpu has none"
    assert engine.trace("hello", settings).output_ids == expected.output_ids
    *_, last = engine.race("hello", settings)
    assert last.eagle2.token_ids == last.autoregressive.token_ids == list(expected.output_ids)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({}, None),
        ({"kind": "static"}, "not a dynamic one"),
        ({"depth": "auto"}, "not a dynamic one"),
        ({"rope_type": "dynamic"}, "rotary embedding is of type dynamic"),
    ],
)
def test_when_it_is_not_taken_on_a_gpu(change: dict[str, Any], why: str | None) -> None:
    config = dataclasses.replace(tiny_head(tiny_model()).config, rope={"rope_type": change.pop("rope_type", "default")})
    head: Any = SimpleNamespace(config=config, fc=SimpleNamespace(weight=SimpleNamespace(device=torch.device("cuda"))))
    assert (why or "None") in str(DeviceEagleDrafter.refusal(head, TreeSettings(**change)))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_on_a_gpu_target_and_drafter_are_captured_and_change_no_token() -> None:
    tokenizer = byte_tokenizer()
    model = tiny_model(vocab_size=len(tokenizer), max_position_embeddings=1024)
    settings = Settings(max_new_tokens=100, depth=6, top_k=10, total_tokens=59)
    expected = reference(model, prompt := [3 + i % 90 for i in range(300)], 100)
    engine = Engine(model.cuda(), tokenizer, tiny_head(model).cuda(), name="tiny", head_name="tiny", costs=None)
    for _ in range(2):  # the second run replays what the first one captured
        items = engine.run(prompt, settings)
        ids = [t for item in items for t in ((item.token,) if isinstance(item, Prefill) else item.emitted)]
        assert ids == expected
    metadata = engine.metadata(settings)
    assert (metadata["forward"], metadata["draft_forward"]) == ("graphs", "graphs")
