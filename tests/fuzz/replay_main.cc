// Runs a fuzz target without libFuzzer, under any compiler: over the corpus it
// is given, and over a fixed number of mutations of it. The same inputs every
// time, unless KEDGE_TEST_SEED says otherwise. An input that stops the process
// is left behind in a file.
//
//   fuzz_replay_TARGET PATH [MUTATIONS]    PATH: a folder of inputs, or one

#include <fcntl.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>
#include <string>
#include <vector>

#include "kedge/tests/fuzz/fuzz_input.h"

// There when a sanitizer is linked.
extern "C" void __sanitizer_set_death_callback(void (*callback)())  // NOLINT
    __attribute__((weak));

namespace kedge::fuzz {
namespace {

using Bytes = std::vector<std::uint8_t>;

// What runs now, for the handlers.
const Bytes* current_input = nullptr;
char left_behind[4096];

void LeaveInputBehind() {
  const Bytes* const input = current_input;
  current_input = nullptr;
  if (input == nullptr) return;
  const int file = open(left_behind, O_CREAT | O_TRUNC | O_WRONLY, 0644);
  if (file < 0) return;
  const ssize_t wrote = write(file, input->data(), input->size());
  close(file);
  if (wrote != static_cast<ssize_t>(input->size())) return;
  const char text[] = "the input that did it is in ";
  (void)!write(2, text, sizeof(text) - 1);
  (void)!write(2, left_behind, std::strlen(left_behind));
  (void)!write(2, "\n", 1);
}

void OnSignal(int number) {
  LeaveInputBehind();
  signal(number, SIG_DFL);
  raise(number);
}

Bytes ReadInput(const std::filesystem::path& path) {
  std::ifstream stream(path, std::ios::binary);
  const std::string text((std::istreambuf_iterator<char>(stream)),
                         std::istreambuf_iterator<char>());
  if (!stream.good() && !stream.eof()) {
    std::fprintf(stderr, "cannot read %s\n", path.c_str());
    std::exit(8);
  }
  return Bytes(text.begin(), text.end());
}

void Run(Bytes input) {
  input.shrink_to_fit();  // so that a read beyond it is seen
  current_input = &input;
  if (LLVMFuzzerTestOneInput(input.data(), input.size()) != 0) std::abort();
  current_input = nullptr;
}

class Mutator {
 public:
  explicit Mutator(std::uint64_t seed) : random_(seed) {}

  std::size_t Below(std::size_t bound) {
    return bound == 0 ? 0 : random_() % bound;
  }

  // A few changes of `input`, one of `corpus`.
  void Change(const std::vector<Bytes>& corpus, Bytes* input) {
    for (std::size_t n = 1 + Below(4); n > 0; --n) ChangeOnce(corpus, input);
  }

 private:
  void ChangeOnce(const std::vector<Bytes>& corpus, Bytes* input) {
    constexpr std::uint64_t kNumbers[] = {
        0,          1,           0x7f,       0x80,
        0xff,       0x7fff,      0xffff,     0x7fffffff,
        0x80000000, 0xffffffff,  0xfffffff8, std::uint64_t{1} << 32,
        1ull << 63, ~0ull >> 1u, ~0ull,      ~0ull - 7};
    if (input->empty()) input->push_back(0);
    const std::size_t at = Below(input->size());
    const std::size_t left = input->size() - at;
    switch (Below(8)) {
      case 0:
        (*input)[at] ^= static_cast<std::uint8_t>(1u << Below(8));
        break;
      case 1:
        (*input)[at] = static_cast<std::uint8_t>(random_());
        break;
      case 2: {  // a number that somebody may have forgotten
        const std::uint64_t number = kNumbers[Below(std::size(kNumbers))];
        const std::size_t width = std::size_t{1} << Below(4);
        std::memcpy(input->data() + at, &number, std::min(width, left));
        break;
      }
      case 3:  // a number near the one there
        (*input)[at] += static_cast<std::uint8_t>(Below(9)) - 4;
        break;
      case 4:
        input->erase(
            input->begin() + at,
            input->begin() + at + 1 + Below(std::min<std::size_t>(left, 32)));
        break;
      case 5: {  // a part of it once more
        const std::size_t from = Below(input->size());
        const Bytes part(
            input->begin() + from,
            input->begin() + from +
                Below(std::min<std::size_t>(input->size() - from + 1, 64)));
        input->insert(input->begin() + at, part.begin(), part.end());
        break;
      }
      case 6: {  // what another one has there
        const Bytes& other = corpus[Below(corpus.size())];
        if (at >= other.size()) break;
        const std::size_t count = Below(std::min(left, other.size() - at) + 1);
        std::copy_n(other.begin() + at, count, input->begin() + at);
        break;
      }
      default:
        if (Below(4) == 0) input->resize(at);
        break;
    }
  }

  std::mt19937_64 random_;
};

int Main(int argc, char** argv) {
  if (argc < 2) {
    std::fprintf(stderr, "usage: %s PATH [MUTATIONS]\n", argv[0]);
    return 8;
  }
  const std::filesystem::path program(argv[0]);
  std::snprintf(left_behind, sizeof(left_behind), "crash-%s",
                program.filename().c_str());
  for (const int number : {SIGABRT, SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTERM}) {
    signal(number, OnSignal);
  }
  if (__sanitizer_set_death_callback != nullptr) {
    __sanitizer_set_death_callback(LeaveInputBehind);
  }

  std::vector<std::filesystem::path> paths;
  if (std::filesystem::is_directory(argv[1])) {
    for (const auto& entry : std::filesystem::directory_iterator(argv[1])) {
      paths.push_back(entry.path());
    }
    std::sort(paths.begin(), paths.end());
  } else {
    paths.push_back(argv[1]);
  }
  std::vector<Bytes> corpus;
  for (const auto& path : paths) corpus.push_back(ReadInput(path));
  if (corpus.empty()) {
    std::fprintf(stderr, "no inputs in %s\n", argv[1]);
    return 8;
  }
  for (const Bytes& input : corpus) Run(input);

  const char* const seed_text = std::getenv("KEDGE_TEST_SEED");
  const std::uint64_t seed =
      seed_text != nullptr ? std::strtoull(seed_text, nullptr, 0) : 1;
  const long mutations = argc > 2 ? std::strtol(argv[2], nullptr, 0) : 0;
  std::printf("%zu inputs; %ld mutations with KEDGE_TEST_SEED=%llu\n",
              corpus.size(), mutations, static_cast<unsigned long long>(seed));
  std::fflush(stdout);
  Mutator mutator(seed);
  for (long i = 0; i < mutations; ++i) {
    Bytes input = corpus[mutator.Below(corpus.size())];
    mutator.Change(corpus, &input);
    Run(std::move(input));
  }
  return 0;
}

}  // namespace
}  // namespace kedge::fuzz

int main(int argc, char** argv) { return kedge::fuzz::Main(argc, argv); }
