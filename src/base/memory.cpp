#include "base/memory.h"

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <vector>

#ifdef __linux__
#include <unistd.h>
#endif

#include "base/text_file.h"

namespace rocket {
namespace {

bool read_line(const std::string& path, std::string& line) {
  const std::vector<std::string> lines = read_lines(path);
  if (lines.empty()) return false;
  line = lines[0];
  return true;
}

// The number in a cgroup file; nothing for "max" or a missing file.
bool read_number(const std::string& path, int64_t& value) {
  std::string line;
  if (!read_line(path, line) || line.empty() || line == "max") return false;
  char* end = nullptr;
  value = std::strtoll(line.c_str(), &end, 10);
  return end != line.c_str();
}

// A field such as "inactive_file 1234" of memory.stat.
int64_t read_field(const std::string& path, const std::string& name) {
  for (const std::string& line : read_lines(path)) {
    if (line.compare(0, name.size() + 1, name + " ") == 0) return std::atoll(line.c_str() + name.size());
  }
  return 0;
}

int64_t meminfo_kib(const std::string& name) {
  for (const std::string& line : read_lines("/proc/meminfo")) {
    if (line.compare(0, name.size(), name) == 0) return std::atoll(line.c_str() + name.size());
  }
  return 0;
}

// This process's folders under a cgroup hierarchy, innermost first, up to the mount point.
std::vector<std::string> cgroup_folders(const std::string& mount, const std::string& controller) {
  std::vector<std::string> folders;
  for (const std::string& line : read_lines("/proc/self/cgroup")) {
    const size_t first = line.find(':'), second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const std::string names = line.substr(first + 1, second - first - 1);
    const bool match = controller.empty()
                           ? names.empty()
                           : ("," + names + ",").find("," + controller + ",") != std::string::npos;
    if (!match) continue;
    std::string path = line.substr(second + 1);
    while (path.size() > 1) {
      folders.push_back(mount + path);
      path.resize(path.find_last_of('/'));
      if (path.empty()) break;
    }
    break;
  }
  folders.push_back(mount);
  return folders;
}

struct Limit {
  std::string current, limit, stat, inactive;
};

void lower(MemoryAvailable& available, const std::vector<std::string>& folders, const Limit& names) {
  for (const std::string& folder : folders) {
    int64_t limit = 0, used = 0;
    if (!read_number(folder + "/" + names.limit, limit) || !read_number(folder + "/" + names.current, used))
      continue;
    if (limit <= 0 || limit > (int64_t{1} << 60)) continue;
    // Clean page cache is counted as used, but goes away when memory is asked for.
    used -= read_field(folder + "/" + names.stat, names.inactive);
    const int64_t left = std::max<int64_t>(0, limit - std::max<int64_t>(0, used));
    if (left < available.bytes) available = {left, folder + "/" + names.limit};
  }
}

int64_t parse_bytes(const char* text) {
  char* end = nullptr;
  const double value = std::strtod(text, &end);
  double unit = 1;
  if (*end == 'K' || *end == 'k') unit = 1024.0;
  if (*end == 'M' || *end == 'm') unit = 1024.0 * 1024;
  if (*end == 'G' || *end == 'g') unit = 1024.0 * 1024 * 1024;
  return static_cast<int64_t>(value * unit);
}

}  // namespace

MemoryAvailable memory_available() {
  MemoryAvailable available{meminfo_kib("MemAvailable:") * 1024, "MemAvailable"};
#ifdef __linux__
  if (available.bytes == 0) {  // no /proc: what the C library says
    available = {static_cast<int64_t>(sysconf(_SC_AVPHYS_PAGES)) * sysconf(_SC_PAGESIZE), "free pages"};
  }
#endif
  lower(available, cgroup_folders("/sys/fs/cgroup", ""),
        {"memory.current", "memory.max", "memory.stat", "inactive_file"});
  lower(available, cgroup_folders("/sys/fs/cgroup/memory", "memory"),
        {"memory.usage_in_bytes", "memory.limit_in_bytes", "memory.stat", "total_inactive_file"});
  lower_by_environment(available, "ROCKET_MEMORY_LIMIT");
  return available;
}

void lower_by_environment(MemoryAvailable& available, const char* variable) {
  const char* text = std::getenv(variable);
  if (!text || !*text) return;
  const int64_t limit = parse_bytes(text);
  if (limit < available.bytes) available = {limit, variable};
}

int64_t resident_bytes() {
#ifdef __linux__
  std::string line;
  long long pages = 0, resident = 0;
  if (read_line("/proc/self/statm", line) && std::sscanf(line.c_str(), "%lld %lld", &pages, &resident) == 2)
    return resident * sysconf(_SC_PAGESIZE);
#endif
  return 0;
}

int cgroup_cpu_quota() {
  double cpus = std::numeric_limits<double>::infinity();
  for (const std::string& folder : cgroup_folders("/sys/fs/cgroup", "")) {
    std::string line;
    if (!read_line(folder + "/cpu.max", line)) continue;
    double quota = 0, period = 0;  // "max 100000" has no quota
    if (std::sscanf(line.c_str(), "%lf %lf", &quota, &period) == 2 && period > 0)
      cpus = std::min(cpus, quota / period);
  }
  for (const std::string& folder : cgroup_folders("/sys/fs/cgroup/cpu", "cpu")) {
    int64_t quota = 0, period = 0;
    if (read_number(folder + "/cpu.cfs_quota_us", quota) &&
        read_number(folder + "/cpu.cfs_period_us", period) && quota > 0 && period > 0) {
      cpus = std::min(cpus, static_cast<double>(quota) / static_cast<double>(period));
    }
  }
  return std::isfinite(cpus) ? std::max(1, static_cast<int>(std::ceil(cpus))) : 0;
}

std::string cpu_name() {
  for (const std::string& line : read_lines("/proc/cpuinfo")) {
    const size_t colon = line.find(": ");
    if (line.compare(0, 10, "model name") == 0 && colon != std::string::npos) return line.substr(colon + 2);
  }
#if defined(__aarch64__)
  return "Arm CPU";
#else
  return "CPU";
#endif
}

std::string format_bytes(int64_t bytes) {
  const char* unit[] = {"B", "KiB", "MiB", "GiB", "TiB"};
  double value = static_cast<double>(bytes);
  int step = 0;
  while (value >= 1024.0 && step < 4) {
    value /= 1024.0;
    ++step;
  }
  char text[48];
  std::snprintf(text, sizeof text, step == 0 ? "%.0f %s" : "%.2f %s", value, unit[step]);
  return text;
}

}  // namespace rocket
