"""OpenRLHF's programs that train on a data set: train_sft, train_rm, train_dpo, train_kto, train_kd, train_prm."""

from __future__ import annotations

from rlhf_translate.openrlhf.common import data
from rlhf_translate.options import (
    PROCESSES,
    PROGRAM,
    Convert,
    Given,
    Option,
    Outcome,
    Table,
    always,
    key,
    lost,
    same,
    switch,
    to,
)
from rlhf_translate.shared import placed, rows_of, scheduled_warmup

MATTERS = (
    "model.beta",
    "model.label_smoothing",
    "model.margin_loss_enable",
    "kd_coef",
)
"""Options whose defaults matter here, beside those of every program."""

_ALGORITHMS = {"kd": "distill"}
_PAIRS = ("dpo", "rm")


def _program(option: Option, given: Given) -> Outcome:
    if given.method == "prm":
        remark = (
            "one score after each step here, tokens of the language-model head there; rows have prompt, completions and labels"
        )
        return to({"algo.name": "prm"}, remark)
    return to({"algo.name": _ALGORITHMS.get(given.method, given.method)})


def _likelihood(option: Option, given: Given) -> Outcome:
    """Handles the likelihood of the chosen, a mean over rows there."""
    if not option.number:
        return same("0, as it is here")
    return to({"algo.nll_coef": option.value, "algo.nll_mean": "rows"})


def _columns(known: str) -> Convert:
    def convert(option: Option, given: Given) -> Outcome:
        if option.is_off or option.value == known:
            return same("the column is recognised")
        return lost(f"the column is called {known} here: rename it, or choose data.format")

    return convert


def _longest(option: Option, given: Given) -> Outcome:
    """Handles long rows: OpenRLHF cuts their ends; here pairs would be left out."""
    settings = {"data.max_tokens": option.written}
    return to(settings | ({"data.long_rows": "truncate"} if given.method not in ("sft", "kd", "prm") else {}))


def _margin(option: Option, given: Given) -> Outcome:
    if given.method != "rm":
        return same("only reward models have it")
    if option.is_off:
        return to({"algo.margin": "off"}, "a column margin is not used there without it")
    return to({"algo.margin": "auto"})


def _whole_texts(option: Option, given: Given) -> Outcome:
    """Handles rows of which every token trains."""
    if option.is_off:
        return same("off, as it is here")
    column = given["data.input_key"].written if "data.input_key" in given else "input"
    remark = "here an end-of-sequence token follows each text, and trains"
    return to({"data.format": "text", "data.prompt_key": column}, remark)


def _updates(given: Given) -> int | None:
    """Returns the updates of the whole run, if the number of rows is known."""
    rows = None if "data.dataset_probs" in given else rows_of(given["data.dataset"].texts)
    if rows is None:
        return None
    if (most := given.number("data.max_samples")) > 0:
        rows = min(rows, int(most))
    return int(rows * given.number("train.max_epochs", 1) // given.number("train.batch_size", 1))


def _smoothing(option: Option, given: Given) -> Outcome:
    return to({"algo.label_smoothing": option.value}) if option.number else same("0, as it is here")


TABLE: Table = {
    "data.dataset": data("data.dataset", "data.dataset_probs", "data.dataset_split"),
    "data.dataset_probs": data("data.dataset", "data.dataset_probs", "data.dataset_split"),
    "data.dataset_split": data("data.dataset", "data.dataset_probs", "data.dataset_split"),
    "data.max_len": _longest,
    "train.batch_size": key("train.batch_size", "rows or pairs per optimizer update, all processes together"),
    "train.max_epochs": key("data.epochs"),
    "actor.lr_warmup_ratio": lambda option, given: scheduled_warmup(
        "actor", given["actor.lr_scheduler"], option.number or 0.0, _updates(given)
    ),
    PROGRAM: _program,
    PROCESSES: placed(),
    **{name: placed() for name in ("nproc_per_node", "num_gpus", "nnodes", "num_nodes", "num_processes", "include")},
    "model.ipo_enable": switch({"algo.loss": "ipo_sum"}, "sums over tokens there"),
    "model.nll_loss_coef": _likelihood,
    "model.label_smoothing": _smoothing,
    "model.margin_loss_enable": _margin,
    "model.pretrain_mode_enable": _whole_texts,
    "model.compute_fp32_loss_enable": always("rewards and losses are in float32"),
    "data.chosen_key": _columns("chosen"),
    "data.rejected_key": _columns("rejected"),
    "data.output_key": _columns("completion"),
    "data.prompt_key": _columns("prompt"),
    "data.multiturn": always("rows of messages are recognised"),
    "model.loss_type": lambda option, given: (
        same("logexp and sigmoid are the same function")
        if option.value in ("sigmoid", "logexp")
        else lost("losses here: sigmoid")
    ),
    "kd_coef": key("algo.alpha"),
    "placeholder_token": key("algo.separator"),
    "reward_tokens": lambda option, given: lost("a step has one score here, and no words for its labels"),
}
