"""The default agent: the task's own prompt, one answer, the end."""

from __future__ import annotations

import asyncio

from rlhf_host import Action, Episode, Step, Task
from rlhf_host.extensions.single_turn import SingleTurn


def test_an_episode_is_the_prompt_and_one_answer():
    agent = SingleTurn(None)
    episode = Episode("episode-0", "group-0", Task("2+3="))
    assert asyncio.run(agent.agent_reset(episode)) == Step(observation=None, done=False)
    assert asyncio.run(agent.agent_step(episode, Action("5", [5], "stop"))) == Step(reward=None, done=True)
    assert asyncio.run(agent.agent_step(episode, Action("5", [5], "length"))).done
