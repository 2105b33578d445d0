"""FSDP of verl and TRL: what becomes ``--backend fsdp``, and what is said of the rest."""

from __future__ import annotations

import json

import pytest

VERL = "python -m verl.trainer.main_ppo algorithm.adv_estimator=grpo trainer.nnodes=2 trainer.n_gpus_per_node=8"
TRL = "torchrun --nnodes 2 --nproc_per_node 8 trl/scripts/sft.py --dataset_name d --model_name_or_path m"
FSDP = {"name": "fsdp"}
GIVEN_UP = "a block's weights are always given up after its forward pass"


def said_of(text, option):
    """Returns the line of a translation about an option."""
    lines = " ".join(line.lstrip("# ") for line in text.splitlines())
    return lines[lines.index(option) :].split(": ", 1)[1]


@pytest.mark.parametrize(
    ("flags", "backend"),
    [
        ("strategy=fsdp2", {}),
        ("strategy=fsdp", {}),
        ("fsdp_config.param_offload=True", {"offload_while_sampling": "all"}),
        ("fsdp_config.optimizer_offload=True", {"offload_while_sampling": "optimizer"}),
        ("fsdp_config.param_offload=True fsdp_config.optimizer_offload=True", {"offload_while_sampling": "all"}),
        ("strategy=fsdp2 fsdp_config.offload_policy=True", {"offload": "cpu"}),
        ("strategy=fsdp2 fsdp_config.offload_policy=True fsdp_config.param_offload=True", {"offload": "cpu"}),
        ("fsdp_config.offload_policy=True", {}),
        ("fsdp_config.fsdp_size=8", {"shard": 8}),
        ("fsdp_config.fsdp_size=16", {}),
        ("fsdp_config.fsdp_size=-1", {}),
        ("fsdp_config.dtype=bfloat16", {"precision": "bf16"}),
        ("+fsdp_config.mixed_precision.param_dtype=fp32", {"precision": "fp32"}),
    ],
)
def test_verl_is_split_by_the_backend_fsdp(translated, script, flags, backend):
    place = "actor_rollout_ref.actor."
    words = [f"+{place}{word[1:]}" if word[0] == "+" else place + word for word in flags.split()]
    values = translated(script(f"{VERL} {' '.join(words)}\n"))[2]
    assert values["backend"] == FSDP | backend
    assert values["placement"] == ["actor+rollout=2x8"]


@pytest.mark.parametrize(
    ("flag", "reason"),
    [
        ("fsdp_config.reshard_after_forward=False", GIVEN_UP),
        ("fsdp_config.dtype=float16", "the weights of passes are bf16 or fp32"),
        ("fsdp_config.mixed_precision.reduce_dtype=bf16", "gradients are summed in float32"),
        ("fsdp_config.offload_policy=True", "FSDP1 does not read it there"),
        ("strategy=magic", "backends here: torch, deepspeed, fsdp"),
    ],
)
def test_what_verl_has_and_the_backend_has_not_is_said(translated, script, flag, reason):
    text = translated(script(f"{VERL} actor_rollout_ref.actor.{flag}\n"))[1]
    assert said_of(text, f"actor_rollout_ref.actor.{flag} ").startswith(reason)


def test_types_and_offloads_of_verls_supervised_training(translated, script):
    command = "torchrun --nproc_per_node=4 -m verl.trainer.{} data.train_files=a.parquet data.train_batch_size=64"
    old = " model.strategy=fsdp2 model.fsdp_config.cpu_offload=True model.fsdp_config.offload_params=True"
    values = translated(script(command.format("fsdp_sft_trainer") + old + "\n"))[2]
    assert (values["backend"], values["placement"]) == (FSDP | {"offload": "cpu"}, ["actor=4"])
    new = " model.path=m engine.strategy=fsdp2 engine.fsdp_size=2 engine.param_offload=True engine.model_dtype=bf16"
    _, text, values = translated(script(command.format("sft_trainer") + new + "\n"))
    assert (values["backend"], values["actor"]["dtype"]) == (FSDP | {"shard": 2}, "bfloat16")
    assert said_of(text, "engine.param_offload=True ").startswith("nothing samples on the same devices")


