// How much memory this process may still take.
#pragma once

#include <cstdint>
#include <string>

namespace rocket {

struct MemoryAvailable {
  // What can be taken without swapping: MemAvailable, lowered to what cgroup limits (v1, v2, every level) leave.
  int64_t bytes;
  std::string source;  // "MemAvailable", or the cgroup file that is the lowest limit
};

// ROCKET_MEMORY_LIMIT (bytes; suffixes K, M, G for powers of 1024) lowers it further, for tests.
MemoryAvailable memory_available();
void lower_by_environment(MemoryAvailable& available, const char* variable);  // the same for another variable
int64_t resident_bytes();                                                     // of this process
int cgroup_cpu_quota();  // CPUs that the container may use, rounded up; 0 = no limit
std::string cpu_name();

// "16.62 GiB", "13.50 MiB", "512 B".
std::string format_bytes(int64_t bytes);

}  // namespace rocket
