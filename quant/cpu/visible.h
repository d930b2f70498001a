// Keys that the rows of a pass see.
//
// Reference: `causal_mask` in model.py and `TreeView` in tree.py.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

namespace {

// Keys that each row sees: slots 0 .. shared - 1, then slots of its own. `shared` is even: keys of
// the ranks 2i and 2i + 1 are added as a pair, for whatever row.
struct Visible {
  int64_t shared = 0;
  std::vector<int64_t> begin;  // [T + 1] into `own`
  std::vector<int64_t> own;    // ascending within a row

  int64_t length(int64_t t) const { return shared + begin[t + 1] - begin[t]; }

  // Returns the largest even number of keys up to n.
  static int64_t in_pairs(int64_t n) { return n - n % 2; }

  static Visible of_mask(const bool* mask, int64_t T, int64_t S) {
    Visible v;
    v.shared = S;
    for (int64_t t = 0; t < T; t++) {
      const bool* row = mask + t * S;
      const void* gap = std::memchr(row, 0, v.shared);
      if (gap != nullptr) v.shared = (const bool*)gap - row;
    }
    v.shared = in_pairs(v.shared);
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
    v.shared = in_pairs(seq_len);
    for (int64_t t = 0; t < T; t++)
      if (window > 0 && seq_len + depths[t] >= window) v.shared = 0;
    v.begin.push_back(0);
    for (int64_t t = 0; t < T; t++) {
      const int64_t last = seq_len + depths[t];  // logical positions first .. last
      const int64_t first = window > 0 ? std::max<int64_t>(0, last - window + 1) : 0;
      for (int64_t s = std::max(first, v.shared); s < seq_len; s++) v.own.push_back(s);
      for (int64_t d = std::max<int64_t>(0, first - seq_len); d <= depths[t]; d++)
        v.own.push_back(seq_len + paths[t * width + d]);
      v.begin.push_back(v.own.size());
    }
    return v;
  }

  // Returns the keys that the tokens of `rows` slots from `first` on see: those up to their own
  // slot, with a window only the last ones.
  static Visible of_text(int64_t first, int64_t rows, int64_t window) {
    const bool cut = window > 0 && first + rows > window;
    Visible v;
    v.shared = cut ? 0 : in_pairs(first + 1);
    v.begin.push_back(0);
    for (int64_t slot = first; slot < first + rows; slot++) {
      const int64_t begin = cut ? std::max<int64_t>(0, slot - window + 1) : v.shared;
      for (int64_t key = begin; key <= slot; key++) v.own.push_back(key);
      v.begin.push_back(v.own.size());
    }
    return v;
  }
};

}  // namespace
