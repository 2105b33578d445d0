"""``rlhf eval`` up to the first sample, and how it prints."""

from __future__ import annotations

import json
from pathlib import Path

import pytest


@pytest.fixture
def evaluated(monkeypatch: pytest.MonkeyPatch):
    """What would be evaluated, instead of sampling."""
    from rlhf_host.training import evaluate_only

    class Evaluated:
        def __call__(self, config, manager, output):
            self.config, self.plugins = config, [item.key for item in manager.loaded]
            return {"eval/pass@1": 0.123456, "eval/samples": 8.0}

    evaluated = Evaluated()
    monkeypatch.setattr(evaluate_only, "evaluate_only", evaluated)
    return evaluated


def model(path: str) -> Path:
    Path(path).mkdir(parents=True)
    Path(path, "config.json").write_text("{}")
    return Path(path)


def test_it_prints_a_table_or_json(rlhf, evaluated):
    flags = ["eval", "--actor.model", "m", "--eval.data", "sums", "--reward", "length"]
    table = rlhf(*flags)
    assert table.exit_code == 0, table.output
    assert [line.split() for line in table.stdout.splitlines()] == [
        ["metric", "value"],
        ["eval/pass@1", "0.1235"],
        ["eval/samples", "8"],
    ]
    assert json.loads(rlhf(*flags, "--json").stdout) == {"eval/pass@1": 0.123456, "eval/samples": 8.0}
    assert evaluated.plugins == ["agent:single_turn", "reward:length"]


def test_data_and_rewards_default_to_those_of_training(rlhf, evaluated):
    Path("run.yaml").write_text("actor: {model: m}\ndata: sums\nalgo: not_installed\nreward: [length, not_installed]\n")
    assert rlhf("eval", "--config", "run.yaml", "--reward", "length").exit_code == 0
    assert [source.path for source in evaluated.config.eval.data.sources] == ["sums"]
    result = rlhf("eval", "--config", "run.yaml", "--eval.reward", "short=length", "--eval.data", "other")
    assert result.exit_code == 0, result.output
    assert [source.path for source in evaluated.config.eval.data.sources] == ["other"]
    assert evaluated.plugins == ["agent:single_turn", "eval_reward:short"]
    assert list(evaluated.config.eval.reward) == ["short"]


def test_rewards_of_the_command_line_replace_all_of_the_file(rlhf, evaluated):
    Path("run.yaml").write_text("actor: {model: m}\ndata: sums\neval: {reward: length}\n")
    assert rlhf("eval", "--config", "run.yaml").exit_code == 0
    assert evaluated.plugins == ["agent:single_turn", "eval_reward:length"]
    assert rlhf("eval", "--config", "run.yaml", "--reward", "short=length").exit_code == 0
    assert evaluated.plugins == ["agent:single_turn", "reward:short"]
    both = rlhf("eval", "--config", "run.yaml", "--reward", "length", "--eval.reward", "short=length")
    assert both.exit_code == 2
    assert both.stderr == "Error: --reward has no effect beside --eval.reward: leave one of them out\n"


def test_a_checkpoint_brings_its_model_and_the_runs_settings(rlhf, evaluated):
    final, first = model("run/model"), model("run/checkpoints/step-000002/model")
    Path("run/config.yaml").write_text(
        "actor: {model: m, revision: r}\ndata: sums\nreward: length\nrollout: {max_new_tokens: 7}\n"
    )
    Path("run/run.json").write_text(json.dumps({"status": "interrupted", "step": 2}))
    for given, expected in (("run", first), ("run/checkpoints/step-000002", first)):
        assert rlhf("eval", "--checkpoint", given).exit_code == 0
        actor = evaluated.config.roles["actor"]
        assert (actor.model, actor.revision, evaluated.config.rollout.max_new_tokens) == (str(expected), None, 7)
    newest = model("run/checkpoints/step-000010/model")
    rlhf("eval", "--checkpoint", "run")
    assert evaluated.config.roles["actor"].model == str(newest)
    Path("run/run.json").write_text(json.dumps({"status": "finished", "step": 10}))
    rlhf("eval", "--checkpoint", "run")
    assert evaluated.config.roles["actor"].model == str(final)


def test_the_actor_may_be_a_checkpoint_or_run_directory(rlhf, evaluated):
    newest = model("run/checkpoints/step-000002/model")
    for given in ("run", "run/checkpoints/step-000002", newest):
        assert rlhf("eval", "--actor.model", given, "--eval.data", "sums", "--reward", "length").exit_code == 0
        assert evaluated.config.roles["actor"].model == str(newest)


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (["--eval.data", "sums", "--actor.model", "m"], "nothing judges the answers: give --reward NAME"),
        (["--actor.model", "m", "--reward", "length"], "no evaluation data: give --eval.data PATH or --data PATH"),
        (["--data", "sums", "--reward", "length"], "no model to evaluate: give --actor.model PATH, or --checkpoint RUN_DIR"),
        (["--checkpoint", "gone"], "gone: no such run directory (a run that has just begun has none yet)"),
        (
            ["--checkpoint", "gone", "--actor.model", "m"],
            "--checkpoint uses the run's own model and settings: leave --actor.model out",
        ),
        (
            ["--actor.model", ".", "--eval.data", "sums", "--reward", "length"],
            ". contains no model: give a model directory, a checkpoint or a run directory",
        ),
        (["--eval.nn", "3"], "--eval.nn: no such flag; did you mean '--eval.n' or '--eval.k' or '--eval.min-p'?"),
    ],
)
def test_refusals(rlhf, flags, line):
    assert rlhf.refused("eval", *flags) == [line]


def test_a_reward_that_cannot_judge_is_refused(rlhf):
    flags = ["--actor.model", "m", "--eval.data", "sums", "--reward", "mute"]
    assert "reward:mute (made-up 1.0) has no score hook, so it scores nothing" in rlhf.refused("eval", *flags)[0]


def test_help(rlhf):
    text = rlhf("eval", "--reward", "length", "--help").stdout
    assert "--checkpoint" in text
    assert "--reward.length.timeout-s" in text
    assert "--train." not in text
