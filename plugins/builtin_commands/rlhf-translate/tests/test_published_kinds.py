"""Kinds of published scripts: losses and what their limits mean, engines with devices of their own, programs of other years."""

from __future__ import annotations

import pytest
from rlhf_translate.options import PROGRAM, Given, Option
from rlhf_translate.programs import first_program_of
from rlhf_translate.verl import asynchronous, losses

from rlhf_host import UserError

from .known import DPO, UNSET, alone, flat

_ACTOR = "actor_rollout_ref.actor."
VERL = (
    "python3 -m {program} data.train_files=d.parquet actor_rollout_ref.model.path=M actor_rollout_ref.rollout.name=vllm"
    " actor_rollout_ref.rollout.n=4 actor_rollout_ref.actor.ppo_mini_batch_size=8 trainer.nnodes=1 trainer.n_gpus_per_node=4"
    " algorithm.adv_estimator=grpo "
)
MAIN = VERL.format(program="verl.trainer.main_ppo") + "data.train_batch_size=8 trainer.total_training_steps=9 "


def given_of(*, version=(0, 9, 1), program="verl.trainer.main_ppo", **values):
    options = [(name, Option(name, (str(value),), 1, "=")) for name, value in values.items()]
    return Given("ppo", [(PROGRAM, Option(program, (), 1)), *options], version)


@pytest.mark.parametrize(
    ("mode", "settings"),
    [
        ("vanilla", {"algo.loss": "clip", "algo.clip_eps": "0.2", "algo.clip_eps_high": "0.2", "algo.dual_clip": "3.0"}),
        ("gspo", {"algo.loss": "gspo", "algo.gspo_eps": "0.2", "algo.gspo_eps_high": "0.2"}),
        ("cispo", {"algo.loss": "cispo", "algo.cispo_max": "1.2"}),
        ("dppo_tv", {"algo.loss": "dppo_tv", "algo.dppo_delta": "0.2", "algo.dppo_max": "3.0"}),
        ("sapo", {"algo.loss": "sapo"}),
        ("gpg", {"algo.loss": "pg"}),
        (
            "clip_cov",
            {
                "algo.loss": "clip",
                "with.clip_cov.name": "clip_cov",
                "algo.dual_clip": None,
                "algo.clip_eps": "0.2",
                "algo.clip_eps_high": "0.2",
                "with.clip_cov.share": "0.001",
            },
        ),
        ("kl_cov", {"algo.loss": "ratio", "with.kl_cov.name": "kl_cov", "with.kl_cov.coef": "0.1"}),
        ("geo_mean", {"algo.clip_eps": "0.2", "algo.clip_eps_high": "0.2"}),
    ],
)
def test_limits_mean_what_they_mean_in_each_loss(mode, settings):
    own = {"policy_loss.loss_mode": mode, "clip_ratio": 0.2, "clip_ratio_low": 0.2, "clip_ratio_high": 0.2, "clip_ratio_c": 3.0}
    parts = {"policy_loss.clip_cov_ratio": 0.001, "policy_loss.ppo_kl_coef": 0.1}
    given = given_of(**{"algorithm.adv_estimator": "grpo"}, **{f"{_ACTOR}{name}": each for name, each in (own | parts).items()})
    found = {}
    for name, convert in losses.TABLE.items():
        if name in given:
            found |= convert(given[name], given).settings
    assert found == settings


def test_a_lower_limit_that_is_not_here_is_told():
    given = given_of(**{f"{_ACTOR}policy_loss.loss_mode": "cispo", f"{_ACTOR}clip_ratio_low": 0.2})
    assert (
        "ratios below 1 - 0.2"
        in losses.TABLE[f"{_ACTOR}policy_loss.loss_mode"](given[f"{_ACTOR}policy_loss.loss_mode"], given).remark
    )


