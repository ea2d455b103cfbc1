// Row-wise ops on fp32 activations: what their kernels are told, and the tables of kernels.
#pragma once
#include <cmath>

#include "runtime.h"

namespace banyan {

// Strides are in elements, between tokens; what lies inside a token is contiguous.
struct NormArgs {
  const float* x;         // [n, heads, dim]
  const float* residual;  // [n, dim] or null: x + residual is normalised
  const float* weight;    // [dim]
  const float* bias;      // [dim] or null
  float* out;             // [n, heads, dim], contiguous
  float* total;           // [n, dim], contiguous: x + residual
  int64_t x_stride, residual_stride, dim;
  int32_t heads;
  float eps;
};

struct MapArgs {
  const float* x;  // [n, dim]
  const float* y;  // [n, dim]; null where the op has one input
  float* out;      // [n, dim]
  int64_t x_stride, y_stride, out_stride, dim;
  float scale, soft_cap;
  int32_t size;
  int32_t pieces = 1;       // equal parts of a row, each with a number of y
  float limit = INFINITY;  // of a gated unit: the gate is at most that, the up to either side
};

struct RotaryArgs {
  const float* x;              // [n, heads, dim]
  const float *cosine, *sine;  // [n, pairs], contiguous
  float* out;                  // [n, heads, dim], contiguous
  int64_t x_stride;
  int32_t heads, dim, pairs;
};

struct AngleArgs {
  const int64_t* positions;  // [n]
  const float* frequencies;  // [pairs]
  float *cosine, *sine;      // [n, pairs]
  int32_t pairs;
  float magnitude;
  const int32_t* shifts;  // [n, num_axes] or null: what each axis adds to the position
  const int32_t* axes;    // [pairs], axis of each pair
  int32_t num_axes;
};

struct TakeArgs {
  const float* x;        // [n, dim]
  const int32_t* where;  // [n], row of `rows` that x takes; negative = none
  const float* rows;     // [any, dim]
  float* out;            // [n, dim], contiguous
  int64_t x_stride, rows_stride, dim;
  int32_t adds;  // the row is added to x instead of replacing it
};

struct SelectArgs {
  const float* x;     // [any, dim]
  const void* index;  // [n] int32 or int64, rows of x
  float* out;         // [n, dim], contiguous
  int64_t x_stride, dim;
  int32_t is_wide;  // the index is int64
};

struct SpreadArgs {
  const float* x;          // [n, dim]
  const int64_t* columns;  // [dim], where each column of x goes
  float* out;              // [n, width], contiguous
  int64_t x_stride, dim, width;
};

struct RowKernels {
  Kernel rms_norm, layer_norm, rotary, rotary_angles, select_rows, take_rows, spread_columns, copy,
      add, silu_and_mul, gelu_and_mul, gelu_tanh_and_mul, gelu_tanh, sigmoid_scale, scale_logits;
};

extern const RowKernels rows_base, rows_avx2, rows_avx512;

}  // namespace banyan
