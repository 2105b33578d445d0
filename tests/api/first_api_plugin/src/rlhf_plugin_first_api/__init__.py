"""Every hook of the first API that ran, each naming some of its arguments of then; calls are counted under the hook's name."""

from __future__ import annotations

import json

from pydantic import BaseModel, ConfigDict, Field

from rlhf_host import (
    Advantages,
    Drop,
    EpisodeFailed,
    LossTerm,
    Metric,
    Needs,
    Reward,
    RoleNeed,
    Sampling,
    Segment,
    Step,
    Task,
    Trajectory,
    hookimpl,
)
from rlhf_host import functional as F

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
        return Needs("prompts", (RoleNeed("actor", "lm", True, None),), 2, frozenset({"entropy"}))

    @hookimpl
    def loss_masks(self, experience):
        note("loss_masks")
        alone = F.group_sizes(experience.group_id, experience.episode_id) < 2
        return experience.action_mask & ~alone.unsqueeze(-1)

    @hookimpl
    def compute_advantages(self, experience):
        note("compute_advantages")
        rewards = experience.rewards + F.masked_sum(experience.shaped, experience.action_mask, -1)
        centred = rewards - F.group_mean(rewards, experience.group_id, experience.episode_id)
        advantages = F.on_actions(self.options.scale * centred, experience.action_mask)
        return Advantages(advantages, None, [Metric("first/spread", centred.abs())])

    @hookimpl
    def batch_statistics(self, role, outputs):
        note("batch_statistics")
        return [Metric("first/likelihood", outputs.logprobs, None, "mean")] if role == "actor" else []

    @hookimpl
    def compute_loss(self, role, outputs, batch):
        note("compute_loss")
        assert "first/likelihood" in batch.stats
        entropy = LossTerm("entropy", -outputs.entropy, "loss_mask", 1e-3, "token-mean", False)
        return [*F.policy_loss(outputs, batch, self.options), entropy] if role == "actor" else []


class FirstReward(Plugin):
    """Vowels among the first characters; named without the context that ``score`` is given too."""

    @hookimpl
    def score(self, trajectories):
        note("score")
        found = [sum(character in "aeiou" for character in row.text) / 8 for row in trajectories]
        return [Reward(value, None, None, min(1.0, value), {"first/vowels": value}) for value in found]


class FirstExtension(Plugin):
    """Filters, shapes and corrects, and keeps a count through checkpoints."""

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
    def importance_weights(self, logprobs, sampler_logprobs, mask):
        """The hook had ``advantages`` too, and nothing else."""
        note("importance_weights")
        return (logprobs - sampler_logprobs).where(mask, logprobs.new_zeros(())).exp().clamp(max=2.0)

    @hookimpl
    def step_finished(self, metrics):
        note("step_finished")
        self.steps += 1

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
    """Asks twice."""

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
    """Owns its loop: one answer of at most four tokens."""

    @hookimpl
    async def agent_run(self, episode, policy):
        note("agent_run")
        prompt = list(episode.task.prompt_ids)
        made = await policy.generate(prompt, Sampling(4))
        segments = [Segment("prompt", prompt), Segment("action", made.token_ids, made.logprobs, made.versions)]
        return [Trajectory(episode.episode_id, episode.group_id, episode.task, segments, made.finish_reason, episode.sample)]


class FirstTasks(Plugin):
    """Sixteen short prompts."""

    @hookimpl
    def load_tasks(self, split):
        note("load_tasks")
        start = 0 if split == "train" else 100
        yield from (Task(f"{number}+1=", str(number + 1)) for number in range(start, start + 12))
        yield from ({"prompt": f"{number}+2=", "label": str(number + 2)} for number in range(start, start + 4))


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

    @hookimpl
    def sync_connect(self, targets):
        note("sync_connect")
        self.engines = [target.engine for target in targets]

    @hookimpl
    def sync_weights(self, version):
        note("sync_weights")
        for engine in self.engines:
            engine.set_version(version)

    @hookimpl
    def sync_close(self):
        note("sync_close")
        self.engines = []
