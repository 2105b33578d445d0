"""Names of metrics that programs and data choose: a bounded number, readable, and different from the host's own."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from rlhf_host.errors import visible

log = logging.getLogger(__name__)

MOST = 100
"""Maximum number of names of one row, and of one source in a run."""
LONGEST = 200
"""Maximum characters of a name."""


def misnamed(names: Mapping[Any, Any]) -> str:
    """Returns what is wrong with these metrics, or an empty string."""
    if len(names) > MOST:
        return f"{len(names)} metrics; at most {MOST}"
    odd = [name for name in names if not is_name(name)]
    return f"the name {shown(odd[0])}, and names are texts of 1 to {LONGEST} printable characters" if odd else ""


def is_name(name: Any) -> bool:
    return isinstance(name, str) and 0 < len(name) <= LONGEST and name.isprintable()


def shown(name: Any) -> str:
    return f"'{visible(str(name)[:60])}'"


class MetricNames:
    """The names that one source uses in a run: the first ones. Others are left out, which is logged once.

    Args:
        whose: owner of the names, for the message.
        prefix: text before each name in the log.
    """

    def __init__(self, whose: str, most: int = MOST, prefix: str = ""):
        self._whose, self._most, self._prefix = whose, most, prefix
        self._known: set[str] = set()
        self._said = False

    def takes(self, name: Any) -> bool:
        if name in self._known:
            return True
        if len(self._known) < self._most and isinstance(name, str) and is_name(self._prefix + name):
            self._known.add(name)
            return True
        if not self._said:
            self._said = True
            rule = f"the first {self._most} names of at most {LONGEST} printable characters"
            log.warning("%s: some metrics are left out, such as %s: a run has %s", self._whose, shown(name), rule)
        return False


class RowMetrics:
    """Metrics of rows from agents, rewards and programs, beside the metrics of the host, whose names stay its own."""

    def __init__(self) -> None:
        self._names = MetricNames("rows", 2 * MOST)
        self._host = {"step"}
        """Names that the host has used."""
        self._said: set[str] = set()

    def merged_with(self, host: Mapping[str, float], means: Mapping[str, float]) -> dict[str, float]:
        """Returns all of them. A name that the host has used becomes ``plugin/NAME``."""
        self._host |= host.keys()
        own = {}
        for name in filter(self._names.takes, means):
            taken = name in self._host or name.startswith(("eval/", "plugin/"))
            if taken and name not in self._said:
                self._said.add(name)
                log.warning("a metric %r of rows has the name of one of the run's own: it is called 'plugin/%s'", name, name)
            own[f"plugin/{name}" if taken else name] = means[name]
        return {**own, **host}
