// Builder of the ops of low-rank adapters, and what checks their kernels.
#include "adapters.h"

#include <cmath>
#include <cstdio>
#include <vector>

using namespace banyan;

namespace {

const AdapterKernels& table_of(int32_t level) {
#ifdef BN_ADAPTERS_AVX512
  if (level >= AVX512) return adapters_avx512;
#endif
#ifdef BN_ADAPTERS_AVX2
  if (level >= AVX2) return adapters_avx2;
#endif
  (void)level;
  return adapters_base;
}

constexpr int INPUTS = 37, OUTPUTS_OF = 75, RANK = 11;  // whole vectors and a rest, rows too

// What a table of kernels adds to the outputs of one token.
std::vector<float> outcome(const AdapterKernels& kernels) {
  std::vector<float> x(INPUTS), down(RANK * INPUTS), up(RANK * OUTPUTS_OF), out(OUTPUTS_OF, 1.0f);
  std::vector<float> scales(RANK, 0.5f), inner(RANK);
  for (size_t i = 0; i < x.size(); i++) x[i] = std::sin(1.7f * (float)i);
  for (size_t i = 0; i < down.size(); i++) down[i] = std::cos(0.9f * (float)i);
  for (size_t i = 0; i < up.size(); i++) up[i] = std::sin(0.3f * (float)i);
  AdapterPair pair{down.data(), up.data(), scales.data(), RANK, ADAPTER_FP32,
                   {{0, OUTPUTS_OF, 0, RANK}}};
  const int32_t pieces[] = {1, 0, 0, 1}, order[] = {0};
  AdapterArgs args{&pair,        pieces, order,      x.data(), out.data(),
                   inner.data(), INPUTS, OUTPUTS_OF, INPUTS,   RANK};
  Sizes sizes{{1, 1, 1}};
  Worker worker;
  worker.index = 0, worker.count = 1;
  for (const Kernel* kernel : {&kernels.shrink, &kernels.expand})
    kernel->run(&args, sizes, 0, kernel->units(&args, sizes), worker);
  return out;
}

}  // namespace

// Whether an instruction set computes what the plain code does; 1 and the reason when not.
BN_EXPORT int bn_check_adapters(int32_t isa, char* why, int32_t room) {
  std::vector<float> expected = outcome(adapters_base), found = outcome(table_of(isa));
  for (size_t i = 0; i < found.size(); i++)
    if (!(std::fabs(found[i] - expected[i]) <= 1e-4f * (1.0f + std::fabs(expected[i])))) {
      std::snprintf(why, room, "adapters give %g for %g", found[i], expected[i]);
      return 1;
    }
  return 0;
}

// Adds to the rows of `out` what the adapters of their tokens make of the rows of `x`.
BN_EXPORT void bn_adapters(Program* program, int32_t size, const void* table, const int32_t* pieces,
                           const int32_t* order, const float* x, int64_t x_stride, float* out,
                           int64_t out_stride, float* inner, int64_t inputs, int64_t width) {
  (void)size;
  const AdapterKernels& kernels = table_of(isa());
  AdapterArgs args{(const AdapterPair*)table, pieces, order, x, out, inner, x_stride, out_stride,
                   inputs, width};
  append(program, kernels.shrink, &args, sizeof args, NOT_ROW_WISE);
  append(program, kernels.expand, &args, sizeof args, NOT_ROW_WISE);
}
