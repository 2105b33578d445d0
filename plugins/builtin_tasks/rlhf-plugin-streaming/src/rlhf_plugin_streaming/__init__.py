"""Tasks of files and hub data sets that are read while the run goes on."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from itertools import islice
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveInt

from rlhf_host import RunContext, Task, UserError, hookimpl
from rlhf_plugin_streaming.shards import Shards, open_shards

__all__ = ["Streaming"]

log = logging.getLogger(__name__)

UNHEARD = {
    "prompt_key": "prompt",
    "label_key": "label",
    "agent_key": "agent",
    "ignore": "ignore",
    "on_bad_row": "on-bad-row",
    "fetch_images": "fetch-images",
}
"""Settings of ``data``, which do not reach a task plugin → options."""


@dataclass(slots=True)
class Place:
    """A place in the stream: the block that is drawn from, and how many of its rows were drawn."""

    epoch: int = 0
    shard: int = 0
    """Number of the block's shard in the order of the epoch."""
    row: int = 0
    """First row of the block."""
    byte: int = 0
    drawn: int = 0


class Streaming:
    """Rows that are read as they are drawn: data may be larger than the memory, and hub data larger than the disk. Shards come in
    an order of the seed, and in each shard blocks of rows are shuffled."""

    class Options(BaseModel):
        model_config = ConfigDict(extra="forbid")

        files: str = Field(
            min_length=1,
            description="file, directory, pattern such as data/*.parquet, or hub name; {split} in it becomes train or eval",
        )
        hub_config: str | None = Field(None, description="configuration of a hub data set")
        hub_split: str | None = Field(None, description="split of a hub data set; default: train, for evaluation test")
        buffer: PositiveInt = Field(
            1000, description="rows that are shuffled together, and in memory; 1: the order of the files"
        )
        prompt: str | None = Field(None, description="column with the prompt, as data.prompt_key elsewhere")
        label: str | None = Field(None, description="column with the ground truth, as data.label_key elsewhere")
        agent: str | None = Field(None, description="column with the agent's name, as data.agent_key elsewhere")
        ignore: list[str] = Field([], description="as data.ignore")
        on_bad_row: Literal["stop", "skip"] = Field("stop", description="as data.on_bad_row")
        fetch_images: bool = Field(False, description="as data.fetch_images")

    def __init__(self, options: Options):
        self.options = options
        self.place = Place()
        self._split = "train"
        self._known = ""
        """Fingerprint of the data."""
        self._keys: tuple[str | None, str | None, str | None] = (options.prompt, options.label, None)
        """Columns with prompt, label and more of the prompt, once they are found."""

    @hookimpl
    def load_tasks(self, split: str, seed: int) -> Iterator[Task]:
        """Yields the tasks of a pass from its place on. For evaluation the host reads all of them at once."""
        self._split, files = split, self.options.files.replace("{split}", split)
        part = self.options.hub_split or ("train" if split == "train" else "test")
        shards = open_shards(files, self.options.hub_config, part)
        if split == "eval":
            return self._rest_of_pass(shards, seed, Place())
        if self._known not in ("", shards.fingerprint):
            raise self._other_files()
        if shards.unread and not self._known:
            more = f" and {len(shards.unread) - 3} more" if len(shards.unread) > 3 else ""
            log.info("streaming: not read, because of their kind: %s%s", ", ".join(shards.unread[:3]), more)
        self._known = shards.fingerprint
        return self._rest_of_pass(shards, seed, self.place)

    @hookimpl
    def run_started(self, context: RunContext) -> None:
        data = context.config["data"] if self._split == "train" else context.config["eval"]["data"]
        own = [source for source in data["sources"] if source["path"].rpartition(":")[2].lower() == "streaming"]
        for name, option in UNHEARD.items():
            # Options have the names of sections, but for the columns, which any source may name.
            mine = any(source.get(name) for source in own) and name.endswith("_key")
            for_others = len(own) < len(data["sources"]) and option.replace("-", "_") in self.options.model_fields_set
            if mine or (data.get(name) not in (None, [], False, "stop") and not for_others):
                where = "data" if self._split == "train" else "eval.data"
                raise UserError(f"{where}.{name} does not reach streaming: give --{where}.streaming.{option} instead")
        if self._split == "train" and not data["shuffle"] and self.options.buffer > 1:
            raise UserError(
                "data.shuffle is false, and streaming shuffles: give --data.streaming.buffer 1 for the files' order"
            )

    def _rest_of_pass(self, shards: Shards, seed: int, place: Place) -> Iterator[Task]:
        """Yields the tasks of a pass from a place on, which goes along."""
        order, first = list(range(len(shards))), place.shard == place.row == place.drawn == 0
        if self.options.buffer > 1:
            random.Random(f"{seed}/{place.epoch}").shuffle(order)
        while place.shard < len(order):
            shard = order[place.shard]
            rows = shards.rows(shard, place.row, place.byte)
            while block := list(islice(rows, self.options.buffer)):
                tasks = self._tasks(shards, block)
                if self.options.buffer > 1:
                    random.Random(f"{seed}/{place.epoch}/{place.shard}/{place.row}").shuffle(tasks)
                for task in tasks[place.drawn :]:
                    place.drawn, first = place.drawn + 1, False
                    yield task
                place.row, place.byte, place.drawn = *block[-1][2:], 0
            place.shard, place.row, place.byte = place.shard + 1, 0, 0
        if first:
            raise UserError(f"streaming: no row of {self.options.files} can be used: it has none, or only bad ones")
        place.epoch, place.shard = place.epoch + 1, 0

    def _tasks(self, shards: Shards, block: list[Any]) -> list[Task]:
        """Returns the tasks of rows, as a run makes those of files."""
        from rlhf_host.internals import RowReader, open_source
        from rlhf_host.settings import DataConfig, DataSource

        options, key = self.options, "python:block"
        chosen = {name: getattr(options, name) for name in ("ignore", "on_bad_row", "fetch_images")}
        prompt_key, label_key, context_key = self._keys
        source = DataSource(path=key, prompt_key=prompt_key, label_key=label_key)
        rows = open_source(source, key, "train", {key: [row for row, *_ in block]})
        rows = replace(rows, where=lambda number: block[number][1](), root=shards.root)
        reader = RowReader(DataConfig(agent_key=options.agent, **chosen), source, options.files, rows)
        reader.context_key = context_key
        tasks = reader.read(None)
        self._keys = (reader.prompt_key, reader.label_key, reader.context_key)
        if reader.bad:
            log.warning("streaming%s", reader.bad.summary)
        # Their pictures are parts of the prompt by now, where the host finds them.
        return [replace(task, images=()) if task.images else task for task in tasks]

    @hookimpl
    def state_dict(self) -> dict[str, Any]:
        return {"place": asdict(self.place), "fingerprint": self._known, "keys": list(self._keys)}

    @hookimpl
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if "" not in (self._known, state["fingerprint"]) and self._known != state["fingerprint"]:
            raise self._other_files()
        self.place, self._known, self._keys = Place(**state["place"]), state["fingerprint"], (*state["keys"],)

    def _other_files(self) -> UserError:
        told = f"the files of {self.options.files} are not those of the checkpoint: resume with the same data"
        return UserError(f"{told} (names and sizes count, also from one pass to the next)")
