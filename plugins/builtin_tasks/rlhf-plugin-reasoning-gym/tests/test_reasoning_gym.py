"""Generated problems: their mix, their seeds, and who judges them."""

import json
import os
import subprocess
import sys

import pytest
from rlhf_authoring import reward_contract, tasks_contract
from rlhf_plugin_reasoning_gym import ReasoningGym, ReasoningGymLevels, ReasoningGymReward, reward

import rlhf_host
from rlhf_host import Group, Reward, Segment, Task, Trajectory, Unjudged, UserError

MIX = ["chain_sum@2", "leg_counting", "spell_backward"]
TASKS = ReasoningGym(ReasoningGym.Options(datasets=MIX, size=8)).load_tasks("train", 0)

TestTasks = tasks_contract("reasoning_gym", options={"datasets": MIX, "size": 40, "eval_size": 8})
TestLevels = tasks_contract("reasoning_gym_levels", options={"datasets": MIX[:1], "eval_size": 8})
TestReward = reward_contract("reasoning_gym", tasks=TASKS[:2], texts=("12", str(TASKS[0].ground_truth)))


def judged(text, task, **options):
    row = Trajectory("e", "g", task, [Segment("prompt", [0]), Segment("action", [1])], decode=lambda ids: text)
    [found] = ReasoningGymReward(ReasoningGymReward.Options(**options)).score([row], None)
    return found


def test_shares_are_mixed_and_held_out_problems_are_others():
    source = ReasoningGym(ReasoningGym.Options(datasets=MIX, size=40, eval_size=40, config='{"chain_sum": {"max_terms": 2}}'))
    train, held_out = source.load_tasks("train", 0), source.load_tasks("eval", 0)
    names = [task.metadata["reasoning_gym"]["dataset"] for task in train]
    assert [names.count(name.partition("@")[0]) for name in MIX] == [20, 10, 10]
    assert set(names[:6]) == {"chain_sum", "leg_counting", "spell_backward"}
    assert train == source.load_tasks("train", 1), "the run's seed sets the order alone"
    long = [task for task in train if task.metadata["reasoning_gym"]["dataset"] == "leg_counting"]
    assert not {task.prompt for task in long} & {task.prompt for task in held_out}
    assert all(task.prompt.count("+") + task.prompt.count(" - ") <= 1 for task in train if "arithmetic" in task.prompt)
    json.dumps([dict(task.metadata) for task in train])


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.metadata["reasoning_gym"]["dataset"])
def test_the_data_set_s_own_answer_is_right(task):
    name = f"reasoning_gym/{task.metadata['reasoning_gym']['dataset']}"
    assert judged(task.ground_truth, task) == Reward(1.0, score=1.0, metrics={name: 1.0})
    tagged = f"It is 7. <answer> {task.ground_truth} </answer>"
    assert judged(tagged, task, pattern="<answer>(.*?)</answer>").value == 1.0
    assert judged(task.ground_truth, task, pattern="<answer>(.*?)</answer>").value < 1.0


def test_a_pattern_that_takes_too_long_finds_no_answer(monkeypatch):
    monkeypatch.setattr(reward, "PATTERN_S", 0.05)
    assert judged("a" * 40, TASKS[0], pattern="(a|a)*[bc]").value == 0.0
    assert judged("y", TASKS[0], pattern="(x)|y").value < 1.0


def test_syntax_warnings_of_its_imports_are_not_shown(tmp_path):
    package = tmp_path / "reasoning_gym"
    package.mkdir()
    (package / "__init__.py").write_text("def create_dataset(name, seed, size):\n    return [name is 'x']\n")
    (package / "factory.py").write_text("DATASETS = {'x': None}\n")
    code = "from rlhf_plugin_reasoning_gym.datasets import made; print(len(made('x', 0, 1, '{}')))"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run([sys.executable, "-B", "-c", code], capture_output=True, text=True, env=env, timeout=60)
    assert (done.stdout, done.stderr) == ("1\n", "")


