"""A language modelling loss on a second data set, beside the policy's."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, PositiveInt
from rlhf_rows import GivenRows, read_rows

from rlhf_host import (
    Batch,
    Extra,
    LossTerm,
    Metric,
    Outputs,
    RunContext,
    Trajectory,
    UserError,
    hookimpl,
)

__all__ = ["PTX"]

log = logging.getLogger(__name__)


class PTX:
    """A second data set whose likelihood the policy keeps: InstructGPT's PPO-ptx (arXiv:2203.02155, eq. 2)."""

    class Options(BaseModel):
        model_config = ConfigDict(extra="forbid")

        data: str = Field(description="file, directory or hub name of rows with answers, or with text")
        coef: float = Field(0.05, gt=0, description="weight of the loss")
        rows: PositiveInt = Field(16, description="rows in each step, shared by its updates")

    def __init__(self, options: Options):
        self.options = options
        self._read: GivenRows | None = None
        self._fitting: list[int] = []
        """Places of the rows that fit the policy's context."""
        self._seed = 0

    @hookimpl
    def check_run(self, config: Mapping[str, Any], tokenizers: Mapping[str, Any]) -> None:
        if (temperature := config["rollout"]["temperature"]) != 1:
            raise UserError(
                f"ptx is a loss at temperature 1, and rollout.temperature is {temperature:g}: set it to 1, or leave ptx out"
            )
        self._read = read_rows(config, tokenizers["actor"], self.options.data, needed_by="ptx")

    @hookimpl
    def run_started(self, context: RunContext) -> None:
        assert self._read is not None
        room = context.roles["actor"].context_length
        self._seed, lengths = context.seed, self._read.lengths
        self._fitting = [place for place, length in enumerate(lengths) if length <= room]
        for line in self._read.report:
            log.warning("ptx: %s", line)
        if not self._fitting:
            raise UserError(f"ptx: every row of {self.options.data} is longer than the policy's context of {room} tokens")
        if left_out := len(lengths) - len(self._fitting):
            log.warning("ptx: %d of %d rows are longer than %d tokens and left out", left_out, len(lengths), room)

    @hookimpl
    def auxiliary_rows(self, step: int) -> list[Trajectory]:
        """Returns the step's rows: each of the data once before any comes again, in an order of the seed."""
        import numpy as np

        assert self._read is not None
        count, orders, rows = len(self._fitting), {}, []
        for place in range((step - 1) * self.options.rows, step * self.options.rows):
            epoch = place // count
            if epoch not in orders:
                orders[epoch] = np.random.default_rng([self._seed, epoch]).permutation(count)
            rows += self._read[self._fitting[int(orders[epoch][place % count])]]
        return rows

    @hookimpl
    def compute_loss(self, outputs: Outputs, batch: Batch) -> Iterator[LossTerm | Metric]:
        """Computes ``−coef·log π``, a mean over the trained tokens of the rows beside."""
        import torch

        mask = batch.own["beside"]
        assert outputs.logprobs is not None
        nll = torch.where(mask, -outputs.logprobs, 0.0)
        yield LossTerm("ptx", nll, mask=Extra("beside"), coefficient=self.options.coef)
        yield Metric("ptx/nll", nll.detach(), mask)
