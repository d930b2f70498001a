// Confidence-gated chain of tokens drafted by an EAGLE head in one call.
//
// Reference: `EagleDrafter.propose` in drafting/eagle.py, on a chain that `gated_chain` ends.

#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/custom_class.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numeric>
#include <optional>
#include <tuple>
#include <vector>

#include "block.h"
#include "sampling.h"
#include "tensors.h"

namespace {

// Best of some logits, and the sum of exp(logit - best) over them.
struct Best {
  float value = -std::numeric_limits<float>::infinity(), total = 0.0f;
  int64_t index = 0;

  static Best of(const float* x, int64_t begin, int64_t end) {
    Best b;
    b.index = begin;
    for (int64_t i = begin; i < end; i++)
      if (x[i] > b.value) {
        b.value = x[i];
        b.index = i;
      }
    VF sums = {};
    int64_t i = begin;
    for (; i + W <= end; i += W) sums += exp_of(load(x + i) - b.value);
    b.total = sum(sums);
    for (; i < end; i++) b.total += std::exp(x[i] - b.value);
    return b;
  }

  // Merges the best of later logits into this.
  void add(const Best& o) {
    const bool larger = o.value > value;
    const float most = larger ? o.value : value;
    if (most == -std::numeric_limits<float>::infinity()) return;
    total = total * std::exp(value - most) + o.total * std::exp(o.value - most);
    if (larger) index = o.index;
    value = most;
  }
};

// Weights of a draft head. EAGLE-1: x = fc(embedding, feature); a layer for multi-token prediction
// norms both. EAGLE-3: x is the feature, and the block's first product reads norm(embedding),
// norm(feature).
struct HeadWeights {
  Tensor embedding;  // [V, D]
  Weight fc;         // not EAGLE-3
  const float *token_norm = nullptr, *feature_norm = nullptr, *last_norm = nullptr;  // not EAGLE-1
  bool eagle3 = false, normed_residual = false, normed_output = false;
  int64_t window = 0;  // 0: none
  Block block;
  Weight lm_head;
};

// Drafts a chain on all threads together; each thread tracks the state by itself.
template <class C>
struct Chain {
  const HeadWeights& head;
  Pass<C> pass;  // of one level; the text's rows come first
  Sequence<C> text;
  const float *cos, *sin;  // tables of all positions
  const int64_t* target_ids;
  float *features, *entry, *logits;  // [n, D], [rows, 2 D], [draft vocabulary]
  const float* read;                 // the features of this step
  Activations joined, said;
  Best* bests;  // [threads]
  int64_t seq_len;
  Noise noise;

  float* x(int64_t row) const { return pass.x + row * pass.D; }

  // Writes rows of tokens and features in the block's input format.
  void enter(const Worker& me, const int64_t* tokens) {
    const int64_t D = pass.D;
    float* both = pass.own_scratch(me);
    const auto [begin, end] = me.share(pass.T);
    for (int64_t t = begin; t < end; t++) {
      float* out = head.eagle3 ? entry + t * 2 * D : both;
      row_in_fp32(head.embedding, tokens[t], D, out);
      if (head.token_norm != nullptr) rms_norm(out, head.token_norm, D, pass.eps, out);
      rms_norm(read + t * D, head.feature_norm, D, pass.eps, out + D);  // EAGLE-1 has none
      if (head.eagle3) {
        const float* residual = head.normed_residual ? out + D : read + t * D;
        std::copy(residual, residual + D, x(t));
      } else {
        joined.quantize_row(t, out, 2 * D);
      }
    }
    me.team.barrier();
    if (head.eagle3) return;
    products(me, head.fc, joined, (uint8_t*)both, pass.T, pass.x, D, false);
    me.team.barrier();
  }

