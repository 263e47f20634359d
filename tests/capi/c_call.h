#ifndef KEDGE_TESTS_CAPI_C_CALL_H_
#define KEDGE_TESTS_CAPI_C_CALL_H_

// Calls of kedge.h as tests want them: what a call came to as a value, structs
// with their size filled in, handles that are given back.

#include <gtest/gtest.h>
#include <stdlib.h>

#include <cstdint>
#include <filesystem>
#include <memory>
#include <ostream>
#include <string>
#include <utility>

#include "kedge/capi/kedge.h"

namespace kedge {

struct Outcome {
  kedge_status status = KEDGE_OK;
  std::string message;
  bool has_error = false;

  bool ok() const { return status == KEDGE_OK; }
};
inline std::ostream& operator<<(std::ostream& out, const Outcome& outcome) {
  return out << kedge_status_name(outcome.status) << ": " << outcome.message;
}

// `call` is given the place for its error.
template <class Function>
Outcome Call(const Function& call) {
  // Poison: a call sets it, whatever comes.
  kedge_error* const poison = reinterpret_cast<kedge_error*>(0x51);
  kedge_error* error = poison;
  Outcome outcome;
  outcome.status = call(&error);
  EXPECT_NE(error, poison);
  if (error == poison) return outcome;
  outcome.has_error = error != nullptr;
  outcome.message = kedge_error_message(error);
  EXPECT_EQ(kedge_error_status(error), outcome.status);
  kedge_error_free(error);
  EXPECT_EQ(outcome.has_error, outcome.status != KEDGE_OK);
  return outcome;
}

#define EXPECT_C_OK(outcome)              \
  do {                                    \
    const ::kedge::Outcome got = outcome; \
    EXPECT_TRUE(got.ok()) << got;         \
  } while (false)
#define ASSERT_C_OK(outcome)              \
  do {                                    \
    const ::kedge::Outcome got = outcome; \
    ASSERT_TRUE(got.ok()) << got;         \
  } while (false)
// The status, and `text` somewhere in the message.
#define EXPECT_C_FAILS(outcome, expected, text)          \
  do {                                                   \
    const ::kedge::Outcome got = outcome;                \
    EXPECT_EQ(got.status, expected) << got;              \
    EXPECT_NE(got.message.find(text), std::string::npos) \
        << "expected \"" << (text) << "\" in: " << got;  \
  } while (false)

// A struct with its size and nothing else.
template <class T>
T Sized() {
  T value = {};
  value.struct_size = sizeof(T);
  return value;
}

template <auto free_handle>
struct HandleFree {
  template <class T>
  void operator()(T* handle) const {
    free_handle(handle);
  }
};
using DeviceHandle =
    std::unique_ptr<kedge_device, HandleFree<kedge_device_free>>;
using CoordinatorHandle =
    std::unique_ptr<kedge_coordinator, HandleFree<kedge_coordinator_free>>;
using WriterHandle =
    std::unique_ptr<kedge_writer, HandleFree<kedge_writer_free>>;
using HookHandle = std::unique_ptr<kedge_hook, HandleFree<kedge_hook_free>>;
using ReaderHandle =
    std::unique_ptr<kedge_reader, HandleFree<kedge_reader_free>>;

// A directory that lives as long as a test; kedge's own sources stay out of
// these programs.
class ScratchDirectory {
 public:
  ScratchDirectory() {
    std::string name =
        (std::filesystem::temp_directory_path() / "kedge-capi.XXXXXX").string();
    if (mkdtemp(name.data()) == nullptr) std::abort();
    path_ = name;
  }
  ~ScratchDirectory() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  ScratchDirectory(const ScratchDirectory&) = delete;
  ScratchDirectory& operator=(const ScratchDirectory&) = delete;

  std::string Join(const std::string& name) const { return path_ + "/" + name; }

 private:
  std::string path_;
};

}  // namespace kedge

#endif  // KEDGE_TESTS_CAPI_C_CALL_H_
