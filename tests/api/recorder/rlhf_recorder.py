"""Plugins that note every call of every hook, in order, with its arguments; options say how they answer."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from rlhf_host import (
    Adjust,
    Advantages,
    Drop,
    EpisodeFailed,
    LossTerm,
    Metric,
    Needs,
    Reward,
    RoleNeed,
    Segment,
    Step,
    Stop,
    Task,
    Trajectory,
    UserError,
    hookimpl,
)
from rlhf_host.protocols import WeightSyncTraits


@dataclass
class Call:
    hook: str
    arguments: dict[str, Any]
    who: object


CALLS: list[Call] = []


def note(who, hook, **arguments):
    CALLS.append(Call(hook, arguments, who))


class Plugin:
    class Options(BaseModel):
        model_config = ConfigDict(extra="forbid")

    def __init__(self, options):
        self.options = options


class Algorithm(Plugin):
    """Every action token's advantage is its row's reward; two loss terms of 1 a token, one of them corrected."""

    class Options(BaseModel):
        shape: Literal["right", "wrong"] = "right"
        group_size: int = 1

    @hookimpl
    def needs(self):
        note(self, "needs")
        return Needs("prompts", (RoleNeed("actor", trainable=True, source=None),), self.options.group_size)

    @hookimpl
    def compute_advantages(self, experience):
        note(self, "compute_advantages", experience=experience)
        mask = experience.action_mask
        advantages = experience.rewards.unsqueeze(-1) * mask
        metrics = [Metric("seen/shaped", experience.shaped, mask), Metric("seen/kept", experience.loss_mask.sum(-1).float())]
        return Advantages(advantages if self.options.shape == "right" else advantages[:, :1], metrics=metrics)

    @hookimpl
    def batch_statistics(self, role, outputs, batch):
        note(self, "batch_statistics", role=role, outputs=outputs, batch=batch)
        return [Metric("rows", float(len(batch)), reduce="sum")]

    @hookimpl
    def around_pass(self, role, model, lengths, traces):
        note(self, "around_pass", role=role, head=hasattr(model, "lm_head"), lengths=lengths, traces=traces)
        return self._around()

    @contextmanager
    def _around(self):
        yield
        note(self, "passed")

    @hookimpl
    def compute_loss(self, role, outputs, batch):
        note(self, "compute_loss", role=role, outputs=outputs, batch=batch)
        ones = outputs.logprobs * 0 + 1
        yield LossTerm("corrected", ones, corrected=True)
        yield LossTerm("plain", ones)
        yield Metric("seen/rows", batch.stats["rows"])


class Selecting(Plugin):
    """Rows of its own instead of advantages."""

    @hookimpl
    def needs(self):
        return Needs("prompts", (RoleNeed("actor", trainable=True, source=None),))

    @hookimpl
    def make_rows(self, groups):
        note(self, "make_rows", groups=groups)
        return [group.trajectories[0] for group in groups]

    @hookimpl
    def compute_loss(self, role, outputs, batch):
        return [LossTerm("nll", -outputs.logprobs)]


class Rewarding(Plugin):
    """Twice the reward as a penalty, and half a point for each token."""

    @hookimpl
    def transform_rewards(self, rewards):
        return -2 * rewards

    @hookimpl
    def shape_rewards(self, experience):
        return 0.5 * experience.action_mask.float()

    @hookimpl
    def prepare_batch(self, experience):
        note(self, "prepare_batch", experience=experience)


class Judge(Plugin):
    """The sample's number is its reward."""

    class Options(BaseModel):
        unjudged: int = -1
        unread: str = ""
        figure: float = 1.0
        """Figure of a group; below 0, it is no metric."""

    def __init__(self, options):
        super().__init__(options)
        self.judged = 0.0

    @hookimpl
    def step_metrics(self, step):
        note(self, "step_metrics", step=step)
        judged, self.judged = self.judged, 0.0
        return [Metric("judged", judged)] if self.options.figure >= 0 else [judged]

    @hookimpl
    def check_labels(self, tasks):
        note(self, "check_labels", tasks=list(tasks))
        return {place: "no such label" for place, task in enumerate(tasks) if task.ground_truth == self.options.unread}

    @hookimpl
    async def score(self, trajectories, context):
        note(self, "score", trajectories=list(trajectories), context=context)
        self.judged += self.options.figure
        return [
            None if row.sample == self.options.unjudged else Reward(float(row.sample), score=float(row.sample > 0))
            for row in trajectories
        ]


