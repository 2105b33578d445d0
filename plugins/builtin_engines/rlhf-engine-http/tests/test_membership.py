"""Servers that come and go while the run goes on, by a file that names them."""

import asyncio
import contextlib
import logging
import random
import re
import threading
import time

import pytest
from rlhf_authoring import write_tiny_model
from rlhf_engine_http import Http

from rlhf_host import RunError, Sampling, UserError

from .conftest import PLAIN, PROMPTS
from .sglang import Sglang


class Slow(Sglang):
    """Takes ``load_s`` for loading, and remembers the weights that each answer was sampled with."""

    load_s = 0.0

    async def _update(self, request):
        await asyncio.sleep(self.load_s)
        return await super()._update(request)


class Named:
    """A file of servers."""

    def __init__(self, path, *servers):
        self.path = path
        self.name(*servers)

    def name(self, *servers, remark=""):
        lines = [server if isinstance(server, str) else server.url for server in servers]
        self.path.write_text("\n".join([remark, *lines]) + "\n")


@pytest.fixture
def named(tmp_path):
    return lambda *servers: Named(tmp_path / "servers.txt", *servers)


@pytest.fixture(autouse=True)
def said(caplog):
    caplog.set_level(logging.WARNING)
    return caplog


def until(condition, *, seconds=30):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come about"
        time.sleep(0.02)


def urls_of(engine):
    return {server.url for server in engine.engine._fleet.servers}


def test_a_line_that_is_added_is_a_server_with_the_newest_weights(tiny, rig, named, said):
    with Sglang(tiny) as one, Sglang(tiny) as other:
        names = named(one)
        engine = rig(servers=names.path)
        engine.train()
        engine.sync(1)
        expected = engine.sample()
        names.name(one, other, remark="# two")
        until(lambda: urls_of(engine) == {one.url, other.url})
        one.kill()
        assert engine.sample() == expected
        assert engine.gap(expected) < 1e-5
        assert [path[-6:] for path in other.loaded] == ["000001"]
    assert f"{other.url} joined with the weights of version 1; servers: 2" in said.text


def test_a_line_that_is_removed_is_a_server_that_ends_its_requests_and_gets_no_other(tiny, rig, named, said):
    with Sglang(tiny) as one, Sglang(tiny) as other:
        names = named(one, other)
        engine = rig(servers=names.path)
        expected = engine.sample()
        one.answers.clear(), other.answers.clear()
        one.seen.clear(), other.seen.clear()

        async def ask():
            first = asyncio.ensure_future(engine.ask())
            while len(one.seen) + len(other.seen) < len(PROMPTS):
                await asyncio.sleep(0.01)
            sent = list(one.seen)
            names.name(other)
            while (leaving := f"{one.url} is not named any more; {len(sent)} requests of it end") not in said.text:
                await asyncio.sleep(0.01)
            assert sent, leaving
            second = asyncio.ensure_future(engine.ask())
            while len(other.seen) < 2 * len(PROMPTS) - len(sent):
                await asyncio.sleep(0.01)
            one.answers.set(), other.answers.set()
            assert await first == await second == expected
            assert one.seen == sent

        engine.loop.run_until_complete(ask())
        until(lambda: urls_of(engine) == {other.url})
        names.name(other, one)
        until(lambda: urls_of(engine) == {one.url, other.url})
        other.kill()
        assert engine.sample() == expected
    assert f"{one.url} is let go; servers: 1" in said.text


def test_a_line_that_comes_back_before_the_last_answer_keeps_its_server(tiny, rig, named, said):
    with Sglang(tiny) as server:
        names = named(server)
        engine = rig(servers=names.path)
        expected = engine.sample(PROMPTS[:1])
        server.answers.clear()

        async def ask():
            asked = asyncio.ensure_future(engine.ask(PROMPTS[:1]))
            names.name()
            while "1 requests of it end" not in said.text:
                await asyncio.sleep(0.01)
            names.name(server)
            while "is named again, and stays" not in said.text:
                await asyncio.sleep(0.01)
            server.answers.set()
            return await asked

        assert engine.loop.run_until_complete(ask()) == expected
        assert engine.sample(PROMPTS[:1]) == expected
        assert len(server.loaded) == 1


def test_a_sync_does_not_wait_for_a_newcomer_that_loads_older_weights(tiny, rig, named):
    """It loads the newer ones too, before it answers."""
    with Sglang(tiny) as one, Slow(tiny) as other:
        names = named(one)
        engine = rig(servers=names.path)
        engine.train()
        engine.sync(1)
        other.load_s = 1.5
        names.name(one, other)
        until(lambda: "/update_weights_from_disk" in other.paths)
        engine.train()
        started = time.monotonic()
        engine.sync(2)
        assert time.monotonic() - started < 1.4
        assert other.loaded == []
        expected = engine.sample()
        until(lambda: urls_of(engine) == {one.url, other.url})
        assert [path[-6:] for path in other.loaded] == ["000001", "000002"]
        one.kill()
        assert engine.sample() == expected
        assert engine.gap(expected) < 1e-5


