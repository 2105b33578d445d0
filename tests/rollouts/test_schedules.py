"""Random schedules, a few of every mode: none hangs, every draw is used once, none is too old, and the engine expects nobody when
all is over. ``scripts/schedules.py`` plays thousands."""

from __future__ import annotations

import asyncio
import importlib.util
import logging

import pytest

from rlhf_host.rollouts.pipeline import Pipeline

from . import schedules
from .schedules import MODES, play
from .virtual_time import Hang, run

SCHEDULES = 20
EXACT = ("rounds", "fixed-1", "fixed-4")


@pytest.fixture(autouse=True)
def _quiet():
    logging.disable(logging.CRITICAL)  # agents fail by the hundred
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("mode", MODES)
def test_no_schedule_hangs(tokenizer, mode):
    if "pool" in mode and importlib.util.find_spec("ray") is None:
        pytest.skip("a pool's engines are Ray's actors")
    ended = [play(mode, seed, tokenizer) for seed in range(SCHEDULES)]
    assert sum(how == "finished" for _, how in ended) > SCHEDULES / 2
    assert any(one.lives > 1 for one, _ in ended), "some were interrupted"


@pytest.mark.parametrize("mode", EXACT)
def test_a_fixed_schedule_does_not_depend_on_time_or_interrupts(tokenizer, mode):
    """Tokens say in which wave they were sampled: waves are the same, whichever agent is faster, and after a kill."""
    for seed in range(SCHEDULES):
        one, other = (play(mode, seed, tokenizer, pace, exact=True) for pace in (0, 1))
        assert one[1] == other[1]
        assert one[0].steps == other[0].steps, f"schedule {seed}"


class WakesNobody(Pipeline):
    """The defect: what is over is taken in, and whoever waits for a batch is not told."""

    def _over(self, ordinal, one, task):
        told, self._news = self._news, asyncio.Event()
        super()._over(ordinal, one, task)
        self._news = told


class IsNeverOver(Pipeline):
    """The defect: of what some draws played nothing is heard."""

    def _over(self, ordinal, one, task):
        if ordinal % 5 != 3:
            super()._over(ordinal, one, task)


@pytest.mark.parametrize("defect", [WakesNobody, IsNeverOver])
def test_a_waiter_that_nobody_wakes_is_noticed_at_once(tokenizer, monkeypatch, defect):
    monkeypatch.setattr(schedules, "Pipeline", defect)
    with pytest.raises(Hang, match=r"the rollout cannot go on: .*This is a bug in rlhf-host"):
        [play("held-1", seed, tokenizer) for seed in range(20)]


def test_a_loop_in_which_nothing_is_left_to_do_hangs():
    async def waits():
        await asyncio.sleep(5)
        await asyncio.Event().wait()

    with pytest.raises(Hang, match=r"at 5\.000 s"):
        run(waits)
