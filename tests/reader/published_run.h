#ifndef KEDGE_TESTS_READER_PUBLISHED_RUN_H_
#define KEDGE_TESTS_READER_PUBLISHED_RUN_H_

// A store in a temporary directory with a trainer that publishes into it, and
// the trainer's bytes at every version.

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "kedge/engine/io/store.h"
#include "kedge/format/layout.h"
#include "kedge/reader/follower.h"
#include "kedge/tests/reader/engine_memory.h"
#include "kedge/tests/support/fault_file_system.h"
#include "kedge/tests/support/temp_directory.h"
#include "kedge/tests/support/test_model.h"
#include "kedge/writer/snapshot_writer.h"

namespace kedge {

// Of all tensors, ties once.
inline std::uint64_t ElementsOf(const TensorTable& table) {
  std::uint64_t elements = 0;
  for (const TensorSpec& spec : table.tensors()) {
    if (spec.tied_to == kNotTied) elements += spec.element_count();
  }
  return elements;
}

class PublishedRun {
 public:
  // Publishes v0, with an anchor.
  explicit PublishedRun(std::uint64_t seed = 1, std::uint64_t scale = 1)
      : random_(seed) {
    const TestModel model(seed, scale);
    weights_ = model.Bytes();
    for (TrainerTensor tensor : model.Tensors()) {
      tensor.strides_bytes.clear();  // weights_ is contiguous
      tensors_.push_back(std::move(tensor));
    }
    Create();
  }
  // Likewise, of a model with these tensors (names, dtypes, shapes).
  PublishedRun(std::vector<TrainerTensor> tensors, std::uint64_t seed)
      : random_(seed), tensors_(std::move(tensors)) {
    for (const TrainerTensor& tensor : tensors_) {
      std::uint64_t bytes = ElementBytes(tensor.dtype);
      for (const std::uint64_t extent : tensor.shape) bytes *= extent;
      std::vector<std::byte>& values = weights_[tensor.name];
      values.resize(bytes);
      for (std::byte& value : values) value = std::byte(random_());
    }
    Create();
  }

 private:
  void Create() {
    unsynced_.set_script(SkipSyncs);
    options_.store_path = path();
    options_.fs = &unsynced_;
    options_.io_threads = 2;
    options_.encode_threads = 1;
    options_.anchor_file_bytes = 64 << 10;  // several files
    options_.slice_units = 1 << 13;         // several records a tensor
    options_.segment_files = 3;
    auto writer = SnapshotWriter::Create(options_, {}, Tensors());
    EXPECT_TRUE(writer.ok()) << writer.status();
    writer_ = *std::move(writer);
    Remember();
  }

 public:
  // Trains and publishes `step`; an anchor too if asked for.
  void Publish(std::uint64_t step, bool anchor = false,
               double fraction = 0.02) {
    if (fraction > 0) Train(fraction);
    PublishHere(step, anchor);
  }
  // Publishes what weights() holds.
  void PublishHere(std::uint64_t step, bool anchor = false) {
    const auto published = writer_->Publish(step, {.anchor = anchor});
    ASSERT_TRUE(published.ok()) << published.status();
    ASSERT_TRUE(published->anchor_status.ok()) << published->anchor_status;
    Remember();
  }
  void PublishUpTo(std::uint64_t last, std::uint64_t anchor_every = 1000) {
    for (std::uint64_t s = writer_->held().step + 1; s <= last; ++s) {
      Publish(s, s % anchor_every == 0);
    }
  }
  // Goes on from `step` with other random numbers, as a trainer does that was
  // restarted from a checkpoint.
  void ResumeAt(std::uint64_t step, std::uint64_t seed) {
    writer_.reset();
    random_.seed(seed);
    for (const auto& [name, bytes] : history_.at(step)) {
      std::copy(bytes.begin(), bytes.end(), weights_.at(name).begin());
    }
    auto writer = SnapshotWriter::Open(options_, Tensors(), step);
    ASSERT_TRUE(writer.ok()) << writer.status();
    writer_ = *std::move(writer);
  }

