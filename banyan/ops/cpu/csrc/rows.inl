// The row-wise ops for one instruction set. Compiled once per set, as BN_TABLE (FAMILIES of build.py).
//
// A row is taken through in vectors from its beginning, the last one cut short, and sums have one
// order of their own: a row's result depends on that row alone.
#include <cstring>

#include "rows.h"
#include "rows_curves.h"

namespace banyan {
namespace {

constexpr int64_t WORTH = 16384;         // floats that are worth a claim
constexpr int64_t LOGITS_CHUNK = 8192;   // columns of one unit where rows are few and wide

// f(offset, lanes) over 0 ... n - 1, whole vectors first.
template <class F>
inline __attribute__((always_inline)) void each(int64_t n, F f) {
  int64_t i = 0;
  for (; i + LANES <= n; i += LANES) f(i, LANES);
  if (i < n) f(i, (int)(n - i));
}
inline vf get(const float* p, int lanes) { return lanes == LANES ? load(p) : load_some(p, lanes); }
inline void put(float* p, vf v, int lanes) {
  if (lanes == LANES)
    store(p, v);
  else
    store_some(p, v, lanes);
}

// Sum of f(offset, lanes), four vectors at a time; f gives 0 in the lanes it is not asked for.
template <class F>
inline __attribute__((always_inline)) float sum_of(int64_t n, F f) {
  vf s0{}, s1{}, s2{}, s3{};
  int64_t i = 0;
  for (; i + 4 * LANES <= n; i += 4 * LANES) {
    s0 += f(i, LANES);
    s1 += f(i + LANES, LANES);
    s2 += f(i + 2 * LANES, LANES);
    s3 += f(i + 3 * LANES, LANES);
  }
  for (; i + LANES <= n; i += LANES) s0 += f(i, LANES);
  if (i < n) s1 += f(i, (int)(n - i));
  return sum((s0 + s1) + (s2 + s3));
}

int64_t rows_worth(int64_t floats) {
  int64_t rows = WORTH / (floats ? floats : 1);
  return rows ? rows : 1;
}
// Row-wise ops are dealt out by rows; this is for ops that stand alone.
template <class A>
int64_t no_units(const void*, const Sizes&) {
  return 0;
}

// --- norms ---------------------------------------------------------------------------------------

void rms_norm_row(const NormArgs& a, const float* x, float* out) {
  float squares = sum_of(a.dim, [&](int64_t i, int lanes) {
    vf v = get(x + i, lanes);
    return v * v;
  });
  vf factor = splat(1.0f / std::sqrt(squares / (float)a.dim + a.eps));
  each(a.dim, [&](int64_t i, int lanes) {
    put(out + i, get(x + i, lanes) * factor * get(a.weight + i, lanes), lanes);
  });
}

void rms_norm(const void* args, const Sizes&, int64_t begin, int64_t end, Worker&) {
  const NormArgs& a = *(const NormArgs*)args;
  for (int64_t row = begin; row < end; row++) {
    const float* x = a.x + row * a.x_stride;
    if (a.residual) {
      const float* residual = a.residual + row * a.residual_stride;
      float* total = a.total + row * a.dim;
      each(a.dim, [&](int64_t i, int lanes) {
        put(total + i, get(x + i, lanes) + get(residual + i, lanes), lanes);
      });
      x = total;
    }
    for (int64_t head = 0; head < a.heads; head++)
      rms_norm_row(a, x + head * a.dim, a.out + (row * a.heads + head) * a.dim);
  }
}

void layer_norm(const void* args, const Sizes&, int64_t begin, int64_t end, Worker&) {
  const NormArgs& a = *(const NormArgs*)args;
  for (int64_t row = begin; row < end; row++) {
    const float* x = a.x + row * a.x_stride;
    float* out = a.out + row * a.dim;
    float mean = sum_of(a.dim, [&](int64_t i, int lanes) { return get(x + i, lanes); });
    mean /= (float)a.dim;
    vf middle = splat(mean);
    int64_t whole = a.dim / LANES * LANES;
    float squares = sum_of(whole, [&](int64_t i, int lanes) {
      vf v = get(x + i, lanes) - middle;
      return v * v;
    });
    for (int64_t i = whole; i < a.dim; i++) squares += (x[i] - mean) * (x[i] - mean);
    vf factor = splat(1.0f / std::sqrt(squares / (float)a.dim + a.eps));
    each(a.dim, [&](int64_t i, int lanes) {
      vf y = (get(x + i, lanes) - middle) * factor * get(a.weight + i, lanes);
      put(out + i, a.bias ? y + get(a.bias + i, lanes) : y, lanes);
    });
  }
}

int64_t norm_grain(const void* args, const Sizes&) {
  const NormArgs& a = *(const NormArgs*)args;
  return rows_worth(a.dim * a.heads);
}

// --- rotation ------------------------------------------------------------------------------------

void rotary(const void* args, const Sizes&, int64_t begin, int64_t end, Worker&) {
  const RotaryArgs& a = *(const RotaryArgs*)args;
  int rest = a.dim - 2 * a.pairs;
  for (int64_t row = begin; row < end; row++) {
    const float *cosine = a.cosine + row * a.pairs, *sine = a.sine + row * a.pairs;
    for (int64_t head = 0; head < a.heads; head++) {
      const float* x = a.x + row * a.x_stride + head * a.dim;
      float* out = a.out + (row * a.heads + head) * a.dim;
      each(a.pairs, [&](int64_t i, int lanes) {
        vf c = get(cosine + i, lanes), s = get(sine + i, lanes);
        vf first = get(x + i, lanes), second = get(x + a.pairs + i, lanes);
        put(out + i, first * c - second * s, lanes);
        put(out + a.pairs + i, second * c + first * s, lanes);
      });
      if (rest) std::memcpy(out + 2 * a.pairs, x + 2 * a.pairs, sizeof(float) * rest);
    }
  }
}
int64_t rotary_grain(const void* args, const Sizes&) {
  const RotaryArgs& a = *(const RotaryArgs*)args;
  return rows_worth((int64_t)a.heads * a.dim);
}

// The product is rounded to fp32, as models are trained; its remainder by 2·pi is taken in double,
// so that an angle of 10^6 costs nothing more.
void rotary_angles(const void* args, const Sizes&, int64_t begin, int64_t end, Worker&) {
  const AngleArgs& a = *(const AngleArgs*)args;
  for (int64_t row = begin; row < end; row++) {
    float *cosine = a.cosine + row * a.pairs, *sine = a.sine + row * a.pairs;
    for (int64_t i = 0; i < a.pairs; i++) {
      int64_t position = a.positions[row];
      if (a.shifts) position += a.shifts[row * a.num_axes + a.axes[i]];
      double angle = (float)position * a.frequencies[i];
      cosine[i] = (float)std::cos(angle) * a.magnitude;
      sine[i] = (float)std::sin(angle) * a.magnitude;
    }
  }
}
int64_t angles_grain(const void* args, const Sizes&) {
  return rows_worth((int64_t)((const AngleArgs*)args)->pairs * 16);
}

// --- moving rows ---------------------------------------------------------------------------------

void select_rows(const void* args, const Sizes&, int64_t begin, int64_t end, Worker&) {
  const SelectArgs& a = *(const SelectArgs*)args;
  for (int64_t row = begin; row < end; row++) {
    int64_t from = a.is_wide ? ((const int64_t*)a.index)[row] : ((const int32_t*)a.index)[row];
    std::memcpy(a.out + row * a.dim, a.x + from * a.x_stride, sizeof(float) * a.dim);
  }
}
int64_t select_grain(const void* args, const Sizes&) {
  return rows_worth(((const SelectArgs*)args)->dim);
}

void take_rows(const void* args, const Sizes&, int64_t begin, int64_t end, Worker&) {
  const TakeArgs& a = *(const TakeArgs*)args;
  for (int64_t row = begin; row < end; row++) {
    const float* x = a.x + row * a.x_stride;
    float* out = a.out + row * a.dim;
    int64_t from = a.where[row];
    const float* given = from < 0 ? x : a.rows + from * a.rows_stride;
    if (from < 0 || !a.adds) {
      std::memcpy(out, given, sizeof(float) * a.dim);
      continue;
    }
    each(a.dim, [&](int64_t i, int lanes) {
      put(out + i, get(x + i, lanes) + get(given + i, lanes), lanes);
    });
  }
}
int64_t take_grain(const void* args, const Sizes&) {
  return rows_worth(((const TakeArgs*)args)->dim);
}

void spread_columns(const void* args, const Sizes&, int64_t begin, int64_t end, Worker&) {
  const SpreadArgs& a = *(const SpreadArgs*)args;
  for (int64_t row = begin; row < end; row++) {
    const float* x = a.x + row * a.x_stride;
    float* out = a.out + row * a.width;
    for (int64_t i = 0; i < a.width; i++) out[i] = -INFINITY;
    for (int64_t i = 0; i < a.dim; i++) out[a.columns[i]] = x[i];
  }
}
int64_t spread_grain(const void*, const Sizes&) { return 1; }

void copy(const void* args, const Sizes&, int64_t begin, int64_t end, Worker&) {
  const MapArgs& a = *(const MapArgs*)args;
  for (int64_t row = begin; row < end; row++)
    std::memcpy(a.out + row * a.out_stride, a.x + row * a.x_stride, sizeof(float) * a.dim);
}

// --- element by element --------------------------------------------------------------------------

template <vf (*F)(vf)>
void map(const void* args, const Sizes&, int64_t begin, int64_t end, Worker&) {
  const MapArgs& a = *(const MapArgs*)args;
  for (int64_t row = begin; row < end; row++) {
    const float* x = a.x + row * a.x_stride;
    float* out = a.out + row * a.out_stride;
    each(a.dim, [&](int64_t i, int lanes) { put(out + i, F(get(x + i, lanes)), lanes); });
  }
}

template <vf (*F)(vf, vf)>
void map_two(const void* args, const Sizes&, int64_t begin, int64_t end, Worker&) {
  const MapArgs& a = *(const MapArgs*)args;
  for (int64_t row = begin; row < end; row++) {
    const float *x = a.x + row * a.x_stride, *y = a.y + row * a.y_stride;
    float* out = a.out + row * a.out_stride;
    each(a.dim, [&](int64_t i, int lanes) {
      put(out + i, F(get(x + i, lanes), get(y + i, lanes)), lanes);
    });
  }
}

// Pieces of rows of x, each times the sigmoid of one number: y is [n, pieces].
void sigmoid_scale(const void* args, const Sizes&, int64_t begin, int64_t end, Worker&) {
  const MapArgs& a = *(const MapArgs*)args;
  for (int64_t row = begin; row < end; row++) {
    const float* x = a.x + row * a.x_stride;
    float* out = a.out + row * a.out_stride;
    int64_t width = a.dim / a.pieces;
    for (int32_t piece = 0; piece < a.pieces; piece++, x += width, out += width) {
      vf factor = gate_by(splat(1.0f), splat(a.y[row * a.y_stride + piece]));
      each(width, [&](int64_t i, int lanes) { put(out + i, get(x + i, lanes) * factor, lanes); });
    }
  }
}

inline vf sum_two(vf x, vf y) { return x + y; }
inline vf gelu_times(vf x, vf y) { return gelu(x) * y; }
inline vf gelu_tanh_times(vf x, vf y) { return gelu_tanh(x) * y; }

void silu_and_mul(const void* args, const Sizes&, int64_t begin, int64_t end, Worker&) {
  const MapArgs& a = *(const MapArgs*)args;
  for (int64_t row = begin; row < end; row++) {
    const float *x = a.x + row * a.x_stride, *y = a.y + row * a.y_stride;
    float* out = a.out + row * a.out_stride;
    each(a.dim, [&](int64_t i, int lanes) {
      put(out + i, limited_silu(get(x + i, lanes), get(y + i, lanes), a.limit), lanes);
    });
  }
}

int64_t map_grain(const void* args, const Sizes&) {
  return rows_worth(((const MapArgs*)args)->dim * 2);
}

// Logits are few rows of very many columns: a unit is a piece of a row.
int64_t logits_chunks(const MapArgs& a) { return (a.dim + LOGITS_CHUNK - 1) / LOGITS_CHUNK; }
int64_t logits_units(const void* args, const Sizes& sizes) {
  const MapArgs& a = *(const MapArgs*)args;
  return sizes.n[a.size] * logits_chunks(a);
}
int64_t logits_grain(const void*, const Sizes&) { return 1; }

void scale_logits(const void* args, const Sizes&, int64_t begin, int64_t end, Worker&) {
  const MapArgs& a = *(const MapArgs*)args;
  int64_t chunks = logits_chunks(a);
  vf scale = splat(a.scale), cap = splat(a.soft_cap);
  for (int64_t unit = begin; unit < end; unit++) {
    int64_t row = unit / chunks, first = unit % chunks * LOGITS_CHUNK;
    int64_t n = a.dim - first < LOGITS_CHUNK ? a.dim - first : LOGITS_CHUNK;
    const float* x = a.x + row * a.x_stride + first;
    float* out = a.out + row * a.out_stride + first;
    each(n, [&](int64_t i, int lanes) {
      vf v = get(x + i, lanes) * scale;
      put(out + i, a.soft_cap != 0 ? cap * tanh(v / cap) : v, lanes);
    });
  }
}

// --- cost ----------------------------------------------------------------------------------------

// Bytes and operations of n rows; every op here is bound by the memory it touches.
template <class A>
double floats_per_row(const A& a);
template <>
double floats_per_row(const NormArgs& a) {
  return (double)a.heads * a.dim * (a.residual ? 4 : 2);
}
template <>
double floats_per_row(const RotaryArgs& a) {
  return (double)a.heads * a.dim * 2;
}
template <>
double floats_per_row(const AngleArgs& a) {
  return (double)a.pairs * 2;
}
template <>
double floats_per_row(const SelectArgs& a) {
  return (double)a.dim * 2;
}
template <>
double floats_per_row(const TakeArgs& a) {
  return (double)a.dim * 2;
}
template <>
double floats_per_row(const SpreadArgs& a) {
  return (double)a.width + a.dim * 2;
}
template <>
double floats_per_row(const MapArgs& a) {
  return (double)a.dim * (a.y ? 3 : 2);
}
template <class A, int OPERATIONS>
void cost(const void* args, const Sizes& sizes, double* bytes, double* operations) {
  double floats = floats_per_row(*(const A*)args) * (double)sizes.n[TOKENS];
  *bytes = 4 * floats;
  *operations = OPERATIONS * floats;
}
template <int OPERATIONS>
void map_cost(const void* args, const Sizes& sizes, double* bytes, double* operations) {
  const MapArgs& a = *(const MapArgs*)args;
  double floats = floats_per_row(a) * (double)sizes.n[a.size];
  *bytes = 4 * floats;
  *operations = OPERATIONS * floats;
}

template <class A>
constexpr Kernel row_wise(const char* name, int64_t (*grain)(const void*, const Sizes&),
                          decltype(Kernel::run) run, decltype(Kernel::cost) cost) {
  return Kernel{name, no_units<A>, grain, run, cost};
}

}  // namespace

extern const RowKernels BN_TABLE = {
    row_wise<NormArgs>("rms_norm", norm_grain, rms_norm, cost<NormArgs, 2>),
    row_wise<NormArgs>("layer_norm", norm_grain, layer_norm, cost<NormArgs, 4>),
    row_wise<RotaryArgs>("rotary", rotary_grain, rotary, cost<RotaryArgs, 2>),
    row_wise<AngleArgs>("rotary_angles", angles_grain, rotary_angles, cost<AngleArgs, 20>),
    row_wise<SelectArgs>("select_rows", select_grain, select_rows, cost<SelectArgs, 0>),
    row_wise<TakeArgs>("take_rows", take_grain, take_rows, cost<TakeArgs, 0>),
    row_wise<SpreadArgs>("spread_columns", spread_grain, spread_columns, cost<SpreadArgs, 0>),
    row_wise<MapArgs>("copy", map_grain, copy, map_cost<0>),
    row_wise<MapArgs>("add", map_grain, map_two<sum_two>, map_cost<1>),
    row_wise<MapArgs>("silu_and_mul", map_grain, silu_and_mul, map_cost<8>),
    row_wise<MapArgs>("gelu_and_mul", map_grain, map_two<gelu_times>, map_cost<14>),
    row_wise<MapArgs>("gelu_tanh_and_mul", map_grain, map_two<gelu_tanh_times>, map_cost<10>),
    row_wise<MapArgs>("gelu_tanh", map_grain, map<gelu_tanh>, map_cost<14>),
    row_wise<MapArgs>("sigmoid_scale", map_grain, sigmoid_scale, map_cost<1>),
    {"scale_logits", logits_units, logits_grain, scale_logits, map_cost<12>},
};

}  // namespace banyan
