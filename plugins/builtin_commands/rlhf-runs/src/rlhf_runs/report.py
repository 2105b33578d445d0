"""Runs as one page of HTML that needs no network: metrics, groups of answers, settings, versions."""

from __future__ import annotations

import base64
import gzip
import html
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, cached_property, partial
from importlib.resources import files
from pathlib import Path
from typing import Any

from rlhf_host import RunDirectory
from rlhf_host.runs import beside, flat
from rlhf_runs.headline import last_row
from rlhf_runs.metrics import described_all
from rlhf_runs.notes import note_of
from rlhf_runs.page_policy import page_policy
from rlhf_runs.pictured import DAMAGED, Pictured
from rlhf_runs.predicted import time_lines
from rlhf_runs.speakers import turns_of, turns_of_messages
from rlhf_runs.thumbnails import Thumbnails
from rlhf_runs.used import UNTOLD, setting_helps, used_settings, written
from rlhf_runs.usual import usual_settings

MOST = 14_000_000
"""Maximum characters of saved answers in a page, compressed; the newest steps come first."""
NAMED = 3
"""Names in the title of a page with more runs."""
SCRIPTS = ("elements", "headline", "charts", "answers", "settings", "start")
"""Parts of the page's script, in their order."""
CHARTS = "uplot/uplot"
"""uPlot 1.6.32 with its licence, unchanged, as its npm package has it: dist/uPlot.iife.min.js and dist/uPlot.min.css."""
Decode = Callable[[int], str]


class Shown:
    """Contents of a run's page, in pieces.

    Args:
        name: unique among the runs of a page.
    """

    def __init__(self, run: RunDirectory, name: str):
        self.run, self.name = run, name

    def head(self) -> dict[str, Any]:
        """Returns everything but the answers. ``places`` are the steps whose answers are saved."""
        run = self.run
        return {
            "name": self.name,
            "path": str(run.path),
            "status": run.status,
            "step": run.step,
            "steps": run.steps,
            "note": note_of(run),
            "time": time_lines(run),
            "what": self._what(),
            "headline": run.headline,
            "beside": beside(last_row(run, run.headline), run.headline) if run.headline else "",
            "about": {name: value for name, value in run.about.items() if name not in ("used", "status")},
            "draws": run.draws,
            "warnings": [*run.warnings, *run.damage],
            "plugins": run.plugins,
            "requirements": _text(run.path / "requirements.txt"),
            "settings": self._settings(),
            "curves": run.curves,
            "metrics": described_all(run),
            "times": {row["step"]: row.get("time/wall") for row in run.metrics},
            "places": [list(place) for place in run.trajectories],
            "left_out": [],
        }

    def answers(self, split: str, step: int, thumbnails: Thumbnails | None = None) -> list[dict[str, Any]]:
        """Returns the groups of a step.

        Args:
            thumbnails: copies of pictures; default: as many as a page may have.
        """
        run = self.run  # which a server replaces
        rows = run.rows(split, step)
        tokens = any(row.get("segments") for row in rows)  # else no tokenizer is needed, which takes seconds to load
        tokenizer, decode = (self._tokenizer, self._decode) if tokens else (None, None)
        pictured = Pictured(run.trajectories[split, step].parent, tokenizer, thumbnails or Thumbnails())
        return list(_groups(rows, decode, pictured))

    def _what(self) -> dict[str, str]:
        """Returns what was trained on what, and how."""
        settings, names = (
            self.run.settings,
            [(plugin["kind"], str(plugin["alias"] or plugin["name"])) for plugin in self.run.plugins],
        )
        sources = [str(source["path"] if isinstance(source, dict) else source) for source in settings["data"]["sources"]]
        kinds = {kind: ", ".join(name for of, name in names if of == kind) for kind in ("algo", "reward", "extension", "agent")}
        return {
            "model": str(settings["roles"]["actor"]["model"]),
            "data": ", ".join(sources) or "data given in Python",
            **{kind: text for kind, text in kinds.items() if text},
        }

    def _settings(self) -> dict[str, dict[str, Any]]:
        """Returns the settings: the value that was used, the usual one if that is another, and what it means."""
        usual, helps, stated = self._usual, setting_helps(self.run), flat(self.run.settings)
        found = {}
        for name, value in used_settings(self.run).items():
            changed = name in stated and usual.get(name, ...) != stated[name] and name not in UNTOLD
            row = {"value": written(value), "changed": changed, "usual": written(usual.get(name)), "help": helps.get(name, "")}
            found[name] = {key: text for key, text in row.items() if text}
        return found

    @cached_property
    def _tokenizer(self) -> Any:
        return _tokenizer(self.run)

    @cached_property
    def _decode(self) -> Decode | None:
        return None if self._tokenizer is None else cache(partial(_decoded, self._tokenizer))

    @cached_property
    def _usual(self) -> dict[str, Any]:
        return usual_settings(self.run)


