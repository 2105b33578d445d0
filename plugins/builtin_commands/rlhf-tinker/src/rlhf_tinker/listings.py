"""Listings of training runs and of saved weights, which can be asked for without a model."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from rlhf_tinker.bodies import answer_of, page, read_ttl
from rlhf_tinker.states import RunRecord, States, stamp

if TYPE_CHECKING:
    from aiohttp import web


class Listings:
    """Handlers of requests about what is saved.

    Args:
        last_request: the time of a loaded model's last request, by the id of its run; None: it is not loaded.
    """

    def __init__(self, states: States, last_request: Callable[[str], float | None]):
        self.states, self._last_request = states, last_request

    async def weights_info(self, body: Mapping[str, Any], request: web.Request) -> Any:
        run = self.states.find(body.get("tinker_path")).run
        return {
            "base_model": run.base_model,
            "optimizer_config": {"type": "adamw"},
            "is_lora": True,
            "lora_rank": run.lora_rank,
            "train_unembed": False,
            "train_mlp": run.train_mlp,
            "train_attn": run.train_attn,
        }

    async def training_runs(self, request: web.Request) -> web.StreamResponse:
        offset, limit = page(request)
        runs = await asyncio.to_thread(self.states.runs)
        rows = [await asyncio.to_thread(self._run_row, run) for run in runs[offset : offset + limit]]
        return answer_of({"training_runs": rows, "cursor": {"offset": offset, "limit": limit, "total_count": len(runs)}})

    async def training_run(self, request: web.Request) -> web.StreamResponse:
        run = self.states.run(request.match_info["run"])
        return answer_of(await asyncio.to_thread(self._run_row, run))

    def _run_row(self, run: RunRecord) -> dict[str, Any]:
        saved = sorted(self.states.listed(run.run_id), key=lambda each: each.time)
        last = max([run.created, *(each.time for each in saved), self._last_request(run.run_id) or 0.0])
        newest = {each.kind: each.row() for each in saved}
        return {
            "training_run_id": run.run_id,
            "base_model": run.base_model,
            "model_owner": "local",
            "is_lora": True,
            "corrupted": False,
            "lora_rank": run.lora_rank,
            "last_request_time": stamp(last),
            "last_checkpoint": newest.get("weights"),
            "last_sampler_checkpoint": newest.get("sampler_weights"),
            "user_metadata": run.user_metadata or None,
        }

    async def checkpoints(self, request: web.Request) -> web.StreamResponse:
        run_id = request.match_info["run"]
        return answer_of({"checkpoints": [saved.row() for saved in self.states.listed(run_id)], "cursor": None})

    async def all_checkpoints(self, request: web.Request) -> web.StreamResponse:
        offset, limit = page(request)
        saved = sorted(await asyncio.to_thread(lambda: list(self.states.listed())), key=lambda each: each.time, reverse=True)
        rows = [each.row() for each in saved[offset : offset + limit]]
        return answer_of({"checkpoints": rows, "cursor": {"offset": offset, "limit": limit, "total_count": len(saved)}})

    async def delete_checkpoint(self, request: web.Request) -> web.StreamResponse:
        self.states.remove(_named(request))
        return answer_of({})

    async def set_ttl(self, body: Mapping[str, Any], request: web.Request) -> Any:
        self.states.set_ttl(self.states.find(_named(request)), read_ttl(body))
        return {}


def _named(request: web.Request) -> str:
    at = request.match_info
    return f"tinker://{at['run']}/{at['kind']}/{at['name']}"
