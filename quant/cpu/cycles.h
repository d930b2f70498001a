// Decode cycles of one text or several, one after the other, without Python between them.
//
// References: `decode_cycle` in decoding/cycle.py, `run_together` in batch.py. A cycle drafts a
// chain, by the lookup or by the draft head, or nothing; texts share the passes.

#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdint>
#include <deque>
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

  // Returns the chain of `tokens` after `root`, in memory that the text's next chain of this length
  // uses.
  static const Chain& of(size_t text, int64_t root, const std::vector<int64_t>& tokens,
                         int64_t source) {
    thread_local std::deque<std::array<std::optional<Chain>, MAX_ROWS>> chains;  // they do not move
    const size_t n = tokens.size();
    TORCH_CHECK(n < MAX_ROWS, n, " drafted tokens");
    while (chains.size() <= text) chains.emplace_back();
    std::optional<Chain>& chain = chains[text][n];
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
  const Chain* chain = nullptr;  // of these tokens
  std::vector<double> promised;
  bool extended = false;  // whether the draft head has read the pending pairs
  double ms = 0.0;        // what drafting took, a share of what texts did together
};

// Settings that the cycles of all texts share: `How` in compile/cpu_cycles.py.
struct How {
  const Target& target;
  const Head* head;  // none: the lookup alone
  Tensor target_ids;
  int64_t depth, head_depth;     // longest chains
  int64_t width;                 // most pending pairs; 0: none are stored
  double keep;                   // bound of a looked-up token's path probability
  std::optional<double> needed;  // gain of a looked-up chain that skips the head; none: any
  std::vector<double> verify, expand;
  std::vector<int64_t> aux_layers;
  Tensor features_like;  // of the type of features
};

// One text: what a cycle changes and reads of it.
struct Writing {
  State state;
  Sampling sampling;
  DraftTensors drafting;
  std::optional<Lookup> lookup;  // none: the draft head alone
  std::vector<int64_t> ends;     // tokens after which no cycle is run
  int64_t most;                  // as many tokens after which none is run
};

double ms_between(Clock::time_point from, Clock::time_point to) {
  return std::chrono::duration<double, std::milli>(to - from).count();
}

// Drafts by the head for the texts at `places`.
void draft_by_head(const How& how, const std::vector<Writing>& texts,
                   const std::vector<size_t>& places, std::vector<Drafted>& drafted) {
  TORCH_CHECK(how.head != nullptr, "a draft head or a lookup");
  const Clock::time_point begin = Clock::now();
  std::vector<Tensor> tokens, features, counts, seq_lens, keys, values;
  OptionalTensors temperatures, seeds;
  for (const size_t i : places) {
    const State& state = texts[i].state;
    const DraftTensors& own = texts[i].drafting;
    const int64_t n = std::min(how.width, state.count.item<int64_t>());
    tokens.push_back(state.tokens.narrow(0, 0, n));
    features.push_back(how.head->read(state.features.narrow(0, 0, n)));
    counts.push_back(state.count);
    seq_lens.push_back(state.seq_len);
    keys.push_back(own.keys);
    values.push_back(own.values);
    const bool noisy = own.seed.defined();
    temperatures.push_back(noisy ? std::optional(own.temperature) : std::nullopt);
    seeds.push_back(noisy ? std::optional(own.seed) : std::nullopt);
  }
  const auto chains =
      how.head->draft(tokens, features, counts, seq_lens, how.target_ids, keys, values,
                      temperatures, seeds, how.head_depth, how.verify, how.expand);
  const double ms = ms_between(begin, Clock::now()) / double(places.size());
  for (size_t i = 0; i < places.size(); i++) {
    const auto& [ids, paths] = chains[i];
    const int64_t* token = ids.const_data_ptr<int64_t>();
    const float* probability = paths.const_data_ptr<float>();
    Drafted& own = drafted[places[i]];
    own.tokens.assign(token, token + ids.numel());
    own.promised.assign(probability, probability + ids.numel());
    own.extended = true;
    own.ms += ms;
  }
}

// Drafts for every text: by its lookup, else by the head, which runs once for all that it drafts
// for.
std::vector<Drafted> draft(const How& how, const std::vector<Writing>& texts) {
  std::vector<Drafted> drafted(texts.size());
  if (!how.depth) return drafted;
  std::vector<size_t> places;
  for (size_t i = 0; i < texts.size(); i++) {
    const Clock::time_point begin = Clock::now();
    const State& state = texts[i].state;
    Copied copied;
    if (texts[i].lookup)
      copied = look_up(state.text, state.seq_len, *texts[i].lookup, how.depth, how.keep);
    if (texts[i].lookup && (how.head == nullptr || !how.needed || copied.gain > *how.needed)) {
      drafted[i].tokens = std::move(copied.tokens);
    } else {
      places.push_back(i);
    }
    drafted[i].ms = ms_between(begin, Clock::now());
  }
  if (!places.empty()) draft_by_head(how, texts, places, drafted);
  return drafted;
}

