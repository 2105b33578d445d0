"""Meanings of options there are those of their settings here, in the version that the command is of."""

from __future__ import annotations

import re

import pytest

from .known import DPO, GRPO, PPO, UNSET, VERL, alone, flat

NEW = "python -m openrlhf.cli.train_ppo_ray --actor.model_name_or_path m --data.prompt_dataset p.jsonl"
OLD = GRPO.partition(" --reward_funcs")[0]
ROWS = "deepspeed --num_gpus 1 --module openrlhf.cli.train_{} --pretrain m --dataset d"
CORRECTED = "--enable_vllm_is_correction"
RS = "algorithm.rollout_correction.rollout_rs"
IS = "algorithm.rollout_correction.rollout_is"
BUFFER = "reward_model.reward_kwargs.overlong_buffer_cfg"
ACTOR = "actor_rollout_ref.actor."


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        # verl: rejection and weights (docs/algorithms.md, Corrections)
        (f"{VERL} {RS}=seq_sum_k1 {RS}_threshold=0.2_1.25", {"sequence_mask": ["sum", 0.8, 5.0, "one"]}),
        (f"{VERL} {RS}=seq_mean_k1 {RS}_threshold=2", {"sequence_mask": ["geometric", 0.5, 2.0, "one"]}),
        (f"{VERL} {RS}=seq_mean_k3 {RS}_threshold=0.01", {"sequence_mask": ["k3", None, 0.01, "one"]}),
        (
            f"{VERL} {RS}=geometric {RS}_threshold=1.01 {RS}_threshold_lower=0.9",
            {"sequence_mask": ["geometric", 0.9, 1.01, "one"]},
        ),
        (f"{VERL} {RS}=sequence {RS}_threshold=4", {"sequence_mask": ["sum", 0.25, 4.0, "one"]}),
        (
            f"{VERL} {RS}=seq_sum_k1,seq_mean_k3 '{RS}_threshold=\"2,0.1\"'",
            {"seq_sum_k1": ["sum", 0.5, 2.0, "one"], "seq_mean_k3": ["k3", None, 0.1, "one"]},
        ),
        (f"{VERL} {RS}=token_k1 {RS}_threshold=2", {}),
        (f"{VERL} {RS}=token {RS}_threshold=2", {}),
        (f"{VERL} {RS}=seq_max_k2 {RS}_threshold=2", {}),
        (f"{VERL} {RS}=null", {}),
        (f"{VERL} {IS}=token {IS}_threshold=0.5_5", {"icepop": [0.5, 5.0]}),
        (f"{VERL} {IS}=token {IS}_threshold=3", {"tis": [3.0]}),
        (f"{VERL} {IS}=sequence {IS}_threshold=3", {"sequence_truncate": [3.0]}),
        (f"{VERL} {IS}=sequence {IS}_threshold=0.5_3", {"sequence_mask": [None, 0.5, 3.0, None]}),
        (f"{VERL} {IS}=token {IS}_batch_normalize=true", {}),
        (
            f"{VERL} algorithm.rollout_is=true algorithm.rollout_is_threshold=3 algorithm.rollout_is_mode=mask",
            {"icepop": [1 / 3, 3.0]},
        ),
        # OpenRLHF, by version
        (f"{PPO} {CORRECTED} --vllm_is_truncated_threshold 2 --bf16", {"tis": [0.0, 2.0]}),
        (f"{PPO} {CORRECTED} --flash_attn", {"tis": [0.0, 2.0]}),
        (f"{PPO} {CORRECTED} --use_icepop", {"icepop": [0.5, 5.0]}),
        (f"{PPO} {CORRECTED} --vllm_is_correction_type icepop", {"icepop": [0.5, 5.0]}),
        (f"{PPO} {CORRECTED} --vllm_is_correction_type mis", {"sequence_mask": ["geometric", 0.5, 5.0, "token_truncated"]}),
        (f"{PPO} --algo.advantage.is_correction_enable --algo.advantage.is_correction_type icepop", {"icepop": [0.5, 5.0]}),
        (f"{PPO} --algo.advantage.is_correction_enable", {"tis": [0.5, 5.0]}),
        (f"{PPO} --algo.advantage.is_correction_level token --algo.advantage.is_correction_mode clip", {"tis": [0.5, 5.0]}),
        # TRL, by version
        (f"{GRPO} --use_vllm --vllm_importance_sampling_cap 4", {"sequence_mask": [None, None, 4.0, None]}),
        (f"{GRPO} --use_vllm --vllm_importance_sampling_mode token_mask", {"icepop": [0.0, 3.0]}),
    ],
)
def test_corrections(translated, script, command, expected):
    values = translated(script(f"{command}\n"), *alone(command))[2].get("with", {})
    found = {name: list(options_of(name, options)) for name, options in values.items() if name != "reward_scaling"}
    assert found == {
        name: [pytest.approx(item) if isinstance(item, float) else item for item in items] for name, items in expected.items()
    }


