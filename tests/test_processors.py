"""Generation configs: greedy ids equal those of ``generate`` under each setting, in both lanes; the rest is refused."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, RepetitionPenaltyLogitsProcessor, WatermarkingConfig

from eagle2.draft import Drafter, RootOnly
from eagle2.eagle import EagleDrafter, TreeSettings
from eagle2.engine import Engine, Settings
from eagle2.evaluate import evaluate
from eagle2.generate import Prefill, Step, Stops, generate
from eagle2.processors import REFUSED, SUPPORTED, GenerationConfigError, PathProcessors, settings_in_force
from eagle2.record import step_trace
from eagle2.target import Target
from eagle2.tree import DraftTree
from eagle2.verify import SamplingParams, target_probs
from tests.tiny import EOS, VOCAB, RandomDrafter, byte_tokenizer, oracle, reference, tiny_head, tiny_model

PROMPT = [5, 9, 41, 33, 8, 20]
COUNT = 24
GREEDY = SamplingParams()


def decode(
    model: Any, drafter: Drafter | None, prompt: Sequence[int] = PROMPT, count: int = COUNT,
    sampling: SamplingParams = GREEDY, seed: int = 0,
) -> tuple[list[int], list[Prefill | Step]]:  # fmt: skip
    """Ids and items of a run; the drafter None is an `EagleDrafter` with a random head."""
    target = Target(model)
    drafter = drafter or EagleDrafter(tiny_head(model), target, TreeSettings("dynamic", 3, 4, 9))
    eos = model.generation_config.eos_token_id
    ends = frozenset(eos if isinstance(eos, list) else [] if eos is None else [eos])
    generator = torch.Generator().manual_seed(seed)
    items = list(generate(target, drafter, prompt, sampling=sampling, stops=Stops(count, ends), generator=generator))
    return ids_of(items), items


def ids_of(items: Iterable[Prefill | Step]) -> list[int]:
    return [token for item in items for token in ([item.token] if isinstance(item, Prefill) else item.emitted)]


def with_settings(model: Any, **settings: Any) -> Any:
    for name, value in settings.items():
        assert hasattr(model.generation_config, name), name
        setattr(model.generation_config, name, value)
    return model


PLAIN = reference(tiny_model(), PROMPT, COUNT)
# Settings that change the first tokens of this model's plain output, so that a processor that does nothing is noticed.
CASES: dict[str, dict[str, Any]] = {
    "repetition_penalty": {"repetition_penalty": 3.0},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 1},
    "bad_words_ids": {"bad_words_ids": [[PLAIN[1]], [PLAIN[3], PLAIN[4]], [PLAIN[6], PLAIN[7], PLAIN[8]]]},
    "sequence_bias": {"sequence_bias": [[[PLAIN[2]], -30.0], [[PLAIN[0], 50], 30.0], [[50, 60, 70], 30.0]]},
    "suppress_tokens": {"suppress_tokens": [PLAIN[0], PLAIN[2], PLAIN[5]]},
    "begin_suppress_tokens": {"begin_suppress_tokens": [PLAIN[0]]},
    "min_new_tokens": {"min_new_tokens": 11, "eos_token_id": [PLAIN[3], PLAIN[5]]},
    "min_length": {"min_length": 13, "eos_token_id": [PLAIN[3], PLAIN[5]]},
    "forced_eos_token_id": {"forced_eos_token_id": 17},
    "exponential_decay_length_penalty": {"exponential_decay_length_penalty": (4, 1.9), "eos_token_id": EOS},
    "several": {"repetition_penalty": 1.4, "no_repeat_ngram_size": 2, "min_new_tokens": 9, "bad_words_ids": [[PLAIN[0]]]},
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_greedy_ids_equal_those_of_generate_in_both_lanes(name: str) -> None:
    model = with_settings(tiny_model(), **CASES[name])
    expected = reference(model, PROMPT, COUNT)
    assert expected != PLAIN
    ids, items = decode(model, oracle(expected))  # accepts paths, so that rows deep in the tree are read
    assert ids == expected
    assert len(items) < len(expected)
    for drafter in (None, RandomDrafter(3), RootOnly()):
        assert decode(model, drafter)[0] == expected


def test_a_forced_first_token_follows_a_prompt_of_one_token() -> None:
    model = with_settings(tiny_model(), forced_bos_token_id=7, begin_suppress_tokens=[PLAIN[0]])
    expected = reference(model, [5], COUNT)
    assert expected[0] == 7
    for drafter in (oracle(expected), None, RootOnly()):
        assert decode(model, drafter, [5])[0] == expected


def test_invalid_values_are_removed_where_the_config_says_so() -> None:
    class Broken(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x).index_fill(-1, torch.tensor([30]), float("nan"))

    model = with_settings(tiny_model(tie_word_embeddings=False), remove_invalid_values=True)
    head = Broken(32, VOCAB, bias=False)
    head.weight = model.lm_head.weight
    model.lm_head = head
    assert not torch.isfinite(Target(model, lean=False).prefill(PROMPT, 16).logits).all()
    target = Target(model, lean=False)
    items = generate(target, RandomDrafter(1), PROMPT, sampling=GREEDY, stops=Stops(8))
    assert ids_of(items) == reference(model, PROMPT, 8)


@pytest.mark.parametrize("kind", [int, list])
def test_one_end_token_or_a_list_of_them(kind: type) -> None:
    model = with_settings(tiny_model(vocab_size=259), eos_token_id=None)
    free = reference(model, PROMPT, COUNT)
    with_settings(model, eos_token_id=free[9] if kind is int else [258, free[9], free[12]])
    expected = reference(model, PROMPT, COUNT)
    assert len(expected) == free.index(free[9]) + 1 < COUNT
    engine = Engine(model, byte_tokenizer(), tiny_head(model), name="tiny", head_name="random", costs=None)
    for drafted in (True, False):
        assert ids_of(engine.run(PROMPT, Settings(COUNT), drafted=drafted)) == expected


TREE = DraftTree(
    torch.tensor([7, PLAIN[3], 12, PLAIN[4], PLAIN[0], 15, PLAIN[5]]),
    (-1, 0, 0, 1, 1, 2, 3),
    torch.full((7,), 0.5),
    -torch.arange(7).float(),
)


@pytest.mark.parametrize("name", CASES)
def test_each_row_is_processed_as_transformers_would_on_its_path(name: str) -> None:
    model = with_settings(tiny_model(), **CASES[name])
    target = Target(model)
    target.prefill(PROMPT, 64)
    plain = target.forward(TREE)
    eos = model.generation_config.eos_token_id
    processors = PathProcessors.of(target, 4, 6, frozenset(eos if isinstance(eos, list) else [eos]))
    assert processors is not None
    processed = processors(plain, [*PROMPT, 7], TREE)
    assert processed.logits.dtype == torch.float32
    assert processed.hidden is plain.hidden
    config, _ = model._prepare_generation_config(None, do_sample=False, max_length=10)
    model._prepare_special_tokens(config, device=target.device)
    theirs = model._get_logits_processor(config, 4, device="cpu")
    for node in range(len(TREE)):
        branch = [node]
        while branch[0]:
            branch.insert(0, TREE.parents[branch[0]])
        ids = torch.tensor([[*PROMPT, *TREE.token_ids[branch].tolist()]])
        assert torch.equal(processed.logits[node], theirs(ids, plain.logits[node][None].float())[0])


def test_probabilities_that_are_drawn_from_and_recorded_are_those_after_the_processors() -> None:
    model = with_settings(tiny_model(), repetition_penalty=1.5)
    sampling = SamplingParams(0.8, top_k=20)
    ids, items = decode(model, None, sampling=sampling)
    penalty = RepetitionPenaltyLogitsProcessor(1.5)
    done = 1
    for item in items[1:]:
        assert isinstance(item, Step)
        record = step_trace(item, sampling)
        path = torch.tensor([[*PROMPT, *ids[:done]]])
        with torch.inference_mode():
            probs = target_probs(penalty(path, model(path).logits[:, -1])[0], sampling)
        assert record.choice_ids[0] == int(probs.argmax())
        assert record.choice_probs[0] == pytest.approx(float(probs.max()), rel=1e-4)
        first = [(node, p) for node, p in zip(record.kept, record.target_probs) if record.parents[node] == 0]
        for node, prob in first:
            assert prob == pytest.approx(float(probs[record.token_ids[node]]), abs=1e-5)
        for decision in record.decisions[:1]:
            assert decision.target_prob == pytest.approx(float(probs[record.token_ids[decision.node]]), abs=1e-5)
        done += len(item.emitted)
    assert done == len(ids)


def test_a_config_that_asks_for_nothing_costs_nothing_and_sampling_defaults_are_not_read() -> None:
    model = tiny_model()
    for name, (nothing, _) in SUPPORTED.items():
        with_settings(model, **{name: nothing})
    for name, nothing in REFUSED.items():
        with_settings(model, **{name: nothing})
    assert settings_in_force(model) == {}
    assert PathProcessors.of(Target(model), 6, 24, frozenset([EOS])) is None
    greedy, sampled = decode(model, None)[0], decode(model, None, sampling=SamplingParams(1.0), seed=5)[0]
    assert greedy == PLAIN
    sampling = {
        "do_sample": True, "temperature": 0.3, "top_k": 2, "top_p": 0.4, "min_p": 0.3, "typical_p": 0.2,
        "epsilon_cutoff": 0.2, "eta_cutoff": 0.2, "max_new_tokens": 3, "renormalize_logits": True,
    }  # fmt: skip
    with_settings(model, **sampling)
    assert settings_in_force(model) == {}
    assert decode(model, None)[0] == greedy
    assert decode(model, None, sampling=SamplingParams(1.0), seed=5)[0] == sampled


UNSUPPORTED = {
    "num_beams": 4, "num_beam_groups": 2, "num_return_sequences": 3, "penalty_alpha": 0.6, "guidance_scale": 1.5,
    "dola_layers": "high", "prompt_lookup_num_tokens": 3, "assistant_early_exit": 2, "use_mtp": True,
    "watermarking_config": WatermarkingConfig(), "constraints": ["x"], "force_words_ids": [[3]], "max_time": 2.0,
    "encoder_repetition_penalty": 1.2, "encoder_no_repeat_ngram_size": 2, "token_healing": True, "stop_strings": ["x"],
    "speculation_type": "dflash",
}  # fmt: skip


def test_unsupported_settings_are_refused_by_name() -> None:
    assert set(UNSUPPORTED) == set(REFUSED)
    for name, value in UNSUPPORTED.items():
        model = with_settings(tiny_model(vocab_size=259), **{name: value})
        with pytest.raises(GenerationConfigError, match=f"sets {name} to .*generation_config.{name} to"):
            next(generate(Target(model), RootOnly(), PROMPT, sampling=GREEDY, stops=Stops(4)))
    with pytest.raises(GenerationConfigError, match="speculation_type"):
        Engine(model, byte_tokenizer(), tiny_head(model), name="tiny", head_name="random", costs=None)


@pytest.mark.parametrize(
    "wrong",
    [{"repetition_penalty": -1.0}, {"no_repeat_ngram_size": 1.5}, {"bad_words_ids": [3]}, {"sequence_bias": [[3, 4]]}],
)
def test_garbled_settings_are_refused_by_name(wrong: dict[str, Any]) -> None:
    (name,) = wrong
    with pytest.raises(GenerationConfigError, match=f"sets {name} to .*cannot be"):
        decode(with_settings(tiny_model(), **wrong), RootOnly())


def test_every_setting_of_transformers_is_sorted() -> None:
    """A new version's new setting must not pass unseen."""
    elsewhere = {
        # the run's own settings decide
        "max_length", "max_new_tokens", "do_sample", "temperature", "top_k", "top_p", "min_p", "top_h", "typical_p",
        "epsilon_cutoff", "eta_cutoff", "eos_token_id", "pad_token_id", "bos_token_id", "decoder_start_token_id",
        "renormalize_logits",  # a softmax follows anyway
        # means nothing without a setting that is refused
        "early_stopping", "length_penalty", "diversity_penalty", "low_memory", "is_assistant", "num_assistant_tokens",
        "num_assistant_tokens_schedule", "assistant_confidence_threshold", "max_matching_ngram_size",
        "assistant_lookbehind", "target_lookbehind", "assistant_ensemble_weight",
        # how ``generate`` runs, and what it returns
        "use_cache", "cache_implementation", "cache_config", "max_cache_len", "output_attentions",
        "output_hidden_states", "output_scores", "output_logits", "return_dict_in_generate", "compile_config",
        "disable_compile", "continuous_batching_config", "prefill_chunk_size", "transformers_version",
    }  # fmt: skip
    every = {name for name in vars(GenerationConfig()) if not name.startswith("_")}
    assert every == elsewhere | set(SUPPORTED) | set(REFUSED)


def test_what_was_in_force_is_in_the_metadata_and_a_replay_is_refused() -> None:
    model = with_settings(tiny_model(vocab_size=259), repetition_penalty=1.3, suppress_tokens=list(range(3, 90)))
    engine = Engine(model, byte_tokenizer(), tiny_head(model), name="tiny", head_name="random", costs=None)
    said = engine.metadata(Settings())["generation_config"]
    assert said["repetition_penalty"] == 1.3
    assert len(said["suppress_tokens"]) == 80
    with pytest.raises(ValueError, match=r"repetition_penalty, suppress_tokens.*full loop"):
        evaluate(engine, ["a b"], Settings(8), progress=False)
    result = evaluate(engine, ["a b"], Settings(8), full_loop=True, progress=False)
    assert result["settings"]["generation_config"] == said
    plain = with_settings(model, repetition_penalty=1.0, suppress_tokens=None)
    plain = Engine(plain, byte_tokenizer(), tiny_head(model), name="tiny", head_name="random", costs=None)
    assert "generation_config" not in plain.metadata(Settings())
