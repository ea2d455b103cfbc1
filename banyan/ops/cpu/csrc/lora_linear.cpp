// A product with the low-rank adapters of its rows beside it, as one stage.
//
// Threads begin with the adapters' first products, every other one at their end, and go on with
// outputs. A thread adds what adapters change to the outputs of a claim when it has them, and waits,
// helping, only where the first products are not there by then.
//
// Matrices of many adapters are short pieces in many places, which take as long to find as to read. So
// what the first products read is fetched during the product before, whose arithmetic leaves the memory
// idle where there are several rows: by each thread for the half where it will begin, as what another
// one has fetched lies in the other's cache.
#include <sched.h>

#include <algorithm>

#include "lora.h"
#include "linear.h"
#include "program.h"

namespace banyan {
namespace {

struct AdaptedArgs {
  LinearArgs product;
  AdapterArgs adapters;
  const AdapterState* next;  // of the product after this one; null for the last
};

const AdaptedArgs& of(const void* args) { return *(const AdaptedArgs*)args; }

int64_t units(const void* args, const Sizes& sizes) {
  const AdapterArgs& a = of(args).adapters;
  AdapterState& state = *a.state;
  state.units = adapter_units(a, sizes.n[of(args).product.size]);
  state.table = a.table, state.pieces = a.pieces, state.inputs = a.inputs;
  state.bytes = 0;
  for (int32_t i = 0; state.units && i < a.pieces[0]; i++)
    state.bytes += down_bytes(a.table[a.pieces[1 + 3 * i]], a.inputs);
  for (auto* count : {&state.claimed, &state.from[0], &state.from[1]})
    count->store(0, std::memory_order_relaxed);
  state.done.store(0, std::memory_order_relaxed);
  return linear_units(&of(args).product, sizes);
}

int64_t grain(const void* args, const Sizes& sizes) {
  return linear_grain(&of(args).product, sizes);
}

bool is_shrunk(const AdapterState& state) {
  return state.done.load(std::memory_order_acquire) == state.units;
}

void shrink(const AdapterArgs& a, const LinearArgs* product, Worker& worker) {
  AdapterState& state = *a.state;
  const bool is_last_first = worker.index % 2;
  while (state.claimed.fetch_add(1, std::memory_order_relaxed) < state.units) {
    int64_t unit = state.from[is_last_first].fetch_add(1, std::memory_order_relaxed);
    shrink_unit(a, is_last_first ? state.units - 1 - unit : unit, product, worker);
    state.done.fetch_add(1, std::memory_order_acq_rel);
  }
}

// Help with the first products until all of them are there.
void await_shrunk(const AdapterArgs& a, const LinearArgs* product, Worker& worker) {
  if (is_shrunk(*a.state)) return;
  shrink(a, product, worker);
  for (int spins = 1; !is_shrunk(*a.state); spins++)
    if (spins % 1024 == 0) sched_yield();
}

constexpr int64_t LINE = 64;
constexpr int64_t FETCHED_FOR = 16;  // tokens; with more the arithmetic takes longer than any reading

// One of `shares` shares of what the first products after these read.
void fetch_down(const AdapterState& next, int64_t share, int64_t shares) {
  int64_t from = next.bytes * share / shares, to = next.bytes * (share + 1) / shares;
  for (int32_t i = 0; i < next.pieces[0] && to > 0; i++) {
    const AdapterPair& pair = next.table[next.pieces[1 + 3 * i]];
    const int64_t bytes = down_bytes(pair, next.inputs);
    for (int64_t at = std::max(from, (int64_t)0); at < std::min(to, bytes); at += LINE)
      __builtin_prefetch((const uint8_t*)pair.down + at, 0, 2);
    from -= bytes, to -= bytes;
  }
}

template <bool EXACT>
void run(const void* args, const Sizes& sizes, int64_t begin, int64_t end, Worker& worker) {
  const AdapterArgs& a = of(args).adapters;
  if (!a.state->units) return linear_run<EXACT>(&of(args).product, sizes, begin, end, worker);
  const AdapterKernels& kernels = lora_table(isa());
  // Its rows serve adapters in 8 bits too, if they are in 8 bits.
  const bool is_shared = !EXACT && of(args).product.format < NUM_QUANTISED;
  const LinearArgs* product = is_shared ? &of(args).product : nullptr;
  if (!is_shrunk(*a.state)) shrink(a, product, worker);
  const LinearPlan plan(of(args).product, sizes);
  const AdapterState* next = of(args).next;
  if (next && sizes.n[of(args).product.size] <= FETCHED_FOR)
    for (int64_t at = begin; at < end; at++) {
      fetch_down(*next, at, plan.groups);
      linear_run<EXACT>(&of(args).product, sizes, at, at + 1, worker);
    }
  else
    linear_run<EXACT>(&of(args).product, sizes, begin, end, worker);
  await_shrunk(a, product, worker);
  for (int64_t at = begin, to; at < end; at = to) {
    to = std::min(end, at - plan.group(at) + plan.groups);
    kernels.expand(a, plan.group(at), plan.group(to - 1) + 1, plan.first(at), plan.last(at));
  }
}

void cost(const void* args, const Sizes& sizes, double* bytes, double* operations) {
  linear_cost(&of(args).product, sizes, bytes, operations);
  for (int is_down = 0; is_down < 2; is_down++) {
    double more_bytes, more_operations;
    adapter_cost(of(args).adapters, sizes.n[of(args).product.size], is_down, &more_bytes,
                 &more_operations);
    *bytes += more_bytes;
    *operations += more_operations;
  }
}

const Kernel ADAPTED = {"linear + adapters", units, grain, run<false>, cost};
const Kernel ADAPTED_BF16 = {"linear_bf16 + adapters", units, grain, run<false>, cost};
const Kernel ADAPTED_EXACT = {"linear_exact + adapters", units, grain, run<true>, cost};

}  // namespace

bool join_product(Program* program, int32_t size, const AdapterArgs& adapters) {
  static_assert(TILE == GROUP, "a unit of a product is a tile of the adapters'");
  const Kernel* const kernels[][2] = {
      {&LINEAR, &ADAPTED}, {&LINEAR_BF16, &ADAPTED_BF16}, {&LINEAR_EXACT, &ADAPTED_EXACT}};
  for (auto [alone, adapted] : kernels) {
    const LinearArgs* product = (const LinearArgs*)last_args(program, *alone);
    if (!product || product->out != adapters.out || product->n != adapters.outputs ||
        product->out_stride != adapters.out_stride || product->size != size)
      continue;
    AdaptedArgs args{*product, adapters, nullptr};
    for (auto before : kernels)
      if (AdaptedArgs* newest = (AdaptedArgs*)newest_args(program, *before[1]);
          newest && !newest->next)
        newest->next = adapters.state;
    take_back(program);
    append(program, *adapted, &args, sizeof args, NOT_ROW_WISE);
    return true;
  }
  return false;
}

}  // namespace banyan
