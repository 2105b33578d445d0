"""``rlhf translate`` reads a shell script as a shell does, and writes none of its keys and passwords down."""

from __future__ import annotations

import re

import pytest
from rlhf_translate.credentials import without_secret
from rlhf_translate.options import Option, Unknown

from rlhf_host import UserError


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("trl sft --a ${A:-${B:-x}}", {"--a": "x"}),
        ("B=y\ntrl sft --a ${A:-${B:-x}} --b ${A:-{}}", {"--a": "y", "--b": "{}"}),
        ('trl sft --a "${A:-"${B:-"x y"}"}"', {"--a": "x y"}),
        ("trl sft ${ARGS:---a 1 --b 2}", {"--a": "1", "--b": "2"}),
        (
            'B=(x y)\ntrl sft --a "${B[1]}" --b ${#B[@]} --c "${B[-1]}" --d ${B[7]}',
            {"--a": "y", "--b": "2", "--c": "y", "--d": ""},
        ),
        ("trl sft --a ${X:=4} --b $X", {"--a": "4", "--b": "4"}),
        (": ${X:=4}\ntrl sft --a $X ${X:+--b 1}", {"--a": "4", "--b": "1"}),
        ('B=(x y); B+=z; trl sft --a "${B[@]}"', {"--a": "xz y"}),
        ('C=q; C+=(r s)\ntrl sft --a "${C[@]}"', {"--a": "q r s"}),
        ("Y=1\nunset Y\ntrl sft --a ${Y:-2}$Y", {"--a": "2${Y}"}),
        (r"trl sft --a $'m\tx\'' --b $'\u2192é\e'" + ' --c $"t"', {"--a": "m\tx'", "--b": "→é\\e", "--c": "t"}),
        ("trl sft --a <(cat x | sort) --b 1 < <(y)", {"--a": "<(cat x | sort)", "--b": "1"}),
        ("trl sft --a d{1,2}.j --b {2..4}{a,} --c '{1,2}'", {"--a": "d1.j d2.j", "--b": "2a 2 3a 3 4a 4", "--c": "{1,2}"}),
        ("\ufefftrl sft --a 1", {"--a": "1"}),
    ],
)
def test_words_are_those_of_a_shell(options, text, expected):
    assert options(text)[0] == expected


def test_a_quoted_default_is_one_word(options):
    command = options("trl sft --a ${D:-\"q r\" s} --b '${D}'")[2]
    assert command.options[0].values == ("q r", "s")


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("""python -m verl.trainer.main_ppo data.train_files='["a.parquet","b,c.parquet"]'""", "a.sh"),
        ("data: {train_files: [a.parquet, 'b,c.parquet'], train_batch_size: 1}", "a.yaml"),
    ],
)
def test_commas_in_quotes_do_not_split(options, text, name):
    assert options(text, name)[2].options[0].items == ["a.parquet", "b,c.parquet"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("N=4\nM=8\ntrl sft --a $((N * M / 3)) --b $(($N - 6)) --c $(( (N + M) % 5 ))", ["10", "-2", "2"]),
        ("N=4\nK=$((N * 2))\ntrl sft --a $((${M:-3} * K)) --b $((-7 / 2)) --c $((N > 3 ? 5 : 6))", ["24", "-3", "5"]),
        ("N=4; ((N *= 2)); let M=N+1; ((N++))\ntrl sft --a $N --b $M", ["9", "9"]),
        (
            "X=/a/b.tar.gz\ntrl sft --a ${X##*/} --b ${X%.gz} --c ${X/a/q} --d ${X^^} --e ${X:1:1}",
            ["b.tar.gz", "/a/b.tar", "/q/b.tar.gz", "/A/B.TAR.GZ", "a"],
        ),
        ("N=A\nA=3\ntrl sft --a ${!N}", ["3"]),
        ("N=3\ntrl sft --a $[N * 2] --b $", ["6", "$"]),
        ("A=1\nA=2 trl dpo\ntrl sft --a $A", ["1"]),
    ],
)
def test_sums_and_cut_texts_have_their_values(options, text, expected):
    command = find(options, text)
    assert [option.value for option in command.options] == expected


