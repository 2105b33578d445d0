"""Rewards and agents with one rule broken each."""

from .breaking import breaks

JUDGE = "        right = float(label in text)"

TABLE = [
    # --- rewards ---
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
    breaks("missing_labels_are_not_judged", "reward", "            return None", "            return 0.0"),
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
    breaks(
        "groups_at_once_are_as_one_after_another",
        "reward",
        "return [self.judge(trajectory) for trajectory in trajectories]",
        "self.judged = []\n        for trajectory in trajectories:\n"
        "            self.judged.append(self.judge(trajectory))\n        return self.judged",
    ),
    breaks("trajectories_are_left_alone", "reward", JUDGE, f"        trajectory.metrics['seen'] = 1.0\n{JUDGE}"),
    # --- agents ---
    breaks("episodes_give_trajectories", "agent with its own loop", "episode.task, segments,", "episode.task, segments[:1],"),
    breaks("tokens_are_only_appended", "agent", "self.seen += 1", "action.token_ids[:] = [5]"),
    breaks("tokens_are_only_appended", "agent with its own loop", "tokens = [*tokens, *made", "tokens = [*tokens[:-1], *made"),
    breaks(
        "sampled_tokens_are_trained_once",
        "agent with its own loop",
        "        return [Trajectory(episode.episode_id, episode.group_id, episode.task, segments, sample=episode.sample)]",
        "        made = episode.episode_id, episode.group_id, episode.task, segments\n"
        "        return [Trajectory(*made, sample=episode.sample) for _ in range(2)]",
    ),
    breaks("agent_rewards_are_finite", "agent", "reward=float(right)", "reward=float('inf')"),
    breaks("episodes_end", "agent", ">= self.options.max_turns", ">= 9"),
    breaks("episodes_end", "agent with its own loop", "in range(self.options.max_turns)", "in range(9)"),
    breaks(
        "the_event_loop_goes_on",
        "agent",
        "    def agent_step(self, episode, action):\n",
        "    async def agent_step(self, episode, action):\n        import asyncio, time\n"
        "        if len(asyncio.all_tasks()) > 3 and episode.episode_id == 'made-up-0-0' and not episode.turn:\n"
        "            time.sleep(0.6)\n",
    ),
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
]
