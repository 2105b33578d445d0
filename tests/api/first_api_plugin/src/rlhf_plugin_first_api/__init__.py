"""Every hook of the first API that ran, each naming some of its arguments of then; calls are counted under the hook's name."""

from __future__ import annotations

import json

from pydantic import BaseModel, ConfigDict, Field

from rlhf_host import (
    ACTION,
    LOSS,
    TOKEN_MEAN,
    Adjust,
    Advantages,
    AgentNeeds,
    AlgoNeeds,
    CorrectionNeeds,
    Drop,
    EpisodeFailed,
    Extra,
    LossTerm,
    Metric,
    Output,
    Reward,
    RoleNeed,
    Sampling,
    Segment,
    Step,
    Task,
    Trajectory,
    Unjudged,
    hookimpl,
)
from rlhf_host import functional as F
from rlhf_host.protocols import WeightSyncTraits

CALLS: dict[str, int] = {}


def note(hook: str) -> None:
    CALLS[hook] = CALLS.get(hook, 0) + 1


class Plugin:
    class Options(BaseModel):
        model_config = ConfigDict(extra="forbid")

    def __init__(self, options):
        self.options = options


class FirstAlgorithm(Plugin):
    """REINFORCE with the group's mean as baseline."""

    class Options(F.PolicyLossOptions):
        scale: float = Field(1.0, gt=0, description="factor of the advantages")

    @hookimpl
    def needs(self):
        note("needs")
        return AlgoNeeds(
            "prompts", (RoleNeed("actor", "lm", True, None),), 2, (Output("entropy"),), weights="token", ratio=True
        )

    @hookimpl
    def check_run(self, config):
        note("check_run")
        assert config["rollout"]["n"] > 1

    @hookimpl
    def loss_masks(self, experience):
        note("loss_masks")
        return experience.action_mask & experience.completion_mask

    @hookimpl
    def compute_advantages(self, experience):
        note("compute_advantages")
        rewards = experience.rewards + F.masked_sum(experience.shaped, experience.action_mask, -1)
        centred = rewards - F.group_mean(rewards, experience.group_id, experience.episode_id)
        advantages = F.on_actions(self.options.scale * centred, experience.action_mask)
        return Advantages(advantages, None, [Metric("first/spread", centred.abs())])

    @hookimpl
    def batch_statistics(self, outputs):
        note("batch_statistics")
        return [Metric("first/likelihood", outputs.logprobs, None, "mean")]

    @hookimpl
    def compute_loss(self, role, outputs, batch):
        note("compute_loss")
        assert role == "actor"
        assert "first/likelihood" in batch.stats
        entropy = LossTerm("entropy", -outputs.entropy, LOSS, 1e-3, TOKEN_MEAN, False)
        first = LossTerm("first", 0 * outputs.logprobs, Extra("first"))
        every = LossTerm("every", 0 * outputs.logprobs, ACTION)
        return [*F.policy_loss(outputs, batch, self.options), entropy, first, every]

    @hookimpl
    def prepare_batch(self, experience):
        note("prepare_batch")
        return {"first": experience.action_mask & (experience.action_mask.long().cumsum(-1) == 1)}


class FirstRows(Plugin):
    """Trains on the first row of each group."""

    @hookimpl
    def needs(self):
        return AlgoNeeds("prompts", (RoleNeed("actor", trainable=True),), rewards=False, weights=None)

    @hookimpl
    def make_rows(self, groups):
        note("make_rows")
        return [group.trajectories[0] for group in groups]

    @hookimpl
    def compute_loss(self, outputs, batch):
        assert batch.advantages is None
        return [LossTerm("nll", -outputs.logprobs)]


class FirstReward(Plugin):
    """Vowels among the first characters; named without the context that ``score`` is given too."""

    @hookimpl
    def score(self, trajectories):
        note("score")
        found = [sum(character in "aeiou" for character in row.text) / 8 for row in trajectories]
        return [Reward(value, None, None, min(1.0, value), {"first/vowels": value}, {"vowels": value}) for value in found]

    @hookimpl
    def check_labels(self, tasks):
        note("check_labels")
        return {place: "no label" for place, task in enumerate(tasks) if task.ground_truth is None}


class FirstDoubt(Plugin):
    """Judges nothing."""

    @hookimpl
    def score(self, trajectories):
        return [Unjudged("no opinion") for _ in trajectories]


