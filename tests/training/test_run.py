"""Whole runs through the real command line: what they write, what stops them, and that they learn."""

import dataclasses
import json
import math
import shlex
from pathlib import Path

import pytest
from rlhf_authoring.learner import SUMS, Learner, right_answer
from rlhf_runs.metrics import OTHERS, described
from ruamel.yaml import YAML
from transformers import AutoModelForCausalLM, AutoTokenizer

import rlhf_host
from rlhf_host import functional as F
from rlhf_host import hookimpl
from rlhf_host.config.check import EVAL_METRICS
from rlhf_host.errors import RunError
from rlhf_host.rollouts.summary import pass_at_k

# fmt: off
ALWAYS = [
    "step", "version", "epoch", "tokens", "tokens_per_s", "tflops", "reward/mean", "reward/std", "reward/min", "reward/max",
    "reward/vowels", "score/mean", "length/mean", "length/max", "truncated", "groups/no_variance", "advantages/mean",
    "advantages/std", "loss", "loss/policy", "clip_fraction", "grad_norm", "lr", "entropy", "mismatch/mean", "mismatch/max",
    "mismatch/k3", "rollout/drawn", "rollout/groups", "rollout/identical",
    "rollout/unjudged", "rollout/failed", "rollout/dropped", "time/rollout",
    "time/logprobs", "time/advantages", "time/train", "time/sync", "time/log", "time/host", "time/step", "time/wall",
    "memory/rss_gb",
]
# fmt: on


@pytest.fixture
def train(rlhf_here, small_run, tmp_path):
    """Run in this process; gives the rows of metrics.jsonl and the run directory."""

    def run(*flags, code=0):
        run_dir = tmp_path / f"run-{len(list(tmp_path.iterdir()))}"
        result = rlhf_here(*small_run, "--run-dir", run_dir, *flags)
        assert result.exit_code == code, result.output
        assert "Traceback" not in result.output
        path = run_dir / "metrics.jsonl"
        rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        return rows, run_dir, result.output

    return run


def test_a_run_directory_has_everything_documented(train, prompts):
    rows, run_dir, output = train("--train.steps", "2", "--eval.data", prompts, "--eval.n", "2", "--trajectories.tokens")
    assert [row["step"] for row in rows] == [0, 1, 2]
    for row in rows[1:]:
        assert [name for name in ALWAYS if name not in row] == []
        assert all(value is None or math.isfinite(value) for value in row.values())
    of_evaluation = {f"eval/{name}" for name in (*EVAL_METRICS, "pass@1", "pass@2", "pass@1/stderr", "pass@2/stderr")}
    assert {name for name in rows[0] if name.startswith("eval/")} == of_evaluation == rows[2].keys() & of_evaluation
    assert rows[1]["mismatch/max"] < 1e-5
    undescribed = {name for row in rows for name in row if described(name).question == OTHERS}
    assert undescribed == set(), "write them into metrics.toml of rlhf-runs, from which docs/reference/metrics.md is made"

    config = YAML(typ="safe").load((run_dir / "config.yaml").read_text())
    assert config["train"]["steps"] == 2
    plugins = json.loads((run_dir / "plugins.json").read_text())
    assert {"algo", "reward", "agent", "tracker", "weight_sync"} <= {plugin["kind"] for plugin in plugins}
    assert next(p for p in plugins if p["kind"] == "algo")["distribution"] == "rlhf-plugin-rloo"

    trajectories = [
        json.loads(line) for line in (run_dir / "trajectories" / "train-step-000001.jsonl").read_text().splitlines()
    ]
    assert len(trajectories) == 16
    action = trajectories[0]["segments"][1]
    assert len(action["token_ids"]) == len(action["logprobs"]) == len(action["versions"]) == trajectories[0]["length"]
    assert (run_dir / "trajectories" / "eval-step-000002.jsonl").exists()

    model = AutoModelForCausalLM.from_pretrained(run_dir / "model")
    last = AutoModelForCausalLM.from_pretrained(run_dir / "checkpoints" / "step-000002" / "model")
    for ours, saved in zip(model.parameters(), last.parameters(), strict=True):
        assert ours.equal(saved)
    assert AutoTokenizer.from_pretrained(run_dir / "model").decode([13]) != ""
    assert f"Everything is in {run_dir}" in output
    assert "rlhf train --resume" in output


def test_every_phase_has_a_line(train, prompts):
    """While libraries, data and models are loaded there is no progress bar yet."""
    _, _, output = train("--train.steps", "1", "--eval.data", prompts)
    assert [line for line in output.splitlines() if line.endswith(" ...")] == [
        "Loading libraries ...",
        "Reading data ...",
        "Loading actor, starting the engine transformers ...",
        "Evaluating 24 tasks × 1 samples ...",
        "Evaluating 24 tasks × 1 samples ...",
        "Writing the last checkpoint ...",
    ]