def options_of(name, options):
    names = {"tis": ("low", "cap"), "icepop": ("low", "high"), "sequence_truncate": ("cap",)}
    for key in names.get(name, ("statistic", "low", "high", "token_weight")):
        if key in options or name not in ("tis",):
            yield options.get(key)


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (f"{PPO} --flash_attn", {"rollout.max_new_tokens": 1024, "data.max_prompt_tokens": 1024, "algo.value_clip": None}),
        (f"{NEW} --rollout.temperature 1", {"rollout.max_new_tokens": 2047, "rollout.max_tokens": 2048}),
        (f"{PPO} --value_clip 0.3 --lr_scheduler constant", {"actor.schedule": "constant", "critic.schedule": "constant"}),
        (f"{PPO} --adam_betas 0.8 0.9", {"actor.betas": [0.8, 0.9], "critic.betas": [0.8, 0.9]}),
        (f"{NEW} --actor.adam.betas 0.8 0.9", {"actor.betas": [0.8, 0.9], "critic.betas": None}),
        (f"{OLD} --vllm_device auto", {"kl.coef": 0.04, "rollout.temperature": 0.9, "algo.aggregation": "token-mean"}),
        (
            f"{GRPO} --log_unique_prompts --max_prompt_length 9",
            {"kl.coef": None, "rollout.max_new_tokens": None, "data.max_prompt_tokens": 9},
        ),
        (f"{GRPO} --vllm_importance_sampling_clip_max 2", {"rollout.max_new_tokens": 512, "algo.aggregation": "token-mean"}),
        (f"{VERL} {ACTOR}optim.warmup_style=cosine", {"actor.schedule": "cosine"}),
        (
            f"{VERL} trainer.remove_previous_ckpt_in_save=True {ACTOR}clip_ratio=0.1",
            {"algo.clip_eps": 0.1, "algo.clip_eps_high": 0.1},
        ),
    ],
)
def test_defaults_are_those_of_the_version(translated, script, command, expected):
    values = flat(translated(script(f"{command}\n"), *alone(command))[2])
    assert {key: values.get(key) for key in expected} == expected


def test_the_version_is_said_with_the_names_that_tell_it(translated, script):
    path = script(f"{PPO} --use_icepop\n")
    text = translated(path)[1]
    assert "# Version: OpenRLHF 0.9.1 to 0.9.2 have these options; taken is 0.9.2, by use_icepop, " in text
    assert "(another: --from openrlhf:ppo_ray==VERSION)" in re.sub(r"\n# +", " ", text)
    text = translated(path, "--from", "openrlhf==0.8.3")[1]
    assert "# Version: OpenRLHF 0.8.3, as --from says." in text
    assert "# OpenRLHF 0.8.3 has no use_icepop; read as in 0.9.1 to 0.9.2." in text


