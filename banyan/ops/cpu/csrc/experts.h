// Experts: which of them a token goes through, and their feed-forward blocks over packed weights.
//
// The pairs of a step, (token, chosen expert), are sorted by expert, so that the tokens of an expert
// lie together and go through its tiles as rows of a projection do. Work is cut by columns of the
// results, not by experts: a unit takes its columns through all experts in rising order, so units
// are equal work however unequal the experts' loads are, and a token adds its experts up in that
// order whoever else is in the step.
#pragma once
#include "lora.h"
#include "linear.h"

namespace banyan {

// One projection of one expert, in the tiles of linear.h.
struct ExpertWeight {
  const uint8_t* tiles;
  const float* factors;
  int64_t format;
  const float* bias;  // [outputs up to a multiple of 16] or null
};

// How many experts of a step have tokens, and how many pairs there are; kept for reports.
struct ExpertLoad {
  int64_t active, pairs;
};

struct LogitsArgs {
  const float* x;       // [tokens, dim], strided
  const float* weight;  // [count, dim]
  const float* bias;    // [count] or null
  float* out;           // [tokens, count]
  int64_t x_stride, dim, count;
  int32_t size;  // of the tokens
};

// SPARSEMIXER: the best expert and the best of the others, each weighed among those whose logits are
// nearly as large.
enum Scoring : int32_t { SOFTMAX = 0, SIGMOID = 1, SPARSEMIXER = 2 };

struct RouteArgs {
  const float* logits;      // [tokens, count]
  const float* correction;  // [count] or null
  int64_t* ids;             // [tokens, per_token], best first
  float* shares;            // [tokens, per_token]
  int32_t count, per_token, scoring, is_normalised, groups, top_groups, group_best;
  float scale, jitter;
};

// A step's pairs by expert. Experts are counted from the first one that is here.
struct SortArgs {
  const int64_t* ids;   // [tokens, per_token]
  const float* shares;  // [tokens, per_token]
  ExpertLoad* load;
  int32_t* experts;      // [count]: those with tokens, in rising order
  int32_t* starts;       // [count + 1]: where the pairs of each begin
  int32_t* places;       // [tokens, per_token]: where a pair lies; -1: its expert is elsewhere
  int32_t* tokens;       // [pairs]: of the pair at a place
  float* sorted_shares;  // [pairs]
  int64_t first, count;
  int32_t size, per_token;
};

struct GatherArgs {
  const uint8_t* x;  // [tokens] rows
  const int32_t* places;
  uint8_t* out;  // [pairs] rows
  int64_t x_bytes, bytes;
  int32_t per_token;
};

struct ExpertRowsArgs {  // rows of pairs rounded for weights of a format
  const float* x;        // [pairs, k]
  uint8_t* out;
  const ExpertLoad* load;
  int64_t k;
  int32_t format, size, per_token;
};

// SILU: of at most `limit`, times an up of at most `limit` to either side.
// CLAMPED: a gate of at most `limit` times its sigmoid at `alpha`, times one more than an up of at
// most `limit` to either side. PLAIN: there is no gate, and what is above zero is squared.
enum Curve : int32_t { SILU = 0, GELU = 1, GELU_TANH = 2, CLAMPED = 3, PLAIN = 4 };

// act(x · gate) · (x · up) of every pair.
struct ExpertsInArgs {
  const ExpertWeight *gate, *up;
  const ExpertLoad* load;
  const int32_t *experts, *starts;
  const uint8_t* x;  // [pairs] rows, rounded or fp32
  float* out;        // [pairs, inner]
  int64_t x_bytes, dim, inner, count;
  int32_t size, per_token, is_exact, curve;
  float limit, alpha;
};

// The sum over a token's experts of share · (x · down).
struct ExpertsOutArgs {
  const ExpertWeight* down;
  const ExpertLoad* load;
  const int32_t *experts, *starts, *tokens;
  const float* shares;
  const uint8_t* x;  // [pairs] rows, rounded or fp32
  float* out;        // [tokens, dim]
  int64_t x_bytes, inner, dim, count;
  int32_t size, per_token, is_exact;
};

// The adapters beside one projection of all experts here. A pair goes through that of its token, of
// its own expert.
struct ExpertAdapters {
  const int64_t* table;   // by adapter: the address of AdapterPair [count], or 0
  const int32_t* pieces;  // of the step: [0] is 0 where no token has an adapter
  const int32_t* numbers;  // [tokens], the adapter of each; not filled where there are no pieces
  const int32_t* tokens;   // [pairs], of the pair at a place
  float* inner;            // [pairs, width]: down · x, scaled
  int64_t width;

  bool any() const { return pieces[0] > 0; }
  // What the adapter of the pair at a place has for its expert; null for nothing.
  const AdapterPair* of(int64_t place, int64_t expert) const {
    const AdapterPair* pairs = (const AdapterPair*)table[numbers[tokens[place]]];
    return pairs && pairs[expert].rank ? pairs + expert : nullptr;
  }
};

// The first products of a step's pairs. x: rows of tokens, or of pairs where they lie.
struct ExpertShrinkArgs {
  ExpertAdapters beside;
  const ExpertLoad* load;
  const int32_t *experts, *starts;
  const float* x;
  int64_t x_stride, inputs;
  int32_t size, per_token, is_by_token;
};

struct AdaptedInArgs {
  ExpertsInArgs of;  // first: what stands around the products reads these
  ExpertAdapters beside;
};
struct AdaptedOutArgs {
  ExpertsOutArgs of;
  ExpertAdapters beside;
};

// Which of the places of an expert a pair goes to: by the token's number, or by how many pairs of
// the step have come to the expert before. EVEN takes other experts, all of them as often.
enum Dispatch : int32_t { STATIC = 0, DYNAMIC = 1, EVEN = 2 };

struct PlaceArgs {
  const int64_t* ids;     // [tokens, per_token]
  const int32_t* slots;   // [count, room]: places of an expert
  const int32_t* copies;  // [count]: how many it has
  int64_t* out;           // [tokens, per_token]
  int64_t count, room;
  int32_t size, per_token, dispatch;
};

// Rows of pairs at their places to the pairs' own; pairs that are elsewhere become zeros.
struct SpreadArgs {
  const float* x;         // [pairs, dim]
  const int32_t* places;  // [tokens, per_token]
  float* out;             // [tokens, per_token, dim]
  int64_t dim;
  int32_t per_token;
};

// The sum over a token's experts of share · x, in rising order within each of the homes, of `home`
// experts each, and then over the homes.
struct CombineArgs {
  const float* x;       // [tokens, per_token, dim]
  const int64_t* ids;   // [tokens, per_token]
  const float* shares;  // [tokens, per_token]
  float* out;           // [tokens, dim]
  int64_t dim, home;
  int32_t per_token;
};

struct ExpertKernels {
  Kernel logits, route, in, out, in_exact, out_exact, apart, apart_exact, combine;
  Kernel in_adapted, out_adapted, in_exact_adapted, out_exact_adapted;
};
extern const ExpertKernels experts_base, experts_avx2, experts_avx512;
const ExpertKernels& experts_table(int32_t level);

}  // namespace banyan
