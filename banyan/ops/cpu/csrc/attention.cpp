// Attention over pages: the planner and the builders.
//
// The planner turns a step's rows into units of work, once for all layers of one geometry, before
// the program runs. Rows of one tile are *split* by spans, so that few long contexts keep all
// threads busy, and split rows whose span lies in the same pages (a shared prefix) become one unit
// that loads them once. Rows of many tokens become tiles that walk all their spans.
#include "attention.h"

#include <algorithm>
#include <cstring>

namespace banyan {

// The kernels of an instruction set for heads of this size.
const AttentionKernels& attention_table(int32_t level, int head_dim) {
#ifdef BN_ATTENTION_AVX512
  if (level >= AVX512 && head_dim % attention_avx512.lanes == 0) return attention_avx512;
#endif
#ifdef BN_ATTENTION_AVX2
  if (level >= AVX2) return attention_avx2;
#endif
  (void)level, (void)head_dim;
  return attention_base;
}

#ifdef BN_ATTENTION_PAIRS_VNNI
#define BN_ROUNDS_FROM VNNI
#endif
#ifdef BN_ATTENTION_PAIRS_AMX
#define BN_ROUNDS_FROM AMX
#endif

const Kernel* rounding_attention(int32_t cache, int head_dim) {
#ifdef BN_ROUNDS_FROM
  if (isa() < BN_ROUNDS_FROM || !has_bf16_products() || head_dim % attention_avx512.lanes)
    return nullptr;
  if (cache == CACHE_F16) return &attend_float16_pairs;
  if (cache == CACHE_BF16) return &attend_bfloat16_pairs;
#endif
  (void)cache, (void)head_dim;
  return nullptr;
}

}  // namespace banyan

using namespace banyan;

namespace {

// --- plan ----------------------------------------------------------------------------------------

struct Planner {
  const PlanArgs& args;
  Plan& plan;
  int64_t num_units = 0, num_queries = 0, num_slots = 0;
  int32_t num_pieces = 0;
  int tile;  // tokens of a unit

  explicit Planner(const PlanArgs& a) : args(a), plan(*a.plan) {
    tile = std::max(1, args.tile / args.group);
    plan.pairs = plan.keys = 0;
  }

  int32_t seen_from(int32_t position) const { return first_seen(position, args.window); }
  int first_span(int32_t position) const { return seen_from(position) / SPAN; }
  int num_spans(int32_t position) const { return position / SPAN - first_span(position) + 1; }

  void add_row(int row) {
    int begin = args.row_starts[row], count = args.row_starts[row + 1] - begin;
    int context = args.context_lengths[row];
    if (count > 0 && args.paths.of(begin)) return add_tree(row, begin, count);
    for (int t = 0; t < count; t++)
      plan.pairs += end_of(begin + t, context + t) - seen_from(context + t);
    if (count > 0 && (is_mutual(begin, count) || !split(row, begin, count, context)))
      add_tiles(row, begin, count, context);
  }

  int32_t end_of(int token, int32_t position) const {
    return args.ends && args.ends[token] ? args.ends[token] : position + 1;
  }
  // Some token of the row sees later ones.
  bool is_mutual(int first_token, int count) const {
    for (int t = 0; args.ends && t < count; t++)
      if (args.ends[first_token + t]) return true;
    return false;
  }

  // One tile after another: the lightest and the heaviest in turn, so that every stretch of units
  // is about the same work.
  void add_tiles(int row, int first_token, int count, int context) {
    int tiles = (count + tile - 1) / tile;
    for (int i = 0; i < tiles; i++) {
      int nth = i % 2 ? tiles - 1 - i / 2 : i / 2;
      int begin = nth * tile, end = std::min(count, begin + tile), seen = 0;
      Unit& unit = plan.units[num_units++];
      unit = {(int32_t)num_queries, end - begin, row, first_span(context + begin), 0};
      for (int t = begin; t < end; t++) {
        Query query{first_token + t, context + t, end_of(first_token + t, context + t), -1};
        plan.queries[num_queries++] = query;
        seen = std::max(seen, query.end);
      }
      unit.end_span = (seen - 1) / SPAN + 1;
      plan.keys += seen - seen_from(context + begin);
    }
  }

  // A row of one tile, span by span; false where there is no need or no room for it.
  bool split(int row, int first_token, int count, int context) {
    int first = first_span(context), last = (context + count - 1) / SPAN, spans = 0;
    if (count > tile || last == first) return false;
    for (int t = 0; t < count; t++) spans += num_spans(context + t);
    if (num_slots + spans > MAX_SPLITS) return false;
    for (int span = first; span <= last; span++)
      plan.pieces[num_pieces++] = {row,     span,               first_token, count,
                                   context, (int32_t)num_slots, -1,          0};
    num_slots += spans;
    std::memset(plan.arrived + (int64_t)first_token * args.kv_heads, 0,
                sizeof(int32_t) * count * args.kv_heads);
    return true;
  }

