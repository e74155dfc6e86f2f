#include "glm5-moe-nvfp4-2b/share.h"

#include <algorithm>
#include <utility>

#include "base/error.h"

namespace rocket::glm5 {
namespace {

constexpr int32_t kMostListed = 64;  // of ranks that would do

// What is split, by name, and into how many pieces it may go. Of a rank's config, what all have together.
std::vector<std::pair<const char*, int32_t>> split_parts(const Config& c) {
  const auto any = [](const std::vector<bool>& layers, bool kind) {
    return std::find(layers.begin(), layers.end(), kind) != layers.end();
  };
  std::vector<std::pair<const char*, int32_t>> parts;
  if (any(c.is_kda, true)) parts.emplace_back("KDA heads", c.linear_num_heads * c.dense_ranks);
  if (any(c.is_kda, false)) parts.emplace_back("MLA heads", c.num_attention_heads * c.dense_ranks);
  if (any(c.is_moe, false))
    parts.emplace_back("columns of the dense MLPs", c.intermediate_size * c.dense_ranks);
  if (any(c.is_moe, true))
    parts.emplace_back("columns of the shared experts", c.shared_inner() * c.dense_ranks);
  parts.emplace_back("rows of lm_head", c.vocab_size);
  return parts;
}

}  // namespace

std::vector<int32_t> possible_ranks(const Config& config) {
  const auto parts = split_parts(config);
  std::vector<int32_t> ranks;
  for (int32_t n = 1; n <= kMostListed; ++n) {
    const auto divides = [n](const auto& part) { return part.second % n == 0; };
    if (std::all_of(parts.begin(), parts.end(), divides)) ranks.push_back(n);
  }
  return ranks;
}

std::string listed(const std::vector<int32_t>& numbers) {
  std::string text;
  for (const int32_t n : numbers) text += (text.empty() ? "" : ", ") + std::to_string(n);
  return text;
}

Config share_of(const Config& whole, int32_t ranks) {
  for (const auto& [name, count] : split_parts(whole)) {
    if (count % ranks == 0) continue;
    throw InputError("--split-dense: expected a number of boosters that divides the " +
                         std::to_string(count) + " " + name + ", found " + std::to_string(ranks),
                     "with these weights it works with this many boosters: " + listed(possible_ranks(whole)));
  }
  Config share = whole;
  share.dense_ranks = ranks;
  share.linear_num_heads /= ranks;
  share.num_attention_heads /= ranks;
  share.intermediate_size /= ranks;
  return share;
}

}  // namespace rocket::glm5
