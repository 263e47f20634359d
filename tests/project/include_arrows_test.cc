// Goal: sources include only what the layout allows: format <- engine/{io, cpu,
// cuda} <- {writer, reader} <- the rest, siblings never each other, and each
// library only where it belongs. Method: reads every include of every source of
// the tree; canaries prove that each forbidden arrow is found.

#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <map>
#include <regex>
#include <set>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

namespace kedge {
namespace {

// Path from the root of the tree, with forward slashes -> text.
using Sources = std::map<std::string, std::string>;

bool StartsWith(const std::string& text, const std::string& prefix) {
  return text.compare(0, prefix.size(), prefix) == 0;
}
bool EndsWith(const std::string& text, const std::string& suffix) {
  return text.size() >= suffix.size() &&
         text.compare(text.size() - suffix.size(), suffix.size(), suffix) == 0;
}

// The layer a path belongs to: its first folder, or engine/ and the next one.
std::string LayerOf(const std::string& path) {
  const std::size_t slash = path.find('/');
  if (slash == std::string::npos) return "";
  const std::string top = path.substr(0, slash);
  if (top != "engine") return top;
  const std::size_t second = path.find('/', slash + 1);
  return second == std::string::npos ? top : path.substr(0, second);
}

const std::set<std::string>& LayersBelow(const std::string& layer) {
  static const std::set<std::string> format = {"format"};
  static const std::set<std::string> on_device = {"format", "engine/device"};
  static const std::set<std::string> engine = {
      "format", "engine/io", "engine/device", "engine/cpu", "engine/cuda"};
  static const std::set<std::string> libraries = {
      "format",      "engine/io", "engine/device", "engine/cpu",
      "engine/cuda", "writer",    "reader"};
  static const std::set<std::string> examples = {
      "format",      "engine/io", "engine/device", "engine/cpu",
      "engine/cuda", "writer",    "reader",        "capi"};
  static const std::set<std::string> tests = {
      "format",      "engine/io", "engine/device", "engine/cpu",
      "engine/cuda", "writer",    "reader",        "capi",
      "python",      "tools",     "examples",      "bench"};
  static const std::set<std::string> none;
  static const std::map<std::string, const std::set<std::string>&> below = {
      {"format", none},
      {"engine/io", format},
      {"engine/device", format},
      {"engine/cpu", on_device},
      {"engine/cuda", on_device},
      {"writer", engine},
      {"reader", engine},
      {"capi", libraries},
      {"python", libraries},
      {"tools", libraries},
      {"examples", examples},
      {"bench", libraries},
      {"tests", tests}};
  const auto found = below.find(layer);
  return found == below.end() ? none : found->second;
}

const std::set<std::string>& Layers() {
  static const std::set<std::string> layers = {
      "format",   "engine/io", "engine/device", "engine/cpu", "engine/cuda",
      "writer",   "reader",    "capi",          "python",     "tools",
      "examples", "bench",     "tests"};
  return layers;
}

// The layers that may use a library, by how its headers begin; absl is allowed
// everywhere, as is what the C++ standard and the system bring.
bool MayUseLibrary(const std::string& layer, const std::string& header,
                   bool* is_library) {
  static const std::vector<std::pair<std::string, std::set<std::string>>>
      libraries = {
          {"flatbuffers/", {"format", "tests"}},
          {"xxhash.h", {"format", "tests", "bench"}},
          {"xxh_x86dispatch.h", {"format"}},
          {"hwy/", {"engine/cpu", "tests", "bench"}},
          {"liburing", {"engine/io", "tests", "bench"}},
          {"cuda",
           {"engine/cuda", "capi", "python", "examples", "tests", "bench"}},
          {"cub/", {"engine/cuda", "tests", "bench"}},
          {"gtest/", {"tests"}},
          {"gmock/", {"tests"}},
          {"benchmark/", {"bench"}},
          {"CLI/", {"tools", "examples"}},
          {"nlohmann/", {"tools", "examples", "tests"}},
          {"pybind11/", {"python"}},
      };
  *is_library = true;
  if (EndsWith(header, "_generated.h")) {
    return layer == "format" || layer == "tests";
  }
  for (const auto& [prefix, layers] : libraries) {
    if (StartsWith(header, prefix)) return layers.count(layer) != 0;
  }
  *is_library = false;
  return true;
}

// Of the C++ standard library, what format/ has no use for: no I/O, no threads.
bool IsIoOrThreads(const std::string& header) {
  static const std::set<std::string> headers = {
      "atomic",  "barrier",   "condition_variable", "filesystem",
      "fstream", "future",    "iostream",           "latch",
      "mutex",   "semaphore", "shared_mutex",       "stop_token",
      "thread"};
  return headers.count(header) != 0;
}

bool IsSystemHeader(const std::string& header) {
  static const std::vector<std::string> folders = {
      "sys/", "linux/", "arpa/", "netinet/", "asm/", "bits/"};
  if (header.find('/') == std::string::npos) return true;
  return std::any_of(folders.begin(), folders.end(),
                     [&](const auto& f) { return StartsWith(header, f); });
}

// Why `path` must not include `header`; empty if it may.
std::string Objection(const Sources& sources, const std::string& path,
                      const std::string& header, bool quoted) {
  const std::string layer = LayerOf(path);
  if (header.find("..") != std::string::npos) return "a path with ..";

  // Written from spec/ alone, so that it can prove that spec/ suffices.
  if (StartsWith(path, "tests/support/plain_decoder/") &&
      StartsWith(header, "kedge/") && !EndsWith(path, "_test.cc")) {
    return "the plain decoder uses no header of kedge";
  }
  if (StartsWith(header, "kedge/")) {
    const std::string target = header.substr(6);
    if (sources.count(target) == 0) return "no such file";
    const std::string to = LayerOf(target);
    if (to == layer || LayersBelow(layer).count(to) != 0) return "";
    return layer + " must not include " + to;
  }
  bool is_library = false;
  if (!MayUseLibrary(layer, header, &is_library)) {
    return layer + " must not use this library";
  }
  if (is_library || StartsWith(header, "absl/")) return "";
  if (quoted) {
    // A neighbour: for what is no header of its own right, such as a .inc file.
    const std::string folder = path.substr(0, path.rfind('/') + 1);
    if (sources.count(folder + header) != 0) return "";
    if (layer == "tests" &&
        sources.count("tests/support/plain_decoder/" + header) != 0) {
      return "";
    }
    return "headers of kedge are included as \"kedge/...\"";
  }
  if (!IsSystemHeader(header)) return "a library that no layer declares";
  if (layer == "format" && (IsIoOrThreads(header) || EndsWith(header, ".h"))) {
    return "format has no I/O, no threads, no system calls";
  }
  return "";
}

std::vector<std::string> FindViolations(const Sources& sources) {
  static const std::regex include(
      R"re(^[ \t]*#[ \t]*include[ \t]*([<"])([^>"]+)[>"])re");
  std::vector<std::string> violations;
  for (const auto& [path, text] : sources) {
    const std::string layer = LayerOf(path);
    if (Layers().count(layer) == 0) {
      violations.push_back(path + ": a source outside every layer");
      continue;
    }
    std::istringstream lines(text);
    std::string line;
    for (int number = 1; std::getline(lines, line); ++number) {
      std::smatch match;
      if (line.find('#') == std::string::npos ||
          !std::regex_search(line, match, include)) {
        continue;
      }
      const std::string objection =
          Objection(sources, path, match[2], match[1] == "\"");
      if (objection.empty()) continue;
      violations.push_back(path + ":" + std::to_string(number) + ": " +
                           match[2].str() + ": " + objection);
    }
  }
  return violations;
}

bool IsSource(const std::filesystem::path& path) {
  static const std::set<std::string> extensions = {
      ".h", ".hh", ".hpp", ".cuh", ".inc", ".c", ".cc", ".cpp", ".cu"};
  return extensions.count(path.extension().string()) != 0;
}

Sources ReadTree(const std::filesystem::path& root) {
  Sources sources;
  auto at = std::filesystem::recursive_directory_iterator(root);
  for (const auto& entry : at) {
    const std::string name = entry.path().filename().string();
    if (entry.is_symlink() ||
        (entry.is_directory() && (name == "build" || name[0] == '.'))) {
      at.disable_recursion_pending();
      continue;
    }
    if (!entry.is_regular_file() || !IsSource(entry.path())) continue;
    std::ifstream file(entry.path(), std::ios::binary);
    std::ostringstream text;
    text << file.rdbuf();
    sources[std::filesystem::relative(entry.path(), root).generic_string()] =
        text.str();
  }
  return sources;
}

TEST(IncludeArrowsTest, TheTreeFollowsTheLayout) {
  const Sources sources = ReadTree(KEDGE_SOURCE_DIR);
  ASSERT_EQ(sources.count("format/manifest.h"), 1u);
  ASSERT_EQ(sources.count("tests/project/include_arrows_test.cc"), 1u);
  std::string all;
  for (const std::string& violation : FindViolations(sources)) {
    all += violation + "\n";
  }
  EXPECT_EQ(all, "");
}

// --- Canaries ----------------------------------------------------------------

// One header in each layer, and `line` in `from`.
std::vector<std::string> Canary(const std::string& from,
                                const std::string& line) {
  Sources sources;
  for (const std::string& layer : Layers()) sources[layer + "/x.h"] = "";
  sources[from] = "// A comment.\n" + line + "\n";
  return FindViolations(sources);
}

TEST(IncludeArrowsTest, EveryArrowThatIsNotDrawnIsFound) {
  const std::map<std::string, std::set<std::string>> drawn = {
      {"format", {}},
      {"engine/io", {"format"}},
      {"engine/cpu", {"format", "engine/device"}},
      {"engine/device", {"format"}},
      {"engine/cuda", {"format", "engine/device"}},
      {"writer",
       {"format", "engine/io", "engine/device", "engine/cpu", "engine/cuda"}},
      {"reader",
       {"format", "engine/io", "engine/device", "engine/cpu", "engine/cuda"}}};
  for (const std::string& from : Layers()) {
    for (const std::string& to : Layers()) {
      const auto arrows = drawn.find(from);
      const bool above = arrows == drawn.end();
      const bool allowed =
          from == to || from == "tests" ||
          (from == "examples" && to == "capi") ||
          (above ? drawn.count(to) != 0 : arrows->second.count(to) != 0);
      const auto found =
          Canary(from + "/y.cc", "#include \"kedge/" + to + "/x.h\"");
      EXPECT_EQ(found.empty(), allowed) << from << " -> " << to;
    }
  }
}

TEST(IncludeArrowsTest, MisplacedLibrariesAreFound) {
  const std::vector<std::pair<std::string, std::string>> wrong = {
      {"format/y.cc", "#include <thread>"},
      {"format/y.cc", "#include <fstream>"},
      {"format/y.h", "#include <unistd.h>"},
      {"format/y.h", "#include <sys/mman.h>"},
      {"format/y.h", "  #  include <cuda_runtime_api.h>"},
      {"format/y.cc", "#include <hwy/highway.h>"},
      {"engine/io/y.cc", "#include \"hwy/highway.h\""},
      {"engine/cpu/y.cc", "#include <liburing.h>"},
      {"engine/cpu/y.cc", "#include <flatbuffers/flatbuffers.h>"},
      {"reader/y.cc", "#include \"step_manifest_generated.h\""},
      {"writer/y.cc", "#include <nlohmann/json.hpp>"},
      {"writer/y.cc", "#include \"gtest/gtest.h\""},
      {"writer/y.cc", "#include <boost/any.hpp>"},
      {"writer/y.cc", "#include \"../format/x.h\""},
      {"writer/y.cc", "#include \"format/x.h\""},
      {"writer/y.cc", "#include \"kedge/format/missing.h\""},
      {"tests/support/plain_decoder/y.cc", "#include \"kedge/format/x.h\""},
      {"stray/y.cc", ""}};
  for (const auto& [from, line] : wrong) {
    EXPECT_EQ(Canary(from, line).size(), 1u) << from << ": " << line;
  }
}

TEST(IncludeArrowsTest, WhatTheLayoutAllowsPasses) {
  const std::vector<std::pair<std::string, std::string>> right = {
      {"format/y.cc", "#include <vector>"},
      {"format/y.cc", "#include \"absl/status/status.h\""},
      {"format/y.cc", "#include <flatbuffers/flatbuffers.h>"},
      {"format/y.cc", "#include \"step_manifest_generated.h\""},
      {"format/y.cc", "#include <xxhash.h>"},
      {"engine/io/y.cc", "#include <sys/mman.h>"},
      {"engine/cpu/y.cc", "#include \"hwy/highway.h\""},
      {"engine/cpu/y.cc", "#include \"x.h\""},
      {"tools/y.cc", "#include <CLI/CLI.hpp>"},
      {"bench/y.cc", "#include <benchmark/benchmark.h>"},
      {"tests/y.cc", "#include <gtest/gtest.h>"},
      {"format/y.cc", "// #include <thread>"}};
  for (const auto& [from, line] : right) {
    EXPECT_TRUE(Canary(from, line).empty()) << from << ": " << line;
  }
}

}  // namespace
}  // namespace kedge
