"""The budget of the house, by reading the source: import arrows, sizes, and words that must not
occur. Runs first, in milliseconds, and imports nothing of what it reads."""

import ast
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "banyan"

RULES = "lora.rules moe.rules dp_attention.rules disaggregation.rules"
"""Modules that check flags. They lie in the folder of their subject and belong to `config`."""
LORA_FILES = "lora.adapter_config lora.adapter_files"
ARROWS = {
    "base": "",
    "formats": "base",
    "families": "base model_config.model_config model_config.checkpoint_fields",
    "model_config": "base formats families config.schema config.env hub.sources",
    "hub": "base formats families model_config config.schema config.env",
    "config": f"base formats families model_config hub ascend.variables {RULES}",
    "messages": "base",
    "kv_cache": "base config model_config messages.plan disaggregation.peer_pages",
    "grammar": "base messages.requests",
    "scheduler": "base config messages kv_cache grammar"
    " lora.scheduling disaggregation.scheduling pipeline.micro_batches",
    "engine": "base config formats model_config messages scheduler kv_cache grammar"
    " lora.adapter_files lora.scheduling lora.rules"
    " disaggregation.scheduling disaggregation.peer_pages dp_attention.step_clock"
    " pipeline.micro_batches",
    "sim": "base config model_config messages kv_cache scheduler grammar.base"
    " engine.core engine.journal engine.core_spec engine.snapshot",
    "tokenizer": "base config formats",
    "chat_template": "base tokenizer",
    "media": "base config.schema messages.spans model_config.media tokenizer.tokenizer",
    "requests": f"base config model_config messages media tokenizer {LORA_FILES}",
    "parsers": "base tokenizer requests",
    "engine_client": "base config messages tokenizer requests",
    "bench": "base model_config messages tokenizer formats",
    "server": "base config model_config messages media tokenizer chat_template requests parsers"
    " engine_client formats hub.remote_instance scheduler.routing lora.adapter_files"
    " dp_attention.rules",
    "router": "base config scheduler.routing server.errors server.http",
    "platform": "base config.defaults config.env model_config.model_config",
    "ops": "platform base",
    "parallel": "platform ops base dp_attention.batch",
    "layers": "parallel ops platform.base base model_config.model_config"
    " lora.targets moe.expert_location"
    " moe.expert_watch",
    "models": "layers parallel model_config families formats ops base moe.layer",
    "kv_transfer": "base config messages",
    "runner": "base config model_config messages models layers parallel ops platform kv_transfer"
    " kv_cache.sizing formats.arrays lora.load lora.pool lora.slots moe.routing_record"
    " context_parallel pipeline.runner_stage dp_attention disaggregation.page_cutting",
    "lora": "base formats messages config model_config families hub ops layers models parallel"
    " platform moe.layer moe.rules runner.control_ops",
    "lora.scheduling": "base messages scheduler",
    "lora.rules": "base config model_config moe.rules",
    "moe": "base formats messages config model_config ops layers models parallel platform"
    " lora.targets lora.adapter_config dp_attention.batch runner.control_ops runner.batch",
    "moe.rules": "base config model_config",
    "dp_attention": "base messages config model_config ops",
    "dp_attention.network_clock": "base messages engine.multi_node",
    "dp_attention.remote_engines": "base messages config model_config engine",
    "context_parallel": "base config model_config ops layers parallel runner dp_attention.batch",
    "pipeline.micro_batches": "base messages scheduler",
    "pipeline.runner_stage": "base messages parallel runner",
    "disaggregation": "base config messages kv_transfer",
    "disaggregation.rules": "base config model_config",
    "disaggregation.peer_pages": "base messages kv_cache",
    "disaggregation.scheduling": "base messages kv_cache scheduler",
    "ascend": "base config model_config platform ops parallel disaggregation kv_transfer",
}
"""What a package, or a module of a subject's folder, may import besides its own folder. The longest
name counts."""
SHELVES = {
    "server": {
        "store": "errors",
        "tool_servers": "errors",
        "http": "errors",
        "openai": "errors state http store",
        "sglang": "errors state http openai",
        "responses": "errors state http openai store tool_servers",
        "anthropic": "errors state http openai",
        "ollama": "errors state http openai embeddings",
        "admin": "errors state http openai embeddings",
        "console": "state http",
        "grpc": "errors state http sglang embeddings admin",
        "lifecycle": "state listeners http admin batches tool_servers",
    },
}
"""Folder -> its sub-folder -> what else of the folder that one may import."""
DOORS = ("server/anthropic/", "server/ollama/")
"""Routes in the words of another API. They only translate: what runs is a chat request's plan."""
DOOR_IMPORTS = (
    *("base.errors", "base.json_types", "server", "chat_template.template"),
    "parsers.answer_deltas",
    "requests.embeddings",
    *("requests.request_spec.RequestContext", "requests.request_spec.RequestSpec"),
    *(f"requests.generation.{name}" for name in ("run", "TextChunk", "Finish", "Usage")),
)
COMPOSITION_ROOTS = (
    *("cli", "llm.py", "config/prepare.py", "server/processes.py"),
    *("engine/core_process.py", "engine/model_loader.py"),
    *("engine/kv_transfer_setup.py", "engine/grammar_queue.py"),
    *("__main__.py", "check_env.py"),
    *("launch_server.py", "launch_router.py", "launch_lb.py"),
    *("bench_serving.py", "bench_one_batch.py", "bench_offline_throughput.py"),
)
NO_TORCH = (
    *("base", "formats", "config", "model_config", "hub", "families", "messages", "kv_cache"),
    *("scheduler", "engine", "grammar", "sim", "tokenizer", "chat_template", "media"),
    "requests",
    *("parsers", "engine_client", "server", "router", "ascend/launch", "lora/scheduling"),
    *("lora/rules", "lora/adapter_files", "moe/rules"),
    *("dp_attention/step_clock", "dp_attention/rules", "disaggregation", "pipeline/micro_batches"),
)
PURE = ("scheduler", "kv_cache", "lora/scheduling", "disaggregation/scheduling")
PURE += ("disaggregation/peer_pages", "pipeline/micro_batches")
DEVICE_WORDS = re.compile(r"\btorch\.(cuda|npu|xpu)\b|\btorch_npu\b|\btriton\b")
FORBIDDEN_IMPORTS = ("pickle", "cPickle", "dill", "marshal", "shelve", "cloudpickle")
FORBIDDEN_CALLS = ("eval", "exec", "torch.load", "yaml.load", "yaml.unsafe_load")
PRIVATE_WORDS = re.compile(
    r"/(?:work|home|root|tmp|Users)/[\w.]|\b(?:TODO|FIXME|XXX)\b|\b(?:the|this|my) brief\b"
    r"|\bissue #\d",
)
MAX_FILE_LINES, MAX_STATEMENTS, MAX_PUBLIC_METHODS, MAX_ARGUMENTS = 800, 60, 12, 8
MORE_PUBLIC_METHODS = {
    "Ops": 25,  # one method for each operator of models
    "Engine": 18,  # SGLang's offline interface
    "Library": 18,  # its compiled functions and what kernels ask of it
    "Launch": 18,  # facts that the rules of a start read
    "Group": 16,  # collectives, of tensors and of rows
    "EngineClient": 16,  # the link to one engine, as a server and a supervisor need it
    "DataParallelClient": 15,  # the same for several engines
    "StreamingText": 14,  # the verbs in which parsers are written
}
"""Classes above the limit, each with its number: none grows, and none joins."""
MIN_FILE_LINES = 80
SMALL_FILES = (
    *("bench_offline_throughput.py", "bench_one_batch.py", "bench_serving.py", "check_env.py"),
    *("launch_lb.py", "launch_router.py", "launch_server.py"),
    *("config/rules/execution.py", "disaggregation/rules.py"),
    "server/listeners.py",
    "tokenizer/detokenizer.py",
)
"""Commands under SGLang's module names, rules of a subject, a table, and a file that
readers look for by its name."""
MUTABLE_CALLS = ("list", "dict", "set", "bytearray", "deque", "defaultdict", "Counter", "Lock")
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)

