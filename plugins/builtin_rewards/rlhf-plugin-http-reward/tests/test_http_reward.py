"""Servers that judge, and each way in which they do not."""

import asyncio
import time

import pytest
from rlhf_authoring.models import tiny_tokenizer
from rlhf_plugin_http_reward import HttpReward, servers

import rlhf_host
from rlhf_host import Reward, RunError, ScoreContext, Segment, Task, Trajectory, Unjudged, UserError
from rlhf_host.config.load import load_config

from .servers import Server

TOKENIZER = tiny_tokenizer()


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(servers, "WAIT_S", 0.01)


def row(text, label="2"):
    prompt = TOKENIZER.encode("1+1=", add_special_tokens=False)
    answer = [*TOKENIZER.encode(text, add_special_tokens=False), TOKENIZER.eos_token_id]
    return Trajectory("e", "g", Task("1+1=", label), [Segment("prompt", prompt), Segment("action", answer)])


def ask(servers, *groups, **options):
    """The rewards of each group, asked at once."""
    plugin = HttpReward(HttpReward.Options(urls=[server.url for server in servers], **options))

    async def run():
        try:
            return await asyncio.gather(*(plugin.score(group, ScoreContext(tokenizer=TOKENIZER)) for group in groups))
        finally:
            await plugin.run_finished(None)

    return asyncio.run(run())


def lengths(body, number):
    return {"rewards": [float(len(query)) for query in body["query"]]}


def test_the_protocol():
    def answer(body, number):
        return {"rewards": [[1.5], -2], "scores": [0.5, 7], "extra_logs": {"words": [3, None], "seconds": 0.25}}

    with Server(answer) as server:
        [found] = ask([server], [row("2"), row("no", None)])
        end = TOKENIZER.eos_token
        assert server.asked == [{"query": [f"1+1=2{end}", f"1+1=no{end}"], "prompts": ["1+1=", "1+1="], "labels": ["2", None]}]
    assert found == [
        Reward(1.5, score=0.5, metrics={"reward/http/words": 3.0, "reward/http/seconds": 0.25}),
        Reward(-2.0, metrics={"reward/http/seconds": 0.25}),
    ]


def test_a_server_cannot_fill_the_log_with_names(caplog):
    def answer(body, number):
        names = ["reward/mean", "a\nb", "ü", "x" * 101, "", *(f"m{number}-{i}" for i in range(300))]
        return {"rewards": [1.0], "extra_logs": {name: [2.0] for name in names}}

    with Server(answer) as server:
        found = ask([server], [row("2")], [row("3")])
    names = {name for [reward] in found for name in reward.metrics}
    assert len(names) == 100
    assert "reward/http/reward/mean" in names
    assert all(name.removeprefix("reward/http/").isascii() and "\n" not in name for name in names)
    assert len([record for record in caplog.records if "some of extra_logs are left out" in record.getMessage()]) == 1


def test_groups_are_spread_and_few_are_open_at_once():
    with Server(lengths) as one, Server(lengths) as two:
        groups = [[row("2" * (i + 1)), row("3")] for i in range(12)]
        found = ask([one, two], *groups, at_once=2)
        assert (one.most, two.most) == (2, 2)
        assert len(one.asked) == len(two.asked) == 6
    base = len(f"1+1={TOKENIZER.eos_token}")
    assert [[reward.value for reward in group] for group in found] == [[base + i + 1, base + 1] for i in range(12)]


@pytest.mark.parametrize("failure", [(500, "oh"), (503, ""), (429, "busy"), 2.0])
def test_what_may_pass_is_asked_again(failure):
    with Server(lambda body, number: failure if number < 3 else lengths(body, number)) as server:
        [[found]] = ask([server], [row("2")], timeout_s=1.5 if failure == 2.0 else 20)
        assert isinstance(found, Reward)
        assert len(server.asked) == 3


