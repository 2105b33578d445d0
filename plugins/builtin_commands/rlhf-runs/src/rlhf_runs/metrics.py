"""Metrics to look at first."""

from __future__ import annotations

PLOTTED = ("reward/mean", "kl", "entropy", "length/mean", "loss")
"""Metrics to plot besides the headline, of those that there are."""

TELLING = (
    *(
        "score/mean",
        "reward/mean",
        "loss",
        "accuracy",
        "kl",
        "entropy",
        "length/mean",
        "truncated",
        "grad_norm",
        "clip_fraction",
    ),
    *(
        "mismatch/mean",
        "groups/no_variance",
        "rollout/dropped",
        "staleness/mean",
        "time/step",
        "tokens_per_s",
        "memory/actor_gb",
    ),
)
"""Metrics with which tables and the page begin."""
