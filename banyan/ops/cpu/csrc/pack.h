// Packing: what a group of 16 outputs is made from, and who makes it quickly.
#pragma once
#include "linear.h"

namespace banyan {

struct PackArgs {
  int32_t source, format;
  const uint8_t* raw;
  int64_t row_bytes, n, k;
  uint8_t* tiles;
  float* factors;

  const uint8_t* row(int64_t group, int i) const { return raw + (group * GROUP + i) * row_bytes; }
  int rows(int64_t group) const {
    int64_t left = n - group * GROUP;
    return left < GROUP ? (int)left : GROUP;
  }
};

// One group to its tiles; its factors are 1 before.
typedef void (*PackGroup)(const PackArgs& args, int64_t group, uint8_t* to);

// What packs whole groups with an instruction set, to the bits of the plain code; null for what the
// plain code does.
PackGroup pack_avx2(int32_t source, int32_t format);
PackGroup pack_avx512(int32_t source, int32_t format);

}  // namespace banyan
