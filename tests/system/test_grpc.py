"""A real server with --grpc-mode: the same tokens as over HTTP, and a drain that ends it."""

import signal
from collections.abc import Iterator

import grpc
import httpx
import pytest
from smg_grpc_proto.generated import sglang_scheduler_pb2 as pb
from smg_grpc_proto.generated import sglang_scheduler_pb2_grpc as service

from tests.system.checkpoint import write_tiny_model
from tests.system.conftest import with_tiny_model
from tests.system.serving import CALL_S, READY_S, Server, free_port, launch, wait_until

IDS = [5, 6, 7, 8]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, httpx.Client]]:
    """A server that is ready, and a client of its HTTP port."""
    folder = tmp_path_factory.mktemp("grpc")
    model, port = write_tiny_model(folder / "model"), free_port()
    flags = ("--grpc-mode", "--grpc-http-sidecar-port", str(port))
    server = launch(folder / "log", *with_tiny_model(flags, model))
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=CALL_S) as http:

        def is_ready() -> bool:
            assert server.process.poll() is None, server.tail()
            try:
                return http.get("/readyz").status_code == 200
            except httpx.TransportError:
                return False

        try:
            wait_until(is_ready, READY_S, "the server to be ready")
            yield server, http
        finally:
            server.kill()


def asking(stream: bool) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        tokenized=pb.TokenizedInput(input_ids=IDS),
        sampling_params=pb.SamplingParams(temperature=0, max_new_tokens=12, ignore_eos=True),
        stream=stream,
    )


def test_http_is_served_next_to_grpc(server: tuple[Server, httpx.Client]) -> None:
    process, http = server
    sampling = {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}
    body = {"input_ids": IDS, "sampling_params": sampling}
    expected = http.post("/generate", json=body).json()["output_ids"]
    with grpc.insecure_channel(f"127.0.0.1:{process.port}") as channel:
        stub = service.SglangSchedulerStub(channel)
        (whole,) = stub.Generate(asking(stream=False), timeout=CALL_S)
        assert list(whole.complete.output_ids) == expected
        *chunks, last = stub.Generate(asking(stream=True), timeout=CALL_S)
        assert [token for chunk in chunks for token in chunk.chunk.token_ids] == expected
        assert last.complete.completion_tokens == 12
        assert stub.HealthCheck(pb.HealthCheckRequest(), timeout=CALL_S).healthy
        load = stub.GetLoads(pb.GetLoadsRequest(), timeout=CALL_S).loads[0]
        assert load.max_total_num_tokens > 0
    assert "listening on grpc://" in process.log.read_text()
    assert httpx_fails(process.port), "the port of gRPC speaks no HTTP/1.1"


def httpx_fails(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/health", timeout=60).status_code != 200
    except httpx.HTTPError:
        return True


def test_the_signal_to_end_lets_calls_end_first(server: tuple[Server, httpx.Client]) -> None:
    process, _ = server
    with grpc.insecure_channel(f"127.0.0.1:{process.port}") as channel:
        stub = service.SglangSchedulerStub(channel)
        call = stub.Generate(asking(stream=True), timeout=CALL_S)
        first = next(call)
        process.signal(signal.SIGTERM)
        *_, last = call
    assert first.chunk.token_ids and len(last.complete.output_ids) == 12
    assert process.exit_code(READY_S) == 0
