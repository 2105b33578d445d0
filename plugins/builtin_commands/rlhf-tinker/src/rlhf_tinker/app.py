"""The server: routes of Tinker's API, sessions of clients, and the models that they have made."""

from __future__ import annotations

import asyncio
import hashlib
import json
import secrets
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf_server import ApiError, HttpServer, Route, check_key

from rlhf_tinker import wire
from rlhf_tinker.bodies import answer_of, invalid, page, read_adam, read_ttl, texts, tokens_of, whole
from rlhf_tinker.listings import Listings
from rlhf_tinker.losses import Job, checked_config, checked_datum
from rlhf_tinker.models import CLOSE_S, Adapter, Base, Frozen, Model, Snapshot
from rlhf_tinker.requests import Line, Pending, Requests, Result
from rlhf_tinker.sampling import Ask, read_ask
from rlhf_tinker.states import NAME, RunRecord, Saved, States

if TYPE_CHECKING:
    from aiohttp import web

BODY_BYTES = 32 << 20
"""Longest body of a request with data or tokens."""
SMALL_BYTES = 1 << 20
"""Longest body of any other request."""
DATA = 4096
"""Maximum number of data of a request."""
SILENT_S = 30.0
"""Seconds without a heartbeat (there is one every 10) after which a session's models may make room for others."""
ROOM_S = 90.0
"""Seconds that a new model waits for room."""
SAMPLERS = 100_000
CLIENT_CONFIG = {
    "pjwt_auth_enabled": False,
    "proto_compress_fwdbwd": False,
    "custom_loss_server_side": False,
    "sample_use_retrieve_futures": False,
    "sample_join_sampling_session": False,
    "sample_max_concurrent_requests": 1000,
    "fwdbwd_max_chunk_len": 1024,
    "fwdbwd_max_chunk_bytes_count": 5_000_000,
}
"""Settings that the client gets; the rest is its own default."""


@dataclass(slots=True)
class ClientSession:
    """A client's session."""

    session_id: str
    user_metadata: dict[str, str] | None
    display_name: str | None
    beat: float
    finished: bool = False
    models: list[str] = field(default_factory=list)
    samplers: list[str] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Trained:
    """A model of a client."""

    run: RunRecord
    session: ClientSession
    line: Line
    model: Model | None = None
    """None until it is loaded."""
    last_request: float = field(default_factory=time.time)


@dataclass(frozen=True, slots=True)
class Sampler:
    sampler_id: str
    snapshot: Snapshot
    path: str | None


def refused(error: ApiError) -> dict[str, Any]:
    """Returns an error as a client shows it."""
    return {"detail": error.message, "code": error.code}


