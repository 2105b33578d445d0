"""Training on what ``rlhf rollout`` or a run saved: the same trajectories, and from them the same updates."""

import json
from pathlib import Path

import pytest

from rlhf_host.training.saved_rows import read_steps

TIMES = ("time/", "memory/", "engine/", "sync/", "tokens_per_s", "tflops", "mfu", "rollout/")


PLAIN: list[bytes] = []
"""What the plain rollout wrote: it is always the same, so it is made once."""


@pytest.fixture
def sampling(small_run):
    """The flags of ``small_run`` without its command and algorithm."""
    return [*small_run[3:]]


@pytest.fixture
def rollout(rlhf_here, sampling, tmp_path):
    """Run in this process; gives the rows of the file, and the output."""

    def run(*flags, code=0, output="rollouts.jsonl"):
        if not flags and code == 0 and PLAIN:
            (tmp_path / output).write_bytes(PLAIN[0])
            return [json.loads(line) for line in PLAIN[0].splitlines()], ""
        result = rlhf_here("rollout", *sampling, "--output", tmp_path / output, *flags)
        assert result.exit_code == code, result.output
        assert "Traceback" not in result.output
        path = tmp_path / output
        if not flags and code == 0:
            PLAIN.append(path.read_bytes())
        rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        return rows, result.stdout if code == 0 else result.output

    return run


@pytest.fixture
def train(rlhf_here, small_run, tmp_path):
    """Run in this process; gives the rows of metrics.jsonl and the run directory."""

    def run(*flags, code=0, name="run"):
        run_dir = tmp_path / name
        where = () if "--resume" in flags else (*small_run, "--run-dir", run_dir)
        result = rlhf_here(*(where or ["train"]), *flags)
        assert result.exit_code == code, result.output
        assert "Traceback" not in result.output
        return metrics(run_dir), run_dir, result.output

    return run


def metrics(run_dir: Path) -> list[dict]:
    path = run_dir / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def learned(rows):
    """What training made of the trajectories, without what depends on the clock or on how they came about."""
    return [{name: value for name, value in row.items() if not name.startswith(TIMES)} for row in rows]


WHOLE = ("--trajectories.tokens", "--trajectories.max-per-step", "0")


def test_a_rollout_is_what_the_first_step_of_a_run_samples(rollout, train):
    rows, _ = rollout()
    _, run_dir, _ = train("--train.steps", "1", *WHOLE)
    logged = (run_dir / "trajectories" / "train-step-000001.jsonl").read_text().splitlines()
    assert len(rows) == 16
    made = [{key: value for key, value in json.loads(line).items() if key != "advantage"} for line in logged]
    assert rows == made


def test_training_from_the_file_is_training(rollout, train):
    rollout("--steps", "1")
    sampled, _, _ = train("--train.steps", "1", name="sampled")
    read, _, output = train("--train.steps", "1", "--from-trajectories", "rollouts.jsonl", name="read")
    assert sampled[0]["grad_norm"] > 0
    assert learned(read) == learned(sampled)
    assert "16 trajectories in 1 steps" in output


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    "how",
    [
        ("--train.epochs", "2", "--train.minibatches", "2"),
        ("--algo", "grpo", "--kl.coef", "0.1", "--kl.controller", "adaptive", "--actor.schedule", "linear"),
    ],
    ids=["several-updates", "kl-and-schedule"],
)
def test_a_runs_own_trajectories_give_its_metrics_to_the_last_bit(train, how):
    """Three steps: the second and third hold only if the weights after each update are the same too."""
    sampled, run_dir, _ = train("--train.steps", "3", *WHOLE, *how, name="sampled")
    read, _, _ = train("--train.steps", "3", "--from-trajectories", run_dir, *how, name="read")
    assert len(read) == 3
    assert learned(read) == learned(sampled)


def test_steps_that_were_sampled_ahead_are_all_of_version_zero(rollout, train):
    rows, _ = rollout("--steps", "3")
    assert {version for row in rows for segment in row["segments"] for version in segment["versions"] or []} == {0}
    read, _, output = train("--from-trajectories", "rollouts.jsonl", "--train.steps", "100")
    assert [row["step"] for row in read] == [1, 2, 3]
    assert "training ends with them, before train.steps 100" in output


