#ifndef KEDGE_TESTS_WRITER_RANK_WORLD_H_
#define KEDGE_TESTS_WRITER_RANK_WORLD_H_

// Several ranks as threads of a test, and models cut into shards.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "kedge/format/dtype.h"
#include "kedge/writer/tensor_source.h"

namespace kedge {

// Runs `body(rank)` on a thread a rank and returns what each returned.
template <class Result>
std::vector<Result> OnRanks(std::uint32_t world_size,
                            const std::function<Result(std::uint32_t)>& body) {
  std::vector<std::optional<Result>> results(world_size);
  std::vector<std::thread> threads;
  for (std::uint32_t rank = 0; rank < world_size; ++rank) {
    threads.emplace_back([&, rank] { results[rank].emplace(body(rank)); });
  }
  for (std::thread& thread : threads) thread.join();
  std::vector<Result> all;
  for (auto& result : results) all.push_back(*std::move(result));
  return all;
}

// Cuts whole tensors into shards for `world_size` ranks: anywhere (views: at
// rows), some ranks with several, some with nothing, some tensors on one rank
// alone. The shards point into the tensors' own memory.
inline std::vector<std::vector<TrainerTensor>> CutIntoShards(
    const std::vector<TrainerTensor>& tensors, std::uint32_t world_size,
    std::mt19937_64& random) {
  std::vector<std::vector<TrainerTensor>> ranks(world_size);
  const auto below = [&](std::uint64_t n) { return random() % n; };
  for (const TrainerTensor& tensor : tensors) {
    std::uint64_t elements = 1;
    for (const std::uint64_t extent : tensor.shape) elements *= extent;
    if (!tensor.tied_to.empty() || elements == 0) {
      // On one rank, or on all.
      const bool everywhere = below(2) == 0;
      const std::uint64_t one = below(world_size);
      for (std::uint32_t rank = 0; rank < world_size; ++rank) {
        if (everywhere || rank == one) ranks[rank].push_back(tensor);
      }
      continue;
    }
    const std::uint64_t row =
        tensor.strides_bytes.empty() ? 1 : elements / tensor.shape[0];
    const std::uint64_t rows = elements / row;
    // Whole on one rank, or up to three parts a rank.
    const std::uint64_t parts = below(4) == 0 ? 1 : 1 + below(3 * world_size);
    std::vector<std::uint64_t> cuts = {0, rows};
    for (std::uint64_t i = 1; i < parts; ++i) cuts.push_back(below(rows + 1));
    std::sort(cuts.begin(), cuts.end());
    for (std::size_t i = 0; i + 1 < cuts.size(); ++i) {
      TrainerTensor shard = tensor;
      shard.shard = ElementRange{cuts[i] * row, cuts[i + 1] * row};
      const std::int64_t step =
          tensor.strides_bytes.empty()
              ? static_cast<std::int64_t>(ElementBytes(tensor.dtype))
              : tensor.strides_bytes[0];
      shard.data = static_cast<const std::byte*>(tensor.data) +
                   static_cast<std::int64_t>(cuts[i]) * step;
      if (parts == 1 && below(2) == 0) shard.shard.reset();
      ranks[below(world_size)].push_back(std::move(shard));
    }
  }
  for (auto& rank : ranks) std::shuffle(rank.begin(), rank.end(), random);
  return ranks;
}

}  // namespace kedge

#endif  // KEDGE_TESTS_WRITER_RANK_WORLD_H_