// Result of a text's cycle: its tokens, then how many of them the lookup had proposed and how many
// tokens were drafted; milliseconds of its draft, of the pass and of the whole; whether the draft
// head was run; path probabilities of the tokens that it drafted.
using Cycle = std::tuple<std::vector<int64_t>, std::vector<double>, bool, std::vector<double>>;

// Returns the tokens and numbers of the last cycle of a text.
std::vector<int64_t> result_of(const State& state, int64_t depth) {
  const int64_t *out = state.result.const_data_ptr<int64_t>(),
                *behind = std::find(out, out + depth + 1, PAD);
  std::vector<int64_t> result(out, behind);
  result.insert(result.end(), out + state.result.numel() - 2, out + state.result.numel());
  return result;
}

// Runs a pass over the rows of texts `begin` to `end`, and the ends of their cycles. Returns the
// milliseconds of the pass.
double verify(const How& how, std::vector<Writing>& texts, const std::vector<Drafted>& drafted,
              size_t begin, size_t end) {
  const Clock::time_point from = Clock::now();
  std::vector<Tensor> tokens, seq_lens, paths, depths, caches;
  for (size_t i = begin; i < end; i++) {
    const Chain& chain = *drafted[i].chain;
    tokens.push_back(chain.tree.tokens);
    seq_lens.push_back(texts[i].state.seq_len);
    paths.push_back(chain.paths);
    depths.push_back(chain.depths);
    caches.push_back(texts[i].state.rows);
  }
  const auto [logits, features, aux_states] = how.target.run_together(
      tokens, seq_lens, paths, depths, caches, how.aux_layers, how.features_like);
  const double ms = ms_between(from, Clock::now());
  const Tensor& read = how.aux_layers.empty() ? features : aux_states;
  for (int64_t i = begin, row = 0; i < (int64_t)end; i++) {
    const int64_t T = tokens[i - begin].numel();
    finish_cycle(logits.narrow(0, row, T), read.narrow(0, row, T), drafted[i].chain->tree,
                 texts[i].state, texts[i].sampling,
                 {how.depth, true, drafted[i].extended, how.width > 0});
    row += T;
  }
  return ms;
}

// Runs up to `n` cycles of every text: the last ones where one of them has a token of its `ends`,
// its `most` tokens, or a row without a token. Returns those of each text, one after the other.
std::vector<std::vector<Cycle>> run_cycles(const How& how, std::vector<Writing>& texts, int64_t n) {
  const size_t B = texts.size();
  std::vector<std::vector<Cycle>> cycles(B);
  std::vector<double> pass_ms(B);
  std::vector<int64_t> made(B);
  for (bool ended = false; !ended && (int64_t)cycles[0].size() < n;) {
    const Clock::time_point begin = Clock::now();
    std::vector<Drafted> drafted = draft(how, texts);
    for (size_t i = 0; i < B; i++)
      drafted[i].chain = &Chain::of(i, texts[i].state.root.item<int64_t>(), drafted[i].tokens,
                                    drafted[i].extended ? HEAD_SOURCE : LOOKUP_SOURCE);
    for (size_t first = 0, last = 0; first < B; first = last) {
      for (size_t rows = 0; last < B && rows + 1 + drafted[last].tokens.size() <= MAX_ROWS; last++)
        rows += 1 + drafted[last].tokens.size();
      const double ms = verify(how, texts, drafted, first, last);
      std::fill(pass_ms.begin() + first, pass_ms.begin() + last, ms);
    }
    const double ms = ms_between(begin, Clock::now());
    for (size_t i = 0; i < B; i++) {
      std::vector<int64_t> result = result_of(texts[i].state, how.depth);
      const auto is_end = [&](int64_t token) {
        return token < 0 ||
               std::find(texts[i].ends.begin(), texts[i].ends.end(), token) != texts[i].ends.end();
      };
      made[i] += result.size() - 2;
      ended |= made[i] >= texts[i].most || std::any_of(result.begin(), result.end() - 2, is_end);
      cycles[i].emplace_back(std::move(result), std::vector<double>{drafted[i].ms, pass_ms[i], ms},
                             drafted[i].extended, std::move(drafted[i].promised));
    }
  }
  return cycles;
}

}  // namespace
