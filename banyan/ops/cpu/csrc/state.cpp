// Builders of the ops on states: fill in the arguments and append the kernel of the instruction set.
#include "state.h"

#include <cmath>
#include <cstdio>
#include <vector>

using namespace banyan;

namespace {

const StateKernels& table_of(int32_t level) {
#ifdef BN_STATE_AVX512
  if (level >= AVX512) return state_avx512;
#endif
#ifdef BN_STATE_AVX2
  if (level >= AVX2) return state_avx2;
#endif
  (void)level;
  return state_base;
}
const StateKernels& table() { return table_of(isa()); }

// --- self-check ----------------------------------------------------------------------------------

constexpr int CHECK_TOKENS = 5, CHECK_HEADS = 2, CHECK_KEYS = 7, CHECK_VALUES = 19, CHECK_TAPS = 3;
constexpr int CHECK_WIDTH = CHECK_HEADS * CHECK_VALUES;

// What a kernel leaves of one fresh row of small numbers: its outputs, then its state.
enum Form { CONV, SCAN, SELECTIVE };
std::vector<float> outcome(const Kernel& kernel, Form form) {
  int32_t pages[] = {0}, starts[] = {0, CHECK_TOKENS}, contexts[] = {0};
  std::vector<float> x(CHECK_TOKENS * CHECK_WIDTH);
  std::vector<float> gates(CHECK_TOKENS * CHECK_HEADS * CHECK_KEYS, 0.75f);
  for (size_t i = 0; i < x.size(); i++) x[i] = std::sin(1.3f * (float)i);
  std::vector<float> out(x.size() + CHECK_KEYS * CHECK_WIDTH);
  StateRows rows{pages, starts, contexts, 1};
  float *results = out.data(), *state = results + x.size();
  ConvArgs conv{rows, x.data(), x.data(), x.data(), results, state, CHECK_WIDTH, CHECK_WIDTH,
                CHECK_TAPS, 1};
  ScanArgs scan{rows, x.data(), x.data() + 3, x.data(), gates.data(), gates.data(), gates.data(),
                results, state, CHECK_WIDTH, CHECK_WIDTH, CHECK_WIDTH, CHECK_HEADS, CHECK_HEADS, 1,
                CHECK_KEYS, CHECK_VALUES};
  std::vector<float> rate(CHECK_KEYS * CHECK_WIDTH, 0.4f);
  SelectiveArgs selective{rows, x.data(), x.data() + 3, x.data(), rate.data(), rate.data(),
                          x.data(), results, state, CHECK_WIDTH, CHECK_WIDTH, CHECK_WIDTH,
                          CHECK_WIDTH, CHECK_WIDTH, CHECK_KEYS};
  const void* args = form == CONV ? (const void*)&conv : form == SCAN ? (const void*)&scan : &selective;
  Sizes sizes{{CHECK_TOKENS, 1, 1}};
  Worker worker;
  worker.index = 0, worker.count = 1;
  kernel.run(args, sizes, 0, kernel.units(args, sizes), worker);
  return out;
}

}  // namespace

// Whether an instruction set computes what the plain code does; 1 and the reason when not.
BN_EXPORT int bn_check_state(int32_t isa, char* why, int32_t room) {
  constexpr Kernel StateKernels::* CHECKED[] = {&StateKernels::conv, &StateKernels::scan,
                                                &StateKernels::delta, &StateKernels::scan_keys,
                                                &StateKernels::delta_keys,
                                                &StateKernels::selective};
  for (Kernel StateKernels::* kernel : CHECKED) {
    Form form = kernel == &StateKernels::conv        ? CONV
                : kernel == &StateKernels::selective ? SELECTIVE
                                                     : SCAN;
    std::vector<float> expected = outcome(state_base.*kernel, form);
    std::vector<float> found = outcome(table_of(isa).*kernel, form);
    for (size_t i = 0; i < found.size(); i++)
      if (!(std::fabs(found[i] - expected[i]) <= 1e-4f * (1.0f + std::fabs(expected[i])))) {
        std::snprintf(why, room, "%s gives %g for %g", (state_base.*kernel).name, found[i],
                      expected[i]);
        return 1;
      }
  }
  return 0;
}

