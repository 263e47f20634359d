// The `kedge` program: what operators do with a store by hand.

#include <malloc.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <limits>
#include <string>

#include "CLI/CLI.hpp"
#include "absl/strings/str_cat.h"
#include "kedge/format/limits.h"
#include "kedge/tools/commands.h"
#include "kedge/tools/console.h"

namespace kedge {
namespace {

constexpr char kExitStatusText[] =
    "Exit status: 0 done, 1 an error (on stderr), 2 wrong usage.";

// Large buffers go back to the system when they are freed, instead of staying
// with the thread that had them: what the program says about its memory would
// not hold otherwise.
void BoundHeap() {
  constexpr int kLargeBytes = 1 << 20;
  mallopt(M_MMAP_THRESHOLD, kLargeBytes);
  mallopt(M_TRIM_THRESHOLD, kLargeBytes);
  mallopt(M_ARENA_MAX, 4);
}

// A checkpoint that somebody shortens while it is mapped ends the program.
// Nothing is lost: what is not renamed yet was never published.
extern "C" void OnSigbus(int /*signal*/) {
  static constexpr char kText[] =
      "kedge: a mapped file was shortened, or its storage failed, while it was "
      "read; the step in progress is not published; repeat it when nothing "
      "writes the checkpoint\n";
  [[maybe_unused]] const ssize_t ignored =
      write(STDERR_FILENO, kText, sizeof(kText) - 1);
  _exit(kExitError);
}

void InstallSigbusHandler() {
  struct sigaction action {};
  action.sa_handler = OnSigbus;
  sigaction(SIGBUS, &action, nullptr);
}

// A whole number of at most `max`, and nothing that merely starts like one.
CLI::Validator WholeNumber(std::uint64_t min, std::uint64_t max) {
  return CLI::Validator(
      [min, max](std::string& text) -> std::string {
        const bool digits = !text.empty() && text.size() <= 19 &&
                            std::all_of(text.begin(), text.end(), [](char c) {
                              return c >= '0' && c <= '9';
                            });
        const std::uint64_t value = digits ? std::stoull(text) : 0;
        if (digits && value >= min && value <= max) {
          text = std::to_string(value);  // leading zeros are no octal
          return {};
        }
        return "expected a whole number from " + std::to_string(min) + " to " +
               std::to_string(max) + ", found " + text;
      },
      "N");
}

// One subcommand: its options, and what it does with them.
class Program {
 public:
  Program()
      : app_(
            "kedge publishes what changes in a model's weights at each step: "
            "small, lossless, self-checking deltas, and now and then a full "
            "anchor, in a store on a file system.",
            "kedge") {
    app_.set_version_flag(
        "--version", absl::StrCat("kedge ", KEDGE_VERSION, " (format version ",
                                  kFormatVersion, ")"));
    app_.require_subcommand(1);
    app_.footer(
        "CKPT is a .safetensors file or a directory in the Hugging Face "
        "layout.\n`kedge COMMAND --help` explains a command. Exit status: 0 "
        "done, 1 an error (on stderr), 2 wrong usage; fsck: 4 findings, 8 "
        "could not check; wait: 3 not in time.");
    AddInit();
    AddPublish();
    AddLs();
    AddShow();
    AddMaterialize();
    AddFsck();
    AddGc();
    AddWait();
  }

  int Main(int argc, char** argv) {
    try {
      app_.parse(argc, argv);
    } catch (const CLI::ParseError& error) {
      // Help and version are no errors; all others are one status.
      return app_.exit(error) == 0 ? Flushed() : kExitUsage;
    }
    const absl::StatusOr<int> exit_status = chosen_();
    if (exit_status.ok()) return *exit_status;
    PrintError(exit_status.status());
    return kExitError;
  }

 private:
  static int Flushed() {
    return std::fflush(stdout) == 0 && std::ferror(stdout) == 0 ? kExitOk
                                                                : kExitError;
  }

  template <typename Command>
  CLI::App* Add(const char* name, const char* what, std::string footer,
                Command* command) {
    CLI::App* const sub = app_.add_subcommand(name, what);
    sub->footer(std::move(footer));
    sub->add_option("STORE", command->store, "Directory of the store")
        ->required();
    sub->add_flag("--json", command->json,
                  "Print the result as one JSON object");
    sub->callback(
        [this, command] { chosen_ = [command] { return Run(*command); }; });
    return sub;
  }

  // As gc has it, for those that only look.
  static void AddLeaseTtl(CLI::App* sub, std::uint64_t* seconds) {
    sub->add_option("--lease-ttl", *seconds,
                    "Seconds that a reader's lease counts, as for gc")
        ->capture_default_str()
        ->check(WholeNumber(1, std::numeric_limits<std::uint32_t>::max()));
  }

  void AddInit() {
    CLI::App* const sub = Add(
        "init", "Creates a store whose v0 is a checkpoint, with an anchor.",
        absl::StrCat("STORE must not exist, or be an empty directory. Writes "
                     "as many bytes as the checkpoint has.\n",
                     kExitStatusText),
        &init_);
    sub->add_option("CKPT", init_.checkpoint,
                    "A .safetensors file or a Hugging Face directory")
        ->required();
  }

