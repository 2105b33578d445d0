"""Refusals: runs that cannot work are refused before they start, each with one line that says what to do."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin

from rlhf_host.config.check_ahead import ahead_refusals, decide_old_logprobs
from rlhf_host.config.defaults import refusals
from rlhf_host.config.oddities import oddities, updates_text
from rlhf_host.config.problems import fail
from rlhf_host.config.resolve import EVAL_REWARD, Resolved
from rlhf_host.config.schema import EvalConfig, LoraOptions, RoleConfig, RunConfig
from rlhf_host.config.tree import ROLES, Names, annotation_at, role_flag
from rlhf_host.errors import PluginError, near_matches
from rlhf_host.plugins.discovery import HOST
from rlhf_host.plugins.manager import PluginManager
from rlhf_host.plugins.selection import find_data
from rlhf_host.plugins.servers import find_server
from rlhf_host.records.needs import AgentNeeds, AlgoNeeds, CorrectionNeeds, Needs

EVAL_METRICS = (
    *("reward/mean", "reward/stderr", "score/mean", "score/stderr"),
    *("length/mean", "truncated", "samples", "unjudged", "failed", "failed/share"),
)
"""Metrics that evaluations of samples give under ``eval/``, beside pass@k."""
RESERVED = ("agent", "mean", "std", "min", "max", "stderr")
"""No aliases of rewards: ``reward/ALIAS`` would be another metric's name."""


def check(run: Resolved, manager: PluginManager, needs: Needs) -> list[str]:
    """Refuse impossible runs before any model or file is touched; gives warnings about merely odd ones, and what plugins decide
    of settings left at ``auto``, in place.

    Raises:
        UserError: one line per reason, each with what to do.
    """
    config, traits = run.config, run.traits
    decided = list(decide_old_logprobs(config, manager))
    unfit = refusals(config, traits, needs)
    reasons = [
        *_plugin_refusals(config, manager, needs),
        *_state_refusals(manager),
        *_setting_refusals(config, needs),
        *unfit,
        *_forbidden(config, manager),
        *ahead_refusals(config, manager, needs, traits),
    ]
    fail([*reasons, *_off_policy(config, manager), *_idle_corrections(manager)])
    return [*decided, *oddities(config, manager, needs, traits)]


def check_evaluation(config: RunConfig, manager: PluginManager) -> None:
    """Refuse evaluations that cannot be done. Raises ``UserError``, one line per reason."""
    lines = [*_eval_refusals(config.eval), *scoring_refusals(config, manager)]
    if not config.roles["actor"].model:
        lines.append("no model to evaluate: give --actor.model PATH, or --checkpoint RUN_DIR")
    if not config.eval.data.sources:
        lines.append("no evaluation data: give --eval.data PATH or --data PATH")
    if not (config.eval.reward or config.reward or any(not own.rewards for own in manager.needs().values())):
        lines.append("nothing judges the answers: give --reward NAME")
    fail(lines)


def scoring_refusals(config: RunConfig, manager: PluginManager) -> Iterator[str]:
    """Yields what makes it impossible to play and score episodes, one line each."""
    yield from _reward_refusals(config, manager)
    yield from _server_refusals(manager)


def _reward_refusals(config: RunConfig, manager: PluginManager) -> Iterator[str]:
    for alias in (name for name in RESERVED if name in config.reward or name in config.eval.reward):
        why = "for the agent's own rewards" if alias == "agent" else f"as reward/{alias} is of all rewards together"
        yield f"the alias {alias!r} is reserved {why}: choose another alias"
    for item in manager.loaded:
        if item.kind in ("reward", EVAL_REWARD) and item.key not in manager.names("score"):
            yield f"{item} has no score hook, so it scores nothing"


def _state_refusals(manager: PluginManager) -> Iterator[str]:
    for item in manager.loaded:
        if len(half := {"state_dict", "load_state_dict"} & {*manager.hooks(item.key)}) == 1:
            lacks = "load_state_dict" if half == {"state_dict"} else "state_dict"
            yield f"{item} has {half.pop()} and no {lacks}, so its state would be lost where a run is resumed: add {lacks}"


def _server_refusals(manager: PluginManager) -> Iterator[str]:
    for key in (key for key, own in manager.needs().items() if AgentNeeds.of(own).server):
        try:
            find_server()
        except PluginError as error:
            yield f"{key} needs a policy server: {error}"


