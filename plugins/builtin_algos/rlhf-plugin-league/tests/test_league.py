"""Real runs: whose weights an opponent has is compared with checkpoints, by transformers."""

from __future__ import annotations

import json
import shutil
from importlib.resources import files

import pytest
import torch
from peft import PeftModel
from rlhf_authoring.learner import Learner
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import rlhf_host
from rlhf_host import Needs, RoleNeed, RunError, UserError, hookimpl

QUICKSTART = files("rlhf_host") / "models/quickstart"
TASKS = [{"prompt": prompt} for prompt in ("17+35=", "38+26=", "4+4=", "41+29=", "7*8=", "12-5=")]


class Game:
    """Both sides say one token; the larger one wins."""

    def __init__(self):
        self.said = []

    @hookimpl
    def needs(self):
        return Needs(rewards=False, roles=(RoleNeed("opponent", generates=True),))

    @hookimpl
    async def agent_run(self, episode, policy):
        prompt = list(episode.task.prompt_ids)
        mine = await policy.generate(prompt)
        theirs = await policy.role("opponent").generate(prompt)
        self.said.append((episode.split, episode.group_id, prompt, theirs.token_ids[0], theirs.logprobs[0]))
        rows = policy.trajectories()
        rows[0].score = (1 + (mine.token_ids[0] > theirs.token_ids[0]) - (mine.token_ids[0] < theirs.token_ids[0])) / 2
        rows[0].agent_rewards = [rows[0].score]
        return rows


class Alone(Game):
    """Asks for no opponent."""

    @hookimpl
    async def agent_run(self, episode, policy):
        await policy.generate(list(episode.task.prompt_ids))
        rows = policy.trajectories()
        rows[0].agent_rewards = [1.0]
        return rows


def train(run, agent=None, **more):
    settings = {
        "actor.model": "quickstart",
        "actor.lr": 3e-3,
        "rollout.n": 4,
        "rollout.max_new_tokens": 1,
        "train.batch_size": 3,
        "train.steps": 4,
        "train.threads": 1,
        "checkpoint.every": 1,
        "checkpoint.keep": 0,
        "extensions": ["league"],
        "trackers": ["jsonl"],
        "run_dir": str(run),
    }
    return rlhf_host.train(algo=Learner(), agent=agent or Game(), data=TASKS, **{**settings, **more})


