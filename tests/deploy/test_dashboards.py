"""The dashboard and the alerts ask for figures that a server has, and a real Prometheus takes every
query where one is installed (Debian and Ubuntu: apt install prometheus)."""

import json
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from tests.server.fakes import Site
from tests.server.test_metrics import asked, chunk, metrics_of, run
from tests.support.scripted import scripted
from tests.system.serving import free_port, wait_until

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
BOARD = json.loads((DEPLOY / "grafana" / "banyan.json").read_text())
RULES = yaml.safe_load((DEPLOY / "prometheus" / "alerts.yml").read_text())["groups"][0]["rules"]
PANELS = [panel for panel in BOARD["panels"] if panel["type"] != "row"]
BOARD_QUERIES = [target["expr"] for panel in PANELS for target in panel["targets"]]
ALERTS = [rule["expr"] for rule in RULES]
OF_OTHERS = {"up"}
"""Metrics that Prometheus makes itself."""
NAMES = re.compile(r"\b(?:sglang|banyan):\w+|\bup\b")
LABELS = re.compile(r"(\w+)\s*(?:=~|!~|=|!=)\s*\"|by \(([^)]*)\)|(?:on|ignoring) \(([^)]*)\)")


def counted():
    """Metrics of a server that has answered a few requests."""
    metrics = metrics_of("--enable-metrics")
    for grammar in ("", "json"):
        run(metrics, _Scripted(), asked(grammar=grammar, key_name="shop"))
    return metrics


class _Scripted:
    def check(self, requests) -> None:
        pass

    @scripted
    async def generate(self, request):
        from banyan.requests.generation import Finish

        yield chunk(1)
        yield chunk(3, Finish("stop"), cached_tokens=4, queue_s=0.1)


def shown(metrics) -> dict[str, set[str]]:
    """Name of each sample -> its labels."""
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(metrics.export().decode()):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


SHOWN = shown(counted())
ADDED = {"instance", "job"}
"""Labels that Prometheus adds as it scrapes."""


@pytest.mark.parametrize("query", [*BOARD_QUERIES, *ALERTS])
def test_a_query_names_figures_that_are_shown_and_labels_that_they_have(query: str) -> None:
    names = set(NAMES.findall(query))
    assert names and names <= SHOWN.keys() | OF_OTHERS
    own = set().union(*(SHOWN.get(name, set()) for name in names))
    for groups in LABELS.findall(query):
        for label in re.split(r",\s*", next(filter(None, groups))):
            assert label in own | ADDED, label


def test_choices_of_the_dashboard_name_figures_that_are_shown() -> None:
    asked_for = [v["definition"] for v in BOARD["templating"]["list"] if "definition" in v]
    assert asked_for and all(set(NAMES.findall(text)) <= SHOWN.keys() for text in asked_for)


def test_panels_have_names_units_and_places_of_their_own() -> None:
    ids = [panel["id"] for panel in BOARD["panels"]]
    assert len(ids) == len(set(ids)) and all(panel["title"] for panel in BOARD["panels"])
    taken: set[tuple[int, int]] = set()
    for panel in BOARD["panels"]:
        at = panel["gridPos"]
        cells = {(at["x"] + i, at["y"] + j) for i in range(at["w"]) for j in range(at["h"])}
        assert not cells & taken and at["x"] + at["w"] <= 24, panel["title"]
        taken |= cells


def test_an_alert_says_what_is_wrong_and_what_to_do() -> None:
    assert len({rule["alert"] for rule in RULES}) == len(RULES)
    for rule in RULES:
        assert rule["for"] and rule["labels"]["severity"] in ("critical", "warning", "info")
        assert rule["annotations"]["summary"] and rule["annotations"]["description"]


@pytest.mark.skipif(not shutil.which("promtool"), reason="promtool is not installed")
def test_prometheus_accepts_the_rules_and_the_configuration() -> None:
    command = ["promtool", "check", "config", str(DEPLOY / "prometheus" / "prometheus.yml")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(RULES)} rules found" in done.stdout


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """A Prometheus that has scraped a server a few times."""
    if not shutil.which("prometheus"):
        pytest.skip("Prometheus is not installed (Debian and Ubuntu: apt install prometheus)")
    folder, port = tmp_path_factory.mktemp("prometheus"), free_port()
    site = Site()
    site.state.metrics = counted()
    with site.serving():
        config = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())
        config["global"]["scrape_interval"] = "500ms"
        config["rule_files"] = [str(DEPLOY / "prometheus" / "alerts.yml")]
        config["scrape_configs"][0]["static_configs"][0]["targets"] = [f"127.0.0.1:{site.port}"]
        (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
        command = [
            *("prometheus", f"--config.file={folder / 'prometheus.yml'}"),
            *(f"--storage.tsdb.path={folder / 'data'}", f"--web.listen-address=127.0.0.1:{port}"),
        ]
        with (folder / "log").open("wb") as log:
            process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        try:
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as http:
                wait_until(lambda: len(values(http, "up[1m]")) >= 2, 60, "two scrapes")
                run(
                    site.state.metrics, _Scripted(), asked(key_name="shop")
                )  # so that counters grow
                wait_until(lambda: len(values(http, "up[1m]")) >= 5, 60, "three more")
                yield http
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)


def values(http: httpx.Client, query: str) -> list:
    """What a query finds; the points of its first series where it asks for a range."""
    try:
        answer = http.get("/api/v1/query", params={"query": query})
    except httpx.TransportError:
        return []
    if answer.status_code != 200:
        return []
    result = answer.json()["data"]["result"]
    return result[0]["values"] if result and "values" in result[0] else result


GRAFANA = {"$__rate_interval": "1m", "$__range": "5m", "$model": ".*", "$instance": ".*"}


@pytest.mark.parametrize("query", BOARD_QUERIES)
def test_every_panel_has_something_to_show(prometheus: httpx.Client, query: str) -> None:
    for name, value in GRAFANA.items():
        query = query.replace(name, value)
    answer = prometheus.get("/api/v1/query", params={"query": query})
    assert answer.status_code == 200, answer.text
    assert answer.json()["data"]["result"], query


def test_no_rule_fails_and_a_sound_server_raises_no_alarm(prometheus: httpx.Client) -> None:
    groups = prometheus.get("/api/v1/rules").json()["data"]["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    assert len(rules) == len(RULES)
    for expression in ALERTS:
        answer = prometheus.get("/api/v1/query", params={"query": expression})
        assert answer.status_code == 200 and answer.json()["data"]["result"] == [], expression
