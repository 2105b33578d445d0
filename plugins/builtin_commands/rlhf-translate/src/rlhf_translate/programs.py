"""Training programs of other projects, and the meaning of their commands."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass, field

from rlhf_host import UserError
from rlhf_translate.options import PROCESSES, Option
from rlhf_translate.versions import Groups, check

PROJECTS = {"openrlhf": "OpenRLHF", "trl": "TRL", "verl": "verl"}

METHODS = {
    "openrlhf": ("ppo_ray", "dpo", "sft", "rm", "kto", "kd", "prm"),
    "trl": ("grpo", "rloo", "dpo", "sft", "kto", "reward", "prm"),
    "verl": ("ppo", "sft"),
}
"""Project → methods that its programs train, in its own words. The first is that of a file that does not tell."""

BY_ROLE = (("openrlhf", "ppo_ray"), ("verl", "ppo"))
"""Programs whose options say on how many devices each role is; the number of their own processes says nothing."""

_NAMES = {
    "openrlhf": "train_ppo_ray, train_dpo, train_sft, train_rm, train_kto, train_kd, train_prm",
    "trl": "trl grpo, trl rloo, trl dpo, trl sft, trl kto, trl reward, and prm.py",
    "verl": "main_ppo, main_dapo, fully_async_main, sft_trainer, fsdp_sft_trainer",
}

_PROGRAMS = {
    "openrlhf": re.compile(r"(?:.*[./])?openrlhf[./]cli[./]train_(\w+?)(?:\.py)?"),
    "trl": re.compile(
        r"(?:.*/)?(?:trl[./]scripts[./]|trl[./]experimental[./]\w+[./]|examples/scripts[./](?:\w+/)?)(\w+?)(?:\.py)?"
    ),
    "verl": re.compile(
        r"(?:.*[./])?(?:verl[./]trainer|verl[./]experimental[./]\w+|recipe[./]\w+(?:[./]src)?)[./]((?:main|fsdp_sft|sft)_\w+?|fully_async_main)(?:\.py)?"
    ),
}
_FIRST = re.compile(r"(?:.*/)?train_(ppo_ray|ppo|sft|rm|dpo|kto|kd|prm)\.py")
"""OpenRLHF's programs of 2023, which were files of its examples; others have such names too."""
_FIRST_OPTIONS = ("--pretrain", "--save_path", "--zero_stage", "--train_batch_size", "--micro_train_batch_size")
"""Options by which they are recognised."""
_CALLED = {
    "reward_modeling": "reward",
    "sft_vlm": "sft",
    "sft_gpt_oss": "sft",
    "dpo_vlm": "dpo",
    "mpo_vlm": "dpo",
    "main_ppo": "ppo",
    "main_ppo_sync": "ppo",
    "main_ppo_v0": "ppo",
    "main_dapo": "ppo",
    "fully_async_main": "ppo",
    "sft_trainer": "sft",
    "sft_trainer_ray": "sft",
    "fsdp_sft_trainer": "sft",
}
OTHERS = {
    "swift": "ms-swift",
    "megatron": "ms-swift",
    "llamafactory-cli": "LLaMA-Factory",
    "axolotl": "axolotl",
    "axolotl.cli.train": "axolotl",
    "tune": "torchtune",
    "nemo_rl": "NeMo RL",
}
"""Programs of projects that are not translated."""

_MENTION = re.compile(
    r"openrlhf[./]cli[./]|verl[./]trainer[./]|\btrl +[a-z]+ |(?:trl[./]|examples/)scripts[./]|train_\w+\.py|\bpython[\d.]* "
)


@dataclass(frozen=True, slots=True)
class Origin:
    """Origin of a file, given by the reader: ``PROJECT[:METHOD][==VERSION]``."""

    project: str = ""
    method: str = ""
    version: str = ""


@dataclass
class Command:
    """One command that trains."""

    project: str
    method: str
    options: list[Option]
    line: int
    program: str = ""
    """Program as in the file; for a configuration, the file."""
    launch: list[Option] = field(default_factory=list)
    """Options of the launcher: torchrun, accelerate, a job of Ray; and variables before it."""
    processes: Option = field(default_factory=lambda: Option(PROCESSES, ("1",)))
    """Number of processes that the launcher starts."""
    version: str = ""
    """Version given by the reader."""
    added: frozenset[str] = frozenset()
    """Options that its version lacks, according to the command."""
    groups: Groups = ()
    """Parts of the project's configuration that it chose."""
    notes: list[str] = field(default_factory=list)
    """Notes on the file beside its options."""

    @property
    def about(self) -> str:
        return f"{PROJECTS[self.project]} ({self.method})"


