// Rounding a row of activations to 8 bits: the largest of the row are taken out, then, per block of 32,
// the largest magnitude becomes 127. The results are the same bits in every instruction set. A NaN or
// an infinity is taken out first, or makes the block's scale one.
namespace banyan {
namespace {

constexpr int32_t TINY = 27 << 23;  // the bits of 2^-100

// The scale of a block and its inverse, from the bits of the largest magnitude. Below 2^-100 a block
// counts as zero: 127 / amax must stay finite.
inline void scales_of(int32_t top, float* scale, float* inverse) {
  float amax;
  std::memcpy(&amax, &top, 4);
  bool is_zero = top < TINY;
  *scale = is_zero ? 0.0f : amax / 127.0f;
  *inverse = is_zero ? 0.0f : 127.0f / amax;
}

inline int32_t magnitude_of(float x) {  // its order is that of the bits, with NaN the largest
  int32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits & 0x7fffffff;
}

inline int32_t largest_of(const float* x) {
  int32_t most = 0;
  for (int i = 0; i < BLOCK; i++) {
    int32_t size = magnitude_of(x[i]);
    most = size > most ? size : most;
  }
  return most;
}

// A block without the inputs whose bit is set, and with zeros behind its last one.
inline void copy_rest(const float* x, int64_t count, uint32_t taken, float* out) {
  for (int i = 0; i < BLOCK; i++) out[i] = i < count && !(taken >> i & 1) ? x[i] : 0.0f;
}

// Takes the largest magnitudes out of a row, the first of equal ones first.
// most: [blocks], the largest of each block, kept up; taken: [blocks], bits of inputs, zeros at first.
inline void take_apart(const float* x, int64_t k, int32_t* most, uint32_t* taken, float* values,
                       int32_t* places) {
  const int64_t blocks = blocks_of(k);
  for (int64_t i = 0; i < apart_of(blocks); i++) {
    int32_t top = 0;
    for (int64_t b = 0; b < blocks; b++) top = most[b] > top ? most[b] : top;
    values[i] = 0.0f;
    places[i] = 0;
    if (top < TINY) continue;
    int64_t b = 0;
    while (most[b] != top) b++;
    float rest[BLOCK];
    copy_rest(x + b * BLOCK, k - b * BLOCK, taken[b], rest);
    int at = 0;
    while (magnitude_of(rest[at]) != top) at++;
    values[i] = rest[at];
    places[i] = (int32_t)(b * BLOCK + at);
    taken[b] |= 1u << at;
    rest[at] = 0.0f;
    most[b] = largest_of(rest);
  }
}

#if defined(__AVX2__)
inline int32_t quantize_block(const __m256* v, int32_t top, uint8_t* out, int16_t* sums,
                              float* scale) {
  float inverse;
  scales_of(top, scale, &inverse);
  const __m256 factor = _mm256_set1_ps(inverse);
  __m256i q[4];
  for (int i = 0; i < 4; i++) q[i] = _mm256_cvtps_epi32(_mm256_mul_ps(v[i], factor));
  // Packing works per 128 bits: dword (lane, i) holds four values of vector i.
  const __m256i mixed = _mm256_packs_epi16(_mm256_packs_epi32(q[0], q[1]),
                                           _mm256_packs_epi32(q[2], q[3]));
  const __m256i values =
      _mm256_permutevar8x32_epi32(mixed, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
  _mm256_storeu_si256((__m256i*)out, values);
  __m256i sum = _mm256_madd_epi16(_mm256_maddubs_epi16(_mm256_set1_epi8(1), values),
                                  _mm256_set1_epi16(1));
  sum = _mm256_add_epi32(sum, _mm256_shuffle_epi32(sum, 0x4e));
  sum = _mm256_add_epi32(sum, _mm256_shuffle_epi32(sum, 0xb1));
  const int32_t first = _mm_cvtsi128_si32(_mm256_castsi256_si128(sum));
  const int32_t second = _mm_cvtsi128_si32(_mm256_extracti128_si256(sum, 1));
  sums[0] = (int16_t)first;
  sums[1] = (int16_t)second;
  return first + second;
}
typedef __m256 BlockPart;
inline BlockPart load_part(const float* p) { return _mm256_loadu_ps(p); }
#else
inline int32_t quantize_block(const vf* v, int32_t top, uint8_t* out, int16_t* sums,
                              float* scale) {
  constexpr int COUNT = BLOCK / LANES;
  int32_t total[2] = {};
  float inverse;
  scales_of(top, scale, &inverse);
  for (int i = 0; i < COUNT; i++) {
    vi q = round_to_int(v[i] * splat(inverse));
    for (int j = 0; j < LANES; j++) {
      out[i * LANES + j] = (uint8_t)q[j];
      total[i >= COUNT / 2] += (int8_t)q[j];
    }
  }
  sums[0] = (int16_t)total[0];
  sums[1] = (int16_t)total[1];
  return total[0] + total[1];
}
typedef vf BlockPart;
inline BlockPart load_part(const float* p) { return load(p); }
#endif

// scratch: two words for each block.
void quantize_row(const float* x, int64_t k, uint8_t* out, uint8_t* scratch) {
  constexpr int COUNT = BLOCK * sizeof(float) / sizeof(BlockPart);
  int64_t blocks = blocks_of(k);
  float* scales = (float*)(out + blocks * 32);
  float* scaled = (float*)(out + blocks * 36);
  int16_t* sums = (int16_t*)(out + blocks * 40);
  float* apart = (float*)(out + blocks * 44);
  int32_t* most = (int32_t*)scratch;
  uint32_t* taken = (uint32_t*)(most + blocks);
  float rest[BLOCK];
  std::memset(taken, 0, sizeof(uint32_t) * blocks);
  for (int64_t b = 0; b < k / BLOCK; b++) most[b] = largest_of(x + b * BLOCK);
  if (k % BLOCK) {  // a block that the row does not fill ends in zeros
    copy_rest(x + (blocks - 1) * BLOCK, k % BLOCK, 0, rest);
    most[blocks - 1] = largest_of(rest);
  }
  take_apart(x, k, most, taken, apart, (int32_t*)(apart + apart_of(blocks)));
  for (int64_t b = 0; b < blocks; b++) {
    const float* from = x + b * BLOCK;
    if (taken[b] || k - b * BLOCK < BLOCK) {
      copy_rest(from, k - b * BLOCK, taken[b], rest);
      from = rest;
    }
    BlockPart v[COUNT];
    for (int i = 0; i < COUNT; i++) v[i] = load_part(from + i * (BLOCK / COUNT));
    int32_t sum = quantize_block(v, most[b], out + b * BLOCK, sums + 2 * b, scales + b);
    scaled[b] = scales[b] * (float)sum;
  }
}

}  // namespace
}  // namespace banyan
