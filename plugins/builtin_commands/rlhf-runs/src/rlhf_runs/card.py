"""The model card of an exported model, written only from its run directory."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from rlhf_host import RunDirectory
from rlhf_host.runs import RunModel, beside, figure, flat
from rlhf_host.settings import write_yaml
from rlhf_runs.usual import usual_settings

HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
LIBRARIES = ("torch", "transformers", "peft", "vllm", "deepspeed", "ray")
KINDS = {"algo": "algorithm", "reward": "reward", "agent": "agent", "extension": "extension"}
"""Plugins that the card names → their words in it."""
TASKS = {"lm": "text-generation", "scalar": "text-classification"}


def model_card(model: RunModel, role: str, head: Literal["lm", "scalar"], dtype: str) -> str:
    """Returns Markdown with a head in YAML, in the format of the Hugging Face Hub.

    Args:
        role: role of the model.
        dtype: type of its weights.
    """
    from huggingface_hub import ModelCard, ModelCardData

    assert model.run is not None
    run = RunDirectory(model.run)
    base = run.settings["roles"]["actor"]["model"]
    sources = [source["path"] for source in run.settings["data"]["sources"]]
    head_of_card = ModelCardData(
        base_model=base if _is_of_hub(base, "model") else None,
        datasets=[name for name in sources if _is_of_hub(name, "dataset")] or None,
        library_name="transformers",
        pipeline_tag=TASKS[head],
        tags=["rlhf-host", *(plugin["name"] for plugin in run.plugins if plugin["kind"] == "algo")],
    )
    parts = [
        f"---\n{head_of_card.to_yaml()}\n---",
        f"# {run.settings['name']}",
        _summary(run, model, role, dtype),
        "## Held-out figures",
        _figures(run, model.step) + ("" if role == "actor" else "\n\nThese are the actor's."),
        "## Training",
        _table(("", ""), _training(run, role)),
        *(["## Prompts and sampling", _table(("", ""), _asked(run))] if head == "lm" else []),
        "## How to train it again",
        _again(run),
    ]
    return ModelCard("\n\n".join(parts) + "\n").content


def _summary(run: RunDirectory, model: RunModel, role: str, dtype: str) -> str:
    who = "The trained model" if role == "actor" else f"The {role}"
    steps = "" if model.step is None else f" after step {model.step}" + (f" of {run.steps}" if run.steps else "")
    return (
        f"{who} of a run of rlhf-host {run.about.get('rlhf_host', '')}{steps}, in {dtype}. The run: {run.status}. "
        "This card has what the run directory says."
    )


def _figures(run: RunDirectory, step: int | None) -> str:
    """Returns means of evaluations before training, and of the last one up to the model's step, with 95 % intervals."""
    rows = [row for row in run.metrics if any(name.startswith("eval/") for name in row)]
    rows = [row for row in rows if step is None or row["step"] <= step]
    if not rows:
        return "The run evaluated nothing up to this step."
    shown = [rows[0], *rows[1:][-1:]]
    names = [name for name in shown[-1] if name.startswith("eval/") and not name.endswith("/stderr")]
    lines = [(name, *(figure(row, name) if name in row else "" for row in shown)) for name in names]
    head = ("metric", *(f"step {row['step']}" for row in shown))
    notes = [f"{run.headline} at step {row['step']}: {said}." for row in shown if (said := beside(row, str(run.headline)))]
    if any(name.endswith("/stderr") for row in shown for name in row):
        notes.append("± is half of the 95 % interval of the mean over tasks.")
    return "\n\n".join([_table(head, lines), *notes])


