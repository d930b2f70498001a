// Root-mean-square norm of a row.
//
// Reference: `RMSNorm` in model.py.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "vec.h"

namespace {

// Returns 1 / rms(x).
inline float rms_factor(const float* x, int64_t n, float eps) {
  VF total[2] = {};
  int64_t i = 0;
  for (; i + 2 * W <= n; i += 2 * W) {
    const VF a = load(x + i), b = load(x + i + W);
    total[0] = fma(a, a, total[0]);
    total[1] = fma(b, b, total[1]);
  }
  float squares = sum(total[0] + total[1]);
  for (; i < n; i++) squares += x[i] * x[i];
  return 1.0f / std::sqrt(squares / float(n) + eps);
}

inline void scaled(const float* x, float factor, const float* weight, int64_t n, float* out) {
  int64_t i = 0;
  for (; i + W <= n; i += W) store(out + i, load(x + i) * factor * load(weight + i));
  for (; i < n; i++) out[i] = x[i] * factor * weight[i];
}

// Computes x / rms(x) * weight, or copies x without a weight.
inline void rms_norm(const float* x, const float* weight, int64_t n, float eps, float* out) {
  if (weight == nullptr) {
    std::copy(x, x + n, out);
  } else {
    scaled(x, rms_factor(x, n, eps), weight, n, out);
  }
}

}  // namespace
