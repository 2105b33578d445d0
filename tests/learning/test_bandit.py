"""Every algorithm and every policy loss climbs a task with a known optimum, and sinks when its sign is wrong.

A tiny random model is paid for the share of digits among four tokens: a fifth by chance, all of it at best. Each run is a real
one, from the task to the optimizer, in about a second; two passes over each batch take the ratio away from 1.
"""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from rlhf_authoring.models import write_tiny_model

from rlhf_host import LossTerm, Needs, RunError, hookimpl
from rlhf_host import functional as F
from rlhf_host.config.resolve import resolve
from rlhf_host.config.schema import (
    CheckpointConfig,
    DataConfig,
    DataSource,
    PluginChoice,
    RoleConfig,
    RolloutConfig,
    RunConfig,
    TrainConfig,
)
from rlhf_host.plugins.discovery import discover
from rlhf_host.plugins.manager import Loaded, PluginManager
from rlhf_host.plugins.selection import build, find, load
from rlhf_host.training.run import train

STEPS = 16
FEW = ("a2po",)
"""One of a prompt's answers is the policy's, too few for these means; benchmarks/preferences.py shows that it learns."""


def online_algorithms() -> dict[str, Needs]:
    """All that are installed, learn from prompts and rewards and need no option."""
    found = {info.name: build(info, {}).needs() for info in discover() if info.kind == "algo" and info.status == "ok"}
    learning = {name: needs for name, needs in sorted(found.items()) if needs.data == "prompts" and needs.rewards}
    # The policy as its own teacher learns from texts of its own, which say nothing here.
    return {
        name: needs for name, needs in learning.items() if name not in FEW and not any(role.follows for role in needs.roles)
    }


ALGORITHMS = online_algorithms()
CRITICS = [name for name, needs in ALGORITHMS.items() if any(role.trainable and role.name == "critic" for role in needs.roles)]
CHOOSING = [name for name in ALGORITHMS if hasattr(load(find("algo", name)), "make_rows")]
AGENTS = {info.name for info in discover() if info.kind == "agent"}
"""One with an algorithm's name plays its episodes."""
OPTIONS = {"nash_md": {"beta": "0"}}
"""Its default keeps the policy near the reference, whose answers are a fifth digits."""
AGAINST_REFERENCE = ("xpo",)
"""Half of their answers are the reference's, so half of the mean stays what it is in the first step."""
LOSSES = sorted(F.policy_losses)


class Digits:
    """Pays for the share of digits among the sampled tokens, and keeps each step's metrics."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []

    @hookimpl
    def score(self, trajectories):
        return [sum(map(str.isdigit, row.text)) / row.action_length for row in trajectories]

    @hookimpl
    def log_metrics(self, metrics):
        self.steps.append(dict(metrics))


class Negated:
    """The mistake that must not go unnoticed."""

    @hookimpl(wrapper=True)
    def compute_advantages(self):
        (found,) = yield
        return [replace(found, advantages=-found.advantages)]


class NegatedRewards:
    """The same mistake where rows are chosen by their reward: the worst are."""

    @hookimpl
    def transform_rewards(self, rewards):
        return -rewards


class NegatedCritic:
    """The same mistake in a critic's loss."""

    @hookimpl(wrapper=True)
    def compute_loss(self, role):
        (items,) = yield
        if role != "critic":
            return [items]
        return [[replace(item, coefficient=-item.coefficient) if isinstance(item, LossTerm) else item for item in items]]


@pytest.fixture(scope="module")
def bandit(tmp_path_factory):
    """Train; gives the mean reward, or another metric, of every step."""
    root = tmp_path_factory.mktemp("bandit")
    model = write_tiny_model(root / "model", hidden=16, layers=1)
    tasks = root / "tasks.jsonl"
    tasks.write_text("".join(json.dumps({"prompt": f"{letter}:", "label": "any"}) + "\n" for letter in "abcdefgh"))

    def run(algorithm: str, *hooks: object, metric: str = "reward/mean", **options: str) -> list[float]:
        config = RunConfig(
            run_dir=str(root / f"run-{len(list(root.iterdir()))}"),
            algo=PluginChoice(name=algorithm, **OPTIONS.get(algorithm, {}) | options),
            agent=PluginChoice(name=algorithm if algorithm in AGENTS else "single_turn"),
            roles={"actor": RoleConfig(model=str(model), lr=2e-2), "critic": RoleConfig(lr=2e-2)},
            data=DataConfig(sources=[DataSource(path=str(tasks))]),
            rollout=RolloutConfig(n=8, max_new_tokens=4),
            train=TrainConfig(steps=STEPS, batch_size=8, epochs=2, threads=1),
            checkpoint=CheckpointConfig(final=False),
            tracker={},
        )
        resolved, digits = resolve(config), Digits()
        own = resolved.plugins().loaded
        kinds = [("reward", digits), *(("extension", hook) for hook in hooks)]
        added = [Loaded(kind, type(hook).__name__, own[0].info, hook) for kind, hook in kinds]
        try:
            assert train(resolved.config, PluginManager([*own, *added])).step == STEPS
        except RunError as error:  # solved, or given up for good: no two answers differ any more
            if "equal_rewards" not in str(error):
                raise
        values = [metrics[metric] for metrics in digits.steps]
        return [2 * value - values[0] for value in values] if algorithm in AGAINST_REFERENCE else values

    return run


def climbs(means: list[float]) -> bool:
    """From chance to near the optimum of 1."""
    return means[0] < 0.25 and sum(means[-3:]) / 3 > 0.85


def sinks(means: list[float]) -> bool:
    """Prompts whose answers all get 0 are drawn again where rows are chosen, so there the mean stays above 0."""
    return sum(means[-3:]) / 3 < means[0] / 2


def test_the_installed_algorithms_are_found():
    assert "rloo" in ALGORITHMS


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_algorithm_climbs(bandit, algorithm):
    means = bandit(algorithm)
    assert climbs(means), means


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_with_negated_advantages_every_algorithm_sinks(bandit, algorithm):
    means = bandit(algorithm, NegatedRewards() if algorithm in CHOOSING else Negated(), metric="reward/Digits")
    assert sinks(means), means


@pytest.mark.parametrize("loss", LOSSES)
def test_every_policy_loss_climbs(bandit, loss):
    means = bandit("rloo", loss=loss)
    assert climbs(means), means


@pytest.mark.parametrize("loss", LOSSES)
def test_with_negated_advantages_every_policy_loss_sinks(bandit, loss):
    means = bandit("rloo", Negated(), loss=loss)
    assert sinks(means), means


@pytest.mark.parametrize("algorithm", CRITICS)
def test_every_critic_comes_to_know_the_reward_unless_its_loss_is_negated(bandit, algorithm):
    right = bandit(algorithm, metric="critic/loss")
    assert abs(right[-1]) < right[0] / 4, right
    wrong = bandit(algorithm, NegatedCritic(), metric="critic/loss")
    assert abs(wrong[-1]) > abs(wrong[0]), wrong
