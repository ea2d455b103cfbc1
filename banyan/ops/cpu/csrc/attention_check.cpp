// The load-time check of attention: a small step in an instruction set and in plain code.
#include <cmath>
#include <cstdio>
#include <memory>
#include <vector>

#include "attention.h"
#include "program.h"

using namespace banyan;

extern "C" {
int64_t bn_attention_plan_bytes(int64_t max_tokens, int64_t kv_heads, int64_t group,
                                int64_t head_dim);
void bn_attention_plan(Program* program, int32_t size, void* memory, const int32_t* page_tables,
                       int64_t table_stride, const int32_t* row_starts,
                       const int32_t* context_lengths, int32_t page_size, int32_t kv_heads,
                       int32_t group, int32_t head_dim, int32_t window, int32_t max_tokens,
                       int32_t shares_prefixes, int32_t rounds, const int32_t* paths,
                       int64_t path_stride, const int32_t* ends);
}

namespace {

// Nine tokens after three others, in one tile that tile registers take at once but for a rest; and one
// token after SPAN others, which is split.
constexpr int GROUP_HEADS = 4, DIM = 32, PAGE = 16, TABLE_PAGES = SPAN / PAGE + 1;
constexpr int STARTS[] = {0, 9, 10}, CONTEXTS[] = {3, SPAN};
constexpr int TOKENS_NOW = STARTS[2], TOKENS_EVER = 12 + SPAN + 1;
// Values are at most 1 and rounded to 8 bits; one key of twelve too many or too few is more.
constexpr float MOST_BY_ROUNDING = 4e-3f;

std::vector<float> wave(size_t size, float step) {
  std::vector<float> x(size);
  for (size_t i = 0; i < size; i++) x[i] = std::sin(step * (float)i);
  return x;
}

struct Step {
  std::vector<float> q = wave(TOKENS_NOW * GROUP_HEADS * DIM, 0.37f);
  std::vector<float> k = wave(TOKENS_EVER * DIM, 1.3f), v = wave(TOKENS_EVER * DIM, 0.71f);
  std::vector<float> out = std::vector<float>(q.size());
  std::vector<int32_t> tables = std::vector<int32_t>(2 * TABLE_PAGES);
  std::vector<int64_t> locations;
  std::vector<float> k_pages = std::vector<float>((1 + 2 * TABLE_PAGES) * PAGE * DIM);
  std::vector<float> v_pages = k_pages;

