"""OpenRLHF's programs, and the options of those that train on a data set: train_sft, train_rm, train_dpo, train_kto."""

from __future__ import annotations

from rlhf_host.translate import openrlhf_ppo
from rlhf_host.translate.openrlhf_common import BOTH, COMMON, data
from rlhf_host.translate.options import PROGRAM, Convert, Defaults, Given, Option, Outcome, Table, key, lost, never, same, to
from rlhf_host.translate.shared import LAUNCH, scheduled_warmup

ALIASES = {
    "max_new_tokens": "rollout.max_new_tokens",
    "adam.weight_decay": "actor.adam.weight_decay",
    "adam.betas": "actor.adam.betas",
    "adam.eps": "actor.adam.eps",
    "learning_rate": "actor.adam.lr",
    "adam.lr": "actor.adam.lr",
    "train_split": "data.dataset_split",
}

_ROWS: dict[str, Defaults] = {
    "dpo": {
        "actor.adam.lr": ("1e-05",),
        "data.max_len": ("512",),
        "train.max_epochs": ("1",),
        "eval.split": ("test",),
        "model.beta": ("0.1",),
    },
    "sft": {
        "actor.adam.lr": ("5e-06",),
        "data.max_len": ("2048",),
        "train.max_epochs": ("2",),
        "eval.split": ("train",),
        "data.input_template": ("User: {}\nAssistant: ",),
    },
    "rm": {"actor.adam.lr": ("9e-06",), "data.max_len": ("512",), "train.max_epochs": ("1",), "eval.split": ("train",)},
    "kto": {},  # not in 0.11
}


def _processes(option: Option, given: Given) -> Outcome:
    number = int(option.number or 0)
    if not number:
        return lost("not a number of processes: say it with --placement actor=N")
    return to({"runtime.name": "ray", "placement": [f"actor={number}"]})


def _ipo(option: Option, given: Given) -> Outcome:
    return to({"algo.name": "ipo"}) if not option.is_off else same("off, as it is here")


def _columns(known: str) -> Convert:
    def convert(option: Option, given: Given) -> Outcome:
        if option.value == known:
            return same("the column is recognised")
        return lost(f"the column is called {known} here: rename it, or choose data.format")

    return convert


_OF_ROWS: Table = {
    "nproc_per_node": _processes,
    "num_gpus": _processes,
    "nnodes": never("the machines are those of --placement actor=NODESxDEVICES"),
    "data.dataset": data("data.dataset", "data.dataset_probs", "data.dataset_split"),
    "data.dataset_probs": data("data.dataset", "data.dataset_probs", "data.dataset_split"),
    "data.dataset_split": data("data.dataset", "data.dataset_probs", "data.dataset_split"),
    "data.max_len": key("data.max_tokens"),
    "train.batch_size": key("train.batch_size", "rows or pairs per optimizer update"),
    "train.max_epochs": key("data.epochs"),
    "actor.lr_warmup_ratio": lambda option, given: scheduled_warmup(
        "actor", given["actor.lr_scheduler"], option.number or 0.0, None
    ),
    PROGRAM: lambda option, given: to(
        {"algo.name": "ipo" if given.is_on("model.ipo_enable") else given.method},
        "" if given.wrote("nproc_per_node", "num_gpus") else "one process per device there: --placement actor=DEVICES",
    ),
    "model.ipo_enable": _ipo,
    "data.chosen_key": _columns("chosen"),
    "data.rejected_key": _columns("rejected"),
}


def defaults(method: str) -> Defaults:
    if method == "ppo_ray":
        return openrlhf_ppo.DEFAULTS
    return COMMON | _ROWS[method]


def convert(method: str) -> Table:
    return LAUNCH | BOTH | (openrlhf_ppo.TABLE if method == "ppo_ray" else _OF_ROWS)
