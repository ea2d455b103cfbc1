// Builders of the experts' ops, what needs no instruction set, and the check at load time.
#include "experts.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <vector>

namespace banyan {

const ExpertKernels& experts_table(int32_t level) {
#ifdef BN_EXPERTS_AVX512
  if (level >= AVX512) return experts_avx512;
#endif
#ifdef BN_EXPERTS_AVX2
  if (level >= AVX2) return experts_avx2;
#endif
  (void)level;
  return experts_base;
}

namespace {

// --- pairs by expert -----------------------------------------------------------------------------

int64_t one(const void*, const Sizes&) { return 1; }
void no_cost(const void*, const Sizes&, double* bytes, double* operations) {
  *bytes = *operations = 0;
}

void sort_run(const void* args, const Sizes& sizes, int64_t, int64_t, Worker& worker) {
  const SortArgs& a = *(const SortArgs*)args;
  int64_t pairs = sizes.n[a.size] * a.per_token;
  int32_t* next = (int32_t*)worker.scratch(sizeof(int32_t) * a.count);
  auto expert_of = [&](int64_t pair) {  // -1: elsewhere
    int64_t expert = a.ids[pair] - a.first;
    return expert < 0 || expert >= a.count ? -1 : expert;
  };
  std::memset(next, 0, sizeof(int32_t) * a.count);
  for (int64_t pair = 0; pair < pairs; pair++)
    if (int64_t expert = expert_of(pair); expert >= 0) next[expert]++;
  int32_t begin = 0, active = 0;
  for (int64_t expert = 0; expert < a.count; expert++) {
    if (next[expert]) a.experts[active++] = (int32_t)expert;
    a.starts[expert] = begin;
    begin += next[expert];
    next[expert] = a.starts[expert];
  }
  a.starts[a.count] = begin;
  *a.load = {active, begin};
  for (int64_t pair = 0; pair < pairs; pair++) {
    int64_t expert = expert_of(pair);
    a.places[pair] = expert < 0 ? -1 : next[expert]++;
    if (expert < 0) continue;
    a.tokens[a.places[pair]] = (int32_t)(pair / a.per_token);
    a.sorted_shares[a.places[pair]] = a.shares[pair];
  }
}
constexpr Kernel SORT = {"sort_experts", one, one, sort_run, no_cost};

void gather_run(const void* args, const Sizes&, int64_t begin, int64_t end, Worker&) {
  const GatherArgs& a = *(const GatherArgs*)args;
  for (int64_t token = begin; token < end; token++)
    for (int64_t pair = token * a.per_token; pair < (token + 1) * a.per_token; pair++)
      if (a.places[pair] >= 0)
        std::memcpy(a.out + a.places[pair] * a.bytes, a.x + token * a.x_bytes, a.bytes);
}
int64_t none(const void*, const Sizes&) { return 0; }  // row-wise: dealt out by tokens
int64_t gather_grain(const void* args, const Sizes&) {
  const GatherArgs& a = *(const GatherArgs*)args;
  return 65536 / (a.bytes * a.per_token + 1) + 1;
}
void gather_cost(const void* args, const Sizes& sizes, double* bytes, double* operations) {
  const GatherArgs& a = *(const GatherArgs*)args;
  *bytes = (double)sizes.n[TOKENS] * (double)(a.bytes * (1 + a.per_token));
  *operations = 0;
}
constexpr Kernel GATHER = {"gather_experts", none, gather_grain, gather_run, gather_cost};

void place_run(const void* args, const Sizes& sizes, int64_t, int64_t, Worker& worker) {
  const PlaceArgs& a = *(const PlaceArgs*)args;
  int64_t pairs = sizes.n[a.size] * a.per_token;
  int32_t* come = (int32_t*)worker.scratch(sizeof(int32_t) * a.count);
  std::memset(come, 0, sizeof(int32_t) * a.count);
  for (int64_t pair = 0; pair < pairs; pair++) {
    if (a.dispatch == EVEN) {
      a.out[pair] = pair % a.count;
      continue;
    }
    int64_t expert = a.ids[pair];
    int64_t turn = a.dispatch == STATIC ? pair / a.per_token : come[expert]++;
    a.out[pair] = a.slots[expert * a.room + turn % a.copies[expert]];
  }
}
constexpr Kernel PLACE = {"place_experts", one, one, place_run, no_cost};

void spread_run(const void* args, const Sizes&, int64_t begin, int64_t end, Worker&) {
  const SpreadArgs& a = *(const SpreadArgs*)args;
  for (int64_t pair = begin * a.per_token; pair < end * a.per_token; pair++) {
    float* out = a.out + pair * a.dim;
    if (a.places[pair] < 0) std::memset(out, 0, a.dim * sizeof(float));
    else std::memcpy(out, a.x + a.places[pair] * a.dim, a.dim * sizeof(float));
  }
}
int64_t spread_grain(const void* args, const Sizes&) {
  const SpreadArgs& a = *(const SpreadArgs*)args;
  return 65536 / (a.dim * a.per_token * 4 + 1) + 1;
}
void spread_cost(const void* args, const Sizes& sizes, double* bytes, double* operations) {
  const SpreadArgs& a = *(const SpreadArgs*)args;
  *bytes = 8.0 * (double)sizes.n[TOKENS] * (double)(a.dim * a.per_token);
  *operations = 0;
}
constexpr Kernel SPREAD = {"spread_experts", none, spread_grain, spread_run, spread_cost};

int64_t rows_units(const void* args, const Sizes& sizes) {
  const ExpertRowsArgs& a = *(const ExpertRowsArgs*)args;
  return sizes.n[a.size] * a.per_token;
}
int64_t rows_grain(const void* args, const Sizes&) {
  return 10000 / (((const ExpertRowsArgs*)args)->k + 1) + 1;
}
void rows_run(const void* args, const Sizes&, int64_t begin, int64_t end, Worker& worker) {
  const ExpertRowsArgs& a = *(const ExpertRowsArgs*)args;
  const LinearKernels& table = linear_table(isa());
  uint8_t* scratch = worker.scratch(quantize_scratch(a.k));
  for (int64_t i = begin; i < end && i < a.load->pairs; i++)
    table.round(a.format, a.x + i * a.k, a.k, a.out + i * activation_bytes(a.format, a.k), scratch);
}
void rows_cost(const void* args, const Sizes&, double* bytes, double* operations) {
  const ExpertRowsArgs& a = *(const ExpertRowsArgs*)args;
  double rows = (double)a.load->pairs;
  *bytes = rows * (double)(4 * a.k + activation_bytes(a.format, a.k));
  *operations = rows * 4 * (double)a.k;
}
constexpr Kernel ROUND = {"round_experts", rows_units, rows_grain, rows_run, rows_cost};

// --- the check -----------------------------------------------------------------------------------

// Three tokens, two of four experts each, with small float weights.
struct Step {
  static constexpr int TOKENS_NOW = 3, COUNT = 4, CHOSEN = 2, DIM = 37, INNER = 21;
  std::vector<float> x = wave(TOKENS_NOW * DIM, 0.37f), router = wave(COUNT * DIM, 1.3f);
  std::vector<float> logits = std::vector<float>(TOKENS_NOW * COUNT);
  std::vector<float> shares = std::vector<float>(TOKENS_NOW * CHOSEN), sorted = shares;
  std::vector<int64_t> ids = std::vector<int64_t>(TOKENS_NOW * CHOSEN);
  std::vector<int32_t> experts = std::vector<int32_t>(COUNT), starts = std::vector<int32_t>(COUNT + 1);
  std::vector<int32_t> places = std::vector<int32_t>(ids.size()), tokens = places;
  std::vector<float> rows = std::vector<float>(ids.size() * DIM);
  std::vector<float> inner = std::vector<float>(ids.size() * INNER);
  std::vector<float> out = std::vector<float>(TOKENS_NOW * DIM), factors = std::vector<float>(64, 1.0f);
  std::vector<float> in_tiles = wave(groups_of(INNER) * GROUP * DIM, 0.71f);
  std::vector<float> out_tiles = wave(groups_of(DIM) * GROUP * INNER, 0.53f);

