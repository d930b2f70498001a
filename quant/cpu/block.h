// Whole decoder blocks: norms, products, RoPE and attention of up to 32 rows, on all threads
// together.
//
// Reference: `Block` in model.py, except for activations in 8 bits.

#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <span>
#include <vector>

#include "attention.h"
#include "gemm.h"
#include "moe.h"
#include "norm.h"
#include "quantize.h"
#include "tensors.h"
#include "threads.h"
#include "vec.h"

namespace {

struct Block {
  const float *attention_norm, *q_norm, *k_norm, *mlp_norm;  // null if missing
  int64_t q_norm_dim;  // E, or H * E: then queries and keys of all heads are normed together
  Weight qkv, out, gate_up, down;
  Experts experts;
};

Block block_of(const BlockTensors& t) {
  Block b;
  b.attention_norm = floats(t.attention_norm);
  b.qkv = Weight(t.qkv, &t.qkv_bias);
  b.q_norm = floats(t.q_norm);
  b.k_norm = floats(t.k_norm);
  b.out = Weight(t.out);
  b.mlp_norm = floats(t.mlp_norm);
  b.gate_up = Weight(t.gate_up);
  b.down = Weight(t.down);
  b.q_norm_dim = t.q_norm.numel();
  if (t.router.numel()) b.experts = experts_of(t);
  return b;
}

// Raises unless the tensors `t` of block `b` fit each other; its QKV product reads `K` inputs.
void check_block(const BlockTensors& t, const Block& b, const Heads& heads, int64_t D, int64_t K) {
  const int64_t H = heads.H, G = heads.G, E = heads.E, F = b.down.h.K;
  TORCH_CHECK(G > 0 && H > 0 && H % G == 0 && E > 0 && E % 16 == 0 && E <= MAX_HEAD_DIM &&
                  H % heads.together() == 0,
              "head dim");
  const int64_t n = std::max<int64_t>(1, b.experts.n);
  TORCH_CHECK(D % BLOCK == 0 && F % BLOCK == 0, "widths in blocks of 32");
  TORCH_CHECK(b.qkv.h.N == (H + 2 * G) * E && b.qkv.h.K == K, "qkv is [", (H + 2 * G) * E, ", ", K,
              "]");
  TORCH_CHECK(b.out.h.N == D && b.out.h.K == H * E, "out is [", D, ", ", H * E, "]");
  TORCH_CHECK(b.gate_up.h.N == n * 2 * F && b.gate_up.h.K == D, "gate_up is [", n * 2 * F, ", ", D,
              "]");
  TORCH_CHECK(b.down.h.N == n * D, "down is [", n * D, ", ", F, "]");
  if (b.experts.n) check_experts(t, b.experts, D);
  const auto is_scale = [](const Tensor& norm, int64_t n) {
    return norm.is_contiguous() && (norm.numel() == 0 || norm.numel() == n);
  };
  const bool whole = b.q_norm_dim > E;
  TORCH_CHECK(is_scale(t.attention_norm, D) && is_scale(t.q_norm, whole ? H * E : E) &&
                  is_scale(t.k_norm, whole ? G * E : E) && is_scale(t.mlp_norm, D) &&
                  (t.q_norm.numel() == 0) == (t.k_norm.numel() == 0),
              "norms are [D] and [E]");
}

// Raises unless all blocks without experts have one FFN dim.
void check_widths(const std::vector<Block>& blocks) {
  int64_t F = 0;
  for (const Block& block : blocks) {
    if (block.experts.n) continue;
    TORCH_CHECK(F == 0 || block.down.h.K == F, "blocks of one shape");
    F = block.down.h.K;
  }
}

// Raises unless cos and sin are tables [positions, E].
void check_tables(const Tensor& cos, const Tensor& sin, int64_t E) {
  TORCH_CHECK(cos.dim() == 2 && cos.size(1) == E && sin.sizes() == cos.sizes() &&
                  cos.is_contiguous() && sin.is_contiguous(),
              "cos and sin are [positions, E]");
}

struct Scratch {
  std::unique_ptr<uint8_t[]> memory;  // without values
  size_t size = 0, used = 0;

