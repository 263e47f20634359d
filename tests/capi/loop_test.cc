// Goal: everything that the C ABI offers works end to end, in host memory: a
// writer, several trainer ranks, a hook, a reader alone, on a device and in a
// tensor-parallel group, the callbacks, the errors that a program must tell
// apart. Method: after each version the engine's bytes are compared with the
// trainer's.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <mutex>
#include <random>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "kedge/capi/kedge.h"
#include "kedge/tests/capi/c_call.h"

extern "C" void kedge_test_add_in_c(std::uint64_t* sum,
                                    const std::uint64_t* values,
                                    std::size_t count);

namespace kedge {
namespace {

constexpr std::uint32_t kSeed = 20230817;

// Three tensors, odd sizes. The engine holds up and gate of one packed buffer.
constexpr std::uint64_t kRows = 37;
constexpr std::uint64_t kCols = 130;
constexpr std::uint64_t kNorm = 51;
const std::uint64_t kMatrixShape[2] = {kRows, kCols};
const std::uint64_t kNormShape[1] = {kNorm};

struct Trainer {
  std::vector<std::uint16_t> gate, up;
  std::vector<float> norm;
  std::mt19937 random{kSeed};

  Trainer() : gate(kRows * kCols), up(kRows * kCols), norm(kNorm) {
    for (auto* matrix : {&gate, &up}) {
      for (auto& bits : *matrix) {
        bits = static_cast<std::uint16_t>(0x3c00 + random() % 0x800);
      }
    }
    for (float& value : norm) value = 1.0f;
  }
  void Train() {
    for (auto* matrix : {&gate, &up}) {
      for (int n = 0; n < 60; ++n) {
        (*matrix)[random() % matrix->size()] ^=
            static_cast<std::uint16_t>(1 + random() % 7);
      }
    }
    for (float& value : norm) value += 0.0078125f;
  }
  std::vector<kedge_tensor> Tensors() const {
    std::vector<kedge_tensor> tensors(3, Sized<kedge_tensor>());
    const void* const data[] = {gate.data(), up.data(), norm.data()};
    const char* const names[] = {"gate", "up", "norm"};
    for (int i = 0; i < 3; ++i) {
      tensors[i].name = names[i];
      tensors[i].dtype = i == 2 ? KEDGE_F32 : KEDGE_BF16;
      tensors[i].dimensions = i == 2 ? 1 : 2;
      tensors[i].shape = i == 2 ? kNormShape : kMatrixShape;
      tensors[i].data = data[i];
    }
    return tensors;
  }
};

// Columns [first, first + cols) of gate and up, packed row by row, and norm.
struct Engine {
  std::uint64_t begin[2];
  std::uint64_t extent[2];
  std::int64_t strides[2];
  std::vector<std::uint16_t> gate_up;
  std::vector<float> norm = std::vector<float>(kNorm, -1.0f);
  bool with_norm = true;

  explicit Engine(std::uint64_t first = 0, std::uint64_t cols = kCols)
      : begin{0, first},
        extent{kRows, cols},
        strides{static_cast<std::int64_t>(4 * cols), 2},
        gate_up(2 * kRows * cols, 0x7fff) {}

