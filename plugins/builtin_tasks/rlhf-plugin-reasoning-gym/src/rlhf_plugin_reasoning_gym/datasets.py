"""Data sets by name, made once for all their items."""

from __future__ import annotations

import json
import warnings
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
    import difflib

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)  # of cellpylib, which reasoning_gym imports
        import reasoning_gym
        from reasoning_gym.factory import DATASETS

    if name not in DATASETS:
        near = difflib.get_close_matches(name, DATASETS, 3)
        hint = f"; did you mean {' or '.join(near)}?" if near else f"; there are {', '.join(sorted(DATASETS))}"
        raise UserError(f"reasoning_gym has no data set {name!r}{hint}")
    try:
        return reasoning_gym.create_dataset(name, seed=seed, size=size, **json.loads(config))
    except (TypeError, AssertionError, ValueError) as error:
        raise UserError(f"reasoning_gym: {name} cannot be made with {config}: {error}") from error
