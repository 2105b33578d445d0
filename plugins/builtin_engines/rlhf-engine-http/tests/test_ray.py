"""The engine in a process of Ray."""

import pytest

import rlhf_host
from rlhf_host import PluginError
from rlhf_host.installed import find

pytest.importorskip("ray")


def test_a_run_on_ray(tiny, server, tmp_path):
    try:
        find("algo", "rloo")
    except PluginError:
        pytest.skip("on Ray an algorithm is an installed package, and none is")
    run = rlhf_host.train(
        algo="rloo",
        rewards=lambda text: float(sum(character in "aeiou" for character in text)),
        model=tiny,
        data=[{"prompt": "1+1="}, {"prompt": "2+2="}],
        engine={"name": "http", "urls": server.url},
        runtime="ray",
        placement=["actor=1:cpu", "rollout=1:cpu"],
        rollout={"n": 4, "max_new_tokens": 6},
        train={"steps": 3, "batch_size": 2},
        lr=0.01,
        run_dir=tmp_path / "run",
    )
    assert [row["version"] for row in run.metrics] == [1, 2, 3]
    assert max(row["mismatch/max"] for row in run.metrics) < 1e-4
    assert run.metrics[0]["grad_norm"] > 0
    assert len(server.loaded) == 4
