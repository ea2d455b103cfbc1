// Attention over pages: the planner and the builders.
//
// The planner turns a step's rows into units of work, once for all layers of one geometry, before
// the program runs. Rows of one tile are *split* by spans, so that few long contexts keep all
// threads busy, and split rows whose span lies in the same pages (a shared prefix) become one unit
// that loads them once. Rows of many tokens become tiles that walk all their spans.
#include "attention.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <vector>

using namespace banyan;

namespace {

const AttentionKernels& table_of(int32_t level, int head_dim) {
#if defined(__x86_64__)
  if (level >= AVX512 && head_dim % attention_avx512.lanes == 0) return attention_avx512;
  if (level >= AVX2) return attention_avx2;
#endif
  (void)level, (void)head_dim;
  return attention_base;
}

// --- plan ----------------------------------------------------------------------------------------

struct Planner {
  const PlanArgs& args;
  Plan& plan;
  int64_t num_units = 0, num_queries = 0, num_slots = 0;
  int tile;  // tokens of a unit

  explicit Planner(const PlanArgs& a) : args(a), plan(*a.plan) {
    tile = std::max(1, TILE / args.group);
    plan.pairs = plan.keys = 0;
  }

  int first_span(int32_t position) const { return first_seen(position, args.window) / SPAN; }

  // One tile after another: the lightest and the heaviest in turn, so that every stretch of units
  // is about the same work.
  void add_tiles(int row, int first_token, int count, int context) {
    int tiles = (count + tile - 1) / tile;
    for (int i = 0; i < tiles; i++) {
      int nth = i % 2 ? tiles - 1 - i / 2 : i / 2;
      int begin = nth * tile, end = std::min(count, begin + tile);
      plan.units[num_units++] = {(int32_t)num_queries, end - begin, row,
                                 first_span(context + begin), (context + end - 1) / SPAN + 1};
      for (int t = begin; t < end; t++)
        plan.queries[num_queries++] = {first_token + t, context + t, -1};
      plan.keys += context + end - first_seen(context + begin, args.window);
    }
  }

  // A row of one tile, span by span; false where there is no need or no room for it.
  bool split(int row, int first_token, int count, int context) {
    int last = (context + count - 1) / SPAN, first = first_span(context), spans = 0;
    for (int t = 0; t < count; t++)
      spans += (context + t) / SPAN - first_span(context + t) + 1;
    if (count > tile || last == first || num_slots + spans > MAX_SPLITS) return false;
    int32_t slot = (int32_t)num_slots;
    num_slots += spans;
    for (int t = 0; t < count; t++)
      std::memset(plan.arrived + (int64_t)(first_token + t) * args.kv_heads, 0,
                  sizeof(int32_t) * args.kv_heads);
    for (int span = first; span <= last; span++) {
      Unit unit{(int32_t)num_queries, 0, row, span, span + 1};
      int32_t mine = slot;
      for (int t = 0; t < count; t++) {
        int32_t position = context + t;
        if (span >= first_span(position) && span <= position / SPAN) {
          plan.queries[num_queries++] = {first_token + t, position, mine};
          unit.num_queries++;
        }
        mine += position / SPAN - first_span(position) + 1;
      }
      if (unit.num_queries) plan.units[num_units++] = unit;
    }
    plan.keys += context + count - first_seen(context, args.window);
    return true;
  }

