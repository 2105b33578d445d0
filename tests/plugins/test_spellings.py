"""What people write instead of a plugin's name is what plugins' metadata says."""

from __future__ import annotations

import pytest

from rlhf_host import PluginError
from rlhf_host.plugins import discovery
from rlhf_host.plugins.recommended import recommended
from rlhf_host.plugins.selection import find
from rlhf_host.plugins.spellings import spellings, written_out, written_short

CODE = {"spelt.py": ""}


def without(distribution, monkeypatch):
    """As if it were not installed."""
    scan = discovery._scan
    monkeypatch.setattr(discovery, "_scan", lambda *key: [info for info in scan(*key) if info.distribution != distribution])


@pytest.mark.parametrize(
    ("kind", "spec", "plugin", "options"),
    [
        ("reward", "http://a/x", "http_reward", {"urls": ["http://a/x"]}),
        ("reward", "https://a/x,http://b", "http_reward", {"urls": ["https://a/x", "http://b"]}),
        ("reward", "dir/f.py:len", "file", {"path": "dir/f.py", "function": "len"}),
        ("reward", "f.py", "file", {"path": "f.py"}),
        ("agent", "f.py:Play", "file", {"path": "f.py", "function": "Play"}),
        ("tasks", "f.py:rows", "file", {"file": "f.py", "function": "rows"}),
    ],
)
def test_addresses_and_files_choose_the_plugin_that_claims_them(kind, spec, plugin, options):
    assert written_out(kind, spec) == (plugin, options)
    if kind != "tasks":
        assert written_short(kind, plugin, options) == spec


@pytest.mark.parametrize(
    ("kind", "spec"), [("tasks", "rows.jsonl"), ("tasks", "http://a"), ("reward", "d:format"), ("algo", "f.py")]
)
def test_all_else_is_a_name(kind, spec):
    assert written_out(kind, spec) == (spec, {})


def test_a_package_claims_its_own(here):
    groups = {"rlhf.tasks": "bucket = spelt:X\ntable = spelt:X"}
    groups["rlhf.tasks.spellings"] = "s3 = bucket:addresses\n.xlsx = table:book.sheet"
    groups["rlhf.tasks.recommended"] = "answers = table"
    here.install("spelt-a", groups, CODE)
    assert written_out("tasks", "s3://b/k@2") == ("bucket", {"addresses": ["s3://b/k@2"]})
    assert written_out("tasks", "b.xlsx:May") == ("table", {"book": "b.xlsx", "sheet": "May"})
    assert written_out("reward", "s3://b/k") == ("s3://b/k", {})
    assert recommended("tasks", "answers") == "table"


def test_two_that_claim_the_same_are_named(here):
    here.install("spelt-a", {"rlhf.tasks": "a = spelt:X", "rlhf.tasks.spellings": "s3 = a:at"}, CODE)
    here.install("spelt-b", {"rlhf.tasks": "b = spelt:X", "rlhf.tasks.spellings": "s3 = b:at"}, CODE)
    with pytest.raises(PluginError, match="tasks plugins 'a' and 'b' both answer to 's3': leave one out with --disable"):
        written_out("tasks", "s3://b/k")


def test_an_address_says_what_to_install(monkeypatch):
    without("rlhf-plugin-http-reward", monkeypatch)
    name, options = written_out("reward", "http://a/x")
    assert options == {"urls": ["http://a/x"]}
    with pytest.raises(PluginError, match=r"pip install .*rlhf-plugin-http-reward"):
        find("reward", name)


def test_a_disabled_plugin_still_answers(monkeypatch):
    monkeypatch.setenv(discovery.DISABLE, "http_reward")
    with pytest.raises(PluginError, match="reward 'http_reward' is disabled"):
        find("reward", written_out("reward", "http://a/x")[0])


def test_what_chooses_another_kind_is_said():
    with pytest.raises(PluginError, match=r"'http://a/x' is written for reward, not for algo: give the name of an algo"):
        find("algo", "http://a/x")
    with pytest.raises(PluginError, match=r"'f\.py' is no file with one class that has hooks or options: write f\.py:NAME"):
        find("algo", "f.py")


def test_tools_of_an_environment_are_for_the_agent_that_claims_them(monkeypatch):
    assert spellings("agent")["environment.tools"].plugin == "multi_turn"
    assert recommended("extension", "mismatch") == "tis"


def test_nobody_is_recommended_without_a_plugin_that_says_so():
    assert recommended("tracker", "prompts") == "NAME"