  // Returns the likeliest token after the last row, whose feature becomes row 0.
  Best leave(const Worker& me) {
    const int64_t D = pass.D, N = head.lm_head.h.N;
    if (me.id == 0) {
      float* row = x(pass.T - 1);
      float* own = pass.own_scratch(me);
      rms_norm(row, head.last_norm, D, pass.eps, own);  // EAGLE-1 has none
      said.quantize_row(0, own, D);
      const float* feature = head.normed_output ? own : row;
      std::copy(feature, feature + D, features);
    }
    me.team.barrier();
    products(me, head.lm_head, said, (uint8_t*)pass.own_scratch(me), 1, logits, N, false);
    const auto [begin, end] = me.share(head.lm_head.column_blocks);
    const int64_t last = std::min(end * COLUMNS, N);
    if (noise.temperature > 0) noise.add(logits, target_ids, begin * COLUMNS, last);
    bests[me.id] = Best::of(logits, begin * COLUMNS, last);
    me.team.barrier();
    Best best = bests[0];
    for (int i = 1; i < me.size; i++) best.add(bests[i]);
    return best;
  }

  // Selects row `first` of the text and the rows after it; a slot equals its RoPE position.
  void place(int64_t first, const int64_t* slots, const Visible* seen) {
    const int64_t E = pass.heads.E;
    pass.cos = cos + first * E;
    pass.sin = sin + first * E;
    pass.slots = slots;
    text.seen = seen;
    text.T = pass.T;
  }
};

// Returns the bound of a depth; the last bound holds for all greater depths.
inline float at_depth(const std::vector<float>& bounds, int64_t depth) {
  return bounds[std::min<int64_t>(depth, bounds.size() - 1)];
}

// Returns the keys that the tokens of `rows` slots from `first` on see: those up to their own slot,
// with a window only the last ones.
inline Visible visible_text(int64_t first, int64_t rows, int64_t window) {
  const bool cut = window > 0 && first + rows > window;
  Visible seen;
  seen.shared = cut ? 0 : first + 1;
  seen.begin.push_back(0);
  for (int64_t slot = first; slot < first + rows; slot++) {
    const int64_t begin = cut ? std::max<int64_t>(0, slot - window + 1) : seen.shared;
    for (int64_t key = begin; key <= slot; key++) seen.own.push_back(key);
    seen.begin.push_back(seen.own.size());
  }
  return seen;
}

// Runs the draft head over the last `n` pairs, `MAX_ROWS` at a time, then drafts at most `depth`
// tokens. A token with a path probability below `verify` is left out, and none is drafted after a
// token below `expand` (bounds by depth). With a temperature, tokens are ranked with the noise that
// the target will sample with. Returns the path probabilities, that of a token left out included.
template <class C>
std::vector<float> draft_chain(const Chain<C>& of_all, const int64_t* tokens, int64_t n,
                               int64_t depth, const std::vector<float>& verify,
                               const std::vector<float>& expand, int64_t* drafted) {
  // Steps: the pairs, `MAX_ROWS` at a time, then one row for each further level.
  std::vector<Visible> seen;
  for (int64_t first = 0; first < n + depth - 1;) {
    const int64_t rows = first < n ? std::min<int64_t>(MAX_ROWS, n - first) : 1;
    seen.push_back(visible_text(of_all.seq_len - n + first, rows, of_all.head.window));
    first += rows;
  }
  std::vector<int64_t> slots(n + depth - 1);
  std::iota(slots.begin(), slots.end(), of_all.seq_len - n);
  std::vector<float> found;
  in_parallel([&](const Worker& me) {
    Chain<C> chain = of_all;
    int64_t own_token = 0;
    float path = 1.0f;
    const Visible* visible = seen.data();
    const auto step = [&](int64_t first, int64_t rows, const int64_t* ids, const float* features) {
      chain.pass.T = rows;
      chain.read = features;
      chain.place(chain.seq_len - n + first, slots.data() + first, visible++);
      chain.enter(me, ids);
      chain.pass.block(me, chain.head.block, chain.head.eagle3);
    };
    const auto show = [&](int64_t first, int64_t rows) {
      step(first, rows, tokens + first, chain.features + first * chain.pass.D);
    };
    chain.pass.sequences = {&chain.text, 1};
    int64_t shown = 0;
    for (; n - shown > MAX_ROWS; shown += MAX_ROWS) show(shown, MAX_ROWS);
    show(shown, n - shown);
    for (int64_t level = 0; level < depth; level++) {
      chain.noise.at(chain.seq_len + level + 1);
      if (level) step(n + level - 1, 1, &own_token, chain.features);
      const Best best = chain.leave(me);
      path *= 1.0f / best.total;
      own_token = chain.target_ids[best.index];
      if (me.id == 0) {
        found.push_back(path);
        drafted[level] = own_token;
      }
      if (!(path >= at_depth(verify, level) && path >= at_depth(expand, level))) break;
    }
  });
  return found;
}

// A draft head whose weights are all packed.
struct Head : torch::CustomClassHolder {
  const BlockTensors block_tensors;  // and `tensors` own the memory of `weights`
  const HeadTensors tensors;
  HeadWeights weights;
  Heads heads;
  int64_t D, N;
  float eps;

