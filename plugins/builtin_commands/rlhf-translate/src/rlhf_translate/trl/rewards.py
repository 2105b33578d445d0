"""Rewards of TRL's GRPO and RLOO."""

from __future__ import annotations

import re

from rlhf_translate.options import Given, Option, Outcome, lost, to
from rlhf_translate.shared import rewards

_FUNCTIONS: dict[str, dict[str, object]] = {
    "accuracy_reward": {"reward.accuracy_reward.name": "math_verifier"},
    "reasoning_accuracy_reward": {"reward.reasoning_accuracy_reward.name": "math_verifier"},
    "think_format_reward": {
        "reward.think_format_reward.name": "format",
        "reward.think_format_reward.pattern": "<think>(?!.*<think>).*?</think>.*",
    },
    "get_soft_overlong_punishment": {"with.overlong_penalty.max_length": 1280, "with.overlong_penalty.buffer": 256},
}
"""TRL's own reward functions."""


def _own(name: str) -> dict[str, object]:
    """Returns the reward for an import path, or for a file and a function in it."""
    path, _, function = name.rpartition(":")
    if path.endswith(".py"):
        return dict(rewards(name).settings)
    if "." in name and name.replace(".", "_").isidentifier():
        module, _, function = name.rpartition(".")
        return dict(rewards(f"{module.replace('.', '/')}.py:{function}").settings)
    return {}


def functions(option: Option, given: Given) -> Outcome:
    settings: dict[str, object] = {}
    unknown = []
    for name in option.texts:
        known = _FUNCTIONS.get(name) or _own(name)
        settings |= known
        unknown += [] if known else [name]
    if not unknown:
        return to(settings)
    some = f"{', '.join(unknown)} {'is' if len(unknown) == 1 else 'are'}"
    remark = f"{some} no function of TRL's, and no import path: a reward of yours, FILE.py:NAME, or reward_model for a model"
    keys = tuple(f"reward.{_alias(name)}.name" for name in unknown)
    return Outcome(settings, remark, asks=keys, stand_ins=dict.fromkeys(keys, "math_verifier"))


def _alias(name: str) -> str:
    """Returns the alias of the reward that a name becomes."""
    key = next(iter(_own(name)), "")
    return key.split(".")[1] if key else re.sub(r"\W+", "_", name).strip("_") or "reward"


def weights(option: Option, given: Given) -> Outcome:
    model = ["reward_model"] if "reward_model_name_or_path" in given else []
    names = [*model, *given["reward_funcs"].texts]
    if len(names) != len(option.items):
        return lost(f"{len(option.items)} weights for {len(names)} rewards")
    settings = {}
    for name, weight in zip(names, option.items, strict=True):
        penalty = name == "get_soft_overlong_punishment"
        settings["with.overlong_penalty.factor" if penalty else f"reward.{_alias(name)}.weight"] = weight
    return to(settings)
