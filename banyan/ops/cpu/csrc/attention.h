// Attention over pages: the layout of a page, the plan of a step, and the tables of kernels.
//
// K lies as [page][kv_head][head_dim][page_size] and V as [page][kv_head][page_size][head_dim], so
// that vectors run over the tokens of a page for q·k and over the dimensions of a head for p·v,
// and nothing is ever summed across lanes. Of 8-bit K and V a (page, kv_head) goes on with a scale
// per token, fp32 [page_size]: a number is scale · byte, the largest of a head being 127 or -127.
//
// One arithmetic serves every shape of a step. Keys are taken in *spans* at absolute positions. In
// a span a query has its largest logit, its sum of exponentials and its weighted values; spans are
// folded together in ascending order. Who computes a span, with how many queries beside it, and
// whether it passes through memory before it is folded, changes no bit.
#pragma once
#include "runtime.h"

namespace banyan {

constexpr int SPAN = 256;         // keys that are weighed at once; spans start at its multiples
constexpr int GROUP = 16;         // tokens that lie together in every page
constexpr int TILE = 48;          // (token, head) pairs of a unit at most, if heads allow
constexpr int WIDE_TILE = 192;    // the same where tile registers take them
constexpr int MAX_SPLITS = 4096;  // spans of a step that may pass through memory

enum CacheType : int32_t { CACHE_F32 = 0, CACHE_F16 = 1, CACHE_BF16 = 2, CACHE_INT8 = 3,
                           CACHE_E4M3 = 4, CACHE_E5M2 = 5, NUM_CACHE_TYPES = 6 };

// Of a step's tokens [tokens, stride]: base, length, and where each of the positions base ...
// base + length - 1 of the token's past lies, itself the last one. A token whose length is 0 stands
// where it lies, and so do all before it. Drafts that branch lie one after another and stand below
// each other.
struct Paths {
  const int32_t* rows = nullptr;  // null: no token has one
  int64_t stride = 0;
  const int32_t* of(int64_t token) const {
    return rows && rows[token * stride + 1] ? rows + token * stride : nullptr;
  }
};
inline int32_t base_of(const int32_t* path) { return path[0]; }
inline int32_t position_of(const int32_t* path) { return path[0] + path[1] - 1; }
inline int64_t place_of(const int32_t* path, int64_t position) {
  return path && position >= path[0] ? path[2 + position - path[0]] : position;
}

// A token at work in a unit. Positions count from the beginning of its request.
struct Query {
  int32_t token, position;
  int32_t end;   // position after the last that it sees, position + 1 but in mutual rows
  int32_t slot;  // of its first span's result in memory; -1: the unit folds all spans by itself
};

// Queries whose keys lie in the same pages for all spans first_span ... end_span - 1.
struct Unit {
  int32_t first_query, num_queries;
  int32_t row;  // whose page table serves
  int32_t first_span, end_span;
};

// One span of a row that is split.
struct Piece {
  int32_t row, span;
  int32_t first_token, count, context;
  int32_t slot;           // of the row's first token
  int32_t next, chained;  // pieces on the same pages: the next one; their tokens, or IN_A_CHAIN
};
constexpr int32_t IN_A_CHAIN = -1, TABLE = 2 * MAX_SPLITS;

// What a step's layers of one geometry share; lies in memory that outlives the program, written
// anew before each run.
struct Plan {
  int64_t num_units;
  double pairs, keys;  // (query, key) pairs, and keys loaded, per kv head
  Unit* units;         // [max_tokens + MAX_SPLITS]
  Query* queries;      // [max_tokens + MAX_SPLITS]
  int32_t* arrived;    // [max_tokens, kv_heads]: spans of a split token that are in memory
  Piece* pieces;       // [MAX_SPLITS]
  int32_t* table;      // [TABLE]: pieces by their first page
  float* results;      // [MAX_SPLITS, heads, head_dim + GROUP]: largest logit, sum, ..., values
  Paths paths;
};

struct PlanArgs {
  Plan* plan;
  const int32_t *page_tables, *row_starts, *context_lengths;
  int64_t table_stride;
  int32_t page_size, group, kv_heads, window;
  int32_t shares_prefixes, tile;
  Paths paths;
  const int32_t* ends;  // of a step's tokens, 0: position + 1; null: all are 0
};

struct AttentionArgs {
  const float* q;  // [tokens, heads, head_dim], strided by token
  const void *k_pages, *v_pages;
  float* out;  // [tokens, heads, head_dim], contiguous
  const Plan* plan;
  const int32_t* page_tables;
  int64_t q_stride, table_stride;
  int32_t page_size, kv_heads, group, head_dim, window;
  float scale, soft_cap;
  const float* sinks;  // [heads], a logit beside those of the keys, without a value; or null
  float unit = 1.0f;   // of the values
};

// Latent attention: one latent vector and one turned key of each token for all heads. Both lie as
// [page][page_size][width], of 8-bit numbers with their scale behind them. The heads are cut into
// `kv_heads` blocks of `group` heads for the plan; head_dim is the rank up to a multiple of GROUP.
struct LatentArgs {
  AttentionArgs of;       // q: [tokens, heads, rank]; k_pages: latents; v_pages: keys
  const float* q_turned;  // [tokens, heads, rope_dim], strided by token
  int64_t turned_stride;
  int32_t rank, rope_dim;
  const int32_t* chosen;  // [tokens, words]: bits of the positions that a token reads; null: all
  int64_t words;
};

// What a token reads, by an indexer's scores. Its keys lie as those of latent attention, in parts.
struct ChooseArgs {
  const float *q, *q_turned;  // [tokens, heads, plain], [tokens, heads, turned], strided by token
  const float* weights;       // [tokens, heads], strided by token
  const void *key_pages, *turned_pages;
  const int32_t *page_tables, *row_starts, *context_lengths;
  int32_t* chosen;  // [tokens, words]
  int64_t q_stride, turned_stride, weights_stride, table_stride, words;
  int32_t page_size, heads, plain, turned, top, size;
  Paths paths;
  int32_t first;  // positions before it are not chosen
};

struct WriteLatentArgs {
  const float *latent, *key;  // [tokens, rank], [tokens, rope_dim], strided by token
  void *latent_pages, *key_pages;
  const int64_t* locations;  // [tokens]: page · page_size + offset
  int64_t latent_stride, key_stride;
  int32_t rank, rope_dim;
};

struct WriteArgs {
  const float *k, *v;  // [tokens, kv_heads, head_dim], strided by token
  void *k_pages, *v_pages;
  const int64_t* locations;  // [tokens]: page · page_size + offset
  int64_t k_stride, v_stride;
  int32_t page_size, kv_heads, head_dim;
  float factor = 1.0f;  // on floats of 8 bits
};

// First position that a query sees. A window below zero leaves out so many positions at the
// beginning, where no query stands.
inline int32_t first_seen(int32_t position, int32_t window) {
  if (window < 0) return -window;
  return window && position >= window ? position - window + 1 : 0;
}

struct AttentionKernels {
  Kernel write[NUM_CACHE_TYPES], attend[NUM_CACHE_TYPES];
  Kernel write_latent[NUM_CACHE_TYPES], attend_latent[NUM_CACHE_TYPES];
  Kernel choose[NUM_CACHE_TYPES];
  int32_t lanes;
};

extern const AttentionKernels attention_base, attention_avx2, attention_avx512;
const AttentionKernels& attention_table(int32_t level, int head_dim);

// Attention on rounded numbers (attention_pairs_<set>.cpp), where the machine, the pages and the heads
// have it; or null.
const Kernel* rounding_attention(int32_t cache, int head_dim);
extern const Kernel attend_float16_pairs, attend_bfloat16_pairs;

}  // namespace banyan
