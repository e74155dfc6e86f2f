// Small text files, of the system and of fuels, through C's stdio: C++ streams need the locale of the standard library that
// is in the process first, and inside Python that may be another one than this was compiled with.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace rocket {

// The whole file, or nothing if it cannot be opened or read, or has more than max_bytes.
std::optional<std::string> read_file(const std::string& path, uint64_t max_bytes = 1 << 24);

// Its lines without their ends; none if it cannot be read.
std::vector<std::string> read_lines(const std::string& path);

}  // namespace rocket