def test_the_files_of_a_slow_newcomer_stay_until_it_has_read_them(tiny, rig, named):
    with Sglang(tiny) as one, Slow(tiny) as other:
        names = named(one)
        engine = rig(servers=names.path)
        other.load_s = 1.5
        names.name(one, other)
        until(lambda: "/update_weights_from_disk" in other.paths)
        for version in (1, 2, 3, 4):
            engine.train()
            engine.sync(version)
        until(lambda: urls_of(engine) == {one.url, other.url})
        assert [path[-6:] for path in other.loaded] == ["000000", "000004"]


def test_a_server_that_is_named_again_in_the_middle_of_a_sync_gets_its_weights(tiny, rig, named):
    with Sglang(tiny) as one, Slow(tiny) as other:
        names = named(one, other)
        engine = rig(servers=names.path)
        until(lambda: urls_of(engine) == {one.url, other.url})
        fleet = engine.engine._fleet
        again = next(server for server in fleet.servers if server.url == one.url)
        load = fleet._load

        async def rename(server):
            again.leaving = False  # as the file's next text has it, before the last answer was given
            await load(server)

        again.leaving, fleet._load = True, rename
        engine.train()
        engine.sync(1)
        until(lambda: again.state == "serving")
        assert one.label == other.label


@pytest.mark.parametrize("removed", [True, False], ids=["removed", "killed"])
def test_a_server_that_goes_in_the_middle_of_a_sync(tiny, rig, named, removed):
    with Sglang(tiny) as one, Slow(tiny) as other, Sglang(tiny) as third:
        names = named(one, other)
        engine = rig(servers=names.path)
        other.load_s = 1.0
        engine.train()

        async def sync():
            syncing = asyncio.ensure_future(asyncio.to_thread(engine.sync_elsewhere, 1))
            before = other.paths.count("/update_weights_from_disk")
            while other.paths.count("/update_weights_from_disk") == before:
                await asyncio.sleep(0.01)
            names.name(one, third) if removed else other.kill()
            await syncing

        asyncio.run(sync())
        expected = engine.sample()
        assert engine.gap(expected) < 1e-5
        if removed:
            until(lambda: urls_of(engine) == {one.url, third.url})
        else:
            other.load_s = 0.0
            other.start()
            until(lambda: other.label == one.label)
            third.kill()
        one.kill()
        assert engine.sample() == expected


def test_a_server_that_died_is_replaced_by_another_address(tiny, rig, named, said):
    with Sglang(tiny) as one, Sglang(tiny) as other:
        names = named(one)
        engine = rig(servers=names.path)
        engine.train()
        engine.sync(1)
        expected = engine.sample()
        one.kill()

        async def ask():
            asked = asyncio.ensure_future(engine.ask())
            while "is left out" not in said.text:
                await asyncio.sleep(0.01)
            names.name(other)
            return await asked

        assert engine.loop.run_until_complete(ask()) == expected
        assert urls_of(engine) == {other.url}


def test_a_file_without_a_server_lets_requests_wait_and_then_ends_the_run(tiny, rig, named, said):
    with Sglang(tiny) as server:
        names = named(server)
        engine = rig(servers=names.path, wait_s=2.0)
        expected = engine.sample()
        names.name(remark="# maintenance")
        until(lambda: not urls_of(engine))

        async def ask():
            asked = asyncio.ensure_future(engine.ask())
            while "names no server; 4 requests wait, up to 2 s" not in said.text:
                await asyncio.sleep(0.01)
            names.name(server)
            return await asked

        assert engine.loop.run_until_complete(ask()) == expected
        names.name()
        until(lambda: not urls_of(engine))
        with pytest.raises(RunError, match=r"no server was usable for 2 s .*servers.txt \(--engine.servers\) names none"):
            engine.sample()


def test_a_run_begins_with_the_first_server_that_is_ready(tiny, rig, named, said):
    with Sglang(tiny) as one, Sglang(tiny) as late:
        late.kill()
        engine = rig(servers=named(one, late).path)
        assert f"cannot use {late.url}" in said.text
        expected = engine.sample()
        late.start()
        until(lambda: urls_of(engine) == {one.url, late.url})
        one.kill()
        assert engine.sample() == expected


def test_a_run_begins_with_a_server_that_comes_later(tiny, rig, named):
    with Sglang(tiny) as server:
        server.kill()
        names = named(server)
        with pytest.raises(UserError, match=rf"no server was usable for 0.5 s .*{server.url}: .*cannot be reached"):
            rig(servers=names.path, wait_s=0.5)

        async def begin():
            starting = asyncio.ensure_future(asyncio.to_thread(rig, servers=names.path))
            await asyncio.sleep(0.5)
            server.start()
            return await starting

        engine = asyncio.run(begin())
        assert engine.gap(engine.sample()) < 1e-5


