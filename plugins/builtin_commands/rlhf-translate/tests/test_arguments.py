"""Options in variables of a shell script, where a part of them is not known: the others are read, and the reader is told."""

from __future__ import annotations

import re

import pytest

from .known import UNSET

DPO = "python -m openrlhf.cli.train_dpo --pretrain m --dataset d"
SFT = "trl sft --model_name_or_path m"


@pytest.mark.parametrize(
    ("text", "values", "note"),
    [
        # a part of a text has no value
        ('A="--a 1 --b x-$(date +%s) --c 2"\ntrl sft $A', {"--a": "1", "--b": "x-$(date +%s)", "--c": "2"}, ""),
        ('A="--a 1 --b ${M##*/}"\nA="$A --c 2"\ntrl sft $A', {"--a": "1", "--b": "${M##*/}", "--c": "2"}, ""),
        ('A="--a `date` --c 2"\ntrl sft $A', {"--a": "`date`", "--c": "2"}, ""),
        ("A=$((B * 2))\ntrl sft --a $A", {"--a": "$((B * 2))"}, ""),
        # a part is set under a condition
        ('A="--a 1"\n[ -n "$X$Y" ] && A="$A --b 2"\ntrl sft $A --c 3', {"--a": "1", "--c": "3"}, "${A...} (set on lines 1, 2"),
        (
            'if q; then A="--a 1 --b 2"; else A="--a 1 --b 3"; fi\ntrl sft $A',
            {"--a": "1", "--b": "${A..}"},
            "${A...} (set on line 1",
        ),
        ('A=(--a 1)\n[ -f x ] && A+=(--b 2)\ntrl sft "${A[@]}" --c', {"--a": "1", "--c": ""}, "${A...} (set on lines 1, 2"),
        (
            'A=(--a 1)\nfor i in 1 2; do A+=(--b $i); done\ntrl sft "${A[@]}"',
            {"--a": "1"},
            "${A...} (set in the loop on line 2)",
        ),
        ('C="trl sft --a 1"\nif q; then C="$C --b 2"; fi\nC="$C --c 3"\neval $C', {"--a": "1", "--c": "3"}, "${C...}"),
        ("A=--b\nif q; then A='--b --c 1'; fi\ntrl sft $A", {"--b": ""}, "${A...} (set on lines 1, 2 under a condition)"),
        ("if q; then A='--a 1'; fi\ntrl sft $A --c 3", {"--c": "3"}, "${A...} (set on line 1 under a condition)"),
        # options of which nothing is known, by the place or the name
        ("trl sft $A --b 1", {"--b": "1"}, "${A} (line 1): stands for options"),
        ("trl sft --bf16 $EXTRA_ARGS --b 1", {"--bf16": "", "--b": "1"}, "${EXTRA_ARGS} (line 1): stands for options"),
        ("trl sft --a 1 ${OPTS}", {"--a": "1"}, "${OPTS} (line 1): stands for options"),
        ("trl sft --a $B $C", {"--a": "${B} ${C}"}, ""),
    ],
)
def test_what_is_known_of_them_is_read(options, text, values, note):
    read, _, command = options(text)
    assert read == values
    assert note in " ".join(command.notes)
    assert bool(note) == bool(command.notes)


def test_overrides_of_verl(options):
    text = 'A="a.b=1 c.d=x"\nif q; then A="$A e.f=1"; fi\npython -m verl.trainer.main_ppo $A g.h=2 $B'
    read, _, command = options(text)
    assert read == {"a.b": "1", "c.d": "x", "g.h": "2"}
    assert [note.partition(" ")[0] for note in command.notes] == ["${A...}", "${B}"]


def test_the_learning_rate_beside_a_date_is_no_default(translated, script):
    text = f'O="--learning_rate 1e-5"\nO="$O --run_name x-$(date +%s)"\n{SFT} --dataset_name d $O\n'
    _, text, values = translated(script(text), "--processes", "1")
    assert values["actor"]["lr"] == 1e-5
    assert values["data"]["sources"] == [{"path": "d"}]
    assert values["name"] == "x-$(date +%s)"
    assert f"name: {UNSET} (no value in the file for $(date +%s))" in text


@pytest.mark.parametrize(
    ("text", "line", "first"),
    [
        (f"{SFT} \\\n   # --seed 3 \\\n   --dataset_name d\n", 3, "--dataset_name"),
        (f"{SFT} \\ \n   --dataset_name d \\\n   --seed 3\n", 2, "--dataset_name"),
        ("python -m verl.trainer.main_ppo a.b=1 \\\n  # c \\\n  data.x=2\n", 3, "data.x=2"),
    ],
)
def test_options_that_a_comment_cuts_off(translated, script, text, line, first):
    _, text, _ = translated(script(text), "--processes", "1") if "trl" in text else translated(script(text))
    assert f"# line {line}: {first} and what follows belong to no command" in re.sub(r"\n#   ", " ", text)


def test_functions_that_call_each_other(options):
    assert options("f() { f; g; }\ng() { f; }\nf\ntrl sft --a 1")[0] == {"--a": "1"}


def test_a_file_without_end(rlhf_here):
    done = rlhf_here("translate", "/dev/zero")
    assert done.exit_code == 2
    assert "is no script" in done.output


def test_a_script_that_runs_another(translated, script):
    script("python3 -m verl.trainer.main_ppo data.train_files=$D/a.parquet actor_rollout_ref.model.path=$1\nD=z\n", "other.sh")
    for line in ("bash ./other.sh m", "sbatch other.sh m", "./other.sh m", "X=1 srun -N 1 sh -x other.sh m"):
        _, text, values = translated(script(f"export D=data\n{line}\n"))
        assert values["data"]["sources"] == [{"path": "data/a.parquet"}]
        assert values["actor"]["model"] == "m"
        assert re.search(r"^# line 2: (./)?other.sh is read in its place", text, re.M)


def test_a_script_without_a_training_command_is_not_read(options, script):
    script("A=2\n", "other.sh")
    assert options("A=1\nbash other.sh\ntrl sft --a $A")[0] == {"--a": "1"}


def test_a_value_that_differs_is_asked_for(translated, script):
    text = f'if q; then A="--beta 0.1"; else A="--beta 0.2 --ipo"; fi\n{DPO} $A\n'
    _, text, values = translated(script(text))
    assert values["algo"]["beta"] == UNSET
    assert f"algo.beta: {UNSET} (no value in the file for ${{A..}} (set on line 1 under a condition))" in re.sub(
        r"\n#   ", " ", text
    )