class FirstExtension(Plugin):
    """Draws, filters, shapes, corrects and steers, and keeps a count through checkpoints."""

    def __init__(self, options):
        super().__init__(options)
        self.steps = 0
        self.run_dir = None

    @hookimpl
    def run_started(self, context):
        note("run_started")
        self.run_dir = context.run_dir

    @hookimpl
    def keep_group(self, group):
        note("keep_group")
        return True if len(group.trajectories) > 1 else Drop("alone")

    @hookimpl
    def transform_rewards(self, rewards):
        note("transform_rewards")
        return rewards.clamp(-1, 1)

    @hookimpl
    def shape_rewards(self, experience):
        note("shape_rewards")
        return -0.001 * experience.action_mask.float()

    @hookimpl
    def draw_tasks(self, tasks, count, step):
        note("draw_tasks")
        return [(step * count + number) % len(tasks) for number in range(count)]

    @hookimpl
    def needs(self):
        return CorrectionNeeds(weights="token")

    @hookimpl
    def importance_weights(self, logprobs, batch):
        note("importance_weights")
        mask = batch.action_mask
        assert int(batch.versions[mask].max()) <= batch.version
        assert logprobs.current.shape == logprobs.old.shape
        return (logprobs.old - logprobs.sampler).where(mask, logprobs.old.new_zeros(())).exp().clamp(max=2.0)

    @hookimpl
    def step_finished(self, step, metrics):
        note("step_finished")
        self.steps += 1
        return Adjust({"actor.lr": 1e-4 / step, "first_extension.steps": self.steps})

    @hookimpl
    def adjust(self, settings):
        note("adjust")
        assert settings == {"steps": self.steps}

    @hookimpl
    def state_dict(self):
        note("state_dict")
        return {"steps": self.steps}

    @hookimpl
    def load_state_dict(self, state):
        note("load_state_dict")
        self.steps = state["steps"]

    @hookimpl
    def run_finished(self, outcome):
        note("run_finished")
        report = {"calls": CALLS, "steps": self.steps, "status": outcome.status}
        (self.run_dir / "first_api.json").write_text(json.dumps(report))


class FirstAgent(Plugin):
    """Asks twice, and rewards what is said itself."""

    @hookimpl
    def needs(self):
        return AgentNeeds(rewards=False, episodes_at_once=64)

    @hookimpl
    def agent_reset(self, episode):
        note("agent_reset")
        episode.state = {"asked": 0}
        return Step(None)

    @hookimpl
    def agent_step(self, episode, action):
        note("agent_step")
        if episode.state is None:
            raise EpisodeFailed("no reset", True)
        episode.state["asked"] += 1
        done = episode.state["asked"] == 2
        return Step("again" if not done else None, 0.01 * len(action.text), done, None, {"first/turns": 1.0})

    @hookimpl
    def agent_close(self, episode):
        note("agent_close")
        episode.state = None


class FirstOwner(Plugin):
    """Owns its loop: a stem of at most two tokens and a leaf of at most four, a row each."""

    @hookimpl
    async def agent_run(self, episode, policy):
        note("agent_run")
        rows, prompt = [], list(episode.task.prompt_ids)
        for tokens in (2, 4):
            made = await policy.generate(prompt, Sampling(tokens))
            parts = [Segment("prompt", prompt), Segment("action", made.token_ids, made.logprobs, made.versions)]
            rows.append(
                Trajectory(episode.episode_id, episode.group_id, episode.task, parts, made.finish_reason, episode.sample)
            )
            prompt = prompt + made.token_ids
        rows[1].parent, rows[1].branch = 0, len(rows[1].prompt_ids)
        return rows


class FirstTasks(Plugin):
    """Sixteen short prompts."""

    @hookimpl
    def load_tasks(self, split):
        note("load_tasks")
        start = 0 if split == "train" else 100
        tasks = [Task(f"{number}+1=", str(number + 1)) for number in range(start, start + 12)]
        return [*tasks, *({"prompt": f"{number}+2=", "label": str(number + 2)} for number in range(start, start + 4))]


class FirstTracker(Plugin):
    @hookimpl
    def log_metrics(self, metrics, step):
        note("log_metrics")

    @hookimpl
    def log_trajectories(self, trajectories):
        note("log_trajectories")
        assert all(row.segments for row in trajectories)


class FirstSync(Plugin):
    """Weights that the engine shares: only the version moves."""

    traits = WeightSyncTraits(in_place=True)
    engines = ()

    def start(self, start):
        assert start.run_dir is not None
        return self

    async def connect(self, targets):
        self.engines = [target.engine for target in targets]

    async def send(self, source, version):
        for engine in self.engines:
            engine.set_version(version)

    async def close(self):
        self.engines = ()
