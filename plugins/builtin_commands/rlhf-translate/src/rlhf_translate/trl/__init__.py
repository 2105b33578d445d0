"""TRL's options whose value or meaning differs from ours."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from rlhf_translate.elsewhere import key_of
from rlhf_translate.options import Option, Table
from rlhf_translate.shared import LAUNCH
from rlhf_translate.trl import common, rollouts, rows
from rlhf_translate.trl.batch import SAMPLED


def matters(method: str) -> Sequence[str]:
    return [*common.MATTERS, *(rollouts.MATTERS if method in SAMPLED else rows.MATTERS)]


def convert(method: str) -> Table:
    return LAUNCH | common.TABLE | (rollouts.TABLE if method in SAMPLED else rows.TABLE)


def resolved(options: Sequence[Option], defaults: Mapping[str, tuple[str, ...]]) -> list[Option]:
    """Returns ``--no_NAME`` as ``--NAME False``."""
    names = {f"no_{name}": f"--{name}" for name in defaults}
    return [
        replace(option, name=names[key_of(option.name)], values=("False",), shown=option.name)
        if key_of(option.name) in names and not option.values
        else option
        for option in options
    ]
