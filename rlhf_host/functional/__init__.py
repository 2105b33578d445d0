"""Pure tensor functions that algorithms share. Importing this loads no torch; the first function used does."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlhf_host.lazily import lazily

if TYPE_CHECKING:
    from rlhf_host.functional.kl import kl_estimate as kl_estimate
    from rlhf_host.functional.kl import kl_loss as kl_loss
    from rlhf_host.functional.options import PolicyLossOptions as PolicyLossOptions
    from rlhf_host.functional.options import policy_needs as policy_needs
    from rlhf_host.functional.policy import importance_ratio as importance_ratio
    from rlhf_host.functional.policy import policy_loss as policy_loss
    from rlhf_host.functional.policy import policy_losses as policy_losses
    from rlhf_host.functional.returns import discounted_sum as discounted_sum
    from rlhf_host.functional.returns import gae as gae
    from rlhf_host.functional.returns import value_loss as value_loss
    from rlhf_host.functional.returns import whiten as whiten
    from rlhf_host.functional.statistics import group_mean as group_mean
    from rlhf_host.functional.statistics import group_normalize as group_normalize
    from rlhf_host.functional.statistics import group_sizes as group_sizes
    from rlhf_host.functional.statistics import leave_one_out as leave_one_out
    from rlhf_host.functional.statistics import masked_mean as masked_mean
    from rlhf_host.functional.statistics import masked_sum as masked_sum
    from rlhf_host.functional.statistics import on_actions as on_actions
    from rlhf_host.functional.statistics import suffix_sum as suffix_sum
    from rlhf_host.functional.statistics import turn_advantages as turn_advantages
    from rlhf_host.functional.statistics import with_siblings as with_siblings
    from rlhf_host.functional.twins import twin as twin

__getattr__, __dir__, __all__ = lazily(__name__)
