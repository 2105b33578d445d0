"""Names of metrics that programs and data choose."""

from __future__ import annotations

import pytest

from rlhf_host import Episode, Task
from rlhf_host.records.metric_names import LONGEST, MOST, MetricNames, RowMetrics, misnamed


@pytest.mark.parametrize("name", ["", "a\nb", "\x1b[31m", "\u202e", "a" * (LONGEST + 1), 3, None, ("a",)])
def test_what_is_no_name(name):
    assert "printable characters" in misnamed({name: 1.0})
    assert not MetricNames("x").takes(name)


def test_there_are_at_most_so_many():
    assert misnamed(dict.fromkeys(map(str, range(MOST)))) == ""
    assert misnamed(dict.fromkeys(map(str, range(MOST + 1)))) == f"{MOST + 1} metrics; at most {MOST}"


def test_a_run_has_the_first_names_of_a_source_and_says_once_that_others_are_left_out(caplog):
    names = MetricNames("made up", 2, prefix="p/")
    assert [names.takes(name) for name in ("a", "b", "a", "c", "d", "b")] == [True, True, True, False, False, True]
    [said] = caplog.messages
    assert said.startswith("made up: some metrics are left out, such as 'c': a run has the first 2 names")


def test_names_of_the_host_stay_its_own(caplog):
    rows = RowMetrics()
    host = {"reward/max": 1.0, "version": 3.0}
    own = {"reward/max": 7.0, "version": 8.0, "step": 9.0, "eval/x": 1.0, "plugin/y": 2.0, "turns": 4.0}
    renamed = {f"plugin/{name}": own[name] for name in ("reward/max", "version", "step", "eval/x", "plugin/y")}
    assert rows.merged_with(host, own) == {**host, **renamed, "turns": 4.0}
    assert rows.merged_with({"loss": 1.0}, own)["plugin/version"] == 8.0, "also in a step that does not have it"
    assert len(caplog.messages) == 5
    many = {f"n{number}": 0.0 for number in range(10 * MOST)}
    assert len(rows.merged_with({}, many)) <= 2 * MOST


@pytest.mark.parametrize(
    ("kind", "values"), [("call", {"why": "x"}), ("ignored", {"parameters": 3}), ("retry", {}), ("x", {"t": "soon"})]
)
def test_events_that_the_host_counts_are_its_own(kind, values):
    episode = Episode("e", "g", Task("q"))
    with pytest.raises(ValueError, match="is the host's own: choose another name"):
        episode.log(kind, **values)
    assert not episode.events
