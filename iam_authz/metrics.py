"""What IAM counts. Labels hold words from closed lists, never ids."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_SECONDS = (0.00005, 0.0001, 0.0002, 0.0003, 0.0005, 0.001, 0.002, 0.005, 0.02, 0.1, 0.5, 2.0)


class IamMetrics:
    """One set per process."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._checks = Counter(
            "kvmesh_iam_checks", "Credential checks by outcome.", ["face", "outcome"], registry=registry
        )
        self._check_seconds = Histogram(
            "kvmesh_iam_check_seconds",
            "Time of a credential check inside IAM.",
            ["face"],
            buckets=_SECONDS,
            registry=registry,
        )
        self._usage = Counter(
            "kvmesh_iam_usage_records", "Usage records received.", ["outcome"], registry=registry
        )
        self._fetches = Counter(
            "kvmesh_iam_jwks_fetches", "Fetches of issuers' signing keys.", ["outcome"], registry=registry
        )
        self.policy_version = Gauge("kvmesh_iam_policy_version", "Version of the policy.", registry=registry)
        self.watchers = Gauge("kvmesh_iam_policy_watchers", "Open policy watches.", registry=registry)

    def checked(self, face: str, outcome: str, seconds: float) -> None:
        """One credential check: `face` is "edge" or "rpc"."""
        self._checks.labels(face, outcome).inc()
        self._check_seconds.labels(face).observe(seconds)

    def used(self, outcome: str) -> None:
        """One usage record: "stored" or "refused"."""
        self._usage.labels(outcome).inc()

    def fetched(self, issuer: str, succeeded: bool) -> None:
        """One fetch of signing keys."""
        self._fetches.labels("ok" if succeeded else "failed").inc()
