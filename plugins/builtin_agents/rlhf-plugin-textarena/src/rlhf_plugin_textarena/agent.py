"""The agent ``textarena``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import regex
from pydantic import BaseModel, ConfigDict, Field

from rlhf_host import Episode, EpisodeFailed, Needs, NoRoom, Policy, RoleNeed, RunContext, Trajectory, UserError, hookimpl
from rlhf_plugin_textarena.games import Game, check_players, fewest_players
from rlhf_plugin_textarena.threads import in_thread

PATTERN_S = 1.0
"""Maximum seconds of a search for the pattern in one answer: some patterns take for ever on some texts."""


class TextArena:
    """An episode is a game. Every seat of the policy is a player with its own conversation, row and reward."""

    class Options(BaseModel):
        model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

        game: str | None = Field(None, description="the game of tasks that name none, such as TicTacToe-v0")
        players: int | None = Field(None, ge=1, description="how many play; default: the game's own number, else the fewest")
        opponent: Literal["self", "frozen"] = Field(
            "self", description="who has the other seats: the policy itself, which learns from all of them; or a frozen model"
        )
        sees: Literal["new", "game"] = Field(
            "new",
            description="new: a conversation, in which a player is told what happened since its move; game: what the game's own"
            " wrappers show, each move asked for anew",
        )
        pattern: str | None = Field(
            None, description="a regular expression that finds the move in an answer; default: all of it"
        )
        max_turns: int = Field(100, ge=1, description="moves per game, of all players")
        unfinished: float = Field(0.0, description="reward where a game does not end: of max_turns, or of a full conversation")

    def __init__(self, options: Options):
        self.options = options
        try:
            self.pattern = regex.compile(options.pattern, regex.S) if options.pattern is not None else None
        except (regex.error, RecursionError) as error:
            raise UserError(f"textarena: pattern is no regular expression: {error}") from error
        if options.game is not None:
            players = fewest_players(options.game)
            if options.players is not None:
                check_players(options.game, options.players)
            if options.opponent == "frozen" and (options.players or players) == 1:
                raise UserError(f"textarena: {options.game} has one player, so no opponent: leave opponent out")

    @hookimpl
    def needs(self) -> Needs:
        roles = (RoleNeed("opponent", generates=True),) if self.options.opponent == "frozen" else ()
        return Needs(rewards=False, roles=roles)

    @hookimpl
    async def run_started(self, context: RunContext) -> None:
        """Imports the games, which takes a moment, before the first of them is played."""
        await in_thread(__import__, "textarena")

    @hookimpl
    async def agent_run(self, episode: Episode, policy: Policy) -> list[Trajectory]:
        name, seed = self._game(episode)
        players = self.options.players
        if players is None:
            players = await in_thread(fewest_players, name)
        else:
            await in_thread(check_players, name, players)
        mine = set(range(players)) if self.options.opponent == "self" else {episode.sample % players}
        for _ in range(2):
            game = await in_thread(Game, name, players, seed, self.options.sees)
            seats = [policy.fork(f"player_{seat}") if seat in mine else policy.role("opponent") for seat in range(players)]
            turns, ended = await self._play(game, seats, episode)
            if rows := policy.trajectories():
                break
            assert game.first is not None
            mine = {game.first}  # the opponent ended the game before the policy had a move: again, and the policy begins
        else:
            raise EpisodeFailed(f"{name} ended before the policy had a move")
        rewards, info = await in_thread(game.result) if ended else (dict.fromkeys(range(players), self.options.unfinished), {})
        for row in rows:
            if row.final:
                _judge(row, int(row.role.removeprefix("player_")), rewards, info, turns, ended)
        return rows

    async def _play(self, game: Game, seats: Sequence[Policy], episode: Episode) -> tuple[int, bool]:
        """Returns the number of moves, and True if the game came to an end."""
        first = _text_of(episode.task.prompt)
        talks: list[list[dict[str, Any]]] = [[] for _ in seats]
        for turns in range(1, self.options.max_turns + 1):
            seat, seen = await in_thread(game.turn)
            talk = talks[seat] if self.options.sees == "new" else []
            seen = seen or "It is your move."
            talk.append({"role": "user", "content": seen if talk else f"{first}\n\n{seen}".strip()})
            try:
                reply = await seats[seat].chat(talk)
            except NoRoom:
                if turns == 1:
                    raise
                return turns - 1, False
            talk.append(dict(reply.message))
            talks[seat] = talk
            move = await in_thread(self._move, reply.content)
            over = await in_thread(game.move, move)
            episode.log("move", player=seat, move=move)
            if over:
                return turns, True
        return self.options.max_turns, False

    def _move(self, text: str) -> str:
        """Returns the part of an answer that the game gets."""
        if self.pattern is None:
            return text.strip()
        try:
            found = list(self.pattern.finditer(text, timeout=PATTERN_S, concurrent=True))
        except TimeoutError:
            return ""
        return ((found[-1][1] if self.pattern.groups else found[-1][0]) or "") if found else ""

    def _game(self, episode: Episode) -> tuple[str, int]:
        where: Any = episode.task.metadata.get("textarena")
        told = where if isinstance(where, Mapping) else {}
        name = told.get("game") or self.options.game
        if not name:
            raise EpisodeFailed("the task names no game: use --data textarena, or --agent.game")
        seed = told.get("seed")
        return str(name), int(seed) if isinstance(seed, int) else episode.task.index


def _judge(
    row: Trajectory,
    seat: int,
    rewards: Mapping[int, float],
    info: Mapping[int, Mapping[str, Any]],
    turns: int,
    ended: bool,
) -> None:
    reward = rewards.get(seat, 0.0)
    row.agent_rewards = [None] * (len(row.actions) - 1) + [reward]
    row.metrics = {
        "textarena/turns": float(turns),
        "textarena/unfinished": float(not ended),
        "textarena/invalid": float(bool(info.get(seat, {}).get("invalid_move"))),
    }
    if not ended:
        return
    if len(rewards) == 1:
        row.score = min(1.0, max(0.0, reward))
        return
    best = max(rewards.values())
    winners = [player for player, other in rewards.items() if other == best]
    won, drawn = seat in winners and len(winners) < len(rewards), len(winners) == len(rewards)
    row.score = 0.5 if drawn else float(won)
    row.metrics |= {"textarena/won": float(won), "textarena/drawn": float(drawn)}


def _text_of(prompt: Any) -> str:
    return prompt if isinstance(prompt, str) else str(prompt[-1]["content"])
