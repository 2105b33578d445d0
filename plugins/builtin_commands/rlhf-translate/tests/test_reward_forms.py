"""Reward functions written for other trainers: called as those call them, and what their answers become."""

import asyncio
import math

import pytest
import torch
from rlhf_authoring.models import tiny_tokenizer

import rlhf_host
from rlhf_host import Reward, ScoreContext, Segment, Task, Trajectory, Unjudged
from rlhf_host.errors import PluginError
from rlhf_host.plugins.reward_functions import FunctionReward

TOKENIZER = tiny_tokenizer()
CONTEXT = ScoreContext("train", 7, tokenizer=TOKENIZER)


def answer(text, label="3", prompt="1+2=", turns=(), **metadata):
    def ids(text):
        return TOKENIZER.encode(text, add_special_tokens=False)

    asked = prompt if isinstance(prompt, str) else prompt[-1]["content"]
    segments = [Segment("prompt", ids(asked)), Segment("action", ids(text))]
    for seen, said in turns:
        segments += [Segment("observation", ids(seen)), Segment("action", ids(said))]
    segments[-1].token_ids = [*segments[-1].token_ids, TOKENIZER.eos_token_id]
    task = Task(prompt, label, metadata, source="sums")
    return Trajectory("e", "g", task, segments, decode=lambda ids: TOKENIZER.decode(ids, skip_special_tokens=True))


def score(function, *rows):
    found = FunctionReward(function, "f").score(rows, CONTEXT)
    return asyncio.run(found) if asyncio.iscoroutine(found) else found


# --- TRL ---------------------------------------------------------------------------------------------


def test_trl_gets_the_group_with_its_columns_and_says_what_does_not_apply():
    seen = {}

    def reward(prompts, completions, completion_ids, solution, level, trainer_state, log_metric, log_extra, **columns):
        seen.update(locals())
        log_metric("asked", len(prompts))
        log_extra("column", completions)
        return [1.0, None]

    found = score(reward, answer("3", level=1, other="x"), answer("4", level=2, other="y"))
    assert found == [Reward(value, metrics={"reward/f/asked": 2.0}) for value in (1.0, 0.0)]
    assert (seen["prompts"], seen["completions"]) == (["1+2=", "1+2="], ["3", "4"])
    assert (seen["solution"], seen["level"], seen["columns"]["other"]) == (["3", "3"], [1, 2], ["x", "y"])
    assert [TOKENIZER.decode(ids, skip_special_tokens=True) for ids in seen["completion_ids"]] == ["3", "4"]
    assert seen["trainer_state"].global_step == 7


def test_trl_gets_messages_where_the_prompt_is_some():
    def reward(completions, **columns):
        return [float(len(completion)) for completion in completions] if columns["prompts"][0][0]["role"] == "user" else None

    assert score(reward, answer("1", prompt=[{"role": "user", "content": "1+2="}], turns=[("5", "3")])) == [Reward(3.0)]


def test_trl_may_be_async_and_a_callable_object():
    class Judge:
        async def __call__(self, completions, **columns):
            return torch.tensor([len(text) for text in completions])

    assert score(Judge(), answer("33"), answer("3")) == [Reward(2.0), Reward(1.0)]


# --- verl --------------------------------------------------------------------------------------------


def test_verl_gets_each_answer_and_gives_a_number_or_a_dict():
    def compute_score(data_source, solution_str, ground_truth, extra_info=None, **more):
        assert (data_source, extra_info["num_turns"], extra_info["index"]) == ("sums", 2, 4)
        return {"score": 0.5, "acc": solution_str.endswith(ground_truth), "format": 1, "pred": "text"}

    row = answer("1", turns=[("5", "3")], extra_info={"index": 4})
    metrics = {"reward/f/acc": 1.0, "reward/f/format": 1.0}
    assert score(compute_score, row) == [Reward(0.5, score=1.0, metrics=metrics)]
    assert score(lambda solution_str, ground_truth: solution_str == ground_truth, answer("3")) == [Reward(1.0, score=1.0)]
    assert score(lambda solution_str, ground_truth, method="strict": 2, answer("3")) == [Reward(2.0)]
    assert score(lambda solution_str, ground_truth: None, answer("3")) == [Unjudged("the function gave None")]


def test_verl_finds_its_own_columns():
    def compute_score(data_source, solution_str, ground_truth, extra_info=None):
        return float((data_source, ground_truth) == ("openai/gsm8k", "7"))

    row = answer("3", label=None, data_source="openai/gsm8k", reward_model={"style": "rule", "ground_truth": "7"})
    assert score(compute_score, row) == [Reward(1.0)]


# --- OpenRLHF ----------------------------------------------------------------------------------------