def origin_of(text: str | None) -> Origin:
    """Parses an origin. Raises ``UserError`` if it names no project, method or version."""
    name, equals, version = (text or "").partition("==")
    project, _, method = name.partition(":")
    if (text and project not in METHODS) or (method and method not in METHODS[project]):
        known = ", ".join(f"{name}[:{'|'.join(methods)}][==VERSION]" for name, methods in METHODS.items())
        raise UserError(f"--from {text}: should be one of {known}")
    if equals:
        check(project, version)
    return Origin(project, method, version)


def program_of(text: str) -> tuple[str, str] | None:
    """Returns project and method of a word that is a program; a method that is unknown here has the project's own name."""
    for project, pattern in _PROGRAMS.items():
        if match := pattern.fullmatch(text):
            return project, _CALLED.get(match[1], match[1])
    return None


def first_program_of(text: str, options: Collection[str]) -> tuple[str, str] | None:
    """Returns OpenRLHF and the method of a file of its early examples.

    Args:
        options: names after it.
    """
    match = _FIRST.fullmatch(text)
    known = match and sum(name in options for name in _FIRST_OPTIONS) >= 3
    return ("openrlhf", match[1]) if match and known else None


def mentions(text: str) -> bool:
    """Returns True if a text may have a training command in it."""
    return bool(_MENTION.search(text))


def unsupported(program: str, project: str, method: str) -> str:
    """Returns a message about a program whose method is unknown here."""
    if (hint := _INSTEAD.get((project, method))) is not None:
        return f"{program} is not translated: {hint}"
    return f"{program} is not supported; supported are {_NAMES[project]}"


_INSTEAD = {
    **{
        ("trl", f"{name}_vlm"): f"its data and its rewards are in its code; it is --algo {name} here, with pictures in the rows"
        for name in ("grpo", "rloo")
    },
    ("trl", "online_dpo_vlm"): "it is --algo online_dpo with --reward here, with pictures in the rows",
    **{
        ("trl", name): f"its data and its rewards are in its code; it is {here} here"
        for name, here in {
            "gspo": "--algo grpo --algo.loss gspo",
            "gspo_vlm": "--algo grpo --algo.loss gspo, with pictures in the rows",
            "maxrl": "--algo maxrl",
            "grpo_agent": "--algo grpo --agent multi_turn, with the tools in a file of yours,",
            "grpo_2048": "--algo grpo --agent FILE.py",
            "async_grpo": "--algo grpo --async-depth N",
        }.items()
    },
    (
        "trl",
        "gold",
    ): "it is --algo on_policy_distill with --algo.own-tokens true, --algo.signal full and --teacher.model here",
    ("trl", "async_distillation"): "it is --algo on_policy_distill with --teacher.model and --async-depth N here",
    ("trl", "orpo"): "it is --algo dpo --algo.loss orpo here",
    ("trl", "cpo"): "it is --algo cpo here, and CPO-SimPO --algo cpo --algo.loss sigmoid_norm",
    ("trl", "xpo"): "it is --algo xpo --agent xpo with --reward here",
    ("trl", "nash_md"): "it is --algo nash_md --agent nash_md with --reward here",
    ("trl", "bco"): "pairs train with --algo dpo --algo.loss bco_pair here",
    ("trl", "dpo_online"): "it is --algo online_dpo with --reward here",
    ("trl", "ppo_tldr"): "it is --algo ppo with --reward reward_model and --reward-model.model here",
    (
        "openrlhf",
        "ppo",
    ): "the program of OpenRLHF up to 0.4 without Ray; its options are those of train_ppo_ray: --from openrlhf:ppo_ray",
    ("openrlhf", "opd"): "distillation on the student's own answers is --algo on_policy_distill with --teacher.model here",
    ("openrlhf", "ct"): "conditional training, which is --algo sft with --data.condition here",
    ("trl", "gkd"): "distillation on the student's own answers is --algo on_policy_distill with --teacher.model here",
    (
        "trl",
        "distillation",
    ): "distillation is --algo distill on a data set, or --algo on_policy_distill, with --teacher.model here",
    ("trl", "sdpo"): "it is --algo sdpo here",
    ("trl", "sdft"): "the nearest is --algo sdpo here, whose teacher is the policy that has read a solution",
    ("trl", "tpo"): "it is --algo tpo here",
    ("trl", "gmpo"): "it is --algo gmpo here",
    ("trl", "ssd"): "it samples, and trains on its own answers: rlhf generate, then rlhf train --algo sft",
    ("trl", "ssd_eval"): "it evaluates and trains nothing: rlhf eval",
    ("trl", "online_dpo"): "it is --algo online_dpo with --reward here",
    ("trl", "ppo"): "it is --algo ppo with --reward reward_model and --reward-model.model here",
}
