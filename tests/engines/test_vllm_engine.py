"""What the vLLM engine says of itself, without vLLM."""

import time
from types import SimpleNamespace

import pytest

from rlhf_host.engines.vllm_engine import STEP_S, VLLMEngine


@pytest.mark.parametrize(
    ("core_died", "failure", "step_s", "closed", "dead"),
    [
        (True, None, None, False, True),
        (False, None, None, False, False),
        (False, RuntimeError("a step failed"), None, False, True),
        (False, None, 5.0, False, False),
        (False, None, 2 * STEP_S, False, True),
        (True, None, None, True, False),
    ],
)
def test_an_engine_tells_that_its_core_died_or_was_stopped_in_a_step(core_died, failure, step_s, closed, dead):
    engine = object.__new__(VLLMEngine)
    engine.multiprocess, engine._failure, engine._closed = True, failure, closed
    engine._step_began = None if step_s is None else time.perf_counter() - step_s
    engine.llm = SimpleNamespace(engine_core=SimpleNamespace(resources=SimpleNamespace(engine_dead=core_died)))
    assert engine.dead is dead