def _rewarding(manager: PluginManager) -> str:
    """Return what an agent whose steps give rewards has to say, where one is chosen that is not the host's."""
    agents = [item for item in manager.loaded if item.kind == "agent" and item.info.distribution != "rlhf-host"]
    return f"; where the steps of {agents[0].key} give rewards, its hook needs returns Needs(rewards=False)" if agents else ""


def _plugin_refusals(config: RunConfig, manager: PluginManager, needs: Needs) -> Iterator[str]:
    if config.algo is None:
        yield "no algorithm is chosen: give --algo NAME (rlhf plugins --kind algo lists them)"
    saved = config.from_trajectories is not None
    if not needs.samples:
        yield from _row_refusals(config, manager, needs)
    elif config.data.epochs != 1:
        yield f"data.epochs {config.data.epochs:g} is for data that is trained on as it is: set --train.steps"
    elif config.data.condition is not None:
        yield "data.condition is for answers that come with a reward: leave it out (data.template changes prompts)"
    elif not saved and not config.reward and needs.rewards:
        yield "no reward is chosen: give --reward NAME (rlhf plugins --kind reward lists them)" + _rewarding(manager)
    yield from _reward_refusals(config, manager)
    if config.algo is not None:
        chosen = needs.samples and manager.has("make_rows")
        for hook in ("compute_advantages", "compute_loss") if needs.samples and not chosen else ("compute_loss",):
            if not manager.has(hook):
                yield f"no chosen plugin implements {hook}: algorithm {config.algo.name!r} is incomplete"
        if chosen:
            yield from _chosen_row_refusals(manager)
        if not any(need.name == "actor" and need.trainable for need in needs.roles):
            yield f"no chosen plugin trains the actor: needs() of {config.algo.name!r} lacks RoleNeed('actor', trainable=True)"
    if (
        not saved
        and needs.samples
        and not manager.has("agent_run")
        and not (manager.has("agent_reset") and manager.has("agent_step"))
    ):
        yield f"agent {config.agent.name!r} implements neither agent_run nor agent_reset and agent_step"
    yield from _auxiliary_row_refusals(config, manager, needs)
    if not saved:
        yield from _server_refusals(manager)
    yield from _role_refusals(config, needs)
    for key, own in manager.needs().items():
        if (least := own.min_group_size) > config.rollout.n:
            yield f"{key} needs groups of {least} or more, and rollout.n is {config.rollout.n}: set --rollout.n {least}"


def _auxiliary_row_refusals(config: RunConfig, manager: PluginManager, needs: Needs) -> Iterator[str]:
    """Yields plugins whose rows have no batch to train beside."""
    if not needs.samples or manager.has("make_rows"):
        for key in manager.names("auxiliary_rows"):
            name = config.algo.name if config.algo else "a plugin"
            yield f"{key} gives rows that train beside sampled ones with advantages, and {name} has no advantages: leave it out"


def _chosen_row_refusals(manager: PluginManager) -> Iterator[str]:
    """Yields what has no place in a run that samples and trains on the rows of ``make_rows``."""
    (owner,) = manager.names("make_rows")[:1]
    for key in manager.names("compute_advantages"):
        yield f"{owner} trains on the rows that it chooses, which get no advantages, and {key} computes some: choose one of them"
    for key in manager.names("importance_weights"):
        yield f"{key} gives importance_weights, and {owner} trains on the rows that it chooses, without advantages: leave it out"


def _row_refusals(config: RunConfig, manager: PluginManager, needs: Needs) -> Iterator[str]:
    """Yields what has no place in a run over a data set."""
    try:
        plugin = find_data(config, needs)
    except PluginError as error:
        yield str(error)
    else:
        yield from plugin.refusals(config, manager, needs)


def _off_policy(config: RunConfig, manager: PluginManager) -> Iterator[str]:
    """Yields what makes ``Needs(on_policy=True)`` untrue."""
    for key in (key for key, own in manager.needs().items() if own.on_policy):
        rule = f"{key} is right only for the weights that sampled"
        if config.train.updates_per_batch > 1:
            yield f"{rule}, and {updates_text(config.train)} updates per batch: set both to 1"
        if config.from_trajectories is not None:
            yield f"{rule}: leave --from-trajectories out"


