// Ops of layers that keep a running state: what their kernels are told, and the tables of kernels.
//
// A page holds one state. Tokens of a row are taken in one after another, in one order of sums for
// prompts and for decoding alike, so where a prompt is cut changes no bit. Rows at position 0 begin
// with zeros and do not read their page. Channels of a convolution, and the columns (value
// dimensions) of a scan, know nothing of each other: they are what threads share out.
#pragma once
#include "runtime.h"

namespace banyan {

constexpr int MAX_TAPS = 16;

// Strides are in elements: between tokens, of `pages` between rows.
struct StateRows {
  const int32_t *pages, *row_starts, *context_lengths;
  int64_t pages_stride;
  const int32_t* trails;  // [rows, 2]: first page of a row's trail, and its pages; or null
};

// Where the state after token `t` of a row is kept as well, -1 = nowhere: the last tokens but one
// may turn out to be wrong.
inline int64_t trail_page(const StateRows& rows, int64_t row, int64_t t) {
  if (!rows.trails) return -1;
  int64_t place = t - (rows.row_starts[row + 1] - 1 - rows.trails[2 * row + 1]);
  return place < 0 || place >= rows.trails[2 * row + 1] ? -1 : rows.trails[2 * row] + place;
}

struct ConvArgs {
  StateRows rows;
  const float* x;       // [tokens, channels]
  const float* weight;  // [taps, channels]
  const float* bias;    // [channels] or null
  float* out;           // [tokens, channels], contiguous
  float* last_inputs;   // [pages, taps - 1, channels]
  int64_t x_stride;
  int32_t channels, taps, has_silu;
};

struct ScanArgs {
  StateRows rows;
  const float *q, *k;            // [tokens, heads / shared, key_dim]
  const float* v;                // [tokens, heads, value_dim]
  const float *kept, *strength;  // [tokens, heads]; of kept in *_keys [tokens, heads, key_dim]
  const float* skip;             // [heads] or null
  float* out;                    // [tokens, heads, value_dim], contiguous
  void* states;                  // [pages, heads, key_dim, value_dim], fp32 or bf16
  int64_t q_stride, k_stride, v_stride, strength_stride;
  int32_t heads, shared, key_dim, value_dim, is_bf16;
};

// Its state is one matrix, whose columns are channels.
struct SelectiveArgs {
  StateRows rows;
  const float *q, *k;     // [tokens, key_dim]
  const float *v, *step;  // [tokens, channels]
  const float* rate;      // [key_dim, channels]
  const float* skip;      // [channels]
  float* out;             // [tokens, channels], contiguous
  void* states;           // [pages, key_dim, channels], fp32 or bf16
  int64_t q_stride, k_stride, v_stride, step_stride;
  int32_t channels, key_dim, is_bf16;
};

struct DecayArgs {
  const float* x;             // [n, dim]
  const float *bias, *rate;   // [dim]
  float *step, *kept;         // [n, dim], contiguous
  int64_t x_stride, dim;
  float low, high;
};

struct GateArgs {
  const float *x, *gate;  // [n, dim]
  float* out;             // [n, dim], contiguous
  int64_t x_stride, gate_stride, dim;
};

constexpr int NUM_CURVES = 4;  // the gate itself, silu, sigmoid, relu

struct StateKernels {
  Kernel conv, scan, delta, scan_keys, delta_keys, selective, decay, gates[NUM_CURVES];
};

extern const StateKernels state_base, state_avx2, state_avx512;

}  // namespace banyan
