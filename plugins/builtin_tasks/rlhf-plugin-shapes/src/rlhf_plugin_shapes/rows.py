"""Drawn tasks as files, for algorithms that train on answers: ``python -m rlhf_plugin_shapes.rows DIRECTORY``."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import get_args

from rlhf_plugin_shapes.tasks import DrawnTasks, Kind, Shapes


def write_rows(
    directory: Path, count: int, *, split: str = "train", kind: Kind = "colour", size: int = 56, seed: int = 0
) -> Path:
    """Writes questions with their answers, and the pictures beside them. Returns the file of rows.

    Each row has ``messages``, in which ``{"type": "image"}`` is the place of the picture, and ``images`` with its path.
    """
    tasks = DrawnTasks(Shapes.Options(kind=kind, size=size, tasks=count, eval_tasks=count), split, seed)
    pictures = directory / f"{split}-pictures"
    pictures.mkdir(parents=True, exist_ok=True)
    file = directory / f"{split}.jsonl"
    with file.open("w", encoding="utf-8") as rows:
        for number, task in enumerate(tasks):
            [message] = task.prompt
            picture, text = message["content"]
            path = pictures / f"{number:06}.png"
            picture["image"].save(path)
            question = {"role": "user", "content": [{"type": "image"}, text]}
            answer = {"role": "assistant", "content": task.ground_truth}
            row = {"messages": [question, answer], "images": [str(path.relative_to(directory))]}
            rows.write(json.dumps(row) + "\n")
    return file


def main() -> None:
    """Writes the rows of the command line."""
    parser = argparse.ArgumentParser(prog="python -m rlhf_plugin_shapes.rows", description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--split", choices=("train", "eval"), default="train")
    parser.add_argument("--kind", choices=get_args(Kind), default="colour")
    parser.add_argument("--size", type=int, default=56)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    print(write_rows(given.directory, given.count, split=given.split, kind=given.kind, size=given.size, seed=given.seed))


if __name__ == "__main__":
    main()
