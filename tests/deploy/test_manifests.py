"""The Kubernetes manifests are valid, their parts fit together, and their command lines start."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from banyan.cli.main import VERBS
from banyan.cli.router import read_flags
from banyan.config.cli import parse
from banyan.config.env import Environment
from banyan.router.config import RouterConfig
from banyan.router.routes import all_routes as router_routes
from banyan.server.http import auth
from banyan.server.routes import all_routes as server_routes

FOLDER = Path(__file__).resolve().parents[2] / "deploy"
FILES = sorted(FOLDER.glob("*.yaml"))
OLDEST = "1.30"
ENDING_S = 30
"""What a process takes at most once its drain is over."""


def documents(path: Path) -> list[dict]:
    return list(yaml.safe_load_all(path.read_text()))


def workloads(path: Path) -> list[dict]:
    return [d for d in documents(path) if "template" in d.get("spec", {})]


def containers(path: Path) -> Iterator[tuple[dict, dict]]:
    for workload in workloads(path):
        pod = workload["spec"]["template"]["spec"]
        for container in pod["containers"]:
            yield pod, container


def routed(container: dict) -> RouterConfig:
    def refuse(flags: object) -> None:
        raise AssertionError(f"no server is to be started with {flags}")

    assert container["args"][0] in VERBS
    return read_flags(container["args"][1:], {"api-key": "k"}, refuse)


def test_there_is_a_manifest_for_each_layout() -> None:
    names = [path.name for path in FILES]
    assert names == ["prefill-decode.yaml", "replicated.yaml", "single.yaml"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_manifest_is_legal_for_old_and_new_clusters(path: Path) -> None:
    schemas = pytest.importorskip("kubernetes_validate")
    for document in documents(path):
        for version in (OLDEST, schemas.latest_version()):
            schemas.validate(document, version, strict=True)
    broken = documents(path)[0] | {"sepc": {}}
    with pytest.raises(schemas.ValidationError):
        schemas.validate(broken, OLDEST, strict=True)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_what_selects_pods_finds_some_and_ports_have_names(path: Path) -> None:
    pods = {
        workload["metadata"]["name"]: workload["spec"]["template"] for workload in workloads(path)
    }
    labels = [pod["metadata"]["labels"] for pod in pods.values()]
    for workload in workloads(path):
        own = workload["spec"]["selector"]["matchLabels"]
        assert own.items() <= workload["spec"]["template"]["metadata"]["labels"].items()
        assert workload["kind"] != "StatefulSet" or workload["spec"]["serviceName"] in names(
            path, "Service"
        )
    for document in documents(path):
        spec = document["spec"]
        if document["kind"] == "Service":
            assert spec["selector"] in labels
            ports = {
                port["name"]
                for pod in pods.values()
                if pod["metadata"]["labels"] == spec["selector"]
                for container in pod["spec"]["containers"]
                for port in container["ports"]
            }
            assert {port["targetPort"] for port in spec["ports"]} <= ports
        if document["kind"] == "PodDisruptionBudget":
            assert spec["selector"]["matchLabels"] in labels
        if document["kind"] == "NetworkPolicy":
            assert spec["podSelector"]["matchLabels"] in labels
    assert len({(d["kind"], d["metadata"]["name"]) for d in documents(path)}) == len(
        documents(path)
    )


def names(path: Path, kind: str) -> list[str]:
    return [d["metadata"]["name"] for d in documents(path) if d["kind"] == kind]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_volumes_are_there_for_what_is_mounted(path: Path) -> None:
    for workload in workloads(path):
        pod = workload["spec"]["template"]["spec"]
        claims = workload["spec"].get("volumeClaimTemplates", ())
        known = {volume["name"] for volume in pod["volumes"]}
        known |= {claim["metadata"]["name"] for claim in claims}
        for container in pod["containers"]:
            assert {mount["name"] for mount in container["volumeMounts"]} == known


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_probes_ask_routes_that_need_no_key_and_life_is_no_question_of_readiness(
    path: Path,
) -> None:
    for _, container in containers(path):
        is_router = container["args"][0] == "router"
        table = router_routes() if is_router else server_routes()
        open_ = {route.path for route in table if route.guard == auth.OPEN}
        asked = {kind: container[f"{kind}Probe"] for kind in ("startup", "readiness", "liveness")}
        for probe in asked.values():
            assert probe["httpGet"]["path"] in open_ and probe["httpGet"]["port"] == "http"
        assert asked["liveness"]["httpGet"]["path"] == "/livez"
        assert asked["readiness"]["httpGet"]["path"] == "/readyz"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_pod_gets_the_time_that_its_drain_takes(path: Path) -> None:
    for pod, container in containers(path):
        verb, sleep, seconds = (
            container["args"][0],
            *container["lifecycle"]["preStop"]["exec"]["command"],
        )
        assert sleep == "sleep"
        if verb == "router":
            needed_s = routed(container).server.drain_timeout_s + 5
        else:
            needed_s = parse(container["args"][1:], Environment()).server.drain_timeout_s + ENDING_S
        assert pod["terminationGracePeriodSeconds"] >= int(seconds) + needed_s


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_command_line_is_one_that_starts_and_asks_for_a_key(path: Path) -> None:
    for pod, container in containers(path):
        (key,) = [e for e in container["env"] if e["name"] == "BANYAN_API_KEY"]
        assert "secretKeyRef" in key["valueFrom"]
        if container["args"][0] == "router":
            server = routed(container).server
        else:
            assert container["args"][0] == "serve"
            secrets = {e["name"] for e in container["env"] if "secretKeyRef" in e["valueFrom"]}
            hands_over = "--disaggregation-mode" in container["args"]
            assert ("BANYAN_DIST_SECRET" in secrets) == hands_over
            server = parse(container["args"][1:], Environment({"api-key": "k"})).server
        assert (server.host, server.require_key, server.api_key) == ("0.0.0.0", True, "k")
        assert [port["containerPort"] for port in container["ports"]][0] == server.port
        assert pod["securityContext"]["runAsNonRoot"] is True


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_routers_name_every_server_by_its_stable_name(path: Path) -> None:
    sets = [w for w in workloads(path) if w["kind"] == "StatefulSet"]
    named = sorted(
        f"http://{w['metadata']['name']}-{i}.{w['spec']['serviceName']}:30000"
        for w in sets
        for i in range(w["spec"]["replicas"])
    )
    routers = [c for _, c in containers(path) if c["args"][0] == "router"]
    assert bool(routers) == bool(sets)
    for container in routers:
        fleet = routed(container).pool
        assert sorted(spec.url for spec in fleet.workers) == named
        for spec in fleet.workers:
            assert spec.kind == "regular" or spec.kind in spec.url
            assert (spec.bootstrap_port == 8998) == (spec.kind == "prefill")


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_an_image_made_on_the_node_is_used_and_only_volumes_are_written(path: Path) -> None:
    for pod, container in containers(path):
        assert container["imagePullPolicy"] == "IfNotPresent"
        assert container["securityContext"]["readOnlyRootFilesystem"] is True
        written = {mount["mountPath"] for mount in container["volumeMounts"]}
        assert "/tmp" in written
        assert container["args"][0] == "router" or "/home/banyan/.cache" in written
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_prometheus_scrapes_every_service_on_a_route_that_is_there(path: Path) -> None:
    monitor = yaml.safe_load((FOLDER / "prometheus" / "servicemonitor.yaml").read_text())
    (rule,) = monitor["spec"]["selector"]["matchExpressions"]
    (endpoint,) = monitor["spec"]["endpoints"]
    services = [d for d in documents(path) if d["kind"] == "Service"]
    for service in services:
        assert service["metadata"]["labels"][rule["key"]] in rule["values"]
        assert endpoint["port"] in {port["name"] for port in service["spec"]["ports"]}
    for _, container in containers(path):
        is_router = container["args"][0] == "router"
        assert "--enable-metrics" in container["args"]
        table = router_routes() if is_router else server_routes()
        assert auth.OPEN in {r.guard for r in table if r.path == endpoint["path"]}
    for policy in (d for d in documents(path) if d["kind"] == "NetworkPolicy"):
        peers = policy["spec"]["ingress"][0]["from"]
        assert any("namespaceSelector" in peer for peer in peers)
