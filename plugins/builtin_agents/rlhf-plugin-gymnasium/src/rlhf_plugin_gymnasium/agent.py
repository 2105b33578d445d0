"""The agent ``gymnasium``."""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import regex
from pydantic import BaseModel, ConfigDict, Field, field_validator

from rlhf_host import Action, Episode, EpisodeFailed, Needs, Step, UserError, hookimpl
from rlhf_plugin_gymnasium.text import NoAction, action_of, shown

PATTERN_S = 1.0
"""Maximum seconds of a search for the pattern in one answer: some patterns take for ever on some texts."""


@dataclass(slots=True)
class _Game:
    env: Any
    turns: int = 0
    invalid: int = 0
    returned: float = 0.0


class Gymnasium:
    """An episode is one of a gymnasium environment; an answer is an action, and rewards count per turn."""

    class Options(BaseModel):
        model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

        id: str | None = Field(None, description="the environment of tasks that name none: CartPole-v1, or my_module:My-v0")
        kwargs: str = Field("{}", description="arguments of gymnasium.make, as a JSON object")
        names: list[str] = Field([], description="what the actions are called, in order: left,down,right,up; default: numbers")
        pattern: str | None = Field(
            None, description="a regular expression that finds the action in an answer, such as <action>(.*?)</action>"
        )
        observation: Literal["auto", "render", "value"] = Field(
            "auto", description="what is shown: what the environment renders as text (render), its value as JSON, or as it can"
        )
        prompt: str = Field("{prompt}\n{observation}", description="the first message")
        max_turns: int = Field(32, ge=1, description="actions per episode")
        on_invalid: Literal["tell", "end"] = Field("tell", description="an answer that is no action: tell the policy, or end")
        invalid_reward: float = Field(0.0, description="added for an answer that is no action")

        @field_validator("names", mode="before")
        @classmethod
        def _several(cls, value: Any) -> Any:
            return value.split(",") if isinstance(value, str) else value

    def __init__(self, options: Options):
        self.options = options
        self.names = [name.strip() for name in options.names]
        if "" in self.names:
            raise UserError(f"gymnasium: a name in names is empty: {','.join(options.names)!r}")
        if len({name.casefold() for name in self.names}) < len(self.names):
            raise UserError(f"gymnasium: a name stands twice in names: {', '.join(self.names)}")
        try:
            self.pattern = regex.compile(options.pattern, regex.S) if options.pattern is not None else None
        except (regex.error, RecursionError) as error:
            raise UserError(f"gymnasium: pattern is no regular expression: {error}") from error
        try:
            self.kwargs = json.loads(options.kwargs)
        except ValueError as error:
            raise UserError(f"gymnasium: kwargs is no JSON: {error}") from error
        if not isinstance(self.kwargs, dict):
            raise UserError("gymnasium: kwargs is no JSON object")
        if options.id is not None:
            env = self._made(options.id)
            self._check_names(env)
            env.close()

    @hookimpl
    def needs(self) -> Needs:
        return Needs(rewards=False)

    @hookimpl
    def check_run(self, config: Mapping[str, Any]) -> None:
        """Raises ``UserError`` if neither the agent nor the tasks name an environment."""
        if self.options.id is not None:
            return
        for flag, data in (("--data", config["data"]), ("--eval.data", config["eval"]["data"])):
            if any(source["path"] == "gymnasium" and not source.get("id") for source in data["sources"]):
                raise UserError(
                    f"gymnasium: {flag} gymnasium and the agent name no environment: give --agent.id NAME, such as"
                    f" FrozenLake-v1, or {flag}.gymnasium.id NAME"
                )

    @hookimpl
    def agent_reset(self, episode: Episode) -> Step:
        where: Any = episode.task.metadata.get("gymnasium")
        told = where if isinstance(where, Mapping) else {}
        name = told.get("id") or self.options.id
        if not name:
            raise EpisodeFailed(
                "the task names no environment: give --agent.id NAME, or --data gymnasium --data.gymnasium.id NAME"
            )
        seed = told.get("seed")
        # All samples of a task begin alike, so that a baseline compares like with like.
        seed = seed if isinstance(seed, int) else episode.seed % 2**31
        game = episode.state = _Game(self._made(str(name)))
        observation, _ = game.env.reset(seed=seed)
        prompt = episode.task.prompt
        text = prompt if isinstance(prompt, str) else str(prompt[-1]["content"])
        seen = self.options.prompt.replace("{prompt}", text).replace("{observation}", self._text(game, observation)).strip()
        return Step(seen if isinstance(prompt, str) else [*prompt[:-1], {**prompt[-1], "content": seen}])

    @hookimpl
    def agent_step(self, episode: Episode, action: Action) -> Step:
        game: _Game = episode.state
        game.turns += 1
        try:
            chosen = action_of(game.env.action_space, self._found(action.text), self.names)
        except NoAction as why:
            return self._invalid(game, str(why), episode)
        observation, reward, terminated, truncated, _ = game.env.step(chosen)
        reward = float(reward)
        if not math.isfinite(reward):
            raise EpisodeFailed(f"gymnasium: the environment gave the reward {reward}")
        game.returned += reward
        episode.log("step", action=shown(chosen), reward=reward, terminated=bool(terminated), truncated=bool(truncated))
        ended = bool(terminated or truncated)
        cut = bool(truncated) or (not ended and game.turns == self.options.max_turns)
        if ended or cut:
            return Step(reward=reward, done=True, metrics=self._metrics(game, cut))
        return Step(self._text(game, observation), reward=reward, metrics=self._metrics(game, False))

    @hookimpl
    def agent_close(self, episode: Episode) -> None:
        if isinstance(episode.state, _Game):
            episode.state.env.close()

    def _invalid(self, game: _Game, why: str, episode: Episode) -> Step:
        game.invalid += 1
        game.returned += self.options.invalid_reward
        episode.log("invalid", why=why)
        reward = self.options.invalid_reward
        if self.options.on_invalid == "end" or game.turns == self.options.max_turns:
            return Step(reward=reward, done=True, metrics=self._metrics(game, self.options.on_invalid == "tell"))
        return Step(f"This is no action: {why}.", reward=reward, metrics=self._metrics(game, False))

    def _metrics(self, game: _Game, cut: bool) -> dict[str, float]:
        names = {"turns": game.turns, "invalid": game.invalid, "return": game.returned, "truncated": cut}
        return {f"gymnasium/{name}": float(value) for name, value in names.items()}

    def _found(self, text: str) -> str:
        if self.pattern is None:
            return text
        try:
            found = list(self.pattern.finditer(text, timeout=PATTERN_S, concurrent=True))
        except TimeoutError:
            found = []
        if not found:
            raise NoAction(f"it has nothing of the form {self.pattern.pattern}")
        return (found[-1][1] if self.pattern.groups else found[-1][0]) or ""

    def _text(self, game: _Game, observation: Any) -> str:
        if game.env.render_mode == "ansi":
            picture = game.env.render()
            picture = picture if isinstance(picture, str) else "\n".join(map(str, picture or ()))
            # Terminal colours mark where one stands.
            return re.sub(r"\x1b\[\d+m(.*?)\x1b\[0m", r"[\1]", picture, flags=re.S).strip("\n")
        return shown(observation)

    def _made(self, name: str) -> Any:
        """Makes the environment. Raises ``UserError`` if it does not exist or cannot be made."""
        import gymnasium

        kwargs = dict(self.kwargs)
        if self.options.observation != "value" and "render_mode" not in kwargs and self._draws_text(name):
            kwargs["render_mode"] = "ansi"
        try:
            env = gymnasium.make(name, **kwargs)
        except gymnasium.error.UnregisteredEnv as error:
            near = difflib.get_close_matches(name, gymnasium.registry, 3)
            hint = f"; did you mean {' or '.join(near)}?" if near else ""
            raise UserError(f"gymnasium has no environment {name!r}{hint}") from error
        except Exception as error:
            why = " ".join(f"{type(error).__name__}: {error}".split())
            raise UserError(f"gymnasium: {name} cannot be made with {self.options.kwargs}: {why}") from error
        if self.options.observation == "render" and env.render_mode != "ansi":
            env.close()
            raise UserError(f"gymnasium: {name} does not render as text: leave agent.observation out")
        return env

    def _draws_text(self, name: str) -> bool:
        import gymnasium

        try:
            spec = gymnasium.spec(name)
            made: Any = spec.entry_point
            if isinstance(made, str):
                made = gymnasium.envs.registration.load_env_creator(made)
        except Exception:  # ``make`` tells it better
            return False
        return "ansi" in (getattr(made, "metadata", None) or {}).get("render_modes", ())

    def _check_names(self, env: Any) -> None:
        from gymnasium import spaces

        if not self.names:
            return
        if not isinstance(env.action_space, spaces.Discrete):
            raise UserError(f"gymnasium: names are for a discrete space, and {self.options.id} has {env.action_space}")
        if len(self.names) != env.action_space.n:
            raise UserError(f"gymnasium: {len(self.names)} names for {env.action_space.n} actions of {self.options.id}")
