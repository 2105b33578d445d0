"""Every tracker of the host answers only hooks that exist, with arguments that exist, and is imported without torch."""

from __future__ import annotations

import subprocess
import sys

import pluggy
import pytest

from rlhf_host import hookspecs
from rlhf_host.trackers.console import Console
from rlhf_host.trackers.jsonl import JsonLines


@pytest.mark.parametrize("tracker", [Console, JsonLines])
def test_a_tracker_fits_the_contract(tracker):
    manager = pluggy.PluginManager(hookspecs.PROJECT)
    manager.add_hookspecs(hookspecs)
    plugin = tracker(tracker.Options() if hasattr(tracker, "Options") else None)
    manager.register(plugin)
    manager.check_pending()
    answered = {caller.name for caller in manager.get_hookcallers(plugin) or []}
    assert {"run_started", "log_metrics", "log_trajectories", "run_finished"} <= answered


def test_importing_trackers_imports_no_torch():
    code = """
import sys
from rlhf_host.trackers import console, jsonl, numbers
print("torch" in sys.modules)
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert found.stdout == "False\n", found.stderr
