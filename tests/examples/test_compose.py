"""examples/compose.yaml: its parts fit together, and the server starts with its command line."""

from pathlib import Path

import yaml

from banyan.cli.main import VERBS
from tests.support.flags import config_of
from tests.system.serving import ROOT

FOLDER = ROOT / "examples"
COMPOSE = yaml.safe_load((FOLDER / "compose.yaml").read_text(encoding="utf-8"))
SERVICES = COMPOSE["services"]
KEYS = {
    *("build", "image", "command", "ports", "volumes", "healthcheck", "depends_on"),
    "environment",
}


def mounts() -> list[tuple[str, str, str]]:
    """Service, source and target of each mount."""
    return [
        (name, *mount.split(":")[:2])
        for name, service in SERVICES.items()
        for mount in service.get("volumes", [])
    ]


def load(path: str) -> dict:
    return yaml.safe_load((FOLDER / path).read_text(encoding="utf-8"))


def test_every_service_has_an_image_with_a_version_and_known_keys() -> None:
    for name, service in SERVICES.items():
        assert service.keys() <= KEYS
        assert "build" in service or ":" in service["image"], name
        assert set(service.get("depends_on", [])) <= SERVICES.keys()


def test_the_server_starts_with_its_command_line_and_shows_metrics() -> None:
    verb, *flags = SERVICES["banyan"]["command"]
    config = config_of(*flags)
    assert verb in VERBS and config.observe.metrics
    assert "banyan" in SERVICES["banyan"]["command"]


def test_every_mount_has_a_file_or_a_volume() -> None:
    for name, source, _ in mounts():
        if source.startswith("."):
            assert (FOLDER / source).resolve().exists(), f"{name}: {source}"
        else:
            assert source in COMPOSE["volumes"]


def test_ports_are_open_on_this_machine_only() -> None:
    ports = [port for service in SERVICES.values() for port in service.get("ports", [])]
    assert ports and all(port.startswith("127.0.0.1:") for port in ports)


def test_prometheus_scrapes_the_server_and_grafana_reads_prometheus() -> None:
    (job,) = load("compose/prometheus.yml")["scrape_configs"]
    host, _, port = job["static_configs"][0]["targets"][0].partition(":")
    assert host in SERVICES and port == "30000"
    (source,) = load("compose/grafana/datasources/prometheus.yml")["datasources"]
    assert source["url"] == "http://prometheus:9090" and "prometheus" in SERVICES


def test_grafana_finds_the_dashboard_and_prometheus_the_alerts() -> None:
    (provider,) = load("compose/grafana/dashboards/banyan.yml")["providers"]
    found = {target: (FOLDER / source).resolve() for _, source, target in mounts()}
    assert (found[provider["options"]["path"]] / "banyan.json").is_file()
    rules = load("compose/prometheus.yml")["rule_files"]
    assert all(str(Path("/etc/prometheus") / rule) in found for rule in rules)
