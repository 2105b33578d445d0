"""How vLLM gets weights: its calls, in their order, against a stand-in for them; ``test_vllm.py`` has vLLM itself."""

import asyncio
import socket

import pytest
import torch
from aiohttp import web
from rlhf_engine_http.connection import Connection, NoAnswer
from rlhf_engine_http.dialects import DIALECTS
from rlhf_engine_http.vllm_plugin import BACKEND
from rlhf_engine_http.weights import Stored

VLLM = DIALECTS["vllm"]
WEIGHTS = {
    "embed": torch.arange(6.0).reshape(2, 3),
    "half": torch.randn(5, 7).to(torch.bfloat16),
    "scale": torch.tensor(3.5),
    "none": torch.empty(0, 4),
    "flags": torch.tensor([True, False]),
    "large": torch.randn(1 << 18),
}


class Calls:
    """vLLM's routes for weights, with the state that they change. Each call is noted with what was so before it."""

    def __init__(self, workers=1):
        self.workers, self.loaded = workers, [{} for _ in range(workers)]
        self.notes, self.at = [], {}
        self.started()

    def started(self):
        self.label, self.paused, self.updating = "default", False, False

    async def __aenter__(self):
        app = web.Application()
        app.router.add_route("*", "/{path}", self._call)
        self.runner = web.AppRunner(app)
        await self.runner.setup()
        listener = socket.create_server(("127.0.0.1", 0))
        await web.SockSite(self.runner, listener).start()
        self.connection = Connection(f"http://127.0.0.1:{listener.getsockname()[1]}", None)
        return self

    async def __aexit__(self, *_):
        await self.connection.close()
        await self.runner.cleanup()

    async def _call(self, request):
        path = request.match_info["path"]
        body = await request.json() if request.can_read_body else {}
        self.notes.append((path, self.label, self.paused))
        if path in self.at:
            self.at.pop(path)(self)
        answer = await getattr(self, path)(body)
        return answer if isinstance(answer, web.Response) else web.json_response(answer or {})

    async def get_world_size(self, body):
        return {"world_size": self.workers}

    async def pause(self, body):
        self.paused = True

    async def resume(self, body):
        self.paused = False

    async def is_paused(self, body):
        return {"is_paused": self.paused}

    async def weight_info(self, body):
        return {"weight_version": self.label}

    async def server_info(self, body):
        model = {"model": "m", "max_model_len": 512, "dtype": "torch.float32", "quantization": None}
        model |= {"logprobs_mode": "processed_logprobs"}
        backend = {"backend": BACKEND}
        return {
            "vllm_config": {"model_config": model, "cache_config": {"cache_dtype": "auto"}, "weight_transfer_config": backend}
        }

    async def update_weight_version(self, body):
        self.label = body["new_version"]

    async def collective_rpc(self, body):
        self.path = body["kwargs"]["weights_path"]

    async def reset_prefix_cache(self, body):
        return {"success": True}

    async def reset_encoder_cache(self, body):
        return {"success": True}

    async def init_weight_transfer_engine(self, body):
        assert body == {"init_info": {}}

    async def start_weight_update(self, body):
        if self.updating:
            return web.json_response({"error": "start_weight_update called while a weight update is active"}, status=500)
        self.updating = True

    async def finish_weight_update(self, body):
        if not self.updating:
            return web.json_response({"error": "finish_weight_update called without a matching start"}, status=500)
        self.updating, self.label = False, body.get("weight_version", self.label)

    async def update_weights(self, body):
        info = body["update_info"]
        try:
            await asyncio.gather(*(asyncio.to_thread(self.fetch, info, worker) for worker in range(self.workers)))
        except ConnectionError as error:
            self.updating = False
            return web.json_response({"error": str(error)}, status=500)

    def fetch(self, info, worker):
        with socket.create_connection((info["host"], info["port"]), 10) as place:
            place.sendall(info["word"].encode())
            for name, dtype, shape in zip(info["names"], info["dtype_names"], info["shapes"], strict=True):
                tensor = torch.empty(shape, dtype=getattr(torch, dtype))
                size, content = tensor.nbytes, b""
                while len(content) < size:
                    if not (part := place.recv(size - len(content))):
                        raise ConnectionError(f"ended in {name}")
                    content += part
                if size:
                    tensor = torch.frombuffer(bytearray(content), dtype=tensor.dtype).reshape(shape)
                self.loaded[worker][name] = tensor
            assert place.recv(1) == b""


def loaded(calls, stored, *, streams):
    async def load():
        async with calls:
            return await VLLM.load(calls.connection, stored, "rlhf-run-3", 10.0, streams=streams)

    return asyncio.run(load())


@pytest.mark.parametrize("workers", [1, 3])
def test_a_stream_brings_every_weight_as_it_is(workers):
    calls = Calls(workers)
    size = loaded(calls, Stored(tensors=WEIGHTS), streams=True)
    for own in calls.loaded:
        assert list(own) == list(WEIGHTS)
        for name, tensor in WEIGHTS.items():
            assert own[name].dtype == tensor.dtype
            assert torch.equal(own[name], tensor)
    assert size == workers * sum(tensor.nbytes for tensor in WEIGHTS.values())
    assert (calls.label, calls.paused) == ("rlhf-run-3", False)