  // Makes room for `bytes`, and for some more, because texts grow.
  void reserve(size_t bytes) {
    used = 0;
    if (size >= bytes + 4096) return;
    size = 0;
    memory.reset();  // before there is more: nobody reads what it holds
    const size_t more = bytes + bytes / 4 + 4096;
    memory.reset(new uint8_t[more]);
    size = more;
  }
  template <class E>
  E* take(size_t n) {
    used = (used + 63) / 64 * 64;
    uint8_t* start = (uint8_t*)(((uintptr_t)memory.get() + 63) / 64 * 64);
    E* p = (E*)(start + used);
    used += n * sizeof(E);
    TORCH_INTERNAL_ASSERT(used + 64 <= size, "scratch memory");
    return p;
  }
  Activations activations(int64_t rows, int64_t K) {
    return Activations::at(take<uint8_t>(Activations::bytes(rows, K)), rows, K);
  }
};

// Rows of one sequence in a pass, which follow each other, and its cache.
template <class C>
struct Sequence {
  int64_t first, T;  // rows of the pass: T from `first` on
  int64_t row;       // of `first` in `seen`
  int64_t S, key_blocks;
  const Visible* seen;
  float* parts;  // see `Attention`
  C *k, *v;      // see `Attention`, of the block that runs

  bool has(int64_t t) const { return t >= first && t < first + T; }
};

// State that all blocks of one call share. `sequences` are the worker's own: they go from block to
// block.
template <class C>
struct Pass {
  using Factor = typename Product<C>::Factor;

  Heads heads;
  int64_t D, T;
  float eps;
  const float *cos, *sin;  // [T, E]
  const int64_t* slots;    // [T]
  float* x;                // [T, D], in place
  const float* entry;      // [T, entry_dim]: input of the first product instead of norm(x), or null
  int64_t entry_dim;
  Factor* queries;
  float *qkv, *parts, *scratch;  // parts: of all sequences; scratch: one per worker
  int64_t scratch_size, key_blocks;
  std::span<const Sequence<C>> sequences;
  uint8_t* expert_memory;
  Activations normed, attended, hidden, entered;

  float* own_scratch(const Worker& me) const { return scratch + me.id * scratch_size; }

  // Rotates and scales one attention head, and writes it in the type of `out`.
  template <class O>
  void rope(const float* in, const float* norm, float factor, int64_t t, float scale,
            O* out) const {
    const int64_t E = heads.E, half = E / 2;
    float own[MAX_HEAD_DIM];
    if (norm != nullptr) {
      scaled(in, factor, norm, E, own);
      in = own;
    }
    const float *c = cos + t * E, *s = sin + t * E;
    int64_t e = 0;
    for (; e + W <= half; e += W) {
      const VF a = load(in + e), b = load(in + e + half);
      store(out + e, (a * load(c + e) - b * load(s + e)) * scale);
      store(out + e + half, (b * load(c + e + half) + a * load(s + e + half)) * scale);
    }
    for (; e < half; e++) {
      const float a = in[e], b = in[e + half];
      put(out + e, (a * c[e] - b * s[e]) * scale);
      put(out + e + half, (b * c[e + half] + a * s[e + half]) * scale);
    }
  }

  void rotate(const Worker& me, const Block& w) const {
    const int64_t H = heads.H, G = heads.G, E = heads.E, n = H + 2 * G, group = heads.group();
    const float scale = 1.0f / std::sqrt(float(E));
    const auto [begin, end] = me.share(T * n);
    const bool whole = w.q_norm_dim > E;
    float factors[2] = {};  // of all queries and of all keys of a row
    const Sequence<C>* own = sequences.data();
    for (int64_t i = begin; i < end; i++) {
      const int64_t t = i / n, h = i % n;
      while (!own->has(t)) own++;
      const float *row = qkv + t * n * E, *in = row + h * E;
      if (whole && (i == begin || h == 0)) {
        factors[0] = rms_factor(row, H * E, eps);
        factors[1] = rms_factor(row + H * E, G * E, eps);
      }
      const float* norm = h < H ? w.q_norm : w.k_norm;
      float factor = 1.0f;
      if (whole && h < H + G) {
        norm += (h < H ? h : h - H) * E;
        factor = factors[h >= H];
      } else if (norm != nullptr) {
        factor = rms_factor(in, E, eps);
      }
      if (h < H) {
        const int64_t g = h / group, at = (g * own->T + t - own->first) * group + h % group;
        rope(in, norm, factor, t, scale, queries + (own->first * H + at) * E);
      } else {
        const bool is_key = h < H + G;
        C* place = heads.row(is_key ? own->k : own->v, own->S, (h - H) % G, slots[t]);
        C room[MAX_HEAD_DIM], *out = heads.packed ? room : place;
        if (is_key) rope(in, norm, factor, t, 1.0f, out);
        for (int64_t e = 0; e < E && !is_key; e += W) store(out + e, load(in + e));
        if (heads.packed) pack(out, E, (int8_t*)place);
      }
    }
  }

