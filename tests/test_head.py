"""The draft head: cached equals recomputed, and a damaged or foreign checkpoint never runs."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from eagle2.head import EagleHead, HeadConfig, HeadFormatError
from tests.tiny import tiny_head, tiny_model


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    head = tiny_head(tiny_model())
    head.save(tmp_path, dtype=torch.float32)
    return tmp_path


def edit(folder: Path, **changes: Any) -> None:
    """Rewrite the checkpoint: a value replaces a tensor, None deletes it."""
    tensors = load_file(folder / "model.safetensors")
    for name, value in changes.items():
        key = name.replace("__", ".")
        if value is None:
            del tensors[key]
        else:
            tensors[key] = value
    save_file(tensors, folder / "model.safetensors")


def test_cached_rows_equal_a_pass_over_everything() -> None:
    head = tiny_head(tiny_model())
    generator = torch.Generator().manual_seed(0)
    embeds, features = torch.randn(2, 1, 9, 32, generator=generator)
    positions = torch.arange(9)[None]
    whole = head(embeds, features, positions)
    cache = head.new_cache(9)
    pieces = []
    for part in (slice(0, 4), slice(4, 5), slice(5, 9)):
        n, start = part.stop - part.start, part.start
        visible = torch.ones(n, start + n, dtype=torch.bool).tril(start)[None, None]
        pieces.append(head(embeds[:, part], features[:, part], positions[:, part], visible, cache))
        cache.commit()
    torch.testing.assert_close(torch.cat(pieces, 1), whole, rtol=1e-4, atol=1e-5)


def test_official_names_on_disk(saved: Path) -> None:
    assert sorted(load_file(saved / "model.safetensors")) == [
        "fc.weight",
        "layers.0.mlp.down_proj.weight",
        "layers.0.mlp.gate_proj.weight",
        "layers.0.mlp.up_proj.weight",
        "layers.0.post_attention_layernorm.weight",
        "layers.0.self_attn.k_proj.weight",
        "layers.0.self_attn.o_proj.weight",
        "layers.0.self_attn.q_proj.weight",
        "layers.0.self_attn.v_proj.weight",
    ]
    config = json.loads((saved / "config.json").read_text())
    assert (config["num_hidden_layers"], config["hidden_size"], config["vocab_size"]) == (1, 32, 96)


def test_save_and_load_give_the_same_head(saved: Path) -> None:
    model = tiny_model()
    loaded = EagleHead.load(saved, target_config=model.config)
    for name, value in tiny_head(model).state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value)


@pytest.mark.parametrize("biased", ["fc__bias", "attention"])
def test_the_file_decides_about_biases(saved: Path, biased: str) -> None:
    """Configs are often wrong about them (EAGLE #100, vLLM, SGLang)."""
    if biased == "fc__bias":
        edit(saved, fc__bias=torch.full((32,), 0.5))
        assert torch.equal(EagleHead.load(saved).fc.bias, torch.full((32,), 0.5))
    else:
        sizes = {"q": 32, "k": 16, "v": 16}
        edit(saved, **{f"layers__0__self_attn__{n}_proj__bias": torch.ones(size) for n, size in sizes.items()})
        assert "layers.0.self_attn.k_proj.bias" in EagleHead.load(saved).state_dict()


def test_copies_of_the_targets_matrices_are_ignored(saved: Path) -> None:
    edit(saved, embed_tokens__weight=torch.zeros(96, 32))
    assert "embed_tokens.weight" not in EagleHead.load(saved).state_dict()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"fc__weight": None}, "lacks fc.weight"),
        ({"layers__0__self_attn__o_proj__weight": None}, "lacks layers.0.self_attn.o_proj.weight"),
        ({"layers__0__input_layernorm__weight": torch.full((32,), 1.5)}, "layers.0.input_layernorm.weight"),
        ({"fc__weight": torch.zeros(32, 32)}, r"fc.weight has shape \[32, 32\].*\[32, 64\]"),
        ({"fc__weight": torch.full((32, 64), float("nan"))}, "not numbers"),
        ({"midlayer__self_attn__q_proj__weight": torch.zeros(32, 64)}, "EAGLE-3"),
        ({"d2t": torch.zeros(16, dtype=torch.long)}, "EAGLE-3"),
        ({"draft_token_ids": torch.tensor([[1, 2]])}, r"shape \[1, 2\] and dtype int64; it must be one row"),
        ({"draft_token_ids": torch.tensor([1.0, 2.0])}, "dtype float32; it must be"),
        ({"draft_token_ids": torch.tensor([False, True])}, "dtype bool; it must be"),
        ({"draft_token_ids": torch.tensor([5])}, "names 1 tokens; at least 2"),
        ({"draft_token_ids": torch.tensor([], dtype=torch.int32)}, "names 0 tokens; at least 2"),
        ({"draft_token_ids": torch.tensor([1, 4, 4])}, "not strictly increasing"),
        ({"draft_token_ids": torch.tensor([4, 1])}, "not strictly increasing"),
        ({"draft_token_ids": torch.tensor([-1, 4])}, "from -1 to 4, outside of the vocabulary of 96"),
        ({"draft_token_ids": torch.tensor([3, 96])}, "from 3 to 96, outside of the vocabulary of 96"),
    ],
)
def test_a_wrong_checkpoint_is_named_and_refused(saved: Path, changes: dict[str, Any], message: str) -> None:
    edit(saved, **changes)
    with pytest.raises(HeadFormatError, match=message):
        EagleHead.load(saved)


