"""From options to processes: which run, with which files, and when each is ready.

Writes the configuration of every process, with its certificate, just before each
start. Knows every role's place in the mesh and the options it is given; does not
start anything.
"""

from __future__ import annotations

import secrets
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from deploy import envoy as edge
from deploy import nats as news
from mesh.ca import CertificateAuthority
from mesh.config import IdentityFiles, MetricsConfig, ModelConfig, NatsConfig, ServiceConfig, write_config
from mesh.identity import ServiceIdentity, service_audience
from mesh.models import is_encoder
from mesh.nats_permissions import permissions
from mesh.processors import Places, allowed
from mesh.supervisor.options import WORKERS, MeshOptions, process_slug
from mesh.supervisor.ports import Ports
from mesh.supervisor.probe import GreetingProbe, HttpProbe, Probe
from mesh.supervisor.process import ProcessSpec
from mesh.supervisor.state import StateDir
from mesh.supervisor.status_file import ServiceAliveProbe, StatusFileProbe
from mesh.supervisor.sweep import NODES, edge_ids

ROOT = Path(__file__).resolve().parents[2]
PACKAGES: Mapping[str, str] = {"iam": "iam_authz", "responses": "response_store"}
NICE: Mapping[str, int] = {"decode": 5, "prefill": 10}
DEV_ORGANISATION = "dev"
# Threads of a worker, unless somebody says how many.
MOST_THREADS = 8
# How far apart steps of decode begin while prompts wait for the same processors.
PACE_S = 0.04
SUPERVISOR = "supervisor"
EDGE = "edge"
# The edge cannot make tokens, so it holds ones that outlive any run; the supervisor is not replaced.
_EDGE_DAYS = 3000
MOVE_S = 2.0
_STOP_S: Mapping[str, float] = {"nats": 5.0, "envoy": 5.0}


class PlanError(Exception):
    """The mesh cannot be started as asked; the message says why."""


@dataclass(frozen=True, slots=True)
class ModelPlan:
    """A model and the path that its source was resolved to."""

    name: str
    source: str
    path: str


@dataclass(frozen=True, slots=True)
class NodePlan:
    """A set of processes that map one arena: a store and workers. `directory` is the store's own."""

    name: str
    store: str
    directory: Path
    workers: Mapping[str, int]