  // Writes the normed rows in 8 bits, and to `rows` [T, D] in fp32 if it is not null.
  void norm(const Worker& me, const float* weight, float* rows = nullptr) {
    const auto [begin, end] = me.share(T);
    for (int64_t t = begin; t < end; t++) {
      float* own = rows == nullptr ? own_scratch(me) : rows + t * D;
      rms_norm(x + t * D, weight, D, eps, own);
      normed.quantize_row(t, own, D);
    }
  }

  void enter(const Worker& me) {
    const auto [begin, end] = me.share(T);
    for (int64_t t = begin; t < end; t++) entered.quantize_row(t, entry + t * entry_dim, entry_dim);
  }

  Attention<C> attention_of(const Sequence<C>& s) const {
    const Factor* own = queries + s.first * heads.H * heads.E;
    return {heads, s.T, s.S, s.key_blocks, own, s.k, s.v, s.seen, s.row, s.parts};
  }

  void attention(const Worker& me) {
    int64_t n = 0;  // units of all sequences
    for (const Sequence<C>& sequence : sequences) n += heads.G * sequence.key_blocks;
    me.each(n, [&](int64_t begin, int64_t end) {
      for (const Sequence<C>& sequence : sequences) {
        Attention<C> a = attention_of(sequence);
        const int64_t units = heads.G * a.key_blocks;
        for (int64_t i = std::max<int64_t>(0, begin); i < std::min(end, units); i++)
          a.unit(i, own_scratch(me));
        begin -= units;
        end -= units;
      }
    });
    me.end(Phase::attention);
    // Take as many attention heads together as fill blocks of 32.
    const int64_t E = heads.E, group = heads.group(), together = heads.together();
    float result[2 * MAX_HEAD_DIM];
    const auto [from, to] = me.share(T * heads.H / together);
    const Sequence<C>* own = sequences.data();
    for (int64_t i = from; i < to; i++) {
      const int64_t t = i * together / heads.H, first = i * together % heads.H;
      while (!own->has(t)) own++;
      const Attention<C> a = attention_of(*own);
      for (int64_t h = first; h < first + together; h++)
        a.combine(h / group, (t - own->first) * group + h % group, result + (h - first) * E);
      for (int64_t e = 0; e < together * E; e += BLOCK)
        attended.quantize(t, (first * E + e) / BLOCK, result + e);
    }
  }

  void feed_forward(const Worker& me, const Block& w) {
    uint8_t* own = (uint8_t*)own_scratch(me);
    norm(me, w.mlp_norm);
    me.end(Phase::norms);
    const Choice choice(own, normed, T, w.gate_up.base);
    me.each(hidden.blocks, [&](int64_t begin, int64_t end) {
      for (int64_t block = begin; block < end; block++)
        gated(w.gate_up, block, normed, choice, T, hidden);
    });
    me.end(Phase::gate_up);
    products(me, w.down, hidden, own, T, x, D, true);
    me.end(Phase::down);
  }

  void experts(const Worker& me, const Block& w) {
    uint8_t* own = (uint8_t*)own_scratch(me);
    Mixture mixture(w.experts, w.gate_up, w.down, normed, T, expert_memory, own);
    norm(me, w.mlp_norm, mixture.rows);
    me.end(Phase::norms);
    mixture.score(me);
    me.end(Phase::router);
    mixture.route();
    mixture.gate(me);
    me.end(Phase::gate_up);
    mixture.add(me, x);
    me.end(Phase::down);
  }

