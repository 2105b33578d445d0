"""Data sets by name, made once for all their items."""

from __future__ import annotations

import json
import warnings
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

from rlhf_host import UserError


@lru_cache(maxsize=256)
def made(name: str, seed: int, size: int, config: str) -> Any:
    """Returns the data set.

    Args:
        config: its settings as JSON.

    Raises:
        UserError: there is no such data set, or it has no such setting.
    """
    reasoning_gym = library(name)
    try:
        return reasoning_gym.create_dataset(name, seed=seed, size=size, **json.loads(config))
    except (TypeError, AssertionError, ValueError) as error:
        raise UserError(f"reasoning_gym: {name} cannot be made with {config}: {error}") from error


def library(name: str) -> Any:
    """Returns reasoning_gym. Raises ``UserError`` if it has no data set of that name."""
    import difflib

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)  # of cellpylib, which reasoning_gym imports
        import reasoning_gym
        from reasoning_gym.factory import DATASETS

    if name not in DATASETS:
        near = difflib.get_close_matches(name, DATASETS, 3)
        hint = f"; did you mean {' or '.join(near)}?" if near else f"; there are {', '.join(sorted(DATASETS))}"
        raise UserError(f"reasoning_gym has no data set {name!r}{hint}")
    return reasoning_gym


@dataclass(frozen=True, slots=True)
class Curriculum:
    """The levels of a data set: every attribute that has the level takes it, the others their last."""

    name: str
    top: int
    """The last level."""

    def config(self, level: int) -> dict[str, Any]:
        """Returns the data set's settings at a level, as JSON has them."""
        curriculum = library(self.name).factory.create_curriculum(self.name)
        curriculum.set_global_level(level)
        settings = asdict(curriculum.generate_configuration())
        settings = {key: value for key, value in settings.items() if key not in ("seed", "size")}
        try:
            return dict(json.loads(json.dumps(settings)))
        except TypeError as error:
            raise UserError(f"reasoning_gym: the settings of {self.name} at level {level} are no JSON: {error}") from error


@lru_cache(maxsize=256)
def curriculum(name: str) -> Curriculum:
    """Returns the data set's curriculum. Raises ``UserError`` if it has none."""
    factory = library(name).factory
    if not factory.has_curriculum(name):
        raise UserError(f"reasoning_gym: {name} has no curriculum, so it has no levels: take --data reasoning_gym for it")
    attributes = factory.create_curriculum(name).attributes.values()
    return Curriculum(name, max(len(attribute.levels) for attribute in attributes) - 1)
