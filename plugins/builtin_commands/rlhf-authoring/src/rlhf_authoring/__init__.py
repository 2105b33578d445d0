"""For plugin authors' tests: contract suites, made-up batches, tiny models, scripted engines, an algorithm to train with.

Importing this loads no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from rlhf_authoring.contracts.suite import (
    CheckResult,
    agent_contract,
    algorithm_contract,
    backend_contract,
    command_contract,
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
from rlhf_authoring.models import byte_tokenizer, tiny_tokenizer, write_tiny_model

if TYPE_CHECKING:
    from rlhf_authoring.engines import ModuleEngine, ScriptedEngine, module_source
    from rlhf_authoring.learner import Learner, right_answer
    from rlhf_authoring.tensors import make_batch, model_inputs

_WITH_TORCH = {
    **dict.fromkeys(("ModuleEngine", "ScriptedEngine", "module_source"), "engines"),
    **dict.fromkeys(("Learner", "right_answer"), "learner"),
    **dict.fromkeys(("make_batch", "model_inputs"), "tensors"),
}
"""Name → the module that it is in."""

__all__ = [
    "CheckResult",
    "Learner",
    "ModuleEngine",
    "ScriptedEngine",
    "agent_contract",
    "algorithm_contract",
    "backend_contract",
    "byte_tokenizer",
    "command_contract",
    "engine_contract",
    "extension_contract",
    "kernels_contract",
    "make_batch",
    "model_inputs",
    "module_source",
    "reward_contract",
    "right_answer",
    "run_contract",
    "runtime_contract",
    "tasks_contract",
    "tiny_tokenizer",
    "tracker_contract",
    "weight_sync_contract",
    "write_tiny_model",
]


def __getattr__(name: str) -> Any:
    if name not in _WITH_TORCH:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_WITH_TORCH[name]}"), name)


def __dir__() -> list[str]:
    return __all__