def test_defaults_that_differ_between_the_versions_that_fit_are_said(translated, script):
    text = re.sub(r"\n# +", " ", translated(script(f"{PPO} {CORRECTED}\n"))[1])
    assert "vllm_is_truncated_threshold (2 in 0.8.9, 0.5 5.0 from 0.9.1)" in text


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (f"{ROWS.format('dpo')} --max_len 64", {"data.max_tokens": 64, "data.long_rows": "truncate"}),
        (f"{ROWS.format('rm')} --max_len 64", {"data.long_rows": "truncate", "algo.margin": "off"}),
        (f"{ROWS.format('rm')} --margin_loss", {"algo.margin": "auto"}),
        (f"{ROWS.format('sft')} --max_len 64", {"data.max_tokens": 64, "data.long_rows": None}),
        (f"{ROWS.format('dpo')} --ipo", {"algo.name": "dpo", "algo.loss": "ipo_sum"}),
        (f"{ROWS.format('dpo')} --nll_loss_coef 0.2", {"algo.nll_coef": 0.2, "algo.nll_mean": "rows"}),
        (
            f"{ROWS.format('kd')} --teacher_model t --kd_coef 0.3",
            {"algo.name": "distill", "algo.alpha": 0.3, "teacher.model": "t"},
        ),
        (f"{ROWS.format('kd')} --teacher_model t", {"algo.alpha": 0.4}),
        (f"{ROWS.format('prm')} --placeholder_token '<s>'", {"algo.name": "prm", "algo.separator": "<s>"}),
        (f"{PPO} --advantage_estimator group_norm --n_samples_per_prompt 4", {"algo.std_eps": 1e-9}),
        (GRPO, {"algo.std_eps": 1e-4}),
        (f"{GRPO} --multi_objective_aggregation normalize_then_sum", {"algo.name": "gdpo", "algo.std_eps": 1e-4}),
        (f"{DPO} --max_length 64", {"data.max_tokens": 64, "data.long_rows": "truncate"}),
        (f"{DPO} --label_smoothing 0.1 --vllm_model_impl x", {"algo.label_smoothing": None}),
        (f"{DPO} --label_smoothing 0.1 --loss_type robust", {"algo.label_smoothing": 0.1}),
        (f"{DPO} --label_smoothing 0.1 --label_pad_token_id 1", {"algo.label_smoothing": 0.1}),
        (f"{DPO} --loss_type sigmoid sft --loss_weights 1 0.2", {"algo.loss": "sigmoid", "algo.nll_coef": 0.2}),
        (f"{DPO} --loss_type sft hinge --loss_weights 0.5 2", {"algo.loss": "hinge", "algo.nll_coef": 0.25}),
        (f"{DPO} --rpo_alpha 0.3", {"algo.nll_coef": 0.3}),
        (f"{DPO} --truncation_mode keep_end", {"data.long_rows": "truncate"}),
        # get_batch_loss_metrics of TRL 0.20 to 0.28: rpo_alpha is added to what the losses and weights give
        *(
            (f"{DPO} {flags}", {"algo.loss": loss, "algo.nll_coef": coef})
            for flags, loss, coef in (
                ("--rpo_alpha 1.0 --loss_type sigmoid sft --loss_weights 1.0 0.5", "sigmoid", 1.5),
                ("--loss_type sigmoid sft --loss_weights 1.0 0.5 --rpo_alpha 1.0", "sigmoid", 1.5),
                ("--loss_type hinge --loss_weights 2 --rpo_alpha 1.0", "hinge", 0.5),
                ("--loss_weights 2 --rpo_alpha 1.0", "sigmoid", 0.5),
                ("--rpo_alpha 1.0 --loss_type ipo", "ipo", 1.0),
                ("--rpo_alpha 1.0 --loss_type ipo hinge", UNSET, 1.0),
            )
        ),
        # the steps of verl begin with 1, those of OpenRLHF with 0 from 0.9.1 on
        (f"{VERL.replace('grpo', 'gae')} trainer.critic_warmup=10", {"algo.critic_warmup": 9}),
        (f"{VERL} trainer.critic_warmup=10", {"algo.critic_warmup": None}),
        (f"{NEW} --critic.freezing_steps 10", {"algo.critic_warmup": 11}),
        (f"{NEW} --critic.freezing_steps -1", {"algo.critic_warmup": 0}),
        (f"{PPO} --freezing_actor_steps 10 --flash_attn", {"algo.critic_warmup": 10}),
        ("trl reward --model_name_or_path m --dataset_name d --max_length 64", {"data.max_tokens": 64, "data.long_rows": None}),
        (
            f"{VERL} critic.grad_clip=0.5 algorithm.adv_estimator=gae",
            {"critic.max_grad_norm": 0.5, "critic.gradient_checkpointing": True},
        ),
        (
            f"{VERL} algorithm.adv_estimator=gae critic.model.enable_gradient_checkpointing=False",
            {"critic.gradient_checkpointing": False},
        ),
        (f"{VERL} {ACTOR}optim.lr_warmup_steps=10", {"actor.warmup_steps": 40}),
        (f"{VERL} {ACTOR}optim.lr_warmup_steps_ratio=0.1 trainer.total_training_steps=50", {"actor.warmup_steps": 20}),
        (f"{VERL} {ACTOR}optim.lr_warmup_steps_ratio=0.1", {"actor.warmup_steps": UNSET}),
        (
            f"{VERL} +{BUFFER}.enable=True +{BUFFER}.len=9 +{BUFFER}.penalty_factor=0.5"
            " +reward_model.reward_kwargs.max_resp_len=99",
            {"with.overlong_penalty.buffer": 9, "with.overlong_penalty.factor": 0.5, "with.overlong_penalty.max_length": 99},
        ),
        (
            f"{VERL} reward_model.overlong_buffer.enable=False reward_model.overlong_buffer.len=9",
            {"with.overlong_penalty.buffer": None},
        ),
        (
            f"{VERL} algorithm.filter_groups.enable=True algorithm.filter_groups.max_num_gen_batches=10",
            {"rollout.max_refills": 9},
        ),
        (f"{VERL} +data.apply_chat_template_kwargs.enable_thinking=False", {"data.template_kwargs": ["enable_thinking=false"]}),
        (f"{VERL} actor_rollout_ref.rollout.multi_turn.enable=True", {"agent.name": UNSET}),
        (
            f"{VERL} actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.max_num_batched_tokens=99",
            {"engine.extra": {"max_num_batched_tokens": 99}},
        ),
    ],
)
def test_meanings_that_differ(translated, script, command, expected):
    values = translated(script(f"{command}\n"), *alone(command))[2]
    values = flat(values) | {"engine.extra": values.get("engine", {}).get("extra")}
    assert {key: values.get(key) for key in expected} == expected


