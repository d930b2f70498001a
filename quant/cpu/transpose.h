// Lanes of vectors in another order: a matrix transposed, pairs of bf16 taken apart and together.

#pragma once

#include <utility>

#include "vec.h"

namespace {

// Transposes the W x W matrix in v: after stage d, lanes and rows have exchanged bit d.
template <int d, int... j>
[[gnu::always_inline]] inline void exchange(VF* v, std::integer_sequence<int, j...>) {
#pragma GCC unroll 16
  for (int i = 0; i < W; i++) {
    if (i & d) continue;
    const VF a = v[i], b = v[i + d];
    v[i] = __builtin_shuffle(a, b, (VI){(j & d ? W + j - d : j)...});
    v[i + d] = __builtin_shuffle(a, b, (VI){(j & d ? W + j : j + d)...});
  }
}

[[gnu::always_inline]] inline void transpose(VF* v) {
  constexpr auto lanes = std::make_integer_sequence<int, W>();
  exchange<1>(v, lanes);
  exchange<2>(v, lanes);
  exchange<4>(v, lanes);
  if constexpr (W == 16) exchange<8>(v, lanes);
}

// Elements of 2 * W bf16 that lie in pairs: those at even or odd places.
inline VF even_of_pairs(VF v) { return (VF)((VU)v << 16); }
inline VF odd_of_pairs(VF v) { return (VF)((VU)v & 0xffff0000u); }

// Pairs of elements of a and of b, each 2 * W bf16, in order: those of the first W elements, or of
// the last ones.
template <int first, int... j>
inline VF pairs_of(VF a, VF b, std::integer_sequence<int, j...>) {
  return (VF)__builtin_shuffle((VS)a, (VS)b, (VS){(first + j / 2 + j % 2 * 2 * W)...});
}
template <int first>
inline VF pairs_of(VF a, VF b) {
  return pairs_of<first>(a, b, std::make_integer_sequence<int, 2 * W>());
}

// Turns 2 * W adjacent values into those at even places and those at odd places; `join` undoes it.
template <int... j>
[[gnu::always_inline]] inline void separate(VF& a, VF& b, std::integer_sequence<int, j...>) {
  const VF even = __builtin_shuffle(a, b, (VI){2 * j...});
  b = __builtin_shuffle(a, b, (VI){2 * j + 1 ...});
  a = even;
}
template <int... j>
[[gnu::always_inline]] inline void join(VF& a, VF& b, std::integer_sequence<int, j...>) {
  const VF first = __builtin_shuffle(a, b, (VI){j / 2 + j % 2 * W...});
  b = __builtin_shuffle(a, b, (VI){(W + j) / 2 + j % 2 * W...});
  a = first;
}
inline void separate(VF& a, VF& b) { separate(a, b, std::make_integer_sequence<int, W>()); }
inline void join(VF& a, VF& b) { join(a, b, std::make_integer_sequence<int, W>()); }

}  // namespace
