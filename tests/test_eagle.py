"""The EAGLE drafter: exact counts, and cached drafting equal to drafting from scratch after every step."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from eagle2.__main__ import main
from eagle2.draft import Proposal
from eagle2.eagle import DraftVocabulary, EagleDrafter, TreeSettings, static_shape
from eagle2.engine import Engine, Settings
from eagle2.generate import Prefill, Step, Stops, generate
from eagle2.lean import LeanHead
from eagle2.target import Target
from eagle2.verify import SamplingParams
from tests.tiny import byte_tokenizer, tiny_head, tiny_model

PROMPT = [5, 9, 41, 33, 8, 20]


def run(settings: TreeSettings, count: int = 24, model: Any = None, drafter: Any = None) -> list[Prefill | Step]:
    model = model or tiny_model()
    target = Target(model)
    drafter = drafter or EagleDrafter(tiny_head(model), target, settings)
    return list(generate(target, drafter, PROMPT, sampling=SamplingParams(), stops=Stops(count)))


def steps(items: list[Prefill | Step]) -> list[Step]:
    return [item for item in items if isinstance(item, Step)]


@pytest.mark.parametrize(("depth", "top_k", "total"), [(6, 10, 59), (3, 4, 5), (1, 3, 3), (2, 5, 12), (4, 1, 4)])
def test_counts_of_the_paper(depth: int, top_k: int, total: int) -> None:
    settings = TreeSettings("dynamic", depth, top_k, total)
    first = steps(run(settings))[0].proposal
    tree = first.expanded
    assert len(tree) - 1 == settings.pool_size == top_k + (depth - 1) * top_k**2
    assert len(first.kept) == min(total, settings.pool_size)
    assert max(tree.depths) == depth
    assert [len(nodes) for nodes in first.selected] == [top_k] * (depth - 1)
    # Each layer's fed nodes are those of highest value; each got top_k children.
    for layer, nodes in enumerate(first.selected, 1):
        values = tree.log_value.tolist()
        of_layer = [n for n, d in enumerate(tree.depths) if d == layer]
        assert set(nodes) == set(sorted(of_layer, key=lambda n: (-values[n], n))[:top_k])
        assert all(len(tree.children()[node]) == top_k for node in nodes)


def test_values_are_products_of_confidences_along_the_path() -> None:
    tree = steps(run(TreeSettings("dynamic", 4, 3, 10)))[0].proposal.expanded
    for node, parent in enumerate(tree.parents):
        if node:
            expected = tree.log_value[parent] + tree.confidence[node].log()
            torch.testing.assert_close(tree.log_value[node], expected, rtol=1e-4, atol=1e-4)


def test_official_settings_count_the_root_and_one_layer_less() -> None:
    assert TreeSettings.from_official(total_token=60, depth=5, top_k=10) == TreeSettings("dynamic", 6, 10, 59)


def test_static_shape_is_fixed_connected_and_within_bounds() -> None:
    shape = static_shape(5, 4, 25)
    assert len(shape) == len(set(shape)) == 25
    assert all(len(p) <= 5 and max(p) < 4 and (len(p) == 1 or p[:-1] in shape) for p in shape)
    assert all((*p[:-1], p[-1] - 1) in shape for p in shape if p[-1])  # a child only after its better siblings
    assert static_shape(1, 3, 10) == ((0,), (1,), (2,))
    assert static_shape(4, 1, 9) == ((0,), (0, 0), (0, 0, 0), (0, 0, 0, 0))


def test_the_static_tree_has_the_same_shape_at_every_step() -> None:
    made = steps(run(TreeSettings("static", 4, 3, 12), count=12))
    shapes = {step.proposal.expanded.parents for step in made[:-4]}
    assert len(shapes) == 1
    assert all(len(step.proposal.kept) == 12 for step in made[:-4])


class Checked(EagleDrafter):
    """Compares each expansion with one computed from scratch: no cache, every path fed anew (vLLM #14647, #14649)."""

    def reset(self, capacity: int) -> None:
        super().reset(capacity)
        self.ids: list[int] = []
        self.rows: list[Tensor] = []
        self.compared = 0

    def observe(self, token_ids: Any, hidden: Tensor | None) -> None:
        assert hidden is not None
        self.ids += token_ids
        self.rows += list(hidden)
        super().observe(token_ids, hidden)

    def propose(self, root: int, max_depth: int, max_nodes: int) -> Proposal:
        proposal = super().propose(root, max_depth, max_nodes)
        tree = proposal.expanded
        children = tree.children()
        for node in (0, *itertools.chain(*proposal.selected)):
            path: list[int] = []
            at = node
            while at:
                path.insert(0, int(tree.token_ids[at]))
                at = tree.parents[at]
            expected = self._scratch(root, path)
            for child in children[node]:
                got = float(tree.confidence[child])
                assert got == pytest.approx(float(expected[tree.token_ids[child]]), rel=1e-3, abs=1e-6)
                self.compared += 1
        return proposal

    @torch.inference_mode()
    def _scratch(self, root: int, path: list[int]) -> Tensor:
        """The head's distribution after root and ``path``: the target's features, then the head's own, one by one."""
        features = torch.stack(self.rows)
        tokens = [*self.ids[1:], root]
        for token in [*path, None]:
            embeds = self.target.embed(torch.tensor(tokens))
            output = self.head(embeds[None], features[None], torch.arange(len(tokens))[None])[0]
            if token is None:
                break
            features = torch.cat((features, output[-1:]))
            tokens.append(token)
        logits = self.target.lm_head(output[-1])
        if (ids := self.head.draft_token_ids) is not None:  # the tokens that are not drafted have probability 0
            logits = torch.full_like(logits, -float("inf")).scatter(0, ids, logits[ids])
        result: Tensor = logits.softmax(-1)
        return result


@pytest.mark.parametrize("reduced", [None, torch.arange(3, 96, 4)])
@pytest.mark.parametrize("settings", [TreeSettings("dynamic", 4, 3, 8), TreeSettings("static", 4, 3, 9)])
def test_cached_drafting_equals_drafting_from_scratch_after_every_step(
    settings: TreeSettings, reduced: Tensor | None
) -> None:
    model = tiny_model()
    target = Target(model)
    drafter = Checked(tiny_head(model).with_draft_tokens(reduced), target, settings)
    made = steps(run(settings, 20, model, drafter))
    # `run` makes a target of its own, on the same weights.
    assert len(made) >= 5
    assert drafter.compared > 100


EDGES = [
    (depth, top_k, total, kind)
    for depth, top_k, total in itertools.product((1, 2, 5), (1, 2, 64), (1, 2, 59, 512))
    for kind in ("dynamic", "static")
    if not (top_k == 64 and depth > 2)
]


@pytest.mark.parametrize(("depth", "top_k", "total", "kind"), EDGES)
def test_edge_settings_work_and_change_no_token(depth: int, top_k: int, total: int, kind: Any) -> None:
    """Top-k above the pool or the vocabulary, depth 1, one token in all (TensorRT-LLM #10323)."""
    settings = TreeSettings(kind, depth, top_k, total)
    model = tiny_model(vocab_size=48)
    plain = run(settings, 8, model, EagleDrafter(tiny_head(model), Target(model), TreeSettings("dynamic", 1, 1, 1)))
    made = run(settings, 8, model)

    def ids(items: list[Prefill | Step]) -> list[int]:
        return [t for item in items for t in ((item.token,) if isinstance(item, Prefill) else item.emitted)]

    assert ids(made) == ids(plain)
    assert all(len(step.proposal.kept) <= total for step in steps(made))


@pytest.mark.parametrize(
    "bad", [{"depth": 0}, {"depth": 99}, {"top_k": 0}, {"top_k": 65}, {"total_tokens": 0}, {"kind": "bushy"}]
)
def test_bad_tree_settings_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"must lie|dynamic"):
        TreeSettings(**bad)