def test_gmpo_and_gdpo_are_algorithms(translated, script):
    values = translated(
        script(f"{MAIN}{_ACTOR}policy_loss.loss_mode=geo_mean {_ACTOR}clip_ratio_low=0.4 {_ACTOR}entropy_coeff=0")
    )[2]
    assert values["algo"] == {"name": "gmpo", "clip_eps": 0.4, "clip_eps_high": 0.2}
    parts = 'algorithm.gdpo_reward_keys=\'["right","short"]\' algorithm.gdpo_reward_weights=[1,0.5]'
    function = "reward.custom_reward_function.path=r.py"
    values = translated(script(f"{MAIN.replace('=grpo', '=gdpo')}+{parts.replace(' ', ' +')} {function}"))[2]
    assert values["algo"]["name"] == "gdpo"
    assert values["reward"] == {"right": {"name": UNSET, "weight": 1.0}, "short": {"name": UNSET, "weight": 0.5}}


def test_a_trainer_with_a_queue(translated, script):
    command = VERL.format(program="verl.experimental.fully_async_policy.fully_async_main")
    stream = "rollout.total_rollout_steps=128 rollout.nnodes=1 rollout.n_gpus_per_node=2 async_training.require_batches=2"
    more = "data.train_batch_size=0 data.gen_batch_size=1 data.val_files=v.parquet trainer.test_freq=3 trainer.total_epochs=2"
    values = translated(script(f"{command}{stream} {more} async_training.trigger_parameter_sync_step=4"))[2]
    assert values["train"]["batch_size"] == 16
    assert (values["train"]["minibatches"], values["train"]["steps"]) == (2, 8)
    assert values["eval"]["every"] == 12
    assert values["placement"] == ["actor=4", "rollout=2"]
    assert "sleep" not in values["engine"]
    assert values["async_depth"] == UNSET


def test_engines_have_devices_of_their_own_where_the_program_says_so(translated, script):
    own = "actor_rollout_ref.rollout.nnodes=1 actor_rollout_ref.rollout.n_gpus_per_node=2"
    modes = {"trainer.use_v1=True trainer.v1.trainer_mode=separate_async": ["actor=4", "rollout=2"], "": ["actor+rollout=4"]}
    for mode, placement in modes.items():
        assert translated(script(f"{MAIN}{own} {mode}"))[2]["placement"] == placement


@pytest.mark.parametrize(
    ("version", "program", "prompts"),
    [
        ((0, 7, 0), "verl.trainer.main_ppo", 96),
        ((0, 7, 0), "recipe.dapo.main_dapo", 32),
        ((0, 9, 1), "verl.trainer.main_ppo", 32),
    ],
)
def test_prompts_that_are_drawn_at_a_time_are_the_batch_of_older_trainers(version, program, prompts):
    given = given_of(version=version, program=program, **{"data.train_batch_size": 32, "data.gen_batch_size": 96})
    settings = [
        asynchronous.TABLE[name](given[name], given).settings for name in ("data.train_batch_size", "data.gen_batch_size")
    ]
    assert {} in settings
    assert {"train.batch_size": str(prompts)} in settings
    assert asynchronous.prompts(given) == prompts


@pytest.mark.parametrize(
    "teacher",
    [
        "distillation.teacher_model.model_path=T distillation.teacher_model.enable_resource_pool=False",
        "+distillation.teacher_models.math.key=a +distillation.teacher_models.math.model_path=T",
        "actor_rollout_ref.distillation.teacher_models.teacher0.path=T actor_rollout_ref.distillation.enabled=True",
    ],
)
def test_the_only_teacher_has_any_name_and_place(translated, script, teacher):
    loss = "distillation.distillation_loss.loss_mode=k1 distillation.distillation_loss.use_task_rewards=False"
    gradient = "distillation.distillation_loss.use_policy_gradient=True distillation.enabled=True"
    values = translated(script(f"{MAIN}{loss} {gradient if '.enabled' not in teacher else gradient.split()[0]} {teacher}"))[2]
    assert values["algo"]["name"] == "on_policy_distill"
    assert values["teacher"]["model"] == "T"
    assert values["placement"] == ["actor+rollout=4"]


def test_values_of_nothing_are_values_where_others_read_them(translated, script):
    free = (
        "+reward.custom_reward_function.reward_kwargs.weight=0.0",
        "+actor_rollout_ref.model.override_config.tie_word_embeddings=False",
        "+actor_rollout_ref.rollout.engine_kwargs.vllm.enable_log_requests=False",
    )
    needless = ("+actor_rollout_ref.model.override_config.attention_dropout=0.", "actor_rollout_ref.rollout.over_sample_rate=0")
    text = translated(script(f"{MAIN}reward.custom_reward_function.path=r.py {' '.join((*free, *needless))}"))[1]
    lost, _, none = text.partition("# Options that need no setting here:")
    assert all(option.strip("+") in lost for option in free)
    assert all(option.strip("+") in none for option in needless)