  static std::vector<float> wave(size_t size, float step) {
    std::vector<float> x(size);
    for (size_t i = 0; i < size; i++) x[i] = std::sin(step * (float)i);
    return x;
  }
};

std::vector<float> outcome(const ExpertKernels& kernels) {
  Step s;
  Worker worker;
  worker.index = 0, worker.count = 1;
  Sizes sizes{{Step::TOKENS_NOW, 1, 1}};
  auto run = [&](const Kernel& kernel, const void* args, int64_t units) {
    kernel.run(args, sizes, 0, units, worker);
  };
  LogitsArgs logits{s.x.data(), s.router.data(), nullptr, s.logits.data(), Step::DIM,
                    Step::DIM,  Step::COUNT,     TOKENS};
  run(kernels.logits, &logits, kernels.logits.units(&logits, sizes));
  RouteArgs route{s.logits.data(), nullptr, s.ids.data(), s.shares.data(), Step::COUNT, Step::CHOSEN,
                  SIGMOID, 1, 2, 1, 2, 1.5f, 0.0f};
  run(kernels.route, &route, Step::TOKENS_NOW);
  ExpertLoad load;
  SortArgs sort{s.ids.data(),    s.shares.data(), &load,           s.experts.data(), s.starts.data(),
                s.places.data(), s.tokens.data(), s.sorted.data(), 0,                Step::COUNT,
                TOKENS,          Step::CHOSEN};
  run(SORT, &sort, 1);
  GatherArgs gather{(const uint8_t*)s.x.data(), s.places.data(), (uint8_t*)s.rows.data(),
                    Step::DIM * 4, Step::DIM * 4, Step::CHOSEN};
  run(GATHER, &gather, Step::TOKENS_NOW);
  ExpertWeight in[Step::COUNT], out[Step::COUNT];
  for (int e = 0; e < Step::COUNT; e++) {
    in[e] = {(const uint8_t*)s.in_tiles.data(), s.factors.data(), F32, nullptr};
    out[e] = {(const uint8_t*)s.out_tiles.data(), s.factors.data(), F32, s.rows.data()};
  }
  ExpertsInArgs first{in, in, &load, s.experts.data(), s.starts.data(),
                      (const uint8_t*)s.rows.data(), s.inner.data(), Step::DIM * 4, Step::DIM,
                      Step::INNER, Step::COUNT, TOKENS, Step::CHOSEN, 1, CLAMPED, 0.5f, 1.7f};
  run(kernels.in, &first, kernels.in.units(&first, sizes));
  ExpertsOutArgs second{out, &load, s.experts.data(), s.starts.data(), s.tokens.data(),
                        s.sorted.data(), (const uint8_t*)s.inner.data(), s.out.data(),
                        Step::INNER * 4, Step::INNER, Step::DIM, Step::COUNT, TOKENS, Step::CHOSEN, 1};
  run(kernels.out, &second, kernels.out.units(&second, sizes));
  ExpertsOutArgs third = second;
  third.out = s.rows.data();
  run(kernels.apart, &third, kernels.apart.units(&third, sizes));
  std::vector<float> pairs(s.rows.size()), sums(s.out.size());
  SpreadArgs spread{s.rows.data(), s.places.data(), pairs.data(), Step::DIM, Step::CHOSEN};
  run(SPREAD, &spread, Step::TOKENS_NOW);
  CombineArgs combine{pairs.data(), s.ids.data(), s.shares.data(), sums.data(), Step::DIM, 2,
                      Step::CHOSEN};
  run(kernels.combine, &combine, Step::TOKENS_NOW);
  s.out.insert(s.out.end(), sums.begin(), sums.end());
  return s.out;
}

}  // namespace
}  // namespace banyan

