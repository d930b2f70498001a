// Vectors of W lanes, with exp, log and half precision.
//
// `fma` is the only fused operation: compilers fuse none (-ffp-contract=off), because two copies of
// one line could then round differently.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>

// 5: AVX-512 VNNI and BF16, 4: AVX-512 VNNI, 3: AVX-512 BW, 2: AVX-VNNI, 1: AVX2, 0: plain loops.
// The caller's compiler flags allow the instructions that a path needs.
#ifndef FASTEAGLE_ISA
#define FASTEAGLE_ISA 0
#endif
#if FASTEAGLE_ISA > 0
#include <immintrin.h>
#endif

namespace {

constexpr int W = FASTEAGLE_ISA >= 3 ? 16 : 8;  // lanes of a vector

typedef float VF __attribute__((vector_size(4 * W)));
typedef int32_t VI __attribute__((vector_size(4 * W)));
typedef int16_t VS __attribute__((vector_size(4 * W)));
typedef uint16_t VH __attribute__((vector_size(2 * W)));
typedef uint32_t VU __attribute__((vector_size(4 * W)));
typedef int8_t VB __attribute__((vector_size(W)));

// 1.5 * 2^23: an fp32 sum with it is rounded to an integer, which its last bits hold; and an
// integer sum that begins with its bits is the number MAGIC + sum.
constexpr float MAGIC = 12582912.0f;
constexpr uint32_t MAGIC_BITS = 0x4b400000;

// Prefetches a line to the L2 cache. Zen 4 reads memory up to twice as fast by these as by
// prefetches to the L1 cache, of which few may be under way at once.
inline void to_l2(const void* p) { __builtin_prefetch(p, 0, 2); }

inline VF load(const float* p) {
  VF v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
inline void store(float* p, VF v) { std::memcpy(p, &v, sizeof v); }
inline VF splat(float x) { return x - VF{}; }
inline VI splat(int32_t x) { return x + VI{}; }
inline VF to_float(VI v) { return __builtin_convertvector(v, VF); }

// W integers of 8 bits; GCC would convert them one by one.
inline VI load(const int8_t* p) {
#if FASTEAGLE_ISA >= 3
  return (VI)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p));
#elif FASTEAGLE_ISA >= 1
  return (VI)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p));
#else
  VB values;
  std::memcpy(&values, p, sizeof values);
  return __builtin_convertvector(values, VI);
#endif
}

// Stores the last 8 bits of W integers.
inline void store(int8_t* p, VI v) {
#if FASTEAGLE_ISA >= 3
  _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8((__m512i)v));
#else
  const VB bytes = __builtin_convertvector(v, VB);
  std::memcpy(p, &bytes, W);
#endif
}

// One rounding in every path: a compiler's choice of fusion may differ between two copies.
inline VF fma(VF a, VF b, VF c) {
#if FASTEAGLE_ISA >= 3
  return (VF)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif FASTEAGLE_ISA >= 1
  return (VF)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
  return a * b + c;
#endif
}

// Exchanges lane i with lane i ^ d.
template <int d, class V, int... j>
inline V swapped(V v, std::integer_sequence<int, j...>) {
  return __builtin_shuffle(v, (VI){(j ^ d)...});
}

template <int d, class V>
inline V swapped(V v) {
  return swapped<d>(v, std::make_integer_sequence<int, W>());
}

// Calls `f` with `n`, 1 .. MAX, as a compile-time constant.
template <int MAX, class F>
inline void with_count(int64_t n, F f) {
  if constexpr (MAX > 1) {
    if (n < MAX) return with_count<MAX - 1>(n, f);
  }
  f(std::integral_constant<int, MAX>());
}

// Calls `f(0)`, `f(1)` .. `f(n - 1)` in order: a loop that is always unrolled.
template <class F, int... r>
[[gnu::always_inline]] inline void for_each(F f, std::integer_sequence<int, r...>) {
  (f(r), ...);
}

template <int n, class F>
[[gnu::always_inline]] inline void for_each(F f) {
  for_each(f, std::make_integer_sequence<int, n>());
}

template <class V>
inline auto sum(V v) {
  if constexpr (W == 16) v += swapped<8>(v);
  v += swapped<4>(v);
  v += swapped<2>(v);
  v += swapped<1>(v);
  return v[0];
}

// The larger or smaller value; b if either is NaN. GCC makes one instruction of the integers alone.
inline VI larger(VI a, VI b) { return a > b ? a : b; }
#if FASTEAGLE_ISA >= 3
inline VF larger(VF a, VF b) { return (VF)_mm512_max_ps((__m512)a, (__m512)b); }
inline VF smaller(VF a, VF b) { return (VF)_mm512_min_ps((__m512)a, (__m512)b); }
#elif FASTEAGLE_ISA >= 1
inline VF larger(VF a, VF b) { return (VF)_mm256_max_ps((__m256)a, (__m256)b); }
inline VF smaller(VF a, VF b) { return (VF)_mm256_min_ps((__m256)a, (__m256)b); }
#else
inline VF larger(VF a, VF b) { return a > b ? a : b; }
inline VF smaller(VF a, VF b) { return a < b ? a : b; }
#endif

