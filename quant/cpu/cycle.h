// End of a decode cycle: accept the path of the target's own tokens and commit it.
//
// Reference: `accept_and_commit` in decoding/cycle.py.

#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "block.h"
#include "sampling.h"
#include "tensors.h"

namespace {

constexpr int64_t BAD_ROW = -1, PAD = -2;  // as in sampling.py and verify.py

// Samples from rows of logits, one after the other: rows of a path have the penalty on its tokens.
class RowSampler {
 public:
  RowSampler(const Tensor& logits, const Sampling& sampling)
      : logits_(logits.contiguous()), V_(logits.size(1)) {
    TORCH_CHECK(logits.scalar_type() == at::kFloat && V_ > 0, "fp32 logits [T, V]");
    TORCH_CHECK(sampling.temperature.defined() == sampling.seed.defined(),
                "a temperature and a seed");
    if (sampling.temperature.defined()) {
      noise_.temperature = sampling.temperature.item<float>();
      noise_.seed = uint64_t(sampling.seed.item<int64_t>());
      noisy_ = true;
    }
    if (sampling.top_k.defined()) filters_.top_k = sampling.top_k.item<int64_t>();
    if (sampling.top_p.defined()) filters_.top_p = sampling.top_p.item<float>();
    if (sampling.min_p.defined()) filters_.min_p = sampling.min_p.item<float>();
    if (!sampling.penalty.defined()) return;
    const Tensor& seen = sampling.seen;
    TORCH_CHECK(seen.numel() == V_ && seen.scalar_type() == at::kBool && seen.is_contiguous(),
                "a flag for each token");
    seen_ = seen.const_data_ptr<bool>();
    penalty_ = sampling.penalty.item<float>();
  }

  // Returns the token that row `t`, whose own token is `id`, samples for `position`. Rows come in
  // the order of their path.
  int64_t draw(int64_t t, int64_t id, int64_t position) {
    const float* row = logits_.const_data_ptr<float>() + t * V_;
    if (seen_ != nullptr) {
      TORCH_CHECK(id >= 0 && id < V_, "token ", id);
      path_.push_back(id);
      row = penalized(row);
    }
    const auto [best, token] = best_of(row, position);
    return std::isfinite(best) ? token : BAD_ROW;
  }

 private:
  const float* penalized(const float* row) {
    const auto lowered = [&](float x) { return x < 0 ? x * penalty_ : x / penalty_; };
    penalized_.resize(V_);
    for (int64_t i = 0; i < V_; i++) penalized_[i] = seen_[i] ? lowered(row[i]) : row[i];
    for (const int64_t token : path_) penalized_[token] = lowered(row[token]);
    return penalized_.data();
  }

  std::pair<float, int64_t> best_of(const float* row, int64_t position) {
    if (!noisy_) return largest_of(row, 0, V_);
    noise_.at(position);
    return filters_.any() ? drawn_among(row, V_, noise_, filters_) : drawn_of(row, V_, noise_);
  }

  const Tensor logits_;
  const int64_t V_;
  Noise noise_;
  bool noisy_ = false;
  Filters filters_;
  const bool* seen_ = nullptr;
  float penalty_ = 1.0f;
  std::vector<float> penalized_;
  std::vector<int64_t> path_;  // tokens of the rows so far
};

// Path that the target's own tokens take through a tree.
struct Path {
  std::vector<int64_t> rows;    // of the tree, root first
  std::vector<int64_t> tokens;  // sampled by each of these rows; the last one is the bonus token
  int64_t n_valid = 0;          // rows of the tree without padding

