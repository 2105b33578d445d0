"""Every command starts in an interpreter of its own, which most tests leave out: they fork it (``tests/forks.py``)."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from rlhf_host.cli.main import main

ELSEWHERE = {
    "bisect": "plugins/builtin_syncs/rlhf-sync-delta/tests/test_runs.py",
    "train": "tests/training/test_resume.py",
    "rollout": "plugins/builtin_commands/rlhf-samples/tests/test_rollout.py",
    "generate": "plugins/builtin_commands/rlhf-samples/tests/test_generate.py",
    "merge-lora": "tests/cli/test_merge_lora.py",
    "doctor": "plugins/builtin_commands/rlhf-authoring/tests/test_doctor.py",
    "serve": "tests/cli/test_serve.py",
    "serve-reward": "tests/cli/test_serve_reward.py",
    "serve-training": "plugins/builtin_commands/rlhf-tinker/tests/test_server.py",
    "chat": "tests/cli/test_chat.py",
    "runs": "plugins/builtin_commands/rlhf-runs/tests/test_runs.py",
    "show": "plugins/builtin_commands/rlhf-runs/tests/test_runs.py",
    "compare": "plugins/builtin_commands/rlhf-runs/tests/test_runs.py",
    "report": "tests/runs/test_report.py",
    "translate": "plugins/builtin_commands/rlhf-translate/tests/test_command.py",
    "view": "tests/runs/test_view.py",
    "export": "tests/cli/test_export.py",
    "push": "tests/cli/test_push.py",
    "profile": "plugins/builtin_commands/rlhf-profile/tests/test_profile.py",
    "prometheus": "plugins/builtin_trackers/rlhf-tracker-prometheus/tests/test_files.py",
}
"""Commands that these files start in a process of their own."""


COMMANDS = {
    "eval": ["--checkpoint", "{run}", "--eval.data", "{prompts}", "--json"],
    "replay": ["{run}", "--reward", "vowels", "--algo", "rloo", "--output", "{replayed}"],
    "data": ["show", "{prompts}", "--actor.model", "{model}"],
    "episodes": ["{run}", "--count", "2"],
    "plan": ["--algo", "grpo", "--actor.model", "{model}", "--json"],
    "xray": ["{run}@1", "--algo", "rloo,raft", "--only-actor", "true", "--json"],
    "sweep": ["--vary.algo", "rloo,raft", "--seeds", "0,1", "--reward", "math_verifier", "--dry-run"],
    "env": ["list", "--json"],
    "plugins": ["--json"],
    "completion": ["bash"],
}


@pytest.fixture(scope="module")
def at_hand(rlhf, tiny_model, prompts, tmp_path_factory):
    """Words that stand in flags for a run, a model and files."""
    folder = tmp_path_factory.mktemp("start")
    small = ["--rollout.n", "4", "--rollout.max-new-tokens", "8", "--train.batch-size", "4", "--train.steps", "1"]
    chosen = ["--algo", "rloo", "--reward", "vowels", "--actor.model", tiny_model, "--data", prompts, "--kernels", "none"]
    rlhf.run("train", *chosen, *small, "--trajectories.tokens", "--run-dir", folder / "run")
    return {"run": folder / "run", "replayed": folder / "replayed.jsonl", "prompts": prompts, "model": tiny_model}


def test_every_command_is_started_somewhere():
    assert COMMANDS.keys() | ELSEWHERE.keys() == main.installed().keys()


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_starts_and_does_its_work(rlhf_process, at_hand, command):
    done = rlhf_process.run(command, *(word.format(**at_hand) for word in COMMANDS[command]))
    assert "Traceback" not in done.stdout + done.stderr
    said = {
        "eval": lambda: "eval/pass@1" in json.loads(done.stdout),
        "replay": lambda: at_hand["replayed"].read_text().count("\n") == 16,
        "data": lambda: "1: 0+0= — label 0" in done.stdout,
        "episodes": lambda: done.stdout.count("answer") == 2,
        "plan": lambda: json.loads(done.stdout)["phases"][-1]["phase"] == "sampling",
        "xray": lambda: [each["name"] for each in json.loads(done.stdout)["algorithms"]] == ["rloo", "raft"],
        "sweep": lambda: done.stdout.endswith("algo-rloo_seed-0\nalgo-rloo_seed-1\nalgo-raft_seed-0\nalgo-raft_seed-1\n"),
        "env": lambda: isinstance(json.loads(done.stdout), list),
        "plugins": lambda: "rloo" in {plugin["name"] for plugin in json.loads(done.stdout)},
        "completion": lambda: "_RLHF_COMPLETE=bash_complete" in done.stdout,
    }
    assert said[command](), done.stdout


def test_the_package_runs_as_the_command():
    done = subprocess.run([sys.executable, "-m", "rlhf_host", "rnus"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (2, "Error: no command 'rnus'; did you mean 'runs'?\n")
