"""Warm-ups: what is named runs, in order, and a name that nothing has is refused."""

import asyncio

from banyan.server.lifecycle.startup import warm_up
from tests.server.fakes import Site
from tests.support.flags import config_of


def asked(site: Site, *flags: str) -> list[tuple[int, str]]:
    """(length of the prompt, constraint) of each request that the warm-up sent."""
    asyncio.run(warm_up(site.service, config_of("--chunked-prefill-size", "512", *flags)))
    return [(len(request.prompt), request.message.grammar) for request in site.generator.asked]


def test_what_is_named_runs_before_the_server_is_ready() -> None:
    trial, chunk, constraint = asked(Site(), "--warmups", "chunk, constraint")
    assert trial == (1, "") and chunk == (512, "") and constraint == (1, "regex:[0-9]")


def test_the_trial_request_is_sent_unless_it_is_skipped() -> None:
    assert asked(Site()) == [(1, "")]
    assert asked(Site(), "--skip-server-warmup") == []
    assert asked(Site(), "--skip-server-warmup", "--warmups", "chunk") == [(512, "")]
