#ifndef KEDGE_TESTS_ENGINE_CUDA_BLOCK_EMULATOR_H_
#define KEDGE_TESTS_ENGINE_CUDA_BLOCK_EMULATOR_H_

// A thread block without a GPU: every thread is a fiber, and bodies of kernels
// written against a `Block` (engine/cuda/block.cuh) run as they are.
//
// Between two points where threads meet, warps, and the lanes of a warp, run in
// an order drawn at random: a kernel that lacks a barrier gives other results
// for other seeds. Lanes of a warp that meet at different points, or of which
// some have returned, end the program with a message.

#include <ucontext.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <vector>

#include "kedge/engine/cuda/block.cuh"
#include "kedge/format/l61.h"

namespace kedge::testing {

// Thread safety: none.
class BlockEmulator {
 public:
  BlockEmulator(std::uint32_t threads, std::uint64_t seed)
      : rng_(seed), fibers_(threads) {
    for (Fiber& fiber : fibers_) {
      fiber.stack = std::make_unique<std::byte[]>(kStackBytes);
    }
  }

  // Runs `body(*this)` in every thread, to its end.
  void Run(const std::function<void(BlockEmulator&)>& body) {
    body_ = &body;
    for (Fiber& fiber : fibers_) {
      fiber.state = State::kReady;
      getcontext(&fiber.context);
      fiber.context.uc_stack.ss_sp = fiber.stack.get();
      fiber.context.uc_stack.ss_size = kStackBytes;
      fiber.context.uc_link = nullptr;
      const auto self = reinterpret_cast<std::uintptr_t>(this);
      makecontext(&fiber.context, reinterpret_cast<void (*)()>(&Enter), 2,
                  static_cast<unsigned>(self),
                  static_cast<unsigned>(self >> 32));
    }
    while (Advance()) {
    }
  }

  // ------------------------------------------------- what kernel bodies call
  std::uint32_t Thread() const { return running_; }
  std::uint32_t Lane() const { return running_ % 32; }
  std::uint32_t Warp() const { return running_ / 32; }

  void Sync() { Meet(State::kSync, 0, 0); }
  void SyncWarp() { Meet(State::kSyncWarp, 0, 0); }
  std::uint32_t Ballot(bool value) {
    return static_cast<std::uint32_t>(Meet(State::kBallot, value ? 1 : 0, 0));
  }
  std::uint32_t Shuffle(std::uint32_t value, std::uint32_t lane) {
    return static_cast<std::uint32_t>(Meet(State::kShuffle, value, lane % 32));
  }
  std::uint32_t ScanAdd(std::uint32_t value) {
    return static_cast<std::uint32_t>(Meet(State::kScanAdd, value, 0));
  }
  std::uint32_t ScanMax(std::uint32_t value) {
    return static_cast<std::uint32_t>(Meet(State::kScanMax, value, 0));
  }
  std::uint32_t ReduceAdd(std::uint32_t value) {
    return static_cast<std::uint32_t>(Meet(State::kReduceAdd, value, 0));
  }
  std::uint32_t ReduceMax(std::uint32_t value) {
    return static_cast<std::uint32_t>(Meet(State::kReduceMax, value, 0));
  }
  std::uint64_t AddResidues(std::uint64_t residue) {
    return Meet(State::kAddResidues, residue, 0);
  }
  template <typename T>
  T AtomicAdd(T* to, T value) {
    const T was = *to;
    *to += value;
    return was;
  }
  void AtomicMin(std::uint64_t* to, std::uint64_t value) {
    *to = std::min(*to, value);
  }
  void AtomicOr(std::uint32_t* to, std::uint32_t value) { *to |= value; }
  Bytes16 Load16(const std::byte* from) {
    if (reinterpret_cast<std::uintptr_t>(from) % 16 != 0) {
      Die("a load of 16 bytes that are not aligned");
    }
    Bytes16 vector;
    std::memcpy(&vector, from, sizeof(vector));
    return vector;
  }
  template <typename Unit>
  Unit Load(const std::byte* from) {
    if (reinterpret_cast<std::uintptr_t>(from) % sizeof(Unit) != 0) {
      Die("a unit that is not aligned");
    }
    Unit unit;
    std::memcpy(&unit, from, sizeof(unit));
    return unit;
  }

