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
#include <utility>
#include <vector>

#include "quantize.h"
#include "vec.h"

namespace {

constexpr int KEYS = 64;  // keys of one block of attention
constexpr int MAX_HEAD_DIM = 256;
constexpr int WIDE = 4;                // vectors of keys, or of columns of values, at once
constexpr int MOST = W == 16 ? 4 : 3;  // queries at once: their sums stay in registers

// Keys that each row sees: slots 0 .. shared - 1, then slots of its own.
struct Visible {
  int64_t shared = 0;
  std::vector<int64_t> begin;  // [T + 1] into `own`
  std::vector<int64_t> own;    // ascending within a row

  int64_t length(int64_t t) const { return shared + begin[t + 1] - begin[t]; }

  static Visible of_mask(const bool* mask, int64_t T, int64_t S) {
    Visible v;
    v.shared = S;
    for (int64_t t = 0; t < T; t++) {
      const bool* row = mask + t * S;
      const void* gap = std::memchr(row, 0, v.shared);
      if (gap != nullptr) v.shared = (const bool*)gap - row;
    }
    v.begin.push_back(0);
    for (int64_t t = 0; t < T; t++) {
      const bool* row = mask + t * S;
      for (int64_t s = v.shared; s < S; s++)
        if (row[s]) v.own.push_back(s);
      v.begin.push_back(v.own.size());
    }
    return v;
  }

  static Visible of_tree(int64_t seq_len, const int32_t* paths, int64_t width,
                         const int64_t* depths, int64_t T, int64_t window) {
    Visible v;
    v.shared = seq_len;
    for (int64_t t = 0; t < T; t++)
      if (window > 0 && seq_len + depths[t] >= window) v.shared = 0;
    v.begin.push_back(0);
    for (int64_t t = 0; t < T; t++) {
      const int64_t last = seq_len + depths[t];  // logical positions first .. last
      const int64_t first = window > 0 ? std::max<int64_t>(0, last - window + 1) : 0;
      if (v.shared < seq_len)
        for (int64_t s = first; s < seq_len; s++) v.own.push_back(s);
      for (int64_t d = std::max<int64_t>(0, first - seq_len); d <= depths[t]; d++)
        v.own.push_back(seq_len + paths[t * width + d]);
      v.begin.push_back(v.own.size());
    }
    return v;
  }
};

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

struct Heads {
  int64_t H, G, E;
  int64_t group() const { return H / G; }
  int64_t together() const { return E % BLOCK ? 2 : 1; }
};

// Attention of some rows over one block's cache, in units that threads share.
template <class C>
struct Attention {
  Heads heads;
  int64_t T, S, key_blocks;
  const float* q;  // [G, T * group, E], scaled
  const C* k;      // [G, S, E]
  const C* v;      // [G, S, E]
  const Visible* seen;
  int64_t row;   // the first of the T rows in `seen`
  float* parts;  // [G, key_blocks, T * group, E + 2]: sums, their weight, the largest score
  const C* ahead = nullptr;  // 64 rows that are read next, which products prefetch

  int64_t queries() const { return T * heads.group(); }
  float* part(int64_t g, int64_t block, int64_t i) const {
    return parts + ((g * key_blocks + block) * queries() + i) * (heads.E + 2);
  }
  // i = t * group + head within the group
  const float* query(int64_t g, int64_t i) const { return q + (g * queries() + i) * heads.E; }

  // Transposes keys `first` .. `first + n - 1`, W at most, into columns of `turned` [E, WIDE * W];
  // further columns are zeros.
  void turn(int64_t g, int64_t first, int64_t n, float* turned) const {
    const C* keys = k + (g * S + first) * heads.E;
    if (n == W) return turn([&](int i) { return keys + i * heads.E; }, turned);
    static constexpr C NONE[MAX_HEAD_DIM] = {};
    turn([&](int i) { return i < n ? keys + i * heads.E : NONE; }, turned);
  }

