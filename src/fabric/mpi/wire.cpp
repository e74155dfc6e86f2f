// The wire over MPI: librocket_mpi, the only part of Rocket that is linked with an MPI library.
#include "fabric/wire.h"

#include <mpi.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace rocket {
namespace {

class MpiWire : public Wire {
 public:
  MpiWire() {
    MPI_Comm_rank(MPI_COMM_WORLD, &rank_);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks_);
    name_library();
  }
  const char* library() const override { return library_; }
  int rank() const override { return rank_; }
  int ranks() const override { return ranks_; }

  int send(int rank, int channel, const void* data, int64_t bytes, Request* request) override {
    MPI_Request r = MPI_REQUEST_NULL;
    const int code = MPI_Isend(data, static_cast<int>(bytes), MPI_BYTE, rank, channel, MPI_COMM_WORLD, &r);
    put(r, request);
    return code;
  }
  int receive(int rank, int channel, void* data, int64_t bytes, Request* request) override {
    MPI_Request r = MPI_REQUEST_NULL;
    const int code = MPI_Irecv(data, static_cast<int>(bytes), MPI_BYTE, rank, channel, MPI_COMM_WORLD, &r);
    put(r, request);
    return code;
  }
  int test(Request* request, bool* done) override {
    MPI_Request r;
    std::memcpy(&r, request, sizeof r);
    int flag = 0;
    const int code = MPI_Test(&r, &flag, MPI_STATUS_IGNORE);
    put(r, request);
    *done = flag != 0;
    return code;
  }
  const char* error(int code) override {
    int length = 0;
    if (MPI_Error_string(code, error_, &length) != MPI_SUCCESS)
      std::snprintf(error_, sizeof error_, "error %d", code);
    return error_;
  }
  int stop() override { return MPI_Finalize(); }
  void abort(int status) override { MPI_Abort(MPI_COMM_WORLD, status); }

 private:
  // "MPICH Version:      5.0.2\n…" and "Open MPI v5.0.11, package: …" both begin with what people call it.
  void name_library() {
    char text[MPI_MAX_LIBRARY_VERSION_STRING] = "";
    int length = 0;
    MPI_Get_library_version(text, &length);
    text[std::strcspn(text, "\n,")] = '\0';
    char* to = library_;
    for (const char* c = text; *c; ++c) {
      const bool blank = *c == ' ' || *c == '\t';
      if (std::strncmp(c, "Version:", 8) == 0) {
        c += 7;
      } else if (!blank || (to > library_ && to[-1] != ' ')) {
        *to++ = blank ? ' ' : *c;
      }
    }
    *to = '\0';
  }
  static void put(MPI_Request r, Request* request) {
    static_assert(sizeof r <= sizeof *request);
    *request = 0;
    std::memcpy(request, &r, sizeof r);
  }

  int rank_ = 0, ranks_ = 0;
  char library_[MPI_MAX_LIBRARY_VERSION_STRING] = "";
  char error_[MPI_MAX_ERROR_STRING] = "";
};

}  // namespace
}  // namespace rocket

extern "C" {

[[gnu::visibility("default")]] extern const int rocket_mpi_abi;
const int rocket_mpi_abi = rocket::kWireVersion;

[[gnu::visibility("default")]] extern const char rocket_mpi_kind[];
#ifdef OPEN_MPI
const char rocket_mpi_kind[] = "Open MPI";
#else
const char rocket_mpi_kind[] = "MPICH";  // or one of its kin
#endif

// Calls come from the thread that computes and from the one that gives signs of life, never from both at once.
[[gnu::visibility("default")]] rocket::Wire* rocket_start_mpi(char* error, int error_bytes) {
  setenv("MPIR_CVAR_SUPPRESS_ABORT_MESSAGE", "1", 0);  // whoever aborts has said why
  int there = 0, threads = 0;
  MPI_Initialized(&there);
  const int code =
      there ? MPI_Query_thread(&threads) : MPI_Init_thread(nullptr, nullptr, MPI_THREAD_SERIALIZED, &threads);
  if (code != MPI_SUCCESS) {
    std::snprintf(error, static_cast<size_t>(error_bytes), "MPI_Init_thread failed with code %d", code);
    return nullptr;
  }
  if (threads < MPI_THREAD_SERIALIZED) {
    std::snprintf(error, static_cast<size_t>(error_bytes),
                  "expected thread support MPI_THREAD_SERIALIZED, found level %d", threads);
    return nullptr;
  }
  MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
  return new rocket::MpiWire;
}
}