def test_what_a_run_suggests_at_its_end_works(train, rlhf_here, prompts):
    """Also after greedy evaluations, of which more samples would be refused; the best checkpoint can be found."""
    flags = ["--eval.data", prompts, "--eval.temperature", "0", "--checkpoint.best", "eval/reward/mean"]
    rows, run_dir, output = train("--train.steps", "1", *flags)
    best = max(rows, key=lambda row: row["eval/reward/mean"])
    assert (run_dir / "checkpoints/best").resolve() == run_dir / f"checkpoints/step-{best['step']:06d}"
    assert (
        f"The best eval/reward/mean is that of step-{best['step']:06d}: {run_dir / 'checkpoints/best'} points to it" in output
    )
    suggested = [shlex.split(line) for line in output.splitlines() if line.startswith("    ")]
    assert [words[1] for words in suggested] == ["eval", "train"]
    for program, *words in [*suggested, ["rlhf", "eval", "--checkpoint", run_dir / "checkpoints/best"]]:
        assert Path(program).name == "rlhf"
        assert (done := rlhf_here(*words)).exit_code == 0, done.output


def test_it_learns(train):
    rows, _, _ = train("--train.steps", "25", "--actor.lr", "5e-3", "--train.batch-size", "8", "--checkpoint.final", "false")
    assert rows[-1]["reward/mean"] > 2 * rows[0]["reward/mean"]
    assert rows[-1]["version"] == 26 or rows[-1]["version"] == 25


def test_the_three_kinds_of_old_logprobs_agree_on_the_first_update(train):
    norms = {}
    for mode in ("fused", "recompute", "sampler"):
        rows, _, _ = train("--train.steps", "1", "--train.old-logprobs", mode, "--checkpoint.final", "false")
        norms[mode] = rows[0]["grad_norm"]
        assert rows[0]["clip_fraction"] == 0.0
    assert norms["recompute"] == pytest.approx(norms["fused"], rel=1e-4)
    assert norms["sampler"] == pytest.approx(norms["fused"], rel=1e-4)


def test_several_updates_move_the_policy_and_clip(train):
    flags = ["--train.steps", "2", "--train.epochs", "2", "--train.minibatches", "2", "--actor.lr", "1e-2"]
    rows, _, _ = train(*flags, "--checkpoint.final", "false")
    assert all(row["ratio/max_log"] > 1e-3 and row["kl/update"] > 0 for row in rows)
    assert rows[-1]["clip_fraction"] > 0
    assert rows[-1]["mismatch/max"] < 1e-5, "measured before the first update only"


@pytest.mark.parametrize("place", ["reward", "loss"])
def test_the_kl_is_zero_at_first_and_then_measured(train, place):
    rows, _, _ = train("--train.steps", "3", "--kl.coef", "0.1", "--kl.place", place, "--checkpoint.final", "false")
    assert abs(rows[0]["kl"]) < 1e-6
    assert rows[2]["kl/k3"] > 1e-6
    assert ("loss/kl" in rows[0]) == (place == "loss")


def test_a_strong_kl_holds_the_policy_back(train):
    flags = ["--train.steps", "8", "--actor.lr", "3e-3", "--checkpoint.final", "false", "--kl.place", "loss"]
    free = train(*flags, "--kl.coef", "1e-6")[0][-1]["kl/k3"]
    held = train(*flags, "--kl.coef", "5")[0][-1]["kl/k3"]
    assert held < free / 2


def test_a_reward_that_is_down_stops_the_run_and_says_why(train):
    rows, run_dir, output = train("--reward", "broken", code=1)
    assert "16 of 16 trajectories could not be judged" in output
    assert "broken: ConnectionError: the judge is down" in output
    assert rows == []
    assert not (run_dir / "model").exists()


def test_unjudged_samples_are_counted_and_the_rest_trains(train):
    rows, _, _ = train("--reward", "picky", "--train.steps", "1", "--checkpoint.final", "false")
    assert rows[0]["rollout/unjudged"] == 4
    assert rows[0]["rollout/groups"] == 4


def test_a_diverged_run_stops_without_a_traceback(train):
    _, run_dir, output = train("--train.steps", "5", "--actor.lr", "1e30", "--actor.max-grad-norm", "0", code=1)
    assert "the model's logits are not finite" in output
    assert not (run_dir / "model").exists()


