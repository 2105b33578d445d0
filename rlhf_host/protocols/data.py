"""Interface of the data of a run: tasks, saved trajectories, or the rows of a data set that a package reads."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias

from rlhf_host.records.episodes import Trajectory
from rlhf_host.records.needs import Needs

if TYPE_CHECKING:
    from rlhf_host.config.schema import DataConfig, RunConfig
    from rlhf_host.plugins.manager import PluginManager
    from rlhf_host.training.assemble import Started
    from rlhf_host.training.events import EventLoop
    from rlhf_host.training.source import Source

PythonRows: TypeAlias = Mapping[str, Iterable[Mapping[str, Any]]]
"""A source's path, ``python:NAME`` → its rows."""
Split: TypeAlias = Literal["train", "eval"]
Evaluate: TypeAlias = Callable[[int], tuple[dict[str, float], list[Trajectory]]]
"""Step → metrics under ``eval/``, and rows for logs."""


class GivenData(Protocol):
    """The data of one run, read and checked before anything is written."""

    @property
    def report(self) -> Sequence[str]:
        """Lines for people: what was read, left out and cut."""

    @property
    def pictured(self) -> bool:
        """True if some of the first rows have pictures."""

    def steps(self, config: RunConfig) -> int:
        """Return the number of steps of the whole run."""

    def end(self, config: RunConfig) -> tuple[int | None, str]:
        """Return the step after which nothing is left to do, and what to say then, such as ``raise --train.steps to continue``."""

    def computed(self, config: RunConfig, manager: PluginManager, needs: Needs) -> Collection[str]:
        """Return roles that the run need not load, because all that is wanted of them is computed before or known."""

    def source(self, config: RunConfig, manager: PluginManager, started: Started, events: EventLoop) -> Source:
        """Return the source of the run's batches."""

    def evaluate(self, config: RunConfig, manager: PluginManager, started: Started, events: EventLoop) -> Evaluate | None:
        """Return the function that evaluates after a step; None: there is no held-out data."""


class DataPlugin(Protocol):
    """An object that an entry point of the group ``rlhf.data`` names. Runs that sample nothing use it; the entry point is called
    as the ``Needs.data`` of their algorithm, such as ``preference``, or ``trajectories``, where ``from_trajectories`` is set.
    """

    def refusals(self, config: RunConfig, manager: PluginManager, needs: Needs) -> Iterable[str]:
        """Return what has no place in a run over such data. Nothing is read yet."""

    def read(self, config: RunConfig, manager: PluginManager, needs: Needs, tokenizer: Any, rows: PythonRows) -> GivenData:
        """Return the data for training and evaluation. Raises ``UserError`` for data that cannot be read.

        Args:
            tokenizer: the actor's.
        """

    def look(
        self, config: RunConfig, data: DataConfig, split: Split, needs: Needs, tokenizer: Any, rows: PythonRows
    ) -> Sequence[str]:
        """Return what the rows of ``data`` are, for ``--dry-run``. Raises ``UserError`` as ``read`` does."""

    def length(self, config: RunConfig) -> str:
        """Return how long the run is, for ``--dry-run``."""
