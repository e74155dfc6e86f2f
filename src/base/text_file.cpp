#include "base/text_file.h"

#include <algorithm>
#include <cstdio>
#include <memory>

namespace rocket {

std::optional<std::string> read_file(const std::string& path, uint64_t max_bytes) {
  const std::unique_ptr<std::FILE, int (*)(std::FILE*)> file(std::fopen(path.c_str(), "rb"), &std::fclose);
  if (!file) return std::nullopt;
  std::string text;
  char piece[1 << 14];
  while (const size_t got = std::fread(piece, 1, sizeof piece, file.get())) {
    text.append(piece, got);
    if (text.size() > max_bytes) return std::nullopt;
  }
  if (std::ferror(file.get())) return std::nullopt;
  return text;
}

std::vector<std::string> read_lines(const std::string& path) {
  const std::string text = read_file(path).value_or("");
  std::vector<std::string> lines;
  for (size_t begin = 0; begin < text.size();) {
    const size_t end = std::min(text.find('\n', begin), text.size());
    lines.push_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  return lines;
}

}  // namespace rocket
