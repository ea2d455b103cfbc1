// What tile registers give at most in 8 bits and bf16; the rest as vectors have it.
#include "probe.inl"

namespace banyan {
namespace {

// All registers are 16 rows of 64 bytes: 0-3 sums, 4-7 what is multiplied.
struct alignas(64) WholeTiles {
  uint8_t palette = 1, start = 0, reserved[14] = {};
  uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};
constexpr WholeTiles SHAPE{};

// A round is one product of tiles, of `inputs` inputs; `four` does four that wait for none of each other.
template <class Four>
double tile_products(int64_t rounds, int64_t inputs, Four four) {
  _tile_loadconfig(&SHAPE);
  for (int64_t i = 0; i < rounds; i += 4) four();
  _tile_release();
  return 2.0 * 16 * 16 * (double)inputs * (double)((rounds + 3) / 4 * 4);
}

// Of an instruction, whose registers are part of it.
#define FOUR_BY(multiply) \
  [] {                    \
    multiply(0, 4, 6);    \
    multiply(1, 4, 7);    \
    multiply(2, 5, 6);    \
    multiply(3, 5, 7);    \
  }

double small_tile_products(int64_t rounds) {
  return tile_products(rounds, 64, FOUR_BY(_tile_dpbsud));
}
double pair_tile_products(int64_t rounds) {
  return tile_products(rounds, 32, FOUR_BY(_tile_dpbf16ps));
}

}  // namespace

const ProbeKernels probe_amx = {products, small_tile_products, pair_tile_products, read_all};
}  // namespace banyan