using namespace banyan;

// Whether an instruction set computes what the plain code does; 1 and the reason when not.
BN_EXPORT int bn_check_experts(int32_t isa, char* why, int32_t room) {
  std::vector<float> expected = outcome(experts_base), found = outcome(experts_table(isa));
  for (size_t i = 0; i < found.size(); i++)
    if (!(std::fabs(found[i] - expected[i]) <= 1e-3f)) {
      std::snprintf(why, room, "experts give %g for %g", found[i], expected[i]);
      return 1;
    }
  return 0;
}

// The router's logits, x · transposed(weight) + bias in fp32. x: [size, dim]; weight: [count, dim];
// bias: [count] or null; out: [size, count].
BN_EXPORT void bn_router_logits(Program* program, int32_t size, const float* x, int64_t x_stride,
                                const float* weight, const float* bias, float* out, int64_t dim,
                                int64_t count) {
  LogitsArgs args{x, weight, bias, out, x_stride, dim, count, size};
  append(program, experts_table(isa()).logits, &args, sizeof args, NOT_ROW_WISE);
}

// Choose per_token of count experts. scoring: a Scoring; jitter: of SPARSEMIXER; correction: [count] or null; ids, shares: [size, per_token].
BN_EXPORT void bn_route(Program* program, int32_t size, const float* logits,
                        const float* correction, int64_t* ids, float* shares, int32_t count,
                        int32_t per_token, int32_t scoring, int32_t is_normalised,
                        int32_t groups, int32_t top_groups, int32_t group_best, float scale,
                        float jitter) {
  RouteArgs args{logits,        correction, ids,        shares,     count, per_token, scoring,
                 is_normalised, groups,     top_groups, group_best, scale, jitter};
  append(program, experts_table(isa()).route, &args, sizeof args, size);
}

