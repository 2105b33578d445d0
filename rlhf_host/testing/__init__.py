"""For plugin authors' tests: contract suites, made-up batches, tiny models, scripted engines. Importing this loads no torch."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlhf_host.testing.contracts import (
        CheckResult,
        agent_contract,
        algorithm_contract,
        extension_contract,
        reward_contract,
        run_contract,
    )
    from rlhf_host.testing.engines import ScriptedEngine
    from rlhf_host.testing.models import tiny_tokenizer, write_tiny_model
    from rlhf_host.testing.tensors import make_batch

_HOME = {
    "CheckResult": "contracts",
    "ScriptedEngine": "engines",
    "agent_contract": "contracts",
    "algorithm_contract": "contracts",
    "extension_contract": "contracts",
    "make_batch": "tensors",
    "reward_contract": "contracts",
    "run_contract": "contracts",
    "tiny_tokenizer": "models",
    "write_tiny_model": "models",
}

__all__ = [
    "CheckResult",
    "ScriptedEngine",
    "agent_contract",
    "algorithm_contract",
    "extension_contract",
    "make_batch",
    "reward_contract",
    "run_contract",
    "tiny_tokenizer",
    "write_tiny_model",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
