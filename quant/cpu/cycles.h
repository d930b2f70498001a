// Decode cycles of one sequence, one after the other, without Python between them.
//
// Reference: `decode_cycle` in decoding/cycle.py. A cycle drafts a chain, by the lookup or by the
// draft head, or nothing.

#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "cycle.h"
#include "head.h"
#include "lookup.h"
#include "target.h"

namespace {

constexpr int64_t HEAD_SOURCE = 1, LOOKUP_SOURCE = 2;  // as in tree.py

// Rows of a chain: the root, then drafted tokens.
struct Chain {
  Tree tree;
  Tensor depths, paths;

  explicit Chain(int64_t T) {
    const auto ints = at::dtype(at::kLong);
    depths = at::empty({T}, ints);
    paths = at::empty({T, T}, at::dtype(at::kInt));
    tree = {at::empty({T}, ints), at::empty({T}, ints), at::empty({T}, at::dtype(at::kBool)),
            at::empty({T}, ints)};
    for (int64_t t = 0; t < T; t++) {
      depths.mutable_data_ptr<int64_t>()[t] = t;
      tree.parents.mutable_data_ptr<int64_t>()[t] = std::max<int64_t>(0, t - 1);
      tree.valid.mutable_data_ptr<bool>()[t] = true;
      for (int64_t d = 0; d < T; d++)
        paths.mutable_data_ptr<int32_t>()[t * T + d] = int32_t(std::min(d, t));
    }
    tree.sources.mutable_data_ptr<int64_t>()[0] = 0;
  }

  // Returns the chain of `tokens` after `root`, in memory that the next chain of this length uses.
  static const Chain& of(int64_t root, const std::vector<int64_t>& tokens, int64_t source) {
    thread_local std::optional<Chain> chains[MAX_ROWS];
    const size_t n = tokens.size();
    TORCH_CHECK(n < MAX_ROWS, n, " drafted tokens");
    std::optional<Chain>& chain = chains[n];
    if (!chain) chain.emplace(n + 1);
    int64_t* rows = chain->tree.tokens.mutable_data_ptr<int64_t>();
    rows[0] = root;
    std::copy(tokens.begin(), tokens.end(), rows + 1);
    std::fill_n(chain->tree.sources.mutable_data_ptr<int64_t>() + 1, n, source);
    return *chain;
  }
};

// Tokens to verify, and what the draft head promised of them.
struct Drafted {
  std::vector<int64_t> tokens;
  std::vector<double> promised;
  bool extended = false;  // whether the draft head has read the pending pairs
};

// What drafts chains, and the policy's prices.
struct Drafting {
  const Head* head;              // none: the lookup alone
  std::optional<Lookup> lookup;  // none: the head alone
  Tensor target_ids, keys, values;
  bool noisy;                    // whether the head ranks tokens with the noise of `sampling`
  int64_t depth, head_depth;     // longest chains
  int64_t width;                 // most pending pairs; 0: none are stored
  double keep;                   // bound of a looked-up token's path probability
  std::optional<double> needed;  // gain of a looked-up chain that skips the head; none: any
  std::vector<double> verify, expand;

  Drafted draft(const State& state, const Sampling& sampling) const {
    Drafted drafted;
    if (!depth) return drafted;
    if (lookup) {
      Copied copied = look_up(state.text, state.seq_len, *lookup, depth, keep);
      if (head == nullptr || !needed || copied.gain > *needed) {
        drafted.tokens = std::move(copied.tokens);
        return drafted;
      }
    }
    TORCH_CHECK(head != nullptr, "a draft head or a lookup");
    const int64_t n = std::min(width, state.count.item<int64_t>());
    OptionalTensors temperatures, seeds;
    temperatures.push_back(noisy ? std::optional(sampling.temperature) : std::nullopt);
    seeds.push_back(noisy ? std::optional(sampling.seed) : std::nullopt);
    const auto chains =
        head->draft({state.tokens.narrow(0, 0, n)}, {head->read(state.features.narrow(0, 0, n))},
                    {state.count}, {state.seq_len}, target_ids, {keys}, {values}, temperatures,
                    seeds, head_depth, verify, expand);
    const auto& [tokens, paths] = chains[0];
    const int64_t* ids = tokens.const_data_ptr<int64_t>();
    const float* probabilities = paths.const_data_ptr<float>();
    drafted.tokens.assign(ids, ids + tokens.numel());
    drafted.promised.assign(probabilities, probabilities + tokens.numel());
    drafted.extended = true;
    return drafted;
  }
};

// Result of a cycle: its tokens, then how many of them the lookup had proposed and how many tokens
// were drafted; milliseconds of draft, of verify and of the whole; whether the draft head was run;
// path probabilities of the tokens that it drafted.
using Cycle = std::tuple<std::vector<int64_t>, std::vector<double>, bool, std::vector<double>>;

// Runs up to `n` cycles: the last one has a token in `ends`, or a row without a token.
std::vector<Cycle> run_cycles(const Target& target, const Drafting& drafting, State& state,
                              const Sampling& sampling, const std::vector<int64_t>& aux_layers,
                              const Tensor& features_like, const std::vector<int64_t>& ends,
                              int64_t n) {
  const auto ms = [](Clock::time_point from, Clock::time_point to) {
    return std::chrono::duration<double, std::milli>(to - from).count();
  };
  std::vector<Cycle> cycles;
  for (bool ended = false; !ended && (int64_t)cycles.size() < n;) {
    const Clock::time_point begin = Clock::now();
    Drafted drafted = drafting.draft(state, sampling);
    const Chain& chain = Chain::of(state.root.item<int64_t>(), drafted.tokens,
                                   drafted.extended ? HEAD_SOURCE : LOOKUP_SOURCE);
    const Clock::time_point drafted_at = Clock::now();
    const auto [logits, features, aux_states] =
        target.run(chain.tree.tokens, state.seq_len, chain.paths, chain.depths, state.rows,
                   aux_layers, features_like);
    const Clock::time_point verified_at = Clock::now();
    const CommitRules rules{drafting.depth, true, drafted.extended, drafting.width > 0};
    finish_cycle(logits, aux_layers.empty() ? features : aux_states, chain.tree, state, sampling,
                 rules);
    const int64_t *out = state.result.const_data_ptr<int64_t>(), *behind = out;
    for (; behind <= out + drafting.depth && *behind != PAD; behind++)
      ended |= *behind < 0 || std::find(ends.begin(), ends.end(), *behind) != ends.end();
    std::vector<int64_t> result(out, behind);
    result.insert(result.end(), out + state.result.numel() - 2, out + state.result.numel());
    cycles.emplace_back(std::move(result),
                        std::vector<double>{ms(begin, drafted_at), ms(drafted_at, verified_at),
                                            ms(begin, Clock::now())},
                        drafted.extended, std::move(drafted.promised));
  }
  return cycles;
}

}  // namespace
