"""Short runs that show whether a plugin's policy learns: a tiny random model on made tasks, sampled before and after."""

from __future__ import annotations

import math
import random
import statistics
import string
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import rlhf_host
from rlhf_authoring.contracts.session import running
from rlhf_authoring.contracts.subject import Subject
from rlhf_authoring.models import write_tiny_model
from rlhf_host import Advantages, AlgoNeeds, Batch, Experience, LossTerm, Outputs, RoleNeed, UserError, hookimpl

WANTED = {"digits": string.digits, "a to j": "abcdefghij"}
"""Tasks of algorithms: each pays for the share of these characters, a sixth by chance. What moves without the reward cannot rise in
both."""
OTHERS = "klmnopqrstuvwxyz"
"""Characters of rejected rows."""
STEPS, BATCH, TOKENS, LR = 16, 8, 4, 2e-2
SAMPLED = 256
"""Answers that are judged before and after."""
ERRORS = 5.0
"""A rise is as large as so many standard errors of the two means' difference."""


class NotShown(Exception):
    """The test does not apply, or cannot be made here; the message says why."""


@dataclass(frozen=True, slots=True)
class Learned:
    """One run's mean rewards."""

    task: str
    steps: int
    before: float
    after: float
    standard_error: float
    """Standard error of ``after - before``."""

    @property
    def rises(self) -> bool:
        return self.after - self.before > ERRORS * self.standard_error


@dataclass(frozen=True, slots=True)
class Made:
    """One made task, and the settings of a run on it."""

    task: str
    prompts: list[dict[str, Any]]
    """Rows that are answered before and after."""
    judges: dict[str, Any]
    """Rewards and agent, as ``rlhf_host.session`` and ``train`` take them."""
    training: dict[str, Any]
    """All other arguments of ``train``."""
    steps: int = STEPS
    rows: list[dict[str, Any]] | None = field(default=None)
    """Rows that are trained on; default: the prompts, with answers that are judged."""


class Learner:
    """``-(r - mean of the group)·log π``: what rewards and agents are tried with."""

    @hookimpl
    def needs(self) -> AlgoNeeds:
        return AlgoNeeds(data="prompts", roles=(RoleNeed("actor", trainable=True, source=None),), min_group_size=2)

    @hookimpl
    def compute_advantages(self, experience: Experience) -> Advantages:
        from rlhf_host import functional as F

        values = F.group_normalize(experience.rewards, experience.group_id, experience.episode_id, std="none")
        return Advantages(F.on_actions(values, experience.action_mask))

    @hookimpl
    def compute_loss(self, outputs: Outputs, batch: Batch) -> Iterator[LossTerm]:
        assert outputs.logprobs is not None
        assert batch.advantages is not None
        yield LossTerm("policy", -batch.advantages * outputs.logprobs)


def learn(subject: Subject) -> Iterator[Learned]:
    """Trains in runs of a few seconds, and yields their figures.

    Raises:
        NotShown: it does not apply to this plugin, or cannot be made here.
        RunError: a run failed.
    """
    kinds = {"algo": _of_algorithm, "reward": _of_reward, "agent": _of_agent}
    if subject.kind not in kinds:
        raise NotShown(f"does not apply to the kind {subject.kind}")
    with tempfile.TemporaryDirectory(prefix="rlhf-learning-") as folder:
        model = write_tiny_model(Path(folder, "model"), hidden=16, layers=1)
        for number, made in enumerate(kinds[subject.kind](subject)):
            try:
                yield _learn(made, model, Path(folder, f"run-{number}"))
            except UserError as error:
                raise NotShown(f"the made run is refused: {error}") from error


