"""Runs beside the real torch_npu: tells its schemas and what its meta kernels give, as JSON."""

import json
import sys

import torch


def main() -> None:
    import torch_npu  # noqa: F401  registers the operators

    from tests.emulation.real.calls import results

    schemas = [s for s in torch._C._jit_get_all_schemas() if s.name.startswith(("npu::", "atb::"))]
    told = {
        "schemas": sorted({str(schema) for schema in schemas}),
        "results": results(lambda tensor: tensor.to("meta")),
    }
    sys.stdout.write("\n" + json.dumps(told))


if __name__ == "__main__":
    main()
