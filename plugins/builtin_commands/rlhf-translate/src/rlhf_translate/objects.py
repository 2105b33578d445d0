"""Python objects of other projects, given as arguments or plugins here: settings, callbacks, trainers, agent loops, tools."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

OWNERS = {
    "transformers": "transformers",
    "trl": "TRL",
    "peft": "PEFT",
    "verl": "verl",
    "openrlhf": "OpenRLHF",
    "datasets": "datasets",
    "omegaconf": "OmegaConf",
}
"""Package → its name in messages."""

CHOSEN = "is chosen by algo=NAME: rlhf plugins --kind algo lists them"
ANSWERS = (
    (r"trl\..*(GRPO|RLOO|DPO|KTO|SFT|Reward|PPO|NashMD|XPO)\w*Trainer", CHOSEN),
    (
        r"(transformers|trl|verl|openrlhf)\..*Trainer",
        "is no plugin: a loss of one's own is a class with compute_loss, algo=Mine, and rlhf plugins new NAME --kind algo begins"
        " one",
    ),
    (
        r"transformers\..*Callback",
        "is no plugin: a class with log_metrics is a tracker, trackers=[Mine], and one with step_finished an extension,"
        " extensions=[Mine], which may stop the run",
    ),
    (
        r"verl\..*AgentLoop\w*",
        "is no plugin: an agent is a class with agent_run, or agent_reset and agent_step, agent=Mine, and rlhf plugins new NAME"
        " --kind agent begins one",
    ),
    (
        r"verl\.tools\..*",
        "is no plugin: a tool is a plain function with types and a docstring, in a file:"
        ' agent={"name": "multi_turn", "tools": "tools.py"}',
    ),
    (r"transformers\..*BitsAndBytesConfig", 'is actor.quantize here: actor={"quantize": "4bit"}'),
    (r"transformers\..*Tokenizer\w*", 'is given as a directory: actor={"tokenizer": DIRECTORY}'),
    (r"omegaconf\..*", "is no settings here: write it to a file, and rlhf translate FILE says what it is here"),
)
"""Pattern over the name of a class, and of those that it inherits from → what to do."""

LORA = {"r": "actor.lora.rank", "lora_alpha": "actor.lora.alpha", "lora_dropout": "actor.lora.dropout"}
"""Fields of ``LoraConfig`` → settings."""
SHOWN = 6


def of_object(value: Any) -> str:
    """Returns ``; transformers' TrainerCallback ...`` for an object or class of another project, or one that inherits from it; else
    nothing."""
    cls = value if isinstance(value, type) else type(value)
    for base in cls.__mro__:
        package, name = base.__module__.partition(".")[0], f"{base.__module__}.{base.__qualname__}"
        owner = OWNERS.get(package)
        if owner is None:
            continue
        whose = f"; {base.__name__} of {owner}"
        if re.fullmatch(r".*(Config|Arguments)", base.__name__) and package in ("trl", "transformers", "peft") and base is cls:
            return f"{whose} is settings here, each of its own: {_settings(value, LORA if package == 'peft' else None)}"
        for pattern, answer in ANSWERS:
            if re.fullmatch(pattern, name) and (base is cls or answer is not CHOSEN):
                return f"{whose} {answer}"
    return ""


def _settings(value: Any, table: dict[str, str] | None) -> str:
    """Returns the fields of a configuration that are not at their defaults, as arguments of ``train``."""
    usual = {field.name: field.default for field in dataclasses.fields(value)} if dataclasses.is_dataclass(value) else {}
    fields = {
        name: item
        for name, item in vars(value).items()
        if not name.startswith("_") and item != usual.get(name, dataclasses.MISSING)
    }
    known = {name: here for name in fields if (here := _here(name, table))}
    parts = [f'"{here}": {fields[name]!r}' for name, here in known.items()][:SHOWN]
    more = len(fields) - len(parts)
    rest = f", and {more} more" if more else ""
    told = f"train(**{{{', '.join(parts)}}}){rest}" if parts else "each by its name"
    return f"{told}; rlhf translate SCRIPT.py writes them all"


def _here(name: str, table: dict[str, str] | None) -> str:
    """Returns the setting that a field is here; empty: none, or several flags."""
    if table is not None:
        return table.get(name, "")
    from rlhf_translate.elsewhere import names

    same = [known.here for known in names() if known.project == "TRL" and known.words == (name, "")]
    flags = [here.removeprefix("--").replace("-", "_") for here in same if " " not in here]
    return flags[0] if flags else ""