  Step() {
    for (int i = 0; i < 2 * TABLE_PAGES; i++) tables[i] = i + 1;
    for (int row = 0; row < 2; row++)
      for (int at = 0; at < (row ? SPAN + 1 : 12); at++)
        locations.push_back((int64_t)tables[row * TABLE_PAGES + at / PAGE] * PAGE + at % PAGE);
  }
};

std::vector<float> outcome(const AttentionKernels& kernels, const Kernel& kernel, int cache) {
  Step s;
  int32_t starts[] = {STARTS[0], STARTS[1], STARTS[2]}, contexts[] = {CONTEXTS[0], CONTEXTS[1]};
  // Not cleared: a plan needs little of its room here.
  std::unique_ptr<uint64_t[]> memory(
      new uint64_t[bn_attention_plan_bytes(TOKENS_NOW, 1, GROUP_HEADS, DIM) / sizeof(uint64_t)]);
  Program *fill = bn_program_new(), *attend = bn_program_new();
  WriteArgs write{s.k.data(), s.v.data(), s.k_pages.data(), s.v_pages.data(), s.locations.data(),
                  DIM,        DIM,        PAGE,             1,                DIM};
  append(fill, kernels.write[cache], &write, sizeof write, TOKENS);
  bn_attention_plan(attend, TOKENS, memory.get(), s.tables.data(), TABLE_PAGES, starts, contexts,
                    PAGE, 1, GROUP_HEADS, DIM, 0, TOKENS_NOW, 1, 0, nullptr, 0, nullptr);
  AttentionArgs args{s.q.data(),   s.k_pages.data(),  s.v_pages.data(), s.out.data(),
                     (const Plan*)memory.get(), s.tables.data(), GROUP_HEADS * DIM, TABLE_PAGES,
                     PAGE, 1, GROUP_HEADS, DIM, 0, 0.25f, 3.0f};
  append(attend, kernel, &args, sizeof args, NOT_ROW_WISE);
  Pool* pool = bn_pool_new(1, nullptr);
  int64_t past[] = {TOKENS_EVER, 2, 2}, now[] = {TOKENS_NOW, 2, 2};
  bn_program_run(pool, fill, past, nullptr);
  bn_program_run(pool, attend, now, nullptr);
  bn_program_free(pool, fill);
  bn_program_free(pool, attend);
  bn_pool_free(pool);
  return s.out;
}

// The same rows by latent attention: GROUP_HEADS heads of DIM numbers that turn and DIM that do not.
std::vector<float> latent_outcome(const AttentionKernels& kernels, int cache) {
  Step s;
  int32_t starts[] = {STARTS[0], STARTS[1], STARTS[2]}, contexts[] = {CONTEXTS[0], CONTEXTS[1]};
  std::unique_ptr<uint64_t[]> memory(
      new uint64_t[bn_attention_plan_bytes(TOKENS_NOW, 1, GROUP_HEADS, DIM) / sizeof(uint64_t)]);
  Program *fill = bn_program_new(), *attend = bn_program_new();
  WriteLatentArgs write{s.v.data(), s.k.data(), s.v_pages.data(), s.k_pages.data(),
                        s.locations.data(), DIM, DIM, DIM, DIM};
  append(fill, kernels.write_latent[cache], &write, sizeof write, TOKENS);
  bn_attention_plan(attend, TOKENS, memory.get(), s.tables.data(), TABLE_PAGES, starts, contexts,
                    PAGE, 1, GROUP_HEADS, DIM, 0, TOKENS_NOW, 1, 0, nullptr, 0, nullptr);
  AttentionArgs of{s.q.data(),   s.v_pages.data(),  s.k_pages.data(), s.out.data(),
                   (const Plan*)memory.get(), s.tables.data(), GROUP_HEADS * DIM, TABLE_PAGES,
                   PAGE, 1, GROUP_HEADS, DIM, 0, 0.25f, 0.0f};
  LatentArgs args{of, s.q.data(), GROUP_HEADS * DIM, DIM, DIM, nullptr, 0};
  append(attend, kernels.attend_latent[cache], &args, sizeof args, NOT_ROW_WISE);
  Pool* pool = bn_pool_new(1, nullptr);
  int64_t past[] = {TOKENS_EVER, 2, 2}, now[] = {TOKENS_NOW, 2, 2};
  bn_program_run(pool, fill, past, nullptr);
  bn_program_run(pool, attend, now, nullptr);
  bn_program_free(pool, fill);
  bn_program_free(pool, attend);
  bn_pool_free(pool);
  return s.out;
}

// 0 where no number is further off than `most`; else 1, and the first that is.
int differ(const std::vector<float>& found, const std::vector<float>& expected, float most,
           const char* name, int cache, char* why, int32_t room) {
  for (size_t i = 0; i < found.size(); i++)
    if (!(std::fabs(found[i] - expected[i]) <= most)) {
      std::snprintf(why, room, "%s over cache type %d gives %g for %g", name, cache, found[i],
                    expected[i]);
      return 1;
    }
  return 0;
}

}  // namespace

// Whether an instruction set computes what the plain code does; 1 and the reason when not.
BN_EXPORT int bn_check_attention(int32_t isa, char* why, int32_t room) {
  const AttentionKernels &base = attention_table(BASE, DIM), &kernels = attention_table(isa, DIM);
  for (int cache = 0; cache < NUM_CACHE_TYPES; cache++) {
    std::vector<float> expected = outcome(base, base.attend[cache], cache);
    std::vector<float> found = outcome(kernels, kernels.attend[cache], cache);
    if (differ(found, expected, 1e-5f, "attention", cache, why, room)) return 1;
    const Kernel* rounding = rounding_attention(cache, DIM);
    if (rounding && differ(outcome(kernels, *rounding, cache), expected, MOST_BY_ROUNDING,
                           "attention that rounds", cache, why, room))
      return 1;
    expected = latent_outcome(base, cache);
    found = latent_outcome(kernels, cache);
    if (differ(found, expected, 1e-5f, "latent attention", cache, why, room)) return 1;
  }
  return 0;
}
