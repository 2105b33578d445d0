"""verl's models, data, rewards, engines and machines."""

from __future__ import annotations

import json
from typing import Any

from rlhf_translate import shared
from rlhf_translate.options import (
    NONE,
    PROGRAM,
    Convert,
    Given,
    Option,
    Outcome,
    Table,
    ask,
    key,
    lost,
    same,
    switch,
    to,
)
from rlhf_translate.shared import (
    REPLAYED,
    attention,
    frozen_tower,
    picture_column,
    rewards,
    sequence_parallel,
    sources,
    template_kwargs,
)
from rlhf_translate.verl import asynchronous, distillation, schedules, sharding
from rlhf_translate.verl.algorithm import of_critic, reward_parts

_ACTOR, _ROLLOUT, _MODEL = (f"actor_rollout_ref.{name}." for name in ("actor", "rollout", "model"))


def _reward_function(option: Option, given: Given) -> Outcome:
    if "reward.custom_reward_function.path" not in given:
        return same("no function is given")
    if reward_parts(given):
        return same("see algorithm.gdpo_reward_keys: functions here return one number")
    path = given["reward.custom_reward_function.path"]
    named = "reward.custom_reward_function.name" in given
    name = given["reward.custom_reward_function.name"].written if named else "compute_score"
    return rewards(f"{path.written.removeprefix('file://').removeprefix('pkg://')}:{name}")


def _reward_model(option: Option, given: Given) -> Outcome:
    if not given.is_on("reward.reward_model.enable"):
        return same("no reward model is loaded")
    if "reward.custom_reward_function.path" in given and not given["reward.custom_reward_function.path"].is_off:
        return lost("the function alone is the reward there, and calls this model: serve it, and say in the function where")
    settings = {"reward.reward_model.name": "reward_model"}
    return to(settings | {"reward_model.model": given["reward.reward_model.model_path"].written})


def _program(option: Option, given: Given) -> Outcome:
    settings: dict[str, object] = {}
    remarks = []
    if "one_step_off_policy" in option.name:
        settings, remarks = {"async_depth": 1}, ["the program samples one batch ahead"]
    ahead = ("async_depth",) if asynchronous.is_stream(given) else None
    if ahead:
        remarks = [
            "trainer and engines work at the same time there, so many batches apart (async_training.staleness_threshold)"
        ]
    if distillation.alone(given):
        remarks.append("the teacher is the only signal")
    elif "reward.custom_reward_function.path" not in given and not given.is_on("reward.reward_model.enable"):
        settings["reward.math_verifier.name"] = "math_verifier"
        remarks.append("verl chooses a function for each row by its data_source; this one compares answers of mathematics")
    if not settings and not ahead:
        return same("; ".join(remarks) or "the reward is given")
    return Outcome(settings, "; ".join(remarks), asks=ahead)


def _agent(option: Option, given: Given) -> Outcome:
    known = {"single_turn_agent": "single_turn", "tool_agent": "multi_turn"}
    return (
        to({"agent.name": known[option.value]})
        if option.value in known
        else ask("an agent of your own: FILE.py", "agent.name", agent="multi_turn")
    )


def _turns(option: Option, given: Given) -> Outcome:
    """Handles answers that call tools, or get answers."""
    if option.is_off:
        return same("off, as it is here")
    if given[f"{_ROLLOUT}agent.default_agent_loop"].value == "tool_agent":
        return same("the agent is given")
    return _asks_for_an_agent()


def _asks_for_an_agent() -> Outcome:
    return ask(
        "several turns: multi_turn with the tools in a file of yours, or an agent FILE.py", "agent.name", agent="multi_turn"
    )


def _has_turns(given: Given) -> bool:
    """Returns True for agents of several turns: tools alone say it too, because rows or verl's own file may name the agent."""
    agent = given[f"{_ROLLOUT}agent.default_agent_loop"].value == "tool_agent"
    return agent or any(_has(given, name) for name in ("enable", *_TOOLS))


def _has(given: Given, name: str) -> bool:
    """Returns True for a setting of turns that is on, and for one whose file is where only the script's user knows."""
    return bool(given[f"{_TURNS}{name}"].missing) or given.is_on(f"{_TURNS}{name}")


