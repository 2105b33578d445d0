"""Parts of a run: data, rewards, devices, trackers, schedules, the number of steps, precision."""

from __future__ import annotations

import re

import pytest

from .known import GRPO, PPO, UNSET


def test_a_mixture_of_data(translated, script):
    mixture = "datasets:\n- {path: a/b, name: main, split: train, fraction: 0.3}\n- {path: c.jsonl, fraction: 0.7}\n"
    _, _, values = translated(script(f"{mixture}reward_funcs: my.f\n", "mixed.yaml"))
    assert values["data"]["sources"] == [
        {"path": "a/b", "subset": "main", "split": "train", "weight": 0.3},
        {"path": "c.jsonl", "weight": 0.7},
    ]
    assert values["reward"] == {"f": {"name": UNSET}}


def test_rewards_of_trl(translated, script, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my").mkdir()
    (tmp_path / "my/rewards.py").write_text("def short(completions, **columns): ...\n")
    _, _, values = translated(
        script(
            "accelerate launch --num_processes 2 trl/scripts/grpo.py --model_name_or_path m --dataset_name d --use_vllm True"
            " --reward_funcs my.rewards.short think_format_reward get_soft_overlong_punishment --reward_weights 1 0.5 2"
            " --per_device_train_batch_size 8 --gradient_accumulation_steps 4 --steps_per_generation 8 --num_generations 16"
            " --beta 0.04 --loss_type grpo --vllm_importance_sampling_mode token_truncate --max_steps 100 --save_steps 50\n"
        )
    )
    assert values["reward"]["short"] == {"name": "my/rewards.py:short", "weight": 1.0}
    assert values["reward"]["think_format_reward"]["name"] == "format"
    assert values["with"]["overlong_penalty"] == {"max_length": 1280, "buffer": 256, "factor": 2.0}
    assert values["with"]["tis"] == {"cap": 3.0}
    assert values["train"] == {"batch_size": 8, "minibatches": 2, "steps": 50, "autocast": "bfloat16"}
    assert values["kl"] == {"coef": 0.04, "place": "loss", "estimator": "unbiased", "aggregation": "sequence-mean-token-mean"}
    assert values["checkpoint"]["every"] == 25


def test_models_on_devices_of_their_own(translated, script):
    """As in examples/scripts/train_ppo_llama_ray.sh of OpenRLHF 0.8."""
    flags = " ".join(f"--{role}_num_nodes 1 --{role}_num_gpus_per_node 2" for role in ("ref", "reward", "critic"))
    _, _, values = translated(
        script(
            f"python -m openrlhf.cli.train_ppo_ray {flags} --actor_num_nodes 2 --actor_num_gpus_per_node 4 --vllm_num_engines 2"
            " --vllm_tensor_parallel_size 2 --colocate_critic_reward --colocate_actor_ref --pretrain m --reward_pretrain r"
            " --use_kl_estimator_k3 --flash_attn --prompt_data a,b --prompt_data_probs 0.3,0.7\n"
        )
    )
    assert values["placement"] == ["actor+reference=2x4", "critic+reward=2", "rollout=4"]
    assert values["kl"] == {"estimator": "k3", "force": True, "coef": 0.01}
    assert values["actor"]["attn_implementation"] == "flash_attention_2"
    assert values["data"]["sources"] == [{"path": "a", "weight": 0.3}, {"path": "b", "weight": 0.7}]


def test_trackers_and_their_projects(translated, script):
    chosen = "'trainer.logger=[console,mlflow,swanlab,clearml]' trainer.project_name=sums"
    text = f"python -m verl.trainer.main_ppo data.train_files=p.parquet {chosen}"
    assert translated(script(text + "\n"))[2]["tracker"] == {
        "mlflow": {"name": "mlflow", "experiment": "sums"},
        "swanlab": {"name": "swanlab", "project": "sums"},
        "clearml": {"name": "clearml", "project": "sums"},
    }
    text = "trl grpo --model_name_or_path m --dataset_name d --report_to trackio --project sums --trackio_space_id me/sums"
    assert translated(script(text + "\n"))[2]["tracker"] == {
        "trackio": {"name": "trackio", "project": "sums", "space_id": "me/sums"}
    }
    text = "trl grpo --model_name_or_path m --dataset_name d --report_to mlflow --project sums"
    assert translated(script(text + "\n"))[2]["tracker"] == {"mlflow": {"name": "mlflow"}}


@pytest.mark.parametrize(
    "command",
    [
        f"{PPO} --lr_scheduler {{}} --lr_warmup_ratio 0.01",
        "trl dpo --lr_scheduler_type {} --warmup_steps 3",
    ],
)
def test_a_constant_schedule_of_transformers_ignores_the_warm_up(translated, script, command):
    _, text, values = translated(script(command.format("constant")))
    assert values["actor"]["warmup_steps"] == 0
    assert "the schedule constant has no warm-up there; constant_with_warmup has" in text
    assert translated(script(command.format("constant_with_warmup")))[2]["actor"]["warmup_steps"] in (3, UNSET)


def test_a_share_of_the_updates_is_rounded_up(translated, script, tmp_path):
    (tmp_path / "p.jsonl").write_text('{"input": "a"}\n' * 10240)
    command = f"{PPO.replace('p.jsonl', str(tmp_path / 'p.jsonl'))} --train_batch_size 1024 --lr_warmup_ratio 0.11"
    assert translated(script(command))[2]["actor"]["warmup_steps"] == 2


def test_updates_that_do_not_fill_a_batch(translated, script):
    command = f"{GRPO} --steps_per_generation 8 --gradient_accumulation_steps 2 --max_steps 10"
    _, text, values = translated(script(command), "--processes", "1")
    assert values["train"]["steps"] == 2
    assert "10 updates, 4 per batch; not a whole number, so it is rounded" in text


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_rows_are_counted_for_the_number_of_steps(translated, script, tmp_path, suffix):
    from datasets import Dataset

    path, rows = tmp_path / f"rows.{suffix}", Dataset.from_list([{"prompt": "a"}] * 100)
    rows.to_parquet(path) if suffix == "parquet" else rows.to_json(path)
    command = f"python -m verl.trainer.main_ppo data.train_files={path} data.train_batch_size=16 trainer.total_epochs=3"
    assert translated(script(command))[2]["train"]["steps"] == 18
    assert translated(script(f"{command} data.train_max_samples=32"))[2]["train"]["steps"] == 6


def test_what_trls_sft_trains(translated, script):
    assert (
        "# Defaults of TRL without a counterpart here:\n#   --assistant_only_loss False: " in translated(script("trl sft\n"))[1]
    )
    assert (
        "--assistant_only_loss (line 1): only answers are trained here"
        in translated(script("trl sft --assistant_only_loss\n"))[1]
    )


def test_float16(translated, script):
    _, text, values = translated(script(f"{GRPO} --fp16\n"))
    assert "autocast" not in values["train"]
    assert "--fp16 (line 1): mixed precision in float16; train.autocast is bfloat16 on GPUs, off elsewhere" in text


def test_an_algorithm_that_is_not_here(translated, script):
    said, text, values = translated(script("python -m verl.trainer.main_ppo algorithm.adv_estimator=remax\n"))
    assert values["algo"] == {"name": UNSET, "aggregation": "token-mean", "clip_eps_high": 0.2}
    assert (
        "# algo.name: SET THIS (no algorithm here does what remax does there): algorithm.adv_estimator=remax (line 1)\n" in text
    )
    assert re.search(r"train --config \S+ .*--algo NAME.*\n", said)
