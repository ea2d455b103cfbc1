"""/requests of a real server: what runs is listed while it runs, and can be ended by its id."""

import json

from tests.system.serving import Server, settled, wait_until


def test_a_request_is_listed_while_it_runs_and_ends_by_its_rid(shared_server: Server) -> None:
    http = shared_server.http
    assert http.get("/requests").json() == {"requests": [], "open": 0, "most_per_replica": 256}
    finished = shared_server.stats()["finished"]
    body = {
        **{"prompt": list(range(5, 105)), "max_tokens": 1900, "ignore_eos": True},
        **{"stream": True, "rid": "long-one", "temperature": 0},
    }
    with http.stream("POST", "/v1/completions", json=body) as answer:
        lines = (line for line in answer.iter_lines() if line.startswith("data: "))
        next(lines)
        (seen,) = http.get("/requests").json()["requests"]
        assert seen["rid"] == "long-one" and seen["phase"] == "decode" and seen["dp_rank"] == 0
        assert seen["prompt_tokens"] == 100 and seen["output_tokens"] >= 1
        assert seen["computed_tokens"] >= 100 and seen["age_s"] >= seen["queue_s"] >= 0
        assert http.post("/abort_request", json={"rid": "long-one"}).json() == {"aborted": 1}
        events = [json.loads(line[6:]) for line in lines if line != "data: [DONE]"]
    reasons = [c["finish_reason"] for event in events for c in event.get("choices", ())]
    assert "abort" in reasons
    settled(shared_server.stats, finished + 1)
    wait_until(lambda: not http.get("/requests").json()["requests"], 60, "the list to be empty")
    first = http.get("/requests?ended=true").json()["ended"][0]
    assert (first["rid"], first["reason"], first["prompt_tokens"]) == ("long-one", "abort", 100)
    assert first["seconds"] >= first["decode_s"] > 0 and first["prefill_s"] > 0
    assert http.get("/v1/loads?include=history").json()["history"][0]["most"] > 0
