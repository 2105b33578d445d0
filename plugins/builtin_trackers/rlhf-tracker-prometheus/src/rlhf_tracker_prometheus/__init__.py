"""The prometheus tracker: the run's metrics on a port, for Prometheus to read while the run goes on."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Mapping
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict, Field

from rlhf_host import Outcome, PluginError, RunContext, hookimpl
from rlhf_host.trackers import numbers

if TYPE_CHECKING:
    from rlhf_tracker_prometheus.endpoint import Endpoint
    from rlhf_tracker_prometheus.exported import Exported

__all__ = ["Prometheus"]

log = logging.getLogger(__name__)


class Prometheus:
    """Metrics of the run, its state and the time of its last step on a port, for Prometheus. `rlhf prometheus DIR` writes a
    dashboard, alerts and a configuration.
    """

    class Options(BaseModel):
        model_config = ConfigDict(extra="forbid")

        host: str = Field(
            "127.0.0.1", description="address to listen at; 0.0.0.0: every machine that reaches this one reads it"
        )
        port: int = Field(9464, ge=0, le=65535, description="port to listen at; 0: a free one, which is printed")
        run_name: str | None = Field(None, description="the label run of every metric; default: the run directory's name")
        linger_s: float = Field(
            60.0, ge=0, description="longest wait at the end for a Prometheus that reads regularly to read the last state"
        )

    def __init__(self, options: Options):
        self.options = options
        self._exported: Exported | None = None
        self._endpoint: Endpoint | None = None

    @hookimpl
    def run_started(self, context: RunContext) -> None:
        from rlhf_tracker_prometheus.endpoint import Endpoint
        from rlhf_tracker_prometheus.exported import Exported

        options = self.options
        name = options.run_name or (context.run_dir.name if context.run_dir is not None else "rlhf")
        exported = Exported(name, context)
        try:
            self._endpoint = Endpoint(exported, options.host, options.port)
        except OSError as error:
            raise PluginError(
                f"tracker 'prometheus' cannot listen at {options.host} port {options.port}: {error.strerror or error}; another"
                " port is --prometheus.port PORT, and 0 any free one"
            ) from error
        self._exported = exported
        log.warning("metrics for Prometheus: %s", self._endpoint.address)

    @hookimpl
    def log_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        if self._exported is not None:
            self._exported.report(step, numbers(metrics))

    @hookimpl
    def run_finished(self, outcome: Outcome) -> Awaitable[None] | None:
        if self._exported is None or self._endpoint is None:
            return None
        self._exported.end(outcome.status)
        endpoint, self._endpoint, self._exported = self._endpoint, None, None
        # Who pressed Ctrl-C, or takes the machine away, waits for nothing.
        wait_s = 0.0 if outcome.status == "interrupted" else endpoint.expected_s(self.options.linger_s)
        if not wait_s:
            endpoint.close()
            return None
        return endpoint.read_once_more(wait_s)