  std::vector<kedge_target> Targets() {
    std::vector<kedge_target> targets(3, Sized<kedge_target>());
    const char* const names[] = {"gate", "up", "norm"};
    for (int i = 0; i < 3; ++i) {
      targets[i].name = names[i];
      targets[i].dtype = i == 2 ? KEDGE_F32 : KEDGE_BF16;
      targets[i].dimensions = i == 2 ? 1 : 2;
      targets[i].shape = i == 2 ? kNormShape : kMatrixShape;
      if (i == 2) {
        targets[i].data = norm.data();
        continue;
      }
      targets[i].begin = begin;
      targets[i].extent = extent;
      targets[i].strides_bytes = strides;
      targets[i].data = gate_up.data() + i * extent[1];
    }
    if (!with_norm) targets.pop_back();
    return targets;
  }
  void Set(const Trainer& trainer) {
    for (std::uint64_t r = 0; r < kRows; ++r) {
      for (std::uint64_t c = 0; c < extent[1]; ++c) {
        const std::uint64_t from = r * kCols + begin[1] + c;
        gate_up[2 * r * extent[1] + c] = trainer.gate[from];
        gate_up[(2 * r + 1) * extent[1] + c] = trainer.up[from];
      }
    }
    norm = trainer.norm;
  }
  bool Holds(const Trainer& trainer) const {
    Engine expected(begin[1], extent[1]);
    expected.Set(trainer);
    return gate_up == expected.gate_up &&
           (!with_norm || std::memcmp(norm.data(), expected.norm.data(),
                                      kNorm * sizeof(float)) == 0);
  }
};

Outcome CreateWriter(const std::string& store, const Trainer& trainer,
                     WriterHandle* writer,
                     const kedge_store_options* store_options = nullptr) {
  auto options = Sized<kedge_writer_options>();
  options.store_path = store.c_str();
  // Read during the call, and not kept.
  std::vector<kedge_tensor> tensors = trainer.Tensors();
  kedge_writer* made = nullptr;
  const Outcome outcome = Call([&](auto** e) {
    return kedge_writer_create(&options, store_options, tensors.data(),
                               tensors.size(), &made, e);
  });
  writer->reset(made);
  return outcome;
}

Outcome OpenWriter(const std::string& store, const Trainer& trainer,
                   const std::uint64_t* resume_step, WriterHandle* writer) {
  auto options = Sized<kedge_writer_options>();
  options.store_path = store.c_str();
  std::vector<kedge_tensor> tensors = trainer.Tensors();
  kedge_writer* made = nullptr;
  const Outcome outcome = Call([&](auto** e) {
    return kedge_writer_open(&options, tensors.data(), tensors.size(),
                             resume_step, &made, e);
  });
  writer->reset(made);
  return outcome;
}

Outcome OpenReader(const std::string& store, kedge_reader_options options,
                   Engine& engine, ReaderHandle* reader) {
  std::string path = store;
  options.store_path = path.c_str();
  std::vector<kedge_target> targets = engine.Targets();
  auto set = Sized<kedge_weight_set>();
  set.name = "engine";
  set.targets = targets.data();
  set.target_count = targets.size();
  kedge_reader* opened = nullptr;
  const Outcome outcome = Call([&](auto** e) {
    return kedge_reader_open(&options, &set, 1, &opened, e);
  });
  reader->reset(opened);
  return outcome;
}

Outcome Publish(const WriterHandle& writer, std::uint64_t step,
                kedge_publish_result* result = nullptr, bool anchor = false) {
  auto options = Sized<kedge_publish_options>();
  options.anchor = anchor ? 1 : 0;
  return Call([&](auto** e) {
    return kedge_writer_publish(writer.get(), step, &options, result, e);
  });
}
Outcome Update(const ReaderHandle& reader, kedge_update_result* result) {
  return Call(
      [&](auto** e) { return kedge_reader_update(reader.get(), result, e); });
}
Outcome Join(const ReaderHandle& reader, kedge_update_result* result) {
  return Call(
      [&](auto** e) { return kedge_reader_join(reader.get(), result, e); });
}
Outcome VerifyHeld(const ReaderHandle& reader, std::uint64_t step) {
  return Call([&](auto** e) {
    return kedge_reader_verify_held(reader.get(), step, e);
  });
}

bool SameVersion(const kedge_version_id& a, const kedge_version_id& b) {
  return a.step == b.step && std::memcmp(a.manifest_hash, b.manifest_hash,
                                         sizeof(a.manifest_hash)) == 0;
}

std::string ReadAll(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

class CapiLoopTest : public testing::Test {
 protected:
  ScratchDirectory directory_;
  const std::string store_ = directory_.Join("store");
  Trainer trainer_;
};

// ------------------------------------------------------------ writer, reader

// What the callbacks of a reader saw.
struct Seen {
  int pauses = 0;
  std::vector<kedge_version_id> commits;
  kedge_status pause_with = KEDGE_OK;
};
kedge_status SeePause(void* user) {
  auto* const seen = static_cast<Seen*>(user);
  ++seen->pauses;
  return seen->pause_with;
}
void SeeCommit(void* user, const kedge_version_id* version) {
  static_cast<Seen*>(user)->commits.push_back(*version);
}

TEST_F(CapiLoopTest, AnEngineHoldsWhatTheTrainerPublished) {
  WriterHandle writer;
  ASSERT_C_OK(CreateWriter(store_, trainer_, &writer));
  EXPECT_EQ(kedge_writer_snapshot_bytes(writer.get()),
            2 * 2 * kRows * kCols + 4 * kNorm);

  Engine engine;
  engine.Set(trainer_);
  Seen seen;
  auto options = Sized<kedge_reader_options>();
  options.lease_id = "c";
  options.pause = SeePause;
  options.commit = SeeCommit;
  options.user = &seen;
  ReaderHandle reader;
  ASSERT_C_OK(OpenReader(store_, options, engine, &reader));
  kedge_version_id held;
  EXPECT_C_FAILS(
      Call([&](auto** e) { return kedge_reader_held(reader.get(), &held, e); }),
      KEDGE_FAILED_PRECONDITION, "empty");
  ASSERT_C_OK(VerifyHeld(reader, 0));
  EXPECT_EQ(kedge_reader_get_state(reader.get()), KEDGE_READER_READY);

  auto updated = Sized<kedge_update_result>();
  ASSERT_C_OK(Update(reader, &updated));
  EXPECT_EQ(updated.changed, 0);
  for (std::uint64_t step = 1; step <= 4; ++step) {
    trainer_.Train();
    auto published = Sized<kedge_publish_result>();
    ASSERT_C_OK(Publish(writer, step, &published, step == 2));
    EXPECT_EQ(published.version.step, step);
    EXPECT_GE(published.nnz, kNorm);
    EXPECT_EQ(published.records, 3u);
    EXPECT_GT(published.bytes, published.manifest_bytes);
    EXPECT_EQ(published.anchor_bytes != 0, step == 2);
    EXPECT_EQ(published.anchor_status, KEDGE_OK);
    EXPECT_STREQ(published.anchor_message, "");
    EXPECT_EQ(published.epoch, 1u);
    EXPECT_EQ(published.warning_count, 0u);
    kedge_version_id last;
    ASSERT_C_OK(Call(
        [&](auto** e) { return kedge_writer_held(writer.get(), &last, e); }));
    EXPECT_TRUE(SameVersion(last, published.version));

    std::int32_t found = 0;
    kedge_version_id next = {};
    ASSERT_C_OK(Call([&](auto** e) {
      return kedge_reader_prefetch(reader.get(), &found, &next, e);
    }));
    EXPECT_EQ(found, 1);
    EXPECT_TRUE(SameVersion(next, published.version));
    EXPECT_FALSE(engine.Holds(trainer_));
    ASSERT_C_OK(Update(reader, &updated));
    EXPECT_EQ(updated.changed, 1);
    EXPECT_EQ(updated.joined, 0);
    EXPECT_EQ(updated.deltas, 1u);
    EXPECT_EQ(updated.nnz, published.nnz);
    EXPECT_EQ(updated.tensors_verified, 3u);
    EXPECT_EQ(updated.bytes_verified, 2 * 2 * kRows * kCols + 4 * kNorm);
    EXPECT_EQ(updated.elements_verified, 2 * kRows * kCols + kNorm);
    EXPECT_TRUE(engine.Holds(trainer_)) << "step " << step;
    ASSERT_C_OK(Call(
        [&](auto** e) { return kedge_reader_held(reader.get(), &held, e); }));
    EXPECT_TRUE(SameVersion(held, published.version));
    ASSERT_EQ(seen.commits.size(), step);
    EXPECT_TRUE(SameVersion(seen.commits.back(), published.version));
    EXPECT_EQ(seen.pauses, static_cast<int>(step));
    ASSERT_C_OK(Call([&](auto** e) {
      return kedge_reader_prefetch(reader.get(), &found, nullptr, e);
    }));
    EXPECT_EQ(found, 0);
  }

  // Late, and back.
  Engine late;
  ReaderHandle late_reader;
  ASSERT_C_OK(
      OpenReader(store_, Sized<kedge_reader_options>(), late, &late_reader));
  EXPECT_C_FAILS(Update(late_reader, nullptr), KEDGE_FAILED_PRECONDITION, "");
  ASSERT_C_OK(Join(late_reader, &updated));
  EXPECT_EQ(updated.joined, 1);
  EXPECT_EQ(updated.version.step, 4u);
  EXPECT_TRUE(late.Holds(trainer_));
  ASSERT_C_OK(Call([&](auto** e) {
    return kedge_reader_join_step(late_reader.get(), 2, &updated, e);
  }));
  EXPECT_EQ(updated.version.step, 2u);
  EXPECT_FALSE(late.Holds(trainer_));
  EXPECT_C_FAILS(Call([&](auto** e) {
                   return kedge_reader_join_step(late_reader.get(), 9, nullptr,
                                                 e);
                 }),
                 KEDGE_NOT_FOUND, "9");
}

TEST_F(CapiLoopTest, FailuresAreToldApart) {
  WriterHandle writer;
  ASSERT_C_OK(CreateWriter(store_, trainer_, &writer));
  WriterHandle other;
  EXPECT_C_FAILS(CreateWriter(store_, trainer_, &other), KEDGE_ALREADY_EXISTS,
                 store_);
  EXPECT_EQ(other, nullptr);
  EXPECT_C_FAILS(
      OpenWriter(directory_.Join("nowhere"), trainer_, nullptr, &other),
      KEDGE_NOT_FOUND, "nowhere");
  Engine engine;
  ReaderHandle reader;
  EXPECT_C_FAILS(OpenReader(directory_.Join("nowhere"),
                            Sized<kedge_reader_options>(), engine, &reader),
                 KEDGE_NOT_FOUND, "nowhere");
  EXPECT_EQ(reader, nullptr);

  trainer_.Train();
  ASSERT_C_OK(Publish(writer, 3));
  auto published = Sized<kedge_publish_result>();
  published.nnz = 77;
  EXPECT_C_FAILS(Publish(writer, 3, &published), KEDGE_INVALID_ARGUMENT, "3");
  EXPECT_EQ(published.nnz, 77u);  // left as it was

  // Another trainer's weights; then a trainer restored from version 3.
  const std::uint64_t missing = 2;
  EXPECT_C_FAILS(OpenWriter(store_, trainer_, &missing, &other),
                 KEDGE_NOT_FOUND, "2");
  Trainer wrong;
  EXPECT_C_FAILS(OpenWriter(store_, wrong, nullptr, &other),
                 KEDGE_FAILED_PRECONDITION, "gate");
  const std::uint64_t resumed = 3;
  ASSERT_C_OK(OpenWriter(store_, trainer_, &resumed, &other));
  trainer_.Train();
  EXPECT_C_FAILS(Publish(writer, 4), KEDGE_FAILED_PRECONDITION, "epoch 2");
  published = Sized<kedge_publish_result>();
  ASSERT_C_OK(Publish(other, 4, &published));
  EXPECT_EQ(published.epoch, 2u);

  // What an engine holds that is not what it says.
  ASSERT_C_OK(
      OpenReader(store_, Sized<kedge_reader_options>(), engine, &reader));
  EXPECT_C_FAILS(VerifyHeld(reader, 4), KEDGE_DATA_LOSS, "norm");
  EXPECT_EQ(kedge_reader_get_state(reader.get()), KEDGE_READER_EMPTY);
  ASSERT_C_OK(Join(reader, nullptr));
  EXPECT_TRUE(engine.Holds(trainer_));

  const auto start = std::chrono::steady_clock::now();
  EXPECT_C_FAILS(Call([&](auto** e) {
                   return kedge_reader_wait_for_update(reader.get(), 60,
                                                       nullptr, e);
                 }),
                 KEDGE_DEADLINE_EXCEEDED, "");
  EXPECT_GE(std::chrono::steady_clock::now() - start,
            std::chrono::milliseconds(60));

  // A delta that a disk has changed: refused before anything is touched.
  trainer_.Train();
  ASSERT_C_OK(Publish(other, 5));
  const std::string segment = store_ + "/step_00000005/delta-r000-000.kds";
  std::filesystem::permissions(segment, std::filesystem::perms::owner_all);
  {
    std::fstream file(segment, std::ios::in | std::ios::out | std::ios::binary);
    ASSERT_TRUE(file.good());
    file.seekp(100);
    file.put('\x5a');
  }
  Seen seen;
  EXPECT_C_FAILS(Update(reader, nullptr), KEDGE_DATA_LOSS, "step_00000005");
  EXPECT_EQ(kedge_reader_get_state(reader.get()), KEDGE_READER_READY);

  // Targets of tensors that the store does not have, and none for one it has.
  Engine partial;
  partial.with_norm = false;
  ReaderHandle partial_reader;
  EXPECT_C_FAILS(OpenReader(store_, Sized<kedge_reader_options>(), partial,
                            &partial_reader),
                 KEDGE_FAILED_PRECONDITION, "norm");
}

TEST_F(CapiLoopTest, PauseCancelsAnUpdate) {
  WriterHandle writer;
  ASSERT_C_OK(CreateWriter(store_, trainer_, &writer));
  Engine engine;
  engine.Set(trainer_);
  Seen seen;
  auto options = Sized<kedge_reader_options>();
  options.pause = SeePause;
  options.commit = SeeCommit;
  options.user = &seen;
  ReaderHandle reader;
  ASSERT_C_OK(OpenReader(store_, options, engine, &reader));
  ASSERT_C_OK(VerifyHeld(reader, 0));
  const Trainer before = trainer_;
  trainer_.Train();
  ASSERT_C_OK(Publish(writer, 1));

  seen.pause_with = KEDGE_UNAVAILABLE;
  EXPECT_C_FAILS(Update(reader, nullptr), KEDGE_UNAVAILABLE,
                 "the pause callback returned KEDGE_UNAVAILABLE");
  seen.pause_with = 1234;
  EXPECT_C_FAILS(Update(reader, nullptr), KEDGE_UNKNOWN,
                 "1234, which is no kedge_status");
  EXPECT_TRUE(engine.Holds(before));
  EXPECT_EQ(kedge_reader_get_state(reader.get()), KEDGE_READER_READY);
  EXPECT_TRUE(seen.commits.empty());
  seen.pause_with = KEDGE_OK;
  ASSERT_C_OK(Update(reader, nullptr));
  EXPECT_TRUE(engine.Holds(trainer_));
  EXPECT_EQ(seen.pauses, 3);
}

TEST_F(CapiLoopTest, UnverifiedTensorsAreListed) {
  WriterHandle writer;
  ASSERT_C_OK(CreateWriter(store_, trainer_, &writer));
  Engine engine(0, 65);  // half of the columns
  auto options = Sized<kedge_reader_options>();
  options.allow_partial = 1;
  ReaderHandle reader;
  ASSERT_C_OK(OpenReader(store_, options, engine, &reader));
  const char* const* names = nullptr;
  std::size_t count = 0;
  ASSERT_C_OK(Call([&](auto** e) {
    return kedge_reader_unverified(reader.get(), &names, &count, e);
  }));
  ASSERT_EQ(count, 2u);
  EXPECT_THAT((std::vector<std::string>{names[0], names[1]}),
              testing::UnorderedElementsAre("gate", "up"));
  ASSERT_C_OK(Join(reader, nullptr));
  EXPECT_EQ(kedge_reader_get_state(reader.get()), KEDGE_READER_EMPTY);
  EXPECT_TRUE(engine.Holds(trainer_));
}

TEST_F(CapiLoopTest, AStoreBeginsAsItIsTold) {
  std::uint8_t run_id[16];
  for (int i = 0; i < 16; ++i) run_id[i] = static_cast<std::uint8_t>(0xa0 + i);
  const std::uint64_t seed = 0x1234567890abcdef;
  const kedge_metadata metadata[] = {{"first-key", "first-value"}};
  auto options = Sized<kedge_store_options>();
  options.run_id = run_id;
  options.l61_seed = &seed;
  options.created_unix_seconds = 1'700'000'000;
  options.metadata = metadata;
  options.metadata_count = 1;
  options.external_v0 = 1;
  WriterHandle writer;
  ASSERT_C_OK(CreateWriter(store_, trainer_, &writer, &options));
  const std::string store = ReadAll(store_ + "/STORE");
  EXPECT_NE(store.find(std::string(reinterpret_cast<char*>(run_id), 16)),
            std::string::npos);
  EXPECT_NE(store.find(std::string(reinterpret_cast<const char*>(&seed), 8)),
            std::string::npos);
  EXPECT_FALSE(std::filesystem::exists(store_ + "/step_00000000/anchor"));
  EXPECT_NE(ReadAll(store_ + "/step_00000000/MANIFEST").find("first-value"),
            std::string::npos);

  // Metadata go on unless they are replaced, also by nothing.
  auto publish = Sized<kedge_publish_options>();
  const kedge_metadata second[] = {{"second-key", "second-value"}};
  publish.metadata = second;
  publish.metadata_count = 1;
  const auto manifest_of = [&](std::uint64_t step) {
    trainer_.Train();
    EXPECT_C_OK(Call([&](auto** e) {
      return kedge_writer_publish(writer.get(), step, &publish, nullptr, e);
    }));
    return ReadAll(store_ + "/step_0000000" + std::to_string(step) +
                   "/MANIFEST");
  };
  EXPECT_EQ(manifest_of(1).find("second-value"), std::string::npos);
  publish.replace_metadata = 1;
  EXPECT_NE(manifest_of(2).find("second-value"), std::string::npos);

  // Other tensors: a version of its own table.
  Trainer larger;
  larger.norm.assign(kNorm + 1, 2.0f);
  std::vector<kedge_tensor> tensors = larger.Tensors();
  const std::uint64_t shape[1] = {kNorm + 1};
  tensors[2].shape = shape;
  auto published = Sized<kedge_publish_result>();
  ASSERT_C_OK(Call([&](auto** e) {
    return kedge_writer_replace_tensors(writer.get(), 3, tensors.data(),
                                        tensors.size(), metadata, 1, &published,
                                        e);
  }));
  EXPECT_EQ(published.version.step, 3u);
  EXPECT_GT(published.anchor_bytes, 0u);
  EXPECT_NE(ReadAll(store_ + "/step_00000003/MANIFEST").find("first-value"),
            std::string::npos);
}

// -------------------------------------------------------------------- groups

// An all-reduce of threads behind the C callback.
class CReducer {
 public:
  explicit CReducer(std::uint32_t size) : size_(size) {}

  // `user` of each rank.
  static kedge_status Reduce(void* user, std::uint64_t* values,
                             std::size_t count) {
    return static_cast<CReducer*>(user)->ReduceOne(values, count);
  }
  void FailNext() {
    const std::lock_guard lock(mutex_);
    fail_ = true;
  }

 private:
  kedge_status ReduceOne(std::uint64_t* values, std::size_t count) {
    std::unique_lock lock(mutex_);
    const std::uint64_t round = round_;
    if (here_ == 0) sum_.assign(count, 0);
    if (sum_.size() != count) wrong_ = true;
    kedge_test_add_in_c(sum_.data(), values, std::min(count, sum_.size()));
    if (++here_ == size_) {
      outcome_ = wrong_ || fail_ ? KEDGE_UNAVAILABLE : KEDGE_OK;
      result_ = sum_;
      here_ = 0;
      fail_ = false;
      ++round_;
      changed_.notify_all();
    } else if (!changed_.wait_for(lock, std::chrono::seconds(30),
                                  [&] { return round_ != round; })) {
      return KEDGE_UNAVAILABLE;
    }
    // Nobody begins another round before all have left this one: each rank
    // calls again only after it has copied.
    if (outcome_ == KEDGE_OK) {
      std::copy(result_.begin(), result_.end(), values);
    }
    return outcome_;
  }

  const std::uint32_t size_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::uint64_t round_ = 0;
  std::uint32_t here_ = 0;
  bool wrong_ = false;
  bool fail_ = false;
  kedge_status outcome_ = KEDGE_OK;
  std::vector<std::uint64_t> sum_;
  std::vector<std::uint64_t> result_;
};

TEST_F(CapiLoopTest, TwoReadersFollowAsAGroup) {
  WriterHandle writer;
  ASSERT_C_OK(CreateWriter(store_, trainer_, &writer));
  constexpr std::uint32_t kRanks = 2;
  CReducer reducer(kRanks);
  Engine engines[kRanks] = {Engine(0, 50), Engine(50, kCols - 50)};
  ReaderHandle readers[kRanks];
  Seen seen[kRanks];
  // Runs `call` on a thread a rank.
  const auto on_all = [&](const std::function<void(std::uint32_t)>& call) {
    std::vector<std::thread> threads;
    for (std::uint32_t rank = 0; rank < kRanks; ++rank) {
      threads.emplace_back(call, rank);
    }
    for (std::thread& thread : threads) thread.join();
  };
  on_all([&](std::uint32_t rank) {
    auto options = Sized<kedge_reader_options>();
    options.group_rank = rank;
    options.group_size = kRanks;
    options.group_name = "tp";
    options.reduce = CReducer::Reduce;
    options.reduce_user = &reducer;
    options.pause = SeePause;
    options.commit = SeeCommit;
    options.user = &seen[rank];
    EXPECT_C_OK(OpenReader(store_, options, engines[rank], &readers[rank]));
  });
  ASSERT_NE(readers[0], nullptr);
  ASSERT_NE(readers[1], nullptr);
  on_all(
      [&](std::uint32_t rank) { EXPECT_C_OK(Join(readers[rank], nullptr)); });
  for (std::uint64_t step = 1; step <= 3; ++step) {
    trainer_.Train();
    auto published = Sized<kedge_publish_result>();
    ASSERT_C_OK(Publish(writer, step, &published));
    on_all([&](std::uint32_t rank) {
      auto updated = Sized<kedge_update_result>();
      EXPECT_C_OK(Call([&](auto** e) {
        return kedge_reader_wait_for_update(readers[rank].get(), 20'000,
                                            &updated, e);
      }));
      EXPECT_TRUE(SameVersion(updated.version, published.version));
      EXPECT_TRUE(engines[rank].Holds(trainer_)) << "rank " << rank;
      EXPECT_EQ(kedge_reader_get_state(readers[rank].get()),
                KEDGE_READER_READY);
    });
  }
  EXPECT_EQ(seen[0].commits.size(), 4u);
  EXPECT_EQ(seen[1].commits.size(), 4u);

  // A reducer that fails on all ranks, while they vote: nothing is changed.
  const Trainer before = trainer_;
  trainer_.Train();
  ASSERT_C_OK(Publish(writer, 4));
  reducer.FailNext();
  on_all([&](std::uint32_t rank) {
    EXPECT_C_FAILS(Update(readers[rank], nullptr), KEDGE_UNAVAILABLE,
                   "the reduce callback returned KEDGE_UNAVAILABLE");
    EXPECT_TRUE(engines[rank].Holds(before));
  });
  on_all([&](std::uint32_t rank) {
    EXPECT_C_OK(Update(readers[rank], nullptr));
    EXPECT_TRUE(engines[rank].Holds(trainer_));
  });
}

TEST_F(CapiLoopTest, TwoTrainerRanksPublishTogether) {
  constexpr std::uint32_t kRanks = 2;
  // The matrices split within a row; norm belongs to rank 1.
  constexpr std::uint64_t kCut = 1234;
  const kedge_range shards[kRanks] = {{0, kCut}, {kCut, kRows * kCols}};
  const auto tensors_of = [&](std::uint32_t rank) {
    std::vector<kedge_tensor> tensors = trainer_.Tensors();
    for (int i = 0; i < 2; ++i) {
      tensors[i].shard = &shards[rank];
      const std::uint16_t* const data =
          i == 0 ? trainer_.gate.data() : trainer_.up.data();
      tensors[i].data = data + shards[rank].begin;
    }
    if (rank == 0) tensors.pop_back();
    return tensors;
  };
  WriterHandle writers[kRanks];
  std::uint8_t run_id[16] = {1, 2, 3};
  const auto on_all = [&](const std::function<void(std::uint32_t)>& call) {
    std::vector<std::thread> threads;
    for (std::uint32_t rank = 0; rank < kRanks; ++rank) {
      threads.emplace_back(call, rank);
    }
    for (std::thread& thread : threads) thread.join();
  };
  on_all([&](std::uint32_t rank) {
    auto options = Sized<kedge_coordinator_options>();
    options.store_path = store_.c_str();
    options.rank = rank;
    options.world_size = kRanks;
    options.run_id = run_id;
    options.deadline_ms = 30'000;
    kedge_coordinator* coordinator = nullptr;
    const Outcome opened = Call([&](auto** e) {
      return kedge_coordinator_open_files(&options, &coordinator, e);
    });
    EXPECT_TRUE(opened.ok()) << opened;
    auto writer_options = Sized<kedge_writer_options>();
    writer_options.store_path = store_.c_str();
    writer_options.coordinator = coordinator;
    auto store_options = Sized<kedge_store_options>();
    store_options.run_id = run_id;
    const std::vector<kedge_tensor> tensors = tensors_of(rank);
    kedge_writer* writer = nullptr;
    EXPECT_C_OK(Call([&](auto** e) {
      return kedge_writer_create(&writer_options, &store_options,
                                 tensors.data(), tensors.size(), &writer, e);
    }));
    writers[rank].reset(writer);
    // The writer keeps what it needs of it.
    kedge_coordinator_free(coordinator);
  });
  ASSERT_NE(writers[0], nullptr);
  ASSERT_NE(writers[1], nullptr);

  Engine engine;
  ReaderHandle reader;
  ASSERT_C_OK(
      OpenReader(store_, Sized<kedge_reader_options>(), engine, &reader));
  ASSERT_C_OK(Join(reader, nullptr));
  EXPECT_TRUE(engine.Holds(trainer_));
  for (std::uint64_t step = 1; step <= 3; ++step) {
    trainer_.Train();
    kedge_version_id versions[kRanks];
    on_all([&](std::uint32_t rank) {
      auto published = Sized<kedge_publish_result>();
      EXPECT_C_OK(Publish(writers[rank], step, &published, step == 2));
      versions[rank] = published.version;
    });
    EXPECT_TRUE(SameVersion(versions[0], versions[1]));
    auto updated = Sized<kedge_update_result>();
    ASSERT_C_OK(Update(reader, &updated));
    EXPECT_TRUE(SameVersion(updated.version, versions[0]));
    EXPECT_TRUE(engine.Holds(trainer_)) << "step " << step;
  }
}

}  // namespace
}  // namespace kedge
