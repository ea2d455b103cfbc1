// Low-rank adapters beside experts: the first products of a step's pairs, and the builders of what
// adds the second ones to the experts' own (experts.inl).
#include <algorithm>

#include "experts.h"

namespace banyan {
namespace {

constexpr int64_t PARTS = 32;     // of the pairs; more would be short ones
constexpr int32_t AT_ONCE = 32;   // pairs that share one reading of an adapter's matrix
constexpr int64_t FEW = 4;        // shares of the blocks, where there are few pairs

int64_t shrink_units(const void* args, const Sizes& sizes) {
  const ExpertShrinkArgs& a = *(const ExpertShrinkArgs*)args;
  if (!sizes.n[a.size] || !a.beside.any()) return 0;
  return PARTS * FEW;
}
int64_t shrink_grain(const void*, const Sizes&) { return 2; }

// Some pairs of one expert whose tokens have one adapter.
void shrink_run_of(const ExpertShrinkArgs& a, const AdapterPair& pair, int64_t first, int32_t count,
                   int64_t share, int64_t shares) {
  int32_t from[AT_ONCE], to[AT_ONCE];
  for (int32_t i = 0; i < count; i++) {
    to[i] = (int32_t)(first + i);
    from[i] = a.is_by_token ? a.beside.tokens[first + i] : to[i];
  }
  AdapterArgs of{};
  of.x = a.x, of.x_stride = a.x_stride, of.inputs = a.inputs;
  of.inner = a.beside.inner, of.width = a.beside.width;
  const AdapterKernels& kernels = lora_table(isa());
  for (int64_t block = share; block * RANKS < pair.rank; block += shares)
    kernels.shrink_rows(of, pair, block, from, to, count);
}

// Units are PARTS shares of the pairs, each of them FEW shares of the ranks.
void shrink_run(const void* args, const Sizes&, int64_t begin, int64_t end, Worker&) {
  const ExpertShrinkArgs& a = *(const ExpertShrinkArgs*)args;
  for (int64_t unit = begin; unit < end; unit++) {
    int64_t part = unit / FEW, pairs = a.load->pairs;
    int64_t from = part * pairs / PARTS, to = (part + 1) * pairs / PARTS;
    for (int64_t i = 0; i < a.load->active && from < to; i++) {
      int64_t expert = a.experts[i], last = std::min((int64_t)a.starts[expert + 1], to);
      for (int64_t at = std::max((int64_t)a.starts[expert], from); at < last;) {
        const AdapterPair* pair = a.beside.of(at, expert);
        int64_t first = at++;
        while (at < last && at < first + AT_ONCE && a.beside.of(at, expert) == pair) at++;
        if (pair) shrink_run_of(a, *pair, first, (int32_t)(at - first), unit % FEW, FEW);
      }
    }
  }
}

void shrink_cost(const void* args, const Sizes&, double* bytes, double* operations) {
  const ExpertShrinkArgs& a = *(const ExpertShrinkArgs*)args;
  *bytes = *operations = 0;
  for (int64_t i = 0; a.beside.any() && i < a.load->active; i++) {
    int64_t expert = a.experts[i];
    for (int64_t at = a.starts[expert]; at < a.starts[expert + 1]; at++)
      if (const AdapterPair* pair = a.beside.of(at, expert)) {
        double weights = (double)(pair->rank * a.inputs);
        *bytes += weights * (double)bytes_of(pair->type);
        *operations += 2 * weights;
      }
  }
}

const Kernel SHRINK = {"experts_adapter_down", shrink_units, shrink_grain, shrink_run, shrink_cost};

}  // namespace
}  // namespace banyan

using namespace banyan;

// down · x of the adapters beside a projection of experts, for each pair of a step; inner: [pairs,
// width]. table: by adapter, AdapterPair [count]; the lists are those of bn_sort_experts. x: a row
// for each token, or, unless `is_by_token`, for each pair.
BN_EXPORT void bn_experts_shrink(Program* program, int32_t size, const int64_t* table,
                                 const int32_t* pieces, const int32_t* numbers,
                                 const int32_t* tokens, float* inner, int64_t width,
                                 const void* load, const int32_t* experts, const int32_t* starts,
                                 const float* x, int64_t x_stride, int64_t inputs,
                                 int32_t per_token, int32_t is_by_token) {
  ExpertShrinkArgs args{{table, pieces, numbers, tokens, inner, width},
                        (const ExpertLoad*)load,
                        experts,
                        starts,
                        x,
                        x_stride,
                        inputs,
                        size,
                        per_token,
                        is_by_token};
  append(program, SHRINK, &args, sizeof args, NOT_ROW_WISE);
}

// bn_experts_in with the adapters of the pairs' tokens; `inner` is what bn_experts_shrink made.
BN_EXPORT void bn_experts_in_adapted(
    Program* program, int32_t size, const void* gate, const void* up, const void* load,
    const int32_t* experts, const int32_t* starts, const void* x, int64_t x_bytes, float* out,
    int64_t dim, int64_t inner_width, int64_t count, int32_t per_token, int32_t is_exact,
    int32_t curve, float limit, float alpha, const int64_t* table, const int32_t* pieces,
    const int32_t* numbers, const int32_t* tokens, float* inner, int64_t width) {
  AdaptedInArgs args{{(const ExpertWeight*)gate, (const ExpertWeight*)up, (const ExpertLoad*)load,
                      experts, starts, (const uint8_t*)x, out, x_bytes, dim, inner_width, count, size,
                      per_token, is_exact, curve, limit, alpha},
                     {table, pieces, numbers, tokens, inner, width}};
  const ExpertKernels& kernels = experts_table(isa());
  append(program, is_exact ? kernels.in_exact_adapted : kernels.in_adapted, &args, sizeof args,
         NOT_ROW_WISE);
}

// bn_experts_out with the adapters of the pairs' tokens.
BN_EXPORT void bn_experts_out_adapted(
    Program* program, int32_t size, const void* down, const void* load, const int32_t* experts,
    const int32_t* starts, const int32_t* tokens, const float* shares, const void* x,
    int64_t x_bytes, float* out, int64_t inner_width, int64_t dim, int64_t count, int32_t per_token,
    int32_t is_exact, const int64_t* table, const int32_t* pieces, const int32_t* numbers,
    float* inner, int64_t width) {
  AdaptedOutArgs args{{(const ExpertWeight*)down, (const ExpertLoad*)load, experts, starts, tokens,
                       shares, (const uint8_t*)x, out, x_bytes, inner_width, dim, count, size,
                       per_token, is_exact},
                      {table, pieces, numbers, tokens, inner, width}};
  const ExpertKernels& kernels = experts_table(isa());
  append(program, is_exact ? kernels.out_exact_adapted : kernels.out_adapted, &args, sizeof args,
         NOT_ROW_WISE);
}
