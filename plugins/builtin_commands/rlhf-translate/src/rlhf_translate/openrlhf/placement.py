"""Models that an OpenRLHF run loads, and the devices of models and vLLM."""

from __future__ import annotations

from rlhf_translate.options import Convert, Given, Option, Outcome, Table, lost, same, to

_ROLES = {"actor": "actor", "critic": "critic", "reference": "ref", "reward": "reward"}
"""Our role → theirs."""


def roles(given: Given) -> list[str]:
    """Returns the models that the run loads."""
    there = {
        "critic": given["algo.advantage.estimator"].value == "gae",
        "reference": given.number("algo.kl.init_coef") > 0,
        "reward": "reward.model_name_or_path" in given and not given.wrote("train.agent_func_path"),
    }
    return [role for role in _ROLES if there.get(role, True)]


def _placement(given: Given) -> list[str]:
    loaded = roles(given)
    engines = max(0, int(given.number("vllm.num_engines"))) * int(given.many("vllm.tensor_parallel_size"))
    groups = [[role] for role in loaded]
    if given.is_on("train.colocate_all"):
        groups = [loaded]
    for switch_on, pair in (("train.colocate_actor_ref", "actor reference"), ("train.colocate_critic_reward", "critic reward")):
        together = [role for role in pair.split() if role in loaded]
        if given.is_on(switch_on) and together and len(groups) > 1:
            groups = [group for group in groups if group[0] not in together] + [together]
    entries = [(group, _devices(_ROLES[group[0]], given)) for group in groups]
    if given.is_on("train.colocate_all") and not given.is_on("train.async_enable"):
        entries[0][0].append("rollout")
    elif engines:
        entries.append((["rollout"], str(engines)))
    return [f"{'+'.join(group)}={devices}" for group, devices in entries]


def _devices(role: str, given: Given) -> str:
    nodes, each = (int(given.many(f"{role}.{name}")) for name in ("num_nodes", "num_gpus_per_node"))
    return f"{nodes}x{each}" if nodes > 1 else str(each)


def _place(role: str) -> Convert:
    def convert(option: Option, given: Given) -> Outcome:
        if role not in roles(given):
            return same(f"no {role} model is loaded")
        return to({"runtime.name": "ray", "placement": _placement(given)})

    return convert


def _together(option: Option, given: Given) -> Outcome:
    return to({"runtime.name": "ray", "placement": _placement(given)}) if not option.is_off else same("off, as it is here")


def _engines(option: Option, given: Given) -> Outcome:
    if (option.number or 0) <= 0:
        return same("the trainer's own model samples")
    return to({"engine.name": "vllm", "runtime.name": "ray", "placement": _placement(given)})


def _vllm(name: str) -> Convert:
    def convert(option: Option, given: Given) -> Outcome:
        if not given.number("vllm.num_engines"):
            return same("no vLLM samples")
        return to({"engine.name": "vllm", f"engine.{name}": option.written if option.values else "true"})

    return convert


def _sleep(option: Option, given: Given) -> Outcome:
    """Handles sleep: in OpenRLHF, vLLM sleeps only if all models share their devices, and DeepSpeed's states then move to the
    CPU.
    """
    if option.is_off or not given.number("vllm.num_engines"):
        return same("off, as it is here") if option.is_off else same("no vLLM samples")
    if given.is_on("train.async_enable"):
        return lost("trainer and engines work at the same time here, so neither gives its memory away")
    if not given.is_on("train.colocate_all"):
        return lost("the engines have devices of their own, so they need not sleep")
    return to({"engine.name": "vllm", "engine.sleep": True})


TABLE: Table = {
    **{f"{theirs}.{name}": _place(ours) for ours, theirs in _ROLES.items() for name in ("num_nodes", "num_gpus_per_node")},
    **{f"train.colocate_{name}": _together for name in ("all", "actor_ref", "critic_reward")},
    "vllm.num_engines": _engines,
    "vllm.tensor_parallel_size": _vllm("tensor_parallel_size"),
    "vllm.gpu_memory_utilization": _vllm("gpu_memory_utilization"),
    "vllm.enforce_eager": _vllm("enforce_eager"),
    "vllm.enable_prefix_caching": _vllm("enable_prefix_caching"),
    "vllm.enable_sleep": _sleep,
    "ds.enable_sleep": _sleep,
}
