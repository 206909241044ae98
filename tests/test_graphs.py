"""Passes with static shapes: the same logits as the model's own code for every padded size, and nothing else moves."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
from torch import Tensor

from eagle2.graphs import ROWS, GraphForward, Graphs, GraphWeights, Shelf, Status, padded, roomy
from eagle2.lean import Lean
from eagle2.target import HuggingFaceForward, Target
from eagle2.tree import DraftTree
from tests.static_shapes import Watch, replayed
from tests.test_lean import FAMILIES, MORE, made, run
from tests.test_target import MODELS, PROMPT, TREE
from tests.tiny import VOCAB, tiny_model


def static(model: Any) -> Target:
    return Target(model, runs=GraphForward(GraphWeights(model)))


def forward_of(target: Target) -> GraphForward:
    assert isinstance(target._runs, GraphForward)
    return target._runs


def random_tree(rows: int, seed: int = 0) -> DraftTree:
    generator = torch.Generator().manual_seed(seed)
    parents = [int(torch.randint(0, node, (), generator=generator)) for node in range(1, rows)]
    ids = torch.randint(3, VOCAB, (rows,), generator=generator)
    return DraftTree(ids, (-1, *parents), torch.ones(rows), torch.zeros(rows))


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("name", [*FAMILIES, *MORE])
def test_passes_equal_the_models_own(name: str, graphs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if graphs:
        replayed(monkeypatch)
    model = made(name)
    for mine, theirs in zip(run(static(model)), run(Target(model, lean=False)), strict=True):
        for one, other in zip(mine, theirs):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_in_bfloat16_it_is_as_near_to_the_truth_as_the_models_own() -> None:
    model = made("qwen3").to(torch.bfloat16)
    truth = run(Target(copy.deepcopy(model).float(), lean=False))

    def error(target: Target) -> float:
        parts = [(one - other).abs().mean() for mine, true in zip(run(target), truth) for one, other in zip(mine, true)]
        return float(torch.stack(parts).mean())

    assert error(static(model)) <= 1.25 * error(Target(model, lean=False))


def test_every_padded_size_and_its_neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    """One prefix after the other, so that buffers hold what earlier passes left."""
    replayed(monkeypatch)
    model = tiny_model(max_position_embeddings=512)
    mine, theirs = static(model), Target(model, lean=False)
    for target in (mine, theirs):
        target.prefill(PROMPT, 240)
    for rows in sorted({rows for size in ROWS for rows in (size - 1, size, size + 1) if rows}, reverse=True):
        tree = random_tree(rows, rows)
        one, other = mine.forward(tree), theirs.forward(tree)
        assert one.logits.shape == (rows, VOCAB)
        torch.testing.assert_close(one.logits, other.logits, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(one.hidden, other.hidden, rtol=1e-4, atol=1e-4)
        path = [rows - 1]
        while path[0]:
            path.insert(0, tree.parents[path[0]])
        for target in (mine, theirs):
            target.commit(path)
    assert [padded(rows) for rows in (1, 2, 8, 9, 64, 65, 256)] == [1, 8, 8, 16, 64, 65, 256]


def test_padding_at_the_end_of_the_buffer_overwrites_nothing() -> None:
    model = tiny_model(max_position_embeddings=512)
    prompt = [3 + i % 90 for i in range(253)]
    mine, theirs = static(model), Target(model, lean=False)
    for target in (mine, theirs):
        target.prefill(prompt, 256)
    assert forward_of(mine).capacity == 256
    tree = TREE.select([1, 2])
    for _ in range(2):
        one, other = mine.forward(tree), theirs.forward(tree)
        torch.testing.assert_close(one.logits, other.logits, rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match="cache has 256 rows, this pass needs 260"):
        mine.forward(TREE)
    with pytest.raises(ValueError, match="cache has 256 rows, this pass needs 260"):
        forward_of(mine).forward(TREE.token_ids, TREE.ancestor_mask(), TREE.depth_ids(), logit_rows=len(TREE))


def test_a_longer_sequence_gets_larger_buffers() -> None:
    model = tiny_model(max_position_embeddings=1024)
    target = static(model)
    target.prefill(PROMPT, 20)
    prompt = [7 + i % 50 for i in range(700)]
    long, own = target.prefill(prompt, 710), Target(model, lean=False).prefill(prompt, 710)
    assert forward_of(target).capacity == roomy(710) == 1024
    torch.testing.assert_close(long.hidden, own.hidden, rtol=1e-4, atol=1e-4)
    assert [roomy(n) for n in (0, 256, 257, 513, 1025)] == [256, 256, 512, 1024, 2048]


def test_results_stay_when_the_next_pass_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph writes to the same place each time; a step that somebody still looks at must not change."""
    replayed(monkeypatch)
    target = static(tiny_model())
    target.prefill(PROMPT, 64)
    output = target.forward(TREE)
    before = output.logits.clone(), output.hidden.clone()
    target.forward(random_tree(7, 5))
    assert torch.equal(output.logits, before[0])
    assert torch.equal(output.hidden, before[1])