template <class V>
inline auto largest(V v) {
  if constexpr (W == 16) v = larger(v, swapped<8>(v));
  v = larger(v, swapped<4>(v));
  v = larger(v, swapped<2>(v));
  return larger(v, swapped<1>(v))[0];
}

inline float half_to_float(uint16_t h) {
  const uint32_t sign = uint32_t(h & 0x8000) << 16, exponent = (h >> 10) & 31, mantissa = h & 1023;
  if (exponent == 0) {
    const float value = std::ldexp(float(mantissa), -24);
    return sign ? -value : value;
  }
  const uint32_t bits =
      sign | (exponent == 31 ? 0x7f800000u : (exponent + 112) << 23) | (mantissa << 13);
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

inline VF load_half(const uint16_t* p) {
#if FASTEAGLE_ISA >= 3
  return (VF)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
#elif FASTEAGLE_ISA >= 1
  return (VF)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
#else
  VF v;
  for (int i = 0; i < W; i++) v[i] = half_to_float(p[i]);
  return v;
#endif
}

struct Bf16 {
  uint16_t bits;
};

inline VF load(const Bf16* p) {
  VH h;
  std::memcpy(&h, p, sizeof h);
#if FASTEAGLE_ISA >= 3
  return (VF)_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)h), 16);
#elif FASTEAGLE_ISA >= 1
  return (VF)_mm256_slli_epi32(_mm256_cvtepu16_epi32((__m128i)h), 16);
#else
  return (VF)(__builtin_convertvector(h, VU) << 16);
#endif
}

inline float to_scalar(Bf16 x) {
  const uint32_t bits = uint32_t(x.bits) << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

inline void put(float* p, float x) { *p = x; }
inline void put(Bf16* p, float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  const bool nan = (bits & 0x7fffffff) > 0x7f800000;
  p->bits = nan ? 0x7fc0 : uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

inline void store(Bf16* p, VF x) {
#if FASTEAGLE_ISA == 5
  const __m256bh h = _mm512_cvtneps_pbh((__m512)x);
#else
  const VU bits = (VU)x;
  const VU rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  const VH h = __builtin_convertvector(x != x ? (VI)(VU{} + 0x7fc0) : (VI)rounded, VH);
#endif
  std::memcpy(p, &h, sizeof h);
}

// Computes e^x to about 1 unit in the last place; 0 below -87.3; NaN stays NaN.
inline VF exp_of(VF x) {
  const VI tiny = x < -87.3f;
  const VF y = smaller(splat(88.0f), larger(splat(-87.3f), x));
  const VF n = fma(y, splat(1.44269504f), splat(MAGIC)) - MAGIC;
  VF r = fma(n, splat(-0.693359375f), y);
  r = fma(n, splat(2.12194440e-4f), r);
  VF p = splat(1.9875691500e-4f);
  p = fma(p, r, splat(1.3981999507e-3f));
  p = fma(p, r, splat(8.3334519073e-3f));
  p = fma(p, r, splat(4.1665795894e-2f));
  p = fma(p, r, splat(1.6666665459e-1f));
  p = fma(p, r, splat(5.0000001201e-1f));
  p = fma(p, r * r, r) + 1.0f;
  // NaN converts to some integer; its mantissa is NaN already.
  const VU power = ((VU) __builtin_convertvector(n, VI) + 127u) << 23;
  const VF value = p * (VF)power;
  return tiny ? VF{} : value;
}

// Computes e^x of x <= 0 with a relative error below 1.1e-4: enough for weights in bf16. 1 at 0,
// about 1e-38 below -87; NaN stays NaN. About half the operations of `exp_of`.
inline VF coarse_exp_of(VF x) {
  const VF y = larger(splat(-126.0f), x * 1.44269504f), n = y + MAGIC, r = y - (n - MAGIC);
  VF p = fma(splat(5.500859e-2f), r, splat(2.4221038e-1f));
  p = fma(p, r, splat(6.932829e-1f));
  p = fma(p, r, splat(1.0f));
  return (VF)((VU)p + ((VU)n << 23));
}

// Natural logarithm of positive normal numbers, with an absolute or relative error below 2e-7.
inline VF log_of(VF x) {
  const VU bits = (VU)x;
  VF exponent = to_float((VI)(bits >> 23) - 127);
  VF m = (VF)((bits & 0x7fffffu) | 0x3f800000u);  // 1 .. 2
  const VI upper = m > 1.41421356f;
  m = upper ? m * 0.5f : m;
  exponent = upper ? exponent + 1.0f : exponent;
  // log(m) = 2 atanh((m - 1) / (m + 1)), an odd series in at most 0.172
  const VF z = (m - 1.0f) / (m + 1.0f), s = z * z;
  VF series = fma(s, splat(2.0f / 9.0f), splat(2.0f / 7.0f));
  series = fma(series, s, splat(2.0f / 5.0f));
  series = fma(series, s, splat(2.0f / 3.0f));
  series = fma(series, s, splat(2.0f));
  return fma(exponent, splat(0.69314718f), series * z);
}

}  // namespace
