"""DeepSpeed and FSDP under TRL: options of the Trainer, of accelerate and of their files."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence

from rlhf_translate.options import PROCESSES, Convert, Given, Option, Outcome, Table, Unknown, always, count, lost, same, to
from rlhf_translate.shared import FSDP
from rlhf_translate.trl import parallelism

_UNREAD = "the file is not here, so it is not read: its settings are --backend and --placement here"
_BLOCKS = "a block is a module that the model's class names (_no_split_modules)"
_ON_RAY = {"runtime.name": "ray"}

# --- DeepSpeed ----------------------------------------------------------------------------------


def _file(option: Option, given: Given) -> Outcome:
    """Handles a configuration of DeepSpeed or accelerate."""
    if option.is_off:
        return same("off, as it is here")
    if option.value in given.files or f"TRL's {option.value}.yaml" in given.files:
        return same("its options are translated")
    if match := re.search(r"zero_?([123])", option.value):
        return to({**_ON_RAY, "backend.name": "deepspeed", "backend.zero_stage": match[1]}, "by the file's name")
    if "fsdp" in option.value.lower():
        return to(_ON_RAY | FSDP, "by the file's name")
    return lost(_UNREAD)


def _stage(option: Option, given: Given) -> Outcome:
    """Returns the ZeRO stage of a file of accelerate."""
    return to({**_ON_RAY, "backend.name": "deepspeed", "backend.zero_stage": option.written})


def _uses_deepspeed(option: Option, given: Given) -> Outcome:
    if option.values and option.is_off:
        return same("off, as it is here")
    file = any(name in given for name in ("deepspeed_config_file", "config_file", "zero_stage"))
    stage = {} if file else {"backend.zero_stage": "2"}
    return to({**_ON_RAY, "backend.name": "deepspeed", **stage}, "" if file else "accelerate's own stage")


def _zero_offload(name: str) -> Convert:
    def convert(option: Option, given: Given) -> Outcome:
        if option.is_off:
            return same("off, as it is here")
        where = "cpu" if option.is_on else option.written
        return to({**_ON_RAY, "backend.name": "deepspeed", f"backend.offload_{name}": where})

    return convert


def _if_deepspeed(convert: Convert) -> Convert:
    """Returns the outcome of an option that ``accelerate launch`` ignores without DeepSpeed."""
    ignored = same("accelerate launch ignores it without --use_deepspeed")
    return lambda option, given: convert(option, given) if given.wrote("use_deepspeed") else ignored


# --- FSDP ---------------------------------------------------------------------------------------


def _distributed(option: Option, given: Given) -> Outcome:
    return to(_ON_RAY | FSDP) if option.value.upper() == "FSDP" else same("rlhf train starts its processes itself")


def _switch(option: Option, given: Given) -> Outcome:
    """Handles ``fsdp``: a switch, or words such as ``full_shard auto_wrap offload``."""
    if option.values and option.is_off:
        return same("off, as it is here")
    outcomes = [(word, _WORDS.get(word.lower(), _strategy)(Option("fsdp", (word,)), given)) for word in _words(option)]
    return _together(_ON_RAY | FSDP, outcomes)


def _words(option: Option) -> list[str]:
    return [] if not option.values or option.is_on else re.split(r"[\s,]+", option.value.strip())


def _strategy(option: Option, given: Given) -> Outcome:
    """Handles strategies of FSDP1, by name or number, and the switch that FSDP2 has in their place."""
    value = option.value.upper().rpartition(".")[2]
    strategy = _STRATEGIES.get(value, value)
    if option.is_off or strategy == "SHARD_GRAD_OP":
        return lost("a block's weights are always given up after its forward pass")
    if option.is_on or strategy == "FULL_SHARD":
        return same("a block's weights are given up after its forward pass, as they are here")
    if strategy == "NO_SHARD":
        return lost("nothing is split: --backend torch")
    if strategy not in ("HYBRID_SHARD", "HYBRID_SHARD_ZERO2", "_HYBRID_SHARD_ZERO2"):
        return lost("a word of FSDP that is not known here")
    try:
        machines = next((given.many(name) for name in ("num_machines", "nnodes", "num_nodes") if name in given), 1.0)
        each = count(given.many(PROCESSES) / machines)
    except Unknown as unknown:
        return lost(f"a copy on each machine: --backend.shard, the number of its GPUs ({unknown.why})")
    return to({**_ON_RAY, **FSDP, "backend.shard": each}, "a copy on each machine")


_STRATEGIES = dict(zip("12345", ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2"), strict=True))
"""accelerate's number of a strategy → its name."""


def _offload(option: Option, given: Given) -> Outcome:
    return same("off, as it is here") if option.is_off else to({**_ON_RAY, **FSDP, "backend.offload": "cpu"})


