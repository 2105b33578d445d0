"""Chooses the settings that are run: the whole grid, random draws, or what optuna proposes from the results so far."""

from __future__ import annotations

import hashlib
import itertools
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from rlhf_host import UserError
from rlhf_sweep.space import Choices, Range, Varied, label

SAMPLERS = ("random", "tpe", "gp")
"""Samplers of optuna, which propose from the finished settings alone, so that a sweep which goes on proposes the same."""
OF_OPTUNA = {"tpe": "TPESampler", "gp": "GPSampler"}
TRIES = 200
"""Draws in a row that bring nothing new, after which a space counts as used up."""

Values = dict[str, Any]
Result = tuple[Mapping[str, Any], float | None]
"""Settings, and their value; None: they failed."""


def size(varied: Sequence[Varied]) -> int | None:
    """Returns the number of combinations. None: a range has no end of them."""
    if any(isinstance(each.space, Range) for each in varied):
        return None
    return math.prod(len(each.space.values) for each in varied if isinstance(each.space, Choices))


def grid(varied: Sequence[Varied]) -> Iterator[Values]:
    spaces = [each.space.values for each in varied if isinstance(each.space, Choices)]
    for values in itertools.product(*spaces):
        yield dict(zip((each.name for each in varied), values, strict=True))


def key(values: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    """Returns what two equal settings have in common."""
    return tuple(sorted((name, label(value)) for name, value in values.items()))


def draw(varied: Sequence[Varied], seed: int, number: int, known: Sequence[Mapping[str, Any]]) -> Values | None:
    """Returns random settings that are not known. The same seed and number give the same ones. None: there are no more."""
    return _new(known, lambda turn: _drawn(varied, random.Random(f"{seed}/{number}/{turn}")))


def propose(
    varied: Sequence[Varied], sampler: str, seed: int, number: int, results: Sequence[Result], best_is_low: bool
) -> Values | None:
    """Returns what a sampler of optuna proposes after these results, finished or not. None: nothing that is new."""
    optuna = require_optuna(sampler)
    distributions = {each.name: _distribution(optuna, each.space) for each in varied}

    def ask(turn: int) -> Values:
        made = getattr(optuna.samplers, OF_OPTUNA[sampler])(seed=_number(f"{seed}/{number}/{turn}"))
        study = optuna.create_study(direction="minimize" if best_is_low else "maximize", sampler=made)
        for values, value in results:
            state = optuna.trial.TrialState.FAIL if value is None else optuna.trial.TrialState.COMPLETE
            places = {each.name: _place(each.space, values[each.name]) for each in varied}
            study.add_trial(optuna.trial.create_trial(params=places, distributions=distributions, value=value, state=state))
        params = study.ask(distributions).params
        return {each.name: _value(each.space, params[each.name]) for each in varied}

    return _new([values for values, _ in results], ask)


def require_optuna(sampler: str) -> Any:
    """Returns the library. Raises ``UserError`` where it is not installed."""
    try:
        import optuna
    except ImportError as error:
        raise UserError(
            f"--sampler {sampler} is of optuna, which is not installed ({error}): pip install optuna; --sampler random needs"
            " nothing"
        ) from None
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna


def _new(known: Sequence[Mapping[str, Any]], ask: Callable[[int], Values]) -> Values | None:
    """Returns the first answer that is not known."""
    old = {key(values) for values in known}
    answers = map(ask, range(TRIES))
    return next((values for values in answers if key(values) not in old), None)


def _drawn(varied: Sequence[Varied], source: random.Random) -> Values:
    return {each.name: _drawn_from(each.space, source) for each in varied}


def _drawn_from(space: Choices | Range, source: random.Random) -> Any:
    if isinstance(space, Choices):
        return source.choice(space.values)
    if space.log:
        value = math.exp(source.uniform(math.log(space.low), math.log(space.high)))
    else:
        value = source.uniform(space.low, space.high)
    return _rounded(min(max(value, space.low), space.high), space)


def _rounded(value: float, space: Range) -> Any:
    return round(value) if space.whole else float(f"{value:.6g}")


def _distribution(optuna: Any, space: Choices | Range) -> Any:
    if isinstance(space, Choices):
        return optuna.distributions.CategoricalDistribution(tuple(range(len(space.values))))
    if space.whole:
        return optuna.distributions.IntDistribution(int(space.low), int(space.high), log=space.log)
    return optuna.distributions.FloatDistribution(space.low, space.high, log=space.log)


def _place(space: Choices | Range, value: Any) -> Any:
    if isinstance(space, Choices):
        return [label(each) for each in space.values].index(label(value))
    return value


def _value(space: Choices | Range, place: Any) -> Any:
    return space.values[place] if isinstance(space, Choices) else _rounded(place, space)


def _number(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big")
