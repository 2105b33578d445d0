"""The table of an X-ray for the terminal, as wide as that is."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from itertools import groupby

from rich.console import Console
from rich.table import Table
from rich.text import Text

from rlhf_host.commands import visible
from rlhf_xray.measures import XRay

COSINE = 6
"""Width of a column of cosines."""


def show(found: XRay, console: Console | None = None) -> None:
    """Prints what was found."""
    console = Console() if console is None else console
    for text in heading(found):
        console.print(Text(visible(text)))
    console.print()
    longest = max(len(each.name) for each in found.algorithms) + 5
    beside = found.spread(max(1, min(len(found.algorithms), (console.width - longest - 31) // COSINE)))
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("", justify="right", no_wrap=True)
    table.add_column("algorithm", overflow="fold")
    for title in ("length", "rows", "tokens", "half in"):
        table.add_column(title, justify="right", no_wrap=True)
    for number in beside:
        table.add_column(f"to {number + 1}" if number == beside[0] else str(number + 1), justify="right", no_wrap=True)
    for number, each in enumerate(found.algorithms):
        table.add_row(
            str(number + 1),
            each.name,
            f"{each.length:.3g}",
            *("-" if each.unseen else str(value) for value in (each.rows, each.tokens, each.half)),
            *(cosine(found.cosines[number][other]) for other in beside),
        )
    console.print(table)
    console.print()
    for text in below(found, len(beside)):
        console.print(Text(visible(text)))


def heading(found: XRay) -> Iterator[str]:
    """Yields what is compared."""
    about = found.about
    yield (
        f"{about['answers']} answers to {about['prompts']} prompts, {about['tokens']} tokens,"
        f" mean reward {about['reward_mean']:.3g}: step {about['step']} of {about['from']}"
    )
    of = "" if about["weights"] == "all" else f" ({about['weights']})"
    yield f"Gradients by {about['numbers']:,} weights{of} of {about['model']}"
    gap = about["logprob_gap"]
    ratios = "ratios are 1, as in the first update of the batch (--old-logprobs model)"
    if about["old_logprobs"] == "file":
        ratios = "ratios are to the log-probabilities of the file, as in a later update (--old-logprobs file)"
    far = (
        "the file has none"
        if gap is None
        else f"those of file and model differ by {gap['mean']:.2g} on average, {gap['max']:.2g} at most"
    )
    yield f"Log-probabilities: {far}; {ratios}"
    yield from (f"Notice: {notice}" for notice in about["notices"])


def below(found: XRay, beside: int) -> Iterator[str]:
    """Yields how to read the table, which gradients are alike, and what is left out."""
    yield (
        "length: of the gradient; rows, tokens: answers and tokens that act; half in: half of the push is in so few tokens;"
        " last columns: cosines to the algorithm with that number"
    )
    if beside < len(found.algorithms):
        yield f"Cosines to the {beside} that differ most; --json and --output have all"
    if unseen := [each.name for each in found.algorithms if each.unseen]:
        yield f"No push of single tokens: {', '.join(unseen)}: the loss reads whole distributions"
    for group in found.alike():
        yield f"One direction: {', '.join(group)}"
    for why, names in by_reason(found.left_out.items()):
        yield f"Left out: {', '.join(names)}: {why}"


def by_reason(left_out: Iterable[tuple[str, str]]) -> Iterator[tuple[str, list[str]]]:
    """Yields each reason with the algorithms that it keeps out."""
    ordered = sorted(((why, name) for name, why in left_out))
    for why, group in groupby(ordered, key=lambda item: item[0]):
        yield why, [name for _, name in group]


def cosine(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.3f}".replace("0.", ".", 1)
