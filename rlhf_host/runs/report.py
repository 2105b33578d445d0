"""Runs as one page of HTML that needs no network: curves, groups of answers, settings, versions."""

from __future__ import annotations

import base64
import gzip
import html
import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import cache, partial
from importlib.resources import files
from pathlib import Path
from typing import Any

from rlhf_host.config.defaults import KINDS
from rlhf_host.config.schema import RunConfig
from rlhf_host.errors import UserError
from rlhf_host.plugins.selection import find, load, options_model
from rlhf_host.runs.directory import TELLING, RunDirectory, flat

MOST = 14_000_000
"""Characters of saved answers in a page, compressed; the newest steps come first."""
Decode = Callable[[int], str]


def page(runs: Sequence[RunDirectory], names: Sequence[str]) -> tuple[str, list[str]]:
    """The page, and what is not on it.

    Args:
        names: of the runs, each another.

    Raises:
        UserError: plotly is not installed.
    """
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        raise UserError("the page's plots need plotly: pip install 'rlhf-host[report]'") from None
    notices: list[str] = []
    chunks: dict[str, str] = {}
    heads = []
    room = MOST // len(runs)
    for number, (run, name) in enumerate(zip(runs, names, strict=True)):
        steps, left_out, used = [], [], 0
        decode = _decoder(run)
        for split, step in reversed(run.trajectories):
            packed = _packed(list(_groups(run.rows(split, step), decode)))
            if used + len(packed) > room:
                left_out.append(f"{split} {step}")
                continue
            used += len(packed)
            chunks[f"run{number}-{split}-{step}"] = packed
            steps.append([split, step])
        if left_out:
            notices.append(f"{name}: the answers of {len(left_out)} steps are left out, as the page would be too large")
        heads.append(_head(run, name) | {"places": steps[::-1], "left_out": left_out[::-1]})
    chunks["head"], chunks["telling"] = _packed(heads), _packed(TELLING)
    parts = {part: files(__package__).joinpath("page", f"page.{part}").read_text("utf-8") for part in ("html", "css", "js")}
    parts["title"] = html.escape(", ".join(names))
    parts["plotly"] = get_plotlyjs().replace("</script", "<\\/script")
    parts["chunks"] = "\n".join(
        f'<script type="text/plain" id="{html.escape(key)}">{text}</script>' for key, text in chunks.items()
    )
    return re.sub(r"\{(title|css|chunks|js|plotly)\}", lambda place: parts[place[1]], parts["html"]), notices


def _packed(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass")
    return base64.b64encode(gzip.compress(text, 6, mtime=0)).decode()


def _head(run: RunDirectory, name: str) -> dict[str, Any]:
    settings, usual = flat(run.settings), _defaults(run)
    return {
        "name": name,
        "path": str(run.path),
        "status": run.status,
        "step": run.step,
        "steps": run.steps,
        "headline": run.headline,
        "about": run.about,
        "draws": run.draws,
        "warnings": run.warnings,
        "plugins": run.plugins,
        "requirements": _text(run.path / "requirements.txt"),
        "settings": settings,
        "changed": [key for key, value in settings.items() if usual.get(key, ...) != value and key not in ("name", "run_dir")],
        "curves": run.curves,
        "times": {row["step"]: row.get("time/wall") for row in run.metrics},
    }


def _defaults(run: RunDirectory) -> dict[str, Any]:
    """Of all settings, and of the options of those plugins that are installed."""
    found = flat(RunConfig().model_dump(mode="json"))
    sections = {"reward": "reward", "extension": "with", "tracker": "tracker"}
    for plugin in [*run.plugins, *({"kind": kind, "alias": "", "name": run.settings[kind]["name"]} for kind in KINDS)]:
        kind, alias = plugin["kind"], plugin["alias"]
        section = f"{sections[kind]}.{alias}." if kind in sections else f"{kind}."
        with suppress(UserError):
            model = options_model(load(find(kind, plugin["name"])), kind)
            found |= flat(model.model_construct().model_dump(mode="json"), section)
    return found


def _text(path: Path) -> str:
    return path.read_text("utf-8", "replace") if path.exists() else ""


def _groups(rows: Sequence[dict[str, Any]], decode: Decode | None) -> Iterator[dict[str, Any]]:
    groups: dict[Any, list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault(row.get("group_id"), []).append(row)
    for name, members in groups.items():
        first = members[0]
        yield {
            "group": name,
            "source": first.get("source"),
            "task": first.get("task"),
            "label": first.get("label"),
            "prompt": first.get("prompt"),
            "rows": [_row(row, decode) for row in members],
        }


def _row(row: dict[str, Any], decode: Decode | None) -> dict[str, Any]:
    kept = ("episode_id", "sample", "reward", "rewards", "score", "advantage", "finish_reason", "length", "unjudged", "role")
    found = {name: row[name] for name in (*kept, "final", "metrics", "events", "tree") if row.get(name) not in (None, {}, [])}
    segments = row.get("segments")
    if not segments:
        return found | {"text": row.get("full_text") or row.get("text")}
    found["segments"], behind = [], 0
    for segment in segments[1:]:
        first, behind = behind, behind + len(segment["token_ids"])
        part = {name: segment[name] for name in ("kind", "text") if name in segment}
        if segment["kind"] == "action":
            part |= {"logprobs": [round(value, 3) for value in segment["logprobs"]], "versions": segment["versions"]}
            if "advantages" in row:
                part["advantages"] = row["advantages"][first:behind]
        if decode is not None:
            part["tokens"] = [decode(token) for token in segment["token_ids"]]
        found["segments"].append(part)
    return found | ({} if decode is not None else {"text": row.get("full_text") or row.get("text")})


def _decoder(run: RunDirectory) -> Decode | None:
    """Token → its text, by the run's tokenizer, if it is here."""
    places = [run.path / "model", run.settings["roles"]["actor"]["model"]]
    from transformers import AutoTokenizer

    for place in places:
        try:
            tokenizer = AutoTokenizer.from_pretrained(str(place), local_files_only=True)
        except Exception:  # gone, or of another machine
            continue
        return cache(partial(_decoded, tokenizer))
    return None


def _decoded(tokenizer: Any, token: int) -> str:
    return str(tokenizer.decode([token]))
