"""Faults that users met in EAGLE implementations, and the tests that show that this one does not have them.

Each kind comes from public issue threads (SafeAILab/EAGLE, vLLM, SGLang, TensorRT-LLM, transformers).  The table names the
tests; what no other file tests follows below it.
"""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from test_verify import LOGITS, VOCAB, chi_square, deterministic_tree, limit, tree, two_tokens
from tokenizers.processors import TemplateProcessing
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen2Config

from eagle2.__main__ import main
from eagle2.cost import CostModel
from eagle2.engine import Engine, Settings
from eagle2.head import EagleHead, HeadConfig
from eagle2.models import encode_chat
from eagle2.race import first_difference
from eagle2.target import Target
from eagle2.verify import SamplingParams, Verdict, verify
from tests.checkpoints import official_config, official_tensors, write_head
from tests.tiny import EOS, byte_tokenizer, reference, tiny_head, tiny_model

TESTS = Path(__file__).parent
TABLE: dict[str, tuple[str, ...]] = {
    # EAGLE #75, #178, #212; transformers #39421
    "greedy output differs from the baseline": (
        "test_generate.test_greedy_ids_equal_hugging_faces_whatever_is_drafted",
        "test_processors.test_greedy_ids_equal_those_of_generate_in_both_lanes",
        "test_bench.test_outputs_are_cut_at_the_stop_and_at_the_cap",
        "test_race.test_a_lane_that_differs_is_reported_with_the_logit_gap",
        "test_faults.test_half_precision_tells_its_first_difference",
    ),
    # EAGLE #50, #183, PR 215
    "not lossless at a temperature, top-p, a cold bonus token, NaN of a zero tail": (
        "test_verify.test_sampling_leaves_the_targets_distribution",
        "test_verify.test_a_broken_verifier_fails_the_same_test",
        "test_verify.test_low_temperature_sampling_accepts_the_whole_path",
        "test_verify.test_certain_token_is_never_rejected_even_by_the_largest_draw",
        "test_verify.test_probabilities_are_float32_in_half_precision",
        "test_generate.test_sampled_text_has_the_targets_distribution_whatever_is_drafted",
        "test_faults.test_the_distribution_at_temperature_0_1_where_whole_paths_are_accepted",
        "test_faults.test_rejecting_a_token_that_is_all_but_certain",
    ),
    # SGLang #27908; EAGLE strict=False, #214
    "a head with missing, unknown or renamed tensors runs": (
        "test_head.test_a_wrong_checkpoint_is_named_and_refused",
        "test_checkpoint.test_missing_unused_and_partial_tensors_are_named",
        "test_checkpoint.test_other_kinds_are_named",
    ),
    # EAGLE #100, #141; TensorRT-LLM #2588; SGLang #5773
    "fc.bias of the file against the config's flag": (
        "test_head.test_the_file_decides_about_biases",
        "test_faults.test_the_file_decides_about_fc_bias_whatever_the_config_says",
    ),
    # EAGLE #117, #138; AngelSlim #173
    "q/k/v biases, tied embeddings, single and sharded files, no index": (
        "test_checkpoint.test_official_head_races_on_its_target",
        "test_checkpoint.test_layouts_on_disk_hold_the_same_head",
        "test_faults.test_a_tied_qwen2_in_one_file_and_in_shards",
    ),
    # vLLM #11672
    "a norm in the head that does not belong there": (
        "test_faults.test_the_heads_logits_are_those_computed_by_hand",
        "test_export.test_vllm_drafts_the_chain_of_top_k_1",
    ),
    # vLLM #14647, #14649
    "stale draft cache, features shifted by one": (
        "test_eagle.test_cached_drafting_equals_drafting_from_scratch_after_every_step",
        "test_head.test_cached_rows_equal_a_pass_over_everything",
        "test_device.test_proposals_are_those_of_the_eagle_drafter",
    ),
    # SGLang #7477; EAGLE's searchsorted
    "nodes kept without their parents": (
        "test_tree.test_kept_nodes_are_always_connected",
        "test_tree.test_select_refuses_nodes_without_their_parent",
        "test_tree.test_rerank_refuses_half_precision",
    ),
    # TensorRT-LLM #10323
    "top-k above the pool or the vocabulary, depth 1, one token": (
        "test_eagle.test_edge_settings_work_and_change_no_token",
        "test_eagle.test_top_k_above_the_reduced_vocabulary_drafts_each_of_its_tokens",
        "test_eagle.test_bad_tree_settings_are_refused",
    ),
    # EAGLE #37; SGLang #3574, #6783
    "prompts near or over the context length": (
        "test_target.test_prompts_around_the_context_length",
        "test_generate.test_the_context_is_used_to_its_last_position_and_never_beyond",
        "test_architectures.test_absolute_positions_end_with_the_context",
    ),
    # SGLang #31599; vLLM #47616
    "tokens after the end, or more than were asked for": (
        "test_generate.test_eos_inside_an_accepted_path_ends_the_output_there",
        "test_generate.test_the_cap_is_exact",
        "test_generate.test_stop_strings_end_the_run_at_the_token_that_completes_them",
    ),
    # EAGLE #296
    "racers that count tokens differently": (
        "test_race.test_both_lanes_give_generates_ids_and_count_alike",
        "test_bench.test_outputs_are_cut_at_the_stop_and_at_the_cap",
    ),
    # EAGLE #45
    "logits that are not numbers": (
        "test_generate.test_non_finite_logits_name_the_step",
        "test_verify.test_non_finite_logits_name_the_step",
        "test_device.test_logits_that_are_not_numbers_are_named_with_their_step",
    ),
    # EAGLE #5; SpecForge #296
    "two BOS tokens; turn 2 does not begin with turn 1": (
        "test_models.test_next_turn_begins_with_the_last",
        "test_models.test_without_template_the_last_user_message_is_plain_text",
        "test_faults.test_one_bos_whoever_writes_it",
    ),
    # EAGLE #90, #250
    "a batch crashes inside": ("test_faults.test_a_batch_is_refused_in_a_sentence",),
    # EAGLE #88, #121, #209
    "figures that nobody can reproduce": (
        "test_cli.test_race_table_names_settings_and_versions",
        "test_bench.test_json_shape",
        "test_bench.test_every_method_is_warmed_up_and_the_order_rotates_by_prompt",
        "test_faults.test_every_figure_is_printed_with_what_it_was_measured_with",
    ),
    # Not of that list: what a public app meets.
    "visitors at the same time, many runs, closed tabs": (
        "test_load.test_visitors_at_the_same_time_each_get_their_own_run",
        "test_load.test_memory_is_flat_over_200_runs",
        "test_load.test_a_closed_tab_frees_the_device",
        "test_app.test_closing_the_generator_ends_the_race",
        "test_app_browser.test_a_closed_tab_ends_the_run_and_frees_the_device",
    ),
    "a hub out of reach, a full disk, a damaged cache, a killed download": (
        "test_hub.test_hub_out_of_reach",
        "test_hub.test_full_disk_before_and_within_the_download",
        "test_hub.test_a_damaged_cache_is_mended",
        "test_hub.test_damage_that_the_size_does_not_show",
        "test_hub.test_next_start_after_a_killed_download",
        "test_models.test_no_network_and_no_cache",
        "test_models.test_full_disk_while_downloading",
        "test_models.test_damaged_copy_is_made_again",
        "test_models.test_rest_of_a_killed_process_is_swept",
        "test_models.test_cut_connection_is_resumed",
        "test_app.test_a_failed_load_is_told_and_tried_again",
    ),
}


