"""Roles as plugins see them: awaitable forward passes without gradient, on any runtime."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, TypeVar

import torch

from rlhf_host.config.schema import RoleConfig
from rlhf_host.models.loading import load_tokenizer
from rlhf_host.protocols import Trainer
from rlhf_host.records.episodes import Trajectory
from rlhf_host.records.tensors import Batch, RoleOutput

T = TypeVar("T")


class TrainerRole:
    """``RoleHandle`` over a trainer.

    Args:
        temperature: divides logits before the softmax.
        threads: wait in a thread beside the event loop. If False the loop waits too, so that a debugger can follow.
    """

    def __init__(
        self,
        trainer: Trainer,
        name: str,
        settings: RoleConfig,
        context_length: int,
        *,
        temperature: float,
        threads: bool = True,
    ):
        self.name, self.context_length = name, context_length
        self._trainer, self._settings, self._temperature, self._threads = trainer, settings, temperature, threads

    @cached_property
    def tokenizer(self) -> Any:
        return load_tokenizer(self._settings)

    async def logprobs(self, trajectories: Sequence[Trajectory], *, temperature: float | None = None) -> list[list[float]]:
        return await self._per_token("logprobs", trajectories, self._at(temperature))

    async def topk(
        self, trajectories: Sequence[Trajectory], k: int, *, temperature: float | None = None
    ) -> list[list[dict[int, float]]]:
        batch = self._batch(trajectories, self._at(temperature))
        likeliest = await self._run(self._trainer.topk, self.name, k, batch)
        rows = zip(likeliest.ids, likeliest.logprobs, batch.lengths.tolist(), strict=True)
        return [
            [dict(zip(*place, strict=True)) for place in zip(ids[:length].tolist(), values[:length].tolist(), strict=True)]
            for ids, values, length in rows
        ]

    async def values(self, trajectories: Sequence[Trajectory]) -> list[list[float]]:
        return await self._per_token("values", trajectories)

    async def scores(self, trajectories: Sequence[Trajectory]) -> list[float]:
        return (await self._run(self._trainer.outputs, self.name, "scores", self._batch(trajectories))).tolist()

    async def token_scores(self, trajectories: Sequence[Trajectory]) -> list[list[float]]:
        return await self._per_token("token_scores", trajectories)

    async def _per_token(
        self, output: RoleOutput, trajectories: Sequence[Trajectory], temperature: float | None = None
    ) -> list[list[float]]:
        batch = self._batch(trajectories, temperature)
        values = await self._run(self._trainer.outputs, self.name, output, batch)
        return [row[:length].tolist() for row, length in zip(values, batch.lengths.tolist(), strict=True)]

    def _batch(self, trajectories: Sequence[Trajectory], temperature: float | None = None) -> Batch:
        return completions(trajectories, self._temperature if temperature is None else temperature)

    def _at(self, temperature: float | None) -> float:
        chosen = self._temperature if temperature is None else temperature
        if chosen == 0:
            raise ValueError(f"the role {self.name} has no log-probabilities at temperature 0: give another, such as 1.0")
        return chosen

    async def _run(self, compute: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.to_thread(compute, *arguments) if self._threads else compute(*arguments)


def completions(trajectories: Sequence[Trajectory], temperature: float) -> Batch:
    """Returns trajectories as rows for a forward pass; fields of sampling are not filled in."""
    tokens = [[token for segment in row.completion for token in segment.token_ids] for row in trajectories]
    width = max([1, *map(len, tokens)])
    ids = torch.tensor([row + [0] * (width - len(row)) for row in tokens], dtype=torch.int64).reshape(-1, width)
    mask = torch.arange(width) < torch.tensor([len(row) for row in tokens]).unsqueeze(-1)
    shape, rows = ids.shape, torch.arange(len(tokens))
    groups: dict[str, int] = {}
    return Batch(
        prompt_ids=[row.prompt_ids for row in trajectories],
        completion_ids=ids,
        completion_mask=mask,
        action_mask=mask,
        loss_mask=mask,
        turn_ids=torch.zeros(shape, dtype=torch.int64),
        group_id=torch.tensor([groups.setdefault(row.group_id, len(groups)) for row in trajectories], dtype=torch.int64),
        episode_id=rows,
        unit_id=rows,
        task_index=torch.tensor([row.task.index for row in trajectories], dtype=torch.int64),
        truncated=torch.tensor([row.truncated for row in trajectories], dtype=torch.bool),
        sampler_logprobs=torch.zeros(shape),
        versions=torch.zeros(shape, dtype=torch.int64),
        temperature=temperature,
        images=images if any(images := [row.shown for row in trajectories]) else None,
    )
