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

constexpr int MAX_ROWS = 32;  // rows that go through the blocks together
constexpr int KEYS = 64;      // keys of one block of attention

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
inline void exchange(VF* v, std::integer_sequence<int, j...>) {
#pragma GCC unroll 16
  for (int i = 0; i < W; i++) {
    if (i & d) continue;
    const VF a = v[i], b = v[i + d];
    v[i] = __builtin_shuffle(a, b, (VI){(j & d ? W + j - d : j)...});
    v[i + d] = __builtin_shuffle(a, b, (VI){(j & d ? W + j : j + d)...});
  }
}

inline void transpose(VF* v) {
  constexpr auto lanes = std::make_integer_sequence<int, W>();
  exchange<1>(v, lanes);
  exchange<2>(v, lanes);
  exchange<4>(v, lanes);
  if constexpr (W == 16) exchange<8>(v, lanes);
}

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

  int64_t queries() const { return T * heads.group(); }
  float* part(int64_t g, int64_t block, int64_t i) const {
    return parts + ((g * key_blocks + block) * queries() + i) * (heads.E + 2);
  }
  // i = t * group + head within the group
  const float* query(int64_t g, int64_t i) const { return q + (g * queries() + i) * heads.E; }

  // Transposes keys `first` .. `first + n - 1` into `turned` [E, W]; the other columns are zeros.
  void turned_keys(int64_t g, int64_t first, int64_t n, float* turned) const {
    int64_t e = 0;
    if constexpr (std::is_same_v<C, Bf16>) {  // in pairs of elements
      for (; e + 2 * W <= heads.E; e += 2 * W) {
        VF tile[W] = {};
        for (int64_t i = 0; i < n; i++)
          std::memcpy(&tile[i], k + (g * S + first + i) * heads.E + e, sizeof tile[i]);
        transpose(tile);
        for (int i = 0; i < W; i++) {
          store(turned + (e + 2 * i) * W, (VF)((VU)tile[i] << 16));
          store(turned + (e + 2 * i + 1) * W, (VF)((VU)tile[i] & 0xffff0000u));
        }
      }
    }
    for (; e < heads.E; e += W) {
      VF tile[W] = {};
      for (int64_t i = 0; i < n; i++) tile[i] = load(k + (g * S + first + i) * heads.E + e);
      transpose(tile);
      for (int i = 0; i < W; i++) store(turned + (e + i) * W, tile[i]);
    }
  }

  // Computes products of R queries with W keys, in four chains.
  template <int R>
  void scores(int64_t g, int64_t i, const float* turned, VF* out) const {
    const float* x[R];
    VF chains[R][4] = {};
    for (int r = 0; r < R; r++) x[r] = query(g, i + r);
    for (int64_t e = 0; e < heads.E; e += 4)
      for (int c = 0; c < 4; c++) {
        const VF keys = load(turned + (e + c) * W);
        for (int r = 0; r < R; r++) chains[r][c] = fma(splat(x[r][e + c]), keys, chains[r][c]);
      }
    for (int r = 0; r < R; r++)
      out[r] = (chains[r][0] + chains[r][1]) + (chains[r][2] + chains[r][3]);
  }

  // Computes the scores of queries `from` .. `to` - 1 with W keys.
  template <class F>
  void some_scores(int64_t g, int64_t from, int64_t to, const float* turned, F take) const {
    VF out[4];
    for (int64_t i = from, n; i < to; i += n) {
      n = std::min<int64_t>(4, to - i);
      with_count<4>(n, [&](auto count) { scores<count>(g, i, turned, out); });
      for (int64_t r = 0; r < n; r++) take(i + r, out[r]);
    }
  }

  // Computes all queries of KV head g over keys of rank 64 * block .. 64 * block + 63.
  void unit(int64_t g, int64_t block, float* scratch) const {
    const int64_t group = heads.group(), E = heads.E, first = block * KEYS;
    const int64_t shared = std::clamp<int64_t>(seen->shared - first, 0, KEYS);
    float* turned = scratch;                                      // [E, W]
    float* s = turned + E * W + queries() * W;                    // [queries, KEYS]
    const char* values = (const char*)(v + (g * S + first) * E);  // wanted after the scores
    for (int64_t i = 0; i < shared * E * int64_t(sizeof(C)); i += 64)
      __builtin_prefetch(values + i);
    std::fill(s, s + queries() * KEYS, -std::numeric_limits<float>::infinity());
    for (int64_t at = 0; at < shared; at += W) {
      const int64_t n = std::min<int64_t>(W, shared - at);
      turned_keys(g, first + at, n, turned);
      some_scores(g, 0, queries(), turned, [&](int64_t i, VF found) {
        if (n == W) return store(s + i * KEYS + at, found);
        for (int64_t j = 0; j < n; j++) s[i * KEYS + at + j] = found[j];
      });
    }
    own_scores(g, first, turned, s);

    for (int64_t i = 0; i < queries(); i++) softmax(s + i * KEYS, part(g, block, i));
    const int64_t width = E + 2;
    add_values(s, v + (g * S + first) * E, shared, queries(), part(g, block, 0), width);
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
    float* all = turned + heads.E * W;  // [queries, W]
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
      turned_keys(g, slot, n, turned);
      for (int64_t t = 0, end; t < T; t = end + 1) {
        for (end = t; end < T && seen_by(end);) end++;
        some_scores(g, t * group, end * group, turned,
                    [&](int64_t i, VF found) { store(all + i * W, found); });
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
    for (int64_t i = 0; i < n_queries; i += 4, p += 4 * KEYS, out += 4 * width)
      with_count<4>(n_queries - i, [&](auto count) {
        add_values_of<count>(p, values, n, out, width);
      });
  }

  template <int R>
  void add_values_of(const float* p, const C* values, int64_t n, float* out, int64_t width) const {
    constexpr int WIDE = W == 16 ? 4 : 2;  // vectors of a row at once
    int64_t e = 0;
    for (; e + WIDE * W <= heads.E; e += WIDE * W)
      add_columns<R, WIDE>(p, values + e, n, out + e, width);
    for (; e < heads.E; e += W) add_columns<R, 1>(p, values + e, n, out + e, width);
  }

  template <int R, int N>
  void add_columns(const float* p, const C* values, int64_t n, float* out, int64_t width) const {
    VF acc[R][N];
    for (int r = 0; r < R; r++)
      for (int c = 0; c < N; c++) acc[r][c] = load(out + r * width + c * W);
    for (int64_t j = 0; j < n; j++, values += heads.E)
      for (int c = 0; c < N; c++) {
        const VF value = load(values + c * W);
        for (int r = 0; r < R; r++) acc[r][c] = fma(splat(p[r * KEYS + j]), value, acc[r][c]);
      }
    for (int r = 0; r < R; r++)
      for (int c = 0; c < N; c++) store(out + r * width + c * W, acc[r][c]);
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
