"""Runs beside the real torch_npu: tells its schemas, which operators have no meta kernels, and what
those of the others give, as JSON.

    python -m tests.ascend.emulation.real.ask [FOLDER]  # a package whose libraries are not loaded
"""

import json
import sys
from pathlib import Path

import torch

_has = torch._C._dispatch_has_kernel_for_dispatch_key
_FOR_META = ("Meta", "CompositeImplicitAutograd", "CompositeExplicitAutograd")


def main() -> None:
    if sys.argv[1:]:
        from tests.ascend.emulation.real.apart import register
        from tests.ascend.emulation.real.lists import declared

        packages = Path(sys.argv[1])
        kept = register(packages, declared(packages))
        assert kept.ns == "npu"
    else:
        import torch_npu  # noqa: F401  registers the operators

    from tests.ascend.emulation.exchange_cases import exchange_cases
    from tests.ascend.emulation.real.calls import called, results

    schemas = [s for s in torch._C._jit_get_all_schemas() if s.name.startswith(("npu::", "atb::"))]
    absent = [name for name in called() if not any(_has(name, key) for key in _FOR_META)]
    reported = {
        "absent": absent,
        "schemas": sorted({str(schema) for schema in schemas}),
        "results": results(lambda tensor: tensor.to("meta"), absent),
        "exchanges": results(lambda tensor: tensor.to("meta"), absent, exchange_cases),
    }
    sys.stdout.write("\n" + json.dumps(reported))


if __name__ == "__main__":
    main()
