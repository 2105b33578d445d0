"""Makes an environment that can be played from settings: plugins, data, and refusals of what no other side could play."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rlhf_environments.playing import Environment
from rlhf_environments.policy import MOST_TOKENS, TextEpisodes
from rlhf_environments.text_tokens import text_tokenizer
from rlhf_host import AgentNeeds, Needs, Sampling, Task, UserError
from rlhf_host.installed import discover, load
from rlhf_host.internals import EpisodeSettings, load_tasks
from rlhf_host.sampling import scoring_refusals, session
from rlhf_host.settings import RunConfig, merge_needs, resolve


@dataclass(frozen=True, slots=True)
class Opened:
    """An environment, the event loop that it runs on, and what was read."""

    environment: Environment
    session: Any
    report: Sequence[str]


@contextlib.contextmanager
def opened(config: RunConfig, origins: Any = None, *, most: int = 256, idle_s: float = 1800.0) -> Iterator[Opened]:
    """Opens the environment that settings describe. Raises ``UserError`` for one that cannot be played by another side."""
    if not config.data.sources:
        raise UserError("no data: give --data a file, a directory, a hub name or a task plugin's name")
    if config.data.template is not None:
        raise UserError("--data.template: the other side renders prompts, with its own chat template: leave it out")
    config = config.model_copy(deep=True)
    config.rollout.episode_retries = 0  # who has answered once is not asked everything again
    run = resolve(config, origins, "rollout")
    with contextlib.closing(run.plugins()) as manager:
        refused = [*scoring_refusals(run.config, manager), *_refusals(manager)]
        if refused:
            raise UserError("\n".join(refused))
        tokenizer = text_tokenizer()
        taskset = load_tasks(run.config.data, split="train", tokenizer=tokenizer, seed=run.config.seed, manager=manager)
        tasks = [replace(task, prompt_ids=None) for task in taskset.tasks]
        if not tasks:
            raise UserError("its tasks have no end: give --data.max-samples NUMBER")
        if pictured := next((task for task in tasks if task.images), None):
            raise UserError(f"{pictured.source}, row {pictured.index + 1} has pictures, and only texts can be exported")
        settings = EpisodeSettings(
            sampling=Sampling(max_new_tokens=MOST_TOKENS),
            max_tokens=MOST_TOKENS,
            data=run.config.data,
            rollout=run.config.rollout,
        )
        with session(run.config, manager, needs=Needs(), tokenizer=tokenizer) as running:
            episodes = TextEpisodes.of(manager, settings)
            if any(AgentNeeds.of(own).server for own in manager.needs().values()):
                episodes.endpoints = load(next(info for info in discover() if info.kind == "server"))(port=0)
            environment = Environment(run.config, manager, tasks, episodes, most=most, idle_s=idle_s)
            try:
                report = [line.rpartition("; prompts")[0] or line for line in taskset.report]
                if beside := dict.fromkeys(name for task in tasks for name in task.metadata):
                    report.append(f"columns that agents and rewards alone may read: {', '.join(beside)}")
                yield Opened(environment, running, report)
            finally:
                running.run(_close(environment), interruptible=False)


async def _close(environment: Environment) -> None:
    await environment.close()
    if environment.episodes.endpoints is not None:
        await environment.episodes.endpoints.close()


def _refusals(manager: Any) -> Iterator[str]:
    needs = merge_needs(manager)
    scoring = {item.kind for item in manager.loaded if item.key in manager.names("score")}
    if needs.rewards and not scoring:
        yield "nothing gives a reward: add --reward NAME, or choose an agent that gives its own"
    for key, own in manager.needs().items():
        if roles := [need.name for need in own.roles]:
            yield f"{key} needs a model for the role {roles[0]!r}, and an environment has none: it cannot be exported"


def prompt_messages(task: Task) -> Sequence[Any]:
    """Returns a task's prompt as messages."""
    return [{"role": "user", "content": task.prompt}] if isinstance(task.prompt, str) else task.prompt
