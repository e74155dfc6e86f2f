#include <cstdint>
#include <cstring>

#include "ops/float_key.h"
#include "ops/indexer.h"

namespace rocket {
namespace {

// Radix selection: the key of the k-th largest is found digit by digit, from histograms of the keys that
// share the digits found so far. Then one pass in index order takes all larger keys and the first of the
// equal ones, which is both the tie rule and the order of the result. Linear for any input.
constexpr int kDigitBits[] = {11, 11, 10};
constexpr int kBins = 1 << 11;

struct Threshold {
  uint32_t key;   // of the k-th largest
  int64_t equal;  // how many with this key are taken
};

Threshold find_threshold(const uint32_t* keys, int32_t n, int64_t k) {
  Threshold t{0, k};
  int shift = 32;
  for (const int width : kDigitBits) {
    const uint32_t known = shift == 32 ? 0 : ~0u << shift;
    shift -= width;
    const uint32_t mask = (1u << width) - 1;
    // Two tables: runs of equal scores are common, and adding to one counter again and again waits for
    // memory.
    uint32_t count[2][kBins] = {};
    int32_t i = 0;
    for (; i + 2 <= n; i += 2) {
      if ((keys[i] & known) == t.key) ++count[0][(keys[i] >> shift) & mask];
      if ((keys[i + 1] & known) == t.key) ++count[1][(keys[i + 1] >> shift) & mask];
    }
    if (i < n && (keys[i] & known) == t.key) ++count[0][(keys[i] >> shift) & mask];
    uint32_t digit = mask;
    for (;; --digit) {
      const int64_t here = static_cast<int64_t>(count[0][digit]) + count[1][digit];
      if (here >= t.equal) break;
      t.equal -= here;
    }
    t.key |= digit << shift;
  }
  return t;
}

}  // namespace

int32_t topk_lowest_index(const float* score, int32_t n, int32_t k, uint64_t* keys, int32_t* out) {
  if (k > n) k = n;
  if (k <= 0) return 0;
  if (k == n) {
    for (int32_t i = 0; i < n; ++i) out[i] = i;
    return n;
  }
  auto* ordered = reinterpret_cast<uint32_t*>(keys);
  for (int32_t i = 0; i < n; ++i) ordered[i] = float_key(score[i]);
  Threshold t = find_threshold(ordered, n, k);
  int32_t taken = 0;
  for (int32_t i = 0; taken < k; ++i) {
    if (ordered[i] > t.key) {
      out[taken++] = i;
    } else if (ordered[i] == t.key && t.equal > 0) {
      --t.equal;
      out[taken++] = i;
    }
  }
  return k;
}

}  // namespace rocket