def test_features_are_required() -> None:
    model = tiny_model()
    drafter = EagleDrafter(tiny_head(model), Target(model), TreeSettings())
    with pytest.raises(ValueError, match="feature"):
        drafter.observe([1, 2], None)
    with pytest.raises(ValueError, match="nothing was observed"):
        drafter.propose(4, 3, 3)


# --- the reduced vocabulary -------------------------------------------------------------------------------------------


class Capped(nn.Linear):
    """An LM head that is more than a linear map."""

    def forward(self, input: Tensor) -> Tensor:
        return 2 * torch.tanh(super().forward(input) / 2)


@pytest.mark.parametrize("kind", ["tied", "bias", "capped", "capped, all tokens"])
def test_reduced_logits_are_the_lm_heads_own_columns(kind: str) -> None:
    model = tiny_model(tie_word_embeddings=False)
    if kind != "tied":
        model.lm_head = (nn.Linear if kind == "bias" else Capped)(32, 96).requires_grad_(False)
    target = Target(model)
    ids = torch.arange(96) if kind == "capped, all tokens" else torch.tensor([0, 7, 8, 40, 95])
    vocabulary = DraftVocabulary(target, ids)
    features = 3 * torch.randn(4, 32, generator=torch.Generator().manual_seed(0))
    logits = vocabulary.logits(features)
    assert vocabulary.size == len(ids)
    torch.testing.assert_close(logits, target.lm_head(features)[:, ids])
    assert vocabulary.target_ids(torch.tensor([[1, 3]])).tolist() == [ids[[1, 3]].tolist()]


