"""The loop: the output never depends on the drafter, and it stops exactly where it should."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from eagle2.draft import RootOnly
from eagle2.eagle import EagleDrafter, TreeSettings
from eagle2.generate import Prefill, Step, Stops, generate
from eagle2.target import ContextLengthError, Target
from eagle2.verify import NonFiniteLogitsError, SamplingParams
from tests.tiny import RandomDrafter, byte_tokenizer, oracle, reference, tiny_head, tiny_model

PROMPTS = [[5, 9, 41, 33, 8, 20], [1, 77], [60] * 9, [3, 14, 15, 92, 65, 35, 89]]
COUNT = 40


def decode(
    model: Any, drafter: Any, prompt: list[int], stops: Stops, *, lean: bool = True, **more: Any
) -> tuple[list[int], list[Any]]:
    target = Target(model, lean=lean)
    items = list(generate(target, drafter, prompt, **({"sampling": SamplingParams()} | more), stops=stops))
    ids = [t for item in items for t in ((item.token,) if isinstance(item, Prefill) else item.emitted)]
    return ids, items


def eagle(model: Any, settings: TreeSettings | None = None, only: list[int] | None = None) -> EagleDrafter:
    """The head's drafter; ``only`` is its reduced vocabulary."""
    head = tiny_head(model).with_draft_tokens(None if only is None else torch.tensor(only))
    return EagleDrafter(head, Target(model), settings or TreeSettings("dynamic", 4, 3, 8))


@pytest.mark.parametrize("lean", [True, False])
@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("kind", ["root only", "oracle", "always wrong", "random", "head", "static head"])
def test_greedy_ids_equal_hugging_faces_whatever_is_drafted(kind: str, prompt: list[int], lean: bool) -> None:
    model = tiny_model()
    expected = reference(model, prompt, COUNT, eos_token_id=None)
    drafter = {
        "root only": lambda: RootOnly(),
        "oracle": lambda: oracle(expected),
        "always wrong": lambda: oracle(expected, wrong=1),
        "random": lambda: RandomDrafter(5),
        "head": lambda: eagle(model),
        "static head": lambda: eagle(model, TreeSettings("static", 3, 3, 7)),
    }[kind]()
    ids, items = decode(model, drafter, prompt, Stops(COUNT), lean=lean)
    assert ids == expected
    assert items[-1].finish_reason == "length"
    passes = len(items) - 1
    if kind in ("root only", "always wrong"):
        assert passes == COUNT - 1
    if kind == "oracle":
        assert passes < COUNT / 2


@pytest.mark.parametrize(("prompt", "kind"), list(zip(PROMPTS, ["dynamic", "static"] * 2)))
def test_greedy_ids_with_a_reduced_vocabulary_equal_hugging_faces(prompt: list[int], kind: Any) -> None:
    """Also where most of the answer's tokens, the end of turn among them, can never be drafted."""
    model = tiny_model()
    expected = reference(model, prompt, COUNT, eos_token_id=None)
    answer = sorted(set(expected))
    assert len(answer) > 2
    eos = expected[-1]
    expected_to_eos = expected[: expected.index(eos) + 1]
    drafted_right = 0
    for only in (answer, answer[::2], sorted({*answer} - {eos} | {0, 1}), sorted({*range(96)} - {*answer}), [0, 95]):
        drafter = eagle(model, TreeSettings(kind, 3, 4, 9), only)
        ids, items = decode(model, drafter, prompt, Stops(COUNT))
        assert ids == expected
        drafted = {t for step in items[1:] for t in step.proposal.expanded.token_ids[1:].tolist()}
        assert drafted
        assert drafted <= set(only)
        accepted = sum(len(step.verdict.accepted) for step in items[1:])
        drafted_right += accepted
        if not set(only) & set(answer):
            assert accepted == 0
    assert drafted_right > 0
    stopped, _ = decode(
        model, eagle(model, only=[t for t in answer if t != eos]), prompt, Stops(COUNT, frozenset([eos]))
    )
    assert stopped == expected_to_eos


@pytest.mark.parametrize("kind", ["root only", "oracle", "random", "head"])
def test_eos_inside_an_accepted_path_ends_the_output_there(kind: str) -> None:
    """SGLang #31599, vLLM #47616: nothing after the stop is part of the output."""
    model = tiny_model()
    prompt = PROMPTS[0]
    free = reference(model, prompt, COUNT, eos_token_id=None)
    for at in range(1, 12):
        eos = free[at]
        expected = free[: free.index(eos) + 1]
        assert reference(model, prompt, COUNT, eos_token_id=[eos, 0]) == expected
        drafter = {
            "root only": lambda: RootOnly(),
            "oracle": lambda: oracle(free),
            "random": lambda seed=at: RandomDrafter(seed),
            "head": lambda: eagle(model),
        }[kind]()
        ids, items = decode(model, drafter, prompt, Stops(COUNT, frozenset([eos, 0])))
        assert ids == expected
        assert items[-1].finish_reason == "eos"


@pytest.mark.parametrize("cap", [1, 2, 3, 7])
def test_the_cap_is_exact(cap: int) -> None:
    model = tiny_model()
    expected = reference(model, PROMPTS[0], 20, eos_token_id=None)
    for drafter in (RootOnly(), oracle(expected), eagle(model)):
        ids, items = decode(model, drafter, PROMPTS[0], Stops(cap))
        assert ids == expected[:cap]
        assert items[-1].finish_reason == "length"


