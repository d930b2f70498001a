// Decode attention of some rows over one block's cache.
//
// A row reads its keys in logical order, in blocks of 64 by rank, so that its result depends
// neither on the slots of a tree nor on other rows.
//
// Reference: `attend` in model.py; `Visible` holds the information of its mask.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#include "cache.h"
#include "quantize.h"
#include "transpose.h"
#include "vec.h"
#include "visible.h"

namespace {

constexpr int KEYS = 64;  // keys of one block of attention
constexpr int MAX_HEAD_DIM = 256;
constexpr int WIDE = 4;                // vectors of keys, or of columns of values, at once
constexpr int MOST = W == 16 ? 4 : 3;  // queries at once: their sums stay in registers

// Products of queries and weights with elements of a cache: in fp32, one after another.
template <class C>
struct Product {
  using Factor = float;               // type of queries and weights
  static constexpr int64_t STEP = 1;  // elements of a lane
  static VF add(VF sum, VF a, VF b) { return fma(a, b, sum); }
  static VF ones() { return splat(1.0f); }
  static VF exp(VF x) { return std::is_same_v<C, Bf16> ? coarse_exp_of(x) : exp_of(x); }
};
#if FASTEAGLE_ISA == 5
// In bf16, by pairs, the odd one first: twice as fast on AMD's cores. Sums are fp32.
template <>
struct Product<Bf16> {
  using Factor = Bf16;
  static constexpr int64_t STEP = 2;
  static VF add(VF sum, VF a, VF b) {
    return (VF)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
  }
  static VF ones() { return (VF)splat(0x3f803f80); }
  static VF exp(VF x) { return coarse_exp_of(x); }
};
#endif

// Attention of some rows over one block's cache, in units that threads share.
template <class C>
struct Attention {
  using Factor = typename Product<C>::Factor;
  static constexpr int64_t STEP = Product<C>::STEP;
  static constexpr int64_t ROW = KEYS * (sizeof(float) / sizeof(Factor));  // of weights
  static constexpr bool BF16 = std::is_same_v<C, Bf16>, PAIRED = STEP == 2;
  static constexpr C NONE[MAX_HEAD_DIM] = {};

  Heads heads;
  int64_t T, S, key_blocks;
  const Factor* q;  // [G, T * group, E], scaled
  const C* k;       // [G, S, E], or rows in 8 bits
  const C* v;       // like k
  const Visible* seen;
  int64_t row;   // the first of the T rows in `seen`
  float* parts;  // [G, key_blocks, T * group, E + 2]: sums, their weight, the largest score
  const C* ahead = nullptr;  // 64 rows that are read next, which products prefetch

  int64_t queries() const { return T * heads.group(); }
  float* part(int64_t g, int64_t block, int64_t i) const {
    return parts + ((g * key_blocks + block) * queries() + i) * (heads.E + 2);
  }
  // i = t * group + head within the group
  const Factor* query(int64_t g, int64_t i) const { return q + (g * queries() + i) * heads.E; }

  // Returns `n` rows of a cache from `slot` on, in `room` if the cache has them in 8 bits.
  const C* rows(const C* cache, int64_t g, int64_t slot, int64_t n, C* room) const {
    if (!heads.packed) return heads.row(cache, S, g, slot);
    for (int64_t i = 0; i < n; i++)
      unpack((const int8_t*)heads.row(cache, S, g, slot + i), heads.E, room + i * heads.E);
    return room;
  }

  // Transposes n keys, W at most, into columns of `turned` [E, WIDE * W], or of pairs of elements
  // [E / 2, WIDE * W]; further columns are zeros.
  void turn(const C* keys, int64_t n, float* turned) const {
    if (n == W) return turn([&](int i) { return keys + i * heads.E; }, turned);
    turn([&](int i) { return i < n ? keys + i * heads.E : NONE; }, turned);
  }

  // Transposes the keys `row(0)` .. `row(W - 1)`. Not inlined, for then GCC keeps the tile in
  // memory.
  template <class F>
  [[gnu::noinline]] void turn(F row, float* turned) const {
    constexpr int64_t STRIDE = WIDE * W;
    int64_t e = 0;
    VF tile[W];
    if constexpr (BF16) {  // in pairs of elements
      for (; e + 2 * W <= heads.E; e += 2 * W) {
        for_each<W>([&](int i) { tile[i] = load((const float*)(row(i) + e)); });
        transpose(tile);
        for_each<W>([&](int i) {
          if constexpr (PAIRED) {
            store(turned + (e / 2 + i) * STRIDE, tile[i]);
          } else {
            store(turned + (e + 2 * i) * STRIDE, even_of_pairs(tile[i]));
            store(turned + (e + 2 * i + 1) * STRIDE, odd_of_pairs(tile[i]));
          }
        });
      }
    }
    for (; e < heads.E; e += W) {
      if constexpr (PAIRED) {
        for_each<W>([&](int i) {
          tile[i] = VF{};
          std::memcpy(&tile[i], row(i) + e, W * sizeof(C));
        });
        transpose(tile);
        for_each<W / 2>([&](int i) { store(turned + (e / 2 + i) * STRIDE, tile[i]); });
      } else {
        for_each<W>([&](int i) { tile[i] = load(row(i) + e); });
        transpose(tile);
        for_each<W>([&](int i) { store(turned + (e + i) * STRIDE, tile[i]); });
      }
    }
  }

