"""Habits of people who come from other programs, and what they mean here: words of the command line, and flags.

Every command and flag in these texts is one that is accepted. ``{}`` is the number that was typed, or N; ``{a|b}`` is
the one of these that was typed, or all of them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial

COMMANDS = {
    "ls list ps status history jobs": "rlhf runs for runs, rlhf plugins for what is installed",
    "log logs tail watch monitor metrics plot": "rlhf show RUN_DIR in the terminal, rlhf view RUN_DIR in the browser",
    "dashboard ui gui web": "rlhf view RUN_DIR",
    "run fit finetune fine-tune launch start learn training": "rlhf train",
    "resume continue": "rlhf train --resume RUN_DIR",
    "test evaluate evaluation validate score": "rlhf eval for a model, rlhf replay FILE for saved trajectories",
    "bench benchmark": "rlhf plugins bench NAME for a plugin, rlhf eval for a model",
    "timeline trace perf profiler": "rlhf train --with profile, then rlhf profile RUN_DIR",
    "infer inference predict sample complete": "rlhf rollout for a file of answers, rlhf chat, rlhf serve for programs",
    "api server": "rlhf serve",
    "convert import migrate": "rlhf translate FILE for another project's command, rlhf export RUN_DIR for a model",
    "merge merge_lora lora": "rlhf merge-lora DIRECTORY",
    "save gguf quantize": "rlhf export RUN_DIR",
    "upload publish": "rlhf push RUN_DIR NAME",
    "preprocess dataset datasets prepare tokenize": "rlhf data show PATH; data needs no preparation",
    "add install update upgrade pip": "rlhf plugins install NAME",
    "remove uninstall": "rlhf plugins uninstall NAME",
    "search find": "rlhf plugins search",
    "new init create scaffold": "rlhf plugins new NAME",
    "algos algorithms rewards agents environments engines backends trackers": "rlhf plugins",
    "recipes examples": "rlhf train --config NAME; an unknown name lists them",
    "config settings options args": "rlhf train --print-config for all settings, rlhf train --help for what they mean",
    "check verify diagnose env info debug": "rlhf doctor for this machine, rlhf plugins check NAME for a plugin",
    "dry-run": "rlhf train --dry-run",
    "help man": "rlhf --help",
    "version": "rlhf --version",
}
"""Words in the place of a command → what to type."""

PLUGINS = {
    "ls list all installed status": "rlhf plugins",
    "info describe about options": "rlhf plugins show NAME",
    "help man": "rlhf plugins --help",
    "add update upgrade": "rlhf plugins install NAME",
    "remove rm delete": "rlhf plugins uninstall NAME",
    "find available": "rlhf plugins search",
    "init create scaffold": "rlhf plugins new NAME",
    "verify test validate": "rlhf plugins check NAME, or rlhf plugins show, which imports all",
    "benchmark profile": "rlhf plugins bench NAME",
    "freeze lock": "rlhf plugins requirements",
    "disable": "rlhf train --disable NAME",
}
"""The same after ``rlhf plugins``."""

DATA = {
    "view print head cat preview inspect describe stats list ls": "rlhf data show PATH",
    "clean rm remove delete purge cache": "rlhf data clear",
}
"""The same after ``rlhf data``."""

FLAGS = {
    "gpus gpu num_gpus n_gpus ngpus ngpu nproc num_processes n_devices num_devices devices world_size dp dp_size": (
        "--runtime ray --placement actor+rollout={}, where roles joined by + share {} devices"
    ),
    "nodes nnodes num_nodes n_nodes machines": "--runtime ray --placement actor+rollout=2x8 for 2 machines of 8 devices",
    "tp tp_size tensor_parallel": "--engine vllm --engine.tensor-parallel-size {} for the engine's model",
    "zero stage": "--backend deepspeed --backend.zero-stage {}",
    "epochs epoch num_epochs n_epochs": (
        "--data.epochs N for passes over a data set that is trained on as it is, or --train.steps N, in batches of prompts, for a"
        " run that samples (--train.epochs N is passes over each of these batches)"
    ),
    "iterations iters num_iters num_steps n_steps total_steps training_steps": "--steps {}",
    "model_name model_path model_id base_model pretrained hf_model": "--model PATH",
    "ref_model reference_model": "--reference.model PATH",
    "dataset_path data_path train_data train_file train_dataset prompts prompt_file": "--data PATH",
    "eval_data eval_file val_data val_file val_dataset validation_file test_data test_file test_dataset": "--eval.data PATH",
    "out output outdir out_dir save_dir save_path work_dir workdir log_dir logdir checkpoint_dir": "--run-dir DIRECTORY",
    "exp_name experiment experiment_name": "--name NAME",
    "bs batch global_batch_size": "--batch-size {}, in prompts, each with --n N answers",
    "n_samples num_samples samples group_size num_rollouts num_responses": "--n {}",
    "max_seq_len max_seq_length seq_len seq_length context_length": (
        "--rollout.max-tokens {} for a run that samples, --data.max-tokens {} for one over a data set"
    ),
    "max_completion_len max_response_len max_response_length response_length max_gen_len": "--max-new-tokens {}",
    "max_prompt_len": "--data.max-prompt-tokens {}",
    "clip_eps_low clip_ratio_low eps_clip_low cliprange clip_range": "--algo.clip-eps {}",
    "eps_clip_high": "--algo.clip-eps-high {}",
    "value_prefix_head value_head_prefix": "--reward-model.model PATH, whose head its configuration says",
    "kl_penalty kl_weight kl_beta kl_loss_coef": "--kl.coef {}",
    "log_with logger logging tracking": "--tracker NAME",
    "reward_fn reward_func reward_function reward_functions verifier judge grader": "--reward NAME, or --reward FILE.py:FUNCTION",
    "env environment_name": "--agent NAME",
    "tools": "--agent multi_turn --agent.tools FILE.py, whose functions are the tools",
    "lora use_lora peft qlora": "--actor.lora.rank 16",
    "mixed_precision precision amp": "--train.autocast bfloat16",
    "lr_warmup warmup num_warmup_steps warmup_ratio": "--actor.warmup-steps N, in optimizer updates",
    "lr_schedule scheduler": "--actor.schedule {constant|linear|cosine}",
    "wd l2_reg": "--actor.weight-decay {}",
    "grad_clip clip_grad gradient_clipping clip_grad_norm": "--actor.max-grad-norm {}",
    "save_freq save_every save_interval": "--checkpoint.every {}",
    "eval_freq eval_interval val_freq test_freq": "--eval.data PATH --eval.every {}",
    "continue from_checkpoint load_from resume_from restore": "--resume RUN_DIR",
    "async async_mode": "--async-depth 1",
    "cpu no_cuda": "--actor.device cpu",
    "cuda use_gpu": "--actor.device cuda, the default where there is one",
    "conf config_file yaml cfg": "--config FILE.yaml",
    "preset recipe environment": "--config NAME",
    "args training_args training_arguments": (
        "arguments of their own, such as --lr 0.001 --n 8; rlhf translate writes those of a script"
    ),
    "peft_config lora_config": "--actor.lora.rank 16",
    "quantization_config bnb_config": "--actor.quantize 4bit",
    "callbacks callback": "--tracker NAME, which may be a class with log_metrics; an extension with step_finished stops runs",
    "optimizers optimizer_cls_and_kwargs": "--backend.optimizer AdamW --actor.schedule cosine",
    "processing_class": "--actor.tokenizer DIRECTORY, by default that of the model",
    "compute_metrics": "--eval.reward FILE.py:FUNCTION",
    "formatting_func data_collator": "--data.template TEXT",
    "rollout_func environment_factory agent_loop": "--agent NAME, which may be a class",
    "compute_loss_func": "--algo NAME, which may be a class with compute_loss",
    "reward_processing_classes": "no setting: a model that judges brings its tokenizer, --reward NAME",
    "accum grad_accum micro_batch_size mbs": "--train.max-tokens-per-microbatch N, from which micro-batches follow",
}
"""Names of flags and keys, with underscores → what to type."""

_CHOICE = re.compile(r"\{([\w|]+)\}")

GROUPS = {"": COMMANDS, "plugins": PLUGINS, "data": DATA}
"""Group of commands → what people type after its name."""


def of_command(name: str) -> str:
    """``; here it is rlhf runs`` for ``ls``, or nothing; ``plugins.ls`` is typed after ``rlhf plugins``."""
    group, _, word = name.rpartition(".")
    return _of(word, GROUPS.get(group, {}))


def of_flag(name: str, value: object) -> str:
    """The same for a flag or a key, and its value."""
    return _of(name.replace("-", "_"), FLAGS, value)


def _of(word: str, table: Mapping[str, str], value: object = None) -> str:
    text = next((text for words, text in table.items() if word in words.split()), "")
    number = str(value) if re.fullmatch(r"[\d.]+(e-?\d+)?", str(value)) else "N"
    return f"; here it is {_CHOICE.sub(partial(_chosen, str(value)), text.replace('{}', number))}" if text else ""


def _chosen(value: str, choices: re.Match[str]) -> str:
    """Returns the choice that a value begins with, as ``constant_with_warmup`` does, or all of them."""
    names = choices[1].split("|")
    return next((name for name in names if value.partition("_")[0] == name), f"{', '.join(names[:-1])} or {names[-1]}")
