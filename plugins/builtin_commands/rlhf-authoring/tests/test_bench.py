"""``rlhf plugins bench``: which hooks are measured, and that time and memory are what the hooks take."""

from __future__ import annotations

import json
from importlib.metadata import version

import pytest
from rlhf_authoring.bench import bench
from rlhf_authoring.contracts.subject import Subject

MIB = 2**20

COSTLY = '''
"""Hooks that cost a known amount."""
import time
from rlhf_host import Needs, hookimpl

class Costly:
    def __init__(self, options): ...
    @hookimpl
    def transform_rewards(self, experience, rewards):
        import torch
        held = torch.zeros(5 * 2**20, dtype=torch.uint8)
        return rewards + held[0]
    @hookimpl
    def keep_group(self, group):
        held = bytearray(3 * 2**20)
        time.sleep(0.02)
        return len(held) > 0
    @hookimpl
    def shape_rewards(self, experience):
        raise RuntimeError("out of ideas")
    @hookimpl
    def run_started(self, context): ...
'''


@pytest.fixture
def costs(site):
    def measure(name, *arguments, code=0):
        done = site.rlhf("plugins", "bench", name, "--rows", "16", "--tokens", "32", "--json", *arguments)
        assert done.returncode == code, done.stdout + done.stderr
        (report,) = json.loads(done.stdout)
        return {cost["hook"]: cost for cost in report["hooks"]}

    return measure


def test_time_and_memory_are_the_hooks_own(costs, site):
    site.install("cli-costly", {"rlhf.extensions": "costly = cli_costly:Costly"}, {"cli_costly.py": COSTLY})
    # What fails is told, and the others are measured.
    found = costs("costly", code=1)
    assert list(found) == ["run_started", "keep_group", "transform_rewards", "shape_rewards"]
    assert found["run_started"]["problem"] == "needs a run"
    assert "failed in shape_rewards: RuntimeError: out of ideas" in found["transform_rewards"]["problem"]
    assert found["keep_group"]["median_s"] >= 0.02
    assert 3 * MIB <= found["keep_group"]["peak_bytes"] < 3.1 * MIB
    assert found["keep_group"]["calls"] >= 3


def test_tensors_count(costs, site):
    quiet = COSTLY[: COSTLY.index("    @hookimpl\n    def shape_rewards")]
    site.install("cli-costly", {"rlhf.extensions": "costly = cli_costly:Costly"}, {"cli_costly.py": quiet})
    found = costs("costly")["transform_rewards"]
    assert 5 * MIB <= found["peak_bytes"] < 5.1 * MIB
    assert found["size"] == "16 × 32 tokens"


@pytest.mark.usefixtures("others")
def test_an_algorithm_is_measured_hook_by_hook_and_its_loss_with_the_backward_pass(costs, site):
    found = costs("ppo")
    assert list(found) == [
        "needs",
        "compute_advantages",
        *(f"compute_loss ({role}){also}" for role in ("actor", "critic") for also in ("", " and backward")),
    ]
    assert all(cost["median_s"] > 0 and not cost["problem"] for cost in found.values())
    # The advantages alone are 16 × 32 numbers of 4 bytes.
    assert found["compute_advantages"]["peak_bytes"] >= 16 * 32 * 4
    table = site.rlhf("plugins", "bench", "rloo", "--rows", "8", "--tokens", "8", COLUMNS="120").stdout.splitlines()
    assert table[0] == f"algo rloo from rlhf-plugin-rloo {version('rlhf-plugin-rloo')}"
    assert table[2].split() == ["HOOK", "TIME", "MEMORY", "CALLS", "SIZE"]
    assert any(line.startswith("compute_advantages ") and line.endswith("8 × 8 tokens") for line in table)


@pytest.mark.parametrize(
    ("kind", "name", "hook", "size"),
    [
        ("reward", "math_verifier", "score", "16 trajectories of 2000 characters, 2 groups at once"),
        ("agent", "single_turn", "agent_reset, agent_step", "16 episodes at once"),
        ("tasks", "arithmetic", "load_tasks", "the first 10000 tasks"),
        ("tracker", "jsonl", "log_trajectories", "16 trajectories"),
        ("extension", "dynamic_filtering", "keep_group", "a group of 8"),
        ("extension", "tis", "importance_weights", "16 × 32 tokens"),
    ],
)
@pytest.mark.usefixtures("others")
def test_other_kinds_are_called_as_a_run_calls_them(kind, name, hook, size):
    cost = {cost.hook: cost for cost in bench(Subject(kind, name), rows=16, tokens=32)}[hook]
    assert (cost.problem, cost.size) == ("", size)
    assert cost.median_s > 0


def test_a_plugin_that_cannot_be_built_is_told_in_one_line(site):
    site.install("cli-costly", {"rlhf.extensions": "costly = cli_costly:Costly"}, {"cli_costly.py": "raise OSError('gone')"})
    done = site.rlhf("plugins", "bench", "costly")
    assert done.returncode == 2
    assert done.stderr == ("Error: extension 'costly' from cli-costly 1.0: importing cli_costly failed: OSError: gone\n")
