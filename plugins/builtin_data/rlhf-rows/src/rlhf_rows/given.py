"""Rows of a data set, for plugins. Importing it loads no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from rlhf_host import Trajectory

if TYPE_CHECKING:
    from rlhf_rows.units import Unit


@dataclass(frozen=True, slots=True)
class GivenRows:
    """Rows of a data set, as algorithms that train on data get them: ``rows[i]`` is a list of trajectories, one for an answer, two
    for a pair. Their actions are the tokens that train.
    """

    report: Sequence[str]
    """Lines for people: what was read, left out and cut."""
    _units: Sequence[tuple[str, int, Unit]]
    _tokenizer: Any

    def __len__(self) -> int:
        return len(self._units)

    @property
    def lengths(self) -> list[int]:
        """Tokens of each item's longest row."""
        return [max(len(row.prompt_ids) + len(row.completion_ids) for row in unit.rows) for _, _, unit in self._units]

    def __getitem__(self, place: int) -> list[Trajectory]:
        from rlhf_host.batches import decoder
        from rlhf_rows.source import trajectories

        source, index, unit = self._units[place]
        return trajectories(unit, unit.task(index, source), f"{source}-{index}", decoder(self._tokenizer))


def read_rows(
    config: Mapping[str, Any],
    tokenizer: Any,
    path: str,
    *,
    kind: Literal["prompt_completion", "preference", "triple", "unpaired", "rated", "stepwise"] = "prompt_completion",
    needed_by: str = "a plugin",
) -> GivenRows:
    """Returns the rows of a data set, rendered and tokenised as the run does it, in file order.

    Args:
        config: the run's settings, as ``check_run`` and ``RunContext`` have them. The sources and columns in its section ``data``
            are not those of this data set.
        tokenizer: the actor's.
        path: file, directory or hub name, as after ``--data``.
        kind: what the rows have, as ``Needs.data``.
        needed_by: the plugin, for messages.

    Raises:
        UserError: data that cannot be found or read, is of another kind, or has a bad row, with its file and line.
    """
    from rlhf_host.settings import DataConfig, DataSource
    from rlhf_rows.load_units import load_units

    own = {"sources": [DataSource(path=path)], "prompt_key": None, "label_key": None, "agent_key": None, "max_samples": None}
    data = DataConfig.model_validate({**config["data"], **own, "condition": None})
    found = load_units(data, kind=kind, split="train", tokenizer=tokenizer, needed_by=needed_by)
    units = [(name, index, units[index]) for name, units in found.sources.items() for index in range(len(units))]
    return GivenRows(found.report, units, tokenizer)
