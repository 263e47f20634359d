#include "kedge/tools/console.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <ctime>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "kedge/format/status.h"
#include "kedge/tools/posix_file.h"

namespace kedge {
namespace {

constexpr std::chrono::milliseconds kRedrawInterval{100};
constexpr int kBarCells = 24;

}  // namespace

std::string Printable(absl::string_view text) {
  std::string out;
  out.reserve(text.size());
  for (std::size_t i = 0; i < text.size(); ++i) {
    const auto byte = static_cast<unsigned char>(text[i]);
    const bool c0 = (byte < 0x20 && byte != '\n') || byte == 0x7f;
    // U+0080 to U+009F, which some terminals obey like ESC sequences.
    const bool c1 = byte == 0xc2 && i + 1 < text.size() &&
                    static_cast<unsigned char>(text[i + 1]) >= 0x80 &&
                    static_cast<unsigned char>(text[i + 1]) <= 0x9f;
    if (c0 || c1) {
      absl::StrAppendFormat(&out, "\\x%02x", byte);
      if (c1) {
        absl::StrAppendFormat(&out, "\\x%02x",
                              static_cast<unsigned char>(text[++i]));
      }
    } else {
      out.push_back(text[i]);
    }
  }
  return out;
}

std::string HumanBytes(std::uint64_t bytes) {
  static constexpr const char* kUnits[] = {"KiB", "MiB", "GiB", "TiB", "PiB"};
  if (bytes < 1024) return absl::StrCat(bytes, " B");
  double value = static_cast<double>(bytes) / 1024;
  std::size_t unit = 0;
  while (value >= 1024 && unit + 1 < std::size(kUnits)) {
    value /= 1024;
    ++unit;
  }
  return absl::StrFormat("%.1f %s", value, kUnits[unit]);
}

std::string HumanCount(std::uint64_t count) {
  std::string digits = absl::StrCat(count);
  for (std::size_t at = digits.size(); at > 3;) {
    at -= 3;
    digits.insert(at, ",");
  }
  return digits;
}

std::string Counted(std::uint64_t count, absl::string_view noun) {
  return absl::StrCat(HumanCount(count), " ", noun, count == 1 ? "" : "s");
}

std::string HumanSeconds(double seconds) {
  return seconds < 0.1 ? absl::StrFormat("%.1f ms", seconds * 1e3)
                       : absl::StrFormat("%.2f s", seconds);
}

std::string UtcTime(std::int64_t unix_seconds) {
  const std::time_t time = unix_seconds;
  std::tm parts{};
  if (gmtime_r(&time, &parts) == nullptr) return "-";
  char text[40];
  std::strftime(text, sizeof(text), "%Y-%m-%dT%H:%M:%SZ", &parts);
  return text;
}

std::string Percent(double part, double whole) {
  return whole > 0 ? absl::StrFormat("%.3g %%", 100 * part / whole) : "-";
}

TextTable::TextTable(std::vector<Column> columns)
    : columns_(std::move(columns)) {}

void TextTable::Add(std::vector<std::string> cells) {
  KEDGE_CHECK(cells.size() == columns_.size());
  for (std::string& cell : cells) cell = Printable(cell);
  rows_.push_back(std::move(cells));
}

std::string TextTable::Text() const {
  std::vector<std::size_t> widths;
  for (const Column& column : columns_) widths.push_back(column.heading.size());
  for (const auto& row : rows_) {
    for (std::size_t i = 0; i < row.size(); ++i) {
      widths[i] = std::max(widths[i], row[i].size());
    }
  }
  std::string out;
  const auto add_line = [&](const auto& cell_of) {
    std::string line;
    for (std::size_t i = 0; i < columns_.size(); ++i) {
      const std::string& cell = cell_of(i);
      const std::string padding(widths[i] - cell.size(), ' ');
      if (i > 0) line += "  ";
      line +=
          columns_[i].align == Align::kRight ? padding + cell : cell + padding;
    }
    line.erase(line.find_last_not_of(' ') + 1);
    out += line + "\n";
  };
  add_line(
      [&](std::size_t i) -> const std::string& { return columns_[i].heading; });
  for (const auto& row : rows_) {
    add_line([&](std::size_t i) -> const std::string& { return row[i]; });
  }
  return out;
}

absl::Status Print(absl::string_view text) {
  if (std::fwrite(text.data(), 1, text.size(), stdout) != text.size() ||
      std::fflush(stdout) != 0) {
    return SystemError(errno, "stdout", "write");
  }
  return absl::OkStatus();
}

void PrintError(const absl::Status& status) {
  const std::string text =
      absl::StrCat("kedge: ", Printable(status.message()), "\n");
  std::fputs(text.c_str(), stderr);
}

absl::Status PrintJson(const Json& json) {
  return Print(json.dump(2, ' ', false, Json::error_handler_t::replace) + "\n");
}

Progress::Progress(std::string label, std::uint64_t total_bytes, bool enabled)
    : label_(std::move(label)),
      total_bytes_(total_bytes),
      start_(std::chrono::steady_clock::now()) {
  if (!enabled || isatty(STDERR_FILENO) == 0) return;
  thread_ = std::thread([this] {
    std::unique_lock<std::mutex> lock(mutex_);
    while (!stopped_) {
      Draw();
      condition_.wait_for(lock, kRedrawInterval);
    }
  });
}

Progress::~Progress() {
  if (!thread_.joinable()) return;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    stopped_ = true;
  }
  condition_.notify_all();
  thread_.join();
  std::fputs("\r\033[K", stderr);
  std::fflush(stderr);
}

void Progress::Draw() const {
  const std::uint64_t done = done_bytes_.load(std::memory_order_relaxed);
  const double seconds =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - start_)
          .count();
  const double share =
      total_bytes_ == 0 ? 1
                        : std::min(1.0, static_cast<double>(done) /
                                            static_cast<double>(total_bytes_));
  const int cells = static_cast<int>(share * kBarCells);
  const std::string line = absl::StrFormat(
      "\r%s [%s%s] %s / %s  %s/s\033[K", Printable(label_),
      std::string(cells, '#'), std::string(kBarCells - cells, ' '),
      HumanBytes(done), HumanBytes(total_bytes_),
      HumanBytes(seconds > 0 ? static_cast<std::uint64_t>(
                                   static_cast<double>(done) / seconds)
                             : 0));
  std::fputs(line.c_str(), stderr);
  std::fflush(stderr);
}

}  // namespace kedge
