"""Parts of the contract in an earlier version, and what to write instead."""

from __future__ import annotations

import re

BEFORE = "0.9"
"""Version of that contract."""
PAGE = f"the page 'From {BEFORE} to 0.10' has examples"

MOVED = {
    "hook": dict.fromkeys(
        ("sync_connect", "sync_weights", "sync_close"),
        "a weight sync is an object with connect, send and close now (rlhf_host.protocols.WeightSync)",
    ),
    "importance_weights": {
        "old_logprobs": "it is logprobs.old now",
        "current_logprobs": "it is logprobs.current now",
        "sampler_logprobs": "it is logprobs.sampler now",
        "mask": "it is batch.action_mask now",
        **{name: f"it is batch.{name} now" for name in ("advantages", "versions", "version")},
    },
    "Needs": {
        "weights": "it is a field of AlgoNeeds now, and for importance_weights of CorrectionNeeds",
        **dict.fromkeys(("unit_rows", "separator", "ratio"), "it is a field of AlgoNeeds now"),
        **dict.fromkeys(("episodes_at_once", "server"), "it is a field of AgentNeeds now"),
        "overlap_safe": "it is a field of RewardNeeds now",
        **dict.fromkeys(("in_place", "rounded_weights"), "it is a field of WeightSyncTraits now"),
    },
}
"""Place → name that it had → what became of it."""


def moved(place: str, name: str) -> str:
    """Returns what became of a name, after a semicolon; empty for one that never was."""
    return f"; {MOVED[place][name]} ({PAGE})" if name in MOVED.get(place, {}) else ""


def moved_field(error: BaseException) -> str:
    """Returns what became of a field of ``Needs`` that a plugin still gives, or of an argument that is a record now; empty for
    other errors.
    """
    if "PolicyLogprobs" in str(error):
        return f"; logprobs is a record now: logprobs.current, logprobs.old and logprobs.sampler ({PAGE})"
    field = re.search(r"Needs.__init__\(\) got an unexpected keyword argument '(\w+)'", str(error))
    return moved("Needs", field[1]) if field else ""
