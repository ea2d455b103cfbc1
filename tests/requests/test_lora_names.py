"""The adapters that requests may name, as the front knows them."""

import pytest

from banyan.base.errors import RequestError
from banyan.lora.adapter_files import AdapterPlace
from banyan.requests.lora_names import AdapterNames


def test_the_name_of_an_adapter_that_left_is_no_other_models_until_it_comes_back() -> None:
    names = AdapterNames(True, [AdapterPlace("a", "/a"), AdapterPlace("b", "/b")])
    assert not names.has_left("a") and not names.has_left("gpt")
    names.remove("a")
    assert names.has_left("a") and "a" not in names
    with pytest.raises(RequestError, match="'a' is not loaded. There are: b."):
        names.named("a", "model", 404)
    names.add(AdapterPlace("a", "/other"))
    assert not names.has_left("a") and names.named("/other") == "a"


def test_of_names_that_have_left_the_newest_are_kept() -> None:
    names = AdapterNames(True)
    for number in range(5000):
        names.remove(str(number))
    names.remove("5")
    kept = [number for number in range(5000) if names.has_left(str(number))]
    assert kept == [5, *range(905, 5000)]
