"""Common parts of several projects' options: schedules, data sources, options of launchers."""

from __future__ import annotations

import json
import math
import os.path
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlhf_host import PluginError
from rlhf_host.settings import parse_choice
from rlhf_translate.options import (
    PROCESSES,
    Convert,
    Given,
    Option,
    Outcome,
    Table,
    Unknown,
    ask,
    count,
    lost,
    never,
    same,
    shown,
    switch,
    to,
)

SCHEDULES = {
    "constant": "constant",
    "constant_with_warmup": "constant",
    "linear": "linear",
    "cosine": "cosine",
    "cosine_with_min_lr": "cosine",
}

UNREAD = "its settings are not known: put it beside the script; what is a default below may have another value in it"
"""Message about a configuration that is not read."""

ATTENTION = ("sdpa", "eager", "flash_attention_2", "flex_attention")

REPLAYED = "probabilities are of the tokens that could be drawn, here in training too"
"""Remark about truncated sampling."""

FSDP = {"backend.name": "fsdp"}
"""Setting of what FSDP does in other projects."""

LAUNCH: Table = {
    name: never("its keys are those of --ray.runtime-env here, and few runs need one")
    for name in ("runtime_env_json", "working_dir")
}
"""Options of the other project's launcher."""


def picture_column(option: Option, given: Given) -> Outcome:
    """Handles the name of the column with pictures."""
    known = "pictures are read from the columns image and images"
    return same(known) if option.is_off or option.value in ("image", "images") else lost(f"{known}: rename it in the data")


frozen_tower = switch({"actor.freeze": ["*visual*"]}, "the names of its weights, which some families call *vision*")


def schedule(role: str) -> Convert:
    def convert(option: Option, given: Given) -> Outcome:
        if option.value in SCHEDULES:
            return to({f"{role}.schedule": SCHEDULES[option.value]})
        return lost(f"schedules here: {', '.join(dict.fromkeys(SCHEDULES.values()))}")

    return convert


def warmup(role: str, ratio: float, updates: int | None, per_step: int = 1) -> Outcome:
    """Converts a share of the run to a number of optimizer updates.

    Args:
        updates: updates of the whole run, if known.
        per_step: updates of each step.
    """
    if not ratio:
        return same("no warm-up, as it is here")
    if updates is None:
        each = f", {per_step} of each step" if per_step > 1 else ""
        return ask(f"{shown(ratio)} of all optimizer updates{each}", f"{role}.warmup_steps")
    return to({f"{role}.warmup_steps": math.ceil(ratio * updates)}, f"{shown(ratio)} of {updates} optimizer updates")


def scheduled_warmup(role: str, schedule: Option, ratio: float, updates: int | None, per_step: int = 1) -> Outcome:
    """Does the same with a schedule of Transformers, one of which ignores the warm-up."""
    if ratio and schedule.value == "constant":
        return to({f"{role}.warmup_steps": 0}, "the schedule constant has no warm-up there; constant_with_warmup has")
    return warmup(role, ratio, updates, per_step)


