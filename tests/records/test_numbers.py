"""Numbers per token: in code for lists they behave as lists, and take a tenth of the memory."""

import asyncio
import copy
import pickle

import numpy as np
import pytest
from rlhf_authoring.engines import ScriptedEngine

from rlhf_host.plugins.manager import PluginManager
from rlhf_host.records.episodes import Sampling
from rlhf_host.records.numbers import Numbers
from rlhf_host.rollouts.episode_settings import EpisodeSettings, SampledModel
from rlhf_host.rollouts.episodes import Episodes
from rlhf_host.rollouts.gate import Gate


def test_they_compare_add_and_slice_as_lists_do():
    ids, same, more = Numbers("i", [1, 2, 3]), [1, 2, 3], [4]
    assert ids == same
    assert same == ids
    differs = ids != same
    assert not differs
    assert ids != more
    assert ids + more == [1, 2, 3, 4]
    assert more + ids == [4, 1, 2, 3]
    assert ids + ids == [1, 2, 3, 1, 2, 3]
    assert ids[:2] == [1, 2]
    assert ids[-1] == 3
    other = Numbers("i", ids)
    other[:] = [9]
    assert other == [9]
    assert repr(ids) == "[1, 2, 3]"
    tokens = [0]
    tokens += ids
    ids += [4]
    assert (tokens, ids) == ([0, 1, 2, 3], [1, 2, 3, 4])


@pytest.mark.parametrize("again", [copy.copy, copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one, protocol=5))])
def test_copies_are_numbers_too(again):
    ids = Numbers("i", [1, 2])
    assert type(again(ids)) is Numbers
    assert again(ids) == ids
    assert again(ids) is not ids


def test_numpy_reads_them_without_copying():
    ids = Numbers("i", [1, 2, 3])
    np.asarray(ids)[0] = 7
    assert ids == [7, 2, 3]


def test_an_answer_given_as_lists_takes_16_bytes_a_token_and_keeps_its_values():
    engine = ScriptedEngine(lambda ids, key: [5] * 1000, version=3)
    episodes = Episodes(
        PluginManager([]),
        SampledModel(engine=Gate(engine), tokenizer=None),
        EpisodeSettings(sampling=Sampling(1000), max_tokens=2000),
    )
    answer = asyncio.run(episodes.generate([1], Sampling(1000), (0, 0, 0)))
    columns = (answer.token_ids, answer.logprobs, answer.versions)
    assert sum(np.asarray(column).nbytes for column in columns) == 16_000
    assert columns == ([5] * 1000, [-0.5] * 1000, [3] * 1000)
