"""What the contract makes possible, each as a plugin of one small file that does its work in a real run."""

from __future__ import annotations

import importlib
import json
import random
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
from rlhf_authoring.models import tiny_tokenizer, write_tiny_model
from transformers import AutoModelForCausalLM

PLUGINS = Path(__file__).parent / "plugins"

ENTRY_POINTS = """
[rlhf.algos]
distil = distil:Distil
[rlhf.rewards]
judge = judge:Judge
[rlhf.extensions]
curriculum = curriculum:Curriculum
early_stop = early_stop:EarlyStop
follow_kl = follow_kl:FollowKL
spy = spy:Spy
[rlhf.agents]
tree = tree:Tree
"""

SPY = '''
from rlhf_host import hookimpl

SEEN = []

class Spy:
    """Keeps every step's experience."""
    def __init__(self, options):
        SEEN.clear()
    @hookimpl
    def prepare_batch(self, experience):
        SEEN.append(experience)
'''


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Two folders that, on the path, are an installed distribution of these plugins."""
    folder = tmp_path_factory.mktemp("proofs")
    about = folder / "proofs-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: proofs\nVersion: 1.0\nRequires-Dist: rlhf-host>=0.10,<0.11\n")
    (about / "entry_points.txt").write_text(ENTRY_POINTS)
    (folder / "spy.py").write_text(SPY)
    return [str(folder), str(PLUGINS)]


@pytest.fixture(autouse=True)
def _installed(site, monkeypatch):
    for folder in site:
        monkeypatch.syspath_prepend(folder)
    yield
    for name in [*(path.stem for path in PLUGINS.glob("*.py")), "spy"]:
        sys.modules.pop(name, None)


@pytest.fixture
def run(rlhf_here, tmp_path):
    def train(*flags, run_dir=tmp_path / "run"):
        result = rlhf_here("train", *flags, "--train.threads", "1", "--run-dir", run_dir)
        assert result.exit_code == 0, result.output
        return run_dir, result.output

    return train


def curve(run_dir):
    """The rows of ``metrics.jsonl`` without what measures this machine."""
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    machine = ("time/", "memory/", "engine/", "sync/", "tokens_per_s", "tflops", "mfu")
    return [{key: value for key, value in row.items() if not key.startswith(machine)} for row in rows]


def trajectories(run_dir):
    files = sorted((run_dir / "trajectories").glob("train-step-*.jsonl"))
    return [json.loads(line) for path in files for line in path.read_text().splitlines()]


@pytest.mark.parametrize("name", [path.stem for path in sorted(PLUGINS.glob("*.py"))])
def test_each_is_one_small_file(name):
    lines = (PLUGINS / f"{name}.py").read_text(encoding="utf-8").splitlines()
    assert len(lines) < 60
    assert not [line for line in lines if "rlhf_host." in line], "the public names are enough"


@pytest.mark.parametrize(
    ("kind", "name", "options"),
    [
        ("extension", "curriculum", {}),
        ("extension", "early_stop", {"reward": 0.1}),
        ("algo", "distil", {"top": 4}),
        ("algo", "distil", {"top": None}),
        ("reward", "judge", {}),
        ("agent", "tree", {}),
    ],
)
def test_each_keeps_the_contract(kind, name, options):
    from rlhf_authoring import run_contract

    slow = ("import_is_light",)  # torch, in distil
    failed = [one for one in run_contract(kind, name, options) if not one.passed and one.name not in slow]
    assert failed == []


# --- curriculum -----------------------------------------------------------------------------------


def curriculum_flags(tiny_model, prompts):
    small = ["--rollout.n", "4", "--rollout.max-new-tokens", "6", "--train.batch-size", "4", "--train.threads", "1"]
    plugins = ["--algo", "rloo", "--reward", "vowels", "--with", "curriculum", "--actor.model", tiny_model, "--data", prompts]
    return [*plugins, *small, "--actor.lr", "1e-2", "--train.steps", "6", "--checkpoint.every", "2"]


def test_a_curriculum_draws_what_is_solved_half_of_the_time(tiny_model, prompts, run):
    curriculum = importlib.import_module("curriculum").Curriculum
    plugin = curriculum(curriculum.Options())
    plugin.solved = {0: 1.0, 1: 0.5, 2: 0.0}
    drawn = plugin.draw_tasks([None] * 3, 1000, 1)
    assert drawn.count(1) > 5 * max(drawn.count(0), drawn.count(2)) > 0
    run_dir, _ = run(*curriculum_flags(tiny_model, prompts))
    tasks = [row["task"] for row in trajectories(run_dir)[::4]]
    assert len(tasks) == 24
    assert len(set(tasks)) < 24, "an epoch in the seed's order would have each once"
    state = torch.load(run_dir / "checkpoints/step-000006/trainer.pt", weights_only=True)["plugins"]["extension:curriculum"]
    assert set(state["solved"]) == set(tasks)
    assert tuple(state["dice"]) != random.Random(0).getstate()


def test_a_curriculum_that_was_killed_goes_on_value_for_value(tiny_model, prompts, run, rlhf, rlhf_here, site, tmp_path):
    flags = curriculum_flags(tiny_model, prompts)
    whole, _ = run(*flags, run_dir=tmp_path / "whole")
    killed = tmp_path / "killed"
    rlhf.environment["PYTHONPATH"] = ":".join([*site, rlhf.environment["PYTHONPATH"]])
    process = rlhf.start("train", *flags, "--run-dir", killed)
    deadline = time.monotonic() + 300
    while not (killed / "metrics.jsonl").exists() or len(curve(killed)) < 3:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    process.stderr.close()
    assert len(curve(killed)) < 6
    assert rlhf_here("train", "--resume", killed).exit_code == 0
    assert curve(killed) == curve(whole)


# --- steering ---------------------------------------------------------------------------------------


def test_early_stopping_ends_a_run_cleanly_with_its_reason(small_run, run, rlhf_here):
    flags = ["--with", "early_stop", "--with.early_stop.reward", "0.2", "--train.steps", "40", "--actor.lr", "1e-2"]
    run_dir, output = run(*small_run[1:], *flags)
    rows = curve(run_dir)
    assert len(rows) < 40
    assert rows[-1]["reward/mean"] >= 0.2
    assert all(row["reward/mean"] < 0.2 for row in rows[:-1])
    last = rows[-1]["step"]
    assert f"finished after step {last}: extension:early_stop: the mean reward reached 0.2" in output
    assert f"Finished after step {last} (extension:early_stop: the mean reward reached 0.2)." in output
    assert (run_dir / "model/config.json").exists()
    assert (run_dir / f"checkpoints/step-{last:06d}").is_dir()


def test_a_learning_rate_follows_the_kl_of_updates_through_a_resume(small_run, run, rlhf_here, tmp_path):
    steering = ["--with", "follow_kl", "--with.follow_kl.lr", "1e-2", "--with.follow_kl.target", "1e-3"]
    flags = [*small_run[1:], *steering, "--train.epochs", "2", "--actor.lr", "1e-2"]
    whole, _ = run(*flags, "--train.steps", "6", run_dir=tmp_path / "whole")
    rows = curve(whole)
    rate = 1e-2
    for row in rows:
        assert row["lr"] == pytest.approx(rate)
        rate = rate / 2 if row["kl/update"] > 1e-3 else min(rate * 1.05, 1e-2)
    assert sorted({row["kl/update"] > 1e-3 for row in rows}) == [False, True], "it went down and recovered"
    parts, _ = run(*flags, "--train.steps", "3", run_dir=tmp_path / "parts")
    assert rlhf_here("train", "--resume", parts, "--train.steps", "6").exit_code == 0
    assert curve(parts) == rows


# --- a teacher --------------------------------------------------------------------------------------


def teacher_gap(student, teacher):
    """Mean KL(teacher ‖ student) over every place of some texts, by transformers alone."""
    tokenizer = tiny_tokenizer()
    gaps = []
    for text in ("12+34=46 and so on", "what is it?", "(3*4)-2=10"):
        ids = torch.tensor([tokenizer(text)["input_ids"]])
        with torch.no_grad():
            theirs, own = (
                AutoModelForCausalLM.from_pretrained(path)(input_ids=ids).logits.log_softmax(-1) for path in (teacher, student)
            )
        gaps.append((theirs.exp() * (theirs - own)).sum(-1).mean())
    return float(torch.stack(gaps).mean())


@pytest.mark.parametrize("top", ["32", "none"])
def test_a_student_comes_nearer_to_its_teacher_without_any_reward(tiny_model, prompts, run, tmp_path, top):
    teacher = write_tiny_model(tmp_path / "teacher", seed=7)
    model = AutoModelForCausalLM.from_pretrained(teacher)
    with torch.no_grad():
        model.lm_head.weight.mul_(12)  # a random model knows nothing
    model.save_pretrained(teacher)
    flags = ["--algo", "distil", "--algo.top", top, "--teacher.model", teacher, "--actor.model", tiny_model, "--data", prompts]
    small = ["--rollout.n", "2", "--rollout.max-new-tokens", "8", "--train.batch-size", "4", "--actor.lr", "1e-2"]
    run_dir, output = run(*flags, *small, "--train.steps", "15")
    rows = curve(run_dir)
    losses = [row["loss/distil"] for row in rows]
    assert sum(losses[-3:]) < 0.7 * sum(losses[:3])
    assert teacher_gap(run_dir / "model", teacher) < 0.75 * teacher_gap(tiny_model, teacher)
    assert not [name for name in rows[-1] if name.startswith(("reward/", "groups/"))], "no reward is made up"
    assert "nothing to teach" not in output


def test_a_teacher_s_algorithm_is_refused_what_makes_it_untrue(small_run, rlhf_here, tiny_model):
    flags = ["train", "--algo", "distil", "--teacher.model", tiny_model, *small_run[5:], "--dry-run"]
    assert "set both to 1" in rlhf_here(*flags, "--train.epochs", "2").output
    saved = rlhf_here(*flags, "--from-trajectories", "some.jsonl")
    assert "algo:distil is right only for the weights that sampled: leave --from-trajectories out" in saved.output
    corrected = rlhf_here(*flags, "--with", "tis")
    assert "extension:tis gives importance_weights, and the loss of algo:distil takes none: leave it out" in corrected.output
    assert {result.exit_code for result in (saved, corrected)} == {2}


# --- a judge and a tree -----------------------------------------------------------------------------


def test_the_parts_of_a_judge_reach_the_algorithm_and_its_reasons_the_logs(tiny_model, prompts, run):
    flags = ["--algo", "gdpo", "--reward", "judge", "--reward.judge.weight", "2", "--with", "spy", "--actor.model", tiny_model]
    small = ["--rollout.n", "8", "--rollout.max-new-tokens", "8", "--train.batch-size", "4", "--rollout.max-unjudged", "0.5"]
    run_dir, _ = run(*flags, *small, "--data", prompts, "--train.steps", "3", "--trajectories.tokens")
    for experience in sys.modules["spy"].SEEN:
        assert experience.reward_names == ("judge.vowels", "judge.short")
        assert experience.reward_weights == (2.0, 2.0)
        parts = [[row.rewards["judge"].parts[name] for name in ("vowels", "short")] for row in experience.trajectories]
        torch.testing.assert_close(experience.plugin_rewards, torch.tensor(parts))
        torch.testing.assert_close(experience.rewards, 2 * experience.plugin_rewards.sum(-1))
    last = curve(run_dir)[-1]
    assert 0 < last["reward/judge.short"] <= 0.5
    assert last["loss/policy"] != 0
    rows = trajectories(run_dir)
    assert {row["unjudged"] for row in rows if "unjudged" in row} == {"judge: it begins with a number"}
    assert all(set(row["verdicts"]["judge"]["parts"]) == {"vowels", "short"} for row in rows if "unjudged" not in row)


def test_a_tree_is_trained_on_every_token_once_and_saved_as_one(small_run, run, tmp_path):
    flags = [*small_run[1:], "--agent", "tree", "--with", "spy", "--train.steps", "2", "--trajectories.tokens"]
    run_dir, _ = run(*flags)
    branched = 0
    for experience in sys.modules["spy"].SEEN:
        for row, parent in enumerate(experience.parent.tolist()):
            if parent < 0:
                assert experience.branch[row] == 0
                continue
            branched += 1
            length = int(experience.completion_mask[parent].sum())
            stem = experience.prompt_ids[parent] + experience.completion_ids[parent, :length].tolist()
            assert experience.prompt_ids[row] == stem
            assert experience.branch[row] == len(stem)
            assert experience.episode_id[row] == experience.episode_id[parent]
        moved = experience.select([2, 1, 0])
        assert moved.parent.tolist() == [{0: 2, 1: 1, 2: 0}.get(parent, -1) for parent in experience.parent[[2, 1, 0]].tolist()]
    assert branched > 10
    saved = tmp_path / "saved"
    again = [*small_run[1:], "--with", "spy", "--train.steps", "2", "--from-trajectories", run_dir]
    first = [(experience.parent.tolist(), experience.branch.tolist()) for experience in sys.modules["spy"].SEEN]
    run(*again, run_dir=saved)
    assert [(experience.parent.tolist(), experience.branch.tolist()) for experience in sys.modules["spy"].SEEN] == first
    assert [row["loss"] for row in curve(saved)] == pytest.approx([row["loss"] for row in curve(run_dir)], abs=1e-5)
