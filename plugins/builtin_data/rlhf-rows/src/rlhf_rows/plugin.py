"""Rows of data sets as the data of runs that sample nothing. Importing this loads neither torch nor a tokenizer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from rlhf_host import AlgoNeeds, Needs, UserError
from rlhf_host.internals import PluginManager, role_flag
from rlhf_host.settings import DataConfig, RunConfig
from rlhf_rows.texts import where_of
from rlhf_rows.units import PythonRows, Split, UnitSet

if TYPE_CHECKING:
    from rlhf_rows.data import RowData

CHECKED = 1000
"""Rows that plugins look at together."""


class DataSets:
    """``DataPlugin`` of all kinds of rows."""

    def refusals(self, config: RunConfig, manager: PluginManager, needs: Needs) -> Iterator[str]:
        owner = f"{config.algo.name if config.algo else 'a plugin'} trains on {needs.data} data"
        if config.reward or config.eval.reward:
            yield f"{owner}, and samples and scores nothing: leave --reward out"
        if config.from_trajectories is not None:
            yield f"{owner}: give --data PATH instead of --from-trajectories"
        if config.train.updates_per_batch > 1:
            yield f"{owner}, and takes one step per batch: for more passes set --data.epochs, not train.epochs or train.minibatches"
        if config.train.old_logprobs not in ("auto", "fused"):
            yield f"{owner}, which nothing sampled: leave --train.old-logprobs out"
        if config.train.steps is not None and config.data.epochs != 1:
            yield "train.steps and data.epochs both say when the run ends: leave one of them out"
        before = [f"--{role_flag(name)}.precompute" for name, role in config.roles.items() if role.precompute]
        if before and manager.has("make_rows") and manager.has("draw_tasks"):
            (maker,), (chooser,) = manager.names("make_rows"), manager.names("draw_tasks")
            reason = f"{maker} makes rows of whole batches, and {chooser} chooses these during the run"
            yield f"{reason}, so their log-probabilities cannot be computed before: leave {before[0]} or {chooser} out"
        for key in manager.names("importance_weights"):
            yield f"{key} corrects for a sampler, and {owner}, which nothing sampled: leave it out"
        idle = {"keep_group", "transform_rewards", "shape_rewards"}
        for key in (item.key for item in manager.loaded if item.kind == "extension"):
            if (hooks := idle & {*manager.hooks(key)}) and not {"compute_loss", "loss_masks"} & {*manager.hooks(key)}:
                yield (
                    f"{key} has {' and '.join(sorted(hooks))} for sampled answers, and {owner}, which nothing samples: leave it out"
                )

    def read(self, config: RunConfig, manager: PluginManager, needs: Needs, tokenizer: Any, rows: PythonRows) -> RowData:
        from rlhf_rows.data import RowData, read_units

        held_out = read_units(config, config.eval.data, "eval", needs, tokenizer, rows) if config.eval.data.sources else None
        units = read_units(config, config.data, "train", needs, tokenizer, rows)
        for each in filter(None, (units, held_out) if AlgoNeeds.of(needs).texts else ()):
            refuse_rows(each, manager)
        return RowData(units, held_out, tokenizer)

    def look(
        self, config: RunConfig, data: DataConfig, split: Split, needs: Needs, tokenizer: Any, rows: PythonRows
    ) -> Sequence[str]:
        from rlhf_rows.data import read_units

        return read_units(config, data, split, needs, tokenizer, rows).report

    def length(self, config: RunConfig) -> str:
        length = f"{config.train.steps} steps" if config.train.steps else f"{config.data.epochs:g} passes over the data"
        return f"{length}, {config.train.batch_size} rows or pairs per step"


def refuse_rows(units: UnitSet, manager: PluginManager) -> None:
    """Raises ``UserError`` for the first row whose columns the algorithm cannot use (``check_labels``), with its place."""
    for key in (key for key in manager.names("check_labels") if manager.by_key[key].kind != "agent"):
        for name, source in units.sources.items():
            for begin in range(0, len(source), CHECKED):
                some = [source[index].task(index, name) for index in range(begin, min(begin + CHECKED, len(source)))]
                for place, problem in (manager.call(key, "check_labels", tasks=some) or {}).items():
                    raise UserError(f"{where_of(some[place])}: {key} cannot use the row: {problem}")


DATA_SETS = DataSets()
