"""The Helm chart, rendered by Helm's own library."""

from pathlib import Path

import pytest
import yaml

from banyan.config.cli import parse
from banyan.config.env import Environment

helm = pytest.importorskip("helm_python", reason="pip install helm-python-sdk (80 MB)")
FOLDER = Path(__file__).resolve().parents[2] / "deploy"
CHART = FOLDER / "chart"

Document = dict
INFO = 1


Documents = dict[tuple[str, str], Document]
"""(kind, name) -> document."""


def rendered(values: Document | None = None, name: str = "banyan") -> Documents:
    """Without the notes."""
    with helm.Chart.load(str(CHART)) as chart:
        files = chart.render(values or {}, name=name)
    texts = [text for path, text in files.items() if path.endswith(".yaml")]
    found = [d for text in texts for d in yaml.safe_load_all(text) if d]
    return {(d["kind"], d["metadata"]["name"]): d for d in found}


def test_the_chart_has_no_finding_of_lint() -> None:
    report = helm.lint(str(CHART), strict=True)
    assert report["total_charts_linted"] == 1 and not report["errors"]
    assert [m["error"] for m in report["messages"] if m["severity"] > INFO] == []


def test_the_defaults_are_the_manifest_of_three_servers() -> None:
    listed = yaml.safe_load_all((FOLDER / "replicated.yaml").read_text())
    expected = {(d["kind"], d["metadata"]["name"]): d for d in listed}
    found = rendered()
    assert set(found) == set(expected)
    for place, document in found.items():
        assert document == expected[place], place


def test_names_follow_the_release_and_workers_the_number_of_servers() -> None:
    found = rendered({"server": {"replicas": 5}}, "llm")
    args = found["Deployment", "llm"]["spec"]["template"]["spec"]["containers"][0]["args"]
    urls = args[args.index("--worker-urls") + 1 :]
    assert urls == [f"http://llm-server-{n}.llm-server:30000" for n in range(5)]


def test_without_routers_clients_reach_the_ready_servers() -> None:
    found = rendered({"router": {"replicas": 0}})
    assert ("Deployment", "banyan") not in found and ("NetworkPolicy", "banyan-server") not in found
    assert found["Service", "banyan"]["spec"]["selector"] == {"app": "banyan-server"}


def test_flags_that_are_added_start_a_server_and_the_monitor_is_optional() -> None:
    flags = ["--log-format", "json", "--max-running-requests", "8"]
    found = rendered({"model": "qwen3-0.6b", "server": {"flags": flags}, "serviceMonitor": True})
    pod = found["StatefulSet", "banyan-server"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    config = parse(container["args"][1:], Environment(flags={"api-key": "k"}))
    assert config.model.source == "qwen3-0.6b" and config.schedule.max_running == 8
    assert ("ServiceMonitor", "banyan-server") in found


@pytest.mark.parametrize(
    "values", [{"modle": "x"}, {"server": {"replicas": 0}}, {"imagePullPolicy": "Sometimes"}]
)
def test_values_that_mean_nothing_are_refused(values: Document) -> None:
    with pytest.raises(helm.HelmError):
        rendered(values)
