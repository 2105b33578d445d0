"""The local runtime: every role, the engine and the controller in this process."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import torch
from pydantic import BaseModel, ConfigDict

from rlhf_host.config.schema import PluginChoice, RoleConfig, RunConfig
from rlhf_host.errors import UserError
from rlhf_host.models.loading import load_model, load_tokenizer, quiet_transformers
from rlhf_host.plugins.manager import PluginManager
from rlhf_host.plugins.selection import find, load, read_options
from rlhf_host.protocols import SyncTarget
from rlhf_host.records.episodes import Trajectory
from rlhf_host.records.needs import Needs, RoleHandle, RoleNeed
from rlhf_host.records.tensors import Experience
from rlhf_host.training.worker import Role, Worker
from rlhf_host.weight_sync.local_source import LocalSource

T = TypeVar("T")


class LocalRuntime:
    """One worker that holds all roles. The embedded engine samples from the actor's own module, so that a sync only counts the
    version; another engine needs another ``--sync`` than ``in_process``."""

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
        self.manager = manager
        self.trainer = Worker(roles, manager, config.train, needs)
        self.tokenizer = tokenizer
        self.engine = _make_engine(config.engine, actor, tokenizer, trained=total_updates > 0)
        trained = roles["actor"].backend
        if getattr(self.engine, "model", None) is not None and not all(weight.numel() for weight in actor.parameters()):
            raise UserError(
                f"backend {config.backend.plugin!r} spreads the actor's weights, and an engine in the same process samples from"
                " them whole: take --backend.zero-stage 2, or --runtime ray with --engine vllm"
            )
        self.source = LocalSource(actor, None if trained is None else trained.gathered)
        self.targets = [SyncTarget("local", self.engine)]
        self.handles: dict[str, RoleHandle] = {
            name: LocalRole(self.trainer, name, config.rollout.temperature, used[name], threads=not config.debug)
            for name in roles
        }
        self.context_length = context_length(actor)

    def compute_with(self, execute: Callable[[Callable[[], None]], None]) -> None:
        if hasattr(self.engine, "compute_with"):
            self.engine.compute_with(execute)

    async def sync(self, version: int) -> None:
        for key in self.manager.names("sync_weights"):
            await self.manager.acall(key, "sync_weights", source=self.source, version=version)

    @property
    def trainable(self) -> list[str]:
        return [role.name for role in self.trainer.roles.values() if role.backend is not None]

    def save_role(self, name: str, directory: Path) -> None:
        backend = self.trainer.roles[name].backend
        assert backend is not None
        with quiet_transformers():
            backend.save_model(directory)
        self.tokenizer.save_pretrained(directory)

    def save_state(self, directory: Path) -> None:
        for role in self.trainer.roles.values():
            if role.backend is not None:
                (directory / role.name).mkdir()
                role.backend.save(directory / role.name)

    def load_state(self, directory: Path) -> None:
        check_trained(directory, self.trainable)
        for role in self.trainer.roles.values():
            if role.backend is not None:
                role.backend.load(directory / role.name)

    async def close(self) -> None:
        await self.engine.close()


def check_trained(directory: Path, trainable: Sequence[str]) -> None:
    """Raises ``UserError`` when a checkpoint's roles are not those this run trains."""
    saved = sorted(path.name for path in directory.iterdir())
    if saved != sorted(trainable):
        then, now = ", ".join(saved), ", ".join(sorted(trainable))
        raise UserError(f"the checkpoint trains {then}, this run {now}: resume with the algorithm it was started with")


class LocalRole:
    """A role's forward passes, awaitable, for plugins."""

    def __init__(self, worker: Worker, name: str, temperature: float, settings: RoleConfig, *, threads: bool = True):
        self.worker = worker
        self.name = name
        self.temperature = temperature
        self.settings = settings
        self.threads = threads
        self.context_length = context_length(worker.roles[name].model)

    @cached_property
    def tokenizer(self) -> Any:
        return load_tokenizer(self.settings)

    async def logprobs(self, trajectories: Sequence[Trajectory]) -> list[list[float]]:
        return await self._beside(self._per_token, self.worker.logprobs, trajectories)

    async def values(self, trajectories: Sequence[Trajectory]) -> list[list[float]]:
        return await self._beside(self._per_token, self.worker.values, trajectories)

    async def scores(self, trajectories: Sequence[Trajectory]) -> list[float]:
        batch = completions(trajectories, self.temperature)
        return (await self._beside(self.worker.scores, self.name, batch)).tolist()

    async def _beside(self, compute: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.to_thread(compute, *arguments) if self.threads else compute(*arguments)

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


def _make_engine(choice: PluginChoice, actor: Any, tokenizer: Any, *, trained: bool) -> Any:
    """An engine on the actor's own module, or one with weights of its own, which a sync brings; to an actor that is not
    trained nothing is synced."""
    info = find("engine", choice.plugin)
    cls: Any = load(info)
    options = read_options(info, cls, choice.options)
    if not getattr(cls, "own_weights", False):
        return cls(options, model=actor, tokenizer=tokenizer)
    with tempfile.TemporaryDirectory(prefix="rlhf-engine-") as directory, quiet_transformers():
        if trained:
            actor.config.save_pretrained(directory)
            actor.generation_config.save_pretrained(directory)
        else:
            actor.save_pretrained(directory)
        tokenizer.save_pretrained(directory)
        return cls(options, model=directory, tokenizer=tokenizer, version=-1 if trained else 0)


def _made(kind: str, choice: PluginChoice, **parts: Any) -> Any:
    info = find(kind, choice.plugin)
    cls: Any = load(info)
    return cls(read_options(info, cls, choice.options), **parts)
