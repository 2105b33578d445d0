"""``-o``: every installed command that writes a file or a folder takes it, and calls it ``--output``."""

from __future__ import annotations

import re
from collections.abc import Iterator

import click
import pytest

from rlhf_host.cli.configured import SettingsCommand
from rlhf_host.cli.main import main

WRITES = {
    "env export",
    "eval",
    "export",
    "generate",
    "merge-lora",
    "plugins check",
    "plugins new",
    "replay",
    "report",
    "rollout",
    "sweep",
    "train",
    "translate",
    "xray",
}
"""Commands that write where they are told."""
OTHERS = {
    "bisect",
    "chat",
    "compare",
    "completion",
    "data clear",
    "data show",
    "doctor",
    "env add",
    "env list",
    "episodes",
    "plan",
    "plugins",
    "plugins bench",
    "plugins install",
    "plugins requirements",
    "plugins search",
    "plugins show",
    "plugins uninstall",
    "plugins verify",
    "profile",
    "prometheus",
    "push",
    "runs",
    "serve",
    "serve-reward",
    "serve-training",
    "show",
    "view",
}
"""Commands that print, serve, upload, or change what is there: there is nothing to name."""
WRITTEN = re.compile(r"where to write|is written|write .* to a (new )?file|where the \w+ go", re.IGNORECASE)
"""Words of a flag's help for a place to write."""


def commands(command: click.Command, words: tuple[str, ...] = ()) -> Iterator[tuple[str, click.Command]]:
    if words and not (isinstance(command, click.Group) and not command.invoke_without_command):
        yield " ".join(words), command
    if isinstance(command, click.Group):
        context = click.Context(command, info_name=" ".join(("rlhf", *words)))
        for name in command.list_commands(context):
            below = command.get_command(context, name)
            assert below is not None
            yield from commands(below, (*words, name))


INSTALLED = dict(commands(main))


def flags(command: click.Command) -> dict[str, str]:
    """Spellings of each flag, with commas between → its help."""
    if isinstance(command, SettingsCommand):
        spelled = dict(command._spelled((f"--{flag}", text) for flag, text in command.start.items()))
        return {name: text for name, text in spelled.items() if text}
    return {", ".join(sorted(each.opts)): each.help or "" for each in command.params if isinstance(each, click.Option)}


def test_it_is_known_of_every_command_whether_it_writes():
    assert INSTALLED.keys() == WRITES | OTHERS


@pytest.mark.parametrize("name", sorted(INSTALLED))
def test_a_place_to_write_is_the_option_o(name):
    spelled = flags(INSTALLED[name])
    outputs = [flag for flag in spelled if {"-o", "--output"} & {*flag.split(", ")}]
    assert len(outputs) == (name in WRITES), outputs
    for flag in outputs:
        assert {"-o", "--output"} <= {*flag.split(", ")}
    assert [flag for flag, text in spelled.items() if WRITTEN.search(text) and flag not in outputs] == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["rollout", "-o"], "--output needs a value"),
        (["generate", "-o=a.jsonl", "--output", "b.jsonl"], "--output can be given once"),
        (["train", "-o", "a", "--run-dir", "b"], "--output and --run-dir set the same: leave one out"),
        (["chat", "-o", "a"], "--output: no such flag"),
        (["eval", "--debug", "-o"], "--output needs a value"),
    ],
)
def test_it_is_refused_like_any_flag(rlhf_here, words, said):
    done = rlhf_here(*words)
    assert done.exit_code == 2
    assert said in done.output


def test_a_run_is_written_where_it_says(rlhf_here, tmp_path):
    done = rlhf_here("train", "--algo", "rloo", "--reward", "math_verifier", "--print-config", "-o", tmp_path / "mine")
    assert f"run_dir: {tmp_path}/mine" in done.output
