"""The script for whoever has a GPU: it says so where there is none, and what it measures with works without one."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from eagle2.eagle import TreeSettings
from eagle2.engine import DTYPES, Engine
from tests.tiny import byte_tokenizer, tiny_head, tiny_model

SCRIPT = Path(__file__).parent.parent / "scripts" / "gpu_check"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setattr("sys.dont_write_bytecode", True)
    loader = importlib.machinery.SourceFileLoader("gpu_check", str(SCRIPT))
    spec = importlib.util.spec_from_loader("gpu_check", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def load(dtype: str) -> Engine:
    tokenizer = byte_tokenizer()
    model = tiny_model(vocab_size=len(tokenizer), max_position_embeddings=256)
    head = tiny_head(model).to(DTYPES[dtype])
    return Engine(model.to(DTYPES[dtype]), tokenizer, head, name="tiny", head_name="tiny", costs=None)


def test_without_cuda_it_says_so_in_a_sentence(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert script.main([]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err == "gpu_check needs a CUDA GPU, and torch finds none on this machine.\n"


def test_its_report_has_every_lane(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    report = script.examine(load, ["bfloat16"], ["hi", "hello"], 12, TreeSettings("dynamic", 3, 4, 9))
    names = ["ar, plain", "ar, graphs", "eagle2, plain", "eagle2, graphs"]
    assert report["first_difference_in_float32"] == {name: [None, None] for name in names}
    assert list(report["measured"]["bfloat16"]) == names
    for name, figures in report["measured"]["bfloat16"].items():
        assert figures["tokens_per_second"] > 0
        assert figures["tau"] == 1 if name.startswith("ar") else figures["tau"] >= 1
    assert report["graphs_in_float32"] == dict.fromkeys(
        ("target", "drafter"), "static shapes without graphs: cpu has none"
    )
    assert json.loads(json.dumps(report)) == report
    shown = script.table(report)
    assert all(name in shown for name in names)
    assert "float32 ids equal" in shown


def test_a_lane_that_goes_astray_is_named_with_the_token(script: ModuleType) -> None:
    engine = load("float32")
    lanes, _ = script.make_lanes(engine, TreeSettings("dynamic", 3, 4, 9), [])
    ids = engine.encode("hi")
    right = script.ids_of(lanes["ar, plain"](ids, 12))

    def wrong(prompt: list[int], count: int) -> Any:
        yield script.Prefill(right[0], None, 0.0, None)
        yield script.Prefill(right[1] + 1, None, 0.0, None)

    found = script.first_differences(engine, {"wrong": wrong, "right": lanes["eagle2, graphs"]}, [ids], 12)
    assert found == {"wrong": [1], "right": [None]}
