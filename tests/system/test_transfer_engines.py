"""Pairs of servers whose pages a transfer engine carries: `make test-transfer` installs the
packages in folders of their own. Both servers are processes: the engines keep threads.
"""

import json
import os
import signal
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from banyan.base.errors import ConfigError
from banyan.llm import Engine
from tests.support.handoff import CASES, GREEDY, PROMPT, output_of
from tests.support.transfer_engines import OF_DEVICES, flags_of, needs
from tests.system.handing import FLAGS, WAIT_S, Servers, engines, fresh_room, servers
from tests.system.serving import free_port, serving, settled, status_of, wait_until
from tests.system.test_handoff_sizes import KINDS, computed, settle, written

BACKENDS = ("mooncake", "nixl")


@pytest.fixture(scope="module", params=BACKENDS)
def pair(
    request: pytest.FixtureRequest, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Servers]:
    needs(request.param)
    flags = ("--disaggregation-transfer-backend", request.param)
    with servers(tmp_path_factory.mktemp(request.param), tiny_model, *flags) as found:
        yield found


def answer(pair: Servers, body: dict[str, object]) -> object:
    first, second = pair.start("/generate", body)
    assert first.result(WAIT_S).status_code == 200, first.result().text
    assert second.result(WAIT_S).status_code == 200, second.result().text
    return second.result().json()


@pytest.mark.parametrize("length", [3, 64, 300])
@pytest.mark.parametrize("case", CASES)
def test_a_pair_answers_like_one_server(
    pair: Servers, single: Engine, case: str, length: int
) -> None:
    prompt = [(x + length) % 390 + 5 for x in PROMPT[:length]]
    body = {"input_ids": prompt, **CASES[case]}
    right, found = single.generate(**body), answer(pair, body)
    both = (right, found) if isinstance(right, list) else ([right], [found])
    assert [output_of(json.loads(json.dumps(x))) for x in both[0]] == [
        output_of(x) for x in both[1]
    ]


def test_the_engine_carries_the_pages(pair: Servers) -> None:
    """The decode server does not compute a long prompt, and nobody tells of a page that failed."""
    before = pair.decode.stats()
    prompt = [(at * 11) % 390 + 5 for at in range(1500)]
    answer(pair, {"input_ids": prompt, "sampling_params": GREEDY})
    after = settled(pair.decode.stats, before["finished"] + 1)
    assert after["computed_tokens"] - before["computed_tokens"] < 700
    for server in (pair.prefill, pair.decode):
        assert (
            "instead" not in server.log.read_text() and "cannot write" not in server.log.read_text()
        )


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", KINDS)
def test_an_engine_carries_pages_of_all_kinds(
    kind: str, backend: str, tiny_model: Path, tmp_path: Path
) -> None:
    """Into pages of another size too; and states with them."""
    needs(backend)
    model, flags = written(kind, tiny_model, tmp_path / "model")
    carried = {"engine_mode": "normal", "disaggregation_transfer_backend": backend}
    prompts = [[2 + (7 * i * i + k) % 60 for i in range(n)] for k, n in enumerate((300, 256, 90))]
    bodies = [
        {"input_ids": prompt, "sampling_params": params}
        for params in (GREEDY, {"temperature": 1.0, "sampling_seed": 7, "max_new_tokens": 8})
        for prompt in (*prompts, prompts[0])
    ]
    with Engine(str(model), **FLAGS, **flags) as alone:
        right = [alone.generate(**body)["output_ids"] for body in bodies]
    giving = {**flags, **carried, "page_size": 64, "chunked_prefill_size": 64}
    with engines(model, giving, {**flags, **carried}) as both:
        assert [both.ask(**body)["output_ids"] for body in bodies] == right
        settle(both)
        before = computed(both.decode)
        both.ask(input_ids=[3, *prompts[0]], sampling_params=GREEDY)
        settle(both)
        assert computed(both.decode) - before < 64 + 16, "the prompt was carried"