def test_a_resumed_run_goes_on_at_its_step_of_the_file(rollout, train):
    rollout("--steps", "3")
    whole, _, _ = train("--train.steps", "3", "--from-trajectories", "rollouts.jsonl", name="whole")
    train("--train.steps", "2", "--from-trajectories", "rollouts.jsonl", name="half")
    resumed, _, _ = train("--resume", "half", "--train.steps", "3", name="half")
    assert learned(resumed) == learned(whole)
    _, _, output = train("--resume", "half", "--train.steps", "9", code=2, name="half")
    assert "half is finished at step 3: rollouts.jsonl has no more steps" in output


def test_a_resume_with_other_trajectories_or_none_is_refused(rollout, train, prompts):
    rollout("--steps", "3")
    train("--train.steps", "1", "--from-trajectories", "rollouts.jsonl", name="run")
    rollout("--steps", "3", "--seed", "5", output="other.jsonl")
    _, _, output = train("--resume", "run", "--from-trajectories", "other.jsonl", "--train.steps", "3", code=2)
    assert "other.jsonl changed since the checkpoint" in output
    _, _, output = train("--resume", "run", "--from-trajectories", "null", "--train.steps", "3", code=2)
    assert "run was trained from saved trajectories, and cannot continue sampling" in output
    train("--train.steps", "1", name="sampled")
    _, _, output = train("--resume", "sampled", "--from-trajectories", "other.jsonl", "--train.steps", "3", code=2)
    assert "sampled was trained sampling, and cannot continue from saved trajectories" in output


def test_nothing_is_generated_or_evaluated(rollout, train, prompts, monkeypatch):
    rollout()
    from rlhf_host.engines.embedded import EmbeddedEngine

    monkeypatch.delattr(EmbeddedEngine, "generate")
    rows, run_dir, _ = train("--from-trajectories", "rollouts.jsonl", "--eval.data", prompts)
    assert len(rows) == 1
    assert not any(name.startswith("eval/") for name in rows[0])
    assert [path.name for path in (run_dir / "trajectories").iterdir()] == ["train-step-000001.jsonl"]


def test_neither_rewards_nor_data_need_to_be_named(rollout, rlhf_here, tiny_model):
    rollout()
    result = rlhf_here(
        *("train", "--algo", "rloo", "--actor.model", tiny_model, "--from-trajectories", "rollouts.jsonl"),
        *("--rollout.max-new-tokens", "8", "--run-dir", "run"),
    )
    assert result.exit_code == 0, result.output
    assert metrics(Path("run"))[0]["reward/vowels"] >= 0


def test_a_file_without_rewards_is_refused(rlhf_here, sampling, train):
    assert rlhf_here("rollout", *sampling[2:], "--output", "bare.jsonl").exit_code == 0
    _, _, output = train("--from-trajectories", "bare.jsonl", code=2)
    assert "bare.jsonl:1: no trajectory of step 1 has a reward" in output or "scored by no plugin" in output


def test_unjudged_trajectories_are_saved_and_leave_the_training_again(rollout, train):
    rows, _ = rollout("--reward", "picky")
    assert sum(row["reward"] is None for row in rows) == 4
    read, _, _ = train("--reward", "picky", "--from-trajectories", "rollouts.jsonl", name="read")
    sampled, _, _ = train("--reward", "picky", "--train.steps", "1", name="sampled")
    assert read[0]["rollout/unjudged"] == 4
    assert learned(read) == learned(sampled)


# --- what the file says, and what is wrong with it ----------------------------------------------


def test_trajectories_come_back_exactly(rollout, tiny_model, prompts):
    """Read and written again, the file is the same bytes: nothing is lost or rounded."""
    from rlhf_host.training.saved_rows import lines

    rollout("--steps", "2")
    steps = read_steps(Path("rollouts.jsonl"))
    assert [step.step for step in steps] == [1, 2]
    again = b"".join(lines(step.step, step.split, step.rows, step.origin, Path()) for step in steps)
    assert again == Path("rollouts.jsonl").read_bytes()


def change(path: str, line: int, **values) -> None:
    rows = [json.loads(text) for text in Path(path).read_text().splitlines()]
    rows[line - 1] |= values
    Path(path).write_text("".join(json.dumps(row) + "\n" for row in rows))