  // Transposes the keys `row(0)` .. `row(W - 1)`.
  template <class F>
  [[gnu::always_inline]] void turn(F row, float* turned) const {
    constexpr int64_t STRIDE = WIDE * W;
    int64_t e = 0;
    VF tile[W];
    if constexpr (std::is_same_v<C, Bf16>) {  // in pairs of elements
      for (; e + 2 * W <= heads.E; e += 2 * W) {
        for_each<W>([&](int i) { tile[i] = load((const float*)(row(i) + e)); });
        transpose(tile);
        for_each<W>([&](int i) {
          store(turned + (e + 2 * i) * STRIDE, even_of_pairs(tile[i]));
          store(turned + (e + 2 * i + 1) * STRIDE, odd_of_pairs(tile[i]));
        });
      }
    }
    for (; e < heads.E; e += W) {
      for_each<W>([&](int i) { tile[i] = load(row(i) + e); });
      transpose(tile);
      for_each<W>([&](int i) { store(turned + (e + i) * STRIDE, tile[i]); });
    }
  }

  // Prefetches n of the elements that are read next.
  void prefetch(int64_t first, int64_t n) const {
    constexpr int64_t LINE = 64 / sizeof(C);
    for (int64_t i = first; i < first + n; i += LINE) to_l2(ahead + i);
  }

