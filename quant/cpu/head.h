// Draft head whose weights are all packed, as Python makes it: it checks the texts that `chain.h`
// drafts for.
//
// Python: `NativeChain` in compile/cpu_draft.py.

#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/custom_class.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "chain.h"
#include "linear.h"
#include "tensors.h"

namespace {

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

  // Returns features [P, D] for `draft` from the target's states [P, F], in their type.
  Tensor read(const Tensor& states) const {
    if (!tensors.reader.defined()) return states;
    std::optional<Tensor> bias;
    if (tensors.reader_bias.defined()) bias = tensors.reader_bias;
    return linear(states, tensors.reader, bias, D, 0).to(states.scalar_type());
  }

  // Drafts at most `depth` tokens after each of B texts: see `draft_chains`. `tokens` [P] and
  // `features` [P, D] are the pairs of one, of which the first `count` are new. Token i of the
  // draft vocabulary is `target_ids[i]`. `caches`: keys of each text, and values of each.
  // `temperatures` and `seeds`: of texts that are drawn, else None. Returns the tokens of each text
  // with path probabilities of at least `verify`, and these probabilities, then that of the last
  // token drafted if it is left out.
  std::vector<std::tuple<Tensor, Tensor>> draft(
      std::vector<Tensor> tokens, std::vector<Tensor> features, std::vector<Tensor> counts,
      std::vector<Tensor> seq_lens, Tensor target_ids, std::vector<Tensor> keys,
      std::vector<Tensor> values, OptionalTensors temperatures, OptionalTensors seeds,
      int64_t depth, std::vector<double> verify_, std::vector<double> expand_) const {
    const size_t B = tokens.size();
    TORCH_CHECK(B >= 1 && B <= MAX_ROWS && features.size() == B && counts.size() == B &&
                    seq_lens.size() == B && keys.size() == B && values.size() == B &&
                    temperatures.size() == B && seeds.size() == B,
                "pairs, a cache and noise of each text");
    TORCH_CHECK(!verify_.empty() && !expand_.empty(), "bounds of path probabilities");
    TORCH_CHECK(depth >= 1, "depth ", depth);
    TORCH_CHECK(target_ids.is_contiguous() && target_ids.numel() == N, "a target id each");
    const std::vector<float> verify(verify_.begin(), verify_.end());
    const std::vector<float> expand(expand_.begin(), expand_.end());
    const auto type = keys[0].scalar_type();
    TORCH_CHECK(type == at::kFloat || type == at::kBFloat16, "caches in bf16 or fp32");
    Tensor drafted = at::empty({(int64_t)B, depth}, tokens[0].options());
    const auto run = [&](auto element) {
      using C = decltype(element);
      std::vector<Text<C>> texts;
      for (size_t i = 0; i < B; i++) {
        TORCH_CHECK(keys[i].scalar_type() == type, "caches of one type");
        texts.push_back(text_of<C>(tokens[i], features[i], counts[i], seq_lens[i], keys[i],
                                   values[i], temperatures.get(i), seeds.get(i), depth));
        texts.back().drafted = drafted.mutable_data_ptr<int64_t>() + i * depth;
      }
      thread_local Scratch scratch;
      Chains<C> chains = arranged<C>(scratch, texts, features, depth);
      chains.target_ids = target_ids.const_data_ptr<int64_t>();
      draft_chains(chains, depth, verify, expand);
      std::vector<std::vector<float>> paths;
      for (Text<C>& text : texts) paths.push_back(std::move(text.paths));
      return paths;
    };
    std::vector<std::tuple<Tensor, Tensor>> results;
    for (const std::vector<float>& probabilities : type == at::kFloat ? run(0.0f) : run(Bf16{})) {
      const int64_t n = probabilities.size(),
                    likely = n - !(probabilities.back() >= at_depth(verify, n - 1));
      Tensor paths = at::empty({n}, drafted.options().dtype(at::kFloat));
      std::copy(probabilities.begin(), probabilities.end(), paths.mutable_data_ptr<float>());
      results.emplace_back(drafted[results.size()].slice(0, 0, likely), paths);
    }
    return results;
  }

