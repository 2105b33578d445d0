"""A figure is never guessed: what a file gives no value is ``SET THIS``, with all that follows from it."""

from __future__ import annotations

import re

import pytest

from .known import DPO, GRPO, PPO, UNSET, VERL, flat, unset


@pytest.mark.parametrize(
    ("command", "keys"),
    [
        (f"{PPO} --init_kl_coef ${{KL}} --vllm_num_engines 2", {"kl.coef", "placement"}),
        (f"{PPO} --vllm_num_engines $N", {"placement"}),
        (f"{PPO} --train_batch_size $((A * B / C))", {"train.minibatches"}),
        (f"{PPO} --actor_num_gpus_per_node $(nvidia-smi -L | wc -l)", {"placement"}),
        (f"{PPO} --advantage_estimator $ALG", {"algo.name", "critic.lr"}),
        (f"{PPO} --actor_learning_rate $LR", {"actor.lr"}),
        (f"{GRPO} --beta $B", {"kl.coef"}),
        (f"{GRPO} --use_vllm $V --vllm_gpu_memory_utilization 0.4", {"engine.name", "engine.gpu_memory_utilization"}),
        (f"{GRPO} --per_device_train_batch_size $B --processes 1", {"train.batch_size"}),
        (f"{DPO} --lr_scheduler_type $S --warmup_ratio 0.1", {"actor.schedule", "actor.warmup_steps"}),
        (f"{DPO} --gradient_checkpointing $G", {"actor.gradient_checkpointing"}),
        (f"{DPO} --use_peft $P --lora_r 8", {"actor.lora.rank"}),
        (f"{VERL} actor_rollout_ref.actor.use_kl_loss=$K", {"kl.coef", "kl.place"}),
        (f"{VERL} trainer.nnodes=$NNODES", {"placement"}),
        (f"{VERL} data.train_batch_size=$((N*8)) actor_rollout_ref.actor.ppo_mini_batch_size=8", {"train.batch_size"}),
        (f"{VERL} actor_rollout_ref.rollout.n=${{1}}", {"rollout.n"}),
        (
            f"{VERL} actor_rollout_ref.rollout.mode=sync actor_rollout_ref.rollout.val_kwargs.do_sample=$D data.val_files=v",
            {"eval.temperature"},
        ),
    ],
)
def test_a_value_that_the_script_does_not_have(translated, script, command, keys):
    _, text, values = translated(script(command))
    assert keys <= set(unset(values))
    assert not re.search(r"need no setting here:.*\$\{?[A-Z1(]", text.partition("\n\n")[0], re.S)
    for key in keys:
        assert re.search(rf"# {key}: SET THIS \(", text), key


def test_the_option_itself_is_named_and_the_reader_can_give_its_value(translated, script):
    path = script(f"{PPO} --init_kl_coef ${{KL}} --vllm_num_engines 2\n")
    _, text, _ = translated(path)
    assert "# kl.coef: SET THIS (no value in the file for ${KL}): --init_kl_coef ${KL} (line 1)\n" in text
    assert "  coef: SET THIS  # --init_kl_coef ${KL} (line 1)\n" in text
    assert "no reference model is loaded" not in text
    values = translated(path, "--set", "KL=0.02")[2]
    assert values["kl"] == {"coef": 0.02}
    assert values["placement"] == ["actor=8", "critic=8", "reference=8", "rollout=2"]
    assert "kl" not in translated(path, "--set", "KL=0")[2]


def test_a_text_is_kept_with_what_it_lacks(translated, script):
    _, text, values = translated(script(f"{PPO} --save_path $ROOT/out\n"))
    assert values["run_dir"] == "${ROOT}/out"
    assert "run_dir: ${ROOT}/out  # SET THIS: --save_path ${ROOT}/out (line 1)" in text.replace('"', "")


@pytest.mark.parametrize(
    ("begin", "files", "processes"),
    [
        ("accelerate launch", {}, None),
        ("accelerate launch --multi_gpu", {}, None),
        ("accelerate launch --config_file a.yaml", {}, None),
        ("accelerate launch --config_file a.yaml", {"a.yaml": "num_processes: 6\nmixed_precision: bf16\n"}, 6),
        ("accelerate launch --config_file a.yaml --num_processes 3", {"a.yaml": "num_processes: 6\n"}, 3),
        ("accelerate launch --num_processes 3 --config_file a.yaml", {"a.yaml": "num_processes: 6\n"}, 3),
        ("accelerate launch --num_processes=4", {}, 4),
        ("accelerate launch --num_processes $N", {}, None),
        ("deepspeed", {}, None),
        ("deepspeed --num_gpus 4 --num_nodes 2", {}, 8),
        ("deepspeed --num_gpus=$G", {}, None),
        ("deepspeed --include localhost:0,1,5", {}, 3),
        ("CUDA_VISIBLE_DEVICES=2,3 deepspeed", {}, 2),
        ("torchrun --nproc_per_node 4", {}, 4),
        ("torchrun --nnodes 2 --nproc_per_node=4", {}, 8),
        ("torchrun --nnodes=2 --nproc-per-node 4", {}, 8),
        ("torchrun --nnodes $N --nproc_per_node 4", {}, None),
        ("torchrun --nnodes 1:4 --nproc_per_node 4", {}, None),
        ("torchrun --nproc_per_node gpu", {}, None),
        ("torchrun --nproc_per_node auto", {}, None),
        ("torchrun", {}, 1),
        ("python -m torch.distributed.run --nproc_per_node 2", {}, 2),
        ("srun -n 4 python", {}, 4),
        ("srun python", {}, None),
        ("python", {}, 1),
    ],
)
def test_the_number_of_processes(translated, script, tmp_path, begin, files, processes):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    command = f"{begin} trl/scripts/dpo.py --dataset_name d --per_device_train_batch_size 2 --gradient_accumulation_steps 3"
    _, text, values = translated(script(command))
    if processes is None:
        assert (values["train"]["batch_size"], values["placement"]) == (UNSET, UNSET)
    else:
        assert values["train"]["batch_size"] == 6 * processes
        assert flat(values).get("placement", "one") == "one" if processes == 1 else values["placement"] in placements(processes)
        assert ("all processes together" in text) == (processes > 1)