def rows_of(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def logprobs(model, said):
    """What the model gives to the opponent's tokens."""
    values = []
    for _, _, prompt, token, _ in said:
        with torch.no_grad():
            values.append(float(model(torch.tensor([prompt])).logits[0, -1].log_softmax(-1)[token]))
    return values


def checkpoint(run, step):
    return AutoModelForCausalLM.from_pretrained(run / f"checkpoints/step-{step:06d}/model") if step else start()


def start():
    return AutoModelForCausalLM.from_pretrained(QUICKSTART)


def by_step(said):
    """Steps → what opponents said in them, of training."""
    steps = {}
    for each in said:
        if each[0] == "train":
            steps.setdefault(int(each[1].split("-")[1]), []).append(each)
    return steps


def test_the_latest_opponent_is_the_policy_of_the_step_before(tmp_path):
    game = Game()
    options = {"league.draw": "latest", "league.every": 1, "league.at_once": 1}
    train(tmp_path / "run", game, **options)
    moved = 0.0
    for step, said in by_step(game.said).items():
        told, before = [each[-1] for each in said], checkpoint(tmp_path / "run", step - 1)
        assert told == pytest.approx(logprobs(before, said), abs=1e-4)
        moved = max(moved, *(abs(a - b) for a, b in zip(told, logprobs(start(), said), strict=True)))
    assert moved > 0.01, "the opponent stayed as it was"
    first, second, *_ = rows_of(tmp_path / "run")
    assert (first["league/games"], first["league/pool"], second["league/pool"]) == (12.0, 1.0, 2.0)
    assert set(by_step(game.said)) == {1, 2, 3, 4}


def test_an_opponent_of_a_policy_that_trains_an_adapter_has_its_whole_weights(tmp_path):
    game = Game()
    options = {"league.draw": "latest", "league.every": 1, "league.at_once": 1, "actor.lora.rank": 4, "actor.lr": 3e-2}
    train(tmp_path / "run", game, **options, **{"train.steps": 3})
    for step, said in by_step(game.said).items():
        model = start()
        if step > 1:
            adapter = tmp_path / f"run/checkpoints/step-{step - 1:06d}/model"
            model = PeftModel.from_pretrained(model, adapter).merge_and_unload()
        assert [each[-1] for each in said] == pytest.approx(logprobs(model, said), abs=1e-4)


def test_members_are_drawn_for_a_step_and_a_group_has_one(tmp_path):
    game = Game()
    options = {"league.draw": "uniform", "league.every": 1, "league.size": 3, "league.at_once": 3, "train.steps": 6}
    train(tmp_path / "run", game, **options)
    models = [checkpoint(tmp_path / "run", step) for step in range(6)]
    met = set()
    for step, said in by_step(game.said).items():
        groups = {}
        for each in said:
            groups.setdefault(each[1], []).append(each)
        for group in groups.values():
            told = [each[-1] for each in group]
            who = [n for n, model in enumerate(models) if told == pytest.approx(logprobs(model, group), abs=1e-4)]
            assert who, "no model of this run said that"
            assert any(n < step for n in who)
            met |= set(who) if len(who) == 1 else set()
    assert len(met) >= 3
    rates = [name for name in rows_of(tmp_path / "run")[-1] if name.startswith("league/win_rate/")]
    assert set(rates) <= {"league/win_rate/opponent", *(f"league/win_rate/step-{step:06d}" for step in (3, 4, 5))}


def test_a_resumed_run_goes_on_to_the_bit(tmp_path):
    options = {"league.every": 2, "league.size": 2, "league.at_once": 2, "train.steps": 8}
    train(tmp_path / "whole", **options)
    train(tmp_path / "run", **{**options, "train.steps": 5})
    rlhf_host.train(resume=str(tmp_path / "run"), algo=Learner(), agent=Game(), data=TASKS, steps=8)
    one, other = (load_file(tmp_path / run / "model/model.safetensors") for run in ("whole", "run"))
    assert all(torch.equal(one[name], other[name]) for name in one)
    leagues = [
        [{name: value for name, value in row.items() if name.startswith("league/")} for row in rows_of(tmp_path / run)]
        for run in ("whole", "run")
    ]
    assert leagues[0] == leagues[1]
    assert len(leagues[0]) == 8


def test_saved_steps_stay_as_long_as_a_checkpoint_has_them_in_its_pool(tmp_path):
    options = {"league.every": 1, "league.size": 2, "league.at_once": 1, "train.steps": 8}
    train(tmp_path / "one", **options, **{"checkpoint.keep": 2})
    names = sorted(path.name for path in (tmp_path / "one/league").iterdir())
    assert names[-2:] == ["step-000007", "step-000008"]
    assert len(names) <= 6, "two of the pool, and what the last checkpoints may go back to"
    train(tmp_path / "none", **options, **{"checkpoint.every": 0})
    names = sorted(path.name for path in (tmp_path / "none/league").iterdir())
    assert names == ["step-000006", "step-000007", "step-000008"], "the one that left last is removed at the next step"


def test_a_resume_without_its_opponents_is_refused(tmp_path):
    train(tmp_path / "run", **{"league.every": 1, "train.steps": 2})
    shutil.rmtree(tmp_path / "run/league/step-000001")
    with pytest.raises(UserError, match=r"league/step-000001 is gone, an opponent of this run"):
        rlhf_host.train(resume=str(tmp_path / "run"), algo=Learner(), agent=Game(), data=TASKS, steps=3)


@pytest.mark.parametrize(
    ("harm", "why"),
    [
        (lambda file: file.write_bytes(file.read_bytes()[:100]), "00000.safetensors cannot be read"),
        (lambda file: file.unlink(), "no weights came for"),
        (lambda file: save_file({"x": torch.zeros(2)}, file), "there is no weight 'x' here"),
    ],
    ids=["cut", "removed", "another model's"],
)
def test_a_resume_with_damaged_opponents_is_refused_by_their_place(tmp_path, harm, why):
    train(tmp_path / "run", **{"league.every": 1, "league.draw": "latest", "train.steps": 2})
    harm(tmp_path / "run/league/step-000002/00000.safetensors")
    with pytest.raises(UserError, match=f"league: the opponent in .*step-000002 cannot be loaded: .*{why}.*put the files back"):
        rlhf_host.train(resume=str(tmp_path / "run"), algo=Learner(), agent=Game(), data=TASKS, steps=3)


def test_a_resume_may_have_other_settings_of_the_league(tmp_path):
    train(tmp_path / "first", **{"train.steps": 1})
    rivals = [str(tmp_path / "first/model"), "quickstart"]
    options = {"league.every": 1, "league.draw": "uniform", "league.at_once": 2, "league.rivals": rivals, "train.steps": 3}
    train(tmp_path / "run", **options)
    (tmp_path / "run/league/notes").mkdir()
    again = {"league.at_once": 1, "league.rivals": rivals[1:], "league.size": 2}
    rlhf_host.train(resume=str(tmp_path / "run"), algo=Learner(), agent=Game(), data=TASKS, steps=5, **again)
    assert rows_of(tmp_path / "run")[-1]["league/pool"] == 4, "the role, a rival, two saved steps"
    assert (tmp_path / "run/league/notes").is_dir(), "what is no saved step is not the league's"


def test_held_out_games_are_against_the_roles_own_model(tmp_path):
    game = Game()
    options = {"league.draw": "latest", "league.every": 1, "eval.data": TASKS, "eval.every": 1, "eval.n": 2}
    train(tmp_path / "run", game, **options, **{"train.steps": 3})
    said = [each for each in game.said if each[0] == "eval"]
    assert [each[-1] for each in said] == pytest.approx(logprobs(start(), said), abs=1e-4)


def test_a_rival_of_another_run_is_in_the_pool_from_the_start(tmp_path):
    train(tmp_path / "first", **{"train.steps": 2})
    game = Game()
    rival = str(tmp_path / "first/model")
    train(tmp_path / "run", game, **{"league.rivals": [rival], "league.every": 9, "league.at_once": 2, "train.steps": 2})
    models = [start(), AutoModelForCausalLM.from_pretrained(rival)]
    met = {
        n
        for each in game.said
        for n, model in enumerate(models)
        if each[-1] == pytest.approx(logprobs(model, [each])[0], abs=1e-4)
    }
    assert met == {0, 1}
    assert rows_of(tmp_path / "run")[0]["league/pool"] == 2


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"league.at_once": 9}, r"at_once 9 is more than the pool saves \(size 8\)"),
        ({"roles.opponent_1.model": "quickstart"}, "opponent_1 gets the weights of saved steps: leave opponent_1.model out"),
        ({"actor.lora.rank": 4, "sync.adapter": "adapter"}, "adapter"),
        ({"async_depth": 1}, r"league has a state that its choose_role changes beside the steps: leave async.depth out"),
    ],
)
def test_what_cannot_be_is_refused_before_the_run(tmp_path, more, said):
    with pytest.raises(UserError, match=said):
        train(tmp_path / "run", **more)
    assert not (tmp_path / "run").exists()


def test_an_agent_without_an_opponent_is_refused_after_the_first_step(tmp_path):
    with pytest.raises((UserError, RunError), match=r"no episode has asked for policy.role\('opponent'\)"):
        train(tmp_path / "run", Alone())
