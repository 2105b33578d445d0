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
        kernels_contract,
        reward_contract,
        run_contract,
        tasks_contract,
        tracker_contract,
        weight_sync_contract,
    )
    from rlhf_host.testing.engines import ScriptedEngine
    from rlhf_host.testing.inputs import model_inputs
    from rlhf_host.testing.models import tiny_tokenizer, write_tiny_model
    from rlhf_host.testing.tensors import make_batch
    from rlhf_host.testing.weights import ModuleEngine, module_source

_HOME = {
    "CheckResult": "contracts",
    "ModuleEngine": "weights",
    "ScriptedEngine": "engines",
    "agent_contract": "contracts",
    "algorithm_contract": "contracts",
    "extension_contract": "contracts",
    "kernels_contract": "contracts",
    "make_batch": "tensors",
    "model_inputs": "inputs",
    "module_source": "weights",
    "reward_contract": "contracts",
    "run_contract": "contracts",
    "tasks_contract": "contracts",
    "tiny_tokenizer": "models",
    "tracker_contract": "contracts",
    "weight_sync_contract": "contracts",
    "write_tiny_model": "models",
}

__all__ = [*_HOME]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
