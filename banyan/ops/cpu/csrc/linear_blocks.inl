// The blocks of checkpoints as values of 32 inputs in one common form, for packing and embeddings.
//
// Source of the layouts: the GGUF specification (ggml-quants).
#pragma once
#include <cmath>
#include <cstring>

#include "linear.h"
#include "vec.h"

namespace banyan {
namespace {

#include "grids.inl"

enum Source : int32_t {
  S_F32, S_F16, S_BF16, S_E4M3, S_Q4_0, S_Q4_1, S_Q5_0, S_Q5_1, S_Q8_0, S_Q2_K, S_Q3_K, S_Q4_K, S_Q5_K,
  S_Q6_K, S_IQ4_NL, S_MXFP4, S_IQ4_XS, S_IQ3_XXS, S_IQ3_S, S_IQ2_XXS, S_IQ2_XS, S_IQ2_S, S_IQ1_S,
  S_IQ1_M, S_TQ1_0, S_TQ2_0, NUM_SOURCES
};

// 32 weights: scale * (q - offset of the format) + minimum, scale and minimum per half. Where the
// format has levels, q is the number of one.
struct Values {
  uint8_t q[BLOCK];
  float scale[2], minimum[2];
};

struct Layout {
  int32_t format;
  int values, bytes;             // of a block
  bool has_wide_scales = false;  // scales are products that fp16 may not hold
};
constexpr Layout LAYOUTS[NUM_SOURCES] = {
    {F32, 1, 4},
    {F16, 1, 2},
    {BF16, 1, 2},
    {E4M3, 32, 36},
    {W4, 32, 18},
    {W4_MIN, 32, 20},
    {W5, 32, 22},
    {W5_MIN, 32, 24},
    {W8, 32, 34},
    {W4_MIN_HALVES, 256, 84, true},
    {W4_HALVES, 256, 110, true},
    {W4_MIN, 256, 144, true},
    {W5_MIN, 256, 176, true},
    {W6_HALVES, 256, 210, true},
    {W4_IQ4, 32, 18},
    {W4_E2M1, 32, 17, true},
    {W4_IQ4, 256, 136, true},
    {W4_IQ3, 256, 98, true},
    {W5, 256, 110, true},
    {W4_IQ2_HALVES, 256, 66, true},
    {W4_IQ2_HALVES, 256, 74, true},
    {W4_IQ2_HALVES, 256, 82, true},
    {W4_MIN, 256, 50, true},
    {W6_HALVES, 256, 56, true},
    {W4, 256, 54},
    {W4, 256, 66},
};

inline float half_at(const uint8_t* p) {
  uint16_t v;
  std::memcpy(&v, p, 2);
  return from_fp16(v);
}
inline int u16_at(const uint8_t* p) { return p[0] | p[1] << 8; }
inline uint32_t u32_at(const uint8_t* p) {
  return (uint32_t)u16_at(p) | (uint32_t)u16_at(p + 2) << 16;
}

inline void set(Values& v, float scale, float minimum) {
  v.scale[0] = v.scale[1] = scale;
  v.minimum[0] = v.minimum[1] = minimum;
}
inline void set_halves(Values& v, float first, float second) {
  v.scale[0] = first;
  v.scale[1] = second;
  v.minimum[0] = v.minimum[1] = 0;
}

inline void nibbles(uint8_t* q, const uint8_t* low) {  // values 0 ... 15 low, 16 ... 31 high
  for (int i = 0; i < 16; i++) {
    q[i] = low[i] & 15;
    q[i + 16] = low[i] >> 4;
  }
}
inline void fifth_bits(uint8_t* q, const uint8_t* high) {  // bit i belongs to value i
  for (int i = 0; i < 32; i++) q[i] |= (uint8_t)((high[i / 8] >> i % 8 & 1) << 4);
}

// A power of two that brings the largest scale of a row below 2^14, so that products of two scales,
// which may be larger or far smaller than fp16 allows, keep their 11 bits.
inline float factor_for(float most) {
  if (most == 0 || !std::isfinite(most)) return 1.0f;
  return std::ldexp(1.0f, std::ilogb(most) - 13);
}

// Eight values of IQ2 and four of IQ3: magnitudes of a vector, and a bit for each sign.
inline void eight(uint8_t* q, uint16_t vector, int signs) {
  for (int i = 0; i < 8; i++) q[i] = (uint8_t)((vector >> 2 * i & 3) | (signs >> i & 1) << 2);
}
inline void four(uint8_t* q, uint16_t vector, int signs, bool is_xxs) {
  for (int i = 0; i < 4; i++) {
    int place = vector >> 4 * i & 7, sign = signs >> i & 1, m = 2 * place + 1;
    q[i] = (uint8_t)(is_xxs ? place | sign << 3 : 16 + (sign ? -m : m));
  }
}
// Seven signs are stored; the eighth makes their number even.
inline int eight_signs(uint32_t seven) {
  uint32_t s = seven & 127, p = s ^ s >> 4;
  p ^= p >> 2;
  return (int)(s | ((p ^ p >> 1) & 1) << 7);
}

// The numbers of the values 32 sub ... of a block.
template <int32_t S>
inline void quants(const uint8_t* block, int sub, uint8_t* q) {
  const int c = sub % 4, h = sub / 4;
  if constexpr (S == S_Q4_0) nibbles(q, block + 2);
  if constexpr (S == S_Q4_1) nibbles(q, block + 4);
  if constexpr (S == S_Q5_0) {
    nibbles(q, block + 6);
    fifth_bits(q, block + 2);
  }
  if constexpr (S == S_Q5_1) {
    nibbles(q, block + 8);
    fifth_bits(q, block + 4);
  }
  if constexpr (S == S_Q8_0)
    for (int l = 0; l < 32; l++) q[l] = block[2 + l] ^ 0x80;
  if constexpr (S == S_IQ4_NL) nibbles(q, block + 2);
  if constexpr (S == S_IQ4_XS) nibbles(q, block + 8 + 16 * sub);
  if constexpr (S == S_MXFP4) nibbles(q, block + 1);
  if constexpr (S == S_Q4_K || S == S_Q5_K) {
    const uint8_t* low = block + (S == S_Q4_K ? 16 : 48) + sub / 2 * 32;
    for (int l = 0; l < 32; l++) q[l] = low[l] >> sub % 2 * 4 & 15;
  }
  if constexpr (S == S_Q5_K)
    for (int l = 0; l < 32; l++) q[l] |= (uint8_t)((block[16 + l] >> sub & 1) << 4);
  if constexpr (S == S_Q6_K)
    for (int l = 0; l < 32; l++)
      q[l] = (uint8_t)((block[h * 64 + c % 2 * 32 + l] >> c / 2 * 4 & 15) |
                       (block[128 + h * 32 + l] >> 2 * c & 3) << 4);
  if constexpr (S == S_Q2_K)
    for (int l = 0; l < 32; l++) q[l] = block[16 + h * 32 + l] >> 2 * c & 3;
  if constexpr (S == S_Q3_K)
    for (int l = 0; l < 32; l++)
      q[l] = (uint8_t)((block[32 + h * 32 + l] >> 2 * c & 3) | (block[l] >> sub & 1) << 2);
  if constexpr (S == S_IQ3_XXS) {
    const uint8_t* at = block + 2 + 8 * sub;
    for (int l = 0; l < 8; l++) {
      int signs = eight_signs(u32_at(block + 66 + 4 * sub) >> 7 * (l / 2)) >> l % 2 * 4;
      four(q + 4 * l, GRID_IQ3_XXS[at[l]], signs, true);
    }
  }
  if constexpr (S == S_IQ3_S)
    for (int l = 0; l < 8; l++) {
      int vector = block[2 + 8 * sub + l] | (block[66 + sub] >> l & 1) << 8;
      four(q + 4 * l, GRID_IQ3_S[vector], block[74 + 4 * sub + l / 2] >> l % 2 * 4, false);
    }
  if constexpr (S == S_IQ2_XXS) {
    const uint8_t* at = block + 2 + 8 * sub;
    for (int l = 0; l < 4; l++)
      eight(q + 8 * l, GRID_IQ2_XXS[at[l]], eight_signs(u32_at(at + 4) >> 7 * l));
  }
  if constexpr (S == S_IQ2_XS)
    for (int l = 0; l < 4; l++) {
      int both = u16_at(block + 2 + 8 * sub + 2 * l);
      eight(q + 8 * l, GRID_IQ2_XS[both & 511], eight_signs((uint32_t)both >> 9));
    }
  if constexpr (S == S_IQ2_S)
    for (int l = 0; l < 4; l++) {
      int vector = block[2 + 4 * sub + l] | (block[66 + sub] >> 2 * l & 3) << 8;
      eight(q + 8 * l, GRID_IQ2_S[vector], block[34 + 4 * sub + l]);
    }
  if constexpr (S == S_IQ1_S)
    for (int l = 0; l < 4; l++) {
      int high = u16_at(block + 34 + 2 * sub) >> 3 * l & 7;
      uint16_t vector = GRID_IQ1[block[2 + 4 * sub + l] | high << 8];
      for (int i = 0; i < 8; i++) q[8 * l + i] = vector >> 2 * i & 3;
    }
  if constexpr (S == S_IQ1_M)  // eighths of a step
    for (int l = 0; l < 4; l++) {
      int high = block[32 + 2 * sub + l / 2] >> l % 2 * 4;
      uint16_t vector = GRID_IQ1[block[4 * sub + l] | (high & 7) << 8];
      int delta = high & 8 ? -1 : 1;
      for (int i = 0; i < 8; i++)
        q[8 * l + i] = (uint8_t)(32 + 8 * ((vector >> 2 * i & 3) - 1) + delta);
    }
  if constexpr (S == S_TQ1_0) {  // five digits to the base of 3 in a byte
    constexpr int POWERS[5] = {1, 3, 9, 27, 81};
    for (int l = 0; l < 32; l++) {
      int i = 32 * sub + l, at = i, n = 0;
      if (i < 160) at = i % 32, n = i / 32;
      else if (i < 240) at = 32 + i % 16, n = (i - 160) / 16;
      else at = 48 + i % 4, n = (i - 240) / 4;
      q[l] = (uint8_t)(7 + ((uint8_t)(block[at] * POWERS[n]) * 3 >> 8));
    }
  }
  if constexpr (S == S_TQ2_0)
    for (int l = 0; l < 32; l++) q[l] = (uint8_t)(7 + (block[h * 32 + l] >> 2 * c & 3));
}

// Scales and minima of the same values.
template <int32_t S>
inline void scales(const uint8_t* block, int sub, Values& v) {
  if constexpr (S == S_Q4_0 || S == S_Q5_0 || S == S_Q8_0 || S == S_IQ4_NL)
    set(v, half_at(block), 0);
  if constexpr (S == S_Q4_1 || S == S_Q5_1) set(v, half_at(block), half_at(block + 2));
  // The exponent is biased by 127, the levels are doubled.
  if constexpr (S == S_MXFP4) set(v, std::ldexp(1.0f, block[0] - 128), 0);
  if constexpr (S == S_Q4_K || S == S_Q5_K) {  // 6 bits each, from 12 bytes
    const uint8_t* s = block + 4;
    int i = sub;
    int scale = i < 4 ? s[i] & 63 : (s[i + 4] & 15) | s[i - 4] >> 6 << 4;
    int minimum = i < 4 ? s[i + 4] & 63 : s[i + 4] >> 4 | s[i] >> 6 << 4;
    set(v, half_at(block) * (float)scale, -(half_at(block + 2) * (float)minimum));
  }
  if constexpr (S == S_Q6_K) {
    float d = half_at(block + 208);
    const uint8_t* s = block + 192 + 2 * sub;
    set_halves(v, d * (float)(int8_t)s[0], d * (float)(int8_t)s[1]);
  }
  if constexpr (S == S_Q2_K)
    for (int p = 0; p < 2; p++) {
      uint8_t s = block[2 * sub + p];
      v.scale[p] = half_at(block + 80) * (float)(s & 15);
      v.minimum[p] = -(half_at(block + 82) * (float)(s >> 4));
    }
  if constexpr (S == S_Q3_K)
    for (int p = 0; p < 2; p++) {
      const uint8_t* s = block + 96;
      int j = 2 * sub + p;
      int scale = (s[j % 8] >> j / 8 * 4 & 15) | (s[8 + j % 4] >> j / 4 * 2 & 3) << 4;
      v.scale[p] = half_at(block + 108) * (float)(scale - 32);
      v.minimum[p] = 0;
    }
  if constexpr (S == S_IQ4_XS) {
    int low = block[4 + sub / 2] >> sub % 2 * 4 & 15, high = u16_at(block + 2) >> 2 * sub & 3;
    set(v, half_at(block) * (float)((low | high << 4) - 32), 0);
  }
  if constexpr (S == S_IQ3_XXS)  // twice the type's: its magnitudes are halved
    set(v, half_at(block) * (0.5f + (float)(u32_at(block + 66 + 4 * sub) >> 28)), 0);
  if constexpr (S == S_IQ3_S)
    set(v, half_at(block) * (float)(1 + 2 * (block[106 + sub / 2] >> sub % 2 * 4 & 15)), 0);
  if constexpr (S == S_IQ2_XXS)
    set(v, half_at(block) * (0.5f + (float)(u32_at(block + 6 + 8 * sub) >> 28)) * 0.25f, 0);
  if constexpr (S == S_IQ2_XS || S == S_IQ2_S) {
    int both = block[(S == S_IQ2_XS ? 66 : 74) + sub];
    float d = half_at(block);
    set_halves(v, d * (0.5f + (float)(both & 15)) * 0.25f, d * (0.5f + (float)(both >> 4)) * 0.25f);
  }
  if constexpr (S == S_IQ1_S) {
    int high = u16_at(block + 34 + 2 * sub);
    float scale = half_at(block) * (float)(2 * (high >> 12 & 7) + 1);
    set(v, scale, scale * (high & 0x8000 ? -1.125f : -0.875f));
  }
  if constexpr (S == S_IQ1_M) {  // the fp16 scale lies in the highest bits of four words
    const uint8_t* s = block + 48;
    uint16_t bits = (uint16_t)(s[1] >> 4 | (s[3] >> 4) << 4 | (s[5] >> 4) << 8 | (s[7] >> 4) << 12);
    float d = from_fp16(bits) * 0.125f;
    int both = u16_at(s + sub / 2 * 2) >> sub % 2 * 6;
    set_halves(v, d * (float)(2 * (both & 7) + 1), d * (float)(2 * (both >> 3 & 7) + 1));
  }
  if constexpr (S == S_TQ1_0) set(v, half_at(block + 52), 0);
  if constexpr (S == S_TQ2_0) set(v, half_at(block + 64), 0);
}

}  // namespace
}  // namespace banyan
