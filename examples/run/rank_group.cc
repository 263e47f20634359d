#include "kedge/examples/run/rank_group.h"

#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>

#include "absl/strings/str_cat.h"
#include "kedge/examples/run/progress.h"
#include "kedge/format/l61.h"
#include "kedge/format/status.h"

namespace kedge::example {
namespace {

using Clock = std::chrono::steady_clock;

absl::Status Lost(std::uint32_t rank, absl::string_view why) {
  return absl::UnavailableError(
      absl::StrCat("rank ", rank, ": ", why, "; start all ranks again"));
}

absl::Status Send(int socket, std::uint32_t to,
                  std::span<const std::uint64_t> values) {
  const auto* at = reinterpret_cast<const char*>(values.data());
  std::size_t left = values.size_bytes();
  while (left > 0) {
    const ssize_t sent = send(socket, at, left, MSG_NOSIGNAL);
    if (sent < 0 && errno == EINTR) continue;
    if (sent < 0) return Lost(to, std::strerror(errno));
    at += sent;
    left -= static_cast<std::size_t>(sent);
  }
  return absl::OkStatus();
}

absl::Status Receive(int socket, std::uint32_t from, Clock::time_point until,
                     std::span<std::uint64_t> values) {
  auto* at = reinterpret_cast<char*>(values.data());
  std::size_t left = values.size_bytes();
  while (left > 0) {
    const auto wait = std::chrono::duration_cast<std::chrono::milliseconds>(
        until - Clock::now());
    if (wait.count() <= 0) return Lost(from, "no answer in time");
    pollfd poller = {.fd = socket, .events = POLLIN, .revents = 0};
    const int ready = poll(&poller, 1, static_cast<int>(wait.count()));
    if (ready == 0 || (ready < 0 && errno == EINTR)) continue;
    const ssize_t received = recv(socket, at, left, 0);
    if (received < 0 && errno == EINTR) continue;
    if (received < 0) return Lost(from, std::strerror(errno));
    if (received == 0) return Lost(from, "it has ended");
    at += received;
    left -= static_cast<std::size_t>(received);
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::unique_ptr<RankGroup>> RankGroup::Fork(
    std::uint32_t size, std::chrono::milliseconds timeout) {
  std::unique_ptr<RankGroup> group(new RankGroup(size, timeout));
  const pid_t parent = getpid();
  for (std::uint32_t rank = 1; rank < size; ++rank) {
    int pair[2];
    if (socketpair(AF_UNIX, SOCK_STREAM, 0, pair) != 0) {
      return absl::ResourceExhaustedError(
          absl::StrCat("rank ", rank, ": socketpair: ", std::strerror(errno)));
    }
    const pid_t child = fork();
    if (child < 0) {
      return absl::ResourceExhaustedError(
          absl::StrCat("rank ", rank, ": fork: ", std::strerror(errno)));
    }
    if (child == 0) {
      prctl(PR_SET_PDEATHSIG, SIGKILL);
      if (getppid() != parent) std::_Exit(1);  // it died before that
      for (const int socket : group->sockets_) close(socket);
      close(pair[0]);
      group->rank_ = rank;
      group->children_.clear();
      group->sockets_ = {pair[1]};
      return group;
    }
    close(pair[1]);
    group->children_.push_back(child);
    group->sockets_.push_back(pair[0]);
  }
  return group;
}

RankGroup::~RankGroup() {
  for (const pid_t child : children_) {
    kill(child, SIGKILL);
    waitpid(child, nullptr, 0);
  }
  for (const int socket : sockets_) close(socket);
}

absl::Status RankGroup::AllReduce(std::span<std::uint64_t> values) {
  const Clock::time_point until = Clock::now() + timeout_;
  if (rank_ != 0) {
    KEDGE_RETURN_IF_ERROR(Send(sockets_[0], 0, values));
    return Receive(sockets_[0], 0, until, values);
  }
  std::vector<std::uint64_t> theirs(values.size());
  for (std::uint32_t rank = 1; rank < size_; ++rank) {
    KEDGE_RETURN_IF_ERROR(Receive(sockets_[rank - 1], rank, until, theirs));
    for (std::size_t i = 0; i < values.size(); ++i) {
      values[i] = L61Add(values[i], theirs[i]);
    }
  }
  for (std::uint32_t rank = 1; rank < size_; ++rank) {
    KEDGE_RETURN_IF_ERROR(Send(sockets_[rank - 1], rank, values));
  }
  return absl::OkStatus();
}

absl::Status RankGroup::Finish() {
  for (std::uint32_t rank = 1; !children_.empty(); ++rank) {
    int status = 0;
    KEDGE_RETURN_IF_ERROR(
        WaitUntil(timeout_, absl::StrCat("the end of rank ", rank),
                  [&]() -> absl::StatusOr<bool> {
                    return waitpid(children_.front(), &status, WNOHANG) != 0;
                  }));
    children_.erase(children_.begin());
    if (WIFEXITED(status) && WEXITSTATUS(status) == 0) continue;
    return absl::InternalError(
        WIFSIGNALED(status)
            ? absl::StrCat("rank ", rank, ": killed by signal ",
                           WTERMSIG(status))
            : absl::StrCat("rank ", rank, ": exit status ", WEXITSTATUS(status),
                           "; it said why"));
  }
  return absl::OkStatus();
}

}  // namespace kedge::example
