"""``rlhf episodes``: saved episodes in the terminal, each as a tree of its rows."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rlhf_host import UserError
from rlhf_host.commands import near_matches, visible
from rlhf_host.trackers import spread

if TYPE_CHECKING:
    from rlhf_host import Trajectory

HELP_GROUP = "Look at runs"

KINDS = {"prompt": "prompt", "action": "answer", "observation": "seen"}


@click.command()
@click.argument("place", metavar="RUN|FILE.jsonl", type=click.Path(path_type=Path))
@click.option("--step", type=int, help="Of this step; default: the last one there is.")
@click.option("--episode", help="Only this episode, by its id.")
@click.option("--count", type=click.IntRange(0), default=3, show_default=True, help="So many episodes; 0: all.")
@click.option(
    "--worst", is_flag=True, help="Those of the lowest reward, lowest first; default: of several groups, one of them wrong."
)
@click.option(
    "--chars",
    type=click.IntRange(0),
    default=400,
    show_default=True,
    help="Longest text; of longer ones, head and tail are shown. 0: all.",
)
def episodes(place: Path, step: int | None, episode: str | None, count: int, worst: bool, chars: int) -> None:
    """Show episodes that a run or rlhf rollout saved.

    An episode has a row for each conversation that went on by itself. A row that branched off says from which row, and where.
    Texts are shown by turn where the file has tokens (--trajectories.tokens), and otherwise as one text.
    """
    from rlhf_host.runs import read_steps

    steps = read_steps(place, texts=True, joined=True)
    chosen = [each for each in steps if step is None or each.step == step]
    if not chosen:
        raise UserError(f"--step {step}: {place} has the steps {', '.join(str(each.step) for each in steps)}")
    found = chosen[-1]
    by_episode: dict[str, list[Trajectory]] = {}
    for row in found.rows:
        by_episode.setdefault(row.episode_id, []).append(row)
    if episode is not None and episode not in by_episode:
        raise UserError(f"--episode {episode}: step {found.step} has no such episode{near_matches(episode, by_episode)}")
    names = [episode] if episode is not None else list(by_episode)
    least = {name: min(by_episode[name], key=_worth) for name in names}
    if worst:
        shown = sorted(names, key=lambda name: _worth(least[name]))[: count or None]
    else:
        shown = [row.episode_id for row in spread([*least.values()], count or len(names))]
    for name in shown:
        click.echo("\n".join(map(visible, _episode(name, by_episode[name], chars))) + "\n")
    click.echo(f"{len(shown)} of {len(names)} episodes of step {found.step} ({found.split})", err=True)
    if found.joined:
        click.echo("all turns of an answer are one text here: --trajectories.tokens saves them by turn", err=True)


def _worth(row: Trajectory) -> float:
    return float("-inf") if row.reward is None else row.reward


def _episode(name: str, rows: Sequence[Trajectory], chars: int) -> Iterator[str]:
    first = rows[0]
    source = f"{first.task.source}:{first.task.index}" if first.task.source else f"task {first.task.index}"
    yield f"{name}  {source}  label {_short(str(first.task.ground_truth), 60)}"
    width = max(40, shutil.get_terminal_size().columns - 14)
    for place, row in enumerate(rows):
        last = place == len(rows) - 1
        yield f"{'└' if last else '├'}─ {_head(row, len(rows) > 1)}"
        pictures = 0
        for kind, images, text in _parts(row):
            lines = [_named(image, number) for number, image in enumerate(images, start=pictures + 1)]
            lines += _wrapped(_short(text, chars), width)
            pictures += len(images)
            yield f"{' ' if last else '│'}    {kind:8}{lines[0]}"
            yield from (f"{' ' if last else '│'}            {line}" for line in lines[1:])
    if first.events:
        yield "   what happened:"
        for event in first.events:
            yield from (f"     {line}" for line in _wrapped(_short(_told(event), chars), width))


def _head(row: Trajectory, several: bool) -> str:
    parts = [f"row {row.row}"] if several else []
    if row.role:
        parts.append(row.role)
    if several:
        parts.append("final" if row.final else "not judged")
    if row.parent is not None:
        parts.append(f"from row {row.parent} behind its first {row.branch} tokens")
    parts.append(f"reward {row.reward:g}" if row.reward is not None else f"unjudged: {row.unjudged_reason}")
    if row.score is not None:
        parts.append(f"score {row.score:g}")
    if row.advantage is not None:
        parts.append(f"advantage {row.advantage:+.3g}")
    return ", ".join([*parts, f"{row.action_length} tokens", row.finish_reason])


def _told(event: Mapping[str, Any]) -> str:
    """Returns an event of the log as a line: time, kind, and values."""
    kind = event.get("kind")
    values = {name: value for name, value in event.items() if name not in ("kind", "t") and value not in (None, "")}
    if kind == "call":
        whose = f"{values.pop('role')} " if "role" in values else ""
        after = f" after {values.pop('parent')}" if "parent" in values else ""
        head = f"{whose}{values.pop('id', '')} ({values.pop('why', '')}{after})"
        head += f": {values.pop('prompt', 0)} → {values.pop('tokens', 'no')} tokens in {values.pop('s', 0)} s"
    else:
        head = str(kind)
    more = ", ".join(f"{name} {value if isinstance(value, str) else json.dumps(value)}" for name, value in values.items())
    return f"{event.get('t', 0):8.2f} s  {head}" + (f", {more}" if more else "")


def _named(picture: Any, number: int) -> str:
    return visible(f"[picture {number}] {picture.width}×{picture.height} {picture.path}")


def _parts(row: Trajectory) -> Iterator[tuple[str, Sequence[Any], str]]:
    """Yields pictures and text of the row's segments, or of its prompt and answer if the file has no more."""
    assert row.decode is not None
    try:
        parts = [(KINDS[segment.kind], segment.images, row.decode(segment.token_ids)) for segment in row.segments]
    except UserError:
        first, rest = row.segments[0].images, row.images[len(row.segments[0].images) :]
        answer = row.full_text if len(row.actions) > 1 else row.text
        parts = [("prompt", first, row.prompt_text), ("answer", rest, answer)]
    yield from parts


def _short(text: str, most: int) -> str:
    if not most or len(text) <= most:
        return text
    head, tail = most - most // 3, most // 3
    return f"{text[:head]} [... {len(text) - head - tail} characters ...] {text[len(text) - tail :]}"


def _wrapped(text: str, width: int) -> list[str]:
    """Returns wrapped lines without characters that could move a cursor."""
    lines = [visible(line) for line in text.split("\n")]
    return [line[start : start + width] for line in lines for start in range(0, max(1, len(line)), width)]
