#include "probe.inl"

namespace banyan {
const ProbeKernels probe_avx2 = {products, small_products, pair_products, read_all};
}