def test_what_is_no_task_of_it_is_not_judged():
    assert isinstance(judged("1", Task("x", "1")), Unjudged)
    assert isinstance(judged("1", Task("x", "1", {"reasoning_gym": {"dataset": "chain_sum"}})), Unjudged)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"datasets": []}, "name data sets"),
        ({"datasets": ["chain_sun"]}, "no data set 'chain_sun'; did you mean chain_sum"),
        ({"datasets": ["chain_sum@x"]}, "a weight is a number above 0"),
        ({"datasets": ["chain_sum@nan"]}, "a weight is a number above 0"),
        ({"datasets": ["chain_sum@inf"]}, "a weight is a number above 0"),
        ({"datasets": ["chain_sum", "chain_sum@2"]}, "chain_sum,chain_sum@2 has a name twice"),
        ({"datasets": ["chain_sum"], "config": "{"}, "config is no JSON"),
        ({"datasets": ["chain_sum"], "config": '{"other": {}}'}, "settings of other"),
        ({"datasets": ["chain_sum"], "config": '{"chain_sum": {"most": 3}}'}, "cannot be made with"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(UserError, match=message):
        ReasoningGym(ReasoningGym.Options(**options)).load_tasks("train", 0)


def test_ten_steps_on_three_data_sets(tmp_path):
    pytest.importorskip("rlhf_plugin_rloo", reason="a whole run needs an algorithm")
    settings = {"rollout.n": 2, "train.batch_size": 4, "train.steps": 10, "train.threads": 1, "rollout.max_new_tokens": 6}
    data = {"sources": [{"path": "reasoning_gym", "datasets": MIX, "size": 64}]}
    made = {"model": "quickstart", "data": data, "run_dir": str(tmp_path / "run"), "checkpoint.final": False}
    rlhf_host.train(algo="rloo", rewards="reasoning_gym", **made, **settings)
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert len(rows) == 10
    seen = {name for row in rows for name in row if name.startswith("reasoning_gym/")}
    assert seen == {f"reasoning_gym/{name.partition('@')[0]}" for name in MIX}


# --- levels ---------------------------------------------------------------------------------------


def levels(**options):
    return ReasoningGymLevels(
        ReasoningGymLevels.Options(**{"datasets": ["chain_sum@2", "leg_counting"], "groups": 2, **options})
    )


def play(plugin, tasks, score):
    """A step in which every task has groups of that score."""
    for task in tasks:
        rows = [Trajectory(f"e{number}", "g", task, [], score=score) for number in range(2)]
        plugin.keep_group(Group("g", task, rows))
    plugin.step_finished()


def where(task):
    return task.metadata["reasoning_gym"]


def test_problems_are_generated_at_a_level_that_follows_success():
    plugin = levels(most=2)
    stream = plugin.load_tasks("train", 0)
    first = [next(stream) for _ in range(6)]
    assert [where(task)["dataset"] for task in first].count("chain_sum") == 4
    assert {where(task)["level"] for task in first} == {0}
    play(plugin, [task for task in first if where(task)["dataset"] == "chain_sum"], 1.0)
    assert {name: level.level for name, level in plugin.levels.items()} == {"chain_sum": 1, "leg_counting": 0}
    second = [next(stream) for _ in range(6)]
    harder = next(task for task in second if where(task)["dataset"] == "chain_sum")
    assert (where(harder)["level"], where(harder)["config"]["max_terms"]) == (1, 3)
    assert judged(harder.ground_truth, harder).metrics["reasoning_gym/chain_sum/level"] == 1.0
    play(plugin, first, 1.0)
    assert plugin.levels["chain_sum"].level == 1, "groups of a level that is over say nothing"
    play(plugin, second, 1.0)
    play(plugin, [next(stream) for _ in range(6)], 1.0)
    assert plugin.levels["chain_sum"].level == 2, "the highest"
    for _ in range(4):
        play(plugin, [next(stream) for _ in range(6)], 0.0)
    assert {level.level for level in plugin.levels.values()} == {0}
    play(plugin, [next(stream) for _ in range(6)], 0.5)
    assert {level.level for level in plugin.levels.values()} == {0}
    assert len({task.prompt for task in (*first, *second)}) == 12


def test_the_stream_goes_on_where_its_state_was_taken():
    plugin, again = levels(), levels()
    stream = plugin.load_tasks("train", 0)
    play(plugin, [next(stream) for _ in range(7)], 1.0)
    again.load_state_dict(json.loads(json.dumps(plugin.state_dict())))
    other = again.load_tasks("train", 0)
    assert [next(other) for _ in range(9)] == [next(stream) for _ in range(9)]


def test_held_out_problems_are_of_all_levels_and_others():
    plugin = levels(most=3, eval_size=40)
    held_out = plugin.load_tasks("eval", 0)
    assert {where(task)["level"] for task in held_out} == {0, 1, 2, 3}
    stream = plugin.load_tasks("train", 0)
    assert not {where(task)["seed"] for task in held_out} & {where(next(stream))["seed"] for _ in range(200)}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"datasets": ["composite"]}, "composite has no curriculum|composite"),
        ({"level": 99}, "chain_sum has the levels 0 to 10, and level is 99"),
        ({"datasets": []}, "name data sets"),
        ({"rise": 0.1, "fall": 0.5}, "fall 0.5 is not below rise 0.1"),
        ({"level": 2, "most": 1}, "level 2 is above most 1"),
    ],
)
def test_bad_options_of_levels(options, message):
    with pytest.raises((UserError, ValueError), match=message):
        levels(**options).load_tasks("train", 0)


def test_a_run_whose_problems_get_harder_resumes_value_for_value(tmp_path):
    pytest.importorskip("rlhf_plugin_rloo", reason="a whole run needs an algorithm")
    settings = {"rollout.n": 2, "train.batch_size": 4, "train.threads": 1, "rollout.max_new_tokens": 6}
    data = {"sources": [{"path": "reasoning_gym_levels", "datasets": MIX[:2], "groups": 2, "rise": 0.01, "fall": 0.0}]}
    made = {"model": "quickstart", "data": data, "algo": "rloo", "rewards": "reasoning_gym", **settings}
    rlhf_host.train(run_dir=str(tmp_path / "whole"), **made, **{"train.steps": 6})
    rlhf_host.train(run_dir=str(tmp_path / "run"), **made, **{"train.steps": 3})
    rlhf_host.train(resume=str(tmp_path / "run"), steps=6)
    runs = [
        [json.loads(line) for line in (tmp_path / each / "metrics.jsonl").read_text().splitlines()] for each in ("run", "whole")
    ]
    names = ("loss", "grad_norm", "reward/mean", "reasoning_gym/chain_sum/level", "length/mean")
    assert [[row.get(name) for name in names] for row in runs[0]] == [[row.get(name) for name in names] for row in runs[1]]
    with pytest.raises(UserError, match="a task source has a state of its own"):
        rlhf_host.train(run_dir=str(tmp_path / "ahead"), async_depth=1, **made, **{"train.steps": 2})