def test_what_scripts_set_beside_the_model(translated, script):
    options = (
        "data.trust_remote_code=True data.val_max_samples=32 data.val_files=v.parquet critic.enable=False"
        " actor_rollout_ref.actor.fsdp_config.model_dtype=fp16 custom_reward_function.path=null trainer.device=cuda"
    )
    _, text, values = translated(script(MAIN + options))
    assert values["actor"]["trust_remote_code"] is True
    assert values["actor"]["dtype"] == "float16"
    assert values["eval"]["data"]["max_samples"] == 32
    assert "Options without a counterpart" not in text
    assert "devices here are GPUs and the CPU, not npu" in translated(script(f"{MAIN}trainer.device=npu"))[1]


def test_a_reward_model_under_its_names_of_other_years(translated, script):
    values = translated(script(f"{MAIN}reward_model.enable=True reward_model.model_path=R reward_model.inference.name=vllm"))[2]
    assert values["reward_model"]["model"] == "R"


def test_tools_alone_ask_for_an_agent(translated, script):
    turns = "actor_rollout_ref.rollout.multi_turn"
    for place in ("t.yaml", "$(pwd)/t.yaml"):
        values = translated(script(f"{MAIN}{turns}.tool_config_path={place} {turns}.max_assistant_turns=2"))[2]
        assert values["agent"] == {"name": UNSET, "max_turns": 2}


def test_verls_own_files_are_known(translated, script):
    for name in ("transfer_queue_ppo_trainer", "one_step_off_ppo_trainer", "fully_async_ppo_megatron_trainer"):
        text = translated(script(f"{MAIN}--config-name={name}"))[1]
        assert "is not here, so" not in text


def test_a_word_of_a_condition_is_no_program(options):
    text = f'S=fsdp2\nif [ "$S" == "megatron" ]; then\n{MAIN} a.b=1\nelse\n{MAIN}\nfi\n'
    assert not any("ms-swift" in line for line in options(text)[1])


def test_openrlhfs_first_programs_are_known_by_their_options(options, script, translated):
    words = "--pretrain M --save_path s --zero_stage 2 --train_batch_size 8 --dataset d"
    options(f"deepspeed --num_gpus 2 ../train_sft.py {words}")
    assert (options.commands[0].project, options.commands[0].method) == ("openrlhf", "sft")
    assert first_program_of("train_sft.py", ["--pretrain", "--epochs"]) is None
    chat = "python ../batch_inference.py --eval_task rm --pretrain M --dataset d --output_path o.jsonl"
    assert (
        "trains nothing: it samples or scores: rlhf generate --model M"
        in options(f"deepspeed train_rm.py {words}\n{chat}")[1][0]
    )
    newer = "torchrun --nproc_per_node 2 -m openrlhf.cli.train_kd --model_name_or_path M --teacher_model T --dataset d"
    assert translated(script(f"{newer} --ckpt_save_path s"))[2]["actor"]["model"] == "M"


@pytest.mark.parametrize(
    ("name", "here"), [("gspo", "--algo.loss gspo"), ("maxrl", "--algo maxrl"), ("gold", "--algo.own-tokens true")]
)
def test_scripts_of_trl_whose_data_is_in_their_code_say_what_they_are_here(options, name, here):
    with pytest.raises(UserError, match=here):
        options(f"python examples/scripts/{name}.py --model_name_or_path M")


def test_several_losses_of_dpo_are_asked_for(translated, script):
    command = f"{DPO} --loss_type sigmoid bco_pair sft --loss_weights 0.8 0.2 1.0"
    assert translated(script(command), *alone(command))[2]["algo"]["loss"] == UNSET


@pytest.mark.parametrize("value", ['\'{"dtype": "bfloat16", "use_cache": false}\'', '\'{"torch_dtype": "bfloat16"}\''])
def test_arguments_of_the_models_class_that_are_settings(translated, script, value):
    command = f"{DPO} --model_init_kwargs {value}"
    assert flat(translated(script(command), *alone(command))[2])["actor.dtype"] == "bfloat16"