  void AddPublish() {
    CLI::App* const sub = Add(
        "publish",
        "Publishes a checkpoint as the next version: what changed since the "
        "newest version before it.",
        absl::StrCat(
            "Reads the version before from the store; needs no second "
            "checkpoint, and at most 256 MiB beside the mapped files. Takes "
            "over the store: a writer that has it open is fenced. Elements of "
            "8 bytes count as two units of 4 bytes.\n",
            kExitStatusText),
        &publish_);
    sub->add_option("CKPT", publish_.checkpoint,
                    "A .safetensors file or a Hugging Face directory")
        ->required();
    sub->add_option("--step", publish_.step,
                    "Number of the step; above the newest version's")
        ->required()
        ->check(WholeNumber(1, kMaxStep));
    sub->add_flag("--anchor", publish_.anchor,
                  "Also write every byte of the version, for late joins");
    sub->add_flag("--resume", publish_.resume,
                  "Go on from the newest valid version below the step; later "
                  "ones are moved to .trash");
    sub->add_flag("--replace-model", publish_.replace_model,
                  "Publish a root step, an anchor without a delta: the "
                  "checkpoint may have other tensors");
  }

  void AddLs() {
    CLI::App* const sub = Add(
        "ls", "Lists the versions of a store, and who holds what.",
        absl::StrCat(
            "CHANGED counts elements (of 8 bytes: their 4-byte halves), "
            "DENSITY is out of all; BYTES are all files of the step but the "
            "anchor's; BITS/CHANGE are BYTES over CHANGED; COMMITTED is UTC. "
            "A step that readers would refuse is listed with the reason. Under "
            "the versions: the chains they form, the epochs of the writer, and "
            "the leases of readers, whose age is by this host's clock.\n",
            kExitStatusText),
        &ls_);
    AddLeaseTtl(sub, &ls_.lease_ttl_seconds);
  }

  void AddShow() {
    CLI::App* const sub =
        Add("show", "Shows the manifest of a version, or one tensor of it.",
            absl::StrCat("Sizes are in bytes; BEGIN, END and CHANGED count "
                         "elements (of 8 bytes: their 4-byte halves). S is "
                         "the tensor's L61 checksum.\n",
                         kExitStatusText),
            &show_);
    sub->add_option("STEP", show_.step, "Number of the step")
        ->required()
        ->check(WholeNumber(0, kMaxStep));
    sub->add_option("--tensor", show_.tensor, "Name of a tensor");
  }

  void AddMaterialize() {
    CLI::App* const sub = Add(
        "materialize",
        "Writes the checkpoint files of a version, byte for byte as they were "
        "published.",
        absl::StrCat(
            "Every file hash and every tensor's checksum is checked; the "
            "directory takes its name when it is complete and synced.\n",
            kExitStatusText),
        &materialize_);
    sub->add_option("--step", materialize_.step, "Number of the step")
        ->required()
        ->check(WholeNumber(0, kMaxStep));
    sub->add_option("--out", materialize_.out,
                    "Directory to create; may exist if it is empty")
        ->required();
  }

  void AddFsck() {
    CLI::App* const sub =
        Add("fsck", "Checks a store and changes nothing in it.",
            "A store that is being written to gives no false finding.\n"
            "Exit status: 0 clean, 4 findings, 8 could not check, 1 the result "
            "could not be printed, 2 wrong usage.",
            &fsck_);
    sub->add_flag("--deep", fsck_.deep,
                  "Read every byte, decode every record, and prove each "
                  "anchor equal to the one before plus the deltas");
    AddLeaseTtl(sub, &fsck_.lease_ttl_seconds);
  }

  void AddGc() {
    CLI::App* const sub = Add(
        "gc",
        "Moves the versions that the newest anchors do not need to .trash, and "
        "deletes what has lain there long enough.",
        absl::StrCat("Steps from the oldest kept anchor on stay, and those "
                     "that a reader's lease needs, so every chain stays "
                     "whole.\n",
                     kExitStatusText),
        &gc_);
    sub->add_option("--keep-anchors", gc_.keep_anchors,
                    "How many of the newest anchors to keep, at least 1")
        ->required()
        ->check(WholeNumber(1, std::numeric_limits<std::uint32_t>::max()));
    sub->add_option("--grace", gc_.grace_seconds,
                    "Seconds that something lies in .trash before a later gc "
                    "deletes it")
        ->capture_default_str()
        ->check(WholeNumber(0, std::numeric_limits<std::uint32_t>::max()));
    sub->add_option("--lease-ttl", gc_.lease_ttl_seconds,
                    "Seconds that a reader's lease counts after it was "
                    "written; after twice that it is removed")
        ->capture_default_str()
        ->check(WholeNumber(1, std::numeric_limits<std::uint32_t>::max()));
    sub->add_flag("--dry-run", gc_.dry_run,
                  "Change nothing, say what would be");
  }

  void AddWait() {
    CLI::App* const sub = Add(
        "wait", "Waits until a version is published, and prints it.",
        "Any valid version of at least the step will do. STORE itself may not "
        "be there yet.\n"
        "Exit status: 0 it is there, 3 it was not there in time, 1 an error "
        "(on stderr), 2 wrong usage.",
        &wait_);
    sub->add_option("--step", wait_.step, "Number of the step")
        ->required()
        ->check(WholeNumber(0, kMaxStep));
    sub->add_option("--timeout", wait_.timeout_seconds,
                    "Seconds to wait; 0 looks once")
        ->required()
        ->check(WholeNumber(0, std::numeric_limits<std::uint32_t>::max()));
  }

  CLI::App app_;
  std::function<absl::StatusOr<int>()> chosen_;
  InitCommand init_;
  PublishCommand publish_;
  LsCommand ls_;
  ShowCommand show_;
  MaterializeCommand materialize_;
  FsckCommand fsck_;
  GcCommand gc_;
  WaitCommand wait_;
};

}  // namespace
}  // namespace kedge

int main(int argc, char** argv) {
  kedge::BoundHeap();
  kedge::InstallSigbusHandler();
  try {
    return kedge::Program().Main(argc, argv);
  } catch (const std::exception& error) {
    // No error of kedge is an exception; this one is from below, as when
    // memory is used up.
    kedge::PrintError(absl::InternalError(error.what()));
    return kedge::kExitError;
  }
}
