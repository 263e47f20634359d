#ifndef KEDGE_READER_GROUP_H_
#define KEDGE_READER_GROUP_H_

// How the ranks of one inference engine (a TP group) follow a store together:
// each holds a part of the model, all are at one version. See docs/protocol.md,
// "Groups".

#include <cstdint>
#include <functional>
#include <span>
#include <string>

#include "absl/status/status.h"

namespace kedge {

// The default is a group of one, which needs no `reduce`.
//
// Contract: all ranks are opened with the same size, name, every_version and
// allow_partial. Follower::Open, Update, WaitForUpdate, Join, JoinStep and
// VerifyHeld are collective: every rank calls them, in the same order.
// Prefetch, state() and held() are not.
struct GroupOptions {
  std::uint32_t rank = 0;
  std::uint32_t size = 1;
  // Replaces each value by the sum over all ranks of the group, modulo
  // 2^61 - 1. Values handed in are below 2^61 - 1; up to 8 ranks plain addition
  // of 64-bit integers does, since kedge reduces what comes back.
  //
  // Collective, like an all-reduce: called on the thread that updates, by every
  // rank equally often and with equally many values, once to vote before
  // anything is written and once to verify what was. It has a deadline of its
  // own, longer than the ranks' retry_deadline, and fails with kUnavailable or
  // kDeadlineExceeded when it passes; so it does, on every rank, if ranks come
  // with different numbers of values. Callers of the follower then get
  // kUnavailable.
  //
  // `values` are host memory, also where the weights are a device's: a vote is
  // a few values, a verification one for each tensor and cover. One that sums
  // with NCCL keeps a device buffer as large as the largest call so far (and
  // makes it before the first pause: verification has the most), copies
  // `values` there on a stream of its own, calls ncclAllReduce in place with
  // ncclUint64 and ncclSum (up to 8 ranks; beyond, ncclAllGather and a sum
  // modulo 2^61 - 1 on the host), copies back and waits for that stream.
  std::function<absl::Status(std::span<std::uint64_t> values)> reduce;
  std::string name;  // for messages ("tp")
};

}  // namespace kedge

#endif  // KEDGE_READER_GROUP_H_
