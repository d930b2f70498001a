// Whole pass of the target, from tokens to logits in one call.
//
// Reference: `verify` in decoding/cycle.py.

#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/custom_class.h>

#include <algorithm>
#include <cstdint>
#include <tuple>
#include <utility>
#include <vector>

#include "block.h"

namespace {

// Target whose weights are all packed: from tokens to logits in one call. Python code between two
// operations would run with cold caches, which the weights have just filled.
struct Target : torch::CustomClassHolder {
  const std::vector<BlockTensors> block_tensors;  // and `tensors` own the memory below
  const TargetTensors tensors;
  std::vector<Block> blocks;
  Weight lm_head;
  const float *norm, *cos, *sin;
  Tensor embedding;
  int64_t n_head, window, D, E, kv_heads, positions;
  float eps;

  Target(std::vector<Tensor> blocks_, std::vector<Tensor> tensors_, int64_t n_head_,
         int64_t window_, double eps_)
      : block_tensors(each_named<BlockTensors>(blocks_)),
        tensors(named<TargetTensors>(at::TensorList(tensors_))),
        embedding(tensors.embedding),
        n_head(n_head_),
        window(window_),
        eps(float(eps_)) {
    for (const BlockTensors& block : block_tensors) blocks.push_back(block_of(block));
    lm_head = Weight(tensors.lm_head);
    norm = tensors.norm.const_data_ptr<float>();
    cos = tensors.cos.const_data_ptr<float>();
    sin = tensors.sin.const_data_ptr<float>();
    D = embedding.size(1);
    E = tensors.cos.size(1);
    check_rows(embedding, D);
    check_tables(tensors.cos, tensors.sin, E);
    TORCH_CHECK(tensors.norm.numel() == D, "the norm is [D]");
    TORCH_CHECK(lm_head.h.K == D && E > 0, "LM head");
    positions = tensors.cos.size(0);
    kv_heads = (blocks[0].qkv.h.N / E - n_head) / 2;
    for (size_t i = 0; i < blocks.size(); i++)
      check_block(block_tensors[i], blocks[i], Heads{n_head, kv_heads, E}, D, D);
    check_widths(blocks);
  }

  // Runs the trees of one or several sequences in one pass, each after the text in its own cache.
  // Returns, of the rows of all, in order, logits [T, V] in fp32, features [T, D] like
  // `features_like`, and the input of the auxiliary layers [T, R * D] in fp32. `caches` are planes
  // [2 L, G, S, E], or have rows in 8 bits.
  std::tuple<Tensor, Tensor, Tensor> run_together(
      std::vector<Tensor> tokens, std::vector<Tensor> seq_lens, std::vector<Tensor> paths,
      std::vector<Tensor> depths, std::vector<Tensor> caches, std::vector<int64_t> aux_layers,
      Tensor features_like) const {
    const size_t n = tokens.size();
    TORCH_CHECK(n >= 1 && seq_lens.size() == n && paths.size() == n && depths.size() == n &&
                    caches.size() == n,
                "a tree and a cache of each sequence");
    TORCH_CHECK(
        features_like.scalar_type() == at::kFloat || features_like.scalar_type() == at::kBFloat16,
        "features in fp32 or bf16");
    std::vector<Part> parts;
    int64_t T = 0;
    for (size_t i = 0; i < n; i++) {
      TORCH_CHECK(caches[i].scalar_type() == caches[0].scalar_type(), "caches of one type");
      parts.push_back(part_of(tokens[i], seq_lens[i], paths[i], depths[i], caches[i], T));
      T += parts.back().T;
    }
    TORCH_CHECK(T <= MAX_ROWS, T, " rows");
    const auto fp32 = caches[0].options().dtype(at::kFloat);
    Tensor logits = at::empty({T, lm_head.h.N}, fp32);
    Tensor features = at::empty({T, D}, features_like.options());
    Tensor aux_states = at::empty({T, (int64_t)aux_layers.size() * D}, fp32);
    with_element_of(caches[0], [&](auto element) {
      pass<decltype(element)>(parts, is_packed(caches[0]), aux_layers, logits, features,
                              aux_states);
    });
    return {logits, features, aux_states};
  }

 private:
  // Tree of one sequence: T rows of a pass, from `first` on.
  struct Part {
    int64_t first, T, past, S, longest;
    const int64_t *ids, *depth;
    Visible seen;
    void* cache;
  };