  Head(std::vector<Tensor> block_, OptionalTensors tensors_, int64_t n_head, double eps_,
       bool normed_residual, bool normed_output, int64_t window)
      : block_tensors(named<BlockTensors>(at::TensorList(block_))),
        tensors(named<HeadTensors>(tensors_)),
        eps(float(eps_)) {
    weights.embedding = tensors.embedding;
    weights.block = block_of(block_tensors);
    weights.lm_head = Weight(tensors.lm_head);
    weights.normed_residual = normed_residual;
    weights.normed_output = normed_output;
    weights.window = window;
    D = tensors.embedding.size(1);
    N = weights.lm_head.h.N;
    const int64_t E = tensors.cos.size(1);
    check_rows(tensors.embedding, D);
    check_tables(tensors.cos, tensors.sin, E);
    TORCH_CHECK(weights.lm_head.h.K == D && E > 0, "LM head");
    weights.eagle3 = !tensors.fc.defined();
    if (!weights.eagle3) {
      weights.fc = Weight(tensors.fc, tensors.fc_bias.defined() ? &tensors.fc_bias : nullptr);
      TORCH_CHECK(weights.fc.h.N == D && weights.fc.h.K == 2 * D, "fc");
    }
    if (weights.eagle3 || tensors.norm.defined()) {
      weights.token_norm = norm_of(tensors.embedding_norm);
      weights.feature_norm = norm_of(tensors.feature_norm);
      weights.last_norm = norm_of(tensors.norm);
    }
    heads = {n_head, (weights.block.qkv.h.N / E - n_head) / 2, E};
    // The block of an EAGLE-3 head reads embedding and feature.
    check_block(block_tensors, weights.block, heads, D, weights.eagle3 ? 2 * D : D);
  }

  // Drafts at most `depth` tokens: see `draft_chain`. `tokens` [P], `features` [P, D]: pairs, of
  // which the first `count` are new. Token i of the draft vocabulary is `target_ids[i]`. `caches`:
  // keys and values. Returns the tokens with path probabilities of at least `verify`, and these
  // probabilities, then that of the last token drafted if it is left out.
  std::tuple<Tensor, Tensor> draft(Tensor tokens, Tensor features, Tensor count, Tensor seq_len,
                                   Tensor target_ids, std::vector<Tensor> caches,
                                   std::optional<Tensor> temperature, std::optional<Tensor> seed,
                                   int64_t depth, std::vector<double> verify_,
                                   std::vector<double> expand_) const {
    TORCH_CHECK(!verify_.empty() && !expand_.empty(), "bounds of path probabilities");
    const std::vector<float> verify(verify_.begin(), verify_.end());
    const std::vector<float> expand(expand_.begin(), expand_.end());
    const int64_t n = count.item<int64_t>(), past = seq_len.item<int64_t>();
    TORCH_CHECK(caches.size() == 2, "keys and values");
    check_caches(caches);
    check_pairs(tokens, features, n, past);
    const int64_t S = caches[0].size(1);
    TORCH_CHECK(caches[0].size(0) == heads.G && caches[0].size(2) == heads.E, "cache");
    TORCH_CHECK(depth >= 1 && past + depth - 1 <= S && past + depth - 1 <= tensors.cos.size(0),
                "slots");
    TORCH_CHECK(target_ids.is_contiguous() && target_ids.numel() == N, "a target id each");
    TORCH_CHECK(temperature.has_value() == seed.has_value(), "a temperature and a seed");
    Noise noise;
    if (temperature.has_value()) {
      noise.temperature = temperature->item<float>();
      noise.seed = uint64_t(seed->item<int64_t>());
    }
    Tensor drafted = at::empty({depth}, tokens.options());
    std::vector<float> found;
    const auto run = [&](auto element) {
      using C = decltype(element);
      thread_local Scratch scratch;
      Chain<C> chain = arranged<C>(scratch, features, n, past + depth, S);
      chain.text.k = (C*)caches[0].data_ptr();
      chain.text.v = (C*)caches[1].data_ptr();
      chain.target_ids = target_ids.const_data_ptr<int64_t>();
      chain.seq_len = past;
      chain.noise = noise;
      found = draft_chain(chain, tokens.const_data_ptr<int64_t>(), n, depth, verify, expand,
                          drafted.mutable_data_ptr<int64_t>());
    };
    if (caches[0].scalar_type() == at::kBFloat16) {
      run(Bf16{});
    } else {
      TORCH_CHECK(caches[0].scalar_type() == at::kFloat, "caches in bf16 or fp32");
      run(0.0f);
    }
    const int64_t likely = found.size() - !(found.back() >= at_depth(verify, found.size() - 1));
    Tensor paths = at::empty({(int64_t)found.size()}, drafted.options().dtype(at::kFloat));
    std::copy(found.begin(), found.end(), paths.mutable_data_ptr<float>());
    return {drafted.slice(0, 0, likely), paths};
  }

