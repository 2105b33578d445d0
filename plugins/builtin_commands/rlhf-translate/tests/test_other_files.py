"""Python scripts of TRL, scripts for Slurm, and files of projects that are not translated."""

from __future__ import annotations

import re

import pytest

from .known import HERE, UNSET, flat

PYTHON = '''"""Train."""
from trl import {name}Config, {name}Trainer
from peft import LoraConfig
MODEL, SIZE = "Qwen/Qwen2.5-0.5B", 4
BASE = "m"
longest = 1024
rows = load_dataset("org/d", "main", split="train[:10]")
def short(completions, **more):
    raise SystemExit("a script that is read does not run")
raise SystemExit("nor this one")
def main(rate=2e-5):
    args = {name}Config({options})
    trainer = {name}Trainer(model={model}, args=args, train_dataset=rows{more})
'''


def python(name, options, model="BASE", more=""):
    return PYTHON.format(name=name, options=options, model=model, more=more)


@pytest.mark.parametrize(
    ("name", "algorithm"),
    [("GRPO", "grpo"), ("RLOO", "rloo"), ("DPO", "dpo"), ("SFT", "sft"), ("KTO", "kto"), ("Reward", "rm"), ("PRM", "prm")],
)
def test_a_python_script_that_makes_a_configuration(translated, script, name, algorithm):
    _, text, values = translated(script(python(name, "learning_rate=1e-6, max_steps=7"), "train.py"), "--processes", "1")
    assert values["algo"]["name"] == algorithm
    assert (values["actor"]["model"], values["actor"]["lr"], values["train"]["steps"]) == ("m", 1e-6, 7)
    assert values["data"]["sources"] == [{"path": "org/d", "subset": "main", "split": "train[:10]"}]
    assert "--learning_rate 1e-06 (line 12)" in text


def test_what_is_no_literal_has_no_value(translated, script):
    options = (
        "learning_rate=rate, max_completion_length=longest // 4 + 1, beta=f(2), output_dir=f'out/{BASE}', num_generations=SIZE"
    )
    _, text, values = translated(script(python("GRPO", options), "train.py"))
    assert (values["rollout"]["max_new_tokens"], values["run_dir"]) == (257, "out/m")
    for key in ("actor.lr", "kl.coef", "rollout.n", "train.batch_size", "placement"):
        assert flat(values)[key] == UNSET, key
    text = re.sub(r"\n# +", " ", text)
    assert "actor.lr: SET THIS (no value in the file for rate (2e-05 by default)): --learning_rate rate (line 12)" in text
    assert "kl.coef: SET THIS (no value in the file for f(2)): --beta f(2) (line 12)" in text
    assert "no value in the file for the number of processes of the script" in text


LATER = """from trl import GRPOConfig, GRPOTrainer
MORE = dict(max_steps=7, bf16=not True)
RATE: float = 1e-6
N = 4
N *= 2
STEPS = 10
for STEPS in (1, 2): pass
RATES = {{"a": 1e-6}}
def build(beta=0.5):
    pass
beta = 0.1
args = GRPOConfig("out", learning_rate=RATE, num_generations=N, beta=beta, **MORE, **{{"seed": 3, "top_k": -RATES}}{more})
args.max_completion_length = 2**8
args.temperature += 0.1
setattr(args, "top_p", 0.9)
if big:
    args.epsilon = 0.3
if __name__ == "__main__":
    args.save_steps = 9
trainer = GRPOTrainer("m", accuracy_reward, args, rows)
"""


def test_what_is_set_later_in_the_script_counts(translated, script):
    said, _, values = translated(script(LATER.format(more=""), "train.py"), "--processes", "1")
    known = {
        "actor.lr": 1e-6,
        "train.steps": 7,
        "seed": 3,
        "rollout.max_new_tokens": 256,
        "checkpoint.every": 9,
        "run_dir": "out",
    }
    known |= {"actor.model": "m", "reward.accuracy_reward.name": "math_verifier", "train.autocast": "off"}
    assert {key: flat(values).get(key) for key in known} == known
    for key in ("rollout.n", "kl.coef", "rollout.temperature", "algo.clip_eps"):
        assert flat(values)[key] == UNSET, key
    assert "line 15: setattr(args, 'top_p', 0.9) is not read: add what it sets" in said
    assert "line 20: rows of GRPOTrainer is not read: add what it says" in said


def test_a_mapping_of_options_that_only_a_run_would_give(translated, script):
    said, *_ = translated(script(LATER.format(more=", **load()"), "train.py"), "--processes", "1")
    assert "line 12: **load() of GRPOConfig is not read: add what it has, instead of defaults" in said


