"""In programs of their own: torch is imported once in a process."""

import subprocess
import sys
from pathlib import Path

PART = "torch._meta_registrations"
SHAPE = "torch.nn.functional.scaled_dot_product_attention(*[torch.empty(1, 2, 3, 4)] * 3)"
"""An op whose shape on the meta device is among what is left out."""
LEFT_OUT = "[n for n in parts._PARTS if n not in sys.modules]"


def run(*lines: str) -> str:
    first = (
        "import sys",
        "import banyan.base.torch_parts as parts",
        "from banyan.base.torch_parts import complete_torch, without_parts",
    )
    done = subprocess.run(
        [sys.executable, "-c", "\n".join([*first, *lines])], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def on_meta() -> str:
    return f"with torch.device('meta'): print(tuple({SHAPE}.shape))"


def test_torch_computes_without_its_parts_and_they_can_be_brought() -> None:
    """In the installed release, which is a tried one."""
    output = run(
        "import linecache",
        "with without_parts(): import torch",
        f"print({LEFT_OUT} == [*parts._PARTS], linecache.cache)",  # no text of files stays
        f"print(tuple({SHAPE}.shape))",
        "print(tuple((torch.empty(4, 5, device='meta') @ torch.empty(5, 6, device='meta')).shape))",
        "try:",
        f"    {on_meta()}",
        "except NotImplementedError: print('none')",
        "complete_torch()",
        f"print({LEFT_OUT})",
        on_meta(),
        "print(torch.compile(lambda x: x.cumsum(0) + 1, backend='aot_eager')(torch.ones(2)))",
        "print(torch.distributions.Normal(0., 1.).mean, torch.nn.quantized.Linear.__name__)",
    )
    before, after = output.splitlines()[:4], output.splitlines()[4:]
    assert before == ["True {}", "(1, 2, 3, 4)", "(4, 6)", "none"]
    assert after == ["[]", "(1, 2, 3, 4)", "tensor([2., 3.])", "tensor(0.) Linear"]


def test_who_asks_for_a_part_gets_it() -> None:
    output = run(
        "with without_parts():",
        "    import torch",
        "    from torch._meta_registrations import meta_table",
        f"print({PART!r} in sys.modules)",
        on_meta(),
        "print(float(torch.distributions.Normal(2., 1.).mean))",
        "import torch.utils.data.dataset",
        "print(torch.utils.data.dataset.Dataset is torch.utils.data.Dataset)",
        "from torch.export import *",
        "print(callable(export), torch.export.export is export)",
    )
    assert output.splitlines() == ["True", "(1, 2, 3, 4)", "2.0", "True", "True True"]


def test_what_is_left_out_computes_when_it_is_asked() -> None:
    output = run(
        "with without_parts(): import torch",
        "two = torch.ones(2, requires_grad=True)",
        "print(float(torch.linalg.norm(torch.ones(4))))",
        "print(torch.fft.fft(torch.ones(2)).real.tolist())",
        "print(torch.sparse.mm(torch.eye(2).to_sparse(), torch.ones(2, 1)).sum().item())",
        "print(torch.autograd.functional.vjp(lambda x: x * x, two, two)[0].tolist())",
        "with torch.autograd.profiler.record_function('sum'): two + two",
        "print(torch.compiler.is_compiling(), torch.xpu.is_available())",
        "with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH): pass",
        "print(torch.optim.SGD.__name__)",
    )
    assert output.splitlines() == ["2.0", "[2.0, 0.0]", "2.0", "[1.0, 1.0]", "False False", "SGD"]


def test_a_part_that_this_version_of_torch_does_not_have_stays_away() -> None:
    output = run(
        "parts._PARTS += ('torch.banyan',)",
        "with without_parts(): import torch",
        "complete_torch()",
        "try: import torch.banyan",
        "except ModuleNotFoundError as error: print(error.name)",
    )
    assert output == "torch.banyan"


def test_nothing_is_left_out_where_torch_imports_packages_for_other_devices() -> None:
    output = run(
        "from types import SimpleNamespace",
        "one = SimpleNamespace(name='theirs', load=lambda: (lambda: None))",
        "parts.entry_points = lambda group: [one]",
        "with without_parts(): import torch",
        f"print({LEFT_OUT})",
    )
    assert output == "[]"


def test_code_that_is_not_ours_finds_all_of_torch(tmp_path: Path) -> None:
    (tmp_path / "theirs.py").write_text(
        "import torch\n"
        f"with torch.device('meta'): shape = tuple({SHAPE}.shape)\n"
        "def act(): return shape\n"
    )
    output = run(
        "with without_parts(): import torch",
        "from banyan.base.table import load_named",
        f"sys.path.insert(0, {str(tmp_path)!r})",
        "print(load_named('--x', 'theirs:act', 'nowhere')())",
    )
    assert output == "(1, 2, 3, 4)"


def test_where_torch_is_not_loaded_it_is_not_loaded_for_that() -> None:
    assert run("complete_torch()", "print('torch' in sys.modules)") == "False"


def test_an_untried_release_is_imported_whole() -> None:
    found = run(
        "parts.TRIED_RELEASES = ('0.1',)",
        "with without_parts(): import torch",
        f"print({LEFT_OUT})",
    )
    assert found == "[]"