def _tools(option: Option, given: Given) -> Outcome:
    told = _has(given, "enable") or given[f"{_ROLLOUT}agent.default_agent_loop"].value == "tool_agent"
    first = next((f"{_TURNS}{name}" for name in _TOOLS if _has(given, name)), "")
    if told or option.name != first:
        return _of_turns(option, given)
    return _asks_for_an_agent()


def _of_turns(option: Option, given: Given) -> Outcome:
    if option.is_off or not _has_turns(given):
        return same("there is one turn")
    return lost("tools and replies of the user belong to the agent: --agent multi_turn, or --agent FILE.py")


def _most_turns(option: Option, given: Given) -> Outcome:
    if option.is_off or not _has_turns(given):
        return same("there is one turn")
    return to({"agent.max_turns": option.written})


def _overlong(name: str) -> Convert:
    """Handles DAPO's overlong reward, under one of its places."""

    def convert(option: Option, given: Given) -> Outcome:
        place = option.name.rpartition(".")[0]
        place = place if place.endswith(("overlong_buffer", "overlong_buffer_cfg")) else f"{place}.overlong_buffer_cfg"
        if not given.is_on(f"{place}.enable"):
            return same("no length penalty is on")
        if name == "enable":
            return to({"with.overlong_penalty.name": "overlong_penalty"})
        return to({f"with.overlong_penalty.{name}": option.written})

    return convert


def _val_only(option: Option, given: Given) -> Outcome:
    if option.is_off:
        return same("off, as it is here")
    return ask("the command evaluates and trains nothing: rlhf eval with these settings")


def _data(place: str) -> Convert:
    return lambda option, given: same("no data") if option.is_off else to({f"{place}.sources": sources(option.texts)})


def _ranks(given: Given) -> float:
    return given.many("trainer.nnodes") * given.many("trainer.n_gpus_per_node")


def _place(option: Option, given: Given) -> Outcome:
    nodes, each = (int(given.many(f"trainer.{name}")) for name in ("nnodes", "n_gpus_per_node"))
    places = [("actor+rollout", nodes, each)]
    if place := asynchronous.engines_place(given):
        own, of_each = (int(given.many(f"{place}{name}")) for name in ("nnodes", "n_gpus_per_node"))
        places = [("actor", nodes, each), ("rollout", own, of_each)]
    roles = [f"{role}={f'{count}x' if count > 1 else ''}{devices}" for role, count, devices in places]
    return to({"runtime.name": "ray", "placement": list(filter(None, [*roles, distillation.devices(given)]))})


def _of_engines(option: Option, given: Given) -> Outcome:
    """Handles devices of the engines alone."""
    return _place(option, given) if asynchronous.engines_place(given) else same("engines have the trainer's devices")


def _sleep(option: Option, given: Given) -> Outcome:
    if asynchronous.engines_place(given):
        return same("engines have devices of their own, and no reason to sleep")
    return _of_vllm("sleep")(option, given)


def _device(option: Option, given: Given) -> Outcome:
    if option.missing or option.is_off or option.value in ("cuda", "gpu", "auto"):
        return same("the devices of the machine are found")
    return (
        to({"actor.device": "cpu"}) if option.value == "cpu" else lost(f"devices here are GPUs and the CPU, not {option.value}")
    )


def _engine(option: Option, given: Given) -> Outcome:
    known = {"vllm": "vllm", "hf": "transformers"}
    if option.value in known:
        return to({"engine.name": known[option.value]})
    return to({"engine.name": "vllm"}, f"in the place of {option.value}: it samples from the same distribution")


def _of_vllm(name: str) -> Convert:
    def convert(option: Option, given: Given) -> Outcome:
        vllm = f"{_ROLLOUT}name" in given and given[f"{_ROLLOUT}name"].value != "hf"
        return to({f"engine.{name}": option.written}) if vllm else same("no vLLM samples")

    return convert


