"""Packages explain unknown names: entry points in ``rlhf.hints``, asked when a name is unknown, and not before."""

from __future__ import annotations

import re

import pytest

from rlhf_host.config.load import load_config
from rlhf_host.errors import UserError
from rlhf_host.plugins.discovery import discover, unchosen
from rlhf_host.plugins.hints import UnknownName, of_flag, of_nobody, of_packages, of_place

TELLS = """
def hint(unknown):
    fits = unknown.fits("--algo.clip-eps")
    return f"; {unknown.what} {unknown.name} {unknown.value} {fits}" if "zz" in unknown.name else ""
"""


def install(site, name, source):
    module = name.replace("-", "_")
    site.install(name, {"rlhf.hints": f"{name} = {module}:hint"}, {f"{module}.py": source})


@pytest.mark.parametrize(
    ("ask", "hint"),
    [
        (lambda: of_flag("zz.a", "1", lambda flag: flag == "--algo.clip-eps"), "; flag zz.a 1 True"),
        (lambda: of_flag("zz.a", "1", lambda flag: False), "; flag zz.a 1 False"),
        (lambda: of_place("run.yaml:3: zz", {"a": {"b": 7}}), "; flag zz 7 True"),
        (lambda: of_packages(UnknownName("option", "algo.zz")), "; option algo.zz None True"),
        (lambda: of_packages(UnknownName("section", "zz")), "; section zz None True"),
        (lambda: of_packages(UnknownName("choice", "zz")), "; choice zz None True"),
        (lambda: of_packages(UnknownName("choice", "yy")), ""),
        (lambda: of_packages(UnknownName("command", "data.zz")), "; command data.zz None True"),
        (lambda: of_flag("exp_name"), "; here it is --name NAME"),  # of the next package
    ],
)
def test_a_package_answers(here, ask, hint):
    install(here, "cmd-tells", TELLS)
    assert ask() == hint


def test_where_nothing_explains_names_it_is_told_what_does(monkeypatch):
    assert of_nobody() == ""
    monkeypatch.setattr("rlhf_host.plugins.hints.unchosen", lambda kind: [])
    line = "; names of other projects are explained after pip install -c dist/wheels.txt rlhf-translate"
    assert of_nobody() == line
    for flags, said in (
        (["--learning-rate", "1"], f"--learning-rate: no such flag{line}"),
        (["--adv_estimator", "grpo"], f"--adv_estimator: no such flag{line}"),
        (["--rollout.temprature", "1"], "--rollout.temprature: no such flag; did you mean '--rollout.temperature'"),
    ):
        with pytest.raises(UserError, match=re.escape(said)):
            load_config(flags=flags)


def test_an_answer_stands_in_the_message(site):
    install(site, "cmd-tells", TELLS)
    for words, message in (
        (("--zz", "3"), "--zz: no such flag; flag zz 3 True"),
        (("--algo", "sft", "--zz", "3"), "--zz: no such flag; flag zz 3 False"),
        (("--algo", "zz"), "--algo: no algo named 'zz' is installed; choice zz None True"),
        (("--kl.coef", "1", "--kl.zz", "1"), "--kl.zz: extension 'kl' has no option 'zz'; flag kl.zz 1 True"),
    ):
        done = site.rlhf("train", *words)
        assert (done.returncode, done.stderr.splitlines()[-1]) == (2, f"Error: {message}")


@pytest.mark.parametrize(
    "source",
    [
        "import no_such_module",
        "import sys; sys.exit('this must not end the command')",
        "def other(): ...",
        "hint = 7",
        "def hint(unknown):\n    raise ValueError('broken')",
        "def hint(unknown):\n    raise SystemExit(0)",
        "def hint(unknown):\n    return 7",
        "def hint():\n    return '; x'",
    ],
)
def test_a_package_that_fails_hides_neither_the_message_nor_what_others_say(site, source):
    install(site, "cmd-fails", source)
    done = site.rlhf("train", "--zz", "3")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "Error: --zz: no such flag\n"
    install(site, "cmd-tells", TELLS)
    assert site.rlhf("train", "--zz", "3").stderr == "Error: --zz: no such flag; flag zz 3 True\n"


def test_a_package_for_another_host_is_not_imported(site):
    site.install(
        "cmd-old", {"rlhf.hints": "old = cmd_old:hint"}, {"cmd_old.py": "print('imported')"}, requires=["rlhf-host<0.9"]
    )
    assert site.rlhf("train", "--zz", "3").stdout == ""


def test_it_is_imported_for_unknown_names_alone(site):
    points = {"rlhf.hints": "loud = cmd_loud:hint", "rlhf.reward_forms": "loud = cmd_loud:form"}
    site.install("cmd-loud", points, {"cmd_loud.py": "print('imported')\ndef hint(unknown):\n    return ''\n"})
    for words in (("plugins",), ("train", "--help"), ("train", "--algo", "rloo", "--train.steps", "2", "--print-config")):
        done = site.rlhf(*words)
        assert done.returncode == 0, done.stderr
        assert "imported" not in done.stdout
    assert site.rlhf("train", "--zz", "3").stdout == "imported\n"


def test_it_can_be_left_out(here, monkeypatch):
    install(here, "cmd-tells", TELLS)
    assert "cmd-tells" in [info.distribution for info in unchosen("hint")]
    monkeypatch.setenv("RLHF_DISABLE_PLUGINS", "cmd-tells")
    assert "cmd-tells" not in [info.distribution for info in unchosen("hint")]
    assert of_packages(UnknownName("choice", "zz")) == ""


def test_it_is_no_plugin_that_anybody_chooses(here):
    install(here, "cmd-tells", TELLS)
    assert not [info for info in discover(disabled=True) if info.distribution == "cmd-tells"]


def test_without_the_package_nothing_is_known(monkeypatch):
    monkeypatch.setenv("RLHF_DISABLE_PLUGINS", "translate")
    assert of_flag("pretrain") == ""
