"""The table of metrics, ``metrics.toml``: the question that each answers, its unit, and a sentence of help."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from typing import Any

from rlhf_host import RunDirectory
from rlhf_runs.used import used_settings

PLOTTED = ("reward/mean", "kl", "entropy", "length/mean", "loss")
"""Metrics to plot besides the headline, of those that there are."""
OTHERS = "What else was measured?"
"""The question of metrics that are not in the table: plugins and data name them."""
_CHOSEN = re.compile(r"[A-Z]+")


@dataclass(frozen=True, slots=True)
class Described:
    """A row of the table.

    Args:
        names: words in capitals stand for anything.
        more: what the docs say besides.
        first: True if it is shown at once, not among "more".
    """

    names: tuple[str, ...]
    question: str
    unit: str
    help: str
    more: str = ""
    first: bool = False

    def means(self, name: str) -> bool:
        """Returns True if this is the row of a metric."""
        return any(re.fullmatch(_CHOSEN.sub(".+", re.escape(each)), name) for each in self.names)


@cache
def table() -> list[Described]:
    """Returns the rows, in the order in which they are shown."""
    questions = tomllib.loads(files(__package__).joinpath("metrics.toml").read_text("utf-8"))["question"]
    return [
        Described(**row | {"names": tuple(row["names"]), "question": question["title"]})
        for question in questions
        for row in question["metric"]
    ]


def described(name: str, roles: Collection[str] = (), plugins: Mapping[str, str] | None = None) -> Described:
    """Returns the row of a metric.

    Args:
        roles: the run's; a metric of another role than the actor begins with the role's name.
        plugins: alias → what it is; metrics of plugins begin with the alias.
    """
    exact = [row for row in table() if name in row.names]
    if found := next(iter([*exact, *(row for row in table() if row.means(name))]), None):
        return found
    first, _, rest = name.partition("/")
    if rest and first in roles:
        inner = described(rest)
        return replace(inner, first=False, help=f"Of the {first}: {_lower(inner.help)}")
    if rest and first == "eval":
        source, _, last = rest.partition("/")
        whole = next((row for row in table() if last and row.means(f"eval/{last}")), None)
        if whole is not None:
            return replace(whole, first=False, help=f"Of the source {source}: {_lower(whole.help)}")
        inner = described(rest, roles, plugins)
        return replace(inner, first=False, help=f"At evaluations: {_lower(inner.help)}")
    whose = (plugins or {}).get(first, "a plugin, or by what the run was given")
    return Described((name,), OTHERS, "", f"Measured by {whose}.")


def described_all(run: RunDirectory) -> dict[str, dict[str, Any]]:
    """Returns question, unit, help and place of each of a run's metrics, in the order of the table."""
    plugins = {str(plugin["alias"]): f"the {plugin['kind']} {plugin['name']}" for plugin in run.plugins}
    order = {row.names: place for place, row in enumerate(table())}
    roles = {name.removesuffix(".lr") for name in used_settings(run) if name.endswith(".lr")}
    rows = {name: described(name, roles, plugins) for name in run.curves}
    names = sorted(rows, key=lambda name: (order.get(rows[name].names, len(order)), name))
    return {
        name: {"question": row.question, "unit": row.unit, "help": row.help, "first": row.first}
        for name, row in ((name, rows[name]) for name in names)
    }


def in_order(names: Iterable[str]) -> list[str]:
    """Returns the names that are shown at once, in the order of the table."""
    known = set(names)
    return [name for row in table() if row.first for name in row.names if name in known]


def _lower(text: str) -> str:
    return text[:1].lower() + text[1:]
