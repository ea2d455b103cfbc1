// Sampling and log-probabilities: the entry points, and the choice of the instruction set.
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "sample.h"

namespace banyan {
namespace {

const SampleKernels& kernels(Isa level) {
#ifdef BN_SAMPLE_AVX512
  if (level >= AVX512) return sample_avx512;
#endif
#ifdef BN_SAMPLE_AVX2
  if (level >= AVX2) return sample_avx2;
#endif
  (void)level;
  return sample_base;
}

}  // namespace
}  // namespace banyan

using namespace banyan;

BN_EXPORT void bn_sample(Program* program, int32_t size, const float* logits, int64_t stride,
                         int64_t vocab, const void* params, const int64_t* positions,
                         const int64_t* slots, int32_t* history, int64_t history_stride,
                         const uint8_t* masks, const int32_t* mask_of, int64_t mask_bytes,
                         const int64_t* addends, const int32_t* addend_ids,
                         const float* addend_values, int64_t* tokens, float* best) {
  SampleArgs args = {logits,  stride,     vocab,         (const RowParams*)params,
                     positions, slots,    history,       history_stride,
                     masks,   mask_of,    mask_bytes,    addends,
                     addend_ids, addend_values, tokens,  best,
                     size};
  append(program, kernels(isa()).sample, &args, sizeof args, size);
}

BN_EXPORT void bn_logprobs(Program* program, int32_t size, const float* logits, int64_t stride,
                           int64_t vocab, const int64_t* rows, const double* temperatures,
                           const int64_t* tokens, int64_t top, const int64_t* picked,
                           int64_t num_picked, float* logprobs, int32_t* top_ids,
                           float* top_logprobs, float* picked_logprobs) {
  LogprobArgs args = {logits,     stride,   vocab,   rows,         temperatures,    tokens, top,
                      picked,     num_picked, logprobs, top_ids, top_logprobs, picked_logprobs,
                      size};
  append(program, kernels(isa()).logprobs, &args, sizeof args, size);
}

// Every filter on a few rows of made-up logits: the tokens and values of `isa` are those of BASE.
BN_EXPORT int bn_check_sample(int32_t isa, char* why, int32_t room) {
  constexpr int64_t ROWS_N = 6, VOCAB = 1337, TOP = 5;
  static const double top_p[ROWS_N] = {1.0, 0.9, 1.0, 0.7, 1.0, 0.99};
  static const int64_t top_k[ROWS_N] = {-1, -1, 20, 400, -1, -1};
  float logits[VOCAB];
  int64_t positions[ROWS_N], slots[ROWS_N], scored[ROWS_N] = {1, 2, 3, 4, 5, 6};
  int32_t history[65], mask_of[ROWS_N];
  uint8_t mask[(VOCAB + 7) / 8];
  double temperatures[ROWS_N];
  RowParams params[ROWS_N];
  uint32_t state = 1;
  auto next = [&] { return (state = state * 1664525u + 1013904223u) >> 8; };
  for (float& x : logits) x = (float)(next() % 4096) / 256.0f - 8.0f;
  for (int32_t& t : history) t = (int32_t)(next() % VOCAB);
  for (uint8_t& bits : mask) bits = (uint8_t)next();
  for (int64_t r = 0; r < ROWS_N; r++) {
    temperatures[r] = 0.5 + 0.25 * (double)r;
    params[r] = {10, temperatures[r], top_k[r], top_p[r], r == 4 ? 0.05 : 0.0, (uint64_t)r,
                 0,  0.25,            0.5,      1.25,     0, (uint8_t)(r % 2), 0};
    positions[r] = 64;
    slots[r] = r;
    mask_of[r] = r == 5 ? 0 : -1;
  }
  struct Outcome {
    int64_t tokens[ROWS_N];
    float best[ROWS_N], logprobs[ROWS_N], top_logprobs[ROWS_N * TOP], picked[ROWS_N];
    int32_t top_ids[ROWS_N * TOP];
  } outcomes[2];
  Worker worker{};
  const Isa levels[2] = {BASE, (Isa)isa};
  for (int i = 0; i < 2; i++) {
    Outcome& out = outcomes[i];
    std::memset(&out, 0, sizeof out);
    Sizes sizes = {{1, 1, 1}};
    SampleArgs sample = {logits, 0,       VOCAB,       params,  positions, slots,
                         history, 0,      mask,        mask_of, sizeof mask, nullptr,
                         nullptr, nullptr, out.tokens, out.best, TOKENS};
    kernels(levels[i]).sample.run(&sample, sizes, 0, ROWS_N, worker);
    LogprobArgs score = {logits, 0,  VOCAB,        slots,       temperatures,     scored, TOP,
                         scored, 1,  out.logprobs, out.top_ids, out.top_logprobs, out.picked,
                         TOKENS};
    kernels(levels[i]).logprobs.run(&score, sizes, 0, ROWS_N, worker);
  }
  std::free(worker.scratch(0));
  if (!std::memcmp(&outcomes[0], &outcomes[1], sizeof(Outcome))) return 0;
  std::snprintf(why, room, "sampled tokens or log-probabilities differ from the plain code");
  return 1;
}
