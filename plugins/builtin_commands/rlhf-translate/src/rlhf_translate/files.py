"""YAML files of other projects, as options."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from rlhf_host import UserError
from rlhf_host.settings import Located, Names, RunConfig, plain, read_yaml
from rlhf_translate.elsewhere import names
from rlhf_translate.options import Option
from rlhf_translate.programs import METHODS, PROJECTS, Command, Origin

_OTHERS = {
    "axolotl": {
        "base_model",
        "sequence_len",
        "micro_batch_size",
        "datasets",
        "sample_packing",
        "adapter",
        "rl",
        "val_set_size",
    },
    "LLaMA-Factory": {
        "stage",
        "finetuning_type",
        "cutoff_len",
        "template",
        "dataset_dir",
        "lora_target",
        "infer_backend",
        "export_dir",
    },
    "ms-swift": {"train_type", "tuner_type", "rlhf_type", "model_type", "torch_dtype", "split_dataset_ratio"},
    "NeMo RL": {"policy", "loss_fn", "cluster", "checkpointing", "grpo", "sft", "dpo", "env", "logger"},
    "torchtune": {"checkpointer", "tokenizer", "optimizer", "loss", "max_steps_per_epoch", "dataset", "lr_scheduler"},
    "accelerate": {"compute_environment", "distributed_type", "machine_rank", "main_training_function", "rdzv_backend"},
}
"""Projects whose files are recognised by their keys, and not translated here."""


def configuration(path: Path, origin: Origin) -> Command:
    """Returns the command that a file alone represents."""
    leaves = list(leaves_of(path))
    if not leaves:
        raise UserError(f"{path}: has no settings")
    project = origin.project or _project(path, leaves)
    method = origin.method or _method(path, project, leaves)
    if project != "verl":
        leaves = [Option(f"--{option.name}", option.values, option.line, missing=option.missing) for option in leaves]
    return Command(project, method, leaves, 1, path.name, version=origin.version)


def leaves_of(path: Path) -> Iterator[Option]:
    """Yields every value of a file with its line, under its dotted name."""
    return _leaves(read_yaml(path))


def leaves_in(text: str) -> list[tuple[str, tuple[str, ...]]]:
    """Returns the values of a mapping that is written on one line; none if it is not such a mapping."""
    try:
        values = YAML(typ="safe", pure=True).load(text)
    except YAMLError:
        return []
    if not isinstance(values, dict) or any(value is None and ":" in str(key) for key, value in values.items()):
        return []
    return [(option.name, option.values) for option in _leaves(_located(values))]


def _located(value: Any) -> Located:
    return Located({key: _located(inner) for key, inner in value.items()} if isinstance(value, dict) else value, "")


def _leaves(tree: Located, path: tuple[str, ...] = ()) -> Iterator[Option]:
    """Yields the values; a mapping in a list becomes JSON."""
    if isinstance(tree.value, Mapping) and tree.value and not (len(path) == 1 and path[0].endswith("_kwargs")):
        for name, inner in tree.value.items():
            yield from _leaves(inner, (*path, str(name)))
    elif path:
        value = plain(tree)
        values = tuple(map(_item, value)) if isinstance(value, list) else (_text(value),)
        yield Option(".".join(path), values, _line(tree), "=")


def _project(path: Path, leaves: Sequence[Option]) -> str:
    """Returns the project whose names the file has."""
    heads = {leaf.name.partition(".")[0] for leaf in leaves}
    others = {name: len(heads & keys) for name, keys in _OTHERS.items()}
    known = {(name.project, name.words[0]) for name in names()}
    titles = {project: title for project, title in PROJECTS.items() if project != "openrlhf"}  # which reads no files
    hits = {project: sum((title, leaf.name) in known for leaf in leaves) for project, title in titles.items()}
    best, other = max(hits, key=lambda project: hits[project]), max(others, key=lambda name: others[name])
    if not hits["verl"] and heads & {"algo", "actor", "data", "rollout", "reward", "train"} and all(map(_is_ours, heads)):
        raise UserError(f"{path}: is a configuration of rlhf already: rlhf train --config {path}")
    if others[other] >= 2 and hits["verl"] < 3 and not heads & {"dataset_name", "reward_funcs"}:
        raise UserError(_other(path, other, leaves))
    if not hits[best]:
        raise UserError(f"{path}: has no names of verl or TRL that are known here; --from PROJECT says whose it is")
    return best


@cache
def _sections() -> frozenset[str]:
    return frozenset(field.alias or name for name, field in RunConfig.model_fields.items())


def _is_ours(head: str) -> bool:
    """Returns True for a section of our own files."""
    place, plugin = Names().place(head)
    return plugin is not None or place != (head,) or head in _sections()


def _method(path: Path, project: str, leaves: Sequence[Option]) -> str:
    given = {leaf.name.lstrip("-") for leaf in leaves}
    if project == "verl":
        return "sft" if {"model.partial_pretrain", "data.micro_batch_size_per_gpu"} & given else "ppo"
    if project != "trl":
        return METHODS[project][0]
    if given & {"reward_funcs", "num_generations", "max_completion_length", "epsilon", "reward_weights"}:
        return "grpo"
    raise UserError(f"{path}: TRL's file does not say what reads it; say it with --from trl:{'|'.join(METHODS['trl'])}")


def _line(tree: Located) -> int:
    match = re.search(r":(\d+)(?:: |$)", tree.where)
    return int(match[1]) if match else 1


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    return json.dumps(value)


def _item(value: Any) -> str:
    """Returns an item of a list; a text with commas is quoted."""
    return json.dumps(value, ensure_ascii=False) if "," in str(value) else _text(value)


# --- files that are not translated --------------------------------------------------------------


def _other(path: Path, name: str, leaves: Sequence[Option]) -> str:
    """Tells whose file it is, and what to do instead."""
    values = {leaf.name: " ".join(leaf.values) for leaf in leaves}
    if name in ("NeMo RL", "torchtune"):
        return (
            f"{path}: is a configuration of {name}, which is not translated: rlhf plugins --kind algo lists what there is here"
        )
    if name == "accelerate":
        return f"{path}: is a configuration of accelerate launch: translate the script that names it, which reads this one too"
    return f"{path}: is a configuration of {name}, which is not translated; {_start_of_ours(values)}"


_FLAGS = {
    "--actor.lr": ("learning_rate",),
    "--data.epochs": ("num_epochs", "num_train_epochs"),
    "--data.max-tokens": ("sequence_len", "cutoff_len", "max_length"),
    "--actor.lora.rank": ("lora_r", "lora_rank"),
    "--actor.lora.alpha": ("lora_alpha",),
}
"""Numbers in other projects' files that are the same here."""


def _start_of_ours(values: Mapping[str, str]) -> str:
    """Returns the command to begin with."""
    kind = values.get("rl") or values.get("rlhf_type") or values.get("stage") or "sft"
    algo = {"pt": "sft", "reward": "rm"}.get(kind, kind)
    if algo not in ("sft", "dpo", "ipo", "kto", "rm", "prm", "grpo", "ppo"):
        return f"its method {kind} has no counterpart here: rlhf plugins --kind algo lists what there is"
    model = next((values[name] for name in ("base_model", "model_name_or_path", "model") if name in values), "MODEL")
    data = re.findall(r'"path": "([^"]+)"', values.get("datasets", "")) or values.get("dataset", "DATA").split(",")
    flags = [f"--algo {algo} --actor.model {model}", *(f"--data {each.strip()}" for each in data)]
    for flag, theirs in _FLAGS.items():
        value = next((values[name] for name in theirs if values.get(name, "null") != "null"), None)
        adapter = flag.startswith("--actor.lora") and values.get("adapter", values.get("finetuning_type", "full")) == "full"
        flags += [f"{flag} {value}"] if value is not None and not adapter else []
    return f"begin with: rlhf train {' '.join(flags)} --dry-run (--train.batch-size counts the rows of all processes)"
