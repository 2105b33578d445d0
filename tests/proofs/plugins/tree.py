"""A tree of answers: one stem, and two leaves that go on from it; three rows an episode."""

from __future__ import annotations

from dataclasses import replace

from pydantic import BaseModel, ConfigDict, Field, PositiveInt

from rlhf_host import Episode, Generation, Policy, Segment, Trajectory, hookimpl


class Tree:
    """Every sampled token is an action in exactly one row; the leaves' prompts repeat the stem."""

    class Options(BaseModel):
        model_config = ConfigDict(extra="forbid")

        stem: PositiveInt = Field(3, description="tokens of the stem")
        leaf: PositiveInt = Field(4, description="tokens of each leaf")

    def __init__(self, options: Options):
        self.options = options

    @hookimpl
    async def agent_run(self, episode: Episode, policy: Policy) -> list[Trajectory]:
        prompt = list(episode.task.prompt_ids or ())
        stem = await policy.generate(prompt, replace(policy.sampling, max_new_tokens=self.options.stem))
        rows, shared = [row(episode, prompt, stem)], prompt + stem.token_ids
        if stem.finish_reason == "stop":
            return rows
        short = replace(policy.sampling, max_new_tokens=self.options.leaf)
        leaves = [await policy.generate(shared, short) for _ in range(2)]
        return rows + [replace(row(episode, shared, leaf), parent=0, branch=len(shared)) for leaf in leaves]


def row(episode: Episode, prompt: list[int], said: Generation) -> Trajectory:
    action = Segment("action", said.token_ids, said.logprobs, said.versions)
    segments = [Segment("prompt", prompt), action]
    ids = (episode.episode_id, episode.group_id)
    return Trajectory(*ids, episode.task, segments, said.finish_reason, episode.sample)
