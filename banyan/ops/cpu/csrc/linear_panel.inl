// The rows of quantised activations and the weights brought to bytes, as every instruction set has
// them. Included before the file that defines `multiply`.
namespace banyan {
namespace {

// Quantised rows, seen from one block on.
struct Rows {
  const uint8_t* x;
  int64_t bytes, blocks;  // from row to row; blocks of a whole row
  int64_t block;          // the first one

  const uint8_t* values(int64_t row) const { return x + row * bytes + block * BLOCK; }
  const float* scales(int64_t row) const {
    return (const float*)(x + row * bytes + blocks * 32) + block;
  }
  const float* scaled_sums(int64_t row) const {
    return (const float*)(x + row * bytes + blocks * 36) + block;
  }
  const int16_t* sums(int64_t row) const {  // pairs
    return (const int16_t*)(x + row * bytes + blocks * 40) + 2 * block;
  }
  const float* apart(int64_t row) const { return (const float*)(x + row * bytes + blocks * 44); }
  const uint32_t* places(int64_t row) const { return (const uint32_t*)apart(row) + apart_of(blocks); }
};

// Weights of some blocks of one group, a byte each; small enough for the first-level cache.
struct alignas(64) Panel {
  static constexpr int BLOCKS = 18;
  uint8_t q[BLOCKS][8][64];
  float scales[BLOCKS][2][GROUP], minima[BLOCKS][2][GROUP];
  int32_t offset, tile_bytes;  // of the format, where kernels of formats with equal parts are one
};

inline int32_t word(const void* p) {
  int32_t v;
  std::memcpy(&v, p, 4);
  return v;
}

}  // namespace
}  // namespace banyan
