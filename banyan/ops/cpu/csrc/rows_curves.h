// Curves of the activation functions, lane by lane, to a few units in the last place.
// The polynomials are least-maximum fits of the relative error.
#pragma once
#include "vec.h"

namespace banyan {
namespace {

// x · sigmoid(s)
inline vf gate_by(vf x, vf s) { return x / (splat(1.0f) + exp(-s)); }

inline vf silu(vf x) { return gate_by(x, x); }

// silu(gate) of at most `limit`, times an up of at most `limit` to either side. What is no number
// stays.
inline vf limited_silu(vf gate, vf up, float limit) {
  return min(splat(limit), silu(gate)) * max(splat(-limit), min(splat(limit), up));
}

// 0.5 · x · (1 + tanh u) = x · sigmoid(2u), which loses nothing where tanh u is close to -1.
inline vf gelu_tanh(vf x) {
  vf cube = x * x * x;
  vf u = fma(splat(0.044715f), cube, x) * splat(1.5957691216057308f);  // 2 · sqrt(2/pi)
  return gate_by(x, u);
}

// x · Φ(x). With z = |x|/sqrt 2 the tail is erfc(z)/2 = exp(-z²) · t·P(t)/2, t = 1/(1 + z/2).
inline vf gelu(vf x) {
  vf magnitude = (vf)((vi)x & splat_i(0x7fffffff));
  vf z = min(magnitude, splat(14.0f)) * splat(0.70710678118654752f);
  vf t = splat(1.0f) / fma(z, splat(0.5f), splat(1.0f));
  vf p = splat(-0.05906929448246956f);
  p = fma(p, t, splat(0.28457653522491455f));
  p = fma(p, t, splat(-0.48720303177833557f));
  p = fma(p, t, splat(0.2780705988407135f));
  p = fma(p, t, splat(-0.026627907529473305f));
  p = fma(p, t, splat(0.20268777012825012f));
  p = fma(p, t, splat(0.24310354888439178f));
  p = fma(p, t, splat(0.2823753356933594f));
  p = fma(p, t, splat(0.28208640217781067f));
  vf tail = exp(-(z * z)) * (p * t) * splat(0.5f);
  vf gelu = x * choose(x < vf{}, tail, splat(1.0f) - tail);
  return choose(x != x, x, gelu);
}

// Odd polynomial near 0, 1 - 2/(e^2x + 1) beyond.
inline vf tanh(vf x) {
  vf magnitude = (vf)((vi)x & splat_i(0x7fffffff)), sign = (vf)((vi)x & splat_i(INT32_MIN));
  vf square = x * x;
  vf p = splat(-0.005905865225940943f);
  p = fma(p, square, splat(0.02080538123846054f));
  p = fma(p, square, splat(-0.053786683827638626f));
  p = fma(p, square, splat(0.13331958651542664f));
  p = fma(p, square, splat(-0.33333298563957214f));
  vf near = fma(p * square, x, x);
  vf far = splat(1.0f) - splat(2.0f) / (exp(magnitude + magnitude) + splat(1.0f));
  far = (vf)((vi)far | (vi)sign);
  vf y = choose(magnitude < splat(0.6f), near, far);
  return choose(x != x, x, y);
}

}  // namespace
}  // namespace banyan
