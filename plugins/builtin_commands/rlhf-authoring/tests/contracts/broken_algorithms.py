"""Plugins of any kind, and algorithms, with one rule broken each."""

from .breaking import breaks

LEVEL = "advantages = F.on_actions(level, mask)"
LAST = "        return Advantages(advantages)"
VALUES = '        yield Metric("gap"'

TABLE = [
    # --- any plugin ---
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
    breaks("hooks_of_its_kind_are_there", "algorithm", "    @hookimpl\n    def needs", "    def needs", "hooks_are_marked"),
    breaks("hooks_are_marked", "algorithm", "    @hookimpl\n    def compute_advantages", "    def compute_advantages"),
    breaks(
        "needs_are_pure",
        "algorithm",
        'return Needs(data="prompts"',
        'self.seen += 1\n        return Needs(forbids=(Forbid("rollout.n", self.seen, ""),), data="prompts"',
    ),
    breaks(
        "state_survives_a_checkpoint",
        "algorithm",
        '{"seen": self.seen}',
        '{"seen": self.seen, "options": self.options}',
        "what_was_learnt_survives_a_checkpoint",
    ),
    breaks("state_survives_a_checkpoint", "reward", 'self.seen = state["seen"]', "pass"),
    breaks("instances_share_nothing", "reward", "self.seen += len", "Base.total = getattr(Base, 'total', 0) + len"),
    breaks(
        "instances_share_nothing", "algorithm", "self.options = options", "self.options = options\n        self.cache = CACHE"
    ),
    breaks(
        "what_was_learnt_survives_a_checkpoint",
        "algorithm",
        LEVEL,
        f"self.uses = getattr(self, 'uses', 0) + 1\n        {LEVEL.replace('level', 'level * self.uses')}",
    ),
    breaks(
        "what_was_learnt_survives_a_checkpoint",
        "filter with a memory",
        'self.seen += 1\n        return Drop("a group too many") if self.seen',
        "self.met = getattr(self, 'met', 0) + 1\n        return Drop('a group too many') if self.met",
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
    # --- algorithms ---
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
    breaks("advantages_rise_with_the_reward", "algorithm", LEVEL, LEVEL.replace("level", "-level")),
    breaks("rewritten_prompts_fit_the_rows", "hints", 'return {"teacher"', 'prompts.pop()\n        return {"teacher"'),
    breaks("rewritten_prompts_fit_the_rows", "hints", '{"teacher": prompts}', '{"actor": prompts}'),
    breaks("rewritten_prompts_fit_the_rows", "hints", "[3, *ids]", "[]"),
    breaks("made_rows_are_of_the_samples", "algorithm of chosen rows", "return rows", "return rows + rows"),
    breaks("loss_items_are_well_formed", "algorithm", ".abs(), mask)", ".abs() + float('inf'), mask)"),
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
        "loss_is_finite_where_the_sampler_is_unknown",
        "algorithm",
        'LossTerm("policy", values)',
        'LossTerm("policy", values + 0 * batch.sampler_logprobs)',
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
]
