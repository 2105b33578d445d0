"""Commands of other people's packages: listed and helped from metadata, completed, run; broken and conflicting ones."""

from __future__ import annotations

import json
import tomllib

import pytest

from rlhf_host.cli import lazy
from rlhf_host.plugins.discovery import discover
from tests.conftest import ROOT

TOP = '''
import click
from rlhf_host import RunDirectory, UserError
from rlhf_host.commands import near_matches

HELP_GROUP = "Look at runs"


@click.command()
@click.argument("run")
@click.option("--metric", default="loss", show_default=True, help="The metric to print.")
def top(run, metric):
    """Print the highest value of a metric. More is below.

    This is not in the list.
    """
    rows = RunDirectory(run).metrics
    values = [row[metric] for row in rows if metric in row]
    if not values:
        raise UserError(f"{run} has no metric {metric!r}{near_matches(metric, rows[-1])}")
    click.echo(f"{max(values):g}")


@click.command()
def inner():
    """Do something for authors."""
    click.echo("inner ran")
'''

ENTRIES = {"rlhf.commands": "top = cmd_top:top\nplugins.inner = cmd_top:inner"}


@pytest.fixture
def outside(site):
    site.install("cmd-top", ENTRIES, {"cmd_top.py": TOP})
    return site


@pytest.fixture
def run_dir(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.yaml").write_text("seed: 0\n")
    (folder / "metrics.jsonl").write_text("".join(json.dumps({"step": n, "loss": n / 4}) + "\n" for n in (1, 3, 2)))
    return folder


def test_it_is_listed_where_it_says_and_imported_for_nothing_but_running(outside):
    (outside.folder / "cmd_top.py").write_text(TOP + "\nprint('imported')\n")
    said = outside.rlhf("--help")
    section = said.stdout.partition("Look at runs:\n")[2].partition("\n\n")[0]
    assert "top Print the highest value of a metric." in [" ".join(line.split()) for line in section.splitlines()]
    assert "imported" not in said.stdout + outside.rlhf("plugins", "--json").stdout
    assert "inner" in outside.rlhf("plugins", "--help").stdout
    assert "inner" not in said.stdout


def test_it_is_helped_run_and_its_mistakes_are_messages(outside, run_dir):
    assert "--metric TEXT  The metric to print.  [default: loss]" in outside.rlhf("top", "--help").stdout
    assert outside.rlhf("top", run_dir).stdout == "0.75\n"
    wrong = outside.rlhf("top", run_dir, "--metric", "los")
    assert (wrong.returncode, wrong.stderr) == (2, f"Error: {run_dir} has no metric 'los'; did you mean 'loss'?\n")
    twice = outside.rlhf("top", run_dir, "--metric", "a", "--metric", "b")
    assert (twice.returncode, twice.stderr) == (2, "Error: --metric can be given once\n")
    assert outside.rlhf("plugins", "inner").stdout == "inner ran\n"


def test_it_is_completed(outside):
    variables = {"_RLHF_COMPLETE": "bash_complete", "COMP_WORDS": "rlhf to", "COMP_CWORD": "1"}
    assert outside.rlhf_process(**variables).stdout == "plain,top\n"
    variables = {"_RLHF_COMPLETE": "bash_complete", "COMP_WORDS": "rlhf top --m", "COMP_CWORD": "2"}
    assert outside.rlhf_process(**variables).stdout == "plain,--metric\n"


def test_it_is_a_plugin_of_its_kind(outside):
    listed = outside.listed("--kind", "command")
    assert (listed["top"]["status"], listed["top"]["summary"]) == ("ok", "Print the highest value of a metric.")
    shown = outside.rlhf("plugins", "show", "top")
    assert shown.returncode == 0
    assert shown.stdout.startswith("command top\n")
    assert "Print the highest value of a metric." in shown.stdout
    assert outside.rlhf("--help", RLHF_DISABLE_PLUGINS="top").stdout.count("highest value") == 0


GROUP = '''
import click
from rlhf_host.commands import CommandGroup

@click.group(cls=CommandGroup)
def lab():
    """Work in the lab."""

@lab.command()
def clean():
    """Clean the lab."""
    click.echo("cleaned")

@click.command()
def measure():
    """Measure something."""
    click.echo("measured")

@click.group()
def plain():
    """Have no commands of others."""
'''


def test_a_group_of_one_s_own(site):
    names = "lab = cmd_lab:lab\nlab.measure = cmd_lab:measure"
    site.install("cmd-lab", {"rlhf.commands": names}, {"cmd_lab.py": GROUP})
    shown = site.rlhf("lab", "--help").stdout
    assert shown.partition("Commands:\n")[2].splitlines() == ["  measure  Measure something.", "  clean    Clean the lab."]
    assert site.rlhf("lab", "measure").stdout == "measured\n"
    assert site.rlhf("lab", "clean").stdout == "cleaned\n"
    assert site.rlhf("lab", "mesure").stderr == "Error: no command 'mesure'; did you mean 'measure'?\n"
    variables = {"_RLHF_COMPLETE": "bash_complete", "COMP_WORDS": "rlhf lab ", "COMP_CWORD": "2"}
    assert site.rlhf_process(**variables).stdout == "plain,measure\nplain,clean\n"
    assert "broken" not in site.rlhf("plugins", "--kind", "command").stdout
    assert site.rlhf("plugins", "check", "lab.measure").returncode == 0


def test_the_group_in_the_docs(site):
    page = (ROOT / "docs/plugins/command.md").read_text().partition("## A group of commands")[2]
    points, source = (page.partition(f"```{language}\n")[2].partition("```")[0] for language in ("toml", "python"))
    [(group, entries)] = tomllib.loads(points)["project"]["entry-points"].items()
    site.install(
        "rlhf-plugin-lab",
        {group: "\n".join(f"{name} = {value}" for name, value in entries.items())},
        {"rlhf_plugin_lab.py": source},
    )
    assert site.rlhf("lab", "weigh").stdout == "42 kg\n"
    assert "weigh  Weigh a model." in site.rlhf("lab", "--help").stdout


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("plain.measure", "command 'plain' from cmd-lab 1.0 is no group of installed commands: make one with @click.group"),
        ("train.measure", "is no group of installed commands"),
        ("nosuch.measure", "'nosuch' is installed"),
    ],
)
def test_a_command_that_nothing_can_reach_is_told(site, name, words):
    names = f"plain = cmd_lab:plain\n{name} = cmd_lab:measure"
    site.install("cmd-lab", {"rlhf.commands": names}, {"cmd_lab.py": GROUP})
    for shown in ([], ["show"]):
        listed = " ".join(site.rlhf("plugins", *shown, "--kind", "command", COLUMNS="300").stdout.split())
        assert listed.count("broken: ") == 1, listed
        assert f"broken: rlhf {name.replace('.', ' ')} cannot be reached" in listed
        assert words in listed
    checked = site.rlhf("plugins", "check", name)
    assert checked.returncode == 1
    assert "FAILED   it_can_be_reached" in checked.stdout
    shown = site.rlhf("plugins", "show", name)
    assert (shown.returncode, "cannot be reached" in " ".join(shown.stdout.split())) == (1, True)


