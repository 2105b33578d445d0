from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from click.testing import CliRunner, Result
from rlhf_authoring.learner import __file__ as learner
from transformers import LlamaConfig, Qwen2Config

from rlhf_host.commands import main

OWNERS = {"fsdp": "rlhf_backend_fsdp", "http": "rlhf_engine_http"}
MODELS: dict[str, Any] = {
    "7B": Qwen2Config(
        hidden_size=3584,
        intermediate_size=18944,
        num_hidden_layers=28,
        num_attention_heads=28,
        num_key_value_heads=4,
        vocab_size=152064,
    ),
    "32B": Qwen2Config(
        hidden_size=5120,
        intermediate_size=27648,
        num_hidden_layers=64,
        num_attention_heads=40,
        num_key_value_heads=8,
        vocab_size=152064,
    ),
    "70B": LlamaConfig(
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
        vocab_size=128256,
    ),
}
"""Shapes of Qwen2.5 and Llama 3."""


@pytest.fixture
def directory(tmp_path) -> Callable[[str], str]:
    """Writes the ``config.json`` of a model, and nothing else."""

    def write(name: str) -> str:
        MODELS[name].save_pretrained(tmp_path / name)
        assert [each.name for each in (tmp_path / name).iterdir()] == ["config.json"]
        return str(tmp_path / name)

    return write


@pytest.fixture
def plan(monkeypatch) -> Callable[..., Result]:
    """``rlhf plan`` of a policy alone, in this process. Skips what needs a package that is not installed."""
    monkeypatch.setenv("COLUMNS", "200")

    def run(*arguments: Any) -> Result:
        for package in {OWNERS[each] for each in arguments if each in OWNERS}:
            pytest.importorskip(package)
        return CliRunner().invoke(main, ["plan", "--algo", f"{learner}:Learner", *map(str, arguments)])

    return run
