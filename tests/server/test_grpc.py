"""The gRPC listener with a real client: generation, errors, keys, deadlines, cancellation."""

import asyncio
import contextlib
import hashlib
import io
import threading
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path

import grpc
import httpx
import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from smg_grpc_proto.generated import common_pb2 as common
from smg_grpc_proto.generated import sglang_scheduler_pb2 as pb
from smg_grpc_proto.generated import sglang_scheduler_pb2_grpc as service

from banyan.base.errors import ConfigError
from banyan.config import prepare
from banyan.config.schema import ServerConfig
from banyan.engine_client.client import Health
from banyan.lora.adapter_files import AdapterPlace
from banyan.messages.events import Reply
from banyan.requests.generation import Finish
from banyan.requests.lora_names import AdapterNames
from banyan.server.admin.metrics import CustomLabels
from banyan.server.admin.spans import Spans
from banyan.server.grpc import listener as grpc_listener
from banyan.server.grpc.listener import GrpcListener, server_credentials
from banyan.server.http.app import App
from banyan.server.http.listen import bind
from tests.server.fakes import Site, refusal, steps
from tests.server.test_tls import AUTHORITY, flags
from tests.support.flags import config_of
from tests.system.serving import wait_until

WAIT_S = 60.0


@contextlib.contextmanager
def serving(config: ServerConfig | None = None) -> Iterator[tuple[Site, GrpcListener, str]]:
    """A scripted server behind gRPC; yields it, its listener and its address."""
    site = Site(config)
    listener = GrpcListener(site.state, bind(ServerConfig(port=0)))
    loop = site.loop
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    run = lambda work: asyncio.run_coroutine_threadsafe(work, loop).result(WAIT_S)  # noqa: E731
    run(listener.start())
    try:
        yield site, listener, listener.url.partition("://")[2]
    finally:
        listener_end = listener.stop(is_now=True)
        run(listener_end)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(WAIT_S)


@contextlib.contextmanager
def stub_of(address: str) -> Iterator[service.SglangSchedulerStub]:
    with grpc.insecure_channel(address) as channel:
        yield service.SglangSchedulerStub(channel)


@pytest.fixture
def served() -> Iterator[tuple[Site, service.SglangSchedulerStub]]:
    with serving() as (site, _, address), stub_of(address) as stub:
        yield site, stub


def asking(stream: bool = False, **fields: object) -> pb.GenerateRequest:
    sampling = pb.SamplingParams(temperature=0.0, max_new_tokens=8)
    return pb.GenerateRequest(
        request_id="r1",
        tokenized=pb.TokenizedInput(input_ids=[65, 66, 67]),
        sampling_params=fields.pop("sampling_params", sampling),
        stream=stream,
        **fields,
    )


def failure(call: object) -> grpc.RpcError:
    with pytest.raises(grpc.RpcError) as caught:
        list(call) if isinstance(call, Iterator) else call()
    return caught.value


def test_tokens_are_generated_whole_and_streamed(served) -> None:
    site, stub = served
    expected = site.tokenizer.encode("Hello", add_special_tokens=False)
    (whole,) = stub.Generate(asking(), timeout=WAIT_S)
    assert list(whole.complete.output_ids) == expected and whole.request_id == "r1"
    assert whole.complete.finish_reason == "stop" and whole.complete.matched_token_id == 256
    assert (whole.complete.prompt_tokens, whole.complete.cached_tokens) == (3, 3)
    *chunks, last = stub.Generate(asking(stream=True), timeout=WAIT_S)
    assert [t for chunk in chunks for t in chunk.chunk.token_ids] == expected
    assert chunks[-1].chunk.completion_tokens == len(expected)
    assert list(last.complete.output_ids) == expected
    assert site.generator.asked[0].prompt == [65, 66, 67]


def test_sampling_fields_mean_what_they_mean_over_http(served) -> None:
    site, stub = served
    sampling = pb.SamplingParams(
        temperature=0.7,
        top_p=0.9,
        top_k=5,
        min_p=0.05,
        max_new_tokens=6,
        stop_token_ids=[7],
        logit_bias={"3": 1.5},
        n=2,
        stop=["x"],
    )
    answers = list(stub.Generate(asking(sampling_params=sampling), timeout=WAIT_S))
    assert sorted(answer.complete.index for answer in answers) == [0, 1]
    request = site.generator.asked[0]
    given = request.sampling
    assert (given.temperature, given.top_p, given.top_k, given.min_p) == (0.7, 0.9, 5, 0.05)
    assert given.max_new_tokens == 6 and 7 in given.stop_ids
    assert request.text.stop == ("x",)


