"""Pure tensor functions that algorithms share. Importing this loads no torch; the first function used does."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlhf_host.functional.options import (
    REFERENCE,
    PolicyLossOptions,
    PreferenceLossName,
    PreferenceOptions,
    SupervisedOptions,
    policy_needs,
    preference_needs,
)
from rlhf_host.lazily import lazily

if TYPE_CHECKING:
    from rlhf_host.functional.kl import kl_estimate, kl_loss
    from rlhf_host.functional.policy import importance_ratio, policy_loss, policy_losses
    from rlhf_host.functional.preference import chosen_tokens, on_rows, pairs, preference_loss, preference_losses
    from rlhf_host.functional.returns import discounted_sum, gae, value_loss, whiten
    from rlhf_host.functional.statistics import (
        group_mean,
        group_normalize,
        group_sizes,
        leave_one_out,
        masked_mean,
        masked_sum,
        on_actions,
        suffix_sum,
        turn_advantages,
        with_siblings,
    )
    from rlhf_host.functional.supervised import supervised_loss
    from rlhf_host.functional.twins import twin

_HOME = {
    "chosen_tokens": "preference",
    "discounted_sum": "returns",
    "gae": "returns",
    "group_mean": "statistics",
    "group_normalize": "statistics",
    "group_sizes": "statistics",
    "importance_ratio": "policy",
    "kl_estimate": "kl",
    "kl_loss": "kl",
    "leave_one_out": "statistics",
    "masked_mean": "statistics",
    "masked_sum": "statistics",
    "on_actions": "statistics",
    "on_rows": "preference",
    "pairs": "preference",
    "policy_loss": "policy",
    "policy_losses": "policy",
    "preference_loss": "preference",
    "preference_losses": "preference",
    "suffix_sum": "statistics",
    "supervised_loss": "supervised",
    "turn_advantages": "statistics",
    "twin": "twins",
    "value_loss": "returns",
    "whiten": "returns",
    "with_siblings": "statistics",
}

__all__ = [
    "REFERENCE",
    "PolicyLossOptions",
    "PreferenceLossName",
    "PreferenceOptions",
    "SupervisedOptions",
    "policy_needs",
    "preference_needs",
    *_HOME,
]

__getattr__, __dir__ = lazily(__name__, {name: f"{__name__}.{home}" for name, home in _HOME.items()})