  int32_t position(int token, int32_t otherwise) const {
    const int32_t* path = args.paths.of(token);
    return path ? position_of(path) : otherwise;
  }

  // A row of drafts that branch. Spans before its base lie as in any row; what a token reads from
  // there on is its own, and so is a unit.
  void add_tree(int row, int first_token, int count) {
    for (int from = 0; from < count; from += tile)
      add_branches(row, first_token + from, std::min(count - from, tile));
  }
  void add_branches(int row, int first_token, int count) {
    int32_t base = base_of(args.paths.of(first_token)), spans = 0, least = INT32_MAX;
    for (int t = first_token; t < first_token + count; t++) {
      int32_t at = position(t, 0);
      plan.pairs += at + 1 - seen_from(at);
      spans += num_spans(at);
      least = std::min(least, at);
    }
    int first = first_span(least), own = base / SPAN;
    bool splits = own > first && num_slots + spans <= MAX_SPLITS;
    int32_t slot = (int32_t)num_slots;
    for (int span = first; splits && span < own; span++)
      plan.pieces[num_pieces++] = {row, span, first_token, count, base, slot, -1, 0};
    for (int t = first_token; t < first_token + count; t++) {
      int32_t at = position(t, 0);
      if (!splits) {
        add_own(row, t, at, first_span(at), at / SPAN + 1, -1);
        continue;
      }
      for (int span = std::max(own, first_span(at)); span <= at / SPAN; span++)
        add_own(row, t, at, span, span + 1, slot);
      slot += num_spans(at);
    }
    if (!splits) return;
    num_slots += spans;
    std::memset(plan.arrived + (int64_t)first_token * args.kv_heads, 0,
                sizeof(int32_t) * count * args.kv_heads);
  }
  void add_own(int row, int token, int32_t at, int span, int end_span, int32_t slot) {
    plan.units[num_units++] = {(int32_t)num_queries, 1, row, span, end_span};
    plan.queries[num_queries++] = {token, at, at + 1, slot};
    plan.keys += std::min(at + 1, end_span * SPAN) - std::max(span * SPAN, seen_from(at));
  }

  // Every key of the span lies in the past of every token: nothing but its pages matters.
  bool is_whole(const Piece& p) const {
    return (p.span + 1) * SPAN <= p.context + 1 &&
           seen_from(p.context + p.count - 1) <= p.span * SPAN;
  }
  const int32_t* pages(const Piece& p) const {
    return args.page_tables + p.row * args.table_stride + p.span * (SPAN / args.page_size);
  }

  // Chain pieces on the same pages behind the first of them, up to a tile.
  void share() {
    std::fill_n(plan.table, TABLE, -1);
    for (int32_t i = 0; i < num_pieces; i++) {
      Piece& piece = plan.pieces[i];
      if (!is_whole(piece)) continue;
      uint32_t at = (uint32_t)pages(piece)[0] * 2654435761u % TABLE;
      for (; plan.table[at] >= 0; at = (at + 1) % TABLE) {
        Piece& head = plan.pieces[plan.table[at]];
        if (head.span != piece.span ||
            std::memcmp(pages(head), pages(piece), sizeof(int32_t) * (SPAN / args.page_size)))
          continue;
        if (head.chained + head.count + piece.count > tile) break;  // full: begin another
        head.chained += piece.count;
        piece.chained = IN_A_CHAIN;
        piece.next = head.next;
        head.next = i;
        break;
      }
      if (piece.chained != IN_A_CHAIN) plan.table[at] = i;
    }
  }

  void add_pieces() {
    if (args.shares_prefixes && num_pieces && plan.pieces[num_pieces - 1].row != plan.pieces[0].row)
      share();
    for (int32_t i = 0; i < num_pieces; i++) {
      const Piece& head = plan.pieces[i];
      if (head.chained == IN_A_CHAIN) continue;
      Unit unit{(int32_t)num_queries, 0, head.row, head.span, head.span + 1};
      for (int32_t member = i; member >= 0; member = plan.pieces[member].next)
        add_queries(plan.pieces[member]);
      unit.num_queries = (int32_t)num_queries - unit.first_query;
      if (!unit.num_queries) continue;
      plan.units[num_units++] = unit;
      int32_t begin = std::max(head.span * SPAN, seen_from(head.context));
      plan.keys += std::min(head.context + head.count, (head.span + 1) * SPAN) - begin;
    }
  }

