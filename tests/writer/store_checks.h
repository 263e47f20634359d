#ifndef KEDGE_TESTS_WRITER_STORE_CHECKS_H_
#define KEDGE_TESTS_WRITER_STORE_CHECKS_H_

// What a store that a test has written should be.

#include <cstdint>
#include <string>

#include "gtest/gtest.h"
#include "kedge/engine/io/store.h"
#include "kedge/reader/fsck.h"
#include "kedge/tests/support/test_model.h"

namespace kedge {

// Version `step`, rebuilt with the plain code of format/, is `expected`, tensor
// by tensor.
inline void ExpectVersion(const std::string& path, std::uint64_t step,
                          const ModelBytes& expected) {
  const auto store = Store::Open(PosixFileSystem(), path);
  ASSERT_TRUE(store.ok()) << store.status();
  const auto published = (*store)->ReadStep(step);
  ASSERT_TRUE(published.ok()) << published.status();
  const auto model = ReadModel(**store, *published);
  ASSERT_TRUE(model.ok()) << model.status();
  ASSERT_EQ(model->size(), expected.size());
  for (const auto& [name, bytes] : expected) {
    ASSERT_TRUE(model->count(name)) << name;
    EXPECT_TRUE(model->at(name) == bytes) << "v" << step << ": " << name;
  }
}

// Deep fsck finds nothing.
inline FsckReport ExpectClean(const std::string& path) {
  FsckOptions options;
  options.store_path = path;
  options.deep = true;
  options.io_threads = 2;
  const auto report = Fsck(options);
  EXPECT_TRUE(report.ok()) << report.status();
  if (!report.ok()) return {};
  EXPECT_TRUE(report->clean()) << FormatFsckReport(*report);
  return *report;
}

}  // namespace kedge

#endif  // KEDGE_TESTS_WRITER_STORE_CHECKS_H_