def test_what_trains_nothing_is_at_the_top(translated, script):
    said = translated(script(f"{VERL} trainer.val_only=True\n"))[0]
    assert (
        "SET THIS (the command evaluates and trains nothing: rlhf eval with these settings): trainer.val_only=True (line 1)"
        in said
    )


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (
            f"{VERL} trainer.critic_warmup=10",
            "trainer.critic_warmup=10 (line 1): without a critic nothing at all learns in the first 9",
        ),
        (f"{NEW} --algo.advantage.estimator rloo --critic.freezing_steps 0", "nothing at all learns in the first step there"),
    ],
)
def test_steps_that_only_a_critic_would_use_are_lost(translated, script, command, said):
    """``fit`` of verl's ray trainer and ``ppo_train`` of OpenRLHF ask nothing about the estimator."""
    assert said in translated(script(f"{command}\n"))[0]


@pytest.mark.parametrize(
    "command",
    [
        f"{PPO} --vllm_num_engines 2 --async_train --deepspeed_enable_sleep --remote_rm_url r.py",
        f"{PPO} --vllm_num_engines 2 --train.async_enable --ds.enable_sleep --vllm.enable_sleep --reward.remote_url r.py",
        f"{PPO} --async_train --vllm_num_engines 2 {CORRECTED} --remote_rm_url r.py",
        f"{VERL} actor_rollout_ref.rollout.n=4 {IS}=token algorithm.rollout_correction.bypass_mode=true",
        f"{VERL} actor_rollout_ref.rollout.n=4 {RS}=seq_mean_k1 {RS}_threshold=2 algorithm.rollout_correction.bypass_mode=true",
        f"{VERL} actor_rollout_ref.rollout.n=4 actor_rollout_ref.rollout.val_kwargs.n=4 data.val_files=v.parquet",
        f"{VERL} actor_rollout_ref.rollout.n=4 trainer.test_freq=5",
        f"{GRPO} --eval_strategy steps --eval_steps 10",
        f"{DPO} --max_steps 10 --num_train_epochs 3",
        f"{ROWS.format('sft')} --deepspeed_enable_sleep --seed 3",
    ],
)
def test_what_the_other_project_allows_is_no_refusal(translated, script, command):
    said = translated(script(f"{command}\n"), *alone(command))[0]
    assert "--dry-run refuses" not in said


