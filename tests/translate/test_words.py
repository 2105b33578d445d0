"""``rlhf translate`` reads a shell script as a shell does, and writes none of its keys and passwords down."""

# ruff: noqa: F401, F811  (fixtures of another file)

from __future__ import annotations

import re

import pytest

from rlhf_host.translate.commands import find_commands
from rlhf_host.translate.options import Option, without_secret
from tests.translate.test_translate import script, translated


@pytest.fixture
def options(script):
    """Names and values of a script's training command, and what is said of other lines."""

    def read(text, name="train.sh"):
        commands, others = find_commands(script(text, name))
        return {option.name: option.value for option in commands[0].options}, others, commands[0]

    return read


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
        ("Y=1\nunset Y\ntrl sft --a ${Y:-2}$Y", {"--a": "2"}),
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
    ("text", "lines"),
    [
        ("A=1\nif x; then\n A=2\nfi\ntrl sft --a $A", "1, 3"),
        ("if x; then A=1; else\nA=2; fi\ntrl sft --a $A", "1, 2"),
        ("case $1 in\n a) A=1;;\n b) A=2;;\nesac\ntrl sft --a $A", "2, 3"),
        ("A=1\n[ $# = 1 ] && A=2\ntrl sft --a ${A}", "1, 2"),
        ("A=(1)\nif x; then\n A+=(2)\nfi\ntrl sft --a ${A[@]}", "1, 3"),
        ("A=1\nA=2\ntrl sft --a $A", ""),
        ("if x; then\n A=1\nfi\nA=2\ntrl sft --a $A", ""),
    ],
)
def test_a_value_that_depends_on_a_condition_is_named(options, text, lines):
    notes = [other.partition(": ")[2] for other in options(text)[1] if "conditions" in other]
    assert notes == ([f"A is set on lines {lines}, under conditions: the last is taken; check it"] if lines else [])


def test_what_has_no_value_is_named_with_the_line_of_its_use(options):
    command = options("if [ ${1} ]; then echo ${1}; fi\ntrl sft \\\n  --a x${1} \\\n  --b ${1}")[2]
    assert command.unset == {"${1}": 3}


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
        "KEYS[0]",
        "curl",
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
