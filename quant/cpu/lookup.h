// Tokens that followed the longest earlier match of the text's end, and their probabilities.
//
// Reference: `Lookup` in drafting/lookup.py.

#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <vector>

#include "tensors.h"

namespace {

constexpr int CLASSES = 8;  // of match sizes and of depths: 1 .. 7, and 8 or more
constexpr float TABLE_MEMORY = 128.0f;

constexpr int64_t KEY_TOKENS = 3, KEY_BITS = 21, WINDOW = 256;  // as in drafting/lookup.py

struct Match {
  int64_t size = 0, end = 0;  // number of tokens, and position of the last
};

// Returns the longest match of the text's end in `corpus` (tokens, sorted keys, their order:
// `Corpus` in drafting/lookup.py), the latest among equals. At most WINDOW positions are compared.
Match find_in_corpus(const CorpusIndex& corpus, const int64_t* text, int64_t last,
                     int64_t longest) {
  const int64_t* tokens = corpus.tokens.const_data_ptr<int64_t>();
  const int64_t *keys = corpus.keys.const_data_ptr<int64_t>(),
                *keys_end = keys + corpus.keys.numel();
  const int64_t* order = corpus.order.const_data_ptr<int64_t>();
  Match best;
  for (int64_t n = std::min({KEY_TOKENS, longest, last + 1}); n > 0 && !best.size; n--) {
    int64_t low = 0;
    for (int64_t i = 0; i < n; i++) low |= (text[last - i] + 1) << KEY_BITS * (KEY_TOKENS - 1 - i);
    const int64_t high = low + (int64_t(1) << KEY_BITS * (KEY_TOKENS - n)) - 1;
    const int64_t first = std::lower_bound(keys, keys_end, low) - keys;
    const int64_t behind = std::upper_bound(keys + first, keys_end, high) - keys;
    for (int64_t i = behind - 1; i >= std::max(first, behind - WINDOW); i--) {
      const int64_t end = order[i];
      int64_t size = n;
      while (size < longest && size <= std::min(last, end) &&
             tokens[end - size] == text[last - size])
        size++;
      if (size > best.size || (size == best.size && end > best.end)) best = {size, end};
    }
  }
  return best;
}

// Returns the latest of the longest earlier matches of the text's end, of at most `longest` tokens.
Match find_in_text(const int64_t* text, int64_t last, int64_t longest) {
  Match best;
  for (int64_t i = last - 1; i >= 0 && best.size < longest; i--) {
    if (text[i] != text[last]) continue;
    int64_t n = 1;
    while (n < longest && n <= i && text[i - n] == text[last - n]) n++;
    if (n > best.size) best = {n, i};
  }
  return best;
}

// Table of how often looked-up tokens were right, with the last proposal; documents to look in.
struct Lookup {
  Tensor table;   // [2, 8, 8] of tokens tried and accepted, by match size and depth
  Tensor recent;  // [4 + R]: position of its root, root, match size, number of tokens, tokens
  std::optional<CorpusIndex> corpus;
  int64_t longest;  // tokens of a match

  Lookup(const Tensor& table_, const Tensor& recent_, at::TensorList corpus_, int64_t longest_)
      : table(table_), recent(recent_), longest(longest_) {
    if (!corpus_.empty()) corpus = named<CorpusIndex>(corpus_);
  }
};

// Looked-up tokens, their path probabilities, and their expected gain.
struct Copied {
  std::vector<int64_t> tokens;
  std::vector<float> paths;
  double gain = 0.0;
};

// Returns the tokens after the longest match in the text, or in the documents if these have a
// longer one; their path probabilities; and their expected gain, which is the sum of these less
// `keep` for each token. Tokens with path probabilities below `keep` are left out. The
// probabilities come from the table, which the last proposal updates first.
Copied look_up(const Tensor& text_, const Tensor& last_, const Lookup& lookup, int64_t reach,
               double keep) {
  const int64_t last = last_.item<int64_t>(), *text = text_.const_data_ptr<int64_t>();
  const Tensor &table = lookup.table, &proposal = lookup.recent;
  TORCH_CHECK(last >= 0 && last < text_.numel() && text_.is_contiguous(), "last token at ", last);
  TORCH_CHECK(table.numel() == 2 * CLASSES * CLASSES && proposal.numel() >= 4 + reach &&
                  table.is_contiguous() && proposal.is_contiguous() && reach >= 0,
              "a table");
  float *tried = table.mutable_data_ptr<float>(), *right = tried + CLASSES * CLASSES;
  int64_t* recent = proposal.mutable_data_ptr<int64_t>();
  const auto cell = [](int64_t size, int64_t depth) {
    return std::min<int64_t>(size, CLASSES) * CLASSES - CLASSES +
           std::min<int64_t>(depth, CLASSES) - 1;
  };
  // Only one cycle later: more tokens after its root mean a new turn or another text.
  if (recent[0] <= last && last <= recent[0] + reach + 1 && text[recent[0]] == recent[1] &&
      recent[2]) {
    for (int64_t i = 0; i < recent[3] && recent[0] + 1 + i <= last; i++) {
      const int64_t c = cell(recent[2], i + 1);
      const bool is_right = text[recent[0] + 1 + i] == recent[4 + i];
      tried[c] += 1.0f;
      right[c] += is_right;
      if (!is_right) break;
    }
    for (int64_t depth = 1; depth <= CLASSES; depth++) {
      const int64_t c = cell(recent[2], depth);
      const float share = std::min(1.0f, TABLE_MEMORY / tried[c]);
      tried[c] *= share;
      right[c] *= share;
    }
  }
  const Match here = find_in_text(text, last, lookup.longest);
  const Match there =
      lookup.corpus ? find_in_corpus(*lookup.corpus, text, last, lookup.longest) : Match{};
  const int64_t size = std::max(here.size, there.size);
  Copied copied;
  std::vector<int64_t>& proposed = copied.tokens;
  if (there.size > here.size) {
    const Tensor& documents = lookup.corpus->tokens;
    const int64_t* tokens = documents.const_data_ptr<int64_t>();
    const int64_t end = std::min(there.end + 1 + reach, documents.numel());
    for (int64_t i = there.end + 1; i < end && tokens[i] >= 0; i++) proposed.push_back(tokens[i]);
  } else if (size) {  // a repetition is expected to continue
    for (int64_t i = 0; i < reach; i++)
      proposed.push_back(text[here.end + 1 + i % (last - here.end)]);
  }
  const int64_t n = proposed.size();
  recent[0] = last;
  recent[1] = text[last];
  recent[2] = size;
  recent[3] = n;
  std::copy(proposed.begin(), proposed.end(), recent + 4);
  for (float path = 1.0f; (int64_t)copied.paths.size() < n;) {
    const int64_t c = cell(size, copied.paths.size() + 1);
    path *= std::min(1.0f, std::max(1e-3f, right[c] / tried[c]));
    if (path < float(keep)) break;
    copied.paths.push_back(path);
    copied.gain += path - keep;
  }
  proposed.resize(copied.paths.size());
  return copied;
}

}  // namespace
