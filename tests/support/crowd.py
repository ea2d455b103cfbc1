"""Clients that ask one server all the time, while something happens to it."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import httpx

from tests.system.serving import Server, wait_until

ASK_S = 120.0


class Crowd:
    """Threads that send requests until they are stopped.

    Args:
        body_of: the request of a client, by its number and how many it has sent.

    Attributes:
        answers: (body, status, answer), in the order in which they came.
        refusals: the answers of another status.
        lost: what happened to requests without an answer.
    """

    def __init__(
        self, server: Server, clients: int, body_of: Callable[[int, int], dict], key: str = ""
    ) -> None:
        self.answers: list[tuple[dict, int, dict]] = []
        self.refusals: list[httpx.Response] = []
        self.lost: list[str] = []
        self._server, self._body_of = server, body_of
        self._headers = {"authorization": f"Bearer {key}"} if key else {}
        self._is_over = threading.Event()
        self._threads = [
            threading.Thread(target=self._ask, args=(n,), daemon=True) for n in range(clients)
        ]
        for thread in self._threads:
            thread.start()

    def wait_for(self, more: int, deadline_s: float = ASK_S) -> None:
        """Until so many more answers of status 200 have come."""
        begun = self.good
        wait_until(lambda: self.good >= begun + more, deadline_s, f"{more} more answers")

    @property
    def good(self) -> int:
        return sum(status == 200 for _, status, _ in self.answers)

    def end(self) -> None:
        """Wait for the last answers."""
        self._is_over.set()
        for thread in self._threads:
            thread.join(ASK_S)
            assert not thread.is_alive(), "a client has no answer"
        assert not self.lost, self.lost[:3]

    def _ask(self, number: int) -> None:
        count = 0
        with httpx.Client(
            base_url=self._server.url, timeout=ASK_S, headers=self._headers
        ) as client:
            while not self._is_over.is_set():
                body = self._body_of(number, count)
                count += 1
                try:
                    answer = client.post("/generate", json=body)
                    self.answers.append((body, answer.status_code, answer.json()))
                    if answer.status_code != 200:
                        self.refusals.append(answer)
                except (httpx.HTTPError, ValueError) as error:
                    self.lost.append(f"{type(error).__name__}: {error}")


@contextmanager
def asking(server: Server, clients: int, body_of: Callable[[int, int], dict]) -> Iterator[Crowd]:
    crowd = Crowd(server, clients, body_of)
    yield crowd
    crowd.end()
