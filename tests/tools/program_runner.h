#ifndef KEDGE_TESTS_TOOLS_PROGRAM_RUNNER_H_
#define KEDGE_TESTS_TOOLS_PROGRAM_RUNNER_H_

// Runs the built `kedge` program as an operator would, and hears what it says.

#include <cstdint>
#include <string>
#include <vector>

namespace kedge::testing {

struct ProgramResult {
  int exit_status = -1;  // -1: ended by a signal
  std::string out;
  std::string err;
  // The most memory it had of its own, seen by looking every millisecond:
  // pages of no file (RssAnon).
  std::uint64_t peak_private_bytes = 0;
};

// Runs KEDGE_PROGRAM with `arguments`. `stdout_path`: a file in place of what
// becomes ProgramResult::out.
ProgramResult RunKedge(const std::vector<std::string>& arguments,
                       const std::string& stdout_path = "");

}  // namespace kedge::testing

#endif  // KEDGE_TESTS_TOOLS_PROGRAM_RUNNER_H_