ACTION = {"kind": "action", "token_ids": [5, 6], "logprobs": [-1.0, -2.0], "versions": [0, 0]}
PROMPT = {"kind": "prompt", "token_ids": [5]}


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"segments": [PROMPT, {**ACTION, "logprobs": [-1.0]}]}, "segments.1: 2 tokens were sampled, and it has 1 logprobs"),
        ({"segments": [PROMPT, {**ACTION, "versions": None}]}, "segments.1: 2 tokens were sampled, and it has 0 versions"),
        ({"segments": [ACTION]}, "segments: a trajectory begins with its prompt, and has one"),
        ({"segments": [PROMPT, {**ACTION, "token_ids": [5, -6]}]}, "segments: a token id is negative"),
        ({"segments": [PROMPT, {**ACTION, "token_ids": [5, 6.5]}]}, "segments.1.token_ids.1: should be a valid integer"),
        (
            {"segments": [PROMPT, {**ACTION, "kind": "speech"}]},
            "segments.1.kind: should be 'prompt', 'action' or 'observation'",
        ),
        ({"segments": [PROMPT, {**ACTION, "token_ids": [5, 4000]}]}, "the token 4000, and the model a vocabulary of"),
        ({"reward": "much"}, "reward: should be a valid number"),
        ({"step": "one"}, "step: should be a valid integer"),
        ({"verdicts": {"vowels": {"tokens": [1.0] * 99}}}, "verdicts.vowels: 99 rewards for"),
        ({"step": 2}, "rollouts.jsonl:4: step 1 continues after another step began"),
        ({"sampling": {"temperature": 0.5}}, None),
    ],
    ids=lambda value: None if isinstance(value, dict) else "ok" if value is None else value[:30],
)
def test_a_malformed_row_is_named_with_its_line(rollout, train, values, problem):
    rollout()
    if problem is None:  # only the first row of a step is asked how it was sampled
        change("rollouts.jsonl", 1, **values)
        problem = "rollouts.jsonl:1: sampled with temperature 0.5, and rollout.temperature is 1: set --rollout.temperature 0.5"
    else:
        change("rollouts.jsonl", 3, **values, **({} if "step" not in values else {"group_id": "own"}))
        if "vocabulary" not in problem and "continues" not in problem:
            problem = f"rollouts.jsonl:3: {problem}"
    _, run_dir, output = train("--from-trajectories", "rollouts.jsonl", code=2)
    assert problem in output
    assert not run_dir.exists()


def test_a_file_that_is_none_is_refused(train, rollout, prompts, tmp_path):
    rollout()
    _, _, output = train("--from-trajectories", "rollout.jsonl", code=2)
    assert "rollout.jsonl: no such file or directory; did you mean 'rollouts.jsonl'?" in output
    _, _, output = train("--from-trajectories", prompts, code=2)
    assert "not a trajectory; it has prompt, label" in output
    (tmp_path / "torn.jsonl").write_text((tmp_path / "rollouts.jsonl").read_text()[:-20])
    _, _, output = train("--from-trajectories", "torn.jsonl", code=2)
    assert "torn.jsonl:16: not valid JSON" in output


def test_trajectories_logged_without_tokens_say_what_to_do(train):
    _, run_dir, _ = train("--train.steps", "1", name="plain")
    _, _, output = train("--from-trajectories", run_dir, code=2)
    assert "a trajectory without its tokens: write token ids too: rlhf rollout does" in output


def test_cut_groups_are_pointed_out(train):
    _, run_dir, _ = train("--train.steps", "1", "--trajectories.tokens", "--trajectories.max-per-step", "6", name="cut")
    _, _, output = train("--from-trajectories", run_dir, name="read")
    assert "groups of 2 to 4 trajectories in step 1; trajectories.max_per_step cuts what a run writes" in output


def test_weights_and_names_of_rewards_are_the_files(rollout, train):
    rollout("--reward.vowels.weight", "0.5")
    read, _, _ = train("--reward.vowels.weight", "0.5", "--from-trajectories", "rollouts.jsonl", name="read")
    sampled, _, _ = train("--reward.vowels.weight", "0.5", "--train.steps", "1", name="sampled")
    assert learned(read) == learned(sampled)
    _, _, output = train("--from-trajectories", "rollouts.jsonl", code=2)
    assert "vowels was weighted 0.5, and now 1; rlhf replay scores a file again" in output
    flags = ("--reward.vowels.weight", "0.5", "--reward", "picky")
    _, _, output = train(*flags, "--from-trajectories", "rollouts.jsonl", code=2)
    assert "scored by vowels, not by picky; rlhf replay scores a file again" in output
