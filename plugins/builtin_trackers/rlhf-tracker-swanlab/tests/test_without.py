"""The package without SwanLab."""

from __future__ import annotations

import sys

import pytest
from rlhf_authoring.trackers import SmallRun
from rlhf_tracker_swanlab import SwanLab

from rlhf_host import PluginError


def test_a_missing_package_is_named_with_its_install_line(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "swanlab", None)
    with pytest.raises(PluginError, match=r"pip install 'rlhf-tracker-swanlab\[swanlab\]'"):
        SwanLab(SwanLab.Options()).run_started(SmallRun(tmp_path).context())
