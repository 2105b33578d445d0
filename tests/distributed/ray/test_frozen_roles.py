"""Frozen models that answer beside the policy on Ray, by engines of their own: the same runs as in one process."""

from __future__ import annotations

import json
import os
import signal
import tempfile
import time
from dataclasses import replace

import pytest
from pydantic import BaseModel
from rlhf_authoring.killing import engines
from rlhf_authoring.models import write_tiny_model

import rlhf_host
from rlhf_host import Needs, RoleNeed, hookimpl

pytest.importorskip("ray")

pytestmark = pytest.mark.timeout(900)

DATA = [{"prompt": text} for text in ("17+35=", "38+26=", "4+4=", "41+29=")]
NEAR = ("reward/mean", "grad_norm", "entropy", "agent/calls", "tokens", "loss/policy")


class Game:
    """Policy and opponent continue the prompt; another answer wins. When ``dies_at`` answers are known, all engines are killed."""

    class Options(BaseModel):
        mixes: float | None = None

    def __init__(self, options=None, dies_at=None, directory="", temperature=1.0):
        self.options, self.dies_at, self.directory = options or self.Options(), dies_at, directory
        self.temperature = temperature
        self.said, self.own, self.killed = {}, {}, []

    @hookimpl
    def needs(self):
        return Needs(roles=(RoleNeed("opponent", generates=True, mixes=self.options.mixes),), rewards=False)

    @hookimpl
    async def agent_run(self, episode, policy):
        mine = await policy.generate(episode.task.prompt_ids)
        if self.dies_at == len(self.said):
            self.dies_at, self.killed = None, engines(self.directory)
            for pid in self.killed:
                os.kill(pid, signal.SIGKILL)
        opponent = policy.role("opponent")
        sampling = replace(opponent.sampling, max_new_tokens=3, temperature=self.temperature)
        theirs = await opponent.generate(episode.task.prompt_ids, sampling)
        self.said[episode.episode_id], self.own[episode.episode_id] = theirs, mine
        rows = policy.trajectories()
        rows[0].agent_rewards = [float(list(mine.token_ids)[:1] != list(theirs.token_ids)[:1])]
        return rows


@pytest.fixture
def ray_dir():
    with tempfile.TemporaryDirectory(prefix="rt-", dir="/tmp") as made:
        yield made
        deadline = time.monotonic() + 30
        while engines(made) and time.monotonic() < deadline:
            time.sleep(0.5)
        assert engines(made) == []


def settings(run_dir, ray_dir=None, **more):
    there = {"ray.temp_dir": ray_dir, "ray.num_cpus": 4, "ray.num_gpus": 0, "ray.object_store_mb": 200}
    return {
        "actor.model": "quickstart",
        "actor.lr": 1e-3,
        "rollout.n": 4,
        "rollout.max_new_tokens": 3,
        "train.batch_size": 4,
        "train.steps": 3,
        "train.threads": 1,
        "trajectories.every": 1,
        "run_dir": str(run_dir),
        **({"runtime": "ray", **there} if ray_dir else {}),
        **more,
    }


def metrics(run_dir):
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def gap(there, here):
    """Returns the largest relative difference of a metric that both runs have."""
    assert [row["step"] for row in there] == [row["step"] for row in here] != []
    names = [name for name in NEAR if name in here[0]]
    assert {"reward/mean", "grad_norm", "agent/calls"} <= {*names}
    return max(abs(a[name] - b[name]) / max(abs(b[name]), 1e-3) for a, b in zip(there, here, strict=True) for name in names)


def said(game):
    return {episode: tuple(answer.token_ids) for episode, answer in game.said.items()}


@pytest.mark.parametrize("placement", [[], ["actor=1", "rollout=1", "opponent=2"]], ids=["together", "apart"])
@pytest.mark.parametrize("mixes", [None, 0.25], ids=["frozen", "mixture"])
def test_a_run_on_ray_is_that_of_one_process(tmp_path, ray_dir, mixes, placement):
    here, there = Game(Game.Options(mixes=mixes)), Game(Game.Options(mixes=mixes))
    rlhf_host.train(algo="rloo", agent=here, data=DATA, **settings(tmp_path / "local"))
    rlhf_host.train(algo="rloo", agent=there, data=DATA, **settings(tmp_path / "ray", ray_dir, placement=placement))
    assert len(here.said) == 48
    assert said(there) == said(here)
    for episode, answer in there.said.items():
        assert answer.logprobs == pytest.approx(list(here.said[episode].logprobs), abs=1e-4)
        assert answer.versions == here.said[episode].versions
    versions = {version for answer in there.said.values() for version in answer.versions}
    assert versions == ({0} if mixes is None else {0, 1, 2}), "a mixture has the policy's weights of each step"
    assert gap(metrics(tmp_path / "ray"), metrics(tmp_path / "local")) < 1e-3
    assert max(row["mismatch/max"] for row in metrics(tmp_path / "ray")) < 1e-3


@pytest.mark.parametrize("mixes", [None, 0.25], ids=["frozen", "mixture"])
def test_engines_that_die_come_back_with_their_weights(tmp_path, ray_dir, mixes):
    """In the second step, where the policy's weights are no longer those of its files."""
    here = Game(Game.Options(mixes=mixes))
    there = Game(Game.Options(mixes=mixes), dies_at=16, directory=ray_dir)
    rlhf_host.train(algo="rloo", agent=here, data=DATA, **settings(tmp_path / "local"))
    rlhf_host.train(algo="rloo", agent=there, data=DATA, **settings(tmp_path / "ray", ray_dir))
    assert len(there.killed) == 2
    assert said(there) == said(here)
    assert gap(metrics(tmp_path / "ray"), metrics(tmp_path / "local")) < 1e-3