def test_a_newcomer_that_does_not_fit_gets_no_request(tiny, rig, named, tmp_path, said):
    other = write_tiny_model(tmp_path / "other", layers=3)
    with Sglang(tiny) as one, Sglang(other) as wrong, Sglang(tiny, facts={"context_length": 20}) as short:
        names = named(one)
        engine = rig(servers=names.path)
        names.name(one, wrong, short)
        until(lambda: "num_hidden_layers 3, and the run's 2" in said.text)
        until(lambda: "its rows have 20 tokens at most" in said.text)
        assert urls_of(engine) == {one.url}
        assert engine.engine.context_length == 512
        names.name(one)
        until(lambda: "never came" in said.text)


def test_a_newcomer_with_other_weights_than_it_says_gets_no_request(tiny, rig, named, said):
    with Sglang(tiny) as one, Sglang(tiny) as other:
        names = named(one)
        engine = rig(servers=names.path)
        engine.train()
        engine.sync(1)
        other.wrong_loads = 1
        names.name(one, other)
        until(lambda: "log-probabilities of a probe differ" in said.text)
        assert urls_of(engine) == {one.url}


def test_a_text_that_is_no_list_changes_nothing(tiny, rig, named, said):
    with Sglang(tiny) as server:
        names = named(server)
        engine = rig(servers=names.path)
        for text, why in {
            "127.0.0.1:8000\n": "'127.0.0.1:8000' in .* is no address of a server",
            f"{server.url}\n{server.url}/v1\n": "is given twice",
            "http://10.0.0.1:8000\n": "may be on another machine",
        }.items():
            names.path.write_text(text)
            until(lambda why=why: re.search(why, said.text))
        names.path.unlink()
        until(lambda: "cannot read --engine.servers" in said.text)
        assert said.text.count("the servers stay as they are") == 4
        assert engine.gap(engine.sample()) < 1e-5


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (None, "cannot read --engine.servers .*No such file"),
        ("http://127.0.0.1:8000 http://127.0.0.1:8001\n", "is no address of a server"),
        ("http://127.0.0.1:7000\n", "is given twice in .*servers.txt and --engine.urls"),
        ("http://u:secret@127.0.0.1:8000\n", "has a user, a password or a query"),
    ],
)
def test_a_file_that_is_no_list_is_refused(tmp_path, text, why):
    path = tmp_path / "servers.txt"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UserError, match=why) as raised:
        Http(Http.Options(urls=["http://127.0.0.1:7000"], servers=path))
    assert "secret" not in str(raised.value)


def test_truncated_sampling_is_refused_where_no_server_has_its_log_probabilities(tiny, rig, named):
    with Sglang(tiny) as server:
        engine = rig(servers=named(server).path)
        with pytest.raises(UserError, match="are not of what top_p, top_k and min_p leave"):
            engine.sample(sampling=Sampling(4, top_k=3))
        assert engine.sample(sampling=PLAIN)


@pytest.mark.parametrize("seed", range(3))
def test_whatever_happens_each_request_has_one_answer_of_the_newest_weights(tiny, rig, named, seed):
    """Servers are killed, started, named and not named, while weights change: answers are those of a server that is left alone."""
    draw, over = random.Random(seed), threading.Event()
    prompts = [[5 + number % 40, 6, 7] for number in range(12)]
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(Slow(tiny)) for _ in range(4)]
        names = named(*servers[:2])
        engine, quiet = rig(servers=names.path), rig(stack.enter_context(Sglang(tiny)))

        def disturb():
            while not over.wait(draw.uniform(0.05, 0.3)):
                up = [server for server in servers if server.up]
                event = draw.choice(["kill", "start", "name", "slow"])
                if event == "kill" and len(up) > 1:
                    draw.choice(up).kill()
                elif event == "start" and len(up) < len(servers):
                    draw.choice([server for server in servers if not server.up]).start()
                elif event == "name":
                    names.name(*draw.sample(servers, draw.randrange(1, 5)))
                elif event == "slow":
                    draw.choice(servers).load_s = draw.choice([0.0, 0.3])
            for server in servers:
                server.up or server.start()

        disturbing = threading.Thread(target=disturb)
        disturbing.start()
        try:
            for version in range(1, 9):
                engine.train()
                engine.sync(version)
                quiet.model.load_state_dict(engine.model.state_dict())
                quiet.sync(version)
                answers = engine.sample(prompts, Sampling(20))
                assert answers == quiet.sample(prompts, Sampling(20))
                assert {seen for one in answers for seen in one.versions} == {version}
        finally:
            over.set()
            disturbing.join()
