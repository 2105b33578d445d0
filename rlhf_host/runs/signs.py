"""Signs of trouble in the metrics of a run's steps."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from rlhf_host.errors import beyond
from rlhf_host.plugins.recommended import recommended

BEGINNING = 5
"""Number of first steps whose mean entropy counts as the one at the start."""
GONE = 20
"""Number of steps without a sign after which it is reported again."""

ENTROPY, OF_START = 0.05, 0.05
"""Nats per token, and share of the entropy at the start: a policy that is below both hardly explores."""
IDENTICAL, LEARNED = 0.9, 0.8
"""Share of the groups, and the mean score above which neither this nor a low entropy is a sign: a model that knows the one
right answer always gives it.
"""
DROPPED = 0.9
"""Share of the groups."""
MISMATCH, MISMATCH_K3 = 0.05, 0.01
"""Nats per token. Engines in 16 bits are usually around 0.01, and 0.001 in k3. NeMo-RL's nightly tests fail above a mean factor
of 1.05 to 1.1 between the two probabilities (0.05 to 0.1 nats), and above a divergence of 0.01."""
TRUNCATED = 0.9
"""Share of the trajectories."""


@dataclass(slots=True)
class Signs:
    """Reports each sign once, and again after it had disappeared. A resumed run starts anew."""

    _beginning: list[float] = field(default_factory=list)
    _looks: int = 0
    _seen: dict[str, int] = field(default_factory=dict)
    """Sign → the last check that found it."""

    def look(self, metrics: Mapping[str, float]) -> list[str]:
        """Returns the reports about a step."""
        self._looks += 1
        entropy = metrics.get("entropy", math.nan)
        if len(self._beginning) < BEGINNING and math.isfinite(entropy):
            self._beginning.append(entropy)
        reports = []
        for sign, report in self._signs(metrics):
            if self._looks - self._seen.get(sign, -GONE) > GONE:
                reports.append(report)
            self._seen[sign] = self._looks
        return reports

    def _signs(self, metrics: Mapping[str, float]) -> Iterator[tuple[str, str]]:
        def value(name: str) -> float:
            return metrics.get(name, math.nan)

        start = sum(self._beginning) / max(1, len(self._beginning))
        learned = value("score/mean") > LEARNED
        if (entropy := value("entropy")) < ENTROPY and entropy < OF_START * start and not learned:
            yield (
                "entropy",
                (
                    f"entropy is {entropy:.2g}, and was {start:.2g} in the first steps: the policy hardly explores any more;"
                    f" lower --actor.lr, set an entropy coefficient, or add --with {recommended('extension', 'entropy')}"
                ),
            )
        if (identical := value("rollout/identical")) > IDENTICAL and not learned:
            yield (
                "identical",
                (
                    f"in {identical:.0%} of the groups all answers are the same (rollout/identical): there is nothing to compare;"
                    " see the answers in trajectories/, and entropy"
                ),
            )
        drawn = value("rollout/dropped") + value("rollout/groups")
        if drawn and (dropped := value("rollout/dropped") / drawn) > DROPPED:
            yield (
                "dropped",
                (
                    f"filters dropped {dropped:.0%} of the groups (rollout/dropped/REASON says why): most of what is sampled is not"
                    " trained on; the tasks may be too hard or too easy for this model"
                ),
            )
        limits = {"mismatch/mean": MISMATCH, "mismatch/k3": MISMATCH_K3}
        if high := [f"{name} is {beyond(value(name), limit)}" for name, limit in limits.items() if value(name) > limit]:
            yield (
                "mismatch",
                (
                    f"{' and '.join(high)}: the engine samples from another distribution than the trainer's; correct for it"
                    f" with --with {recommended('extension', 'mismatch')}, or compute both in the same type"
                ),
            )
        rest = "are left out: the other figures are of the rest"
        for name, text in (
            ("eval/unjudged", f"held-out answers could not be judged (eval/unjudged) and {rest}"),
            ("rollout/unjudged", f"trajectories could not be judged (rollout/unjudged) and {rest}"),
            (
                "eval/failed",
                "held-out episodes failed (eval/failed): they count as wrong, and rewards and lengths are of the rest",
            ),
            ("rollout/failed", f"episodes failed (rollout/failed) and {rest}"),
        ):
            if (lost := value(name)) > 0:
                yield name, f"{lost:.0f} {text}"
        if value("grad_norm") == 0 and value("groups/no_variance") != 1:  # where it is 1, that is reported already
            yield "gradient", "grad_norm is 0: this step taught nothing; see advantages/std and the loss masks"
        if (truncated := value("truncated")) > TRUNCATED:
            yield (
                "truncated",
                (
                    f"{truncated:.0%} of the trajectories are cut off (truncated): raise --rollout.max-new-tokens, or"
                    f" --with {recommended('extension', 'truncated')}"
                ),
            )
