"""Effects of earlier versions that have no option are written too, where it is not so here."""

from __future__ import annotations

import pytest
from rlhf_translate import versions
from rlhf_translate.in_code import IN_CODE

from .conftest import ORACLES
from .known import GRPO, PPO, UNSET, flat

VERL = (
    "python -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_files=d.parquet data.val_files=v.parquet "
    "actor_rollout_ref.model.path=m actor_rollout_ref.rollout.n=4"
)
SFT = "torchrun --nnodes=1 --nproc_per_node=1 -m verl.trainer.fsdp_sft_trainer data.train_files=d.parquet data.val_files=v.parquet"


@pytest.mark.parametrize(
    ("command", "version", "expected"),
    [
        (
            VERL,
            "verl==0.2",
            {
                "kl.coef": 0.001,
                "kl.place": "reward",
                "algo.dual_clip": None,
                "actor.betas": [0.9, 0.999],
                "actor.weight_decay": 0.01,
                "eval.temperature": 0.0,
                "checkpoint.keep": 0,
            },
        ),
        (VERL, "verl==0.3", {"kl.coef": 0.001, "kl.place": "reward", "algo.dual_clip": None}),
        (VERL, "verl==0.4", {"kl.coef": None, "actor.betas": [0.9, 0.999]}),
        (f"{VERL} algorithm.kl_ctrl.kl_coef=0", "verl==0.2", {"kl.coef": None}),
        (f"{VERL} actor_rollout_ref.actor.use_kl_loss=true", "verl==0.2", {"kl.coef": 0.001, "kl.place": "loss"}),
        (
            f"{VERL} actor_rollout_ref.actor.use_kl_loss=true actor_rollout_ref.actor.kl_loss_coef=0.0",
            "verl==0.7",
            {"kl.coef": None},
        ),
        (f"{VERL.replace('grpo', 'gae')} critic.model.path=m", "verl==0.2", {"critic.betas": [0.9, 0.999]}),
        (SFT, "verl:sft==0.3", {"actor.schedule": "cosine", "checkpoint.every": UNSET, "eval.every": UNSET}),
        (f"{GRPO} --beta 0", "trl==0.14", {"algo.dual_clip": None, "algo.aggregation": "sequence-mean-token-mean"}),
        (f"{GRPO} --beta 0", "trl==0.16", {"algo.dual_clip": None, "algo.aggregation": "token-mean"}),
        ("trl sft --model_name_or_path m --dataset_name d", "trl==0.14", {"data.max_tokens": 1024}),
        (PPO, "openrlhf==0.8.3", {"algo.dual_clip": None}),
    ],
)
def test_it_is_a_default_too(translated, script, command, version, expected):
    values = flat(translated(script(f"{command}\n"), "--from", version)[2])
    missing = {name: "not set" for name in expected if (name not in values and expected[name] is not None) or name == "kl.coef"}
    assert {name: values.get(name, missing.get(name)) for name in expected} == {
        name: "not set" if name == "kl.coef" and value is None else value for name, value in expected.items()
    }


def test_that_it_differs_is_said(translated, script):
    said = translated(script(f"{VERL}\n"))[0]
    assert "algorithm.use_kl_in_reward (True in 0.2.0.post2, False from 0.4.0)" in said


def test_before_0_15_a_batch_of_grpo_is_prompts(translated, script):
    path = script(f"{GRPO} --num_processes 2 --per_device_train_batch_size 4 --gradient_accumulation_steps 2 --max_steps 10\n")
    for version, prompts in (("0.14", 16), ("0.15", 2)):
        values = translated(path, "--from", f"trl:grpo=={version}")[2]
        assert (values["train"]["batch_size"], values["train"]["minibatches"], values["train"]["steps"]) == (prompts, 1, 10)


def test_each_is_an_option_of_a_later_version():
    for project, programs in IN_CODE.items():
        for program, names in programs.items():
            for name, changes in names.items():
                span = versions.spans(project, program, name)
                assert span
                assert span.partition(" ")[0] in (*changes, span.partition(" ")[0])
                assert not set(changes) - {None} <= {span.partition(" ")[0]}


@pytest.mark.parametrize(
    ("wheel", "file", "code"),
    [
        ("verl-0.2.0.post2", "verl/workers/fsdp_workers.py", "betas=optim_config.get('betas', (0.9, 0.999))"),
        ("verl-0.2.0.post2", "verl/workers/fsdp_workers.py", "weight_decay=optim_config.get('weight_decay', 1e-2)"),
        ("verl-0.2.0.post2", "verl/trainer/ppo/ray_trainer.py", "if not self.config.actor_rollout_ref.actor.get('use_kl_loss'"),
        ("verl-0.4.1", "verl/workers/fsdp_workers.py", 'betas=optim_config.get("betas", (0.9, 0.999))'),
    ],
)
def test_the_code_of_that_version_says_so(wheel, file, code):
    path = ORACLES / "published" / wheel / file
    if not path.is_file():
        pytest.skip("make oracles fetches the published packages")
    assert code in path.read_text()


def test_an_option_that_is_added_is_one_that_the_version_lacks(translated, script):
    """TinyZero's script: hydra refuses ``+NAME`` where there is such an option."""
    said, _, values = translated(script(f"{VERL} algorithm.kl_ctrl.kl_coef=0.002 +trainer.val_before_train=False\n"))
    assert "Version: verl 0.2.0.post2 to 0.3.0.post1 have these options" in said
    assert values["kl"] == {"coef": 0.002, "place": "reward"}
    said, _, values = translated(script(f"{VERL} algorithm.kl_ctrl.kl_coef=0.002 ++trainer.val_before_train=False\n"))
    assert "kl" not in values