def _quantization(option: Option, given: Given) -> Outcome:
    if option.is_off:
        return same("off, as it is here")
    if option.value not in ("fp8", "int8"):
        return lost(f"vLLM's weights as {option.value}: --engine.quantization is fp8 or int8")
    return _of_vllm("quantization")(option, given)


def _router_replay(option: Option, given: Given) -> Outcome:
    if option.is_off or option.value == "disabled":
        return same("off, as it is here")
    if option.value != "R3":
        return lost("experts of the trainer's own first pass: --with router_replay has those of the engine")
    return to({"with.router_replay.name": "router_replay", "engine.routed_experts": True})


def _expert_parallel(option: Option, given: Given) -> Outcome:
    size = int(option.number or 1)
    return to({"backend.expert_parallel": size}) if size > 1 else same("experts are split as other weights")


def trackers(option: Option, given: Given) -> Outcome:
    there = "the console is always there"
    return same(there) if option.is_off else shared.trackers(option, "console", there)


def project(option: Option, given: Given) -> Outcome:
    chosen = given["trainer.logger"].items
    settings = {key: option.written for name, key in shared.PROJECT_OF.items() if name in chosen}
    return to(settings) if settings else same("no tracker here has projects")


def _val_samples(given: Given) -> bool:
    """Returns True if validation samples: agent loops, which ``rollout.mode=async`` and all versions from 0.7 use, read
    the temperature alone, and other rollouts are greedy unless samples are requested.
    """
    mode = given[f"{_ROLLOUT}mode"].value if given.wrote(f"{_ROLLOUT}mode") else "async" if given.version >= (0, 7) else "sync"
    if mode == "async" and given[f"{_ROLLOUT}name"].value != "hf":
        return given.number(f"{_ROLLOUT}val_kwargs.temperature") > 0
    return given.is_on(f"{_ROLLOUT}val_kwargs.do_sample")


def _val_temperature(option: Option, given: Given) -> Outcome:
    """Handles the temperature of validation."""
    sampled = _val_samples(given)
    return to({"eval.temperature": given[f"{_ROLLOUT}val_kwargs.temperature"].written if sampled else "0"})


def _val_n(option: Option, given: Given) -> Outcome:
    if not _val_samples(given) and (option.number or 1) > 1:
        return lost("greedy samples are all the same: eval.n is 1")
    return to({"eval.n": option.value})


def resume(option: Option, given: Given) -> Outcome:
    if option.value in ("disable", "auto"):
        return same("a run begins anew, and rlhf train --resume RUN_DIR goes on with one")
    return lost("to go on with a run: rlhf train --resume RUN_DIR")


def _lora(name: str) -> Convert:
    def convert(option: Option, given: Given) -> Outcome:
        if not given.number(f"{_MODEL}lora_rank"):
            return same("no adapter is trained")
        if name == "targets" and option.is_off:
            return same("none are named")
        return to({f"actor.lora.{name}": option.texts if name == "targets" else option.written})

    return convert


def _excluded(option: Option, given: Given) -> Outcome:
    if option.is_off or not given.number(f"{_MODEL}lora_rank"):
        return same("none are named" if option.is_off else "no adapter is trained")
    return lost("the maps that get adapters are named: --actor.lora.targets")


def _name_of(place: str, given: Given) -> tuple[str, str]:
    """Returns the optimizer's class, and the module that verl imports it from; versions before 0.5 have no choice."""
    parts = (("optimizer", "AdamW"), ("optimizer_impl", "torch.optim"))
    name, module = (given[f"{place}{key}"].value if f"{place}{key}" in given else usual for key, usual in parts)
    return ("AdamW" if name.lower() in ("adam", "adamw") else name), module


def optimizer(place: str, actor: str = "") -> Convert:
    """Handles optimizers of torch and bitsandbytes.

    Args:
        place: beginning of the options.
        actor: that of the actor's, if these are another role's.
    """

    def convert(option: Option, given: Given) -> Outcome:
        name, module = chosen = _name_of(place, given)
        if actor and chosen != _name_of(actor, given):
            return lost("all roles have one optimizer here")
        if module not in ("torch.optim", "bitsandbytes.optim"):
            return lost("optimizers here are those of torch.optim and bitsandbytes.optim")
        if name == "adaptive_muon":
            return lost("an optimizer of Megatron: muon is here")
        return same("AdamW") if name == "AdamW" else to({"backend.optimizer": "Muon" if name == "muon" else name})

    return convert