def test_forks_share_weights_and_nothing_else() -> None:
    target = static(tiny_model())
    other = target.fork()
    assert forward_of(other).weights is forward_of(target).weights
    target.prefill(PROMPT, 64)
    other.prefill(PROMPT[::-1], 64)
    other.forward(TREE)
    alone = static(tiny_model())
    alone.prefill(PROMPT, 64)
    assert torch.equal(target.forward(TREE).logits, alone.forward(TREE).logits)


def test_buffers_of_a_sequence_that_has_ended_are_used_again_and_what_it_left_is_gone() -> None:
    parent = static(tiny_model())
    first = parent.fork()
    first.prefill(PROMPT, 64)
    expected = first.forward(TREE).logits
    kv = forward_of(first)._buffers.kv  # type: ignore[union-attr]
    with torch.inference_mode():
        kv.fill_(float("nan"))  # as after weights that are damaged
    at_the_same_time = parent.fork()
    at_the_same_time.reset(64)
    assert forward_of(at_the_same_time)._buffers.kv is not kv  # type: ignore[union-attr]
    del first
    gc.collect()
    second = parent.fork()
    second.prefill(PROMPT, 64)
    assert forward_of(second)._buffers.kv is kv  # type: ignore[union-attr]
    assert torch.equal(second.forward(TREE).logits, expected)


def test_the_shelf_lets_go_of_what_is_too_small() -> None:
    class Box:
        def __init__(self, capacity: int) -> None:
            self.capacity = capacity

    shelf: Shelf[Box] = Shelf()
    owners = [Box(0), Box(0), Box(0)]
    small, back = shelf.take(owners[0], 100, Box)
    large, back_large = shelf.take(owners[1], 1000, Box)
    back()
    back_large()
    back()  # once is enough
    assert shelf.take(owners[2], 300, Box)[0] is large
    assert shelf.take(owners[0], 100, Box)[0] is not small


def test_a_pass_asks_the_host_for_nothing_and_its_shapes_depend_on_no_value(monkeypatch: pytest.MonkeyPatch) -> None:
    target = static(tiny_model().to("meta"))
    with Watch(monkeypatch) as watch:
        for prompt, tree in ((PROMPT, TREE), ([5] * 20, TREE.select([1, 2, 3]))):
            target.prefill(prompt, 64)
            target.forward(tree)
    keys = [key for key, _ in watch.calls]
    assert keys == [8, 8, 32, 8]
    assert watch.calls[1][1] == watch.calls[3][1] == watch.calls[0][1]
    assert len(watch.calls[1][1]) > 40
    with Watch(monkeypatch), pytest.raises(AssertionError, match="asks the host"):
        torch.zeros(1).item()
    with Watch(monkeypatch), pytest.raises(AssertionError, match="within a graph"):
        Graphs(torch.device("cpu"), Status(torch.device("cpu"))).run(0, lambda: torch.zeros(1))