def _idle_corrections(manager: PluginManager) -> Iterator[str]:
    """Corrections that no loss term of the algorithm takes."""
    needs = manager.needs()
    for algo in (item for item in manager.loaded if item.kind == "algo"):
        taken = AlgoNeeds.of(needs.get(algo.key)).weights
        accepts = "none" if taken is None else "only weights of whole rows"
        for key in manager.names("importance_weights"):
            if taken is None or (taken, CorrectionNeeds.of(needs.get(key)).weights) == ("row", "token"):
                yield f"{key} gives importance_weights, and the loss of {algo.key} takes {accepts}: leave it out"


def _role_refusals(config: RunConfig, needs: Needs) -> Iterator[str]:
    needed = {need.name: need for need in needs.roles}
    sources = {need.source for need in needs.roles}
    for name in config.roles:
        if name not in needed and name not in sources and name not in ROLES:
            yield f"roles.{name}: no chosen plugin knows this role{near_matches(name, {*needed, *ROLES})}"
    if not config.roles["actor"].model:
        yield "no model to train: give --actor.model PATH"
    if not config.data.sources and config.from_trajectories is None:
        yield "no training data: give --data PATH"
    for name, role in config.roles.items():
        if role.lora.rank == 0 and role.lora != LoraOptions(dropout=role.lora.dropout):
            yield f"roles.{name}.lora is set without a rank, and trains no adapter: give --{role_flag(name)}.lora.rank 16"
        if (role.freeze or role.train_only) and role.adapts:
            yield f"roles.{name}: with adapters all weights of the model are frozen: leave freeze and train_only out"
        if role.adapts and importlib.util.find_spec("peft") is None:
            yield f"LoRA adapters need peft: pip install '{HOST}[peft]'"
        if role.quantize and importlib.util.find_spec("bitsandbytes") is None:
            yield f"weights in 4 bits need bitsandbytes: pip install '{HOST}[bitsandbytes]'"
    for output in needs.outputs:
        if output.role not in ("", *needed):
            yield f"{output.what} of the role {output.role!r} is wanted, and no chosen plugin needs that role"
    yield from _precompute_refusals(config, needs)
    for need in needed.values():
        if need.name == "actor" or config.roles.get(need.name, RoleConfig()).model:
            continue
        if need.source is None:
            yield f"the role {need.name!r} has no model: give {_model_flag(need.name)} PATH"
            continue
        is_role = need.source in {*ROLES, *config.roles} and need.source not in needed
        if is_role and not config.roles.get(need.source, RoleConfig()).model:
            flags = f"{_model_flag(need.source)} PATH, or {_model_flag(need.name)} PATH"
            yield f"the role {need.name!r} starts from the role {need.source!r}, which has no model: give {flags}"


def _precompute_refusals(config: RunConfig, needs: Needs) -> Iterator[str]:
    """Roles whose log-probabilities cannot be known before the run, or are not all that is wanted of them."""
    for need in needs.roles:
        if need.name not in config.roles or not config.roles[need.name].precompute:
            continue
        leave, uses = f"leave --{role_flag(need.name)}.precompute out", {o.what for o in needs.outputs if o.role == need.name}
        if need.trainable or need.follows is not None:
            moves = "is trained" if need.trainable else f"follows {need.source}"
            yield f"the role {need.name!r} {moves}, so its log-probabilities cannot be computed before: {leave}"
        elif needs.samples:
            yield f"the run samples the rows that the role {need.name!r} is wanted for, so nothing is known before: {leave}"
        elif uses != {"logprobs"} or need.own_tokens:
            other = ", ".join(sorted(uses - {"logprobs"})) or "nothing that can be kept"
            yield f"of the role {need.name!r} {other} is wanted, and only log-probabilities are computed before: {leave}"


def _model_flag(role: str) -> str:
    return f"--{role_flag(role)}.model"