_OF_MEGATRON = ("muon", "adaptive_muon")


ARGUMENTS = (
    *("momentum", "dampening", "nesterov", "amsgrad", "maximize", "foreach", "capturable", "differentiable", "fused", "eps"),
    *("alpha", "centered", "rho", "lambd", "t0", "initial_accumulator_value", "etas", "step_sizes", "momentum_decay"),
    *("min_8bit_size", "percentile_clipping", "block_wise", "optim_bits", "is_paged"),
)
"""Arguments of the optimizers of torch and bitsandbytes that are no settings of a role; ``eps`` is one here."""


def _overrides(place: str, given: Given) -> dict[str, str]:
    """Returns the arguments that a command adds to an optimizer, as one mapping or each as an option of its own."""
    whole, pairs = given[f"{place}override_optimizer_config"], dict[str, str]()
    if f"{place}override_optimizer_config" in given:
        for item in whole.value.strip().removeprefix("{").removesuffix("}").split(","):
            name, sign, value = (part.strip().strip("'\"") for part in item.partition(":"))
            if item.strip() and (not sign or not name or not value or "{" in value or "[" in value):
                raise ValueError
            pairs |= {name: value} if item.strip() else {}
    each = {name: given[f"{place}override_optimizer_config.{name}"] for name in ARGUMENTS}
    return pairs | {name: one.value for name, one in each.items() if one.line}


def overrides(role: str, place: str, actor: str = "") -> Convert:
    """Handles arguments of the optimizer; see ``optimizer``."""

    def convert(option: Option, given: Given) -> Outcome:
        arguments = _overrides(place, given)
        if actor and arguments != _overrides(actor, given):
            return lost("all roles have one optimizer here")
        if unknown := [name for name in arguments if name not in ARGUMENTS]:
            return lost(f"{unknown[0]} is no argument of the optimizers here, or an option of verl by itself")
        settings: dict[str, Any] = {f"{role}.adam_eps": arguments["eps"]} if "eps" in arguments else {}
        if others := [f"{name}={_as_json(value)}" for name, value in arguments.items() if name != "eps"]:
            settings["backend.optimizer_args"] = others
        return to(settings) if settings else same("none are given")

    return convert


def _as_json(value: str) -> str:
    return value.lower() if value.lower() in ("true", "false") else "null" if value.lower() in NONE else value


def overriding(role: str, place: str, actor: str = "") -> Table:
    """Returns the rows of a role's ``override_optimizer_config``."""
    names = ("", *(f".{name}" for name in ARGUMENTS))
    return {f"{place}override_optimizer_config{name}": overrides(role, place, actor) for name in names}


def betas(role: str, place: str) -> Convert:
    """Handles the betas, which only optimizers with Adam in their names get there (``build_optimizer``)."""
    return lambda option, given: (
        to({f"{role}.betas": option.numbers})
        if any(name in _name_of(place, given)[0].lower() for name in ("adam", "ademamix"))
        or _name_of(place, given)[0] in _OF_MEGATRON  # its Adam, for what is no matrix
        else same("the optimizer has none")
    )


TEMPLATE_VALUES = ("enable_thinking", "thinking", "thinking_budget", "reasoning_effort", "preserve_thinking", "clear_thinking")
"""Values that chat templates of published models read."""


def _template_values(given: Given) -> list[str]:
    """Returns all values for the chat template that a command gives one by one."""
    options = {name: given[f"data.apply_chat_template_kwargs.{name}"] for name in TEMPLATE_VALUES}
    return [f"{name}={_in_json(option.written)}" for name, option in options.items() if option.line]


def _in_json(value: str) -> str:
    """Returns a value of Hydra's, a text in quotes."""
    return _as_json(value) if value.isdigit() or value.lower() in ("true", "false", *NONE) else json.dumps(value)


