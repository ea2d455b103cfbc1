#include "sample.inl"

namespace banyan {
extern const SampleKernels sample_avx2 = KERNELS;
}
