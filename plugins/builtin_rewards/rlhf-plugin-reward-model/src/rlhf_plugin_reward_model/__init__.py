"""The reward ``reward_model``: the scalar head of a model that the run loads as the role ``reward``."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveInt

from rlhf_host import Experience, Needs, Reward, RoleNeed, ScoreContext, Segment, Trajectory, UserError, hookimpl
from rlhf_host import functional as F

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger(__name__)


class Options(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    model: str | None = Field(None, description="the reward model's directory or hub name; default: roles.reward.model")
    template: Literal["same_tokens", "chat", "text"] = Field(
        "same_tokens", description="what the model reads: the policy's tokens, its own chat template, or plain text"
    )
    max_tokens: PositiveInt | None = Field(None, description="longer trajectories are unjudged; default: the model's context")
    normalize: Literal["none", "running", "batch", "file"] = Field(
        "none",
        description="in training: normalise to mean 0 and deviation 1, over all rewards so far, over the batch, or by mean and std"
        " in the model's config.json",
    )
    clip: float | None = Field(
        None, gt=0, description="in training: largest absolute value of a reward, after normalize; null: no limit"
    )
    score: Literal["sigmoid", "none"] = Field("none", description="the 0-1 score: the reward's sigmoid, or none")


@dataclass(slots=True)
class Judged(Reward):
    by: Any = field(default=None, repr=False, compare=False)
    """The plugin. It distinguishes its column of ``plugin_rewards`` from others, whatever its alias."""


class RewardModel:
    """Scores answers with a reward model, the role ``reward``. The score is None if a trajectory is too long or empty, or if
    the model's number is not finite.
    """

    Options = Options

    def __init__(self, options: Options):
        self.options = options
        self.count, self.mean, self.squares = 0, 0.0, 0.0
        self._of_file = (0.0, 1.0)
        """Mean and deviation in the model's file."""
        self._waiting: list[tuple[Trajectory, asyncio.Future[float]]] = []
        self._passes: asyncio.Task[None] | None = None
        self._warned = self._blind = False

    @hookimpl
    def needs(self) -> Needs:
        return Needs(roles=(RoleNeed("reward", head="scalar", trainable=False, source=self.options.model),))

    @hookimpl
    def check_run(self, config: Mapping[str, Any], tokenizers: Mapping[str, Any]) -> None:
        """Refuses a second, different model, and tokens that mean something else to the reward model."""
        tokenizer, template = tokenizers["reward"], self.options.template
        settings = config.get("roles", {}).get("reward", {})
        other = settings.get("model")
        if self.options.model and other and other != self.options.model:
            raise UserError(f"the option model is {self.options.model} and roles.reward.model is {other}: give one of them")
        if self.options.normalize in ("none", "file"):
            self._read_statistics(self.options.model or other, settings.get("revision"))
        if template == "chat" and not tokenizer.chat_template:
            raise UserError("template is chat, but the reward model's tokenizer has no chat template: set template to text")
        if template == "same_tokens":
            known = tokenizer.get_vocab()
            if wrong := [token for token, number in tokenizers["actor"].get_vocab().items() if known.get(token) != number]:
                raise UserError(
                    f"the reward model has another vocabulary than the policy ({len(wrong)} tokens differ, such as {wrong[0]!r}):"
                    " set template to chat or text"
                )

    def _read_statistics(self, model: str | None, revision: str | None) -> None:
        """Reads ``mean`` and ``std`` of the scores, as OpenRLHF writes them into the configuration of its reward models.

        Raises ``UserError`` if they are asked for, and missing or not usable.
        """
        from transformers import PreTrainedConfig

        if model is None:
            return
        asked = self.options.normalize == "file"
        try:
            known = PreTrainedConfig.get_config_dict(model, **({"revision": revision} if revision else {}))[0]
        except (OSError, ValueError):  # what cannot be loaded is told when the model is
            known = {}
        numbers = [known.get(name) for name in ("mean", "std")]
        usable = all(isinstance(number, float | int) and math.isfinite(number) for number in numbers) and numbers[1] > 0
        if asked and not usable:
            shown = ", ".join(f"{name} {number}" for name, number in zip(("mean", "std"), numbers, strict=True))
            raise UserError(
                f"normalize is file, and config.json of {model} does not have the mean of its scores and their std above 0"
                f" ({shown}): set normalize to running or none"
            )
        if asked:
            self._of_file = (float(numbers[0]), float(numbers[1]))
        elif usable:
            log.warning(
                "reward_model: %s says that its scores have mean %g and std %g: normalize file uses that", model, *numbers
            )

    @hookimpl
    async def score(self, trajectories: Sequence[Trajectory], context: ScoreContext) -> list[Reward | None]:
        role = context.roles["reward"]
        rows = self._as_read(trajectories, role.tokenizer)
        lengths = [sum(len(segment.token_ids) for segment in row.segments) for row in rows]
        limit = min(self.options.max_tokens or role.context_length, role.context_length)
        fits = [i for i, row in enumerate(rows) if row.prompt_ids and trajectories[i].action_length and lengths[i] <= limit]
        if max(lengths, default=0) > limit and not self._warned:
            self._warned = True
            log.warning("reward_model: %d tokens are more than the limit of %d: not judged", max(lengths), limit)
        values = await self._values([rows[i] for i in fits], role) if fits else []
        found = dict(zip(fits, values, strict=True))
        return [self._reward(found.get(i, math.nan)) for i in range(len(rows))]

    @hookimpl
    def transform_rewards(self, experience: Experience, rewards: Tensor) -> Tensor:
        """Adds ``w·(clip((x − mean)/std) − x)`` to the rewards, with ``x [B]`` the model's scores and ``w`` its weight.
        Population deviations, over episodes.
        """
        mine, options = self._column(experience), self.options
        if mine is None or experience.reward_weights[mine] == 0 or (options.normalize, options.clip) == ("none", None):
            return rewards
        raw = values = experience.plugin_rewards[:, mine].double()
        means = F.group_mean(raw, experience.episode_id).tolist()
        each = raw.new_tensor([*dict(zip(experience.episode_id.tolist(), means, strict=True)).values()])
        if options.normalize == "running":
            for value in each.tolist():  # Welford, 1962
                gap, self.count = value - self.mean, self.count + 1
                self.mean += gap / self.count
                self.squares += gap * (value - self.mean)
            values = (raw - self.mean) / max(math.sqrt(self.squares / self.count), 1e-6)
        elif options.normalize == "file":
            values = (raw - self._of_file[0]) / self._of_file[1]
        elif options.normalize == "batch":
            values = (raw - each.mean()) / each.std(correction=0).clamp(min=1e-6)
        if options.clip is not None:
            values = values.clamp(-options.clip, options.clip)
        return rewards + experience.reward_weights[mine] * (values - raw)

    @hookimpl
    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "mean": self.mean, "squares": self.squares}

    @hookimpl
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.count, self.mean, self.squares = int(state["count"]), float(state["mean"]), float(state["squares"])

    def _as_read(self, trajectories: Sequence[Trajectory], tokenizer: Any) -> list[Trajectory]:
        """Returns the trajectories in the reward model's tokens. Their common part is the prompt, which is computed once."""
        if self.options.template == "same_tokens":
            return list(trajectories)
        if not self._blind and any(row.images for row in trajectories):
            self._blind = True
            log.warning(
                "reward_model: with template %s it judges words alone: pictures are not shown to it", self.options.template
            )
        if self.options.template == "chat":
            texts = [tokenizer.apply_chat_template(_messages(row), tokenize=False) for row in trajectories]
        else:
            texts = [row.prompt_text + row.full_text for row in trajectories]
        # A chat template has written its special tokens itself.
        ids = tokenizer(texts, add_special_tokens=self.options.template == "text")["input_ids"]
        split = max(1, sum(1 for _ in takewhile(lambda column: len(set(column)) == 1, zip(*ids, strict=False))))
        return [
            replace(row, segments=[Segment("prompt", list(own[:split])), Segment("action", list(own[split:]))])
            for row, own in zip(trajectories, ids, strict=True)
        ]

    async def _values(self, rows: Sequence[Trajectory], role: Any) -> list[float]:
        """Returns the scalar of each row. Requests of one turn of the event loop, or made while the model is busy, share one
        pass.
        """
        answers = [asyncio.get_running_loop().create_future() for _ in rows]
        self._waiting += zip(rows, answers, strict=True)
        if self._passes is None or self._passes.done():
            self._passes = asyncio.create_task(self._run_passes(role))
        return await asyncio.gather(*answers)

    async def _run_passes(self, role: Any) -> None:
        await asyncio.sleep(0)
        # Who asked may have given up, before the pass or during it: those answers are done.
        while waiting := [pair for pair in self._waiting if not pair[1].done()]:
            self._waiting = []
            try:
                values = await role.scores([row for row, _ in waiting])
            except Exception as error:
                for answer in (answer for _, answer in waiting if not answer.done()):
                    answer.set_exception(error)
                continue
            for (_, answer), value in zip(waiting, values, strict=True):
                if not answer.done():
                    answer.set_result(value)

    def _reward(self, value: float) -> Reward | None:
        if not math.isfinite(value):
            return None
        score = 0.5 * (1.0 + math.tanh(value / 2)) if self.options.score == "sigmoid" else None
        return Judged(value, score=score, by=self)

    def _column(self, experience: Experience) -> int | None:
        given = ((alias, reward) for row in experience.trajectories for alias, reward in row.rewards.items())
        mine = (alias for alias, reward in given if isinstance(reward, Judged) and reward.by is self)
        return next(map(experience.reward_names.index, mine), None)


def _messages(row: Trajectory) -> list[dict[str, Any]]:
    prompt = row.task.prompt
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    return [*messages, {"role": "assistant", "content": row.full_text}]
