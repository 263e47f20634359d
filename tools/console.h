#ifndef KEDGE_TOOLS_CONSOLE_H_
#define KEDGE_TOOLS_CONSOLE_H_

// What the `kedge` program says: tables and JSON on stdout, progress on a
// terminal's stderr. Text that comes from files is shown without the control
// characters that a terminal would obey.

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "nlohmann/json.hpp"

namespace kedge {

// Objects keep the order in which their keys were set.
using Json = nlohmann::ordered_json;

// `text` with every control character but '\n' as \xNN.
std::string Printable(absl::string_view text);

std::string HumanBytes(std::uint64_t bytes);  // "332.1 MiB", "17 B"
std::string HumanCount(std::uint64_t count);  // "12,345,678"
std::string Counted(std::uint64_t count, absl::string_view noun);  // "1 file"
std::string HumanSeconds(double seconds);                          // "1.24 s"
std::string UtcTime(std::int64_t unix_seconds);  // "2025-03-01T12:00:00Z"
std::string Percent(double part, double whole);  // "1.03 %"; "-" of nothing

// Rows of text under headings, columns as wide as needed.
class TextTable {
 public:
  enum class Align { kLeft, kRight };
  struct Column {
    std::string heading;
    Align align = Align::kLeft;
  };
  explicit TextTable(std::vector<Column> columns);
  // As many cells as columns.
  void Add(std::vector<std::string> cells);
  std::string Text() const;  // Printable; each line ends with '\n'

 private:
  std::vector<Column> columns_;
  std::vector<std::vector<std::string>> rows_;
};

// Writes to stdout and flushes; errors name the errno (a full disk behind a
// redirection must not look like success).
absl::Status Print(absl::string_view text);
// "kedge: MESSAGE" on stderr.
void PrintError(const absl::Status& status);
// One object, indented, with a newline; bytes that are no UTF-8 are replaced.
absl::Status PrintJson(const Json& json);

// A bar on stderr, bytes done and rate, redrawn ten times a second while the
// object lives; nothing at all unless `enabled` and stderr is a terminal.
//
// Thread safety: Add may run concurrently.
class Progress {
 public:
  Progress(std::string label, std::uint64_t total_bytes, bool enabled);
  ~Progress();  // erases the bar
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  void Add(std::uint64_t bytes) {
    done_bytes_.fetch_add(bytes, std::memory_order_relaxed);
  }

 private:
  void Draw() const;

  const std::string label_;
  const std::uint64_t total_bytes_;
  const std::chrono::steady_clock::time_point start_;
  std::atomic<std::uint64_t> done_bytes_{0};
  std::mutex mutex_;
  std::condition_variable condition_;
  bool stopped_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

}  // namespace kedge

#endif  // KEDGE_TOOLS_CONSOLE_H_
