#include "kedge/tests/tools/program_runner.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>

#include "kedge/tests/tools/checkpoint_files.h"

namespace kedge::testing {
namespace {

std::uint64_t PrivateBytesOf(pid_t process) {
  std::ifstream status("/proc/" + std::to_string(process) + "/status");
  std::string word;
  while (status >> word) {
    if (word != "RssAnon:") continue;
    std::uint64_t kilobytes = 0;
    status >> kilobytes;
    return kilobytes * 1024;
  }
  return 0;
}

}  // namespace

ProgramResult RunKedge(const std::vector<std::string>& arguments,
                       const std::string& stdout_path) {
  const TemporaryDirectory temporary;
  const std::string out =
      stdout_path.empty() ? temporary.Path("out") : stdout_path;
  const std::string err = temporary.Path("err");
  std::vector<char*> argv;
  std::string program = KEDGE_PROGRAM;
  std::vector<std::string> copies = arguments;
  argv.push_back(program.data());
  for (std::string& argument : copies) argv.push_back(argument.data());
  argv.push_back(nullptr);

  const pid_t child = fork();
  if (child == 0) {
    const int out_file = open(out.c_str(), O_WRONLY | O_CREAT, 0644);
    const int err_file = open(err.c_str(), O_WRONLY | O_CREAT, 0644);
    dup2(out_file, STDOUT_FILENO);
    dup2(err_file, STDERR_FILENO);
    execv(argv[0], argv.data());
    _exit(127);
  }
  ProgramResult result;
  int status = 0;
  while (waitpid(child, &status, WNOHANG) == 0) {
    result.peak_private_bytes =
        std::max(result.peak_private_bytes, PrivateBytesOf(child));
    usleep(1000);
  }
  if (WIFEXITED(status)) result.exit_status = WEXITSTATUS(status);
  EXPECT_NE(result.exit_status, 127) << KEDGE_PROGRAM << " cannot be run";
  if (stdout_path.empty()) result.out = ReadFile(out);
  result.err = ReadFile(err);
  return result;
}

}  // namespace kedge::testing