def _learn(made: Made, model: Path, run_dir: Path) -> Learned:
    """Sample, train, sample again."""
    before = _judged(made, model)
    if max(before) == min(before):
        raise NotShown(f"all {len(before)} answers to the made task have the reward {before[0]:g}")
    sampling = {**made.judges, "n": SAMPLED // BATCH // len(made.prompts), "max_new_tokens": TOKENS}
    run = rlhf_host.train(
        data=made.rows or made.prompts,
        batch_size=BATCH if made.rows else len(made.prompts),
        lr=LR,
        steps=made.steps,
        model=model,
        run_dir=run_dir,
        kernels="none",
        train={"threads": 1},
        trajectories={"every": 0},
        **({} if made.rows else sampling),
        **made.training,
    )
    after = _judged(made, run.model)
    error = math.sqrt(sum(statistics.variance(values) / len(values) for values in (before, after)))
    return Learned(made.task, made.steps, statistics.fmean(before), statistics.fmean(after), error)


def _judged(made: Made, model: Path) -> list[float]:
    """Rewards of ``SAMPLED`` answers."""
    count = len(made.prompts)
    with rlhf_host.session(
        model=model, data=made.prompts, n=SAMPLED // count, max_new_tokens=TOKENS, seed=1, kernels="none", **made.judges
    ) as running:
        rows = running.sample(1, count).trajectories_in_order()
    values = [row.reward for row in rows if row.reward is not None]
    if len(values) < len(rows) / 2:
        raise NotShown(f"{len(rows) - len(values)} of {len(rows)} answers to the made task have no reward")
    return values


def _chosen(subject: Subject) -> dict[str, Any]:
    return {"name": f"{subject.info.distribution}:{subject.info.name}", **subject.options}


def _prompts() -> list[dict[str, Any]]:
    return [{"prompt": f"{letter}:", "label": "any"} for letter in "abcdefgh"]


def _share(wanted: str) -> dict[str, Callable[..., float]]:
    """A reward: the share of ``wanted`` characters among the sampled tokens."""

    def share(text: str, trajectory: Any) -> float:
        return sum(character in wanted for character in text) / max(1, trajectory.action_length)

    return {"share": share}


def _of_algorithm(subject: Subject) -> Iterator[Made]:
    roles = {role.name: role for role in subject.needs.roles}
    if "actor" in roles and roles["actor"].head != "lm":
        raise NotShown("does not apply to algorithms that train scores: nothing is sampled from their model")
    training: dict[str, Any] = {"algo": _chosen(subject)}
    if "critic" in roles:
        training["critic"] = {"lr": LR}
    for task, wanted in WANTED.items():
        rows = _rows(str(subject.needs.data), wanted) if subject.offline else None
        yield Made(task, _prompts(), {"rewards": _share(wanted)}, training, rows=rows)


def _rows(data: str, wanted: str) -> list[dict[str, Any]]:
    """Rows of the format ``data`` whose good completions are of wanted characters. Raises ``NotShown`` for other formats."""
    draw = random.Random(0)

    def text(characters: str) -> str:
        return "".join(draw.choices(characters, k=TOKENS))

    rows: list[dict[str, Any]] = []
    for number in range(64):
        prompt, good = f"{'abcdefgh'[number % 8]}:", number % 16 < 8
        if data == "prompt_completion":
            rows.append({"prompt": prompt, "completion": text(wanted)})
        elif data == "preference":
            rows.append({"prompt": prompt, "chosen": text(wanted), "rejected": text(OTHERS)})
        elif data == "triple":
            rows.append({"prompt": prompt, "chosen": text(wanted), "rejected": text(OTHERS), "reference": text(wanted)})
        elif data == "unpaired":
            rows.append({"prompt": prompt, "completion": text(wanted if good else OTHERS), "label": good})
        elif data == "rated":
            rows.append({"prompt": prompt, "completion": text(wanted if good else OTHERS), "reward": float(good)})
        else:
            raise NotShown(f"does not apply to algorithms that train on {data} rows")
    return rows


def _of_reward(subject: Subject) -> Iterator[Made]:
    prompts = [{"prompt": prompt, "label": "4"} for prompt in ("2+2=", "1+3=", "5-1=", "8-4=")]
    yield Made("answers that are 4", prompts, {"rewards": {"certified": _chosen(subject)}}, {"algo": Learner}, 3 * STEPS)


def _of_agent(subject: Subject) -> Iterator[Made]:
    with running(subject) as session:
        rows = [row for episode in session.play() for row in episode]
    own = any(reward is not None for row in rows for reward in row.agent_rewards)
    judges = {"agent": _chosen(subject)} if own else {"agent": _chosen(subject), "rewards": _share(string.digits)}
    yield Made("the agent's own rewards" if own else "digits", _prompts(), judges, {"algo": Learner})