def find(options, text):
    """The last command."""
    options(text)
    return options.commands[-1]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("B=fsdp\nif [ $B = megatron ]; then A=1; elif [[ $B == fsdp && -n $B ]]; then A=2; else A=3; fi", "2"),
        ('[ -z "$M" ] && A=q || A=z', "q"),
        ("case fsdp2 in fsdp*) A=1;; *) A=2;; esac", "1"),
        ("if ((4 > 3)); then A=1; else A=2; fi", "1"),
        ("A=1\nwhile [[ $# -gt 0 ]]; do case $1 in --a) A=$2; shift 2;; esac; done", "1"),
        ("for A in x; do :; done", "x"),
        ("if python ok.py; then A=1; else A=1; fi", "1"),
        ("f() { local B=$1; A=$B; }\nf 7", "7"),
        ("cd x && export A=2", "2"),
        ("if x; then A=1; else echo no; exit 1; fi", "1"),
        ("A=1\nif x; then A=2; exit; fi", "1"),
        ("A=1\nif x; then A=2; exit; elif y; then A=1; fi", "1"),
        ("f() { case $Q in a) A=1;; *) return 1;; esac; }\nf", "1"),
        ("A=1\nif [ $# -lt 1 ]; then A=2; exit 1; fi", "1"),
        ("A=1\nf() { local A=2 B; B=3; }\nB=0\nf\nA=$A$B", "10"),
        ("A=1\nf() { declare -i A=2; }\nf", "1"),
        ("A=1\n(A=2; cd x)", "1"),
        ("A=1\n(\n A=2\n trl dpo\n)", "1"),
        ("A=1\n[ -n x ] && (A=2) || A=3", "1"),
        ("A=1; case x in (x) A=4;; (*) A=5;; esac", "4"),
    ],
)
def test_conditions_that_the_script_decides(options, text, value):
    assert find(options, f"{text}\ntrl sft --a $A").options[0].value == value


@pytest.mark.parametrize(
    ("text", "missing"),
    [
        ("A=1\nif x; then\n A=2\nfi", "${A} (set on lines 1, 3 under a condition)"),
        ("if x; then A=1; else\nA=2; fi", "${A} (set on lines 1, 2 under a condition)"),
        ("case $1 in\n a) A=1;;\n b) A=2;;\nesac", "${A} (set on lines 2, 3 under a condition)"),
        ("A=1\nif x; then [ -d y ] && exit; A=2; fi", "${A} (set on lines 1, 2 under a condition)"),
        ("A=1\n[ -d x ] && { A=2; }", "${A} (set on lines 1, 2 under a condition)"),
        ("A=1\nfor i in 1 2; do A=$((A * 2)); done", "${A} (set in the loop on line 2)"),
        ("for A in 1e-6 5e-6; do :; done", "${A} (one of 1e-6, 5e-6 (line 1))"),
        ("A=$(nproc)", "${A} ($(nproc))"),
        ("read -r A < file", "${A} (read on line 1)"),
        ("A=$((B * 2))", "${B}"),
        ("A=$((1 / 0))", "$((1 / 0))"),
        ("", "${A}"),
    ],
)
def test_what_only_a_run_would_decide_has_no_value(options, text, missing):
    option = find(options, f"{text}\ntrl sft --a $A").options[0]
    assert option.missing == (missing,)
    with pytest.raises(Unknown, match="no value in the file"):
        _ = option.number


def test_a_value_of_the_reader_is_taken_where_the_script_has_none(options):
    text = "B=$(nproc)\nC=1\ntrl sft --a ${A} --b $B --c $C --d ${D:-4} --e $1"
    values = {"--a": "x", "--b": "8", "--c": "1", "--d": "5", "--e": "q"}
    assert options(text, A="x", B="8", D="5", **{"1": "q"})[0] == values
    for name in ("C", "Q"):
        with pytest.raises(UserError, match=f"--set {name}: no variable"):
            options(text, **{name: "9"})


@pytest.mark.parametrize(
    "text",
    [
        'srun -N 2 bash -c "pip install x && trl sft --a $A"',
        "CMD='trl sft --a 1'\neval $CMD",
        "CMD='trl sft --a 1'\n$CMD",
        "sbatch <<EOF\n#!/bin/bash\ntrl sft --a $A\nEOF",
        "cat > job.sh <<'EOF'\ntrl sft --a 1\nEOF",
        'ssh host "cd x; trl sft --a 1"',
        "run() {\n trl sft --a $1\n}\nrun 1",
        "run() {\n trl sft --a $A\n}",
        "if [ -d x ]; then\n trl sft --a 1\nfi",
    ],
)
def test_scripts_in_scripts(options, text):
    assert options(f"A=1\n{text}")[0] == {"--a": "1"}


