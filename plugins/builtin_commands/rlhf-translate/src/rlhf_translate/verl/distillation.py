"""verl's on-policy distillation, which a command of GRPO or PPO turns on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from rlhf_translate.options import Convert, Given, Option, Outcome, Table, ask, lost, same, to

_PLACE = "distillation."
_LOSS = f"{_PLACE}distillation_loss."
_TEACHER = f"{_PLACE}teacher_models.teacher_model."
_TEACHERS = f"{_PLACE}teacher_models."
_POOL = f"{_PLACE}teacher_model.enable_resource_pool"
ALIASES = {
    f"{_PLACE}teacher_model.{old}": new
    for old, new in (
        *((name, f"{_TEACHER}{name}") for name in ("model_path", "key", "num_replicas")),
        *((name, f"{_PLACE}{name}") for name in ("n_gpus_per_node", "nnodes")),
    )
}
"""Names before a run could have several teachers."""
ALGORITHM = "on_policy_distill"
_CHOICES = ("loss_mode", "topk", "use_task_rewards", "use_policy_gradient")
_CHUNKS = ("use_chunked_topk", "chunked_topk_chunk_size")
MATTER = tuple(
    f"{_PLACE}{name}"
    for name in (
        *("enabled", "n_gpus_per_node", "nnodes", "teacher_models.teacher_model.model_path"),
        *("distillation_loss.distillation_loss_coef", "distillation_loss.clip_ratio_low", "distillation_loss.clip_ratio_high"),
        *(f"distillation_loss.{name}" for name in _CHOICES),
    )
)
"""Options whose defaults matter."""


_FIRST = "actor_rollout_ref.distillation."
_RENAMED = {".path": ".model_path", ".use_policy_loss": ".use_policy_gradient"}


def renamed(options: Sequence[Option]) -> list[Option]:
    """Returns the options with those of distillation under their newest names: its first place was in the actor, and the only
    teacher of a run may have any name.
    """
    places = {option.name: _newest(option.name) for option in options}
    names = {name.removeprefix(_TEACHERS).partition(".")[0] for name in places.values() if name.startswith(_TEACHERS)}
    if len(names) == 1:
        own = f"{_TEACHERS}{names.pop()}."
        places = {old: name.replace(own, _TEACHER, 1) for old, name in places.items()}
    return [
        option if places[option.name] == option.name else replace(option, name=places[option.name], shown=option.text)
        for option in options
    ]


def _newest(name: str) -> str:
    if not name.startswith(_FIRST):
        return name
    place, dot, last = name.replace(_FIRST, _PLACE, 1).rpartition(".")
    return f"{place}{_RENAMED.get(dot + last, dot + last)}"


def is_on(given: Given) -> bool:
    return given.is_on(f"{_PLACE}enabled")


def alone(given: Given) -> bool:
    """Returns True if no reward of the task is in the loss."""
    return is_on(given) and not given.is_on(f"{_LOSS}use_task_rewards")


def is_gradient(given: Given) -> bool:
    return given.is_on(f"{_LOSS}use_policy_gradient")


def algorithm(given: Given) -> Outcome:
    """Returns the algorithm of a command whose only signal is the teacher."""
    mode, top = given[f"{_LOSS}loss_mode"].value, given[f"{_LOSS}topk"]
    if is_gradient(given) and mode in ("k1", "kl"):
        return to({"algo.name": ALGORITHM})
    if mode == "forward_kl_topk" and not is_gradient(given):
        settings = {"algo.name": ALGORITHM, "algo.signal": "full", "algo.beta": 0.0, "algo.top_k": int(top.number or 0)}
        return to(settings, "there the tokens beyond the likeliest count nothing, here as one")
    how = "its gradient" if is_gradient(given) else "the loss itself"
    why = f"{mode} as {how} is not here: algo.signal sample is k1 as an advantage, full is the whole divergence"
    return Outcome({"algo.name": ALGORITHM}, why, asks=("algo.signal",))


def _beside_rewards(given: Given, aggregation: Callable[[Given], str | None], kinds: Mapping[str, str]) -> Outcome:
    """Returns the penalty that a distillation beside rewards of the task is: the KL to the teacher, in the loss."""
    mode = given[f"{_LOSS}loss_mode"].value
    others = given.is_on("actor_rollout_ref.actor.use_kl_loss") or given.is_on("algorithm.use_kl_in_reward")
    if is_gradient(given) or mode not in kinds or others:
        why = "rewards of the task with this distillation in one loss"
        return ask(f"{why}: --algo on_policy_distill has the distillation alone", "algo.name", algo=ALGORITHM)
    settings = {"kl.coef": given[f"{_LOSS}distillation_loss_coef"].value, "kl.place": "loss", "kl.estimator": kinds[mode]}
    mean = aggregation(given)
    return to(settings | ({"kl.aggregation": mean} if mean not in (None, "token-mean") else {}), "the teacher is the reference")


def _teacher(option: Option, given: Given) -> Outcome:
    role = "teacher" if alone(given) else "reference"
    if option.is_off:
        return ask("no teacher is given, or one for each kind of row, which here is --algo.teachers", f"{role}.model")
    return to({f"{role}.model": option.written})


def devices(given: Given) -> str:
    """Returns the placement of the teacher, if it has devices of its own."""
    if (pool := given[_POOL]).line and pool.is_off:
        return ""
    nodes, each = (int(given.number(f"{_PLACE}{name}")) for name in ("nnodes", "n_gpus_per_node"))
    role = "teacher" if alone(given) else "reference"
    return f"{role}={f'{nodes}x' if nodes > 1 else ''}{each}" if is_on(given) and nodes * each else ""


def _if_on(convert: Convert) -> Convert:
    return lambda option, given: convert(option, given) if is_on(given) else same("no distillation is on")


def _follows(remark: str) -> Convert:
    return _if_on(lambda option, given: same(remark))


def _coefficient(option: Option, given: Given) -> Outcome:
    return same("it weighs the loss beside rewards of the task" if alone(given) else "see distillation.enabled")


def _clamp(option: Option, given: Given) -> Outcome:
    if option.name.endswith("min_clamp") and given[f"{_LOSS}loss_mode"].value != "forward_kl_topk":
        return same("only forward_kl_topk uses it")
    return same("no limit, as it is here") if option.is_off else lost("no limit for the signal of one token here")


def _ends(name: str) -> Convert:
    def convert(option: Option, given: Given) -> Outcome:
        if not (alone(given) and is_gradient(given)):
            return same("no policy loss is computed")
        return to({f"algo.{name}": option.value})

    return convert


def _shape(option: Option, given: Given) -> Outcome:
    return same("the loss clip") if option.value == "vanilla" else lost("verl has no other here")


def table(aggregation: Callable[[Given], str | None], kinds: Mapping[str, str]) -> Table:
    """Returns the options of distillation.

    Args:
        aggregation: returns how losses are averaged.
        kinds: estimators of the KL here, by verl's names.
    """

    def enabled(option: Option, given: Given) -> Outcome:
        if not is_on(given):
            return same("off, as it is here")
        return algorithm(given) if alone(given) else _beside_rewards(given, aggregation, kinds)

    return {
        f"{_PLACE}enabled": enabled,
        f"{_PLACE}teacher_key": _follows("one teacher teaches all rows"),
        **{f"{_PLACE}{name}": _follows("placement has the teacher's devices") for name in ("nnodes", "n_gpus_per_node")},
        _POOL: _follows("placement has the teacher's devices"),
        f"{_TEACHER}model_path": _if_on(_teacher),
        f"{_TEACHER}key": _follows("one teacher teaches all rows"),
        f"{_TEACHER}num_replicas": _follows("placement has the teacher's devices"),
        **{f"{_LOSS}{name}": _follows("see distillation.enabled") for name in _CHOICES},
        f"{_LOSS}distillation_loss_coef": _if_on(_coefficient),
        f"{_LOSS}loss_max_clamp": _if_on(_clamp),
        f"{_LOSS}log_prob_min_clamp": _if_on(_clamp),
        f"{_LOSS}policy_loss_mode": _if_on(_shape),
        f"{_LOSS}clip_ratio": _follows("both limits are given"),
        f"{_LOSS}clip_ratio_low": _if_on(_ends("clip_eps")),
        f"{_LOSS}clip_ratio_high": _if_on(_ends("clip_eps_high")),
        **{f"{_LOSS}{name}": _follows("it changes the memory, not the result") for name in _CHUNKS},
    }
