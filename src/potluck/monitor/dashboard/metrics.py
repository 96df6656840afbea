"""The run for Prometheus: `/metrics`."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from potluck.monitor.dashboard.state import Dashboard

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class RunCollector(Collector):
    """Looks at the run when asked."""

    def __init__(self, dashboard: Dashboard) -> None:
        self._dashboard = dashboard

    def collect(self) -> Iterator[Metric]:
        """All figures, with the run as a label, and those of peers with peer and name too."""
        overview = self._dashboard.overview()
        run = [overview.run]
        whole: list[tuple[str, str, float | None]] = [
            ("epoch", "Updates that are committed", overview.epoch),
            ("samples", "Samples towards the next epoch", overview.samples),
            ("target_samples", "Samples that make an epoch", overview.target),
            ("samples_per_second", "Of all trainers", overview.samples_per_second),
            ("loss", "Of all trainers, weighted by their speed", overview.loss),
            ("held_out_loss", "On data that nobody trains on", overview.held_out_loss),
            ("epoch_seconds", "From one epoch to the next", overview.seconds_per_epoch),
            ("epoch_bytes", "Sent by all members in the newest round", overview.bytes_per_epoch),
        ]
        for name, text, value in whole:
            if value is not None:
                gauge = GaugeMetricFamily(f"potluck_{name}", text, labels=["run"])
                gauge.add_metric(run, value)
                yield gauge
        sent = CounterMetricFamily("potluck_sent_bytes", "Sent in rounds since the start", labels=["run"])
        sent.add_metric(run, self._dashboard.follower.past.total("sent_bytes"))
        yield sent
        peers = GaugeMetricFamily("potluck_peers", "Peers that are here", labels=["run", "role"])
        for role, count in overview.roles.items():
            peers.add_metric([*run, role], count)
        yield peers
        rates = GaugeMetricFamily(
            "potluck_peer_samples_per_second", "Of one trainer", labels=["run", "peer", "name", "place"]
        )
        for row in self._dashboard.rows():
            if row.role == "trainer":
                rates.add_metric([*run, row.peer, row.name, row.place], row.samples_per_second)
        yield rates


def render(dashboard: Dashboard) -> bytes:
    """What Prometheus reads."""
    registry = CollectorRegistry()
    registry.register(RunCollector(dashboard))
    return generate_latest(registry)
