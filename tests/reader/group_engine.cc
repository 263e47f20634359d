// One rank of a two-rank inference engine as a process of its own, for
// group_process_test: follows a store until it has been told to go, through
// whatever happens to the other rank.
//
//   group_engine STORE RANK SOCKET REPORT
//
// For each version that it commits it appends a line to REPORT: step, manifest
// hash, hash of what its memory holds. Whenever the group breaks it meets the
// other rank anew at SOCKET, opens a new follower and joins, in place.

#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kedge/engine/io/store.h"
#include "kedge/format/hash.h"
#include "kedge/format/l61.h"
#include "kedge/reader/follower.h"
#include "kedge/tests/reader/engine_memory.h"
#include "kedge/tests/reader/reader_group.h"

namespace kedge {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr milliseconds kReduceDeadline{1000};

// The other rank at the other end of a stream socket: both send what they have
// and add what they get.
class Peer {
 public:
  explicit Peer(int socket) : socket_(socket) {}
  ~Peer() { ::close(socket_); }
  Peer(const Peer&) = delete;
  Peer& operator=(const Peer&) = delete;

  absl::Status Reduce(std::span<std::uint64_t> values) {
    const Clock::time_point deadline = Clock::now() + kReduceDeadline;
    std::vector<std::uint64_t> out = {values.size()};
    out.insert(out.end(), values.begin(), values.end());
    std::vector<std::uint64_t> in(out.size());
    std::size_t sent = 0;
    std::size_t got = 0;
    const std::size_t bytes = out.size() * 8;
    const auto* from = reinterpret_cast<const char*>(out.data());
    auto* to = reinterpret_cast<char*>(in.data());
    while (sent < bytes || got < bytes) {
      pollfd wait = {socket_, POLLIN, 0};
      if (sent < bytes) wait.events |= POLLOUT;
      const auto left =
          std::chrono::duration_cast<milliseconds>(deadline - Clock::now());
      if (left.count() <= 0) {
        return absl::DeadlineExceededError(absl::StrCat(
            "waited ", kReduceDeadline.count(), " ms for the other rank; had ",
            got, " of ", bytes, " bytes"));
      }
      if (::poll(&wait, 1, static_cast<int>(left.count())) < 0 &&
          errno != EINTR) {
        return absl::UnavailableError("poll failed");
      }
      if ((wait.revents & POLLOUT) != 0) {
        const ssize_t n =
            ::send(socket_, from + sent, bytes - sent, MSG_NOSIGNAL);
        if (n < 0 && errno != EAGAIN) {
          return absl::UnavailableError("the other rank is gone");
        }
        if (n > 0) sent += static_cast<std::size_t>(n);
      }
      if ((wait.revents & (POLLIN | POLLHUP | POLLERR)) != 0 && got < bytes) {
        const ssize_t n = ::recv(socket_, to + got, bytes - got, 0);
        if (n == 0 || (n < 0 && errno != EAGAIN)) {
          return absl::UnavailableError("the other rank is gone");
        }
        if (n > 0) got += static_cast<std::size_t>(n);
        if (got >= 8 && in[0] != values.size()) {
          return absl::UnavailableError(
              absl::StrCat("the other rank comes with ", in[0],
                           " values, this one with ", values.size()));
        }
      }
    }
    for (std::size_t i = 0; i < values.size(); ++i) values[i] += in[i + 1];
    return absl::OkStatus();
  }

 private:
  int socket_;
};

sockaddr_un Address(const std::string& path) {
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  std::strncpy(address.sun_path, path.c_str(), sizeof(address.sun_path) - 1);
  return address;
}

// Rank 0 listens, rank 1 comes. Null if the other one did not within a while.
std::unique_ptr<Peer> Meet(const std::string& path, int listener) {
  int socket = -1;
  if (listener >= 0) {
    pollfd wait = {listener, POLLIN, 0};
    if (::poll(&wait, 1, 200) > 0)
      socket = ::accept(listener, nullptr, nullptr);
  } else {
    socket = ::socket(AF_UNIX, SOCK_STREAM, 0);
    const sockaddr_un address = Address(path);
    if (::connect(socket, reinterpret_cast<const sockaddr*>(&address),
                  sizeof(address)) != 0) {
      ::close(socket);
      socket = -1;
      std::this_thread::sleep_for(milliseconds(10));
    }
  }
  if (socket < 0) return nullptr;
  ::fcntl(socket, F_SETFL, O_NONBLOCK);
  return std::make_unique<Peer>(socket);
}

int Run(const std::string& store_path, std::uint32_t rank,
        const std::string& socket_path, const std::string& report_path) {
  auto store = Store::Open(PosixFileSystem(), store_path);
  if (!store.ok()) return 2;
  const auto newest = (*store)->Newest();
  if (!newest.ok()) return 2;
  EngineMemory memory(*(*newest)->table,
                      PartsOf(*(*newest)->table, Split::kRows, rank, 2), "w");
  int listener = -1;
  if (rank == 0) {
    ::unlink(socket_path.c_str());
    listener = ::socket(AF_UNIX, SOCK_STREAM, 0);
    const sockaddr_un address = Address(socket_path);
    if (::bind(listener, reinterpret_cast<const sockaddr*>(&address),
               sizeof(address)) != 0 ||
        ::listen(listener, 1) != 0) {
      return 2;
    }
  }
  std::FILE* report = std::fopen(report_path.c_str(), "a");
  if (report == nullptr) return 2;
  const auto say = [&](const std::string& line) {
    std::fputs((line + "\n").c_str(), report);
    std::fflush(report);
  };

  while (true) {
    const std::unique_ptr<Peer> peer = Meet(socket_path, listener);
    if (peer == nullptr) continue;
    FollowerOptions options;
    options.store_path = store_path;
    options.io_threads = 1;
    options.apply_threads = 1;
    options.retry_deadline = milliseconds(500);
    options.lease_id = "engine";
    options.group.rank = rank;
    options.group.size = 2;
    options.group.name = "pair";
    options.group.reduce = [&](std::span<std::uint64_t> values) {
      return peer->Reduce(values);
    };
    options.commit = [&](const VersionId& id) {
      say(absl::StrCat(id.step, " ", ToHex(id.manifest_hash), " ",
                       ToHex(HashBytes128(memory.Contents()))));
    };
    auto follower = Follower::Open(options, memory.sets());
    if (!follower.ok()) {
      say(absl::StrCat("open: ", follower.status().ToString()));
      continue;
    }
    absl::Status status = (*follower)->Join().status();
    while (status.ok() || absl::IsDeadlineExceeded(status)) {
      status = (*follower)->WaitForUpdate(milliseconds(300)).status();
    }
    say(absl::StrCat("left: ", status.ToString()));
  }
}

}  // namespace
}  // namespace kedge

int main(int argc, char** argv) {
  if (argc != 5) return 2;
  return kedge::Run(argv[1], static_cast<std::uint32_t>(std::atoi(argv[2])),
                    argv[3], argv[4]);
}
