"""A training server over a tiny model, spoken to as the client of Tinker does."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from rlhf_authoring.models import write_tiny_model
from rlhf_session import TrainableSession
from rlhf_tinker import app, models, requests, wire
from rlhf_tinker.app import TrainingServer
from rlhf_tinker.models import Base, limits
from rlhf_tinker.states import States

from rlhf_host import RunError
from rlhf_host.settings import RunConfig, resolve

KEY = "tml-a-key-of-the-tests"


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


def tensor(message: Any, values: Any, kind: str = "<f4") -> None:
    """Fills a tensor as the client does."""
    array = np.asarray(values, kind)
    message.dtype = wire.INT64 if kind == "<i8" else wire.FLOAT32
    message.shape.extend(array.shape)
    message.dense = array.tobytes()


def passes(model_id: str, number: int, data: list[dict[str, Any]], loss: str = "cross_entropy", **settings: Any) -> bytes:
    """Returns the body of a forward_backward. Each of ``data`` has ``tokens``, ``target_tokens`` and what the loss needs."""
    body = wire.message("ForwardBackwardRequest")(model_id=model_id, seq_id=number, loss_fn=loss)
    body.forward_only = settings.pop("forward_only", False)
    for name, value in settings.items():
        body.loss_fn_config_v2[name].number = value
    for given in data:
        datum = body.data.add()
        datum.model_input.add().encoded_text.tokens = np.asarray(given["tokens"], "<i4").tobytes()
        for name, values in given.items():
            if name != "tokens":
                tensor(datum.loss_fn_inputs[name], values, "<i8" if name == "target_tokens" else "<f4")
    return bytes(body.SerializeToString())


class Client:
    """Sends what the client of Tinker sends."""

    def __init__(self, url: str):
        self.url, self.headers = url, {"X-API-Key": KEY}

    def send(self, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
        raw = body if isinstance(body, bytes) else None if body is None else json.dumps(body).encode()
        kind = wire.MEDIA_TYPE if isinstance(body, bytes) else "application/json"
        request = urllib.request.Request(
            f"{self.url}/api/v1/{path}", raw, {**self.headers, "Content-Type": kind, **headers}, method=method
        )
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                status, content, form = answer.status, answer.read(), answer.headers["Content-Type"]
        except urllib.error.HTTPError as error:
            status, content, form = error.code, error.read(), error.headers["Content-Type"]
        return status, content if form == wire.MEDIA_TYPE else json.loads(content)

    def post(self, path: str, body: Any) -> Any:
        """Returns the result of a request, or the error that it became."""
        status, answer = self.send("POST", path, body)
        while status == 200 and isinstance(answer, dict) and "request_id" in answer:
            request_id = answer["request_id"]
            status, answer = self.send("POST", "retrieve_future", {"request_id": request_id})
            if status == 408:
                status, answer = 200, {"request_id": request_id}
        return answer


def config_of(model: Path) -> RunConfig:
    settings = {"roles": {"actor": {"model": str(model)}}, "train": {"threads": 1}, "kernels": {"name": "none"}}
    return resolve(RunConfig.model_validate(settings), {}, "rollout").config


@pytest.fixture(scope="session")
def client(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    """A server in a thread of this process."""
    folder = tmp_path_factory.mktemp("server")
    (folder / "aside").mkdir()
    (folder / "states").mkdir()
    config = config_of(tiny_model)
    vocabulary, room = limits(config)
    started, loop = threading.Event(), asyncio.new_event_loop()
    server = TrainingServer(
        Base("tiny", config), States(folder / "states"), KEY, folder / "aside", most=2, vocabulary=vocabulary, room=room
    )

    def run() -> None:
        asyncio.set_event_loop(loop)
        loop.run_until_complete(server.start("127.0.0.1", 0))
        started.set()
        loop.run_forever()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    assert started.wait(30)
    yield Client(server.url)
    asyncio.run_coroutine_threadsafe(server.close(), loop).result(60)
    loop.call_soon_threadsafe(loop.stop)
    thread.join(10)


TOKENS, TARGETS = [5, 6, 7, 8, 9], [6, 7, 8, 9, 2]
DATUM = {"tokens": TOKENS, "target_tokens": TARGETS, "weights": [0.0, 1.0, 1.0, 0.5, 2.0]}
ADAM = {"learning_rate": 1e-2, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1, "grad_clip_norm": 0.5}


class Model:
    """A model of the server, and the numbers of its requests."""

    def __init__(self, client: Client, session: str, order: int, rank: int = 4):
        self.client, self.id, self.number = client, f"{session}:train:{order}", 0
        body = {"session_id": session, "model_seq_id": order, "base_model": "tiny", "lora_config": {"rank": rank, "seed": 1}}
        self.made = client.post("create_model", body)

    def next(self) -> int:
        self.number += 1
        return self.number

    def passes(self, data: list[dict[str, Any]], loss: str = "cross_entropy", **settings: Any) -> Any:
        answer = self.client.post("forward_backward", passes(self.id, self.next(), data, loss, **settings))
        return wire.read("ForwardBackwardOutput", answer) if isinstance(answer, bytes) else answer

    def ask(self, route: str, **body: Any) -> Any:
        return self.client.post(route, {"model_id": self.id, "seq_id": self.next(), **body})


@pytest.fixture(scope="module")
def session(client: Client) -> str:
    answer = client.post("create_session", {"tags": [], "user_metadata": None, "sdk_version": "0.38.0"})
    return str(answer["session_id"])


@pytest.fixture(scope="module")
def model(client: Client, session: str) -> Model:
    made = Model(client, session, 0)
    assert made.made == {"type": "create_model", "model_id": made.id}
    return made


def logprobs_of(output: Any) -> list[np.ndarray]:
    return [np.frombuffer(record.fields["logprobs"].data, "<f4") for record in output.loss_fn_outputs]


def sampler_of(model: Model) -> str:
    return str(model.ask("save_weights_for_sampler")["sampling_session_id"])


def scored(client: Client, sampler: str, tokens: list[int], number: int = 0) -> np.ndarray:
    body = {
        "sampling_session_id": sampler,
        "seq_id": number,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": tokens}]},
        "sampling_params": {"max_tokens": 1},
        "prompt_logprobs": True,
    }
    return np.frombuffer(wire.read("SampleResponse", client.post("asample", body)).prompt_logprobs, "<f4")


def reference(directory: Path, tokens: list[int]) -> np.ndarray:
    """Returns ``[N, V]``: log-probabilities by the base, in float64."""
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float64)
    with torch.no_grad():
        return base(input_ids=torch.tensor([tokens])).logits[0].log_softmax(-1).numpy()


def test_losses_are_those_of_the_documentation_in_float64(model: Model, tiny_model: Path):
    logprobs = reference(tiny_model, TOKENS)[np.arange(5), TARGETS]
    old, advantages = np.array([-3.0, -5.0, -4.0, -4.5, -3.5]), np.array([1.0, -1.0, 0.5, 2.0, -0.5])
    rl = {"tokens": TOKENS, "target_tokens": TARGETS, "logprobs": old, "advantages": advantages}
    ratio = np.exp(logprobs - old)
    clipped = np.clip(ratio, 0.8, 1.2)
    inside = np.array([0.0, 1.0, 1.0, 0.0, 1.0])
    whole = np.exp((logprobs - old)[inside > 0].mean())
    expected = {
        "importance_sampling": -(ratio * advantages).sum(),
        "ppo": -np.minimum(ratio * advantages, clipped * advantages).sum(),
        "cispo": -(clipped * logprobs * advantages).sum(),
        "dro": -(logprobs * advantages - 0.5 * 0.1 * (logprobs - old) ** 2).sum(),
        "gspo": -np.minimum(whole * advantages, np.clip(whole, 0.5, 1.5) * advantages).sum(),
    }
    settings = {"dro": {"beta": 0.1}, "gspo": {"clip_low_threshold": 0.5, "clip_high_threshold": 1.5}}
    output = model.passes([DATUM, DATUM], forward_only=True)
    assert output.metrics["loss:sum"] == pytest.approx(-2 * (logprobs * DATUM["weights"]).sum(), abs=1e-5)
    np.testing.assert_allclose(logprobs_of(output), [logprobs, logprobs], atol=1e-5)
    for loss, value in expected.items():
        data = [rl | ({"sequence_ratio_mask": inside} if loss == "gspo" else {})]
        found = model.passes(data, loss, forward_only=True, **settings.get(loss, {})).metrics["loss:sum"]
        assert found == pytest.approx(value, rel=1e-5), loss


def test_targets_need_not_be_the_tokens_that_follow(model: Model, tiny_model: Path):
    table = reference(tiny_model, TOKENS)
    several = np.array([[1, 2], [3, 4], [7, 8], [0, 1], [9, 9]])
    weights = np.array([[0.5, 0.5]] * 5)
    output = model.passes([{"tokens": TOKENS, "target_tokens": several, "weights": weights}], forward_only=True)
    expected = table[np.arange(5)[:, None], several]
    np.testing.assert_allclose(logprobs_of(output)[0].reshape(5, 2), expected, atol=1e-5)
    assert list(output.loss_fn_outputs[0].fields["logprobs"].trailing_shape) == [2]
    assert output.metrics["loss:sum"] == pytest.approx(-(expected * weights).sum(), abs=1e-5)


def test_steps_states_and_samples_of_weights_of_their_time(client: Client, session: str, model: Model):
    assert "no gradient waits" in model.ask("optim_step", adam_params=ADAM)["error"]
    before, text = sampler_of(model), [5, 6, 7, 8]
    first = scored(client, before, text)
    assert np.isnan(first[0])
    losses = []
    for _ in range(3):
        losses.append(model.passes([DATUM]).metrics["loss:sum"])
        assert model.ask("optim_step", adam_params=ADAM)["metrics"]["grad_norm"] > 0
    assert losses[2] < losses[0]
    saved = model.ask("save_weights", path="three")["path"]
    assert saved == f"tinker://{model.id}/weights/three"
    assert "overwrite" in model.ask("save_weights", path="three")["error"]
    after = scored(client, sampler_of(model), text)
    np.testing.assert_array_equal(scored(client, before, text, 1), first)  # the weights of then
    assert abs(after[1:] - first[1:]).max() > 1e-3

    then = [model.passes([DATUM]).metrics["loss:sum"], model.ask("optim_step", adam_params=ADAM)["metrics"]["grad_norm"]]
    again = {"path": saved, "optimizer": True}
    assert model.ask("load_weights", **again)["path"] == saved
    assert [
        model.passes([DATUM]).metrics["loss:sum"],
        model.ask("optim_step", adam_params=ADAM)["metrics"]["grad_norm"],
    ] == then

    body = {"session_id": session, "model_seq_id": 1, "path": saved, "optimizer": False}
    assert client.post("load_weights", body)["path"] == saved
    other = f"{session}:train:1"
    answer = client.post("forward_backward", passes(other, 1, [DATUM], forward_only=True))
    assert wire.read("ForwardBackwardOutput", answer).metrics["loss:sum"] == pytest.approx(then[0], abs=1e-5)
    client.post("unload_model", {"model_id": other})
    listed = client.send("GET", f"training_runs/{model.id}/checkpoints")[1]["checkpoints"]
    assert [each["tinker_path"] for each in listed] == [saved]
    assert client.post("weights_info", {"tinker_path": saved})["lora_rank"] == 4


def test_after_a_failed_pass_no_step_is_taken(model: Model):
    model.passes([DATUM])
    short = {**DATUM, "weights": [1.0]}
    assert "weights has the shape [1], and target_tokens [5]" in model.passes([DATUM, short])["error"]
    assert "a request before it failed" in model.ask("optim_step", adam_params=ADAM)["error"]
    assert "no gradient waits" in model.ask("optim_step", adam_params=ADAM)["error"]


def test_after_a_step_that_is_not_finite_samples_are_drawn(client: Client, model: Model, monkeypatch: pytest.MonkeyPatch):
    sampler, text = sampler_of(model), [5, 6, 7, 8]
    first = scored(client, sampler, text)
    model.passes([{**DATUM, "weights": [1e30] * 5}])
    assert "the gradient norm is inf" in model.ask("optim_step", adam_params=ADAM)["error"]
    np.testing.assert_array_equal(scored(client, sampler, text, 1), first)

    def half(self: Any, **settings: Any) -> dict[str, float]:
        self._stepped = True
        raise RunError("of two roles one has stepped")

    monkeypatch.setattr(TrainableSession, "optim_step", half)
    assert "one has stepped" in model.ask("optim_step", adam_params=ADAM)["error"]
    np.testing.assert_array_equal(scored(client, sampler, text, 2), first)


def test_after_a_lost_request_no_step_is_taken(client: Client, model: Model, monkeypatch: pytest.MonkeyPatch):
    def sent(route: str, body: Any) -> Any:
        return client.send("POST", route, body)[1]["request_id"]

    def outcome(request_id: str) -> Any:
        return client.post("retrieve_future", {"request_id": request_id})

    monkeypatch.setattr(requests, "GAP_S", 0.02)
    model.passes([DATUM])
    lost = model.next()
    late = sent("forward_backward", passes(model.id, model.next(), [DATUM]))
    assert f"waited for {lost}, which did not come" in outcome(late)["error"]
    assert f"failed: request {lost} did not come" in model.ask("optim_step", adam_params=ADAM)["error"]
    assert "no gradient waits" in model.ask("optim_step", adam_params=ADAM)["error"]

    model.passes([DATUM])
    lost = model.next()
    late = sent("optim_step", {"model_id": model.id, "seq_id": model.next(), "adam_params": ADAM})
    assert f"waited for {lost}, which did not come" in outcome(late)["error"]
    assert "no gradient waits" in model.ask("optim_step", adam_params=ADAM)["error"]
    model.passes([DATUM])  # complete again
    assert "metrics" in model.ask("optim_step", adam_params={**ADAM, "learning_rate": 0.0})


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"weights": [float("nan")] * 5}, "not finite"),
        ({"tokens": [5, 6, 7, 8, 999]}, "model_input has the token 999, and the model 60 tokens"),
        ({"target_tokens": [6, 7, 8, 9, -1]}, "target_tokens has the token -1"),
        ({"tokens": [], "target_tokens": [], "weights": []}, "model_input is empty"),
        ({"tokens": [5] * 600, "target_tokens": [5] * 600, "weights": [1.0] * 600}, "room for 512"),
        ({"advantages": [1.0] * 5}, "'advantages', which cross_entropy does not read"),
    ],
)
def test_data_that_cannot_be_trained_on_is_refused_by_name(model: Model, change: dict[str, Any], error: str):
    answer = model.passes([DATUM, {**DATUM, **change}], forward_only=True)
    assert answer["error"].startswith("datum 1: ")
    assert error in answer["error"]
    assert answer["category"] == "user"


@pytest.mark.parametrize("ended", ["finished", "silent"])
def test_a_model_whose_session_ends_while_it_loads_leaves_its_place(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ended: str
):
    loading, go_on = threading.Event(), threading.Event()

    def opens(model: Any) -> None:
        loading.set()
        assert go_on.wait(10)

    monkeypatch.setattr(models.Model, "open", opens)
    monkeypatch.setattr(app, "SILENT_S", -1.0 if ended == "silent" else 60.0)
    monkeypatch.setattr(app, "ROOM_S", 0.0)
    server = TrainingServer(
        Base("tiny", config_of(tiny_model)), States(tmp_path), KEY, tmp_path, most=1, vocabulary=60, room=512
    )
    request: Any = SimpleNamespace(match_info={})

    async def created() -> Any:
        session = await server._create_session({}, request)
        body = {**session, "model_seq_id": 0, "base_model": "tiny", "lora_config": {"rank": 4, "seed": 1}}
        return session["session_id"], (await server._create_model(body, request))["request_id"]

    async def outcome() -> tuple[Any, Any, Any]:
        request.match_info["session"], first = await created()
        assert await asyncio.to_thread(loading.wait, 10)
        if ended == "finished":
            await server._finish_session({}, request)
        _, second = await created()
        refused = await server._requests.result(second)
        go_on.set()
        gone = await server._requests.result(first)
        _, third = await created()
        made = await server._requests.result(third)
        await server.close()
        return refused, gone, made

    refused, gone, made = asyncio.run(outcome())
    assert "1 models are at work" in refused["error"]
    assert "was unloaded while it was loading" in gone["error"]
    assert made["type"] == "create_model"


def test_losses_that_are_not_here_say_so(model: Model):
    assert "stable_reinforce" in model.passes([DATUM], "stable_reinforce", forward_only=True)["error"]
    assert "needs beta" in model.passes([{**DATUM}], "dro", forward_only=True)["error"]
    assert "save_weights_external is not here" in model.ask("save_weights_external", path="x")["error"]


def test_requests_are_done_in_order_and_once(client: Client, model: Model):
    first, second = model.next(), model.next()
    late = passes(model.id, second, [DATUM], forward_only=True)
    ids = [client.send("POST", "forward_backward", late)[1]["request_id"] for _ in range(2)]
    assert ids[0] == ids[1]  # sent twice, done once
    assert client.send("POST", "forward_backward", passes(model.id, second, [DATUM]))[0] == 400
    early = client.post("forward_backward", passes(model.id, first, [DATUM, DATUM], forward_only=True))
    late_answer = client.post("forward_backward", late)
    sums = [wire.read("ForwardBackwardOutput", each).metrics["loss:sum"] for each in (early, late_answer)]
    assert sums[0] == pytest.approx(2 * sums[1])


@pytest.mark.parametrize(
    "path",
    [
        "tinker://../../weights/x",
        "tinker://{id}/weights/..",
        "tinker://{id}/weights/../../x",
        "/etc/passwd",
        "tinker://{id}/sampler_weights/x",
    ],
)
def test_paths_stay_in_the_folder_of_states(client: Client, session: str, model: Model, path: str):
    body = {"session_id": session, "model_seq_id": 7, "path": path.format(id=model.id), "optimizer": True}
    status, answer = client.send("POST", "load_weights", body)
    assert status == 400
    assert "tinker://RUN/weights/NAME" in answer["detail"]


def test_access_bodies_and_what_is_not_there(client: Client, session: str):
    assert client.send("POST", "client/config", {}, **{"X-API-Key": "tml-another"})[0] == 401
    assert client.send("POST", "create_session", b"x" * (2 << 20))[0] == 413
    assert client.send("POST", "forward_backward", b"\xff\xff\xff\x07")[0] == 400
    assert client.send("POST", "forward_backward", passes("nobody", 1, [DATUM]))[0] == 404
    assert client.send("POST", "copy_weights", {})[0] == 404
    assert client.send("POST", "retrieve_future", {"request_id": "x"})[0] == 404
    assert "tiny" in json.dumps(client.send("GET", "get_server_capabilities")[1])
    body = {"session_id": session, "model_seq_id": 9, "base_model": "other", "lora_config": {"rank": 4}}
    assert "this server has 'tiny'" in client.send("POST", "create_model", body)[1]["detail"]
    gone = client.post("create_session", {})["session_id"]
    client.post(f"sessions/{gone}/finish", {})
    assert client.send("POST", "session_heartbeat", {"session_id": gone})[0] == 410


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"prompt": {"chunks": [{"tokens": [999]}]}}, "the token 999"),
        ({"prompt": {"chunks": []}}, "it is empty"),
        ({"prompt": {"chunks": [{"type": "image", "data": ""}]}}, "'image' are not here"),
        ({"sampling_params": {"max_tokens": 4000}}, "room for 512"),
        ({"sampling_params": {"stop": ["a", 3]}}, "texts that are not empty, or ids"),
        ({"topk_prompt_logprobs": 2}, "topk_prompt_logprobs is not here"),
        ({"record_stability_info": True}, "stable_reinforce, which is not here"),
        ({"num_samples": 0}, "num_samples"),
    ],
)
def test_samples_that_cannot_be_drawn_are_refused_by_name(client: Client, model: Model, change: dict[str, Any], error: str):
    body = {
        "sampling_session_id": sampler_of(model),
        "seq_id": 1,
        "prompt": {"chunks": [{"tokens": [5]}]},
        "sampling_params": {},
    }
    status, answer = client.send("POST", "asample", body | change)
    assert status == 400
    assert error in answer["detail"]


def test_samples_stop_where_they_are_asked_to(client: Client, model: Model):
    body = {
        "sampling_session_id": sampler_of(model),
        "seq_id": 1,
        "num_samples": 6,
        "prompt": {"chunks": [{"tokens": [5, 6]}]},
        "sampling_params": {"max_tokens": 30, "stop": list(range(3, 40)), "seed": 3, "top_k": 50, "top_p": 0.99},
    }
    once = client.post("asample", body)
    response = wire.read("SampleResponse", once)
    assert len(response.sequences) == 6
    for sequence in response.sequences:
        tokens = np.frombuffer(sequence.tokens, "<i4")
        assert tokens[-1] < 40 or len(tokens) == 30
        assert all(token >= 40 or token < 3 for token in tokens[:-1])
        assert len(tokens) == len(np.frombuffer(sequence.logprobs, "<f4"))
    assert client.post("asample", {**body, "seq_id": 2}) == once  # of the same seed


def started(model: Path, folder: Path) -> tuple[subprocess.Popen[str], Client]:
    """Starts the command; returns its process and a client."""
    (folder / "key").write_text(KEY)
    flags = ["--name", "tiny", "--port", "0", "--key-file", "key", "--kernels", "none", "--train.threads", "1"]
    command = [sys.executable, "-m", "rlhf_host", "serve-training", str(model), *flags]
    reset = partial(signal.signal, signal.SIGINT, signal.default_int_handler)
    process = subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=reset)
    assert process.stdout is not None
    return process, Client(process.stdout.readline().strip().removeprefix("TINKER_BASE_URL="))


def test_a_killed_server_leaves_states_for_the_next(tiny_model: Path, tmp_path: Path):
    process, client = started(tiny_model, tmp_path)
    try:
        session = client.post("create_session", {})["session_id"]
        model = Model(client, session, 0)
        model.passes([DATUM])
        model.ask("optim_step", adam_params=ADAM)
        saved = model.ask("save_weights", path="one")["path"]
        expected = [model.passes([DATUM]).metrics["loss:sum"], model.ask("optim_step", adam_params=ADAM)]
    finally:
        process.kill()
        process.communicate()
    half = tmp_path / "states" / model.id.replace(":", "_") / "weights" / ".half"
    half.mkdir()
    process, client = started(tiny_model, tmp_path)
    try:
        assert not half.exists()
        second, _ = started(tiny_model, tmp_path)
        assert "give another --states" in second.communicate()[1]
        assert second.returncode == 2
        session = client.post("create_session", {})["session_id"]
        body = {"session_id": session, "model_seq_id": 0, "path": saved, "optimizer": True}
        assert client.post("load_weights", body)["path"] == saved
        again = Model.__new__(Model)
        again.client, again.id, again.number = client, f"{session}:train:0", 0
        assert [again.passes([DATUM]).metrics["loss:sum"], again.ask("optim_step", adam_params=ADAM)] == expected
        process.send_signal(signal.SIGINT)
        assert "Ended." in process.communicate(timeout=60)[1]
    finally:
        process.kill()
        process.communicate()
