"""Figures for people: with their 95 % interval, and with the episodes that failed or nobody could judge."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any


def figure(row: Mapping[str, Any], name: str, form: str = ".4g") -> str:
    """Returns ``0.633 ± 0.024 (95 %)``: a metric with half its 95 % interval, which is 1.96 standard errors over tasks.
    None is written where there is no error, as of one task, or of tasks that are all the same.
    """
    error = row.get(f"{name.removesuffix('/mean')}/stderr")
    return f"{row[name]:{form}}" + (f" ± {1.96 * error:.2g} (95 %)" if error else "")


def failed_share(row: Mapping[str, Any], name: str) -> float:
    """Returns the share of the episodes behind a metric that failed."""
    if name.startswith("eval/"):
        return float(row.get(f"{_set(row, name)}/failed/share") or 0.0)
    failed, *others = (row.get(f"rollout/{how}") or 0.0 for how in ("failed", "finished", "truncated"))
    return float(failed / (failed + sum(others))) if failed else 0.0


def _set(row: Mapping[str, Any], name: str) -> str:
    """Returns the beginning of a metric's name that says of which evaluated tasks it is: ``eval``, or ``eval/SOURCE``."""
    return next((each for each in map(str, PurePosixPath(name).parents) if f"{each}/failed/share" in row), "eval")


def beside(row: Mapping[str, Any], name: str) -> str:
    """Returns what must be read beside a metric, empty for nothing: how many episodes failed, and its range where answers are
    unjudged.
    """
    share, stem, tasks = failed_share(row, name), name.removesuffix("/mean"), _set(row, name)
    counted = "count as wrong" if name.startswith((f"{tasks}/pass@", f"{tasks}/score/")) else "are left out"
    parts = [f"{100 * share:.3g} % of the episodes failed and {counted}"] if share else []
    if f"{stem}/low" in row:
        parts.append(f"{row[f'{stem}/low']:.3g} to {row[f'{stem}/high']:.3g} with unjudged answers as wrong or right")
    elif unjudged := row.get(f"{tasks}/unjudged" if name.startswith("eval/") else "rollout/unjudged"):
        parts.append(f"{unjudged:.0f} unjudged answers are left out")
    return "; ".join(parts)
