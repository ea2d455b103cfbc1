// Builders of the row-wise ops: fill in the arguments and append the kernel of the instruction set.
//
// Shapes are those of ops/api.py; strides are in elements between tokens (see rows.h). `size` names
// which size of a step the leading dimension has.
#include "rows.h"

#include <cmath>
#include <cstdio>
#include <vector>

using namespace banyan;

namespace {

const RowKernels& table_of(int32_t level) {
#ifdef BN_ROWS_AVX512
  if (level >= AVX512) return rows_avx512;
#endif
#ifdef BN_ROWS_AVX2
  if (level >= AVX2) return rows_avx2;
#endif
  (void)level;
  return rows_base;
}
const RowKernels& table() { return table_of(isa()); }

template <class A>
void add_rows(Program* program, int32_t size, const Kernel& kernel, const A& args) {
  append(program, kernel, &args, sizeof args, size);
}

// --- self-check ----------------------------------------------------------------------------------

constexpr int CHECK_ROWS = 2, CHECK_DIM = 37;  // two vectors of the widest set, and a rest

struct CheckData {
  std::vector<float> x, y, out, total;
  CheckData()
      : x(CHECK_ROWS * CHECK_DIM * 2), y(CHECK_ROWS * CHECK_DIM), out(x.size()), total(x.size()) {
    for (size_t i = 0; i < x.size(); i++) x[i] = 4.0f * std::sin(1.7f * (float)i);
    for (size_t i = 0; i < y.size(); i++) y[i] = std::cos(0.9f * (float)i);
  }
};

// What one kernel leaves in `out` for the same small inputs.
std::vector<float> outcome(const RowKernels& kernels, Kernel RowKernels::* kernel) {
  CheckData d;
  NormArgs norm{d.x.data(),     nullptr,   d.y.data(), nullptr,   d.out.data(),
                d.total.data(), CHECK_DIM, CHECK_DIM,  CHECK_DIM, 1,
                1e-5f};
  RotaryArgs turn{d.x.data(), d.y.data(), d.y.data(), d.out.data(), CHECK_DIM, 1, CHECK_DIM, 17};
  MapArgs map{d.x.data(), d.y.data(), d.out.data(), CHECK_DIM, CHECK_DIM,
              CHECK_DIM,  CHECK_DIM,  1.5f,         3.0f,      TOKENS};
  const void* args = &map;
  if (kernel == &RowKernels::rms_norm || kernel == &RowKernels::layer_norm) args = &norm;
  if (kernel == &RowKernels::rotary) args = &turn;
  Worker worker;
  worker.index = 0, worker.count = 1;
  (kernels.*kernel).run(args, Sizes{{CHECK_ROWS, CHECK_ROWS, CHECK_ROWS}}, 0, CHECK_ROWS, worker);
  return d.out;
}

}  // namespace

// Whether an instruction set computes what the plain code does; 1 and the reason when not.
BN_EXPORT int bn_check_rows(int32_t isa, char* why, int32_t room) {
  constexpr Kernel RowKernels::* CHECKED[] = {
      &RowKernels::rms_norm,     &RowKernels::layer_norm,   &RowKernels::rotary,
      &RowKernels::silu_and_mul, &RowKernels::gelu_and_mul, &RowKernels::gelu_tanh_and_mul,
      &RowKernels::gelu_tanh,    &RowKernels::scale_logits, &RowKernels::add,
      &RowKernels::sigmoid_scale};
  for (Kernel RowKernels::* kernel : CHECKED) {
    std::vector<float> expected = outcome(rows_base, kernel);
    std::vector<float> found = outcome(table_of(isa), kernel);
    for (size_t i = 0; i < found.size(); i++)
      if (!(std::fabs(found[i] - expected[i]) <= 2e-5f * (1.0f + std::fabs(expected[i])))) {
        std::snprintf(why, room, "%s gives %g for %g", (rows_base.*kernel).name, found[i],
                      expected[i]);
        return 1;
      }
  }
  return 0;
}

// residual and total: 0 for the plain norm. heads > 1: x is [n, heads, dim], each head by itself.
BN_EXPORT void bn_rms_norm(Program* program, int32_t size, const float* x, int64_t x_stride,
                           const float* residual, int64_t residual_stride, const float* weight,
                           float* out, float* total, int32_t heads, int64_t dim, float eps) {
  add_rows(program, size, table().rms_norm,
           NormArgs{x, residual, weight, nullptr, out, total, x_stride, residual_stride, dim, heads,
                    eps});
}

BN_EXPORT void bn_layer_norm(Program* program, int32_t size, const float* x, int64_t x_stride,
                             const float* weight, const float* bias, float* out, int64_t dim,
                             float eps) {
  add_rows(program, size, table().layer_norm,
           NormArgs{x, nullptr, weight, bias, out, nullptr, x_stride, 0, dim, 1, eps});
}

