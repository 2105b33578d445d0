"""Batches of rows that nothing sampled, for packages that have the data of a run: tasks that stand for rows, the order in which
they are drawn, and what was drawn. Importing this loads no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlhf_host.lazily import lazily

if TYPE_CHECKING:
    from rlhf_host.data.stream import IndexedTasks as IndexedTasks
    from rlhf_host.data.stream import TaskSet as TaskSet
    from rlhf_host.training.assemble import stream_of as stream_of
    from rlhf_host.training.saved_rows import decoder as decoder
    from rlhf_host.training.source import Drawn as Drawn

__getattr__, __dir__, __all__ = lazily(__name__)
