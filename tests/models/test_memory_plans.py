"""Packages decide what passes keep: entry points in ``rlhf.memory_plans``, asked where a setting leaves it to memory."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from rlhf_host.config.schema import RoleConfig, TrainConfig
from rlhf_host.errors import RunError
from rlhf_host.models.memory_plans import memory_plan


def install(site, name, body):
    source = f"def plan(roles, train, ranks):\n    {body}\n"
    site.install(
        name, {"rlhf.memory_plans": f"{name} = {name.replace('-', '_')}:plan"}, {f"{name.replace('-', '_')}.py": source}
    )


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    monkeypatch.setenv("RLHF_DISABLE_PLUGINS", "rlhf-plan:plan")


def planned(layers, device="cpu", logits="auto"):
    passes = SimpleNamespace(device=torch.device(device))
    roles = {"actor": SimpleNamespace(passes=passes, settings=RoleConfig(gradient_checkpointing=layers))}
    return memory_plan(roles, TrainConfig(keep_logits=logits), None)


def test_the_first_package_decides(here):
    install(here, "memo-b", "return 'b'")
    install(here, "memo-a", "return (*roles, train.keep_logits, ranks)")
    assert planned("auto") == ("actor", "auto", None)
    assert planned(False, "cuda") == ("actor", "auto", None)


@pytest.mark.parametrize(("layers", "device", "logits"), [(False, "cpu", "auto"), (True, "cuda", "off"), (3, "cuda", "on")])
def test_where_settings_say_everything_none_is_asked(here, layers, device, logits):
    install(here, "memo-a", "raise ValueError('asked')")
    with planned(layers, device, logits)("a role") as nothing:
        assert nothing == "a role"


def test_a_package_that_fails_is_named(here):
    install(here, "memo-a", "raise ValueError('broken')")
    with pytest.raises(RunError, match=r"memory_plan 'memo-a' from memo-a 1\.0 failed in its call: ValueError: broken"):
        planned("auto")


def test_without_a_package_nothing_is_decided():
    with planned(False, "cuda")("a role"):
        pass
