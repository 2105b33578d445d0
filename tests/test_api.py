"""Runs from Python: as easy as the command line, with functions and objects where it has names."""

import asyncio
import itertools
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import BaseModel, ConfigDict
from ruamel.yaml import YAML

import rlhf_host
from rlhf_host import Advantages, Drop, LossTerm, Needs, PluginError, Reward, RoleNeed, RunError, UserError, hookimpl
from rlhf_host.records.metric_names import MOST

SMALL = {"rollout": {"n": 4, "max_new_tokens": 8}, "train": {"steps": 2, "batch_size": 2, "threads": 1}}
ROWS = [{"prompt": f"{i}+{i}=", "label": str(2 * i)} for i in range(8)]


def vowels(text, label):
    return sum(char in "aeiou" for char in text) / 8


class Plain:
    """Rewards as advantages, and the policy gradient."""

    class Options(BaseModel):
        model_config = ConfigDict(extra="forbid")
        scale: float = 1.0

    def __init__(self, options=None):
        self.options = options or self.Options()
        self.steps = 0

    @hookimpl
    def needs(self):
        return Needs(data="prompts", roles=(RoleNeed("actor", trainable=True, source=None),))

    @hookimpl
    def compute_advantages(self, experience):
        self.steps += 1
        return Advantages(self.options.scale * experience.rewards[:, None] * experience.action_mask)

    @hookimpl
    def compute_loss(self, role, outputs, batch):
        yield LossTerm("plain", -batch.advantages * outputs.logprobs)


class Sift:
    @hookimpl
    def keep_group(self, group):
        return True if group.task.index % 2 else Drop("even")


