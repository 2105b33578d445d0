"""A league on Ray, whose places are engines of their own that take the weights of saved steps."""

from __future__ import annotations

import json
import os
import signal
import tempfile
from dataclasses import replace

import pytest
import torch
from rlhf_authoring.killing import engines
from rlhf_authoring.learner import __file__ as learner
from rlhf_authoring.models import write_tiny_model
from transformers import AutoModelForCausalLM

import rlhf_host
from rlhf_host import Needs, RoleNeed, hookimpl

pytest.importorskip("ray")

pytestmark = pytest.mark.timeout(900)

DATA = [{"prompt": text} for text in ("17+35=", "38+26=", "4+4=", "41+29=")]
LEAGUE = {"league.every": 1, "league.size": 3, "league.at_once": 2}


class Game:
    """The larger first token wins. Before the answer number ``dies_at`` all engines under ``directory`` are killed."""

    def __init__(self, dies_at=None, directory="", temperature=1.0):
        self.dies_at, self.directory, self.temperature = dies_at, directory, temperature
        self.said, self.killed = {}, []

    @hookimpl
    def needs(self):
        return Needs(rewards=False, roles=(RoleNeed("opponent", generates=True),))

    @hookimpl
    async def agent_run(self, episode, policy):
        prompt = episode.task.prompt_ids
        mine = await policy.generate(prompt)
        if self.dies_at == len(self.said):
            self.dies_at, self.killed = None, engines(self.directory)
            for pid in self.killed:
                os.kill(pid, signal.SIGKILL)
        opponent = policy.role("opponent")
        theirs = await opponent.generate(prompt, replace(opponent.sampling, temperature=self.temperature))
        self.said[episode.episode_id] = (len(self.said) // 16 + 1, list(prompt), theirs)  # 16 a step
        rows = policy.trajectories()
        rows[0].score = (1 + (mine.token_ids[0] > theirs.token_ids[0]) - (mine.token_ids[0] < theirs.token_ids[0])) / 2
        rows[0].agent_rewards = [rows[0].score]
        return rows


@pytest.fixture
def ray_dir():
    with tempfile.TemporaryDirectory(prefix="rt-", dir="/tmp") as made:
        yield made


def train(run, game, ray_dir=None, **more):
    there = {"runtime": "ray", "ray.temp_dir": ray_dir, "ray.num_cpus": 6, "ray.num_gpus": 0, "ray.object_store_mb": 200}
    settings = {
        "actor.model": "quickstart",
        "actor.lr": 3e-3,
        "rollout.n": 4,
        "rollout.max_new_tokens": 1,
        "train.batch_size": 4,
        "train.steps": 4,
        "train.threads": 1,
        "checkpoint.every": 1,
        "checkpoint.keep": 0,
        "extensions": ["league"],
        "run_dir": str(run),
        **LEAGUE,
        **(there if ray_dir else {}),
    }
    return rlhf_host.train(algo=f"{learner}:Learner", agent=game, data=DATA, **{**settings, **more})


def said(game):
    return {episode: (tuple(answer.token_ids), list(answer.versions)) for episode, (*_, answer) in game.said.items()}


def league(run):
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in row.items() if name.startswith("league/")} for row in rows]


def check_same(tmp_path, here, there):
    assert said(here) == said(there) != {}
    assert {version for *_, answer in there.said.values() for version in answer.versions} >= {0, 1, 2}
    for one, other in zip(league(tmp_path / "local"), league(tmp_path / "ray"), strict=True):
        assert one == pytest.approx(other)


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"placement": ["actor=1", "rollout=1", "opponent=1", "opponent_1=2", "opponent_2=1"]},
        {"backend": "fsdp", "placement": ["actor=2", "rollout=1", "opponent=1", "opponent_1=1", "opponent_2=1"]},
        {"actor.lora.rank": 4},
    ],
    ids=["together", "two engines of a place", "split", "lora"],
)
def test_a_league_on_ray_is_that_of_one_process(tmp_path, ray_dir, more):
    if "backend" in more:
        pytest.importorskip("rlhf_backend_fsdp")
    here, there = Game(), Game()
    train(tmp_path / "local", here, **({} if "placement" in more else more))
    train(tmp_path / "ray", there, ray_dir, **more)
    check_same(tmp_path, here, there)


def test_places_whose_engines_die_come_back_with_the_weights_of_their_steps(tmp_path, ray_dir):
    """In the third step, where the places have saved steps."""
    here, there = Game(), Game(dies_at=32, directory=ray_dir)
    train(tmp_path / "local", here)
    train(tmp_path / "ray", there, ray_dir)
    assert len(there.killed) == 4
    check_same(tmp_path, here, there)


def test_a_resumed_league_on_ray_goes_on_with_its_opponents(tmp_path, ray_dir):
    here, there = Game(), Game()
    train(tmp_path / "local", here)
    train(tmp_path / "ray", there, ray_dir, **{"train.steps": 2})
    rlhf_host.train(resume=str(tmp_path / "ray"), agent=there, data=DATA, steps=4)
    check_same(tmp_path, here, there)


def test_an_opponent_that_vllm_serves_is_the_policy_of_the_step_before(tmp_path, ray_dir):
    pytest.importorskip("vllm")
    model = write_tiny_model(tmp_path / "model", hidden=128)  # vLLM has no attention kernel for narrower heads on CPUs
    game, run = Game(temperature=0.0), tmp_path / "run"
    more = {"actor.model": str(model), "engine": "vllm", "engine.kv_cache_bytes": 1 << 24, "actor.lr": 2e-2}
    train(run, game, ray_dir, **more, **{"league.draw": "latest", "league.at_once": 1})
    tokens = {}
    for step in range(1, 5):
        saved = model if step == 1 else run / f"checkpoints/step-{step - 1:06d}/model"
        policy = AutoModelForCausalLM.from_pretrained(saved)
        with torch.no_grad():
            for prompt in {tuple(prompt) for _, prompt, _ in game.said.values()}:
                tokens[step, prompt] = int(policy(torch.tensor([prompt])).logits[0, -1].argmax())
    for step, prompt, answer in game.said.values():
        assert answer.token_ids[0] == tokens[step, tuple(prompt)]
    assert {step for step, *_ in game.said.values()} == {1, 2, 3, 4}
    assert any(tokens[step, prompt] != tokens[1, prompt] for step, prompt in tokens), "no answer of the policy has changed"
