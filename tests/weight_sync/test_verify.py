"""The probe after a sync: agreement passes, what differs does not."""

from __future__ import annotations

import asyncio

import pytest
from rlhf_authoring.engines import ScriptedEngine
from rlhf_authoring.models import tiny_tokenizer

from rlhf_host.config.schema import SyncChoice
from rlhf_host.errors import LostError, RunError
from rlhf_host.protocols import SyncTarget
from rlhf_host.weight_sync.verify import probe_prompt, verified_syncs, verify_sync

PROMPT = probe_prompt(tiny_tokenizer(), 512)


def test_an_engine_that_dies_in_the_probe_is_left_out():
    class Dead(ScriptedEngine):
        async def generate(self, token_ids, sampling, key):
            raise LostError("engine e0 has died")

    async def logprobs(rows):
        return [[-0.25] * len(row.segments[1].token_ids) for row in rows]

    dead, alive = (SyncTarget(kind.__name__, kind(lambda ids, key: [5, 6], version=1)) for kind in (Dead, ScriptedEngine))
    assert asyncio.run(verify_sync([dead, alive], logprobs, 1, PROMPT, tolerance=1.0)) == 0.25
    assert asyncio.run(verify_sync([dead], logprobs, 1, PROMPT)) == 0.0


def probed(gaps, tolerance=0.1):
    """``verify_sync`` of an engine whose log-probabilities are off by ``gaps``, the next list with each continuation."""
    left = iter(gaps)

    async def logprobs(rows):
        return [[-0.5 + gap for gap in next(left)] for _ in rows]

    target = SyncTarget("e0", ScriptedEngine(lambda ids, key: [5] * 8, version=1))
    return asyncio.run(verify_sync([target], logprobs, 1, PROMPT, tolerance=tolerance))


def test_single_tokens_may_be_far_off_where_rounding_is_coarse():
    assert probed([[0.02] * 7 + [0.3]]) == pytest.approx(0.055)


def test_an_engine_that_seems_to_differ_is_asked_again_before_the_run_ends():
    assert probed([[0.2] * 8, [0.02] * 8]) == pytest.approx(0.02)
    with pytest.raises(RunError, match=r"engine e0 .* differ by 0\.4, more than 0\.1, on average, 3 times"):
        probed([[0.2] * 8, [0.3] * 8, [0.4] * 8])


def test_a_short_continuation_of_an_engine_without_numbers_is_no_agreement():
    with pytest.raises(RunError, match="differ by nan"):
        probed([[float("nan")] * 8] * 3)


def test_the_probe_spans_several_blocks_of_a_prefix_cache_and_is_always_the_same():
    assert len(PROMPT) == 320
    assert probe_prompt(tiny_tokenizer(), 512) == PROMPT
    assert not set(PROMPT) & set(tiny_tokenizer().all_special_ids)


def test_a_short_context_gets_a_probe_that_fits():
    assert len(probe_prompt(tiny_tokenizer(), 96)) == 96 - 8 - 1


@pytest.mark.parametrize(("setting", "read"), [("auto", "auto"), ("on", "on"), ("off", "off"), (0, 0), ("3", 3)])
def test_every_sync_takes_the_setting(setting, read):
    for name in ("in_process", "broadcast", "ipc", "checkpoint"):
        choice = SyncChoice(name=name, verify=setting)
        assert (choice.verify, choice.options) == (read, {})


@pytest.mark.parametrize("setting", ["sometimes", True, -1, 1.5, None])
def test_other_settings_are_refused(setting):
    with pytest.raises(ValueError, match=r"should be 'auto' \(the first two syncs\), 'on', 'off' or a number of syncs"):
        SyncChoice(verify=setting)


def test_the_setting():
    assert [verified_syncs(setting) for setting in ("auto", "off", "3", 5)] == [2, 0, 3, 5]
    assert verified_syncs("on") == float("inf")
    assert [verified_syncs(setting, moved=False) for setting in ("auto", "3")] == [0, 3]