@pytest.mark.parametrize(
    ("command", "refusal"),
    [
        (VERL, "algo:grpo needs groups of 2 or more, and rollout.n is 1"),
        (f"{NEW} --rollout.max_new_tokens 900 --data.max_len 800 --reward.remote_url r.py", "leaves no room for a prompt"),
        (f"{PPO} --rollout_batch_size 4 --train_batch_size 1 --n_samples_per_prompt 8", "at most one minibatch per prompt"),
        ("python -m openrlhf.cli.train_ppo_ray --pretrain m --remote_rm_url r.py", "no training data: give --data PATH"),
    ],
)
def test_a_conflict_that_the_other_project_does_not_see_is_at_the_top_of_the_file(translated, script, command, refusal):
    _, text, _ = translated(script(f"{command}\n"), *alone(command))
    head = re.sub(r"\n#   ", " ", text.partition("\n\n")[0])
    assert re.search(rf"# --dry-run refuses this file until you decide: .*{refusal}", head)


def test_one_version_of_trl_is_chosen_by_the_reader(translated, script):
    path = script(f"{GRPO} --use_vllm\n")
    flags = ("--processes", "1", "--from")
    assert "with" not in translated(path, *flags, "trl==0.22")[2]
    assert translated(path, *flags, "trl==0.25")[2]["with"] == {"tis": {"cap": 2.0}}
    assert translated(path, *flags, "trl:grpo==1.16")[2]["with"] == {"sequence_mask": {"high": 3.0}}


@pytest.mark.parametrize(
    ("command", "name", "expected"),
    [
        (f"{VERL} actor_rollout_ref.actor.ulysses_sequence_parallel_size=1", "ulysses", "off, as it is here"),
        (f"{ROWS.format('sft')} --ring_attn_size 1", "ring_attn_size", "off, as it is here"),
        (f"{GRPO} --neftune_noise_alpha 0.0", "neftune", "off, as it is here"),
        (f"{VERL} algorithm.gamma=0.9", "algorithm.gamma", "grpo does not use it there either"),
        (f"{PPO} --advantage_estimator rloo --lambd 0.9", "lambd", "only gae uses it, there too"),
        (f"{PPO} --init_kl_coef -1", "init_kl_coef", "not above 0: no reference model is loaded"),
        (f"{VERL} hydra.run.dir=x", "hydra.run.dir", "hydra's own settings"),
        (f"{VERL} trainer.logger=null", "trainer.logger", "the console is always there"),
        (f"{NEW} --ckpt.best_metric_key none", "best_metric_key", "none, as it is here"),
        (f"{PPO} --normalize_reward", "normalize_reward", "no reward model is loaded"),
    ],
)
def test_what_asks_for_nothing_needs_no_setting(translated, script, command, name, expected):
    text = re.sub(r"\n#     ", " ", translated(script(f"{command}\n"), *alone(command))[1])
    needless = text.partition("# Options that need no setting here:")[2]
    assert re.search(rf"#   \S*{re.escape(name)}.*: {re.escape(expected)}", needless), text


@pytest.mark.parametrize(
    ("command", "key"),
    [
        (f"{VERL} trainer.nnodes=0", "placement"),
        (f"{VERL} actor_rollout_ref.actor.ppo_mini_batch_size=0", "train.minibatches"),
        (f"{PPO} --actor_num_nodes 0", "placement"),
        (f"{PPO} --train_batch_size 0", "train.minibatches"),
        (f"{DPO} --num_processes 0", "placement"),
        (f"{GRPO} --num_generations 0 --num_processes 1", "rollout.n"),
    ],
)
def test_none_is_not_one(translated, script, command, key):
    assert flat(translated(script(f"{command}\n"))[2])[key] == UNSET


