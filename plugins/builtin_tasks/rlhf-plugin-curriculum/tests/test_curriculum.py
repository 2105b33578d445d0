"""Rates of tasks and the choice among them, then whole runs: resumed, killed, filtered, and ended when all is solved."""

from __future__ import annotations

import json
from collections import Counter

import numpy as np
import pytest
import rlhf_authoring.learner
import torch
from rlhf_authoring.killing import curve, killed_and_resumed, start
from rlhf_authoring.learner import SUMS, Learner, right_answer
from rlhf_plugin_curriculum import Curriculum
from rlhf_plugin_curriculum.rates import Options, Rates

import rlhf_host
from rlhf_host import PluginError, Task, UserError


def tasks(count, source=""):
    return [Task(f"{number}+1=", str(number + 1), index=number, source=source) for number in range(count)]


def rates(count, scores=(), **options):
    made = Rates(tasks(count), 0, Options(**options))
    for number, values in scores:
        made.note(tasks(count)[number], values)
    return made


def drawn(made, count, times, shuffle=True):
    dice = np.random.default_rng(0)
    return Counter(number for _ in range(times) for number in made.draw(count, dice, shuffle))


# --- rates ----------------------------------------------------------------------------------------


def test_a_rate_is_the_posterior_s_mean_and_older_groups_count_less():
    made = rates(2, [(0, [1.0, 1.0, 0.0, 1.0])])
    assert made.rates.tolist() == pytest.approx([4 / 6, 0.5])
    assert made.values.tolist() == pytest.approx([4 * 2 / (6 * 7), 1 / 6])
    made.note(tasks(2)[0], [0.0, 0.0, 0.0, 0.0])
    assert made.rates[0] == pytest.approx((0.5 * 3 + 1) / (0.5 * 4 + 4 + 2))
    plain = rates(1, [(0, [1.0, 0.0]), (0, [1.0, 1.0])], memory=1.0)
    assert plain.rates.tolist() == [4 / 6]


def test_adaptive_draws_go_to_tasks_between_easy_and_hard():
    made = rates(3, [(0, [1.0] * 8), (1, [1.0, 0.0] * 4), (2, [0.0] * 8)], uniform=0.0)
    found = drawn(made, 1, 2000)
    values = made.values / made.values.sum()
    assert [found[number] / 2000 for number in range(3)] == pytest.approx(values.tolist(), abs=0.03)
    alike = drawn(rates(3, [(0, [1.0] * 8), (1, [1.0, 0.0] * 4), (2, [0.0] * 8)], uniform=1.0), 1, 2000)
    assert min(alike.values()) > 600


@pytest.mark.parametrize("strategy", ["adaptive", "pools"])
def test_no_task_comes_twice_in_a_step_while_others_are_left(strategy):
    made = rates(6, [(number, [float(number > 2)] * 8) for number in range(6)], strategy=strategy)
    assert sorted(made.draw(6, np.random.default_rng(1), True)) == [*range(6)]
    assert sorted(Counter(made.draw(15, np.random.default_rng(2), True)).values()) == [2, 2, 2, 3, 3, 3]


def test_pools_get_their_shares_and_leave_them_to_others_where_they_are_empty():
    scores = [(number, [[1.0] * 8, [1.0, 0.0] * 4, [0.0] * 8][number % 3]) for number in range(30)]
    made = rates(30, scores, strategy="pools", easy_share=0.2, hard_share=0.1)
    found = Counter({pool: 0 for pool in range(3)})
    for number, count in drawn(made, 4, 1000).items():
        found[number % 3] += count
    assert [found[pool] / 4000 for pool in range(3)] == pytest.approx([0.2, 0.7, 0.1], abs=0.03)
    assert max(made.draws) - min(made.draws[1::3]) < 300, "the least drawn of a pool come first"
    hard = rates(4, [(number, [0.0] * 8) for number in range(4)], strategy="pools", hard_share=0.0)
    assert sorted(hard.draw(4, np.random.default_rng(0), True)) == [0, 1, 2, 3]


def test_pools_without_shuffling_go_through_the_file():
    made = rates(5, strategy="pools")
    dice = np.random.default_rng(0)
    assert [made.draw(2, dice, False) for _ in range(3)] == [[0, 1], [2, 3], [4, 0]]


