"""The local runtime: every role, the engine and the controller in this process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict

from rlhf_host.config.schema import PluginChoice, RoleConfig, RunConfig
from rlhf_host.errors import UserError
from rlhf_host.models.loading import load_model, load_tokenizer, quiet_transformers
from rlhf_host.plugins.manager import PluginManager
from rlhf_host.plugins.selection import find, load, read_options
from rlhf_host.training.worker import Role, Worker
from rlhf_host.types import Experience, Needs, RoleHandle, RoleNeed, SyncTarget, Trajectory


class LocalRuntime:
    """One worker that holds all roles; the engine samples from the actor's own module, so a sync only counts the version."""

    class Options(BaseModel):
        model_config = ConfigDict(extra="forbid")

    def __init__(self, options: Options):
        self.options = options

    def start(
        self,
        *,
        config: RunConfig,
        manager: PluginManager,
        needs: Needs,
        tokenizer: Any,
        total_updates: int,
        models: Mapping[str, Path],
    ) -> None:
        roles: dict[str, Role] = {}
        used: dict[str, RoleConfig] = {}
        for need in needs.roles:
            settings = used[need.name] = role_settings(config, need, models.get(need.name), needs)
            model = load_model(settings, head=need.head, trainable=need.trainable)
            backend = None
            if need.trainable:
                backend = _made("backend", config.backend, model=model, role=settings, total_updates=total_updates)
            roles[need.name] = Role(need.name, model, backend)
        actor = roles["actor"].model
        self.trainer = Worker(roles, manager, config.train, needs)
        self.tokenizer = tokenizer
        self.engine = _made("engine", config.engine, model=actor, tokenizer=tokenizer)
        self.source = actor
        self.targets = [SyncTarget("local", self.engine)]
        self.handles: dict[str, RoleHandle] = {
            name: LocalRole(self.trainer, name, config.rollout.temperature, used[name]) for name in roles
        }
        self.context_length = context_length(actor)

    def compute_with(self, execute: Callable[[Callable[[], None]], None]) -> None:
        if hasattr(self.engine, "compute_with"):
            self.engine.compute_with(execute)

    @property
    def trainable(self) -> list[str]:
        return [role.name for role in self.trainer.roles.values() if role.backend is not None]

    def save_role(self, name: str, directory: Path) -> None:
        with quiet_transformers():
            self.trainer.roles[name].model.save_pretrained(directory)
        self.tokenizer.save_pretrained(directory)

    def state_dict(self) -> dict[str, Any]:
        return {role.name: role.backend.state_dict() for role in self.trainer.roles.values() if role.backend is not None}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if set(state) != set(self.trainable):
            then, now = ", ".join(sorted(state)), ", ".join(sorted(self.trainable))
            raise UserError(f"the checkpoint trains {then}, this run {now}: resume with the algorithm it was started with")
        for name, saved in state.items():
            backend = self.trainer.roles[name].backend
            assert backend is not None
            backend.load_state_dict(saved)

    async def close(self) -> None:
        await self.engine.close()


class LocalRole:
    """A role's forward passes, awaitable, for plugins."""

    def __init__(self, worker: Worker, name: str, temperature: float, settings: RoleConfig):
        self.worker = worker
        self.name = name
        self.temperature = temperature
        self.settings = settings
        self.context_length = context_length(worker.roles[name].model)

    @cached_property
    def tokenizer(self) -> Any:
        return load_tokenizer(self.settings)

    async def logprobs(self, trajectories: Sequence[Trajectory]) -> list[list[float]]:
        return await asyncio.to_thread(self._per_token, self.worker.logprobs, trajectories)

    async def values(self, trajectories: Sequence[Trajectory]) -> list[list[float]]:
        return await asyncio.to_thread(self._per_token, self.worker.values, trajectories)

    async def scores(self, trajectories: Sequence[Trajectory]) -> list[float]:
        batch = completions(trajectories, self.temperature)
        return (await asyncio.to_thread(self.worker.scores, self.name, batch)).tolist()

    def _per_token(self, compute: Any, trajectories: Sequence[Trajectory]) -> list[list[float]]:
        batch = completions(trajectories, self.temperature)
        found = compute(self.name, batch)
        return [row[:length].tolist() for row, length in zip(found, batch.lengths.tolist(), strict=True)]


def context_length(model: Any) -> int:
    """Longest row of tokens that the model has positions for."""
    return int(getattr(model.config, "max_position_embeddings", None) or 2**31)


def completions(trajectories: Sequence[Trajectory], temperature: float) -> Experience:
    """Trajectories as rows for a forward pass; nothing of rewards or sampling is filled in."""
    tokens = [[token for segment in row.completion for token in segment.token_ids] for row in trajectories]
    shape = (len(tokens), max(1, max(map(len, tokens), default=1)))
    ids = torch.zeros(shape, dtype=torch.int64)
    mask = torch.zeros(shape, dtype=torch.bool)
    for i, row in enumerate(tokens):
        ids[i, : len(row)] = torch.tensor(row, dtype=torch.int64)
        mask[i, : len(row)] = True
    count, zeros = shape[0], torch.zeros(shape)
    groups: dict[str, int] = {}
    return Experience(
        prompt_ids=[row.prompt_ids for row in trajectories],
        completion_ids=ids,
        completion_mask=mask,
        action_mask=mask,
        loss_mask=mask,
        turn_ids=torch.zeros(shape, dtype=torch.int64),
        group_id=torch.tensor([groups.setdefault(row.group_id, len(groups)) for row in trajectories], dtype=torch.int64),
        episode_id=torch.arange(count),
        unit_id=torch.arange(count),
        task_index=torch.tensor([row.task.index for row in trajectories], dtype=torch.int64),
        truncated=torch.tensor([row.truncated for row in trajectories], dtype=torch.bool),
        rewards=torch.zeros(count),
        plugin_rewards=torch.zeros(count, 0),
        scores=torch.zeros(count),
        token_rewards=zeros,
        sampler_logprobs=zeros,
        versions=torch.zeros(shape, dtype=torch.int64),
        temperature=temperature,
    )


def role_settings(config: RunConfig, need: RoleNeed, override: Path | None, needs: Needs) -> RoleConfig:
    """The role's own settings, with the model of ``need.source`` (a role's name, or a path) where it names none, and the
    learning rate of ``need`` where it sets none.

    Args:
        override: a checkpoint of the role.
        needs: of the whole run: the role that ``need.source`` names may have its model from its own source.

    Raises:
        UserError: when no model is named anywhere.
    """
    settings = config.roles.get(need.name) or RoleConfig()
    if settings.lr is None:
        settings = settings.model_copy(update={"lr": need.lr})
    if settings.model is None and need.source is not None:
        needed = next((other for other in needs.roles if other.name == need.source), None)
        origin = config.roles.get(need.source) if needed is None else role_settings(config, needed, None, needs)
        inherited: dict[str, Any] = {"model": origin.model if origin else need.source}
        if origin:
            trusted = settings.trust_remote_code or origin.trust_remote_code
            inherited |= {"revision": origin.revision, "trust_remote_code": trusted}
        settings = settings.model_copy(update=inherited)
    if override is not None:
        settings = settings.model_copy(update={"model": str(override)})
    if settings.model is None:
        raise UserError(f"the role {need.name} has no model; give --{need.name}.model DIRECTORY|HUB_NAME|FILE.gguf")
    return settings


def _made(kind: str, choice: PluginChoice, **parts: Any) -> Any:
    info = find(kind, choice.plugin)
    cls: Any = load(info)
    return cls(read_options(info, cls, choice.options), **parts)
