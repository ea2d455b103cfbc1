import csv
from pathlib import Path

import pytest

from banyan.config.env import read_environment

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


def test_honoured_variables_are_not_reported_as_idle() -> None:
    given = {"SGLANG_USE_MODELSCOPE": "1", "SGLANG_OTHER": "1", "PATH": "/bin"}
    assert read_environment(given).idle == ("SGLANG_OTHER",)


def test_the_token_does_not_show_when_the_environment_is_printed() -> None:
    environment = read_environment({"HF_TOKEN": "hf_secret"})
    assert environment.hf_token == "hf_secret"
    assert "hf_secret" not in repr(environment)


def test_every_known_variable_of_the_engine_is_honoured_or_reported() -> None:
    if not SPEC.exists():
        pytest.skip("the list of known variables is not on this machine")
    with SPEC.open(newline="") as file:
        names = [row[0] for row in csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE)][1:]
    # Read by the libraries they belong to (gloo, torch, the hub), or settings of the system.
    elsewhere = {"GLOO_SOCKET_IFNAME", "TORCHINDUCTOR_CACHE_DIR", "VLLM_TARGET_DEVICE", "HF_TOKEN"}
    honoured = {"SGLANG_USE_MODELSCOPE", "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"}
    expected = {n for n in names if "." not in n and " " not in n} - elsewhere - honoured
    assert set(read_environment(dict.fromkeys(names, "1")).idle) == expected