class Extension(Plugin):
    class Options(BaseModel):
        add: float = 0.0
        times: float = 1.0
        shaped: float = 0.0
        factor: float = 1.0
        first: int = 0
        last: int = 1000
        refuse: str = ""
        stop: int = -1
        adjust: str = ""
        to: float = 0.0
        """Below -10: not a number, which no option can be."""

    def __init__(self, options):
        super().__init__(options)
        self.steps = 0

    @hookimpl
    def check_run(self, config, tokenizers):
        note(self, "check_run", config=config, tokenizers=dict(tokenizers))
        if self.options.first == 99:
            raise UserError("first is 99")

    @hookimpl
    async def run_started(self, context):
        note(self, "run_started", context=context, steps=self.steps)

    @hookimpl
    def keep_group(self, group):
        note(self, "keep_group", group=group)
        return Drop("refused") if self.options.refuse == group.task.prompt else True

    @hookimpl
    def transform_rewards(self, experience, rewards):
        note(self, "transform_rewards", experience=experience, rewards=rewards.clone())
        return (rewards + self.options.add) * self.options.times

    @hookimpl
    def shape_rewards(self, experience):
        note(self, "shape_rewards", experience=experience)
        return self.options.shaped * experience.action_mask.float()

    @hookimpl
    def loss_masks(self, experience):
        note(self, "loss_masks", experience=experience)
        position = experience.action_mask.long().cumsum(-1) - 1
        return (position >= self.options.first) & (position <= self.options.last)

    @hookimpl
    def prepare_batch(self, experience):
        note(self, "prepare_batch", experience=experience)
        return {"row": experience.rewards.clone(), "weight": self.options.factor}

    @hookimpl
    def importance_weights(self, logprobs, batch):
        note(self, "importance_weights", logprobs=logprobs, batch=batch)
        return logprobs.current.new_full(batch.action_mask.shape, self.options.factor)

    @hookimpl
    def compute_loss(self, role, batch):
        note(self, "own", own=dict(batch.own), extra=dict(batch.extra))
        return []

    @hookimpl
    def step_finished(self, step, metrics):
        note(self, "step_finished", step=step, metrics=dict(metrics))
        self.steps += 1
        if step == self.options.stop:
            return Stop("enough")
        to = self.options.to if self.options.to > -10 else float("nan")
        return Adjust({self.options.adjust: to}) if self.options.adjust else None

    @hookimpl
    def adjust(self, settings):
        note(self, "adjust", settings=dict(settings))

    @hookimpl
    def state_dict(self):
        note(self, "state_dict")
        return {"steps": self.steps}

    @hookimpl
    def load_state_dict(self, state):
        note(self, "load_state_dict", state=state)
        self.steps = state["steps"]

    @hookimpl
    def run_finished(self, outcome):
        note(self, "run_finished", outcome=outcome)


class Chooser(Plugin):
    """The last task, always; or one of its own."""

    class Options(BaseModel):
        own: bool = False

    @hookimpl
    def draw_tasks(self, tasks, count, step):
        note(self, "draw_tasks", tasks=tasks, count=count, step=step)
        return [Task("7+7=", "14") if self.options.own else len(tasks) - 1] * count


class Agent(Plugin):
    """Two turns of ``again``."""

    class Options(BaseModel):
        fails: bool = False

    @hookimpl
    def agent_reset(self, episode):
        note(self, "agent_reset", episode=episode)
        episode.state = []
        return Step(observation=None)

    @hookimpl
    def agent_step(self, episode, action):
        note(self, "agent_step", episode=episode, action=action)
        if self.options.fails and episode.sample == 0:
            raise EpisodeFailed("the sandbox is gone")
        episode.state.append(action.text)
        return Step(observation="again", done=len(episode.state) == 2)

    @hookimpl
    async def agent_close(self, episode):
        note(self, "agent_close", episode=episode)


class Owner(Plugin):
    """Plays the episode itself."""

    @hookimpl
    async def agent_run(self, episode, policy):
        note(self, "agent_run", episode=episode, policy=policy)
        prompt = list(episode.task.prompt_ids)
        made = await policy.generate(prompt)
        action = Segment("action", made.token_ids, made.logprobs, made.versions)
        return [Trajectory(episode.episode_id, episode.group_id, episode.task, [Segment("prompt", prompt), action])]


class Guest(Plugin):
    """Asks a frozen role and says what that said."""

    @hookimpl
    def needs(self):
        return Needs(roles=(RoleNeed("host", generates=True),))

    @hookimpl
    async def agent_run(self, episode, policy):
        prompt = list(episode.task.prompt_ids)
        host = policy.role("host")
        note(self, "asked", episode=episode, tokenizer=host.tokenizer, policy=await host.generate(prompt))
        await policy.generate(prompt)
        return policy.trajectories()


class Standing(Plugin):
    """Another role for the first sample of a group, and a role that there is not for the option."""

    class Options(BaseModel):
        other: str = "stand_in"

    @hookimpl
    def needs(self):
        return Needs(roles=(RoleNeed("stand_in", generates=True),))

    @hookimpl
    def choose_role(self, episode, role):
        note(self, "choose_role", episode=episode, role=role)
        return self.options.other if episode.sample == 0 else None


class Tasks(Plugin):
    @hookimpl
    def load_tasks(self, split, seed):
        note(self, "load_tasks", split=split, seed=seed)
        return [Task("1+1=", "2"), {"prompt": "1+2=", "label": "3"}]

    @hookimpl
    def step_finished(self, step):
        note(self, "step_finished of tasks", step=step)


class Tracker(Plugin):
    @hookimpl
    def log_metrics(self, step, metrics):
        note(self, "log_metrics", step=step, metrics=dict(metrics))

    @hookimpl
    def log_trajectories(self, step, split, trajectories):
        note(self, "log_trajectories", step=step, split=split, trajectories=list(trajectories))


class Sync(Plugin):
    traits = WeightSyncTraits()

    def start(self, start):
        note(self, "start", start=start)
        return self

    async def connect(self, targets):
        note(self, "connect", targets=targets)
        self.targets = targets

    async def send(self, source, version):
        note(self, "send", source=source, version=version)
        for target in self.targets:
            target.engine.set_version(version)

    async def close(self):
        note(self, "close")