 private:
  const float* norm_of(const Tensor& norm) const {
    TORCH_CHECK(norm.defined() && norm.numel() == D && norm.is_contiguous(), "norms are [D]");
    return norm.const_data_ptr<float>();
  }

  void check_pairs(const Tensor& tokens, const Tensor& features, int64_t n, int64_t past) const {
    TORCH_CHECK(n >= 1 && n <= tokens.numel() && n <= features.size(0) && n <= past, n, " pairs");
    TORCH_CHECK(tokens.is_contiguous(), "contiguous tokens");
    check_rows(features, D);
    const int64_t* ids = tokens.const_data_ptr<int64_t>();
    for (int64_t i = 0; i < n; i++)
      TORCH_CHECK(ids[i] >= 0 && ids[i] < tensors.embedding.size(0), "token ", ids[i]);
  }

  // Returns a chain with its memory, for `n` pairs and rows that see at most `longest` keys.
  template <class C>
  Chain<C> arranged(Scratch& scratch, const Tensor& features, int64_t n, int64_t longest,
                    int64_t S) const {
    const int threads = at::get_num_threads();
    Chain<C> chain{weights};
    Pass<C>& pass = chain.pass;
    pass.heads = heads;
    pass.D = D;
    pass.eps = eps;
    pass.entry_dim = weights.eagle3 ? 2 * D : 0;
    const int64_t most = std::min<int64_t>(n, MAX_ROWS);
    const size_t more = Activations::bytes(most, 2 * D) + Activations::bytes(1, D) +
                        4 * size_t((n + 3 * most) * D + N) + sizeof(Best) * threads + 1024;
    arrange(pass, scratch, {&weights.block, 1}, most, longest, more);
    chain.text.S = S;
    chain.text.key_blocks = pass.key_blocks;
    chain.text.parts = pass.parts;
    chain.joined = scratch.activations(most, 2 * D);
    chain.said = scratch.activations(1, D);
    pass.x = scratch.take<float>(most * D);
    chain.features = scratch.take<float>(n * D);
    chain.entry = scratch.take<float>(most * 2 * D);
    chain.logits = scratch.take<float>(N);
    chain.bests = scratch.take<Best>(threads);
    pass.entry = weights.eagle3 ? chain.entry : nullptr;
    chain.cos = tensors.cos.const_data_ptr<float>();
    chain.sin = tensors.sin.const_data_ptr<float>();
    for (int64_t t = 0; t < n; t++) row_in_fp32(features, t, D, chain.features + t * D);
    return chain;
  }
};

}  // namespace
