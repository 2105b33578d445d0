"""The package without SwanLab."""

from __future__ import annotations

import sys

import pytest
from rlhf_tracker_swanlab import SwanLab

from rlhf_host import PluginError


def test_a_missing_package_is_named_with_its_install_line(context, monkeypatch):
    monkeypatch.setitem(sys.modules, "swanlab", None)
    with pytest.raises(PluginError, match=r"pip install 'rlhf-tracker-swanlab\[swanlab\]'"):
        SwanLab(SwanLab.Options()).run_started(context())
