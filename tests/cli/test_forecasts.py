"""Packages say something of a run before it starts: entry points in ``rlhf.forecasts``, asked by a dry run, and not before."""

from __future__ import annotations

import pytest

from rlhf_host.cli.dry_run import told
from rlhf_host.config.schema import RunConfig
from rlhf_host.errors import RunError, UserError
from rlhf_host.plugins.discovery import discover

TELLS = "def forecast(config, manager):\n    return [f'{config.train.batch_size} prompts', str(manager)]\n"


def install(site, name, source):
    module = name.replace("-", "_")
    site.install(name, {"rlhf.forecasts": f"{name} = {module}:forecast"}, {f"{module}.py": source})


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    monkeypatch.setenv("RLHF_DISABLE_PLUGINS", "rlhf-plan:plan")


def test_lines_of_all_packages_in_the_order_of_names(here):
    install(here, "fore-b", "def forecast(config, manager):\n    yield 'of b'\n")
    install(here, "fore-a", TELLS)
    assert [*told("forecast", RunConfig(), "the manager")] == ["32 prompts", "the manager", "of b"]
    assert not [info for info in discover(disabled=True) if info.distribution.startswith("fore-")]


@pytest.mark.parametrize(
    ("body", "kind", "said"),
    [
        ("raise UserError('it does not fit: take less')", UserError, "it does not fit: take less"),
        ("raise ValueError('broken')", RunError, "forecast 'fore-a' from fore-a 1.0 failed in its call: ValueError: broken"),
        ("return 'one'", RunError, "failed in its call: TypeError: it must return lines, a list of texts"),
        ("return [1]", RunError, "failed in its call: TypeError: it must return lines, a list of texts"),
        ("return 7", RunError, "forecast 'fore-a' from fore-a 1.0 failed in its call: TypeError: 'int' object is not iterable"),
    ],
)
def test_a_run_that_would_fail_and_a_package_that_does(here, body, kind, said):
    install(here, "fore-a", f"from rlhf_host import UserError\ndef forecast(config, manager):\n    {body}\n")
    with pytest.raises(kind) as caught:
        list(told("forecast", RunConfig(), None))
    assert type(caught.value) is kind
    assert said in str(caught.value)


def test_a_dry_run_prints_it_and_nothing_else_imports_it(site, tiny_model):
    install(site, "fore-a", f"print('imported')\n{TELLS}")
    words = (
        "train",
        "--algo",
        "rloo",
        "--reward",
        "format",
        "--reward.format.min-tokens",
        "1",
        "--actor.model",
        tiny_model,
        "--data",
        "arithmetic",
    )
    assert "imported" not in site.rlhf(*words, "--print-config").stdout
    done = site.rlhf(*words, "--dry-run")
    assert "32 prompts\n" in done.stdout, done.stderr