  void add_queries(const Piece& piece) {
    int32_t slot = piece.slot;
    for (int t = 0; t < piece.count; t++) {
      int32_t at = position(piece.first_token + t, piece.context + t);
      if (piece.span >= first_span(at) && piece.span <= at / SPAN)
        plan.queries[num_queries++] = {piece.first_token + t, at, at + 1, slot};
      slot += num_spans(at);
    }
  }
};

int64_t plan_units(const void* args, const Sizes& sizes) {
  const PlanArgs& a = *(const PlanArgs*)args;
  Planner planner(a);
  for (int64_t row = 0; row < sizes.n[ROWS]; row++) planner.add_row((int)row);
  planner.add_pieces();
  a.plan->num_units = planner.num_units;
  return 0;
}
int64_t plan_grain(const void*, const Sizes&) { return 1; }
void plan_run(const void*, const Sizes&, int64_t, int64_t, Worker&) {}
void plan_cost(const void*, const Sizes&, double* bytes, double* operations) {
  *bytes = *operations = 0;
}

// Units are counted, here and in the layers behind, before a program runs: planning is counting.
constexpr Kernel PLAN = {"attention_plan", plan_units, plan_grain, plan_run, plan_cost};

constexpr int PLAN_PARTS = 7;

size_t round_up(size_t bytes) { return (bytes + 63) / 64 * 64; }

size_t sizes_of_plan(int64_t max_tokens, int64_t kv_heads, int64_t group, int64_t head_dim,
                     size_t* offsets) {
  int64_t most = max_tokens + MAX_SPLITS;
  size_t sizes[] = {sizeof(Plan),
                    sizeof(Unit) * most,
                    sizeof(Query) * most,
                    sizeof(int32_t) * max_tokens * kv_heads,
                    sizeof(Piece) * MAX_SPLITS,
                    sizeof(int32_t) * TABLE,
                    sizeof(float) * MAX_SPLITS * kv_heads * group * (head_dim + GROUP)};
  size_t at = 0;
  for (int i = 0; i < PLAN_PARTS; i++) {
    offsets[i] = at;
    at += round_up(sizes[i]);
  }
  return at;
}

}  // namespace

// Bytes that a plan needs, 64-byte aligned, for as long as programs with it run.
BN_EXPORT int64_t bn_attention_plan_bytes(int64_t max_tokens, int64_t kv_heads, int64_t group,
                                          int64_t head_dim) {
  size_t offsets[PLAN_PARTS];
  return (int64_t)sizes_of_plan(max_tokens, kv_heads, group, head_dim, offsets);
}

// Plan each run of this program for its attention layers of one geometry, in the given memory.
// rounds: 1 for layers that round. paths: [max_tokens, path_stride], or null. ends: [max_tokens],
// the position after the last that a token sees, 0 where that is its own; or null.
BN_EXPORT void bn_attention_plan(Program* program, int32_t, void* memory,
                                 const int32_t* page_tables, int64_t table_stride,
                                 const int32_t* row_starts, const int32_t* context_lengths,
                                 int32_t page_size, int32_t kv_heads, int32_t group,
                                 int32_t head_dim, int32_t window, int32_t max_tokens,
                                 int32_t shares_prefixes, int32_t rounds, const int32_t* paths,
                                 int64_t path_stride, const int32_t* ends) {
  size_t offsets[PLAN_PARTS];
  sizes_of_plan(max_tokens, kv_heads, group, head_dim, offsets);
  uint8_t* at = (uint8_t*)memory;
  Plan* plan = (Plan*)at;
  *plan = Plan{0,
               0,
               0,
               (Unit*)(at + offsets[1]),
               (Query*)(at + offsets[2]),
               (int32_t*)(at + offsets[3]),
               (Piece*)(at + offsets[4]),
               (int32_t*)(at + offsets[5]),
               (float*)(at + offsets[6]),
               {paths, path_stride}};
  PlanArgs args{plan,      page_tables, row_starts, context_lengths, table_stride,
                page_size, group,       kv_heads,   window,          shares_prefixes,
                rounds && isa() >= AMX ? WIDE_TILE : TILE,
                {paths, path_stride}, ends};
  append(program, PLAN, &args, sizeof args, NOT_ROW_WISE);
}

// Whether attention may compute on rounded numbers with these pages and heads.
BN_EXPORT int32_t bn_rounds_attention(int32_t cache, int32_t head_dim) {
  return rounding_attention(cache, head_dim) != nullptr;
}