def test_a_pair_with_different_engines_shares_nothing(tiny_model: Path, tmp_path: Path) -> None:
    found = [name for name in BACKENDS if find_spec(name)]
    if not found:
        pytest.skip("no transfer engine is installed")
    flag = "--disaggregation-transfer-backend"
    with servers(tmp_path, tiny_model, prefill=(flag, found[0]), decode=(flag, "tcp")) as pair:
        _, second = pair.start("/generate", {"input_ids": PROMPT[:64], "sampling_params": GREEDY})
        assert second.result(WAIT_S).status_code == 503
        text = f"the transfer backend differs: {found[0]} there, tcp here"
        assert text in second.result().text


@pytest.mark.parametrize("backend", [*BACKENDS, *OF_DEVICES])
@pytest.mark.parametrize("blow", [signal.SIGKILL, signal.SIGSTOP])
def test_a_prefill_server_that_goes_takes_no_one_along(
    backend: str,
    blow: signal.Signals,
    tiny_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What waits for it fails in time, and a server that comes in its place is taken from."""
    flags = flags_of(backend, monkeypatch)
    with servers(tmp_path, tiny_model, *flags) as pair:
        answer(pair, {"input_ids": PROMPT, "sampling_params": GREEDY})
        engine = pair.prefill.engine_pid()
        os.kill(engine, blow)
        _, second = pair.start(
            "/generate", {"input_ids": PROMPT[7:], "sampling_params": GREEDY}, fresh_room()
        )
        assert second.result(WAIT_S).status_code in (503, 504), second.result().text
        wait_until(lambda: not pair.decode.stats()["held_pages"], WAIT_S, "all pages back")
        if blow == signal.SIGSTOP:
            os.kill(engine, signal.SIGCONT)
        again = {"input_ids": PROMPT[9:], "sampling_params": GREEDY}
        wait_until(lambda: status_of(pair.prefill, "/readyz") == 200, WAIT_S, "prefill back")
        wait_until(
            lambda: pair.start("/generate", again)[1].result(WAIT_S).status_code == 200,
            *(WAIT_S, "the pair to work again"),
        )
        answer(pair, {"input_ids": PROMPT[9:], "sampling_params": GREEDY})


@pytest.mark.parametrize("backend", [*BACKENDS, *OF_DEVICES])
def test_two_prefill_servers_give_to_one(
    backend: str, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When the first one goes, and what it keeps for all with it, the other one still gives."""
    flags = flags_of(backend, monkeypatch)
    port = free_port()
    second = ("--disaggregation-mode", "prefill", "--disaggregation-bootstrap-port", str(port))
    common = ("--model-path", str(tiny_model), "--threads", "1", "--max-total-tokens", "8192")
    bodies = [{"input_ids": PROMPT[at:], "sampling_params": GREEDY} for at in range(4)]
    with (
        servers(tmp_path, tiny_model, *flags) as pair,
        serving(tmp_path / "second.log", *common, *flags, *second) as other,
    ):
        beside = Servers(other, pair.decode, port)
        right = [answer(pair, body)["output_ids"] for body in bodies]
        pair.decode.http.post("/flush_cache")
        assert [answer(beside, body)["output_ids"] for body in bodies] == right
        pair.prefill.kill()
        pair.decode.http.post("/flush_cache")
        before = pair.decode.stats()
        assert [answer(beside, body)["output_ids"] for body in bodies] == right
        after = settled(pair.decode.stats, before["finished"] + len(bodies))
        assert after["computed_tokens"] - before["computed_tokens"] < len(bodies) * (128 + 16)


@pytest.mark.parametrize("backend", [*BACKENDS, *OF_DEVICES])
def test_without_its_package_an_engine_is_refused_with_what_installs_it(
    backend: str, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("banyan.disaggregation.rules.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="needs a package that is not installed") as refused:
        Engine(
            str(tiny_model), disaggregation_mode="decode", disaggregation_transfer_backend=backend
        )
    assert "pip install" in str(refused.value.hint)
