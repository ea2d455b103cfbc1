#include "probe.inl"

namespace banyan {
const ProbeKernels probe_avx512 = {products, small_products, pair_products, read_all};
}
