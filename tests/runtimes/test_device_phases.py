"""Sharing of devices: who must be on them for what."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("ray")

from rlhf_host.runtimes.ray_runtime import RayRuntime


@pytest.mark.parametrize("shared", [True, False])
def test_workers_are_on_their_devices_before_they_copy_what_a_checkpoint_gets(monkeypatch, shared):
    done = []
    monkeypatch.setattr(RayRuntime, "_everywhere", staticmethod(lambda groups, method, *rest, **_: done.append(method)))
    runtime = RayRuntime.__new__(RayRuntime)
    runtime.trainer = SimpleNamespace(trained=[])
    runtime._phases = SimpleNamespace(train=lambda: done.append("train")) if shared else None
    write = runtime.save_state(Path("state"))
    assert done == ["train", "copy"] if shared else ["copy"]
    write()
    assert done[-1] == "write", "while engines sample again"
