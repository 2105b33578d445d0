"""The plugin on each page is complete: built as a wheel, installed, its own tests pass, and a run with it trains."""

from __future__ import annotations

import json
import tomllib

import pytest

from rlhf_host.plugins.discovery import GROUPS

from .conftest import DOCS

KIND_OF = {
    "algo": "algo",
    "reward": "reward",
    "agent": "agent",
    "extension": "extension",
    "tasks": "tasks",
    "tracker": "tracker",
    "weight-sync": "weight_sync",
    "preset": "preset",
    "kernels": "kernels",
    "command": "command",
}
PAGES = {name: DOCS / "plugins" / f"{name}.md" for name in KIND_OF}

SMALL = {
    "--rollout.n": "2",
    "--rollout.max-new-tokens": "6",
    "--train.batch-size": "2",
    "--train.steps": "2",
    "--train.threads": "1",
}
RUNS = {
    "algo": ["--algo", "median", "--reward", "math_verifier"],
    "reward": ["--algo", "rloo", "--reward", "concise", "--reward.concise.length", "3"],
    "agent": ["--algo", "rloo", "--agent", "guess", "--agent.max-turns", "2"],
    "extension": ["--algo", "rloo", "--reward", "math_verifier", "--with", "budget", "--with.budget.tokens", "1"],
    "tasks": ["--algo", "rloo", "--reward", "math_verifier", "--data", "products", "--data.products.largest", "5"],
    "tracker": ["--algo", "rloo", "--reward", "math_verifier", "--tracker", "csv"],
    "weight-sync": ["--algo", "rloo", "--reward", "math_verifier", "--sync", "fingerprint", "--algo.entropy-coef", "0.1"],
    "preset": ["--config", "lab", "--reward", "math_verifier"],
    "kernels": ["--algo", "rloo", "--reward", "math_verifier", "--kernels", "torch_norms"],
}


def test_every_kind_that_authors_write_has_a_page():
    plain = {kind: f"plugins/{kind}" for kind in ("engine", "backend", "runtime")} | {"server": "serving", "data": "offline"}
    assert set(KIND_OF.values()) == set(GROUPS) - plain.keys()
    assert all(path.is_file() for path in (*PAGES.values(), *(DOCS / f"{page}.md" for page in plain.values())))


@pytest.mark.parametrize("kind", KIND_OF)
def test_the_plugins_files_say_what_it_is(kind, install):
    project = install(PAGES[kind]).project
    settings = tomllib.loads((project / "pyproject.toml").read_text())["project"]
    ((group, points),) = settings["entry-points"].items()
    assert group == GROUPS[KIND_OF[kind]]
    assert len(points) == 1
    assert "rlhf-host>=0.10,<0.11" in settings["dependencies"]
    assert list((project / "tests").glob("test_*.py"))


@pytest.mark.parametrize("kind", KIND_OF)
def test_the_plugins_own_tests_pass(kind, install, fork, environment):
    plugin = install(PAGES[kind])
    own = {**environment, "PYTHONPATH": str(plugin.site)}
    process = fork(["-q", "-p", "no:cacheprovider", "tests"], own, plugin.project, program="pytest")
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, out + err
    assert "passed" in out


@pytest.mark.parametrize("kind", RUNS)
def test_a_run_with_the_plugin_trains(kind, install, rlhf_here, monkeypatch, tiny_model, prompts, tmp_path):
    monkeypatch.syspath_prepend(str(install(PAGES[kind]).site))
    given = [*RUNS[kind], "--actor.model", tiny_model, "--run-dir", tmp_path / "run"]
    given += [] if kind == "tasks" else ["--data", prompts]
    given += ["--eval.data", prompts] if kind == "preset" else []
    done = rlhf_here("train", *given, *(word for pair in SMALL.items() for word in pair))
    assert done.exit_code == 0, done.output
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows][-2:] == [1, 2]
    LEFT_BEHIND[kind](tmp_path / "run", rows)


def algo(run_dir, rows):
    assert "median/spread" in rows[-1]


def reward(run_dir, rows):
    assert rows[-1]["concise/characters"] > 0
    assert "reward/concise" in rows[-1]


def agent(run_dir, rows):
    assert "reward/agent" in rows[-1]
    assert rows[-1]["length/max"] > 6, "two turns"


def extension(run_dir, rows):
    import torch

    (state,) = sorted(run_dir.glob("checkpoints/step-000002/*.pt"))
    assert torch.load(state, weights_only=True)["plugins"]["extension:budget"] == {"price": pytest.approx(2e-4)}


def tasks(run_dir, rows):
    prompts = [json.loads(line)["prompt"] for file in run_dir.glob("trajectories/*.jsonl") for line in file.open()]
    assert prompts
    assert all("*" in prompt for prompt in prompts)


def tracker(run_dir, rows):
    lines = (run_dir / "metrics.csv").read_text().splitlines()
    assert [line.split(",")[0] for line in lines] == ["step", "1", "2"]


def weight_sync(run_dir, rows):
    lines = [json.loads(line) for line in (run_dir / "weights.jsonl").read_text().splitlines()]
    assert [line["version"] for line in lines] == sorted({line["version"] for line in lines})
    assert len({line["sum"] for line in lines}) > 1, "training moved the weights"


def preset(run_dir, rows):
    from ruamel.yaml import YAML

    config = YAML(typ="safe").load((run_dir / "config.yaml").read_text())
    assert config["checkpoint"]["best"] == "eval/reward/mean"
    assert config["algo"]["entropy_coef"] == 0.001
    assert config["rollout"]["n"] == 2


def kernels(run_dir, rows):
    chosen = json.loads((run_dir / "plugins.json").read_text())
    assert [plugin["name"] for plugin in chosen if plugin["kind"] == "kernels"] == ["torch_norms"]


LEFT_BEHIND = {
    "kernels": kernels,
    "algo": algo,
    "reward": reward,
    "agent": agent,
    "extension": extension,
    "tasks": tasks,
    "tracker": tracker,
    "weight-sync": weight_sync,
    "preset": preset,
}
