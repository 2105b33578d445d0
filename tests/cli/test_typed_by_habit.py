"""Habits of people who come from other programs, each with the answer: commands, flags of other projects, short names."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from rlhf_host.cli.main import main

START = ["--algo", "grpo", "--reward", "math_verifier", "--data", "a.jsonl"]

ANSWERS = {
    "ls": "no command 'ls'; here it is rlhf runs for runs, rlhf plugins for what is installed",
    "ps": "no command 'ps'; here it is rlhf runs for runs, rlhf plugins for what is installed",
    "logs": "no command 'logs'; here it is rlhf show RUN_DIR in the terminal, rlhf view RUN_DIR in the browser",
    "dashboard": "no command 'dashboard'; here it is rlhf view RUN_DIR",
    "tensorboard": "no command 'tensorboard'; 'tensorboard' is a tracker: rlhf train --tracker tensorboard --help",
    "run": "no command 'run'; here it is rlhf train",
    "fit": "no command 'fit'; here it is rlhf train",
    "resume": "no command 'resume'; here it is rlhf train --resume RUN_DIR",
    "test": "no command 'test'; here it is rlhf eval for a model, rlhf replay FILE for saved trajectories",
    "benchmark": "no command 'benchmark'; here it is rlhf plugins bench NAME for a plugin, rlhf eval for a model",
    "infer": "no command 'infer'; here it is rlhf rollout for a file of answers, rlhf chat, rlhf serve for programs",
    "convert": (
        "no command 'convert'; here it is rlhf translate FILE for another project's command, rlhf export RUN_DIR for a model"
    ),
    "merge": "no command 'merge'; here it is rlhf merge-lora DIRECTORY",
    "upload": "no command 'upload'; here it is rlhf push RUN_DIR NAME",
    "install": "no command 'install'; here it is rlhf plugins install NAME",
    "search": "no command 'search'; here it is rlhf plugins search",
    "new": "no command 'new'; here it is rlhf plugins new NAME",
    "recipes": "no command 'recipes'; here it is rlhf train --config NAME; an unknown name lists them",
    "config": "no command 'config'; here it is rlhf train --print-config for all settings, rlhf train --help for what they mean",
    "check": "no command 'check'; here it is rlhf doctor for this machine, rlhf plugins check NAME for a plugin",
    "version": "no command 'version'; here it is rlhf --version",
    "ui": "no command 'ui'; here it is rlhf view RUN_DIR",
    "grpo": "no command 'grpo'; 'grpo' is an algo: rlhf train --algo grpo --help",
    "train_ppo": "no command 'train_ppo'; 'ppo' is an algo: rlhf train --algo ppo --help",
    "plugins list": "no command 'list'; here it is rlhf plugins",
    "plugins info grpo": "no command 'info'; here it is rlhf plugins show NAME",
    "plugins add x": "no command 'add'; here it is rlhf plugins install NAME",
    "data head": "no command 'head'; here it is rlhf data show PATH",
    "train --learning_rate 1e-6": "--learning_rate: no such flag; OpenRLHF's and TRL's --learning_rate is --actor.lr here",
    "train --model_name_or_path m2": "--model_name_or_path: no such flag; TRL's model_name_or_path is --actor.model here",
    "train --output_dir out": "--output_dir: no such flag; TRL's output_dir is --run-dir here",
    "train --per_device_train_batch_size 8": (
        "--per_device_train_batch_size: no such flag; TRL's per_device_train_batch_size is "
        "--train.max-tokens-per-microbatch here (always by tokens)"
    ),
    "train --lr-schedule constant": "--lr-schedule: no such flag; here it is --actor.schedule constant",
    "train --lr-schedule constant_with_warmup": "--lr-schedule: no such flag; here it is --actor.schedule constant",
    "train --lr-schedule cosin": "--lr-schedule: no such flag; here it is --actor.schedule constant, linear or cosine",
    "train --num_train_epochs 3": (
        "--num_train_epochs: no such flag; TRL's num_train_epochs is --data.epochs here (of these; with grpo and "
        "rloo: --train.steps, in batches)"
    ),
    "train --gradient_accumulation_steps 4": (
        "--gradient_accumulation_steps: no such flag; TRL's gradient_accumulation_steps is "
        "--train.max-tokens-per-microbatch here (always by tokens)"
    ),
    "train --num_generations 8": "--num_generations: no such flag; TRL's num_generations is --rollout.n here",
    "train --max_completion_length 256": (
        "--max_completion_length: no such flag; TRL's max_completion_length is --rollout.max-new-tokens here"
    ),
    "train --epsilon 0.2": "--epsilon: no such flag; TRL's epsilon is --algo.clip-eps here",
    "train --use_vllm": "--use_vllm: no such flag; TRL's use_vllm is --engine vllm here",
    "train --report_to wandb": "--report_to: no such flag; TRL's report_to is --tracker here",
    "train --logging_steps 10": "--logging_steps: no such flag; every step is logged",
    "train --save_steps 100": "--save_steps: no such flag; OpenRLHF's and TRL's --save_steps is --checkpoint.every here",
    "train --warmup_ratio 0.1": "--warmup_ratio: no such flag; here it is --actor.warmup-steps N, in optimizer updates",
    "train --temperature 0.7": "--temperature: no such flag; OpenRLHF's and TRL's --temperature is --rollout.temperature here",
    "train --pretrain m": "--pretrain: no such flag; OpenRLHF's --pretrain is --actor.model here",
    "train --reward_pretrain r": (
        "--reward_pretrain: no such flag; OpenRLHF's --reward_pretrain is --reward reward_model --reward-model.model here"
    ),
    "train --actor_learning_rate 1e-6": "--actor_learning_rate: no such flag; OpenRLHF's --actor_learning_rate is --actor.lr here",
    "train --rollout_batch_size 128": (
        "--rollout_batch_size: no such flag; OpenRLHF's --rollout_batch_size is --train.batch-size here (prompts)"
    ),
    "train --micro_train_batch_size 4": (
        "--micro_train_batch_size: no such flag; micro-batches follow from train.max_tokens_per_microbatch"
    ),
    "train --n_samples_per_prompt 8": (
        "--n_samples_per_prompt: no such flag; OpenRLHF's --n_samples_per_prompt is --rollout.n here (1 there, 8 here)"
    ),
    "train --init_kl_coef 0.01": (
        "--init_kl_coef: no such flag; OpenRLHF's --init_kl_coef is --kl.coef here (no KL by default; 0.01 there)"
    ),
    "train --zero_stage 3": (
        "--zero_stage: no such flag; OpenRLHF's --zero_stage is --backend deepspeed --backend.zero-stage 3 here"
    ),
    "train --flash_attn": (
        "--flash_attn: no such flag; OpenRLHF's --flash_attn is --actor.attn-implementation flash_attention_2 here"
    ),
    "train --prompt_data p": (
        "--prompt_data: no such flag; OpenRLHF's --prompt_data is --data here (repeated: --data math.jsonl@2 --data code.jsonl)"
    ),
    "train --use_wandb key": (
        "--use_wandb: no such flag; OpenRLHF's --use_wandb is --tracker wandb here (the key is that of wandb "
        "login, or WANDB_API_KEY)"
    ),
    "train algorithm.adv_estimator=grpo": (
        "unexpected argument 'algorithm.adv_estimator=grpo': flags look like --rollout.n 8; verl's "
        "algorithm.adv_estimator grpo is --algo grpo here"
    ),
    "train actor_rollout_ref.rollout.n=8": (
        "unexpected argument 'actor_rollout_ref.rollout.n=8': flags look like --rollout.n 8; verl's "
        "actor_rollout_ref.rollout.n is --rollout.n here (n: 1 there, 8 here)"
    ),
    "train trainer.total_epochs=3": (
        "unexpected argument 'trainer.total_epochs=3': flags look like --rollout.n 8; verl's trainer.total_epochs "
        "is --train.steps here (there passes over the data, here batches)"
    ),
    "train data.train_batch_size=64": (
        "unexpected argument 'data.train_batch_size=64': flags look like --rollout.n 8; verl's "
        "data.train_batch_size is --train.batch-size here (prompts on both sides)"
    ),
    "train --gpus 8": (
        "--gpus: no such flag; here it is --runtime ray --placement actor+rollout=8, where roles joined by + share 8 devices"
    ),
    "train --nodes 2": "--nodes: no such flag; here it is --runtime ray --placement actor+rollout=2x8 for 2 machines of 8 devices",
    "train --tp 2": "--tp: no such flag; here it is --engine vllm --engine.tensor-parallel-size 2 for the engine's model",
    "train --eval_dataset d": "--eval_dataset: no such flag; OpenRLHF's --eval_dataset is --eval.data here",
    "train --lora": "--lora: no such flag; here it is --actor.lora.rank 16",
    "train --env gym": "--env: no such flag; here it is --agent NAME",
    "train --kl 0.1": "--kl takes no value: set an option of 'kl', --kl.coef VALUE",
    "train --group_size 8": "--group_size: no such flag; here it is --n 8",
    "train --max_tokens 512": (
        "--max_tokens: no such flag; did you mean '--data.max-tokens' or '--eval.data.max-tokens' or '--rollout.max-tokens'?"
    ),
    "train --checkpoint c": "--checkpoint is a section: set its keys, such as --checkpoint.every",
    "train --seed": "--seed needs a value",
    "train --async": "--async: no such flag; here it is --async-depth 1",
    "train --cpu": "--cpu: no such flag; here it is --actor.device cpu",
    "train --wandb_project p": (
        "--wandb_project: no such flag; OpenRLHF's --wandb_project is --tracker wandb --tracker.wandb.project here"
    ),
    "train --deepspeed ds.json": (
        "--deepspeed: no such flag; TRL's deepspeed is --runtime ray --backend deepspeed here (options in the "
        "place of its JSON file)"
    ),
    "train --config_file x": "--config_file: no such flag; here it is --config FILE.yaml",
    "train --resume_from_checkpoint r": (
        "--resume_from_checkpoint: no such flag; TRL's resume_from_checkpoint is --resume here (with the run directory)"
    ),
    "train -lr 1e-5": "unexpected argument '-lr': flags look like --rollout.n 8; did you mean '--lr'?",
}
"""Typed words → the answer; ``train`` has an algorithm, a reward and data too."""

ACCEPTED = {
    "train --model m2": "    model: m2\n",
    "train --lr 1e-6": "    lr: 1e-06\n",
    "train --steps 10": "  steps: 10\n",
    "train --batch-size 64": "  batch_size: 64\n",
    "train --n 8 --rollout.max_new_tokens=64": "  n: 8\n",
    "train --max-new-tokens 64": "  max_new_tokens: 64\n",
    "train --wandb": "  wandb:\n    name: wandb\n",
    "train --kl.coef 0.1": "  kl:\n    name: kl\n    coef: 0.1\n",
}
"""Typed words → a part of the printed configuration."""


def rlhf(typed: str, *more: str):
    command, *words = typed.split()
    start = START if command == "train" else []
    return CliRunner().invoke(main, [command, *start, *words, *more], prog_name="rlhf")


@pytest.mark.parametrize("typed", ANSWERS)
def test_what_is_not_accepted_is_answered_with_what_is(typed):
    done = rlhf(typed)
    assert (done.exit_code, done.stderr) == (2, f"Error: {ANSWERS[typed]}\n")


@pytest.mark.parametrize("typed", ACCEPTED)
def test_what_everybody_types_is_accepted(typed):
    done = rlhf(typed, "--print-config")
    assert done.exit_code == 0, done.stderr
    assert ACCEPTED[typed] in done.stdout


def test_they_are_sixty():
    assert len(ANSWERS) + len(ACCEPTED) >= 60