def test_rows_of_one_task_share_its_rate_and_take_turns():
    rows = [Task("1+1=", "2", {"id": 1}), Task("2+2=", "4"), Task("1+1=", "2", {"id": 3}), Task("1+1=", "3")]
    made = Rates(rows, 10, Options(strategy="pools", retire=1.0, retire_after=1))
    assert len(made) == 3
    found = drawn(made, 4, 6)
    assert found == {10: 6, 12: 6, 11: 6, 13: 6}, "a task comes as often as the data has it"
    made.note(rows[2], [1.0, 1.0])
    assert made.retired.tolist() == [True, False, False]
    assert set(drawn(made, 2, 5)) == {11, 13}


def test_a_task_retires_when_groups_in_a_row_solve_it():
    made = rates(2, [(0, [1.0, 1.0]), (0, [1.0, 0.5]), (0, [1.0, 1.0])], retire=1.0)
    assert not made.retired.any()
    made.note(tasks(2)[0], [1.0, 1.0])
    assert made.retired.tolist() == [True, False]
    assert set(drawn(made, 1, 20)) == {1}
    assert not rates(1, [(0, [1.0])] * 9).retired.any(), "off by default"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"hard": 0.8}, "hard 0.8 is not below easy 0.8"),
        ({"easy_share": 0.6, "hard_share": 0.6}, "more than all draws"),
        ({"retire": 0.0}, "greater than 0"),
        ({"memory": 1.5}, "less than or equal to 1"),
    ],
)
def test_bad_options(options, said):
    with pytest.raises(ValueError, match=said):
        Options(**options)


def test_sources_keep_their_weights_until_one_is_solved():
    plugin = Curriculum(Options(retire=1.0, retire_after=1))
    plugin.weights = {"a": 3.0, "b": 1.0}
    both = [*tasks(4, "a"), *tasks(40, "b")]
    found = [number for step in range(10) for number in plugin.draw_tasks(both, 4, step)]
    assert sum(number < 4 for number in found) == 30
    for task in tasks(4, "a"):
        plugin.sources["a"].note(task, [1.0])
    assert min(plugin.draw_tasks(both, 8, 11)) >= 4


def test_other_tasks_than_those_of_the_checkpoint_are_refused():
    plugin, again = Curriculum(Options()), Curriculum(Options())
    plugin.draw_tasks(tasks(8, "a"), 8, 1)
    again.load_state_dict(plugin.state_dict())
    with pytest.raises(UserError, match="the tasks of a are not those of the checkpoint"):
        again.draw_tasks([*tasks(7, "a"), tasks(1, "a")[0]], 2, 2)


# --- runs -----------------------------------------------------------------------------------------


def train(run, **more):
    fixed = {"train.threads": 1, "actor.model": "quickstart", "rollout.max_new_tokens": 4, "n": 4, "batch_size": 2, "steps": 4}
    fixed |= {"curriculum.by": "reward", "algo": Learner(), "reward": right_answer, "data": SUMS, "lr": 1e-3}
    return rlhf_host.train(**{"run_dir": str(run), "extensions": ["curriculum"], **fixed, **more})


NAMES = ("curriculum/rate", "curriculum/easy", "curriculum/medium", "curriculum/hard", "curriculum/unseen", "loss", "grad_norm")


@pytest.mark.parametrize("strategy", ["adaptive", "pools"])
def test_a_resumed_run_draws_what_the_whole_one_does(tmp_path, strategy):
    settings = {"curriculum.strategy": strategy, "steps": 4}
    train(tmp_path / "whole", **settings)
    train(tmp_path / "run", **{**settings, "steps": 2})
    rlhf_host.train(resume=str(tmp_path / "run"), algo=Learner(), reward=right_answer, data=SUMS, steps=4)
    for name in NAMES:
        assert [row[name] for row in curve(tmp_path / "run")] == [row[name] for row in curve(tmp_path / "whole")], name
    last = curve(tmp_path / "whole")[-1]
    pools = sum(last[f"curriculum/{pool}"] for pool in ("easy", "medium", "hard", "unseen"))
    assert pools == len(SUMS)
    assert 0 < last["curriculum/rate"] < 1


