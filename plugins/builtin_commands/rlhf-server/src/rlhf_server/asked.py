"""Sampling settings of a request, and parameters that the run ignores."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from rlhf_host import Sampling
from rlhf_host.rollouts import misfit
from rlhf_server.errors import invalid
from rlhf_server.limits import Limits

REFUSED = {
    "functions": "use tools",
    "function_call": "use tools",
    "audio": "this policy reads text",
    "prediction": "not supported",
    "suffix": "not supported",
    "best_of": "use n",
    "use_beam_search": "tokens come from the run's own distribution",
    **dict.fromkeys(
        ("guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs"),
        "tokens come from the run's own distribution",
    ),
}
"""Parameters that would change the meaning of the answer."""
DISTRIBUTION = ("temperature", "top_p", "top_k", "min_p")
"""Parameters of the distribution."""
PLAIN = re.compile(r"[A-Za-z_][A-Za-z0-9_.]{0,59}")
"""Names of parameters that a header may repeat."""
LENGTHS = ("max_completion_tokens", "max_tokens", "max_output_tokens")


def sampling_of(
    body: Mapping[str, Any], run: Sampling, limits: Limits, *, free: bool = False, stop_name: str = "stop"
) -> Sampling:
    """Returns the run's sampling with the request's length and stops and, if it is ``free``, its distribution too. Raises
    ``ApiError`` for parameters that cannot be followed.

    Args:
        stop_name: what the client calls its stop texts.
    """
    for name, way in REFUSED.items():
        if body.get(name) not in (None, False):
            raise invalid(name, way)
    length = run.max_new_tokens
    for name in LENGTHS:
        if (value := integer(body, name, 1)) is not None:
            length = min(length, value)
    stop = body.get("stop")
    stops = [stop] if isinstance(stop, str) else [] if stop is None else stop
    texts = isinstance(stops, list) and all(isinstance(one, str) and 0 < len(one) <= limits.stop_characters for one in stops)
    if not texts or len(stops) > limits.stops:
        raise invalid(
            stop_name, f"a text, or at most {limits.stops} texts, of at most {limits.stop_characters} characters each"
        )
    sampling = replace(run, max_new_tokens=length, stop=tuple(stops))
    if not free:
        return sampling
    given = {name: body[name] for name in DISTRIBUTION if body.get(name) is not None}
    for name, value in given.items():
        if problem := misfit(replace(sampling, **{name: value})):
            raise invalid(name, problem.removeprefix(f"{name} should be "))
    return replace(sampling, **given)


def ignored_in(body: Mapping[str, Any], run: Sampling, known: Collection[str], *, free: bool = False) -> list[str]:
    """Returns the request's parameters that have no effect, except those with the same values as the run's."""
    same: dict[str, Any] = {"temperature": run.temperature, "top_p": run.top_p, "top_k": run.top_k, "min_p": run.min_p}
    same |= {"tool_choice": "auto", "store": False, "parallel_tool_calls": True, "response_format": {"type": "text"}}
    followed = {*known, *LENGTHS, "stop", "n", "model", "stream", "stream_options", "logprobs", "metadata", *REFUSED}
    followed |= {"echo", "top_logprobs", "return_token_ids", "return_tokens_as_token_ids"}
    followed |= {*DISTRIBUTION, "seed"} if free else set()
    given = [name for name, value in body.items() if value is not None and name not in followed]
    odd = [name for name in given if name not in same or body[name] != same[name]]
    return [name if PLAIN.fullmatch(name) else "other" for name in odd[:50]]


def with_unread(body: Mapping[str, Any], known: Collection[str]) -> dict[str, Any]:
    """Returns the request with a parameter ``tools.NAME`` for each field of its tools that is not read: without effect, which
    its answer says.
    """
    tools = body.get("tools")
    fields = {name for tool in tools if isinstance(tool, dict) for name in tool} if isinstance(tools, list) else set()
    return {**body, **{f"tools.{name}": True for name in sorted(fields - {"type", *known})}}


def seed_of(body: Mapping[str, Any], *, free: bool) -> int | None:
    """Returns the seed of a request that chooses one. Raises ``ApiError`` for a value that is none."""
    return integer(body, "seed", 0, 2**63 - 1) if free else None


def wants_usage(body: Mapping[str, Any]) -> bool:
    """Returns True if a stream ends with the usage. Raises ``ApiError`` for options that are not an object."""
    options = body.get("stream_options") or {}
    if not isinstance(options, Mapping):
        raise invalid("stream_options", "an object")
    return bool(options.get("include_usage"))


def integer(body: Mapping[str, Any], name: str, least: int, most: int | None = None) -> int | None:
    """Returns an integer. Raises ``ApiError`` for any value that is not an integer of this range."""
    value = body.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < least or (most is not None and value > most):
        until = "" if most is None else f" to {most}"
        raise invalid(name, f"an integer from {least}{until}, not {reprlib.repr(value)}")
    return value
