"""Generated problems: their mix, their seeds, and who judges them."""

import json
import os
import subprocess
import sys

import pytest
from rlhf_authoring import reward_contract, tasks_contract
from rlhf_plugin_reasoning_gym import ReasoningGym, ReasoningGymReward, reward

import rlhf_host
from rlhf_host import Reward, Segment, Task, Trajectory, Unjudged, UserError

MIX = ["chain_sum@2", "leg_counting", "spell_backward"]
TASKS = ReasoningGym(ReasoningGym.Options(datasets=MIX, size=8)).load_tasks("train", 0)

TestTasks = tasks_contract("reasoning_gym", options={"datasets": MIX, "size": 40, "eval_size": 8})
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