def _setting_refusals(config: RunConfig, needs: Needs) -> Iterator[str]:
    rollout, train = config.rollout, config.train
    if rollout.temperature == 0 and needs.samples:
        yield "rollout.temperature is 0: greedy samples of a group are all the same; train with a temperature above 0"
    if rollout.max_tokens is not None and rollout.max_new_tokens >= rollout.max_tokens:
        yield (
            f"rollout.max_new_tokens {rollout.max_new_tokens} leaves no room for a prompt in rollout.max_tokens"
            f" {rollout.max_tokens}: lower the first or raise the second"
        )
    if train.minibatches > train.batch_size:
        yield (
            f"train.minibatches {train.minibatches} is more than train.batch_size {train.batch_size}:"
            " a batch is split between groups, so there can be at most one minibatch per prompt"
        )
    if train.old_logprobs == "fused" and train.updates_per_batch > 1:
        rule = "train.old_logprobs fused works only with one update per batch"
        yield f"{rule}, and {updates_text(train)}: set --train.old-logprobs recompute"
    if (best := config.checkpoint.best) and best.startswith("eval/"):
        if config.from_trajectories is not None:
            yield f"checkpoint.best is {best}, and from_trajectories evaluates nothing: set another metric"
        elif not config.eval.data.sources:
            yield f"checkpoint.best is {best}, and nothing is evaluated: give --eval.data PATH"
        elif needs.samples:
            judges = config.eval.reward or config.reward
            known = [*EVAL_METRICS, *(f"reward/{name}" for name in judges if len(judges) > 1)]
            known += [f"pass@{k}" for k in sorted({1, config.eval.n, *config.eval.k})]
            metric = best.removeprefix("eval/")
            if not any(f"/{metric}".endswith(f"/{name}") for name in known):  # perhaps after a source's name
                known = [f"eval/{name}" for name in known]
                near = near_matches(best, known, 1) or f"; there are {', '.join(known)}"
                if "pass@" in metric:
                    near = f"; k is 1, eval.n ({config.eval.n}) or in eval.k: set --eval.n or --eval.k"
                yield f"checkpoint.best is {best}, and evaluations have no such metric{near}"
    if config.eval.every and not config.eval.data.sources:
        yield f"eval.every is {config.eval.every}, and nothing is evaluated: give --eval.data PATH"
    yield from _eval_refusals(config.eval)


def _eval_refusals(settings: EvalConfig) -> Iterator[str]:
    if (k := max(settings.k, default=0)) > settings.n:
        yield f"eval.k {k} needs at least as many samples, and eval.n is {settings.n}: set --eval.n {k}"
    if settings.temperature == 0 and settings.n > 1:
        yield f"eval.temperature 0 makes {settings.n} equal samples: set --eval.n 1, or a temperature above 0"


def _forbidden(config: RunConfig, manager: PluginManager) -> Iterator[str]:
    """Settings that a plugin declares to be wrong for it: the host's, or options of an extension, ``NAME.OPTION``."""
    settings, installed = config.model_dump(), Names().plugins
    decided = {"train.old_logprobs": config.old_logprobs_mode}
    for key, own in manager.needs().items():
        for forbidden in own.forbids:
            section, *rest = forbidden.setting.split(".")
            sections = {forbidden.setting: settings[section]} if section in settings else {}
            unknown = PluginError(f"{key} forbids {forbidden.setting!r}, and there is no such setting; tell its author")
            if installed.get(section) == "extension":
                items = [item for item in manager.loaded if (item.kind, item.info.name) == ("extension", section)]
                aliases = {item.alias: "" if item.alias == section else "with." for item in items}
                sections = {f"{head}{alias}.{'.'.join(rest)}": settings["with"][alias] for alias, head in aliases.items()}
            elif not sections:
                raise unknown
            for setting, actual in sections.items():
                for part in rest:
                    if not isinstance(actual, dict) or part not in actual:
                        raise unknown
                    actual = actual[part]
                if (value := _text(forbidden.value)) in (_text(actual), decided.get(setting)):
                    flag = setting.replace("_", "-")
                    other = _others(setting, value) or "to something else"
                    yield f"{key} does not work with {setting} {value} ({forbidden.why}): set --{flag} {other}"


def _others(setting: str, value: str) -> str:
    """Returns what else a setting of the host may be, if that is a few words."""
    annotation = annotation_at(tuple(setting.split(".")))
    words = get_args(annotation) if get_origin(annotation) is Literal else ()
    return " or ".join(word for word in words if word not in (value, "auto"))


def _text(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    return f"{value:g}" if isinstance(value, float) else str(value)
