"""The different answers of a group, in an order that depends on what they are and on the seed alone."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from rlhf_host import Trajectory
from rlhf_plugin_llm_judge.texts import common_beginning, conversation, mark_of, turns


@dataclass(frozen=True, slots=True)
class Answers:
    """Answers of one role to one task."""

    prompt: str
    before: str
    """First turns that all of them have."""
    texts: list[str]
    """What each answer has behind these, each text once."""
    places: list[list[int]]
    """For each text, where the answers with it are in the group."""
    rng: random.Random
    """The same for the same answers, in whatever order they came."""


def answers_by_role(trajectories: Sequence[Trajectory], answer: str, seed: int) -> list[Answers]:
    """Returns the answers of each role: only these are compared with one another."""
    roles = dict.fromkeys(trajectory.role for trajectory in trajectories)
    return [_answers(trajectories, role, answer, seed) for role in roles]


def _answers(trajectories: Sequence[Trajectory], role: str, answer: str, seed: int) -> Answers:
    places: dict[tuple[str, ...], list[int]] = {}
    for place, trajectory in enumerate(trajectories):
        if trajectory.role == role:
            places.setdefault(turns(trajectory, answer), []).append(place)
    prompt = conversation(next(trajectory.task for trajectory in trajectories if trajectory.role == role))
    distinct = sorted(places)
    shared = common_beginning(distinct) if len(distinct) > 1 else 0
    whole = mark_of(prompt, *("\1".join(parts) for parts in distinct))
    rng = random.Random(f"{seed} {whole}")
    rng.shuffle(distinct)
    texts = ["\n\n".join(parts[shared:]) for parts in distinct]
    before = "\n\n".join(distinct[0][:shared])
    return Answers(prompt, before, texts, [places[parts] for parts in distinct], rng)
