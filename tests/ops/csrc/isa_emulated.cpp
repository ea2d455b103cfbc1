// In place of csrc/isa.cpp: everything is there.
#include <atomic>

#include "runtime.h"

namespace banyan {
static std::atomic<int32_t> chosen{BN_BUILT_FOR};
Isa isa() { return (Isa)chosen.load(std::memory_order_relaxed); }
bool has_byte_lookup() { return true; }
bool has_bf16_products() { return true; }
}  // namespace banyan

BN_EXPORT int32_t bn_machine_isa() { return BN_BUILT_FOR; }
BN_EXPORT int32_t bn_isa() { return banyan::isa(); }
BN_EXPORT void bn_set_isa(int32_t isa) {
  banyan::chosen.store(isa < BN_BUILT_FOR ? isa : BN_BUILT_FOR, std::memory_order_relaxed);
}