// Sort the pairs of `ids` [size, per_token] by expert, those of `first` ... first + count - 1. What
// it fills is described in experts.h.
BN_EXPORT void bn_sort_experts(Program* program, int32_t size, const int64_t* ids,
                               const float* shares, void* load, int32_t* experts, int32_t* starts,
                               int32_t* places, int32_t* tokens, float* sorted_shares,
                               int64_t first, int64_t count, int32_t per_token) {
  SortArgs args{ids,    shares,        (ExpertLoad*)load, experts, starts, places,
                tokens, sorted_shares, first,             count,   size,   per_token};
  append(program, SORT, &args, sizeof args, NOT_ROW_WISE);
}

// Rows of x [size], x_bytes apart, to the places of their pairs.
BN_EXPORT void bn_gather_experts(Program* program, int32_t size, const void* x, int64_t x_bytes,
                                 const int32_t* places, void* out, int64_t bytes,
                                 int32_t per_token) {
  GatherArgs args{(const uint8_t*)x, places, (uint8_t*)out, x_bytes, bytes, per_token};
  append(program, GATHER, &args, sizeof args, size);
}

// bn_quantize for the pairs of a step. x: [pairs, k]; out: [pairs, bn_quantize_bytes(format, k)].
BN_EXPORT void bn_round_experts(Program* program, int32_t size, int32_t format, const float* x,
                                void* out, const void* load, int64_t k, int32_t per_token) {
  ExpertRowsArgs args{x, (uint8_t*)out, (const ExpertLoad*)load, k, format, size, per_token};
  append(program, ROUND, &args, sizeof args, NOT_ROW_WISE);
}

