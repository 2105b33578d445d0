"""Choice of the trained weights of a model, by patterns of their names."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from torch import nn

from rlhf_host.errors import UserError, near_matches


def freeze(model: nn.Module, frozen: Sequence[str], only: Sequence[str]) -> None:
    """Freezes weights. A pattern (``fnmatch``) must match whole names; a tied weight has several names.

    Args:
        frozen: weights that are not trained.
        only: weights that are trained; default: all others.

    Raises:
        UserError: a pattern matches no weight, or nothing is left to train.
    """
    names: dict[nn.Parameter, list[str]] = {}
    for name, weight in model.named_parameters(remove_duplicate=False):
        names.setdefault(weight, []).append(name)
    every = [name for own in names.values() for name in own]
    for setting, patterns in (("freeze", frozen), ("train_only", only)):
        for pattern in patterns:
            if not any(fnmatchcase(name, pattern) for name in every):
                near = near_matches(pattern, every) or f"; a name is, for example, {every[0]}"
                raise UserError(f"{setting}: no weight of {type(model).__name__} is called {pattern!r}{near}")
    for weight, own in names.items():
        wanted = not only or _matches(own, only)
        weight.requires_grad_(wanted and not _matches(own, frozen))
    if not any(weight.requires_grad for weight in names):
        raise UserError("freeze and train_only leave no weight to train")


def _matches(names: Sequence[str], patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for name in names for pattern in patterns)