def placements(number):
    return ([f"actor={number}"], [f"actor=2x{number // 2}"])


@pytest.mark.parametrize(
    ("options", "processes"),
    [("", None), ("--num_processes 2", 2), ("--accelerate_config zero2", 8), ("--accelerate_config mine.yaml", None)],
)
def test_trls_own_command_starts_accelerate(translated, script, options, processes):
    """``trl/cli/accelerate_launcher.py`` of TRL 1.16."""
    values = translated(script(f"{DPO} {options} --per_device_train_batch_size 2"))[2]
    assert values["train"]["batch_size"] == (UNSET if processes is None else 2 * processes)


def test_the_reader_says_how_many_processes_there_are(translated, script):
    command = "accelerate launch trl/scripts/dpo.py --dataset_name d --per_device_train_batch_size 2\n"
    values = translated(script(command), "--processes", "4")[2]
    assert (values["train"]["batch_size"], values["placement"]) == (8, ["actor=4"])


def test_other_projects_row_programs_have_devices_too(translated, script):
    for begin, place in (("deepspeed --module", UNSET), ("torchrun --nproc_per_node 4 -m", ["actor=4"])):
        values = translated(script(f"{begin} openrlhf.cli.train_sft --pretrain m --dataset d\n"))[2]
        assert (values["placement"], values["train"]["batch_size"]) == (place, 128)


def test_nothing_that_follows_from_a_refused_value_is_kept(translated, script, tmp_path):
    """1,874,880,000 steps, of which the warm-up would be 56 million updates."""
    (tmp_path / "p.jsonl").write_text('{"input": "a"}\n' * 1024)
    command = PPO.replace("p.jsonl", str(tmp_path / "p.jsonl"))
    _, text, values = translated(script(f"{command} --num_episodes 1874880000000 --lr_warmup_ratio 0.03\n"))
    assert (values["train"]["steps"], values["actor"]["warmup_steps"]) == (UNSET, UNSET)
    assert "train.steps: SET THIS (train.steps: should be less than 2147483648" in text
    _, _, values = translated(script(f"{DPO} --max_steps 1e12 --warmup_ratio 0.1\n"))
    assert (values["train"]["steps"], values["actor"]["warmup_steps"]) == (UNSET, UNSET)
    _, _, values = translated(
        script(f"{VERL} trainer.total_training_steps=1e12 actor_rollout_ref.actor.optim.lr_warmup_steps_ratio=0.1")
    )
    assert (values["train"]["steps"], values["actor"]["warmup_steps"]) == (UNSET, UNSET)


def test_a_limit_of_rows_is_not_taken_for_their_number(translated, script):
    _, text, values = translated(script(f"{PPO} --max_samples 10240\n"))
    assert values["train"]["steps"] == UNSET
    assert "with 10240 rows, the most that are used, 10 steps" in re.sub(r"\n# +", " ", text)


def test_references_between_options_of_verl(translated, script):
    text = (
        "actor_rollout_ref:\n  actor: {ppo_epochs: '${oc.select:a.b,3}', entropy_coeff: '${nowhere.x}'}\n"
        "  rollout: {n: '${data.k}'}\n  model: {path: '${oc.env:MODEL,m}'}\ndata: {k: 4, train_files: a.parquet}\n"
    )
    _, text, values = translated(script(text, "verl.yaml"))
    assert (values["train"]["epochs"], values["rollout"]["n"], values["actor"]["model"]) == (3, 4, "m")
    assert values["algo"]["entropy_coef"] == UNSET
    assert "no value in the file for ${nowhere.x}" in text


def test_each_reason_is_said_once(translated, script):
    text = "verl.trainer.main_ppo a.use_kl_loss=${USE} a.kl_loss_coef=0.1 a.tp=${TP} ~trainer.save_freq"
    names = {"a.tp": "actor_rollout_ref.rollout.tensor_model_parallel_size", "a.": "actor_rollout_ref.actor."}
    for short, name in names.items():
        text = text.replace(short, name)
    said, _, values = translated(script(f"python -m {text}"))
    assert "engine.tensor_parallel_size: SET THIS (no value in the file for ${TP}): " in said
    assert said.count("kl.coef: SET THIS (") == 1
    assert re.search(r"kl.coef: SET THIS \(follows from [^;]*\): ", said)
    assert "engine.name: SET THIS (no value in the file for ???, which verl wants to be given): default there" in said
    assert "~trainer.save_freq (line 1): takes trainer.save_freq out of the configuration of verl" in said
    assert "every" not in values["checkpoint"]


def test_every_setting_to_give_is_in_the_command_that_trains(translated, script):
    said, *_ = translated(script("trl sft --model_name_or_path $M --output_dir $O/a --learning_rate $L"))
    for flag in ("--actor.model MODEL", "--run-dir RUN_DIR", "--actor.lr LR"):
        assert flag in said.splitlines()[-1]


def test_an_empty_value_is_no_figure(translated, script):
    text = translated(script('trl grpo --model_name_or_path m --num_processes 1 --beta "" --train_file ~nobody/x.jsonl'))[1]
    assert "# kl.coef: SET THIS (it has no value): --beta" in text
