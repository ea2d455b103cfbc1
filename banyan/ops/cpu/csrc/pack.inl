// Packing with the 16 outputs of a group side by side: a lane is an output.
//
// The blocks of 16 rows are transposed word by word. From there on a vector is what a tile holds, four
// inputs of 16 outputs, and the bits of a block come apart as in linear_blocks.inl, 64 values at a time
// and without a shuffle. Knows whole groups only.
#include <utility>

#include "linear_blocks.inl"
#include "pack.h"

#define INLINE inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 8")

namespace banyan {
namespace {

typedef uint32_t Words __attribute__((vector_size(64)));  // 4 bytes of every output
typedef int32_t Ints __attribute__((vector_size(64)));
typedef float Numbers __attribute__((vector_size(64)));

constexpr uint32_t LOW_4 = 0x0f0f0f0f, LOW_2 = 0x03030303, LOW_1 = 0x01010101;

// Where the parts of a block are, in bytes; words that are read. -1: there is none.
struct Parts {
  int quants_at, quant_words, scale_at, min_at;
  int small_at = -1;  // four words with the scales of a part of the block
};
template <int32_t S>
constexpr Parts parts_of() {
  if (S == S_Q4_0 || S == S_IQ4_NL) return {2, 4, 0, -1};
  if (S == S_Q4_1) return {4, 4, 0, 2};
  if (S == S_Q5_0) return {2, 5, 0, -1};
  if (S == S_Q5_1) return {4, 5, 0, 2};
  if (S == S_Q8_0) return {2, 8, 0, -1};
  if (S == S_Q2_K) return {16, 16, 80, 82, 0};
  if (S == S_Q3_K) return {0, 24, 108, -1, 92};
  if (S == S_Q4_K) return {16, 32, 0, 2, 0};
  if (S == S_Q5_K) return {16, 40, 0, 2, 0};
  if (S == S_Q6_K) return {0, 48, 208, -1, 192};
  if (S == S_IQ4_XS) return {8, 32, 0, -1, 0};
  if (S == S_MXFP4) return {1, 4, -1, -1};
  return {0, 0, -1, -1};
}

// Words of 16 rows, from `from` of the first on.
template <int COUNT>
INLINE void columns(const uint8_t* from, int64_t stride, Words* to) {
  for (int i = 0; i < GROUP; i += 4) {
    const uint8_t* row = from + i * stride;
    for (int w = 0; w < COUNT / 4 * 4; w += 4) {
      auto four = [&](int n) { return _mm_loadu_si128((const __m128i*)(row + n * stride) + w / 4); };
      const __m128i a = four(0), b = four(1), c = four(2), d = four(3);
      const __m128i ab = _mm_unpacklo_epi32(a, b), cd = _mm_unpacklo_epi32(c, d);
      const __m128i ab2 = _mm_unpackhi_epi32(a, b), cd2 = _mm_unpackhi_epi32(c, d);
      __m128i* at = (__m128i*)(to + w) + i / 4;
      _mm_store_si128(at, _mm_unpacklo_epi64(ab, cd));
      _mm_store_si128(at + 4, _mm_unpackhi_epi64(ab, cd));
      _mm_store_si128(at + 8, _mm_unpacklo_epi64(ab2, cd2));
      _mm_store_si128(at + 12, _mm_unpackhi_epi64(ab2, cd2));
    }
    for (int w = COUNT / 4 * 4; w < COUNT; w++)
      for (int n = 0; n < 4; n++) std::memcpy((uint8_t*)(to + w) + 4 * (i + n), row + n * stride + 4 * w, 4);
  }
}

// An fp16 of every row.
INLINE Numbers halves(const uint8_t* from, int64_t stride) {
  alignas(32) uint16_t half[GROUP];
  for (int i = 0; i < GROUP; i++) std::memcpy(half + i, from + i * stride, 2);
#if defined(__AVX512F__)
  return (Numbers)_mm512_cvtph_ps(_mm256_load_si256((const __m256i*)half));
#else
  alignas(64) float x[GROUP];
  _mm256_store_ps(x, _mm256_cvtph_ps(_mm_load_si128((const __m128i*)half)));
  _mm256_store_ps(x + 8, _mm256_cvtph_ps(_mm_load_si128((const __m128i*)half + 1)));
  Numbers v;
  std::memcpy(&v, x, sizeof v);
  return v;
#endif
}
INLINE void store_halves(uint8_t* to, const Numbers& x) {
#if defined(__AVX512F__)
  _mm256_storeu_si256((__m256i*)to, _mm512_cvtps_ph((__m512)x, 0));
#else
  const float* from = (const float*)&x;
  _mm_storeu_si128((__m128i*)to, _mm256_cvtps_ph(_mm256_load_ps(from), 0));
  _mm_storeu_si128((__m128i*)to + 1, _mm256_cvtps_ph(_mm256_load_ps(from + 8), 0));
#endif
}

INLINE Numbers numbers(const Words& w) { return __builtin_convertvector((Ints)w, Numbers); }

// Vector g of a tile, a byte for a value. block: what columns made of the quants.
template <int32_t S>
INLINE Words four_inputs(const Words* block, int sub, int g) {
  const int c = sub % 4, h = sub / 4;
  if constexpr (S == S_Q4_0 || S == S_Q4_1 || S == S_IQ4_NL || S == S_MXFP4)
    return block[g % 4] >> g / 4 * 4 & LOW_4;
  if constexpr (S == S_IQ4_XS) return block[4 * sub + g % 4] >> g / 4 * 4 & LOW_4;
  if constexpr (S == S_Q5_0 || S == S_Q5_1) {
    const Words high = block[0] >> 4 * g & 15;  // to the lowest bits of four bytes
    const Words apart = (high | high << 7 | high << 14 | high << 21) & LOW_1;
    return (block[1 + g % 4] >> g / 4 * 4 & LOW_4) | apart << 4;
  }
  if constexpr (S == S_Q8_0) return block[g] ^ 0x80808080;
  if constexpr (S == S_Q4_K) return block[sub / 2 * 8 + g] >> sub % 2 * 4 & LOW_4;
  if constexpr (S == S_Q5_K)
    return (block[8 + sub / 2 * 8 + g] >> sub % 2 * 4 & LOW_4) | (block[g] >> sub & LOW_1) << 4;
  if constexpr (S == S_Q6_K)
    return (block[h * 16 + c % 2 * 8 + g] >> c / 2 * 4 & LOW_4) |
           (block[32 + h * 8 + g] >> 2 * c & LOW_2) << 4;
  if constexpr (S == S_Q2_K) return block[h * 8 + g] >> 2 * c & LOW_2;
  if constexpr (S == S_Q3_K)
    return (block[8 + h * 8 + g] >> 2 * c & LOW_2) | (block[g] >> sub & LOW_1) << 2;
}

// What the scales and minima of a block are multiples of, and four words that say of which.
struct Scales {
  Numbers scale, minimum;
  Words small[4];
};

template <int32_t S>
INLINE void read_scales(const uint8_t* block, int64_t stride, Scales& s) {
  constexpr Parts parts = parts_of<S>();
  if constexpr (S == S_MXFP4) {  // 2^(byte - 128), which are small ones of fp32 at 0 and 1
    Words bits;
    for (int i = 0; i < GROUP; i++) {
      const uint32_t power = block[i * stride];
      bits[i] = power > 1 ? (power - 1) << 23 : 1u << 21 << power;
    }
    s.scale = (Numbers)bits;
    return;
  }
  s.scale = halves(block + parts.scale_at, stride);
  if constexpr (parts.min_at >= 0) s.minimum = halves(block + parts.min_at, stride);
  if constexpr (parts.small_at >= 0) columns<4>(block + parts.small_at, stride, s.small);
}

INLINE Words byte_of(const Words* words, int at) { return words[at / 4] >> at % 4 * 8; }

// Scales and minima of the values 32 sub + 16 part ... of a block.
template <int32_t S>
INLINE void scales_of(const Scales& s, int sub, int part, Numbers& scale, Numbers& minimum) {
  scale = s.scale;
  minimum = s.minimum;
  if constexpr (S == S_Q4_K || S == S_Q5_K) {  // 6 bits each; the first word is the halves
    const int i = sub % 4;
    const Words first = byte_of(s.small, 4 + i), second = byte_of(s.small, 8 + i);
    const Words both = byte_of(s.small, 12 + i);
    const Words q = sub < 4 ? first & 63 : (both & 15) | (first >> 2 & 48);
    const Words m = sub < 4 ? second & 63 : (both >> 4 & 15) | (second >> 2 & 48);
    scale = s.scale * numbers(q);
    minimum = -(s.minimum * numbers(m));
  }
  if constexpr (S == S_Q6_K)
    scale = s.scale *
            __builtin_convertvector((Ints)(s.small[sub / 2] << (24 - (2 * sub + part) % 4 * 8)) >> 24,
                                    Numbers);
  if constexpr (S == S_Q2_K) {
    const Words q = byte_of(s.small, 2 * sub + part);
    scale = s.scale * numbers(q & 15);
    minimum = -(s.minimum * numbers(q >> 4 & 15));
  }
  if constexpr (S == S_Q3_K) {  // the first word belongs to the quants
    const int j = 2 * sub + part;
    const Words q = (byte_of(s.small, 4 + j % 8) >> j / 8 * 4 & 15) |
                    (byte_of(s.small, 12 + j % 4) >> j / 4 * 2 & 3) << 4;
    scale = s.scale * numbers(q - 32);
  }
  if constexpr (S == S_IQ4_XS) {
    const Words q = (s.small[1] >> 4 * sub & 15) | (s.small[0] >> (16 + 2 * sub) & 3) << 4;
    scale = s.scale * numbers(q - 32);
  }
}

// `place` of the plain code for a whole tile.
template <int32_t FORMAT>
INLINE void place(const Words* q, uint8_t* tile) {
  constexpr Format f = FORMATS[FORMAT];
  auto store = [](uint8_t* to, const Words& w) { std::memcpy(to, &w, sizeof w); };
  if constexpr (f.bits == 8) {
    UNROLL for (int g = 0; g < 8; g++) store(tile + f.low_at() + g * 64, q[g]);
    return;
  }
  UNROLL for (int z = 0; z < 4; z++)
      store(tile + f.low_at() + z * 64, (q[2 * z] & LOW_4) | (q[2 * z + 1] & LOW_4) << 4);
  if constexpr (f.bits == 5) {
    Words high{};
    UNROLL for (int g = 0; g < 8; g++) high |= (q[g] >> 4 & LOW_1) << g;
    store(tile + f.high_at(), high);
  }
  if constexpr (f.bits == 6) {
    Words high[2]{};
    UNROLL for (int g = 0; g < 8; g++) high[g / 4] |= (q[g] >> 4 & LOW_2) << g % 4 * 2;
    store(tile + f.high_at(), high[0]);
    store(tile + f.high_at() + 64, high[1]);
  }
}

INLINE void raise(Numbers& most, const Numbers& x) {  // what is no number counts for nothing
  const Ints size = (Ints)x & 0x7fffffff;
  const Ints larger = (Numbers)size > most;
  most = (Numbers)((size & larger) | ((Ints)most & ~larger));
}

// A power of two for every output, as `factor_of` of the plain code.
template <int32_t S>
void find_factors(const uint8_t* row, int64_t stride, int64_t blocks, float* factors) {
  constexpr Format f = FORMATS[LAYOUTS[S].format];
  Numbers most{};
  for (int64_t b = 0; b < blocks; b++) {
    Scales s{};
    read_scales<S>(row + b * LAYOUTS[S].bytes, stride, s);
    for (int sub = 0; sub < LAYOUTS[S].values / BLOCK; sub++)
      for (int part = 0; part < f.parts(); part++) {
        Numbers scale, minimum;
        scales_of<S>(s, sub, part, scale, minimum);
        raise(most, scale);
        if constexpr (f.has_min) raise(most, minimum);
      }
  }
  for (int i = 0; i < GROUP; i++) factors[i] = factor_for(most[i]);
}

template <int32_t S>
void pack_blocks(const PackArgs& args, int64_t group, uint8_t* to) {
  constexpr Layout layout = LAYOUTS[S];
  constexpr Format f = FORMATS[layout.format];
  constexpr Parts parts = parts_of<S>();
  const uint8_t* block = args.row(group, 0);
  const int64_t stride = args.row_bytes, blocks = args.k / layout.values;
  Numbers factors{};
  if constexpr (layout.has_wide_scales) {
    find_factors<S>(block, stride, blocks, args.factors + group * GROUP);
    std::memcpy(&factors, args.factors + group * GROUP, sizeof factors);
  }
  for (int64_t b = 0; b < blocks; b++, block += layout.bytes) {
    Words quants[parts.quant_words];
    columns<parts.quant_words>(block + parts.quants_at, stride, quants);
    Scales s{};
    read_scales<S>(block, stride, s);
    if constexpr (layout.has_wide_scales) {  // exactly: by powers of two
      s.scale /= factors;
      s.minimum /= factors;
    }
    for (int sub = 0; sub < layout.values / BLOCK; sub++, to += f.tile_bytes()) {
      Words q[8];
      for (int part = 0; part < f.parts(); part++) {
        Numbers scale, minimum;
        scales_of<S>(s, sub, part, scale, minimum);
        store_halves(to + part * GROUP * 2, scale);
        if constexpr (f.has_min) store_halves(to + f.scale_bytes() + part * GROUP * 2, minimum);
      }
      UNROLL for (int g = 0; g < 8; g++) q[g] = four_inputs<S>(quants, sub, g);
      place<layout.format>(q, to);
    }
  }
}

// Floats in words: fp32, and pairs of bf16.
void pack_words(const PackArgs& args, int64_t group, uint8_t* to) {
  const uint8_t* row = args.row(group, 0);
  const int64_t stride = args.row_bytes, words = args.format == F32 ? args.k : args.k / 2;
  Words* tile = (Words*)to;
  int64_t w = 0;
  for (; w + 16 <= words; w += 16) columns<16>(row + 4 * w, stride, tile + w);
  for (; w < words; w++) columns<1>(row + 4 * w, stride, tile + w);
  if (args.format == BF16_PAIRS && args.k % 2)
    for (int i = 0; i < GROUP; i++) {
      uint16_t last;
      std::memcpy(&last, row + i * stride + 4 * w, 2);
      tile[w][i] = last;
    }
}

void pack_shorts(const PackArgs& args, int64_t group, uint8_t* to) {
  typedef uint16_t Shorts __attribute__((vector_size(32)));
  const uint8_t* row = args.row(group, 0);
  const int64_t stride = args.row_bytes;
  int64_t k = 0;
  for (; k + 32 <= args.k; k += 32) {
    Words pairs[16];
    columns<16>(row + 2 * k, stride, pairs);
    for (int w = 0; w < 16; w++)
      for (int one = 0; one < 2; one++, to += sizeof(Shorts)) {
        const Shorts part = __builtin_convertvector(pairs[w] >> 16 * one & 0xffff, Shorts);
        std::memcpy(to, &part, sizeof part);
      }
  }
  for (; k < args.k; k++)
    for (int i = 0; i < GROUP; i++, to += 2) std::memcpy(to, row + i * stride + 2 * k, 2);
}

void pack_e4m3(const PackArgs& args, int64_t group, uint8_t* to) {
  const uint8_t* block = args.row(group, 0);
  const __m128i order = _mm_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15);
  for (int64_t b = 0; b < args.k / BLOCK; b++, block += LAYOUTS[S_E4M3].bytes, to += E4M3_TILE) {
    Words all[9];
    columns<9>(block, args.row_bytes, all);
    const Numbers scale = (Numbers)all[8] * 256.0f;
    std::memcpy(to, &scale, sizeof scale);
    for (int i = 0; i < 32; i++) {  // 4 inputs of 4 outputs
      const __m128i four = _mm_load_si128((const __m128i*)all + i);
      _mm_storeu_si128((__m128i*)(to + sizeof scale) + i, _mm_shuffle_epi8(four, order));
    }
  }
}

template <int32_t S>
constexpr PackGroup one_packer() {
  if constexpr (parts_of<S>().quant_words > 0) return pack_blocks<S>;
  return nullptr;
}
template <int... S>
constexpr PackGroup packer(int32_t source, std::integer_sequence<int, S...>) {
  constexpr PackGroup all[] = {one_packer<S_Q4_0 + S>()...};
  return all[source - S_Q4_0];
}

}  // namespace

PackGroup BN_TABLE(int32_t source, int32_t format) {
  if (format == F32 || format == BF16_PAIRS) return pack_words;
  if (format == F16 || format == BF16) return pack_shorts;
  if (format == E4M3) return pack_e4m3;
  if (source < S_Q4_0) return nullptr;  // what is rounded here
  return packer(source, std::make_integer_sequence<int, NUM_SOURCES - S_Q4_0>());
}

}  // namespace banyan
