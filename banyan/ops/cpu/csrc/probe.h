// Upper bounds of this machine, for reports that set a figure against what is possible.
#pragma once
#include "runtime.h"

namespace banyan {

struct ProbeKernels {
  double (*products)(int64_t rounds);        // fp32; returns the operations done
  double (*small_products)(int64_t rounds);  // 8 bits; 0 where the set has none
  double (*pair_products)(int64_t rounds);   // bf16; 0 where the set or the machine has none
  float (*read_all)(const float* data, int64_t count);
};
extern const ProbeKernels probe_base, probe_avx2, probe_avx512, probe_vnni, probe_amx;

}  // namespace banyan