  // Returns the factor at `x`, or the pair that begins there, in all lanes.
  static VF spread_factor(const Factor* x) {
    int32_t bits;
    std::memcpy(&bits, x, sizeof bits);
    return (VF)splat(bits);
  }

  // Prefetches n of the elements that are read next.
  void prefetch(int64_t first, int64_t n) const {
    constexpr int64_t LINE = 64 / sizeof(C);
    for (int64_t i = first; i < first + n; i += LINE) to_l2(ahead + i);
  }

  // Writes products of R queries x [R, E] with N * W keys to `out`, whose rows are `width` apart.
  // The elements are added in order. Not inlined, for then GCC keeps the sums in memory.
  template <int R, int N>
  [[gnu::noinline]] void scores(const Factor* x, const float* turned, float* out,
                                int64_t width) const {
    const int64_t E = heads.E;
    VF sums[R][N] = {};
    for (int64_t e = 0; e < E; e += STEP, turned += WIDE * W) {
      prefetch(e * KEYS, STEP * KEYS);
      VF keys[N];
      for_each<N>([&](int c) { keys[c] = load(turned + c * W); });
      for_each<R>([&](int r) {
        const VF element = spread_factor(x + r * E + e);
        for_each<N>([&](int c) { sums[r][c] = Product<C>::add(sums[r][c], element, keys[c]); });
      });
    }
    for_each<R>(
        [&](int r) { for_each<N>([&](int c) { store(out + r * width + c * W, sums[r][c]); }); });
  }

  // Computes the scores of queries `from` .. `to` - 1 with the first `n` keys of `turned`, and with
  // others until a vector is full.
  void some_scores(int64_t g, int64_t from, int64_t to, const float* turned, int64_t n, float* out,
                   int64_t width) const {
    with_count<WIDE>((n + W - 1) / W, [&](auto vectors) {
      for (int64_t i = from; i < to; i += MOST)
        with_count<MOST>(to - i, [&](auto rows) {
          scores<rows, vectors>(query(g, i), turned, out + i * width, width);
        });
    });
  }

  // Computes all queries of KV head n % G over 64 keys, of rank 64 * (n / G) and more.
  void unit(int64_t n, float* scratch) {
    const int64_t group = heads.group(), E = heads.E, G = heads.G;
    const int64_t g = n % G, block = n / G, first = block * KEYS;
    const int64_t after = std::min(n + 1, G * key_blocks - 1);
    const int64_t shared = std::clamp<int64_t>(seen->shared - first, 0, KEYS);
    float* turned = scratch;                           // [E, WIDE * W]
    float* s = turned + E * WIDE * W + queries() * W;  // [queries, KEYS]
    C* room = (C*)(s + queries() * KEYS);              // [KEYS, E]
    ahead = heads.row(v, S, g, first);
    const C* keys = rows(k, g, first, shared, room);
    for (int64_t at = 0; at < shared; at += WIDE * W) {
      const int64_t some = std::min<int64_t>(WIDE * W, shared - at);
      for (int64_t i = 0; i < some; i += W)
        turn(keys + (at + i) * E, std::min<int64_t>(W, some - i), turned + i);
      some_scores(g, 0, queries(), turned, some, s + at, KEYS);
    }
    for (int64_t i = 0; i < queries(); i++)
      std::fill(s + i * KEYS + shared, s + (i + 1) * KEYS, -std::numeric_limits<float>::infinity());
    own_scores(g, first, turned, s, room);

    for (int64_t i = 0; i < queries(); i++) softmax(s + i * KEYS, part(g, block, i));
    const int64_t width = E + 2;
    ahead = heads.row(k, S, after % G, after / G * KEYS);
    const C* values = rows(v, g, first, shared, room);
    const auto shared_value = [&](int64_t j) { return values + j * E; };
    add_values(weights_of(s, 0), shared_value, shared, queries(), part(g, block, 0), width);
    for (int64_t t = 0; t < T; t++) {
      const auto [begin, end] = own_of(t, first);
      for (int64_t j = 0; heads.packed && j < end - begin; j++)
        rows(v, g, begin[j], 1, room + j * E);
      const auto own_value = [&](int64_t j) {
        return heads.packed ? room + j * E : heads.row(v, S, g, begin[j]);
      };
      add_values(weights_of(s, t * group) + rank_of(t, begin) - first, own_value, end - begin,
                 group, part(g, block, t * group), width);
    }
  }

