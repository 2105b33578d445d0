"""Every command starts in an interpreter of its own, which most tests leave out: they fork it (``tests/forks.py``)."""

from __future__ import annotations

import json
import subprocess
import sys

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
    "chat": "tests/cli/test_chat.py",
    "runs": "plugins/builtin_commands/rlhf-runs/tests/test_runs.py",
    "show": "plugins/builtin_commands/rlhf-runs/tests/test_runs.py",
    "compare": "plugins/builtin_commands/rlhf-runs/tests/test_runs.py",
    "report": "tests/runs/test_report.py",
    "translate": "plugins/builtin_commands/rlhf-translate/tests/test_command.py",
    "view": "tests/runs/test_view.py",
    "export": "tests/cli/test_export.py",
    "push": "tests/cli/test_push.py",
}
"""Commands that these files start with ``rlhf_process``."""


def test_every_command_starts_and_does_its_work(rlhf, rlhf_process, small_run, tiny_model, prompts, tmp_path):
    run_dir, replayed = tmp_path / "run", tmp_path / "replayed.jsonl"
    rlhf.run(*small_run, "--train.steps", "1", "--trajectories.tokens", "--run-dir", run_dir)
    flags = {
        "eval": ["--checkpoint", run_dir, "--eval.data", prompts, "--json"],
        "replay": [run_dir, "--reward", "vowels", "--algo", "rloo", "--output", replayed],
        "data": ["show", prompts, "--actor.model", tiny_model],
        "episodes": [run_dir, "--count", "2"],
        "plan": ["--algo", "grpo", "--actor.model", tiny_model, "--json"],
        "plugins": ["--json"],
        "completion": ["bash"],
    }
    assert flags.keys() | ELSEWHERE.keys() == main.installed().keys()
    done = {command: rlhf_process.run(command, *flags[command]) for command in flags}
    assert "Traceback" not in "".join(each.stdout + each.stderr for each in done.values())
    assert "eval/pass@1" in json.loads(done["eval"].stdout)
    assert "1: 0+0= — label 0" in done["data"].stdout
    assert done["episodes"].stdout.count("answer") == 2
    assert replayed.read_text().count("\n") == 16
    assert json.loads(done["plan"].stdout)["phases"][-1]["phase"] == "sampling"
    assert "rloo" in {plugin["name"] for plugin in json.loads(done["plugins"].stdout)}
    assert "_RLHF_COMPLETE=bash_complete" in done["completion"].stdout


def test_the_package_runs_as_the_command():
    done = subprocess.run([sys.executable, "-m", "rlhf_host", "rnus"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (2, "Error: no command 'rnus'; did you mean 'runs'?\n")