BN_EXPORT void bn_rotary(Program* program, int32_t size, const float* x, int64_t x_stride,
                         const float* cosine, const float* sine, float* out, int32_t heads,
                         int32_t dim, int32_t pairs) {
  add_rows(program, size, table().rotary,
           RotaryArgs{x, cosine, sine, out, x_stride, heads, dim, pairs});
}

// shifts and axes: 0 for ordinary positions.
BN_EXPORT void bn_rotary_angles(Program* program, int32_t size, const int64_t* positions,
                                const float* frequencies, float* cosine, float* sine, int32_t pairs,
                                float magnitude, const int32_t* shifts, const int32_t* axes,
                                int32_t num_axes) {
  add_rows(program, size, table().rotary_angles,
           AngleArgs{positions, frequencies, cosine, sine, pairs, magnitude, shifts, axes,
                     num_axes});
}

// Rows of x, some of them replaced by a row of `rows`, or with one added to them.
BN_EXPORT void bn_take_rows(Program* program, int32_t size, const float* x, int64_t x_stride,
                            const int32_t* where, const float* rows, int64_t rows_stride,
                            float* out, int64_t dim, int32_t adds) {
  add_rows(program, size, table().take_rows,
           TakeArgs{x, where, rows, out, x_stride, rows_stride, dim, adds});
}

BN_EXPORT void bn_select_rows(Program* program, int32_t size, const float* x, int64_t x_stride,
                              const void* index, int32_t is_wide, float* out, int64_t dim) {
  add_rows(program, size, table().select_rows, SelectArgs{x, index, out, x_stride, dim, is_wide});
}

// Columns of x into some columns of a wider out, -infinity elsewhere.
BN_EXPORT void bn_spread_columns(Program* program, int32_t size, const float* x, int64_t x_stride,
                                 const int64_t* columns, float* out, int64_t dim, int64_t width) {
  add_rows(program, size, table().spread_columns,
           SpreadArgs{x, columns, out, x_stride, dim, width});
}

// Columns of x into columns of a wider out.
BN_EXPORT void bn_copy_columns(Program* program, int32_t size, const float* x, int64_t x_stride,
                               float* out, int64_t out_stride, int64_t dim) {
  add_rows(program, size, table().copy,
           MapArgs{x, nullptr, out, x_stride, 0, out_stride, dim, 1.0f, 0.0f, size});
}

BN_EXPORT void bn_add(Program* program, int32_t size, const float* x, int64_t x_stride,
                      const float* y, int64_t y_stride, float* out, int64_t dim) {
  add_rows(program, size, table().add,
           MapArgs{x, y, out, x_stride, y_stride, dim, dim, 1.0f, 0.0f, size});
}

// curve(gate) · up of [n, 2·dim]. curve: 0 silu, 1 gelu, 2 gelu by tanh; limit: of silu, most that
// silu(gate) is, and the up to either side.
BN_EXPORT void bn_gate_and_mul(Program* program, int32_t size, int32_t curve, const float* gate_up,
                               int64_t stride, float* out, int64_t dim, float limit) {
  const Kernel* kernels[] = {&table().silu_and_mul, &table().gelu_and_mul,
                             &table().gelu_tanh_and_mul};
  add_rows(program, size, *kernels[curve],
           MapArgs{gate_up, gate_up + dim, out, stride, stride, dim, dim, 1.0f, 0.0f, size, 1,
                   limit});
}

BN_EXPORT void bn_gelu_tanh(Program* program, int32_t size, const float* x, int64_t x_stride,
                            float* out, int64_t dim) {
  add_rows(program, size, table().gelu_tanh,
           MapArgs{x, nullptr, out, x_stride, 0, dim, dim, 1.0f, 0.0f, size});
}

// Rows of x [n, dim]: each of their equal pieces times the sigmoid of its number in gate
// [n, pieces].
BN_EXPORT void bn_sigmoid_scale(Program* program, int32_t size, const float* x, int64_t x_stride,
                                const float* gate, int64_t gate_stride, float* out, int64_t dim,
                                int32_t pieces) {
  add_rows(program, size, table().sigmoid_scale,
           MapArgs{x, gate, out, x_stride, gate_stride, dim, dim, 1.0f, 0.0f, size, pieces});
}

// x · scale, then cap·tanh(x/cap) unless the cap is 0.
BN_EXPORT void bn_scale_logits(Program* program, int32_t size, const float* x, int64_t x_stride,
                               float* out, int64_t dim, float scale, float soft_cap) {
  add_rows(program, NOT_ROW_WISE, table().scale_logits,
           MapArgs{x, nullptr, out, x_stride, 0, dim, dim, scale, soft_cap, size});
}
