"""The matrix of combinations: algorithm × extensions × data × schedule × temperature × model × options, in pairs.

``python -m tests.combinations.matrix`` runs it and prints its table. A new package is in it, because names are those of what is
installed.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

from .kinds import DATA, PLAIN, SCHEDULES, Files, changes, names
from .one_run import SAMPLER, TEMPERATURES, Case, Found, Runs

BASES = 3
"""Algorithms with which a value is paired with others."""
FIELDS = ("algo", "algo_option", "extension", "extension_option", "second", "data", "schedule", "temperature", "model")
"""Dimensions, in order."""
FIRST = ("algo", "extension", "data", "schedule", "model")
"""Dimensions whose values have a test each, which pairs the value with those of all later dimensions."""

HELPED, HELPS = ("extension", "second"), ("extension_option", "algo_option", "schedule")
"""Dimensions whose values may be admitted with another option or schedule only, and the dimensions of those."""


def values(dimension: str, case: Case | None = None) -> Sequence[Any]:
    """Values of a dimension; those of options are of the case's plugin."""
    if dimension == "algo_option":
        return [None, *(changes("algo", case.algo) if case else ())]
    if dimension == "extension_option":
        return [None, *(changes("extension", case.extension) if case and case.extension else ())]
    extensions = [PLAIN, *names("extension")]
    fixed: dict[str, Sequence[Any]] = {
        "algo": names("algo"),
        "extension": extensions,
        "second": extensions,
        "data": list(DATA),
        "schedule": list(SCHEDULES),
        "temperature": TEMPERATURES,
        "model": (PLAIN, "adapter", "16 bits"),
    }
    return fixed[dimension]


def topics() -> list[tuple[str, Any]]:
    """Every dimension of ``FIRST`` with each of its values."""
    return [(dimension, value) for dimension in FIRST for value in values(dimension) if value != PLAIN]


class Matrix:
    def __init__(self, files: Files, seed: int = 0):
        self.runs, self.seed = Runs(files), seed
        self.runs.save_rollouts()
        self._found: dict[Case, Found] = {}
        self._homes: dict[str, str | None] = {}
        self._helps: dict[tuple[str, Any], Mapping[str, Any]] = {}

    def try_(self, case: Case) -> Found:
        if case not in self._found:
            self._found[case] = found = self.runs(case)
            if found.outcome == "wrong":
                print(f"wrong: {case}: {found.reasons}", file=sys.stderr, flush=True)
        return self._found[case]

    @property
    def found(self) -> list[Found]:
        return list(self._found.values())

    def home(self, algo: str) -> str | None:
        """Returns the first kind of data that the algorithm, as it comes, trains on."""
        if algo not in self._homes:
            self._homes[algo] = next((data for data in DATA if self.try_(Case(algo, data=data)).outcome != "refused"), None)
        return self._homes[algo]

    def cover(self, dimension: str, value: Any) -> list[Found]:
        """Runs cases in which ``value`` meets every value of every later dimension; those that are refused are tried alone.

        An option of an algorithm that changes its roles is another algorithm, which meets every extension.
        """
        before, chance = set(self._found), random.Random(f"{self.seed} {dimension} {value}")
        bases = list(itertools.islice(self._bases(dimension, value, chance), BASES))
        if bases:
            later = FIELDS[FIELDS.index(dimension) + 1 :]
            self._meet(bases, [name for name in later if (dimension, name) != ("algo", "second")], chance)
        for base in bases if dimension == "algo" else ():
            for option in self._other_roles(base):
                if self._admitted(base, {"algo_option": option}):
                    self._meet([replace(base, algo_option=option)], ("extension", "schedule"), chance)
        return [found for case, found in self._found.items() if case not in before]

    def _meet(self, bases: Sequence[Case], dimensions: Sequence[str], chance: random.Random) -> None:
        left = {name: [each for each in values(name, bases[0]) if each not in (PLAIN, None)] for name in dimensions}
        for waiting in left.values():
            chance.shuffle(waiting)
        for base in itertools.cycle(bases):
            picked = {name: waiting[-1] for name, waiting in left.items() if waiting}
            if not picked:
                break
            if not self._admitted(base, picked | self._option(picked, chance)):
                picked = dict([next(iter(picked.items()))])
                helped = picked | self._help(*next(iter(picked.items())))
                any(self._admitted(other, changed) for other in bases for changed in (picked, helped))
            for name in picked:
                left[name].pop()

    def _option(self, picked: Mapping[str, Any], chance: random.Random) -> dict[str, Any]:
        """Returns an option for a picked extension: one with words, or none."""
        words = changes("extension", picked["extension"], words=True) if "extension" in picked else ()
        name = chance.choice([None, *dict(words)])
        return {"extension_option": chance.choice([each for each in words if each[0] == name])} if name else {}

    def _other_roles(self, base: Case) -> list[Any]:
        roles = {option: self.runs.roles(replace(base, algo_option=option)) for option in values("algo_option", base)}
        return [option for option, own in roles.items() if own not in (None, roles[None])]

    def _admitted(self, base: Case, changed: Mapping[str, Any]) -> bool:
        return self.try_(replace(base, **changed)).outcome != "refused"

    def _bases(self, dimension: str, value: Any, chance: random.Random) -> Iterator[Case]:
        """Yields cases with the value and what it needs, each of another algorithm, that are admitted."""
        algorithms = [value] if dimension == "algo" else chance.sample(values("algo"), len(values("algo")))
        changed = {dimension: value} | self._help(dimension, value)
        for algo in algorithms:
            if (home := self.home(algo)) is not None:
                base = replace(Case(algo, data=home), **{**changed, "algo": algo})
                if self.try_(base).outcome != "refused":
                    yield base

    def _help(self, dimension: str, value: Any) -> Mapping[str, Any]:
        """Returns a change without which the value is refused: an option, or another schedule."""
        if (dimension, value) not in self._helps:
            self._helps[dimension, value] = next(self._helpful(dimension, value), {})
        return self._helps[dimension, value]

    def _helpful(self, dimension: str, value: Any) -> Iterator[Mapping[str, Any]]:
        if dimension not in HELPED:
            return
        base = replace(Case(SAMPLER), **{dimension: value})
        tried = ({name: each} for name in HELPS for each in values(name, base))
        yield from (changed for changed in ({}, *tried) if self._admitted(base, changed))

    def sample(self, count: int) -> list[Found]:
        """Runs this many algorithms, chosen by the seed: as they come, and with three changes that the start admits."""
        chance = random.Random(self.seed)
        for algo in chance.sample(values("algo"), min(count, len(values("algo")))):
            base = Case(algo, data=self.home(algo) or "tasks")
            for _ in range(20):
                changed = {name: chance.choice(values(name, base)) for name in chance.sample(FIELDS[1:], 3)}
                if any(value not in (PLAIN, None) for value in changed.values()) and self._admitted(base, changed):
                    break
        return self.found


