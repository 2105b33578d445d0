"""The data of one run over rows: steps, batches, evaluation, and what is computed before."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from rlhf_host import AlgoNeeds, Batch, Experience, Group, Needs, Trajectory
from rlhf_host.batches import decoder, stream_of
from rlhf_host.internals import PluginManager
from rlhf_host.models import sizes, stop_tokens
from rlhf_host.settings import DataConfig, RunConfig
from rlhf_rows.batches import Batches
from rlhf_rows.evaluation import RowEvaluation, chunks
from rlhf_rows.frozen_role import FrozenRole
from rlhf_rows.large_units import refuse_large_units
from rlhf_rows.load_units import load_units
from rlhf_rows.precompute import precomputed
from rlhf_rows.source import Decode, RowSource
from rlhf_rows.stored_logprobs import StoredLogprobs
from rlhf_rows.units import PythonRows, Split, UnitSet

Evaluate: TypeAlias = Callable[[int], tuple[dict[str, float], list[Trajectory]]]
"""Step → metrics, and rows for logs, as in the host."""
FIRST = 1000
"""Units of each source that are looked at for pictures before a run starts."""


def read_units(config: RunConfig, data: DataConfig, split: Split, needs: Needs, tokenizer: Any, rows: PythonRows) -> UnitSet:
    """Returns the units of a split. Raises ``UserError`` for data that cannot be read, and for pairs that are too large."""
    actor, own = config.roles["actor"], AlgoNeeds.of(needs)
    assert needs.data is not None
    assert config.algo is not None
    units = load_units(
        data,
        kind=needs.data,
        split=split,
        tokenizer=tokenizer,
        max_tokens=sizes(actor)[1],
        rows=rows,
        needed_by=config.algo.name,
        stop_ids=stop_tokens(actor),
        separator="\n" if own.separator is None else own.separator,
        texts=own.texts,
    )
    if own.unit_rows:
        scalar = any(need.name == "actor" and need.head == "scalar" for need in needs.roles)
        refuse_large_units(units, config.train, scalar=scalar)
    return units


@dataclass(slots=True)
class RowData:
    """``GivenData`` of a data set."""

    units: UnitSet
    held_out: UnitSet | None
    tokenizer: Any
    _stored: dict[str, StoredLogprobs] = field(default_factory=dict)
    """Role that is not loaded → its log-probabilities."""

    @property
    def report(self) -> list[str]:
        held_out = [] if self.held_out is None else self.held_out.report
        return [*self.units.report, *(f"held out: {line}" for line in held_out)]

    @property
    def pictured(self) -> bool:
        return any(row.images for units in self.units.sources.values() for unit in units[:FIRST] for row in unit.rows)

    @property
    def _decode(self) -> Decode:
        return decoder(self.tokenizer)

    def steps(self, config: RunConfig) -> int:
        if config.train.steps is not None:
            return config.train.steps
        return math.ceil(math.ceil(len(self.units) * config.data.epochs) / config.train.batch_size)

    def end(self, config: RunConfig) -> tuple[int, str]:
        longer = "--data.epochs" if config.train.steps is None else "--train.steps"
        return self.steps(config), f"; raise {longer} to continue"

    def computed(self, config: RunConfig, manager: PluginManager, needs: Needs) -> Collection[str]:
        wanted = [need for need in needs.roles if need.name in config.roles and config.roles[need.name].precompute]
        for need in wanted:
            role = FrozenRole(config, manager, needs, need, self.tokenizer)
            rows = self._all_rows(config, manager, needs)
            self._stored[need.name] = precomputed(role, self._depends_on(config, manager), rows)
        return self._stored

    def source(self, config: RunConfig, manager: PluginManager, started: Any, events: Any) -> RowSource:
        return self._source(config, manager, self._batch(config, manager, started))

    def evaluate(self, config: RunConfig, manager: PluginManager, started: Any, events: Any) -> Evaluate | None:
        if self.held_out is None:
            return None
        batch = self._batch(config, manager, started)
        return RowEvaluation(self.held_out, batch, self._decode, started.runtime.trainer).run

    def _batch(self, config: RunConfig, manager: PluginManager, started: Any) -> Any:
        """Returns the function that makes tensors of groups."""
        batches = Batches(manager, started.needs, started.handles)

        def batch(groups: Sequence[Group], step: int, version: int, times: dict[str, float]) -> Experience:
            return batches.batch(groups, started.runtime.trainer, step=step, version=version, times=times, known=self._known)

        return batch

    def _known(self, experience: Experience) -> dict[str, Any]:
        return {role: stored.of(experience) for role, stored in self._stored.items()}

    def _source(self, config: RunConfig, manager: PluginManager, batch: Any) -> RowSource:
        epochs = config.data.epochs if config.train.steps is None else None
        stream = stream_of(config, manager, self.units.tasks())
        return RowSource(self.units, stream, batch, self._decode, size=config.train.batch_size, epochs=epochs)

    def _all_rows(self, config: RunConfig, manager: PluginManager, needs: Needs) -> Iterator[Batch]:
        """Yields every row that the run will see: all units; if a plugin makes rows of whole batches, the run's batches in their
        order.
        """
        batches = Batches(manager, needs)
        if manager.has("make_rows"):
            source = self._source(config, manager, None)
            for step in range(1, self.steps(config) + 1):
                yield batches.rows(source.groups(step))
        for units in (self.held_out,) if manager.has("make_rows") else (self.units, self.held_out):
            for name in units.sources if units is not None else ():
                assert units is not None
                for groups in chunks(units, name, self._decode):
                    yield batches.rows(groups)

    def _depends_on(self, config: RunConfig, manager: PluginManager) -> dict[str, Any]:
        """Returns what the rows depend on."""
        found: dict[str, Any] = {
            "rows": [None if units is None else units.fingerprint for units in (self.units, self.held_out)]
        }
        if manager.has("make_rows"):
            order = config.seed, config.data.shuffle, config.train.batch_size, self.steps(config)
            makers = [str(manager.by_key[key]) for key in manager.names("make_rows")]
            found["made"] = makers, order, config.algo.model_dump(mode="json") if config.algo else None
        return found
