import csv
from pathlib import Path

import pytest

from banyan.base.errors import ConfigError
from banyan.config.cli import parse
from banyan.config.env import read_environment
from banyan.config.variables import HONOURED, LIBRARIES, QUIET, REFUSED
from tests.support.cases import check_each

SPEC = Path(__file__).resolve().parents[3] / "shared" / "spec" / "env_vars.tsv"


def test_the_hub_folder_follows_the_hub_s_own_variables() -> None:
    assert read_environment({"HF_HOME": "/h"}).hf_cache == "/h/hub"
    assert read_environment({"HF_HOME": "/h", "HF_HUB_CACHE": "/c"}).hf_cache == "/c"
    assert read_environment({}).hf_cache == ""


@pytest.mark.parametrize(
    ("text", "is_on"), [("1", True), ("TRUE", True), ("0", False), ("", False)]
)
def test_switches_are_read_as_words(text: str, is_on: bool) -> None:
    assert read_environment({"HF_HUB_OFFLINE": text}).hf_offline is is_on
    assert read_environment({"SGLANG_USE_MODELSCOPE": text}).use_modelscope is is_on


@pytest.mark.parametrize("name", ["HCCL_CONNECT_TIMEOUT", "ASCEND_RT_VISIBLE_DEVICES"])
def test_variables_of_devices_that_are_absent_are_reported(name: str) -> None:
    (note,) = read_environment({name: "7"}).notes
    assert note.startswith(name)


def test_honoured_variables_are_not_reported() -> None:
    given = {"SGLANG_USE_MODELSCOPE": "1", "SGLANG_OTHER": "1", "PATH": "/bin"}
    assert read_environment(given).notes == ("SGLANG_OTHER is set but has no effect in this build",)


def test_the_token_does_not_show_when_the_environment_is_printed() -> None:
    environment = read_environment({"HF_TOKEN": "hf_secret"})
    assert environment.hf_token == "hf_secret"
    assert "hf_secret" not in repr(environment)


def known_variables() -> list[str]:
    if not SPEC.exists():
        return []
    with SPEC.open(newline="") as file:
        rows = list(csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE))[1:]
    return [row[0] for row in rows if " " not in row[0]]


@pytest.mark.skipif(not SPEC.exists(), reason="the list of known variables is not here")
def test_the_list_of_known_variables_is_whole() -> None:
    assert len(known_variables()) == 67


@pytest.mark.skipif(not SPEC.exists(), reason="the list of known variables is not here")
def test_every_known_variable_is_honoured_reported_or_refused() -> None:
    def check(name: str) -> None:
        environment = read_environment({name: "7"})
        reported = [*environment.notes, *environment.refusals]
        if name in (*HONOURED, *LIBRARIES, *QUIET):
            assert reported == []
        else:
            (line,) = reported
            assert line.startswith(f"{name} is ") and "7" not in line.replace(name, "")

    check_each(known_variables(), check, str)


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_a_variable_that_must_not_be_ignored_ends_the_start(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} is not available in this build"):
        parse([], read_environment({name: "7"}))
    for value in REFUSED[name].neutral:
        assert parse([], read_environment({name: value})).observe.notes


def test_the_newer_name_of_memfabrics_store_is_read_too() -> None:
    url = "tcp://192.0.2.7:6670"
    found = read_environment({"MF_CONFIG_STORE_URL": url})
    assert found.npu.store == url and found.launch["ASCEND_MF_STORE_URL"] == url
    two = read_environment({"MF_CONFIG_STORE_URL": url, "ASCEND_MF_STORE_URL": "tcp://other:1"})
    assert "name two stores" in two.npu_refusals[-1]
    assert read_environment({"MF_CONFIG_STORE_URL": url}).npu_refusals == ()
