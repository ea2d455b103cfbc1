"""In programs of their own: torch is imported once in a process."""

import subprocess
import sys
from pathlib import Path

PART = "torch._meta_registrations"
SHAPE = "torch.nn.functional.scaled_dot_product_attention(*[torch.empty(1, 2, 3, 4)] * 3)"
"""An op whose shape on the meta device is among what is left out."""


def run(*lines: str) -> str:
    first = (
        "import sys",
        "from banyan.base.torch_parts import complete_torch, without_meta_kernels",
    )
    done = subprocess.run(
        [sys.executable, "-c", "\n".join([*first, *lines])], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def on_meta() -> str:
    return f"with torch.device('meta'): print(tuple({SHAPE}.shape))"


def test_torch_computes_without_its_meta_kernels_and_they_can_be_brought() -> None:
    told = run(
        "with without_meta_kernels(): import torch",
        f"print({PART!r} in sys.modules, hasattr(torch, '_meta_registrations'))",
        f"print(tuple({SHAPE}.shape))",
        "print(tuple((torch.empty(4, 5, device='meta') @ torch.empty(5, 6, device='meta')).shape))",
        "try:",
        f"    {on_meta()}",
        "except NotImplementedError: print('none')",
        "complete_torch()",
        f"print({PART!r} in sys.modules)",
        on_meta(),
        "print(torch.compile(lambda x: x.cumsum(0) + 1, backend='aot_eager')(torch.ones(2)))",
    )
    before, after = told.splitlines()[:4], told.splitlines()[4:]
    assert before == ["False False", "(1, 2, 3, 4)", "(4, 6)", "none"]
    assert after == ["True", "(1, 2, 3, 4)", "tensor([2., 3.])"]


def test_whoever_asks_for_it_meanwhile_gets_it() -> None:
    told = run(
        "with without_meta_kernels():",
        "    import torch",
        "    from torch._meta_registrations import meta_table",
        f"print({PART!r} in sys.modules)",
        on_meta(),
    )
    assert told.splitlines() == ["True", "(1, 2, 3, 4)"]


def test_nothing_is_left_out_where_torch_imports_packages_for_other_devices() -> None:
    told = run(
        "import banyan.base.torch_parts as parts",
        "parts.entry_points = lambda group: [group]",
        "with without_meta_kernels(): import torch",
        f"print({PART!r} in sys.modules)",
    )
    assert told == "True"


def test_code_that_is_not_ours_finds_all_of_torch(tmp_path: Path) -> None:
    (tmp_path / "theirs.py").write_text(
        "import torch\n"
        f"with torch.device('meta'): shape = tuple({SHAPE}.shape)\n"
        "def act(): return shape\n"
    )
    told = run(
        "with without_meta_kernels(): import torch",
        "from banyan.base.named_code import load_named",
        f"sys.path.insert(0, {str(tmp_path)!r})",
        "print(load_named('--x', 'theirs:act', 'nowhere')())",
    )
    assert told == "(1, 2, 3, 4)"


def test_where_torch_is_not_loaded_it_is_not_loaded_for_that() -> None:
    assert run("complete_torch()", "print('torch' in sys.modules)") == "False"