@pytest.mark.parametrize(
    ("answer", "why", "asked"),
    [
        ((500, "oh no"), "answered with status 500: oh no", 3),
        ((404, "where?"), "answered with status 404 (is the path missing? many servers judge at /get_reward): where?", 1),
        ((301, "", ("Location", "/other")), "/other", 1),
        (
            (302, "", ("Location", "http://else.where/x")),
            "has moved (status 302): give its new address, http://else.where/x",
            1,
        ),
        ((307, "", ("Location", "/get_reward")), "has moved (status 307)", 1),
        ({"rewards": [10**400]}, "'rewards' has 1000", 1),
        ({"rewards": [1], "scores": [-(10**400)]}, "'scores' has -1000", 1),
        (2.0, "did not answer in 0.3 s", 3),
        ("{", "no JSON", 1),
        ("[" * 100_000, "no JSON", 1),
        ([1.0], "no 'rewards'", 1),
        ({"reward": [1.0]}, "no 'rewards'", 1),
        ({"rewards": [1.0, 2.0]}, "'rewards' has 2 values for 1 rows", 1),
        ({"rewards": "x"}, "'rewards' has a str", 1),
        ('{"rewards": [NaN]}', "'rewards' has nan", 1),
        ({"rewards": [None]}, "gave null", 1),
        ({"rewards": [1], "scores": ["x"]}, "'scores' has 'x'", 1),
        ({"rewards": [1], "extra_logs": {"a": [1, 2]}}, "'extra_logs.a' has 2 values", 1),
        ({"rewards": [1], "extra_logs": [1]}, "'extra_logs' is a list", 1),
        (" " * (17 << 20), "more than 16 MiB", 1),
    ],
)
def test_what_cannot_be_used_is_no_reward(answer, why, asked):
    with Server(lambda body, number: answer) as server:
        [[found]] = ask([server], [row("2")], timeout_s=0.3 if answer == 2.0 else 20)
        assert isinstance(found, Unjudged)
        assert why in found.reason
        assert len(server.asked) == asked


def test_a_key_is_sent(monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "s3cret")
    with Server(lengths) as server:
        ask([server], [row("2")], key_env="JUDGE_KEY")
        assert server.headers[0]["Authorization"] == "Bearer s3cret"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "give an address"),
        ({"urls": "localhost:5000"}, "'localhost:5000' is no address"),
        ({"urls": "http://a:x/b"}, "'http://a:x/b' is no address"),
        ({"urls": "http://127.0.0.1:9", "key_env": "NO_SUCH_KEY"}, "NO_SUCH_KEY .key_env. is not set"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(UserError, match=message):
        HttpReward(HttpReward.Options(**options))


@pytest.mark.parametrize("comma", [",", ", "])
def test_addresses_with_commas_are_one_reward(comma):
    flags = ["--actor.model", "m", "--data", "d.jsonl", "--reward", comma.join(["http://a/x", "http://b/y", "format"])]
    rewards = load_config(flags=flags).reward
    assert (list(rewards), rewards["http"].options["urls"]) == (["http", "format"], ["http://a/x", "http://b/y"])


def test_a_run_trains_on_what_servers_say_and_does_not_start_without(tmp_path):
    pytest.importorskip("rlhf_plugin_rloo", reason="a whole run needs an algorithm")
    settings = {"rollout.n": 4, "train.batch_size": 2, "train.steps": 2, "train.threads": 1, "rollout.max_new_tokens": 4}
    settings |= {"model": "quickstart", "data": [{"prompt": "12+34=", "label": "46"}, {"prompt": "5+6=", "label": "11"}]}

    def answer(body, number):
        return {"rewards": [float(i % 2) for i in range(len(body["query"]))]}

    with Server(answer) as server:
        run = rlhf_host.train(algo="rloo", rewards=server.url, run_dir=str(tmp_path / "run"), **settings)
        assert [metrics["reward/mean"] for metrics in run.metrics] == [0.5, 0.5]
        assert [len(body["query"]) for body in server.asked] == [4] * 4
    began = time.monotonic()
    with pytest.raises((UserError, RunError), match="nothing answers at http"):
        rlhf_host.train(algo="rloo", rewards=server.url, run_dir=str(tmp_path / "other"), **settings)
    assert time.monotonic() - began < 60
