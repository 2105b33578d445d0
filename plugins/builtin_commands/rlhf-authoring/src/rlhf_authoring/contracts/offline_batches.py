"""Made-up units of a data set as a batch, turned into tensors by the host's own code; and the update over them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from rlhf_authoring.contracts.batches import STEP, VOCABULARY, noise
from rlhf_authoring.contracts.subject import Subject
from rlhf_authoring.contracts.training import Bigram, rows_of
from rlhf_host import Experience, Group, Segment, Task, Trajectory
from rlhf_host.internals import PluginManager, apply_masks, group_rows, make_experience

MARGINS = (0.5, float("nan"), 1.0)
"""Margins of the units in turn; NaN: the data has none."""


def make_units(data: str, count: int = 5, *, longest: int = 6) -> list[Group]:
    """Units of a data set of the kind ``data``, as groups: ragged rows, some with observations in between, and prompts that
    differ in length.

    Args:
        longest: tokens of a completion.
    """
    units = []
    for number in range(count):
        random = torch.Generator().manual_seed(500 + number)
        prompt = _tokens(2 + number % 3, random)
        name, margin = f"made-up-{number}", MARGINS[number % 3]
        task = Task("made up", index=number, source="made_up", prompt_ids=tuple(prompt))
        judged = [{"label": label, "margin": margin} for label in (1.0, 0.0)]
        columns = {"preference": judged, "triple": [*judged, {"gold": 1.0}]}.get(data)
        if columns is None:
            columns = [{"unpaired": {"label": float(number % 2 == 0)}, "rated": {"reward": 2.0 + number % 3}}.get(data, {})]
        rows = []
        for place, own in enumerate(columns):
            length = 1 + (3 * number + 2 * place + 1) % longest
            segments = [Segment("prompt", prompt), _action(data, length, random)]
            if (number + place) % 2:
                segments += [Segment("observation", _tokens(2, random)), _action(data, 1, random)]
            rows.append(Trajectory(name, name, task, segments, sample=place, row=place, columns=own))
        units.append(Group(name, task, rows))
    return units


def _action(data: str, length: int, random: torch.Generator) -> Segment:
    steps = [float("nan")] * (length - 1) + [float(length % 2)]
    return Segment("action", _tokens(length, random), columns={"step": steps} if data == "stepwise" else {})


def _tokens(count: int, random: torch.Generator) -> list[int]:
    return torch.randint(3, VOCABULARY, (count,), generator=random).tolist()


def again(units: Sequence[Group]) -> list[Group]:
    """The same units under other names."""

    def renamed(unit: Group) -> Group:
        name = f"{unit.group_id}-again"
        return Group(name, unit.task, [replace(row, group_id=name, episode_id=name) for row in unit.trajectories])

    return [renamed(unit) for unit in units]


def offline_batch(subject: Subject, manager: PluginManager, units: Sequence[Group] | None = None) -> Experience:
    """A batch as workers get it: rows made, masks applied, other roles' log-probabilities made up, ``prepare_batch`` called."""
    units = make_units(str(subject.needs.data)) if units is None else units
    batch = make_experience(rows_of(subject, manager, units), {}, step=STEP, max_new_tokens=0, temperature=1.0)
    apply_masks(batch, manager)
    now = logprobs_now(batch)
    for salt, output in enumerate(output for output in subject.needs.outputs if output.role):
        made_up = now + 0.3 * noise(batch, salt) if output.what == "logprobs" else noise(batch, salt)
        if output.what == "logprobs":
            batch.logprobs[output.role] = torch.where(batch.completion_mask, made_up, 0.0)
        elif output.what == "values":
            batch.values[output.role] = made_up
        elif output.what == "bootstrap":
            batch.bootstrap[output.role] = made_up[:, 0].clone()
    prepare(manager, batch)
    return batch


def prepare(manager: PluginManager, batch: Experience) -> None:
    """``prepare_batch``, in place."""
    for key, extra in manager.each("prepare_batch", experience=batch):
        batch.extra[manager.by_key[key].alias] = extra


def logprobs_now(batch: Experience) -> Tensor:
    """``[B, T]``: of the model that is trained."""
    with torch.no_grad():
        now = Bigram()("lm", batch).logprobs
    assert now is not None
    return now


def whole_units(batch: Experience) -> list[list[int]]:
    """Rows of each unit, in order of first appearance."""
    return group_rows(batch.unit_id.tolist())
