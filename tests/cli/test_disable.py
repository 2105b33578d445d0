"""``--disable`` and RLHF_DISABLE_PLUGINS: plugins left out, by the real command line."""

from __future__ import annotations

import json
import os

import pytest

from rlhf_host.plugins.discovery import DISABLE

TWIN = {"rlhf.algos": "twin = cli_{0}:X"}


def statuses(done):
    return {
        row["name"]: row["status"]
        for row in json.loads(done.stdout)
        if row["distribution"].startswith(("cli-", "rlhf-plugin-rl"))
    }


def test_the_list_shows_what_is_left_out_and_why(site):
    site.install("cli-a", {"rlhf.rewards": "one = cli_a:X\ntwo = cli_a:X"}, {"cli_a.py": ""})
    assert statuses(site.rlhf("plugins", "--json", "--disable", "one", "--kind", "reward")) == {"one": "disabled", "two": "ok"}
    by_variable = site.rlhf("plugins", "--json", RLHF_DISABLE_PLUGINS=" two, cli-a:one ,not_installed,")
    assert {name: status for name, status in statuses(by_variable).items() if name in ("one", "two")} == {
        "one": "disabled",
        "two": "disabled",
    }
    text = " ".join(site.rlhf("plugins", "--disable", "one,two", COLUMNS="200").stdout.split())
    assert text.count("disabled: left out by --disable or RLHF_DISABLE_PLUGINS") == 2


def test_a_plugin_left_out_settles_a_conflict(site):
    for name in ("left", "right"):
        group, point = next(iter(TWIN.items()))
        site.install(f"cli-{name}", {group: point.format(name)}, {f"cli_{name}.py": ""})
    rows = json.loads(site.rlhf("plugins", "--json", "--kind", "algo", "--disable", "cli-left:twin").stdout)
    found = {row["distribution"]: row["status"] for row in rows if row["name"] == "twin"}
    assert found == {"cli-left": "disabled", "cli-right": "ok"}


def test_a_run_cannot_choose_it_and_says_why(rlhf_here, small_run):
    for done in (
        rlhf_here(*small_run, "--dry-run", "--disable", "rloo"),
        rlhf_here(*small_run, "--dry-run", "--disable", "rlhf-plugin-rloo:rloo", "--disable", "grpo"),
    ):
        assert done.exit_code == 2
        assert "algo 'rloo' is disabled: left out by --disable or RLHF_DISABLE_PLUGINS" in done.stderr
    assert rlhf_here(*small_run, "--dry-run", "--disable", "grpo").exit_code == 0


@pytest.mark.parametrize("command", ["eval", "rollout", "replay"])
def test_every_command_that_runs_plugins_has_it(rlhf_here, command):
    done = rlhf_here(command, "--disable", "rlo")
    near = "did you mean 'rloo' or 'rollout'?"
    assert (done.exit_code, done.stderr) == (2, f"Error: --disable rlo: no such plugin is installed; {near}\n")


@pytest.mark.parametrize(
    ("name", "plugins"), [("rlhf-plugin-rloo", "rloo"), ("RLHF_Tracker.wandb", "wandb"), ("rlhf-sync-delta", "bisect,delta")]
)
def test_a_distribution_is_told_by_its_plugins(rlhf_here, name, plugins):
    done = rlhf_here("plugins", "--disable", name)
    assert done.exit_code == 2
    assert done.stderr.startswith(
        f"Error: --disable {name}: this is a distribution; to ignore all its plugins, --disable {plugins}"
    )


def test_it_lasts_as_long_as_the_command(rlhf_here, monkeypatch):
    monkeypatch.setenv(DISABLE, "ppo")
    rows = json.loads(rlhf_here("plugins", "--json", "--disable", "rloo", "--kind", "algo").stdout)
    assert {row["name"] for row in rows if row["status"] == "disabled"} == {"ppo", "rloo"}
    assert os.environ[DISABLE] == "ppo"
    monkeypatch.delenv(DISABLE)
    assert rlhf_here("plugins", "--disable", "rloo").exit_code == 0
    assert DISABLE not in os.environ


def test_it_is_not_imported_by_looking_at_it(site):
    site.install("cli-bad", {"rlhf.rewards": "bad = cli_bad:X"}, {"cli_bad.py": "raise SystemExit('imported')"})
    done = site.rlhf("plugins", "--disable", "bad", "show", "bad", COLUMNS="200")
    assert done.returncode == 1
    assert "status   disabled: left out by" in done.stdout
    assert "imported" not in done.stdout
    assert site.rlhf("plugins", "--disable", "bad", "show", "--kind", "reward").returncode == 0
