"""An episode is one run of a program, or one call of a function."""

from __future__ import annotations

import inspect
import json
import math
import os
import shlex
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from rlhf_host import AgentNeeds, Episode, EpisodeFailed, Picture, Policy, Trajectory, UserError, hookimpl, import_file
from rlhf_plugin_openai_agent.process import run
from rlhf_plugin_openai_agent.threads import in_thread

KEPT = ("PATH", "LANG", "LC_ALL", "TZ", "LD_LIBRARY_PATH", "VIRTUAL_ENV")
"""Environment variables that are passed on: a program that a model controls gets no keys of yours."""


LOGGED = 4000
"""Maximum characters of each output in the log of trajectories."""


class OpenAIAgent:
    """A program, or a function, talks to the policy by OpenAI's API, as it would to any model. Its calls are trained."""

    class Options(BaseModel):
        model_config = ConfigDict(extra="forbid")

        command: str | None = Field(
            None,
            description="the program and its arguments; {task_file} is a JSON file with the task, {python} this interpreter",
        )
        function: str | None = Field(None, description="instead: FILE.py:NAME, a function (task, base_url, api_key)")
        env: list[str] = Field([], description="names of environment variables to pass on")
        at_once: int = Field(32, ge=1, description="programs that run at the same time")
        nonzero: Literal["fail", "score0"] = Field(
            "fail", description="an exit code that is not 0: the episode has failed, or its reward is 0"
        )
        rewards: bool = Field(True, description="the program gives the reward; if not, --reward plugins judge its last answer")

    def __init__(self, options: Options):
        self.options = options
        if (options.command is None) == (options.function is None):
            raise UserError("openai_agent: give --agent.command 'PROGRAM {task_file}' or --agent.function FILE.py:NAME")
        self.function = _function(options.function) if options.function else None
        try:
            self.command = shlex.split(options.command or "")
        except ValueError as error:
            raise UserError(f"openai_agent: agent.command {options.command!r}: {error}") from error
        if not self.command and self.function is None:
            raise UserError("openai_agent: agent.command is empty")

    @hookimpl
    def needs(self) -> AgentNeeds:
        return AgentNeeds(rewards=not self.options.rewards, episodes_at_once=self.options.at_once, server=True)

    @hookimpl
    async def agent_run(self, episode: Episode, policy: Policy) -> list[Trajectory]:
        endpoint = await policy.endpoint()
        task = _plain(episode)
        if self.function is not None:
            given = self.function(task, endpoint.base_url, endpoint.api_key)
            given = await given if inspect.isawaitable(given) else given
        else:
            given = await self._run(task, endpoint, episode)
        if endpoint.failed is not None:
            reason, retryable = endpoint.failed
            raise EpisodeFailed(reason, retryable)
        if endpoint.calls == 0:
            raise EpisodeFailed("the program never asked the policy, or each of its requests was refused")
        reward, score, metrics, final = endpoint.reward, endpoint.score, dict(endpoint.metrics), endpoint.final
        if not self.options.rewards:
            reward = score = None
        elif reward is None:
            told = _verdict(given)
            reward, score, final = told.get("reward"), told.get("score", score), told.get("final") or final
            metrics |= told.get("metrics", {})
        rows = policy.trajectories(final)
        if not rows:
            raise EpisodeFailed("no answer of the policy arrived")
        if reward is None and self.options.rewards:
            raise EpisodeFailed("the program gave no reward: return it, print it as its last line, or POST it to .../reward")
        for row in rows:
            if row.final:
                row.agent_rewards = [None] * (len(row.actions) - 1) + [reward] if reward is not None else []
                row.score, row.metrics = score, metrics
        return rows

    async def _run(self, task: Mapping[str, Any], endpoint: Any, episode: Episode) -> Any:
        with tempfile.TemporaryDirectory(prefix="rlhf-episode-") as folder:
            file = Path(folder) / "task.json"
            file.write_text(json.dumps(task, ensure_ascii=False, default=str), encoding="utf-8")
            named = {name: os.environ[name] for name in (*KEPT, *self.options.env) if name in os.environ}
            own = {"HOME": folder, "TMPDIR": folder, "RLHF_TASK_FILE": str(file), "RLHF_EPISODE": episode.episode_id}
            own |= {"OPENAI_BASE_URL": endpoint.base_url, "OPENAI_API_KEY": endpoint.api_key, "OPENAI_MODEL": "policy"}
            own |= {"ANTHROPIC_BASE_URL": endpoint.base_url.removesuffix("/v1"), "ANTHROPIC_API_KEY": endpoint.api_key}
            places = {"{task_file}": str(file), "{python}": sys.executable}
            command = [_replaced(part, places) for part in self.command]
            ended = await run(command, _where(), named | own)
        episode.log("program", code=ended.code, stdout=ended.stdout[-LOGGED:], stderr=ended.stderr[-LOGGED:])
        if ended.code != 0:
            if self.options.nonzero == "score0" and endpoint.calls and ended.code > 0:  # a signal is not its own doing
                return 0.0
            raise EpisodeFailed(f"the program ended with exit code {ended.code}: {ended.last_words}")
        last = [line for line in ended.stdout.splitlines() if line.strip()][-1:]
        try:
            return json.loads(last[0]) if last else None
        except ValueError:
            return None