def test_zeros_of_an_empty_message_are_no_choices_of_the_client(served) -> None:
    site, stub = served
    list(stub.Generate(asking(sampling_params=pb.SamplingParams()), timeout=WAIT_S))
    sampling = site.generator.asked[0].sampling
    assert (sampling.top_p, sampling.repetition_penalty) == (1.0, 1.0)
    assert sampling.max_new_tokens == 4096 - 3, "as many as fit"


def test_log_probabilities_come_with_prompt_and_output(served) -> None:
    _, stub = served
    request = asking(return_logprob=True, logprob_start_len=0, top_logprobs_num=2)
    (whole,) = stub.Generate(request, timeout=WAIT_S)
    output, prompt = whole.complete.output_logprobs, whole.complete.input_logprobs
    assert list(output.token_logprobs) == [-0.25] * 5
    assert [list(top.values) for top in output.top_logprobs] == [[-0.25, -2.0]] * 5
    assert list(prompt.token_ids) == [65, 66, 67]
    assert not prompt.token_logprobs[0].HasField("value")
    assert prompt.token_logprobs[1].value == -1.0


@pytest.mark.parametrize(
    ("request_", "code", "param"),
    [
        (pb.GenerateRequest(), grpc.StatusCode.INVALID_ARGUMENT, "tokenized"),
        (
            asking(sampling_params=pb.SamplingParams(temperature=-1)),
            grpc.StatusCode.INVALID_ARGUMENT,
            "temperature",
        ),
        (
            asking(mm_inputs=pb.MultimodalInputs(image_urls=["x"])),
            grpc.StatusCode.INVALID_ARGUMENT,
            "mm_inputs",
        ),
        (asking(lora_id="nobody"), grpc.StatusCode.INVALID_ARGUMENT, "lora_path"),
    ],
)
def test_a_bad_request_is_refused_with_the_field(served, request_, code, param) -> None:
    _, stub = served
    error = failure(stub.Generate(request_, timeout=WAIT_S))
    assert error.code() == code, error
    assert dict(error.trailing_metadata())["x-banyan-param"] == param


def test_an_error_of_the_engine_ends_the_call_with_its_status(served) -> None:
    site, stub = served
    site.generator.script = lambda _: steps("a", finish=refusal(503, "no memory"))
    error = failure(stub.Generate(asking(stream=True), timeout=WAIT_S))
    assert error.code() == grpc.StatusCode.UNAVAILABLE and "no memory" in error.details()
    site.generator.script = lambda _: steps("a", finish=Finish("abort"))
    (whole,) = stub.Generate(asking(), timeout=WAIT_S)
    assert whole.complete.finish_reason == "abort"


def test_a_full_queue_and_a_server_that_starts_refuse(served) -> None:
    site, stub = served
    site.client.is_full = True
    error = failure(stub.Generate(asking(), timeout=WAIT_S))
    assert error.code() == grpc.StatusCode.UNAVAILABLE
    trailing = dict(error.trailing_metadata())
    assert trailing["x-banyan-code"] == "queue_full" and int(trailing["retry-after"]) > 0
    site.state.service = None
    error = failure(stub.Generate(asking(), timeout=WAIT_S))
    assert error.code() == grpc.StatusCode.UNAVAILABLE and "loading" in error.details()


def test_a_client_that_leaves_or_runs_out_of_time_aborts_its_request(served) -> None:
    site, stub = served
    site.generator.hold_after = 1
    call = stub.Generate(asking(stream=True))
    next(call)
    call.cancel()
    assert site.generator.closed.acquire(timeout=WAIT_S)
    call = stub.Generate(asking(stream=True), timeout=2.0)
    next(call)
    assert failure(call).code() == grpc.StatusCode.DEADLINE_EXCEEDED
    assert site.generator.closed.acquire(timeout=WAIT_S)
    late = (("x-request-timeout", "1.0"),)
    call = stub.Generate(asking(stream=True), metadata=late, timeout=WAIT_S)
    error = failure(call)
    assert error.code() == grpc.StatusCode.DEADLINE_EXCEEDED and "x-request-timeout" in str(error)
    assert site.generator.closed.acquire(timeout=WAIT_S)


