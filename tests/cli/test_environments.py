"""``--config FILE.py``, an environment: tasks, rewards, tools and settings of one file, by one flag."""

from __future__ import annotations

import json
import re
import shutil

import pytest
import yaml
from rlhf_authoring.commands.new import template_folder

OPTIONS = ("--rollout.n", "2", "--train.batch-size", "2", "--train.steps", "1", "--train.threads", "1")


@pytest.fixture
def train(rlhf_here, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = ("--algo", "rloo", "--actor.model", "quickstart", "--rollout.max-new-tokens", "4", "--run-dir", "run")
    return lambda *flags: rlhf_here("train", *model, *OPTIONS, *flags)


def test_the_new_environment_trains_and_evaluates(train, rlhf_here, tmp_path):
    made = rlhf_here("plugins", "new", "environment", "my-products")
    assert made.exit_code == 0, made.output
    assert re.search(r"train --algo rloo --config my_products\.py", made.output)
    done = train("--config", "my_products.py", "--trajectories.every", "1")
    assert done.exit_code == 0, done.output
    assert "continue training" in done.output
    assert "a model of your own" not in done.output, "names alone would be another run"
    saved = yaml.safe_load((tmp_path / "run/config.yaml").read_text())
    assert {alias: choice["weight"] for alias, choice in saved["reward"].items()} == {"right": 1.0, "short": 0.1}
    assert saved["agent"]["tools"].endswith("my_products.py:multiply")
    assert saved["agent"]["max_turns"] == 4
    assert saved["data"]["system_prompt"] == saved["eval"]["data"]["system_prompt"]
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    [row] = [row for row in rows if "loss" in row]
    assert row["reward/mean"] == pytest.approx(row["reward/right"] + 0.1 * row["reward/short"])
    judged = rlhf_here("eval", "--checkpoint", "run", "--json")
    assert json.loads(judged.stdout)["eval/samples"] == 64
    again = rlhf_here("plugins", "new", "environment", "my-products")
    assert (again.exit_code, "already exists" in again.output) == (2, True)


def test_flags_override_its_parts(train, tmp_path):
    shutil.copy(template_folder() / "environment.py", tmp_path / "game.py")
    own = ("--reward.short.weight", "0", "--agent", "single_turn", "--data", "arithmetic")
    shown = train("--config", "game.py", *own, "--print-config")
    assert shown.exit_code == 0, shown.output
    config = yaml.safe_load(shown.stdout)
    assert config["reward"]["short"]["weight"] == 0
    assert config["agent"]["name"] == "single_turn"
    assert [source["path"] for source in config["data"]["sources"]] == ["arithmetic"]


def test_an_environment_in_a_package_goes_by_its_name(site):
    text = (template_folder() / "environment.py").read_text()
    modules = {"game_package/__init__.py": "", "game_package/game.py": text}
    site.install("rlhf-plugin-game", {"rlhf.presets": "game = game_package:game.py"}, modules)
    done = site.rlhf("train", "--algo", "rloo", "--config", "game", "--actor.model", "quickstart", "--print-config")
    assert done.returncode == 0, done.stderr
    assert yaml.safe_load(done.stdout)["reward"]["right"]["path"].endswith("game_package/game.py")


def test_a_later_file_overrides_an_earlier_one(train, tmp_path):
    shutil.copy(template_folder() / "environment.py", tmp_path / "game.py")
    (tmp_path / "run.yaml").write_text("rollout: {temperature: 0.5}\n")
    (tmp_path / "later.yaml").write_text("rollout: {temperature: 0.7}\n")
    files = [word for name in ("game.py", "grpo", "run.yaml", "later.yaml") for word in ("--config", name)]
    done = train(*files, "--print-config")
    assert (done.exit_code, done.stderr) == (0, "")
    assert yaml.safe_load(done.stdout)["rollout"]["temperature"] == 0.7
    assert "leave --config out" in train("--resume", "run", "--config", "x").output


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1", "is no environment: it has none of tasks, rewards, tools, agent"),
        ("tasks = 3", r"tasks is a function \(split, seed\), or the name of data, not a int"),
        ("def tasks(n): ...", "tasks takes n; tasks are made of split and seed"),
        ("def tasks(): return [{'label': 3}]", "prompt"),
        ("rewards = ['right']", "rewards has 'right', which is no function"),
        ("def right(text): ...\nrewards = {right: 'much'}", "the weight of right is 'much', not a number"),
        ("def right(a, b, c): ...\nrewards = right", r"takes \(a, b, c\)"),
        ("def add(a): ...\ntools = [add]", "no schema for add"),
        ("class A:\n    def reset(self): ...\ndef f(): ...\nagent, tools = A, [f]", "it has tools and an agent"),
        ("agent = 3", "agent has 3, which is no function or class"),
        ("rewards = len\nsystem_prompt = 3", "system_prompt is an int, expected str"),
        ("def right(text): ...\nrewards = right\nsettings = {'rollout': {'m': 3}}", r"rollout\.m"),
        ("1 / 0", "ZeroDivisionError"),
    ],
)
def test_a_file_that_is_no_environment_is_refused(text, message, train, tmp_path):
    (tmp_path / "odd.py").write_text(text + "\n")
    rest = ("--reward", "math_verifier") if "def tasks" in text else ("--data", "arithmetic")
    done = train("--config", "odd.py", *rest)
    assert done.exit_code == 2, done.output
    assert re.search(message, done.output), done.output
    assert "Traceback" not in done.output
    assert not (tmp_path / "run").exists()