  void block(const Worker& me, const Block& w, bool by_entry) {
    uint8_t* own = (uint8_t*)own_scratch(me);
    if (by_entry) {
      enter(me);
    } else {
      norm(me, w.attention_norm);
    }
    me.end(Phase::norms);
    products(me, w.qkv, by_entry ? entered : normed, own, T, qkv, w.qkv.h.N, false);
    me.end(Phase::qkv);
    rotate(me, w);
    me.end(Phase::rope);
    attention(me);
    me.end(Phase::combine);
    products(me, w.out, attended, own, T, x, D, true);
    me.end(Phase::out);
    w.experts.n ? experts(me, w) : feed_forward(me, w);
  }
};

// Memory for passes of at most `most` rows through `blocks` that see at most `longest` keys each,
// and for `more` bytes.
template <class C>
void arrange(Pass<C>& pass, Scratch& scratch, std::span<const Block> blocks, int64_t most,
             int64_t longest, size_t more = 0) {
  const Heads& heads = pass.heads;
  const int64_t H = heads.H, E = heads.E;
  const int64_t n_qkv = (H + 2 * heads.G) * E;
  pass.key_blocks = (longest + KEYS - 1) / KEYS;
  const int64_t n_parts = heads.G * pass.key_blocks * most * heads.group() * (E + 2);
  const int64_t own = E * (WIDE * W + KEYS) + most * heads.group() * (W + KEYS);
  const int threads = at::get_num_threads();
  int64_t F = 0;  // of dense blocks
  size_t of_experts = 0, own_experts = 0;
  for (const Block& block : blocks) {
    if (block.experts.n) {
      of_experts = std::max(of_experts, Mixture::bytes(block.experts, block.down, most, pass.D));
      own_experts =
          std::max(own_experts, Mixture::own_bytes(block.experts, block.down, most, pass.D));
    } else {
      F = block.down.h.K;
    }
  }
  const int64_t widest = std::max({2 * pass.D, F, H * E, pass.entry_dim});
  const int64_t choice = std::max(Choice::bytes(most, widest), own_experts) / 4 + 1;
  pass.scratch_size = (std::max({own, 2 * pass.D, choice}) + 63) / 64 * 64;
  const size_t quantized = Activations::bytes(most, pass.D) + Activations::bytes(most, H * E) +
                           Activations::bytes(most, F) + Activations::bytes(most, pass.entry_dim);
  scratch.reserve(more + quantized + of_experts +
                  4 * size_t(most * (n_qkv + H * E) + n_parts + threads * pass.scratch_size));
  pass.qkv = scratch.take<float>(most * n_qkv);
  pass.queries = scratch.take<typename Pass<C>::Factor>(most * H * E);
  pass.parts = scratch.take<float>(n_parts);
  pass.scratch = scratch.take<float>(threads * pass.scratch_size);
  pass.normed = scratch.activations(most, pass.D);
  pass.attended = scratch.activations(most, H * E);
  pass.hidden = scratch.activations(most, F);
  pass.expert_memory = scratch.take<uint8_t>(of_experts);
  if (pass.entry_dim) pass.entered = scratch.activations(most, pass.entry_dim);
}

template <class C>
void run_blocks(const std::vector<Block>& blocks, at::TensorList caches, Pass<C> pass,
                const Visible& seen, int64_t rows) {
  thread_local Scratch scratch;
  const int64_t E = pass.heads.E;
  int64_t longest = 0;
  for (int64_t t = 0; t < rows; t++) longest = std::max(longest, seen.length(t));
  arrange(pass, scratch, blocks, std::min<int64_t>(rows, MAX_ROWS), longest);
  in_parallel([&](const Worker& me) {
    for (int64_t first = 0; first < rows; first += MAX_ROWS) {
      Pass<C> own_pass = pass;
      own_pass.T = std::min<int64_t>(MAX_ROWS, rows - first);
      Sequence<C> own{0,          own_pass.T, first,  caches[0].size(1), pass.key_blocks, &seen,
                      pass.parts, nullptr,    nullptr};
      own_pass.sequences = {&own, 1};
      own_pass.x += first * pass.D;
      own_pass.cos += first * E;
      own_pass.sin += first * E;
      own_pass.slots += first;
      if (pass.entry != nullptr) own_pass.entry += first * pass.entry_dim;
      for (size_t i = 0; i < blocks.size(); i++) {
        own.k = (C*)caches[2 * i].data_ptr();
        own.v = (C*)caches[2 * i + 1].data_ptr();
        own_pass.block(me, blocks[i], i == 0 && pass.entry != nullptr);
      }
    }
  });
}

// Raises unless every depth [T] is a column of paths that are `width` wide.
void check_depths(const Tensor& depths, int64_t width) {
  const int64_t* depth = depths.const_data_ptr<int64_t>();
  for (int64_t t = 0; t < depths.numel(); t++)
    TORCH_CHECK(depth[t] >= 0 && depth[t] < width, "depth ", depth[t], " of ", width);
}

}  // namespace
