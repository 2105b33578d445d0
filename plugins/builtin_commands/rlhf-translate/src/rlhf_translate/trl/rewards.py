"""Rewards of TRL's GRPO and RLOO."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rlhf_translate.options import Given, Option, Outcome, lost, to

_VERIFIERS = ("accuracy_reward", "reasoning_accuracy_reward")
_THOUGHTS = "think_format_reward"
_PENALTY = "get_soft_overlong_punishment"
"""TRL's own reward functions with a counterpart. Its command line names them, and an import path may."""
_OWN = re.compile(rf"(?:trl\.rewards\.(?:\w+\.)?)?({'|'.join((*_VERIFIERS, _THOUGHTS))})|({_PENALTY})")


@dataclass(frozen=True, slots=True)
class _Reward:
    """Translation of a name."""

    alias: str
    plugin: str = ""
    """Empty: the reader must say it."""
    why: str = ""

    @property
    def settings(self) -> dict[str, object]:
        if self.plugin == "overlong_penalty":
            return {"with.overlong_penalty.max_length": 1280, "with.overlong_penalty.buffer": 256}
        pattern = {f"{self.key}.pattern": "<think>(?!.*<think>).*?</think>.*"} if self.plugin == "format" else {}
        return {f"{self.key}.name": self.plugin, **pattern} if self.plugin else {}

    @property
    def key(self) -> str:
        return f"reward.{self.alias}"

    @property
    def weight(self) -> str:
        return "with.overlong_penalty.factor" if self.plugin == "overlong_penalty" else f"{self.key}.weight"


def _rewards(names: Sequence[str]) -> Iterator[_Reward]:
    """Yields the rewards, each under an alias of its own."""
    specs: dict[str, str] = {}
    for name in names:
        spec, why = _spec(name)
        function = re.sub(r"\W+", "_", re.split(r"[.:]", name.removesuffix(".py"))[-1]).strip("_") or "reward"
        alias = function if specs.setdefault(function, spec or name) == (spec or name) else re.sub(r"\W+", "_", name)
        yield _Reward(alias, spec, why)


def _spec(name: str) -> tuple[str, str]:
    """Returns the plugin for one of TRL's functions, an import path, or a file and a function in it; or why there is none."""
    if match := _OWN.fullmatch(name):
        return ("overlong_penalty" if match[2] else "format" if match[1] == _THOUGHTS else "math_verifier"), ""
    if name.rpartition(":")[0].endswith(".py"):
        return name, ""
    if "." not in name or not name.replace(".", "_").isidentifier():
        return "", f"{name} is no function of TRL's, and no import path"
    module, _, function = name.rpartition(".")
    file = f"{module.replace('.', '/')}.py"
    return (f"{file}:{function}", "") if Path(file).is_file() else ("", f"{name}: there is no file {file} here")


def functions(option: Option, given: Given) -> Outcome:
    settings: dict[str, object] = {}
    unknown = []
    for reward in _rewards(option.texts):
        settings |= reward.settings
        unknown += [] if reward.plugin else [reward]
    if not unknown:
        return to(settings)
    remark = f"{'; '.join(reward.why for reward in unknown)}: a reward of yours, FILE.py:NAME, or reward_model for a model"
    keys = tuple(f"{reward.key}.name" for reward in unknown)
    return Outcome(settings, remark, asks=keys, stand_ins=dict.fromkeys(keys, "math_verifier"))


def weights(option: Option, given: Given) -> Outcome:
    model = ["reward.reward_model.weight"] if "reward_model_name_or_path" in given else []
    keys = [*model, *(reward.weight for reward in _rewards(given["reward_funcs"].texts))]
    if len(keys) != len(option.items):
        return lost(f"{len(option.items)} weights for {len(keys)} rewards")
    return to(dict(zip(keys, option.items, strict=True)))