def test_the_table_names_tests_that_exist() -> None:
    functions = {
        f"{file.stem}.{node.name}"
        for file in TESTS.glob("test_*.py")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }
    assert all(TABLE.values())
    assert {name for names in TABLE.values() for name in names} - functions == set()


def made_engine(dtype: torch.dtype = torch.float32) -> Engine:
    tokenizer = byte_tokenizer()
    model = tiny_model(vocab_size=len(tokenizer), max_position_embeddings=256).to(dtype)
    costs = CostModel((1, 64), (0.01, 0.02), (1, 8), (0.001, 0.002))  # made up: nothing is measured
    head = tiny_head(model).to(dtype)
    return Engine(model, tokenizer, head, name="tiny", head_name="tiny-head", costs=costs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_tells_its_first_difference(dtype: torch.dtype) -> None:
    """Rows of a tree pass round differently from those of a single token: where that shows, it is told, with the gap."""
    engine = made_engine(dtype)
    for prompt in ("hello", "Why?", "10+2="):
        trace = list(engine.race(prompt, Settings(max_new_tokens=40)))[-1].trace
        assert trace is not None
        assert trace.autoregressive is not None
        index = first_difference(trace.output_ids, trace.autoregressive.token_ids)
        assert trace.equal is (index is None)
        assert (trace.difference is None) is trace.equal
        if trace.difference is not None:
            assert trace.difference.index == index
            if None not in (trace.difference.eagle2_id, trace.difference.autoregressive_id):
                assert trace.difference.logit_gap is not None
                assert trace.difference.logit_gap >= 0


def test_the_distribution_at_temperature_0_1_where_whole_paths_are_accepted() -> None:
    sampling = SamplingParams(0.1)
    first = int(LOGITS[()].argmax())
    second = int(LOGITS[(first,)].argmax())
    whole = 0

    def make(_: torch.Generator) -> Any:
        return tree([0, first, second, (first + 1) % VOCAB], (-1, 0, 1, 0), [1, 0.6, 0.5, 0.2])

    def counted(draft: Any, logits: Tensor, *more: Any) -> Verdict:
        nonlocal whole
        verdict = verify(draft, logits, *more)
        whole += verdict.accepted == (1, 2)
        return verdict

    counts = two_tokens(make, counted, 800, sampling)
    assert whole > 100  # the bonus token after a full path keeps its temperature: the other test breaks that on purpose
    statistic, degrees = chi_square(counts, sampling, least=5)
    assert degrees > 0
    assert statistic < limit(degrees)
    assert chi_square(two_tokens(deterministic_tree, verify, 800, sampling), sampling, least=5)[0] < limit(degrees)


def test_rejecting_a_token_that_is_all_but_certain(monkeypatch: pytest.MonkeyPatch) -> None:
    """In float16 the tail is zero: what is left after the rejection must be a distribution, not 0 / 0."""
    monkeypatch.setattr(torch, "rand", lambda *a, **k: torch.tensor(1 - 2**-24))
    logits = torch.full((2, VOCAB), -torch.inf, dtype=torch.float16)
    logits[:, 1], logits[:, 4] = 15.5, 0.0  # 4 has a probability of 2e-7, and the rest none
    verdict = verify(tree([0, 1], (-1, 0)), logits, SamplingParams(1.0), torch.Generator().manual_seed(0))
    assert (verdict.accepted, verdict.next_token, verdict.kind) == ((), 4, "correction")
    logits[:, 4] = -10.0  # now less than float32 tells from nothing
    verdict = verify(tree([0, 1], (-1, 0)), logits, SamplingParams(0.1), torch.Generator().manual_seed(0))
    assert (verdict.accepted, verdict.next_token, verdict.kind) == ((1,), 1, "bonus")


@pytest.mark.parametrize("flag", [True, False, None])
@pytest.mark.parametrize("stored", [True, False])
def test_the_file_decides_about_fc_bias_whatever_the_config_says(
    flag: bool | None, stored: bool, tmp_path: Path
) -> None:
    model = tiny_model()
    config = official_config(model, bias=flag)
    write_head(tmp_path, config, official_tensors(model, config, fc_bias=stored))
    head = EagleHead.load(tmp_path, target=model)
    assert head.config.fc_bias is stored
    assert (head.fc.bias is not None) is stored


@pytest.mark.parametrize("target_shards", ["5GB", "20KB"])
@pytest.mark.parametrize("layout", ["bin", "bin unindexed", "safetensors sharded"])
def test_a_tied_qwen2_in_one_file_and_in_shards(target_shards: str, layout: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "vocab_size": 259, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 128, "initializer_range": 0.3, "use_sliding_window": False,
    }  # fmt: skip
    model = AutoModelForCausalLM.from_config(Qwen2Config(**sizes, tie_word_embeddings=True, eos_token_id=EOS)).eval()
    model.save_pretrained(tmp_path / "target", max_shard_size=target_shards)
    assert (tmp_path / "target/model.safetensors.index.json").exists() is (target_shards == "20KB")
    byte_tokenizer().save_pretrained(tmp_path / "target")
    config = official_config(model, bias=True, qkv_bias=True)
    write_head(tmp_path / "head", config, official_tensors(model, config, fc_bias=True, qkv_bias=True), layout)
    engine = Engine.load(str(tmp_path / "target"), str(tmp_path / "head"), dtype="float32", device="cpu")
    assert "layers.0.self_attn.q_proj.bias" in engine.head.state_dict()
    trace = engine.trace("hello", Settings(max_new_tokens=8, depth=2, top_k=3, total_tokens=5))
    assert list(trace.output_ids) == reference(model, engine.encode("hello"), 8)


def waves(*shape: int, step: float, scale: float) -> Tensor:
    """Numbers that need no random generator: ``scale * sin(step * (1, 2, ...))``."""
    count = torch.Size(shape).numel()
    return (scale * torch.sin(step * torch.arange(1, count + 1, dtype=torch.float64))).float().view(shape)


def test_the_heads_logits_are_those_computed_by_hand() -> None:
    """Stored values: the paper's formula in plain Python floats, apart from this code and from torch.

    ``fc`` over (embedding, feature), no norm before the attention nor after the layer, rotary angles from position 0.
    """
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    head = EagleHead(HeadConfig(8, 12, 2, 1, 4, 10, 1e-6, rope, 64)).eval().requires_grad_(False)
    for number, (name, value) in enumerate(sorted(head.state_dict().items()), 1):
        norm = name.endswith("norm.weight")
        value.copy_(waves(*value.shape, step=1.37 * number, scale=0.25 if norm else 0.5) + norm)
    embeds, features = waves(3, 8, step=1.7, scale=1.0), waves(3, 8, step=2.3, scale=1.0)
    output = head(embeds[None], features[None], torch.arange(3)[None])[0, -1]
    logits = waves(10, 8, step=5.3, scale=0.5) @ output
    golden = [-0.60847, 0.42245, 0.59876, -0.43623, -0.58872, 0.44977, 0.57838, -0.46307, -0.56773, 0.47613]
    torch.testing.assert_close(logits, torch.tensor(golden), rtol=0, atol=2e-5)


@pytest.mark.parametrize("adds", [True, False])
def test_one_bos_whoever_writes_it(adds: bool) -> None:
    """LLaMA's template writes it, and its tokenizer adds one too (EAGLE #5)."""
    tokenizer = byte_tokenizer()
    if adds:
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.chat_template = (
        "{{ bos_token }}{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    turn = [{"role": "user", "content": "Hi <s>"}]
    one = encode_chat(tokenizer, turn)
    two = encode_chat(tokenizer, [*turn, {"role": "assistant", "content": "Ho"}, {"role": "user", "content": "Why?"}])
    assert one[0] == two[0] == 1
    assert one.count(1) == two.count(1) == 1  # the typed one is text
    assert two[: len(one)] == one


def test_a_batch_is_refused_in_a_sentence() -> None:
    engine = made_engine()
    target = Target(tiny_model())
    for batch in ([[5, 6], [7, 8]], ((5, 6),), torch.tensor([[5, 6], [7, 8]]), [torch.tensor([5, 6])]):
        with pytest.raises(ValueError, match=r"^a batch of [12] was given; .* one list of ids$"):
            target.prefill(batch, 16)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="a batch of"):
            next(engine.run(batch, Settings(max_new_tokens=4)))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^the prompt must be one text, not a list; run prompts one at a time$"):
        engine.race(["hello", "you"], Settings())  # type: ignore[arg-type]


@pytest.mark.parametrize("command", ["race", "generate", "eval", "bench"])
def test_every_figure_is_printed_with_what_it_was_measured_with(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = made_engine()
    monkeypatch.setattr(Engine, "load", classmethod(lambda cls, *args, **kwargs: engine))
    questions = tmp_path / "q.jsonl"
    questions.write_text(json.dumps({"question_id": 1, "turns": ["hello"]}) + "\n")
    what = ["hello"] if command in ("race", "generate") else ["--questions", str(questions)]
    tree_of = [] if command == "bench" else ["--depth", "2", "--top-k", "3", "--total-tokens", "4"]
    methods = ["--methods", "eagle2"] if command == "bench" else []
    assert main([command, *what, "--max-new-tokens", "6", *tree_of, *methods]) == 0
    captured = capsys.readouterr()
    said = captured.out + captured.err
    versions = engine.metadata(Settings())["versions"]
    for part in ("tiny, head tiny-head", "float32 on cpu", "threads", f"torch {versions['torch']}",
                 f"transformers {versions['transformers']}", "tau", "the target's own"):  # fmt: skip
        assert part in said, part
    if command != "bench":
        assert "dynamic tree 2/3/4" in said
    if command != "eval":  # where nothing is timed
        assert "warm-up" in said
