"""One served application for a whole file of tests, its fakes reset before each."""

from collections.abc import Iterator

import httpx
import pytest

from banyan.engine_client.client import Health
from banyan.messages.events import Reply
from banyan.server.state import SharedProbe
from tests.server.fakes import Site, steps


@pytest.fixture(scope="module")
def shared_site() -> Iterator[Site]:
    with Site().serving() as served:
        yield served


@pytest.fixture
def site(shared_site: Site) -> Site:
    generator, client = shared_site.generator, shared_site.client
    generator.script = lambda _: steps("Hel", "lo")
    generator.hold_after = None
    generator.asked.clear()
    client.now = Health(True, True, True)
    client.calls.clear()
    client.others, client.reply = [], Reply(1, True, "Cache flushed.")
    client.is_full = False
    shared_site.state.released.clear()
    client.aborted.clear()
    shared_site.state.service = shared_site.service
    shared_site.state.draining = False
    shared_site.state.probe = SharedProbe()
    shared_site.state.dead = ""
    return shared_site


@pytest.fixture
def http(site: Site) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=site.url, timeout=60, verify=False) as client:  # no certificates
        yield client