def _truncation(option: Option, given: Given) -> Outcome:
    if given.is_on("data.filter_overlong_prompts"):
        return same("longer prompts are left out before")
    known = {"left": "truncate", "error": "filter"}
    if option.value not in known:
        return lost("long prompts are left out here, or lose their beginning")
    return to({"data.long_prompts": known[option.value]}, "longer prompts are left out" if option.value == "error" else "")


def _norm(role: str, place: str) -> Convert:
    """Handles the limit of the gradient's norm, which has two names; the written one is used."""

    def convert(option: Option, given: Given) -> Outcome:
        names = (f"{place}optim.clip_grad", f"{place}grad_clip")
        counts = next((name for name in names if given.wrote(name)), names[-1])
        if option.line and not option.name.endswith(counts.rpartition(".")[2]):
            return same("optim.clip_grad counts")
        return to({f"{role}.max_grad_norm": given[counts].written if counts in given else option.written})

    return convert


def _critics_lora(name: str) -> Convert:
    def convert(option: Option, given: Given) -> Outcome:
        if not given.number("critic.model.lora_rank"):
            return same("no adapter is trained")
        return to({f"critic.lora.{name}": option.written})

    return convert


_EXTRA = ("max_num_batched_tokens", "enable_chunked_prefill", "swap_space")


def _extra(option: Option, given: Given) -> Outcome:
    """Handles arguments of vLLM that have no option here."""
    names = [
        name for name in ("max_num_batched_tokens", "enable_chunked_prefill", "swap_space") if given.wrote(f"{_ROLLOUT}{name}")
    ]
    name = given[f"{_ROLLOUT}name"]
    engine = "vllm" if name.missing else name.value  # which a command that names none is asked for
    if engine != "vllm":
        return same("no vLLM samples") if engine == "hf" else lost("an option of another engine")
    values = {name: _json(given[f"{_ROLLOUT}{name}"].value) for name in names}
    return to({"engine.extra": values})


def _json(text: str) -> object:
    try:
        return json.loads(text.lower())
    except ValueError:
        return text


def _lora_of_megatron(name: str) -> Convert:
    def convert(option: Option, given: Given) -> Outcome:
        if not given.number(f"{_MODEL}lora.rank"):
            return same("no adapter is trained")
        return to({f"actor.lora.{name}": option.written})

    return convert


def _position(option: Option, given: Given) -> Outcome:
    return same("before A, as it is here") if option.value == "pre" else lost("dropout after B; here it is before A")


_OVERLONG = (
    *(f"{place}.overlong_buffer" for place in ("reward_model", "custom_reward_function")),
    *(f"{place}.reward_kwargs.overlong_buffer_cfg" for place in ("reward_model", "reward")),
)
_TURNS = f"{_ROLLOUT}multi_turn."
_TOOLS = ("tool_config_path", "interaction_config_path", "function_tool_path")
"""Options without which an answer has one turn."""
_OF_VEOMNI = sharding.options(f"{_ACTOR}veomni.", f"{_ACTOR}strategy", _ranks, samples=True)