  int64_t count() const { return rows.size(); }
};

// Raises unless the tree has as many rows as the logits.
void check_tree(const Tree& tree, const Tensor& logits) {
  const int64_t T = tree.tokens.numel();
  TORCH_CHECK(logits.dim() == 2 && logits.size(0) == T && T > 0, "a state and a tree");
  TORCH_CHECK(tree.parents.numel() == T && tree.valid.numel() == T && tree.tokens.is_contiguous() &&
                  tree.parents.is_contiguous() && tree.valid.is_contiguous(),
              "a parent and a flag for each row");
  TORCH_CHECK(
      !tree.sources.defined() || (tree.sources.numel() == T && tree.sources.is_contiguous()),
      "a source for each row");
}

// Returns the longest path of rows whose tokens their parents sample, the first among equals. With
// a temperature or a penalty only the rows of the path sample; else all rows take their largest
// logits.
Path accept(const Tree& tree, const Tensor& logits, const Sampling& sampling, int64_t seq_len) {
  const int64_t T = tree.tokens.numel();
  const int64_t* ids = tree.tokens.const_data_ptr<int64_t>();
  const int64_t* parents = tree.parents.const_data_ptr<int64_t>();
  const bool* valid = tree.valid.const_data_ptr<bool>();
  std::vector<int64_t> drawn(T, BAD_ROW), level(T, 0);
  std::vector<bool> alive(T, false);
  std::optional<RowSampler> sampler;
  if (sampling.temperature.defined() || sampling.penalty.defined()) {
    sampler.emplace(logits, sampling);
  } else {
    const auto [values, places] = maximum(logits);
    for (int64_t t = 0; t < T; t++)
      if (std::isfinite(values.const_data_ptr<float>()[t]))
        drawn[t] = places.const_data_ptr<int64_t>()[t];
  }
  Path path;
  int64_t last = 0;
  for (int64_t t = 0; t < T; t++) {
    path.n_valid += valid[t];
    if (t > 0) {
      const int64_t p = parents[t];
      TORCH_CHECK(p >= 0 && p < t, "parent ", p, " of row ", t);
      level[t] = level[p] + 1;
      alive[t] = valid[t] && alive[p] && ids[t] == drawn[p];
    } else {
      alive[0] = true;
    }
    if (!alive[t]) continue;
    if (level[t] > level[last]) last = t;
    if (sampler) drawn[t] = sampler->draw(t, ids[t], seq_len + 1 + level[t]);
  }
  for (int64_t t = last;; t = parents[t]) {
    path.rows.insert(path.rows.begin(), t);
    path.tokens.insert(path.tokens.begin(), drawn[t]);
    if (t == 0) return path;
  }
}

// Settings of a cycle by its caller.
struct CommitRules {
  int64_t depth;  // longest path
  bool in_place;  // accepted rows of the cache need no move
  bool extends;   // the drafter has read the pending pairs
  bool keeps;     // pairs are stored for a drafter
};

// Raises unless the state has room for `count` tokens of a pass over `T` rows.
void check_room(const State& state, const Tensor& read, int64_t T, int64_t count,
                const CommitRules& rules) {
  const int64_t seq_len = state.seq_len.item<int64_t>(), depth = rules.depth;
  TORCH_CHECK(count <= depth + 1, "a path of ", count - 1, " levels");
  TORCH_CHECK(seq_len >= 0 && seq_len + depth + 2 <= state.text.numel() &&
                  depth + 3 <= state.result.numel(),
              "room for the path");
  TORCH_CHECK(rules.in_place || !depth ||
                  (state.rows.dim() == 4 && state.rows.is_contiguous() &&
                   seq_len + T <= state.rows.size(2)),
              "cache");
  if (!rules.keeps) return;
  const int64_t first = rules.extends ? 0 : state.count.item<int64_t>();
  TORCH_CHECK(first >= 0 && first + depth + 1 <= state.tokens.numel() &&
                  state.features.dim() == 2 && first + count <= state.features.size(0) &&
                  state.tokens.is_contiguous(),
              "room for pairs");
  TORCH_CHECK(read.dim() == 2 && read.size(0) == T, "features of each row");
  check_rows(read, state.features.size(1));
  check_rows(state.features, state.features.size(1));
}

// Moves the path's rows of the cache, which follow `seq_len` tokens, to their final slots.
void move_rows(const Tensor& rows, int64_t seq_len, const std::vector<int64_t>& path) {
  const int64_t planes = rows.size(0) * rows.size(1), S = rows.size(2), count = path.size();
  const size_t bytes = rows.size(3) * rows.element_size();
  uint8_t* memory = (uint8_t*)rows.data_ptr();
  for (int64_t plane = 0; plane < planes; plane++)
    for (int64_t i = 1; i < count; i++)
      if (path[i] != i)
        std::memcpy(memory + (plane * S + seq_len + i) * bytes,
                    memory + (plane * S + seq_len + path[i]) * bytes, bytes);
}

// Adds the pairs of the path, features `read` and the tokens after them, to the pending pairs.
void keep_pairs(State& state, const Tensor& read, const Path& path, bool extends) {
  int64_t& pending = *state.count.mutable_data_ptr<int64_t>();
  if (extends) pending = 0;
  std::vector<float> row(read.size(1));
  for (int64_t i = 0; i < path.count(); i++, pending++) {
    state.tokens.mutable_data_ptr<int64_t>()[pending] = std::max<int64_t>(path.tokens[i], 0);
    row_in_fp32(read, path.rows[i], row.size(), row.data());
    put_row(state.features, pending, row.data(), row.size());
  }
}

// Writes the result for the host: the padded tokens; from the end the number of rows drafted and,
// if the tree has sources, how many of the path's rows the lookup proposed.
void report(Tensor& result, const Tree& tree, const Path& path) {
  int64_t *out = result.mutable_data_ptr<int64_t>(), *end = out + result.numel();
  std::fill(out, end, PAD);
  std::copy(path.tokens.begin(), path.tokens.end(), out);
  end[-1] = path.n_valid - 1;
  if (!tree.sources.defined()) return;
  const int64_t* sources = tree.sources.const_data_ptr<int64_t>();
  end[-2] = 0;
  for (const int64_t row : path.rows) end[-2] += (sources[row] & 2) != 0;
}

// Marks the root and the tokens of the path as seen by the penalty.
void mark_seen(const Tensor& seen, int64_t root, const Path& path) {
  TORCH_CHECK(root >= 0 && root < seen.numel(), "token ", root);
  bool* flags = seen.mutable_data_ptr<bool>();
  flags[root] = true;
  for (const int64_t token : path.tokens) flags[std::max<int64_t>(token, 0)] = true;
}

// Accepts a path of the tree and updates the whole state for the next cycle.
void finish_cycle(const Tensor& logits, const Tensor& read, const Tree& tree, State& state,
                  const Sampling& sampling, const CommitRules& rules) {
  const int64_t depth = rules.depth;
  TORCH_CHECK(depth >= 0, "a state and a tree");
  check_tree(tree, logits);
  for (const Tensor& t : {state.seq_len, state.root, state.count, state.text, state.result})
    TORCH_CHECK(t.is_contiguous() && t.numel() > 0, "contiguous state");
  TORCH_CHECK(sampling.seen.defined() == sampling.penalty.defined(),
              "a penalty and the tokens under it");
  int64_t& seq_len = *state.seq_len.mutable_data_ptr<int64_t>();
  int64_t& root = *state.root.mutable_data_ptr<int64_t>();
  const Path path = accept(tree, logits, sampling, seq_len);
  check_room(state, read, tree.tokens.numel(), path.count(), rules);

  if (!rules.in_place && depth) move_rows(state.rows, seq_len, path.rows);
  int64_t* text = state.text.mutable_data_ptr<int64_t>() + seq_len + 1;
  std::fill_n(text, depth + 1, 0);
  for (const int64_t token : path.tokens) *text++ = std::max<int64_t>(token, 0);
  report(state.result, tree, path);
  if (rules.keeps) keep_pairs(state, read, path, rules.extends);
  if (sampling.penalty.defined()) mark_seen(sampling.seen, root, path);
  root = std::max<int64_t>(path.tokens.back(), 0);
  seq_len += path.count();
}

}  // namespace
