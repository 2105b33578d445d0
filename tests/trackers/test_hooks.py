"""Every tracker answers only hooks that exist, with arguments that exist."""

from __future__ import annotations

import pluggy
import pytest

from rlhf_host import hookspecs
from rlhf_host.trackers.console import Console
from rlhf_host.trackers.jsonl import JsonLines
from rlhf_host.trackers.tensorboard import TensorBoard
from rlhf_host.trackers.wandb import WandB


@pytest.mark.parametrize("tracker", [Console, JsonLines, TensorBoard, WandB])
def test_a_tracker_fits_the_contract(tracker):
    manager = pluggy.PluginManager(hookspecs.PROJECT)
    manager.add_hookspecs(hookspecs)
    plugin = tracker(tracker.Options() if hasattr(tracker, "Options") else None)
    manager.register(plugin)
    manager.check_pending()
    answered = {caller.name for caller in manager.get_hookcallers(plugin) or []}
    assert {"run_started", "log_metrics", "log_trajectories", "run_finished"} <= answered
