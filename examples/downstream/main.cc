// The smallest use of kedge: a "trainer" publishes two steps, an "engine" that
// holds the same boot weights follows them. Prints the version that both hold.

#include <cstdint>
#include <cstdio>
#include <vector>

#include "kedge/reader/follower.h"
#include "kedge/writer/snapshot_writer.h"

namespace {

int Fail(const absl::Status& status) {
  std::fprintf(stderr, "%s\n", std::string(status.message()).c_str());
  return 1;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) {
    std::fprintf(stderr,
                 "usage: downstream STORE  (a path that is not there)\n");
    return 2;
  }
  // The trainer's weights, bf16 bits, and the engine's own copy of v0.
  std::vector<std::uint16_t> trainer(1024 * 1024, 0x3f80);
  std::vector<std::uint16_t> engine = trainer;

  kedge::TrainerTensor tensor;
  tensor.name = "weight";
  tensor.shape = {1024, 1024};
  tensor.data = trainer.data();
  kedge::WriterOptions writer_options;
  writer_options.store_path = argv[1];
  auto writer = kedge::SnapshotWriter::Create(writer_options, {}, {tensor});
  if (!writer.ok()) return Fail(writer.status());

  kedge::WeightSet weights;
  kedge::TensorTarget target;
  target.name = "weight";
  target.shape = {1024, 1024};
  target.data = engine.data();
  if (auto added = weights.Add(target); !added.ok()) return Fail(added);
  kedge::FollowerOptions follower_options;
  follower_options.store_path = argv[1];
  auto follower = kedge::Follower::Open(follower_options, {&weights});
  if (!follower.ok()) return Fail(follower.status());
  if (auto held = (*follower)->VerifyHeld(0); !held.ok()) return Fail(held);

  for (std::uint64_t step = 1; step <= 2; ++step) {
    for (std::size_t i = step; i < trainer.size(); i += 97) ++trainer[i];
    auto published = (*writer)->Publish(step);
    if (!published.ok()) return Fail(published.status());
    auto update = (*follower)->Update();
    if (!update.ok()) return Fail(update.status());
    std::printf("v%llu: %llu changes in %llu bytes, equal: %s\n",
                static_cast<unsigned long long>(update->version.step),
                static_cast<unsigned long long>(published->nnz),
                static_cast<unsigned long long>(published->bytes),
                engine == trainer ? "yes" : "NO");
    if (engine != trainer) return 1;
  }
  return 0;
}