def test_an_interrupted_run_goes_on_as_if_it_had_not_been(tmp_path, ray_dir):
    """With a mixture, which after the resume has the weights of the checkpoint."""
    whole, parts = Game(Game.Options(mixes=0.25)), Game(Game.Options(mixes=0.25))
    rlhf_host.train(algo="rloo", agent=whole, data=DATA, **settings(tmp_path / "whole"))
    rlhf_host.train(algo="rloo", agent=parts, data=DATA, **settings(tmp_path / "run", ray_dir, **{"train.steps": 1}))
    rlhf_host.train(resume=str(tmp_path / "run"), agent=parts, data=DATA, steps=3)
    assert said(parts) == said(whole)
    assert gap(metrics(tmp_path / "run"), metrics(tmp_path / "whole")) < 1e-3


@pytest.mark.parametrize(
    "more", [{"async_depth": 1, "pipeline.schedule": "fixed"}, {"actor.lora.rank": 4}], ids=["async", "lora"]
)
@pytest.mark.parametrize("mixes", [None, 0.25], ids=["frozen", "mixture"])
def test_features_of_runs_work_with_it(tmp_path, ray_dir, mixes, more):
    here, game = Game(Game.Options(mixes=mixes)), Game(Game.Options(mixes=mixes))
    rlhf_host.train(algo="rloo", agent=game, data=DATA, **settings(tmp_path / "run", ray_dir, **more))
    rlhf_host.train(algo="rloo", agent=here, data=DATA, **settings(tmp_path / "local", **more))
    assert said(game) == said(here)
    assert [each.versions for each in game.said.values()] == [here.said[episode].versions for episode in game.said]
    rows = metrics(tmp_path / "run")
    assert gap(rows, metrics(tmp_path / "local")) < 1e-3
    exact = [row["mismatch/max"] for row in rows if "mismatch/max" in row]  # not of batches that older weights sampled
    assert len(exact) >= (1 if "async_depth" in more else 3)
    assert max(exact) < 1e-3
    assert min(row["grad_norm"] for row in rows) > 0


@pytest.mark.parametrize("mixes", [None, 0.25], ids=["frozen", "mixture"])
def test_ahead_of_training_only_the_weights_that_answer_depend_on_time(tmp_path, ray_dir, mixes):
    """The schedule ``free``: on Ray engines take new weights while they answer. The same weights give the same answer."""
    games, runs = [Game(Game.Options(mixes=mixes)) for _ in range(2)], []
    for number, (game, where) in enumerate(zip(games, (ray_dir, None), strict=True)):
        more = {"async_depth": 1, "train.steps": 5}
        rlhf_host.train(algo="rloo", agent=game, data=DATA, **settings(tmp_path / str(number), where, **more))
        runs.append(metrics(tmp_path / str(number)))
    for answers in ("said", "own"):
        there, here = (getattr(game, answers) for game in games)
        assert there.keys() == here.keys()
        alike = [episode for episode in here if there[episode].versions == here[episode].versions]
        assert len(alike) >= len(here) // 5, "those of the first weights at least"
        for episode in alike:
            assert there[episode].token_ids == here[episode].token_ids
            assert there[episode].logprobs == pytest.approx(here[episode].logprobs, abs=1e-4)
    if mixes is None:
        assert said(games[0]) == said(games[1])
    assert {row["staleness/max"] for rows in runs for row in rows} == {0, 1}


@pytest.mark.parametrize("backend", ["fsdp", "deepspeed"])
def test_backends_that_split_models_leave_its_engines_whole(tmp_path, ray_dir, backend):
    pytest.importorskip("deepspeed" if backend == "deepspeed" else "rlhf_backend_fsdp")
    options = {"backend.zero_stage": 3} if backend == "deepspeed" else {}
    here, there = Game(), Game()
    rlhf_host.train(algo="rloo", agent=here, data=DATA, **settings(tmp_path / "local"))
    placed = {"backend": backend, **options, "placement": ["actor+opponent=2", "rollout=1"]}
    rlhf_host.train(algo="rloo", agent=there, data=DATA, **settings(tmp_path / "ray", ray_dir, **placed))
    assert said(there) == said(here)
    assert gap(metrics(tmp_path / "ray"), metrics(tmp_path / "local")) < 2e-3


def test_vllm_serves_policy_and_opponent(tmp_path, ray_dir):
    """Each with its own weights: greedy answers of the opponent stay, whatever the policy learns."""
    pytest.importorskip("vllm")
    model = write_tiny_model(tmp_path / "model", hidden=128)  # vLLM has no attention kernel for narrower heads on CPUs
    game = Game(temperature=0.0)
    more = {"actor.model": str(model), "engine": "vllm", "engine.kv_cache_bytes": 1 << 24, "actor.lr": 1e-2}
    rlhf_host.train(algo="rloo", agent=game, data=DATA, **settings(tmp_path / "run", ray_dir, **more))
    assert len({tuple(answer.token_ids) for answer in game.said.values()}) <= len(DATA)
    assert max(row["mismatch/max"] for row in metrics(tmp_path / "run")) < 1e-3