TABLE: Table = {
    PROGRAM: _program,
    "data.train_files": _data("data"),
    "data.val_files": _data("eval.data"),
    "data.filter_overlong_prompts": lambda option, given: same(
        "data.truncation says what becomes of longer prompts" if option.is_off else "longer prompts are left out"
    ),
    "data.truncation": _truncation,
    "data.max_prompt_length": key("data.max_prompt_tokens"),
    "data.image_key": picture_column,
    f"{_ACTOR}freeze_vision_tower": frozen_tower,
    "data.seed": lambda option, given: to({"seed": option.written}) if not option.is_off else same("the run's seed"),
    "data.train_max_samples": lambda option, given: (
        to({"data.max_samples": option.value}) if (option.number or -1) > 0 else same("all rows")
    ),
    **sharding.options(f"{_ACTOR}fsdp_config.", f"{_ACTOR}strategy", _ranks, samples=True),
    **{name: _norm("actor", f"{_ACTOR}") for name in (f"{_ACTOR}grad_clip", f"{_ACTOR}optim.clip_grad")},
    **{name: of_critic(_norm("critic", "critic.")) for name in ("critic.grad_clip", "critic.optim.clip_grad")},
    f"{_ACTOR}optim.eps": key("actor.adam_eps"),
    f"{_MODEL}lora_adapter_path": lambda option, given: (
        same("a new adapter, or none") if option.is_off else to({"actor.adapter": option.written})
    ),
    "critic.model.lora_rank": of_critic(_critics_lora("rank")),
    "critic.model.lora_alpha": of_critic(_critics_lora("alpha")),
    **schedules.rows("actor", f"{_ACTOR}optim"),
    **{name: of_critic(row) for name, row in schedules.rows("critic", "critic.optim").items()},
    f"{_ACTOR}ulysses_sequence_parallel_size": sequence_parallel("actor"),
    "critic.ulysses_sequence_parallel_size": of_critic(sequence_parallel("critic")),
    f"{_ACTOR}optim.betas": betas("actor", f"{_ACTOR}optim."),
    **overriding("actor", f"{_ACTOR}optim."),
    **{name: of_critic(row) for name, row in overriding("critic", "critic.optim.", f"{_ACTOR}optim.").items()},
    **{f"{_ACTOR}optim.{name}": optimizer(f"{_ACTOR}optim.") for name in ("optimizer", "optimizer_impl")},
    **{
        f"critic.optim.{name}": of_critic(optimizer("critic.optim.", f"{_ACTOR}optim."))
        for name in ("optimizer", "optimizer_impl")
    },
    f"{_MODEL}enable_gradient_checkpointing": lambda option, given: to({"actor.gradient_checkpointing": not option.is_off}),
    f"{_MODEL}tokenizer_path": lambda option, given: (
        same("the model's") if option.is_off else to({"actor.tokenizer": option.written})
    ),
    f"{_ROLLOUT}do_sample": lambda option, given: (
        lost("answers are sampled in training") if option.is_off else same("answers are sampled")
    ),
    f"{_ROLLOUT}dtype": _of_vllm("dtype"),
    **{f"{_ROLLOUT}{name}": _extra for name in _EXTRA},
    f"{_ACTOR}tau_pos": key("algo.sapo_tau"),
    f"{_ACTOR}tau_neg": key("algo.sapo_tau_negative"),
    f"{_MODEL}lora.rank": _lora_of_megatron("rank"),
    f"{_MODEL}lora.alpha": _lora_of_megatron("alpha"),
    f"{_MODEL}lora.dropout": _lora_of_megatron("dropout"),
    f"{_MODEL}lora.dropout_position": _position,
    "data.apply_chat_template_kwargs": template_kwargs,
    **{
        f"data.apply_chat_template_kwargs.{name}": lambda option, given: to({"data.template_kwargs": _template_values(given)})
        for name in TEMPLATE_VALUES
    },
    "trainer.device": _device,
    **{name: switch({"actor.trust_remote_code": True}) for name in ("data.trust_remote_code", f"{_MODEL}trust_remote_code")},
    "data.val_max_samples": lambda option, given: (
        to({"eval.data.max_samples": option.value}) if (option.number or -1) > 0 else same("all rows")
    ),
    f"{_MODEL}exclude_modules": _excluded,
    **{
        f"{_ACTOR}veomni.{name}": _OF_VEOMNI[f"{_ACTOR}veomni.{name}"]
        for name in ("param_offload", "optimizer_offload", "fsdp_size")
    },
    f"{_ACTOR}veomni.ulysses_parallel_size": sequence_parallel("actor"),
    f"{_ACTOR}automodel_config.activation_checkpointing": lambda option, given: to(
        {"actor.gradient_checkpointing": not option.is_off}
    ),
    f"{_MODEL}override_config.attn_implementation": attention,
    f"{_MODEL}lora_rank": _lora("rank"),
    f"{_MODEL}lora_alpha": _lora("alpha"),
    f"{_MODEL}target_modules": _lora("targets"),
    f"{_ROLLOUT}name": _engine,
    f"{_ROLLOUT}agent.default_agent_loop": _agent,
    f"{_TURNS}enable": _turns,
    f"{_TURNS}max_assistant_turns": _most_turns,
    f"{_TURNS}max_turns": _most_turns,
    **{f"{_TURNS}{name}": _of_turns for name in ("max_user_turns", "format")},
    **{f"{_TURNS}{name}": _tools for name in _TOOLS},
    f"{_ROLLOUT}tensor_model_parallel_size": _of_vllm("tensor_parallel_size"),
    f"{_ROLLOUT}gpu_memory_utilization": _of_vllm("gpu_memory_utilization"),
    f"{_ROLLOUT}enforce_eager": _of_vllm("enforce_eager"),
    f"{_ROLLOUT}free_cache_engine": _sleep,
    f"{_ROLLOUT}enable_prefix_caching": _of_vllm("enable_prefix_caching"),
    f"{_ROLLOUT}max_num_seqs": _of_vllm("max_num_seqs"),
    f"{_ROLLOUT}max_model_len": lambda option, given: (
        same("as the model says") if option.is_off else _of_vllm("max_model_len")(option, given)
    ),
    f"{_ROLLOUT}top_p": lambda option, given: (
        same("off") if option.number == 1 else to({"rollout.top_p": option.written}, REPLAYED)
    ),
    f"{_ROLLOUT}top_k": lambda option, given: (
        same("off") if (option.number or 0) <= 0 else to({"rollout.top_k": option.written}, REPLAYED)
    ),
    f"{_ROLLOUT}quantization": _quantization,
    f"{_ROLLOUT}enable_rollout_routing_replay": lambda option, given: same("the mode of router_replay says whether it is on"),
    **{f"{_ACTOR}{place}router_replay.mode": _router_replay for place in ("", "megatron.", "veomni.")},
    **{
        f"{_ACTOR}{name}": _expert_parallel
        for name in (
            "megatron.expert_model_parallel_size",
            "torchtitan.expert_parallel_size",
            "veomni.expert_parallel_size",
            "fsdp_config.turbo_config.distributed.expert_parallel_size",
        )
    },
    f"{_ROLLOUT}val_kwargs.temperature": _val_temperature,
    f"{_ROLLOUT}val_kwargs.do_sample": _val_temperature,
    f"{_ROLLOUT}val_kwargs.n": _val_n,
    f"{_ROLLOUT}val_kwargs.top_k": lambda option, given: to({"eval.top_k": max(0, int(option.number or 0))}),
    "reward.custom_reward_function.path": _reward_function,
    "reward.custom_reward_function.name": _reward_function,
    "reward.reward_model.enable": _reward_model,
    "reward.reward_model.model_path": _reward_model,
    **{
        f"{place}.{theirs}": _overlong(ours)
        for place in _OVERLONG
        for theirs, ours in (("enable", "enable"), ("len", "buffer"), ("penalty_factor", "factor"))
    },
    **{f"{place.rpartition('.')[0]}.max_resp_len": _overlong("max_length") for place in _OVERLONG[2:]},
    "critic.model.path": of_critic(key("critic.model")),
    "critic.model.enable_gradient_checkpointing": of_critic(
        lambda option, given: to({"critic.gradient_checkpointing": not option.is_off})
    ),
    "critic.model.trust_remote_code": of_critic(switch({"critic.trust_remote_code": True})),
    "critic.optim.lr": of_critic(key("critic.lr")),
    "critic.optim.weight_decay": of_critic(key("critic.weight_decay")),
    "critic.optim.betas": of_critic(betas("critic", "critic.optim.")),
    "trainer.val_only": _val_only,
    "trainer.nnodes": _place,
    "trainer.n_gpus_per_node": _place,
    **{f"{place}{name}": _of_engines for place in ("rollout.", _ROLLOUT) for name in ("nnodes", "n_gpus_per_node")},
    "trainer.save_freq": asynchronous.every("checkpoint.every"),
    "trainer.test_freq": asynchronous.every("eval.every"),
    "trainer.max_actor_ckpt_to_keep": lambda option, given: to({"checkpoint.keep": int(option.number or 0)}),
    "trainer.logger": trackers,
    "trainer.project_name": project,
    "trainer.resume_mode": resume,
}
