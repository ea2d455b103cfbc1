// A product with the low-rank adapters of its rows beside it, as one stage.
//
// Every other thread begins with the adapters' first products, which whoever comes shares, and the
// others with outputs. A thread adds what adapters change to the outputs of a claim when it has them,
// and waits, helping, only where the first products are not there by then.
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

void shrink(const AdapterArgs& a, const LinearArgs* product, Worker& worker) {
  AdapterState& state = *a.state;
  for (;;) {
    int64_t unit = state.claimed.fetch_add(1, std::memory_order_relaxed);
    if (unit >= state.units) return;
    shrink_unit(a, unit, product, worker);
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

template <bool EXACT>
void run(const void* args, const Sizes& sizes, int64_t begin, int64_t end, Worker& worker) {
  const AdapterArgs& a = of(args).adapters;
  if (!a.state->units) return linear_run<EXACT>(&of(args).product, sizes, begin, end, worker);
  const AdapterKernels& kernels = adapters_table(isa());
  const LinearArgs* product = EXACT ? nullptr : &of(args).product;
  if (worker.index % 2 == 0 && !is_shrunk(*a.state)) shrink(a, product, worker);
  linear_run<EXACT>(&of(args).product, sizes, begin, end, worker);
  await_shrunk(a, product, worker);
  const LinearPlan plan(of(args).product, sizes);
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
