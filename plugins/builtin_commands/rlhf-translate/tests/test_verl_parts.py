"""verl's probes of devices, Hydra's parts, schedules of every backend, and distillation."""

from __future__ import annotations

import pytest

PROBED = """DEVICE=${DEVICE:-$(python3 -c 'import torch_npu' 2>/dev/null && echo npu || echo gpu)}
case "${DEVICE}" in
    gpu) DEVICES=${DEVICES:-8} ;;
    npu) DEVICES=${DEVICES:-16} ;;
    *) echo "what is ${DEVICE}?" >&2; exit 1 ;;
esac
LAUNCH=(python3)
if [ "${USE_UV:-1}" != 0 ] && [ "${DEVICE:-gpu}" = gpu ] && { [ "${ENGINE}" = vllm ] || [ "${ENGINE}" = sglang ]; }; then
    LAUNCH=(uv run --frozen --extra "${ENGINE}" python3)
fi
"${LAUNCH[@]}" -m verl.trainer.main_ppo algorithm.adv_estimator=rloo actor_rollout_ref.model.path=M \\
    data.train_files=d.parquet trainer.n_gpus_per_node=${DEVICES} trainer.total_training_steps=3
"""
SFT = (
    "torchrun --nnodes=1 --nproc_per_node=8 -m verl.trainer.sft_trainer data.train_files=d.parquet model.path=M optim.lr=1e-5 "
)
PPO = (
    "python3 -m verl.trainer.main_ppo data.train_files=d.parquet actor_rollout_ref.model.path=M trainer.total_training_steps=9 "
)
DISTILL = (
    f"{PPO} algorithm.adv_estimator=grpo distillation.enabled=True distillation.n_gpus_per_node=4 distillation.nnodes=1"
    " distillation.teacher_models.teacher_model.model_path=T "
)
LOSS = "distillation.distillation_loss."


def test_a_probe_of_the_device_is_no_script(translated, script):
    _, text, values = translated(script(PROBED))
    assert (values["algo"]["name"], values["train"]["steps"]) == ("rloo", 3)
    assert "no value in the file for ${DEVICES} (set on lines 3, 4 under a condition)" in text.replace("\n#   ", " ")
    assert translated(script(PROBED), "--set", "DEVICE=npu")[2]["placement"] == ["actor+rollout=16"]


@pytest.mark.parametrize(
    ("options", "settings"),
    [
        ("optim=fsdp optim.lr_scheduler_type=cosine optim.min_lr_ratio=0.1", {"schedule": "cosine", "min_lr_ratio": 0.1}),
        ("optim.warmup_style=cosine optim.num_cycles=0.5", {"schedule": "cosine"}),
        ("optim=megatron optim.lr_decay_style=linear optim.min_lr=1e-6", {"schedule": "linear", "min_lr_ratio": 0.1}),
        ("optim=veomni optim.lr_min=2e-6", {"schedule": "cosine", "min_lr_ratio": 0.2}),  # by default
        ("optim=torchtitan optim.min_lr_factor=0.3", {"schedule": "linear", "min_lr_ratio": 0.3}),
        ("optim=automodel", {"schedule": "cosine", "min_lr_ratio": 0.01}),
        ("optim.lr_warmup_steps=0 optim.lr_warmup_steps_ratio=0.2 trainer.total_training_steps=50", {"warmup_steps": 10}),
        ("engine=veomni engine.ulysses_parallel_size=2", {"sequence_parallel": 2}),
        ("engine.ulysses_sequence_parallel_size=4", {"sequence_parallel": 4}),
    ],
)
def test_schedules_of_every_backend(translated, script, options, settings):
    _, text, values = translated(script(SFT + options))
    actor = values["actor"]
    assert {name: actor.get(name) for name in settings} == settings
    assert "not known here" not in text


@pytest.mark.parametrize(
    ("option", "reason"),
    [
        ("optim.num_cycles=2 optim.lr_scheduler_type=cosine", "the schedule cosine is half a cosine here"),
        ("optim=megatron optim.lr_decay_style=WSD", "schedules here: constant, linear, cosine"),
        ("optim=automodel optim.init_lr_ratio=0.1 optim.lr_warmup_steps=5", "a warm-up begins at 0 here"),
        ("optim=megatron optim.lr_decay_steps=7 trainer.total_training_steps=9", "the schedule ends with the run here"),
        ("engine=megatron engine.tensor_model_parallel_size=2", "an option of megatron, which is not here"),
        ("engine=mine", "no part of verl 0.9.1"),
    ],
)
def test_what_a_schedule_or_part_here_has_not_is_said_with_its_reason(translated, script, option, reason):
    assert reason in translated(script(SFT + option))[0]


