"""Contract suites, made-up batches, tiny models and scripted engines for plugin authors' tests, from the package rlhf-authoring."""

from __future__ import annotations

import sys
from typing import Any

from rlhf_host.lazily import lazily

PACKAGE = "rlhf_authoring"

_NAMES = (
    *("CheckResult", "run_contract"),
    *("algorithm_contract", "agent_contract", "backend_contract", "command_contract", "engine_contract", "extension_contract"),
    *("kernels_contract", "reward_contract", "runtime_contract", "tasks_contract", "tracker_contract", "weight_sync_contract"),
    *("Learner", "ModuleEngine", "ScriptedEngine", "byte_tokenizer", "make_batch", "model_inputs", "module_source"),
    *("right_answer", "tiny_tokenizer", "write_tiny_model"),
)

_get, __dir__, __all__ = lazily(__name__, dict.fromkeys(_NAMES, PACKAGE))


def __getattr__(name: str) -> Any:
    try:
        return _get(name)
    except (ModuleNotFoundError, AttributeError) as error:
        # A folder that an uninstalled package has left behind is imported too, and has no file.
        left_behind = name in _NAMES and getattr(sys.modules.get(PACKAGE), "__file__", None) is None
        if not left_behind or (isinstance(error, ModuleNotFoundError) and error.name != PACKAGE):
            raise
        way = "pip install -c dist/wheels.txt 'rlhf-host[testing]'"
        raise ImportError(f"rlhf_host.testing.{name} is in the package rlhf-authoring: {way}") from error
