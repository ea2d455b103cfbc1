"""Pausing a real server: what runs ends, recomputes or goes on, and what comes meanwhile waits."""

import threading

import pytest

from tests.system.serving import Server, wait_until

PARAMS = {"temperature": 0, "max_new_tokens": 1800, "ignore_eos": True}


class Asking(threading.Thread):
    """One request of a client that waits for its answer."""

    def __init__(self, server: Server, text: str, tokens: int = 1800) -> None:
        super().__init__(daemon=True)
        self._server, self._text = server, text
        self._params = PARAMS | {"max_new_tokens": tokens}
        self.answer: dict = {}
        self.start()

    def run(self) -> None:
        # With alternatives to each token it takes several heartbeats, so that it is seen running.
        self.answer = self._server.generate(
            text=self._text,
            sampling_params=self._params,
            return_logprob=True,
            top_logprobs_num=20,
        )

    def result(self) -> dict:
        self.join(60)
        assert self.answer, "no answer came"
        return self.answer


def pause(server: Server, mode: str) -> None:
    answer = server.http.post("/pause_generation", json={"mode": mode})
    assert answer.status_code == 200, answer.text


def go_on(server: Server) -> None:
    assert server.http.post("/continue_generation", json={}).status_code == 200


def wait_running(server: Server, count: int) -> None:
    wait_until(lambda: server.stats()["running"] == count, 30, f"{count} running requests")


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
    wait_until(lambda: shared_server.stats()["waiting"] == 2 - is_kept, 30, "the new request")
    steps = shared_server.stats()["steps"]
    last = Asking(shared_server, "One two three")
    wait_until(lambda: shared_server.stats()["waiting"] == 3 - is_kept, 30, "the last request")
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
    wait_until(lambda: shared_server.stats()["waiting"] == 1, 30, "the new request")
    go_on(shared_server)
    assert later.result()["meta_info"]["finish_reason"]["type"] == "length"
