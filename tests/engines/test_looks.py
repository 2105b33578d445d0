"""How often the host looks at drawn tokens: answers do not depend on it, and a device is waited for once in eight steps."""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

from rlhf_host.engines import embedded_rows
from rlhf_host.engines.embedded_rows import OpenRows
from rlhf_host.engines.requests import Request
from rlhf_host.errors import RunError
from rlhf_host.records.episodes import Sampling

from .embedded_rig import engine_for, requests_for, sample

HERE = Path(__file__).parent
CPU = torch.device("cpu")


@pytest.fixture(params=[8, 3])
def seldom(request, monkeypatch):
    """Looks as at a GPU."""
    return lambda: monkeypatch.setattr(embedded_rows, "look_every", lambda device: request.param)


def test_answers_are_the_same_to_the_last_bit_however_seldom_the_host_looks(llama, tokenizer, seldom, monkeypatch):
    """In one batch to the end: products of fewer rows round otherwise, and rows leave at a look."""
    monkeypatch.setattr(OpenRows, "compact", lambda self: None)
    texts = (tokenizer.decode([7, 9]), tokenizer.decode([8]))
    requests = requests_for(
        lambda i, j: Sampling(
            3 + 19 * j + i,
            temperature=(1.0, 0.7, 0.0)[j % 3],
            top_k=(0, 5)[j % 2],
            stop_token_ids=(4 + i,) * (j % 2),
            stop=texts * (j // 3),
        )
    )
    often, rarely = engine_for(llama, tokenizer), engine_for(llama, tokenizer)
    expected = sample(often, requests)
    seldom()
    assert sample(rarely, requests) == expected
    assert {one.finish_reason for one in expected} == {"stop", "length"}
    assert rarely.sampled == often.sampled == sum(len(one.token_ids) for one in expected)


def test_a_row_without_a_distribution_fails_alone_whenever_that_is_seen(seldom):
    seldom()
    requests = {n: Request((3,), Sampling(12), (n,)) for n in range(3)}
    rows, answers = OpenRows(requests, [], None, CPU), {}
    for step in range(12):
        logits = torch.zeros(len(rows._numbers), 5)
        if 1 in rows._numbers:
            logits[rows._numbers.index(1)] = torch.nan if step >= 4 else 0.0
        rows.draw(logits, step)
        if rows.due:
            answers |= dict(rows.look())
            rows.compact()
    assert isinstance(answers[1], RunError)
    assert "weight version 4 stopped" in str(answers[1]), "the step that drew it, not that of the look"
    assert [len(answers[n].token_ids) for n in (0, 2)] == [12, 12]
    assert rows.sampled == 12 + 12 + 5


def test_waiting_requests_take_the_places_of_finished_rows_and_draw_their_own_numbers(seldom):
    """Each with the uniforms of its own key from the first, past a block of them."""
    requests = {n: Request((3 + n % 2,), Sampling(5 + 31 * (n % 3)), (n,)) for n in range(9)}
    logits, seen = torch.arange(7.0).sin() * 2, []

    def answers(most):
        rows, found = OpenRows(requests, [6], None, CPU, most), {}
        while rows.left or rows.waiting:
            rows.draw(logits.expand(len(rows._numbers), -1), 0)
            if rows.due:
                found |= dict(rows.look())
                entered = rows.admit()
                seen.append(entered and len(entered[2]))
                if entered is None:
                    rows.compact()
        return found

    expected = answers(0)
    seldom()
    seen.clear()
    assert answers(4) == expected
    assert sum(filter(None, seen)) == 9 - 4


def test_a_dropped_request_never_comes_in():
    rows = OpenRows({n: Request((3,), Sampling(1), (n,)) for n in range(4)}, [], None, CPU, 2)
    rows.draw(torch.zeros(2, 5), 0)
    assert [number for number, _ in rows.look()] == [0, 1]
    rows.drop({2})
    prompts, owners, places = rows.admit()
    assert (prompts, owners.tolist(), places.tolist(), rows._numbers) == ([(3,)], [0], [0], [3, 1])
    assert rows.left == 1


@pytest.mark.parametrize("name", ["gpt2", "opt"])
def test_a_finished_row_that_is_still_computed_stays_within_the_models_positions(build, name):
    model = build(name)
    model.generation_config.eos_token_id = None
    requests = [Request((3,) * 90, Sampling(50), (0,)), *(Request((3, 4), Sampling(20), (1, i)) for i in range(8))]
    assert [len(one.token_ids) for one in sample(engine_for(model), requests)] == [6] + [20] * 8


def decoded_far_away(kernels):
    command = [sys.executable, str(HERE / "far_decoding.py"), kernels]
    path = os.pathsep.join(map(str, (HERE.parents[1], HERE.parent / "training")))
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(("kernels", "batches"), [("none", 2), ("graphs", 1)])
def test_a_device_is_waited_for_once_in_eight_steps(kernels, batches):
    """In batches, or in one whose rows are filled again."""
    found = decoded_far_away(kernels)
    assert found["same"], "tokens as on a CPU, where the host looks at each step"
    reads = Counter(place.split(",")[0] for why, place in found["waits"] if not why.startswith("written"))
    often, steps = found["steps"]
    assert reads.pop("embedded_rows.py") <= steps // 8 + batches
    assert reads == ({"decoding.py": batches} if kernels == "none" else {}), "how long the prompts of a batch are, once"
    assert (steps < often) == (kernels == "graphs"), "rows that end make room"