  // Writes products of R queries x [R, E] with N * W keys to `out`, whose rows are `width` apart.
  // The elements are added in order. Not inlined, for then GCC keeps the sums in memory.
  template <int R, int N>
  [[gnu::noinline]] void scores(const float* x, const float* turned, float* out,
                                int64_t width) const {
    const int64_t E = heads.E;
    VF sums[R][N] = {};
    for (int64_t e = 0; e < E; e++, turned += WIDE * W) {
      prefetch(e * KEYS, KEYS);
      VF keys[N];
      for_each<N>([&](int c) { keys[c] = load(turned + c * W); });
      for_each<R>([&](int r) {
        const VF element = splat(x[r * E + e]);
        for_each<N>([&](int c) { sums[r][c] = fma(element, keys[c], sums[r][c]); });
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
    const C* values = v + (g * S + first) * E;
    ahead = values;
    for (int64_t at = 0; at < shared; at += WIDE * W) {
      const int64_t keys = std::min<int64_t>(WIDE * W, shared - at);
      for (int64_t i = 0; i < keys; i += W)
        turn(g, first + at + i, std::min<int64_t>(W, keys - i), turned + i);
      some_scores(g, 0, queries(), turned, keys, s + at, KEYS);
    }
    for (int64_t i = 0; i < queries(); i++)
      std::fill(s + i * KEYS + shared, s + (i + 1) * KEYS, -std::numeric_limits<float>::infinity());
    own_scores(g, first, turned, s);

    for (int64_t i = 0; i < queries(); i++) softmax(s + i * KEYS, part(g, block, i));
    const int64_t width = E + 2;
    ahead = k + (after % G * S + after / G * KEYS) * E;
    add_values(s, values, shared, queries(), part(g, block, 0), width);
    for (int64_t t = 0; t < T; t++) {
      const auto [begin, end] = own_of(t, first);
      for (const int64_t *slot = begin, *next; slot < end; slot = next) {
        for (next = slot + 1; next < end && *next == next[-1] + 1;) next++;
        const int64_t rank = rank_of(t, slot) - first, i = t * group;
        add_values(s + i * KEYS + rank, v + (g * S + *slot) * E, next - slot, group,
                   part(g, block, i), width);
      }
    }
  }

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
  void own_scores(int64_t g, int64_t first, float* turned, float* s) const {
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
      turn(g, slot, n, turned);
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

  // Turns scores into weights in place; `out` gets zeros, the sum of weights and the top score.
  void softmax(float* s, float* out) const {
    VF best = load(s);
    for (int j = W; j < KEYS; j += W) {
      best = larger(load(s + j), best);
    }
    const float most = largest(best);
    VF total = {};
    if (most == -std::numeric_limits<float>::infinity()) {
      std::fill(s, s + KEYS, 0.0f);  // no key of this row is in this block
    } else {
      for (int j = 0; j < KEYS; j += W) {
        const VF p = exp_of(load(s + j) - most);
        store(s + j, p);
        total += p;
      }
    }
    std::fill(out, out + heads.E, 0.0f);
    out[heads.E] = sum(total);
    out[heads.E + 1] = most;
  }

  // Adds n values [n, E], weighted by p [queries, KEYS], to rows of `out`, which are `width` apart.
  void add_values(const float* p, const C* values, int64_t n, int64_t n_queries, float* out,
                  int64_t width) const {
    if (n == 0) return;
    for (int64_t i = 0; i < n_queries; i += MOST, p += MOST * KEYS, out += MOST * width)
      with_count<MOST>(n_queries - i, [&](auto count) {
        int64_t e = 0;
        for (; e + WIDE * W <= heads.E; e += WIDE * W)
          add_columns<count, WIDE>(p, values + e, n, out + e, width);
        for (; e + 2 * W <= heads.E; e += 2 * W)
          add_columns<count, 2>(p, values + e, n, out + e, width);
        for (; e < heads.E; e += W) add_columns<count, 1>(p, values + e, n, out + e, width);
      });
  }

  // Adds N * W columns of n values to R rows. Pairs of bf16 are separated where there are two
  // vectors of them: sums of even and odd columns are exchanged at the beginning and the end.
  template <int R, int N>
  [[gnu::noinline]] void add_columns(const float* p, const C* values, int64_t n, float* out,
                                     int64_t width) const {
    constexpr bool PAIRS = std::is_same_v<C, Bf16> && N % 2 == 0;
    VF acc[R][N];
    for_each<R>([&](int r) {
      for_each<N>([&](int c) { acc[r][c] = load(out + r * width + c * W); });
      if constexpr (PAIRS)
        for_each<N / 2>([&](int c) { separate(acc[r][2 * c], acc[r][2 * c + 1]); });
    });
    for (int64_t j = 0; j < n; j++, values += heads.E) {
      prefetch(j * heads.E, heads.E);
      VF weight[R];
      for_each<R>([&](int r) { weight[r] = splat(p[r * KEYS + j]); });
      const auto add = [&](int c, VF value) {
        for_each<R>([&](int r) { acc[r][c] = fma(weight[r], value, acc[r][c]); });
      };
      if constexpr (PAIRS) {
        for_each<N / 2>([&](int c) {
          const VF pairs = load((const float*)(values + 2 * c * W));
          add(2 * c, even_of_pairs(pairs));
          add(2 * c + 1, odd_of_pairs(pairs));
        });
      } else {
        for_each<N>([&](int c) { add(c, load(values + c * W)); });
      }
    }
    for_each<R>([&](int r) {
      if constexpr (PAIRS) for_each<N / 2>([&](int c) { join(acc[r][2 * c], acc[r][2 * c + 1]); });
      for_each<N>([&](int c) { store(out + r * width + c * W, acc[r][c]); });
    });
  }

  // Computes the result [E] of one query, adding up its blocks in order.
  void combine(int64_t g, int64_t i, float* out) const {
    const int64_t E = heads.E, length = seen->length(row + i / heads.group());
    const int64_t n = (length + KEYS - 1) / KEYS;
    float most = -std::numeric_limits<float>::infinity();
    for (int64_t b = 0; b < n; b++) {
      const float m = part(g, b, i)[E + 1];
      most = m > most ? m : most;
    }
    float total = 0;
    std::fill(out, out + E, 0.0f);
    for (int64_t first = 0; first < n; first += W) {
      const int64_t end = std::min<int64_t>(n, first + W);
      VF factors = splat(most);
      for (int64_t b = first; b < end; b++) factors[b - first] = part(g, b, i)[E + 1];
      factors = exp_of(factors - most);
      for (int64_t b = first; b < end; b++) {
        const float *found = part(g, b, i), factor = factors[b - first];
        total += found[E] * factor;
        for (int64_t e = 0; e < E; e += W)
          store(out + e, fma(splat(factor), load(found + e), load(out + e)));
      }
    }
    const float inverse = 1.0f / total;
    for (int64_t e = 0; e < E; e += W) store(out + e, load(out + e) * inverse);
  }
};

}  // namespace
