// kedge_make_golden DIR: writes DIR/store and DIR/versions.txt, the golden
// store of this format version. Before a release a change of the format
// rewrites tests/golden/v1 with it, in the commit that says why; afterwards a
// new format version gets a folder of its own, and the old ones stay as they
// are.

#include <filesystem>
#include <fstream>
#include <iostream>
#include <string>

#include "golden_model.h"

int main(int argc, char** argv) {
  if (argc != 2) {
    std::cerr << "usage: kedge_make_golden DIR (which does not exist yet)\n";
    return 2;
  }
  const std::string directory = argv[1];
  std::error_code error;
  if (!std::filesystem::create_directory(directory, error)) {
    std::cerr << directory
              << ": not created: " << (error ? error.message() : "it exists")
              << "\n";
    return 1;
  }
  const absl::Status status = kedge::WriteGoldenStore(directory + "/store");
  if (!status.ok()) {
    std::cerr << status << "\n";
    return 1;
  }
  std::ofstream out(directory + "/versions.txt", std::ios::binary);
  out << kedge::GoldenText();
  out.close();
  return out ? 0 : 1;
}