def test_variables_are_those_of_shell_scripts(rlhf_here, script):
    done = rlhf_here("translate", script(LATER.format(more=""), "train.py"), "--set", "N=4")
    assert (done.exit_code, "--set:" in done.output, "is no shell script" in done.output) == (2, True, True), done.output


def test_the_trainers_own_arguments(translated, script):
    adapter = "LoraConfig(r=SIZES, lora_alpha=8, target_modules=['a', 'b'])"
    more = f", reward_funcs=[short, accuracy_reward], peft_config={adapter}, callbacks=[x]"
    bits = "BitsAndBytesConfig(load_in_4bit=True)"
    model = f"AutoModelForCausalLM.from_pretrained('big', torch_dtype=torch.bfloat16, quantization_config={bits})"
    path = script(python("GRPO", "max_steps=7", model, more), "train.py")
    said, _, values = translated(path, "--processes", "1")
    assert (values["actor"]["model"], values["actor"]["dtype"], values["actor"]["quantize"]) == ("big", "bfloat16", "4bit")
    assert values["reward"]["short"]["name"] == f"{path}:short"
    assert values["reward"]["accuracy_reward"]["name"] == "math_verifier"
    assert values["actor"]["lora"] == {"rank": UNSET, "alpha": 8, "targets": ["a", "b"]}
    assert "--callbacks [x] (line 13): " in said


def test_rows_that_the_script_changes_are_named(translated, script):
    text = python("SFT", "max_steps=7").replace("def short", "rows = rows.map(f).filter(g)\ndef short")
    said = translated(script(text, "train.py"))[0]
    assert "line 8: the script changes the rows (filter), which is not read" in said
    assert "line 8: the script changes the rows (map), which is not read" in said


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = (", "is not valid Python"),
        ("print(1)", "makes no configuration of TRL, and says no command that runs it"),
        (
            "from trl import GKDConfig\nc = GKDConfig(a=1)",
            "x.py:2: GKDConfig is not translated: distillation on the student's own",
        ),
        ("c = OnlineDPOConfig()", "it is --algo online_dpo with --reward here"),
    ],
)
def test_python_that_will_not_do(rlhf_here, script, text, message):
    done = rlhf_here("translate", script(text, "x.py"))
    assert (done.exit_code, message in done.output, done.stdout) == (2, True, ""), done.output


def test_the_commands_that_a_script_says_for_itself(translated, script):
    text = (
        '"""\nTrain:\n\n```bash\naccelerate launch --num_processes 2 examples/scripts/dpo.py --learning_rate 3e-6\n```\n"""\n'
    )
    _, text, values = translated(script(text, "dpo.py"))
    assert (values["actor"]["lr"], values["placement"]) == (3e-6, ["actor=2"])


SLURM = """#!/bin/bash
#SBATCH -N 2                    # nodes
#SBATCH --gpus-per-node=4
readonly training_script="train.sh"
source ./${{training_script}} slurm
export MASTER_ADDR=$(scontrol show hostnames $SLURM_JOB_NODELIST | head -n 1)
srun --container-image="$IMAGE" {bash}bash -c "cd /x; pip install . ; torchrun \\
--nproc_per_node $SLURM_GPUS_PER_NODE --nnodes $SLURM_NNODES --node_rank $SLURM_PROCID \\
--master_addr $MASTER_ADDR -m ${{training_commands}}" &>> log
"""


def test_a_script_for_slurm(translated, script, rlhf_here, tmp_path):
    """As examples/scripts/train_nonrl_slurm.sh of OpenRLHF, which reads another script."""
    (tmp_path / "train.sh").write_text((HERE / "openrlhf_dpo.sh").read_text())
    path = script(SLURM.format(bash=""), "job.slurm")
    said, text, values = translated(path)
    assert (values["algo"]["name"], values["placement"], values["train"]["batch_size"]) == ("dpo", ["actor=2x4"], 256)
    assert "line 5: ./train.sh is read in its place" in said
    assert "line 2: #SBATCH lines are for Slurm" in said
    assert "--container-image ${IMAGE} (line 7): an option of what starts the program" in text
    (tmp_path / "train.sh").unlink()
    done = rlhf_here("translate", path)
    assert (done.exit_code, "line 5: ./train.sh is not read" in done.output) == (2, True), done.output