class TrainingServer:
    """Tinker's API over trainable sessions.

    Args:
        key: API key of clients.
        aside: a temporary folder.
        most: number of models that are loaded at a time.
        vocabulary: number of tokens of the base; None: unknown.
        room: number of tokens that it can read.
    """

    def __init__(self, base: Base, states: States, key: str, aside: Path, *, most: int, vocabulary: int | None, room: int):
        self.base, self.states, self.key, self.aside, self.most = base, states, key, aside, most
        self.vocabulary, self.room = vocabulary, room
        self.listings = Listings(states, self._last_request)
        self._http = HttpServer("the training server")
        self._requests = Requests()
        self._sessions: dict[str, ClientSession] = {}
        self._trained: dict[str, Trained] = {}
        self._samplers: dict[str, Sampler] = {}
        self._frozen: Frozen | None = None
        self._places = asyncio.Condition()
        self._loaded: list[Model] = []

    @property
    def url(self) -> str:
        return self._http.url

    async def start(self, host: str, port: int) -> None:
        """Accepts requests. Raises ``UserError`` if the address is not available."""
        await self._http.start(host, port, self._routes())

    async def close(self) -> None:
        """Ends all models; work that goes on is waited for, for a while."""
        await self._http.close()
        await self._requests.close()
        workers = [model.worker for model in self._loaded] + ([] if self._frozen is None else [self._frozen.worker])
        for model in self._loaded:
            model.worker.close(model.close)
        if self._frozen is not None:
            self._frozen.worker.close(self._frozen.close)
        for worker in workers:
            await asyncio.to_thread(worker.join, CLOSE_S)

    def _routes(self) -> Iterator[Route]:
        posts = {
            "client/config": self._client_config,
            "client/dynamic_config": self._client_dynamic_config,
            "create_session": self._create_session,
            "session_heartbeat": self._heartbeat,
            "sessions/{session}/finish": self._finish_session,
            "create_model": self._create_model,
            "get_info": self._get_info,
            "unload_model": self._unload_model,
            "optim_step": self._optim_step,
            "save_weights": self._save_weights,
            "load_weights": self._load_weights,
            "save_weights_for_sampler": self._save_for_sampler,
            "save_weights_external": self._save_external,
            "create_sampling_session": self._create_sampling_session,
            "retrieve_future": self._retrieve,
            "weights_info": self.listings.weights_info,
        }
        gets = {
            "healthz": self._health,
            "get_server_capabilities": self._capabilities,
            "training_runs": self.listings.training_runs,
            "training_runs/{run}": self.listings.training_run,
            "training_runs/{run}/checkpoints": self.listings.checkpoints,
            "checkpoints": self.listings.all_checkpoints,
            "sessions": self._list_sessions,
            "sessions/{session}": self._get_session,
            "samplers/{sampler}": self._get_sampler,
        }
        route = partial(Route, admit=self._admit, errors=refused)
        for path, handler in posts.items():
            yield route("POST", f"/api/v1/{path}", _json(self._http, handler), body_bytes=SMALL_BYTES)
        yield route("POST", "/api/v1/asample", _json(self._http, self._sample), body_bytes=BODY_BYTES)
        yield route("POST", "/api/v1/forward_backward", self._forward_backward, body_bytes=BODY_BYTES)
        yield route("POST", "/api/v1/telemetry", self._telemetry, body_bytes=BODY_BYTES)
        for path, listing in gets.items():
            yield route("GET", f"/api/v1/{path}", listing)
        checkpoint = "/api/v1/training_runs/{run}/checkpoints/{kind}/{name}"
        yield route("DELETE", checkpoint, self.listings.delete_checkpoint)
        yield route("PUT", f"{checkpoint}/ttl", _json(self._http, self.listings.set_ttl), body_bytes=SMALL_BYTES)
        yield route("*", "/api/v1/{rest:.*}", self._not_here, body_bytes=BODY_BYTES)

    def _admit(self, request: web.Request) -> None:
        check_key(request, self.key)

    async def _not_here(self, request: web.Request) -> web.StreamResponse:
        raise ApiError(
            404, f"{request.method} {request.path} is not here: rlhf serve-training has a part of Tinker's API", "not_here"
        )

    # Sessions

    async def _client_config(self, body: Mapping[str, Any], request: web.Request) -> Any:
        return CLIENT_CONFIG

    async def _client_dynamic_config(self, body: Mapping[str, Any], request: web.Request) -> Any:
        return {"refresh_interval_sec": 3600, "sample_cancel_enabled": False}

    async def _telemetry(self, request: web.Request) -> web.StreamResponse:
        from aiohttp import web

        await self._http.bytes_of(request)  # which nobody reads
        return web.json_response({"status": "accepted"})

    async def _health(self, request: web.Request) -> web.StreamResponse:
        return answer_of({"status": "ok"})

    async def _capabilities(self, request: web.Request) -> web.StreamResponse:
        model = {"model_name": self.base.name, "max_context_length": self.room, "trainable": True, "sampleable": True}
        return answer_of({"supported_models": [model]})

    async def _create_session(self, body: Mapping[str, Any], request: web.Request) -> Any:
        session_id = str(uuid.uuid4())
        name = body.get("display_name")
        self._sessions[session_id] = ClientSession(
            session_id, texts(body.get("user_metadata")), name if isinstance(name, str) else None, time.monotonic()
        )
        return {"type": "create_session", "session_id": session_id}

    async def _heartbeat(self, body: Mapping[str, Any], request: web.Request) -> Any:
        session = self._session(body.get("session_id"))
        session.beat = time.monotonic()
        return {"type": "session_heartbeat"}

    async def _finish_session(self, body: Mapping[str, Any], request: web.Request) -> Any:
        session = self._session(request.match_info["session"])
        session.finished = True
        for model_id in session.models:
            await self._unload(model_id)
        return {}

    async def _list_sessions(self, request: web.Request) -> web.StreamResponse:
        offset, limit = page(request)
        return answer_of({"sessions": list(self._sessions)[::-1][offset : offset + limit]})

    async def _get_session(self, request: web.Request) -> web.StreamResponse:
        session = self._session(request.match_info["session"], finished=True)
        return answer_of(
            {
                "training_run_ids": session.models,
                "sampler_ids": session.samplers,
                "user_metadata": session.user_metadata,
                "display_name": session.display_name,
            }
        )

    def _session(self, session_id: Any, *, finished: bool = False) -> ClientSession:
        if (session := self._sessions.get(session_id) if isinstance(session_id, str) else None) is None:
            told = f"there is no session {str(session_id)[:80]!r}: the server was started anew; saved weights can be loaded"
            raise ApiError(404, told, "not_found", "session_id")
        if session.finished and not finished:
            raise ApiError(410, f"the session {session.session_id} has finished", "finished", "session_id")
        return session

    # Models

    async def _create_model(self, body: Mapping[str, Any], request: web.Request) -> Any:
        session, order = self._session(body.get("session_id")), _order(body)
        self._check_base(body.get("base_model"))
        lora = body.get("lora_config")
        if not isinstance(lora, Mapping):
            raise invalid("lora_config", "an object: models here are adapters over the base")
        flags = {name: lora.get(name, True) for name in ("train_mlp", "train_attn", "train_unembed")}
        if not all(isinstance(flag, bool) for flag in flags.values()):
            raise invalid("lora_config", "train_mlp, train_attn and train_unembed are true or false")
        if not flags["train_mlp"] and not flags["train_attn"]:
            raise ApiError(
                400, "lora_config: the head has no adapters here: train_attn or train_mlp", "not_here", "lora_config"
            )
        optimizer = body.get("optimizer_config") or {"type": "adamw"}
        if not isinstance(optimizer, Mapping) or optimizer.get("type") != "adamw":
            raise ApiError(400, "optimizer_config: there is adamw", "not_here", "optimizer_config")
        seed = lora.get("seed")
        seed = secrets.randbits(31) if seed is None else whole(seed, "lora_config.seed", 0, 2**31 - 1)
        rank = whole(lora.get("rank"), "lora_config.rank", 1, 4096)
        return self._begin(session, order, body, partial(self._make, seed=seed), rank, flags["train_mlp"], flags["train_attn"])

    def _check_base(self, name: Any) -> None:
        if name not in (self.base.name, self.base.model):
            told = f"base_model: {str(name)[:120]!r} is not here; this server has {self.base.name!r} (--name gives it another name)"
            raise ApiError(404, told, "not_found", "base_model")

    def _begin(
        self,
        session: ClientSession,
        order: int,
        body: Mapping[str, Any],
        make: Callable[[Trained], Awaitable[Result]],
        lora_rank: int,
        train_mlp: bool,
        train_attn: bool,
    ) -> dict[str, Any]:
        """Begins to make a session's model, unless the same request has begun it; returns the first answer."""
        metadata = texts(body.get("user_metadata")) or {}
        run_id = f"{session.session_id}:train:{order}"
        run = RunRecord(run_id, self.base.name, lora_rank, train_mlp, train_attn, metadata, time.time())
        pending, new = self._requests.begin(f"{run_id}:create", _digest(body), {"model_id": run_id})
        if new:
            trained = self._trained[run_id] = Trained(run, session, Line(self._requests))
            session.models.append(run_id)
            self._requests.start(pending, partial(make, trained))
        return first(pending)

    async def _make(self, trained: Trained, seed: int, saved: Saved | None = None, optimizer: bool = False) -> Result:
        """Loads a model, with saved weights if some are given."""
        run = trained.run
        targets = await asyncio.to_thread(self.base.targets, run.train_mlp, run.train_attn)
        adapter = Adapter(run.lora_rank, seed, targets)
        await self._make_room()
        aside = self.aside / secrets.token_hex(8)
        aside.mkdir()
        model = Model(run.run_id, self.base, adapter, aside)
        self._loaded.append(model)
        try:
            await model.worker.submit(model.open)
            if saved is not None:
                await model.worker.submit(partial(model.load, saved.directory, optimizer))
            await asyncio.to_thread(self.states.add_run, run)
            if self._trained.get(run.run_id) is not trained:
                told = f"the model {run.run_id} was unloaded while it was loading: its session finished, or sent no heartbeat"
                raise ApiError(410, told, "finished", "session_id")
        except BaseException:
            await self._close(model)
            self._trained.pop(run.run_id, None)
            raise
        trained.model = model
        if saved is not None:
            return {"type": "load_weights", "path": saved.path}
        return {"type": "create_model", "model_id": run.run_id}

    async def _make_room(self) -> None:
        """Waits until another model may be loaded. Models of silent sessions make room.

        Raises ``ApiError`` if none does.
        """
        begun = time.monotonic()
        async with self._places:
            while len(self._loaded) >= self.most:
                silent = [
                    (session.beat, model_id)
                    for session in self._sessions.values()
                    for model_id in session.models
                    if time.monotonic() - session.beat > SILENT_S and model_id in self._trained
                ]
                if silent:
                    await self._unload(min(silent)[1])
                    continue
                if time.monotonic() - begun > ROOM_S:
                    alive = ", ".join(model.model_id for model in self._loaded)
                    told = f"{self.most} models are at work ({alive}), which is --max-models: finish a session, or allow more"
                    raise ApiError(429, told, "overloaded")
                await asyncio.sleep(1.0)

    def _last_request(self, model_id: str) -> float | None:
        trained = self._trained.get(model_id)
        return None if trained is None else trained.last_request

    async def _unload(self, model_id: str) -> None:
        if (trained := self._trained.pop(model_id, None)) is not None and trained.model is not None:
            await self._close(trained.model)

    async def _close(self, model: Model) -> None:
        if model in self._loaded:
            self._loaded.remove(model)
            for snapshot in model.snapshots:
                snapshot.model = None
            model.worker.close(model.close)

    def _model(self, model_id: Any) -> Trained:
        trained = self._trained.get(model_id) if isinstance(model_id, str) else None
        if trained is None:
            told = f"there is no model {str(model_id)[:120]!r}: it was unloaded, or the server was started anew; load saved weights"
            raise ApiError(404, told, "not_found", "model_id")
        trained.last_request = time.time()
        return trained

    async def _get_info(self, body: Mapping[str, Any], request: web.Request) -> Any:
        run = self._model(body.get("model_id")).run
        return {
            "type": "get_info",
            "model_data": {"arch": None, "model_name": run.base_model, "tokenizer_id": self.base.tokenizer},
            "model_id": run.run_id,
            "optimizer_config": {"type": "adamw"},
            "is_lora": True,
            "lora_rank": run.lora_rank,
            "model_name": run.base_model,
        }

    async def _unload_model(self, body: Mapping[str, Any], request: web.Request) -> Any:
        model_id = self._model(body.get("model_id")).run.run_id
        pending, new = self._requests.begin(f"{model_id}:unload", "", {"model_id": model_id})
        if new:

            async def unload() -> Result:
                await self._unload(model_id)
                return {"type": "unload_model", "model_id": model_id}

            self._requests.start(pending, unload)
        return first(pending)

    def _ordered(self, trained: Trained, seq_id: Any, digest: Any, work: Any, *, steps: bool = False) -> Any:
        """Returns the answer to a request of a model, which is done after those before it. If one of these does not come, the
        gradients that wait are dropped and the next optimizer step is refused.

        Args:
            work: ``await work(model)``.
            steps: the request is an optimizer step.
        """
        order, model_id = whole(seq_id, "seq_id", 1, 2**31 - 1), trained.run.run_id
        pending, new = self._requests.begin(f"{model_id}:{order}", digest, {"model_id": model_id})
        if new:

            async def run() -> Result:
                if trained.model is None:
                    raise ApiError(409, f"the model {model_id} is not loaded", "not_loaded")
                result: Result = await work(trained.model)
                return result

            async def missed(why: str) -> None:
                if (model := trained.model) is not None:
                    await model.worker.submit(partial(model.fail, None if steps else why))

            try:
                trained.line.add(order, pending, run, missed)
            except ApiError as error:
                self._requests.fail(pending, error)
        return first(pending)

    async def _forward_backward(self, request: web.Request) -> web.StreamResponse:
        raw = await self._http.bytes_of(request)
        if request.content_type != wire.MEDIA_TYPE:
            raise ApiError(415, f"the body is {wire.MEDIA_TYPE}, as clients from 0.38 send it", "unsupported_type")
        sent = await asyncio.to_thread(wire.read, "ForwardBackwardRequest", raw)
        trained = self._model(sent.model_id)

        async def work(model: Model) -> Result:
            try:
                job = await asyncio.to_thread(self._job, sent)
            except ValueError as error:
                if not sent.forward_only:
                    await model.worker.submit(partial(model.fail, str(error)))
                raise ApiError(400, str(error), "invalid_value") from error
            logprobs, metrics = await model.worker.submit(partial(model.forward_backward, job, not sent.forward_only))
            return await asyncio.to_thread(wire.forward_backward_output, logprobs, metrics)

        digest = hashlib.blake2b(raw, digest_size=16).digest()
        return answer_of(self._ordered(trained, sent.seq_id, digest, work))

    def _job(self, sent: Any) -> Job:
        """Returns the data of a request, checked. Raises ``ValueError`` for data that cannot be trained on."""
        given: dict[str, Any] = dict(sent.loss_fn_config)
        for name, value in sent.loss_fn_config_v2.items():
            given[name] = value.text if value.HasField("text") else value.number
        config = checked_config(sent.loss_fn, given)
        if not 0 < len(sent.data) <= DATA:
            raise ValueError(f"the request has {len(sent.data)} data, and should have 1 to {DATA}")
        data = []
        for place, datum in enumerate(sent.data):
            try:
                inputs = {name: wire.array_of(tensor, name) for name, tensor in datum.loss_fn_inputs.items()}
                data.append(checked_datum(sent.loss_fn, tokens_of(datum.model_input), inputs, self.vocabulary, self.room))
            except ValueError as error:
                raise ValueError(f"datum {place}: {error}") from error
        return Job(data, sent.loss_fn, config)

    async def _optim_step(self, body: Mapping[str, Any], request: web.Request) -> Any:
        trained = self._model(body.get("model_id"))

        async def work(model: Model) -> Result:
            lr, settings = read_adam(body)
            metrics = await model.worker.submit(partial(model.optim_step, lr, settings))
            return {"type": "optim_step", "metrics": metrics}

        return self._ordered(trained, body.get("seq_id"), _digest(body), work, steps=True)

    # Saved weights

    async def _save_weights(self, body: Mapping[str, Any], request: web.Request) -> Any:
        trained = self._model(body.get("model_id"))

        async def work(model: Model) -> Result:
            saved = await self._saved(trained, model, "weights", body, model.save)
            return {"type": "save_weights", "path": saved.path}

        return self._ordered(trained, body.get("seq_id"), _digest(body), work)

    async def _saved(self, trained: Trained, model: Model, kind: str, body: Mapping[str, Any], write: Any) -> Saved:
        name = body.get("path")
        if not isinstance(name, str) or not NAME.match(name):
            raise invalid("path", "a name of letters, digits, '.', '_' and '-', such as step-0010")
        overwrite = body.get("overwrite", False)
        if not isinstance(overwrite, bool):
            raise invalid("overwrite", "true or false")
        ttl, metadata = read_ttl(body), texts(body.get("user_metadata"))
        save = partial(self.states.save, trained.run, kind, name, write, ttl_s=ttl, overwrite=overwrite, user_metadata=metadata)
        saved: Saved = await model.worker.submit(save)
        return saved

    async def _load_weights(self, body: Mapping[str, Any], request: web.Request) -> Any:
        if body.get("session_id") is not None:
            return await self._create_from(body)
        trained = self._model(body.get("model_id"))

        async def work(model: Model) -> Result:
            saved, optimizer = self._asked(body)
            if (rank := saved.run.lora_rank) != trained.run.lora_rank:
                raise invalid("path", f"{saved.path} has rank {rank}, and this model {trained.run.lora_rank}")
            await model.worker.submit(partial(model.load, saved.directory, optimizer))
            return {"type": "load_weights", "path": saved.path}

        return self._ordered(trained, body.get("seq_id"), _digest(body), work)

    def _asked(self, body: Mapping[str, Any]) -> tuple[Saved, bool]:
        """Returns the weights that a request names, and True if their optimizer is wanted, too."""
        optimizer, config = body.get("optimizer"), body.get("optimizer_config")
        if not isinstance(optimizer, bool):
            raise invalid("optimizer", "true or false")
        if body.get("weights_access_token") is not None:
            raise ApiError(400, "weights_access_token is not here: a server has one owner", "not_here", "weights_access_token")
        if config is not None and config != {"type": "adamw"}:
            raise ApiError(400, "optimizer_config: there is adamw", "not_here", "optimizer_config")
        return self.states.find(body.get("path"), ("weights",)), optimizer

    async def _create_from(self, body: Mapping[str, Any]) -> Any:
        saved, optimizer = self._asked(body)
        session, order = self._session(body.get("session_id")), _order(body)
        if (base := body.get("base_model")) is not None:
            self._check_base(base)
        make = partial(self._make, seed=secrets.randbits(31), saved=saved, optimizer=optimizer)
        was = saved.run
        return self._begin(session, order, body, make, was.lora_rank, was.train_mlp, was.train_attn)

    async def _save_for_sampler(self, body: Mapping[str, Any], request: web.Request) -> Any:
        trained = self._model(body.get("model_id"))

        async def work(model: Model) -> Result:
            if body.get("kind", "snapshot") != "snapshot":
                raise ApiError(400, f"kind: {str(body['kind'])[:40]!r} is not here; there is snapshot", "not_here", "kind")
            if body.get("path") is not None:
                saved = await self._saved(trained, model, "sampler_weights", body, model.save_adapter)
                return {"type": "save_weights_for_sampler", "path": saved.path}
            snapshot = await model.worker.submit(model.snapshot)
            sampler = self._add_sampler(trained.session, snapshot, None)
            return {"type": "save_weights_for_sampler", "sampling_session_id": sampler.sampler_id}

        return self._ordered(trained, body.get("seq_id"), _digest(body), work)

    async def _save_external(self, body: Mapping[str, Any], request: web.Request) -> Any:
        trained = self._model(body.get("model_id"))

        async def work(model: Model) -> Result:
            told = "save_weights_external is not here: save_state's folder has the adapter as peft writes it, for rlhf merge"
            raise ApiError(400, told, "not_here")

        return self._ordered(trained, body.get("seq_id"), _digest(body), work)  # which counts its number

    # Samples

    async def _create_sampling_session(self, body: Mapping[str, Any], request: web.Request) -> Any:
        session = self._session(body.get("session_id"))
        whole(body.get("sampling_session_seq_id"), "sampling_session_seq_id", 0, 2**62)
        path, base = body.get("model_path"), body.get("base_model")
        if base is not None:
            self._check_base(base)
        if path is None and base is None:
            raise invalid("model_path", "a path of saved weights, or base_model")
        snapshot = Snapshot(None if path is None else weights_of(self.states.find(path)))
        sampler = self._add_sampler(session, snapshot, path)
        return {"type": "create_sampling_session", "sampling_session_id": sampler.sampler_id}

    def _add_sampler(self, session: ClientSession, snapshot: Snapshot, path: str | None) -> Sampler:
        sampler = Sampler(f"{session.session_id}:sample:{len(session.samplers)}", snapshot, path)
        self._samplers[sampler.sampler_id] = sampler
        session.samplers.append(sampler.sampler_id)
        if len(self._samplers) > SAMPLERS:
            del self._samplers[next(iter(self._samplers))]
        return sampler

    def _sampler(self, sampler_id: Any) -> Sampler:
        if (sampler := self._samplers.get(sampler_id) if isinstance(sampler_id, str) else None) is None:
            told = f"there is no sampler {str(sampler_id)[:120]!r}: the server was started anew"
            raise ApiError(404, told, "not_found", "sampling_session_id")
        return sampler

    async def _get_sampler(self, request: web.Request) -> web.StreamResponse:
        sampler = self._sampler(request.match_info["sampler"])
        return answer_of({"sampler_id": sampler.sampler_id, "base_model": self.base.name, "model_path": sampler.path})

    async def _sample(self, body: Mapping[str, Any], request: web.Request) -> Any:
        sampler_id = body.get("sampling_session_id")
        if sampler_id is None:
            raise ApiError(
                400, "sampling_session_id: samples are drawn in a sampling session", "not_here", "sampling_session_id"
            )
        sampler = self._sampler(sampler_id)
        if body.get("record_stability_info"):
            raise ApiError(400, "record_stability_info is for the loss stable_reinforce, which is not here", "not_here")
        order = whole(body.get("seq_id"), "seq_id", 0, 2**63 - 1)
        ask = read_ask(body, sampler.sampler_id, self.vocabulary, self.room)
        request_id = f"{sampler.sampler_id}:{order}"
        names = [f"{request_id}:{place}" for place in range(ask.count)]
        pending, new = self._requests.begin(request_id, _digest(body), {"sample_sequence_ids": names})
        if new:
            self._requests.start(pending, partial(self._answers, sampler, ask))
        return first(pending)

    async def _answers(self, sampler: Sampler, ask: Ask) -> Result:
        snapshot = sampler.snapshot
        if (model := snapshot.model) is not None and model.number == snapshot.number:
            # On the model's thread it is looked at again, because a step may come before the samples.
            ask = replace(ask, number=snapshot.number)
            answers, logprobs = await model.worker.submit(ask), None
            if answers is not None and ask.prompt_logprobs:
                of_prompt = partial(model.prompt_logprobs, ask.number, ask.prompt, ask.prompt_logprobs)
                logprobs = await model.worker.submit(of_prompt)
            if answers is not None and (logprobs is not None or not ask.prompt_logprobs):
                return await asyncio.to_thread(wire.sample_response, answers, logprobs)
        if self._frozen is None:
            self._frozen = Frozen(self.base)
        frozen, logprobs = self._frozen, None
        frozen.name(sampler.sampler_id, snapshot)
        answers = await frozen.worker.submit(ask)
        if ask.prompt_logprobs:
            of_frozen = partial(frozen.prompt_logprobs, sampler.sampler_id, ask.prompt, ask.prompt_logprobs)
            logprobs = await frozen.worker.submit(of_frozen)
        return await asyncio.to_thread(wire.sample_response, answers, logprobs)

    async def _retrieve(self, body: Mapping[str, Any], request: web.Request) -> Any:
        from aiohttp import web

        request_id = body.get("request_id")
        if not isinstance(request_id, str):
            raise invalid("request_id", "a text")
        result = await self._requests.result(request_id)
        if result is None:
            waits = {"type": "try_again", "request_id": request_id, "queue_state": "active"}
            return web.json_response(waits, status=408, headers={"x-should-retry": "false"})
        if isinstance(result, bytes):
            return web.Response(body=result, content_type=wire.MEDIA_TYPE)
        return result


def weights_of(saved: Saved) -> Path:
    """Returns the directory of saved weights as an adapter."""
    if saved.kind == "sampler_weights":
        return saved.directory
    from rlhf_session.states import find_state

    return find_state(saved.directory) / "model"


def _json(http: HttpServer, handler: Any) -> Any:
    """Returns a handler that gets the body, and whose value becomes the answer."""

    async def answer(request: web.Request) -> web.StreamResponse:
        body = await http.body_of(request)
        return answer_of(await handler(body.value, request))

    answer.__name__ = handler.__name__
    return answer


def first(pending: Pending) -> dict[str, Any]:
    """Returns the first answer to a request: the id by which its result is fetched."""
    return {"request_id": pending.request_id, **pending.about}


def _order(body: Mapping[str, Any]) -> int:
    """Returns the number of a model in its session."""
    return whole(body.get("model_seq_id"), "model_seq_id", 0, 10**9 - 1)


def _digest(body: Mapping[str, Any]) -> bytes:
    return hashlib.blake2b(json.dumps(body, sort_keys=True).encode(), digest_size=16).digest()
