"""Engines that sleep beside their workers, through the real command line; what each phase needs is in test_device_phases.py."""

from __future__ import annotations

import pytest

from .test_whole_stack import trained

pytestmark = pytest.mark.timeout(900)


def test_two_engines_that_sleep_take_turns_with_their_workers(rlhf, tmp_path):
    """They are compared with the trainer at each sync, and each checkpoint copies between a sync and the next rollout."""
    more = ["--engine.sleep", "true", "--sync.verify", "on", "--checkpoint.every", "1"]
    steps = trained(rlhf, tmp_path, *more, "--placement", "actor+rollout=2")
    assert steps[-1]["version"] == 4
