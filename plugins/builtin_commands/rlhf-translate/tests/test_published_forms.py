"""Forms of published scripts: programs beside launchers' options, paths from paths, options whose effect another one takes away."""

from __future__ import annotations

import pytest
from rlhf_translate.options import Given, Option
from rlhf_translate.verl.models import betas, optimizer

PPO = (
    "python3 -m verl.trainer.main_ppo data.train_files=d.parquet data.train_batch_size=8 actor_rollout_ref.model.path=org/M-1B"
    " actor_rollout_ref.actor.ppo_mini_batch_size=8 actor_rollout_ref.rollout.n=4 actor_rollout_ref.rollout.name=vllm"
    " trainer.total_training_steps=9 algorithm.adv_estimator=grpo "
)
VALIDATION = (
    "data.val_files=v.parquet actor_rollout_ref.rollout.val_kwargs.temperature=0.6 actor_rollout_ref.rollout.val_kwargs.n=4 "
)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("M=org/M-1B\nN=run-$(basename $M)\n", "run-M-1B"),
        ('M=/a/org/M-1B/\nN="$(basename "$M")-x"\n', "M-1B-x"),
        ("D=/a/train.parquet\nN=$(basename ${D} .parquet)\n", "train"),
        ("D=/a/b/train.parquet\nN=$(basename x)_$(dirname $D)\n", "x_/a/b"),
    ],
)
def test_parts_of_a_known_path_are_known(options, text, name):
    assert options(f"{text}{PPO} trainer.experiment_name=$N")[0]["trainer.experiment_name"] == name


@pytest.mark.parametrize("form", ["basename $UNSET", "basename $M | tr a b", "basename -- $(ls)", "dirname a b"])
def test_other_commands_have_no_value(options, form):
    command = options(f"M=org/M-1B\nN=$({form})\n{PPO} trainer.experiment_name=$N")[2]
    assert command.options[-1].missing


def test_a_program_is_no_value_of_its_launcher(options):
    command = options(f"uv run --frozen --no-sync {PPO}")[2]
    assert [(option.name, option.values) for option in command.launch] == [("--frozen", ()), ("--no-sync", ())]


def test_a_word_that_is_no_program_is_not_another_projects(options):
    others = options(f"uv sync --extra megatron --frozen\n{PPO}")[1]
    assert [line.partition(": ")[2] for line in others] == ["not a training command, left out: uv"]


def test_a_command_that_is_shown_is_no_second_one(options):
    text = "C='openrlhf.cli.train_dpo --pretrain M --dataset d'\necho $C\ntorchrun --nproc_per_node 1 -m $C"
    options(text)
    assert [command.line for command in options.commands] == [3]


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (PPO + VALIDATION, {"temperature": 0.6, "n": 4}),  # agent loops read the temperature alone
        (PPO + VALIDATION + "actor_rollout_ref.rollout.mode=async", {"temperature": 0.6, "n": 4}),
        (PPO + VALIDATION + "actor_rollout_ref.rollout.mode=sync", {"temperature": 0.0}),
        (PPO + "data.val_files=v.parquet actor_rollout_ref.rollout.val_kwargs.do_sample=True", {"temperature": 0.0}),
    ],
)
def test_validation_samples_as_its_rollout_does(translated, script, command, expected):
    values = translated(script(command))[2]["eval"]
    assert {name: values.get(name) for name in ("temperature", "n") if name in values} == expected


def test_a_model_that_a_reward_function_calls_is_no_second_reward(translated, script):
    model = "reward.reward_model.enable=True reward.reward_model.model_path=J "
    function = "reward.custom_reward_function.path=r.py reward.custom_reward_function.name=score"
    _, text, values = translated(script(PPO + model + function))
    assert values["reward"] == {"score": {"name": "r.py:score"}}
    assert "the function alone is the reward there, and calls this model" in text
    assert "reward_model" in translated(script(PPO + model))[2]["reward"]


def test_values_for_the_chat_template_one_by_one(translated, script):
    given = "+data.apply_chat_template_kwargs.{}"
    options = " ".join(map(given.format, ("reasoning_effort=medium", "enable_thinking=True", "thinking_budget=512")))
    values = translated(script(PPO + options))[2]
    assert values["data"]["template_kwargs"] == ["enable_thinking=true", "thinking_budget=512", 'reasoning_effort="medium"']


def test_a_loss_that_is_not_here_is_asked_for(translated, script):
    _, text, values = translated(script(PPO + "actor_rollout_ref.actor.policy_loss.loss_mode=cppo model_engine=megatron"))
    assert values["algo"]["loss"] == "SET THIS"
    assert "cppo is not here: vanilla, " in text.replace("\n#   ", " ")


@pytest.mark.parametrize(
    ("option", "reason"),
    [
        ("+actor_rollout_ref.rollout.engine_kwargs.trtllm.x=1", "an option of another engine"),
        ("+actor_rollout_ref.actor.optim.override_optimizer_config.optimizer_cpu_offload=True", "Megatron, which keeps its"),
        ("+actor_rollout_ref.actor.policy_loss.mine.my_floor=0.8 model_engine=megatron", "losses that are not here"),
        ("distillation.teacher_backend=fsdp", "the teacher computes with its weights in the trainer here, without an engine"),
        ("trainer.use_v1=True trainer.v1.trainer_mode=sync", "off, as it is here"),
    ],
)
def test_reasons_are_those_of_the_option(translated, script, option, reason):
    text = translated(script(PPO + option))[1].replace("\n#     ", " ")
    (line,) = (line for line in text.splitlines() if option.split()[-1 if "v1" in option else 0].lstrip("+") in line)
    assert reason in line


def test_the_optimizer_of_megatron_has_betas_for_what_is_no_matrix():
    for name, settings in (("muon", {"actor.betas": [0.9, 0.95]}), ("Muon", {})):
        given = Given("sft", [("optim.optimizer", Option("optim.optimizer", (name,), 1))])
        assert optimizer("optim.")(given["optim.optimizer"], given).settings == {"backend.optimizer": "Muon"}
        assert betas("actor", "optim.")(Option("optim.betas", ("0.9", "0.95"), 1), given).settings == settings


def test_names_of_openrlhf_that_trains_with_fsdp(translated, script):
    command = (
        "python3 -m openrlhf.cli.train_ppo_ray --actor.model_name_or_path M --data.prompt_dataset d --reward.remote_url r.py"
    )
    _, text, values = translated(script(f"{command} --fsdp.attn_implementation eager --fsdp.param_dtype bf16"))
    assert values["actor"]["attn_implementation"] == "eager"
    assert "not known here" not in text