  // Moves about `fraction` of the units of every tensor, the first and the last
  // always, most by little.
  void Train(double fraction) {
    for (const TrainerTensor& tensor : tensors_) {
      std::vector<std::byte>& bytes = weights_.at(tensor.name);
      if (bytes.empty() || !tensor.tied_to.empty()) continue;
      const std::uint64_t unit_bytes = UnitBytes(tensor.dtype);
      const std::uint64_t units = bytes.size() / unit_bytes;
      const auto changes =
          static_cast<std::uint64_t>(static_cast<double>(units) * fraction);
      for (std::uint64_t i = 0; i < changes + 2; ++i) {
        const std::uint64_t unit = i == 0   ? 0
                                   : i == 1 ? units - 1
                                            : random_() % units;
        std::uint64_t value = 0;
        std::memcpy(&value, bytes.data() + unit * unit_bytes, unit_bytes);
        const std::uint64_t kind = random_() % 100;
        value = kind < 80   ? value + (random_() % 2 == 0 ? 1u : ~0u)
                : kind < 95 ? value + random_() % 41 - 20
                            : random_();
        std::memcpy(bytes.data() + unit * unit_bytes, &value, unit_bytes);
      }
    }
  }

  // The trainer's weights, row-major. Of tied tensors only the owner's count.
  ModelBytes& weights() { return weights_; }
  std::vector<TrainerTensor> Tensors() const {
    std::vector<TrainerTensor> tensors = tensors_;
    for (TrainerTensor& tensor : tensors) {
      tensor.data =
          weights_.at(tensor.tied_to.empty() ? tensor.name : tensor.tied_to)
              .data();
    }
    return tensors;
  }
  void Remember() {
    ModelBytes& copy = history_[writer_->held().step];
    copy = weights_;
    for (const TrainerTensor& tensor : tensors_) {
      if (!tensor.tied_to.empty()) copy[tensor.name] = copy.at(tensor.tied_to);
    }
    ids_[writer_->held().step] = writer_->held();
  }

  std::string path() const { return directory_.Join("store"); }
  std::string StepPath(std::uint64_t step) const {
    return path() + "/" + StepDirectoryName(step);
  }
  std::string AnchorPath(std::uint64_t step) const {
    return StepPath(step) + "/anchor";
  }
  SnapshotWriter& writer() { return *writer_; }
  const TensorTable& table() const { return writer_->store_writer().table(); }
  const ModelBytes& at(std::uint64_t step) const { return history_.at(step); }
  const VersionId& id(std::uint64_t step) const { return ids_.at(step); }

  FollowerOptions Options(ReadMode mode = ReadMode::kRead) const {
    FollowerOptions options;
    options.store_path = path();
    options.read_mode = mode;
    options.io_threads = 2;
    options.apply_threads = 2;
    options.retry_deadline = std::chrono::milliseconds(0);
    options.device = DefaultTestDevice();
    return options;
  }
  std::unique_ptr<Follower> Open(const EngineMemory& memory,
                                 const FollowerOptions& options) const {
    auto follower = Follower::Open(options, memory.sets());
    EXPECT_TRUE(follower.ok()) << follower.status();
    return follower.ok() ? *std::move(follower) : nullptr;
  }

 private:
  // Nothing here outlives the process: fsync would only take time.
  static Fault SkipSyncs(const Operation& operation) {
    return operation.kind == FileOperation::kSync ||
                   operation.kind == FileOperation::kSyncDirectory
               ? Fault::Drop()
               : Fault::None();
  }

  TempDirectory directory_;
  FaultFileSystem unsynced_;
  WriterOptions options_;
  std::mt19937_64 random_;
  std::vector<TrainerTensor> tensors_;
  ModelBytes weights_;
  std::unique_ptr<SnapshotWriter> writer_;
  std::map<std::uint64_t, ModelBytes> history_;
  std::map<std::uint64_t, VersionId> ids_;
};

// The data files of a directory, by name.
inline std::vector<std::string> DataFilesOf(const std::string& directory) {
  std::vector<std::string> files;
  for (const auto& entry : std::filesystem::directory_iterator(directory)) {
    const std::string extension = entry.path().extension();
    if (extension == ".kds" || extension == ".kda") {
      files.push_back(entry.path());
    }
  }
  std::sort(files.begin(), files.end());
  return files;
}

// Changes one byte of a file in place.
inline void FlipByte(const std::string& path, std::uint64_t offset) {
  std::FILE* file = std::fopen(path.c_str(), "r+b");
  ASSERT_NE(file, nullptr) << path;
  ASSERT_EQ(std::fseek(file, static_cast<long>(offset), SEEK_SET), 0);
  const int byte = std::fgetc(file);
  ASSERT_NE(byte, EOF) << path;
  ASSERT_EQ(std::fseek(file, static_cast<long>(offset), SEEK_SET), 0);
  std::fputc(byte ^ 0x10, file);
  ASSERT_EQ(std::fclose(file), 0);
}

}  // namespace kedge

#endif  // KEDGE_TESTS_READER_PUBLISHED_RUN_H_
