"""The files for Prometheus and Grafana, and that a real run has every metric that they name."""

from __future__ import annotations

import json
import re
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from prometheus_client.parser import text_string_to_metric_families
from rlhf_authoring.trackers import SmallRun
from rlhf_tracker_prometheus.command import FILES, prometheus
from rlhf_tracker_prometheus.families import FAMILIES
from ruamel.yaml import YAML

from rlhf_host import UserError
from rlhf_host.distributed import reserved

STATE = (
    "run_info",
    "run_state",
    "run_start_timestamp_seconds",
    "last_step_timestamp_seconds",
    "step",
    "planned_steps",
    "steps_total",
)

GPUS = '''
from rlhf_host import Metric, hookimpl


class GPUs:
    """The names of gpu_metrics, of no GPU."""

    @hookimpl
    def compute_loss(self, outputs, batch):
        for name in ("utilisation", "power_w", "memory_gb", "temperature_c"):
            yield Metric(f"gpu/0/{name}", 1.0, reduce="max")
'''


def written(folder: Path, *arguments: str) -> dict[str, str]:
    done = CliRunner().invoke(prometheus, [str(folder), *arguments], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return {name: (folder / name).read_text() for name in FILES}


def queries(files: dict[str, str]) -> list[str]:
    """Every expression of the dashboard and the alerts."""
    board = json.loads(files["dashboard.json"])
    found = [target["expr"] for panel in board["panels"] for target in panel.get("targets", ())]
    found += [variable["definition"] for variable in board["templating"]["list"] if "definition" in variable]
    return found + [rule["expr"] for group in YAML(typ="safe").load(files["alerts.yml"])["groups"] for rule in group["rules"]]


def named(texts: list[str]) -> set[str]:
    return set(re.findall(r"\brlhf_\w+", " ".join(texts)))


def exported(text: str) -> dict[str, set[str]]:
    """Metric → its labels."""
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


def test_the_files_are_written_and_fit_together(tmp_path):
    files = written(tmp_path / "watch", "--target", "gpu1:9464", "--target", "[::1]:1")
    settings: dict[str, Any] = YAML(typ="safe").load(files["prometheus.yml"])
    assert settings["scrape_configs"][0]["static_configs"] == [{"targets": ["gpu1:9464", "[::1]:1"]}]
    assert settings["rule_files"] == ["alerts.yml"]
    ids = [panel["id"] for panel in json.loads(files["dashboard.json"])["panels"]]
    assert len(set(ids)) == len(ids)
    for rule in YAML(typ="safe").load(files["alerts.yml"])["groups"][0]["rules"]:
        assert {"alert", "expr", "labels", "annotations"} <= rule.keys() <= {"alert", "expr", "for", "labels", "annotations"}
    assert written(tmp_path / "watch", "--target", "gpu1:9464", "--target", "[::1]:1") == files


def test_a_file_of_somebody_is_kept(tmp_path):
    (tmp_path / "alerts.yml").write_text("mine")
    with pytest.raises(UserError, match=r"alerts\.yml exists and is another file: give another directory, or --force"):
        written(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["alerts.yml"]
    assert written(tmp_path, "--force")["alerts.yml"] != "mine"
    for target in ("host", "host:0", "host:70000", 'a"b:1', ":1"):
        with pytest.raises(UserError, match="give HOST:PORT"):
            written(tmp_path / "other", "--target", target)
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"file is a file: give a directory|is a file"):
        written(tmp_path / "file")


def test_every_query_names_metrics_that_can_be(tmp_path):
    known = {f"rlhf_{family.name}{'_total' * family.counts}" for family in FAMILIES} | {f"rlhf_{name}" for name in STATE}
    assert named(queries(written(tmp_path))) <= known


def test_a_real_run_has_every_metric_of_the_dashboard_and_the_alerts(tmp_path):
    pytest.importorskip("vllm")
    pytest.importorskip("ray")
    files = written(tmp_path / "watch")
    (tmp_path / "gpus.py").write_text(GPUS)
    ray = ("--runtime", "ray", "--ray.num-cpus", "3", "--ray.num-gpus", "0", "--ray.object-store-mb", "200")
    more = (
        "--kl.coef",
        "0.01",
        "--with",
        "gpus.py:GPUs",
        "--engine",
        "vllm",
        "--eval.every",
        "1",
        "--eval.data.arithmetic.count",
        "4",
    )
    with reserved("127.0.0.1") as place, ThreadPoolExecutor(1) as pool:
        port = place.getsockname()[1]
        flags = (*ray, *more, "--prometheus.port", str(port), "--train.steps", "4")
        run = pool.submit(SmallRun(tmp_path).train, *flags)
        last = ""
        while not run.done():
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
                    last = answer.read().decode()
            except OSError:
                pass
            time.sleep(0.5)
        run.result()
    have = exported(last)
    assert named(queries(files)) - have.keys() == set()
    for query in queries(files):
        for name, labels in re.findall(r"(rlhf_\w+)\{([^}]*)\}", query):
            assert set(re.findall(r"(\w+)=", labels)) <= have[name], query
