"""Servers that fail, go, come back and get new weights."""

import asyncio
import logging
import os
import threading
import time

import pytest
from rlhf_engine_http import fleet
from rlhf_engine_http.dialects import seed_of

import rlhf_host
from rlhf_host import RunError, Sampling, UserError

from .conftest import PLAIN, PROMPTS
from .sglang import BUSY, CUT, FAILING, NAN, Sglang, model_files, with_about, with_logprob, with_tokens


def test_tokens_are_the_servers_and_log_probabilities_the_models(rig, server):
    engine = rig(server)
    for temperature in (1.0, 0.5):
        found = engine.sample(sampling=Sampling(6, temperature))
        assert engine.gap(found, temperature=temperature) < 1e-5
        assert all(set(one.versions) == {0} for one in found)
    assert engine.sample() == engine.sample()
    greedy = engine.sample(sampling=Sampling(6, 0.0))
    assert all(not any(one.logprobs) for one in greedy)


def test_each_sync_brings_all_weights_and_their_name(unsynced, server):
    engine = unsynced(server)
    with pytest.raises(RunError, match="has no weights of this run"):
        engine.sample()
    for version in (1, 2, 3):
        engine.train()
        engine.sync(version)
        found = engine.sample()
        assert engine.gap(found) < 1e-5
        assert {seen for one in found for seen in one.versions} == {version}
    assert len(server.loaded) == 3
    root = os.path.dirname(server.loaded[-1])
    assert model_files(root) == ["model", "version-000002", "version-000003"]
    assert {"config.json", "tokenizer.json", "model.safetensors.index.json"} <= set(model_files(server.loaded[-1]))
    engine.close()
    assert not os.path.exists(root)


def test_a_weight_that_is_left_out_is_missed(unsynced, server):
    engine = unsynced(server)
    with pytest.raises(RunError, match=r"no weights came for lm_head.weight"):
        engine.sync(1, leave_out=["lm_head.weight"])
    assert server.loaded == []
    with pytest.raises(RunError, match="has no weights of this run"):
        engine.sample()


@pytest.mark.parametrize("fault", [BUSY, FAILING, CUT, with_about(finish_reason={"type": "abort"})])
def test_what_passes_is_asked_again(rig, server, fault):
    engine = rig(server)
    expected = engine.sample()
    server.faults = [fault, fault]
    assert engine.sample() == expected
    assert server.faults == []


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        (BUSY, "failed 4 times .*status 503: out of memory"),
        (CUT, "failed 4 times .*something that is no JSON"),
    ],
)
def test_what_does_not_pass_ends_the_run_by_name(rig, server, fault, why):
    engine = rig(server)
    server.faults = [fault] * 20
    with pytest.raises(RunError, match=why):
        engine.sample(PROMPTS[:1])


def test_a_slow_answer_is_given_up_and_asked_again(rig, server):
    engine = rig(server, timeout_s=0.5)
    expected = engine.sample(PROMPTS[:1])
    server.faults = [lambda answer: 30.0]
    started = time.monotonic()
    assert engine.sample(PROMPTS[:1]) == expected
    assert time.monotonic() - started < 20


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        (NAN, "log-probability nan: the model's logits are not finite"),
        (with_logprob(None), "log-probability None"),
        (with_logprob(-9999.0), "logits are not finite"),
        (with_logprob(0.5), "log-probability 0.5, which is above 0"),
        (with_tokens(lambda ids: [60, *ids[1:]]), "token 60 is not in the model's vocabulary of 60"),
        (with_tokens(lambda ids: [-1, *ids[1:]]), "token -1 is not"),
        (with_tokens(lambda ids: [2, 7, 7, 7, 7, 7]), "goes on after token 2, which ends a completion"),
        (with_tokens(lambda ids: ids[:2]), "LookupError|ends after 2 of 6 tokens, for 'length'"),
        (with_tokens(lambda ids: [*ids, 7]), "7 tokens, where 1 to 6 were asked for"),
        (with_about(finish_reason={"type": "stop", "matched": 7}), "eos_token_id differs|ends at token"),
        (with_about(finish_reason={"type": "stop", "matched": "NaN happened"}), "logits are not finite"),
        (with_about(prompt_tokens=5), "counts 5 tokens in a prompt of 4"),
        (with_about(output_token_logprobs=[]), "log-probabilities are of other tokens"),
        (lambda answer: {"text": "Hello"}, "no answer of sglang"),
    ],
)
def test_a_wrong_answer_never_becomes_a_completion(rig, server, fault, why):
    engine = rig(server)
    server.faults = [fault]
    with pytest.raises(RunError, match=why) as raised:
        engine.sample([[5, 6, 7, 8]], Sampling(6, stop_token_ids=()))
    assert server.url in str(raised.value)


def test_a_killed_server_has_its_requests_taken_over(tiny, rig, caplog):
    with Sglang(tiny) as one, Sglang(tiny) as other:
        engine = rig(one, other)
        expected = engine.sample(sampling=Sampling(40))
        threading.Timer(0.05, one.kill).start()
        assert engine.sample(sampling=Sampling(40)) == expected
        while one.up:
            time.sleep(0.01)
        assert engine.sample() == engine.sample()
    assert f"{one.url} is left out" in caplog.text
    assert "requests go to 1 other servers" in caplog.text


def test_a_server_that_hangs_is_given_up(tiny, rig, monkeypatch):
    monkeypatch.setattr(fleet, "BEAT_S", 0.2)
    monkeypatch.setattr(fleet, "SILENT_S", 0.2)
    with Sglang(tiny) as one, Sglang(tiny) as other:
        engine = rig(one, other)
        expected = engine.sample()
        one.hangs = True
        assert engine.sample() == expected
        one.hangs = False


