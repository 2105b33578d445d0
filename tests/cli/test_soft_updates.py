"""Roles that follow the actor, read other prompts, or train on rows beside, and scaled rewards, over two ranks: as in one
process.
"""

from __future__ import annotations

import json

import pytest

pytest.importorskip("ray")

pytestmark = pytest.mark.timeout(900)

RAY = ("--runtime", "ray", "--ray.num-cpus", "4", "--ray.num-gpus", "0", "--ray.object-store-mb", "200")
WORDS = ("--algo.template", "{solution} {prompt}", "--algo.solution-template", "{solution}", "--algo.feedback", "never")
REFERENCE = ("--algo", "rloo", "--with", "moving_reference", "--moving-reference.share", "0.5", "--moving-reference.every", "1")
SELF = ("--algo", "sdpo", *WORDS, "--algo.success", "-9", "--algo.signal", "full", "--algo.beta", "0.5", "--algo.teacher-share")
CASES = {
    "reference": (*REFERENCE, "--kl.coef", "0.1"),
    "adapter": (*REFERENCE, "--kl.coef", "0.1", "--actor.lora.rank", "4"),
    "live": (*SELF, "1"),
    "average": (*SELF, "0.25", "--algo.top-k", "6"),
    "scaled": (
        "--algo",
        "rloo",
        "--with",
        "reward_scaling",
        "--reward-scaling.normalize",
        "running",
        "--reward-scaling.high",
        "1",
    ),
    "beside": ("--algo", "rloo", "--with", "ptx", "--ptx.rows", "6", "--train.minibatches", "2"),
}


def metrics(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    ("case", "backend"),
    [
        ("reference", "fsdp"),
        ("reference", "deepspeed"),
        ("adapter", "fsdp"),
        ("live", "torch"),
        ("live", "deepspeed"),
        ("average", "fsdp"),
        ("beside", "deepspeed"),
        ("scaled", "torch"),
    ],
)
def test_two_ranks_under_ray_train_as_one_process_does_and_resume(rlhf, tiny_model, prompts, tmp_path, case, backend):
    texts = tmp_path / "texts.jsonl"
    texts.write_text("".join(json.dumps({"prompt": f"{n}+1=", "completion": f"{n + 1}"}) + "\n" for n in range(9)))
    more = (*CASES[case], *(("--ptx.data", texts) if case == "beside" else ()))
    small = ("--rollout.n", "4", "--rollout.max-new-tokens", "6", "--train.batch-size", "4", "--train.steps", "3")
    common = ["train", "--reward", "vowels", "--actor.model", tiny_model, "--data", prompts, *small, *more]
    common += ["--actor.lr", "1e-3", "--actor.adam-eps", "1e-4", "--kernels", "none", "--checkpoint.every", "2"]
    rlhf.run(*common, "--run-dir", tmp_path / "one")
    split = ("--backend.zero-stage", "3") if backend == "deepspeed" else ()
    alone, both = dict.fromkeys(("beside", "scaled"), "actor=2"), dict.fromkeys(("reference", "adapter"), "actor+reference=2")
    placed = ("--placement", (alone | both).get(case, "actor+teacher=2"))
    rlhf.run(*common, *RAY, "--backend", backend, *split, *placed, "--placement", "rollout=1", "--run-dir", tmp_path / "two")
    rlhf.run("train", "--resume", tmp_path / "two", "--train.steps", "4")
    rlhf.run("train", "--resume", tmp_path / "one", "--train.steps", "4")
    for one, two in zip(metrics(tmp_path / "one"), metrics(tmp_path / "two"), strict=True):
        for name in ("reward/mean", "loss", "grad_norm", "kl", "teacher/taught", "divergence", "ptx/nll", "advantages/std"):
            assert (name in one) == (name in two), name
            if name in one:
                assert two[name] == pytest.approx(one[name], rel=2e-3, abs=1e-5), (name, one["step"])
    assert metrics(tmp_path / "one")[-1]["step"] == 4


def test_a_role_apart_from_its_source_is_refused_before_the_run(rlhf_here, tiny_model, prompts, tmp_path):
    apart = ("--placement", "actor=1", "--placement", "reference=1")
    start = ("train", "--reward", "vowels", "--actor.model", tiny_model, "--data", prompts, *CASES["reference"])
    result = rlhf_here(*start, *RAY, *apart, "--run-dir", tmp_path / "run")
    assert result.exit_code == 2
    assert "the role reference follows actor, so they have to be in one place" in result.output
    assert not (tmp_path / "run").exists()
