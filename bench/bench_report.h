#ifndef KEDGE_BENCH_BENCH_REPORT_H_
#define KEDGE_BENCH_BENCH_REPORT_H_

// How the GPU benchmarks say what they measured: medians with spread, a table
// for people, JSON for scripts.

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace kedge {

// Repeated measurements of one thing.
struct Samples {
  std::vector<double> values;

  void Add(double value) { values.push_back(value); }
  bool empty() const { return values.empty(); }
  double Median() const;  // 0 if empty
  double Min() const;
  double Max() const;
  // "6.512 (6.498 to 6.640)", each times `factor`.
  std::string Text(double factor, int digits) const;
};

// A JSON object or list, written member by member in order.
class JsonObject {
 public:
  JsonObject& Text(absl::string_view name, absl::string_view value);
  JsonObject& Number(absl::string_view name, double value);
  JsonObject& Number(absl::string_view name, std::uint64_t value);
  JsonObject& Bool(absl::string_view name, bool value);
  // {"median": ..., "min": ..., "max": ..., "all": [...]}; nothing of none.
  JsonObject& Stats(absl::string_view name, const Samples& samples);
  JsonObject& Object(absl::string_view name, const JsonObject& value);
  JsonObject& List(absl::string_view name,
                   const std::vector<JsonObject>& values);
  std::string str() const;  // with line ends

 private:
  JsonObject& Raw(absl::string_view name, std::string value);
  std::string Print(int depth) const;
  struct Member {
    std::string name;
    std::string value;  // unless it has children
    std::vector<JsonObject> children;
    char kind = 'v';  // 'v' value, 'o' object, 'l' list
  };
  std::vector<Member> members_;
};

// Writes `text` to `path`, "-" for standard output.
absl::Status WriteReport(const std::string& path, const std::string& text);

// "--name value" pairs and "--name" alone where `value` is a bool's. Values are
// parsed by where they go; bytes may end in KiB, MiB or GiB.
class Flags {
 public:
  Flags& Text(absl::string_view name, std::string* value);
  Flags& Number(absl::string_view name, double* value);
  Flags& Number(absl::string_view name, std::uint64_t* value);
  Flags& Bytes(absl::string_view name, std::uint64_t* value);
  // Says on standard error what is wrong, and all names.
  bool Parse(int argc, char** argv) const;

 private:
  struct Flag {
    std::string name;
    std::string* text = nullptr;
    double* real = nullptr;
    std::uint64_t* integer = nullptr;
    bool bytes = false;
  };
  std::vector<Flag> flags_;
};

// The command line, as a shell would take it.
std::string CommandLine(int argc, char** argv);

}  // namespace kedge

#endif  // KEDGE_BENCH_BENCH_REPORT_H_
