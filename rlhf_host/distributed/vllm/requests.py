"""Conversion of requests to vLLM's form, and of its answers to the host's."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rlhf_host.distributed.vllm.arguments import versions_by_token
from rlhf_host.distributed.vllm.plugin import MOST_TOLD, TIES
from rlhf_host.engines.requests import Request
from rlhf_host.errors import RunError, UserError
from rlhf_host.records.episodes import FinishReason, Generation, SampleKey, Sampling
from rlhf_host.records.numbers import Numbers
from rlhf_host.records.pictures import images_of
from rlhf_host.records.token_sets import pack_tokens, support_trace

REASONS: dict[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}


@dataclass(eq=False, slots=True)
class Sent:
    """A request and its caller: made on the event loop, answered from the engine's thread."""

    request: Request
    loop: asyncio.AbstractEventLoop
    number: str = ""
    """Name of the request in vLLM."""
    future: asyncio.Future[Generation] = field(init=False)

    def __post_init__(self) -> None:
        self.future = self.loop.create_future()


def answer(finished: Iterable[tuple[Sent, Generation | BaseException]]) -> None:
    """Gives callers their answers; wakes each loop once."""
    by_loop = defaultdict(list)
    for call, result in finished:
        by_loop[call.loop].append((call.future, result))
    for loop, answers in by_loop.items():
        with contextlib.suppress(RuntimeError):  # the caller's loop is gone
            loop.call_soon_threadsafe(_resolve, answers)


def _resolve(answers: Iterable[tuple[asyncio.Future[Generation], Generation | BaseException]]) -> None:
    for future, result in answers:
        if not future.done():
            settle: Any = future.set_exception if isinstance(result, BaseException) else future.set_result
            settle(result)


def request_seed(key: SampleKey) -> int:
    """Returns a 63-bit seed, the same on every machine, so a request that is repeated elsewhere gives the same completion."""
    return int.from_bytes(hashlib.blake2b(",".join(map(str, key)).encode(), digest_size=8).digest(), "big") >> 1


def sampling_params(request: Request, ends: set[int], context_length: int, vocabulary: int, *, seeds: bool = True) -> Any:
    """Returns vLLM's ``SamplingParams``; ``ends`` are the tokens that end any completion, ``seeds`` as in ``Vllm.Options``."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    sampling = request.sampling
    return SamplingParams(
        max_tokens=min(sampling.max_new_tokens, context_length - len(request.token_ids)),
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        seed=request_seed(request.key) if seeds else None,
        stop=list(sampling.stop) or None,
        stop_token_ids=sorted(ends | set(sampling.stop_token_ids)),
        ignore_eos=True,  # the end tokens are among the above
        detokenize=bool(sampling.stop),
        skip_special_tokens=False,
        include_stop_str_in_output=True,
        logprobs=min(told(sampling), vocabulary),
        flat_logprobs=True,
        output_kind=RequestOutputKind.FINAL_ONLY,
        skip_clone=True,
    )


def told(sampling: Sampling) -> int:
    """Returns how many of the likeliest tokens vLLM is asked for: all that top-k leaves, with some that tie with the last one."""
    tells = sampling.support and sampling.temperature > 0 and 0 < sampling.top_k <= MOST_TOLD
    return sampling.top_k + TIES if tells else 0


def answer_of(request: Request, output: Any, version: int) -> Generation | RunError | UserError:
    """Returns the completion in vLLM's ``RequestOutput``; an error if vLLM expanded pictures to other tokens than the trainer's.

    Args:
        version: as in ``generation_of``.
    """
    if images_of(request.token_ids) and list(output.prompt_token_ids) != list(request.token_ids):
        return UserError(
            f"engine vllm: vLLM makes {len(output.prompt_token_ids)} tokens of a prompt with pictures, and transformers'"
            f" processor {len(request.token_ids)}, or others: the trainer would learn other prompts than it sampled; choose another"
            " --engine"
        )
    return generation_of(request.sampling, output, version)


def generation_of(sampling: Sampling, output: Any, version: int) -> Generation | RunError:
    """Returns the completion in vLLM's ``RequestOutput``.

    Args:
        version: version of the current weights, for messages, and for tokens where vLLM does not tell theirs.
    """
    completion = output.outputs[0]
    tokens, most, traces = list(completion.token_ids), told(sampling), dict[str, Any]()
    width = completion.logprobs.end_indices[0] if most and tokens else 1
    logprobs = [0.0] * len(tokens) if sampling.temperature == 0 else completion.logprobs.logprobs[: len(tokens) * width : width]
    if len(logprobs) != len(tokens) or not all(map(math.isfinite, logprobs)):
        return RunError(f"generation under weight version {version} stopped: the model's logits are not finite")
    if completion.finish_reason not in REASONS:
        return RunError(f"engine vllm: a request ended with {completion.finish_reason!r}")
    versions = [version] * len(tokens)
    if versions_by_token():
        spans = completion.weight_versions or ()
        versions = [int(span.version) for span in spans for _ in range(span.start, span.end)]
    per_token = Numbers("i", tokens), Numbers("f", logprobs), Numbers("i", versions)
    if (experts := getattr(completion, "routed_experts", None)) is not None:
        traces["routed_experts"] = experts
    if most:
        flat = completion.logprobs
        values, ids = (np.reshape(each[: len(tokens) * width], (-1, width))[:, 1:] for each in (flat.logprobs, flat.token_ids))
        drawable = np.isfinite(values)
        if width > most and drawable.all(1).any():
            return RunError(
                f"engine vllm: {TIES} tokens or more tie with the last of top_k {sampling.top_k}, so the tokens that could be"
                " drawn are not known: set --engine.dtype float32, or another --rollout.top-k"
            )
        sets = (pack_tokens(np.sort(own[some])) for own, some in zip(ids, drawable, strict=True))
        traces |= support_trace(len(output.prompt_token_ids), sets)
    return Generation(*per_token, REASONS[completion.finish_reason], traces)