def table(found: Sequence[Found]) -> str:
    """Returns the counts of outcomes by algorithm, the reasons of refusals, and what went wrong."""
    rows = [f"{'algorithm':24}{'cases':>8}{'refused':>9}{'run':>7}{'wrong':>7}"]
    for algo in (*names("algo"), None):
        own = [one for one in found if algo in (None, one.case.algo)]
        counts = Counter(one.outcome for one in own)
        rows.append(f"{algo or 'all':24}{len(own):8}{counts['refused']:9}{counts['run']:7}{counts['wrong']:7}")
    reasons = Counter(_kind(one) for one in found if one.outcome == "refused")
    rows += ["", "refused, by the first reason:", *(f"{count:6}  {reason}" for reason, count in reasons.most_common())]
    wrong = [one for one in found if one.outcome == "wrong"]
    rows += ["", "wrong:" if wrong else "wrong: 0", *(f"  {one.case}\n    " + "\n    ".join(one.reasons[:5]) for one in wrong)]
    return "\n".join(rows)


def _kind(found: Found) -> str:
    """Returns the first reason, without the names of this case."""
    reason = found.reasons[0]
    for name in sorted({*names("algo"), *names("extension"), *DATA}, key=len, reverse=True):
        reason = " ".join(
            "…" if word.strip("'\":,;()") in (name, f"algo:{name}", f"extension:{name}") else word for word in reason.split(" ")
        )
    return reason[:150]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", action="append", default=[], help="a value, such as ppo; repeatable")
    parser.add_argument("--sample", type=int, default=0, help="in place of pairs: this many algorithms")
    asked = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        matrix = Matrix(Files.make(Path(folder)), asked.seed)
        if asked.sample:
            matrix.sample(asked.sample)
        for dimension, value in topics() if not asked.sample else ():
            if not asked.only or str(value) in asked.only:
                new = Counter(one.outcome for one in matrix.cover(dimension, value))
                print(f"{time.monotonic() - began:6.0f} s  {dimension} {value}: {dict(new)}", file=sys.stderr, flush=True)
        print(table(matrix.found))
        return int(any(one.outcome == "wrong" for one in matrix.found))


if __name__ == "__main__":
    sys.exit(main())
