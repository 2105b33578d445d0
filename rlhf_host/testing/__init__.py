"""For plugin authors' tests: contract suites, made-up batches, tiny models, scripted engines. Importing this loads no torch."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlhf_host.testing.contracts.suite import (
        CheckResult,
        agent_contract,
        algorithm_contract,
        backend_contract,
        engine_contract,
        extension_contract,
        kernels_contract,
        reward_contract,
        run_contract,
        runtime_contract,
        tasks_contract,
        tracker_contract,
        weight_sync_contract,
    )
    from rlhf_host.testing.engines import ScriptedEngine
    from rlhf_host.testing.inputs import model_inputs
    from rlhf_host.testing.models import tiny_tokenizer, write_tiny_model
    from rlhf_host.testing.tensors import make_batch
    from rlhf_host.testing.weights import ModuleEngine, module_source

SUITES = (
    "agent",
    "algorithm",
    "backend",
    "engine",
    "extension",
    "kernels",
    "reward",
    "runtime",
    "tasks",
    "tracker",
    "weight_sync",
)

_HOME = {
    **{f"{kind}_contract": "contracts.suite" for kind in SUITES},
    "CheckResult": "contracts.suite",
    "run_contract": "contracts.suite",
    "ModuleEngine": "weights",
    "module_source": "weights",
    "make_batch": "tensors",
    "model_inputs": "inputs",
    "ScriptedEngine": "engines",
    "tiny_tokenizer": "models",
    "write_tiny_model": "models",
}
"""Name → the module that it is in."""

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