def test_a_script_that_is_called_like_one_of_trl(translated, script):
    _, _, values = translated(
        script("accelerate launch --num_processes 2 src/grpo.py --num_generations 4 --beta 0.1 --max_steps 3\n")
    )
    assert (values["algo"]["name"], values["kl"]["coef"]) == ("grpo", 0.1)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        (
            "a.yaml",
            "base_model: m\nsequence_len: 512\nmicro_batch_size: 2\nadapter: lora\nlora_r: 8\nlearning_rate: 1e-4\n"
            "datasets:\n- path: org/d\n  type: alpaca\nrl: dpo\n",
            "a configuration of axolotl, which is not translated; begin with: rlhf train --algo dpo --actor.model m --data org/d"
            " --actor.lr 0.0001 --data.max-tokens 512 --actor.lora.rank 8 --dry-run",
        ),
        (
            "a.yaml",
            "model_name_or_path: m\nstage: sft\nfinetuning_type: full\ncutoff_len: 64\ntemplate: x\ndataset: d,e\n",
            "a configuration of LLaMA-Factory, which is not translated; begin with: rlhf train --algo sft --actor.model m --data d",
        ),
        ("a.yaml", "rl: ebft\nbase_model: m\nsequence_len: 1\n", "its method ebft has no counterpart here"),
        (
            "a.yaml",
            "compute_environment: LOCAL_MACHINE\ndistributed_type: NO\nnum_processes: 2\n",
            "is a configuration of accelerate launch: translate the script that names it",
        ),
        (
            "a.sh",
            "axolotl train x.yml\n",
            "axolotl is a program of axolotl, which is not translated; rlhf translate x.yml says",
        ),
        ("a.sh", "swift rlhf --rlhf_type grpo --model m\n", "swift is a program of ms-swift, which is not translated"),
        ("a.sh", "python examples/scripts/cpo.py --a 1\n", "cpo.py is not translated: it is --algo cpo here"),
        ("a.sh", "python examples/scripts/xpo.py --a 1\n", "it is --algo xpo --agent xpo with --reward here"),
        ("a.sh", "python examples/scripts/nash_md.py --a 1\n", "it is --algo nash_md --agent nash_md with --reward here"),
        ("a.sh", "trl vllm-serve --model m\n", "trl vllm-serve trains nothing: it serves a model for a run"),
        ("a.sh", "python -m verl.trainer.main_generation a=1\n", "trains nothing: it samples: rlhf generate"),
    ],
)
def test_what_is_not_translated_is_told_what_to_do_instead(rlhf_here, script, name, text, message):
    done = rlhf_here("translate", script(text, name))
    assert (done.exit_code, done.stdout) == (2, ""), done.output
    assert message in done.output


def test_programs_of_verl_that_train_on_rows(translated, script):
    command = "torchrun --nnodes=1 --nproc_per_node=4 -m verl.trainer.{} data.train_files=a.parquet data.train_batch_size=64"
    own = " model.partial_pretrain=m optim.lr=1e-4 data.prompt_key=extra_info data.prompt_dict_keys=['question']"
    own += " trainer.total_epochs=2"
    _, _, values = translated(script(command.format("fsdp_sft_trainer") + own + "\n"))
    assert (values["algo"]["name"], values["placement"], values["train"]["batch_size"]) == ("sft", ["actor=4"], 64)
    assert (values["data"]["prompt_key"], values["data"]["epochs"]) == ("extra_info.question", 2.0)
    values = translated(script(command.format("sft_trainer") + " model.path=m optim.lr=1e-4 data.truncation=right\n"))[2]
    assert (values["actor"]["model"], values["data"]["long_rows"]) == ("m", "truncate")


def test_hydras_own_files(translated, script, tmp_path):
    """``--config-path`` and ``--config-name``: one beside the script is read."""
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf/mine.yaml").write_text(
        "defaults: [ppo_trainer, _self_]\ndata: {train_batch_size: 24}\nalgorithm: {adv_estimator: rloo}\n"
    )
    flags = "--config-path conf --config-name mine data.train_files=a.parquet algorithm.adv_estimator=grpo"
    command = f"python -m verl.trainer.main_ppo {flags}\n"
    _, text, values = translated(script(command))
    assert (values["train"]["batch_size"], values["algo"]["name"]) == (24, "grpo")
    assert "--config-name=mine (line 1): its options are translated" in text
    said = translated(script(command.replace("mine", "other")))[0]
    assert "SET THIS (hydra's own file is not here, so its settings are not known" in said


