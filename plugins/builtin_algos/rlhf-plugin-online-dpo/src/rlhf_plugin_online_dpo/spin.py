"""SPIN: the answers of a data set must be likelier than those of the model that the run began with (arXiv:2401.01335).

Of a prompt's ``n`` answers, those with even numbers are the data's and those with odd numbers the opponent's, which is the
reference: answer ``2k + 1`` makes a pair with answer ``2k``. The agent ``spin`` makes them so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from pydantic import Field, field_validator
from rlhf_rows import losses

from rlhf_host import (
    Batch,
    Drop,
    Episode,
    Experience,
    Group,
    LossTerm,
    Metric,
    Needs,
    Outputs,
    Policy,
    Segment,
    Task,
    Trajectory,
    UserError,
    hookimpl,
)
from rlhf_plugin_online_dpo.rivals import BesideReference, check_rivals, given, rivals


class AnswersOfData(BesideReference):
    """The agent of SPIN: one question, one answer; the first is that of the data, the second the reference's, and so on."""

    @hookimpl
    def check_labels(self, tasks: Sequence[Task]) -> Mapping[int, str]:
        wrong = "spin trains on the label as the answer, which is a text that is not empty (--data.label-key NAME)"
        return {place: wrong for place, task in enumerate(tasks) if not _is_answer(task.ground_truth)}

    @hookimpl
    async def agent_run(self, episode: Episode, policy: Policy) -> list[Trajectory]:
        """Returns one answer. Evaluations have the policy's answers alone."""
        if episode.split == "eval" or episode.sample % 2:
            return await super().agent_run(episode, policy)
        ids = answer_tokens(episode.task, policy.tokenizer)
        prompt = Segment("prompt", episode.task.prompt_ids or (), images=episode.task.images)
        answer = Segment("observation", ids)  # nobody sampled it; ``make_rows`` has it trained
        names = episode.episode_id, episode.group_id
        return [Trajectory(*names, episode.task, [prompt, answer], sample=episode.sample)]


def _is_answer(label: Any) -> bool:
    return isinstance(label, str) and bool(label.strip())


def answer_tokens(task: Task, tokenizer: Any) -> list[int]:
    """Returns the tokens of the data's answer and the end token. Raises ``UserError`` where there are none."""
    if not _is_answer(task.ground_truth):
        raise UserError(f"{task.source}:{task.index} has no answer to train on: name its column with --data.label-key NAME")
    if tokenizer.eos_token_id is None:
        raise UserError("the tokenizer has no end token, so nothing would say where an answer of the data ends")
    return [*tokenizer(task.ground_truth, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]


def of_data(row: Trajectory) -> Trajectory:
    """Returns the row with its answer as tokens to train on, which nobody sampled."""
    prompt, *answer = row.segments
    return given(replace(row, segments=[prompt, *(replace(segment, kind="action") for segment in answer)]))


class SPINOptions(losses.PreferenceOptions):
    loss: Literal["sigmoid", "hinge"] = Field(
        "sigmoid", description="loss of a pair: sigmoid, the paper's logistic loss, or hinge"
    )
    reference_free: bool = Field(False, description="always false: the reference is the opponent")

    @field_validator("reference_free")
    @classmethod
    def _has_one(cls, value: bool) -> bool:
        if value:
            raise ValueError("the reference of SPIN is the opponent: leave reference_free out, or take --algo sft")
        return value


class SPIN:
    """SPIN: the answers of the data must be likelier than the model's own of the start of the run, compared with it.

    ``ℓ(λ·(log π(y)/ref(y)) − λ·(log π(y')/ref(y')))``, a mean over pairs: ``y`` of the data, ``y'`` sampled from the reference,
    ``ℓ(t) = log(1 + e^−t)``, ``λ`` is ``beta`` (arXiv:2401.01335, eq. 4.7). One run is one iteration.
    """

    Options = SPINOptions

    def __init__(self, options: SPINOptions):
        self.options = options

    @hookimpl
    def needs(self) -> Needs:
        pairs = losses.preference_needs(self.options, lr=1e-6)
        return replace(pairs, data="prompts", min_group_size=2, weights=None)

    @hookimpl
    def check_run(self, config: Mapping[str, Any]) -> None:
        check_rivals(config, "spin")

    @hookimpl
    def keep_group(self, group: Group) -> bool | Drop:
        return True if any(rivals(group)) else Drop("no_pair")

    @hookimpl
    def make_rows(self, groups: Sequence[Group]) -> list[Trajectory]:
        """Returns two rows for each pair: the data's answer, which is chosen, and the opponent's."""
        rows = []
        for group in groups:
            for number, own, other in rivals(group):
                for row, label in ((of_data(own), 1.0), (given(other), 0.0)):
                    common = {"episode_id": f"{group.group_id}/{number}", "row": int(1 - label), "parent": None}
                    rows.append(replace(row, columns={**row.columns, "label": label}, **common))
        return rows

    @hookimpl
    def prepare_batch(self, experience: Experience) -> dict[str, Any]:
        return losses.prepared_pairs(experience, self.options)

    @hookimpl
    def compute_loss(self, outputs: Outputs, batch: Batch) -> list[LossTerm | Metric]:
        return losses.preference_loss(outputs, batch, self.options)
