"""Slow tests that a change reaches: ``scripts/reached.py``, on this tree."""

from __future__ import annotations

from pathlib import Path

import pytest

from .scripts_as_modules import load_script
from .tiers import slow_files

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def reached():
    return load_script("scripts/reached.py")


@pytest.fixture
def distances(reached):
    return lambda *changed, day=0: dict(reached.reached(changed, slow_files(ROOT), day))


def test_a_changed_package_reaches_its_tests_those_that_require_it_and_those_that_name_its_plugins(distances):
    found = distances("plugins/builtin_rewards/rlhf-plugin-code-exec/src/rlhf_plugin_code_exec/__init__.py")
    assert found["plugins/builtin_rewards/rlhf-plugin-code-exec/tests/test_forms.py"] == 1
    assert found["plugins/builtin_agents/rlhf-plugin-shell/tests/test_harbor.py"] == 2
    found = distances("plugins/builtin_algos/rlhf-plugin-dpo/src/rlhf_plugin_dpo/__init__.py")
    assert found["tests/training/test_rows.py"] == 3, 'it names "dpo"'


def test_a_changed_test_reaches_itself_and_a_shared_file_its_folder(distances):
    assert [file for file, rule in distances("tests/cli/test_push.py").items() if rule == 0] == ["tests/cli/test_push.py"]
    assert distances("tests/models/miniatures.py")["tests/models/test_flex.py"] == 0


def test_a_change_of_the_host_reaches_its_room_then_the_rooms_above_and_every_contract(distances):
    found = distances("rlhf_host/models/layouts.py")
    assert found["tests/models/test_flex.py"] == 1
    assert found["tests/distributed/split/test_slices.py"] == 4
    assert found["tests/training/test_rows.py"] == 4
    assert found["plugins/builtin_algos/rlhf-plugin-rloo/tests/test_contract.py"] == 4
    found = distances("rlhf_host/distributed/deepspeed/backend.py")
    assert found["tests/distributed/deepspeed/test_ray_autotp.py"] == 1
    assert found["tests/training/test_lora.py"] == 3, "below it, and it names deepspeed"
    above = distances("rlhf_host/training/loop.py")
    assert above.get("tests/models/test_flex.py", 5) == 5, "models are below training"


def test_within_a_week_every_file_has_its_turn(distances):
    turns = [distances(day=day) for day in range(7)]
    assert set().union(*turns) == set(slow_files(ROOT))
    assert sum(map(len, turns)) == len(slow_files(ROOT))


def test_those_nearest_come_first(reached):
    rules = [rule for _, rule in reached.reached(["rlhf_host/models/layouts.py"], slow_files(ROOT), 3)]
    assert rules == sorted(rules)
    assert rules[0] == 1