class Replayed:
    def __init__(self) -> None:
        self.count = 0

    def replay(self) -> None:
        self.count += 1


def test_a_function_is_captured_once_for_each_key_and_then_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    status = Status(torch.device("cuda"))
    graphs, graph = Graphs(torch.device("cuda"), status), Replayed()
    captured: list[int] = []

    def capture(_: Graphs, function: Any) -> Any:
        captured.append(function())
        return graph, captured[-1]

    monkeypatch.setattr(Graphs, "_capture", capture)
    assert [graphs.run("a", lambda: 1), graphs.run("a", lambda: 1), graphs.run("b", lambda: 2)] == [1, 1, 2]
    assert captured == [1, 2]
    assert graph.count == 3  # the first call of each key replays too: a capture computes nothing
    assert len(graphs) == 2
    assert str(status) == "graphs"


def test_where_capturing_fails_passes_run_as_they_are_and_the_reason_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    tries: list[int] = []

    def capture(_: Graphs, function: Any) -> Any:
        tries.append(1)
        raise RuntimeError("CUDA error: operation not permitted when stream is capturing\nmore")

    monkeypatch.setattr(Graphs, "_capture", capture)
    model = tiny_model()
    target = static(model)
    forward_of(target).weights.status.failure = None  # as on a GPU
    other = target.fork()
    for one in (target, other):
        one.prefill(PROMPT, 64)
    own = Target(model, lean=False)
    own.prefill(PROMPT, 64)
    torch.testing.assert_close(target.forward(TREE).logits, own.forward(TREE).logits, rtol=1e-4, atol=1e-4)
    assert len(tries) == 1
    why = "the capture failed (CUDA error: operation not permitted when stream is capturing)"
    assert other.forward_name == f"static shapes without graphs: {why}"


def test_weights_are_the_models_own() -> None:
    model = tiny_model()
    target = static(model)
    first = target.prefill(PROMPT, 64).logits
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight.mul_(2)
    changed = target.prefill(PROMPT, 64).logits
    assert (changed - first).abs().max() > 1e-3
    own = Target(model, lean=False).prefill(PROMPT, 64).logits
    torch.testing.assert_close(changed, own, rtol=1e-4, atol=1e-4)


def test_it_is_taken_on_gpus_for_the_models_that_it_can_run(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model()
    assert GraphForward.refusal(model) == "it is on cpu, where there are no CUDA graphs"
    assert Target(model).forward_name in ("lean", "native")
    assert Target(model, lean=False).forward_name == "transformers"
    # What the CPU's lean forward refuses for its copies is no reason here; what it cannot run is.
    monkeypatch.setattr("eagle2.lean.available_memory", lambda: 1 << 10)
    assert Lean.refusal(model, copies=False) is None
    assert Lean.refusal(model.to("meta")) == "it is on meta, where a second copy of the weights is too dear"
    assert Lean.refusal(model, copies=False) is None
    assert "GPTNeoXForCausalLM" in (Lean.refusal(MODELS["gpt-neox"](), copies=False) or "")
    monkeypatch.setattr(GraphForward, "refusal", staticmethod(lambda model: Lean.refusal(model, copies=False)))
    target = Target(tiny_model())
    assert isinstance(target._runs, GraphForward)
    assert target.why_not_lean is None
    assert target.fork().forward_name == "static shapes without graphs: cpu has none"
    assert isinstance(Target(MODELS["gpt-neox"]())._runs, HuggingFaceForward)


def test_prefill_in_chunks_without_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model()
    monkeypatch.setattr("eagle2.target.PREFILL_CHUNK", 5)
    mine, own = static(model).prefill(PROMPT * 3, 64), Target(model, lean=False).prefill(PROMPT * 3, 64)
    rows: list[tuple[Tensor, Tensor]] = [(mine.logits, own.logits), (mine.hidden, own.hidden)]
    for one, other in rows:
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
