"""Lines of trajectories that were changed by hand or cut: each is a trajectory, or is refused with its file and line."""

from __future__ import annotations

import copy
import json
import random
from base64 import b64encode

import numpy as np
import pytest

from rlhf_host import Task, UserError
from rlhf_host.records.episodes import Segment, Trajectory
from rlhf_host.records.token_sets import pack_tokens, support_trace, unpack_tokens
from rlhf_host.training.saved_rows import lines, read_steps

ODD = (None, -1, 2**70, 1.5, "x", "***", "", [], {}, [None], "<f4", "|O", "(2,)f4,(", "V9999999999999", "<U0", True)


def saved_line(tmp_path):
    """A row with a set of tokens for each of its own, and a trace of numbers."""
    sets = [pack_tokens(np.arange(token, token + 3)) for token in (5, 6)]
    traces = {**support_trace(2, sets), "numbers": np.arange(3, dtype=np.float32)}
    segments = [Segment("prompt", [1, 2]), Segment("action", [5, 6], [-0.5, -0.25], [0, 0])]
    row = Trajectory("e", "g", Task("q"), segments, reward=1.0, traces=traces, decode=lambda ids: " ".join(map(str, ids)))
    return json.loads(lines(1, "train", [row], {}, tmp_path))


def places(value, path=()):
    """Every place in a JSON value."""
    yield path
    if isinstance(value, dict | list):
        for key, own in value.items() if isinstance(value, dict) else enumerate(value):
            yield from places(own, (*path, key))


def changed(line, draw):
    """A line with one to three values replaced or removed."""
    line = copy.deepcopy(line)
    for _ in range(draw.randint(1, 3)):
        *way, last = draw.choice([path for path in places(line) if path])
        inside = line
        for key in way:
            inside = inside[key]
        if draw.random() < 0.2:
            del inside[last]
        else:
            inside[last] = draw.choice(ODD)
    return line


def read(file):
    """Returns the row of a file, or the message with which it is refused."""
    try:
        ((row,),) = (step.rows for step in read_steps(file))
    except UserError as error:
        return None, str(error)
    return row, ""


@pytest.mark.parametrize("seed", range(4))
def test_a_line_is_a_trajectory_or_refused_by_its_place(tmp_path, seed):
    draw, line, file = random.Random(seed), saved_line(tmp_path), tmp_path / "rows.jsonl"
    refused = 0
    for _ in range(100):
        file.write_text(json.dumps(changed(line, draw)))
        row, message = read(file)
        if row is None:
            refused += 1
            assert str(file) in message
            continue
        for segment in row.segments:
            assert not segment.versions or np.array(segment.versions).astype(np.int32).min() >= 0
        for one in filter(None, row.traces.get("support", ())):
            ids = unpack_tokens(one).astype(np.int64)
            assert len(ids)
            assert (np.diff(ids) > 0).all()
    assert 20 < refused < 100


@pytest.mark.parametrize(
    "odd",
    [
        b"h",
        b"b",
        b"b\x00",
        b"h\x05\x00\x05\x00",
        b"h\x06\x00\x05\x00",
        b"i\xff\xff\xff\xff\x00\x00\x00\x00",
        b"i\x05\x00\x00\x00",
    ],
    ids=["no ids", "no bits", "no bit", "twice", "falling", "falling far", "in more bytes"],
)
def test_bytes_that_no_sampler_writes_are_no_set(tmp_path, odd):
    line = saved_line(tmp_path)
    line["traces"]["support"][2][1] = b64encode(odd).decode()
    (tmp_path / "rows.jsonl").write_text(json.dumps(line))
    with pytest.raises(UserError, match=r"rows.jsonl:1: .*traces: support has no set of tokens"):
        read_steps(tmp_path / "rows.jsonl")