def _recomputed(option: Option, given: Given) -> Outcome:
    return same("gradient_checkpointing counts") if option.is_off else to({"actor.gradient_checkpointing": True})


def _wrap(option: Option, given: Given) -> Outcome:
    based_on_blocks = option.is_off or option.value.upper() == "TRANSFORMER_BASED_WRAP"
    return same(_BLOCKS) if based_on_blocks else lost(f"{_BLOCKS}, and what is in no block is whole during a pass")


_WORDS = {"auto_wrap": always(_BLOCKS), "offload": lambda option, given: to({"backend.offload": "cpu"})}
_SPEED = "it changes the speed, not the result"

_OF_FSDP: Table = {
    "version": lambda option, given: same("as it is here" if option.number == 2 else "the same numbers are split, by FSDP2"),
    "sharding_strategy": _strategy,
    "reshard_after_forward": _strategy,
    "offload_params": _offload,
    "cpu_offload": _offload,
    "activation_checkpointing": _recomputed,
    "activation_checkpointing_offload": lambda option, given: (
        same("off, as it is here") if option.is_off else lost("activations stay on the device")
    ),
    "cpu_ram_efficient_loading": always("how models are loaded is the backend's matter, and the weights are the same"),
    "sync_module_states": always("every rank begins with the same weights"),
    "auto_wrap_policy": _wrap,
    "transformer_layer_cls_to_wrap": always(_BLOCKS),
    "min_num_params": lambda option, given: same("0") if not option.number else lost(_BLOCKS),
    "ignored_modules": lambda option, given: same("none") if option.is_off else lost("all weights are split"),
    "state_dict_type": always("models are saved in Hugging Face format, and any number of ranks takes up optimizer state"),
    **{
        name: always(_SPEED)
        for name in (
            "forward_prefetch",
            "backward_prefetch",
            "backward_prefetch_policy",
            "limit_all_gathers",
            "use_orig_params",
        )
    },
    **{
        name: lambda option, given: same("off, as it is here") if option.is_off else lost("TPUs")
        for name in ("xla", "xla_fsdp_v2", "xla_fsdp_grad_ckpt")
    },
}
"""Keys of ``fsdp_config``. accelerate's begin with ``fsdp_``."""


def _config(option: Option, given: Given) -> Outcome:
    """Handles ``fsdp_config``: a file, or JSON."""
    if option.is_off:
        return same("none")
    if option.value in given.files:
        return same("its options are translated")
    try:
        values = json.loads(option.value)
        parts = [(key.removeprefix("fsdp_"), value) for key, value in values.items()]
    except (ValueError, AttributeError):
        return lost(_UNREAD)
    outcomes = []
    for key, value in parts:
        part = Option(key, tuple(map(str, value)) if isinstance(value, list) else (str(value),), option.line)
        outcomes.append((key, _OF_FSDP.get(key, _unknown)(part, given)))
    return _together({}, outcomes)


def _unknown(option: Option, given: Given) -> Outcome:
    return lost("a setting of FSDP that is not known here")


def _together(settings: Mapping[str, object], outcomes: Sequence[tuple[str, Outcome]]) -> Outcome:
    """Returns one outcome of several words or keys. What has no counterpart is in its remark."""
    remarks = [outcome.remark for _, outcome in outcomes if outcome.settings and outcome.remark]
    remarks += [f"{name} has no counterpart: {outcome.remark}" for name, outcome in outcomes if outcome.lost]
    for _, outcome in outcomes:
        settings = {**settings, **outcome.settings}
    if not settings and any(outcome.lost for _, outcome in outcomes):
        return lost("; ".join(remarks))
    return Outcome(settings, "; ".join(remarks))


TABLE: Table = {
    **parallelism.TABLE,
    **{name: _file for name in ("deepspeed", "accelerate_config", "config_file", "deepspeed_config_file")},
    **{name: _stage for name in ("deepspeed_config.zero_stage", "zero_optimization.stage")},
    **{f"deepspeed_config.offload_{name}_device": _zero_offload(name) for name in ("optimizer", "param")},
    **{f"offload_{name}_device": _if_deepspeed(_zero_offload(name)) for name in ("optimizer", "param")},
    "zero_stage": _if_deepspeed(_stage),
    "launch.gradient_accumulation_steps": always("the Trainer's own number counts"),
    "use_deepspeed": _uses_deepspeed,
    "zero_optimization.offload_optimizer.device": _zero_offload("optimizer"),
    "zero_optimization.offload_param.device": _zero_offload("param"),
    "distributed_type": _distributed,
    "fsdp": _switch,
    "use_fsdp": _switch,
    "fsdp_config": _config,
    **{
        f"{prefix}{name}": convert
        for name, convert in _OF_FSDP.items()
        for prefix in ("fsdp_config.", "fsdp_config.fsdp_", "fsdp_")
    },
}
