"""Evaluation on held-out rows of a data set: the losses and metrics of training, without a step."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rlhf_host import Group, Trajectory
from rlhf_host.commands import phase
from rlhf_host.internals import Metrics
from rlhf_host.protocols import Trainer
from rlhf_rows.source import Batch, Decode, group_of
from rlhf_rows.unit_store import unit_lengths
from rlhf_rows.units import UnitSet

UNITS = 256
"""Units per batch, so that memory does not grow with the data."""
SHOWN = 64
"""Units whose rows are kept for logs."""


@dataclass(slots=True)
class RowEvaluation:
    """A set of units and how to compute with them."""

    units: UnitSet
    batch: Batch
    decode: Decode
    trainer: Trainer

    def run(self, step: int) -> tuple[dict[str, float], list[Trajectory]]:
        """Returns metrics under ``eval/``, over all units and per source, and some of the rows. Means are over all tokens, or
        rows, of the data; ``eval/loss`` is the sum of the loss terms.
        """
        phase(f"Evaluating {len(self.units)} held-out units")
        started = time.perf_counter()
        whole, shown = Metrics(), list[Trajectory]()
        metrics: dict[str, float] = {}
        for source in self.units.sources:
            own = Metrics()
            for groups in chunks(self.units, source, self.decode):
                own.join(self.trainer.evaluate(self.batch(groups, step, 0, {})))
                room = max(0, SHOWN - len(shown))
                shown += [row for group in groups for row in group.trajectories][:room]
            whole.join(own)
            if len(self.units.sources) > 1:
                metrics |= {f"eval/{source}/{name}": value for name, value in _result(own).items()}
        metrics |= {f"eval/{name}": value for name, value in _result(whole).items()}
        return metrics | {"time/eval": time.perf_counter() - started}, shown


def chunks(unit_set: UnitSet, source: str, decode: Decode) -> Iterator[Sequence[Group]]:
    """Yields all units of a source in batches of similar length, because a batch is as wide as its longest row."""
    tasks, units = unit_set.tasks().sources[source], unit_set.sources[source]
    assert isinstance(tasks, Sequence)
    order = (-unit_lengths(units)[:, :, 1].max(1)).argsort(kind="stable").tolist()
    for begin in range(0, len(order), UNITS):
        yield [group_of(units[i], tasks[i], 0, decode) for i in order[begin : begin + UNITS]]


def _result(metrics: Metrics) -> dict[str, float]:
    values = metrics.result()
    losses = [value for name, value in values.items() if name.startswith("loss/")]
    values["loss"] = sum(losses)
    if "nll" in values:
        values["perplexity"] = math.exp(min(values["nll"], 700.0))
    return values
