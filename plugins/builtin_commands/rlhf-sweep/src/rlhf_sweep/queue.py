"""Chooses the next run: all of them in their order, or those of what a sampler proposes from the results so far."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from rlhf_host import UserError
from rlhf_sweep.folder import Folder
from rlhf_sweep.planned import Planned, planned, told
from rlhf_sweep.request import Request
from rlhf_sweep.results import By, Results
from rlhf_sweep.samplers import OF_OPTUNA, Values, draw, grid, key, propose, size
from rlhf_sweep.space import Choices


def fixed_combinations(request: Request) -> list[Values] | None:
    """Returns all combinations, if they do not depend on results.

    Raises:
        UserError: there are more than the limit, or fewer than the sampler shall draw.
    """
    count, each = size(request.varied), len(request.seeds or (0,))
    wanted = request.trials if request.trials is not None else count
    assert wanted is not None
    if wanted * each > request.limit:
        more = f" of {count:,} combinations" if request.trials is None and each > 1 else ""
        raise UserError(
            f"{wanted * each:,} runs{more} are more than --limit {request.limit:,}: vary less, draw some (--sampler random"
            f" --trials 20), or say --limit {wanted * each}"
        )
    if count is not None and request.trials is not None and request.trials > count:
        raise UserError(
            f"--trials {request.trials}: there are only {count} combinations; without --sampler all of them are run"
        )
    if request.sampler is None:
        return list(grid(request.varied))
    if request.sampler in OF_OPTUNA:
        return None
    found: list[Values] = []
    for number in range(wanted):
        if (values := draw(request.varied, request.sampler_seed, number, found)) is None:
            raise UserError(f"--trials {wanted}: after {len(found)} draws nothing new comes from these ranges: ask for fewer")
        found.append(values)
    return found


def corners(request: Request) -> list[Values]:
    """Returns combinations that have each value once, for a check of all before anything runs."""
    ends = {
        each.name: each.space.values
        if isinstance(each.space, Choices)
        else _ends(each.space.low, each.space.high, each.space.whole)
        for each in request.varied
    }
    first = {name: values[0] for name, values in ends.items()}
    found = [first, *({**first, name: value} for name, values in ends.items() for value in values[1:])]
    return list({key(values): values for values in found}.values())


def _ends(low: float, high: float, whole: bool) -> tuple[Any, Any]:
    return (int(low), int(high)) if whole else (low, high)


class FixedQueue:
    """Runs that are known from the beginning."""

    def __init__(self, runs: Sequence[Planned]):
        self.runs = list(runs)
        self._left: Iterator[Planned] = iter(())

    def begin(self, is_open: Callable[[Planned], bool]) -> None:
        self._left = iter([run for run in self.runs if is_open(run)])

    def next(self) -> Planned | None:
        return next(self._left, None)


class ProposedQueue:
    """Runs of what a sampler proposes, one after the other. Proposals are written down before they run."""

    def __init__(self, request: Request, folder: Folder, by: By | None, say: Callable[[str], None]):
        self.request, self.folder, self.by, self.say = request, folder, by, say
        self.refused: dict[Any, str] = {}
        self.runs: list[Planned] = []
        self.values: list[Values] = []
        self._waiting: list[Planned] = []
        self._is_open: Callable[[Planned], bool] = lambda run: True
        self._done = False
        for values in folder.drawn():
            self._add(values)

    def _add(self, values: Mapping[str, Any]) -> list[Planned]:
        self.values.append(dict(values))
        try:
            runs, _ = planned(self.request, [values])
        except UserError as error:
            self.refused[key(values)] = str(error)
            self.say(f"{told(values)}: REFUSED: {error}")
            return []
        self.runs += runs
        return runs

    def begin(self, is_open: Callable[[Planned], bool]) -> None:
        self._is_open = is_open
        self._waiting = [run for run in self.runs if is_open(run)]

    def next(self) -> Planned | None:
        while not self._waiting and not self._done and len(self.values) < (self.request.trials or 0):
            assert self.request.sampler is not None
            results = Results(self.folder, self.runs, self.by)
            known = {key(row.settings): row.mean for row in results.rows}
            low = results.by is not None and results.by.low
            told_so_far = [(values, known.get(key(values))) for values in self.values]
            values = propose(
                self.request.varied, self.request.sampler, self.request.sampler_seed, len(self.values), told_so_far, low
            )
            if values is None:
                self.say(f"{self.request.sampler} proposes nothing new after {len(self.values)} settings")
                self._done = True
                break
            self.folder.note_drawn([*self.values, values])
            new = self._add(values)
            self.folder.write_record(about(self.request), self.runs)
            self._waiting += [run for run in new if self._is_open(run)]
        return self._waiting.pop(0) if self._waiting else None


def about(request: Request) -> dict[str, Any]:
    """Returns what a sampler's proposals follow from; empty where the runs say it all."""
    if request.sampler not in OF_OPTUNA:
        return {}
    spaces = {
        each.name: list(each.space.values)
        if isinstance(each.space, Choices)
        else [each.space.low, each.space.high, "log" if each.space.log else "lin"]
        for each in request.varied
    }
    return {"vary": spaces, "seeds": request.seeds, "sampler": request.sampler, "sampler_seed": request.sampler_seed}
