#include "probe.inl"

namespace banyan {
const ProbeKernels probe_base = {products, small_products, pair_products, read_all};
}