@pytest.mark.parametrize(
    ("flags", "backend"),
    [
        ("--fsdp", {}),
        ("--fsdp full_shard", {}),
        ("--fsdp 'full_shard auto_wrap offload'", {"offload": "cpu"}),
        ("--fsdp 'hybrid_shard auto_wrap'", {"shard": 8}),
        ('--fsdp true --fsdp_config \'{"version": 2, "cpu_offload": true}\'', {"offload": "cpu"}),
        ("--fsdp true --fsdp_config own.json", {"offload": "cpu"}),
    ],
)
def test_the_trainers_fsdp(translated, script, tmp_path, flags, backend):
    own = {"offload_params": True, "activation_checkpointing": True, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}
    (tmp_path / "own.json").write_text(json.dumps(own))
    values = translated(script(f"{TRL} {flags}\n"))[2]
    assert values["backend"] == FSDP | backend
    assert values["runtime"] == {"name": "ray"}


@pytest.mark.parametrize(
    ("flags", "option", "reason"),
    [
        ("--fsdp shard_grad_op", "--fsdp shard_grad_op", f"shard_grad_op has no counterpart: {GIVEN_UP}"),
        ("--fsdp no_shard", "--fsdp no_shard", "no_shard has no counterpart: nothing is split: --backend torch"),
        ("--fsdp fast", "--fsdp fast", "fast has no counterpart: a word of FSDP that is not known here"),
        ("--fsdp_config '{\"xla\": true}'", "--fsdp_config", "xla has no counterpart: TPUs"),
        ("--fsdp_config '{\"speed\": 9}'", "--fsdp_config", "speed has no counterpart: a setting of FSDP"),
        ("--fsdp_config there.json", "--fsdp_config there.json", "the file is not here, so it is not read"),
    ],
)
def test_what_the_trainer_has_and_the_backend_has_not_is_said(translated, script, flags, option, reason):
    text = translated(script(f"{TRL} {flags}\n"))[1]
    said = said_of(text, f"{option} ")
    assert (said.split('"}', 1)[-1] if "{" in said[:20] else said).find(reason) >= 0


def test_accelerates_file(translated, script, tmp_path):
    config = {
        "fsdp_version": 2,
        "fsdp_offload_params": True,
        "fsdp_activation_checkpointing": True,
        "fsdp_reshard_after_forward": False,
        "fsdp_cpu_ram_efficient_loading": True,
        "fsdp_auto_wrap_policy": "SIZE_BASED_WRAP",
        "fsdp_state_dict_type": "SHARDED_STATE_DICT",
        "fsdp_backward_prefetch": "BACKWARD_PRE",
    }
    file = {"distributed_type": "FSDP", "num_processes": 4, "num_machines": 1, "fsdp_config": config}
    (tmp_path / "acc.json").write_text(json.dumps(file))
    command = "accelerate launch --config_file acc.json trl/scripts/sft.py --dataset_name d --gradient_checkpointing False\n"
    _, text, values = translated(script(command))
    assert (values["backend"], values["placement"]) == (FSDP | {"offload": "cpu"}, ["actor=4"])
    for name, reason in (
        ("reshard_after_forward false", GIVEN_UP),
        ("auto_wrap_policy SIZE_BASED_WRAP", "a block is a module that the model's class names"),
        ("cpu_ram_efficient_loading true", "how models are loaded is the backend's matter"),
        ("state_dict_type SHARDED_STATE_DICT", "models are saved in Hugging Face format"),
    ):
        assert said_of(text, f"--fsdp_config.fsdp_{name} ").startswith(reason), name
    head = text.partition("\nactor:")[0]
    assert head.index("Options without a counterpart here") < head.index("fsdp_reshard_after_forward")


def test_accelerates_flags(translated, script):
    command = "accelerate launch --use_fsdp --num_processes 4 --fsdp_offload_params true --fsdp_sharding_strategy 1"
    assert translated(script(f"{command} trl/scripts/sft.py --dataset_name d\n"))[2]["backend"] == FSDP | {"offload": "cpu"}


@pytest.mark.parametrize("name", ["fsdp1", "fsdp2"])
def test_configurations_that_trl_has(translated, script, name):
    values = translated(script(f"trl sft --dataset_name d --accelerate_config {name}\n"))[2]
    assert (values["backend"], values["placement"]) == (FSDP, ["actor=8"])
