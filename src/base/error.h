// Typed errors. Library code throws these and never prints, exits or asserts on input.
//
// A message is one line that names what was wrong, where, what was expected and what was found. `hint` (may be
// empty) says what the user can do; the CLI prints it after the message as "hint: …".
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

namespace rocket {

class Error : public std::runtime_error {
 public:
  explicit Error(const std::string& message, std::string hint = "")
      : std::runtime_error(message), hint_(std::move(hint)) {}
  const std::string& hint() const { return hint_; }

 private:
  std::string hint_;
};

// The files of a checkpoint: missing, truncated, lying, of another model, of wrong shape or dtype.
class FuelError : public Error {
  using Error::Error;
};
// What is asked for does not fit: memory, context, slots, rows a step.
class PlanError : public Error {
  using Error::Error;
};
// A call with arguments that cannot be right: unknown stream, token outside the vocabulary, gap in positions.
class InputError : public Error {
  using Error::Error;
};
// The machine: no such device, an I/O error, a kernel that failed.
class DeviceError : public Error {
  using Error::Error;
};

// An op was called with shapes that it cannot take; a fault of the engine, not of the user's input.
// Out of line so that kernel files, which are compiled once for each instruction set, instantiate nothing shared.
[[noreturn]] void fail_op(const char* op, const char* what, int64_t expected, int64_t found);

}  // namespace rocket