def test_abort_ends_the_request_of_an_id(served) -> None:
    site, stub = served
    site.generator.hold_after = 1
    call = stub.Generate(asking(stream=True))
    next(call)
    answer = stub.Abort(pb.AbortRequest(request_id="r1"), timeout=WAIT_S)
    assert answer.success and site.client.aborted == ["r1"]
    assert not stub.Abort(pb.AbortRequest(request_id="other"), timeout=WAIT_S).success
    call.cancel()


def test_the_same_id_twice_is_refused(served) -> None:
    site, stub = served
    site.generator.hold_after = 1
    first = stub.Generate(asking(stream=True))
    next(first)
    error = failure(stub.Generate(asking(), timeout=WAIT_S))
    assert error.code() == grpc.StatusCode.INVALID_ARGUMENT and "Duplicate" in error.details()
    first.cancel()


def test_health_is_a_generated_token(served) -> None:
    site, stub = served
    assert stub.HealthCheck(pb.HealthCheckRequest(), timeout=WAIT_S).healthy
    assert site.generator.asked[-1].route == "probe"
    site.client.now = Health(True, True, False, "the engine is stuck")
    site.state.probe._good_until_s = 0.0
    answer = stub.HealthCheck(pb.HealthCheckRequest(), timeout=WAIT_S)
    assert not answer.healthy and "stuck" in answer.message


def test_the_standard_health_service_answers() -> None:
    with serving() as (site, _, address), grpc.insecure_channel(address) as channel:
        check = channel.unary_unary("/grpc.health.v1.Health/Check")
        assert check(b"", timeout=WAIT_S) == b"\x08\x01"
        site.state.service = None
        assert check(b"", timeout=WAIT_S) == b"\x08\x02"


def test_model_server_and_load_are_described(served) -> None:
    site, stub = served
    model = stub.GetModelInfo(pb.GetModelInfoRequest(), timeout=WAIT_S)
    assert (model.served_model_name, model.vocab_size) == ("tiny", 261)
    assert model.max_context_length == 4096 and list(model.eos_token_ids) == [256]
    assert model.is_generation and list(model.architectures) == ["LlamaForCausalLM"]
    info = stub.GetServerInfo(pb.GetServerInfoRequest(), timeout=WAIT_S)
    assert info.max_total_num_tokens == 8192 and info.server_type == "grpc"
    assert info.server_args["served_model_name"] == "tiny"
    assert info.scheduler_info["max_running_requests"] == 8
    loads = stub.GetLoads(pb.GetLoadsRequest(), timeout=WAIT_S)
    (load,) = loads.loads
    assert (load.num_running_reqs, load.num_waiting_reqs, load.num_total_reqs) == (2, 1, 3)
    assert load.num_used_tokens == 64 and load.max_total_num_tokens == 8192
    assert load.memory.token_capacity == 8192 and load.queues.waiting == 1
    assert loads.aggregate.total_reqs == 3 and loads.dp_rank_count == 1
    assert not stub.GetLoads(pb.GetLoadsRequest(dp_rank=7), timeout=WAIT_S).loads
    core = stub.GetLoads(pb.GetLoadsRequest(include=["core"]), timeout=WAIT_S).loads[0]
    assert not core.HasField("memory")


def test_the_cache_is_flushed(served) -> None:
    site, stub = served
    answer = stub.FlushCache(common.FlushCacheRequest(), timeout=WAIT_S)
    assert answer.success and site.client.calls == ["flush_cache"]