def run_steps(passes: Option, batch: float, rows: int | None, most: float = 0) -> Outcome:
    """Converts passes over prompts to batches.

    Args:
        batch: prompts per batch.
        rows: rows of the data, if known.
        most: maximum of these; 0: no limit.
    """
    number = "1 pass" if (passes.number or 1) == 1 else f"{passes.value} passes"
    if not batch:
        return ask(f"{number} over the data, in batches of an unknown size", "train.steps")
    if not rows:
        most_steps = count((passes.number or 1) * (most // batch))
        limit = f"; with {shown(most)} rows, the most that are used, {most_steps} steps" if most > 0 else ""
        return ask(f"{number} over the data, each of prompts / {shown(batch)} steps{limit}", "train.steps")
    rows = min(rows, int(most)) if most > 0 else rows
    steps = count((passes.number or 1) * (rows // batch))
    return to({"train.steps": steps}, f"{passes.value} × {rows} rows / {shown(batch)} prompts")


def placed(others: Convert | None = None) -> Convert:
    """Converts processes to devices of the actor.

    Args:
        others: other settings that depend on the number of processes.
    """

    def convert(option: Option, given: Given) -> Outcome:
        try:
            number = count(given.many(PROCESSES))
        except Unknown as unknown:
            return Outcome({"runtime.name": "ray"}, unknown.why, asks=("placement",))
        more = dict(others(option, given).settings) if others is not None else {}
        if number == 1:
            return to(more, "one process") if more else same("one process")
        nodes = next((count(given.many(name)) for name in ("nnodes", "num_machines", "num_nodes") if name in given), 1)
        devices = f"{nodes}x{number // nodes}" if nodes > 1 and number % nodes == 0 else str(number)
        return to({"runtime.name": "ray", "placement": [f"actor={devices}"], **more})

    return convert


def rows_of(paths: Sequence[str]) -> int | None:
    """Returns the number of rows of files on this machine; None if unknown."""
    numbers = [_rows(Path(os.path.expanduser(path))) for path in paths]
    return None if None in numbers else sum(number or 0 for number in numbers) or None


def _rows(path: Path) -> int | None:
    try:
        if path.suffix == ".jsonl":
            with path.open("rb") as lines:
                return sum(bool(line.strip()) for line in lines)
        if path.suffix == ".parquet" and path.is_file():
            from pyarrow import parquet

            return int(parquet.read_metadata(path).num_rows)
    except (OSError, ValueError):  # also what pyarrow says of other files
        pass
    return None


def aggregation(loss: str, value: str) -> Outcome:
    if loss == "gspo" and value != "sequence-mean-token-mean":
        return lost("gspo is a mean over sequences here: sequence-mean-token-mean")
    return to({"algo.aggregation": value})


def clip_limits(loss: str, low: object, high: object, remark: str = "") -> Outcome:
    """Returns limits of the ratio, under the names of the loss."""
    name = "gspo_eps" if loss == "gspo" else "clip_eps"
    return to({f"algo.{name}": low, f"algo.{name}_high": high}, remark)


def template_kwargs(option: Option, given: Given) -> Outcome:
    """Returns a mapping from JSON."""
    if option.is_off or option.value == "{}":
        return same("none, as it is here")
    try:
        values = json.loads(option.value)
        return to({"data.template_kwargs": [f"{key}={json.dumps(value)}" for key, value in values.items()]})
    except (ValueError, AttributeError):
        return lost("not a mapping in JSON: --data.template-kwargs KEY=VALUE")


def attention(option: Option, given: Given) -> Outcome:
    value = option.value if option.values and option.value not in ("true", "True") else "flash_attention_2"
    if value in ATTENTION:
        return to({"actor.attn_implementation": value})
    return lost(f"kernels here: auto, {', '.join(ATTENTION)}")


def sequence_parallel(role: str) -> Convert:
    """Returns a function that translates a number of devices for each row."""
    return lambda option, given: (
        same("off, as it is here") if option.is_off or option.number == 1 else to({f"{role}.sequence_parallel": option.value})
    )


def rewards(*choices: str) -> Outcome:
    """Returns reward plugins, files and addresses, each under an alias that flags can spell."""
    try:
        named = {re.sub(r"\W", "_", alias): spec for alias, spec in map(parse_choice, choices)}
    except PluginError as error:
        return lost(str(error))
    return to({f"reward.{alias}.name": spec for alias, spec in named.items()})


def reward_range(low: float, high: float, remark: str = "") -> Outcome:
    """Returns limits for the sum of all rewards."""
    return to({"with.reward_scaling.low": low, "with.reward_scaling.high": high}, remark)


def sources(
    paths: Sequence[str], shares: Sequence[str] = (), *, split: str | None = None, subset: str | None = None
) -> list[dict[str, Any]]:
    """Returns data sources in the form of a file; splits belong to data sets, not to files."""
    entries: list[dict[str, Any]] = []
    for number, path in enumerate(paths):
        is_file = bool(re.search(r"\.(jsonl?|parquet|csv|txt|arrow)$", path))
        entry: dict[str, Any] = {"path": path}
        entry |= {"subset": subset} if subset else {}
        entry |= {"split": split} if split and not is_file else {}
        entry |= {"weight": float(shares[number])} if number < len(shares) else {}
        entries.append(entry)
    return entries


def critic_first(steps: int, has_critic: bool, remark: str) -> Outcome:
    """Returns first steps in which the actor does not learn: other projects have them without a critic too."""
    if has_critic:
        return to({"algo.critic_warmup": steps}, remark if steps else "")
    if not steps:
        return same("the actor learns from the first step, as it does here")
    first = "step" if steps == 1 else f"{steps} steps"
    return lost(f"without a critic nothing at all learns in the first {first} there; here the actor learns from the first")


PROJECT_OF = {
    "wandb": "tracker.wandb.project",
    "swanlab": "tracker.swanlab.project",
    "mlflow": "tracker.mlflow.experiment",
    "trackio": "tracker.trackio.project",
    "clearml": "tracker.clearml.project",
}
"""Tracker → its setting for the project."""
TRACKERS = (*PROJECT_OF, "tensorboard")


def trackers(option: Option, always_there: str, without: str) -> Outcome:
    """Returns the trackers that a list names.

    Args:
        always_there: the name that stands for what is shown anyway, or for no tracker.
        without: the remark if no other is named.
    """
    known = {f"tracker.{name}.name": name for name in option.items if name in TRACKERS}
    others = [name for name in option.items if name not in (*TRACKERS, always_there)]
    if others and not known:
        return lost(f"no tracker here is called {', '.join(others)}")
    return to(known, f"without {', '.join(others)}" if others else "") if known else same(without)
