"""Recordings of one step from all processes, put together: the timeline, and a record for people and commands."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rlhf_profile.timeline import STEP, Process, Work, phases, shares, step_of, trace

APART_NS = 1_000_000
"""Pieces of sampling that are nearer to each other are shown as one: vLLM samples token by token."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One process: its name, who it said it is, how far its clock is ahead and how exactly that is known, what it recorded."""

    name: str
    look: dict[str, Any]
    clock: tuple[int, int]
    result: dict[str, Any]

    @property
    def process(self) -> Process:
        ahead, uncertainty = self.clock
        work = [
            Work(number, thread, name, began - ahead, ended - ahead, unfinished)
            for number, thread, name, began, ended, unfinished in self.result["spans"]
        ]
        return Process(self.name, self.look["host"], self.look["pid"], merged(work), ahead, uncertainty)


def merged(work: Sequence[Work]) -> list[Work]:
    """Returns the work with neighbouring pieces of sampling as one piece."""
    last: dict[int, int] = {}
    found: list[Work] = []
    for own in sorted(work, key=lambda each: each.began):
        if own.name != "generate":
            found.append(own)
            continue
        place = last.get(own.number)
        if place is not None and own.began - found[place].ended < APART_NS:
            found[place] = found[place]._replace(ended=max(own.ended, found[place].ended))
        else:
            last[own.number] = len(found)
            found.append(own)
    return found


def joined(step: int, answers: Sequence[Answer], seconds: float | None) -> tuple[dict[str, Any], dict[str, Any], list[str]]:
    """Returns timeline, record and notes of a step.

    Args:
        answers: the controller first.
        seconds: ``time/step`` of the run's metrics; ``None``: the step did not end.
    """
    processes = [answer.process for answer in answers]
    whole = step_of(processes[0])
    first = answers[0].result
    began, ended = whole or (first["began"], first["ended"])
    inside = phases(processes[0]) if whole else []
    waiting = sum(own for _, own in inside)
    record = {
        "step": step,
        "seconds": (ended - began) / 1e9,
        "time/step": seconds,
        "phases": [{"name": name, "seconds": own} for name, own in inside],
        "covered": waiting / ((ended - began) / 1e9) if inside else None,
        "processes": [
            {
                "name": answer.name,
                "host": answer.look["host"],
                "pid": answer.look["pid"],
                "clock_us": [value / 1e3 for value in answer.clock],
                "seconds": share.seconds,
                "files": [{"name": name, "bytes": size} for name, size in answer.result["files"]],
                "operations": answer.result["operations"],
                "notes": answer.result["notes"],
            }
            for answer, share in zip(answers, shares(processes, began, ended), strict=True)
        ],
    }
    notes: dict[str, list[str]] = defaultdict(list)
    for answer in answers:
        for note in answer.result["notes"]:
            notes[note].append(answer.name)
    # It shows all from the end of one step to that of the next: what follows a step, such as a checkpoint, is in the next file.
    last = max(first["ended"], ended)
    start = min(began, first["began"])
    about = {"step": step, "shown": f"from the end of the step before to that of step {step}; {STEP} is the step itself"}
    return trace(processes, start, last, about), record, [f"{', '.join(who)}: {note}" for note, who in notes.items()]
