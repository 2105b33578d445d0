"""The agent ``user_simulator``."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import Field, model_validator
from rlhf_plugin_llm_judge.costs import Costs
from rlhf_plugin_llm_judge.options import ChatOptions
from rlhf_plugin_llm_judge.serving import words_of

from rlhf_host import (
    Episode,
    EpisodeFailed,
    Metric,
    Needs,
    NoRoom,
    Outcome,
    Policy,
    RoleNeed,
    RunContext,
    Task,
    Trajectory,
    hookimpl,
)
from rlhf_plugin_user_simulator.profile import INSTRUCTIONS, JudgedBy, Profile, opening, profile_of, read_instructions
from rlhf_plugin_user_simulator.user import RoleUser, ServedUser, Talk, seed_of

log = logging.getLogger(__name__)

GREETING = "Hi! How can I help you?"
"""Words that a user reads before it opens a conversation. The policy does not see them."""


class UserSimulator:
    """A second model plays a user with a goal: a server of OpenAI's API, or a frozen role of the run. It and the policy take turns
    until it is done, gives up, or ``max_turns``."""

    class Options(ChatOptions):
        role: str | None = Field(
            None,
            pattern=r"^[a-z][a-z0-9_]*$",
            description="in place of a server: the frozen role that plays the user, such as user; its model is --ROLE.model, by"
            " default what the policy begins with",
        )
        column: str = Field("user", description="the column with the user: a goal, or an object with goal, persona and success")
        success: JudgedBy = Field(
            "user", description="who judges rows that do not say: the user, by its last mark, or the rewards of the run"
        )
        instructions: str | None = Field(
            None, description="a text file with {goal} {persona} {done} {give_up}: what the user's model reads first"
        )
        max_turns: int = Field(8, ge=1, description="answers of the policy per episode")
        done: str = Field("[DONE]", min_length=1, description="mark with which the user says that it has what it wants")
        give_up: str = Field("[GIVE UP]", min_length=1, description="mark with which the user gives up")
        temperature: float = Field(0.7, ge=0, description="of the model")

        @model_validator(mode="after")
        def _one_user(self) -> UserSimulator.Options:
            own = type(self).model_fields
            of_servers = [name for name in ChatOptions.model_fields if name != "max_tokens"]
            if self.role is not None and (given := [name for name in of_servers if getattr(self, name) != own[name].default]):
                raise ValueError(f"role {self.role} plays the user, and {given[0]} is of a server: leave one of them out")
            if self.done in self.give_up or self.give_up in self.done:
                raise ValueError(f"the marks done {self.done!r} and give_up {self.give_up!r} cannot be told apart")
            return self

    def __init__(self, options: Options):
        self.options = options
        self.instructions = INSTRUCTIONS if options.instructions is None else read_instructions(options.instructions)
        self.server = ServedUser(options) if options.role is None else None
        self.costs = Costs(0.0, 0.0, "user") if self.server is None else self.server.costs

    @hookimpl
    def needs(self) -> Needs:
        roles = () if self.options.role is None else (RoleNeed(self.options.role, generates=True),)
        return Needs(rewards=self.options.success == "rewards", roles=roles)

    @hookimpl
    def check_run(self, config: Mapping[str, Any]) -> None:
        if self.options.serve is not None:
            words_of(self.options)

    @hookimpl
    def check_labels(self, tasks: Sequence[Task]) -> dict[int, str]:
        problems = {}
        for place, task in enumerate(tasks):
            try:
                profile_of(task, self.options.column, self.options.success)
            except ValueError as error:
                problems[place] = str(error)
        return problems

    @hookimpl
    async def run_started(self, context: RunContext) -> None:
        """Raises ``UserError`` if the user's server is not reached, refuses the key, or does not start."""
        if self.server is not None:
            await self.server.start(context)

    @hookimpl
    async def run_finished(self, outcome: Outcome) -> None:
        if self.server is not None:
            log.info("user_simulator: %s", self.costs.told())
            await self.server.finish()

    @hookimpl
    def step_metrics(self) -> list[Metric]:
        measured = self.costs.step()
        if self.server is None:
            measured = {name: value for name, value in measured.items() if name in ("calls", "failed", "latency_s")}
        return [Metric(name, value) for name, value in measured.items()]

    @hookimpl
    async def agent_run(self, episode: Episode, policy: Policy) -> list[Trajectory]:
        try:
            profile = profile_of(episode.task, self.options.column, self.options.success)
        except ValueError as error:
            raise EpisodeFailed(str(error)) from error
        user = self.server or RoleUser(policy.role(str(self.options.role)), self.costs, self.options.max_tokens)
        messages = opening(episode.task)
        talk: Talk = [{"role": "system", "content": profile.filled(self.instructions, self.options.done, self.options.give_up)}]
        talk.append({"role": "user", "content": GREETING})
        ending, answers = None, list[str]()
        if messages[-1]["role"] != "user":
            text, ending = self._read(await user.say(talk, seed_of(episode, 0)))
            if ending is not None:
                raise EpisodeFailed(f"the user ends the conversation ({ending}) before the policy has said anything")
            messages.append({"role": "user", "content": text})
        talk.append({"role": "assistant", "content": _text_of(messages[-1])})
        while ending is None and len(answers) < self.options.max_turns:
            try:
                reply = await policy.chat(messages)
            except NoRoom:
                if not answers:
                    raise
                break
            answers.append(reply.content)
            messages.append(dict(reply.message))
            talk.append({"role": "user", "content": self._unmarked(reply.content)})
            said = await user.say(talk, seed_of(episode, len(answers)))
            text, ending = self._read(said)
            episode.log("user", turn=len(answers), text=text, ending=ending)
            messages.append({"role": "user", "content": text})
            talk.append({"role": "assistant", "content": said})
        # In a thread: a search for a pattern of a row may take its whole time, and nothing else would go on here.
        judged = await asyncio.to_thread(profile.met, answers)
        return self._judged(policy.trajectories(), profile, answers, ending, judged)

    def _read(self, said: str) -> tuple[str, str | None]:
        """Returns the message without marks, and how it ends the conversation. Raises ``EpisodeFailed`` for both marks."""
        endings = [name for name in ("done", "give_up") if getattr(self.options, name) in said]
        if len(endings) > 1:
            raise EpisodeFailed("the user says that it is done and that it gives up")
        return self._unmarked(said), endings[0] if endings else None

    def _unmarked(self, text: str) -> str:
        """Returns a text without marks, so that nobody can end a conversation by the other's words."""
        marks = (self.options.done, self.options.give_up)
        while any(mark in text for mark in marks):  # what is around one may be another
            for mark in marks:
                text = text.replace(mark, "")
        return text.strip()

    def _judged(
        self,
        rows: list[Trajectory],
        profile: Profile,
        answers: Sequence[str],
        ending: str | None,
        judged: tuple[bool | None, int],
    ) -> list[Trajectory]:
        met = ending == "done" if profile.success == "user" else judged[0]
        metrics = {
            "user/turns": float(len(answers)),
            "user/done": float(ending == "done"),
            "user/gave_up": float(ending == "give_up"),
            "user/unfinished": float(ending is None),
            "user/late_searches": float(judged[1]),
        }
        for row in rows:
            if row.final:
                row.metrics = metrics
                if met is not None:
                    row.agent_rewards, row.score = [None] * (len(row.actions) - 1) + [float(met)], float(met)
        return rows


def _text_of(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    if not isinstance(content, str):
        raise EpisodeFailed("the prompt's last message is no text, and the user reads nothing else")
    return content