 private:
  static constexpr std::size_t kStackBytes = 96 * 1024;
  enum class State {
    kReady,
    kSync,
    kSyncWarp,
    kBallot,
    kShuffle,
    kScanAdd,
    kScanMax,
    kReduceAdd,
    kReduceMax,
    kAddResidues,
    kDone
  };
  struct Fiber {
    std::unique_ptr<std::byte[]> stack;
    ucontext_t context;
    State state = State::kReady;
    std::uint64_t value = 0;  // given, then received
    std::uint32_t from = 0;   // kShuffle: the lane to read
  };

  [[noreturn]] static void Die(const char* what) {
    std::fprintf(stderr, "BlockEmulator: %s\n", what);
    std::abort();
  }
  static void Enter(unsigned low, unsigned high) {
    auto* self =
        reinterpret_cast<BlockEmulator*>(std::uintptr_t{high} << 32 | low);
    (*self->body_)(*self);
    self->fibers_[self->running_].state = State::kDone;
    swapcontext(&self->fibers_[self->running_].context, &self->scheduler_);
  }
  std::uint64_t Meet(State state, std::uint64_t value, std::uint32_t from) {
    Fiber& fiber = fibers_[running_];
    fiber.state = state;
    fiber.value = value;
    fiber.from = from;
    swapcontext(&fiber.context, &scheduler_);
    return fiber.value;
  }

  // Runs each lane of one warp, drawn at random, to its next meeting. False if
  // all threads are done.
  bool Advance() {
    const auto warps = static_cast<std::uint32_t>(fibers_.size() / 32);
    const auto skip = static_cast<std::uint32_t>(rng_() % warps);
    for (std::uint32_t i = 0; i < warps; ++i) {
      const std::uint32_t warp = (i + skip) % warps;
      if (fibers_[warp * 32].state != State::kReady) continue;
      // An odd factor and an offset: one of many orders of 32 lanes.
      const auto factor = static_cast<std::uint32_t>(rng_()) | 1;
      const auto offset = static_cast<std::uint32_t>(rng_());
      for (std::uint32_t l = 0; l < 32; ++l) {
        running_ = warp * 32 + (l * factor + offset) % 32;
        swapcontext(&scheduler_, &fibers_[running_].context);
      }
      MeetWarp(&fibers_[warp * 32]);
      return true;
    }
    // Nobody can go on but through a barrier.
    bool all_done = true;
    bool all_sync = true;
    for (const Fiber& fiber : fibers_) {
      all_done = all_done && fiber.state == State::kDone;
      all_sync = all_sync && fiber.state == State::kSync;
    }
    if (all_done) return false;
    if (!all_sync) Die("some threads wait at a barrier, others have returned");
    for (Fiber& fiber : fibers_) fiber.state = State::kReady;
    return true;
  }

  void MeetWarp(Fiber* lanes) {
    const State state = lanes[0].state;
    std::uint64_t values[32];
    std::uint64_t ballot = 0;
    std::uint64_t residues = 0;
    for (std::uint32_t l = 0; l < 32; ++l) {
      if (lanes[l].state != state) Die("lanes of a warp meet at two points");
      values[l] = lanes[l].value;
      ballot |= (values[l] & 1) << l;
      if (state == State::kAddResidues) residues = L61Add(residues, values[l]);
    }
    if (state == State::kDone || state == State::kSync) return;
    std::uint32_t sum = 0;
    std::uint32_t max = 0;
    for (std::uint32_t l = 0; l < 32; ++l) {
      Fiber& lane = lanes[l];
      const auto value = static_cast<std::uint32_t>(values[l]);
      sum += value;
      max = std::max(max, value);
      if (state == State::kBallot) lane.value = ballot;
      if (state == State::kShuffle) lane.value = values[lane.from];
      if (state == State::kScanAdd) lane.value = sum;
      if (state == State::kScanMax) lane.value = max;
      if (state == State::kAddResidues) lane.value = residues;
      lane.state = State::kReady;
    }
    if (state == State::kReduceAdd || state == State::kReduceMax) {
      for (std::uint32_t l = 0; l < 32; ++l) {
        lanes[l].value = state == State::kReduceAdd ? sum : max;
      }
    }
  }

  std::mt19937_64 rng_;
  std::vector<Fiber> fibers_;
  ucontext_t scheduler_;
  const std::function<void(BlockEmulator&)>* body_ = nullptr;
  std::uint32_t running_ = 0;
};

}  // namespace kedge::testing

#endif  // KEDGE_TESTS_ENGINE_CUDA_BLOCK_EMULATOR_H_
