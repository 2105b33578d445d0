"""The contract suites against plugins that break each rule on purpose: every check reports its own."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass, field

import pytest

from rlhf_host import UserError
from rlhf_host.testing import algorithm_contract, run_contract
from rlhf_host.testing.contracts import kernel_cases, suite, traces
from rlhf_host.testing.contracts.suite import HOOKED, all_checks

HEAD = '''"""A plugin for tests."""
from typing import Literal
from pydantic import BaseModel, ConfigDict, Field
from rlhf_host import COMPLETION, Adjust, Advantages, Drop, Forbid, LossTerm, Metric, Needs, Reward, RoleNeed, RunError, Segment
from rlhf_host import Step, Task, Trajectory, hookimpl
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

WEIGHTS = (
    HEAD
    + """
    @hookimpl
    def importance_weights(self, old_logprobs, sampler_logprobs, mask):
        import torch

        gap = torch.where(mask, old_logprobs - sampler_logprobs, 0.0)
        weights = gap.clamp(-20, 20).exp().clamp(max=2.0).detach()
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
    def step_finished(self, step, metrics):
        return Adjust({"actor.lr": 1e-3 / step})
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
        texts = [trajectory.text if trajectory.decode else "" for trajectory in trajectories]
        if self.file is not None:
            self.file.write(f"{step} {split} {texts!r}" + chr(10))

    @hookimpl
    def run_finished(self, outcome):
        if self.file is not None:
            self.file.close()
            self.file = None
"""
)

SYNC = (
    HEAD
    + """
    targets = ()

    @hookimpl
    def sync_connect(self, targets):
        self.targets += tuple(targets)

    @hookimpl
    async def sync_weights(self, source, version):
        self.seen += 1
        for target in self.targets:
            if not target.in_place:
                target.engine.model.load_state_dict(source.model.state_dict())
            target.engine.set_version(version)

    @hookimpl
    def sync_close(self):
        self.targets = ()
