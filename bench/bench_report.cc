#include "kedge/bench/bench_report.h"

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstdio>
#include <cstring>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/strip.h"

namespace kedge {
namespace {

std::string Quoted(absl::string_view text) {
  std::string out = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') {
      out += '\\';
      out += c;
    } else if (static_cast<unsigned char>(c) < 0x20) {
      absl::StrAppend(&out, absl::StrFormat("\\u%04x", c));
    } else {
      out += c;
    }
  }
  return out + "\"";
}

std::string Real(double value) {
  return std::isfinite(value) ? absl::StrFormat("%.9g", value) : "null";
}

}  // namespace

double Samples::Median() const {
  if (values.empty()) return 0;
  std::vector<double> sorted = values;
  std::sort(sorted.begin(), sorted.end());
  const std::size_t n = sorted.size();
  return n % 2 == 1 ? sorted[n / 2] : (sorted[n / 2 - 1] + sorted[n / 2]) / 2;
}
double Samples::Min() const {
  return values.empty() ? 0 : *std::min_element(values.begin(), values.end());
}
double Samples::Max() const {
  return values.empty() ? 0 : *std::max_element(values.begin(), values.end());
}
std::string Samples::Text(double factor, int digits) const {
  return absl::StrFormat("%.*f (%.*f to %.*f)", digits, Median() * factor,
                         digits, Min() * factor, digits, Max() * factor);
}

JsonObject& JsonObject::Raw(absl::string_view name, std::string value) {
  Member member;
  member.name = std::string(name);
  member.value = std::move(value);
  members_.push_back(std::move(member));
  return *this;
}
JsonObject& JsonObject::Text(absl::string_view name, absl::string_view value) {
  return Raw(name, Quoted(value));
}
JsonObject& JsonObject::Number(absl::string_view name, double value) {
  return Raw(name, Real(value));
}
JsonObject& JsonObject::Number(absl::string_view name, std::uint64_t value) {
  return Raw(name, absl::StrCat(value));
}
JsonObject& JsonObject::Bool(absl::string_view name, bool value) {
  return Raw(name, value ? "true" : "false");
}
JsonObject& JsonObject::Stats(absl::string_view name, const Samples& samples) {
  if (samples.values.empty()) return *this;
  std::string all;
  for (const double value : samples.values) {
    absl::StrAppend(&all, all.empty() ? "" : ", ", Real(value));
  }
  return Raw(name, absl::StrCat("{\"median\": ", Real(samples.Median()),
                                ", \"min\": ", Real(samples.Min()),
                                ", \"max\": ", Real(samples.Max()),
                                ", \"all\": [", all, "]}"));
}
JsonObject& JsonObject::Object(absl::string_view name,
                               const JsonObject& value) {
  Member member;
  member.name = std::string(name);
  member.children = {value};
  member.kind = 'o';
  members_.push_back(std::move(member));
  return *this;
}
JsonObject& JsonObject::List(absl::string_view name,
                             const std::vector<JsonObject>& values) {
  Member member;
  member.name = std::string(name);
  member.children = values;
  member.kind = 'l';
  members_.push_back(std::move(member));
  return *this;
}

std::string JsonObject::Print(int depth) const {
  const std::string inner(2 * static_cast<std::size_t>(depth) + 2, ' ');
  std::string text = "{";
  for (const Member& member : members_) {
    absl::StrAppend(&text, text.size() > 1 ? ",\n" : "\n", inner,
                    Quoted(member.name), ": ");
    if (member.kind == 'v') absl::StrAppend(&text, member.value);
    if (member.kind == 'o') {
      absl::StrAppend(&text, member.children.front().Print(depth + 1));
    }
    if (member.kind == 'l') {
      text += "[";
      for (std::size_t i = 0; i < member.children.size(); ++i) {
        absl::StrAppend(&text, i == 0 ? "" : ", ",
                        member.children[i].Print(depth + 1));
      }
      text += "]";
    }
  }
  absl::StrAppend(&text, "\n", inner.substr(2), "}");
  return text;
}
std::string JsonObject::str() const { return Print(0) + "\n"; }

absl::Status WriteReport(const std::string& path, const std::string& text) {
  std::FILE* const file = path == "-" ? stdout : std::fopen(path.c_str(), "wb");
  if (file == nullptr) {
    return absl::UnavailableError(
        absl::StrCat(path, ": cannot be written: ", std::strerror(errno)));
  }
  bool ok = std::fwrite(text.data(), 1, text.size(), file) == text.size();
  ok = std::fflush(file) == 0 && ok;
  if (file != stdout) ok = std::fclose(file) == 0 && ok;
  if (ok) return absl::OkStatus();
  return absl::UnavailableError(absl::StrCat(path, ": write failed"));
}

Flags& Flags::Text(absl::string_view name, std::string* value) {
  Flag flag;
  flag.name = std::string(name);
  flag.text = value;
  flags_.push_back(flag);
  return *this;
}
Flags& Flags::Number(absl::string_view name, double* value) {
  Flag flag;
  flag.name = std::string(name);
  flag.real = value;
  flags_.push_back(flag);
  return *this;
}
Flags& Flags::Number(absl::string_view name, std::uint64_t* value) {
  Flag flag;
  flag.name = std::string(name);
  flag.integer = value;
  flags_.push_back(flag);
  return *this;
}
Flags& Flags::Bytes(absl::string_view name, std::uint64_t* value) {
  Number(name, value);
  flags_.back().bytes = true;
  return *this;
}

bool Flags::Parse(int argc, char** argv) const {
  const auto usage = [&](absl::string_view problem) {
    std::string text = absl::StrCat(problem, "\nusage: ", argv[0]);
    for (const Flag& flag : flags_) {
      absl::StrAppend(&text, " [", flag.name, " ",
                      flag.text != nullptr   ? "TEXT"
                      : flag.real != nullptr ? "X"
                      : flag.bytes           ? "N[KiB|MiB|GiB]"
                                             : "N",
                      "]");
    }
    std::fprintf(stderr, "%s\n", text.c_str());
    return false;
  };
  for (int i = 1; i < argc; i += 2) {
    const auto flag =
        std::find_if(flags_.begin(), flags_.end(),
                     [&](const Flag& f) { return f.name == argv[i]; });
    if (flag == flags_.end()) {
      return usage(absl::StrCat("unknown argument ", argv[i]));
    }
    if (i + 1 == argc) return usage(absl::StrCat(argv[i], " needs a value"));
    absl::string_view value = argv[i + 1];
    bool ok = true;
    if (flag->text != nullptr) *flag->text = std::string(value);
    if (flag->real != nullptr) ok = absl::SimpleAtod(value, flag->real);
    if (flag->integer != nullptr) {
      int shift = 0;
      if (flag->bytes) {
        if (absl::ConsumeSuffix(&value, "KiB")) shift = 10;
        if (absl::ConsumeSuffix(&value, "MiB")) shift = 20;
        if (absl::ConsumeSuffix(&value, "GiB")) shift = 30;
      }
      ok = absl::SimpleAtoi(value, flag->integer) &&
           *flag->integer <= ~std::uint64_t{0} >> shift;
      *flag->integer <<= shift;
    }
    if (!ok) {
      return usage(absl::StrCat(argv[i], ": ", argv[i + 1], " is no value"));
    }
  }
  return true;
}

std::string CommandLine(int argc, char** argv) {
  std::string text;
  for (int i = 0; i < argc; ++i) {
    absl::StrAppend(&text, i == 0 ? "" : " ", argv[i]);
  }
  return text;
}

}  // namespace kedge
