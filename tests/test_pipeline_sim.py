"""The simulation of sampling ahead: what it asserts, and what it compares."""

from __future__ import annotations

import importlib.util
import math
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from rlhf_host.rollouts.admission import Admission

BENCHMARK = Path(__file__).resolve().parents[1] / "benchmarks" / "pipeline_sim.py"


@pytest.fixture(scope="module")
def sim():
    spec = importlib.util.spec_from_file_location("pipeline_sim", BENCHMARK)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.fixture
def setup(sim):
    return sim.Setup(batch=8, depth=1, engines=3, steps=8, slots=8, train_s=60.0, sync_s=2.0, dropped=0.3)


@pytest.mark.parametrize("in_flight", [False, True])
@pytest.mark.parametrize("depth", [0, 1, 4])
def test_engines_are_lost_and_no_draw_is(sim, setup, depth, in_flight):
    steps = 4 + 2 * depth
    simulation = sim.Simulation(replace(setup, depth=depth, steps=steps, in_flight=in_flight, lost_every_s=400.0))
    figures = simulation.run()
    assert any(engine.life for engine in simulation.engines)
    assert len(simulation.trained) == steps * setup.batch
    assert figures["staleness_max"] == depth
    assert figures["dropped"] == len(simulation.fate) - len(simulation.trained)
    assert figures["over_max"] > 1


def test_draws_that_are_passed_cost_less_age_than_depth(sim, setup):
    """Everybody is trained, also the longest."""
    base = replace(setup, steps=24, in_flight=True, train_s=20.0, lost_every_s=400.0)
    deep, passing = (sim.Simulation(replace(base, depth=depth, max_staleness=4)).run() for depth in (4, 1))
    assert deep["staleness_max"] == 4
    assert 1 < passing["staleness_max"] <= 4
    assert passing["staleness_mean"] < deep["staleness_mean"] - 1
    assert passing["staleness_length"] > 0.3
    assert passing["trained_over_drawn"] == pytest.approx(deep["trained_over_drawn"], abs=0.05)


def test_the_same_seed_gives_the_same_run(sim, setup):
    first, second = (sim.Simulation(replace(setup, lost_every_s=400.0)) for _ in range(2))
    assert first.run()["wall_s"] == second.run()["wall_s"]
    assert first.trained == second.trained


def test_trained_groups_are_as_long_as_those_that_were_drawn(sim, setup):
    figures = sim.Simulation(replace(setup, dropped=0.0, steps=30, in_flight=True)).run()
    assert figures["trained_over_drawn"] == 1


def test_a_place_that_is_free_too_early_is_noticed(sim, setup):
    class FreesEarly(Admission):
        def take(self):
            taken = super().take()
            self.held -= self._training * self.batch
            self._training = False
            return taken

    setup = replace(setup, dropped=0.5, steps=40, in_flight=True, shape=2.0)
    with pytest.raises(AssertionError, match="2 versions old"):
        sim.Simulation(setup, FreesEarly(setup.batch, 1, 40, 9 * setup.batch)).run()


def test_a_depth_above_one_needs_weights_that_change_under_requests(sim, setup):
    setup = replace(setup, turns=1, dropped=0.0, steps=40, slots=64)

    def wall(depth, in_flight):
        return sim.Simulation(replace(setup, depth=depth, steps=40 + 2 * depth, in_flight=in_flight)).run()["wall_s"]

    assert wall(4, False) == pytest.approx(wall(1, False), rel=0.05)
    assert wall(4, True) < 0.7 * wall(1, True)


def test_batches_do_not_depend_on_when_what_was_dropped_is_replaced(sim, setup):
    setup = replace(setup, depth=0, turns=1, dropped=0.5, steps=12)
    rule = sim.Admission(setup.batch, 0, setup.steps, 9 * setup.batch)
    runs = [sim.Simulation(setup, rule), sim.Simulation(replace(setup, rounds=True)), sim.Simulation(setup)]
    at_once, in_rounds, in_advance = (run.run()["wall_s"] for run in runs)
    assert in_advance < at_once < in_rounds
    first, *others = ([one.ordinal for one in run.trained] for run in runs)
    assert all(other == first for other in others)


def test_the_bound_by_throughput_is_reached_with_equal_lengths(sim):
    setup = sim.Setup(batch=8, depth=1, engines=1, steps=22, slots=64, turns=1, shape=0.01, in_flight=True)
    setup = replace(setup, prefill_rate=math.inf, train_s=setup.rollout_s)
    assert 1 <= sim.Simulation(setup).run()["over_max"] < 1.1
