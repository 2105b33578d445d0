"""An agent and an engine that take their time, and the steps of a pipeline with them."""

from __future__ import annotations

import asyncio

from rlhf_authoring.engines import ScriptedEngine

from rlhf_host import ScoreContext, Step, hookimpl


class Slow:
    """An agent whose environment takes as long as the task says, in milliseconds."""

    def __init__(self):
        self.closed = []

    @hookimpl
    def agent_reset(self, episode):
        return Step(episode.task.prompt)

    @hookimpl
    async def agent_step(self, episode, action):
        await asyncio.sleep(episode.task.metadata["ms"] / 1000)
        return Step(done=True)

    @hookimpl
    def agent_close(self, episode):
        self.closed.append(episode.task.index)


class Slept(ScriptedEngine):
    async def generate(self, token_ids, sampling, key):
        version = self.version
        await asyncio.sleep(0.002)
        assert self.version == version, "weights changed under a request"
        return await super().generate(token_ids, sampling, key)


async def steps_of(pipeline, gate, count, train_s=0.0, first=0):
    """The task indices of each batch, and the versions of its tokens."""
    batches = []
    await pipeline.published(first)
    for step in range(first + 1, first + count + 1):
        collected = await pipeline.next_rollouts(ScoreContext(step=step))
        rows = collected.trajectories_in_order()
        batches.append(([group.task.index for group in collected.groups], {v for row in rows for v in row.actions[0].versions}))
        await asyncio.sleep(train_s)
        await gate.hold()
        gate.engine.version = step
        gate.release()
        await pipeline.published(step)
    return batches


def stopped_after(made, gate, count):
    """The batches of so many steps, and what a checkpoint has of what goes on behind them."""

    async def run():
        batches = await steps_of(made, gate, count)
        await asyncio.sleep(0.05)
        state, finished = made.state_dict(), made.finished()
        await made.close()
        return batches, state, finished

    return asyncio.run(run())
