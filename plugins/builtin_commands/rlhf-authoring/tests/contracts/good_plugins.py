"""Plugins that keep the contract, one of each kind; their texts are what the tables of broken ones change."""

HEAD = '''"""A plugin for tests."""
from typing import Literal
from pydantic import BaseModel, ConfigDict, Field
from rlhf_host import COMPLETION, Adjust, Advantages, AlgoNeeds, Drop, Forbid, LossTerm, Metric, Needs, Output, Reward, RoleNeed
from rlhf_host import RunError, Segment, Step, Task, Trajectory, hookimpl
from rlhf_host import functional as F


class Base:
    """Options and state."""

    class Options(BaseModel):
        model_config = ConfigDict(extra="forbid")
        loss: Literal["plain", "ratio"] = Field("plain", description="which loss")
        max_turns: int = Field(3, description="turns of an episode")

    def __init__(self, options):
        self.options = options
        self.seen = 0

    @hookimpl
    def state_dict(self):
        return {"seen": self.seen}

    @hookimpl
    def load_state_dict(self, state):
        self.seen = state["seen"]


class Plugin(Base):
    """What the tests are about."""
'''

ALGO = (
    HEAD
    + """
    @hookimpl
    def needs(self):
        return Needs(data="prompts", roles=(RoleNeed("actor", trainable=True, source=None),), min_group_size=2)

    @hookimpl
    def compute_advantages(self, experience):
        import torch

        self.seen += len(experience)
        mask, rewards, groups = experience.action_mask, experience.rewards, experience.group_id
        level = rewards.double() - F.group_mean(rewards, groups)
        advantages = F.on_actions(level, mask) + F.suffix_sum(experience.shaped, mask)
        return Advantages(advantages)

    @hookimpl
    def compute_loss(self, role, outputs, batch):
        import torch

        mask = batch.loss_mask
        logprobs = torch.where(mask, outputs.logprobs, 0.0)
        advantages = torch.where(mask, batch.advantages, 0.0)
        old = logprobs.detach() if batch.old_logprobs is None else torch.where(mask, batch.old_logprobs, 0.0)
        ratio = (logprobs - old).clamp(-20, 20).exp()
        values = -advantages * (logprobs if self.options.loss == "plain" else ratio)
        yield Metric("gap", (logprobs - old).detach().abs(), mask)
        yield LossTerm("policy", values)
"""
)

CHOSEN = (
    HEAD
    + """
    @hookimpl
    def needs(self):
        return AlgoNeeds(data="prompts", roles=(RoleNeed("actor", trainable=True, source=None),), min_group_size=2, weights=None)

    @hookimpl
    def make_rows(self, groups):
        self.seen += len(groups)
        rows = [max(group.trajectories, key=lambda row: row.reward) for group in groups]
        return rows

    @hookimpl
    def compute_loss(self, role, outputs, batch):
        import torch

        yield LossTerm("nll", torch.where(batch.loss_mask, -outputs.logprobs, 0.0))
"""
)

PAIRS = (
    HEAD
    + """
    class Options(Base.Options):
        loss: Literal["sigmoid", "hinge"] = Field("sigmoid", description="which loss")

    @hookimpl
    def needs(self):
        roles = (RoleNeed("actor", trainable=True, source=None), RoleNeed("reference"))
        outputs = (Output("logprobs", "reference"),)
        return AlgoNeeds(data="preference", roles=roles, outputs=outputs, rewards=False, unit_rows=True)

    @hookimpl
    def make_rows(self, groups):
        self.seen += len(groups)
        return [row for group in groups for row in group.trajectories]

    @hookimpl
    def prepare_batch(self, experience):
        return {"rows": len(experience)}

    @hookimpl
    def compute_loss(self, role, outputs, batch):
        import torch

        def places(label):
            rows = (batch.columns["label"] == label).nonzero().squeeze(-1)
            return rows[batch.unit_id[rows].argsort()]

        mask, reference = batch.loss_mask, batch.logprobs["reference"]
        ratios = torch.where(mask, outputs.logprobs - reference, 0.0)
        sums = ratios.sum(-1)
        chosen, rejected = places(1), places(0)
        margin = batch.columns["margin"][chosen].nan_to_num(0.0) if "margin" in batch.columns else 0.0
        gap = 0.1 * (sums[chosen] - sums[rejected]) - margin
        values = -torch.nn.functional.logsigmoid(gap) if self.options.loss == "sigmoid" else (1 - gap).clamp(min=0)
        yield Metric("gap", gap.detach())
        yield Metric("reference", reference, mask)
        yield Metric("rows", batch.own["rows"])
        rows = torch.cat((chosen, rejected))
        yield LossTerm("pairs", values.repeat(2)[rows.argsort()])
"""
)