def test_a_head_for_another_target_is_refused(saved: Path) -> None:
    with pytest.raises(HeadFormatError, match="hidden_size 32, the target 64"):
        EagleHead.load(saved, target_config=tiny_model(hidden_size=64, head_dim=16).config)
    with pytest.raises(HeadFormatError, match="vocab_size 96, the target 100"):
        EagleHead.load(saved, target_config=tiny_model(vocab_size=100).config)


def test_unreadable_files_give_one_sentence(saved: Path, tmp_path: Path) -> None:
    whole = (saved / "model.safetensors").read_bytes()
    (saved / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(HeadFormatError, match="cannot be read"):
        EagleHead.load(saved)
    (saved / "model.safetensors").unlink()
    with pytest.raises(HeadFormatError, match="neither"):
        EagleHead.load(saved)
    # A pickle that would run code is refused before it does.
    import os
    import pickle

    class Bomb:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "boom"),)

    (saved / "pytorch_model.bin").write_bytes(pickle.dumps({"fc.weight": Bomb()}))
    with pytest.raises(HeadFormatError, match="cannot be read"):
        EagleHead.load(saved)
    assert not (tmp_path / "boom").exists()


def test_a_pickled_state_dict_loads(saved: Path) -> None:
    tensors = load_file(saved / "model.safetensors")
    (saved / "model.safetensors").unlink()
    torch.save(tensors, saved / "pytorch_model.bin")
    assert torch.equal(EagleHead.load(saved).fc.weight, tensors["fc.weight"])


IDS = torch.tensor([0, 3, 50, 95])


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_draft_tokens_are_read_from_the_checkpoint(saved: Path, dtype: torch.dtype) -> None:
    assert EagleHead.load(saved).draft_token_ids is None
    edit(saved, draft_token_ids=IDS.to(dtype))
    head = EagleHead.load(saved, target_config=tiny_model().config, dtype=torch.float16)
    assert head.draft_token_ids is not None
    assert head.draft_token_ids.dtype == torch.int64
    assert head.draft_token_ids.tolist() == IDS.tolist()


def test_draft_tokens_survive_a_save_whatever_the_dtype(tmp_path: Path) -> None:
    """Ids above 2048 would not survive a cast to float16."""
    ids = torch.tensor([0, 2049, 4095])
    head = tiny_head(tiny_model(vocab_size=4096)).with_draft_tokens(ids)
    head.save(tmp_path, dtype=torch.float16)
    assert load_file(tmp_path / "model.safetensors")["draft_token_ids"].dtype == torch.int32
    again = EagleHead.load(tmp_path)
    assert again.draft_token_ids is not None
    assert again.draft_token_ids.tolist() == ids.tolist()
    again.with_draft_tokens(None).save(tmp_path)
    assert "draft_token_ids" not in load_file(tmp_path / "model.safetensors")


def test_draft_tokens_are_kept_by_casts_and_copies_but_are_nothing_that_is_trained() -> None:
    """What the trainer does: copy the head, average its parameters, store and restore its state dict."""
    plain, head = tiny_head(tiny_model()), tiny_head(tiny_model()).with_draft_tokens(IDS)
    copied = copy.deepcopy(head)
    for other in (copied, copied.to(torch.bfloat16), copied.half()):
        assert other.draft_token_ids is not None
        assert other.draft_token_ids.dtype == torch.int64
        assert other.draft_token_ids.tolist() == IDS.tolist()
    assert set(head.state_dict()) == set(plain.state_dict()) == {name for name, _ in head.named_parameters()}
    head.load_state_dict(plain.state_dict())  # of a run without them
    plain.load_state_dict(head.state_dict())
    assert (plain.draft_token_ids, head.draft_token_ids.tolist()) == (None, IDS.tolist())  # type: ignore[union-attr]


def test_draft_tokens_are_checked_and_copied_when_set() -> None:
    head = tiny_head(tiny_model())
    with pytest.raises(HeadFormatError, match="increasing"):
        head.with_draft_tokens(torch.tensor([2, 1]))
    assert head.draft_token_ids is None
    ids = IDS.clone()
    head.with_draft_tokens(ids)
    ids[0] = 1
    assert head.draft_token_ids is not None
    assert head.draft_token_ids.tolist() == IDS.tolist()


def test_bad_configs_give_one_sentence(saved: Path) -> None:
    config = json.loads((saved / "config.json").read_text())
    for change, message in (
        ({"hidden_act": "gelu"}, "gelu"),
        ({"num_key_value_heads": 3}, "divide"),
        ({"hidden_size": "wide"}, "garbles"),
    ):
        (saved / "config.json").write_text(json.dumps(config | change))
        with pytest.raises(HeadFormatError, match=message):
            EagleHead.load(saved)
    (saved / "config.json").write_text("{")
    with pytest.raises(HeadFormatError, match="JSON"):
        EagleHead.load(saved)


def test_old_and_new_rope_settings_mean_the_same() -> None:
    base = tiny_head(tiny_model()).config.to_llama().to_dict()
    base.pop("rope_parameters")
    old = HeadConfig.from_dict(base | {"rope_theta": 5000.0}, fc_bias=False, attention_bias=False)
    new = HeadConfig.from_dict(
        base | {"rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}}, fc_bias=False, attention_bias=False
    )
    position = torch.tensor([[7]])
    for one, other in zip(
        EagleHead(old).rotary(position, torch.float32), EagleHead(new).rotary(position, torch.float32)
    ):
        assert torch.equal(one, other)
