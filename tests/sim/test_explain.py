"""A recording tells why a request waited, what it found in the cache and where its time went."""

import mmap
from array import array

import pytest

from banyan.base.errors import ModelError
from banyan.cli.replay import cache
from banyan.engine.flight_recorder import FlightRecorder
from banyan.engine.flight_recorder_memory import journal_of
from banyan.engine.journal import Journal
from banyan.messages.requests import Generate
from banyan.messages.sampling_params import SamplingParams
from banyan.sim.explain import PAGES, PAUSED, PLACES, explain
from tests.scheduler.driver import Driver


@pytest.fixture
def recorded(tmp_path):
    """A driver whose steps take a second each, and the file that it is recorded in."""
    journals = []

    def make(**limits):
        def recorder(spec):
            journals.append(Journal(str(tmp_path / "journal"), spec, 1 << 20))
            return journals[0]

        return Driver(recorder=recorder, **limits), str(tmp_path / "journal")

    yield make
    journals[0].close()


def run(driver):
    while driver.launch() is not None:
        driver.now += 1.0
        driver.complete()


def test_a_request_that_waits_for_a_place_says_so_and_for_how_long(recorded):
    driver, path = recorded(max_running=1)
    driver.submit("first-request", [1, 2, 3], new=4, ignore_eos=True)
    driver.submit("second-request", [4, 5, 6], new=3, ignore_eos=True)
    run(driver)
    reported = explain(path, "second-request")
    assert reported.waits == {PLACES: 4.0} and reported.entered_s - reported.came_s == 4.0
    assert (reported.prompt_tokens, reported.output_tokens, reported.end) == (3, 3, "length")
    assert (reported.prompt_steps, reported.decode_steps) == (1, 2)
    assert "4.000 s: every place was taken (--max-running-requests)" in str(reported)
    assert "in 1 step with its prompt" in str(reported) and "in 2 steps for 3 tokens" in str(
        reported
    )
    assert explain(path, "first-request").waits == {}


def test_pages_that_lack_and_retractions_are_reported(recorded):
    driver, path = recorded(pages=9, conservativeness=0.0)
    for name in "abc":
        driver.submit(f"request-{name}", [ord(name)] * 7, new=12)
    run(driver)
    reported = [explain(path, f"request-{name}") for name in "abc"]
    assert sum(len(one.retracted_s) for one in reported) > 0
    assert any(PAGES in one.waits for one in reported)
    assert "retracted" in str(max(reported, key=lambda one: len(one.retracted_s)))


def test_what_was_in_the_cache_is_reported_and_so_is_a_pause(recorded):
    driver, path = recorded()
    driver.submit("request-one", [1] * 8, new=2, ignore_eos=True)
    run(driver)
    driver.submit("request-two", [1] * 12, new=2, ignore_eos=True)
    run(driver)
    reported = explain(path, "request-two")
    assert reported.cached_tokens == 8 and "12 tokens, 8 of them from the cache" in str(reported)
    assert PAUSED not in reported.waits


def test_a_request_that_is_not_in_it_is_named_with_those_that_are(recorded):
    driver, path = recorded()
    driver.submit("request-one", [1] * 8, new=2)
    run(driver)
    with pytest.raises(ModelError, match=r"no request 'other'.*request-one"):
        explain(path, "other")


def test_one_that_has_not_ended_is_reported_as_far_as_it_got(recorded):
    driver, path = recorded()
    driver.submit("request-one", [1] * 8, new=50, ignore_eos=True)
    for _ in range(3):
        driver.launch()
        driver.now += 1.0
        driver.complete()
    assert "it had not ended when this was recorded" in str(explain(path, "request-one"))


def test_why_no_more_came_from_the_cache_is_reported_and_what_would_help(recorded, capsys):
    driver, path = recorded(pages=9)
    prompt = list(range(20, 32))
    for name, tokens in (
        ("request-one", prompt),
        ("request-two", prompt),
        ("request-large", list(range(40, 68))),
        ("request-late", prompt),
    ):
        driver.now += 10.0
        driver.submit(name, tokens, new=2, ignore_eos=True)
        run(driver)
    assert "that no request before it has had there" in explain(path, "request-one").of_the_cache
    assert "then" not in explain(path, "request-two").of_the_cache
    late = explain(path, "request-late")
    assert late.miss == "evicted" and "/pin_prefix" in late.of_the_cache
    # The first of its pages went when the large one's last token needed one.
    assert late.entered_s - late.evicted_s == 11.0
    assert "had made room for others 11.0 s before; more memory" in late.of_the_cache
    assert late.of_the_cache.splitlines()[1:] == str(late).splitlines()[1:3]
    assert cache(["explain", "request-late", "--file", path]) == 0
    assert capsys.readouterr().out == f"{late.of_the_cache}\n"


def test_what_was_evicted_before_the_recording_begins_has_no_time(tmp_path):
    driver = Driver(pages=9)
    prompt = list(range(20, 32))
    for name, tokens in (("request-one", prompt), ("request-large", list(range(40, 68)))):
        driver.submit(name, tokens, new=2, ignore_eos=True)
        run(driver)
    memory = mmap.mmap(-1, 1 << 20)
    driver.core.recorder = recorder = FlightRecorder(memory, driver.spec)
    recorder.follow(driver.core, driver.now)
    driver.submit("request-late", prompt, new=2, ignore_eos=True)
    run(driver)
    assert driver.ends["request-late"].cache_miss == "evicted"
    (tmp_path / "recording").write_bytes(journal_of(memory[:]))
    late = explain(str(tmp_path / "recording"), "request-late")
    assert (late.miss, late.evicted_s) == ("unseen", -1.0)
    assert "(or they were evicted before the recording begins)" in late.of_the_cache


def test_what_others_have_of_a_prompt_is_reported_to_all_who_may_read_the_recording(recorded):
    driver, path = recorded()
    tokens = array("i", range(20, 32)).tobytes()
    for name, namespace in (("request-one", b"one"), ("request-two", b"two")):
        sampling = SamplingParams(max_new_tokens=2, ignore_eos=True)
        driver.receive(
            Generate(request=name, tokens=tokens, sampling=sampling, namespace=namespace)
        )
        run(driver)
    assert "has 12 of them, which are not shared" in explain(path, "request-two").of_the_cache
    assert "not shared" not in explain(path, "request-one").of_the_cache
