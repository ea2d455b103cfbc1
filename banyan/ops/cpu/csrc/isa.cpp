// Which instruction sets the machine has, and which one the process runs with.
#include <atomic>

#include "runtime.h"
#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace banyan {
namespace {

#if defined(__x86_64__)
constexpr uint64_t XMM_YMM = 0x6, ZMM = 0xe0, TILES = 0x60000;

uint64_t saved_by_the_system() {  // XCR0: registers that survive a change of threads
  uint32_t low, high;
  asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (uint64_t)high << 32 | low;
}

bool may_use_tiles() {  // Linux gives the tile registers on request
  constexpr int ARCH_REQ_XCOMP_PERM = 0x1023, XTILE_DATA = 18;
  return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XTILE_DATA) == 0;
}

Isa detect() {
  uint32_t a, b, c, d;
  if (!__get_cpuid(1, &a, &b, &c, &d)) return BASE;
  bool fma = c >> 12 & 1, osxsave = c >> 27 & 1, f16c = c >> 29 & 1;
  if (!osxsave) return BASE;
  uint64_t saved = saved_by_the_system();
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return BASE;
  bool avx2 = b >> 5 & 1, bmi2 = b >> 8 & 1;
  bool avx512 = (b >> 16 & 1) && (b >> 17 & 1) && (b >> 30 & 1) && (b >> 31 & 1);  // F DQ BW VL
  bool vnni = c >> 11 & 1;
  bool amx = (d >> 22 & 1) && (d >> 24 & 1) && (d >> 25 & 1);  // bf16, tile, int8
  if (!avx2 || !fma || !f16c || !bmi2 || (saved & XMM_YMM) != XMM_YMM) return BASE;
  if (!avx512 || (saved & ZMM) != ZMM) return AVX2;
  if (!vnni) return AVX512;
  return amx && (saved & TILES) == TILES && may_use_tiles() ? AMX : VNNI;
}
#else
Isa detect() { return BASE; }
#endif

// The highest that the machine has and the library is built for.
Isa highest() {
  Isa found = detect();
  return found < BN_BUILT_FOR ? found : (Isa)BN_BUILT_FOR;
}

std::atomic<int32_t> chosen{-1}, byte_lookup{-1}, bf16_products{-1};

struct Answer {  // of the cpuid instruction
  uint32_t a, b, c, d;
};

// A bit of what the processor says of leaf 7, asked once; 0 where there is no VNNI either.
bool remembered(std::atomic<int32_t>& found, uint32_t part, uint32_t Answer::* reg, int bit) {
  int32_t now = found.load(std::memory_order_relaxed);
  if (now >= 0) return now;
  now = 0;
#if defined(__x86_64__)
  Answer said;
  if (detect() >= VNNI && __get_cpuid_count(7, part, &said.a, &said.b, &said.c, &said.d))
    now = said.*reg >> bit & 1;
#else
  (void)part, (void)reg, (void)bit;
#endif
  found.store(now, std::memory_order_relaxed);
  return now;
}

}  // namespace

Isa isa() {
  int32_t now = chosen.load(std::memory_order_relaxed);
  if (now >= 0) return (Isa)now;
  now = highest();
  chosen.store(now, std::memory_order_relaxed);
  return (Isa)now;
}

bool has_byte_lookup() { return remembered(byte_lookup, 0, &Answer::c, 1); }
bool has_bf16_products() { return remembered(bf16_products, 1, &Answer::a, 5); }

}  // namespace banyan

// The highest instruction set that can be used here.
BN_EXPORT int32_t bn_machine_isa() { return banyan::highest(); }
BN_EXPORT int32_t bn_isa() { return banyan::isa(); }
// Run with a lower one from now on; what is above the highest is cut down to it.
BN_EXPORT void bn_set_isa(int32_t isa) {
  int32_t most = banyan::highest();
  banyan::chosen.store(isa < most ? isa : most, std::memory_order_relaxed);
}
