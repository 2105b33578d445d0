"""Sets of tokens that could be drawn: in few bytes, aligned with the tokens of rows, and refused where they do not fit."""

from __future__ import annotations

import json

import numpy as np
import pytest

from rlhf_host import Episode, Generation, Task, UserError
from rlhf_host.records.episodes import Segment, Trajectory
from rlhf_host.records.token_sets import (
    SUPPORT,
    of_completions,
    pack_tokens,
    support_metrics,
    support_trace,
    unpack_tokens,
)
from rlhf_host.rollouts.conversation import Tree
from rlhf_host.training.saved_rows import lines, read_steps


@pytest.mark.parametrize("vocabulary", [1, 8, 61, 50_257, 65_536, 65_537, 151_936])
def test_any_set_comes_back_in_the_fewest_bytes(vocabulary):
    draw = np.random.default_rng(vocabulary)
    for count in {1, 2, 3, 8, vocabulary // 40, vocabulary // 16, vocabulary // 3, vocabulary - 1, vocabulary}:
        ids = np.sort(draw.permutation(vocabulary)[: max(1, count)])
        one = pack_tokens(ids)
        assert unpack_tokens(one).tolist() == ids.tolist()
        width = 2 if ids[-1] < 1 << 16 else 4
        assert len(one) == 1 + min(width * len(ids), -(-(int(ids[-1]) + 1) // 8))


def test_no_bytes_are_the_set_of_all_and_others_are_refused():
    assert unpack_tokens(b"").tolist() == []
    for odd in (b"x\x01\x02", b"h\x01", b"i\x01\x02"):
        with pytest.raises((TypeError, ValueError), match=r"no set of tokens|multiple of element size"):
            unpack_tokens(odd)


def sets(*tokens):
    return [pack_tokens(np.sort([token, token + 1])) for token in tokens]


def test_each_completion_token_has_its_set_whatever_the_prompt():
    traces = [support_trace(3, sets(4, 5)), {"routed_experts": np.zeros((3, 1, 1))}, support_trace(1, sets(7, 8, 9)), {}]
    found = of_completions(traces, [2, 1, 3, 0])
    assert found is not None
    assert [unpack_tokens(one).tolist() for one in found] == [[4, 5], [5, 6], [], [7, 8], [8, 9], [9, 10]]
    assert of_completions([{}, {}], [2, 1]) is None
    assert of_completions(None, [2, 1]) is None


def turns():
    """A row of two turns with an observation between them, as a tree of calls makes it."""
    tree = Tree()
    first = tree.begin(tree.plan_ids([1, 2, 3]))
    tree.done(first, Generation([5, 6], [-0.5] * 2, [0] * 2, "stop", support_trace(3, sets(5, 6))))
    second = tree.begin(tree.plan_ids([1, 2, 3, 5, 6, 9, 9]))
    tree.done(second, Generation([7], [-0.5], [0], "stop", support_trace(7, sets(7))))
    (row,) = tree.rows(Episode("e", "g", Task("q", prompt_ids=(1, 2, 3))))
    row.reward, row.decode = 1.0, lambda ids: " ".join(map(str, ids))
    return row


def test_observations_between_turns_are_not_restricted():
    row = turns()
    found = of_completions([row.traces], [5])
    assert [unpack_tokens(one).tolist() for one in found] == [[5, 6], [6, 7], [], [], [7, 8]]
    assert support_metrics([row], needed=True) == {
        "support/size": 2.0,
        "support/single": 0.0,
        "support/bytes": pytest.approx(7 / 3),
    }


def test_a_file_gives_them_back_and_what_is_no_set_is_refused(tmp_path):
    row = turns()
    line = lines(1, "train", [row], {}, tmp_path)
    (tmp_path / "rows.jsonl").write_bytes(line)
    ((back,),) = (step.rows for step in read_steps(tmp_path / "rows.jsonl"))
    assert back.traces[SUPPORT].tolist() == row.traces[SUPPORT].tolist()
    support_metrics([back], needed=True)
    saved = json.loads(line)
    saved["traces"][SUPPORT][2][2] = "eAA="  # b"x\0"
    (tmp_path / "rows.jsonl").write_text(json.dumps(saved))
    with pytest.raises(UserError, match=r"rows.jsonl.*traces: .*no set of tokens"):
        read_steps(tmp_path / "rows.jsonl")


@pytest.mark.parametrize(
    "traces",
    [
        {},
        support_trace(3, sets(5)),
        support_trace(3, [*sets(5), b""]),
        support_trace(3, sets(5, 8)),
        support_trace(4, sets(5, 6)),
    ],
    ids=["none", "too few", "of all tokens", "without the token", "too many"],
)
def test_rows_whose_sets_are_not_those_of_their_tokens_are_refused(traces):
    segments = [Segment("prompt", [1, 2, 3]), Segment("action", [5, 6], [-0.5] * 2, [0] * 2)]
    with pytest.raises(UserError, match="episode e7 was sampled with top_p, top_k or min_p"):
        support_metrics([Trajectory("e7", "g", Task("q"), segments, traces=traces)], needed=True)
    of_a_data_set = [Segment("prompt", [1, 2, 3]), Segment("action", [5, 6])]
    assert support_metrics([Trajectory("e7", "g", Task("q"), of_a_data_set, traces={})], needed=True) == {}