def test_the_tokenizer_comes_as_an_archive(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text('{"a": 1}' * 20_000)
    (tmp_path / "chat.jinja").write_text("{{ x }}")
    (tmp_path / "model.safetensors").write_text("weights")
    with serving() as (site, _, address), stub_of(address) as stub:
        model = site.state.config.model
        object.__setattr__(model, "path", str(tmp_path))
        chunks = list(stub.GetTokenizer(common.GetTokenizerRequest(), timeout=WAIT_S))
    archive = b"".join(chunk.data for chunk in chunks)
    assert chunks[-1].sha256 == hashlib.sha256(archive).hexdigest()
    assert not any(chunk.sha256 for chunk in chunks[:-1])
    names = zipfile.ZipFile(io.BytesIO(archive)).namelist()
    assert sorted(names) == ["chat.jinja", "tokenizer.json"]


def test_an_adapter_is_loaded_under_the_id_that_requests_name(served) -> None:
    site, stub = served
    site.state.adapters = AdapterNames(True, [AdapterPlace("own", "/own", is_pinned=True)])
    load = pb.LoadLoRAAdapterRequest(lora_name="math", lora_path="/math", lora_id="7f")
    loaded = stub.LoadLoRAAdapter(load, timeout=WAIT_S)
    assert loaded.success and list(loaded.loaded_lora_ids) == ["own", "7f"]
    listed = stub.ListLoadedLoRAAdapters(pb.ListLoadedLoRAAdaptersRequest(), timeout=WAIT_S)
    assert [(one.lora_id, one.lora_name, one.pinned) for one in listed.loaded_adapters] == [
        ("own", "own", True),
        ("7f", "math", False),
    ]
    list(stub.Generate(asking(lora_id="7f"), timeout=WAIT_S))
    assert site.generator.asked[0].message.adapter == "math"
    again = failure(lambda: stub.LoadLoRAAdapter(load, timeout=WAIT_S))
    assert again.code() == grpc.StatusCode.INVALID_ARGUMENT
    wrong = pb.UnloadLoRAAdapterRequest(lora_name="own", lora_id="7f")
    assert (
        "two different" in failure(lambda: stub.UnloadLoRAAdapter(wrong, timeout=WAIT_S)).details()
    )
    unload = pb.UnloadLoRAAdapterRequest(lora_name="math", lora_id="7f")
    assert list(stub.UnloadLoRAAdapter(unload, timeout=WAIT_S).loaded_lora_ids) == ["own"]
    gone = failure(stub.Generate(asking(lora_id="7f"), timeout=WAIT_S))
    assert gone.code() == grpc.StatusCode.INVALID_ARGUMENT and "7f" in gone.details()
    assert site.client.calls == ["load_adapter", "unload_adapter"]


def test_an_adapter_that_the_engine_refuses_is_not_listed(served) -> None:
    site, stub = served
    site.state.adapters = AdapterNames(True)
    site.client.reply = Reply(1, False, "The file is broken.")
    load = pb.LoadLoRAAdapterRequest(lora_name="math", lora_path="/math", lora_id="7f")
    reply = stub.LoadLoRAAdapter(load, timeout=WAIT_S)
    assert (reply.success, reply.message) == (False, "The file is broken.")
    assert not reply.loaded_lora_ids


def test_a_call_sets_the_metric_labels_of_its_metadata(served) -> None:
    site, stub = served
    labels = CustomLabels("x-custom-labels", ["tenant"])
    site.state.labels = labels.context
    seen: list[tuple[str, ...]] = []
    site.generator.script = lambda _: seen.append(labels.now()) or steps("a")
    metadata = (("x-custom-labels", '{"tenant": "me"}'),)
    list(stub.Generate(asking(), timeout=WAIT_S, metadata=metadata))
    list(stub.Generate(asking(), timeout=WAIT_S))
    assert seen == [("me",), ("",)]
    wrong = failure(stub.Generate(asking(), timeout=WAIT_S, metadata=(("x-custom-labels", "["),)))
    assert wrong.code() == grpc.StatusCode.INVALID_ARGUMENT


def test_a_call_has_a_span_in_its_callers_trace(served) -> None:
    site, stub = served
    exporter = InMemorySpanExporter()
    site.state.traces = spans = Spans(exporter, "banyan", "tiny", "1")
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    call = stub.Generate(asking(), timeout=WAIT_S, metadata=(("traceparent", parent),))
    list(call)
    response = dict(call.initial_metadata())["traceresponse"]
    failure(stub.Generate(pb.GenerateRequest(request_id="r2"), timeout=WAIT_S))
    spans.close()
    good, bad = exporter.get_finished_spans()
    assert good.name == "sglang.grpc.scheduler.SglangScheduler/Generate"
    assert f"{good.context.trace_id:032x}" == parent.split("-")[1] == response.split("-")[1]
    assert good.attributes is not None and bad.attributes is not None
    assert good.attributes["rpc.grpc.status_code"] == grpc.StatusCode.OK.value[0]
    status = grpc.StatusCode.INVALID_ARGUMENT.value[0]
    assert bad.attributes["rpc.grpc.status_code"] == status
    assert bad.attributes["error.type"]


def test_what_is_absent_is_unimplemented(served) -> None:
    _, stub = served
    call = stub.SubscribeKvEvents(common.SubscribeKvEventsRequest(), timeout=WAIT_S)
    assert failure(call).code() == grpc.StatusCode.UNIMPLEMENTED


def test_a_key_is_needed_where_the_server_has_some() -> None:
    with (
        serving(ServerConfig(api_key="one two", admin_api_key="root")) as (_, _, address),
        stub_of(address) as stub,
    ):
        error = failure(stub.Generate(asking(), timeout=WAIT_S))
        assert error.code() == grpc.StatusCode.UNAUTHENTICATED
        assert stub.HealthCheck(pb.HealthCheckRequest(), timeout=WAIT_S).healthy
        for metadata in ((("authorization", "Bearer one"),), (("x-api-key", "two"),)):
            assert list(stub.Generate(asking(), metadata=metadata, timeout=WAIT_S))
        flush = common.FlushCacheRequest()
        own, admin = (("authorization", "Bearer one"),), (("authorization", "Bearer root"),)
        error = failure(lambda: stub.FlushCache(flush, metadata=own, timeout=WAIT_S))
        assert error.code() == grpc.StatusCode.UNAUTHENTICATED
        assert stub.FlushCache(flush, metadata=admin, timeout=WAIT_S).success


def test_a_key_has_no_more_requests_at_once_than_it_may(tmp_path: Path) -> None:
    keys = tmp_path / "keys.yaml"
    keys.write_text("keys:\n- name: a\n  key: k\n  max-requests: 1\n")
    with (
        serving(ServerConfig(api_key_file=str(keys))) as (site, _, address),
        stub_of(address) as stub,
    ):
        mine = (("authorization", "Bearer k"),)
        site.generator.hold_after = 1
        first = stub.Generate(asking(stream=True), metadata=mine)
        next(first)
        error = failure(stub.Generate(asking(), metadata=mine, timeout=WAIT_S))
        assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        over_http = asyncio.run_coroutine_threadsafe(models_over_http(site.app), site.loop)
        assert over_http.result(WAIT_S) == 429, "each listener counts for itself"
        first.cancel()
        wait_until(lambda: not site.state.keys._open, WAIT_S, "the call to end")
        again = asyncio.run_coroutine_threadsafe(models_over_http(site.app), site.loop)
        assert again.result(WAIT_S) == 200


async def models_over_http(app: App) -> int:
    """The status of GET /v1/models with the key `k`."""
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        found = await client.get("/v1/models", headers={"authorization": "Bearer k"})
        return found.status_code


def test_a_message_above_the_limit_is_refused() -> None:
    with serving(ServerConfig(max_body_bytes=1000)) as (_, _, address), stub_of(address) as stub:
        large = pb.GenerateRequest(tokenized=pb.TokenizedInput(input_ids=[65] * 5000))
        error = failure(stub.Generate(large, timeout=WAIT_S))
        assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED


def test_fields_without_effect_are_reported_or_refused() -> None:
    request = asking(require_reasoning=True)
    with serving() as (_, _, address), stub_of(address) as stub:
        call = stub.Generate(request, timeout=WAIT_S)
        list(call)
        assert "require_reasoning" in dict(call.trailing_metadata())["x-banyan-warnings"]
    strict = ServerConfig(strict_requests=True)
    with serving(strict) as (_, _, address), stub_of(address) as stub:
        error = failure(stub.Generate(request, timeout=WAIT_S))
        assert error.code() == grpc.StatusCode.INVALID_ARGUMENT


def test_a_drain_waits_for_calls_and_what_is_left_ends_with_a_reason() -> None:
    with serving() as (site, listener, address), stub_of(address) as stub:
        site.generator.hold_after = 1
        call = stub.Generate(asking(stream=True))
        next(call)
        drain = asyncio.run_coroutine_threadsafe(listener.drain(), site.loop)
        time.sleep(0.05)
        assert not drain.done()
        site.call(listener.end_all, "The server is shutting down.")
        error = failure(call)
        assert error.code() == grpc.StatusCode.UNAVAILABLE and "shutting down" in error.details()
        drain.result(WAIT_S)
        assert site.generator.closed.acquire(timeout=WAIT_S)


def test_a_client_that_reads_nothing_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_listener, "SEND_TIMEOUT_S", 0.5)
    small_window = (("grpc.http2.lookahead_bytes", 1 << 16), ("grpc.http2.bdp_probe", 0))
    with (
        serving() as (site, _, address),
        grpc.insecure_channel(address, options=small_window) as channel,
    ):
        site.generator.script = lambda _: steps(*["a" * 10_000] * 200)
        call = service.SglangSchedulerStub(channel).Generate(asking(stream=True))
        assert site.generator.closed.acquire(timeout=WAIT_S)
        call.cancel()