def test_the_list_and_the_help_say_the_same_of_a_command(site):
    source = (
        '"""From the module."""\nimport click\n@click.command()\ndef none(): ...\n'
        '@click.command(help="From the decorator.")\ndef given():\n    """From the function."""\n'
    )
    site.install("cmd-help", {"rlhf.commands": "none = cmd_help:none\ngiven = cmd_help:given"}, {"cmd_help.py": source})
    for name, text in (("none", "From the module."), ("given", "From the decorator.")):
        assert site.listed("--kind", "command")[name]["summary"] == text
        assert site.rlhf(name, "--help").stdout.splitlines()[2].strip() == text


def test_helps_break_no_name_and_show_code_in_single_marks(site):
    words = " ".join(["word"] * 11)
    source = f'import click\n@click.command()\ndef long():\n    """Do ``this``: {words} rlhf-runs[view] and more."""\n'
    site.install("cmd-long", {"rlhf.commands": "long = cmd_long:long"}, {"cmd_long.py": source})
    shown = site.rlhf("long", "--help", COLUMNS="80").stdout
    assert "Do `this`: " in shown
    assert "  rlhf-runs[view] and more." in shown.splitlines()


@pytest.mark.parametrize(
    "source", ["import no_such_module", "bad = 3", "import sys; print('hi'); sys.exit(1)", "def bad(): ..."]
)
def test_completion_says_nothing_of_one_that_is_broken(outside, source):
    outside.install("cmd-bad", {"rlhf.commands": "bad = cmd_bad:bad\nplugins.bad = cmd_bad:bad"}, {"cmd_bad.py": source})
    for words in ("rlhf bad ", "rlhf bad --", "rlhf plugins bad x "):
        variables = {"_RLHF_COMPLETE": "bash_complete", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
        done = outside.rlhf_process(**variables)
        assert (done.stdout.strip(), done.stderr) == ("", ""), words


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("bad = 3", "cmd_bad:bad is an int, not a click.Command"),
        ("import no_such_module", "importing cmd_bad failed: ModuleNotFoundError: No module named 'no_such_module'"),
        ("", "cmd_bad has no 'bad'"),
        ("def bad(): ...", "cmd_bad:bad is a function, not a click.Command"),
    ],
)
def test_one_that_is_broken_breaks_itself_alone(outside, source, message):
    outside.install("cmd-bad", {"rlhf.commands": "bad = cmd_bad:bad"}, {"cmd_bad.py": source})
    done = outside.rlhf("bad")
    assert (done.returncode, done.stderr) == (2, f"Error: command 'bad' from cmd-bad 1.0: {message}\n")
    assert "  bad " in outside.rlhf("--help").stdout
    assert outside.rlhf("plugins", "inner").returncode == 0
    assert outside.rlhf("plugins", "show", "--kind", "command", COLUMNS="200").stdout.count("broken: ") == 1