def test_a_server_that_comes_back_gets_the_weights_before_it_answers(rig, server, caplog):
    caplog.set_level(logging.WARNING)
    engine = rig(server)
    engine.train()
    engine.sync(1)
    expected = engine.sample()
    server.kill()

    async def meanwhile():
        waiting = asyncio.ensure_future(engine.ask())
        await asyncio.sleep(0.5)
        assert not waiting.done()
        server.start()
        return await waiting

    assert engine.loop.run_until_complete(meanwhile()) == expected
    assert engine.gap(expected) < 1e-5
    assert len(server.loaded) == 3  # the directory's, version 1, and that again
    assert "4 requests are unanswered" in caplog.text
    assert "has the weights of version 1, and serves" in caplog.text


def test_a_restart_that_nobody_saw_is_noticed_by_the_answer(rig, server):
    engine = rig(server)
    engine.train()
    engine.sync(1)
    expected = engine.sample()
    server.kill()
    server.start()
    assert server.label == "default"
    assert engine.sample() == expected
    assert engine.gap(expected) < 1e-5


def test_a_server_that_misses_a_sync_gets_it_later(tiny, rig):
    with Sglang(tiny) as one, Sglang(tiny) as other:
        engine = rig(one, other)
        one.kill()
        engine.train()
        engine.sync(1)
        one.start()
        until = time.monotonic() + 20
        while one.label != other.label:
            assert time.monotonic() < until
            time.sleep(0.05)
        other.kill()
        assert engine.gap(engine.sample()) < 1e-5


def test_without_any_server_the_run_ends_and_says_how_to_start_one(rig, server):
    engine = rig(server, wait_s=0.5)
    server.kill()
    with pytest.raises(RunError, match=r"no server was usable for 0.5 s \(--engine.wait-s\)") as raised:
        engine.sample()
    assert str(raised.value).count(server.url) == 1
    assert "python -m sglang.launch_server --model-path" in str(raised.value)


def test_weights_that_are_refused_end_the_sync_by_name(rig, server):
    engine = rig(server)
    server.broken_loads = 1
    with pytest.raises(RunError, match=f"{server.url} did not load version 1: .*size mismatch for lm_head"):
        engine.sync(1)
    with pytest.raises(RunError, match="has no weights"):
        engine.sample()
    engine.sync(2)
    assert engine.gap(engine.sample()) < 1e-5


def test_a_server_that_keeps_old_weights_differs_from_the_others(tiny, rig):
    with Sglang(tiny) as one, Sglang(tiny) as other:
        engine = rig(one, other)
        engine.train()
        other.wrong_loads = 1
        with pytest.raises(
            RunError, match=r"log-probabilities of a probe differ by .*, which loaded the same weights of version 1"
        ):
            engine.sync(1)


def test_two_runs_do_not_share_a_server(rig, server):
    first = rig(server)
    first.sample()
    rig(server)
    with pytest.raises(RunError, match=f"another run gave its weights to {server.url}"):
        first.sample()


def test_a_request_that_cannot_be_served_is_refused(rig, server):
    engine = rig(server)
    for sampling in (Sampling(4, top_p=0.9), Sampling(4, top_k=3), Sampling(4, min_p=0.1)):
        with pytest.raises(UserError, match="log-probabilities of sglang are not of what top_p, top_k and min_p leave"):
            engine.sample(sampling=sampling)
    assert "/generate" in server.paths


def test_a_group_stays_on_its_server(tiny, rig):
    with Sglang(tiny) as one, Sglang(tiny) as other:
        engine = rig(one, other)
        one.seen.clear(), other.seen.clear()
        keys = [(7, group, sample, 0) for group in range(4) for sample in range(4)]

        async def ask():
            one.answers.clear(), other.answers.clear()
            asked = [asyncio.ensure_future(engine.engine.generate([5, 6, 7], PLAIN, key)) for key in keys]
            while len(one.seen) + len(other.seen) < len(keys):
                await asyncio.sleep(0.01)
            one.answers.set(), other.answers.set()
            await asyncio.gather(*asked)

        engine.loop.run_until_complete(ask())
        for group in range(4):
            seeds = {seed_of(key, 31) for key in keys if key[1] == group}
            assert seeds <= set(one.seen) or seeds <= set(other.seen)
        assert len(one.seen) == len(other.seen) == 8


def test_a_run_trains_from_a_server_that_is_killed_and_comes_back(tiny, server, learner, tmp_path, quick):
    """The mismatch of every step is that of engine and trainer, on the tokens that were sampled."""
    killed = []

    def crash(answer):
        killed.append(server.label)

        def again():
            server.kill()
            time.sleep(0.3)
            server.start()

        threading.Thread(target=again).start()
        return 30.0

    def reward(text):
        if len(server.loaded) == 3 and not killed:
            server.faults = [crash]
        return float(sum(character in "aeiou" for character in text))

    run = rlhf_host.train(
        algo=learner,
        rewards=reward,
        model=tiny,
        data=[{"prompt": "1+1="}, {"prompt": "2+2="}],
        engine={"name": "http", "urls": server.url},
        rollout={"n": 4, "max_new_tokens": 6},
        train={"steps": 6, "batch_size": 2},
        actor={"lr": 0.01},
        sync={"verify": "on"},
        run_dir=tmp_path / "run",
    )
    assert [row["version"] for row in run.metrics] == [1, 2, 3, 4, 5, 6]
    assert max(row["mismatch/max"] for row in run.metrics) < 1e-4
    assert any(row["grad_norm"] > 0 for row in run.metrics[:3])
    (label,) = killed
    version = label.rpartition("-")[2].zfill(6)
    assert [path.endswith(version) for path in server.loaded].count(True) == 2
    assert len(server.loaded) == 8