def test_deepspeeds_own_file(translated, script, tmp_path):
    (tmp_path / "ds.json").write_text(
        '{"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}, "overlap_comm": true},'
        ' "bf16": {"enabled": "auto"}, "train_batch_size": "auto"}'
    )
    command = "deepspeed --num_gpus 2 trl/scripts/sft.py --dataset_name d --deepspeed {}\n"
    _, text, values = translated(script(command.format("ds.json")))
    assert values["backend"] == {"name": "deepspeed", "zero_stage": 2, "offload_optimizer": "cpu"}
    assert "--zero_optimization.stage 2 (ds.json:1)" in text
    said = translated(script(command.format("other.json")))[0]
    assert "--deepspeed other.json (line 1): the file is not here, so it is not read" in said


def test_a_file_of_settings_that_is_not_here_is_asked_for(translated, script):
    said = translated(script("trl sft --config there.yaml --dataset_name d\n"))[0]
    asked = "the file is not here, so its settings are not known: put it beside the script"
    assert f"SET THIS ({asked}; what is a default below may have another value in it): --config there.yaml" in said


def test_a_mapping_as_one_override(translated, script):
    command = "python -m verl.trainer.main_ppo 'algorithm.filter_groups={enable: true, metric: acc}' algorithm={gamma: 1.0}"
    values = translated(script(f"{command} algorithm.adv_estimator=grpo\n"))[2]
    assert "dynamic_filtering" in values["with"]


def test_a_program_that_samples_ahead(translated, script):
    command = "python -m verl.experimental.one_step_off_policy.main_ppo algorithm.adv_estimator=grpo\n"
    assert translated(script(command))[2]["async_depth"] == 1


def test_whose_a_command_is_must_be_true(rlhf_here, script):
    done = rlhf_here("translate", script("trl sft --dataset_name d\n"), "--from", "openrlhf==0.9.3")
    assert done.exit_code == 2, done.output
    done = rlhf_here("translate", script("python -m verl.trainer.main_ppo a=1\n"), "--from", "trl")
    assert "is a command of verl, and --from says TRL" in done.output


def test_a_number_of_processes_that_the_file_says_itself(rlhf_here, script):
    done = rlhf_here(
        "translate", script("torchrun --nproc_per_node 2 trl/scripts/sft.py --dataset_name d\n"), "--processes", "4"
    )
    assert done.exit_code == 2
    assert re.search(r"Error: --processes 4: \S*train.sh:1: says how many processes there are$", done.output)


MAPPINGS = """from trl import GRPOConfig
base = {{"learning_rate": 1e-6, "beta": 0.04}}
{change}
args = GRPOConfig(**{words}, num_generations=4)
base["epsilon"] = 0.9
"""


@pytest.mark.parametrize(
    ("change", "words", "expected"),
    [
        ('base["epsilon"] = 0.1', "base", {"actor.lr": 1e-6, "algo.clip_eps": 0.1, "algo.clip_eps_high": 0.1, "kl.coef": 0.04}),
        ('base.update({"max_steps": 5}, temperature=0.7)', "base", {"train.steps": 5, "rollout.temperature": 0.7}),
        ('if x:\n    base["beta"] = 1', "base", {"actor.lr": 1e-6, "kl.coef": UNSET}),
        ("", '{**base, "beta": 0.1}', {"actor.lr": 1e-6, "kl.coef": 0.1}),
        ("", "dict(base, beta=0.1)", {"actor.lr": 1e-6, "kl.coef": 0.1}),
        ('more = {"beta": 0.2}', "(base | more)", {"actor.lr": 1e-6, "kl.coef": 0.2}),
        ('name = "a" + "-" + "b"', "dict(run_name=name)", {"name": "a-b"}),
    ],
)
def test_a_mapping_that_changes_before_it_is_used(translated, script, change, words, expected):
    text = MAPPINGS.format(change=change, words=words)
    if words != "base":
        text = text.replace('base["epsilon"] = 0.9\n', "")
    values = flat(translated(script(text, "train.py"), "--processes", "1")[2])
    assert {key: values[key] for key in expected} == expected


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("base.update(more)", "base"),
        ('del base["beta"]', "base"),
        ('base.pop("beta")', "base"),
        ('base["beta"] = 1', "{**base}"),
        ("base[f()] = 1", "base"),
    ],
)
def test_a_change_that_is_not_read_is_said(translated, script, change, words):
    _, text, _ = translated(script(MAPPINGS.format(change=change, words=words), "train.py"), "--processes", "1")
    assert re.search(r"^# line [34]: .* is not read: ", text, re.M)