def page(runs: Sequence[RunDirectory], names: Sequence[str]) -> tuple[str, list[str]]:
    """Returns the page with all its contents, and a note on what was left out.

    Args:
        names: unique names of the runs.
    """
    notices: list[str] = []
    chunks: dict[str, bytes] = {}
    heads = []
    room = MOST // len(runs)
    for number, (run, name) in enumerate(zip(runs, names, strict=True)):
        shown, steps, left_out, used = Shown(run, name), [], [], 0
        thumbnails = Thumbnails(1 / len(runs))
        for split, step in reversed(run.trajectories):
            packed = pack(shown.answers(split, step, thumbnails))
            if used + (size := len(packed) * 4 // 3) > room:
                left_out.append(f"{split} {step}")
                continue
            used += size
            chunks[f"run{number}-{split}-{step}"] = packed
            steps.append([split, step])
        if left_out:
            notices.append(f"{name}: the answers of {len(left_out)} steps are left out, as the page would be too large")
        if thumbnails.left_out:
            notices.append(f"{name}: {thumbnails.left_out} pictures are only named, as the page would be too large")
        heads.append(shown.head() | {"places": steps[::-1], "left_out": left_out[::-1]})
        notices += run.damage
    chunks["head"] = pack(heads)
    return document(names, chunks)[0], notices


def document(names: Sequence[str], chunks: Mapping[str, bytes], script: str = "") -> tuple[str, str]:
    """Returns the page with these pieces, from ``pack``, and its Content-Security-Policy. It asks its server for missing
    pieces, and again for ``head``, unless that is one of them.

    Args:
        script: more of the page's script: it may replace functions and ``TABS`` of the parts before it.
    """
    parts = {part: _part(f"page.{part}") for part in ("html", "css")}
    parts["js"] = "\n".join([*(_part(f"{name}.js") for name in SCRIPTS), script])
    parts["css"] = f"{_part(f'{CHARTS}.css')}\n{parts['css']}"
    parts["uplot"] = _part(f"{CHARTS}.js")
    parts |= {part: f"\n{parts[part]}\n" for part in ("css", "js", "uplot")}
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED + 1 else ""
    parts["title"] = html.escape(", ".join(names[:NAMED] if more else names) + more)
    policy = page_policy([parts["uplot"], parts["js"]], [parts["css"]], asks_server=not chunks)
    parts["policy"] = html.escape(policy, quote=False)
    parts["chunks"] = "\n".join(
        f'<script type="text/plain" id="{html.escape(key)}">{base64.b64encode(packed).decode()}</script>'
        for key, packed in chunks.items()
    )
    return re.sub(r"\{(title|policy|css|chunks|uplot|js)\}", lambda place: parts[place[1]], parts["html"]), policy


def _part(name: str) -> str:
    return files(__package__).joinpath("page", name).read_text("utf-8")


def pack(value: Any) -> bytes:
    """Returns strict JSON: browsers do not accept NaN."""
    write = partial(json.dumps, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    try:
        text = write(value)
    except ValueError:
        text = write(_strict(value))
    return gzip.compress(text.encode("utf-8", "surrogatepass"), 6, mtime=0)


def _strict(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _strict(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_strict(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _text(path: Path) -> str:
    return path.read_text("utf-8", "replace") if path.exists() else ""


def _groups(rows: Sequence[dict[str, Any]], decode: Decode | None, pictured: Pictured) -> Iterator[dict[str, Any]]:
    groups: dict[Any, list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault(row.get("group_id"), []).append(row)
    for name, members in groups.items():
        first = members[0]
        prompt = first.get("prompt")
        problem = first.get("row")
        messages = turns_of_messages(problem.get("prompt") if isinstance(problem, dict) else prompt)
        turns = messages or turns_of(str(prompt))
        yield {
            "group": name,
            "source": first.get("source"),
            "task": first.get("task"),
            "label": first.get("label"),
            "turns": turns or [("Prompt", prompt if isinstance(prompt, str) else json.dumps(prompt, indent=1))],
            **pictured.prompt(first),
            "rows": [_row(row, decode, pictured, chat=bool(turns)) for row in members],
        }


def _row(row: dict[str, Any], decode: Decode | None, pictured: Pictured, *, chat: bool) -> dict[str, Any]:
    """
    Args:
        chat: the prompt has speakers, so a text of several turns names them too.
    """
    kept = ("episode_id", "sample", "reward", "rewards", "score", "advantage", "finish_reason", "length", "unjudged", "role")
    found = {name: row[name] for name in (*kept, "final", "metrics", "events", "tree") if row.get(name) not in (None, {}, [])}
    text: dict[str, Any] = {"text": row.get("full_text") or row.get("text"), **pictured.turns(row)}
    if chat and "full_text" in row and len(turns := turns_of(f"assistant\n{row['full_text']}")) > 1:
        text["turns"] = turns
    if not row.get("segments"):
        return found | text
    try:
        return found | {"segments": list(_segments(row, decode, pictured))} | ({} if decode is not None else text)
    except DAMAGED:
        return found | text


def _segments(row: dict[str, Any], decode: Decode | None, pictured: Pictured) -> Iterator[dict[str, Any]]:
    """Yields everything but the prompt."""
    behind = 0
    shown = len(row["segments"][0].get("images") or ())
    for segment in row["segments"][1:]:
        if segment.get("images"):
            yield {"kind": segment["kind"], **pictured.segment(segment, segment.get("text") or "", shown)}
            shown, behind = shown + len(segment["images"]), behind + len(segment["token_ids"])
            continue
        first, behind = behind, behind + len(segment["token_ids"])
        part = {name: segment[name] for name in ("kind", "text") if name in segment}
        if segment["kind"] == "action":
            part |= {"logprobs": [round(value, 3) for value in segment["logprobs"]], "versions": segment["versions"]}
            part |= {name: row[name][first:behind] for name in ("advantages", "trainer_logprobs") if name in row}
        elif turns := turns_of(str(part.get("text", "")).lstrip()):
            part["turns"] = turns
        if decode is not None:
            part["tokens"] = [decode(token) for token in segment["token_ids"]]
        yield part


def _tokenizer(run: RunDirectory) -> Any:
    """Returns the run's tokenizer, if that is available."""
    places = [run.path / "model", run.settings["roles"]["actor"]["model"]]
    from transformers import AutoTokenizer

    for place in places:
        try:
            return AutoTokenizer.from_pretrained(str(place), local_files_only=True)
        except Exception:  # gone, or of another machine
            continue
    return None


def _decoded(tokenizer: Any, token: int) -> str:
    return str(tokenizer.decode([token]))