def test_openrlhf_gets_lists_of_one_with_special_tokens():
    def reward_func(queries, prompts, labels, **more):
        assert len(queries) == len(prompts) == len(labels) == 1
        right = float(queries[0] == prompts[0] + labels[0] + TOKENIZER.eos_token)
        return {"rewards": torch.tensor([right]), "scores": [right], "extra_logs": {"length": torch.tensor([4])}}

    found = score(reward_func, answer("3"), answer("4"))
    assert found == [Reward(right, score=right, metrics={"reward/f/length": 4.0}) for right in (1.0, 0.0)]
    assert score(lambda queries, prompts, labels: torch.tensor([2.5]), answer("3")) == [Reward(2.5)]
    assert score(lambda queries, prompts, labels: {"rewards": -3.0, "scores": 40.0}, answer("3")) == [Reward(-3.0)]
    assert score(lambda queries, prompts, labels: {"rewards": None}, answer("3")) == [Unjudged("the function gave None")]


# --- metrics -----------------------------------------------------------------------------------------


def test_metrics_have_the_rewards_name_and_are_no_more_than_a_hundred(caplog):
    def compute_score(solution_str, ground_truth):
        return {"score": 1.0, "entropy": 2.0, "reward/mean": 3.0, "a\nb": 4.0} | {f"{solution_str}-{i}": i for i in range(90)}

    async def later(solution_str, ground_truth):
        return compute_score(solution_str, ground_truth)

    for function in (compute_score, later):
        caplog.clear()
        found = score(function, answer("3"), answer("4"))
        names = {name for reward in found for name in reward.metrics}
        assert len(names) == 100
        assert {"reward/f/entropy", "reward/f/reward/mean"} < names
        assert not any("\n" in name for name in names)
        assert [record.getMessage()[:50] for record in caplog.records] == [
            "reward 'f': some metrics are left out, such as 'a\\"
        ]


def test_a_function_with_a_metric_of_the_hosts_name_trains(tmp_path):
    pytest.importorskip("rlhf_plugin_rloo")
    (tmp_path / "reward.py").write_text(
        "def reward(solution_str, ground_truth):\n    return {'score': 0.5, 'entropy': 2.0, 'mean': 3.0}\n"
    )
    settings = {"rollout.n": 2, "train.batch_size": 1, "train.steps": 1, "train.threads": 1, "rollout.max_new_tokens": 4}
    settings |= {"model": "quickstart", "data": [{"prompt": "12+34=", "label": "46"}], "run_dir": str(tmp_path / "run")}
    [metrics] = rlhf_host.train(algo="rloo", rewards=str(tmp_path / "reward.py"), **settings).metrics
    assert (metrics["reward/mean"], metrics["reward/reward/entropy"], metrics["reward/reward/mean"]) == (0.5, 2.0, 3.0)


# --- what cannot be used ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda completions, **columns: [1.0, 2.0], "gave 2 values for 1 rows"),
        (lambda completions, **columns: "1.0", "gave a str, expected a list of 1 numbers"),
        (lambda completions, **columns: [math.nan], "gave nan, which is no reward"),
        (lambda solution_str, ground_truth: {"points": 1}, "gave no 'score'; it gave points"),
        (lambda solution_str, ground_truth: math.inf, "gave inf, which is no reward"),
        (lambda queries, prompts, labels: {"reward": 1.0}, "gave no 'rewards'; it gave reward"),
    ],
)
def test_no_reward_is_made_up(function, message):
    assert message in why_unjudged(function)


def why_unjudged(function):
    try:
        [unjudged] = score(function, answer("3"))
    except ValueError as error:
        return str(error)
    return unjudged.reason


RAISING = {
    "trl": "def f(completions, **columns):\n    return [1 / len(each) for each in completions]\n",
    "verl": "def f(data_source, solution_str, ground_truth, extra_info):\n    return 1 / len(solution_str)\n",
    "openrlhf": "def f(queries, prompts, labels):\n    return [1.0 / bool(labels[0])]\n",
    "trl, a text": "def f(completions, **columns):\n    return [1.0 if each else 'nothing' for each in completions]\n",
}


@pytest.mark.parametrize("later", [False, True], ids=["now", "awaited"])
@pytest.mark.parametrize("form", RAISING)
def test_only_the_row_for_which_it_raises_is_not_judged(form, later):
    made = {}
    exec(("async " if later else "") + RAISING[form], made)
    one, none, other = score(made["f"], answer("a"), answer("", label=0), answer("b"))
    assert one.value == other.value == 1.0
    assert isinstance(none, Unjudged)


def test_a_function_that_raises_only_for_a_group_judges_none_of_it():
    with pytest.raises(ValueError, match="too many"):
        score(raising_for_many, answer("a"), answer("b"))


def raising_for_many(completions, **columns):
    if len(completions) > 1:
        raise ValueError("too many")
    return [1.0]


def test_a_column_that_the_data_lack_is_named():
    with pytest.raises(PluginError, match="takes 'difficulty', and the data have no such column; there are level, prompts"):
        score(lambda completions, difficulty: [1.0], answer("3", level=1))


def test_what_fits_no_form_is_shown_all():
    with pytest.raises(PluginError, match=r"takes \(a, b, c\).*of TRL.*of verl.*of OpenRLHF"):
        FunctionReward(lambda a, b, c: 1.0, "f")