  void add_row(int row) {
    int begin = args.row_starts[row], count = args.row_starts[row + 1] - begin;
    int context = args.context_lengths[row];
    if (count <= 0) return;
    for (int t = 0; t < count; t++)
      plan.pairs += context + t + 1 - first_seen(context + t, args.window);
    if (!split(row, begin, count, context)) add_tiles(row, begin, count, context);
  }
};

int64_t plan_units(const void* args, const Sizes& sizes) {
  const PlanArgs& a = *(const PlanArgs*)args;
  Planner planner(a);
  for (int64_t row = 0; row < sizes.n[ROWS]; row++) planner.add_row((int)row);
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

size_t round_up(size_t bytes) { return (bytes + 63) / 64 * 64; }

size_t sizes_of_plan(int64_t max_tokens, int64_t kv_heads, int64_t group, int64_t head_dim,
                     size_t* offsets) {
  int64_t most = max_tokens + MAX_SPLITS;
  size_t sizes[] = {sizeof(Plan),
                    sizeof(Unit) * most,
                    sizeof(Query) * most,
                    sizeof(int32_t) * max_tokens * kv_heads,
                    sizeof(int32_t) * 4 * most,
                    sizeof(float) * MAX_SPLITS * kv_heads * group * (head_dim + GROUP)};
  size_t at = 0;
  for (int i = 0; i < 6; i++) {
    offsets[i] = at;
    at += round_up(sizes[i]);
  }
  return at;
}

}  // namespace

// Bytes that a plan needs, 64-byte aligned, for as long as programs with it run.
BN_EXPORT int64_t bn_attention_plan_bytes(int64_t max_tokens, int64_t kv_heads, int64_t group,
                                          int64_t head_dim) {
  size_t offsets[6];
  return (int64_t)sizes_of_plan(max_tokens, kv_heads, group, head_dim, offsets);
}

// Plan each run of this program for its attention layers of one geometry, in the given memory.
BN_EXPORT void bn_attention_plan(Program* program, int32_t, void* memory, const int32_t* page_tables,
                                 int64_t table_stride, const int32_t* row_starts,
                                 const int32_t* context_lengths, int32_t page_size, int32_t kv_heads,
                                 int32_t group, int32_t head_dim, int32_t window,
                                 int32_t max_tokens, int32_t shares_prefixes) {
  size_t offsets[6];
  sizes_of_plan(max_tokens, kv_heads, group, head_dim, offsets);
  uint8_t* at = (uint8_t*)memory;
  Plan* plan = (Plan*)at;
  *plan = Plan{0,
               0,
               0,
               (Unit*)(at + offsets[1]),
               (Query*)(at + offsets[2]),
               (int32_t*)(at + offsets[3]),
               (int32_t*)(at + offsets[4]),
               (float*)(at + offsets[5])};
  PlanArgs args{plan,      page_tables, row_starts, context_lengths, table_stride,   page_size,
                group,     kv_heads,    window,     max_tokens,      shares_prefixes};
  append(program, PLAN, &args, sizeof args, NOT_ROW_WISE);
}

// cache: a CacheType. plan: the memory that bn_attention_plan was given earlier in this program.
BN_EXPORT void bn_paged_attention(Program* program, int32_t, int32_t cache, const float* q,
                                  int64_t q_stride, const void* k_pages, const void* v_pages,
                                  const void* plan, const int32_t* page_tables,
                                  int64_t table_stride, float* out, int32_t page_size,
                                  int32_t kv_heads, int32_t group, int32_t head_dim, int32_t window,
                                  float scale, float soft_cap) {
  AttentionArgs args{q,        k_pages,      v_pages,   out,      (const Plan*)plan, page_tables,
                     q_stride, table_stride, page_size, kv_heads, group,             head_dim,
                     window,   scale,        soft_cap};
  append(program, table_of(isa(), head_dim).attend[cache], &args, sizeof args, NOT_ROW_WISE);
}

BN_EXPORT void bn_write_kv(Program* program, int32_t size, int32_t cache, const float* k,
                           int64_t k_stride, const float* v, int64_t v_stride, void* k_pages,
                           void* v_pages, const int64_t* locations, int32_t page_size,
                           int32_t kv_heads, int32_t head_dim) {
  WriteArgs args{k,        v,        k_pages,   v_pages,  locations,
                 k_stride, v_stride, page_size, kv_heads, head_dim};
  append(program, table_of(isa(), head_dim).write[cache], &args, sizeof args, size);
}
