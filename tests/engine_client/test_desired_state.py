"""The adapters that a replacement engine gets."""

from banyan.engine_client.client import DesiredState


def orders(desired_state: DesiredState) -> list[tuple[str, dict]]:
    """All messages to a fresh engine, in order."""
    reported, found = DesiredState(), []
    while (order := desired_state.lacking(reported)) is not None:
        found.append((order[0], dict(order[1])))
        reported.record(*order)
        assert len(found) < 10
    return found


def load(name: str, path: str) -> tuple[str, dict]:
    return "load_adapter", {"name": name, "path": path}


def unload(name: str) -> tuple[str, dict]:
    return "unload_adapter", {"name": name}


def test_adapters_of_run_time_come_again_and_those_that_left_do_not() -> None:
    """Each verb is heard twice: from the engine, and from the fleet."""
    desired_state = DesiredState()
    for order in (load("x", "/x"), load("y", "/y"), unload("x"), unload("first")):
        desired_state.record(*order)
        desired_state.record(*order)
    assert orders(desired_state) == [unload("first"), load("y", "/y")]


def test_an_adapter_of_the_start_can_be_replaced_under_its_name() -> None:
    desired_state = DesiredState()
    for order in (unload("first"), load("first", "/other")):
        desired_state.record(*order)
        desired_state.record(*order)
    assert orders(desired_state) == [unload("first"), load("first", "/other")]
    desired_state.record(*unload("first"))
    desired_state.record(*unload("first"))
    assert orders(desired_state) == [unload("first")]


def attach(store: str) -> tuple[str, dict]:
    return "attach_store", {"store": store}


def test_the_last_store_is_attached_again_in_the_place_of_that_of_the_start() -> None:
    desired_state = DesiredState()
    for order in (attach("a"), ("detach_store", {"force": False}), attach("b")):
        desired_state.record(*order)
        desired_state.record(*order)
    assert orders(desired_state) == [("detach_store", {}), attach("b")]
    desired_state.record("detach_store", {"force": True})
    assert orders(desired_state) == [("detach_store", {"force": True})]


def test_a_store_comes_before_weights_that_were_taken_later() -> None:
    desired_state, weights = DesiredState(), ("update_weights", {"path": "/other"})
    for order in (attach("a"), weights):
        desired_state.record(*order)
    assert orders(desired_state) == [("detach_store", {}), attach("a"), weights]