def test_a_branch_that_does_not_run_is_named(options):
    others = options("B=1\nif [ $B = 2 ]; then\n trl dpo --a 1\nfi\ntrl sft --a 2")[1]
    assert [other.partition(":")[2] for other in others] == ["3: does not run, because of a condition: trl"]


def test_what_slurm_says_of_the_machines(options):
    text = "#SBATCH --nodes=4\n#SBATCH --gres=gpu:a100:8\ntrl sft --a $((SLURM_NNODES * SLURM_GPUS_ON_NODE))"
    command = find(options, text)
    assert command.options[0].value == "32"
    assert "#SBATCH lines are for Slurm" in command.notes[0]


def test_another_script_that_sets_variables_is_named(options):
    assert "line 1: env.sh is not read" in find(options, "source env.sh\ntrl sft --a $A").notes[0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "A=" + "${A:-" * 600 + "}" * 600 + "\ntrl sft\n",
            "x.sh:1: a ${ that does not end, or nests more than 8 deep",
        ),
        ("A=${A\ntrl sft\n", "x.sh:1: a ${ that does not end"),
        ("A=aaaa\n" + "A=$A$A$A$A\n" * 14 + "trl sft --a $A\n", "the variables up to here make more than 1,000,000 characters"),
        ("A=(a a)\n" + 'A+=("${A[@]}")\n' * 40 + "trl sft\n", "the variables up to here make more than"),
        ("trl sft " + "{a,b}" * 400 + "\n", "x.sh:1: the variables up to here make more than"),
        ("trl sft " + "{a,b}''" * 1500 + "\n", "x.sh:1: the variables up to here make more than"),
        ("trl sft --a <(b\n", "x.sh:1: a bracket that begins here does not end"),
    ],
)
def test_texts_without_end(rlhf_here, script, text, message):
    done = rlhf_here("translate", script(text, "x.sh"))
    assert (done.exit_code, message in done.output, done.output.count("\n")) == (2, True, 1), done.output[:500]


SECRETS = {
    "trl": (
        "trl grpo --model_name_or_path m --dataset_name d --wandb_key S1 --push_to_hub_token S2 --huggingface_token S3"
        """ --access_key S4 --password S5 --model_init_kwargs '{"token": "S6","api_key":"S7", "dtype": "kept"}'"""
        " --reward_funcs http://u:S9@host/x?api_key=S8 --header 'Authorization: Bearer S10'\n"
    ),
    "openrlhf": (
        "OPENAI_KEY=S1 PGPASS='S2 S3' python -m openrlhf.cli.train_ppo_ray --pretrain m --prompt_data p --ref.api_key S4"
        " --wandb_token=S5 --logger.wandb.api_key S6 --apikey S7 S8 --remote_rm_url http://x:S9@kept/a"
        " --agent_config {token: S11}\n"
    ),
    "verl": (
        "python -m verl.trainer.main_ppo data.train_files=p.parquet +trainer.wandb.key=S1 +a.auth=S2"
        ' \'+b={"env": {"HF_TOKEN": "S3"}, "secret": {"x": "S4"}}\' +c=$(curl -H \'token: S5\' kept)\n'
    ),
    "others": (
        "wandb login S1\nhuggingface-cli login --token S2\nKEYS[0]=S3\ncurl http://u:S4@h\nWANDB_API_KEY=S5 wandb login S6\n"
        "python prepare.py --key S7\ntrl sft --dataset_name kept\n"
    ),
    "yaml": (
        "learning_rate: 1.0e-6\nhub_token: S1\nreward_funcs: [kept.f]\nmodel_init_kwargs: {token: S2}\n"
        "datasets: [{path: a, token: S3}]\n"
    ),
}


@pytest.mark.parametrize("name", SECRETS)
def test_secrets_are_not_written_down(translated, script, name):
    said, text, _ = translated(script(SECRETS[name], "x.yaml" if name == "yaml" else "x.sh"))
    assert not re.findall(r"S\d+", said + text)
    assert "kept" in said + text


