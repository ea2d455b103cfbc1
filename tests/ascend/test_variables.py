"""Variables of the documents for Ascend NPUs: each has its effect there, or is refused by name."""

from pathlib import Path

import pytest

from banyan.ascend.variables import READ, REFUSED, SET, SO, VARIABLES, table
from banyan.base.errors import ConfigError
from banyan.config.cli import parse
from banyan.config.env import read_environment
from banyan.config.variables import OF_LAUNCHES, SETTINGS

DOCS = Path(__file__).parents[2] / "docs" / "ascend.md"


def named(outcome: str) -> list[str]:
    return [name for name, reported in VARIABLES.items() if reported.outcome == outcome]


@pytest.mark.parametrize("name", named(REFUSED))
def test_what_this_build_has_not_is_refused_on_npu_alone(name: str) -> None:
    given = read_environment({name: "16"})
    with pytest.raises(ConfigError, match=f"{name} is not available in this build on npu"):
        parse(["M", "--device", "npu"], given)
    parse(["M", "--device", "npu"], read_environment({name: "0"}))
    parse(["M", "--device", "cpu"], given)


@pytest.mark.parametrize("name", named(SO))
def test_what_is_so_already_is_reported(name: str) -> None:
    (note,) = parse(["M", "--device", "npu"], read_environment({name: "1"})).observe.notes
    assert note.startswith(f"{name} is set to the behaviour that applies anyway: ")


@pytest.mark.parametrize("name", [*named(READ), *named(SET)])
def test_what_counts_is_not_said_to_have_no_effect(name: str) -> None:
    words = ["M", "--device", "npu", "--tp", "2", "--moe-a2a-backend", "deepep"]
    assert parse(words, read_environment({name: "1"})).observe.notes == ()


def test_each_variable_that_the_rules_read_is_in_the_table() -> None:
    assert set(OF_LAUNCHES) - set(VARIABLES) == {"PYTORCH_ALLOC_CONF"}  # beside the NPU's own
    of_the_driver = {"SGLANG_NPU_USE_MLAPO", "SGLANG_USE_FIA_NZ"}
    assert set(named(SET)) <= {*SETTINGS, *of_the_driver, "DEEP_NORMAL_MODE_USE_INT8_QUANT"}


def test_a_cache_store_of_memfabric_is_refused_by_name() -> None:
    words = ["--hicache-storage-backend", "npu_memcache"]
    with pytest.raises(ConfigError, match="npu_memcache"):
        parse(["M", "--device", "npu", *words], read_environment({}))


def test_the_table_of_the_docs_is_the_one_of_the_code() -> None:
    assert "\n".join(table()) in DOCS.read_text(encoding="utf-8")