REWARD = (
    HEAD
    + """
    @hookimpl
    def score(self, trajectories, context):
        self.seen += len(trajectories)
        return [self.judge(trajectory) for trajectory in trajectories]

    def judge(self, trajectory):
        text, label = trajectory.last_text, trajectory.task.ground_truth
        if not isinstance(label, str):
            return None
        right = float(label in text)
        return Reward(right, score=right, metrics={"length": float(len(text))})
"""
)

REMEMBERING_REWARD = REWARD.replace(
    "self.seen += len(trajectories)", "bonus = 1 / (1 + self.seen)\n        self.seen += len(trajectories)"
).replace(
    "[self.judge(trajectory) for trajectory in trajectories]",
    "[one and Reward(one.value + bonus, score=one.score) for one in map(self.judge, trajectories)]",
)

AGENT = (
    HEAD
    + """
    @hookimpl
    def agent_reset(self, episode):
        episode.state = {"turns": 0}
        return Step()

    @hookimpl
    def agent_step(self, episode, action):
        self.seen += 1
        episode.state["turns"] += 1
        right = "4" in action.text
        done = right or episode.state["turns"] >= self.options.max_turns
        return Step(None if done else "again: ", reward=float(right), done=done, score=float(right))

    @hookimpl
    def agent_close(self, episode):
        episode.state = None
"""
)

OWN_LOOP = (
    HEAD
    + """
    @hookimpl
    async def agent_run(self, episode, policy):
        tokens, segments = [5, 6, 7], [Segment("prompt", [5, 6, 7])]
        for turn in range(self.options.max_turns):
            made = await policy.generate(tokens)
            segments.append(Segment("action", made.token_ids, made.logprobs, made.versions))
            tokens = [*tokens, *made.token_ids]
        return [Trajectory(episode.episode_id, episode.group_id, episode.task, segments, sample=episode.sample)]
"""
)

FILTER = (
    HEAD
    + """
    @hookimpl
    def keep_group(self, group):
        scores = [trajectory.score for trajectory in group.trajectories]
        return True if len(set(scores)) > 1 else Drop("no variance")
"""
)

TRANSFORM = (
    HEAD
    + """
    @hookimpl
    def transform_rewards(self, experience, rewards):
        return rewards.clamp(-5, 5)
"""
)

SHAPE = (
    HEAD
    + """
    @hookimpl
    def shape_rewards(self, experience):
        import torch

        shaped = torch.where(experience.action_mask, -0.1 * experience.sampler_logprobs, 0.0)
        return shaped
"""
)

MASKS = (
    HEAD
    + """
    @hookimpl
    def loss_masks(self, experience):
        mask = experience.action_mask & ~experience.truncated.unsqueeze(-1)
        return mask
"""
)

HINTS = (
    HEAD
    + """
    @hookimpl
    def needs(self):
        return Needs(roles=(RoleNeed("teacher"),), outputs=(Output("logprobs", role="teacher"),))

    @hookimpl
    def rewrite_prompts(self, experience):
        prompts = [[3, *ids] for ids in experience.prompt_ids]
        return {"teacher": prompts}
"""
)

WEIGHTS = (
    HEAD
    + """
    @hookimpl
    def importance_weights(self, logprobs, batch):
        import torch

        mask = batch.sampled_mask
        gap = torch.where(mask, logprobs.old - logprobs.sampler, 0.0)
        weights = gap.clamp(-20, 20).exp().clamp(max=2.0)
        return weights
"""
)

STEERING = (
    HEAD
    + """
    @hookimpl
    def draw_tasks(self, tasks, count, step):
        self.seen += count
        return [(self.seen + number) % len(tasks) for number in range(count)]

    @hookimpl
    def prepare_batch(self, experience):
        return {"rewards": experience.rewards, "seen": self.seen}

    @hookimpl
    def step_metrics(self, step):
        return [Metric("seen", float(self.seen))]

    @hookimpl
    def step_finished(self, step, metrics):
        return Adjust({"actor.lr": 1e-3 / step})
"""
)

STANDING = (
    HEAD
    + """
    @hookimpl
    def needs(self):
        return Needs(roles=(RoleNeed("host", generates=True), RoleNeed("stand_in", generates=True)))

    @hookimpl
    def choose_role(self, episode, role):
        return ("stand_in", None)[episode.seed % 2] if role == "host" else None
"""
)

SOURCE = (
    HEAD
    + """
    @hookimpl
    def load_tasks(self, split, seed):
        import random

        self.seen += 1
        numbers = list(range(20, 30) if split == "eval" else range(20))
        random.Random(seed).shuffle(numbers)
        return [Task(f"{number}+1=", str(number + 1)) for number in numbers]
"""
)

