// In place of csrc/isa.cpp: everything is there.
#include <atomic>

#include "runtime.h"

namespace banyan {
static std::atomic<int32_t> chosen{BN_HIGHEST};
Isa isa() { return (Isa)chosen.load(std::memory_order_relaxed); }
}  // namespace banyan

BN_EXPORT int32_t bn_machine_isa() { return BN_HIGHEST; }
BN_EXPORT int32_t bn_isa() { return banyan::isa(); }
BN_EXPORT void bn_set_isa(int32_t isa) {
  banyan::chosen.store(isa < BN_HIGHEST ? isa : BN_HIGHEST, std::memory_order_relaxed);
}