 private:
  const float* norm_of(const Tensor& norm) const {
    TORCH_CHECK(norm.defined() && norm.numel() == D && norm.is_contiguous(), "norms are [D]");
    return norm.const_data_ptr<float>();
  }

  // Returns a text without its memory for features.
  template <class C>
  Text<C> text_of(const Tensor& tokens, const Tensor& features, const Tensor& count,
                  const Tensor& seq_len, const Tensor& keys, const Tensor& values,
                  const std::optional<Tensor>& temperature, const std::optional<Tensor>& seed,
                  int64_t depth) const {
    const int64_t n = count.item<int64_t>(), past = seq_len.item<int64_t>();
    check_caches({keys, values});
    TORCH_CHECK(keys.size(0) == heads.G && keys.size(2) == heads.E, "cache");
    TORCH_CHECK(n >= 1 && n <= tokens.numel() && n <= features.size(0) && n <= past, n, " pairs");
    TORCH_CHECK(tokens.is_contiguous(), "contiguous tokens");
    check_rows(features, D);
    const int64_t* ids = tokens.const_data_ptr<int64_t>();
    for (int64_t i = 0; i < n; i++)
      TORCH_CHECK(ids[i] >= 0 && ids[i] < tensors.embedding.size(0), "token ", ids[i]);
    const int64_t S = keys.size(1), end = past + depth - 1;
    TORCH_CHECK(end <= S && end <= tensors.cos.size(0), "slots");
    TORCH_CHECK(temperature.has_value() == seed.has_value(), "a temperature and a seed");
    Text<C> text{n, past, S, ids, nullptr, nullptr, (C*)keys.data_ptr(), (C*)values.data_ptr()};
    if (temperature.has_value()) {
      text.noise.temperature = temperature->item<float>();
      text.noise.seed = uint64_t(seed->item<int64_t>());
    }
    return text;
  }

  // Returns chains with their memory; `features` of each text are copied.
  template <class C>
  Chains<C> arranged(Scratch& scratch, std::vector<Text<C>>& texts,
                     const std::vector<Tensor>& features, int64_t depth) const {
    const int64_t B = texts.size(), E = heads.E;
    int64_t n = 0, longest = 0;
    for (const Text<C>& text : texts) {
      n += text.n;
      longest = std::max(longest, text.seq_len + depth);
    }
    Chains<C> chains{weights};
    chains.texts = texts;
    Pass<C>& pass = chains.pass;
    pass.heads = heads;
    pass.D = D;
    pass.eps = eps;
    pass.entry_dim = weights.eagle3 ? 2 * D : 0;
    const int64_t most = std::min<int64_t>(n, MAX_ROWS);
    const size_t more = Activations::bytes(most, 2 * D) + Activations::bytes(B, D) +
                        4 * size_t((n + B + 3 * most) * D + B * N + 2 * MAX_ROWS * E) +
                        sizeof(Best) * sums_of(N) * B + 1024;
    arrange(pass, scratch, {&weights.block, 1}, most, longest, more);
    chains.joined = scratch.activations(most, 2 * D);
    chains.said = scratch.activations(B, D);
    pass.x = scratch.take<float>(most * D);
    float *own = scratch.take<float>(n * D), *last = scratch.take<float>(B * D);
    chains.turns = scratch.take<float>(2 * MAX_ROWS * E);
    chains.entry = scratch.take<float>(most * 2 * D);
    chains.logits = scratch.take<float>(B * N);
    chains.bests = scratch.take<Best>(B * sums_of(N));
    pass.entry = weights.eagle3 ? chains.entry : nullptr;
    chains.cos = tensors.cos.const_data_ptr<float>();
    chains.sin = tensors.sin.const_data_ptr<float>();
    for (int64_t i = 0; i < B; i++, last += D) {
      texts[i].features = own;
      texts[i].last = last;
      for (int64_t t = 0; t < texts[i].n; t++, own += D) row_in_fp32(features[i], t, D, own);
    }
    return chains;
  }
};

}  // namespace