Finding = tuple[int, str]
"""(line, what is wrong there)."""
Rule = Callable[[Path, ast.Module], Iterator[Finding]]


@cache
def sources(folder: Path) -> list[tuple[Path, ast.Module]]:
    files = sorted(folder.rglob("*.py"))
    return [(f, ast.parse(f.read_text(encoding="utf-8"), str(f))) for f in files]


def inside(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def room(path: Path) -> str:
    return inside(path).split("/")[0]


def is_in(path: Path, folders: tuple[str, ...]) -> bool:
    """Whether a file is one of these, or lies in one of these folders."""
    name = inside(path)
    return any(name in (f, f"{f}.py") or name.startswith(f"{f}/") for f in folders)


def obey(rule: Rule, folders: tuple[str, ...] | None = None) -> None:
    """Fail with file:line of everything that `rule` finds in these folders (None = all)."""
    found = [
        f"{path.relative_to(ROOT)}:{line}: {text}"
        for path, tree in sources(PACKAGE)
        if folders is None or is_in(path, folders)
        for line, text in rule(path, tree)
    ]
    assert not found, "\n" + "\n".join(found)


@cache
def nodes(tree: ast.AST) -> tuple[ast.AST, ...]:
    """All nodes of a tree, which every rule looks through."""
    return tuple(ast.walk(tree))


@cache
def imports(tree: ast.AST) -> tuple[tuple[int, str], ...]:
    """(line, dotted module or module.name) of every import, at any depth."""
    return tuple(_imports(tree))


def _imports(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in nodes(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            dots = "." * node.level
            names = [alias.name for alias in node.names]
            yield from ((node.lineno, f"{dots}{node.module or ''}.{name}") for name in names)


def dotted(node: ast.AST) -> str:
    """ "a.b.c" of names and attributes; "" of anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (front := dotted(node.value)):
        return f"{front}.{node.attr}"
    return ""


@cache
def is_under(name: str, allowed: str) -> bool:
    return name == allowed or name.startswith(allowed + ".")


def breaks_an_arrow(path: Path, tree: ast.Module) -> Iterator[Finding]:
    if is_in(path, COMPOSITION_ROOTS):
        return
    here = inside(path).removesuffix(".py").replace("/", ".")
    key = max((k for k in ARROWS if is_under(here, k)), key=len, default="")
    for line, name in imports(tree):
        if name.startswith("."):
            yield line, "relative import"
        if not is_under(name, "banyan") or inside(path) == "__init__.py":
            continue
        target = name.removeprefix("banyan.")
        if not key:
            yield line, f"{room(path)!r} has no arrows yet"
        elif not any(is_under(target, a) for a in (room(path), *ARROWS[key].split())):
            yield line, f"{key} may not import {target}"


def reaches_past_its_shelf(path: Path, tree: ast.Module) -> Iterator[Finding]:
    parts = inside(path).split("/")
    if len(parts) < 3:
        return
    here, shelf = parts[:2]
    if shelf not in SHELVES[here]:
        yield 1, f"shelf {shelf!r} of {here} has no arrows yet"
        return
    for line, name in imports(tree):
        target = name.removeprefix(f"banyan.{here}.")
        allowed = (shelf, *SHELVES[here][shelf].split())
        if target != name and not any(is_under(target, a) for a in allowed):
            yield line, f"{here}/{shelf} may not import {target}"


def does_more_than_translate(path: Path, tree: ast.Module) -> Iterator[Finding]:
    if not inside(path).startswith(DOORS):
        return
    for line, name in imports(tree):
        target = name.removeprefix("banyan.")
        if is_under(name, "banyan") and not any(is_under(target, a) for a in DOOR_IMPORTS):
            yield line, f"a route that only translates needs no {target}"


def imports_torch(path: Path, tree: ast.Module) -> Iterator[Finding]:
    if is_in(path, COMPOSITION_ROOTS):
        return
    for line, name in imports(tree):
        if name.split(".")[0] in ("torch", "transformers", "safetensors", "torch_npu"):
            yield line, f"{room(path)} may not import {name}"


def names_a_device(path: Path, tree: ast.Module) -> Iterator[Finding]:
    if room(path) in ("platform", "ops", "ascend"):
        return
    for line, name in imports(tree):
        if DEVICE_WORDS.search(name):
            yield line, f"{name} outside platform and ops"
    for node in nodes(tree):
        if isinstance(node, ast.Attribute) and DEVICE_WORDS.search(dotted(node)):
            yield node.lineno, f"{dotted(node)} outside platform and ops"


def compares_device_names(path: Path, tree: ast.Module) -> Iterator[Finding]:
    """Tables map names of devices to their traits; everybody else reads a trait."""
    for node in nodes(tree):
        if isinstance(node, ast.Compare):
            names = [
                dotted(part)
                for side in (node.left, *node.comparators)
                for part in (side.elts if isinstance(side, ast.Tuple) else [side])
            ]
            is_table = isinstance(node.ops[0], (ast.In, ast.NotIn)) and names[-1].isupper()
            if not is_table and any(re.search(r"\b(device|traits)\.name$", n) for n in names):
                yield node.lineno, f"compares {', '.join(filter(None, names))}: read a trait"


def names_a_test(path: Path, tree: ast.Module) -> Iterator[Finding]:
    for line, name in imports(tree):
        if is_under(name, "tests"):
            yield line, f"imports {name}"
    for node in nodes(tree):
        text = node.value if isinstance(node, ast.Constant) else None
        if isinstance(text, str) and re.fullmatch(r"tests(\.\w+)+(:\w+)?", text):
            yield node.lineno, f"names the module {text}"


def reads_the_environment(path: Path, tree: ast.Module) -> Iterator[Finding]:
    if inside(path) == "config/env.py":
        return
    words = ("os.environ", "os.getenv", "os.putenv", "os.environb")
    for line, name in imports(tree):
        if name in words:
            yield line, f"{name} outside config/env.py"
    for node in nodes(tree):
        if isinstance(node, ast.Attribute) and dotted(node) in words:
            yield node.lineno, f"{dotted(node)} outside config/env.py"


def is_not_deterministic(path: Path, tree: ast.Module) -> Iterator[Finding]:
    for line, name in imports(tree):
        if name.split(".")[0] in ("time", "random", "uuid", "secrets", "datetime", "threading"):
            yield line, f"imports {name}"
    for node in nodes(tree):
        if isinstance(node, ast.Call) and dotted(node.func) in ("id", "hash", "os.urandom"):
            yield node.lineno, f"{dotted(node.func)}() differs between runs"
        loops = (ast.For, ast.AsyncFor, ast.comprehension)
        if isinstance(node, loops) and is_set(node.iter):
            yield node.iter.lineno, "iterates over a set"
        if isinstance(node, ast.Call) and dotted(node.func) in ("list", "tuple", "iter"):
            yield from ((a.lineno, "orders a set") for a in node.args if is_set(a))


def is_set(node: ast.expr) -> bool:
    if isinstance(node, ast.BinOp):
        return is_set(node.left) or is_set(node.right)
    named = isinstance(node, ast.Call) and dotted(node.func) in ("set", "frozenset")
    return named or isinstance(node, (ast.Set, ast.SetComp))


def is_too_long(path: Path, tree: ast.Module) -> Iterator[Finding]:
    lines = len(path.read_text(encoding="utf-8").splitlines())
    if lines > MAX_FILE_LINES:
        yield lines, f"{lines} lines in a file, {MAX_FILE_LINES} are legal"
    for node in nodes(tree):
        if isinstance(node, FUNCTIONS) and node.name != "__init__":
            count = sum(isinstance(inner, ast.stmt) for inner in ast.walk(node)) - 1
            if count > MAX_STATEMENTS:
                yield node.lineno, f"{node.name} has {count} statements, {MAX_STATEMENTS} are legal"
        if isinstance(node, ast.ClassDef):
            methods = [child.name for child in node.body if isinstance(child, FUNCTIONS)]
            count = sum(not name.startswith("_") for name in methods)
            if count > MORE_PUBLIC_METHODS.get(node.name, MAX_PUBLIC_METHODS):
                yield node.lineno, f"{node.name} has {count} public methods"
            for child in node.body:
                if isinstance(child, ast.FunctionDef) and child.name == "__init__":
                    count = len(child.args.args) + len(child.args.kwonlyargs) - 1
                    if count > MAX_ARGUMENTS:
                        yield child.lineno, f"{node.name}() takes {count} arguments"


@cache
def importers() -> dict[str, set[Path]]:
    """Dotted name -> the files of the package that import it, as a module or for a part of it."""
    found: dict[str, set[Path]] = {}
    for path, tree in sources(PACKAGE):
        for _, name in imports(tree):
            for module in (name, name.rpartition(".")[0]):
                found.setdefault(module, set()).add(path)
    return found


@cache
def table_rows() -> frozenset[str]:
    """Names of modules in strings: rows of tables, entry points, commands of worker processes."""
    words = re.compile(r"[\w.}]*\.([a-z_0-9]+)\b|\b([a-z_0-9]+):[a-z_]+\b")
    texts = [(ROOT / "pyproject.toml").read_text(encoding="utf-8")]
    for _, tree in sources(PACKAGE):
        constants = (node.value for node in nodes(tree) if isinstance(node, ast.Constant))
        texts += [value for value in constants if isinstance(value, str) and len(value) < 200]
    return frozenset(name for text in texts for pair in words.findall(text) for name in pair)


def belongs_to_its_user(path: Path, tree: ast.Module) -> Iterator[Finding]:
    """A small module without a second importer that no table names."""
    lines = len(path.read_text(encoding="utf-8").splitlines())
    if lines >= MIN_FILE_LINES or path.name.startswith("__") or inside(path) in SMALL_FILES:
        return
    name = "banyan." + inside(path).removesuffix(".py").replace("/", ".")
    users = importers().get(name, set()) - {path}
    if len(users) < 2 and path.stem not in table_rows():
        yield lines, f"{lines} lines, used by {len(users)} modules: move it to its user"


def packs_arguments(path: Path, tree: ast.Module) -> Iterator[Finding]:
    """`f(*(a, b))`: a reader cannot match such arguments to parameters."""
    for node in nodes(tree):
        for argument in node.args if isinstance(node, ast.Call) else ():
            is_packed = isinstance(argument, ast.Starred)
            if is_packed and isinstance(argument.value, (ast.Tuple, ast.List)):
                yield argument.lineno, "arguments packed into a tuple"


def mixes_in(path: Path, tree: ast.Module) -> Iterator[Finding]:
    for node in nodes(tree):
        if isinstance(node, ast.ClassDef) and node.name.lower().endswith("mixin"):
            yield node.lineno, node.name


MUTATORS = ("append", "extend", "add", "update", "insert", "pop", "setdefault", "clear", "remove")


def holds_module_state(path: Path, tree: ast.Module) -> Iterator[Finding]:
    """A container under an UPPER_CASE name is a constant as long as nothing changes it."""
    literals = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp)
    constants: list[str] = []
    for node in tree.body:
        if not isinstance(node, (ast.Assign, ast.AnnAssign)) or node.value is None:
            continue
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        names = [t.id for t in targets if isinstance(t, ast.Name)]
        is_literal = isinstance(node.value, literals)
        called = dotted(node.value.func) if isinstance(node.value, ast.Call) else ""
        if all(re.fullmatch(r"_?[A-Z][A-Z0-9_]*", n) for n in names) and is_literal:
            constants += names
        elif (is_literal and names != ["__all__"]) or called.split(".")[-1] in MUTABLE_CALLS:
            yield node.lineno, f"mutable module-level {', '.join(names) or 'object'}"
    for node in nodes(tree):
        if isinstance(node, ast.Global):
            yield node.lineno, f"global {', '.join(node.names)}"
        changed = None
        if isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load):
            changed = node.value
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            changed = node.func.value if node.func.attr in MUTATORS else None
        if isinstance(changed, ast.Name) and changed.id in constants:
            yield node.lineno, f"changes the module-level {changed.id}"


def prints(path: Path, tree: ast.Module) -> Iterator[Finding]:
    if room(path) in ("cli", "ascend") or inside(path) in ("config/prepare.py", "__main__.py"):
        return
    for node in nodes(tree):
        if isinstance(node, ast.Call) and dotted(node.func) == "print":
            yield node.lineno, "print outside cli/"


def runs_foreign_code(path: Path, tree: ast.Module) -> Iterator[Finding]:
    for line, name in imports(tree):
        if name.split(".")[0] in FORBIDDEN_IMPORTS:
            yield line, f"imports {name}"
    for node in nodes(tree):
        if isinstance(node, ast.Call) and dotted(node.func) in FORBIDDEN_CALLS:
            yield node.lineno, f"calls {dotted(node.func)}"


def speaks_of_another_world(path: Path, tree: ast.Module) -> Iterator[Finding]:
    if inside(path).startswith("config/flags") or path == Path(__file__):
        return
    for number, text in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        found = PRIVATE_WORDS.search(text)
        if found:
            yield number, f"{found.group()!r}"


def swallows_errors(path: Path, tree: ast.Module) -> Iterator[Finding]:
    for node in nodes(tree):
        if isinstance(node, ast.ExceptHandler):
            is_broad = node.type is None or dotted(node.type) in ("Exception", "BaseException")
            if is_broad and all(isinstance(s, (ast.Pass, ast.Continue)) for s in node.body):
                yield node.lineno, "a broad except that does nothing"


def cannot_fail(path: Path, tree: ast.Module) -> Iterator[Finding]:
    """Tests that assert a constant, or nothing at all (calls may assert: kits and raises do)."""
    for node in nodes(tree):
        if isinstance(node, ast.Assert) and isinstance(node.test, ast.Constant) and node.test.value:
            yield node.lineno, "asserts a constant"
        is_test = isinstance(node, FUNCTIONS) and node.name.startswith("test_")
        if is_test and not any(isinstance(n, (ast.Assert, ast.Call)) for n in ast.walk(node)):
            yield node.lineno, f"{node.name} checks nothing"


def test_imports_follow_the_arrows() -> None:
    obey(breaks_an_arrow)


def test_the_shelves_of_the_front_have_an_order() -> None:
    obey(reaches_past_its_shelf, tuple(SHELVES))


def test_other_apis_are_translated_to_chat_and_run_nothing_of_their_own() -> None:
    obey(does_more_than_translate)


def test_control_rooms_and_the_front_door_have_no_torch() -> None:
    obey(imports_torch, NO_TORCH)


def test_devices_are_named_in_platform_and_ops_only() -> None:
    obey(names_a_device)


def test_no_device_is_recognised_by_its_name() -> None:
    obey(compares_device_names)


def test_the_package_names_no_module_of_the_tests() -> None:
    obey(names_a_test)


def test_the_environment_is_read_in_one_file() -> None:
    obey(reads_the_environment)


def test_scheduler_and_memory_depend_on_their_inputs_only() -> None:
    obey(is_not_deterministic, PURE)


def test_files_functions_and_classes_stay_small() -> None:
    obey(is_too_long)


def test_small_modules_have_two_users_or_a_row_in_a_table() -> None:
    obey(belongs_to_its_user)


def test_arguments_are_written_one_by_one() -> None:
    obey(packs_arguments)


def test_nothing_is_mixed_in() -> None:
    obey(mixes_in)


def test_modules_hold_no_mutable_state() -> None:
    obey(holds_module_state)


def test_only_the_command_line_prints() -> None:
    obey(prints)


def test_no_bytes_become_code() -> None:
    obey(runs_foreign_code)


def test_errors_are_not_swallowed() -> None:
    obey(swallows_errors)


def test_the_project_speaks_of_itself_alone() -> None:
    obey(speaks_of_another_world)


def test_every_test_can_fail() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {text}"
        for path, tree in sources(ROOT / "tests")
        for line, text in cannot_fail(path, tree)
    ]
    assert not found, "\n" + "\n".join(found)


def test_the_control_room_and_the_server_start_without_torch() -> None:
    modules = [
        m
        for m in (
            "scheduler.scheduler",
            "kv_cache.cache",
            "engine.core",
            "server.http.app",
            "sim.world",
        )
        if (PACKAGE / (m.replace(".", "/") + ".py")).exists()
    ]
    imported = "; ".join(f"import banyan.{m}" for m in modules)
    code = f"import sys; {imported}; sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr or f"one of {modules} imports torch"