@pytest.fixture
def small(tiny_model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return {"model": tiny_model, "data": ROWS, "run_dir": "run", **SMALL}


def test_data_may_be_columns_and_settings_have_short_names(small):
    settings = {**small, "rollout": {}, "train": {"threads": 1}, "data": {"q": ["1+1=", "12+34="], "a": ["2", "46"]}}
    names = {"data.prompt_key": "q", "data.label_key": "a"}
    run = rlhf_host.train(algo=Plain, rewards=vowels, **settings, **names, steps=1, batch_size=2, n=2, max_new_tokens=4)
    assert {(row["prompt"], row["label"]) for row in run.files.rows("train", 1)} == {("1+1=", "2"), ("12+34=", "46")}
    assert (run.config.rollout.n, run.config.rollout.max_new_tokens, run.config.train.steps) == (2, 4, 1)
    assert run.evaluate(n=3)["eval/samples"] == 6


def test_importing_loads_no_torch():
    program = "import sys, rlhf_host; print([name for name in ('torch', 'transformers', 'pydantic') if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout == "[]\n"
    with pytest.raises(AttributeError, match="no attribute 'tarin'"):
        _ = rlhf_host.tarin


def test_a_function_is_a_reward_and_rows_are_data(small):
    run = rlhf_host.train(algo="rloo", rewards=vowels, **small)
    assert run.outcome.status == "finished"
    assert [row["step"] for row in run.metrics] == [1, 2]
    assert all(row["reward/mean"] == row["reward/vowels"] for row in run.metrics)
    assert run.run_dir == Path("run")
    assert repr(run) == "Run(finished at step 2, 'run')"
    assert (run.model / "config.json").is_file()


def test_it_is_the_run_the_command_line_makes(small, rlhf_here, tiny_model):
    """Same model, data, reward and settings, the reward once a function and once a plugin: the same numbers."""
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    run = rlhf_host.train(algo="rloo", rewards={"vowels": vowels}, **small | {"data": {"sources": "rows.jsonl"}})
    flags = ["--rollout.n", 4, "--rollout.max-new-tokens", 8, "--train.steps", 2, "--train.batch-size", 2, "--train.threads", 1]
    chosen = ["--algo", "rloo", "--reward", "vowels", "--actor.model", tiny_model, "--data", "rows.jsonl", "--run-dir", "told"]
    result = rlhf_here("train", *chosen, *flags)
    assert result.exit_code == 0, result.output
    told = [json.loads(line) for line in Path("told", "metrics.jsonl").read_text().splitlines()]
    for name in ("loss", "grad_norm", "reward/mean", "length/mean"):
        assert [row[name] for row in run.metrics] == [row[name] for row in told]


def test_several_rewards_with_weights(small):
    def long(trajectory):
        return Reward(trajectory.action_length / 8, metrics={"own_tokens": trajectory.action_length})

    settings = small | {"train.steps": 1}
    settings["train"] = {"batch_size": 2, "threads": 1}
    run = rlhf_host.train(algo="rloo", rewards=[vowels, {"name": long, "weight": 0.5}, lambda text: 0.25], **settings)
    (row,) = run.metrics
    assert row["reward/mean"] == pytest.approx(row["reward/vowels"] + 0.5 * row["reward/long"] + row["reward/reward"], abs=1e-6)
    assert row["own_tokens"] > 0


def test_metrics_with_names_of_the_run_or_of_no_form_end_no_run(small, caplog):
    names = itertools.count()

    def judge(trajectory):
        own = dict.fromkeys(("reward/max", "version", "time/step", "loss", "step", "samples", "eval/reward/mean"), 77.0)
        return Reward(1.0, metrics=own | {f"task-{next(names)}": 1.0 for _ in range(50)})

    run = rlhf_host.train(algo="rloo", rewards=judge, eval_data=ROWS[:2], **small | {"eval.n": 2})
    row = run.metrics[-1]
    assert (row["step"], row["reward/max"], row["version"]) == (2, 1.0, 2.0)
    assert {row[f"plugin/{name}"] for name in ("reward/max", "version", "time/step", "step", "eval/reward/mean")} == {77.0}
    assert (row["eval/samples"], row["eval/plugin/samples"], row["eval/reward/mean"]) == (4.0, 77.0, 1.0)
    assert len({name for one in run.metrics for name in one if name.startswith("task-")}) < 2 * MOST
    assert sum("are left out" in message for message in caplog.messages) == 2, "once in training, once in evaluation"


def test_an_algorithm_is_an_instance_or_a_class(small):
    algorithm = Plain()
    run = rlhf_host.train(algo=algorithm, rewards=vowels, extensions=[Sift], **small)
    assert algorithm.steps == 2
    assert run.metrics[-1]["rollout/dropped/even"] >= 1
    assert run.metrics[-1]["loss/plain"] == run.metrics[-1]["loss"]
    second = rlhf_host.train(
        algo={"name": Plain, "scale": 2.0}, rewards=vowels, extensions=[Sift], **small | {"run_dir": "scaled"}
    )
    assert second.metrics[0]["loss"] == pytest.approx(2 * run.metrics[0]["loss"], rel=1e-5)


def test_a_class_is_asked_for_its_options(small):
    with pytest.raises(PluginError, match=r"algo\.scael: algo 'Plain' has no option 'scael'; did you mean 'scale'"):
        rlhf_host.train(algo={"name": Plain, "scael": 2.0}, rewards=vowels, **small)
    with pytest.raises(PluginError, match="it takes no options"):
        rlhf_host.train(algo={"name": Plain(), "scale": 2.0}, rewards=vowels, **small)
    assert not Path("run").exists()


def test_it_runs_inside_a_running_loop(small):
    async def cell():
        return rlhf_host.train(algo="rloo", rewards=vowels, **small)

    assert asyncio.run(cell()).outcome.step == 2


def test_the_result_evaluates_and_generates(small):
    run = rlhf_host.train(algo="rloo", rewards=lambda text, label: label in text, **small)
    found = run.evaluate(eval={"n": 2})
    assert found["eval/samples"] == 16
    assert {"eval/pass@1", "eval/pass@2"} <= set(found)
    assert run.evaluate(data=ROWS[:3])["eval/samples"] == 3
    assert run.evaluate(rewards=lambda text: 0.5)["eval/reward/mean"] == 0.5
    answers = run.generate(["1+1=", "2+2="], n=3)
    assert [len(each) for each in answers] == [3, 3]
    assert answers == run.generate(["1+1=", "2+2="], n=3)
    assert answers != run.generate(["1+1=", "2+2="], n=3, seed=1)


def test_evaluate_takes_a_model_and_functions(small, tiny_model):
    found = rlhf_host.evaluate(model=tiny_model, rewards=vowels, data=ROWS, rollout={"max_new_tokens": 4})
    assert found["eval/samples"] == 8


def test_each_of_several_rewards_is_evaluated(small, tiny_model):
    judges = {"low": lambda text: 0.25, "high": lambda text: 0.75}
    found = rlhf_host.evaluate(model=tiny_model, rewards=judges, data=ROWS[:3], rollout=small["rollout"])
    assert {name: found[f"eval/reward/{name}"] for name in ("low", "high", "mean")} == {"low": 0.25, "high": 0.75, "mean": 1.0}


def sampled(**settings):
    """The trajectories of one step."""
    with rlhf_host.session(**settings) as running:
        return running.sample(1, running.config.train.batch_size).trajectories_in_order()


@pytest.mark.parametrize("kind", ["dataset", "splits", "frame", "generator", "tuple"])
def test_data_in_memory(small, kind, tiny_model):
    import datasets
    import pandas

    table = datasets.Dataset.from_list(ROWS)
    data = {
        "dataset": table,
        "splits": datasets.DatasetDict({"test": table.select(range(2)), "train": table}),
        "frame": pandas.DataFrame(ROWS),
        "generator": (row for row in ROWS),
        "tuple": tuple(ROWS),
    }[kind]
    rows = sampled(**{**small, "data": data, "run_dir": None}, **{"data.shuffle": False})
    assert [row.task.prompt for row in rows] == [ROWS[i]["prompt"] for i in (0,) * 4 + (1,) * 4]


def test_columns_are_named_as_for_files(small):
    data = [{"frage": "1+1=", "antwort": "2"}]
    rows = sampled(**{**small, "data": data, "run_dir": None}, **{"data.prompt_key": "frage", "data.label_key": "antwort"})
    assert {(row.task.prompt, row.task.ground_truth) for row in rows} == {("1+1=", "2")}


def test_malformed_rows_are_named_by_their_place(small):
    with pytest.raises(UserError, match=r"data\[1\]: 'prompt' is empty"):
        sampled(**{**small, "data": [ROWS[0], {"prompt": "", "label": "1"}], "run_dir": None})


# --- what a run with objects leaves behind ------------------------------------------------------


def test_the_run_directory_says_what_no_file_can_hold(small, rlhf_here):
    rlhf_host.train(algo=Plain, rewards=vowels, **small)
    config = YAML(typ="safe").load(Path("run", "config.yaml").read_text())
    assert config["algo"]["name"] == "python:Plain"
    assert config["reward"]["vowels"]["name"] == "python:vowels"
    plugins = {entry["kind"]: entry for entry in json.loads(Path("run", "plugins.json").read_text())}
    assert plugins["reward"]["object"].endswith(":vowels")
    assert plugins["algo"]["object"].endswith(":Plain")
    assert plugins["reward"]["distribution"] is None

    result = rlhf_here("train", "--resume", "run", "--train.steps", "4")
    assert result.exit_code == 2
    assert "reward 'vowels' is a Python object, which cannot be saved in a file: continue from Python with" in result.output
    assert "rlhf_host.train(resume=RUN_DIR, rewards=...), or choose an installed reward" in result.output
    assert "algo 'Plain' is a Python object" in result.output
    result = rlhf_here("train", "--resume", "run", "--train.steps", "4", "--algo", "rloo", "--reward", "vowels", "--force")
    assert result.exit_code == 2
    assert "the data 'data' was given in Python, and is not in a file" in result.output


def test_a_resume_from_python_goes_on_to_the_last_bit(small):
    whole = rlhf_host.train(algo=Plain, rewards=vowels, **small | {"run_dir": "whole", "train": {**SMALL["train"], "steps": 4}})
    rlhf_host.train(algo=Plain, rewards=vowels, **small)
    with pytest.raises(UserError, match="reward 'vowels' is a Python object"):
        rlhf_host.train(resume="run", algo=Plain, data=ROWS)
    resumed = rlhf_host.train(resume="run", algo=Plain, rewards=vowels, data=ROWS, **{"train.steps": 4})
    assert [row["grad_norm"] for row in resumed.metrics] == [row["grad_norm"] for row in whole.metrics]
    assert resumed.run_dir == Path("run")


def test_a_run_from_python_with_names_alone_resumes_anywhere(small, rlhf_here, reward_plugins):
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    rlhf_host.train(algo="rloo", rewards="vowels", **small | {"data": "rows.jsonl"})
    result = rlhf_here("train", "--resume", "run", "--train.steps", "3")
    assert result.exit_code == 0, result.output


# --- mistakes -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"algo": None}, "no algorithm is chosen"),
        ({"rewards": None}, "no reward is chosen"),
        ({"trian": {"steps": 1}}, "trian: no such key; did you mean 'train'"),
        ({"train": {"stesp": 1}}, r"train\.stesp: no such key; did you mean 'steps'"),
        ({"train.steps": -1, "train": {}}, r"train\.steps: should be greater than 0, not -1"),
        ({"train.steps": 3}, r"train\.steps: is given twice"),
        ({"rewards": [vowels, vowels]}, "rewards: 'vowels' is chosen twice"),
        ({"rewards": [lambda text: 1.0, lambda text: 2.0]}, "two objects are called 'reward'|'reward' is chosen twice"),
        ({"rewards": 3.0}, "reward: float is neither a plugin's name nor an object with hooks"),
        (
            {"algo": lambda experience: None},
            "algo 'algo' .*neither a plugin's name nor a class or object with methods marked @hookimpl",
        ),
        ({"rewards": lambda a, b, c: 1.0}, r"reward 'reward' takes \(a, b, c\): a reward function takes"),
        ({"algo": "rlo"}, "no algo named 'rlo' is installed; did you mean 'rloo'"),
        ({"data": 7}, "data is a path, a name, or rows with a prompt each, not int"),
        ({"data": [{"prompt": "x"}, "file.jsonl"]}, "data mixes rows and names of sources"),
        ({"data": ["1+1=", "2+2="]}, r"data has '1\+1=', which is no file and no name: rows are dictionaries"),
        ({"stpes": 3}, "stpes: no such argument; did you mean 'steps'"),
        ({"data": []}, "no training data|data has no rows"),
        ({"model": object()}, "model is a directory, hub name or GGUF file, not object: write it with save_pretrained first"),
        ({"resume": "run"}, "resume uses the run's own directory and settings"),
        ({"dry_run": "no"}, "^dry_run is True or False, not 'no'$"),
        ({"dry_run": 0}, "^dry_run is True or False, not 0$"),
        ({"resume": "run", "force": "false"}, "^force is True or False, not 'false'$"),
        ({"algo": ""}, "^algo: should not be empty$"),
        ({"algo": {"name": ""}}, r"^algo\.name: should not be empty$"),
        ({"agent": ""}, "^agent: should not be empty$"),
    ],
)
def test_mistakes_are_one_clear_line(small, arguments, message):
    given = {"algo": "rloo", "rewards": vowels, **small, **arguments}
    with pytest.raises(UserError, match=message):
        rlhf_host.train(**given)
    assert not Path("run").exists()


