"""Hydra's groups of verl: the parts of its configuration that a command chooses, such as ``optim=megatron``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from rlhf_translate.options import PROCESSES, Convert, Given, Option, Outcome, Table, Unknown, lost, same, to
from rlhf_translate.shared import FSDP, UNREAD
from rlhf_translate.versions import Groups, groups_of, versions

_PLACES = {
    "actor": "actor_rollout_ref.actor",
    "ref": "actor_rollout_ref.ref",
    "rollout": "actor_rollout_ref.rollout",
    "model": "actor_rollout_ref.model",
}
"""Groups whose place has another name, in what is not supervised fine-tuning."""
USUAL = ("ppo_trainer", "sft_trainer", "sft_trainer_engine", "config")
"""Hydra's own files of verl."""
ON_IT = ("one_step_off_ppo_trainer", "fully_async_ppo_trainer", "transfer_queue_ppo_trainer")
"""Files of verl's other programs: the usual one, and the settings of the program."""
OF_MEGATRON = (
    "ppo_megatron_trainer",
    "one_step_off_ppo_megatron_trainer",
    "fully_async_ppo_megatron_trainer",
    "transfer_queue_ppo_megatron_trainer",
)
"""The same with Megatron."""
_OURS = ("fsdp", "dp", "fsdp2")
"""Backends that are FSDP."""
BACKENDS = ("megatron", "mindspeed", "veomni", "torchtitan", "automodel")
"""Other backends of verl."""


def chosen(method: str, options: Iterable[Option]) -> Groups:
    """Returns the parts with defaults of their own that a command chose, or that verl takes: place → part."""
    parts = {group: set(names) for group, names in groups_of("verl").items()}
    said: dict[str, str] = {}
    for option in options:
        name, value = option.name.partition("@")[0], " ".join(option.values).removesuffix(".yaml")
        if option.name.lstrip("-").replace("-", "_") == "config_name" and value in OF_MEGATRON:
            name, value = "model_engine", "megatron"
        if not option.missing and value in parts.get(name, ()):
            said[name] = value
    if method == "sft":
        return [(group, f"{group}={said[group]}") for group in ("optim", "engine") if group in said]
    usual = said.get("model_engine", "dp")
    taken = {role: said.get(role, f"{usual}_{role}") for role in ("actor", "critic")}
    return [(_PLACES.get(role, role), f"{role}={part}") for role, part in taken.items() if part in parts[role]]


def backend_of(part: str) -> str:
    """Returns ``megatron`` for ``megatron_actor``; empty for a part of FSDP, or of none."""
    name = part.partition("=")[2] or part
    return next((backend for backend in BACKENDS if name.partition("_")[0] == backend), "")


def in_place_of(backend: str) -> Outcome:
    """Returns the outcome of a backend that is not here."""
    return to(FSDP, f"in the place of {backend}, which is not here: the same numbers, split by FSDP2")


def _part(group: str, method: str) -> Convert:
    def convert(option: Option, given: Given) -> Outcome:
        name = option.value.removesuffix(".yaml")
        backend = backend_of(name)
        if name not in groups_of("verl")[group]:
            newest = versions("verl")[-1]
            if backend and group == "model_engine":
                return to(FSDP, f"in the place of {backend}, which is not here; it is no part of verl {newest}, so {UNREAD}")
            return lost(f"no part of verl {newest}, so {UNREAD}")
        if group in ("critic", "ref"):
            return same("the critic and the reference are trained and split like the actor")
        if group == "optim":
            return same("its optimizer and schedule are translated")
        if group in ("engine", "model_engine", "actor") and not _is_alone(method, given):
            if backend:
                return in_place_of(backend)
            return to(FSDP) if method == "sft" else same("FSDP, as actor_rollout_ref.actor.strategy says")
        return same("verl's own part, whose defaults are taken" if not backend else "one process: nothing is split")

    return convert


def _is_alone(method: str, given: Given) -> bool:
    """Returns True if one process trains."""
    try:
        return method == "sft" and given.many(PROCESSES) == 1
    except Unknown:
        return False


def _names(method: str) -> Iterator[tuple[str, str]]:
    """Yields the names under which a command chooses a part, with the group."""
    for group in groups_of("verl"):
        place = group if method == "sft" else _PLACES.get(group, group)
        yield from ((name, group) for name in (group, f"{group}@{place}"))
    yield "model@critic.model", "model"


def table(method: str) -> Table:
    return {name: _part(group, method) for name, group in _names(method)}
