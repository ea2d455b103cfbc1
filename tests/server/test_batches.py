"""/v1/batches through the official client: answers, faults, cancelling, restarts."""

import codecs
import errno
import json
import os
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import openai
import pytest
from openai.types.responses import Response

from banyan.base.ids import RequestId
from banyan.config.schema import ScheduleConfig, ServerConfig
from banyan.messages.sampling_params import SamplingParams
from banyan.requests.generation import Finish
from banyan.requests.request_spec import RequestSpec, spec_of
from banyan.server.batch_lines import MAX_FAULTS, MAX_LINES, read_lines
from banyan.server.batches import resume_batches
from banyan.server.store import batches as store_batches
from banyan.server.store.batches import AnswerLog, answer_line
from tests.server.fakes import Site, refusal, steps
from tests.support.batches import ENDPOINT, answers, as_jsonl, begin, ended, line
from tests.support.flags import config_of
from tests.system.serving import wait_until


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    with Site(ServerConfig(storage_path=str(tmp_path))).serving() as served:
        yield served
        served.call(served.state.storage.close)


@pytest.fixture
def client(site: Site) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{site.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def stop_work(site: Site) -> None:
    """End the work on batches as a server that shuts down does."""
    site.call(site.state.storage.close)
    wait_until(lambda: not site.state.storage.batches.num_working, 60, "the batch to stop")


def test_every_line_is_answered_once(client: openai.OpenAI) -> None:
    batch = ended(client, begin(client, [line(f"l{i}") for i in range(25)]))
    assert batch.status == "completed" and batch.metadata == {"a": "b"}
    assert (batch.request_counts.total, batch.request_counts.completed) == (25, 25)
    assert batch.error_file_id is None and batch.completion_window == "24h"
    found = answers(client, batch.output_file_id)
    assert sorted(found) == sorted(f"l{i}" for i in range(25))
    one = found["l3"]
    assert one["error"] is None and one["id"].startswith("batch_req_")
    assert one["response"]["status_code"] == 200
    assert one["response"]["body"]["choices"][0]["message"]["content"] == "Hello"
    kept = client.files.retrieve(batch.output_file_id)
    assert kept.purpose == "batch_output"


def test_a_line_that_fails_fails_alone(client: openai.OpenAI) -> None:
    lines = [line("good"), line("bad", temperature=-1), line("worse", messages=[])]
    batch = ended(client, begin(client, lines))
    assert batch.status == "completed"
    assert (batch.request_counts.completed, batch.request_counts.failed) == (1, 2)
    assert list(answers(client, batch.output_file_id)) == ["good"]
    failed = answers(client, batch.error_file_id)
    assert sorted(failed) == ["bad", "worse"]
    assert failed["bad"]["response"]["status_code"] == 400
    assert failed["bad"]["response"]["body"]["param"] == "temperature"


def test_completions_are_an_endpoint_too(client: openai.OpenAI) -> None:
    lines = [line("a", "/v1/completions", prompt="Hi")]
    batch = ended(client, begin(client, lines, "/v1/completions"))
    body = answers(client, batch.output_file_id)["a"]["response"]["body"]
    assert body["choices"][0]["text"] == "Hello"


def test_responses_are_an_endpoint_too_and_are_in_the_file_alone(
    site: Site, client: openai.OpenAI
) -> None:
    url = "/v1/responses"
    lines = [line("r", url, input="Hi", store=True), line("s", url, input="Hi", background=True)]
    faulty = ended(client, begin(client, lines, url))
    assert [fault.line for fault in faulty.errors.data] == [2]
    batch = ended(client, begin(client, lines[:1], url))
    answer = answers(client, batch.output_file_id)["r"]["response"]
    Response.model_validate_json(json.dumps(answer["body"]), strict=True)
    assert answer["body"]["output"][0]["content"][0]["text"] == "Hello"
    assert answer["warnings"] == ["store: the response is in the output file and is not stored"]
    assert answer["body"]["store"] is False and not len(site.state.responses)


@pytest.mark.parametrize(
    ("content", "num_faults"),
    [
        (b"PK\x03\x04\x14\x00\x00\x00\x08\x00" + bytes(range(256)) * 4, 1),
        (b"custom_id,method,url\na,POST,/v1/chat/completions\n", 2),
        (b"\xff\xfe{\x00}\x00\n", 1),
        (b"[" * 100_000, 1),
        (b'{"custom_id": "' + b"x" * 10_000_000 + b'"}', 1),
        (b"{}\n" * 1_000_000, MAX_FAULTS),
        (b"\n" * 1_000_000, 1),
    ],
    ids=["zip", "csv", "utf-16", "deep", "long line", "a million lines", "blank lines"],
)
def test_what_is_no_batch_is_reported_by_its_lines(content: bytes, num_faults: int) -> None:
    lines, faults = read_lines(content)
    assert not lines and num_faults <= len(faults) <= MAX_FAULTS
    assert all(len(fault.message) < 300 for fault in faults)


def test_more_lines_than_are_taken_are_one_fault() -> None:
    many = b"".join(
        b'{"custom_id":"%d","method":"POST","url":"/v1/completions","body":{}}\n' % i
        for i in range(MAX_LINES + 5)
    )
    _, faults = read_lines(many)
    assert [(fault.code, fault.line) for fault in faults] == [("too_many_lines", MAX_LINES + 1)]


def test_a_file_of_windows_is_read_as_it_is_meant() -> None:
    """With a mark of its encoding, and line ends of two characters."""
    content = as_jsonl([line("a"), line("b")]).replace(b"\n", b"\r\n")
    lines, faults = read_lines(codecs.BOM_UTF8 + content)
    assert [one.custom_id for one in lines] == ["a", "b"] and not faults


def test_what_a_line_asks_for_in_vain_is_reported_in_its_answer(client: openai.OpenAI) -> None:
    batch = ended(client, begin(client, [line("a", no_such_field=1)]))
    response = answers(client, batch.output_file_id)["a"]["response"]
    assert response["warnings"] == ["no_such_field: unknown field, ignored"]


def test_a_faulty_input_fails_whole_and_names_its_lines(client: openai.OpenAI) -> None:
    lines = [line("a"), line("a"), line("b", "/v1/completions"), line("c", stream=True), []]
    batch = ended(client, begin(client, lines))
    assert batch.status == "failed" and batch.output_file_id is None
    logged = [(fault.line, fault.code) for fault in batch.errors.data]
    assert logged[0] == (2, "duplicate_custom_id")
    assert [number for number, _ in logged] == [2, 3, 4, 5]


def test_an_impossible_batch_is_refused(client: openai.OpenAI) -> None:
    given = client.files.create(file=("in", as_jsonl([line("a")])), purpose="batch")
    base = {"input_file_id": given.id, "endpoint": ENDPOINT, "completion_window": "24h"}
    for wrong in ({"endpoint": "/v1/moderations"}, {"completion_window": "1h"}):
        with pytest.raises(openai.BadRequestError, match=next(iter(wrong))):
            client.batches.create(**base | wrong)
    with pytest.raises(openai.NotFoundError):
        client.batches.create(**base | {"input_file_id": "file-0"})
    with pytest.raises(openai.NotFoundError):
        client.batches.retrieve("batch_0")


def test_a_cancelled_batch_keeps_what_was_answered(site: Site, client: openai.OpenAI) -> None:
    site.generator.hold_after = 1
    batch = begin(client, [line(f"l{i}") for i in range(9)])
    assert site.generator.started.acquire(timeout=60)
    assert client.batches.cancel(batch.id).status in ("cancelling", "cancelled")
    batch = ended(client, batch)
    assert batch.status == "cancelled" and batch.request_counts.completed == 0
    assert not site.generator.open, "what ran for the batch was aborted"
    with pytest.raises(openai.ConflictError):
        client.batches.cancel(batch.id)


def test_a_batch_takes_no_more_than_half_of_the_seats(site: Site, client: openai.OpenAI) -> None:
    site.generator.hold_after = 0
    begin(client, [line(f"l{i}") for i in range(50)])
    for _ in range(4):
        assert site.generator.started.acquire(timeout=60)
    assert len(site.generator.open) == site.service.ready.max_running // 2


@pytest.mark.parametrize(("low_first", "priority"), [(False, -100), (True, 100)])
def test_where_priorities_count_a_batch_has_the_lowest(
    site: Site, client: openai.OpenAI, low_first: bool, priority: int
) -> None:
    schedule = ScheduleConfig(priorities=True, low_priority_first=low_first)
    site.state.config = replace(site.state.config, schedule=schedule)
    ended(client, begin(client, [line("a"), line("b", priority=7)]))
    assert sorted(r.message.priority for r in site.generator.asked) == sorted([priority, 7])


def test_embeddings_are_an_endpoint_too(client: openai.OpenAI) -> None:
    lines = [line("a", "/v1/embeddings", input="Hi")]
    batch = ended(client, begin(client, lines, "/v1/embeddings"))
    over_http = httpx.post(f"{client.base_url}embeddings", json=lines[0]["body"])
    found = answers(client, batch.output_file_id) | answers(client, batch.error_file_id)
    assert found["a"]["response"]["status_code"] == over_http.status_code
    assert found["a"]["response"]["body"] == over_http.json()


def test_a_batch_waits_while_others_have_all_seats(site: Site, client: openai.OpenAI) -> None:
    others = [
        spec_of(RequestId(f"other{i}"), [1], SamplingParams(max_new_tokens=1))
        for i in range(site.service.ready.max_running)
    ]
    held = site.state.open.holding(others, b"")
    site.call(held.__enter__)
    batch = begin(client, [line("a")])
    wait_until(lambda: client.batches.retrieve(batch.id).status == "in_progress", 60, "its start")
    assert client.models.list().data and not site.generator.asked
    site.call(held.__exit__, None, None, None)
    assert ended(client, batch).request_counts.completed == 1


def test_a_line_that_finds_no_room_is_asked_again(
    site: Site, client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("banyan.server.batch_lines.RETRY_S", 0.0)
    site.generator.script = lambda _: steps(
        "", finish=refusal(503) if len(site.generator.asked) < 4 else None
    )
    batch = ended(client, begin(client, [line("a")]))
    assert batch.request_counts.completed == 1 and len(site.generator.asked) == 4


def test_batches_are_listed_newest_first(client: openai.OpenAI) -> None:
    made = [ended(client, begin(client, [line("a")])).id for _ in range(3)]
    assert [b.id for b in client.batches.list(limit=2)] == made[::-1]


def test_a_file_that_a_batch_reads_cannot_be_deleted(site: Site, client: openai.OpenAI) -> None:
    site.generator.hold_after = 0
    batch = begin(client, [line("a")])
    with pytest.raises(openai.ConflictError):
        client.files.delete(batch.input_file_id)


def test_an_unfinished_batch_goes_on_at_the_next_start(tmp_path: Path) -> None:
    config = ServerConfig(storage_path=str(tmp_path))
    with Site(config).serving() as first:
        client = openai.OpenAI(base_url=f"{first.url}/v1", api_key="none", max_retries=0)
        first.generator.script = lambda r: steps("one")
        first.generator.hold_after = None
        held = [False]

        def script(request: object) -> list:
            if len(first.generator.asked) > 5 and not held[0]:
                held[0] = True
                first.generator.hold_after = 0
            return steps("one")

        first.generator.script = script
        batch = begin(client, [line(f"l{i}") for i in range(12)])
        wait_until(
            lambda: held[0] and client.batches.retrieve(batch.id).request_counts.completed > 0,
            60,
            "some lines to be answered",
        )
        first.call(first.state.storage.close)
        first.call(first.state.storage.release)
    with Site(config).serving() as second:
        second.generator.script = lambda _: steps("two")
        second.call(resume_batches, second.state)
        client = openai.OpenAI(base_url=f"{second.url}/v1", api_key="none", max_retries=0)
        batch = ended(client, batch)
        found = answers(client, batch.output_file_id)
    assert sorted(found) == sorted(f"l{i}" for i in range(12))
    said = [a["response"]["body"]["choices"][0]["message"]["content"] for a in found.values()]
    assert "one" in said and "two" in said
    assert len(second.generator.asked) == said.count("two")


def test_a_line_on_which_engines_die_fails_alone_while_others_take_their_place(
    tmp_path: Path,
) -> None:
    """The first death suspects what ran, the second is of one line that ran alone; the server
    serves on."""
    with Site(ServerConfig(storage_path=str(tmp_path))).serving() as site:
        client = openai.OpenAI(base_url=f"{site.url}/v1", api_key="none", max_retries=0)

        def script(request: RequestSpec) -> list:
            if "deadly" not in site.tokenizer.decode(request.prompt):
                return steps("fine")
            return steps("", finish=Finish("abort", None, 503, "killed", "engine_unavailable"))

        site.generator.script = script
        ids = ["a", "b", "deadly", "c", "d", "e", "f"]
        batch = ended(client, begin(client, [line(id) for id in ids]))
        good = answers(client, batch.output_file_id)
        failed = answers(client, batch.error_file_id)
        prompts = [site.tokenizer.decode(r.prompt) for r in site.generator.asked]
    assert batch.status == "completed" and sorted(good) == sorted(set(ids) - {"deadly"})
    assert failed["deadly"]["response"]["body"]["error"]["code"] == "engine_died"
    assert sum("deadly" in prompt for prompt in prompts) == 2


def test_a_line_on_which_the_engine_dies_twice_has_failed_and_the_others_go_on(
    tmp_path: Path,
) -> None:
    """Three starts: the first death suspects what ran, the second is of one line that ran alone."""
    config = ServerConfig(storage_path=str(tmp_path))
    batch, asked = None, []
    for start in range(3):
        with Site(config).serving() as site:
            client = openai.OpenAI(base_url=f"{site.url}/v1", api_key="none", max_retries=0)

            def script(request: RequestSpec, site: Site = site) -> list:
                if "deadly" not in site.tokenizer.decode(request.prompt):
                    return steps("fine")
                site.state.dead = "the test"
                return steps("", finish=refusal(503))

            site.generator.script = script
            if batch is None:
                ids = ["a", "b", "deadly", "c", "d", "e", "f", "g", "h", "i"]
                batch = begin(client, [line(id) for id in ids])
            else:
                site.call(resume_batches, site.state)
            store = site.state.storage.batches
            wait_until(lambda s=store: s.work and not s.num_working, 60, "the work's end")
            assert bool(site.state.dead) == (start < 2)
            asked.append([site.tokenizer.decode(r.prompt) for r in site.generator.asked])
            found = client.batches.retrieve(batch.id)
            if start == 1:
                assert store.batches[batch.id].deaths["deadly"] == 2
                assert all(
                    n < 2 for id, n in store.batches[batch.id].deaths.items() if id != "deadly"
                )
            if start == 2:
                good = answers(client, found.output_file_id)
                failed = answers(client, found.error_file_id)
            site.call(site.state.storage.close)
            site.call(site.state.storage.release)
    assert found.status == "completed" and found.request_counts.total == 10
    assert sorted(good) == sorted(set(ids) - {"deadly"}) and list(failed) == ["deadly"]
    reported = failed["deadly"]["response"]
    assert reported["status_code"] == 500 and reported["body"]["error"]["code"] == "engine_died"
    assert "deadly" in asked[1][-1], "the suspects come one at a time"
    assert not any("deadly" in prompt for prompt in asked[2])


def test_another_model_leaves_an_unfinished_batch_alone(
    site: Site, client: openai.OpenAI, caplog: pytest.LogCaptureFixture
) -> None:
    site.generator.hold_after = 0
    batch = begin(client, [line("a")])
    assert batch.model == "tiny" and site.generator.started.acquire(timeout=60)
    stop_work(site)
    tiny = site.state.config
    site.state.config = replace(tiny, model=replace(tiny.model, served_name="other"))
    site.generator.hold_after = None
    site.call(resume_batches, site.state)
    assert f"batch waits for its model id={batch.id} model=tiny" in caplog.text
    assert client.batches.retrieve(batch.id).status == "in_progress"
    site.state.config = tiny
    site.call(resume_batches, site.state)
    assert ended(client, batch).request_counts.completed == 1


def test_a_batch_of_another_model_can_be_cancelled(site: Site, client: openai.OpenAI) -> None:
    site.generator.hold_after = 0
    batch = begin(client, [line("a")])
    assert site.generator.started.acquire(timeout=60)
    stop_work(site)
    model = replace(site.state.config.model, served_name="other")
    site.state.config = replace(site.state.config, model=model)
    client.batches.cancel(batch.id)
    assert ended(client, batch).status == "cancelled"


def test_a_line_that_was_cut_short_is_taken_back(tmp_path: Path) -> None:
    output, errors = tmp_path / "out", tmp_path / "err"
    whole = answer_line("r1", "a", {"status_code": 200})
    for torn in (whole[:-1], whole[:20], b"\x00" * 50 + b"\n", b"\n"):
        errors.unlink(missing_ok=True)
        output.write_bytes(whole + torn)
        log = AnswerLog(output, errors)
        log.recover()
        assert log.answered == {"a": True}
        log.append([("b", False, answer_line("r2", "b", {"status_code": 400}))])
        log.close()
        assert output.read_bytes() == whole
    log = AnswerLog(output, errors)
    log.recover()
    assert log.answered["b"] is False and log.num_succeeded == 1
    log.close()


def test_an_empty_input_is_a_fault() -> None:
    assert read_lines(b"\n\n")[1][0].code == "empty_file"


def test_a_list_of_nothing_touches_no_disk(tmp_path: Path) -> None:
    folder = tmp_path / "none"
    with Site(ServerConfig(storage_path=str(folder))).serving() as site:
        assert httpx.get(f"{site.url}/v1/batches").json()["data"] == []
        assert httpx.get(f"{site.url}/v1/files").json()["data"] == []
    assert not folder.exists()


def test_answers_beyond_the_room_for_files_end_their_batch_and_not_the_next(
    site: Site, client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("banyan.server.store.files.MAX_TOTAL_BYTES", 30_000)
    site.generator.script = lambda _: steps("x" * 6000)
    full = ended(client, begin(client, [line(f"l{i}") for i in range(20)]))
    assert full.status == "failed" and full.errors.data[0].code == "storage_full"
    assert 0 < full.request_counts.completed < 20
    kept = answers(client, full.output_file_id)
    assert len(kept) == full.request_counts.completed, "what was answered is there"
    client.files.delete(full.output_file_id)
    site.generator.script = lambda _: steps("y")
    assert ended(client, begin(client, [line("a")])).status == "completed"


@pytest.mark.parametrize("part", ["answers", "state"])
def test_a_full_disk_is_shown_and_the_batch_goes_on_when_there_is_room(
    site: Site, client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    monkeypatch.setattr("banyan.server.batches.DISK_RETRY_S", 0.01)
    is_full, is_over = threading.Event(), threading.Event()
    where = {"answers": (store_batches, "_write"), "state": (os, "replace")}[part]
    write = getattr(*where)

    def write_or_fail(*given: object) -> None:
        if is_full.is_set() and (part == "answers" or "batch_" in str(given[0])):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(*given)

    monkeypatch.setattr(*where, write_or_fail)

    def answer(_: object) -> list:
        if not is_over.is_set():
            is_full.set()
        return steps("y")

    site.generator.script = answer
    batch = begin(client, [line(f"l{i}") for i in range(9)])

    def errors() -> list[str]:
        found = client.batches.retrieve(batch.id).errors
        return [f"{e.code}: {e.message}" for e in found.data] if found else []

    wait_until(errors, 60, "the full disk to show")
    assert client.batches.retrieve(batch.id).status in ("in_progress", "finalizing")
    is_over.set()
    is_full.clear()
    done = ended(client, batch)
    assert (done.status, done.errors, done.request_counts.completed) == ("completed", None, 9)
    assert sorted(answers(client, done.output_file_id)) == sorted(f"l{i}" for i in range(9))


def test_lines_share_the_cache_of_the_key_that_made_their_batch(tmp_path: Path) -> None:
    flags = ["--api-key", "alice-key bob-key", "--file-storage-path", str(tmp_path)]
    with Site(config_of(*flags).server).serving() as site:
        alice, bob = (
            openai.OpenAI(base_url=f"{site.url}/v1", api_key=f"{name}-key", max_retries=0)
            for name in ("alice", "bob")
        )
        batch = ended(alice, begin(alice, [line("a")]))
        from_batch = site.generator.asked[-1].message.namespace
        for client in (alice, bob):
            client.chat.completions.create(
                model="tiny", messages=[{"role": "user", "content": "a"}]
            )
        by_alice, by_bob = (r.message.namespace for r in site.generator.asked[-2:])
        assert from_batch == by_alice != by_bob
        with pytest.raises(openai.NotFoundError):
            bob.batches.retrieve(batch.id)
        for id in (batch.input_file_id, batch.output_file_id):
            with pytest.raises(openai.NotFoundError):
                bob.files.content(id)
        assert list(bob.batches.list()) == [] == list(bob.files.list())
        with pytest.raises(openai.NotFoundError):
            begin_on(bob, batch.input_file_id)
        assert alice.files.content(batch.output_file_id).content


def begin_on(client: openai.OpenAI, input_file_id: str) -> openai.types.Batch:
    return client.batches.create(
        input_file_id=input_file_id, endpoint="/v1/chat/completions", completion_window="24h"
    )


def test_a_damaged_output_fails_its_batch_and_is_left_as_it_is(tmp_path: Path) -> None:
    with Site(ServerConfig(storage_path=str(tmp_path))).serving() as site:
        client = openai.OpenAI(base_url=f"{site.url}/v1", api_key="none", max_retries=0)
        site.generator.hold_after = 0
        batch = begin(client, [line("a")])
        wait_until(lambda: site.generator.asked, 60, "the line to run")
        site.call(site.state.storage.close)
        site.call(site.state.storage.release)
    output = next(
        p
        for p in tmp_path.iterdir()
        if p.suffix == "" and b"custom" not in p.read_bytes() and p.name.startswith("file-")
    )
    output.write_bytes(b"something else\nand more\n")
    with Site(ServerConfig(storage_path=str(tmp_path))).serving() as site:
        client = openai.OpenAI(base_url=f"{site.url}/v1", api_key="none", max_retries=0)
        site.call(resume_batches, site.state)
        found = ended(client, batch)
        assert found.status == "failed" and found.errors.data[0].code == "output_damaged"
    assert output.read_bytes() == b"something else\nand more\n"