def test_a_dry_run_looks_at_everything_and_writes_nothing(small, capsys):
    run = rlhf_host.train(algo="rloo", rewards=vowels, **small, dry_run=True, disable="ppo", **{"algo.clip_eps": 0.1})
    assert (run.outcome.status, run.config.algo.model_dump()["clip_eps"]) == ("planned", 0.1)
    assert not Path("run").exists()
    assert "The run would be written to run." in capsys.readouterr().out
    with pytest.raises(UserError, match=r"no algo named 'rloo' is installed|rloo.* is disabled"):
        rlhf_host.train(algo="rloo", rewards=vowels, **small, dry_run=True, disable=["rloo"])
    with pytest.raises(UserError, match=r"python:data|prompt"):
        rlhf_host.train(algo="rloo", rewards=vowels, **{**small, "data": [{"question_": "x"}]}, dry_run=True)


def test_a_function_that_fails_stops_the_run_with_its_reason(small):
    def broken(text):
        raise ValueError("no idea")

    with pytest.raises(RunError, match=r"could not be judged .*broken: ValueError: no idea"):
        rlhf_host.train(algo="rloo", rewards=broken, **small)


def test_a_few_answers_that_cannot_be_judged_are_told_with_the_reason(small, caplog):
    def picky(text, label):
        if label == "0":
            raise KeyError("my bug")
        return 1.0

    rlhf_host.train(algo=Plain, rewards=picky, **{**small, "train": {"steps": 4, "batch_size": 2, "threads": 1}})
    told = [line for line in caplog.messages if "my bug" in line]
    assert len(told) == 1, "once, not at every step"
    assert "4 of 8 trajectories could not be judged and are left out; most often: picky: KeyError: 'my bug' (" in told[0]
    assert re.search(r"test_api\.py:\d+\) \(4 times\)", told[0])


class Exploding(Plain):
    @hookimpl
    def compute_loss(self, role, outputs, batch):
        yield LossTerm("plain", outputs.logprobs * float("inf"))


def test_the_dump_of_a_step_that_did_not_happen_is_trained_on(small, tiny_model):
    with pytest.raises(RunError, match=r"its trajectories are in run/nonfinite/step-000001\.jsonl"):
        rlhf_host.train(algo=Exploding, rewards=vowels, **small)
    settings = {"model": tiny_model, "from_trajectories": "run/nonfinite/step-000001.jsonl", **SMALL}
    with pytest.raises(RunError, match="the loss is"):
        rlhf_host.train(algo=Exploding, run_dir="again", **settings)
    mended = rlhf_host.train(algo=Plain, run_dir="mended", **settings)
    healthy = rlhf_host.train(algo=Plain, rewards=vowels, **small | {"run_dir": "healthy"})
    assert mended.metrics[0]["grad_norm"] == healthy.metrics[0]["grad_norm"]
