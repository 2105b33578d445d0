"""The contract suites against plugins that break each rule on purpose: every check reports its own."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from rlhf_authoring import algorithm_contract, run_contract
from rlhf_authoring.contracts import kernel_cases, suite, traces
from rlhf_authoring.contracts.suite import HOOKED, all_checks

from rlhf_host import UserError

from . import broken_algorithms, broken_extensions, broken_kernels, broken_offline, broken_rewards
from .breaking import broken_source
from .good_plugins import AGENT, ALGO, FILTER, GOOD, OWN_LOOP, PAIRS

TABLE = [
    *broken_algorithms.TABLE,
    *broken_offline.TABLE,
    *broken_rewards.TABLE,
    *broken_extensions.TABLE,
    *broken_kernels.TABLE,
]

INSTALLED_APART = {"entry_point_is_unique", "host_dependency_is_bounded", "has_a_summary"}
"""Broken in the metadata or by what is missing: in tests of their own below."""


def failed(results):
    return {result.name for result in results if result.passed is False}


@pytest.mark.parametrize("name", GOOD)
def test_a_good_plugin_passes_every_check(name, install):
    kind, source = GOOD[name]
    install(kind, source)
    results = run_contract(kind, "made_up")
    assert [result for result in results if not result.passed] == []
    assert len(results) >= 15


@pytest.mark.parametrize("case", TABLE, ids=[f"{case.check}-{number}" for number, case in enumerate(TABLE)])
def test_each_check_reports_the_plugin_that_breaks_it_and_no_other_does(case, install, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)  # one of them writes where it was started
    monkeypatch.setattr(traces, "PATIENCE_S", 0.3)
    monkeypatch.setattr(kernel_cases, "PRECISIONS", kernel_cases.PRECISIONS[:1])
    install(case.plugin[0], broken_source(case))
    if case.check != "import_is_light":  # it starts an interpreter, and no other case changes what is imported
        monkeypatch.setattr(suite, "CHECKS", [check for check in all_checks() if check.name != "import_is_light"])
    results = run_contract(case.plugin[0], "made_up", **case.settings)
    assert failed(results) == {case.check, *case.also}
    assert all(result.message for result in results if not result.passed)


def test_every_check_is_broken_by_some_plugin():
    everywhere = [check.name for check in all_checks()]
    assert len(set(everywhere)) == len(everywhere)
    names = {check.name for check in all_checks((*HOOKED, "kernels", "weight_sync"))}
    assert {case.check for case in TABLE} | INSTALLED_APART == names


def test_an_agent_that_only_the_context_ends_is_endless(install):
    bound = ' or episode.state["turns"] >= self.options.max_turns'
    install("agent", AGENT.replace(bound, "").replace("max_turns: int", "other: int"))
    assert failed(run_contract("agent", "made_up")) == {"episodes_end"}


def test_an_agent_may_say_twice_why_the_engine_failed(install):
    """As a framework does that wraps the error of a client, which wraps that of the engine."""
    source = OWN_LOOP.replace("await policy.generate(tokens)", "await self.ask(policy, tokens)")
    wraps = """
    async def ask(self, policy, tokens):
        try:
            return await self.client(policy, tokens)
        except ConnectionError as error:
            raise RuntimeError("no answer") from error

    async def client(self, policy, tokens):
        try:
            return await policy.generate(tokens)
        except Exception as error:
            raise ConnectionError("no server") from error

    @hookimpl
    def agent_close(self, episode):
        episode.state = None
"""
    install("agent", source + wraps)
    assert [result for result in run_contract("agent", "made_up") if not result.passed] == []


def test_an_algorithm_gets_the_checks_of_the_data_that_it_trains_on(install):
    install("algo", PAIRS)
    offline = {result.name for result in run_contract("algo", "made_up")}
    assert {"loss_has_the_sign_of_the_label", "made_rows_are_of_the_data"} <= offline
    assert not offline & {check.name for check in all_checks(suite.ONLINE)}


def test_every_check_states_its_rule():
    assert [check.name for check in all_checks() if not check.rule] == []


def test_two_distributions_of_one_name_are_reported(install):
    install("extension", FILTER)
    install("extension", FILTER, distribution="another-plugin")
    assert failed(run_contract("extension", "made_up")) == {"entry_point_is_unique"}
    assert failed(run_contract("extension", "another-plugin:made_up")) == {"entry_point_is_unique"}


def test_a_plugin_that_is_not_installed_fails_one_check_and_leaves_the_rest_unjudged():
    results = run_contract("algo", "never_heard_of")
    assert failed(results) == {"entry_point_is_unique"}
    assert {result.passed for result in results} == {False, None}


@pytest.mark.parametrize("requires", ["rlhf-host>=0.9", "rlhf-host", "torch"])
def test_a_dependency_without_an_upper_bound_is_reported(requires, install):
    install("extension", FILTER, requires=requires)
    assert failed(run_contract("extension", "made_up")) == {"host_dependency_is_bounded"}


def test_a_plugin_without_a_word_about_itself_is_reported(install):
    install("extension", FILTER.replace('"""A plugin for tests."""\n', "").replace('    """What the tests are about."""\n', ""))
    assert failed(run_contract("extension", "made_up")) == {"has_a_summary"}


# --- the pytest class ---------------------------------------------------------------------------


def test_one_line_gives_a_class_with_a_test_per_check(install):
    install("algo", ALGO)
    contract = algorithm_contract("made_up")
    tests = {name.removeprefix("test_") for name in dir(contract) if name.startswith("test_")}
    assert tests == {result.name for result in run_contract("algo", "made_up")}
    assert contract.test_needs_are_pure.__doc__


def test_a_plugin_that_is_not_installed_fails_one_test_and_skips_the_rest():
    tests = algorithm_contract("never_heard_of")()
    with pytest.raises(AssertionError, match="no algo named 'never_heard_of' is installed"):
        tests.test_entry_point_is_unique()
    with pytest.raises(pytest.skip.Exception, match="a more basic check fails"):
        tests.test_import_is_light()


def test_pytest_names_the_broken_rule(install, tmp_path):
    site = install("algo", ALGO.replace("values = -advantages", "values = advantages"))
    file = tmp_path / "test_it.py"
    file.write_text('from rlhf_authoring import algorithm_contract\n\nTestContract = algorithm_contract("made_up")\n')
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", tmp_path, file]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(site)}, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "TestContract::test_raising_a_good_token_lowers_the_loss" in done.stdout
    assert "check the loss's sign" in done.stdout
    assert "1 failed" in done.stdout


@pytest.mark.parametrize("missing", ["pytest", "hypothesis"])
def test_a_missing_test_library_is_named_with_the_way_to_get_it(missing, monkeypatch):
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(UserError, match=rf"^contract suites need {missing}: pip install 'rlhf-host\[testing\]'$"):
        algorithm_contract("rloo")


def test_importing_the_testing_package_is_light():
    program = (
        "import sys, rlhf_authoring; from rlhf_authoring import algorithm_contract, run_contract\n"
        "print([name for name in ('torch', 'transformers', 'pytest', 'hypothesis') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
