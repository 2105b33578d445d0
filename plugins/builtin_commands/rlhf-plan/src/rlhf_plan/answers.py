"""Lengths of answers, which decide the time of a run, and which nobody knows before some are sampled."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rlhf_host import RunDirectory, UserError
from rlhf_plan.spans import Span


@dataclass(frozen=True, slots=True)
class Lengths:
    """Tokens of answers."""

    mean: Span
    """Mean over a step's answers."""
    longest: float
    """Length of the longest answer of a step, to which decoding goes on."""
    source: str
    """Origin of the lengths, for people."""


def of_limits(most: int) -> Lengths:
    """Returns the range of answers of which nothing is known but their limit."""
    return Lengths(
        Span(1, (1 + most) / 2, most),
        most,
        f"answers of 1 to {most} tokens (rollout.max-new-tokens), which nothing narrows: --answers RUN or FILE,"
        " or --measure-answers, takes lengths that were sampled",
    )


def of_path(path: Path, most: int) -> Lengths:
    """Returns the lengths of the answers in a file of trajectories, or those of a run.

    Raises:
        UserError: it has no answers.
    """
    if path.is_file():
        return of_numbers([float(length) for length in _in_file(path)], most, f"{path}")
    run = RunDirectory(path)
    means, longest = (run.curves.get(name, ([], []))[1] for name in ("length/mean", "length/max"))
    if not means or not longest:
        raise UserError(f"--answers {path}: the run has sampled no answers")
    low, high = min(means), max(means)
    span = Span(low, statistics.fmean(means), high)
    return _limited(span, max(longest), most, f"the {len(means)} steps of {path}")


def of_numbers(lengths: Sequence[float], most: int, source: str) -> Lengths:
    """Returns the range of the mean of answers with these lengths: two standard errors either way."""
    if not lengths:
        raise UserError(f"--answers {source}: it has no answers")
    mean = statistics.fmean(lengths)
    error = 2 * statistics.stdev(lengths) / math.sqrt(len(lengths)) if len(lengths) > 1 else mean
    return _limited(Span(max(1.0, mean - error), mean, mean + error), max(lengths), most, f"{len(lengths)} answers of {source}")


def _limited(mean: Span, longest: float, most: int, source: str) -> Lengths:
    low, middle, high = (min(float(most), value) for value in (mean.low, mean.middle, mean.high))
    span = Span(low, middle, high)
    told = f"answers of {low:.3g} to {high:.3g} tokens at the mean, the longest {min(longest, most):.0f}, by {source}"
    return Lengths(span, min(longest, most), told + "; they may become longer or shorter while the model trains")


def _in_file(path: Path) -> list[int]:
    found = []
    for number, line in enumerate(path.read_text("utf-8").splitlines(), 1):
        try:
            row = json.loads(line)
            found.append(int(row["length"]))
        except (ValueError, KeyError, TypeError):
            raise UserError(
                f"--answers {path}:{number}: no trajectory with a length: give a file of rlhf rollout, or a run"
            ) from None
    return found
