"""Labels that requests bring for what is counted of them."""

import json
from dataclasses import replace
from pathlib import Path

import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from banyan.base.errors import ConfigError
from banyan.config.schema import ServerConfig
from banyan.engine_client.metrics_observer import ObservedGenerator
from banyan.server.admin.metrics import MOST_SETS, check_labels, open_labels, open_metrics
from tests.server.fakes import Site
from tests.support.flags import config_of
from tests.system.serving import wait_until

LIST = "--tokenizer-metrics-allowed-custom-labels"
MODEL = ("--model-path", "tiny")
ALLOWED = (*MODEL, "--enable-metrics", LIST, "tenant", "team")
STRANGE = (
    '{"tenant": "\\ud800"}',
    '{"tenant": "a\\nb"}',
    '{"tenant": "a\\u0000"}',
    '{"tenant": ' + "9" * 5000 + "}",
    '{"tenant": ' + "[" * 5000,
    '{"tenant": NaN}',
)
"""What JSON can say and no label can be."""
LINE = json.dumps(
    {
        "custom_id": "one",
        "method": "POST",
        "url": "/v1/completions",
        "body": {"model": "tiny", "prompt": "hi", "max_tokens": 4},
    }
).encode()
ASKED = {"model": "tiny", "prompt": "hi", "max_tokens": 4}


def site_of(*words: str, storage: str = "") -> Site:
    """A site that counts as a server with these flags does."""
    observe = config_of(*words).observe
    site = Site(ServerConfig(storage_path=storage), observe=observe)
    labels = open_labels(observe)
    metrics = open_metrics(site.state.config, "tiny", list, labels)
    assert metrics is not None
    site.state.metrics = metrics
    site.state.service = site.service = replace(
        site.service, generator=ObservedGenerator(site.generator, [metrics])
    )
    site.state.labels = labels.context if labels else None
    return site


def ended(site: Site) -> dict[tuple[str, str], float]:
    """(tenant, team) -> requests that have ended."""
    found = {}
    for family in text_string_to_metric_families(site.http.get("/metrics").text):
        for sample in family.samples:
            if sample.name == "sglang:num_requests_total":
                brought = (sample.labels["tenant"], sample.labels["team"])
                found[brought] = sample.value
    return found


def ask(site: Site, labels: object = None, header: str = "x-custom-labels") -> int:
    headers = {} if labels is None else {header: json.dumps(labels)}
    return site.http.post("/v1/completions", json=ASKED, headers=headers).status_code


def test_a_request_counts_under_the_labels_it_brings() -> None:
    with site_of(*ALLOWED).serving() as site:
        for labels in ({"tenant": "a"}, {"tenant": "a"}, {"team": "b", "other": "c"}, None):
            assert ask(site, labels) == 200
        assert ended(site) == {("a", ""): 2, ("", "b"): 1, ("", ""): 1}


def test_the_header_is_the_one_of_the_flag() -> None:
    flags = (*ALLOWED, "--tokenizer-metrics-custom-labels-header", "X-Mine")
    with site_of(*flags).serving() as site:
        assert ask(site, {"tenant": "a"}, "x-mine") == 200
        assert ask(site, {"tenant": "b"}) == 200
        assert ended(site) == {("a", ""): 1, ("", ""): 1}


@pytest.mark.parametrize(
    "labels", ["[1]", "{", '{"tenant": 3}', '{"tenant": "' + "x" * 101 + '"}', *STRANGE]
)
def test_labels_that_are_none_are_refused_by_the_name_of_the_header(labels: str) -> None:
    with site_of(*ALLOWED).serving() as site:
        answer = site.http.post("/v1/completions", json=ASKED, headers={"x-custom-labels": labels})
        assert answer.status_code == 400 and "x-custom-labels" in answer.text
        assert ended(site) == {("", ""): 0}


def test_lines_of_a_batch_count_under_the_labels_that_it_was_made_with(tmp_path: Path) -> None:
    with (
        site_of(*ALLOWED, storage=str(tmp_path)).serving() as site,
        openai.OpenAI(base_url=f"{site.url}/v1", api_key="none", max_retries=0) as client,
    ):
        made = []
        for headers in ({"x-custom-labels": '{"tenant": "a"}'}, {}):
            given = client.files.create(file=("in.jsonl", LINE), purpose="batch")
            asked = {"input_file_id": given.id, "endpoint": "/v1/completions"}
            made.append(
                client.batches.create(**asked, completion_window="24h", extra_headers=headers)
            )
        for batch in made:
            wait_until(
                lambda batch=batch: client.batches.retrieve(batch.id).status == "completed",
                60,
                "the batch to end",
            )
        assert ended(site) == {("a", ""): 1, ("", ""): 1}
        site.call(site.state.storage.close)


def test_only_so_many_sets_of_values_are_distinguished() -> None:
    with site_of(*ALLOWED).serving() as site:
        for number in range(MOST_SETS + 2):
            assert ask(site, {"tenant": str(number)}) == 200
        found = ended(site)
        assert found["other", "other"] == 2
        assert len(found) == MOST_SETS + 2  # those, the others, and those without any
        assert ask(site, {"tenant": "0"}) == 200
        assert ended(site)["0", ""] == 2


@pytest.mark.parametrize("name", ["le", "model_name", "a-b", "__a", "1a", "tenant tenant"])
def test_a_name_that_no_label_can_have_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="custom-labels"):
        check_labels(config_of(*MODEL, LIST, *name.split()).observe)
    with pytest.raises(ConfigError, match="header"):
        check_labels(config_of("--tokenizer-metrics-custom-labels-header", "a b").observe)
