"""Refusals of runs whose sampling runs ahead of training, and what such runs decide by themselves."""

from __future__ import annotations

from collections.abc import Iterator

from rlhf_host.config.defaults import RunTraits
from rlhf_host.config.schema import RunConfig
from rlhf_host.hookspecs import RULES
from rlhf_host.plugins.manager import PluginManager
from rlhf_host.plugins.recommended import recommended
from rlhf_host.records.needs import Needs, RewardNeeds

OLD_LOGPROBS = "train.old_logprobs"


def decide_old_logprobs(config: RunConfig, manager: PluginManager) -> Iterator[str]:
    """Has old log-probabilities recomputed, in place, if the ratio would be against the sampler by default and a plugin does not
    work with that; yields what to say of it."""
    if not config.async_depth or config.train.old_logprobs != "auto":
        return
    unfit = _unfit(manager)
    if "sampler" in unfit and "recompute" not in unfit:
        key, why = unfit["sampler"]
        config.train.old_logprobs = "recompute"
        yield f"train.old_logprobs is recompute: with async_depth it would be sampler, and {key} does not work with that ({why})"


def _unfit(manager: PluginManager) -> dict[str, tuple[str, str]]:
    """Returns what old log-probabilities may not be → the plugin that says so, and why."""
    forbids = [(key, forbidden) for key, own in manager.needs().items() for forbidden in own.forbids]
    return {each.value: (key, each.why) for key, each in forbids if each.setting == OLD_LOGPROBS}


def ahead_refusals(config: RunConfig, manager: PluginManager, needs: Needs, traits: RunTraits) -> Iterator[str]:
    if config.async_depth:
        yield from _async_refusals(config, manager, needs, traits)
    yield from _overtaking_refusals(config)
    yield from _in_flight_refusals(config, traits)


def _async_refusals(config: RunConfig, manager: PluginManager, needs: Needs, traits: RunTraits) -> Iterator[str]:
    """Yields what has no place where sampling runs ahead of training."""
    rule = f"async_depth is {config.async_depth}"
    if not needs.samples or config.from_trajectories is not None:
        yield f"{rule}, and nothing is sampled: leave --async-depth out"
        return
    for key in (key for key, own in manager.needs().items() if own.on_policy):
        yield f"{rule}, and {key} is right only for the weights that sampled: leave --async-depth out"
    mode = config.old_logprobs_mode
    if mode != "sampler" and not manager.has("importance_weights"):
        way = "" if "sampler" in _unfit(manager) else "leave --train.old-logprobs out, or "
        way += f"add a correction (--with {recommended('extension', 'mismatch')})"
        yield f"{rule}, and with {OLD_LOGPROBS} {mode} nothing corrects for the versions that sampled: {way}"
    if traits.engine.sleeps:
        yield f"{rule}, and engine {config.engine.name} sleeps while the trainer works: leave one of the two out"
    for key in manager.names("draw_tasks"):
        yield f"{rule}, and {key} chooses tasks by what was trained before: leave --async-depth out"
    safe = {key for key, own in manager.needs().items() if RewardNeeds.of(own).overlap_safe}
    for key in manager.names("state_dict"):
        hooks = [hook for hook, rule in RULES.items() if rule.ahead and key in manager.names(hook)]
        if hooks and key not in manager.names("draw_tasks") and not (hooks == ["score"] and key in safe):
            yield f"{rule}, and {key} has a state that its {hooks[0]} changes beside the steps: leave --async-depth out"


def _overtaking_refusals(config: RunConfig) -> Iterator[str]:
    """Yields what wants batches in the order of the draws, where draws may pass others."""
    if (most := config.pipeline.max_staleness) is None:
        return
    rule, without = f"pipeline.max_staleness is {most}", "--pipeline.max-staleness null for none"
    if not config.async_depth:
        yield f"{rule}, and async_depth is 0, so no draw can pass another one: give --async-depth 1, or {without}"
    elif most <= config.async_depth:
        yield f"{rule}, and async_depth {config.async_depth} is not less: give a larger one, or {without}"
    if config.pipeline.schedule == "fixed":
        yield f"{rule}, so batches depend on time, and pipeline.schedule is fixed: leave one of the two out"


def _in_flight_refusals(config: RunConfig, traits: RunTraits) -> Iterator[str]:
    """Yields why new weights cannot come under requests, where that is asked for."""
    if not config.in_flight_updates or traits.in_flight(config):
        return
    if not config.async_depth:
        why = "async_depth is 0, so nothing is sampled when new weights come: give --async-depth 1"
    elif traits.in_place:
        remote = recommended("runtime", "remote")
        why = f"engine {config.engine.name} samples from the trainer's own module: use --runtime {remote}, or leave it out"
    elif not traits.engine.in_flight:
        why = f"engine {config.engine.name} cannot take them then: leave it out"
    else:
        why = "with pipeline.schedule fixed episodes are over before: leave one of the two out"
    yield f"in_flight_updates wants new weights while requests are answered, and {why}"
