// Rounding a row of activations to 8 bits: per block of 32, the largest magnitude becomes 127. The
// results are the same bits in every instruction set. A NaN or an infinity makes the block's scale one.
namespace banyan {
namespace {

// The scale of a block and its inverse, from the bits of the largest magnitude. Below 2^-100 a block
// counts as zero: 127 / amax must stay finite.
inline void scales_of(int32_t top, float* scale, float* inverse) {
  float amax;
  std::memcpy(&amax, &top, 4);
  bool is_zero = top < (27 << 23);
  *scale = is_zero ? 0.0f : amax / 127.0f;
  *inverse = is_zero ? 0.0f : 127.0f / amax;
}

#if defined(__AVX2__)
inline int32_t quantize_block(const __m256* v, uint8_t* out, int16_t* sums, float* scale) {
  // The order of magnitudes is the order of their bits, with NaN the largest: it gets through.
  const __m256i magnitude = _mm256_set1_epi32(0x7fffffff);
  __m256i bits[4];
  for (int i = 0; i < 4; i++) bits[i] = _mm256_and_si256(_mm256_castps_si256(v[i]), magnitude);
  const __m256i most = _mm256_max_epi32(_mm256_max_epi32(bits[0], bits[1]),
                                        _mm256_max_epi32(bits[2], bits[3]));
  __m128i top = _mm_max_epi32(_mm256_castsi256_si128(most), _mm256_extracti128_si256(most, 1));
  top = _mm_max_epi32(top, _mm_shuffle_epi32(top, 0x4e));
  top = _mm_max_epi32(top, _mm_shuffle_epi32(top, 0xb1));
  float inverse;
  scales_of(_mm_cvtsi128_si32(top), scale, &inverse);
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
inline int32_t quantize_block(const vf* v, uint8_t* out, int16_t* sums, float* scale) {
  constexpr int COUNT = BLOCK / LANES;
  int32_t top = 0, total[2] = {};
  for (int i = 0; i < BLOCK; i++) {
    int32_t bits = ((vi)v[i / LANES])[i % LANES] & 0x7fffffff;
    top = bits > top ? bits : top;
  }
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

void quantize_row(const float* x, int64_t k, uint8_t* out) {
  constexpr int COUNT = BLOCK * sizeof(float) / sizeof(BlockPart);
  int64_t blocks = blocks_of(k);
  float* scales = (float*)(out + blocks * 32);
  float* scaled = (float*)(out + blocks * 36);
  int16_t* sums = (int16_t*)(out + blocks * 40);
  for (int64_t b = 0; b < blocks; b++) {
    const float* from = x + b * BLOCK;
    float last[BLOCK];
    if (k - b * BLOCK < BLOCK) {  // a block that the row does not fill ends in zeros
      std::memset(last, 0, sizeof last);
      std::memcpy(last, from, sizeof(float) * (k - b * BLOCK));
      from = last;
    }
    BlockPart v[COUNT];
    for (int i = 0; i < COUNT; i++) v[i] = load_part(from + i * (BLOCK / COUNT));
    int32_t sum = quantize_block(v, out + b * BLOCK, sums + 2 * b, scales + b);
    scaled[b] = scales[b] * (float)sum;
  }
}

}  // namespace
}  // namespace banyan
