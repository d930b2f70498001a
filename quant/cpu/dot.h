// Integer dot products of one block of 32 inputs: some rows of activations with W outputs.
//
// Sums are exact in int32, and therefore equal for every instruction set.

#pragma once

#include <cstdint>
#include <cstring>
#include <utility>

#include "quantize.h"
#include "vec.h"

namespace {

constexpr int COLUMNS = 16;  // adjacent outputs in a packed weight

inline int32_t four(const int8_t* p) {
  int32_t v;
  std::memcpy(&v, p, 4);
  return v;
}

// Sums of products of unsigned weights with signed activations, four inputs of W outputs at once.
// `bias` is what was added to the weights to make them unsigned, where the sums contain it.
#if FASTEAGLE_ISA >= 3
typedef __m512i Bytes;
inline Bytes load_bytes(const uint8_t* p) { return _mm512_loadu_si512(p); }
inline Bytes low(Bytes v) { return _mm512_and_si512(v, _mm512_set1_epi8(15)); }
inline Bytes high(Bytes v) {
  return _mm512_and_si512(_mm512_srli_epi16(v, 4), _mm512_set1_epi8(15));
}
inline Bytes spread(const int8_t* quad) { return _mm512_set1_epi32(four(quad)); }
inline VS pairs(Bytes w, Bytes x) { return (VS)_mm512_maddubs_epi16(w, x); }
inline VI quads(VS v) { return (VI)_mm512_madd_epi16((Bytes)v, _mm512_set1_epi16(1)); }
#if FASTEAGLE_ISA >= 4
inline Bytes add_quads(Bytes sum, Bytes w, Bytes x) { return _mm512_dpbusd_epi32(sum, w, x); }
#endif
#elif FASTEAGLE_ISA >= 1
typedef __m256i Bytes;
inline Bytes load_bytes(const uint8_t* p) { return _mm256_loadu_si256((const __m256i*)p); }
inline Bytes low(Bytes v) { return _mm256_and_si256(v, _mm256_set1_epi8(15)); }
inline Bytes high(Bytes v) {
  return _mm256_and_si256(_mm256_srli_epi16(v, 4), _mm256_set1_epi8(15));
}
inline Bytes spread(const int8_t* quad) { return _mm256_set1_epi32(four(quad)); }
inline VS pairs(Bytes w, Bytes x) { return (VS)_mm256_maddubs_epi16(w, x); }
inline VI quads(VS v) { return (VI)_mm256_madd_epi16((Bytes)v, _mm256_set1_epi16(1)); }
#if FASTEAGLE_ISA == 2
inline Bytes add_quads(Bytes sum, Bytes w, Bytes x) { return _mm256_dpbusd_avx_epi32(sum, w, x); }
#endif
#else
struct Bytes {
  uint8_t v[4 * W];
};
inline Bytes load_bytes(const uint8_t* p) {
  Bytes b;
  std::memcpy(&b, p, sizeof b);
  return b;
}
inline Bytes low(Bytes b) {
  for (uint8_t& x : b.v) x &= 15;
  return b;
}
inline Bytes high(Bytes b) {
  for (uint8_t& x : b.v) x >>= 4;
  return b;
}
#endif

// Returns the second half of a 4-bit line. For sums of its own it may stay where it is in its
// bytes, 16 times too large.
template <bool OWN>
inline Bytes second_half(const Bytes& v) {
#if FASTEAGLE_ISA >= 4 || FASTEAGLE_ISA == 2
  if (OWN) return v ^ low(v);
#endif
  return high(v);
}

// Sums of one row of activations with W outputs. The halves of a 4-bit line come to `add` and
// `add_second`. With TWO there are two chains, which hides latency for few rows.
template <int BITS, bool TWO>
struct Dot {
#if FASTEAGLE_ISA >= 4 || FASTEAGLE_ISA == 2
  static constexpr int bias = BITS == 8 ? 128 : 0;
  Bytes a, b = {};
  void begin(int32_t start) { a = (Bytes)splat(start); }
  void add(Bytes w, const int8_t* quad) { a = add_quads(a, w, spread(quad)); }
  void add_second(Bytes w, const int8_t* quad) {
    if constexpr (TWO) {
      b = add_quads(b, w, spread(quad));
    } else {
      add(w, quad);
    }
  }
  VI total() const {
    if constexpr (!TWO) return (VI)a;
    return (VI)a + (BITS == 4 ? (VI)b >> 4 : (VI)b);
  }
#elif FASTEAGLE_ISA == 3
  // Pairs of products of 8-bit weights in 16 bits are at most 2 * 128 * 127, if the sign moves to
  // the activation. For 4-bit weights see `block_products`.
  static constexpr int bias = 0;
  __m512i a;
  void begin(int32_t start) { a = (__m512i)splat(start); }
  void add(Bytes w, const int8_t* quad) {
    const Bytes value = _mm512_xor_si512(w, _mm512_set1_epi8(-128)), x = spread(quad);
    const Bytes turned =
        _mm512_mask_sub_epi8(x, _mm512_movepi8_mask(value), _mm512_setzero_si512(), x);
    const Bytes pairs = _mm512_maddubs_epi16(_mm512_abs_epi8(value), turned);
    a = _mm512_add_epi32(a, _mm512_madd_epi16(pairs, _mm512_set1_epi16(1)));
  }
  void add_second(Bytes w, const int8_t* quad) { add(w, quad); }
  VI total() const { return (VI)a; }
#elif FASTEAGLE_ISA == 1
  static constexpr int bias = 0;
  __m256i a;
  void begin(int32_t start) { a = (__m256i)splat(start); }
  void add(Bytes w, const int8_t* quad) {
    const Bytes value = _mm256_xor_si256(w, _mm256_set1_epi8(-128));
    const Bytes turned = _mm256_sign_epi8(spread(quad), value);
    const Bytes pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(value), turned);
    a = _mm256_add_epi32(a, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
  }
  void add_second(Bytes w, const int8_t* quad) { add(w, quad); }
  VI total() const { return (VI)a; }
#else
  static constexpr int bias = BITS == 8 ? 128 : 0;
  int32_t a[W];
  void begin(int32_t start) { std::fill_n(a, W, start); }
  void add(const Bytes& w, const int8_t* quad) {
    for (int i = 0; i < W; i++)
      for (int j = 0; j < 4; j++) a[i] += int32_t(w.v[4 * i + j]) * quad[j];
  }
  void add_second(const Bytes& w, const int8_t* quad) { add(w, quad); }
  VI total() const {
    VI v;
    std::memcpy(&v, a, sizeof v);
    return v;
  }
#endif
};

// Groups of W outputs that are multiplied at once. With AVX2 each quad of activations that is
// spread over a register serves all 16 outputs: the core's limit is vector operations, loads
// included.
template <int BITS>
constexpr int PARTS = BITS == 4 && FASTEAGLE_ISA == 1 ? 2 : 1;

// Computes integer products of R rows of activations, 32 bytes each at `q`, with PARTS * W outputs
// of one block at `line`, and passes them, times the scale of their `terms`, to `take` by row and
// part. They include the `start` of `terms`, which counts if `based`.
template <int R, int BITS, class F>
[[gnu::always_inline]] inline void block_products(const uint8_t* line, const int8_t* q,
                                                  const Term* terms, bool based, F take) {
#if FASTEAGLE_ISA == 3 || FASTEAGLE_ISA == 1
  if constexpr (BITS == 4) {
    // Row by row, with the weights of half a block's inputs in registers. Pairs are added in 16
    // bits, where the eight pairs of a block are at most 8 * 2 * 15 * 127.
    constexpr int P = PARTS<BITS>;
    Bytes w[4][P];
    VS totals[R][P];
    for_each<2>([&](int half) __attribute__((always_inline)) {
      for (int j = 0; j < 4; j++)
        for (int p = 0; p < P; p++) {
          const Bytes values = load_bytes(line + j * 4 * COLUMNS + p * 4 * W);
          w[j][p] = half ? high(values) : low(values);
        }
      for_each<R>([&](int r) __attribute__((always_inline)) {
        for (int j = 0; j < 4; j++) {
          const Bytes x = spread(q + r * BLOCK + 16 * half + 4 * j);
          for (int p = 0; p < P; p++) {
            const VS products = pairs(w[j][p], x);
            totals[r][p] = half || j ? totals[r][p] + products : products;
          }
        }
        if (half)
          for (int p = 0; p < P; p++) {
            VI total = quads(totals[r][p]);
            if (based) [[unlikely]]
              total += splat(terms[r].start);
            take(r, p, to_float(total) * splat(terms[r].scale));
          }
      });
    });
    return;
  }
#endif
  constexpr bool TWO = R < (W == 16 ? 5 : 4);
  constexpr int LINES = BITS == 4 ? 4 : 8;
  Dot<BITS, TWO> dots[R];
  for (int r = 0; r < R; r++) dots[r].begin(terms[r].start);
  for (int j = 0; j < LINES; j++) {
    const Bytes values = load_bytes(line + j * 4 * COLUMNS);
    if constexpr (BITS == 4) {
      const Bytes first = low(values), second = second_half<TWO>(values);
      for (int r = 0; r < R; r++) dots[r].add(first, q + r * BLOCK + 4 * j);
      for (int r = 0; r < R; r++) dots[r].add_second(second, q + r * BLOCK + 4 * j + 16);
    } else {
      for (int r = 0; r < R; r++) {
        if (j % 2) {
          dots[r].add_second(values, q + r * BLOCK + 4 * j);
        } else {
          dots[r].add(values, q + r * BLOCK + 4 * j);
        }
      }
    }
  }
  for (int r = 0; r < R; r++) {
    const VF scale = splat(terms[r].scale);
    const VI total = dots[r].total();
    take(r, 0, BY_MAGIC ? fma((VF)total, scale, splat(terms[r].shift)) : to_float(total) * scale);
  }
}

}  // namespace
