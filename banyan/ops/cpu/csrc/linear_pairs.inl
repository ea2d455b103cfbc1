// What products of bf16 share, by vectors and by tiles. For the files that have VNNI; included after
// linear.inl. What is here runs where has_bf16_products() says so alone.
#ifndef BN_BF16_TARGET
#define BN_BF16_TARGET __attribute__((target("avx512bf16")))
#endif

namespace banyan {
namespace {

constexpr int PAIR_GROUPS = 4;  // of outputs, together

// A row in bf16, with zeros behind the last up to a whole block.
BN_BF16_TARGET void round_pairs(const float* x, int64_t k, uint8_t* out) {
  for (int64_t i = 0; i < blocks_of(k) * BLOCK; i += LANES) {
    const vf v = i + LANES <= k ? load(x + i) : i < k ? load_some(x + i, (int)(k - i)) : vf{};
    const auto rounded = _mm512_cvtneps_pbh((__m512)v);
    std::memcpy(out + 2 * i, &rounded, 2 * LANES);
  }
}

}  // namespace
}  // namespace banyan
