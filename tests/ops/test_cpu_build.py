"""Which compiler builds the CPU kernels."""

from banyan.ops.cpu.build import compilers


def test_a_named_compiler_goes_first() -> None:
    named = next(compilers("my-compiler -v"))
    assert named.words == ("my-compiler", "-v")
    assert all(compiler.name != "my-compiler" for compiler in compilers())