BN_EXPORT void bn_short_conv(Program* program, int32_t, const int32_t* pages, int64_t pages_stride,
                             const int32_t* row_starts, const int32_t* context_lengths,
                             const int32_t* trails, const float* x, int64_t x_stride,
                             const float* weight, const float* bias, float* out,
                             float* last_inputs, int32_t channels, int32_t taps,
                             int32_t has_silu) {
  ConvArgs args{{pages, row_starts, context_lengths, pages_stride, trails},
                x, weight, bias, out, last_inputs, x_stride, channels, taps, has_silu};
  append(program, table().conv, &args, sizeof args, NOT_ROW_WISE);
}

// by_key: kept has a number for each key dimension. strength: with has_delta what its sigmoid is taken of.
BN_EXPORT void bn_scan(Program* program, int32_t, const int32_t* pages, int64_t pages_stride,
                       const int32_t* row_starts, const int32_t* context_lengths,
                       const int32_t* trails, const float* q, int64_t q_stride, const float* k,
                       int64_t k_stride, const float* v, int64_t v_stride, const float* kept,
                       const float* strength, int64_t strength_stride, const float* skip,
                       float* out, void* states,
                       int32_t heads, int32_t shared, int32_t key_dim, int32_t value_dim,
                       int32_t has_delta, int32_t by_key, int32_t is_bf16) {
  ScanArgs args{{pages, row_starts, context_lengths, pages_stride, trails},
                q, k, v, kept, strength, skip, out, states, q_stride, k_stride, v_stride,
                strength_stride, heads, shared, key_dim, value_dim, is_bf16};
  const StateKernels& t = table();
  const Kernel& plain = has_delta ? t.delta : t.scan;
  const Kernel& keys = has_delta ? t.delta_keys : t.scan_keys;
  append(program, by_key ? keys : plain, &args, sizeof args, NOT_ROW_WISE);
}

BN_EXPORT void bn_selective_scan(Program* program, int32_t, const int32_t* pages,
                                 int64_t pages_stride, const int32_t* row_starts,
                                 const int32_t* context_lengths, const int32_t* trails,
                                 const float* q, int64_t q_stride, const float* k,
                                 int64_t k_stride, const float* v, int64_t v_stride,
                                 const float* step, int64_t step_stride,
                                 const float* rate, const float* skip, float* out, void* states,
                                 int32_t channels, int32_t key_dim, int32_t is_bf16) {
  SelectiveArgs args{{pages, row_starts, context_lengths, pages_stride, trails},
                     q, k, v, step, rate, skip, out, states, q_stride, k_stride, v_stride,
                     step_stride, channels, key_dim, is_bf16};
  append(program, table().selective, &args, sizeof args, NOT_ROW_WISE);
}

BN_EXPORT void bn_decay_gates(Program* program, int32_t size, const float* x, int64_t x_stride,
                              const float* bias, const float* rate, float* step, float* kept,
                              int64_t dim, float low, float high) {
  DecayArgs args{x, bias, rate, step, kept, x_stride, dim, low, high};
  append(program, table().decay, &args, sizeof args, size);
}

// x · curve(gate). curve: 0 the gate itself, 1 silu, 2 sigmoid, 3 relu.
BN_EXPORT void bn_apply_gate(Program* program, int32_t size, int32_t curve, const float* x,
                             int64_t x_stride, const float* gate, int64_t gate_stride, float* out,
                             int64_t dim) {
  GateArgs args{x, gate, out, x_stride, gate_stride, dim};
  append(program, table().gates[curve], &args, sizeof args, size);
}
