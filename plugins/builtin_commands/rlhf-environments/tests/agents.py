"""Agents and rewards of the tests: turns with tools, random numbers, failures, and one that runs itself."""

from __future__ import annotations

import random

from pydantic import BaseModel

from rlhf_host import EpisodeFailed, Needs, Reward, Step, hookimpl

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    },
}
CLOSED = []


class Guess:
    """Three tries. A wrong one is told a random number of the episode, a call of the tool its sum."""

    class Options(BaseModel):
        tries: int = 3

    def __init__(self, options):
        self.options = options

    @hookimpl
    def needs(self):
        return Needs(rewards=False)

    @hookimpl
    def agent_reset(self, episode):
        episode.state = {"tries": 0, "draw": random.Random(episode.seed + episode.sample)}
        return Step(tools=[ADD])

    @hookimpl
    def agent_step(self, episode, action):
        state = episode.state
        state["tries"] += 1
        if action.text == "fail":
            raise EpisodeFailed("it was asked to fail")
        if action.text == "bug":
            raise KeyError("a bug")
        good = str(episode.task.ground_truth) in action.text
        if good or state["tries"] == self.options.tries:
            reward = (0.1 + state["draw"].random()) / 3 * good - 0.1 * (action.finish_reason == "length")
            return Step(reward=reward, done=True, metrics={"guess/tries": state["tries"]})
        calls = action.message.tool_calls
        results = [
            {"role": "tool", "name": call.name, "tool_call_id": call.id, "content": str(sum(call.arguments.values()))}
            for call in calls
        ]
        return Step(results or f"no, {state['draw'].random()}")

    @hookimpl
    def agent_close(self, episode):
        CLOSED.append(episode.episode_id)


class Talk:
    """Runs itself: two questions of one conversation."""

    @hookimpl
    async def agent_run(self, episode, policy):
        messages = [{"role": "user", "content": "your name?"}]
        reply = await policy.chat(messages)
        messages += [reply.message, {"role": "user", "content": f"{reply.content}, {episode.task.prompt}"}]
        await policy.chat(messages)
        return policy.trajectories()


class Seats:
    """Runs itself: two seats of equal rank."""

    @hookimpl
    async def agent_run(self, episode, policy):
        for name in ("white", "black"):
            await policy.fork(name).chat([{"role": "user", "content": name}])
        return policy.trajectories()


def letters(trajectory):
    """Reads what rewards read of a text."""
    if "odd" in trajectory.last_text:
        raise ValueError("cannot judge that")
    asked = trajectory.prompt_text.count("1") / 7
    return Reward(value=len(trajectory.text) / 3 + asked, parts={}, metrics={"turns": len(trajectory.actions)})
