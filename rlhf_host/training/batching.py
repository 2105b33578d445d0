"""Micro-batches by token budget: groups stay together while their prompt is shared; otherwise rows of similar length do."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence

from rlhf_host.config.schema import RunConfig
from rlhf_host.errors import RunError, UserError

Cost = Callable[[list[int]], int]
"""Rows → tokens of one pass over them."""
UNEVEN = 0.03
"""Excess of the heaviest share over the mean above which groups are split, which costs their prompt once more."""


def plan_microbatches(
    units: Sequence[Sequence[int]], lengths: Sequence[int], budget: int, cost: Cost, together: Cost | None = None
) -> list[list[int]]:
    """Splits an optimizer batch into micro-batches. Every row appears once. No part costs more than ``budget``, unless a single
    row does, or a unit that may not be split.

    Args:
        units: rows that belong together: a group, or the rows of a unit.
        lengths: tokens per row, prompt included.
        budget: tokens of one forward and backward pass.
        cost: cost of rows in the layout that will be used.
        together: tokens that are computed for rows; given if no unit may be split. What attention gathers of them is not
            counted, because it is known only when the model is loaded, and data is refused before.

    Raises:
        RunError: more tokens than the budget are computed for a unit that may not be split.
    """
    everything = [row for unit in units for row in unit]
    if not everything:
        return []
    # No layout costs more than all rows padded to the longest, which is known at once.
    if len(everything) * max(lengths[i] for i in everything) <= budget or cost(everything) <= budget:
        return [everything]
    pieces: list[list[int]] = []
    for unit in sorted(units, key=lambda rows: (-max(lengths[i] for i in rows), rows[0])):
        rows = sorted(unit, key=lambda i: (-lengths[i], i))
        if cost(rows) <= budget or len(rows) == 1:
            pieces.append(rows)
        elif together is not None:
            if (tokens := together(rows)) > budget:
                raise RunError(
                    f"rows that must stay together cost {tokens} tokens; raise train.max_tokens_per_microbatch (now {budget})"
                )
            pieces.append(rows)
        else:
            pieces.extend(_fill([[i] for i in rows], budget, cost))
    return _fill(pieces, budget, cost)


def _fill(pieces: Sequence[list[int]], budget: int, cost: Cost) -> list[list[int]]:
    batches: list[list[int]] = []
    for piece in pieces:
        if batches and cost(batches[-1] + piece) <= budget:
            batches[-1] = batches[-1] + piece
        else:
            batches.append(list(piece))
    return batches


def evened(
    plan: list[list[int]], count: int, pieces: Sequence[list[int]], budget: int, cost: Cost, work: Callable[[list[int]], float]
) -> list[list[int]]:
    """Returns ``count`` micro-batches of the rows of ``plan``, the heaviest first. Ranks that run as many passes wait in each for
    the heaviest, so rows are dealt anew for equally much work in each pass, if that computes hardly more tokens; else ``plan``
    is filled up with empty ones.

    Args:
        pieces: the rows in units that are not split here.
        work: time of a pass over rows, in any unit.
    """
    if plan and count > 1:
        hands = deal(pieces, [work(piece) for piece in pieces], count)
        dealt = [[row for piece in hand for row in piece] for hand in hands]
        costs = [cost(rows) for rows in dealt if rows]
        if max(costs) <= budget and sum(costs) <= (1 + UNEVEN) * sum(map(cost, plan)):
            plan = dealt
    return sorted(plan, key=lambda rows: -work(rows) if rows else 0.0) + [[]] * (count - len(plan))


def deal(units: Sequence[list[int]], sizes: Sequence[float], count: int) -> list[list[list[int]]]:
    """Distributes units to ``count`` hands so that each has about the same sum of sizes: the largest first, to the hand with the
    least. Within a hand they keep their order; with fewer units than hands some stay empty.
    """
    if count == 1:
        return [list(units)]
    loads, hands = [(0.0, hand) for hand in range(count)], [list[int]() for _ in range(count)]
    for number in sorted(range(len(units)), key=lambda i: (-sizes[i], i)):
        load, hand = loads[0]
        heapq.heapreplace(loads, (load + sizes[number], hand))
        hands[hand].append(number)
    return [[list(units[number]) for number in sorted(hand)] for hand in hands]


def refuse_large_answers(config: RunConfig, context: int | None, prompt: int) -> str | None:
    """Raises ``UserError`` if two sampled rows that must stay together may cost more than a micro-batch may. This check runs
    before training, so that no run ends there. Returns a warning if only the model's context limits the rows.

    Args:
        context: longest row of the model, if that is known.
        prompt: tokens of the longest prompt that is known.
    """
    rollout, budget = config.rollout, config.train.max_tokens_per_microbatch
    rows = [length for length in (rollout.max_tokens, context) if length is not None]
    one_answer = config.agent == RunConfig().agent and not config.agents
    if not one_answer and not rows:
        return None
    longest = min([*([rollout.max_new_tokens] if one_answer else []), *(length - prompt for length in rows)])
    # Prompts are shared where that is worth it, and the model can.
    cost = (1 if config.train.shared_prefix == "on" else 2) * prompt + 2 * (longest - 1)
    if cost <= budget:
        return None
    lower = "max-new-tokens" if one_answer else "max-tokens"
    told = (
        f"two rows that must stay together may cost {cost:,} tokens (answers of {longest:,}, and a prompt), and"
        f" train.max_tokens_per_microbatch is {budget:,}, which ends the run where they do: set"
        f" --train.max-tokens-per-microbatch {cost} or more, or a smaller --rollout.{lower}"
    )
    if one_answer or rollout.max_tokens is not None:
        raise UserError(told)
    return told


def group_rows(ids: Sequence[int]) -> list[list[int]]:
    """Groups rows by equal id, in order of first appearance."""
    rows: dict[int, list[int]] = {}
    for row, number in enumerate(ids):
        rows.setdefault(number, []).append(row)
    return list(rows.values())
