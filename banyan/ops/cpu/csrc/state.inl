// The ops on states for one instruction set. Compiled once per set, as BN_TABLE (FAMILIES of build.py).
#include <cstring>

#include "rows_curves.h"
#include "state.h"

namespace banyan {
namespace {

constexpr int64_t WORTH = 16384;  // floats that are worth a claim

inline vf get(const float* p, int lanes) { return lanes == LANES ? load(p) : load_some(p, lanes); }
inline void put(float* p, vf v, int lanes) {
  if (lanes == LANES)
    store(p, v);
  else
    store_some(p, v, lanes);
}
// A state in its page. Sums are in fp32; where pages are bf16, a state is rounded after each step.
inline vf get_state(const void* states, int64_t at, int lanes, bool is_bf16) {
  if (!is_bf16) return get((const float*)states + at, lanes);
  const uint16_t* p = (const uint16_t*)states + at;
  if (lanes == LANES) return load_bf16(p);
  vf v = {};
  for (int i = 0; i < lanes; i++) v[i] = from_bf16(p[i]);
  return v;
}
inline void put_state(void* states, int64_t at, vf v, int lanes, bool is_bf16) {
  if (!is_bf16) return put((float*)states + at, v, lanes);
  uint16_t* p = (uint16_t*)states + at;
  for (int i = 0; i < lanes; i++) p[i] = to_bf16(v[i]);
}
inline int64_t blocks_of(int64_t width) { return (width + LANES - 1) / LANES; }
inline int lanes_at(int64_t width, int64_t first) {
  return width - first < LANES ? (int)(width - first) : LANES;
}
int64_t one(const void*, const Sizes&) { return 1; }
int64_t no_units(const void*, const Sizes&) { return 0; }

// --- convolution ---------------------------------------------------------------------------------

int64_t conv_units(const void* args, const Sizes& sizes) {
  return sizes.n[ROWS] * blocks_of(((const ConvArgs*)args)->channels);
}
int64_t conv_grain(const void* args, const Sizes& sizes) {
  const ConvArgs& a = *(const ConvArgs*)args;
  int64_t tokens = sizes.n[ROWS] ? sizes.n[TOKENS] / sizes.n[ROWS] + 1 : 1;
  int64_t grain = WORTH / (tokens * a.taps * LANES);
  return grain ? grain : 1;
}

void conv_block(const ConvArgs& a, int64_t row, int64_t first) {
  int begin = a.rows.row_starts[row], end = a.rows.row_starts[row + 1];
  if (begin >= end) return;
  int lanes = lanes_at(a.channels, first), kept = a.taps - 1;
  int64_t page = a.rows.pages[row * a.rows.pages_stride];
  float* inputs = a.last_inputs + page * kept * a.channels + first;
  bool is_fresh = a.rows.context_lengths[row] == 0;
  vf weight[MAX_TAPS], seen[MAX_TAPS];
  for (int i = 0; i < a.taps; i++) weight[i] = get(a.weight + (int64_t)i * a.channels + first, lanes);
  for (int i = 0; i < kept; i++)
    seen[i] = is_fresh ? vf{} : get(inputs + (int64_t)i * a.channels, lanes);
  vf bias = a.bias ? get(a.bias + first, lanes) : vf{};
  for (int64_t t = begin; t < end; t++) {
    seen[kept] = get(a.x + t * a.x_stride + first, lanes);
    vf total = bias;
    for (int i = 0; i < a.taps; i++) total = fma(weight[i], seen[i], total);
    put(a.out + t * a.channels + first, a.has_silu ? silu(total) : total, lanes);
    for (int i = 0; i < kept; i++) seen[i] = seen[i + 1];
    int64_t trail = trail_page(a.rows, row, t);
    if (trail < 0) continue;
    float* left = a.last_inputs + trail * kept * a.channels + first;
    for (int i = 0; i < kept; i++) put(left + (int64_t)i * a.channels, seen[i], lanes);
  }
  for (int i = 0; i < kept; i++) put(inputs + (int64_t)i * a.channels, seen[i], lanes);
}

void conv(const void* args, const Sizes&, int64_t begin, int64_t end, Worker&) {
  const ConvArgs& a = *(const ConvArgs*)args;
  int64_t blocks = blocks_of(a.channels);
  for (int64_t unit = begin; unit < end; unit++) conv_block(a, unit / blocks, unit % blocks * LANES);
}
void conv_cost(const void* args, const Sizes& sizes, double* bytes, double* operations) {
  const ConvArgs& a = *(const ConvArgs*)args;
  double tokens = (double)sizes.n[TOKENS], rows = (double)sizes.n[ROWS];
  *bytes = 4.0 * a.channels * (2 * tokens + 2 * rows * (a.taps - 1));
  *operations = 2.0 * a.channels * a.taps * tokens;
}

// --- scan ----------------------------------------------------------------------------------------

int64_t scan_units(const void* args, const Sizes& sizes) {
  const ScanArgs& a = *(const ScanArgs*)args;
  return sizes.n[ROWS] * a.heads * blocks_of(a.value_dim);
}

// A few columns of one head's state through one row. Sums over the key dimensions have four parts,
// i % 4, that are added last.
template <bool DELTA, bool KEYS>
void scan_block(const ScanArgs& a, int64_t row, int64_t head, int64_t first, float* state) {
  int begin = a.rows.row_starts[row], end = a.rows.row_starts[row + 1];
  if (begin >= end) return;
  int lanes = lanes_at(a.value_dim, first), dim = a.key_dim;
  int64_t page = a.rows.pages[row * a.rows.pages_stride];
  int64_t held = (page * a.heads + head) * dim * a.value_dim + first;
  bool is_fresh = a.rows.context_lengths[row] == 0;
  for (int i = 0; i < dim; i++)
    store(state + i * LANES, is_fresh ? vf{}
                                        : get_state(a.states, held + (int64_t)i * a.value_dim, lanes,
                                                    a.is_bf16));
  vf skip = splat(a.skip ? a.skip[head] : 0.0f);
  for (int64_t t = begin; t < end; t++) {
    const float* q = a.q + t * a.q_stride + head / a.shared * dim;
    const float* k = a.k + t * a.k_stride + head / a.shared * dim;
    vf value = get(a.v + t * a.v_stride + head * a.value_dim + first, lanes);
    const float* left = a.kept + (t * a.heads + head) * (KEYS ? dim : 1);
    vf whole = splat(left[0]);
    auto kept = [&](int i) { return KEYS ? splat(left[i]) : whole; };
    float strength = a.strength[t * a.strength_stride + head];
    vf added, out[4] = {};
    if (DELTA) {
      vf known[4] = {};
      for (int i = 0; i < dim; i++) {
        vf moved = load(state + i * LANES) * kept(i);
        store(state + i * LANES, moved);
        known[i & 3] = fma(splat(k[i]), moved, known[i & 3]);
      }
      vf all = (known[0] + known[1]) + (known[2] + known[3]);
      added = gate_by(value - all, splat(strength));
      for (int i = 0; i < dim; i++) {
        vf moved = fma(splat(k[i]), added, load(state + i * LANES));
        store(state + i * LANES, moved);
        out[i & 3] = fma(splat(q[i]), moved, out[i & 3]);
      }
    } else {
      added = value * splat(strength);
      for (int i = 0; i < dim; i++) {
        vf moved = fma(splat(k[i]), added, load(state + i * LANES) * kept(i));
        store(state + i * LANES, moved);
        out[i & 3] = fma(splat(q[i]), moved, out[i & 3]);
      }
    }
    vf read = (out[0] + out[1]) + (out[2] + out[3]);
    put(a.out + (t * a.heads + head) * a.value_dim + first, a.skip ? fma(skip, value, read) : read,
        lanes);
    int64_t trail = trail_page(a.rows, row, t);
    if (trail < 0) continue;
    int64_t behind = (trail * a.heads + head) * dim * a.value_dim + first;
    for (int i = 0; i < dim; i++)
      put_state(a.states, behind + (int64_t)i * a.value_dim, load(state + i * LANES), lanes,
                a.is_bf16);
  }
  for (int i = 0; i < dim; i++)
    put_state(a.states, held + (int64_t)i * a.value_dim, load(state + i * LANES), lanes, a.is_bf16);
}

template <bool DELTA, bool KEYS>
void scan(const void* args, const Sizes&, int64_t begin, int64_t end, Worker& worker) {
  const ScanArgs& a = *(const ScanArgs*)args;
  int64_t blocks = blocks_of(a.value_dim);
  float* state = (float*)worker.scratch(sizeof(float) * LANES * a.key_dim);
  for (int64_t unit = begin; unit < end; unit++) {
    int64_t head = unit / blocks % a.heads, row = unit / blocks / a.heads;
    scan_block<DELTA, KEYS>(a, row, head, unit % blocks * LANES, state);
  }
}
template <bool DELTA>
void scan_cost(const void* args, const Sizes& sizes, double* bytes, double* operations) {
  const ScanArgs& a = *(const ScanArgs*)args;
  double tokens = (double)sizes.n[TOKENS], state = (double)a.heads * a.key_dim * a.value_dim;
  double passed = 2.0 * a.heads / a.shared * a.key_dim + 2.0 * a.heads * a.value_dim;
  *bytes = 4 * ((a.is_bf16 ? 1 : 2) * sizes.n[ROWS] * state + tokens * passed);
  *operations = (DELTA ? 7 : 5) * tokens * state;
}

// --- selective scan ------------------------------------------------------------------------------

int64_t selective_units(const void* args, const Sizes& sizes) {
  return sizes.n[ROWS] * blocks_of(((const SelectiveArgs*)args)->channels);
}

// A few channels through one row; sums as in `scan_block`.
void selective_block(const SelectiveArgs& a, int64_t row, int64_t first, float* state) {
  int begin = a.rows.row_starts[row], end = a.rows.row_starts[row + 1];
  if (begin >= end) return;
  int lanes = lanes_at(a.channels, first), dim = a.key_dim;
  int64_t page = a.rows.pages[row * a.rows.pages_stride], width = a.channels;
  int64_t held = page * dim * width + first;
  bool is_fresh = a.rows.context_lengths[row] == 0;
  for (int i = 0; i < dim; i++)
    store(state + i * LANES,
          is_fresh ? vf{} : get_state(a.states, held + i * width, lanes, a.is_bf16));
  vf skip = get(a.skip + first, lanes);
  for (int64_t t = begin; t < end; t++) {
    const float *q = a.q + t * a.q_stride, *k = a.k + t * a.k_stride;
    vf value = get(a.v + t * a.v_stride + first, lanes);
    vf step = get(a.step + t * a.step_stride + first, lanes);
    vf added = step * value, out[4] = {};
    for (int i = 0; i < dim; i++) {
      vf kept = exp(vf{} - get(a.rate + i * width + first, lanes) * step);
      vf moved = fma(splat(k[i]), added, load(state + i * LANES) * kept);
      store(state + i * LANES, moved);
      out[i & 3] = fma(splat(q[i]), moved, out[i & 3]);
    }
    vf read = (out[0] + out[1]) + (out[2] + out[3]);
    put(a.out + t * width + first, fma(skip, value, read), lanes);
    int64_t trail = trail_page(a.rows, row, t);
    if (trail < 0) continue;
    int64_t behind = trail * dim * width + first;
    for (int i = 0; i < dim; i++)
      put_state(a.states, behind + i * width, load(state + i * LANES), lanes, a.is_bf16);
  }
  for (int i = 0; i < dim; i++)
    put_state(a.states, held + i * width, load(state + i * LANES), lanes, a.is_bf16);
}

void selective(const void* args, const Sizes&, int64_t begin, int64_t end, Worker& worker) {
  const SelectiveArgs& a = *(const SelectiveArgs*)args;
  int64_t blocks = blocks_of(a.channels);
  float* state = (float*)worker.scratch(sizeof(float) * LANES * a.key_dim);
  for (int64_t unit = begin; unit < end; unit++)
    selective_block(a, unit / blocks, unit % blocks * LANES, state);
}
void selective_cost(const void* args, const Sizes& sizes, double* bytes, double* operations) {
  const SelectiveArgs& a = *(const SelectiveArgs*)args;
  double tokens = (double)sizes.n[TOKENS], state = (double)a.key_dim * a.channels;
  *bytes = 4 * (((a.is_bf16 ? 1 : 2) * sizes.n[ROWS] + 1) * state +
                tokens * (2.0 * a.key_dim + 3.0 * a.channels));
  *operations = 20 * tokens * state;
}

// --- gates ---------------------------------------------------------------------------------------

void decay(const void* args, const Sizes&, int64_t begin, int64_t end, Worker&) {
  const DecayArgs& a = *(const DecayArgs*)args;
  for (int64_t row = begin; row < end; row++)
    for (int64_t i = 0; i < a.dim; i++) {
      float x = a.x[row * a.x_stride + i] + a.bias[i];
      float step = x > 20.0f ? x : (float)std::log1p(std::exp((double)x));
      step = step < a.low ? a.low : step > a.high ? a.high : step;
      a.step[row * a.dim + i] = step;
      a.kept[row * a.dim + i] = (float)std::exp((double)(-a.rate[i] * step));
    }
}
int64_t decay_grain(const void* args, const Sizes&) {
  int64_t rows = WORTH / (((const DecayArgs*)args)->dim * 32);
  return rows ? rows : 1;
}
void decay_cost(const void* args, const Sizes& sizes, double* bytes, double* operations) {
  double n = (double)((const DecayArgs*)args)->dim * sizes.n[TOKENS];
  *bytes = 12 * n;
  *operations = 40 * n;
}

inline vf times(vf x, vf gate) { return x * gate; }
inline vf times_relu(vf x, vf gate) { return x * max(splat(0.0f), gate); }
inline vf times_silu(vf x, vf gate) { return x * silu(gate); }

template <vf (*F)(vf, vf)>
void gate(const void* args, const Sizes&, int64_t begin, int64_t end, Worker&) {
  const GateArgs& a = *(const GateArgs*)args;
  for (int64_t row = begin; row < end; row++)
    for (int64_t i = 0; i < a.dim; i += LANES) {
      int lanes = lanes_at(a.dim, i);
      vf x = get(a.x + row * a.x_stride + i, lanes);
      put(a.out + row * a.dim + i, F(x, get(a.gate + row * a.gate_stride + i, lanes)), lanes);
    }
}
int64_t gate_grain(const void* args, const Sizes&) {
  int64_t rows = WORTH / (((const GateArgs*)args)->dim * 2);
  return rows ? rows : 1;
}
void gate_cost(const void* args, const Sizes& sizes, double* bytes, double* operations) {
  double n = (double)((const GateArgs*)args)->dim * sizes.n[TOKENS];
  *bytes = 12 * n;
  *operations = 8 * n;
}

}  // namespace

extern const StateKernels BN_TABLE = {
    {"short_conv", conv_units, conv_grain, conv, conv_cost},
    {"scan", scan_units, one, scan<false, false>, scan_cost<false>},
    {"delta_scan", scan_units, one, scan<true, false>, scan_cost<true>},
    {"scan_by_key", scan_units, one, scan<false, true>, scan_cost<false>},
    {"delta_scan_by_key", scan_units, one, scan<true, true>, scan_cost<true>},
    {"selective_scan", selective_units, one, selective, selective_cost},
    {"decay_gates", no_units, decay_grain, decay, decay_cost},
    {{"gate", no_units, gate_grain, gate<times>, gate_cost},
     {"silu_gate", no_units, gate_grain, gate<times_silu>, gate_cost},
     {"sigmoid_gate", no_units, gate_grain, gate<gate_by>, gate_cost},
     {"relu_gate", no_units, gate_grain, gate<times_relu>, gate_cost}},
};

}  // namespace banyan