UNSLOTH = """from trl import SFTConfig, SFTTrainer
model, tokenizer = FastLanguageModel.from_pretrained(model_name="unsloth/Qwen3", max_seq_length=2048, load_in_4bit=True)
model = {adapter}
trainer = SFTTrainer(model=model, train_dataset=load_dataset("org/d"), eval_dataset={evaluated}, args=SFTConfig(max_steps=9{more}))
"""


@pytest.mark.parametrize(
    ("adapter", "lora"),
    [
        ('FastLanguageModel.get_peft_model(model, r=32, lora_alpha=64, target_modules=["q_proj"])', [32, 64, ["q_proj"]]),
        ("FastLanguageModel.get_peft_model(model, lora_alpha=64)", [16, 64, None]),
        ("get_peft_model(model, LoraConfig(r=4, lora_alpha=8, bias='none'))", [4, 8, None]),
        ("get_peft_model(model, LoraConfig(r=4, lora_alpha=8, lora_dropout=0.1))", [4, 8, None]),
    ],
)
def test_an_adapter_that_the_script_puts_into_the_model(translated, script, adapter, lora):
    text = UNSLOTH.format(adapter=adapter, evaluated="None", more="")
    _, text, values = translated(script(text, "train.py"), "--processes", "1")
    assert (values["actor"]["model"], values["actor"]["quantize"]) == ("unsloth/Qwen3", "4bit")
    own = values["actor"]["lora"]
    assert [own["rank"], own["alpha"], own.get("targets")] == lora
    assert own.get("dropout") == (0.1 if "dropout" in adapter else None)  # peft's default is 0
    assert values["data"]["max_tokens"] == 2048
    assert "not an option" not in text


def test_evaluation_data_of_a_python_script(translated, script):
    for more, expected in (("", None), (", eval_strategy='steps', eval_steps=5", [{"path": "org/e", "split": "test"}])):
        text = UNSLOTH.format(adapter="model", evaluated='load_dataset("org/e", split="test")', more=more)
        values = flat(translated(script(text, "train.py"), "--processes", "1")[2])
        assert values.get("eval.data.sources") == expected


def test_lines_of_a_docstring_are_those_of_the_file(translated, script):
    text = '"""\n# One\npython trl/scripts/sft.py \\\n    --model_name_or_path m \\\n    --seed 7\n"""\n'
    _, text, _ = translated(script(text, "sft.py"), "--processes", "1")
    assert "# --seed 7 (line 5)" in text
    assert "--model_name_or_path m (line 4)" in text


@pytest.mark.parametrize(
    ("text", "project"),
    [
        (
            "grpo: {num_prompts_per_step: 64}\npolicy: {model_name: m}\nloss_fn: {ratio_clip_min: 0.2}\ncluster: {num_nodes: 1}\n",
            "NeMo RL",
        ),
        ("tokenizer: {_component_: t}\ncheckpointer: {x: 1}\noptimizer: {lr: 1}\nloss: {y: 1}\n", "torchtune"),
    ],
)
def test_files_of_more_projects_are_named(rlhf_here, script, text, project):
    done = rlhf_here("translate", script(text, "x.yaml"))
    assert done.exit_code == 2
    assert f"is a configuration of {project}, which is not translated" in done.output


def test_every_data_set_of_another_project_is_named(rlhf_here, script):
    text = "stage: sft\nfinetuning_type: lora\ndataset: one,two\ntemplate: x\ncutoff_len: 5\n"
    assert "--data one --data two" in rlhf_here("translate", script(text, "x.yaml")).output


def test_options_of_the_script_itself_have_no_value(translated, script):
    text = (
        "from trl import GRPOConfig, GRPOTrainer\n"
        'parser.add_argument("--my-lr", type=float, default=1e-6)\n'
        "class Arguments:\n    n: int = field(default=4)\n    beta: float = 0.3\nclass C:\n    beta = 0.5\n"
        "args = parser.parse_args_into_dataclasses()[0]\n"
        "config = GRPOConfig(learning_rate=args.my_lr, num_generations=args.n, beta=C.beta)\n"
        "GRPOTrainer('m', [lambda a, b: 1, 'org/rm'], config)\n"
    )
    _, text, values = translated(script(text, "train.py"), "--processes", "1")
    assert values["actor"]["lr"] == values["rollout"]["n"] == values["kl"]["coef"] == UNSET
    assert list(values["reward"]) == ["lambda_on_line_10", "org_rm"]
    text = re.sub(r"\n#   ", " ", text)
    for shown in ("args.my_lr (1e-06 by default)", "args.n (4 by default)", "for C.beta)"):
        assert shown in text
