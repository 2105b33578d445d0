"""Nim against a frozen opponent, for a league: players take one to nine from a pile in turn, and who takes the last one wins.

A player sees ``37=`` and answers with a digit. The right one is the pile's last digit: it leaves a multiple of ten, from which
every move loses against a right one.
"""

import random
from dataclasses import replace

from rlhf_host import Needs, RoleNeed, hookimpl

PILES = range(11, 40)


def piles(split, seed):
    """Tasks: the pile at the beginning of a game."""
    draw = random.Random(f"{split} {seed}")
    return [{"prompt": f"{draw.choice(PILES)}="} for _ in range(512 if split == "train" else 128)]


class Nim:
    """A game against the role ``opponent``. Who begins depends on the number of the episode in its group; each seat has rewards of
    its own to compare with. Who makes no legal move loses, but an opponent that begins so only passes, because every episode needs
    a move of the policy."""

    @hookimpl
    def needs(self):
        return Needs(rewards=False, roles=(RoleNeed("opponent", generates=True),))

    @hookimpl
    async def agent_run(self, episode, policy):
        seat, pile, turn = episode.sample % 2, int(episode.task.prompt.rstrip("=")), 0
        player = policy.fork(("first", "second")[seat])
        opponent = policy.role("opponent")
        while pile > 0:
            mine = turn % 2 == seat
            taken = await self._move(player if mine else opponent, pile)
            episode.log("move", mine=mine, pile=pile, taken=taken)
            legal = 1 <= taken <= min(pile, 9)
            if legal or mine or turn:
                pile, won = (pile - taken if legal else 0), mine == legal
            turn += 1
        rows = policy.trajectories()
        for row in rows:
            if row.final:
                row.agent_rewards, row.score = [float(won)], float(won)
        return rows

    async def _move(self, player, pile):
        """Returns the digit that a player says, 0 for anything else."""
        ids = player.tokenizer.encode(f"{pile}=", add_special_tokens=False)
        answer = await player.generate(ids, replace(player.sampling, max_new_tokens=1))
        text = player.tokenizer.decode(answer.token_ids, skip_special_tokens=True)
        return int(text) if text.isdecimal() else 0
