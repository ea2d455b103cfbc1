// What the sampling kernels of all instruction sets share: their arguments and their table.
#pragma once
#include "runtime.h"

namespace banyan {

// How one row is sampled; PARAMS of ops/sampling.py, field by field.
struct RowParams {
  int64_t prompt_len;
  double temperature;
  int64_t top_k;
  double top_p;
  double min_p;
  uint64_t seed;
  int64_t min_new;
  double frequency;
  double presence;
  double repetition;
  uint8_t greedy;
  uint8_t penalised;
  uint8_t biased;
};
static_assert(sizeof(RowParams) == 88, "PARAMS of ops/sampling.py has 88 bytes");

struct SampleArgs {
  const float* logits;  // [rows, vocab]
  int64_t stride;
  int64_t vocab;
  const RowParams* params;   // [slots]
  const int64_t* positions;  // [rows], where the token goes
  const int64_t* slots;      // [rows], entries of `params` and `history`
  int32_t* history;          // tokens of every slot; the chosen one is entered
  int64_t history_stride;
  const uint8_t* masks;  // [masked rows, mask_bytes], bit i = token i is allowed
  const int32_t* mask_of;  // [rows], -1 = none
  int64_t mask_bytes;
  const int64_t* addends;  // [rows + 1], part of the two arrays below; null = no row has any
  const int32_t* addend_ids;
  const float* addend_values;
  int64_t* tokens;  // [rows], 0 for a row that cannot be chosen from
  float* best;      // [rows], the largest logit; NaN if any is
  int32_t size;
};

struct LogprobArgs {
  const float* logits;
  int64_t stride;
  int64_t vocab;
  const int64_t* rows;         // [entries], row of the logits
  const double* temperatures;  // [entries]
  const int64_t* tokens;       // [entries]
  int64_t top;
  const int64_t* picked;  // [entries, num_picked]
  int64_t num_picked;
  float* logprobs;         // [entries]
  int32_t* top_ids;        // [entries, top]
  float* top_logprobs;     // [entries, top]
  float* picked_logprobs;  // [entries, num_picked]
  int32_t size;
};

struct SampleKernels {
  Kernel sample;
  Kernel logprobs;
};
extern const SampleKernels sample_base, sample_avx2, sample_avx512;

}  // namespace banyan
