// End of a decode cycle: accept the path of the target's own tokens and commit it.
//
// Reference: `accept_and_commit` in decoding/cycle.py.

#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <optional>
#include <vector>

#include "block.h"
#include "sampling.h"

namespace {

constexpr int64_t BAD_ROW = -1, PAD = -2;  // as in sampling.py and verify.py

// Accept and commit a cycle: `cycle.accept_and_commit`. The path along the target's own tokens, its
// cache rows moved behind the text unless they lie there, and all of the state brought to the next
// cycle. `state`: seq_len, root, count, tokens, features, text, result, cache rows. With a
// temperature or a penalty the rows of the path are drawn from, one after the other, and no others.
void finish_cycle(const Tensor& logits, const Tensor& read, const Tensor& tokens,
                  const Tensor& parents, const Tensor& valid, const std::optional<Tensor>& sources,
                  at::TensorList state, const std::optional<Tensor>& temperature,
                  const std::optional<Tensor>& seed, const std::optional<Tensor>& top_k,
                  const std::optional<Tensor>& top_p, const std::optional<Tensor>& min_p,
                  const std::optional<Tensor>& seen, const std::optional<Tensor>& penalty,
                  int64_t depth, bool in_place, bool extends, bool keeps) {
  const int64_t T = tokens.numel();
  TORCH_CHECK(state.size() == 8 && logits.dim() == 2 && logits.size(0) == T && T > 0 && depth >= 0,
              "a state and a tree");
  TORCH_CHECK(parents.numel() == T && valid.numel() == T && tokens.is_contiguous() &&
                  parents.is_contiguous() && valid.is_contiguous(),
              "a parent and a flag for each row");
  if (sources.has_value())
    TORCH_CHECK(sources->numel() == T && sources->is_contiguous(), "a source for each row");
  for (const int i : {0, 1, 2, 5, 6})
    TORCH_CHECK(state[i].is_contiguous() && state[i].numel() > 0, "contiguous state");
  const int64_t* ids = tokens.const_data_ptr<int64_t>();
  const int64_t* parent = parents.const_data_ptr<int64_t>();
  const bool* is_valid = valid.const_data_ptr<bool>();
  std::vector<int64_t> drawn(T, BAD_ROW), level(T, 0);
  Noise noise;
  Filters filters;
  if (top_k.has_value()) filters.top_k = top_k->item<int64_t>();
  if (top_p.has_value()) filters.top_p = top_p->item<float>();
  if (min_p.has_value()) filters.min_p = min_p->item<float>();
  const bool by_row = temperature.has_value() || penalty.has_value();
  const int64_t V = logits.size(1);
  const Tensor rows_of_logits = by_row ? logits.contiguous() : logits;
  if (by_row) {
    TORCH_CHECK(logits.scalar_type() == at::kFloat && V > 0, "fp32 logits [T, V]");
    TORCH_CHECK(temperature.has_value() == seed.has_value(), "a temperature and a seed");
    if (temperature.has_value()) {
      noise.temperature = temperature->item<float>();
      noise.seed = uint64_t(seed->item<int64_t>());
    }
  } else {
    const auto [values, places] = maximum(logits);
    for (int64_t t = 0; t < T; t++)
      if (std::isfinite(values.const_data_ptr<float>()[t]))
        drawn[t] = places.const_data_ptr<int64_t>()[t];
  }
  TORCH_CHECK(seen.has_value() == penalty.has_value(), "a penalty and the tokens under it");
  bool* was_seen = nullptr;
  float factor = 1.0f;
  if (penalty.has_value()) {
    TORCH_CHECK(seen->numel() == V && seen->scalar_type() == at::kBool && seen->is_contiguous(),
                "a flag for each token");
    was_seen = (bool*)seen->data_ptr();
    factor = penalty->item<float>();
  }
  std::vector<float> penalized;
  std::vector<int64_t> path_tokens;  // of the living rows so far
  const auto draw = [&](int64_t t, int64_t position) {
    const float* row = rows_of_logits.const_data_ptr<float>() + t * V;
    if (was_seen) {
      const auto lowered = [&](float x) { return x < 0 ? x * factor : x / factor; };
      penalized.resize(V);
      for (int64_t i = 0; i < V; i++) penalized[i] = was_seen[i] ? lowered(row[i]) : row[i];
      for (const int64_t token : path_tokens) penalized[token] = lowered(row[token]);
      row = penalized.data();
    }
    if (!temperature.has_value()) return largest_of(row, 0, V);
    noise.at(position);
    return filters.any() ? drawn_among(row, V, noise, filters) : drawn_of(row, V, noise);
  };
  std::vector<bool> alive(T, false);
  int64_t last = 0, n_valid = 0;
  for (int64_t t = 0; t < T; t++) {
    n_valid += is_valid[t];
    if (t == 0) {
      alive[0] = true;
    } else {
      const int64_t p = parent[t];
      TORCH_CHECK(p >= 0 && p < t, "parent ", p, " of row ", t);
      level[t] = level[p] + 1;
      alive[t] = is_valid[t] && alive[p] && ids[t] == drawn[p];
      if (alive[t] && level[t] > level[last]) last = t;
    }
    if (alive[t] && by_row) {
      if (was_seen) {
        TORCH_CHECK(ids[t] >= 0 && ids[t] < V, "token ", ids[t]);
        path_tokens.push_back(ids[t]);
      }
      const auto [best, place] = draw(t, state[0].item<int64_t>() + 1 + level[t]);
      if (std::isfinite(best)) drawn[t] = place;
    }
  }
  const int64_t count = level[last] + 1;
  TORCH_CHECK(count <= depth + 1, "a path of ", count - 1, " levels");
  std::vector<int64_t> path(depth + 1, 0);
  for (int64_t t = last, i = count - 1; i > 0; t = parent[t], i--) path[i] = t;

  int64_t& seq_len = *state[0].mutable_data_ptr<int64_t>();
  int64_t& root = *state[1].mutable_data_ptr<int64_t>();
  int64_t& pending = *state[2].mutable_data_ptr<int64_t>();
  int64_t* text = state[5].mutable_data_ptr<int64_t>();
  int64_t* result = state[6].mutable_data_ptr<int64_t>();
  const int64_t size = state[6].numel();
  TORCH_CHECK(seq_len >= 0 && seq_len + depth + 2 <= state[5].numel() && depth + 4 <= size,
              "room for the path");
  if (!in_place && depth) {
    const Tensor& rows = state[7];
    TORCH_CHECK(rows.dim() == 4 && rows.is_contiguous() && seq_len + T <= rows.size(2), "cache");
    const int64_t planes = rows.size(0) * rows.size(1), S = rows.size(2);
    const size_t bytes = rows.size(3) * rows.element_size();
    uint8_t* memory = (uint8_t*)rows.data_ptr();
    for (int64_t plane = 0; plane < planes; plane++)
      for (int64_t i = 1; i < count; i++)
        if (path[i] != i)
          std::memcpy(memory + (plane * S + seq_len + i) * bytes,
                      memory + (plane * S + seq_len + path[i]) * bytes, bytes);
  }
  std::fill_n(result, size, PAD);
  const int64_t first = extends ? 0 : pending;
  int64_t by_head = 0, by_lookup = 0;
  if (keeps) {
    TORCH_CHECK(first >= 0 && first + depth + 1 <= state[3].numel() && state[4].dim() == 2 &&
                    first + count <= state[4].size(0) && state[3].is_contiguous(),
                "room for pairs");
    TORCH_CHECK(read.dim() == 2 && read.size(0) == T, "features of each row");
    check_rows(read, state[4].size(1));
    check_rows(state[4], state[4].size(1));
  }
  std::vector<float> row(keeps ? read.size(1) : 0);
  Tensor features = state[4];
  for (int64_t i = 0; i <= depth; i++) {
    const int64_t token = i < count ? drawn[path[i]] : PAD, shown = std::max<int64_t>(token, 0);
    result[i] = token;
    text[seq_len + 1 + i] = shown;
    if (sources.has_value()) {
      const int64_t source = sources->const_data_ptr<int64_t>()[path[i]];
      by_head += (source & 1) != 0;
      by_lookup += (source & 2) != 0;
    }
    if (keeps && i < count) {
      state[3].mutable_data_ptr<int64_t>()[first + i] = shown;
      row_in_fp32(read, path[i], row.size(), row.data());
      put_row(features, first + i, row.data(), row.size());
    }
  }
  if (sources.has_value()) {
    result[size - 3] = by_head;
    result[size - 2] = by_lookup;
  }
  result[size - 1] = n_valid - 1;
  if (keeps) pending = first + count;
  if (was_seen) {
    TORCH_CHECK(root >= 0 && root < V, "token ", root);
    was_seen[root] = true;
    for (int64_t i = 0; i < count; i++) was_seen[std::max<int64_t>(drawn[path[i]], 0)] = true;
  }
  root = std::max<int64_t>(drawn[last], 0);
  seq_len += count;
}

}  // namespace
