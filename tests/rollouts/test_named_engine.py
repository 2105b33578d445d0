"""What an engine gets wrong ends the run with one line that names it."""

from __future__ import annotations

import asyncio
import re

import pytest

from rlhf_host.errors import RunError
from rlhf_host.plugins.manager import PluginManager
from rlhf_host.records.episodes import Generation, Sampling
from rlhf_host.rollouts.episode_settings import EpisodeSettings, SampledModel
from rlhf_host.rollouts.episodes import Episodes
from rlhf_host.rollouts.gate import Gate

NAN = float("nan")


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (None, "AttributeError: 'NoneType'"),
        (TypeError("'dict' + 'int'"), "TypeError: 'dict' + 'int'"),
        (Generation([5, 6], [-1.0], [0, 0], "stop"), "ValueError: 2 tokens of at most 3 with 1 log-probabilities"),
        (Generation([5] * 4, [-1.0] * 4, [0] * 4, "length"), "ValueError: 4 tokens of at most 3 with 4 log-prob"),
        (Generation([5, 6], [-1.0, NAN], [0, 0], "stop"), "ValueError: log-probabilities that are not finite, or above 0"),
        (Generation([5, 6], [-1.0, 0.5], [0, 0], "stop"), "ValueError: log-probabilities that are not finite, or above 0"),
    ],
)
def test_what_an_engine_gets_wrong_is_told_with_its_name(answer, message):
    class Engine:
        async def generate(self, token_ids, sampling, key):
            if isinstance(answer, Exception):
                raise answer
            return answer

    episodes = Episodes(
        PluginManager([]),
        SampledModel(engine=Gate(Engine()), tokenizer=None, engine_name="engine acme"),
        EpisodeSettings(sampling=Sampling(3), max_tokens=8),
    )
    with pytest.raises(RunError, match=re.escape(f"engine acme failed in generate: {message}")):
        asyncio.run(episodes.generate([1], Sampling(3), (0, 0, 0)))