  // Weights of query i, in the place of its scores.
  static Factor* weights_of(float* s, int64_t i) { return (Factor*)(s + i * KEYS); }

  struct Slots {
    const int64_t *begin, *end;
  };
  int64_t rank_of(int64_t t, const int64_t* slot) const {
    return seen->shared + (slot - (seen->own.data() + seen->begin[row + t]));
  }
  // Returns the own slots of a row with a rank in the block that begins at rank `first`.
  Slots own_of(int64_t t, int64_t first) const {
    const int64_t* own = seen->own.data() + seen->begin[row + t];
    const int64_t n = seen->begin[row + t + 1] - seen->begin[row + t];
    const int64_t begin = std::clamp<int64_t>(first - seen->shared, 0, n);
    const int64_t end = std::clamp<int64_t>(first + KEYS - seen->shared, 0, n);
    return {own + begin, own + end};
  }

  // Computes scores of the rows' own keys, W slots at a time, for the rows that see any of them.
  // The keys of a tree's rows are adjacent; those of a batch's rows are separate for each row.
  void own_scores(int64_t g, int64_t first, float* turned, float* s, C* room) const {
    const int64_t group = heads.group();
    float* all = turned + heads.E * WIDE * W;  // [queries, W]
    Slots left[MAX_ROWS];
    for (int64_t t = 0; t < T; t++) left[t] = own_of(t, first);
    for (;;) {
      int64_t slot = S;
      for (int64_t t = 0; t < T; t++)
        if (left[t].begin < left[t].end) slot = std::min(slot, *left[t].begin);
      if (slot == S) return;
      const int64_t n = std::min<int64_t>(W, S - slot);
      const auto seen_by = [&](int64_t t) {
        return left[t].begin < left[t].end && *left[t].begin < slot + n;
      };
      turn(rows(k, g, slot, n, room), n, turned);
      for (int64_t t = 0, end; t < T; t = end + 1) {
        for (end = t; end < T && seen_by(end);) end++;
        some_scores(g, t * group, end * group, turned, W, all, W);
        for (; t < end; t++)
          for (const int64_t*& p = left[t].begin; seen_by(t); p++)
            for (int64_t i = t * group; i < (t + 1) * group; i++)
              s[i * KEYS + rank_of(t, p) - first] = all[i * W + *p - slot];
      }
    }
  }

  // Turns scores into weights in place, see `weights_of`; `out` gets zeros, the sum of weights and
  // the top score. For a row without a key in this block they are NaN, which nothing reads.
  void softmax(float* s, float* out) const {
    VF best = load(s);
    for (int j = W; j < KEYS; j += W) {
      best = larger(load(s + j), best);
    }
    const float most = largest(best);
    Factor* weights = weights_of(s, 0);
    VF total = {};
    for (int j = 0; j < KEYS; j += STEP * W) {
      for_each<STEP>(
          [&](int c) { store(weights + j + c * W, Product<C>::exp(load(s + j + c * W) - most)); });
      total = Product<C>::add(total, load((const float*)(weights + j)), Product<C>::ones());
    }
    std::fill(out, out + heads.E, 0.0f);
    out[heads.E] = sum(total);
    out[heads.E + 1] = most;
  }

  // Adds the values [E] `value(0)` .. `value(n - 1)`, weighted by p [queries, KEYS], to rows of
  // `out`, which are `width` apart. The weight after an odd number of values is 0.
  template <class F>
  void add_values(const Factor* p, F value, int64_t n, int64_t n_queries, float* out,
                  int64_t width) const {
    if (n == 0) return;
    for (int64_t i = 0; i < n_queries; i += MOST, p += MOST * ROW, out += MOST * width)
      with_count<MOST>(n_queries - i, [&](auto count) {
        int64_t e = 0;
        for (; e + WIDE * W <= heads.E; e += WIDE * W)
          add_columns<count, WIDE>(p, value, e, n, out + e, width);
        for (; e + 2 * W <= heads.E; e += 2 * W)
          add_columns<count, 2>(p, value, e, n, out + e, width);
        for (; e < heads.E; e += W) add_columns<count, 1>(p, value, e, n, out + e, width);
      });
  }

