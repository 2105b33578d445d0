"""A tiny model with an optimizer that shows small differences."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from rlhf_authoring.models import write_tiny_model


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def small(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Settings of a session or a run: two prompts with four answers of up to eight tokens."""
    monkeypatch.chdir(tmp_path)
    rows = [{"prompt": f"{i}+{i}=", "label": str(2 * i)} for i in range(8)]
    return {
        "model": tiny_model,
        "data": rows,
        "n": 4,
        "max_new_tokens": 8,
        "batch_size": 2,
        "steps": 3,
        "lr": 1e-2,
        "train": {"threads": 1},
        "actor": {"warmup_steps": 0},
        "kernels": "none",
    }