  Part part_of(const Tensor& tokens, const Tensor& seq_len, const Tensor& paths,
               const Tensor& depths, const Tensor& rows, int64_t first) const {
    const int64_t T = tokens.numel(), past = seq_len.item<int64_t>(), L = blocks.size();
    TORCH_CHECK(T >= 1 && T <= MAX_ROWS && depths.numel() == T, T, " rows");
    TORCH_CHECK(rows.dim() == 4 && rows.is_contiguous() && rows.size(0) == 2 * L &&
                    rows.size(1) == kv_heads && rows.size(3) == E + (is_packed(rows) ? SPARE : 0),
                "cache");
    TORCH_CHECK(paths.dim() == 2 && paths.is_contiguous() && paths.size(0) == T &&
                    depths.is_contiguous() && tokens.is_contiguous(),
                "tree");
    const int64_t S = rows.size(2);
    TORCH_CHECK(past >= 0 && past + T <= S, "slot ", past + T - 1, " of ", S);
    const int64_t *ids = tokens.const_data_ptr<int64_t>(),
                  *depth = depths.const_data_ptr<int64_t>();
    check_depths(depths, paths.size(1));
    for (int64_t t = 0; t < T; t++) {
      TORCH_CHECK(ids[t] >= 0 && ids[t] < embedding.size(0), "token ", ids[t]);
      TORCH_CHECK(past + depth[t] < positions, "position ", past + depth[t], " of ", positions);
    }
    Visible seen =
        Visible::of_tree(past, paths.const_data_ptr<int32_t>(), paths.size(1), depth, T, window);
    for (const int64_t slot : seen.own) TORCH_CHECK(slot >= 0 && slot < S, "slot ", slot);
    int64_t longest = 0;
    for (int64_t t = 0; t < T; t++) longest = std::max(longest, seen.length(t));
    return {first, T, past, S, longest, ids, depth, std::move(seen), rows.data_ptr()};
  }

  template <class C>
  void pass(const std::vector<Part>& parts, bool packed, const std::vector<int64_t>& aux_layers,
            Tensor& logits, Tensor& features, Tensor& aux_states) const {
    thread_local Scratch scratch;
    const int64_t T = features.size(0), N = lm_head.h.N, R = aux_layers.size();
    int64_t longest = 0;
    for (const Part& part : parts) longest = std::max(longest, part.longest);
    Pass<C> pass{};
    pass.heads = Heads{n_head, kv_heads, E, packed};
    pass.D = D;
    pass.T = T;
    pass.eps = eps;
    arrange(pass, scratch, blocks, T, longest, 4 * size_t(T * (D + 2 * E)) + 8 * T + 512);
    float* x = pass.x = scratch.take<float>(T * D);
    float *c = scratch.take<float>(T * E), *s = scratch.take<float>(T * E);
    int64_t* slots = scratch.take<int64_t>(T);
    std::vector<Sequence<C>> sequences;
    float* own_parts = pass.parts;
    for (const Part& part : parts) {
      for (int64_t i = 0, t = part.first; i < part.T; i++, t++) {
        slots[t] = part.past + i;
        std::copy_n(cos + (part.past + part.depth[i]) * E, E, c + t * E);
        std::copy_n(sin + (part.past + part.depth[i]) * E, E, s + t * E);
        row_in_fp32(embedding, part.ids[i], D, x + t * D);
      }
      C* cache = (C*)part.cache;
      const int64_t key_blocks = (part.longest + KEYS - 1) / KEYS;
      sequences.push_back({part.first, part.T, 0, part.S, key_blocks, &part.seen, own_parts, cache,
                           pass.heads.row(cache, part.S, kv_heads, 0)});
      own_parts += kv_heads * key_blocks * part.T * pass.heads.group() * (E + 2);
    }
    pass.cos = c;
    pass.sin = s;
    pass.slots = slots;
    float *out = logits.mutable_data_ptr<float>(), *aux_rows = aux_states.mutable_data_ptr<float>();
    in_parallel([&](const Worker& me) {
      Pass<C> mine = pass;
      std::vector<Sequence<C>> own_sequences = sequences;
      mine.sequences = own_sequences;
      me.begin();
      const auto [begin, end] = me.share(T);
      const auto keep_aux = [&](int64_t layer) {
        for (int64_t r = 0; r < R; r++)
          for (int64_t t = begin; t < end && aux_layers[r] == layer; t++)
            std::copy_n(x + t * D, D, aux_rows + (t * R + r) * D);
      };
      for (size_t i = 0; i < blocks.size(); i++) {
        if (R) keep_aux(i);
        mine.block(me, blocks[i], false);
        for (Sequence<C>& sequence : own_sequences) {
          sequence.k = pass.heads.row(sequence.k, sequence.S, 2 * kv_heads, 0);
          sequence.v = pass.heads.row(sequence.v, sequence.S, 2 * kv_heads, 0);
        }
      }
      if (R) keep_aux(blocks.size());
      float* own = mine.own_scratch(me);
      for (int64_t t = begin; t < end; t++) {
        rms_norm(x + t * D, norm, D, eps, own);
        put_row(features, t, own, D);
        row_in_fp32(features, t, D, own);  // rounded like all other uses of features
        mine.normed.quantize_row(t, own, D);
      }
      me.end(Phase::norms);
      products(me, lm_head, mine.normed, (uint8_t*)own, T, out, N, false);
      me.end(Phase::lm_head);
    });
  }
};

}  // namespace