@pytest.mark.parametrize("streams", [True, False])
def test_what_is_half_loaded_has_no_name_of_a_version_and_answers_nobody(tmp_path, streams):
    calls = Calls()
    stored = Stored(tensors=WEIGHTS) if streams else Stored(tmp_path)
    loaded(calls, stored, streams=streams)
    names = [name for name, *_ in calls.notes]
    middle = calls.notes[2 : names.index("finish_weight_update" if streams else "reset_prefix_cache") + 1]
    assert names[:2] == ["pause", "update_weight_version"]
    assert names[-2:] == ["is_paused", "resume"]
    assert {label for _, label, _ in middle} == {"rlhf-run-3-unfinished"}
    assert all(paused for *_, paused in calls.notes[1:])


@pytest.mark.parametrize(
    ("path", "streams"),
    [
        ("collective_rpc", False),
        ("reset_prefix_cache", False),
        ("update_weights", True),
        ("finish_weight_update", True),
        ("reset_encoder_cache", True),
        ("is_paused", True),
        ("is_paused", False),
    ],
)
def test_a_server_that_was_started_again_meanwhile_does_not_get_the_name(tmp_path, path, streams):
    calls = Calls()
    calls.at[path] = Calls.started
    with pytest.raises(NoAnswer):
        loaded(calls, Stored(tensors=WEIGHTS) if streams else Stored(tmp_path), streams=streams)
    assert calls.label == "default"


def test_a_stream_that_breaks_off_names_nothing_and_lets_the_server_go_on():
    calls = Calls()

    def breaks(info, worker):
        with socket.create_connection((info["host"], info["port"]), 10) as place:
            place.sendall(info["word"].encode())
            place.recv(8)
        raise ConnectionError("the weights ended before embed was whole")

    calls.fetch = breaks
    with pytest.raises(NoAnswer, match="the weights ended before embed was whole"):
        loaded(calls, Stored(tensors=WEIGHTS), streams=True)
    assert (calls.label, calls.paused, calls.updating) == ("rlhf-run-3-unfinished", False, False)
    assert [name for name, *_ in calls.notes][-3:] == ["start_weight_update", "finish_weight_update", "resume"]


def test_a_server_whose_update_cannot_be_ended_stays_paused():
    """Whoever asked it for a completion then would end its engine."""
    calls = Calls()

    def breaks(info, worker):
        raise ConnectionError("gone")

    async def fails(body):
        return web.json_response({"error": "no"}, status=500)

    calls.fetch, calls.finish_weight_update = breaks, fails
    with pytest.raises(NoAnswer):
        loaded(calls, Stored(tensors=WEIGHTS), streams=True)
    assert (calls.label, calls.paused) == ("rlhf-run-3-unfinished", True)


def test_whoever_does_not_know_the_word_gets_nothing():
    calls = Calls()
    fetch, heard = calls.fetch, []

    def after_a_stranger(info, worker):
        with socket.create_connection((info["host"], info["port"]), 10) as place:
            place.sendall(b"x" * len(info["word"]))
            heard.append(place.recv(1))
        fetch(info, worker)

    calls.fetch = after_a_stranger
    loaded(calls, Stored(tensors=WEIGHTS), streams=True)
    assert heard == [b""]
    assert list(calls.loaded[0]) == list(WEIGHTS)


def test_weights_in_memory_become_files_where_a_server_needs_them(tmp_path):
    written = []

    def write(tensors):
        written.append(dict(tensors))
        return tmp_path

    stored = Stored(tensors=WEIGHTS, write=write)
    for _ in range(2):
        calls = Calls()
        assert loaded(calls, stored, streams=False) == 0
        assert calls.path == str(tmp_path)
    assert len(written) == 1


def test_an_update_that_a_run_left_unfinished_is_begun_anew():
    calls = Calls()
    calls.updating = calls.paused = True
    loaded(calls, Stored(tensors=WEIGHTS), streams=True)
    assert list(calls.loaded[0]) == list(WEIGHTS)
    assert (calls.label, calls.updating) == ("rlhf-run-3", False)


@pytest.mark.parametrize("updating", [True, False])
def test_a_server_that_a_run_left_in_the_middle_of_a_stream_goes_on(updating):
    calls = Calls()
    calls.label, calls.paused, calls.updating = "rlhf-other-7-unfinished", True, updating

    async def met():
        async with calls:
            return await VLLM.facts(calls.connection)

    assert asyncio.run(met()).transfer == BACKEND
    assert (calls.label, calls.paused, calls.updating) == ("rlhf-other-7-unfinished", False, False)
    assert [name for name, *_ in calls.notes][-2:] == ["finish_weight_update", "resume"]