def _where() -> Path:
    """Returns the directory in which programs run: that of the run's start, so that relative paths in the command are correct."""
    return Path.cwd()


def _replaced(part: str, places: Mapping[str, str]) -> str:
    for place, value in places.items():
        part = part.replace(place, value)
    return part


def _plain(episode: Episode) -> dict[str, Any]:
    task = episode.task
    return {
        "prompt": task.prompt if isinstance(task.prompt, str) else [_as_sent(message) for message in task.prompt],
        "ground_truth": task.ground_truth,
        "metadata": dict(task.metadata),
        "source": task.source,
        "index": task.index,
        "sample": episode.sample,
        "seed": episode.seed,
        "split": episode.split,
    }


def _as_sent(message: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a message in the form of OpenAI's API: pictures are data URIs."""
    content = message.get("content")
    if not isinstance(content, list):
        return dict(message)
    parts = [
        {"type": "image_url", "image_url": {"url": part["image"].uri()}}
        if isinstance(part, Mapping) and isinstance(part.get("image"), Picture)
        else part
        for part in content
    ]
    return {**message, "content": parts}


REPORT = ("reward", "score", "metrics", "final")
"""Fields that a program's last line, or a function's answer, may have."""


def _verdict(given: Any) -> dict[str, Any]:
    """Returns a program's result in the form of a report to ``/reward``. Raises ``EpisodeFailed`` for one that cannot be read."""
    if hasattr(given, "item") and getattr(given, "ndim", None) == 0:  # of numpy and torch
        given = given.item()
    if isinstance(given, bool | int | float):
        given = {"reward": given}
    if not isinstance(given, Mapping) or given.get("reward") is None:
        return {}
    if unknown := [str(name) for name in given if name not in REPORT]:
        raise EpisodeFailed(f"the program's report has {', '.join(unknown)}; it may have {', '.join(REPORT)}")
    try:
        told = {name: float(given[name]) for name in ("reward", "score") if given.get(name) is not None}
        metrics = {str(name): float(value) for name, value in (given.get("metrics") or {}).items()}
    except (TypeError, ValueError, AttributeError) as error:
        raise EpisodeFailed(f"the program's reward cannot be read: {error}") from error
    if not math.isfinite(told["reward"]) or not 0.0 <= told.get("score", 0.0) <= 1.0:
        shown = ", ".join(f"{name} {value:g}" for name, value in told.items())
        raise EpisodeFailed(f"the program gave {shown}; a reward is finite, and a score in [0, 1]")
    return {**told, "metrics": metrics, "final": given.get("final")}


def _function(place: str) -> Callable[..., Any]:
    path, colon, name = place.partition(".py:")
    module = import_file(path + ".py" if colon else path, "agent.function")
    function = getattr(module, name, None)
    if not callable(function):
        raise UserError(f"agent.function {place}: give FILE.py:NAME of a function; the file has none called {name!r}")
    if not inspect.iscoroutinefunction(function):
        inner: Callable[..., Any] = function

        async def apart(*arguments: Any) -> Any:
            return await in_thread(inner, *arguments)

        return apart
    return function