"""
)

KERNELS = '''"""A plugin for tests."""
import types
from pydantic import BaseModel, ConfigDict
from rlhf_host import functional
from rlhf_host.protocols import Traits


class Plugin:
    """What the tests are about."""

    class Options(BaseModel):
        model_config = ConfigDict(extra="forbid")

    traits = Traits()

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

GOOD = {
    "algorithm": ("algo", ALGO),
    "reward": ("reward", REWARD),
    "agent": ("agent", AGENT),
    "agent with its own loop": ("agent", OWN_LOOP),
    "filter": ("extension", FILTER),
    "transform": ("extension", TRANSFORM),
    "shaping": ("extension", SHAPE),
    "masks": ("extension", MASKS),
    "weights": ("extension", WEIGHTS),
    "steering": ("extension", STEERING),
    "tasks": ("tasks", SOURCE),
    "tracker": ("tracker", TRACKER),
    "weight sync": ("weight_sync", SYNC),
    "kernels": ("kernels", KERNELS),
}


@dataclass(frozen=True)
class Breaks:
    """A good plugin with ``old`` replaced by ``new`` breaks the rule ``check``, and with it those in ``also``."""

    check: str
    plugin: tuple[str, str]
    old: str
    new: str
    also: frozenset[str] = frozenset()
    settings: dict = field(default_factory=dict)


def small_llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=32, pad_token_id=0, **sizes))


def breaks(check, plugin, old, new, *also, **settings):
    if plugin == "kernels":
        settings = {"models": {"llama": small_llama}}
    return Breaks(check, GOOD[plugin], old, new, frozenset(also), settings)


LEVEL = "advantages = F.on_actions(level, mask)"
LAST = "        return Advantages(advantages)"
VALUES = '        yield Metric("gap"'
JUDGE = "        right = float(label in text)"

NORM = "    return y\n"
TWIN = "        return twin\n"

TABLE = [
    # --- any plugin -----------------------------------------------------------------------------
    breaks("entry_point_loads", "algorithm", "from typing", "import no_such_module\nfrom typing"),
    breaks("import_is_light", "filter", "from typing", "import torch\nfrom typing"),
    breaks("options_are_described", "filter", ', description="turns of an episode"', ""),
    breaks("options_are_typed", "filter", "max_turns: int", "max_turns: object"),
    breaks("defaults_are_valid", "filter", "Field(3,", 'Field("3",'),
    breaks("defaults_are_valid", "filter", "Field(3,", "Field(3, gt=3,"),
    breaks("unknown_options_are_refused", "filter", 'extra="forbid"', 'extra="allow"'),
    breaks(
        "hooks_are_known",
        "filter",
        "    @hookimpl\n",
        "    @hookimpl\n    def keep_groups(self, group): ...\n\n    @hookimpl\n",
    ),
    breaks("hooks_are_known", "filter", "keep_group(self, group)", "keep_group(self, grp, group=None)"),
    breaks("hooks_of_its_kind_are_there", "algorithm", "    @hookimpl\n    def needs", "    def needs"),
    breaks(
        "needs_are_pure",
        "algorithm",
        'return Needs(data="prompts"',
        'self.seen += 1\n        return Needs(forbids=(Forbid("rollout.n", self.seen, ""),), data="prompts"',
    ),
    breaks("state_survives_a_checkpoint", "algorithm", '{"seen": self.seen}', '{"seen": self.seen, "options": self.options}'),
    breaks("state_survives_a_checkpoint", "reward", 'self.seen = state["seen"]', "pass"),
    breaks("instances_share_nothing", "reward", "self.seen += len", "Base.total = getattr(Base, 'total', 0) + len"),
    breaks(
        "instances_share_nothing", "algorithm", "self.options = options", "self.options = options\n        self.cache = CACHE"
    ),
    breaks(
        "nothing_outlives_the_run",
        "reward",
        "self.seen += len",
        "import threading, time\n        threading.Thread(target=time.sleep, args=(2,), daemon=False).start()\n"
        "        self.seen += len",
    ),
    breaks(
        "nothing_outlives_the_run",
        "agent",
        "self.seen += 1",
        "import subprocess\n        subprocess.Popen(['sleep', '2'])\n        self.seen += 1",
    ),
    # --- algorithms -----------------------------------------------------------------------------
    breaks("advantages_have_shape_and_dtype", "algorithm", LAST, "        return Advantages(advantages.double())"),
    breaks(
        "advantages_are_zero_outside_actions",
        "algorithm",
        LAST,
        "        return Advantages(torch.where(mask, advantages, 1.0))",
    ),
    breaks("advantages_follow_permuted_groups", "algorithm", LEVEL, LEVEL.replace("level", "level * (1 + groups)")),
    breaks(
        "advantages_of_unequal_groups",
        "algorithm",
        "F.group_mean(rewards, groups)",
        "F.group_mean(rewards, torch.unique_consecutive(groups, return_inverse=True)[1])",
    ),
    breaks(
        "advantages_of_single_samples",
        "algorithm",
        LEVEL,
        "level = torch.where(F.group_sizes(groups) > 1, level, float('nan'))\n        " + LEVEL,
    ),
    breaks("advantages_of_single_samples", "algorithm", LEVEL, LEVEL.replace("level", "level + (F.group_sizes(groups) == 1)")),
    breaks(
        "advantages_of_equal_rewards",
        "algorithm",
        LEVEL,
        LEVEL.replace("level", "level + 1e-7 * rewards * (F.group_sizes(groups) > 1)"),
    ),
    breaks("advantages_of_extreme_rewards", "algorithm", LEVEL, LEVEL.replace("level", "level + 0 * (-rewards / 1e4).exp()")),
    breaks("advantages_ignore_padding", "algorithm", LEVEL, LEVEL.replace("level", "level / mask.shape[1]")),
    breaks(
        "advantages_ignore_masked_garbage",
        "algorithm",
        LEVEL,
        LEVEL.replace("level", "level + 0 * experience.token_rewards.sum(-1)"),
    ),
    breaks(
        "advantages_skip_observations", "algorithm", LEVEL, LEVEL.replace("level", "level / experience.completion_mask.sum(-1)")
    ),
    breaks(
        "advantages_are_deterministic", "algorithm", LEVEL, LEVEL.replace("level", "level * (1 + torch.initial_seed() % 2)")
    ),
    breaks("advantages_leave_the_batch_alone", "algorithm", LEVEL, f"experience.scores.zero_()\n        {LEVEL}"),
    breaks(
        "loss_items_are_well_formed",
        "algorithm",
        ".abs(), mask)",
        ".abs(), mask, 'average')",
        # A run refuses it too, so whatever trains fails.
        "loss_choices_are_finite",
        "loss_ignores_masked_garbage",
        "loss_is_finite_at_extreme_gaps",
        "loss_is_finite_when_masked_out",
        "loss_is_pure",
        "loss_is_the_same_however_split",
    ),
    breaks("loss_is_pure", "algorithm", 'LossTerm("policy", values)', 'LossTerm("policy", values * (1 + self.seen))'),
    breaks("loss_is_the_same_however_split", "algorithm", VALUES, f"        values = values * len(batch)\n{VALUES}"),
    breaks(
        "loss_ignores_masked_garbage", "algorithm", "(logprobs - old).clamp(-20, 20).exp()", "(outputs.logprobs - old).exp()"
    ),
    breaks("loss_ignores_masked_garbage", "algorithm", ".abs(), mask)", ".abs() + 0 * outputs.logprobs.detach())"),
    breaks(
        "loss_is_finite_at_extreme_gaps", "algorithm", "(logprobs - old).clamp(-20, 20).exp()", "(2 * (logprobs - old)).exp()"
    ),
    breaks(
        "loss_is_finite_when_masked_out",
        "algorithm",
        'LossTerm("policy", values)',
        'LossTerm("policy", values / mask.sum(-1, keepdim=True), COMPLETION)',
    ),
    breaks(
        "loss_choices_are_finite",
        "algorithm",
        "else ratio)",
        "else ratio / (batch.old_logprobs is not None))",
    ),
    breaks("raising_a_good_token_lowers_the_loss", "algorithm", "values = -advantages", "values = advantages"),
    # --- rewards --------------------------------------------------------------------------------
    breaks(
        "score_gives_one_result_each",
        "reward",
        "for trajectory in trajectories]",
        "for trajectory in trajectories if len(trajectories) > 1 or trajectory.last_text != 'i do not know']",
    ),
    breaks("results_are_rewards", "reward", "float(len(text))", "text"),
    breaks("rewards_are_finite", "reward", "score=right", "score=2.0"),
    breaks("placed_rewards_fit", "reward", "Reward(right, ", "Reward(turns=[right], "),
    breaks("any_text_is_judged", "reward", JUDGE, f"        assert '{{' not in text or len(text) > 100\n{JUDGE}"),
    breaks(
        "odd_trajectories_leave_their_neighbours",
        "reward",
        JUDGE,
        f"        assert len(text) != 300\n{JUDGE}",
        "any_text_is_judged",
    ),
    breaks(
        "odd_trajectories_leave_their_neighbours",
        "reward",
        "return [self.judge(trajectory) for",
        "most = max(1, *(len(t.text) for t in trajectories), 1)\n        return [len(trajectory.text) / most for",
    ),
    breaks("odd_labels_are_survived", "reward", "            return None", "            raise SystemExit(1)"),
    breaks(
        "score_keeps_its_deadline",
        "reward",
        JUDGE,
        f"        import time\n        time.sleep(20 * text.startswith('1+1+1+'))\n{JUDGE}",
        deadline_s=5.0,
    ),
    breaks(
        "score_keeps_its_deadline",
        "reward",
        "def score(self, trajectories, context):",
        "async def score(self, trajectories, context):\n        import time\n"
        "        time.sleep(20 * any(t.text.startswith('1+1+1+') for t in trajectories))",
        deadline_s=5.0,
    ),
    breaks(
        "order_of_trajectories_does_not_matter",
        "reward",
        "return [self.judge(trajectory)",
        "return [0.5 if trajectories[0].sample > trajectories[-1].sample else self.judge(trajectory)",
    ),
    breaks(
        "groups_at_once_are_as_one_after_another",
        "reward",
        "def score(self, trajectories, context):",
        "async def score(self, trajectories, context):\n        import asyncio\n        self.group = trajectories\n"
        "        await asyncio.sleep(0)\n        trajectories = self.group",
    ),
    breaks("trajectories_are_left_alone", "reward", JUDGE, f"        trajectory.metrics['seen'] = 1.0\n{JUDGE}"),
    # --- agents ---------------------------------------------------------------------------------
    breaks("episodes_give_trajectories", "agent with its own loop", "episode.task, segments,", "episode.task, segments[:1],"),
    breaks("tokens_are_only_appended", "agent", "self.seen += 1", "action.token_ids[:] = [5]"),
    breaks("tokens_are_only_appended", "agent with its own loop", "tokens = [*tokens, *made", "tokens = [*tokens[:-1], *made"),
    breaks(
        "sampled_tokens_are_trained_once",
        "agent with its own loop",
        "        return [Trajectory(episode.episode_id, episode.group_id, episode.task, segments, sample=episode.sample)]",
        "        row = Trajectory(episode.episode_id, episode.group_id, episode.task, segments, sample=episode.sample)\n"
        "        return [row, row]",
    ),
    breaks("agent_rewards_are_valid", "agent", "score=float(right)", "score=2.0"),
    breaks("agent_rewards_are_valid", "agent", "reward=float(right)", "reward='much'"),
    breaks("episodes_end", "agent", ">= self.options.max_turns", ">= 9"),
    breaks("episodes_end", "agent with its own loop", "in range(self.options.max_turns)", "in range(9)"),
    breaks(
        "episodes_do_not_see_each_other",
        "agent",
        'episode.state["turns"] += 1\n        right = "4" in action.text\n        done = right or episode.state["turns"]',
        'self.turns = 1 + (episode.turn and self.turns)\n        right = "4" in action.text\n        done = right or self.turns',
    ),
    breaks(
        "episodes_are_deterministic",
        "agent",
        '"again: ", reward=float(right)',
        '"again: ", metrics={"luck": self.luck}, reward=float(right)',
    ),
    breaks("close_follows_every_failure", "agent", "episode.state = None", "episode.state.clear()"),
    breaks(
        "failures_of_the_engine_come_out",
        "agent with its own loop",
        "made = await policy.generate(tokens)",
        "try:\n                made = await policy.generate(tokens)\n            except Exception:\n                break",
    ),
    # --- extensions -----------------------------------------------------------------------------
    breaks("keep_group_gives_true_or_drop", "filter", 'Drop("no variance")', "False"),
    breaks("keep_group_gives_true_or_drop", "filter", 'Drop("no variance")', 'Drop("")'),
    breaks("keep_group_goes_by_the_group", "filter", "len(set(scores)) > 1", "scores[0] != 0.5"),
    breaks("transformed_rewards_have_shape", "transform", "rewards.clamp(-5, 5)", "rewards / (rewards.abs() < 1e5)"),
    breaks("transformed_rewards_follow_rows", "transform", "rewards.clamp(-5, 5)", "rewards - rewards[0]"),
    breaks(
        "transformed_rewards_ignore_masked_garbage",
        "transform",
        "rewards.clamp(-5, 5)",
        "rewards + experience.token_rewards.sum(-1)",
    ),
    breaks("shaped_rewards_have_shape", "shaping", "return shaped", "return shaped.sum(-1)"),
    breaks("shaped_rewards_follow_rows", "shaping", "return shaped", "return shaped * torch.arange(len(shaped)).unsqueeze(-1)"),
    breaks(
        "shaped_rewards_ignore_masked_garbage",
        "shaping",
        "return shaped",
        "return shaped - experience.sampler_logprobs.mean(-1, keepdim=True)",
    ),
    breaks("loss_masks_are_bool", "masks", "return mask", "return mask.float()"),
    breaks("loss_masks_only_narrow", "masks", "return mask", "experience.loss_mask |= mask\n        return mask"),
    breaks("loss_masks_follow_rows", "masks", "return mask", "mask[0] = False\n        return mask"),
    breaks(
        "loss_masks_ignore_masked_garbage",
        "masks",
        "return mask",
        "return mask & (experience.sampler_logprobs.sum(-1, keepdim=True) < 0)",
    ),
    breaks(
        "importance_weights_have_shape",
        "weights",
        "return weights",
        "return weights * (1 - 2 * (weights > 1).float())",
        "importance_weights_at_extreme_gaps",
    ),
    breaks("importance_weights_are_detached", "weights", ".detach()", ""),
    breaks("importance_weights_are_row_wise", "weights", "return weights", "return weights / weights[mask].mean()"),
    breaks("importance_weights_at_extreme_gaps", "weights", "gap.clamp(-20, 20).exp().clamp(max=2.0)", "(gap * 2).exp()"),
    breaks(
        "importance_weights_ignore_masked_garbage",
        "weights",
        "torch.where(mask, old_logprobs - sampler_logprobs, 0.0)",
        "old_logprobs - sampler_logprobs",
    ),
    breaks("drawn_tasks_come_again", "steering", "% len(tasks) for", "+ len(tasks) for"),
    breaks("drawn_tasks_come_again", "steering", "in range(count)]", "in range(count - 1)]"),
    breaks(
        "drawn_tasks_come_again",
        "steering",
        "        self.seen += count",
        "        self.drawn = getattr(self, 'drawn', 0) + count\n        self.seen = self.drawn",
    ),
    breaks("prepared_batches_are_plain", "steering", "experience.rewards,", "experience.rewards, 'text': 'x',"),
    breaks("answers_to_a_step_are_known", "steering", 'return Adjust({"actor.lr": 1e-3 / step})', "return 1e-3"),
    breaks("answers_to_a_step_are_known", "steering", "1e-3 / step", "float('inf')"),
    # --- tasks ----------------------------------------------------------------------------------
    breaks("tasks_are_well_formed", "tasks", 'f"{number}+1="', '"" if number == 7 else f"{number}+1="'),
    breaks("tasks_are_well_formed", "tasks", "else range(20)", "else []"),
    breaks(
        "tasks_are_the_same_again",
        "tasks",
        "random.Random(seed)",
        "random.Random(self.seen + hash(id(self)))",
    ),
    breaks("splits_share_no_task", "tasks", "range(20, 30)", "range(19, 30)"),
    breaks(
        "randomness_of_others_is_left_alone",
        "tasks",
        "random.Random(seed).shuffle(numbers)",
        "random.seed(seed), random.shuffle(numbers)",
    ),
    breaks(
        "randomness_of_others_is_left_alone",
        "tasks",
        "random.Random(seed).shuffle(numbers)",
        "import torch\n        torch.manual_seed(seed)",
    ),
    # --- trackers -------------------------------------------------------------------------------
    breaks("any_metric_is_logged", "tracker", "sorted(metrics.items())", "[int(value) for value in metrics.values()]"),
    breaks("any_metric_is_logged", "tracker", "sorted(metrics.items())", "metrics['loss']"),
    breaks("any_trajectory_is_logged", "tracker", "trajectory.text if trajectory.decode else", "trajectory.text or"),
    breaks("any_trajectory_is_logged", "tracker", "{texts!r}", "{texts[0]!r}"),
    breaks(
        "runs_without_a_directory_are_logged",
        "tracker",
        "        if context.run_dir is not None:\n            self",
        "        self",
    ),
    breaks("nothing_is_written_elsewhere", "tracker", 'context.run_dir / "log.txt"', '"log.txt"'),
    breaks("what_is_logged_is_left_alone", "tracker", "sorted(metrics.items())", "metrics.pop('loss', 0)"),
    breaks(
        "what_is_logged_is_left_alone",
        "tracker",
        "        texts = [",
        "        for trajectory in trajectories:\n            trajectory.metrics['logged'] = 1.0\n        texts = [",
    ),
    breaks("resumed_runs_keep_their_files", "tracker", '"a")', '"w")'),
    breaks(
        "an_early_end_is_survived",
        "tracker",
        "        if self.file is not None:\n            self.file.close()\n            self.file = None",
        "        self.file = self.file.close() if self.seen else self.file.close()",
        "runs_without_a_directory_are_logged",
    ),
    # --- weight sync ----------------------------------------------------------------------------
    breaks(
        "engines_get_the_version",
        "weight sync",
        "engine.set_version(version)",
        "engine.set_version(version + 1)",
        "engines_are_let_go",
    ),
    breaks("engines_get_the_weights", "weight sync", "if not target.in_place", "if version == 1"),
    breaks(
        "engines_get_the_weights",
        "weight sync",
        "target.engine.model.load_state_dict(source.model.state_dict())",
        "[mine.data.copy_(its) for mine, its in zip(target.engine.model.parameters(), source.model.parameters())]",
    ),
    breaks("the_trainer_is_left_alone", "weight sync", "self.seen += 1", "source.model.requires_grad_(False)"),
    breaks("the_trainer_is_left_alone", "weight sync", "self.seen += 1", "source.model.eval()"),
    breaks(
        "the_trainer_is_left_alone",
        "weight sync",
        "target.engine.model.load_state_dict(source.model.state_dict())",
        "target.engine.model.load_state_dict(source.model.state_dict(), assign=True)",
    ),
    breaks(
        "engines_are_let_go",
        "weight sync",
        "    def sync_close(self):\n        self.targets = ()",
        "    def sync_close(self):\n        pass",
    ),
    breaks(
        "closing_early_and_twice_is_survived",
        "weight sync",
        "    def sync_close(self):\n        self.targets = ()",
        "    def sync_close(self):\n        del self.targets",
    ),
    # --- kernels --------------------------------------------------------------------------------
    breaks("unsuited_computes_nothing", "kernels", "return None if", "return None if next(model.parameters()).sum() and"),
    breaks("unsuited_computes_nothing", "kernels", '== "llama" else', '== "llama" and use.purpose == "sample" else 7 or'),
    breaks("the_model_is_left_alone", "kernels", TWIN, f"        model.model.norm.train()\n{TWIN}"),
    breaks("the_model_is_left_alone", "kernels", TWIN, f"        model.config.rms_norm_eps = 0.5\n{TWIN}"),
    breaks("the_model_is_left_alone", "kernels", TWIN, f"        type(part).made_up = norm\n{TWIN}"),
    breaks(
        "the_model_is_left_alone",
        "kernels",
        TWIN,
        f"        import transformers\n        transformers.AttentionInterface.register('made_up', norm)\n{TWIN}",
    ),
    breaks("the_model_is_left_alone", "kernels", NORM, f"    torch.rand(1)\n{NORM}"),
    breaks(
        "the_model_is_left_alone",
        "kernels",
        "        self.rows = [list(p",
        "        self.model.asked = 1\n        self.rows = [list(p",
    ),
    breaks(
        "twins_hold_the_models_tensors",
        "kernels",
        TWIN,
        "        import torch\n        twin.model.register_parameter('more', torch.nn.Parameter(torch.ones(1)))\n" + TWIN,
        "even_passes_keep_names_and_order",
    ),
    breaks(
        "twins_hold_the_models_tensors",
        "kernels",
        "functional.twin(model)",
        "__import__('copy').deepcopy(model)",
        "changes_of_the_weights_are_seen",
        "gradients_are_the_models",
        "passes_repeat_themselves",
        "even_passes_keep_names_and_order",
    ),
    breaks(
        "changes_of_the_weights_are_seen",
        "kernels",
        NORM,
        "    first = self.__dict__.setdefault('first', self.weight.detach().clone())\n"
        "    return y * (first / self.weight.detach())\n",
    ),
    breaks(
        "values_are_the_models",
        "kernels",
        NORM,
        "    return y * (1.01 if x.shape[1] > 9 else 1)\n",
        "gradients_are_the_models",
        "changes_of_the_weights_are_seen",
        "adapters_are_switched_in_both",
    ),
    breaks("gradients_are_the_models", "kernels", NORM, "    return y + 0.1 * (x - x.detach())\n"),
    breaks("the_model_is_left_alone", "kernels", TWIN, f"        twin.requires_grad_(True)\n{TWIN}"),
    breaks(
        "keywords_are_the_models",
        "kernels",
        TWIN,
        f"        inner = twin.forward\n        twin.forward = lambda position_ids=None, **others: inner(**others)\n{TWIN}",
    ),
    breaks(
        "keywords_are_the_models",
        "kernels",
        TWIN,
        f"        inner = twin.forward\n        twin.forward = lambda input_ids, **others: inner(input_ids, **others)\n{TWIN}",
    ),
    breaks(
        "passes_repeat_themselves",
        "kernels",
        NORM,
        "    self.calls = getattr(self, 'calls', 0) + 1\n    return y * (1 + 1e-6 * (self.calls % 2))\n",
    ),
    breaks("passes_repeat_themselves", "kernels", NORM, "    return y * (1 + 1e-6 * torch.is_grad_enabled())\n"),
    breaks(
        "even_passes_keep_names_and_order",
        "kernels",
        TWIN,
        f"        import torch\n        twin.model.norm = torch.nn.Sequential(twin.model.norm)\n{TWIN}",
    ),
    breaks(
        "adapters_are_switched_in_both",
        "kernels",
        TWIN,
        f"        for part in twin.modules():\n            part.enable_adapters = lambda enabled=True: None\n{TWIN}",
    ),
    breaks(
        "decoders_sample_from_the_model", "kernels", "[self.rows[number] for number in rows.tolist()]", "self.rows[: len(rows)]"
    ),
    breaks(
        "decoders_follow_refresh",
        "kernels",
        "        self.head = ",
        "        self.head = self.head if hasattr(self, 'head') else ",
    ),
    breaks(
        "decoders_begin_anew",
        "kernels",
        "        return self.logits()\n\n    def start",
        "        self.batches = getattr(self, 'batches', 0) + 1\n"
        "        return self.logits() + 1e-6 * self.batches\n\n    def start",
    ),
]

INSTALLED_APART = {"entry_point_is_unique", "host_dependency_is_bounded", "has_a_summary"}
"""Broken in the metadata or by what is missing: in tests of their own below."""


def failed(results):
    return {result.name for result in results if result.passed is False}


def broken_source(case):
    source = case.plugin[1]
    assert case.old in source, f"{case.check}: the table's old text is not in the plugin"
    source = source.replace(case.old, case.new)
    if "self.luck" in source:
        source = source.replace(
            "self.options = options", "self.options = options\n        import random\n        self.luck = random.random()"
        )
    return source.replace("class Base:", "CACHE = []\n\n\nclass Base:") if "CACHE" in source else source


@pytest.mark.parametrize("name", GOOD)
def test_a_good_plugin_passes_every_check(name, install):
    kind, source = GOOD[name]
    install(kind, source)
    results = run_contract(kind, "made_up")
    assert [result for result in results if not result.passed] == []
    assert len(results) >= 15


@pytest.mark.parametrize("case", TABLE, ids=[f"{case.check}-{number}" for number, case in enumerate(TABLE)])
def test_each_check_reports_the_plugin_that_breaks_it_and_no_other_does(case, install, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)  # one of them writes where it was started
    monkeypatch.setattr(traces, "PATIENCE_S", 0.3)
    monkeypatch.setattr(kernel_cases, "PRECISIONS", kernel_cases.PRECISIONS[:1])
    install(case.plugin[0], broken_source(case))
    if case.check != "import_is_light":  # it starts an interpreter, and no other case changes what is imported
        monkeypatch.setattr(suite, "CHECKS", [check for check in all_checks() if check.name != "import_is_light"])
    results = run_contract(case.plugin[0], "made_up", **case.settings)
    assert failed(results) == {case.check, *case.also}
    assert all(result.message for result in results if not result.passed)


def test_every_check_is_broken_by_some_plugin():
    everywhere = [check.name for check in all_checks()]
    assert len(set(everywhere)) == len(everywhere)
    names = {check.name for check in all_checks((*HOOKED, "kernels"))}
    assert {case.check for case in TABLE} | INSTALLED_APART == names


def test_every_check_states_its_rule():
    assert [check.name for check in all_checks() if not check.rule] == []


def test_two_distributions_of_one_name_are_reported(install):
    install("extension", FILTER)
    install("extension", FILTER, distribution="another-plugin")
    assert failed(run_contract("extension", "made_up")) == {"entry_point_is_unique"}
    assert failed(run_contract("extension", "another-plugin:made_up")) == {"entry_point_is_unique"}


def test_a_plugin_that_is_not_installed_fails_one_check_and_leaves_the_rest_unjudged():
    results = run_contract("algo", "never_heard_of")
    assert failed(results) == {"entry_point_is_unique"}
    assert {result.passed for result in results} == {False, None}


@pytest.mark.parametrize("requires", ["rlhf-host>=0.9", "rlhf-host", "torch"])
def test_a_dependency_without_an_upper_bound_is_reported(requires, install):
    install("extension", FILTER, requires=requires)
    assert failed(run_contract("extension", "made_up")) == {"host_dependency_is_bounded"}


def test_a_plugin_without_a_word_about_itself_is_reported(install):
    install("extension", FILTER.replace('"""A plugin for tests."""\n', "").replace('    """What the tests are about."""\n', ""))
    assert failed(run_contract("extension", "made_up")) == {"has_a_summary"}


# --- the pytest class ---------------------------------------------------------------------------


def test_one_line_gives_a_class_with_a_test_per_check(install):
    install("algo", ALGO)
    contract = algorithm_contract("made_up")
    tests = {name.removeprefix("test_") for name in dir(contract) if name.startswith("test_")}
    assert tests == {result.name for result in run_contract("algo", "made_up")}
    assert contract.test_needs_are_pure.__doc__


def test_a_plugin_that_is_not_installed_fails_one_test_and_skips_the_rest():
    tests = algorithm_contract("never_heard_of")()
    with pytest.raises(AssertionError, match="no algo named 'never_heard_of' is installed"):
        tests.test_entry_point_is_unique()
    with pytest.raises(pytest.skip.Exception, match="a more basic check fails"):
        tests.test_import_is_light()


def test_pytest_names_the_broken_rule(install, fork, environment, tmp_path):
    site = install("algo", ALGO.replace("values = -advantages", "values = advantages"))
    file = tmp_path / "test_it.py"
    file.write_text('from rlhf_host.testing import algorithm_contract\n\nTestContract = algorithm_contract("made_up")\n')
    process = fork(
        ["-q", "-p", "no:cacheprovider", "--rootdir", str(tmp_path), str(file)],
        {**environment, "PYTHONPATH": str(site)},
        tmp_path,
        program="pytest",
    )
    out, err = process.communicate(timeout=120)
    assert process.returncode == 1, out + err
    assert "TestContract::test_raising_a_good_token_lowers_the_loss" in out
    assert "check the loss's sign" in out
    assert "1 failed" in out


@pytest.mark.parametrize("missing", ["pytest", "hypothesis"])
def test_a_missing_test_library_is_named_with_the_way_to_get_it(missing, monkeypatch):
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(UserError, match=rf"^contract suites need {missing}: pip install 'rlhf-host\[testing\]'$"):
        algorithm_contract("rloo")


def test_importing_the_testing_package_is_light():
    program = (
        "import sys, rlhf_host.testing; from rlhf_host.testing import algorithm_contract, run_contract\n"
        "print([name for name in ('torch', 'transformers', 'pytest', 'hypothesis') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
