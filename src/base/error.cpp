#include "base/error.h"

namespace rocket {

void fail_op(const char* op, const char* what, int64_t expected, int64_t found) {
  throw Error(std::string(op) + ": " + what + ": expected " + std::to_string(expected) + ", found " +
              std::to_string(found));
}

}  // namespace rocket
