"""The page of a sweep: the report page of runs with a line for each combination, its mean over seeds, and a band around it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

from rlhf_runs import Shown, document, pack

from rlhf_sweep.results import Results, Row, number
from rlhf_sweep.space import label

MOST = 40
"""Combinations with curves, the best ones."""
POINTS = 400
"""Steps of a curve."""
Curve = tuple[list[int], list[float]]


def page(results: Results) -> str:
    """Returns the page, which loads nothing."""
    rows = [row for row in results.rows if row.names][:MOST]
    heads = [_head(results, row) for row in rows]
    script = files(__package__).joinpath("sweep.js").read_text("utf-8")
    title = f"Sweep {results.folder.path.name}"
    if not heads:
        return document([title], {"head": pack([_empty(results)])}, script)[0]
    heads[0]["sweep"] = _told(results, rows)
    return document([title], {"head": pack(heads)}, script)[0]


def _head(results: Results, row: Row) -> dict[str, Any]:
    runs = [results.runs[name] for name in row.names]
    head = Shown(runs[0], row.told).head()
    curves: dict[str, Curve] = {}
    told = [name for name in head["metrics"] if not name.endswith("/stderr")]  # bands are over seeds, not over samples
    for name in told:
        own = [run.curves[name] for run in runs if name in run.curves]
        mean, error = _over_seeds(own)
        if mean[0]:
            curves[name] = mean
            if error is not None:
                curves[f"{name.removesuffix('/mean')}/stderr"] = error
    seeds = ", ".join(str(run.settings["seed"]) for run in runs)
    return head | {
        "status": f"{len(runs)} of {row.planned} finished",
        "headline": results.by.name if results.by else None,
        "beside": "",
        "note": "",
        "about": {},
        "draws": {},
        "warnings": [f"seed {run.settings['seed']}: {line}" for run in runs for line in (*run.warnings, *run.damage)],
        "settings": head["settings"] | {"seed": {"value": seeds}},
        "curves": curves,
        "metrics": {name: head["metrics"][name] for name in told if name in curves},
        "times": {},
        "places": [],
    }


def _empty(results: Results) -> dict[str, Any]:
    """Returns the head of a page without a finished run."""
    return {"name": "none", "status": "", "step": 0, "steps": 0, "note": "", "what": {}, "headline": None, "beside": ""} | {
        "about": {}, "draws": {}, "warnings": [], "plugins": [], "requirements": "", "settings": {}, "curves": {}, "metrics": {},
        "times": {}, "places": [], "left_out": [], "sweep": _told(results, []),
    }  # fmt: skip


def _over_seeds(curves: Sequence[Curve]) -> tuple[Curve, Curve | None]:
    """Returns the mean at the steps that all have, and its standard error if there are several."""
    maps = [dict(zip(*curve, strict=True)) for curve in curves]
    steps = sorted(set.intersection(*(set(each) for each in maps))) if maps else []
    if len(steps) > POINTS:
        steps = [steps[round(place * (len(steps) - 1) / (POINTS - 1))] for place in range(POINTS)]
    values = [[each[step] for each in maps] for step in steps]
    mean = steps, [_rounded(statistics.fmean(each)) for each in values]
    if len(maps) < 2:
        return mean, None
    return mean, (steps, [_rounded(statistics.stdev(each) / math.sqrt(len(each))) for each in values])


def _rounded(value: float) -> float:
    return float(f"{value:.6g}")


def _told(results: Results, shown: Sequence[Row]) -> dict[str, Any]:
    """Returns the parts of the page above the curves."""
    names = list(dict.fromkeys(name for row in results.rows for name in row.settings))
    return {
        "by": str(results.by) if results.by else "",
        "verdict": results.verdict(),
        "names": names,
        "rows": [
            {
                "cells": [label(row.settings[name]) if name in row.settings else "" for name in names],
                "finished": f"{len(row.values)} of {row.planned}" + (f", {row.failed} failed" if row.failed else ""),
                "mean": number(row),
                "values": ", ".join(f"{value:.4g}" for value in row.values),
                "curve": shown.index(row) if row in shown else None,
            }
            for row in results.rows
        ],
        "effects": [
            [
                each.name,
                f"{each.share:.0%}",
                f"{each.chance:.0%}",
                ", ".join(f"{text}: {mean:.3g}" for text, mean, _ in each.levels),
            ]
            for each in results.effects()
        ],
        "failed": [list(each) for each in results.failed],
        "left": len(results.left),
    }