def _training(run: RunDirectory, role: str) -> Iterator[tuple[str, str]]:
    settings = run.settings
    actor = settings["roles"]["actor"]
    own = settings["roles"].get(role, actor)
    revision = f", revision {actor['revision']}" if actor["revision"] else ""
    yield "base model", f"{actor['model']}{revision}"
    if own["adapter"]:
        yield "adapter to begin with", str(own["adapter"])
    if own["lora"]["rank"]:
        yield "trained weights", f"LoRA of rank {own['lora']['rank']}, merged here"
    elif own["freeze"] or own["train_only"]:
        yield "frozen weights", ", ".join(own["freeze"] or [f"all but {name}" for name in own["train_only"]])
    for plugin in run.plugins:
        if plugin["kind"] in KINDS:
            version = f" ({plugin['distribution']} {plugin['version']})" if plugin["distribution"] else " (a Python object)"
            weight = f", weight {plugin['weight']:g}" if plugin["kind"] == "reward" else ""
            yield KINDS[plugin["kind"]], f"{plugin['alias']}: {plugin['name']}{version}{weight}"
    rows = _rows(run)
    for words, data in (("data", settings["data"]), ("held-out data", settings["eval"]["data"])):
        for source in data["sources"]:
            details = [f"{key} {source[key]}" for key in ("subset", "split") if source[key]]
            yield words, ", ".join([source["path"], *details])
    for name, count in rows.items():
        yield "rows for training", f"{name}: {count:,}"
    samples = [row["eval/samples"] for row in run.metrics if "eval/samples" in row]
    if samples:
        yield "held-out answers", f"{samples[-1]:,.0f} in each evaluation"
    yield "libraries", ", ".join([f"Python {run.about.get('python', '')}", *_versions(run)])


def _rows(run: RunDirectory) -> dict[str, int]:
    """Returns the rows of each source of training data, as recorded in the newest checkpoint."""
    for _, checkpoint in reversed(run.checkpoints):
        state = json.loads((checkpoint / "state.json").read_text("utf-8"))
        return {str(name): count for name, count in state.get("stream", {}).get("sizes", {}).items() if count}
    return {}


def _versions(run: RunDirectory) -> list[str]:
    path = run.path / "requirements.txt"
    lines = path.read_text("utf-8").splitlines() if path.exists() else []
    pinned = dict(line.split("==", 1) for line in lines if "==" in line)
    return [f"{name} {pinned[name].partition(' ')[0]}" for name in LIBRARIES if name in pinned]


def _asked(run: RunDirectory) -> Iterator[tuple[str, str]]:
    """Yields how prompts were written and answers sampled: with other prompts or sampling, figures differ."""
    data, rollout = run.settings["data"], run.settings["rollout"]
    template = data["template"]
    named = {None: "the tokenizer's chat template, or plain text where it has none", "none": "plain text"}
    yield "prompts", named.get(template) or f"`{template!r}`"
    if data["template_kwargs"]:
        yield "told to the chat template", f"`{', '.join(data['template_kwargs'])}`"
    if data["system_prompt"]:
        yield "system message", f"`{data['system_prompt']!r}`"
    for name in ("temperature", "top_p", "top_k", "min_p", "max_new_tokens"):
        yield name, f"{rollout[name]}"
    if rollout["stop"]:
        yield "stop", f"`{rollout['stop']!r}`"


def _again(run: RunDirectory) -> str:
    settings, usual = flat(run.settings), usual_settings(run)
    changed: dict[str, Any] = {}
    for key, value in settings.items():
        if value != usual.get(key, None) and key not in ("name", "run_dir"):
            *path, last = key.split(".")
            place = changed
            for part in path:
                place = place.setdefault(part, {})
            place[last] = _without_none(value)
    yaml = write_yaml(changed)
    return (
        "These are the settings that are not at their defaults, as `run.yaml`. They may name files of the machine it was trained "
        f"on.\n\n```yaml\n{yaml.strip()}\n```\n\n```sh\nrlhf train --config run.yaml\n```"
    )


def _without_none(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_none(item) for item in value]
    return {key: item for key, item in value.items() if item is not None} if isinstance(value, Mapping) else value


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    cells = [[cell.replace("|", "\\|").replace("\n", " ") for cell in row] for row in (head, *rows)]
    lines = ["| " + " | ".join(row) + " |" for row in cells]
    return "\n".join([lines[0], "|" + "---|" * len(cells[0]), *lines[1:]])


def _is_of_hub(name: str | None, kind: str) -> bool:
    """Returns True if this is a name of the Hub, from which it was fetched on this machine; else it may be a directory
    elsewhere.
    """
    from huggingface_hub import try_to_load_from_cache

    if not name or not HUB_NAME.fullmatch(name) or Path(name).exists():
        return False
    file = "config.json" if kind == "model" else "README.md"
    return isinstance(try_to_load_from_cache(name, file, repo_type=kind), str)