def test_tls_is_that_of_the_flags(tmp_path: Path) -> None:
    server = flags(tmp_path)
    authority = AUTHORITY.cert_pem.bytes()
    with serving(server) as (_, listener, address):
        assert listener.url.startswith("grpcs://")
        port = address.rpartition(":")[2]
        trusting = grpc.ssl_channel_credentials(authority)
        with grpc.secure_channel(f"localhost:{port}", trusting) as channel:
            stub = service.SglangSchedulerStub(channel)
            assert list(stub.Generate(asking(), timeout=WAIT_S))
    with pytest.raises(ConfigError, match="--enable-ssl-refresh"):
        server_credentials(flags(tmp_path, "--enable-ssl-refresh"))


def test_an_embedding_is_the_vector_of_the_tokens(served) -> None:
    site, stub = served
    request = pb.EmbedRequest(request_id="e", tokenized=pb.TokenizedInput(input_ids=[65, 66]))
    stub.Embed(request, timeout=WAIT_S)
    asked = site.generator.asked[-1]
    assert asked.message.pool and asked.prompt == [65, 66] and asked.id == "e"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"is_cross_encoder": True}, "is_cross_encoder"),
        ({"texts": ["a", "b"]}, "texts"),
        ({"token_type_ids": [0, 1]}, "token_type_ids"),
        ({"mm_inputs": pb.MultimodalInputs()}, "mm_inputs"),
    ],
)
def test_a_field_of_an_embedding_is_never_ignored(served, fields, param) -> None:
    _, stub = served
    request = pb.EmbedRequest(tokenized=pb.TokenizedInput(input_ids=[65]), **fields)
    error = failure(lambda: stub.Embed(request, timeout=WAIT_S))
    assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
    trailing = dict(error.trailing_metadata())
    assert trailing["x-banyan-param"] == param


