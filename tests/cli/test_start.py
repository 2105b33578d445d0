"""Every command starts in an interpreter of its own, which most tests leave out: they fork it (``tests/forks.py``)."""

from __future__ import annotations

import json

from rlhf_host.cli.main import COMMANDS

ELSEWHERE = {
    "train": "training/test_resume.py",
    "rollout": "cli/test_rollout.py",
    "generate": "cli/test_generate.py",
    "merge-lora": "cli/test_merge_lora.py",
    "doctor": "cli/test_doctor.py",
    "serve": "cli/test_serve.py",
    "serve-reward": "cli/test_serve_reward.py",
    "chat": "cli/test_chat.py",
    "runs": "cli/test_runs.py",
    "show": "cli/test_runs.py",
    "compare": "cli/test_runs.py",
    "report": "runs/test_report.py",
    "translate": "translate/test_translate.py",
    "view": "runs/test_view.py",
    "export": "cli/test_export.py",
    "push": "cli/test_push.py",
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
        "plugins": ["--json"],
        "completion": ["bash"],
    }
    assert flags.keys() | ELSEWHERE.keys() == COMMANDS.keys()
    done = {command: rlhf_process.run(command, *flags[command]) for command in flags}
    assert "Traceback" not in "".join(each.stdout + each.stderr for each in done.values())
    assert "eval/pass@1" in json.loads(done["eval"].stdout)
    assert "1: 0+0= — label 0" in done["data"].stdout
    assert done["episodes"].stdout.count("answer") == 2
    assert replayed.read_text().count("\n") == 16
    assert "rloo" in {plugin["name"] for plugin in json.loads(done["plugins"].stdout)}
    assert "_RLHF_COMPLETE=bash_complete" in done["completion"].stdout
