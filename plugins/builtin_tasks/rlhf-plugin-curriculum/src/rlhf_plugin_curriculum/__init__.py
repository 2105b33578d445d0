"""A curriculum: tasks are chosen by how often the policy solves them."""

from __future__ import annotations

import logging
import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from rlhf_host import (
    Batch,
    Experience,
    Group,
    LossTerm,
    Metric,
    Needs,
    Outputs,
    RunContext,
    Stop,
    Task,
    UserError,
    hookimpl,
)
from rlhf_plugin_curriculum.rates import POOLS, Options, Rates

__all__ = ["Curriculum"]

log = logging.getLogger(__name__)


class Curriculum:
    """Draws tasks by their success rate: by learning value, as in SFL and LILO (arXiv:2408.15099, arXiv:2502.12272), or from
    pools of easy, medium and hard ones, as prime-rl's buffer. Solved tasks may retire."""

    Options = Options

    def __init__(self, options: Options):
        self.options = options
        self.sources: dict[str, Rates] = {}
        """Empty before the first draw."""
        self.drawn: dict[str, int] = {}
        self.weights: dict[str, float] = {}
        self.shuffle, self.seed = True, 0
        self._state: Mapping[str, Any] | None = None
        """State of a checkpoint, until tasks are known."""
        self._unfit = ""
        """What is wrong with answers of the step."""

    @hookimpl
    def needs(self) -> Needs:
        return Needs(data="prompts")

    @hookimpl
    def check_run(self, config: Mapping[str, Any]) -> None:
        from rlhf_host.internals import named
        from rlhf_host.settings import DataSource

        if config["from_trajectories"] is not None:
            raise UserError("curriculum chooses tasks to sample, and the run takes saved answers: leave one of the two out")
        self.shuffle = config["data"]["shuffle"]
        if not self.shuffle and self.options.strategy == "adaptive":
            raise UserError(
                "curriculum draws at random, and data.shuffle is false: leave it out, or take --curriculum.strategy pools,"
                " which then goes through each pool in the order of the file"
            )
        sources = [DataSource.model_validate(source) for source in config["data"]["sources"]]
        self.weights = {name: source.weight for name, source in named(sources)}

    @hookimpl
    def run_started(self, context: RunContext) -> None:
        self.seed = context.seed

    @hookimpl
    def draw_tasks(self, tasks: Sequence[Task], count: int, step: int) -> list[int]:
        """Sources share the draws by their weights, as without a curriculum; one whose tasks are all retired leaves its draws to
        the others."""
        import numpy as np

        if not self.sources:
            self._look_at(tasks)
        open_ = [name for name, rates in self.sources.items() if not rates.over]
        if not open_:
            log.warning(
                "all tasks are retired: the rest of step %d is filled with retired ones, and the run ends after it", step
            )
        numbers, shares = [], dict.fromkeys(open_ or self.sources, 0)
        for _ in range(count):
            name = min(shares, key=lambda name: (self.drawn[name] + 1) / self.weights.get(name, 1.0))
            self.drawn[name] += 1
            shares[name] += 1
        dice = np.random.default_rng([self.seed, sum(self.drawn.values())])
        for name, share in shares.items():
            numbers += self.sources[name].draw(share, dice, self.shuffle)
        return numbers

    def _look_at(self, tasks: Sequence[Task]) -> None:
        begin = 0
        for name, own in groupby(tasks, key=lambda task: task.source):
            rates = self.sources[name] = Rates(own, begin, self.options)
            begin += int(rates.copies.sum())
            self.drawn.setdefault(name, 0)
            known = (self._state or {}).get("sources", {}).get(name)
            if known is not None and not rates.load_state_dict(known):
                raise UserError(f"the tasks of {name} are not those of the checkpoint: resume with the same data")
            if copies := int((rates.copies - 1).sum()):
                log.info("%s: %d rows are copies of others, and count as the same tasks", name, copies)
        self._state = None

    @hookimpl
    def keep_group(self, group: Group) -> bool:
        """Counts every group that was judged, also one that a filter drops, and keeps it."""
        rates = self.sources.get(group.task.source)
        if rates is not None:
            found: dict[str, list[float]] = defaultdict(list)
            for row in group.trajectories:
                value = row.score if self.options.by == "score" else row.reward
                if value is None or not 0 <= value <= 1:
                    told = "no 0-1 score" if value is None else f"the reward {value:g}, which is not in [0, 1]"
                    self._unfit = f"{group.task.source}, task {group.task.index + 1}: an answer has {told}"
                    return True
                found[row.episode_id].append(value)
            rates.note(group.task, [statistics.fmean(values) for values in found.values()])
        return True

    @hookimpl
    def prepare_batch(self, experience: Experience) -> dict[str, float]:
        """Returns the metrics, over all distinct tasks."""
        if self._unfit:
            rest = "; with --curriculum.by reward rewards in [0, 1] count" if self.options.by == "score" else ""
            raise UserError(f"{self._unfit}, and success is counted by it: take a reward that gives one{rest}")
        numbers = dict.fromkeys((*POOLS, "unseen", "retired"), 0.0)
        rates: list[float] = []
        for source in self.sources.values():
            active = source.seen & ~source.retired
            for pool, name in enumerate(POOLS):
                numbers[name] += int((source.pools[active] == pool).sum())
            numbers["unseen"] += int((~source.seen).sum())
            numbers["retired"] += int(source.retired.sum())
            rates += source.rates[source.seen].tolist()
        return numbers | ({"rate": statistics.fmean(rates)} if rates else {})

    @hookimpl
    def compute_loss(self, outputs: Outputs, batch: Batch) -> Iterator[LossTerm | Metric]:
        """Gives the metrics, and no loss."""
        for name in (*POOLS, "unseen", "retired", "rate"):
            if name in batch.own:
                yield Metric(f"curriculum/{name}", batch.own[name])

    @hookimpl
    def step_finished(self) -> Stop | None:
        if self.sources and all(rates.over for rates in self.sources.values()):
            count = sum(map(len, self.sources.values()))
            rule = f"a mean of {self.options.retire:g} or more in {self.options.retire_after} groups in a row"
            return Stop(
                f"all {count} tasks are retired: the policy solves them ({rule}); add harder tasks, or leave retire out"
            )
        return None

    @hookimpl
    def state_dict(self) -> dict[str, Any]:
        if self._state is not None:
            return dict(self._state)
        return {"drawn": dict(self.drawn), "sources": {name: rates.state_dict() for name, rates in self.sources.items()}}

    @hookimpl
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._state, self.sources, self.drawn = state, {}, dict(state["drawn"])
