"""Commands of other people's packages: listed and helped from metadata, completed, run; broken and conflicting ones."""

from __future__ import annotations

import json

import pytest

from rlhf_host.cli import lazy
from rlhf_host.plugins.discovery import discover

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
    assert "top       Print the highest value of a metric.\n" in section + "\n"
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


@pytest.mark.parametrize(
    ("source", "message"),
    [
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
    assert outside.rlhf("plugins", "--verify", "--kind", "command", COLUMNS="200").stdout.count("broken: ") == 1


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
    said = f"Error: no command {command.split()[-1]!r} is installed; pip install --find-links dist {package}\n"
    assert (done.exit_code, done.stderr) == (2, said)
