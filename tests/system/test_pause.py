"""Pausing a real server: what runs ends, recomputes or goes on, and what comes meanwhile waits."""

import pytest

from tests.support.pauses import PARAMS, Asking, go_on, pause, wait_running
from tests.system.serving import wait_until


@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_what_runs_goes_on_after_a_pause_as_if_there_had_been_none(shared_server, mode):
    alone = shared_server.generate(text=f"The banyan {mode}", sampling_params=PARAMS)
    running = Asking(shared_server, f"The banyan {mode}")
    wait_running(shared_server, 1)
    pause(shared_server, mode)
    is_kept = mode == "in_place"
    wait_running(shared_server, int(is_kept))
    flushed = shared_server.http.post("/flush_cache").status_code
    assert flushed == (400 if is_kept else 200)
    later = Asking(shared_server, "A server")
    wait_until(lambda: shared_server.stats()["waiting"] == 2 - is_kept, 60, "the new request")
    steps = shared_server.stats()["steps"]
    last = Asking(shared_server, "One two three")
    wait_until(lambda: shared_server.stats()["waiting"] == 3 - is_kept, 60, "the last request")
    assert shared_server.stats()["steps"] == steps
    assert running.is_alive()
    go_on(shared_server)
    last.result()
    assert running.result()["output_ids"] == alone["output_ids"]
    assert running.answer["meta_info"]["num_retractions"] == int(not is_kept)
    assert len(later.result()["output_ids"]) == PARAMS["max_new_tokens"]


def test_a_pause_by_abort_ends_what_runs_and_keeps_what_comes(shared_server):
    running = Asking(shared_server, "The banyan grows")
    wait_running(shared_server, 1)
    pause(shared_server, "abort")
    assert running.result()["meta_info"]["finish_reason"]["type"] == "abort"
    later = Asking(shared_server, "A server")
    wait_until(lambda: shared_server.stats()["waiting"] == 1, 60, "the new request")
    go_on(shared_server)
    assert later.result()["meta_info"]["finish_reason"]["type"] == "length"