// curve(x · gate) · (x · up) of every pair. gate, up: [count] of ExpertWeight; curve: a Curve; limit:
// of SILU and CLAMPED; alpha: of CLAMPED; x: [pairs] rows, fp32 if `is_exact`; out: [pairs, inner].
BN_EXPORT void bn_experts_in(Program* program, int32_t size, const void* gate, const void* up,
                             const void* load, const int32_t* experts, const int32_t* starts,
                             const void* x, int64_t x_bytes, float* out, int64_t dim,
                             int64_t inner, int64_t count, int32_t per_token, int32_t is_exact,
                             int32_t curve, float limit, float alpha) {
  ExpertsInArgs args{(const ExpertWeight*)gate,
                     (const ExpertWeight*)up,
                     (const ExpertLoad*)load,
                     experts,
                     starts,
                     (const uint8_t*)x,
                     out,
                     x_bytes,
                     dim,
                     inner,
                     count,
                     size,
                     per_token,
                     is_exact,
                     curve,
                     limit,
                     alpha};
  const ExpertKernels& table = experts_table(isa());
  append(program, is_exact ? table.in_exact : table.in, &args, sizeof args, NOT_ROW_WISE);
}

// The sum over each token's experts, in rising order, of share · (x · down). x: [pairs] rows of
// `inner` numbers; out: [size, dim].
BN_EXPORT void bn_experts_out(Program* program, int32_t size, const void* down, const void* load,
                              const int32_t* experts, const int32_t* starts, const int32_t* tokens,
                              const float* shares, const void* x, int64_t x_bytes, float* out,
                              int64_t inner, int64_t dim, int64_t count, int32_t per_token,
                              int32_t is_exact) {
  ExpertsOutArgs args{(const ExpertWeight*)down,
                      (const ExpertLoad*)load,
                      experts,
                      starts,
                      tokens,
                      shares,
                      (const uint8_t*)x,
                      out,
                      x_bytes,
                      inner,
                      dim,
                      count,
                      size,
                      per_token,
                      is_exact};
  const ExpertKernels& table = experts_table(isa());
  append(program, is_exact ? table.out_exact : table.out, &args, sizeof args, NOT_ROW_WISE);
}

// As bn_experts_out, but each pair's row by itself and without its share; out: [pairs, dim].
BN_EXPORT void bn_experts_apart(Program* program, int32_t size, const void* down, const void* load,
                                const int32_t* experts, const int32_t* starts, const void* x,
                                int64_t x_bytes, float* out, int64_t inner, int64_t dim,
                                int64_t count, int32_t per_token, int32_t is_exact) {
  ExpertsOutArgs args{(const ExpertWeight*)down,
                      (const ExpertLoad*)load,
                      experts,
                      starts,
                      nullptr,
                      nullptr,
                      (const uint8_t*)x,
                      out,
                      x_bytes,
                      inner,
                      dim,
                      count,
                      size,
                      per_token,
                      is_exact};
  const ExpertKernels& table = experts_table(isa());
  append(program, is_exact ? table.apart_exact : table.apart, &args, sizeof args, NOT_ROW_WISE);
}

// Rows of pairs from their places to [size, per_token, dim]; zeros where an expert is elsewhere.
BN_EXPORT void bn_spread_experts(Program* program, int32_t size, const float* x,
                                 const int32_t* places, float* out, int64_t dim,
                                 int32_t per_token) {
  SpreadArgs args{x, places, out, dim, per_token};
  append(program, SPREAD, &args, sizeof args, size);
}

// Where the pairs of `ids` [size, per_token] go. slots: [count, room], copies: [count]; dispatch: a
// Dispatch.
BN_EXPORT void bn_place_experts(Program* program, int32_t size, const int64_t* ids,
                                const int32_t* slots, const int32_t* copies, int64_t* out,
                                int64_t count, int64_t room, int32_t per_token, int32_t dispatch) {
  PlaceArgs args{ids, slots, copies, out, count, room, size, per_token, dispatch};
  append(program, PLACE, &args, sizeof args, NOT_ROW_WISE);
}

// The sum of share · x over a token's pairs, in rising order of their experts within each `home` of
// them, then over these. x: [size, per_token, dim]; out: [size, dim].
BN_EXPORT void bn_combine_experts(Program* program, int32_t size, const float* x,
                                  const int64_t* ids, const float* shares, float* out, int64_t dim,
                                  int64_t home, int32_t per_token) {
  CombineArgs args{x, ids, shares, out, dim, home, per_token};
  append(program, experts_table(isa()).combine, &args, sizeof args, size);
}