def test_a_killed_run_goes_on_value_for_value(tmp_path):
    learner = rlhf_authoring.learner.__file__
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in SUMS))
    flags = ["--algo", f"{learner}:Learner", "--reward", f"{learner}:right_answer", "--data", tmp_path / "rows.jsonl"]
    flags += ["--model", "quickstart", "--with", "curriculum", "--curriculum.by", "reward", "--n", "4", "--batch-size", "2"]
    flags += ["--max-new-tokens", "4", "--train.threads", "1", "--lr", "1e-3", "--steps", "8", "--checkpoint.every", "2"]
    assert start(*flags, "--run-dir", tmp_path / "whole").wait() == 0
    killed_and_resumed(flags, tmp_path / "run", rows=3, steps=8)
    for name in NAMES:
        assert [row[name] for row in curve(tmp_path / "run")] == [row[name] for row in curve(tmp_path / "whole")], name
    states = [torch.load(tmp_path / each / "checkpoints/step-000008/trainer.pt")["plugins"] for each in ("run", "whole")]
    assert states[0]["extension:curriculum"] == states[1]["extension:curriculum"]


def test_groups_that_a_filter_drops_count_too(tmp_path):
    pytest.importorskip("rlhf_plugin_dapo", reason="a filter")
    solved = {"17+35="}

    def reward(prompt, text):
        return float(prompt in solved or text.strip() == "64")

    def run(name, **more):
        train(tmp_path / name, reward=reward, extensions=["curriculum", "dynamic_filtering"], **more)
        return curve(tmp_path / name)

    rows = run("run", steps=1, **{"rollout.max_refills": 8, "curriculum.retire": 1.0, "curriculum.retire_after": 1})
    assert rows[0]["rollout/dropped"] > 0
    assert rows[0]["curriculum/retired"] == 1.0


def test_a_run_ends_when_every_task_is_retired(tmp_path):
    outcome = train(tmp_path / "run", reward=lambda text: 1.0, steps=9, **{"curriculum.retire": 1.0, "batch_size": 3})
    rows = curve(tmp_path / "run")
    assert "all 4 tasks are retired: the policy solves them" in outcome.outcome.reason
    assert len(rows) == 3, "four tasks, each twice, three a step"
    assert [row["curriculum/retired"] for row in rows] == [0.0, 2.0, 4.0]
    assert (tmp_path / "run/checkpoints/step-000003").is_dir()


def test_answers_without_a_score_are_told(tmp_path):
    with pytest.raises(PluginError, match=r"an answer has no 0-1 score, .*curriculum.by reward"):
        train(tmp_path / "run", reward=lambda text: 0.5, **{"curriculum.by": "score"})
    with pytest.raises(PluginError, match=r"the reward 5, which is not in \[0, 1\]"):
        train(tmp_path / "other", reward=lambda text: 5.0)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"data.shuffle": False}, "draws at random, and data.shuffle is false"),
        ({"async_depth": 1}, "chooses tasks by what was trained before: leave async_depth out"),
    ],
)
def test_what_it_cannot_do_is_refused_before_the_run(tmp_path, more, said):
    with pytest.raises(UserError, match=said):
        train(tmp_path / "run", **more)
    assert not (tmp_path / "run").exists()


def test_rows_with_answers_are_refused(tmp_path):
    pytest.importorskip("rlhf_plugin_sft", reason="an algorithm of rows")
    rows = [{"prompt": "1+1=", "completion": "2"}]
    with pytest.raises(UserError, match=r"for prompt_completion data and extension:curriculum for prompts"):
        rlhf_host.train(algo="sft", model="quickstart", data=rows, extensions=["curriculum"], run_dir=str(tmp_path / "run"))


def test_the_state_of_a_large_data_set_is_that_of_what_was_drawn():
    plugin = Curriculum(Options())
    plugin.draw_tasks(tasks(20_000), 64, 1)
    state = plugin.state_dict()
    assert len(state["sources"][""]["rows"]) == 64
    assert len(json.dumps(state)) < 10_000
