"""Rows of data sets as the data of runs that sample nothing. Importing this loads neither torch nor a tokenizer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from rlhf_host import Needs
from rlhf_host.internals import PluginManager, role_flag
from rlhf_host.settings import DataConfig, RunConfig
from rlhf_rows.units import PythonRows, Split

if TYPE_CHECKING:
    from rlhf_rows.data import RowData


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

        units = read_units(config, config.data, "train", needs, tokenizer, rows)
        held_out = config.eval.data.sources
        return RowData(
            units, read_units(config, config.eval.data, "eval", needs, tokenizer, rows) if held_out else None, tokenizer
        )

    def look(
        self, config: RunConfig, data: DataConfig, split: Split, needs: Needs, tokenizer: Any, rows: PythonRows
    ) -> Sequence[str]:
        from rlhf_rows.data import read_units

        return read_units(config, data, split, needs, tokenizer, rows).report

    def length(self, config: RunConfig) -> str:
        length = f"{config.train.steps} steps" if config.train.steps else f"{config.data.epochs:g} passes over the data"
        return f"{length}, {config.train.batch_size} rows or pairs per step"


DATA_SETS = DataSets()