@pytest.mark.parametrize(
    ("flags", "backend"),
    [
        ("--adam_offload", {"offload_optimizer": "cpu"}),
        ("--overlap_comm", {"extra": {"zero_optimization": {"overlap_comm": True}}}),
        (
            "--overlap_comm --deepcompile --grad_accum_dtype fp32",
            {
                "extra": {
                    "zero_optimization": {"overlap_comm": True},
                    "compile": {"deepcompile": True},
                    "data_types": {"grad_accum_dtype": "fp32"},
                }
            },
        ),
        ("--zpg 1", {}),
        ("--zpg 8", {"zero_hpz_partition_size": "8"}),
    ],
)
def test_switches_of_deepspeed(translated, script, flags, backend):
    own = translated(script(f"{ROWS.format('sft')} {flags}\n"))[2]["backend"]
    assert {key: value for key, value in own.items() if key not in ("name", "precision", "zero_stage")} == backend


def test_rewards_that_are_not_trls_are_asked_for(translated, script):
    command = "trl grpo --model_name_or_path m --dataset_name d --reward_funcs accuracy_reward tag_count --reward_weights 1 0.5"
    _, text, values = translated(script(f"{command} --system_prompt p --dataset_prompt_column q\n"), *alone(command))
    assert values["reward"] == {
        "accuracy_reward": {"name": "math_verifier", "weight": 1.0},
        "tag_count": {"name": UNSET, "weight": 0.5},
    }
    assert f"reward.tag_count.name: {UNSET} (tag_count is no function of TRL's" in text
    assert (values["data"]["system_prompt"], values["data"]["prompt_key"]) == ("p", "q")


def test_a_template_that_a_here_document_leaves_in_quotes(translated, script):
    text = "read -r -d '' C <<EOF\nopenrlhf.cli.train_sft --pretrain m --dataset d --input_template $'User: {}\\nA: '\nEOF\n"
    values = translated(script(f"{text}deepspeed --num_gpus 1 --module $C\n"))[2]
    assert values["data"]["template"] == "User: {prompt}\nA: "


def test_devices_of_several_nodes(translated, script):
    command = "deepspeed --hostfile h --num_nodes 2 --num_gpus 4 --module openrlhf.cli.train_sft --pretrain m --dataset d"
    assert translated(script(f"{command}\n"))[2]["placement"] == ["actor=2x4"]


def test_a_library_that_is_not_here_hides_no_other_error(translated, script):
    _, text, values = translated(script(f"{PPO} --use_liger_kernel --rollout_batch_size 128 --lambd 2 --remote_rm_url r.py\n"))
    assert values["train"]["batch_size"] == 128
    assert values["algo"]["lam"] == UNSET
    assert "kernels 'liger' needs liger_kernel" in text


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (f"{VERL.replace('grpo', 'remax')} {ACTOR}clip_ratio_low=0.1", {"algo.name": UNSET, "algo.clip_eps": 0.1}),
        (f"{PPO} --advantage_estimator x --eps_clip 0.1", {"algo.name": UNSET, "algo.clip_eps": 0.1}),
        (
            f"{VERL} actor_rollout_ref.rollout.multi_turn.enable=true actor_rollout_ref.rollout.multi_turn.max_assistant_turns=5",
            {"agent.name": UNSET, "agent.max_turns": 5},
        ),
    ],
)
def test_options_of_a_plugin_that_is_asked_for_are_kept(translated, script, command, expected):
    said, _, values = translated(script(f"{command}\n"))
    own = flat(values)
    assert {key: own[key] for key in expected} == expected
    assert "algo:grpo needs groups" not in said or "remax" not in command


