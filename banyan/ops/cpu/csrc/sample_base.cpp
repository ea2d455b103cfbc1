#include "sample.inl"

namespace banyan {
extern const SampleKernels sample_base = KERNELS;
}
