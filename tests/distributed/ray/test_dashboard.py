"""The setting ``ray.dashboard``: what is refused before Ray starts. ``tests/outside/test_ray_dashboard.py`` has a real one."""

from __future__ import annotations

import sys

import pytest

from rlhf_host.distributed.ray.cluster import RayCluster
from rlhf_host.distributed.ray.plugin import Ray, require_dashboard
from rlhf_host.errors import UserError

pytest.importorskip("ray")


def test_it_is_off_unless_it_is_asked_for(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray.dashboard.optional_deps", None)
    require_dashboard(Ray.Options())
    require_dashboard(Ray.Options(address="auto"))


@pytest.mark.parametrize("asks", [lambda options: RayCluster(options).start(), require_dashboard])
def test_what_it_needs_is_named_with_the_install_line(monkeypatch, asks):
    monkeypatch.setitem(sys.modules, "ray.dashboard.optional_deps", None)
    with pytest.raises(
        UserError, match=r"what comes with ray\[default\] \(.* is missing\): pip install 'rlhf-host\[cluster\]'"
    ):
        asks(Ray.Options(dashboard=True))


def test_a_cluster_that_exists_is_left_as_it_is():
    with pytest.raises(UserError, match=r"for a cluster that the run makes, and ray\.address joins one: leave one of them out"):
        RayCluster(Ray.Options(dashboard=True, address="127.0.0.1:1")).start()