AVERAGED = f"{PPO} --advantage_estimator rloo --n_samples_per_prompt 8 --rollout_batch_size 128 --enable_ema"
SAMPLED = f"{GRPO} --beta 0.1 --num_processes 1 --per_device_train_batch_size 8 --num_generations 8 --sync_ref_model"
OPTIM = f"{ACTOR}optim.optimizer"


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        # OpenRLHF moves the average after each update: four of them in a step are 0.9^4
        (f"{AVERAGED} --train_batch_size 256 --ema_beta 0.9", {"with.ema.decay": 0.6561}),
        (f"{AVERAGED} --train_batch_size 1024", {"with.ema.decay": 0.992}),
        (f"{NEW} --train.enable_ema --train.batch_size 1024", {"with.ema.decay": 0.992}),
        (f"{NEW} --train.ema_beta 0.9", {"with.ema.decay": None}),
        (
            f"{PPO} --pretrain_data q.jsonl --ptx_coef 0.2 --rollout_batch_size 16 --n_samples_per_prompt 4 --max_epochs 2",
            {"with.ptx.data": "q.jsonl", "with.ptx.coef": 0.2, "with.ptx.rows": 128},
        ),
        (f"{PPO} --pretrain_data q.jsonl,r.jsonl", {"with.ptx.data": None}),
        (f"{PPO} --ptx_coef 0.2", {"with.ptx.coef": None}),
        (
            f"{ROWS.format('sft')} --pretrain_mode --input_key body",
            {"data.format": "text", "data.prompt_key": "body", "data.template": None},
        ),
        (f"{ROWS.format('sft')} --model.pretrain_mode_enable", {"data.format": "text", "data.prompt_key": "input"}),
        # TRL counts the reference's steps in updates
        (
            f"{SAMPLED} --ref_model_sync_steps 64 --gradient_accumulation_steps 4 --steps_per_generation 16",
            {"with.moving_reference.share": 0.6, "with.moving_reference.every": 16},
        ),
        (f"{SAMPLED} --ref_model_mixup_alpha 0.1 --beta 0", {"with.moving_reference.share": None}),
        (
            f"{DPO} --num_processes 1 --optim adamw_torch --adam_beta1 0.8",
            {"backend.optimizer": None, "actor.betas": [0.8, 0.999]},
        ),
        (f"{DPO} --num_processes 1 --optim paged_adamw_8bit", {"backend.optimizer": "PagedAdamW8bit"}),
        (
            f"{DPO} --num_processes 1 --optim sgd --optim_args momentum=0.9,nesterov=True",
            {
                "backend.optimizer": "SGD",
                "backend.optimizer_args": ["momentum=0.9", "nesterov=true"],
                "actor.betas": None,
                "actor.adam_eps": None,
            },
        ),
        (f"{DPO} --num_processes 1 --optim lion_8bit", {"backend.optimizer": "Lion8bit", "actor.betas": [0.9, 0.999]}),
        (f"{VERL} {OPTIM}=SGD {ACTOR}strategy=fsdp", {"backend.optimizer": "SGD", "actor.betas": None}),
        # limits of rewards: of a reward model if they are equal, else of the sum
        (
            f"{PPO} --reward_clip_range -5 5 --remote_rm_url r.py",
            {"with.reward_scaling.low": -5.0, "with.reward_scaling.high": 5.0},
        ),
        (f"{PPO} --remote_rm_url r.py", {"with.reward_scaling.low": -10.0, "with.reward_scaling.high": 10.0}),
        (
            f"{PPO} --reward_pretrain r --reward_clip_range -5 5",
            {"reward.reward_model.clip": 5.0, "with.reward_scaling.low": None},
        ),
        (
            f"{PPO} --reward_pretrain r --reward_clip_range -1 5",
            {"reward.reward_model.clip": None, "with.reward_scaling.low": -1.0},
        ),
        (
            "trl rloo --model_name_or_path m --dataset_name d --num_processes 1 --reward_funcs accuracy_reward"
            " --reward_clip_range -1 2",
            {"with.reward_scaling.low": -1.0, "with.reward_scaling.high": 2.0},
        ),
        (
            f"{VERL} {OPTIM}=SGD +{ACTOR}optim.override_optimizer_config.momentum=0.9",
            {"backend.optimizer": "SGD", "backend.optimizer_args": ["momentum=0.9"]},
        ),
        (
            f"{VERL} {OPTIM}=AdamW '{ACTOR}optim.override_optimizer_config={{eps:1e-6,amsgrad:True}}'",
            {"actor.adam_eps": 1e-6, "backend.optimizer_args": ["amsgrad=true"]},
        ),
        (
            f"{VERL} '{ACTOR}optim.override_optimizer_config={{bf16_stochastic_round:True}}'",
            {"backend.optimizer_args": None},
        ),
        (f"{VERL} {ACTOR}optim.override_optimizer_config=null", {"backend.optimizer_args": None}),
        (
            f"{GRPO} --use_vllm True --vllm_mode server --vllm_server_port 8123 --vllm_server_timeout 60"
            " --vllm_gpu_memory_utilization 0.3",
            {
                "engine.name": "http",
                "engine.urls": ["http://127.0.0.1:8123"],
                "engine.wait_s": 60.0,
                "engine.gpu_memory_utilization": None,
            },
        ),
        (
            f"{GRPO} --use_vllm True --vllm_mode server --vllm_server_base_url http://node1:80",
            {"engine.urls": ["http://node1:80"], "engine.directory": "SET THIS"},
        ),
        (f"{GRPO} --use_vllm True --vllm_mode colocate --vllm_server_port 1", {"engine.name": "vllm", "engine.urls": None}),
        (f"{VERL} {OPTIM}=AdamW", {"backend.optimizer": None, "actor.betas": [0.9, 0.999]}),
    ],
)
def test_averages_second_data_sets_and_optimizers(translated, script, command, expected):
    values = flat(translated(script(f"{command}\n"))[2])
    assert {key: values.get(key) for key in expected} == expected


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (f"{NEW} --actor.optim muon", "whose step has the size of AdamW's, so that one rate serves all"),
        (f"{NEW} --actor.optim muon --actor.muon.lr 0.01", "--actor.muon.lr 0.01 (line 1): Muon there is DeepSpeed's"),
        (f"{DPO} --optim adafactor", "--optim adafactor (line 1): optimizers that are known here"),
        (f"{DPO} --optim sgd --optim_args beta3=0.1", "beta3 is no argument of sgd"),
        (f"{VERL} {ACTOR}optim.optimizer_impl=torchao.optim {OPTIM}=_AdamW", "optimizers here are those of torch.optim and"),
        (
            f"{VERL.replace('grpo', 'gae')} critic.optim.optimizer=SGD",
            "critic.optim.optimizer=SGD (line 1): all roles have one optimizer here",
        ),
        (f"{PPO} --pretrain_data q.jsonl,r.jsonl", "is on one data set here"),
    ],
)
def test_optimizers_and_data_that_are_not_here_are_lost(translated, script, command, said):
    text = re.sub(r"\n#     ", " ", translated(script(f"{command}\n"), *alone(command))[1])
    assert said in text, text