def test_evaluation_alone_gives_the_run_s_own_numbers(rlhf_here, train, prompts):
    rows, run_dir, _ = train("--train.steps", "2", "--eval.data", prompts, "--eval.n", "2")
    result = rlhf_here("eval", "--checkpoint", run_dir, "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    for name in ("eval/reward/mean", "eval/pass@1", "eval/pass@2"):
        assert found[name] == pytest.approx(rows[-1][name])


def test_rewards_of_their_own_for_evaluation(train, prompts):
    flags = ["--eval.data", prompts, "--eval.reward", "picky", "--eval.n", "2"]
    rows, _, _ = train("--train.steps", "1", *flags, "--checkpoint.final", "false")
    assert rows[-1]["eval/unjudged"] == 24
    assert "rollout/unjudged" in rows[-1]
    assert rows[-1]["rollout/unjudged"] == 0


def test_sources_are_evaluated_apart(train, prompts, tmp_path):
    other = tmp_path / "other.jsonl"
    other.write_text(json.dumps({"prompt": "1+1=", "label": "2"}) + "\n")
    flags = ["--eval.data", prompts, "--eval.data", other, "--train.steps", "1", "--checkpoint.final", "false"]
    rows, _, _ = train(*flags)
    assert {"eval/prompts/reward/mean", "eval/other/reward/mean"} <= set(rows[-1])
    assert rows[-1]["eval/other/samples"] == 1


def test_a_best_checkpoint_by_a_metric_that_is_not_there_stops_the_run_early(train, prompts):
    rows, _, output = train("--eval.data", prompts, "--checkpoint.best", "reward/maen", code=1)
    assert "checkpoint.best is reward/maen, and there is no such metric; did you mean" in output
    assert "resumed, the run needs --checkpoint.best NAME" in output
    assert len(rows) <= 1


def test_prompts_beyond_the_model_s_context_are_left_out(train, tmp_path):
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"prompt": "ab " * n, "label": "x"}) + "\n" for n in (2, 2000)))
    rows, _, output = train("--data", data, "--train.steps", "1")
    assert len(rows) == 1
    assert "left out 1 of 2 tasks: prompt longer than 511 tokens" in " ".join(output.split())
    _, _, output = train("--data", data, "--dry-run")
    assert f"{data}: 1 of these are left out: prompt longer than 511 tokens" in output


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--rolout.n", "4"], "did you mean '--rollout.n'"),
        (["--rollout.n", "many"], "rollout.n"),
        (["--rollout.n", "1"], "needs groups of 2 or more"),
        (["--rollout.temperature", "0"], "rollout.temperature is 0"),
        (["--algo.clip-epz", "0.2"], "clip"),
        (["--algo", "rlo"], "did you mean 'rloo'"),
        (["--data", "no-such-file.jsonl"], "no-such-file.jsonl"),
        (["--actor.model", "./no-such-model"], "no model at ./no-such-model"),
    ],
)
def test_bad_input_is_met_at_the_door(rlhf_here, small_run, tmp_path, flags, message):
    run_dir = tmp_path / "run"
    result = rlhf_here(*small_run, "--run-dir", run_dir, *flags)
    assert result.exit_code == 2
    assert message in result.output
    assert "Traceback" not in result.output
    assert not run_dir.exists()


@pytest.mark.parametrize(
    ("samples", "passed", "k", "expected"), [(4, 0, 1, 0.0), (4, 4, 2, 1.0), (4, 1, 1, 0.25), (4, 1, 2, 0.5), (5, 2, 3, 0.9)]
)
def test_pass_at_k_counts_subsets(samples, passed, k, expected):
    assert pass_at_k(samples, passed, k) == pytest.approx(expected)


def test_a_correction_that_no_loss_takes_in_the_whole_run_is_an_error_at_its_end(tmp_path, caplog):
    """One step without such a loss is none: an algorithm may have others in between."""

    class Weights:
        @hookimpl
        def importance_weights(self, batch):
            return batch.action_mask.float()

    class Sometimes(Learner):
        def __init__(self, begin):
            self.begin = begin

        @hookimpl
        def compute_loss(self, outputs, batch):
            items = F.policy_loss(outputs, batch, F.PolicyLossOptions())
            return [dataclasses.replace(items[0], corrected=batch.step >= self.begin), *items[1:]]

    def run(begin):
        fixed = {"train.threads": 1, "rollout.max_new_tokens": 2, "n": 2, "batch_size": 2, "steps": 2, "model": "quickstart"}
        where = {"run_dir": str(tmp_path / str(begin)), "data": SUMS, "reward": right_answer}
        return rlhf_host.train(algo=Sometimes(begin), extensions=[Weights()], **where, **fixed)

    run(2)
    assert not [line for line in caplog.messages if "in the whole run" in line]
    with pytest.raises(RunError, match="extension:Weights: no loss term took its weights in the whole run; leave it out"):
        run(3)
    assert (tmp_path / "3" / "checkpoints" / "step-000002").exists()
