// A product with the low-rank adapters of its rows beside it, as one stage.
//
// Threads share the adapters' first products, a few at a time, while others begin with the outputs:
// what those lack is added once the first products are there. So nobody waits for anybody unless both
// kinds of work have run out, and memory is read for the one while the other computes.
#include <sched.h>

#include <algorithm>

#include "adapters.h"
#include "linear.h"
#include "program.h"

namespace banyan {
namespace {

struct AdaptedArgs {
  LinearArgs product;
  AdapterArgs adapters;
};

const AdaptedArgs& of(const void* args) { return *(const AdaptedArgs*)args; }

int64_t units(const void* args, const Sizes& sizes) {
  const AdapterArgs& a = of(args).adapters;
  AdapterState& state = *a.state;
  state.units = adapter_units(a, sizes.n[of(args).product.size]);
  state.claimed.store(0, std::memory_order_relaxed);
  state.done.store(0, std::memory_order_relaxed);
  return linear_units(&of(args).product, sizes);
}

int64_t grain(const void* args, const Sizes& sizes) {
  return linear_grain(&of(args).product, sizes);
}

bool is_shrunk(const AdapterState& state) {
  return state.done.load(std::memory_order_acquire) == state.units;
}

void shrink(const AdapterArgs& a, const AdapterKernels& kernels) {
  AdapterState& state = *a.state;
  for (;;) {
    int64_t unit = state.claimed.fetch_add(1, std::memory_order_relaxed);
    if (unit >= state.units) return;
    kernels.shrink(a, unit);
    state.done.fetch_add(1, std::memory_order_acq_rel);
  }
}

// Help with the first products until all of them are there.
void await_shrunk(const AdapterArgs& a, const AdapterKernels& kernels) {
  if (is_shrunk(*a.state)) return;
  shrink(a, kernels);
  for (int spins = 1; !is_shrunk(*a.state); spins++)
    if (spins % 1024 == 0) sched_yield();
}

template <bool EXACT>
void run(const void* args, const Sizes& sizes, int64_t begin, int64_t end, Worker& worker) {
  const AdapterArgs& a = of(args).adapters;
  if (!a.state->units) return linear_run<EXACT>(&of(args).product, sizes, begin, end, worker);
  const AdapterKernels& kernels = adapters_table(isa());
  const LinearPlan plan(of(args).product, sizes);
  if (worker.index % 2 == 0 && !is_shrunk(*a.state)) shrink(a, kernels);
  int64_t lacking = begin;
  for (int64_t i = begin; i < end; i++) {
    kernels.fetch(a, plan.group(i), plan.first(i), plan.last(i));
    linear_run<EXACT>(&of(args).product, sizes, i, i + 1, worker);
    bool is_last = i + 1 == end || plan.group(i + 1) == 0;  // of the claim, or of its rows
    if (i + 1 == end) await_shrunk(a, kernels);
    if (!is_shrunk(*a.state) || (!is_last && i + 1 - lacking < TILES_AT_ONCE)) continue;
    for (int64_t to; lacking <= i; lacking = to) {
      to = std::min(i + 1, lacking - plan.group(lacking) + plan.groups);
      kernels.expand(a, plan.group(lacking), plan.group(to - 1) + 1, plan.first(lacking),
                     plan.last(lacking));
    }
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
const Kernel ADAPTED_EXACT = {"linear_exact + adapters", units, grain, run<true>, cost};

}  // namespace

bool join_product(Program* program, int32_t size, const AdapterArgs& adapters) {
  static_assert(TILE == GROUP, "a unit of a product is a tile of the adapters'");
  const Kernel* const kernels[] = {&LINEAR, &LINEAR_EXACT};
  for (const Kernel* kernel : kernels) {
    const LinearArgs* product = (const LinearArgs*)last_args(program, *kernel);
    if (!product || product->out != adapters.out || product->n != adapters.outputs ||
        product->out_stride != adapters.out_stride || product->size != size)
      continue;
    AdaptedArgs args{*product, adapters};
    take_back(program);
    append(program, kernel == &LINEAR ? ADAPTED : ADAPTED_EXACT, &args, sizeof args, NOT_ROW_WISE);
    return true;
  }
  return false;
}

}  // namespace banyan
