"""Which Prometheus metric, with which labels, a metric of a run is."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property

PREFIX = "rlhf_"


@dataclass(frozen=True, eq=False)
class Family:
    """A Prometheus metric, for all metrics of a run that the pattern matches. Its groups are labels."""

    pattern: str
    name: str
    help: str
    counts: bool = False
    """True: values of steps add up to a counter."""
    scale: float = 1.0
    """Factor to the unit that the name says."""
    of_role: bool = False
    """True: it has the label ``role``, and the pattern stands for what follows the role's name."""

    @cached_property
    def compiled(self) -> re.Pattern[str]:
        return re.compile(self.pattern, re.DOTALL)

    @cached_property
    def labels(self) -> tuple[str, ...]:
        return ("run", *(("role",) if self.of_role else ()), *self.compiled.groupindex)


DATA = r"eval/(?:(?P<data>.+)/)?"
"""The beginning of a metric of an evaluation, which may name one of several sources of data."""
GB = 1e9

OTHER = Family(r"(?P<metric>.*)", "metric", "Any other metric of the last step, by its name in metrics.jsonl.")
OTHER_EVAL = Family(r"eval/(?P<metric>.*)", "eval_metric", "Any other metric of the last evaluation, by its name.")

FAMILIES = (
    # Is it learning?
    Family(r"reward/(?P<stat>mean|std|min|max)", "reward", "Total reward of the last step's answers, after all transforms."),
    Family(r"reward/(?P<source>[^/]+)", "reward_source_mean", "Mean of what one reward plugin gave in the last step."),
    Family(r"score/mean", "score_mean", "Mean score of the last step's answers, where 1 is right."),
    Family(
        r"groups/no_variance", "groups_without_variance_ratio", "Share of the groups whose answers all got the same reward."
    ),
    Family(
        DATA + r"pass@(?P<k>\d+)(?:/(?P<stat>stderr|low|high))?",
        "eval_pass_ratio",
        "Chance that one of k answers solves a task of the last evaluation.",
    ),
    Family(DATA + r"score/(?P<stat>mean|stderr|low|high)", "eval_score", "Score of the answers of the last evaluation."),
    Family(DATA + r"reward/(?P<stat>mean|stderr)", "eval_reward", "Reward of the answers of the last evaluation."),
    Family(DATA + r"reward/(?P<source>[^/]+)", "eval_reward_source_mean", "Mean of one of several rewards, last evaluation."),
    Family(DATA + r"length/mean", "eval_answer_length_tokens", "Mean length of an answer of the last evaluation."),
    Family(DATA + r"truncated", "eval_truncated_answers_ratio", "Share of the last evaluation's answers that were cut off."),
    Family(DATA + r"failed/share", "eval_failed_episodes_ratio", "Share of the last evaluation's episodes that failed."),
    Family(DATA + r"loss", "eval_loss", "Loss on rows that are held out."),
    OTHER_EVAL,
    # Is it stable?
    Family(r"loss/(?P<term>.+)", "loss_term", "One term of the last step's loss, with its coefficient.", of_role=True),
    Family(r"loss", "loss", "Loss of the last step.", of_role=True),
    Family(r"grad_norm", "gradient_norm", "Size of the gradient before clipping.", of_role=True),
    Family(r"lr", "learning_rate", "Learning rate of the last step.", of_role=True),
    Family(r"clip_fraction", "clipped_tokens_ratio", "Share of the tokens that the loss held back.", of_role=True),
    Family(r"entropy", "entropy_nats", "Entropy of the policy per token.", of_role=True),
    Family(r"kl", "kl_nats", "Distance of the policy from the reference.", of_role=True),
    Family(
        r"mismatch/(?P<stat>mean|max|k3)",
        "sampler_mismatch_nats",
        "Disagreement of trainer and engine about the same tokens.",
    ),
    Family(r"staleness/(?P<stat>mean|max)", "staleness_versions", "Age of the tokens that were trained on."),
    Family(r"train/skipped", "updates_skipped", "Updates that were refused, as they were not finite.", counts=True),
    # Is it fast?
    Family(r"time/step", "step_duration_seconds", "Time of the last step."),
    Family(r"time/(?P<phase>.+)", "phase_duration_seconds", "Time of a phase of the last step; phases may overlap."),
    Family(r"tokens_per_s", "tokens_per_second", "Tokens of answers per second of the last step."),
    Family(r"tokens", "tokens", "Tokens of answers that were trained on.", counts=True),
    Family(r"mfu", "model_flops_utilisation_ratio", "Part of what the GPUs could compute that training used."),
    Family(r"tflops", "model_flops_per_second", "Operations of the model in training, per second and device.", scale=1e12),
    Family(r"memory/(?P<kind>rss|cuda)_gb", "memory_peak_bytes", "Peak memory of the largest training process.", scale=GB),
    Family(r"sync/gb", "weight_sync_bytes", "Weights sent to the engines.", counts=True, scale=GB),
    Family(r"sync/gb_per_s", "weight_sync_bytes_per_second", "Speed of sending weights to the engines.", scale=GB),
    Family(r"epoch", "epoch", "Pass over the data."),
    Family(r"version", "weights_version", "Version of the engines' weights."),
    # Engines and devices
    Family(r"engine/kv_use", "engine_kv_cache_usage_ratio", "Largest share of an engine's cache that was in use."),
    Family(r"engine/preemptions", "engine_preemptions", "Requests that lost their place in an engine's cache.", counts=True),
    Family(r"engine/(?P<kind>rss|cuda)_gb", "engine_memory_peak_bytes", "Peak memory of the largest engine.", scale=GB),
    Family(r"engine/(?P<metric>.+)", "engine_metric", "What an engine measures of itself, by its name."),
    Family(r"gpu/(?P<device>.+)/utilisation", "gpu_utilisation_ratio", "Share of the last step in which a GPU worked."),
    Family(r"gpu/(?P<device>.+)/power_w", "gpu_power_watts", "Mean power of a GPU over the last step."),
    Family(r"gpu/(?P<device>.+)/memory_gb", "gpu_memory_used_bytes", "Most memory of a GPU in use, last step.", scale=GB),
    Family(r"gpu/(?P<device>.+)/temperature_c", "gpu_temperature_celsius", "Highest temperature of a GPU, last step."),
    # What does it say?
    Family(r"length/(?P<stat>mean|max)", "answer_length_tokens", "Length of the last step's answers."),
    Family(r"truncated", "truncated_answers_ratio", "Share of the last step's answers that were cut off."),
    Family(r"rollout/identical", "identical_groups_ratio", "Share of the groups in which all answers are the same."),
    Family(r"rollout/(?P<result>finished|truncated|failed)", "episodes", "Episodes, by their end.", counts=True),
    Family(r"rollout/failed/(?P<cause>.+)", "episode_failures", "Failed episodes, by agent and kind of error.", counts=True),
    Family(r"rollout/unjudged", "unjudged_answers", "Answers that a reward could not score.", counts=True),
    Family(r"rollout/drawn", "tasks_drawn", "Tasks that were drawn.", counts=True),
    Family(r"rollout/groups", "groups_trained", "Groups that were trained on.", counts=True),
    Family(r"rollout/dropped", "groups_dropped", "Groups that a filter dropped.", counts=True),
    Family(r"rollout/dropped/(?P<reason>.+)", "groups_dropped_by_reason", "Groups that a filter dropped, why.", counts=True),
    OTHER,
)
"""In order: the first that matches is the metric's."""


def found(name: str, roles: Collection[str]) -> tuple[Family, tuple[str, ...]]:
    """Returns the family of a metric, and the values of its labels but the run's.

    Args:
        roles: the run's. Metrics of another role than the actor begin with its name.
    """
    role, _, rest = name.partition("/")
    if role not in roles or not rest:
        role, rest = "actor", name
    for family in FAMILIES:
        if match := family.compiled.fullmatch(rest if family.of_role else name):
            return family, (*((role,) if family.of_role else ()), *(value or "" for value in match.groupdict().values()))
    raise AssertionError(name)  # the last one matches anything
