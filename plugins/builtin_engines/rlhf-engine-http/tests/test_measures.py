"""Metrics of servers."""

import asyncio

import pytest
from aiohttp import web
from rlhf_engine_http.dialects import DIALECTS

from .conftest import PROMPTS
from .sglang import Sglang
from .test_membership import Named, until, urls_of

TEXT = {
    "vllm": """# HELP vllm:num_requests_waiting Number of requests waiting to be processed.
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="m"} 3.0
vllm:num_requests_waiting{engine="1",model_name="m"} 2.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="capacity"} 9.0
vllm:prefix_cache_queries_total{engine="0",model_name="m"} 2000.0
vllm:prefix_cache_queries_created{engine="0",model_name="m"} 1.7e+09
vllm:prefix_cache_hits_total{engine="0",model_name="m"} 1.5e+03
""",
    "sglang": """sglang:num_queue_reqs{model_name="m"} 5.0
sglang:prompt_tokens_total{model_name="m"} 2000.0
sglang:cached_tokens_total{model_name="m"} 1500.0
""",
}


@pytest.mark.parametrize("name", TEXT)
def test_what_a_servers_metrics_say(name):
    assert DIALECTS[name].told(TEXT[name]) == {"waiting": 5.0, "prompt": 2000.0, "cached": 1500.0}
    assert DIALECTS[name].told("# nothing\n") == {}


class Telling(Sglang):
    """With ``--enable-metrics``."""

    tokens, cached, queue = 1000.0, 100.0, 0.0

    @web.middleware
    async def _keyed(self, request, handler):
        if request.path == "/metrics":
            lines = {"num_queue_reqs": self.queue, "prompt_tokens_total": self.tokens, "cached_tokens_total": self.cached}
            return web.Response(text="".join(f'sglang:{name}{{model_name="m"}} {value}\n' for name, value in lines.items()))
        return await super()._keyed(request, handler)


def metrics_of(engine):
    return {metric.name: metric.values for metric in engine.loop.run_until_complete(engine.engine.metrics())}


def test_metrics_of_each_server_and_of_all(tiny, rig):
    with Telling(tiny) as one, Sglang(tiny) as other:
        engine = rig(one, other)
        first = metrics_of(engine)
        assert first["servers"] == 2
        assert first["load_s"] > 0
        assert first["load_gb"] == 0
        engine.sample()
        one.tokens, one.cached, one.queue = 1400.0, 400.0, 2.0
        told = metrics_of(engine)
        a, b = (server.url.removeprefix("http://").replace(":", "-") for server in (one, other))
        assert told[f"{a}/requests"] + told[f"{b}/requests"] == len(PROMPTS)
        assert told[f"{a}/tokens"] + told[f"{b}/tokens"] > len(PROMPTS)
        assert told[f"{a}/waiting"] == 2
        assert told[f"{a}/prefix_cached"] == told["prefix_cached"] == 300 / 400
        assert f"{b}/waiting" not in told
        assert f"{b}/prefix_cached" not in told
        assert told["prefix_known"] == 4 / sum(map(len, PROMPTS))  # one prompt comes twice
        assert "load_s" not in told
        engine.sample()
        assert metrics_of(engine)["prefix_known"] == 1.0
        assert metrics_of(engine)[f"{a}/requests"] == 0


def test_bytes_for_servers_that_load_together_are_a_sum(tiny, rig, monkeypatch):
    load = DIALECTS["sglang"].load

    async def loads(*arguments, **more):
        await asyncio.sleep(0.05)
        return await load(*arguments, **more) + 1_000_000

    monkeypatch.setattr(DIALECTS["sglang"], "load", loads)
    with Sglang(tiny) as one, Sglang(tiny) as other:
        assert metrics_of(rig(one, other))["load_gb"] == pytest.approx(0.002)


def test_counters_of_a_server_that_was_started_again_begin_anew(tiny, rig):
    with Telling(tiny) as server:
        engine = rig(server)
        engine.sample()
        metrics_of(engine)
        server.tokens, server.cached = 50.0, 10.0
        engine.sample()
        assert metrics_of(engine)["prefix_cached"] == 10 / 50


def test_a_server_that_was_let_go_is_counted_once(tiny, rig, tmp_path):
    with Sglang(tiny) as one, Sglang(tiny) as other:
        names = Named(tmp_path / "servers.txt", one, other)
        engine = rig(servers=names.path)
        engine.sample()
        names.name(other)
        until(lambda: urls_of(engine) == {other.url})
        told = metrics_of(engine)
        requests = [value for name, value in told.items() if name.endswith("/requests")]
        assert sum(requests) == len(PROMPTS)
        assert (told["servers"], told["servers_left"]) == (1, 1)
        names.name(other, one)
        until(lambda: urls_of(engine) == {one.url, other.url})
        told = metrics_of(engine)
        assert (told["servers"], told["servers_joined"], told["servers_left"]) == (2, 1, 0)
        one.kill()
        other.kill(), other.start()
        engine.sample()
        told = metrics_of(engine)
        assert told["restarts"] >= 1
        assert told["resent"] >= 1
