"""TRL's trainers on a data set: DPO, SFT, KTO, reward models."""

from __future__ import annotations

from rlhf_translate.options import PROGRAM, Given, Option, Outcome, Table, ask, key, lost, never, same, shown, switch, to

MATTERS = (
    "learning_rate",
    "max_length",
    "max_seq_length",
    "max_prompt_length",
    "truncation_mode",
    "beta",
    "shuffle_dataset",
    "assistant_only_loss",
)
"""Options whose defaults matter here, beside those of every program."""

_ALGORITHMS = {"reward": "rm"}
_LATEST = (0, 29)
"""First version of DPO that ignores label smoothing in the loss ``sigmoid``, and cuts the ends of rows."""


def _program(option: Option, given: Given) -> Outcome:
    return to({"algo.name": _ALGORITHMS.get(given.method, given.method)})


def _preference(option: Option, given: Given) -> Outcome:
    """Handles one loss, or one together with the negative log-likelihood of the chosen: TRL adds ``sft`` and ``rpo_alpha``."""
    if given.method == "sft" and option.is_off:
        return same("nll, as it is here")
    names = option.items
    others = [name for name in names if name != "sft"]
    if given.method != "dpo":
        return to({"algo.loss": names[0]}) if len(names) == 1 else lost("one loss at a time here")
    if len(others) != 1 or len(names) > 2:
        return ask(f"one loss at a time here, and sft beside it, not {', '.join(names)}", "algo.loss")
    weights = given["loss_weights"].numbers if "loss_weights" in given else [1.0] * len(names)
    if len(weights) != len(names) or not weights[names.index(others[0])]:
        return lost(f"{len(weights)} weights for {len(names)} losses")
    own = weights[names.index(others[0])]
    parts = [weights[names.index("sft")]] if "sft" in names else []
    parts += [given.number("rpo_alpha")] if "rpo_alpha" in given else []
    remarks = [f"the whole loss is {shown(own)} times this there: with Adam the step is the same"] if own != 1 else []
    remarks += ["rpo_alpha is added to the weight of sft there"] if len(parts) == 2 else []
    return to({"algo.loss": others[0]} | ({"algo.nll_coef": sum(parts) / own} if parts else {}), "; ".join(remarks))


def _losses(given: Given) -> Option:
    return given["loss_type"] if "loss_type" in given else Option("loss_type", ("sigmoid",))


def _weights(option: Option, given: Given) -> Outcome:
    if option.is_off:
        return same("none, as it is here")
    outcome = _preference(_losses(given), given)
    return outcome if outcome.asks is None else lost("see loss_type")


def _rpo(option: Option, given: Given) -> Outcome:
    if option.is_off:
        return same("off, as it is here")
    outcome = _preference(_losses(given), given)
    return to({"algo.nll_coef": option.value}) if outcome.lost or outcome.asks is not None else outcome


def _smoothing(option: Option, given: Given) -> Outcome:
    losses = given["loss_type"].items if "loss_type" in given else ["sigmoid"]
    if not option.number:
        return same("0, as it is here")
    if given.version >= _LATEST and set(losses) <= {"sigmoid", "sft"}:
        return same("TRL's sigmoid does not use it")
    return to({"algo.label_smoothing": option.value})


def _longest(option: Option, given: Given) -> Outcome:
    """Handles long rows: reward models leave longer pairs out, as here; other trainers cut them."""
    if option.is_off:
        return same("no limit, as it is here")
    if given.method in ("dpo", "kto"):
        return to({"data.max_tokens": option.written, "data.long_rows": "truncate"})
    return to({"data.max_tokens": option.written})


def _longest_prompt(option: Option, given: Given) -> Outcome:
    if option.is_off or (option.number or 0) <= 0:
        return same("prompts have no limit")
    return lost("prompts are not cut on their own here")


def _truncation(option: Option, given: Given) -> Outcome:
    if option.value == "keep_start":
        return same("the end of the answer is cut, as it is here")
    return lost("here the end of the answer is cut")


def _of_answers(option: Option, given: Given) -> Outcome:
    """Handles the choice to train only answers."""
    if option.is_off and option.values:
        return lost("prompts and messages of the user are trained there too; here only answers are")
    return same("only answers are trained here")


def _of_script(option: Option, given: Given) -> Outcome:
    """Handles ``max_length``, which TRL's script for pictures sets itself."""
    return same("sft_vlm.py sets no limit") if "sft_vlm" in given[PROGRAM].name else _longest(option, given)


def _older(option: Option, given: Given) -> Outcome:
    """Handles ``max_seq_length``, until 0.19."""
    return same("max_length counts") if option.is_off else _longest(option, given)


def _dataset_text(option: Option, given: Given) -> Outcome:
    return same("the column is recognised") if option.value == "text" else to({"data.prompt_key": option.value})


TABLE: Table = {
    PROGRAM: _program,
    "assistant_only_loss": _of_answers,
    "completion_only_loss": _of_answers,
    "beta": key("algo.beta"),
    "loss_type": _preference,
    "loss_weights": _weights,
    "label_smoothing": _smoothing,
    "reference_free": switch({"algo.reference_free": True}),
    "step_separator": key("algo.separator"),
    "train_on_last_step_only": switch({"algo.last_step_only": True}),
    "rpo_alpha": _rpo,
    "dataset_text_field": _dataset_text,
    "max_length": _of_script,
    "max_seq_length": _older,
    "max_prompt_length": _longest_prompt,
    "truncation_mode": _truncation,
    "eos_token": never("answers end as the tokenizer and its chat template say"),
}