def test_an_address_says_that_its_credentials_are_gone(translated, script):
    _, text, values = translated(script(SECRETS["openrlhf"]))
    assert "http://kept/a [credentials left out] (line 1)" in text
    assert [reward["name"] for reward in values["reward"].values()] == ["http://kept/a"]


def test_a_program_that_does_not_train_is_named_without_its_arguments(options):
    assert [other.rpartition(": ")[2] for other in options(SECRETS["others"])[1]] == [
        "wandb",
        "huggingface-cli",
        "curl",
        "wandb",
        "python prepare.py",
    ]


@pytest.mark.parametrize(
    "option",
    [
        *(Option(f"--{name}", ("x",)) for name in ("input_key", "data.prompt_key", "label_key", "output_key", "reward_fn_key")),
        *(Option(f"--{name}", ("x",)) for name in ("pad_token", "eos_token", "max_tokens", "author", "tokenizer")),
        Option("--token", ("True",)),
        Option("--hub_token", ("none",)),
        Option("a", ("{data: {prompt_key: x, eos_token: y}}",)),
        Option("--remote_rm_url", ("http://localhost:5000/a?b=c@d",)),
        Option("--template", ("a:" * 50_000 + "b." * 50_000 + "://" * 10_000,)),
    ],
)
def test_what_is_no_secret_stays(option):
    assert without_secret(option) == option


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ('A=(--a 1)\nB=()\ntrl sft "${A[@]}" "${B[@]}" --b "${B[@]}"', {"--a": "1", "--b": ""}),
        ('A=(x y)\ntrl sft --a p"${A[@]}"q --b "${A[*]}"', {"--a": "px yq", "--b": "x y"}),
        ("read -r -d '' C <<EOF\n--a 1 \\\n --b 2\nEOF\neval \"trl sft ${C} --c 3\"", {"--a": "1", "--b": "2", "--c": "3"}),
        (
            "N=4; V='--e 5'\nread -d '' C <<-EOF\n--a $(( N * 2 )) \\\n --b\\\n=x{1,2} $Q${N}k ${R:-}\n"
            "$V --c $(ls -l) \\$N\nEOF\ntrl sft $C",
            {"--a": "8", "--b": "x{1,2} ${Q}4k", "--e": "5", "--c": "$(ls -l) $N"},
        ),
        ("sbatch <<EOF\nB=2\ntrl sft --a \\$B --b $A\nEOF", {"--a": "2", "--b": "${A}"}),
        ("trl sft --a \"\" --b '' --c", {"--a": "", "--b": "", "--c": ""}),
    ],
)
def test_arrays_in_words(options, text, values):
    assert options(text)[0] == values


def test_items_of_an_array_have_lines_of_their_own(options):
    command = options('A=(\n --a 1\n --b 2\n)\ntrl sft "${A[@]}" --c 3')[2]
    assert [option.line for option in command.options] == [2, 3, 5]


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("f() { local n=$1; shift; trl sft --a $1 --b $n; }\nf x y", {"--a": "y", "--b": "x"}),
        ('f() { shift 2; trl sft "$@" --c $#; }\nf x y --a 1 --b', {"--a": "1", "--b": "", "--c": "3"}),
        ('f() { trl sft --a "${@:2:1}" --b "$*" ${@:3}; }\nf x y --c', {"--a": "y", "--b": "x y --c", "--c": ""}),
        ('set -- sft --a 1\nf() { trl "$@"; }\nf "$@"', {"--a": "1"}),
        ("f() { trl sft --a ${1:-z} --b ${2}; }\nf", {"--a": "z", "--b": "${2}"}),
        ('f() { for A in "$@"; do :; done; trl sft --a $A; }\nf x', {"--a": "x"}),
        ("set -- x y\nif true; then shift; fi\ntrl sft --a $1", {"--a": "y"}),
        ("set -- x y\nif [ -d q ]; then shift; fi\ntrl sft --a $1", {"--a": "${1}"}),
    ],
)
def test_arguments_of_functions(options, text, values):
    read, _, command = options(text)
    assert read == values
    assert not [note for note in command.notes if "$@" in note]


def test_arguments_that_the_reader_gives(options):
    assert options("shift\ntrl sft --a $1 --b $#", **{"1": "x", "2": "y"})[0] == {"--a": "y", "--b": "1"}
    assert "$@ (line 2)" in find(options, 'shift\ntrl sft --a 1 "${@:2}"').notes[0]