  // Adds N * W columns, from column `e`, of n values to R rows. Where bf16 columns become fp32,
  // those at even and odd places are separate: their sums are exchanged at the beginning and the
  // end.
  template <int R, int N, class F>
  [[gnu::noinline]] void add_columns(const Factor* p, F value, int64_t e, int64_t n, float* out,
                                     int64_t width) const {
    constexpr bool TWO = BF16 && !PAIRED && N % 2 == 0;
    VF acc[R][N];
    for_each<R>([&](int r) {
      for_each<N>([&](int c) { acc[r][c] = load(out + r * width + c * W); });
      if constexpr (TWO)
        for_each<N / 2>([&](int c) { separate(acc[r][2 * c], acc[r][2 * c + 1]); });
    });
    for (int64_t j = 0; j < n; j += STEP) {
      prefetch(j * heads.E, STEP * heads.E);
      VF weight[R], values[N];
      for_each<R>([&](int r) { weight[r] = spread_factor(p + r * ROW + j); });
      const C* first = value(j) + e;
      if constexpr (PAIRED) {
        const C* second = j + 1 < n ? value(j + 1) + e : NONE;
        load_pairs<N>(first, second, values);
      } else if constexpr (TWO) {
        for_each<N / 2>([&](int c) {
          const VF pairs = load((const float*)(first + 2 * c * W));
          values[2 * c] = even_of_pairs(pairs);
          values[2 * c + 1] = odd_of_pairs(pairs);
        });
      } else {
        for_each<N>([&](int c) { values[c] = load(first + c * W); });
      }
      for_each<N>([&](int c) {
        for_each<R>([&](int r) { acc[r][c] = Product<C>::add(acc[r][c], weight[r], values[c]); });
      });
    }
    for_each<R>([&](int r) {
      if constexpr (TWO) for_each<N / 2>([&](int c) { join(acc[r][2 * c], acc[r][2 * c + 1]); });
      for_each<N>([&](int c) { store(out + r * width + c * W, acc[r][c]); });
    });
  }

  // Loads pairs of N * W columns of two values.
  template <int N>
  static void load_pairs(const C* first, const C* second, VF* pairs) {
    const auto load_bits = [](const C* p) {
      VF bits = {};
      std::memcpy(&bits, p, std::min(N, 2) * W * sizeof(C));
      return bits;
    };
    for_each<(N + 1) / 2>([&](int c) {
      const VF a = load_bits(first + 2 * c * W), b = load_bits(second + 2 * c * W);
      pairs[2 * c] = pairs_of<0>(a, b);
      if constexpr (N % 2 == 0) pairs[2 * c + 1] = pairs_of<W>(a, b);
    });
  }

  // Computes the result [E] of one query, adding up its blocks in order.
  void combine(int64_t g, int64_t i, float* out) const {
    const int64_t E = heads.E, length = seen->length(row + i / heads.group());
    const int64_t n = (length + KEYS - 1) / KEYS, next = queries() * (E + 2);
    float *first = part(g, 0, i), *partial = first;
    float most = -std::numeric_limits<float>::infinity();
    for (int64_t b = 0; b < n; b++, partial += next) most = std::max(most, partial[E + 1]);
    float total = 0;
    partial = first;
    for (int64_t from = 0; from < n; from += W) {
      const int64_t some = std::min<int64_t>(W, n - from);
      VF factors = splat(most);
      for (int64_t b = 0; b < some; b++) factors[b] = partial[b * next + E + 1];
      factors = exp_of(factors - most);
      for (int64_t b = 0; b < some; b++, partial += next) {
        total += partial[E] * factors[b];
        partial[E + 1] = factors[b];
      }
    }
    const float inverse = 1.0f / total;
    int64_t e = 0;
    for (; e + WIDE * W <= E; e += WIDE * W)
      combine_columns<WIDE>(first + e, next, n, E + 1 - e, inverse, out + e);
    for (; e < E; e += W) combine_columns<1>(first + e, next, n, E + 1 - e, inverse, out + e);
  }

  // Adds N * W columns of n blocks, `next` apart, whose factors lie `at` places on.
  template <int N>
  void combine_columns(const float* partial, int64_t next, int64_t n, int64_t at, float inverse,
                       float* out) const {
    VF sums[N] = {};
    for (int64_t b = 0; b < n; b++, partial += next) {
      const VF factor = splat(partial[at]);
      for_each<N>([&](int c) { sums[c] = fma(factor, load(partial + c * W), sums[c]); });
    }
    for_each<N>([&](int c) { store(out + c * W, sums[c] * inverse); });
  }
};

}  // namespace
