"""What an engine tells of tokens stays with them: in trees of calls, batches, parts of batches and files."""

from __future__ import annotations

import numpy as np
import pytest

from rlhf_host import Episode, Generation, Group, Task, UserError
from rlhf_host.distributed.ray.batch_shards import PASSES, make_shards
from rlhf_host.records.episodes import Segment, Trajectory
from rlhf_host.rollouts.conversation import Tree
from rlhf_host.rollouts.experience import make_experience
from rlhf_host.training.auxiliary_rows import joined
from rlhf_host.training.saved_rows import lines, read_steps

EPISODE = Episode("e", "g", Task("q", prompt_ids=(1, 2, 3)))


def told(tokens, call):
    """``[tokens - 1, 1, 2]``: the place of each token, and the number of the call that tells."""
    return {"routed_experts": np.stack([np.arange(tokens - 1), np.full(tokens - 1, call)], -1)[:, None].astype(np.uint8)}


def ask(tree, prompt, length, call):
    answer = Generation([50 + call] * length, [-0.5] * length, [0] * length, "stop", told(len(prompt) + length, call))
    made = tree.begin(tree.plan_ids(prompt))
    tree.done(made, answer)
    return [*prompt, *answer.token_ids]


def row_of(length, name="e0", call=0):
    segments = [Segment("prompt", [1, 2, 3]), Segment("action", [5] * length, [-1.0] * length, [0] * length)]
    row = Trajectory(name, "g", Task("q"), segments, reward=1.0, traces=told(3 + length, call))
    row.decode = lambda ids: " ".join(map(str, ids))
    return row


def test_a_token_has_what_the_call_told_that_first_read_it():
    tree = Tree()
    first = ask(tree, [1, 2, 3], 4, call=0)
    second = ask(tree, [*first, 8, 9], 3, call=1)
    ask(tree, [*first, 7], 2, call=2)  # branches off
    whole, branch = tree.rows(EPISODE)
    places, calls = whole.traces["routed_experts"][:, 0].T
    assert places.tolist() == list(range(len(second) - 1)), "all but the last token"
    assert calls.tolist() == [0] * 6 + [1] * 5, "the last token of an answer is read by the next call"
    assert branch.traces["routed_experts"][:, 0, 1].tolist() == [0] * 6 + [2] * 3
    assert tree.calls[1].generation.traces["routed_experts"].shape == (5, 1, 2), "nothing is kept twice"


def test_an_engine_that_tells_nothing_leaves_rows_and_batches_without():
    tree = Tree()
    call = tree.begin(tree.plan_ids([1, 2]))
    tree.done(call, Generation([3], [-0.5], [0], "stop"))
    (row,) = tree.rows(EPISODE)
    assert row.traces == {}
    row.reward = 0.0
    assert make_experience([Group("g", row.task, [row])], {}, step=1, max_new_tokens=4, temperature=1.0).traces is None


def batch_of(rows):
    return make_experience([Group("g", rows[0].task, rows)], {}, step=1, max_new_tokens=9, temperature=1.0)


def test_parts_of_a_batch_have_those_of_their_rows():
    batch = batch_of([row_of(length, f"e{length}", call=length) for length in (2, 5, 3)])

    def calls(part):
        return [int(own["routed_experts"][0, 0, 1]) for own in part.traces]

    assert calls(batch.select([2, 0])) == [3, 2]
    batch.prompts["teacher"] = [[9]] * 3
    assert batch.seen_by("teacher").traces == [{}, {}, {}], "other prompts, other tokens"
    batch.traces[1]["support"] = own = np.array([b"", b"", *[b"b\xff"] * 5], object)
    assert batch.seen_by("teacher").traces == [{}, {"support": own}, {}], "the same answers, which could be as they could"
    assert calls(batch.seen_by("actor")) == [2, 5, 3]
    shards = [shard.batch() for shard in make_shards(batch.batch(), [[1], [2, 0]], PASSES)]
    assert [calls(shard) for shard in shards] == [[5], [3, 2]]
    batch.extra["ptx"] = {"beside": batch.action_mask & False}
    beside = batch_of([row_of(4)])
    beside.traces = None
    assert joined(batch, beside, "ptx").traces[3] == {}
    assert calls(joined(batch, batch_of([row_of(4, call=7)]), "ptx")) == [2, 5, 3, 7]


def test_a_file_gives_them_back(tmp_path):
    rows = [row_of(4, call=9), row_of(2, "e1", call=1)]
    (tmp_path / "rows.jsonl").write_bytes(lines(1, "train", rows, {}, tmp_path))
    (step,) = read_steps(tmp_path / "rows.jsonl")
    for row, back in zip(rows, step.rows, strict=True):
        own, read = row.traces["routed_experts"], back.traces["routed_experts"]
        assert read.dtype == own.dtype
        assert np.array_equal(read, own)
        assert (back.episode_id, back.finish_reason, back.reward) == (row.episode_id, row.finish_reason, row.reward)


def test_a_file_that_was_cut_is_refused(tmp_path):
    line = lines(1, "train", [row_of(4)], {}, tmp_path)
    (tmp_path / "rows.jsonl").write_bytes(line.replace(b'"shape"', b'"x"').replace(b"[6, 1, 2]", b"[7, 1, 2]"))
    with pytest.raises(UserError, match=r"rows.jsonl.*verdicts or traces: cannot reshape"):
        read_steps(tmp_path / "rows.jsonl")