// cache: a CacheType. plan: the memory that bn_attention_plan was given earlier in this program. sinks:
// [kv_heads · group] or null. unit: what floats of 8 bits are multiplied by. rounds: 1 where
// bn_rounds_attention says so and numbers may be rounded.
BN_EXPORT void bn_paged_attention(Program* program, int32_t, int32_t cache, const float* q,
                                  int64_t q_stride, const void* k_pages, const void* v_pages,
                                  const void* plan, const int32_t* page_tables,
                                  int64_t table_stride, float* out, int32_t page_size,
                                  int32_t kv_heads, int32_t group, int32_t head_dim, int32_t window,
                                  float scale, float soft_cap, const float* sinks, float unit,
                                  int32_t rounds) {
  AttentionArgs args{q,        k_pages,      v_pages,   out,      (const Plan*)plan, page_tables,
                     q_stride, table_stride, page_size, kv_heads, group,             head_dim,
                     window,   scale * unit, soft_cap,  sinks,    unit};
  const Kernel& exact = attention_table(isa(), head_dim).attend[cache];
  append(program, rounds ? *rounding_attention(cache, head_dim) : exact, &args, sizeof args,
         NOT_ROW_WISE);
}

// factor: on K and V that become floats of 8 bits.
BN_EXPORT void bn_write_kv(Program* program, int32_t size, int32_t cache, const float* k,
                           int64_t k_stride, const float* v, int64_t v_stride, void* k_pages,
                           void* v_pages, const int64_t* locations, int32_t page_size,
                           int32_t kv_heads, int32_t head_dim, float factor) {
  WriteArgs args{k,        v,        k_pages,   v_pages,  locations, k_stride,
                 v_stride, page_size, kv_heads, head_dim, factor};
  append(program, attention_table(isa(), head_dim).write[cache], &args, sizeof args, size);
}

// Latent attention with a plan for `blocks` kv heads of `group` heads and a head_dim of `padded`, the
// rank up to a multiple of 16. out: [tokens, blocks · group, padded]; chosen: as
// bn_choose_positions leaves it, or null.
BN_EXPORT void bn_latent_attention(Program* program, int32_t, int32_t cache, const float* q,
                                   int64_t q_stride, const float* q_turned, int64_t turned_stride,
                                   const void* latent_pages, const void* key_pages,
                                   const void* plan, const int32_t* page_tables,
                                   int64_t table_stride, float* out, int32_t page_size,
                                   int32_t blocks, int32_t group, int32_t padded, int32_t rank,
                                   int32_t rope_dim, int32_t window, float scale,
                                   const int32_t* chosen, int64_t words) {
  AttentionArgs of{q,        latent_pages, key_pages, out,    (const Plan*)plan, page_tables,
                   q_stride, table_stride, page_size, blocks, group,             padded,
                   window,   scale,        0.0f,     nullptr};
  LatentArgs args{of, q_turned, turned_stride, rank, rope_dim, chosen, words};
  append(program, attention_table(isa(), padded).attend_latent[cache], &args, sizeof args,
         NOT_ROW_WISE);
}

// Which positions each token reads: those of the `top` best scores. chosen: [tokens, words], bit
// p % 32 of word p / 32 for position p; words behind a token's own position are left as they are.
// paths: as for a plan; first: positions before it are not chosen.
BN_EXPORT void bn_choose_positions(Program* program, int32_t size, int32_t cache, const float* q,
                                   int64_t q_stride, const float* q_turned, int64_t turned_stride,
                                   const float* weights, int64_t weights_stride,
                                   const void* key_pages, const void* turned_pages,
                                   const int32_t* page_tables, int64_t table_stride,
                                   const int32_t* row_starts, const int32_t* context_lengths,
                                   int32_t* chosen, int64_t words, int32_t page_size, int32_t heads,
                                   int32_t plain, int32_t turned, int32_t top,
                                   const int32_t* paths, int64_t path_stride, int32_t first) {
  ChooseArgs args{q,
                  q_turned,
                  weights,
                  key_pages,
                  turned_pages,
                  page_tables,
                  row_starts,
                  context_lengths,
                  chosen,
                  q_stride,
                  turned_stride,
                  weights_stride,
                  table_stride,
                  words,
                  page_size,
                  heads,
                  plain,
                  turned,
                  top,
                  size,
                  {paths, path_stride},
                  first};
  append(program, attention_table(isa(), GROUP).choose[cache], &args, sizeof args, NOT_ROW_WISE);
}

// Pages hold rows of `rank` and `rope_dim` numbers, by token.
BN_EXPORT void bn_write_latent(Program* program, int32_t size, int32_t cache, const float* latent,
                               int64_t latent_stride, const float* key, int64_t key_stride,
                               void* latent_pages, void* key_pages, const int64_t* locations,
                               int32_t rank, int32_t rope_dim) {
  WriteLatentArgs args{latent,    key,           latent_pages, key_pages, locations,
                       latent_stride, key_stride, rank,         rope_dim};
  append(program, attention_table(isa(), GROUP).write_latent[cache], &args, sizeof args, size);
}
