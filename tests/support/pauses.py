"""Requests that run while a server is paused."""

import threading

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
    wait_until(lambda: server.stats()["running"] == count, 60, f"{count} running requests")