def test_no_draft_is_longer_than_what_is_still_wanted() -> None:
    model = tiny_model()
    expected = reference(model, PROMPTS[0], 20, eos_token_id=None)
    _, items = decode(model, oracle(expected), PROMPTS[0], Stops(4))
    assert [max(step.proposal.expanded.depths) for step in items[1:]] == [2]


def test_stop_strings_end_the_run_at_the_token_that_completes_them() -> None:
    tokenizer = byte_tokenizer()
    model = tiny_model(vocab_size=len(tokenizer))
    prompt = tokenizer("hello")["input_ids"]
    free = reference(model, prompt, COUNT, eos_token_id=None)
    string = tokenizer.decode(free[9:12])
    end = next(n for n in range(1, COUNT) if string in tokenizer.decode(free[:n]))
    for drafter in (RootOnly(), oracle(free), eagle(model)):
        ids, items = decode(model, drafter, prompt, Stops(COUNT, strings=(string, "never"), decode=tokenizer.decode))
        assert ids == free[:end]
        assert items[-1].finish_reason == "stop"
    with pytest.raises(ValueError, match="empty"):
        Stops(4, strings=("",), decode=tokenizer.decode)
    with pytest.raises(ValueError, match="decode"):
        Stops(4, strings=("x",))


@pytest.mark.parametrize("drafted", [False, True])
def test_the_context_is_used_to_its_last_position_and_never_beyond(drafted: bool) -> None:
    model = tiny_model()
    for length in (100, 126, 127):
        prompt = ([7, 8, 9, 10] * 40)[:length]
        drafter = eagle(model) if drafted else RootOnly()
        ids, items = decode(model, drafter, prompt, Stops(COUNT))
        assert items[-1].finish_reason == ("context" if 128 - length < COUNT else "length")
        assert len(ids) == min(COUNT, 128 - length + 1)
        assert ids[:3] == reference(model, prompt, 3, eos_token_id=None)[: len(ids)][:3]
    for length in (128, 129, 512):
        with pytest.raises(ContextLengthError, match="shorten the prompt"):
            decode(model, RootOnly(), [5] * length, Stops(4))


def test_one_generator_makes_sampling_repeatable_and_seeds_differ() -> None:
    model = tiny_model()

    def sample(seed: int, drafter: Any) -> list[int]:
        generator = torch.Generator().manual_seed(seed)
        return decode(model, drafter, PROMPTS[0], Stops(24), sampling=SamplingParams(1.0), generator=generator)[0]

    assert sample(3, eagle(model)) == sample(3, eagle(model))
    assert sample(3, eagle(model)) != sample(4, eagle(model))


def test_sampled_text_has_the_targets_distribution_whatever_is_drafted() -> None:
    """Over the whole loop: the second token of many runs, with drafting and without, against the exact distribution."""
    model = tiny_model(vocab_size=12)
    prompt = [5, 9, 4]
    with torch.inference_mode():
        first = model(torch.tensor([prompt])).logits[0, -1].softmax(-1)
        exact = sum(first[t] * model(torch.tensor([[*prompt, t]])).logits[0, -1].softmax(-1) for t in range(12))
    for drafter in (RandomDrafter(1, 12), eagle(model), eagle(model, only=[1, 4, 6, 9])):
        generator = torch.Generator().manual_seed(11)
        counts = torch.zeros(12)
        kinds = []
        for _ in range(400):
            # With a cap of 2 there would be no room for a draft.
            ids, items = decode(model, drafter, prompt, Stops(3), sampling=SamplingParams(1.0), generator=generator)
            counts[ids[1]] += 1
            kinds.append(bool(items[1].verdict.accepted))
        assert 20 < sum(kinds) < 380  # the second token came from a draft, and did not
        big = exact * 400 > 5
        statistic = float((((counts - exact * 400) ** 2) / (exact * 400))[big].sum())
        assert statistic < 35  # 0.1 % point at 12 degrees of freedom: 32.9, with room for the merged rest


def test_non_finite_logits_name_the_step() -> None:
    model = tiny_model()
    expected = reference(model, PROMPTS[0], 12, eos_token_id=None)
    for lean in (True, False):
        target = Target(model, lean=lean)
        calls = 0
        forward = target._runs.forward

        def poisoned(*args: Any, forward: Any = forward, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            logits, hidden = forward(*args, **kwargs)
            if calls == 4:  # the prefill is call 1, step 3 is call 4
                logits[:] = float("nan")
            return logits, hidden

        target._runs.forward = poisoned  # type: ignore[method-assign]
        with pytest.raises(NonFiniteLogitsError, match=r"target.*step 3"):
            for _ in generate(
                target, oracle(expected, wrong=1), PROMPTS[0], sampling=SamplingParams(), stops=Stops(12)
            ):
                pass
    head_model = tiny_model()
    broken = eagle(head_model)
    with torch.no_grad():
        broken.head.fc.weight[0, 0] = float("inf")
    with pytest.raises(NonFiniteLogitsError, match=r"draft head.*step 1"):
        decode(head_model, broken, PROMPTS[0], Stops(12))


def test_seconds_are_the_loops_own() -> None:
    """What a slow consumer does between steps is on nobody's clock."""
    import time

    model = tiny_model()
    begun = time.perf_counter()
    total = 0.0
    for item in generate(Target(model), eagle(model), PROMPTS[0], sampling=SamplingParams(), stops=Stops(6)):
        total += item.seconds if isinstance(item, (Step, Prefill)) else 0
        time.sleep(0.05)
    elapsed = time.perf_counter() - begun
    assert 0 < total < elapsed - 0.05  # at least two items slept
