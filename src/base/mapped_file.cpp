#include "base/mapped_file.h"

#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <mutex>

namespace rocket {

// Where a mapping lies. Entries are never freed but used again: a signal may look at them at any time.
struct MappedFile::Entry {
  std::atomic<uintptr_t> begin{0}, end{0};  // end 0: not in use
  std::atomic<bool> lost{false};
  Entry* next = nullptr;
};

struct MappedFile::Registry {
  static inline std::atomic<Entry*> first{nullptr};
  static inline std::mutex mutex;  // of those who add and remove
  static inline struct sigaction before{};
  static inline uintptr_t page = 4096;

  static Entry* add(uintptr_t begin, size_t bytes) {
    const std::lock_guard lock(mutex);
    listen();
    Entry* entry = first.load();
    while (entry != nullptr && entry->end.load() != 0) entry = entry->next;
    if (entry == nullptr) {
      entry = new Entry;
      entry->next = first.load();
      first.store(entry);
    }
    entry->lost.store(false);
    entry->begin.store(begin);
    entry->end.store(begin + bytes);
    return entry;
  }

  static void remove(Entry* entry) {
    const std::lock_guard lock(mutex);
    entry->end.store(0);
  }

  static void listen() {
    static bool listening = false;
    if (listening) return;
    page = static_cast<uintptr_t>(::sysconf(_SC_PAGESIZE));
    struct sigaction action{};
    action.sa_sigaction = &answer;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    ::sigemptyset(&action.sa_mask);
    listening = ::sigaction(SIGBUS, &action, &before) == 0;
  }

  // In a signal handler: atomics and system calls only.
  static bool replace(uintptr_t address) {
    for (Entry* entry = first.load(); entry != nullptr; entry = entry->next) {
      const uintptr_t end = entry->end.load();
      if (address < entry->begin.load() || address >= end) continue;
      entry->lost.store(true);
      const uintptr_t from = address / page * page;
      constexpr int kFlags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED;
      return ::mmap(reinterpret_cast<void*>(from), end - from, PROT_READ, kFlags, -1, 0) != MAP_FAILED;
    }
    return false;
  }

  static void answer(int number, siginfo_t* info, void* context) {
    const int saved = errno;
    if (replace(reinterpret_cast<uintptr_t>(info->si_addr))) {
      errno = saved;
    } else if ((before.sa_flags & SA_SIGINFO) != 0) {
      before.sa_sigaction(number, info, context);
    } else if (before.sa_handler != SIG_DFL && before.sa_handler != SIG_IGN) {
      before.sa_handler(number);
    } else {
      ::signal(SIGBUS, SIG_DFL);  // the touch is tried again, and ends the process as it would have
    }
  }
};

bool MappedFile::map(int fd, size_t bytes) {
  void* const mapped = ::mmap(nullptr, bytes, PROT_READ, MAP_SHARED, fd, 0);
  if (mapped == MAP_FAILED) return false;
  data_ = static_cast<const uint8_t*>(mapped);
  bytes_ = bytes;
  entry_ = Registry::add(reinterpret_cast<uintptr_t>(mapped), bytes);
  return true;
}

void MappedFile::unmap() {
  if (data_ == nullptr) return;
  Registry::remove(entry_);
  ::munmap(const_cast<uint8_t*>(data_), bytes_);
  data_ = nullptr;
}

bool MappedFile::lost() const {
  return data_ != nullptr && entry_->lost.load();
}

}  // namespace rocket
