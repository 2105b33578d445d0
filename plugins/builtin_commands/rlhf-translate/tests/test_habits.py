"""Hints for what people type out of habit: each names commands and flags that are accepted."""

from __future__ import annotations

import re

import pytest
from click.testing import CliRunner
from rlhf_translate import habits
from rlhf_translate.elsewhere import hint

import rlhf_host
from rlhf_host.cli.main import main
from rlhf_host.commands import CommandGroup
from rlhf_host.config.check import check
from rlhf_host.config.flags import parse, take
from rlhf_host.config.load import read_config
from rlhf_host.config.resolve import merge_needs, resolve
from rlhf_host.errors import UserError
from rlhf_host.settings import UnknownName

RUNS = (
    ("--algo", "grpo", "--reward", "math_verifier", "--model", "m", "--data", "a.jsonl"),
    ("--algo", "sft", "--model", "m", "--data", "a.jsonl"),
)
PLACES = {
    "NAME": "tensorboard",
    "PATH": "b.jsonl",
    "DIRECTORY": "d",
    "N": "512",
    "RUN_DIR": "r",
    "FILE.yaml": "empty.yaml",
    "FILE.py": "tools.py",
}


def rlhf(*words: str):
    return CliRunner().invoke(main, words, prog_name="rlhf")


@pytest.mark.usefixtures("algorithms")
@pytest.mark.parametrize("group", habits.GROUPS)
def test_commands_that_are_named_exist_and_so_do_their_flags(group):
    for text in habits.GROUPS[group].values():
        for command in re.findall(r"rlhf((?: [a-z-]+)*)", text):
            words, context = [], main
            for word in command.split():
                if not isinstance(context, CommandGroup) or word not in context.installed():
                    break
                words.append(word)
                context = context.get_command(None, word)
            done = rlhf(*words, "--help")
            assert done.exit_code == 0, (text, done.output)
            assert words or "--" in text, text
            told = re.search(rf"rlhf {' '.join(words)}((?: --[a-z-]+)*)".replace("rlhf  ", "rlhf "), text)
            assert set(told[1].split()) <= set(re.findall(r"--[a-z-]+", done.output)), (text, told[1])


@pytest.mark.usefixtures("algorithms")
@pytest.mark.parametrize("text", habits.FLAGS.values())
def test_flags_that_are_named_are_accepted(text, tmp_path, monkeypatch):
    """Each of the alternatives, by a run that samples or one over a data set."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.yaml").write_text("{}\n")
    said = re.sub(r"\{(\w+)\|[\w|]+\}", r"\1", text)
    said = said.replace("{}", "2" if "zero" in text else "0.5" if "clip-eps" in text else "512").replace(
        "FILE.py:FUNCTION", "length.py:length"
    )
    (tmp_path / "length.py").write_text("def length(text):\n    return len(text)\n")
    (tmp_path / "tools.py").write_text(
        'def double(x: int) -> int:\n    """Twice x.\n\n    Args:\n        x: a number.\n    """\n    return 2 * x\n'
    )
    alternatives = re.findall(r"--[\w.-]+(?: [\w.+=:]+)?(?: --[\w.-]+(?: [\w.+=:]+)?)*", said)
    assert alternatives
    for typed in alternatives:
        words = [PLACES.get(word.rstrip(","), word.rstrip(",")) for word in typed.split()]
        if words[0] == "--agent" and len(words) == 2:
            words[-1] = "single_turn"
        if words[0] == "--algo":
            words[-1] = "grpo"
        if words[0] == "--reward" and words[-1] == "tensorboard":
            words[-1] = "math_verifier"
        if words[0] == "--config" and words[-1] == "tensorboard":
            words[-1] = "quickstart"
        if words[0] == "--resume":
            continue  # a run is needed
        assert any(accepted(*run, *words) for run in RUNS), typed


def accepted(*words: str) -> bool:
    own, flags = take(parse(words), ("config",))
    last = {".".join(flag.keys): number for number, flag in enumerate(flags)}
    flags = [flag for number, flag in enumerate(flags) if last[".".join(flag.keys)] == number]
    try:
        run = resolve(read_config(own.get("config", []), flags).config)
        manager = run.plugins()
        check(run, manager, merge_needs(manager))
    except UserError:
        return False
    return True


def foreign(home, *bases, **fields):
    """A class of another project, without that project."""
    module, _, name = home.rpartition(".")
    return type(name, bases, {"__module__": module, **fields})


TRAINER = foreign("trl.trainer.grpo_trainer.GRPOTrainer", foreign("transformers.trainer.Trainer"))
CALLBACK = foreign("transformers.trainer_callback.TrainerCallback")
LOOP = foreign("verl.experimental.agent_loop.agent_loop.AgentLoopBase")
CONFIG = foreign("trl.trainer.grpo_config.GRPOConfig")()
CONFIG.__dict__.update(learning_rate=1e-6, num_generations=8)


@pytest.mark.usefixtures("algorithms")
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"args": CONFIG}, 'GRPOConfig of TRL is settings here, each of its own: train(**{"actor.lr": 1e-06, "rollout.n": 8})'),
        ({"config": CONFIG}, "config names files and presets, and has GRPOConfig; GRPOConfig of TRL is settings here"),
        ({"algo": TRAINER}, "GRPOTrainer of TRL is chosen by algo=NAME"),
        (
            {"algo": type("Mine", (TRAINER,), {})},
            "GRPOTrainer of TRL is no plugin: a loss of one's own is a class with compute_loss",
        ),
        ({"trackers": [type("Mine", (CALLBACK,), {})()]}, "a class with log_metrics is a tracker, trackers=[Mine]"),
        ({"agent": type("Mine", (LOOP,), {})}, "an agent is a class with agent_run, or agent_reset and agent_step"),
        ({"agent": foreign("verl.tools.base_tool.BaseTool")()}, "a tool is a plain function"),
        ({"peft_config": foreign("peft.tuners.lora.config.LoraConfig")()}, "LoraConfig of PEFT is settings here"),
        ({"callbacks": []}, "callbacks: no such argument; here it is trackers=NAME, which may be a class with log_metrics"),
        ({"tools": []}, "tools: no such argument; here it is agent multi_turn agent.tools=FILE.py"),
    ],
)
def test_an_object_of_another_project_is_explained(arguments, said):
    with pytest.raises(UserError) as error:
        rlhf_host.train(**{"algo": "grpo", "rewards": len, "data": [{"prompt": "a"}]} | arguments)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.usefixtures("algorithms")
@pytest.mark.parametrize(
    ("typed", "hint"),
    [
        ("list", "here it is rlhf runs for runs, rlhf plugins for what is installed"),
        ("logs", "here it is rlhf show RUN_DIR in the terminal, rlhf view RUN_DIR in the browser"),
        ("plugins list", "here it is rlhf plugins"),
        ("data head", "here it is rlhf data show PATH"),
    ],
)
def test_a_word_in_the_place_of_a_command_is_explained(typed, hint):
    done = rlhf(*typed.split())
    assert (done.exit_code, done.stderr) == (2, f"Error: no command {typed.split()[-1]!r}; {hint}\n")


def test_a_projects_own_name_comes_before_a_habit():
    assert hint(UnknownName("flag", "dataset_path")).startswith("; ")
    assert hint(UnknownName("flag", "num_gpus", "8")) == (
        "; here it is --runtime ray --placement actor+rollout=8, where roles joined by + share 8 devices"
    )
    assert hint(UnknownName("flag", "exp-name")) == "; here it is --name NAME"
    assert hint(UnknownName("command", "server.ls")) == ""
