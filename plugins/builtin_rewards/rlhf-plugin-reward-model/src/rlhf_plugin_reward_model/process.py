"""The reward ``prm``: a process reward model scores each step of an answer (arXiv:2305.20050, arXiv:2312.08935)."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import takewhile
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, model_validator

from rlhf_host import Needs, Reward, RoleNeed, RunContext, ScoreContext, Segment, Trajectory, Unjudged, UserError, hookimpl
from rlhf_plugin_reward_model.steps import Aggregate, Form, Reading, parts_of, read, steps_of, tag_token

if TYPE_CHECKING:
    from rlhf_plugin_reward_model.published import Published

log = logging.getLogger(__name__)


class Options(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    model: str | None = Field(None, description="the model's directory or hub name; default, for form scalar: roles.prm.model")
    form: Literal["scalar", "labels", "tags"] = Field(
        "scalar",
        description="the model's head: scalar (one number, as --algo prm trains), labels (a token classifier, wrong and right) or"
        " tags (a language model that says good or bad after a tag)",
    )
    template: Literal["same_tokens", "pieces", "text", "chat"] = Field(
        "same_tokens",
        description="what the model reads: the policy's prompt and each step tokenised apart, the same with its own tokenizer"
        " (pieces), one text, or its own chat template",
    )
    separator: str = Field("\n", min_length=1, description="the text between the steps of an answer")
    tag: str | None = Field(
        None, min_length=1, description="the text after each step in what the model reads; default: the separator"
    )
    join: str | None = Field(None, description="text, chat: the text between a tag and the next step; default: none")
    good: str | None = Field(None, description="tags: the token that says good; default: +")
    bad: str | None = Field(None, description="tags: the token that says bad; default: -")
    aggregate: Aggregate = Field(
        "min", description="the reward of an answer, from the probabilities of its steps: min, last, mean, product or sum"
    )
    place: Literal["end", "steps"] = Field(
        "end", description="where the reward is placed: at the last token, or each step's part at the step's last token"
    )
    max_tokens: PositiveInt | None = Field(None, description="longer answers are unjudged; default: the model's context")
    device: str | None = Field(None, description="labels, tags: device of the model; default: the first GPU, else the CPU")

    @model_validator(mode="after")
    def _fits_the_form(self) -> Options:
        if self.form != "tags" and (self.good, self.bad) != (None, None):
            raise ValueError(f"good and bad are tokens of form tags; form {self.form} has none: leave them out")
        if self.form == "scalar" and self.device is not None:
            raise ValueError("a model of form scalar is a role of the run: set --roles.prm.device, and leave device out")
        if self.form != "scalar" and self.model is None:
            raise ValueError(f"form {self.form} needs model, a directory or hub name")
        if self.form != "scalar" and self.template == "same_tokens":
            raise ValueError(f"form {self.form} reads with its own tokenizer: set template to pieces, text or chat")
        if self.template in ("same_tokens", "pieces") and self.join is not None:
            raise ValueError(f"template {self.template} tokenises each step apart: leave join out")
        return self


class ProcessReward:
    """Scores each step of an answer with a process reward model: the probability that the step is right, after its end."""

    Options = Options

    def __init__(self, options: Options):
        self.options = options
        self._form = Form(template=options.template, tag=options.tag or options.separator, join=options.join or "")
        self._published: Published | None = None
        self._tokenizer: Any = None
        self._warned = False

    @hookimpl
    def needs(self) -> Needs:
        if self.options.form != "scalar":
            return Needs()
        return Needs(roles=(RoleNeed("prm", head="scalar", trainable=False, source=self.options.model),))

    @hookimpl
    def check_run(self, config: Mapping[str, Any], tokenizers: Mapping[str, Any]) -> None:
        """Refuses a second model, tags that are not one token, and tokens that mean something else to the model."""
        options = self.options
        if options.form == "scalar":
            other = config.get("roles", {}).get("prm", {}).get("model")
            if options.model and other and other != options.model:
                raise UserError(f"the option model is {options.model} and roles.prm.model is {other}: give one of them")
            tokenizer = tokenizers["prm"]
        else:
            tokenizer = self._open()
        if options.template == "chat" and not tokenizer.chat_template:
            raise UserError("template is chat, but the model's tokenizer has no chat template: set template to text or pieces")
        if options.template in ("text", "chat"):
            tag_token(tokenizer, self._form.tag)
        elif not tokenizer(self._form.tag, add_special_tokens=False)["input_ids"]:
            raise UserError(f"the model's tokenizer has no token for the tag {self._form.tag!r}: set another tag")
        if options.template == "same_tokens":
            known = tokenizer.get_vocab()
            if wrong := [token for token, number in tokenizers["actor"].get_vocab().items() if known.get(token) != number]:
                raise UserError(
                    f"the process reward model has another vocabulary than the policy ({len(wrong)} tokens differ, such as"
                    f" {wrong[0]!r}): set template to pieces, text or chat"
                )

    def _open(self) -> Any:
        """Returns the tokenizer of a published model. Raises ``UserError`` for a model that does not have its form's head."""
        from rlhf_plugin_reward_model.published import directory_of, head_of, tokenizer_of

        assert self.options.model is not None
        directory = directory_of(self.options.model)
        if self.options.form == "labels":
            head_of(directory)
        self._tokenizer = tokenizer_of(directory)
        if self.options.form == "tags":
            self._choice()
        return self._tokenizer

    def _choice(self) -> tuple[int, int] | None:
        from rlhf_plugin_reward_model.published import token_of

        if self.options.form == "labels":
            return None
        good, bad = (token_of(self._tokenizer, text) for text in (self.options.good or "+", self.options.bad or "-"))
        return good, bad

    @hookimpl
    async def run_started(self, context: RunContext) -> None:
        if self.options.form == "scalar":
            return
        from rlhf_plugin_reward_model.published import Published, directory_of

        assert self.options.model is not None
        if self._tokenizer is None:
            self._open()
        where = directory_of(self.options.model), self._choice(), self.options.device or "auto"
        self._published = await asyncio.to_thread(Published, *where)

    @hookimpl
    async def run_finished(self) -> None:
        self._published = None

    @hookimpl
    async def score(self, trajectories: Sequence[Trajectory], context: ScoreContext) -> list[Reward | Unjudged]:
        role = context.roles["prm"] if self._published is None else None
        tokenizer = self._tokenizer if role is None else role.tokenizer
        longest = role.context_length if role is not None else self._published.context_length  # type: ignore[union-attr]
        limit = min(self.options.max_tokens or longest, longest)
        answers: dict[int, Reward | Unjudged] = {}
        readings: dict[int, Reading] = {}
        steps = [steps_of(row, self.options.separator) for row in trajectories]
        for number, row in enumerate(trajectories):
            if not steps[number]:
                answers[number] = Unjudged("the answer has no step")
                continue
            found = read(row, steps[number], self._form, tokenizer)
            if isinstance(found, Reading) and len(found.ids) > limit:
                self._warn(len(found.ids), limit)
                found = Unjudged(f"{len(found.ids)} tokens are more than the limit of {limit}")
            if isinstance(found, Unjudged):
                answers[number] = found
            else:
                readings[number] = found
        values = await self._values([trajectories[i] for i in readings], list(readings.values()), role) if readings else []
        for (number, _), each in zip(readings.items(), values, strict=True):
            row = trajectories[number]
            answers[number] = self._reward(each, [step.token for step in steps[number]], row.action_length)
        return [answers[number] for number in range(len(trajectories))]

    async def _values(self, rows: Sequence[Trajectory], readings: Sequence[Reading], role: Any) -> list[list[float]]:
        """Returns the probability of each step of each row: ``σ`` of a scalar head, ``softmax`` of two numbers."""
        if role is None:
            assert self._published is not None
            each = [reading.ids for reading in readings], [reading.places for reading in readings]
            return await asyncio.to_thread(self._published.probabilities, *each)
        columns = zip(*(reading.ids for reading in readings), strict=False)
        shared = sum(1 for _ in takewhile(lambda column: len(set(column)) == 1, columns))
        split = max(1, min(shared, *(reading.places[0] for reading in readings)))
        parts = [
            replace(row, segments=[Segment("prompt", reading.ids[:split]), Segment("action", reading.ids[split:])])
            for row, reading in zip(rows, readings, strict=True)
        ]
        scores = await role.token_scores(parts)
        return [
            [0.5 * (1.0 + math.tanh(own[place - split] / 2)) for place in reading.places]
            for own, reading in zip(scores, readings, strict=True)
        ]

    def _reward(self, values: Sequence[float], tokens: Sequence[int], length: int) -> Reward | Unjudged:
        if not all(map(math.isfinite, values)):
            return Unjudged("the model's numbers are not finite")
        parts = parts_of(values, self.options.aggregate)
        metrics = {"prm/steps": float(len(values)), "prm/mean": math.fsum(values) / len(values)}
        if self.options.place == "end":
            return Reward(math.fsum(parts), metrics=metrics)
        placed = [0.0] * length
        for part, token in zip(parts, tokens, strict=True):
            placed[token] += part
        return Reward(tokens=placed, metrics=metrics)

    def _warn(self, tokens: int, limit: int) -> None:
        if not self._warned:
            self._warned = True
            log.warning("prm: %d tokens are more than the limit of %d: not judged", tokens, limit)