def test_a_reduced_run_does_not_touch_the_other_rows() -> None:
    """Else it would cost what the full vocabulary costs."""
    model = tiny_model()
    target = Target(model, lean=False)
    vocabulary = DraftVocabulary(target, torch.tensor([4, 5, 6]))
    calls: list[Any] = []
    target.lm_head.register_forward_hook(lambda *_: calls.append(1))
    vocabulary.logits(torch.ones(1, 32))
    assert calls == []
    DraftVocabulary(target).logits(torch.ones(1, 32))
    assert calls == [1]


def test_a_reduced_vocabulary_of_all_tokens_gives_the_identical_tree() -> None:
    model = tiny_model()
    settings = TreeSettings("dynamic", 4, 5, 12)
    plain = steps(run(settings, model=model))
    whole = EagleDrafter(tiny_head(model).with_draft_tokens(torch.arange(96)), Target(model), settings)
    made = steps(run(settings, model=model, drafter=whole))
    assert len(made) == len(plain) > 3
    for one, other in zip(made, plain):
        ours, theirs = one.proposal, other.proposal
        assert torch.equal(ours.expanded.token_ids, theirs.expanded.token_ids)
        assert torch.equal(ours.expanded.log_value, theirs.expanded.log_value)
        assert (ours.expanded.parents, ours.kept, ours.selected) == (
            theirs.expanded.parents, theirs.kept, theirs.selected,
        )  # fmt: skip


@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_top_k_above_the_reduced_vocabulary_drafts_each_of_its_tokens(kind: Any) -> None:
    model = tiny_model()
    settings = TreeSettings(kind, 3, 10, 59)
    ids = [7, 30, 91]
    drafter = EagleDrafter(tiny_head(model).with_draft_tokens(torch.tensor(ids)), Target(model), settings)
    for step in steps(run(settings, 16, model, drafter))[:-3]:
        tree = step.proposal.expanded
        for node in (0, *itertools.chain(*step.proposal.selected)):
            drafted = [int(tree.token_ids[child]) for child in tree.children()[node]]
            assert sorted(drafted) == ids if kind == "dynamic" else set(drafted) <= set(ids)
        assert len(tree) - 1 == 3 + 2 * 9 if kind == "dynamic" else len(tree) > 3


def test_the_engine_gathers_rows_once_and_says_what_is_drafted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Through files and the command line: a head with a reduced vocabulary, and the option that ignores it."""
    tokenizer = byte_tokenizer()
    model = tiny_model(vocab_size=len(tokenizer), max_position_embeddings=256)
    model.save_pretrained(tmp_path / "target")
    tokenizer.save_pretrained(tmp_path / "target")
    ids = torch.arange(5, 105)
    tiny_head(model).with_draft_tokens(ids).save(tmp_path / "head")
    capsys.readouterr()
    folders = (str(tmp_path / "target"), str(tmp_path / "head"))
    settings = Settings(max_new_tokens=12)
    texts = set()
    for full in (False, True):
        engine = Engine.load(*folders, device="cpu", full_vocabulary=full)
        size = len(tokenizer) if full else 100
        assert engine.metadata(settings)["draft_vocab"] == size
        one, other = (engine.drafter(settings, engine.target.fork()).vocabulary for _ in range(2))
        assert one is other
        assert one.size == size
        trace = engine.trace("hello", settings)
        drafted = {token for step in trace.steps for token in step.token_ids[1:]}
        assert (drafted <= set(ids.tolist())) is not full
        texts.add(trace.output_ids)
        option = ["--full-vocabulary"] if full else []
        arguments = ["race", "hello", "--model", folders[0], "--head", folders[1], "--device", "cpu", "--json"]
        assert main([*arguments, "--max-new-tokens", "4", *option]) == 0
        result = json.loads(capsys.readouterr().out)
        assert (result["settings"]["draft_vocab"], result["equal"]) == (size, True)
    assert len(texts) == 1


@pytest.mark.parametrize("lean", [True, False])
def test_a_prompt_is_fed_as_it_is_observed_but_for_its_last_token(lean: bool) -> None:
    """Long, short and in pieces: then the same draft."""
    model = tiny_model()
    target, head = Target(model), tiny_head(model)
    ids = [3 + i * 7 % 80 for i in range(20)]
    hidden = target.prefill(ids, 60).hidden
    proposals = []
    for size, fed in ((20, 19), (8, 19), (3, 0), (1, 0)):  # a piece of 4 tokens and more is fed with all that waits
        drafter = EagleDrafter(LeanHead(head) if lean else head, target, TreeSettings("dynamic", 2, 3, 5))
        drafter.reset(60)
        for at in range(0, 20, size):
            drafter.observe(ids[at : at + size], hidden[at : at + size])
        assert drafter._cache.length == fed
        proposals.append(drafter.propose(9, 10, 5))
    for proposal in proposals[1:]:
        assert proposal.expanded.token_ids.tolist() == proposals[0].expanded.token_ids.tolist()
        torch.testing.assert_close(proposal.expanded.confidence, proposals[0].expanded.confidence, rtol=1e-3, atol=1e-4)