class Plan:
    """The processes of one mesh. Addresses and passwords are drawn once per run."""

    def __init__(self, options: MeshOptions, state: StateDir, *, kv_bytes: int) -> None:
        self.options, self.state = options, state
        self._kv_bytes = kv_bytes
        self._ports = Ports()
        self._places = Places(allowed())
        self._tcp = options.listen == "tcp"
        self._node = socket.gethostname().split(".")[0].lower() or "node"
        self._ca = CertificateAuthority.open_or_create(state.ca)
        self._passwords: dict[str, tuple[str, str]] = {}
        self._nats_port = self._ports.take()
        self.nodes = self._node_plans()
        self._node_of: dict[str, NodePlan] = {}
        names = (*self.iam_names, *(node.store for node in self.nodes), "responses-0", *self.router_names)
        self._addresses = {name: self._address(name) for name in names}
        self._models_at_start = len(options.models)
        self._edge_life = edge.EdgeLife(edge_ids(state.root))

    def _node_plans(self) -> list[NodePlan]:
        options, root = self.options, self.state.root
        if not options.nodes:
            counts = {"prefill": options.prefill, "decode": options.decode}
            return [NodePlan(self._node, "kvstore-0", root, counts)]
        return [
            NodePlan(name, f"kvstore-{n}", root / NODES / name, counts)
            for n, (name, counts) in enumerate(options.nodes.items())
        ]

    @property
    def router_names(self) -> list[str]:
        return [f"router-{n}" for n in range(self.options.router)]

    @property
    def iam_names(self) -> list[str]:
        return [f"iam-{n}" for n in range(self.options.iam)]

    # What the supervisor itself needs

    def supervisor_nats(self) -> NatsConfig:
        """The supervisor's own account on the news."""
        return self._nats_config(SUPERVISOR, SUPERVISOR)

    def iam_address(self) -> str:
        return self._addresses["iam-0"]

    # The processes

    def nats(self) -> ProcessSpec:
        binary = news.nats_binary()
        if binary is None:
            raise PlanError("nats-server is missing: run './kvmesh doctor'")
        config = self.state.run / "nats.conf"
        target = f"127.0.0.1:{self._nats_port}"
        probe = GreetingProbe(target, b"INFO ")
        return ProcessSpec(
            name="nats",
            role="nats",
            argv=tuple(news.arguments(binary, config)),
            ready=probe,
            alive=probe,
            log=self.state.logs / "nats.log",
            address=f"{'tls' if self._tcp else 'nats'}://{target}",
            stop_s=_STOP_S["nats"],
            prepare=self._prepare_nats,
        )

    def iams(self, models: list[ModelPlan]) -> list[ProcessSpec]:
        bootstrap = {
            "organisation": DEV_ORGANISATION,
            "dev_key_file": str(self.state.dev_key),
            "models": [{"name": model.name, "source": model.source} for model in models],
        }
        return [
            self._service("iam", name, {"bootstrap": bootstrap}, side_by_side=True) for name in self.iam_names
        ]

    def kvstores(self) -> list[ProcessSpec]:
        options: dict[str, Any] = {
            "kv_bytes": self._kv_bytes // len(self.nodes),
            "models": self._models_at_start,
        }
        if self.options.kv_disk_bytes is not None:
            options["disk_bytes"] = self.options.kv_disk_bytes // len(self.nodes)
        if self.options.page_pool is not None:
            options["page_pool"] = self.options.page_pool
        return [
            self._service("kvstore", node.store, {**options, "directory": str(node.directory)}, node=node)
            for node in self.nodes
        ]

    def responses(self) -> ProcessSpec:
        return self._service("responses", "responses-0", {})

    def workers(self, model: ModelPlan) -> list[ProcessSpec]:
        if is_encoder(model.path):
            return self._encoders(model)
        chosen = {
            "threads": self.options.threads,
            "executor": self.options.executor,
            "kv_dtype": self.options.kv_dtype,
        }
        options: dict[str, Any] = {name: value for name, value in chosen.items() if value is not None}
        # What has not finished by then moves, and needs a moment for it.
        options["drain_s"] = max(0.5, self.options.drain_s - MOVE_S)
        slug = process_slug(model.name)
        places = {role: [node for node in self.nodes for _ in range(node.workers[role])] for role in WORKERS}
        return [
            self._service(role, f"{role}-{slug}-{n}", {**options, **self._share(role)}, model, node=node)
            for role, nodes in places.items()
            for n, node in enumerate(nodes)
        ]

    def _share(self, role: str) -> dict[str, Any]:
        """One more worker's part of the processors: threads, where they stay, whether it shares them."""
        threads = self._threads(role)
        share: dict[str, Any] = {"threads": threads}
        if self.options.pin:
            share["cpus"] = self._places.take(threads)
        wanted = sum(self._threads(name) * getattr(self.options, name) for name in WORKERS)
        if role == "decode" and wanted * len(self.options.models) >= len(allowed()):
            share["pace_s"] = PACE_S
        return share

    def _threads(self, role: str) -> int:
        chosen = self.options.role_options.get(role, {}).get("threads", self.options.threads)
        if isinstance(chosen, int) and chosen > 0:
            return chosen
        # The kernel weighs workers by their niceness, and the cpu executor's idle threads cost nothing.
        return 1 if self.options.executor == "reference" else min(len(allowed()), MOST_THREADS)

    def _encoders(self, model: ModelPlan) -> list[ProcessSpec]:
        threads = self.options.threads or 1
        slug = process_slug(model.name)
        specs = [
            self._service("encode", f"encode-{slug}-{n}", {"threads": threads}, model)
            for n in range(self.options.encode)
        ]
        # The library of the matrix products reads it when it is loaded.
        env = {"OPENBLAS_NUM_THREADS": str(threads)}
        return [replace(spec, env={**spec.env, **env}) for spec in specs]

    def routers(self) -> list[ProcessSpec]:
        chosen = {"tool_parser": self.options.tool_parser, "reasoning_parser": self.options.reasoning_parser}
        options = {name: value for name, value in chosen.items() if value is not None}
        return [
            self._service(
                "router",
                name,
                {
                    "openai_socket": str(self._openai(name)),
                    "responses": self._addresses["responses-0"],
                    **options,
                },
                side_by_side=True,
            )
            for name in self.router_names
        ]

    def envoy(self) -> ProcessSpec:
        binary = edge.envoy_binary()
        if binary is None:
            raise PlanError("there is no Envoy for this platform: use --no-edge, or run './kvmesh doctor'")
        document = self.state.run / "envoy.json"
        return ProcessSpec(
            name="envoy",
            role="envoy",
            argv=tuple(edge.arguments(binary, document)),
            ready=self.edge_probe("/healthz"),
            alive=self.edge_probe("/healthz"),
            log=self.state.logs / "envoy.log",
            address=self.options.url,
            stop_s=_STOP_S["envoy"],
            prepare=lambda taking_over: self._prepare_envoy(document, taking_over),
            side_by_side=True,
            # Told to end by a signal, Envoy cuts what it still answers; its successor ends it.
            retire_s=edge.RETIRE_S + 30.0,
            retire_by_signal=False,
        )

    def edge_probe(self, path: str) -> Probe:
        """Asks the edge itself, as a client would."""
        host = self.options.host.replace("0.0.0.0", "127.0.0.1")
        host = "[::1]" if host in ("::", "::1") else host
        return HttpProbe(f"{host}:{self.options.port}", path, tls=self.options.tls)

    @property
    def admin_socket(self) -> Path:
        return self.state.run / "envoy-admin.sock"

    # Their configuration

    def _service(
        self,
        role: str,
        name: str,
        options: Mapping[str, Any],
        model: ModelPlan | None = None,
        *,
        side_by_side: bool = False,
        node: NodePlan | None = None,
    ) -> ProcessSpec:
        config_file = self.state.run / f"{name}.config.json"
        status_file = self.state.run / f"{name}.json"
        address = self._addresses.get(name) or self._address(name, fixed=False)
        merged = {**options, **self.options.role_options.get(role, {})}
        package = PACKAGES.get(role, role)
        self._node_of[name] = node or self.nodes[0]
        # Before it is a process it must be able to speak on the news.
        self._password(role, name)
        return ProcessSpec(
            name=name,
            role=role,
            argv=(sys.executable, "-m", f"{package}.server", "--config", str(config_file)),
            ready=StatusFileProbe(status_file),
            alive=ServiceAliveProbe(status_file),
            log=self.state.logs / f"{name}.log",
            address=address,
            status_file=status_file,
            model=None if model is None else model.name,
            nice=NICE.get(role, 0),
            stop_s=self.options.drain_s,
            prepare=lambda taking_over: self._prepare_service(
                role, name, address, merged, model, config_file, status_file, side_by_side, taking_over
            ),
            side_by_side=side_by_side,
            env=_environment(),
        )

    def _prepare_service(
        self,
        role: str,
        name: str,
        address: str,
        options: Mapping[str, Any],
        model: ModelPlan | None,
        config_file: Path,
        status_file: Path,
        side_by_side: bool,
        taking_over: bool,
    ) -> Sequence[str]:
        # What the run before left must not be taken for this one's.
        for path in () if taking_over else (status_file, *self._sockets(name, address)):
            path.unlink(missing_ok=True)
        config = ServiceConfig(
            name=name,
            role=role,
            node=self._node_of[name].name,
            state_dir=self.state.root,
            run_dir=self.state.run,
            listen=address,
            advertise=address,
            tls=self._tcp,
            identity=self._issue(role, name, ["127.0.0.1"]),
            nats=self._nats_config(role, name),
            iam=tuple(self._addresses[iam] for iam in self.iam_names),
            kvstore=self._addresses[self._node_of[name].store],
            metrics=MetricsConfig(host="127.0.0.1", port=0, token_file=self.state.metrics_token),
            model=None if model is None else ModelConfig(model.name, model.source, model.path),
            options=dict(options),
            fault_points=self.options.fault_points,
            side_by_side=side_by_side,
        )
        write_config(config_file, config)
        return ()

    def _prepare_nats(self, _: bool) -> Sequence[str]:
        tls = None
        if self._tcp:
            files = self._issue("nats", "nats", ["127.0.0.1"])
            tls = news.NatsTls(files.cert, files.key, files.ca, verify_clients=True)
        self.write_nats_config(tls)
        return ()

    def write_nats_config(self, tls: news.NatsTls | None = None) -> None:
        """Writes the server's file with everybody who has a password by now."""
        if tls is None and self._tcp:
            identities = self.state.identities
            cert, key = identities / "nats.pem", identities / "nats.key"
            tls = news.NatsTls(cert, key, self._ca.cert_file, verify_clients=True)
        server = news.NatsServer(
            name=self._node,
            host="127.0.0.1",
            port=self._nats_port,
            store_dir=self.state.root / "nats",
            users=[self._nats_user(role, name) for name, (role, _) in sorted(self._passwords.items())],
            tls=tls,
        )
        news.write_config(self.state.run / "nats.conf", server)

    def _prepare_envoy(self, document: Path, taking_over: bool) -> Sequence[str]:
        self.admin_socket.unlink(missing_ok=True)
        files = self._ca.issue(self.state.identities, role=EDGE, name=EDGE, days=_EDGE_DAYS)
        identity = ServiceIdentity.load(files)
        ttl_s = _EDGE_DAYS * 86400.0

        def token(role: str) -> str:
            return identity.mint({}, audience=service_audience(role), ttl_s=ttl_s)

        edge.write_bootstrap(
            document,
            edge.EdgeConfig(
                host=self.options.host,
                port=self.options.port,
                admin_socket=self.admin_socket,
                routers=tuple(
                    edge.RouterEndpoint(name, self._openai(name), self._addresses[name])
                    for name in self.router_names
                ),
                iam=tuple(self._addresses[iam] for iam in self.iam_names),
                router_token=token("router"),
                iam_token=token("iam"),
                tls=self._edge_certificate(),
                upstream_tls=edge.UpstreamTls(files.cert, files.key, files.ca) if self._tcp else None,
                **self.options.role_options.get("envoy", {}),
            ),
        )
        return self._edge_life.arguments(self.state.run, taking_over=taking_over)

    def _edge_certificate(self) -> edge.CertificateFiles | None:
        if not self.options.tls:
            return None
        if self.options.cert is not None and self.options.key is not None:
            return edge.CertificateFiles(self.options.cert.absolute(), self.options.key.absolute())
        hosts = ["localhost", "127.0.0.1", "::1", socket.gethostname()]
        if self.options.host not in ("0.0.0.0", "::"):
            hosts.append(self.options.host)
        files = self._issue("public", "public", hosts)
        return edge.CertificateFiles(files.cert, files.key)

    # Certificates, addresses, accounts

    def supervisor_identity(self) -> IdentityFiles:
        """Proves to NATS who this is, for as long as a supervisor may run."""
        return self._ca.issue(self.state.identities, role=SUPERVISOR, name=SUPERVISOR, days=_EDGE_DAYS)

    def _issue(self, role: str, name: str, hosts: Sequence[str]) -> IdentityFiles:
        days = self.options.certificate_days
        return self._ca.issue(self.state.identities, role=role, name=name, hosts=hosts, days=days)

    def _address(self, name: str, *, fixed: bool = True) -> str:
        if self._tcp:
            return f"127.0.0.1:{self._ports.take() if fixed else 0}"
        return f"unix:{self.state.run / name}.sock"

    def _sockets(self, name: str, address: str) -> list[Path]:
        sockets = [self._openai(name)]
        if address.startswith("unix:"):
            sockets.append(Path(address.removeprefix("unix:")))
        return sockets

    def _openai(self, name: str) -> Path:
        return self.state.run / f"{name}.openai.sock"

    def _password(self, role: str, name: str) -> str:
        return self._passwords.setdefault(name, (role, secrets.token_urlsafe(24)))[1]

    def _nats_config(self, role: str, name: str) -> NatsConfig:
        scheme = "tls" if self._tcp else "nats"
        url = f"{scheme}://127.0.0.1:{self._nats_port}"
        return NatsConfig(url, name, self._password(role, name), self._ca.cert_file if self._tcp else None)

    def _nats_user(self, role: str, name: str) -> news.NatsUser:
        rules = permissions(role, name=name, node=self._node_of.get(name, self.nodes[0]).name)
        return news.NatsUser(name, self._password(role, name), rules.publish, rules.subscribe)


def _environment() -> Mapping[str, str]:
    """What a service needs to find the packages of this tree and nothing of a user's own."""
    return {
        "PYTHONPATH": f"{ROOT}:{ROOT / 'protos'}",
        "PYTHONUNBUFFERED": "1",
        "PYTHONDONTWRITEBYTECODE": "",
    }