TRACKER = (
    HEAD
    + """
    file = None

    @hookimpl
    def run_started(self, context):
        if context.run_dir is not None:
            self.file = open(context.run_dir / "log.txt", "a")

    @hookimpl
    def log_metrics(self, step, metrics):
        self.seen += 1
        if self.file is not None:
            self.file.write(f"{step} {sorted(metrics.items())}" + chr(10))

    @hookimpl
    def log_trajectories(self, step, split, trajectories):
        texts = [trajectory.text for trajectory in trajectories]
        if self.file is not None:
            self.file.write(f"{step} {split} {texts!r}" + chr(10))

    @hookimpl
    def run_finished(self, outcome):
        if self.file is not None:
            self.file.close()
            self.file = None
"""
)

SYNC = '''"""A plugin for tests."""
from pydantic import BaseModel, ConfigDict
from rlhf_host.protocols import WeightSyncTraits


class Plugin:
    """What the tests are about."""

    class Options(BaseModel):
        model_config = ConfigDict(extra="forbid")

    traits = WeightSyncTraits()
    targets = ()

    def __init__(self, options):
        self.seen = 0

    def start(self, start):
        return self

    async def connect(self, targets):
        self.targets += tuple(targets)

    async def send(self, source, version):
        self.seen += 1
        for target in self.targets:
            if not target.in_place:
                target.engine.model.load_state_dict(source.model.state_dict())
            target.engine.set_version(version)

    async def close(self):
        self.targets = ()
'''

KERNELS = '''"""A plugin for tests."""
import types
from pydantic import BaseModel, ConfigDict
from rlhf_host import functional
from rlhf_host.protocols import Traits
from rlhf_kernels import choose


class Plugin:
    """What the tests are about."""

    class Options(BaseModel):
        model_config = ConfigDict(extra="forbid")

    traits = Traits()
    choose = staticmethod(choose)

    def __init__(self, options):
        self.options = options

    def unsuited(self, model, use):
        return None if model.config.model_type == "llama" else "it is for Llamas"

    def twin(self, model, use):
        if use.purpose == "sample" and hasattr(model, "lm_head"):
            return Whole(model)
        twin = functional.twin(model)
        for part in twin.modules():
            if hasattr(part, "variance_epsilon"):
                part.forward = types.MethodType(norm, part)
        return twin


def norm(self, x):
    import torch

    y = torch.nn.functional.rms_norm(x, self.weight.shape, self.weight, self.variance_epsilon)
    return y


class Whole:
    """Computes whole rows at every step."""

    ragged = True

    def __init__(self, model):
        self.model = model
        self.refresh()

    def refresh(self):
        self.head = self.model.lm_head.weight.detach().clone()

    def prefill(self, prompts):
        self.rows = [list(prompt) for prompt in prompts]
        return self.logits()

    def start(self, prompt_of_row, longest):
        self.rows = [list(self.rows[number]) for number in prompt_of_row.tolist()]

    def step(self, tokens):
        for row, token in zip(self.rows, tokens.tolist(), strict=True):
            row.append(token)
        return self.logits()

    def keep(self, rows):
        self.rows = [self.rows[number] for number in rows.tolist()]

    def logits(self):
        import torch

        last = torch.tensor([len(row) - 1 for row in self.rows])
        ids = torch.tensor([row + [0] * (int(last.max()) + 1 - len(row)) for row in self.rows])
        hidden = self.model.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state
        return hidden[torch.arange(len(last)), last] @ self.head.t()
'''

SEQUENCES = ALGO.replace(
    '        values = -advantages * (logprobs if self.options.loss == "plain" else ratio)\n',
    '        values = -F.masked_mean(advantages * (logprobs if self.options.loss == "plain" else ratio), mask, -1)\n',
)

SEEN_FILTER = (
    HEAD
    + """
    @hookimpl
    def keep_group(self, group):
        self.seen += 1
        return Drop("a group too many") if self.seen % 3 == 0 else True
"""
)

GOOD = {
    "algorithm": ("algo", ALGO),
    "algorithm of chosen rows": ("algo", CHOSEN),
    "algorithm of pairs": ("algo", PAIRS),
    "algorithm with a loss per row": ("algo", SEQUENCES),
    "reward": ("reward", REWARD),
    "reward with a memory": ("reward", REMEMBERING_REWARD),
    "agent": ("agent", AGENT),
    "agent with its own loop": ("agent", OWN_LOOP),
    "filter": ("extension", FILTER),
    "filter with a memory": ("extension", SEEN_FILTER),
    "transform": ("extension", TRANSFORM),
    "shaping": ("extension", SHAPE),
    "masks": ("extension", MASKS),
    "hints": ("extension", HINTS),
    "weights": ("extension", WEIGHTS),
    "steering": ("extension", STEERING),
    "standing": ("extension", STANDING),
    "tasks": ("tasks", SOURCE),
    "tracker": ("tracker", TRACKER),
    "weight sync": ("weight_sync", SYNC),
    "kernels": ("kernels", KERNELS),
}
