// Goal: nothing that a C program hands in makes the library crash, and each
// wrong argument is KEDGE_INVALID_ARGUMENT with a message that names it.
// Method: every function with null handles, every struct with sizes that no
// version had, every enum with numbers beyond its ends; the functions that the
// library exports are compared with those that the header declares.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <functional>
#include <limits>
#include <regex>
#include <set>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "kedge/capi/kedge.h"
#include "kedge/tests/capi/c_call.h"

extern "C" {
extern const std::size_t kedge_test_sizes_in_c[];
int kedge_test_pauses_in_c(void);
}

namespace kedge {
namespace {

// ------------------------------------------------------------- the library

TEST(CapiLibraryTest, SaysWhichVersionItIs) {
  EXPECT_EQ(kedge_abi_version(), static_cast<std::uint32_t>(KEDGE_ABI_VERSION));
  EXPECT_STREQ(kedge_version(), KEDGE_TEST_VERSION);
}

std::set<std::string> DeclaredFunctions() {
  std::ifstream file(KEDGE_SOURCE_DIR "/capi/kedge.h");
  std::ostringstream text;
  text << file.rdbuf();
  const std::string header = text.str();
  static const std::regex declaration(R"re(KEDGE_API [^;(]*?(kedge_\w+)\()re");
  std::set<std::string> names;
  for (std::sregex_iterator it(header.begin(), header.end(), declaration), end;
       it != end; ++it) {
    names.insert((*it)[1].str());
  }
  return names;
}

TEST(CapiLibraryTest, ExportsWhatTheHeaderDeclaresAndNothingElse) {
  const std::set<std::string> declared = DeclaredFunctions();
  EXPECT_GT(declared.size(), 40u);
  EXPECT_EQ(declared.count("kedge_reader_update"), 1u);
  std::FILE* const nm =
      popen("nm -D --defined-only " KEDGE_TEST_CAPI_LIBRARY, "r");
  ASSERT_NE(nm, nullptr);
  std::set<std::string> exported;
  char line[4096];
  while (std::fgets(line, sizeof(line), nm) != nullptr) {
    std::istringstream words(line);
    std::string address, type, name;
    words >> address >> type >> name;
    // The name of the symbols' version itself, which is absolute.
    if (type == "A") continue;
    exported.insert(name.substr(0, name.find('@')));
  }
  ASSERT_EQ(pclose(nm), 0);
  EXPECT_EQ(exported, declared);
}

TEST(CapiLibraryTest, StructsHaveTheSameSizesInC) {
  const std::vector<std::size_t> in_cc = {sizeof(kedge_version_id),
                                          sizeof(kedge_range),
                                          sizeof(kedge_metadata),
                                          sizeof(kedge_named_bytes),
                                          sizeof(kedge_coordinator_options),
                                          sizeof(kedge_tensor),
                                          sizeof(kedge_writer_options),
                                          sizeof(kedge_store_options),
                                          sizeof(kedge_publish_options),
                                          sizeof(kedge_publish_result),
                                          sizeof(kedge_parameter),
                                          sizeof(kedge_quantised_tensor),
                                          sizeof(kedge_hook_options),
                                          sizeof(kedge_hook_result),
                                          sizeof(kedge_hook_memory),
                                          sizeof(kedge_target),
                                          sizeof(kedge_weight_set),
                                          sizeof(kedge_reader_options),
                                          sizeof(kedge_update_result)};
  std::vector<std::size_t> in_c;
  for (const std::size_t* size = kedge_test_sizes_in_c; *size != 0; ++size) {
    in_c.push_back(*size);
  }
  EXPECT_EQ(in_c, in_cc);
  EXPECT_EQ(kedge_test_pauses_in_c(), 1);
}

TEST(CapiLibraryTest, StatusNumbersAreNamed) {
  EXPECT_STREQ(kedge_status_name(KEDGE_OK), "KEDGE_OK");
  EXPECT_STREQ(kedge_status_name(KEDGE_INVALID_ARGUMENT),
               "KEDGE_INVALID_ARGUMENT");
  EXPECT_STREQ(kedge_status_name(KEDGE_DATA_LOSS), "KEDGE_DATA_LOSS");
  EXPECT_STREQ(kedge_status_name(16), "?");
  EXPECT_STREQ(kedge_status_name(-1), "?");
  std::set<std::string> names;
  for (kedge_status s = 0; s <= KEDGE_DATA_LOSS; ++s) {
    names.insert(kedge_status_name(s));
  }
  EXPECT_EQ(names.size(), 16u);
  EXPECT_EQ(names.count("?"), 0u);
}

// ------------------------------------------------------------- null handles

TEST(CapiArgumentsTest, NullHandlesAreInvalidArguments) {
  kedge_version_id version;
  std::int32_t number = 7;
  std::uint64_t ticket = 7;
  void* stream = nullptr;
  const char* const* names = nullptr;
  std::size_t count = 7;
  auto memory = Sized<kedge_hook_memory>();
  const std::uint16_t source[4] = {};

  using Function = std::function<kedge_status(kedge_error**)>;
  const std::vector<std::pair<const char*, Function>> calls = {
      {"device", [&](auto** e) { return kedge_device_open_cpu(nullptr, e); }},
      {"device",
       [&](auto** e) { return kedge_device_open_cuda(0, nullptr, e); }},
      {"device",
       [&](auto** e) {
         return kedge_device_create_stream(nullptr, &stream, e);
       }},
      {"device",
       [&](auto** e) {
         return kedge_device_wait_for_stream(nullptr, stream, e);
       }},
      {"device",
       [&](auto** e) {
         return kedge_device_destroy_stream(nullptr, stream, e);
       }},
      {"coordinator",
       [&](auto** e) {
         const auto options = Sized<kedge_coordinator_options>();
         return kedge_coordinator_open_files(&options, nullptr, e);
       }},
      {"writer",
       [&](auto** e) {
         return kedge_writer_create(nullptr, nullptr, nullptr, 0, nullptr, e);
       }},
      {"writer",
       [&](auto** e) {
         return kedge_writer_open(nullptr, nullptr, 0, nullptr, nullptr, e);
       }},
      {"writer",
       [&](auto** e) {
         return kedge_writer_publish(nullptr, 1, nullptr, nullptr, e);
       }},
      {"writer",
       [&](auto** e) {
         return kedge_writer_replace_tensors(nullptr, 1, nullptr, 0, nullptr, 0,
                                             nullptr, e);
       }},
      {"writer",
       [&](auto** e) { return kedge_writer_held(nullptr, &version, e); }},
      {"hook",
       [&](auto** e) {
         return kedge_hook_create(nullptr, nullptr, nullptr, nullptr, e);
       }},
      {"hook",
       [&](auto** e) {
         return kedge_hook_open(nullptr, nullptr, nullptr, nullptr, e);
       }},
      {"hook",
       [&](auto** e) { return kedge_hook_begin_step(nullptr, 1, 0, e); }},
      {"hook",
       [&](auto** e) {
         return kedge_hook_on_update(nullptr, 0, 0, 8, source, nullptr, &ticket,
                                     e);
       }},
      {"ticket",
       [&](auto** e) {
         return kedge_hook_on_update(nullptr, 0, 0, 8, source, nullptr, nullptr,
                                     e);
       }},
      {"hook",
       [&](auto** e) { return kedge_hook_has_passed(nullptr, 1, &number, e); }},
      {"passed",
       [&](auto** e) { return kedge_hook_has_passed(nullptr, 1, nullptr, e); }},
      {"hook", [&](auto** e) { return kedge_hook_wait_for(nullptr, 1, e); }},
      {"hook", [&](auto** e) { return kedge_hook_end_step(nullptr, e); }},
      {"hook",
       [&](auto** e) {
         return kedge_hook_publish(nullptr, nullptr, nullptr, nullptr, e);
       }},
      {"hook", [&](auto** e) { return kedge_hook_held(nullptr, &version, e); }},
      {"hook",
       [&](auto** e) { return kedge_hook_get_memory(nullptr, &memory, e); }},
      {"reader",
       [&](auto** e) {
         return kedge_reader_open(nullptr, nullptr, 0, nullptr, e);
       }},
      {"reader",
       [&](auto** e) { return kedge_reader_verify_held(nullptr, 0, e); }},
      {"reader",
       [&](auto** e) { return kedge_reader_join(nullptr, nullptr, e); }},
      {"reader",
       [&](auto** e) {
         return kedge_reader_join_step(nullptr, 1, nullptr, e);
       }},
      {"reader",
       [&](auto** e) {
         return kedge_reader_prefetch(nullptr, &number, &version, e);
       }},
      {"found",
       [&](auto** e) {
         return kedge_reader_prefetch(nullptr, nullptr, &version, e);
       }},
      {"reader",
       [&](auto** e) { return kedge_reader_update(nullptr, nullptr, e); }},
      {"reader",
       [&](auto** e) {
         return kedge_reader_wait_for_update(nullptr, 1, nullptr, e);
       }},
      {"reader",
       [&](auto** e) { return kedge_reader_held(nullptr, &version, e); }},
      {"reader",
       [&](auto** e) {
         return kedge_reader_unverified(nullptr, &names, &count, e);
       }},
  };
  for (std::size_t i = 0; i < calls.size(); ++i) {
    const auto& [name, function] = calls[i];
    SCOPED_TRACE(testing::Message() << "call " << i << ", " << name);
    EXPECT_C_FAILS(Call(function), KEDGE_INVALID_ARGUMENT, name);
    // The message is not everyone's.
    EXPECT_EQ(function(nullptr), KEDGE_INVALID_ARGUMENT);
  }
  EXPECT_EQ(ticket, 0u);
  EXPECT_EQ(number, 0);
  EXPECT_EQ(count, 0u);

  EXPECT_STREQ(kedge_device_name(nullptr), "");
  EXPECT_STREQ(kedge_error_message(nullptr), "");
  EXPECT_EQ(kedge_error_status(nullptr), KEDGE_OK);
  EXPECT_EQ(kedge_writer_snapshot_bytes(nullptr), 0u);
  EXPECT_EQ(kedge_reader_get_state(nullptr), KEDGE_READER_EMPTY);
  kedge_error_free(nullptr);
  kedge_device_free(nullptr);
  kedge_coordinator_free(nullptr);
  kedge_writer_free(nullptr);
  kedge_hook_free(nullptr);
  kedge_reader_free(nullptr);
}

// ------------------------------------------------------------- struct sizes

template <class T>
void CheckInit(kedge_status (*init)(T*, std::size_t, kedge_error**)) {
  EXPECT_C_FAILS(Call([&](auto** e) { return init(nullptr, sizeof(T), e); }),
                 KEDGE_INVALID_ARGUMENT, "null");
  for (const std::size_t size :
       {std::size_t{0}, std::size_t{8}, sizeof(T) - 8, sizeof(T) - 1,
        sizeof(T) + 1, sizeof(T) + 8, ~std::size_t{0}}) {
    T poisoned;
    std::memset(&poisoned, 0x5a, sizeof(poisoned));
    const T before = poisoned;
    EXPECT_C_FAILS(Call([&](auto** e) { return init(&poisoned, size, e); }),
                   KEDGE_INVALID_ARGUMENT, "struct_size");
    EXPECT_EQ(std::memcmp(&poisoned, &before, sizeof(T)), 0) << size;
  }
  T options;
  std::memset(&options, 0x5a, sizeof(options));
  EXPECT_C_OK(Call([&](auto** e) { return init(&options, sizeof(T), e); }));
  EXPECT_EQ(options.struct_size, sizeof(T));
}

TEST(CapiArgumentsTest, InitFillsWhatTheCallerHasOrNothing) {
  CheckInit(kedge_coordinator_options_init);
  CheckInit(kedge_writer_options_init);
  CheckInit(kedge_store_options_init);
  CheckInit(kedge_hook_options_init);
  CheckInit(kedge_reader_options_init);
}

TEST(CapiArgumentsTest, InitShowsTheDefaults) {
  kedge_writer_options writer;
  ASSERT_EQ(kedge_writer_options_init(&writer, sizeof(writer), nullptr),
            KEDGE_OK);
  EXPECT_EQ(writer.store_path, nullptr);
  EXPECT_EQ(writer.coordinator, nullptr);
  EXPECT_EQ(writer.io_threads, 8);
  EXPECT_EQ(writer.encode_threads, 0);
  EXPECT_EQ(writer.anchor_file_bytes, std::uint64_t{1} << 30);
  EXPECT_EQ(writer.slice_units, std::uint64_t{1} << 24);
  EXPECT_EQ(writer.segment_files, 8u);
  EXPECT_EQ(writer.keep_anchors, 0u);
  EXPECT_EQ(writer.lease_ttl_seconds, 600u);
  EXPECT_EQ(writer.trash_grace_seconds, 60u);

  kedge_reader_options reader;
  ASSERT_EQ(kedge_reader_options_init(&reader, sizeof(reader), nullptr),
            KEDGE_OK);
  EXPECT_EQ(reader.device_stage_bytes, std::uint64_t{4} << 30);
  EXPECT_EQ(reader.read_mode, KEDGE_READ_AUTO);
  EXPECT_EQ(reader.io_threads, 12);
  EXPECT_EQ(reader.directory_interval_ms, 30'000u);
  EXPECT_EQ(reader.retry_deadline_ms, 10'000u);
  EXPECT_EQ(reader.lease_renewal_ms, 20'000u);
  EXPECT_EQ(reader.group_size, 1u);
  EXPECT_EQ(reader.pause, nullptr);

  kedge_hook_options hook;
  ASSERT_EQ(kedge_hook_options_init(&hook, sizeof(hook), nullptr), KEDGE_OK);
  EXPECT_EQ(hook.device, nullptr);
  EXPECT_EQ(hook.chunk_bytes, std::uint64_t{32} << 20);
  EXPECT_EQ(hook.ring_bytes, std::uint64_t{256} << 20);
  EXPECT_EQ(hook.deadline_ms, 600'000u);

  kedge_coordinator_options coordinator;
  ASSERT_EQ(kedge_coordinator_options_init(&coordinator, sizeof(coordinator),
                                           nullptr),
            KEDGE_OK);
  EXPECT_EQ(coordinator.deadline_ms, 300'000u);
}

// A store with one tensor, a writer and a reader of it, and a device.
class CapiStoreTest : public testing::Test {
 protected:
  void SetUp() override {
    writer_options_ = Sized<kedge_writer_options>();
    writer_options_.store_path = store_.c_str();
    tensor_ = Sized<kedge_tensor>();
    tensor_.name = "w";
    tensor_.dtype = KEDGE_BF16;
    tensor_.dimensions = 2;
    tensor_.shape = shape_;
    tensor_.data = trainer_.data();
    kedge_writer* writer = nullptr;
    ASSERT_C_OK(Call([&](auto** e) {
      return kedge_writer_create(&writer_options_, nullptr, &tensor_, 1,
                                 &writer, e);
    }));
    writer_.reset(writer);

    target_ = Sized<kedge_target>();
    target_.name = "w";
    target_.dtype = KEDGE_BF16;
    target_.dimensions = 2;
    target_.shape = shape_;
    target_.data = engine_.data();
    set_ = Sized<kedge_weight_set>();
    set_.targets = &target_;
    set_.target_count = 1;
    reader_options_ = Sized<kedge_reader_options>();
    reader_options_.store_path = store_.c_str();
    kedge_reader* reader = nullptr;
    ASSERT_C_OK(Call([&](auto** e) {
      return kedge_reader_open(&reader_options_, &set_, 1, &reader, e);
    }));
    reader_.reset(reader);

    kedge_device* device = nullptr;
    ASSERT_C_OK(
        Call([&](auto** e) { return kedge_device_open_cpu(&device, e); }));
    device_.reset(device);
    parameter_ = Sized<kedge_parameter>();
    parameter_.name = "p";
    parameter_.data = trainer_.data();
    parameter_.bytes = trainer_.size() * 2;
    hook_options_ = Sized<kedge_hook_options>();
    hook_options_.device = device_.get();
    hook_options_.parameters = &parameter_;
    hook_options_.parameter_count = 1;
    hook_options_.tensors = &tensor_;
    hook_options_.tensor_count = 1;
  }

  // With what stands in the members now. A handle that comes out of it is
  // given back.
  Outcome CreateWriter(const kedge_store_options* store = nullptr) {
    const std::string path = directory_.Join("other");
    const char* const here = writer_options_.store_path;
    if (here == store_.c_str()) writer_options_.store_path = path.c_str();
    kedge_writer* writer = Poison<kedge_writer>();
    const Outcome outcome = Call([&](auto** e) {
      return kedge_writer_create(&writer_options_, store, &tensor_,
                                 tensor_count_, &writer, e);
    });
    writer_options_.store_path = here;
    EXPECT_EQ(outcome.ok(), writer != nullptr);
    kedge_writer_free(writer);
    return outcome;
  }
  Outcome OpenReader() {
    kedge_reader* reader = Poison<kedge_reader>();
    const Outcome outcome = Call([&](auto** e) {
      return kedge_reader_open(&reader_options_, &set_, 1, &reader, e);
    });
    EXPECT_EQ(outcome.ok(), reader != nullptr);
    kedge_reader_free(reader);
    return outcome;
  }
  Outcome OpenHook() {
    kedge_hook* hook = Poison<kedge_hook>();
    const Outcome outcome = Call([&](auto** e) {
      return kedge_hook_open(&writer_options_, &hook_options_, nullptr, &hook,
                             e);
    });
    EXPECT_EQ(outcome.ok(), hook != nullptr);
    kedge_hook_free(hook);
    return outcome;
  }
  Outcome Publish(const kedge_publish_options* options,
                  kedge_publish_result* result) {
    return Call([&](auto** e) {
      return kedge_writer_publish(writer_.get(), 1, options, result, e);
    });
  }

  template <class T>
  static T* Poison() {
    return reinterpret_cast<T*>(0x51);
  }

  // `call` with every size of `value` that it cannot have; the right one
  // stands afterwards.
  template <class T>
  static void ExpectSizesRefused(T& value,
                                 const std::function<Outcome()>& call) {
    for (const std::size_t size :
         {std::size_t{0}, std::size_t{1}, std::size_t{8}, sizeof(T) - 8,
          sizeof(T) - 1, sizeof(T) + 1, sizeof(T) + 8, ~std::size_t{7}}) {
      value.struct_size = size;
      SCOPED_TRACE(testing::Message() << "struct_size " << size);
      EXPECT_C_FAILS(call(), KEDGE_INVALID_ARGUMENT, "struct_size: expected");
    }
    value.struct_size = sizeof(T);
  }

  ScratchDirectory directory_;
  const std::string store_ = directory_.Join("store");
  const std::uint64_t shape_[2] = {8, 16};
  std::vector<std::uint16_t> trainer_ = std::vector<std::uint16_t>(128, 0x3f80);
  std::vector<std::uint16_t> engine_ = trainer_;
  kedge_writer_options writer_options_;
  kedge_tensor tensor_;
  std::size_t tensor_count_ = 1;
  kedge_target target_;
  kedge_weight_set set_;
  kedge_reader_options reader_options_;
  kedge_parameter parameter_;
  kedge_hook_options hook_options_;
  DeviceHandle device_;
  WriterHandle writer_;
  ReaderHandle reader_;
};

TEST_F(CapiStoreTest, SizesThatNoVersionHadAreRefused) {
  ExpectSizesRefused(writer_options_, [&] { return CreateWriter(); });
  ExpectSizesRefused(tensor_, [&] { return CreateWriter(); });
  auto store = Sized<kedge_store_options>();
  ExpectSizesRefused(store, [&] { return CreateWriter(&store); });
  auto publish = Sized<kedge_publish_options>();
  ExpectSizesRefused(publish, [&] { return Publish(&publish, nullptr); });
  auto published = Sized<kedge_publish_result>();
  ExpectSizesRefused(published, [&] { return Publish(nullptr, &published); });
  ExpectSizesRefused(published, [&] {
    return Call([&](auto** e) {
      return kedge_writer_replace_tensors(writer_.get(), 1, &tensor_, 1,
                                          nullptr, 0, &published, e);
    });
  });
  ExpectSizesRefused(reader_options_, [&] { return OpenReader(); });
  ExpectSizesRefused(set_, [&] { return OpenReader(); });
  ExpectSizesRefused(target_, [&] { return OpenReader(); });
  auto updated = Sized<kedge_update_result>();
  const auto update = [&](auto function) {
    ExpectSizesRefused(updated, [&] {
      return Call(
          [&](auto** e) { return function(reader_.get(), &updated, e); });
    });
  };
  update(kedge_reader_join);
  update(kedge_reader_update);
  update([](auto* reader, auto* result, auto** e) {
    return kedge_reader_join_step(reader, 0, result, e);
  });
  update([](auto* reader, auto* result, auto** e) {
    return kedge_reader_wait_for_update(reader, 0, result, e);
  });
  ExpectSizesRefused(hook_options_, [&] { return OpenHook(); });
  ExpectSizesRefused(parameter_, [&] { return OpenHook(); });
  auto quantised = Sized<kedge_quantised_tensor>();
  quantised.tensor = "w";
  quantised.scales = "s";
  hook_options_.quantised = &quantised;
  hook_options_.quantised_count = 1;
  ExpectSizesRefused(quantised, [&] { return OpenHook(); });
  auto coordinator = Sized<kedge_coordinator_options>();
  coordinator.store_path = store_.c_str();
  coordinator.world_size = 1;
  ExpectSizesRefused(coordinator, [&] {
    kedge_coordinator* opened = Poison<kedge_coordinator>();
    const Outcome outcome = Call([&](auto** e) {
      return kedge_coordinator_open_files(&coordinator, &opened, e);
    });
    EXPECT_EQ(opened, nullptr);
    return outcome;
  });

  // Nothing has happened.
  kedge_version_id held;
  ASSERT_C_OK(Call(
      [&](auto** e) { return kedge_writer_held(writer_.get(), &held, e); }));
  EXPECT_EQ(held.step, 0u);
  EXPECT_EQ(kedge_reader_get_state(reader_.get()), KEDGE_READER_EMPTY);
  EXPECT_C_OK(Publish(nullptr, nullptr));
}

TEST_F(CapiStoreTest, ElementsOfAnArrayHaveOneSize) {
  kedge_tensor tensors[2] = {tensor_, tensor_};
  tensors[1].name = "v";
  tensors[1].struct_size = sizeof(kedge_tensor) - 8;
  kedge_writer* writer = Poison<kedge_writer>();
  const std::string path = directory_.Join("other");
  writer_options_.store_path = path.c_str();
  EXPECT_C_FAILS(Call([&](auto** e) {
                   return kedge_writer_create(&writer_options_, nullptr,
                                              tensors, 2, &writer, e);
                 }),
                 KEDGE_INVALID_ARGUMENT, "tensors[1].struct_size");
  EXPECT_EQ(writer, nullptr);
}

// ------------------------------------------------------------------ members

TEST_F(CapiStoreTest, WrongWriterOptionsAreNamed) {
  const auto refused = [&](auto& member, auto value, const char* text) {
    const auto right = member;
    member = value;
    EXPECT_C_FAILS(CreateWriter(), KEDGE_INVALID_ARGUMENT, text);
    member = right;
  };
  refused(writer_options_.store_path, nullptr, "store_path");
  refused(writer_options_.io_threads, -1, "io_threads");
  refused(writer_options_.io_threads, 1025, "io_threads");
  refused(writer_options_.encode_threads, -1, "encode_threads");
  refused(writer_options_.segment_files, 1001, "segment_files");
  refused(writer_options_.segment_files,
          std::numeric_limits<std::uint32_t>::max(), "segment_files");
  refused(writer_options_.slice_units,
          std::numeric_limits<std::uint64_t>::max(), "slice_units");
  kedge_writer* writer = Poison<kedge_writer>();
  EXPECT_C_FAILS(Call([&](auto** e) {
                   return kedge_writer_create(nullptr, nullptr, &tensor_, 1,
                                              &writer, e);
                 }),
                 KEDGE_INVALID_ARGUMENT, "writer options");
  EXPECT_EQ(writer, nullptr);

  auto store = Sized<kedge_store_options>();
  store.metadata_count = 1;
  EXPECT_C_FAILS(CreateWriter(&store), KEDGE_INVALID_ARGUMENT, "metadata");
  store.metadata_count = 0;
  store.reserved = 1;
  EXPECT_C_FAILS(CreateWriter(&store), KEDGE_INVALID_ARGUMENT, "reserved");
  store.reserved = 0;
  EXPECT_C_OK(CreateWriter(&store));
}

TEST_F(CapiStoreTest, WrongTensorsAreNamed) {
  const auto refused = [&](auto& member, auto value, const char* text) {
    const auto right = member;
    member = value;
    EXPECT_C_FAILS(CreateWriter(), KEDGE_INVALID_ARGUMENT, text);
    member = right;
  };
  refused(tensor_.name, nullptr, "tensors[0].name");
  for (const kedge_dtype dtype : {-1, 0, 17, 256 + KEDGE_BF16,
                                  std::numeric_limits<std::int32_t>::max()}) {
    refused(tensor_.dtype, dtype, "tensors[0] (w).dtype");
  }
  refused(tensor_.dimensions, 33, "tensors[0] (w).dimensions");
  refused(tensor_.dimensions, std::numeric_limits<std::uint32_t>::max(),
          "tensors[0] (w).dimensions");
  refused(tensor_.shape, nullptr, "tensors[0] (w).shape");
  refused(tensor_count_, ~std::size_t{0}, "tensors: expected at most");
  kedge_writer* writer = nullptr;
  EXPECT_C_FAILS(Call([&](auto** e) {
                   return kedge_writer_open(&writer_options_, nullptr, 1,
                                            nullptr, &writer, e);
                 }),
                 KEDGE_INVALID_ARGUMENT, "tensors");
  EXPECT_C_FAILS(Call([&](auto** e) {
                   return kedge_writer_replace_tensors(
                       writer_.get(), 1, nullptr, 1, nullptr, 0, nullptr, e);
                 }),
                 KEDGE_INVALID_ARGUMENT, "tensors");
  // What the writer itself finds.
  tensor_.data = nullptr;
  EXPECT_FALSE(CreateWriter().ok());
  tensor_.data = trainer_.data();
  const kedge_range beyond = {5, 129};
  tensor_.shard = &beyond;
  EXPECT_FALSE(CreateWriter().ok());
  const kedge_range backwards = {5, 4};
  tensor_.shard = &backwards;
  EXPECT_FALSE(CreateWriter().ok());
  tensor_.shard = nullptr;
  tensor_.tied_to = "nobody";
  EXPECT_FALSE(CreateWriter().ok());
  tensor_.tied_to = nullptr;
  EXPECT_C_OK(CreateWriter());
}

TEST_F(CapiStoreTest, WrongMetadataAreNamed) {
  kedge_metadata metadata[2] = {{"a", "1"}, {"a", "2"}};
  auto options = Sized<kedge_publish_options>();
  options.replace_metadata = 1;
  options.metadata = metadata;
  options.metadata_count = 2;
  EXPECT_C_FAILS(Publish(&options, nullptr), KEDGE_INVALID_ARGUMENT,
                 "metadata[1].key");
  metadata[1].key = nullptr;
  EXPECT_C_FAILS(Publish(&options, nullptr), KEDGE_INVALID_ARGUMENT,
                 "metadata[1].key");
  metadata[1] = {"b", nullptr};
  EXPECT_C_FAILS(Publish(&options, nullptr), KEDGE_INVALID_ARGUMENT,
                 "metadata[1].value");
  options.metadata_count = ~std::size_t{0};
  EXPECT_C_FAILS(Publish(&options, nullptr), KEDGE_INVALID_ARGUMENT,
                 "metadata_count");
  options.metadata = nullptr;
  options.metadata_count = 2;
  EXPECT_C_FAILS(Publish(&options, nullptr), KEDGE_INVALID_ARGUMENT,
                 "metadata");
  // Not looked at.
  options.replace_metadata = 0;
  EXPECT_C_OK(Publish(&options, nullptr));
}

TEST_F(CapiStoreTest, WrongReaderOptionsAreNamed) {
  const auto refused = [&](auto& member, auto value, const char* text) {
    const auto right = member;
    member = value;
    EXPECT_C_FAILS(OpenReader(), KEDGE_INVALID_ARGUMENT, text);
    member = right;
  };
  refused(reader_options_.store_path, nullptr, "store_path");
  refused(reader_options_.read_mode, -1, "read_mode");
  refused(reader_options_.read_mode, 3, "read_mode");
  refused(reader_options_.io_threads, -1, "io_threads");
  refused(reader_options_.io_threads, 1025, "io_threads");
  refused(reader_options_.apply_threads, -1, "apply_threads");
  refused(reader_options_.group_rank, 1, "rank 1 of 1");
  refused(reader_options_.group_size, 2, "reduce");
  refused(reader_options_.lease_id, "../x", "lease_id");
  refused(set_.targets, nullptr, "sets[0].targets");
  refused(set_.target_count, ~std::size_t{0}, "sets[0].targets");
  kedge_reader* reader = Poison<kedge_reader>();
  EXPECT_C_FAILS(Call([&](auto** e) {
                   return kedge_reader_open(&reader_options_, nullptr, 1,
                                            &reader, e);
                 }),
                 KEDGE_INVALID_ARGUMENT, "sets");
  EXPECT_EQ(reader, nullptr);
  EXPECT_C_FAILS(Call([&](auto** e) {
                   return kedge_reader_open(&reader_options_, &set_, 1001,
                                            &reader, e);
                 }),
                 KEDGE_INVALID_ARGUMENT, "sets: expected at most");
  EXPECT_C_OK(OpenReader());
}

TEST_F(CapiStoreTest, WrongTargetsAreNamed) {
  const auto refused = [&](auto& member, auto value, const char* text) {
    const auto right = member;
    member = value;
    EXPECT_C_FAILS(OpenReader(), KEDGE_INVALID_ARGUMENT, text);
    member = right;
  };
  const std::uint64_t begin[2] = {0, 8};
  const std::uint64_t extent[2] = {8, 9};
  refused(target_.name, nullptr, "sets[0].targets[0].name");
  refused(target_.dtype, 0, "sets[0].targets[0] (w).dtype");
  refused(target_.dtype, 17, "sets[0].targets[0] (w).dtype");
  refused(target_.dimensions, 33, "sets[0].targets[0] (w).dimensions");
  refused(target_.shape, nullptr, "sets[0].targets[0] (w).shape");
  refused(target_.begin, begin, "begin and extent");
  refused(target_.extent, extent, "begin and extent");
  refused(target_.data, nullptr, "w");
  target_.begin = begin;
  target_.extent = extent;
  EXPECT_C_FAILS(OpenReader(), KEDGE_INVALID_ARGUMENT, "w");
}

TEST_F(CapiStoreTest, WrongHookOptionsAreNamed) {
  const auto refused = [&](auto& member, auto value, const char* text) {
    const auto right = member;
    member = value;
    EXPECT_C_FAILS(OpenHook(), KEDGE_INVALID_ARGUMENT, text);
    member = right;
  };
  refused(writer_options_.store_path, nullptr, "store_path");
  refused(hook_options_.device, nullptr, "hook options.device");
  refused(hook_options_.parameters, nullptr, "parameters");
  refused(hook_options_.parameter_count, ~std::size_t{0}, "parameters");
  refused(hook_options_.tensors, nullptr, "tensors");
  refused(hook_options_.residual_count, std::size_t{1}, "residual");
  refused(hook_options_.quantised_count, std::size_t{1}, "quantised");
  refused(parameter_.name, nullptr, "parameters[0].name");
  refused(parameter_.data, nullptr, "parameters[0] (p).data");
  refused(parameter_.reserved, 1, "parameters[0].reserved");
  refused(parameter_.replica_count, std::size_t{1},
          "parameters[0] (p).replicas");
  const void* const replicas[1] = {nullptr};
  parameter_.replicas = replicas;
  refused(parameter_.replica_count, std::size_t{1},
          "parameters[0] (p).replicas");
  refused(parameter_.replica_count, ~std::size_t{0},
          "parameters[0] (p).replicas");

  auto quantised = Sized<kedge_quantised_tensor>();
  quantised.tensor = "w";
  quantised.scales = "s";
  hook_options_.quantised = &quantised;
  hook_options_.quantised_count = 1;
  refused(quantised.tensor, nullptr, "quantised[0].tensor");
  refused(quantised.scales, nullptr, "quantised[0].scales");
  refused(quantised.scale_kind, 2, "quantised[0].scale_kind");
  refused(quantised.scale_kind, -1, "quantised[0].scale_kind");
  refused(quantised.floor, std::nanf(""), "quantised[0].floor");
  refused(quantised.floor, -1.0f, "quantised[0].floor");

  kedge_hook* hook = Poison<kedge_hook>();
  EXPECT_C_FAILS(Call([&](auto** e) {
                   return kedge_hook_create(&writer_options_, nullptr, nullptr,
                                            &hook, e);
                 }),
                 KEDGE_INVALID_ARGUMENT, "hook options");
  EXPECT_EQ(hook, nullptr);
}

TEST_F(CapiStoreTest, WrongCoordinatorOptionsAreNamed) {
  auto options = Sized<kedge_coordinator_options>();
  options.store_path = store_.c_str();
  const auto open = [&] {
    kedge_coordinator* opened = Poison<kedge_coordinator>();
    const Outcome outcome = Call([&](auto** e) {
      return kedge_coordinator_open_files(&options, &opened, e);
    });
    EXPECT_EQ(outcome.ok(), opened != nullptr);
    kedge_coordinator_free(opened);
    return outcome;
  };
  EXPECT_EQ(open().status, KEDGE_INVALID_ARGUMENT);  // no world
  options.world_size = 1001;
  EXPECT_EQ(open().status, KEDGE_INVALID_ARGUMENT);
  options.world_size = 1;
  options.rank = 1;
  EXPECT_EQ(open().status, KEDGE_INVALID_ARGUMENT);
  options.rank = 0;
  options.store_path = nullptr;
  EXPECT_C_FAILS(open(), KEDGE_INVALID_ARGUMENT, "store_path");
  options.store_path = store_.c_str();
  EXPECT_C_OK(open());
  // A rank that never comes.
  options.world_size = 2;
  options.deadline_ms = 50;
  EXPECT_C_FAILS(open(), KEDGE_UNAVAILABLE, "rank");
}

TEST_F(CapiStoreTest, ForeignStreamsAreNotDestroyed) {
  EXPECT_STREQ(kedge_device_name(device_.get()), "cpu");
  EXPECT_C_FAILS(Call([&](auto** e) {
                   return kedge_device_create_stream(device_.get(), nullptr, e);
                 }),
                 KEDGE_INVALID_ARGUMENT, "stream");
  EXPECT_C_FAILS(Call([&](auto** e) {
                   return kedge_device_destroy_stream(device_.get(), nullptr,
                                                      e);
                 }),
                 KEDGE_INVALID_ARGUMENT, "stream");
  void* stream = nullptr;
  ASSERT_C_OK(Call([&](auto** e) {
    return kedge_device_create_stream(device_.get(), &stream, e);
  }));
  EXPECT_NE(stream, nullptr);
  EXPECT_C_OK(Call([&](auto** e) {
    return kedge_device_wait_for_stream(device_.get(), stream, e);
  }));
  kedge_device* other = nullptr;
  ASSERT_C_OK(Call([&](auto** e) { return kedge_device_open_cpu(&other, e); }));
  EXPECT_C_FAILS(Call([&](auto** e) {
                   return kedge_device_destroy_stream(other, stream, e);
                 }),
                 KEDGE_INVALID_ARGUMENT, "stream");
  kedge_device_free(other);
  EXPECT_C_OK(Call([&](auto** e) {
    return kedge_device_destroy_stream(device_.get(), stream, e);
  }));
  EXPECT_C_FAILS(Call([&](auto** e) {
                   return kedge_device_destroy_stream(device_.get(), stream, e);
                 }),
                 KEDGE_INVALID_ARGUMENT, "stream");
}

TEST(CapiDeviceTest, CudaSaysWhyItIsNotThere) {
  kedge_device* device = reinterpret_cast<kedge_device*>(0x51);
  EXPECT_C_FAILS(
      Call([&](auto** e) { return kedge_device_open_cuda(-1, &device, e); }),
      KEDGE_INVALID_ARGUMENT, "ordinal");
  EXPECT_EQ(device, nullptr);
#ifdef KEDGE_TEST_WITH_CUDA
  // No host has this many; one without a driver says so.
  const Outcome outcome =
      Call([&](auto** e) { return kedge_device_open_cuda(9999, &device, e); });
  EXPECT_TRUE(outcome.status == KEDGE_INVALID_ARGUMENT ||
              outcome.status == KEDGE_INTERNAL)
      << outcome;
  EXPECT_NE(outcome.message.find("cuda:9999"), std::string::npos) << outcome;
#else
  EXPECT_C_FAILS(
      Call([&](auto** e) { return kedge_device_open_cuda(0, &device, e); }),
      KEDGE_UNIMPLEMENTED, "built without CUDA");
#endif
  EXPECT_EQ(device, nullptr);
}

}  // namespace
}  // namespace kedge