def test_a_moving_reference_has_the_defaults_of_its_version(translated, script):
    command = f"{DPO} --num_processes 1 --sync_ref_model"
    values = translated(script(f"{command}\n"), "--from", "trl:dpo==0.15.2")[2]
    assert values["with"]["moving_reference"] == {"share": 0.9, "every": 64}


@pytest.mark.parametrize(
    ("command", "dropout", "said"),
    [
        (f"{PPO} --lora_rank 8 --lora_dropout 0.1", 0.1, ""),
        (f"{PPO} --lora_dropout 0.1", None, "no adapter is trained"),
        (f"{GRPO} --use_peft --lora_dropout 0.1", 0.1, ""),
        (f"{GRPO} --use_peft", 0.05, ""),
        (f"{GRPO} --use_peft --disable_dropout --lora_dropout 0.1", None, "disable_dropout sets it to 0 there too"),
        (f"{DPO} --use_peft --lora_dropout 0.1", None, "disable_dropout sets it to 0 there too"),
        (f"{DPO} --use_peft --lora_dropout 0.1 --disable_dropout false", 0.1, "the model's own dropout is off in training"),
        (f"{VERL} actor_rollout_ref.model.lora.rank=8 actor_rollout_ref.model.lora.dropout=0.1", 0.1, ""),
        (
            f"{VERL} actor_rollout_ref.model.lora.rank=8 actor_rollout_ref.model.lora.dropout_position=post",
            None,
            "dropout after B; here it is before A",
        ),
    ],
)
def test_dropout_of_adapters(translated, script, command, dropout, said):
    _, text, values = translated(script(command))
    assert values["actor"].get("lora", {}).get("dropout") == dropout
    assert said in text
