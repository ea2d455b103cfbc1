"""Prompts that an operator keeps warm for one tenant, over HTTP."""

from pathlib import Path

from tests.system.serving import serving

PROMPT = [5 + 7 * i % 380 for i in range(50)]
ONE = {"temperature": 0, "max_new_tokens": 1}


def test_an_operator_keeps_a_tenant_s_prompt(tiny_model: Path, tmp_path: Path) -> None:
    flags = ("--model-path", str(tiny_model), "--threads", "1", "--max-total-tokens", "1024")
    keys = ("--api-key", "oak elm", "--admin-api-key", "root", "--enable-metrics")
    with serving(tmp_path / "log", *flags, *keys) as server:

        def call(path: str, body: dict | None, key: str) -> dict | int:
            headers = {"Authorization": f"Bearer {key}"}
            verb = "GET" if body is None else "POST"
            answer = server.http.request(verb, path, json=body, headers=headers)
            return answer.json() if answer.status_code == 200 else answer.status_code

        def cached(key: str) -> int:
            body = {"input_ids": PROMPT, "sampling_params": ONE}
            return call("/generate", body, key)["meta_info"]["cached_tokens"]

        asked = {"input_ids": PROMPT, "ttl_s": 600, "priority": 3, "api_key": "oak"}
        assert call("/pin_prefix", asked, "oak") == 401
        assert call("/pin_prefix", {"input_ids": PROMPT}, "root") == 400, "whose is it?"
        assert call("/pin_prefix", {**asked, "ttl": 3}, "root") == 400
        made = call("/pin_prefix", asked, "root")
        assert (made["prompt_tokens"], made["ttl_s"], made["priority"]) == (50, 600, 3)
        assert call("/pin_prefix", {**asked, "priority": 1 << 53}, "root") == 400
        assert call("/pin_prefix", {**asked, "priority": 1 << 64}, "root") == 400
        (pin,) = call("/pinned_prefixes", None, "root")["pins"]
        assert (pin["pin"], pin["tokens"], pin["pages"]) == (made["pin"], 48, 3)
        assert 0 < pin["left_s"] <= 600 and pin["priority"] == 3
        flush = "/flush_cache?timeout=30"
        server.http.post(flush, headers={"Authorization": "Bearer root"}).raise_for_status()
        assert cached("oak") == 48 and cached("elm") == 0
        metrics = server.http.get("/metrics", headers={"Authorization": "Bearer root"}).text
        lines = [line for line in metrics.splitlines() if "kv_pinned_tokens{" in line]
        assert [float(line.split()[-1]) for line in lines] == [48.0]
        assert call("/unpin_prefix", {"pin": "nobody"}, "root") == 404
        assert call("/unpin_prefix", {"pin": ""}, "root") == 400
        assert call("/unpin_prefix", {"pin": made["pin"]}, "root") == {"unpinned": 1}
        server.http.post(flush, headers={"Authorization": "Bearer root"}).raise_for_status()
        assert cached("oak") == 0