def test_one_for_another_host_is_not_imported(site):
    site.install(
        "cmd-old", {"rlhf.commands": "old = cmd_old:old"}, {"cmd_old.py": "print('imported')"}, requires=["rlhf-host<0.9"]
    )
    done = site.rlhf("old")
    assert (done.returncode, done.stdout) == (2, "")
    assert "cmd-old 1.0 is for rlhf-host <0.9" in done.stderr
    assert "incompatible: cmd-old 1.0 is for" in site.rlhf("--help", COLUMNS="200").stdout


def test_two_of_one_name_are_a_conflict_that_a_prefix_settles(outside, run_dir):
    other = TOP.replace("max(values)", "min(values)")
    outside.install("cmd-bottom", {"rlhf.commands": "top = cmd_bottom:top"}, {"cmd_bottom.py": other})
    done = outside.rlhf("top", run_dir)
    assert done.returncode == 2
    assert "choose with cmd-bottom:top or cmd-top:top" in done.stderr
    assert "conflict: cmd-bottom and cmd-top both provide it" in outside.rlhf("--help", COLUMNS="200").stdout
    assert [outside.rlhf(f"cmd-{name}:top", run_dir).stdout for name in ("top", "bottom")] == ["0.75\n", "0.25\n"]


def test_metadata_is_read_once_by_a_command(outside, prompts, tiny_model):
    (outside.folder / "sitecustomize.py").write_text(
        "import atexit, sys\nimport importlib_metadata\nread = importlib_metadata.distributions\ncount = 0\n"
        "def counted(*arguments, **options):\n    global count\n    count += 1\n    return read(*arguments, **options)\n"
        "importlib_metadata.distributions = counted\n"
        "atexit.register(lambda: print('scans:', count, file=sys.stderr))\n"
    )
    train = [
        "train",
        "--algo",
        "rloo",
        "--reward",
        "math_verifier",
        "--actor.model",
        tiny_model,
        "--data",
        prompts,
        "--dry-run",
    ]
    for words in (["--help"], ["plugins"], ["top", "--help"], ["train", "--algo", "rloo", "--help"], train):
        done = outside.rlhf_process(*words)
        assert done.returncode == 0, done.stderr
        assert done.stderr.rpartition("scans: ")[2] == "1\n", words


@pytest.mark.parametrize(
    ("words", "package"),
    [
        ("translte translate", "rlhf-translate"),
        ("rusn runs", "rlhf-runs"),
        ("srve serve", "rlhf-server"),
        ("doctr doctor", "rlhf-authoring"),
        ("plugins instal install", "rlhf-authoring"),
    ],
)
def test_near_matches_look_at_what_is_not_installed_too(rlhf_here, monkeypatch, words, package):
    monkeypatch.setattr(
        lazy, "discover", lambda disabled=False: [info for info in discover(disabled) if info.distribution != package]
    )
    *group, typed, meant = words.split()
    done = rlhf_here(*group, typed)
    line = f"pip install -c dist/wheels.txt {package}"
    said = f"Error: no command {typed!r}; did you mean {meant!r}? It is not installed: {line}\n"
    assert (done.exit_code, done.stderr) == (2, said)


def test_a_package_that_is_not_installed_may_be_named(rlhf_here, monkeypatch):
    assert "'runs'; rlhf-runs has 'runs': rlhf-runs:runs" in rlhf_here("other:runs").stderr.replace("other:", "")
    monkeypatch.setattr(
        lazy, "discover", lambda disabled=False: [info for info in discover(disabled) if info.distribution != "rlhf-runs"]
    )
    done = rlhf_here("rlhf-runs:runs")
    said = "Error: no command 'rlhf-runs:runs' is installed; pip install -c dist/wheels.txt rlhf-runs\n"
    assert (done.exit_code, done.stderr) == (2, said)
    assert "is installed" not in rlhf_here("other:runs").stderr


@pytest.mark.parametrize(
    ("command", "package"),
    [
        ("view", "rlhf-runs"),
        ("chat", "rlhf-server"),
        ("serve", "rlhf-server"),
        ("doctor", "rlhf-authoring"),
        ("plugins new", "rlhf-authoring"),
    ],
)
def test_one_of_the_project_that_is_not_installed_says_how_to_get_it(rlhf_here, monkeypatch, command, package):
    monkeypatch.setattr(
        lazy, "discover", lambda disabled=False: [info for info in discover(disabled) if info.distribution != package]
    )
    done = rlhf_here(*command.split(), "runs/one")
    said = f"Error: no command {command.split()[-1]!r} is installed; pip install -c dist/wheels.txt {package}\n"
    assert (done.exit_code, done.stderr) == (2, said)
