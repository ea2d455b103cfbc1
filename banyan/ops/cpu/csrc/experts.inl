// Experts for one instruction set. Compiled once per set, as BN_TABLE (FAMILIES of build.py).
//
// Products with an expert's weights are those of the linear family, called for 16 outputs and the
// expert's rows at a time; here is what stands around them.
#include <cmath>
#include <cstring>

#include "experts.h"
#include "rows_curves.h"

namespace banyan {
namespace {

#define UNROLL _Pragma("GCC unroll 16")

inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

constexpr int64_t EXPERTS_OF_UNIT = 8, TOKENS_OF_UNIT = 32;  // of the router's logits
constexpr int FEW = LANES == 16 ? 4 : 2;  // experts beside four tokens: their sums fill the registers
constexpr int64_t ENOUGH_UNITS = 256;
constexpr size_t OUTPUTS_OF_PANEL = sizeof(float) * GROUP * PANEL_ROWS;

// --- the router's logits -------------------------------------------------------------------------

// out[r][e] = x[r] · w[e] + bias[e]: one sum per pair of rows, whatever R and E are.
template <int R, int E>
inline void dot(const float* x, int64_t x_stride, const float* w, const float* bias, int64_t dim,
                float* out, int64_t out_stride) {
  vf sums[R][E] = {};
  int64_t i = 0;
  for (; i + LANES <= dim; i += LANES) {
    vf weights[E];
    UNROLL for (int e = 0; e < E; e++) weights[e] = load(w + e * dim + i);
    UNROLL for (int r = 0; r < R; r++) {
      vf v = load(x + r * x_stride + i);
      UNROLL for (int e = 0; e < E; e++) sums[r][e] = fma(v, weights[e], sums[r][e]);
    }
  }
  int rest = (int)(dim - i);
  for (int r = 0; r < R; r++)
    for (int e = 0; e < E; e++) {
      if (rest)
        sums[r][e] = fma(load_some(x + r * x_stride + i, rest), load_some(w + e * dim + i, rest),
                         sums[r][e]);
      out[r * out_stride + e] = bias ? sum(sums[r][e]) + bias[e] : sum(sums[r][e]);
    }
}

int64_t logits_chunks(const LogitsArgs& a) {
  return (a.count + EXPERTS_OF_UNIT - 1) / EXPERTS_OF_UNIT;
}
int64_t logits_units(const void* args, const Sizes& sizes) {
  const LogitsArgs& a = *(const LogitsArgs*)args;
  int64_t panels = (sizes.n[a.size] + TOKENS_OF_UNIT - 1) / TOKENS_OF_UNIT;
  return panels * logits_chunks(a);
}
int64_t logits_grain(const void* args, const Sizes& sizes) {
  const LogitsArgs& a = *(const LogitsArgs*)args;
  int64_t tokens = least(sizes.n[a.size], TOKENS_OF_UNIT);
  return 30000 / (EXPERTS_OF_UNIT * a.dim * (1 + tokens / 4) + 1) + 1;
}
void logits_run(const void* args, const Sizes& sizes, int64_t begin, int64_t end, Worker&) {
  const LogitsArgs& a = *(const LogitsArgs*)args;
  int64_t chunks = logits_chunks(a);
  for (int64_t unit = begin; unit < end; unit++) {
    int64_t first = unit / chunks * TOKENS_OF_UNIT, e = unit % chunks * EXPERTS_OF_UNIT;
    int64_t last = least(first + TOKENS_OF_UNIT, sizes.n[a.size]);
    int64_t stop = least(e + EXPERTS_OF_UNIT, a.count);
    auto at = [&](auto run, int64_t token, int64_t expert) {
      run(a.x + token * a.x_stride, a.x_stride, a.weight + expert * a.dim,
          a.bias ? a.bias + expert : nullptr, a.dim, a.out + token * a.count + expert, a.count);
    };
    int64_t token = first;
    for (; token + 4 <= last; token += 4) {
      int64_t expert = e;
      for (; expert + FEW <= stop; expert += FEW) at(dot<4, FEW>, token, expert);
      for (; expert < stop; expert++) at(dot<4, 1>, token, expert);
    }
    for (; token < last; token++) {
      int64_t expert = e;
      for (; expert + 8 <= stop; expert += 8) at(dot<1, 8>, token, expert);
      for (; expert < stop; expert++) at(dot<1, 1>, token, expert);
    }
  }
}
void logits_cost(const void* args, const Sizes& sizes, double* bytes, double* operations) {
  const LogitsArgs& a = *(const LogitsArgs*)args;
  double tokens = (double)sizes.n[a.size];
  *bytes = 4.0 * (a.count * a.dim + tokens * (a.dim + a.count));
  *operations = 2.0 * tokens * a.count * a.dim;
}

// --- the choice ----------------------------------------------------------------------------------

// Scores of one token; what lies behind `count` up to a whole vector may be anything.
void score(const RouteArgs& a, const float* logits, float* scores) {
  vf low = splat(0.0f);
  if (a.scoring == SOFTMAX) {
    float most = logits[0];
    for (int e = 1; e < a.count; e++) most = logits[e] > most ? logits[e] : most;
    low = splat(most);
  }
  float total = 0;
  for (int e = 0; e < a.count; e += LANES) {
    int lanes = a.count - e < LANES ? a.count - e : LANES;
    vf v = load_some(logits + e, lanes);
    vf p = a.scoring == SOFTMAX ? exp(v - low) : splat(1.0f) / (splat(1.0f) + exp(-v));
    store(scores + e, p);
    for (int i = 0; i < lanes; i++) total += scores[e + i];
  }
  if (a.scoring == SOFTMAX)
    for (int e = 0; e < a.count; e++) scores[e] /= total;
}

// The largest of those that are not taken, the first of equals; it counts as taken then.
int take_best(const float* worth, int begin, int end, uint8_t* taken) {
  int best = -1;
  for (int e = begin; e < end; e++)
    if (!taken[e] && (best < 0 || worth[e] > worth[best])) best = e;
  taken[best] = 1;
  return best;
}

// Everything outside of the best groups becomes -infinity.
void leave_groups_out(const RouteArgs& a, float* choice, float* worth, uint8_t* taken) {
  int size = a.count / a.groups;
  for (int group = 0; group < a.groups; group++) {
    std::memset(taken + group * size, 0, size);
    worth[group] = 0;
    for (int i = 0; i < a.group_best; i++)
      worth[group] += choice[take_best(choice, group * size, (group + 1) * size, taken)];
  }
  std::memset(taken, 0, a.groups);
  for (int i = 0; i < a.top_groups; i++) take_best(worth, 0, a.groups, taken);
  for (int group = 0; group < a.groups; group++)
    for (int e = group * size; !taken[group] && e < (group + 1) * size; e++) choice[e] = -INFINITY;
}

// Of logits that differ from the largest not taken by at most 2 · jitter of the larger magnitude; a
// taken one counts as none.
float weight_among(const RouteArgs& a, const float* logits, int best, const uint8_t* taken,
                   float* near) {
  float most = logits[best], total = 0;
  int count = 0;
  for (int e = 0; e < a.count; e++) {
    float size = std::fabs(logits[e]);
    size = size > most ? size : most;
    bool is_out = (taken[e] && e != best) || (most - logits[e]) / size > 2 * a.jitter;
    if (!is_out) near[count++] = logits[e] - most;
  }
  for (int i = 0; i < count; i += LANES) {
    int lanes = count - i < LANES ? count - i : LANES;
    vf p = exp(load_some(near + i, lanes));
    for (int lane = 0; lane < lanes; lane++) total += p[lane];
  }
  return 1.0f / total;
}

void mix(const RouteArgs& a, const float* logits, int64_t* ids, float* shares, float* near,
         uint8_t* taken) {
  for (int j = 0; j < a.per_token; j++) {
    int best = take_best(logits, 0, a.count, taken);
    ids[j] = best;
    shares[j] = weight_among(a, logits, best, taken, near);
  }
}

void route_run(const void* args, const Sizes&, int64_t begin, int64_t end, Worker& worker) {
  const RouteArgs& a = *(const RouteArgs*)args;
  size_t room = (size_t)a.count + LANES;
  float* scores = (float*)worker.scratch(room * (3 * sizeof(float) + 1));
  float *choice = scores + room, *worth = choice + room;
  uint8_t* taken = (uint8_t*)(worth + room);
  for (int64_t token = begin; token < end; token++) {
    if (a.scoring == SPARSEMIXER) {
      std::memset(taken, 0, a.count);
      mix(a, a.logits + token * a.count, a.ids + token * a.per_token,
          a.shares + token * a.per_token, scores, taken);
      continue;
    }
    score(a, a.logits + token * a.count, scores);
    for (int e = 0; e < a.count; e++)
      choice[e] = a.correction ? scores[e] + a.correction[e] : scores[e];
    if (a.groups > 1) leave_groups_out(a, choice, worth, taken);
    std::memset(taken, 0, a.count);
    int64_t* ids = a.ids + token * a.per_token;
    float *shares = a.shares + token * a.per_token, total = 0;
    for (int j = 0; j < a.per_token; j++) {
      int best = take_best(choice, 0, a.count, taken);
      ids[j] = best;
      shares[j] = scores[best];
      total += scores[best];
    }
    for (int j = 0; j < a.per_token; j++)
      shares[j] = (a.is_normalised ? shares[j] / total : shares[j]) * a.scale;
  }
}
int64_t route_units(const void*, const Sizes&) { return 0; }  // row-wise: dealt out by tokens
int64_t route_grain(const void* args, const Sizes&) {
  const RouteArgs& a = *(const RouteArgs*)args;
  return 4000 / ((int64_t)a.count * (a.per_token + 4)) + 1;
}
void route_cost(const void* args, const Sizes& sizes, double* bytes, double* operations) {
  const RouteArgs& a = *(const RouteArgs*)args;
  double tokens = (double)sizes.n[TOKENS];
  *bytes = tokens * (4.0 * a.count + 12.0 * a.per_token);
  *operations = tokens * a.count * (8.0 + a.per_token);
}

// --- the feed-forward blocks ---------------------------------------------------------------------

// Rows begin ... begin + count - 1 through 16 outputs of an expert; out: [count][16].
template <class A>
inline void outputs_of(const A& a, const ExpertWeight& weight, int64_t k, int64_t group,
                       int64_t begin, int64_t count, float* out, uint8_t* scratch) {
  const LinearKernels& table = linear_table(isa());
  int32_t format = (int32_t)weight.format;
  LinearArgs args{format,
                  0,
                  GROUP,
                  k,
                  weight.tiles + group * group_bytes(format, k),
                  weight.factors + group * GROUP,
                  weight.bias ? weight.bias + group * GROUP : nullptr,
                  a.x + begin * a.x_bytes,
                  a.x_bytes,
                  out,
                  GROUP};
  (a.is_exact ? table.exact : table.rounded)[format](args, 0, 0, count, scratch);
}

// f(expert, first row, rows) for every panel of the pairs [from, to).
template <class A, class F>
inline void each_panel(const A& a, int64_t from, int64_t to, F f) {
  for (int64_t i = 0; i < a.load->active; i++) {
    int64_t expert = a.experts[i];
    int64_t begin = a.starts[expert] > from ? a.starts[expert] : from;
    int64_t end = least(a.starts[expert + 1], to);
    if (begin >= end) continue;
    Cut cut(end - begin);
    for (int64_t panel = 0; panel < cut.panels; panel++) {
      int64_t first = cut.begin(panel), last = cut.begin(panel + 1);
      if (first < last) f(expert, begin + first, last - first);
    }
  }
}

template <class A>
inline double expected_experts(const A& a, const Sizes& sizes) {
  double pairs = (double)sizes.n[a.size] * a.per_token;
  return pairs < a.count ? pairs : (double)a.count;
}

inline vf joined(const ExpertsInArgs& a, vf gate, vf up) {
  if (a.curve == SILU) return limited_silu(gate, up, a.limit);
  if (a.curve == GELU) return gelu(gate) * up;
  if (a.curve == GELU_TANH) return gelu_tanh(gate) * up;
  if (a.curve == PLAIN) return up * max(splat(0.0f), up);
  gate = min(splat(a.limit), gate);  // what is no number stays
  up = max(splat(-a.limit), min(splat(a.limit), up));
  return gate_by(gate, gate * splat(a.alpha)) * (up + splat(1.0f));
}

// Few columns are cut by pairs too: a pair's results depend on no other pair.
int64_t in_parts(const ExpertsInArgs& a) {
  int64_t groups = groups_of(a.inner);
  return groups < ENOUGH_UNITS ? ENOUGH_UNITS / groups : 1;
}
int64_t in_units(const void* args, const Sizes& sizes) {
  const ExpertsInArgs& a = *(const ExpertsInArgs*)args;
  int64_t parts = least(in_parts(a), sizes.n[a.size] * a.per_token);
  return parts * groups_of(a.inner);
}
int64_t in_grain(const void* args, const Sizes& sizes) {
  const ExpertsInArgs& a = *(const ExpertsInArgs*)args;
  double parts = (double)least(in_parts(a), sizes.n[a.size] * a.per_token + 1);
  double reading = expected_experts(a, sizes) / parts * 2 * group_bytes((int32_t)a.gate->format, a.dim);
  return (int64_t)(30000 / (reading + 1)) + 1;
}
// Add to 16 outputs of the pairs at `row` ... what their adapters make of them; out: [count][16].
inline void adapt_rows(const ExpertAdapters& beside, int part, int64_t expert, int64_t group,
                       int64_t row, int64_t count, float* out) {
  static_assert(TILE == GROUP, "a group of outputs is a tile of the adapters'");
  if (!beside.any()) return;
  const AdapterKernels& table = lora_table(isa());
  for (int64_t r = 0; r < count; r++)
    if (const AdapterPair* pair = beside.of(row + r, expert))
      table.expand_tile(*pair, part, group, beside.inner + (row + r) * beside.width, out + r * GROUP);
}

template <bool ADAPTED>
void in_run(const void* args, const Sizes& sizes, int64_t begin, int64_t end, Worker& worker) {
  const ExpertsInArgs& a = *(const ExpertsInArgs*)args;
  uint8_t* scratch = worker.scratch(LINEAR_SCRATCH + 2 * OUTPUTS_OF_PANEL);
  float *gate = (float*)(scratch + LINEAR_SCRATCH), *up = gate + GROUP * PANEL_ROWS;
  int64_t groups = groups_of(a.inner), pairs = a.load->pairs;
  int64_t parts = least(in_parts(a), sizes.n[a.size] * a.per_token);
  for (int64_t unit = begin; unit < end;) {
    int64_t part = unit / groups, first = unit % groups;
    int64_t last = least(groups, first + end - unit);
    unit += last - first;
    auto panel = [&](int64_t expert, int64_t row, int64_t count) {
      for (int64_t group = first; group < last; group++) {
        if (a.curve != PLAIN)
          outputs_of(a, a.gate[expert], a.dim, group, row, count, gate, scratch);
        outputs_of(a, a.up[expert], a.dim, group, row, count, up, scratch);
        if constexpr (ADAPTED) {
          const ExpertAdapters& beside = ((const AdaptedInArgs*)args)->beside;
          if (a.curve != PLAIN) adapt_rows(beside, 0, expert, group, row, count, gate);
          adapt_rows(beside, 1, expert, group, row, count, up);
        }
        int64_t left = a.inner - group * GROUP;
        for (int64_t r = 0; r < count; r++)
          for (int i = 0; i < GROUP && i < left; i += LANES) {
            vf g = load(gate + r * GROUP + i), u = load(up + r * GROUP + i);
            vf v = joined(a, g, u);
            float* out = a.out + (row + r) * a.inner + group * GROUP + i;
            if (left - i >= LANES) store(out, v);
            else store_some(out, v, (int)(left - i));
          }
      }
    };
    each_panel(a, part * pairs / parts, (part + 1) * pairs / parts, panel);
  }
}
void in_cost(const void* args, const Sizes&, double* bytes, double* operations) {
  const ExpertsInArgs& a = *(const ExpertsInArgs*)args;
  double pairs = (double)a.load->pairs;
  int64_t of_gate = a.curve == PLAIN ? 0 : group_bytes((int32_t)a.gate->format, a.dim);
  double weights = (double)groups_of(a.inner) *
                   (double)(of_gate + group_bytes((int32_t)a.up->format, a.dim));
  *bytes = (double)a.load->active * weights + pairs * (double)(a.x_bytes + 4 * a.inner);
  *operations = (a.curve == PLAIN ? 2.0 : 4.0) * pairs * (double)a.inner * (double)a.dim;
}

int64_t out_units(const void* args, const Sizes& sizes) {
  const ExpertsOutArgs& a = *(const ExpertsOutArgs*)args;
  return sizes.n[a.size] ? groups_of(a.dim) : 0;
}
int64_t out_grain(const void* args, const Sizes& sizes) {
  const ExpertsOutArgs& a = *(const ExpertsOutArgs*)args;
  double reading = expected_experts(a, sizes) * group_bytes((int32_t)a.down->format, a.inner);
  return (int64_t)(30000 / (reading + 1)) + 1;
}
template <bool ADAPTED>
void out_run(const void* args, const Sizes& sizes, int64_t begin, int64_t end, Worker& worker) {
  const ExpertsOutArgs& a = *(const ExpertsOutArgs*)args;
  uint8_t* scratch = worker.scratch(LINEAR_SCRATCH + OUTPUTS_OF_PANEL);
  float* some = (float*)(scratch + LINEAR_SCRATCH);
  int64_t from = begin * GROUP, to = least(a.dim, end * GROUP);
  for (int64_t token = 0; token < sizes.n[a.size]; token++)
    std::memset(a.out + token * a.dim + from, 0, sizeof(float) * (to - from));
  each_panel(a, 0, a.load->pairs, [&](int64_t expert, int64_t row, int64_t count) {
    for (int64_t group = begin; group < end; group++) {
      outputs_of(a, a.down[expert], a.inner, group, row, count, some, scratch);
      if constexpr (ADAPTED)
        adapt_rows(((const AdaptedOutArgs*)args)->beside, 0, expert, group, row, count, some);
      int64_t left = a.dim - group * GROUP;
      for (int64_t r = 0; r < count; r++) {
        vf share = splat(a.shares[row + r]);
        float* out = a.out + (int64_t)a.tokens[row + r] * a.dim + group * GROUP;
        for (int i = 0; i < GROUP && i < left; i += LANES) {
          vf v = load(some + r * GROUP + i);
          int lanes = left - i < LANES ? (int)(left - i) : LANES;
          if (lanes == LANES) store(out + i, fma(share, v, load(out + i)));
          else store_some(out + i, fma(share, v, load_some(out + i, lanes)), lanes);
        }
      }
    }
  });
}
void out_cost(const void* args, const Sizes& sizes, double* bytes, double* operations) {
  const ExpertsOutArgs& a = *(const ExpertsOutArgs*)args;
  double pairs = (double)a.load->pairs;
  double weights = (double)groups_of(a.dim) * group_bytes((int32_t)a.down->format, a.inner);
  *bytes = (double)a.load->active * weights + pairs * (double)a.x_bytes +
           4.0 * (double)(sizes.n[a.size] * a.dim);
  *operations = 2.0 * pairs * (double)a.inner * (double)a.dim;
}

// As out_run, but each pair's row stays by itself, without its share.
void apart_run(const void* args, const Sizes&, int64_t begin, int64_t end, Worker& worker) {
  const ExpertsOutArgs& a = *(const ExpertsOutArgs*)args;
  uint8_t* scratch = worker.scratch(LINEAR_SCRATCH + OUTPUTS_OF_PANEL);
  float* some = (float*)(scratch + LINEAR_SCRATCH);
  each_panel(a, 0, a.load->pairs, [&](int64_t expert, int64_t row, int64_t count) {
    for (int64_t group = begin; group < end; group++) {
      outputs_of(a, a.down[expert], a.inner, group, row, count, some, scratch);
      int64_t left = least(a.dim - group * GROUP, GROUP);
      for (int64_t r = 0; r < count; r++)
        std::memcpy(a.out + (row + r) * a.dim + group * GROUP, some + r * GROUP, left * 4);
    }
  });
}

// --- experts that lie anywhere -------------------------------------------------------------------

void combine_run(const void* args, const Sizes&, int64_t begin, int64_t end, Worker& worker) {
  const CombineArgs& a = *(const CombineArgs*)args;
  int32_t* order = (int32_t*)worker.scratch(sizeof(int32_t) * a.per_token);
  for (int64_t token = begin; token < end; token++) {
    const int64_t* ids = a.ids + token * a.per_token;
    for (int j = 0; j < a.per_token; j++) {
      int at = j;
      for (; at > 0 && ids[order[at - 1]] > ids[j]; at--) order[at] = order[at - 1];
      order[at] = j;
    }
    for (int64_t i = 0; i < a.dim; i += LANES) {
      int lanes = a.dim - i < LANES ? (int)(a.dim - i) : LANES;
      vf total = splat(0.0f), sum = splat(0.0f);
      int64_t home = ids[order[0]] / a.home;
      for (int j = 0; j < a.per_token; j++) {
        int64_t pair = token * a.per_token + order[j];
        if (ids[order[j]] / a.home != home) {
          total = total + sum;
          sum = splat(0.0f);
          home = ids[order[j]] / a.home;
        }
        sum = fma(splat(a.shares[pair]), load_some(a.x + pair * a.dim + i, lanes), sum);
      }
      store_some(a.out + token * a.dim + i, total + sum, lanes);
    }
  }
}
int64_t combine_units(const void*, const Sizes&) { return 0; }  // row-wise: dealt out by tokens
int64_t combine_grain(const void* args, const Sizes&) {
  const CombineArgs& a = *(const CombineArgs*)args;
  return 20000 / (a.dim * a.per_token + 1) + 1;
}
void combine_cost(const void* args, const Sizes& sizes, double* bytes, double* operations) {
  const CombineArgs& a = *(const CombineArgs*)args;
  double values = (double)sizes.n[TOKENS] * (double)a.dim;
  *bytes = 4.0 * values * (1 + a.per_token);
  *operations = 2.0 * values * a.per_token;
}

}  // namespace

extern const ExpertKernels BN_TABLE = {
    {"router", logits_units, logits_grain, logits_run, logits_cost},
    {"route", route_units, route_grain, route_run, route_cost},
    {"experts_in", in_units, in_grain, in_run<false>, in_cost},
    {"experts_out", out_units, out_grain, out_run<false>, out_cost},
    {"experts_in_exact", in_units, in_grain, in_run<false>, in_cost},
    {"experts_out_exact", out_units, out_grain, out_run<false>, out_cost},
    {"experts_apart", out_units, out_grain, apart_run, out_cost},
    {"experts_apart_exact", out_units, out_grain, apart_run, out_cost},
    {"combine_experts", combine_units, combine_grain, combine_run, combine_cost},
    {"experts_in + adapters", in_units, in_grain, in_run<true>, in_cost},
    {"experts_out + adapters", out_units, out_grain, out_run<true>, out_cost},
    {"experts_in_exact + adapters", in_units, in_grain, in_run<true>, in_cost},
    {"experts_out_exact + adapters", out_units, out_grain, out_run<true>, out_cost},
};

}  // namespace banyan