def test_parts_choose_the_backend_and_its_defaults(translated, script):
    for options in ("model_engine=megatron", "actor_rollout_ref.actor.strategy=veomni", "--config-name=ppo_megatron_trainer"):
        _, text, values = translated(script(f"{PPO} algorithm.adv_estimator=rloo {options}"))
        assert values["backend"]["name"] == "fsdp"
        assert "which is not here: the same numbers, split by FSDP2" in text.replace("\n#   ", " ").replace("\n  #   ", " ")
    _, _, values = translated(
        script(f"{PPO} algorithm.adv_estimator=gae model_engine=veomni actor@actor_rollout_ref.actor=dp_actor")
    )
    assert "schedule" not in values["actor"]
    assert values["critic"]["schedule"] == "cosine"
    said = translated(script(f"{PPO} model@actor_rollout_ref.model=hf_model hydra/job_logging=none"))[1]
    assert "model@actor_rollout_ref.model=hf_model (line 1): verl's own part" in said
    assert "hydra/job_logging=none (line 1): hydra's own settings" in said


def test_a_distillation_is_one(translated, script):
    alone = f"{LOSS}use_task_rewards=False "
    _, _, values = translated(script(f"{DISTILL} {alone} {LOSS}loss_mode=k1 {LOSS}use_policy_gradient=True"))
    assert values["algo"]["name"] == "on_policy_distill"
    assert values["teacher"]["model"] == "T"
    assert values["placement"] == ["actor+rollout=8", "teacher=4"]
    assert "reward" not in values
    _, _, values = translated(script(f"{DISTILL} {alone} {LOSS}loss_mode=forward_kl_topk {LOSS}topk=64"))
    assert {name: values["algo"][name] for name in ("signal", "beta", "top_k")} == {"signal": "full", "beta": 0, "top_k": 64}
    said, _, values = translated(script(f"{DISTILL} {alone} {LOSS}loss_mode=k3"))
    assert "algo.signal: SET THIS (k3 as the loss itself is not here" in said
    assert values["algo"]["name"] == "on_policy_distill"


def test_a_distillation_beside_rewards_is_a_penalty_to_the_teacher(translated, script):
    _, _, values = translated(script(f"{DISTILL} {LOSS}distillation_loss_coef=0.5"))
    assert (values["algo"]["name"], values["reference"]["model"]) == ("grpo", "T")
    assert values["kl"] == {"coef": 0.5, "place": "loss", "estimator": "k3"}
    said = translated(script(f"{DISTILL} {LOSS}use_policy_gradient=True"))[0]
    assert "algo.name: SET THIS (rewards of the task with this distillation in one loss" in said
    many = DISTILL.replace("teacher_model.model_path=T", "one.model_path=T").replace(
        "distillation.teacher", "+distillation.teacher"
    )
    many += " +distillation.teacher_models.two.model_path=U"
    assert "teacher.model: SET THIS" in translated(script(f"{many} {LOSS}use_task_rewards=False {LOSS}loss_mode=k1"))[0]


def test_programs_whose_engines_have_devices_of_their_own(translated, script):
    command = PPO.replace("verl.trainer.main_ppo", "verl.experimental.fully_async_policy.fully_async_main")
    said, _, values = translated(script(f"{command} algorithm.adv_estimator=grpo rollout.n_gpus_per_node=4 rollout.nnodes=1"))
    assert values["placement"] == ["actor=8", "rollout=4"]
    assert "async_depth: SET THIS" in said


def test_mixtures_of_experts_and_weights_in_8_bits_are_translated(translated, script):
    rollout, actor = "actor_rollout_ref.rollout.", "actor_rollout_ref.actor."
    options = (
        f"{rollout}name=vllm {rollout}quantization=fp8 {rollout}enable_rollout_routing_replay=True {actor}strategy=megatron"
        f" {actor}megatron.expert_model_parallel_size=4 {actor}megatron.router_replay.mode=R3"
    )
    _, text, values = translated(script(PPO + options))
    assert (values["engine"]["quantization"], values["engine"]["routed_experts"]) == ("fp8", True)
    assert values["with"]["router_replay"] == {"name": "router_replay"}
    assert values["backend"] == {"name": "fsdp", "expert_parallel": 4}
    assert "without a counterpart" not in text


@pytest.mark.parametrize(
    ("option", "why"),
    [
        ("rollout.quantization=torchao", "--engine.quantization is fp8 or int8"),
        ("actor.megatron.router_replay.mode=R2", "--with router_replay has those of the engine"),
    ],
)
def test_other_ways_of_both_are_named(translated, script, option, why):
    said, _, values = translated(script(f"{PPO}actor_rollout_ref.rollout.name=vllm actor_rollout_ref.{option}"))
    assert why in said
    assert "quantization" not in values["engine"]
    assert "router_replay" not in values.get("with", {})