def test_the_replica_of_an_embedding_is_the_one_that_was_named(served) -> None:
    site, stub = served
    request = pb.EmbedRequest(tokenized=pb.TokenizedInput(input_ids=[65]), data_parallel_rank=3)
    stub.Embed(request, timeout=WAIT_S)
    assert site.generator.asked[-1].message.replica == 3


def test_sampling_of_an_embedding_is_reported(served) -> None:
    _, stub = served
    request = pb.EmbedRequest(
        tokenized=pb.TokenizedInput(input_ids=[65]), sampling_params=pb.SamplingParams(n=2)
    )
    _, call = stub.Embed.with_call(request, timeout=WAIT_S)
    assert "sampling_params" in dict(call.trailing_metadata())["x-banyan-warnings"]


@pytest.mark.parametrize(
    "sampling",
    [
        pb.SamplingParams(stop=["a"] * 100_000),
        pb.SamplingParams(stop_token_ids=[5] * 500_000),
        pb.SamplingParams(logit_bias={str(n): 1.0 for n in range(100_000)}),
    ],
)
def test_a_large_request_is_read_in_a_thread_and_refused(served, sampling) -> None:
    site, stub = served
    error = failure(stub.Generate(asking(sampling_params=sampling), timeout=WAIT_S))
    assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert not site.generator.asked


def test_a_message_has_four_mebibytes_at_most(served) -> None:
    _, stub = served
    large = asking(custom_logit_processor="x" * (4 << 20))
    error = failure(stub.Generate(large, timeout=WAIT_S))
    assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED


def test_the_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="smg-grpc-proto"):
        prepare.check_names(config_of("--grpc-mode"))
