#include "kedge/reader/fsck.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <thread>
#include <tuple>
#include <type_traits>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "kedge/engine/io/lease.h"
#include "kedge/engine/io/store.h"
#include "kedge/format/layout.h"
#include "kedge/format/limits.h"
#include "kedge/format/status.h"
#include "kedge/reader/fsck_data.h"
#include "kedge/reader/fsck_directory.h"
#include "kedge/reader/fsck_findings.h"

namespace kedge {
namespace fsck {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::size_t kTablesKept = 4;
// How often a directory that has findings is looked at, and how often the store
// is listed again for steps that came meanwhile.
constexpr int kAttempts = 3;
constexpr int kListings = 3;
constexpr std::size_t kMostStates = 20;  // tensors named for one step

std::string Expected(absl::string_view what, absl::string_view expected,
                     absl::string_view found) {
  return absl::StrCat(what, ": expected ", expected, ", found ", found);
}

std::string StepRange(std::uint64_t first, std::uint64_t last) {
  return first == last ? absl::StrCat("v", first)
                       : absl::StrCat("v", first, " to v", last);
}

struct PendingFinding {
  Finding finding;
  std::vector<Subject> subjects;
};

// What is known of a step directory after it was checked.
struct StepRecord {
  enum class State { kUnpublished, kDamaged, kFenced, kOk };
  State state = State::kDamaged;
  Subject subject;
  std::optional<Hash128> hash;  // if its COMMIT is sound
  Hash128 digest;               // of the version, if kOk
};

// A step or an anchor as the checks of one attempt left it.
template <class Manifest>
struct Checked {
  Directory directory;
  Manifest manifest;
  std::shared_ptr<const TensorTable> table;
  bool sound = false;   // the manifest keeps every rule
  bool fenced = false;  // steps
  FindingList findings;

  Subject subject() const { return {directory.name, directory.commit_key}; }
};
using CheckedStep = Checked<StepManifest>;
using CheckedAnchor = Checked<AnchorManifest>;

// S of every tensor at a version, as far as the files have told it.
struct ChainState {
  std::optional<VersionId> id;  // nothing: the chain is broken here
  std::shared_ptr<const TensorTable> table;
  std::vector<std::uint64_t> l61;
  std::vector<bool> known;
  std::uint64_t unknown = 0;
  std::shared_ptr<const Metadata> metadata;  // null: unknown

  void Forget(const std::shared_ptr<const TensorTable>& of) {
    table = of;
    l61.assign(of->size(), 0);
    known.assign(of->size(), false);
    unknown = of->size();
    metadata = nullptr;
  }
  void Learn(std::uint32_t tensor, std::uint64_t sum) {
    l61[tensor] = sum;
    if (!known[tensor]) --unknown;
    known[tensor] = true;
  }
};

// Versions in a row, and why the first one does not follow from another.
struct Segment {
  enum class Start { kRoot, kPruned, kDamage };
  FsckChain chain;
  VersionId last;
  std::optional<VersionId> last_joinable;
  Start start = Start::kDamage;
  // The first version follows this one, of this digest; its sums were not at
  // hand.
  std::optional<VersionId> base;
  Hash128 base_digest;
  std::vector<Subject> subjects;  // of versions before the first anchor
};

class Run {
 public:
  explicit Run(const FsckOptions& options)
      : options_(options),
        fs_(options.fs != nullptr ? options.fs : PosixFileSystem()),
        root_(options.store_path),
        pool_(options.io_threads) {}

  absl::StatusOr<FsckReport> Check() {
    const auto start = Clock::now();
    KEDGE_ASSIGN_OR_RETURN(const bool go_on, CheckStoreFile());
    if (go_on) KEDGE_RETURN_IF_ERROR(CheckEverything());
    KEDGE_RETURN_IF_ERROR(Judge());
    report_.deep = options_.deep;
    report_.bytes_checked = bytes_.load();
    report_.records_checked = data_.records.load();
    report_.seconds =
        std::chrono::duration<double>(Clock::now() - start).count();
    return std::move(report_);
  }

 private:
  // ----------------------------------------------------------------- helpers
  std::string PathOf(absl::string_view name) const {
    return JoinPath(root_, name);
  }

  void Add(Finding finding, std::vector<Subject> subjects = {}) {
    pending_.push_back({std::move(finding), std::move(subjects)});
  }
  void AddAll(FindingList* findings, const std::vector<Subject>& subjects) {
    for (Finding& finding : findings->Take()) Add(std::move(finding), subjects);
  }

  bool IsThere(const Subject& subject) const {
    return CommitKey(*fs_, PathOf(subject.directory)) == subject.commit_key;
  }

  // Asks until the answer is yes, for the time a store may be in motion.
  template <class Predicate>
  bool Settle(Predicate predicate) const {
    const auto deadline =
        Clock::now() + std::chrono::duration<double>(options_.settle_seconds);
    for (auto pause = std::chrono::milliseconds(1);;
         pause = std::min(2 * pause, std::chrono::milliseconds(50))) {
      if (predicate()) return true;
      if (Clock::now() >= deadline) return false;
      std::this_thread::sleep_for(pause);
    }
  }

  void Advance(std::uint64_t bytes) {
    bytes_.fetch_add(bytes, std::memory_order_relaxed);
    if (!options_.progress) return;
    const std::lock_guard<std::mutex> lock(progress_mutex_);
    done_ += bytes;
    options_.progress(std::min(done_, total_), total_);
  }

  // -------------------------------------------------------------- whole store
  // Whether the rest can be checked.
  absl::StatusOr<bool> CheckStoreFile() {
    const std::string path = PathOf(kStoreFileName);
    const auto bytes = ReadFile(*fs_, path, 2 * kStoreBytes);
    if (absl::IsNotFound(bytes.status())) {
      KEDGE_ASSIGN_OR_RETURN(const auto names, fs_->List(root_));
      const auto trace =
          std::find_if(names.begin(), names.end(), [](const std::string& name) {
            return name == kHeadFileName || name == kEpochsDirectoryName ||
                   ParseStepDirectoryName(name).has_value();
          });
      if (trace == names.end()) {
        return absl::NotFoundError(
            absl::StrCat(root_, ": no kedge store: ", kStoreFileName,
                         " is missing; check the path"));
      }
      Add(MakeFinding(Id::kStoreFileMissing, kStoreFileName,
                      absl::StrCat("expected a file of ", kStoreBytes,
                                   " bytes, found none beside ", *trace)));
      return false;
    }
    if (!bytes.ok() && !absl::IsDataLoss(bytes.status())) return bytes.status();
    absl::Status status = bytes.status();
    if (status.ok()) {
      const auto info = ParseStore(kStoreFileName, *bytes);
      if (absl::IsUnimplemented(info.status())) {
        return Annotate(info.status(), root_);
      }
      if (info.ok()) {
        info_ = *info;
        Advance(bytes->size());
        return true;
      }
      status = info.status();
    }
    Add(FromStatus(Id::kStoreFileBad, kStoreFileName, path, status));
    return false;
  }

  absl::Status CheckEverything() {
    KEDGE_ASSIGN_OR_RETURN(std::vector<std::string> names, fs_->List(root_));
    const auto kind = fs_->KindOf(root_);
    network_ = kind.ok() && *kind == StorageKind::kNetwork;
    summer_ = std::make_unique<L61Summer>(L61Key::FromSeed(info_.l61_seed));
    data_.fs = fs_;
    data_.pool = &pool_;
    data_.summer = summer_.get();
    data_.run = info_.run;
    data_.advance = [this](std::uint64_t bytes) { Advance(bytes); };
    if (options_.progress) total_ = bytes_.load() + Estimate(names);

    KEDGE_RETURN_IF_ERROR(CheckNames(names));
    KEDGE_RETURN_IF_ERROR(ReadEpochs());

    // Steps, oldest first, and then those that came meanwhile.
    std::set<std::uint64_t> checked;
    for (int listing = 0; listing < kListings; ++listing) {
      std::vector<std::uint64_t> steps;
      for (const std::string& name : names) {
        const auto step = ParseStepDirectoryName(name);
        if (step && checked.insert(*step).second) steps.push_back(*step);
      }
      if (steps.empty() && listing > 0) break;
      std::sort(steps.begin(), steps.end());
      for (const std::uint64_t step : steps) {
        // A lower one than the last can only continue from what is known of
        // files, not from the sums at hand.
        if (state_.id && state_.id->step >= step) state_.id.reset();
        KEDGE_RETURN_IF_ERROR(CheckStep(step));
      }
      auto again = fs_->List(root_);
      if (!again.ok()) break;
      names = *std::move(again);
    }
    EndSegment();

    KEDGE_RETURN_IF_ERROR(CheckTables(names));
    KEDGE_RETURN_IF_ERROR(CheckEpochs());
    CheckHead();
    CheckJoins();
    CheckStaging();
    CheckLeases();
    CheckRanks();
    return absl::OkStatus();
  }

  // What there is to read, for the progress bar alone.
  std::uint64_t Estimate(const std::vector<std::string>& names) const {
    std::uint64_t total = 0;
    const auto add_directory = [&](const std::string& path) {
      const auto inside = fs_->List(path);
      if (!inside.ok()) return;
      for (const std::string& name : *inside) {
        if (name != kManifestFileName &&
            !(options_.deep && ParseDataFileName(name))) {
          continue;
        }
        const auto info = fs_->Stat(JoinPath(path, name));
        if (info.ok() && info->type == FileType::kRegular) {
          total += std::min(info->bytes, kMaxFileBytes);
        }
      }
    };
    for (const std::string& name : names) {
      if (!ParseStepDirectoryName(name)) continue;
      add_directory(PathOf(name));
      add_directory(JoinPath(PathOf(name), kAnchorDirectoryName));
    }
    return total;
  }

  absl::Status CheckNames(const std::vector<std::string>& names) {
    FindingList findings;
    std::map<std::string, std::string> by_lower;
    for (const absl::string_view name :
         {kStoreFileName, kHeadFileName, kEpochsDirectoryName,
          kStagingDirectoryName, kTrashDirectoryName, kLeasesDirectoryName,
          kRanksDirectoryName}) {
      by_lower.emplace(absl::AsciiStrToLower(name), std::string(name));
    }
    for (const std::string& name : names) {
      const std::string lower = absl::AsciiStrToLower(name);
      const auto known = by_lower.find(lower);
      if (known != by_lower.end() && known->second == name) {
        if (name == kStoreFileName || name == kHeadFileName) continue;
        const auto info = fs_->Stat(PathOf(name));
        if (info.ok() && info->type != FileType::kDirectory) {
          findings.Add(MakeFinding(
              Id::kNotADirectory, name,
              Expected("file type", "a directory", "something else")));
        }
        continue;
      }
      if (ParseStepDirectoryName(name)) continue;
      const auto table = ParseTensorTableFileName(name);
      if (table && TensorTableFileName(*table) == name) continue;
      std::string meant;
      if (known != by_lower.end()) {
        meant = known->second;
      } else if (const auto hash = ParseTensorTableFileName(lower)) {
        meant = TensorTableFileName(*hash);
      } else if (absl::string_view digits = lower;
                 absl::ConsumePrefix(&digits, "step_")) {
        std::uint64_t step = 0;
        if (absl::SimpleAtoi(digits, &step) && step <= kMaxStep &&
            digits.find_first_not_of("0123456789") == absl::string_view::npos) {
          meant = StepDirectoryName(step);
        }
      }
      findings.Add(meant.empty()
                       ? MakeFinding(Id::kUnknownName, Shown(name),
                                     "expected no such name in a store")
                       : MakeFinding(Id::kNameCase, Shown(name),
                                     Expected("name", meant, Shown(name))));
    }
    AddAll(&findings, {});
    return absl::OkStatus();
  }

  // ------------------------------------------------------------------- epochs
  // Reads the epoch files anew. The findings are those of the last time.
  absl::Status ReadEpochs() {
    epoch_findings_.Clear();
    epochs_bad_ = false;
    const std::string directory = PathOf(kEpochsDirectoryName);
    const auto names = fs_->List(directory);
    if (!names.ok()) {
      if (absl::IsResourceExhausted(names.status())) return names.status();
      if (!absl::IsNotFound(names.status())) {
        epochs_bad_ = true;
        epoch_findings_.Add(FromStatus(Id::kUnreadable, kEpochsDirectoryName,
                                       directory, names.status()));
      }
      epochs_.clear();
      return absl::OkStatus();
    }
    std::map<std::uint32_t, EpochInfo> epochs;
    for (const std::string& base : *names) {
      const std::string name = absl::StrCat(kEpochsDirectoryName, "/", base);
      const std::string path = JoinPath(directory, base);
      const auto number = ParseEpochFileName(base);
      if (!number) {
        epoch_findings_.Add(
            MakeFinding(Id::kUnknownName,
                        absl::StrCat(kEpochsDirectoryName, "/", Shown(base)),
                        "expected the number of an epoch, 8 digits"));
        continue;
      }
      auto bytes = ReadFile(*fs_, path, 2 * kEpochBytes);
      if (absl::IsNotFound(bytes.status())) continue;  // pruned meanwhile
      if (absl::IsResourceExhausted(bytes.status())) return bytes.status();
      const auto bad = [&](Finding finding) {
        epochs_bad_ = true;
        epoch_findings_.Add(std::move(finding));
      };
      if (!bytes.ok()) {
        bad(FromStatus(Id::kEpochBad, name, path, bytes.status()));
        continue;
      }
      const auto epoch = ParseEpoch(name, *bytes);
      if (!epoch.ok()) {
        bad(FromStatus(Id::kEpochBad, name, path, epoch.status()));
      } else if (epoch->run != info_.run) {
        bad(MakeFinding(Id::kEpochBad, name,
                        Expected("run id", ToHex(info_.run), ToHex(epoch->run)),
                        8));
      } else if (epoch->epoch != *number) {
        bad(MakeFinding(Id::kEpochBad, name,
                        Expected("epoch", absl::StrCat(*number),
                                 absl::StrCat(epoch->epoch)),
                        32));
      } else {
        epochs.emplace(*number, *epoch);
      }
    }
    epochs_ = std::move(epochs);
    return absl::OkStatus();
  }

  bool EpochsHaveGap() const {
    return !epochs_.empty() &&
           epochs_.rbegin()->first - epochs_.begin()->first + 1 !=
               epochs_.size();
  }
  std::uint32_t NewestEpoch() const {
    return epochs_.empty() ? 0 : epochs_.rbegin()->first;
  }
  std::uint32_t ValidEpoch(std::uint64_t step) const {
    for (auto epoch = epochs_.rbegin(); epoch != epochs_.rend(); ++epoch) {
      if (epoch->second.resume_step < step) return epoch->first;
    }
    return 0;
  }

  // Whether epoch `epoch`, which `what` names, has a file. Old ones may have
  // been pruned only if no step needs them.
  absl::StatusOr<bool> EpochIsThere(std::uint32_t epoch) {
    if (epoch == 0 || epochs_.contains(epoch)) return true;
    KEDGE_RETURN_IF_ERROR(ReadEpochs());
    return epochs_bad_ || epochs_.contains(epoch);
  }
  void AddEpochMissing(FindingList* findings, const std::string& file,
                       std::uint32_t epoch, std::int64_t offset) const {
    findings->Add(
        MakeFinding(Id::kEpochMissing, file,
                    absl::StrCat("epoch: expected one with a file, found ",
                                 epoch, "; newest is ", NewestEpoch()),
                    offset));
  }

  absl::Status CheckEpochs() {
    KEDGE_RETURN_IF_ERROR(ReadEpochs());
    if (epochs_bad_) {
      // A file system without hard links shows an epoch file before its bytes.
      absl::Status status;
      Settle([&] {
        status = ReadEpochs();
        return !status.ok() || !epochs_bad_;
      });
      KEDGE_RETURN_IF_ERROR(status);
    }
    // gc may have removed an old one between the listing and its file.
    if (!epochs_bad_ && EpochsHaveGap()) {
      absl::Status status;
      Settle([&] {
        status = ReadEpochs();
        return !status.ok() || epochs_bad_ || !EpochsHaveGap();
      });
      KEDGE_RETURN_IF_ERROR(status);
    }
    AddAll(&epoch_findings_, {});
    if (epochs_bad_) return absl::OkStatus();
    std::uint32_t before = 0;
    for (auto epoch = epochs_.begin(); epoch != epochs_.end(); ++epoch) {
      const std::uint32_t number = epoch->first;
      const EpochInfo& info = epoch->second;
      const std::string name =
          absl::StrCat(kEpochsDirectoryName, "/", EpochFileName(number));
      if (before != 0 && number != before + 1) {
        Add(MakeFinding(
            Id::kEpochGap, name,
            Expected("the epoch before it", absl::StrCat(number - 1),
                     absl::StrCat(before))));
      }
      before = number;
      const bool given_up =
          std::any_of(std::next(epoch), epochs_.end(), [&](const auto& later) {
            return later.second.resume_step < info.resume_step;
          });
      const auto step = steps_.find(info.resume_step);
      if (!given_up && step != steps_.end() &&
          step->second.state == StepRecord::State::kOk &&
          *step->second.hash != info.resume_manifest_hash) {
        Add(MakeFinding(
                Id::kEpochResume, name,
                Expected(absl::StrCat("manifest of v", info.resume_step),
                         ToHex(*step->second.hash),
                         ToHex(info.resume_manifest_hash)),
                40),
            {step->second.subject});
      }
    }
    return absl::OkStatus();
  }

  // ------------------------------------------------------------------- tables
  // Null if the table cannot be used, which is then a finding.
  absl::StatusOr<std::shared_ptr<const TensorTable>> Table(
      const Hash128& hash, FindingList* findings) {
    used_tables_.insert(hash);
    for (const auto& table : tables_) {
      if (table->hash() == hash) return table;
    }
    const std::string name = TensorTableFileName(hash);
    const std::string path = PathOf(name);
    const auto bytes = ReadFile(*fs_, path, kMaxFlatBufferBytes);
    if (absl::IsResourceExhausted(bytes.status())) return bytes.status();
    const auto none = std::shared_ptr<const TensorTable>();
    if (absl::IsNotFound(bytes.status())) {
      findings->Add(MakeFinding(Id::kTableMissing, name,
                                "expected the table that a manifest or STORE "
                                "names, found no file"));
      return none;
    }
    if (!bytes.ok()) {
      findings->Add(FromStatus(Id::kTableBad, name, path, bytes.status()));
      return none;
    }
    Advance(bytes->size());
    const Hash128 found = HashBytes128(*bytes);
    if (found != hash) {
      findings->Add(
          MakeFinding(Id::kTableBad, name,
                      Expected("XXH3-128", ToHex(hash), ToHex(found))));
      return none;
    }
    auto parsed = TensorTable::Parse(name, *bytes);
    if (!parsed.ok()) {
      findings->Add(FromStatus(Id::kTableBad, name, path, parsed.status()));
      return none;
    }
    if (tables_.size() == kTablesKept) tables_.erase(tables_.begin());
    tables_.push_back(std::make_shared<const TensorTable>(*std::move(parsed)));
    return tables_.back();
  }

  absl::Status CheckTables(const std::vector<std::string>& names) {
    FindingList findings;
    KEDGE_RETURN_IF_ERROR(Table(info_.v0_table_hash, &findings).status());
    for (const std::string& name : names) {
      const auto hash = ParseTensorTableFileName(name);
      if (!hash || TensorTableFileName(*hash) != name ||
          used_tables_.contains(*hash)) {
        continue;
      }
      // Whether it is sound matters to whoever uses it again.
      FindingList about;
      KEDGE_ASSIGN_OR_RETURN(const auto table, Table(*hash, &about));
      if (table != nullptr) {
        findings.Add(MakeFinding(Id::kTableUnused, name,
                                 absl::StrCat("a table of ", table->size(),
                                              " tensors that no step names")));
      }
      for (Finding& finding : about.Take()) findings.Add(std::move(finding));
    }
    AddAll(&findings, {});
    return absl::OkStatus();
  }

  // -------------------------------------------------------------------- steps
  // Data files of a directory: names, sizes, headers, and every byte if deep.
  template <class Manifest>
  absl::Status CheckData(Checked<Manifest>* checked, std::uint64_t step) {
    DataDirectory data;
    data.name = checked->directory.name;
    data.path = checked->directory.path;
    data.step = step;
    const auto deadline =
        Clock::now() + std::chrono::duration<double>(options_.settle_seconds);
    // On a network file system a client may believe for a while that a file is
    // missing or short; reading the directory makes it ask again.
    const auto wait = [&] {
      if (!network_ || Clock::now() >= deadline) return false;
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
      return fs_->List(data.path).ok();
    };
    KEDGE_RETURN_IF_ERROR(CheckDataFiles(*fs_, checked->directory, info_.run,
                                         step, checked->manifest.files,
                                         ExpectedFiles(checked->manifest), wait,
                                         &data.usable, &checked->findings));
    if (!options_.deep) return absl::OkStatus();
    if constexpr (std::is_same_v<Manifest, StepManifest>) {
      return CheckSegments(data_, data, checked->manifest, *checked->table,
                           &checked->findings);
    } else {
      return CheckAnchorFiles(data_, data, checked->manifest, *checked->table,
                              &checked->findings);
    }
  }

  // `check` until there are no findings, or twice the same COMMIT has some.
  template <class CheckedType, class Check>
  absl::Status Attempts(std::unique_ptr<CheckedType>* checked, Check check) {
    std::uint64_t key_before = 0;
    for (int attempt = 0; attempt < kAttempts; ++attempt) {
      *checked = std::make_unique<CheckedType>();
      KEDGE_RETURN_IF_ERROR(check(checked->get()));
      const Directory& directory = (*checked)->directory;
      if (directory.state == Directory::State::kGone ||
          (*checked)->findings.empty() ||
          (attempt > 0 && directory.commit_key == key_before)) {
        break;
      }
      key_before = directory.commit_key;
    }
    return absl::OkStatus();
  }

  absl::Status CheckStepOnce(std::uint64_t step, CheckedStep* checked) {
    FindingList* findings = &checked->findings;
    KEDGE_ASSIGN_OR_RETURN(checked->directory,
                           ReadDirectory(*fs_, root_, StepDirectoryName(step),
                                         info_.run, step, findings));
    Directory& directory = checked->directory;
    if (directory.commit) {
      KEDGE_RETURN_IF_ERROR(CheckFence(step, checked));
      if (directory.state == Directory::State::kGone) return absl::OkStatus();
    }
    if (directory.state != Directory::State::kOk) return absl::OkStatus();
    Advance(directory.manifest.size());
    const std::string name =
        absl::StrCat(directory.name, "/", kManifestFileName);
    auto manifest = ParseStepManifest(name, directory.manifest);
    if (!manifest.ok()) {
      findings->Add(FromStatus(Id::kManifestBad, name, "", manifest.status()));
      return absl::OkStatus();
    }
    checked->manifest = *std::move(manifest);
    const auto equal = [&](absl::string_view what, const std::string& expected,
                           const std::string& found) {
      if (expected == found) return true;
      findings->Add(
          MakeFinding(Id::kManifestBad, name, Expected(what, expected, found)));
      return false;
    };
    if (!equal("run id", ToHex(info_.run), ToHex(checked->manifest.run)) ||
        !equal("step", absl::StrCat(step),
               absl::StrCat(checked->manifest.step)) ||
        !equal("epoch", absl::StrCat(directory.commit->epoch),
               absl::StrCat(checked->manifest.epoch))) {
      return absl::OkStatus();
    }
    KEDGE_ASSIGN_OR_RETURN(checked->table,
                           Table(checked->manifest.table_hash, findings));
    if (checked->table == nullptr) return absl::OkStatus();
    const absl::Status rules =
        CheckStepManifest(name, checked->manifest, *checked->table);
    if (!rules.ok()) {
      findings->Add(FromStatus(Id::kManifestBad, name, "", rules));
      return absl::OkStatus();
    }
    checked->sound = true;
    return CheckData(checked, step);
  }

  // Whether the epoch of a step is the one that may have published it.
  absl::Status CheckFence(std::uint64_t step, CheckedStep* checked) {
    const std::uint32_t epoch = checked->directory.commit->epoch;
    if (!epochs_bad_ && ValidEpoch(step) == epoch) return absl::OkStatus();
    KEDGE_RETURN_IF_ERROR(ReadEpochs());
    if (epochs_bad_ || ValidEpoch(step) == epoch) return absl::OkStatus();
    const std::string file =
        absl::StrCat(checked->directory.name, "/", kCommitFileName);
    checked->fenced = true;
    KEDGE_ASSIGN_OR_RETURN(const bool there, EpochIsThere(epoch));
    if (!there) {
      AddEpochMissing(&checked->findings, file, epoch, 32);
      return absl::OkStatus();
    }
    // A writer that opens the store makes its epoch, moves what lies above its
    // resume step away, and then replaces HEAD: until then this is no finding.
    bool opened = false;
    absl::Status status;
    Settle([&] {
      if (!IsThere(checked->subject())) {
        checked->directory.state = Directory::State::kGone;
        return true;
      }
      status = ReadEpochs();
      if (!status.ok()) return true;
      const auto bytes = ReadFile(*fs_, PathOf(kHeadFileName), 2 * kHeadBytes);
      const auto head = bytes.ok() ? ParseHead(kHeadFileName, *bytes)
                                   : absl::StatusOr<Head>(bytes.status());
      opened = !head.ok() || head->epoch >= NewestEpoch();
      return opened;
    });
    KEDGE_RETURN_IF_ERROR(status);
    if (checked->directory.state == Directory::State::kGone) {
      return absl::OkStatus();
    }
    // HEAD was read after the step: look whether it is still there.
    if (!IsThere(checked->subject())) {
      checked->directory.state = Directory::State::kGone;
      return absl::OkStatus();
    }
    Finding finding = MakeFinding(
        Id::kStepFenced, file,
        Expected("epoch", absl::StrCat(ValidEpoch(step)), absl::StrCat(epoch)),
        32);
    if (!opened) {
      finding.severity = FindingSeverity::kInfo;
      finding.message +=
          "; a writer is opening the store, or died while it did";
      finding.advice =
          "nothing to do: the next writer that opens the store "
          "moves it to .trash";
    }
    checked->findings.Add(std::move(finding));
    return absl::OkStatus();
  }

  absl::Status CheckAnchorOnce(std::uint64_t step, const CheckedStep& of,
                               CheckedAnchor* checked) {
    FindingList* findings = &checked->findings;
    KEDGE_ASSIGN_OR_RETURN(
        checked->directory,
        ReadDirectory(
            *fs_, root_,
            absl::StrCat(StepDirectoryName(step), "/", kAnchorDirectoryName),
            info_.run, step, findings));
    Directory& directory = checked->directory;
    if (directory.state != Directory::State::kOk) return absl::OkStatus();
    Advance(directory.manifest.size());
    const std::string name =
        absl::StrCat(directory.name, "/", kManifestFileName);
    auto manifest = ParseAnchorManifest(name, directory.manifest);
    if (!manifest.ok()) {
      findings->Add(
          FromStatus(Id::kAnchorManifestBad, name, "", manifest.status()));
      return absl::OkStatus();
    }
    checked->manifest = *std::move(manifest);
    const auto equal = [&](Id id, absl::string_view what,
                           const std::string& expected,
                           const std::string& found) {
      if (expected == found) return true;
      findings->Add(MakeFinding(id, name, Expected(what, expected, found)));
      return false;
    };
    const AnchorManifest& anchor = checked->manifest;
    if (!equal(Id::kAnchorManifestBad, "run id", ToHex(info_.run),
               ToHex(anchor.run)) ||
        !equal(Id::kAnchorManifestBad, "epoch",
               absl::StrCat(directory.commit->epoch),
               absl::StrCat(anchor.epoch))) {
      return absl::OkStatus();
    }
    if (of.directory.commit &&
        !equal(Id::kAnchorVersion, "version",
               ToString(VersionId{step, of.directory.commit->manifest_hash}),
               ToString(anchor.version))) {
      return absl::OkStatus();
    }
    if (of.sound &&
        !equal(Id::kAnchorVersion, "tensor table",
               ToHex(of.manifest.table_hash), ToHex(anchor.table_hash))) {
      return absl::OkStatus();
    }
    KEDGE_ASSIGN_OR_RETURN(const bool epoch_there, EpochIsThere(anchor.epoch));
    // One that is older than all that are kept may have been pruned.
    if (!epoch_there && !epochs_bad_ &&
        (epochs_.empty() || anchor.epoch > epochs_.begin()->first)) {
      AddEpochMissing(findings, name, anchor.epoch, -1);
    }
    KEDGE_ASSIGN_OR_RETURN(checked->table, Table(anchor.table_hash, findings));
    if (checked->table == nullptr) return absl::OkStatus();
    const absl::Status rules =
        CheckAnchorManifest(name, anchor, *checked->table);
    if (!rules.ok()) {
      findings->Add(FromStatus(Id::kAnchorManifestBad, name, "", rules));
      return absl::OkStatus();
    }
    checked->sound = true;
    return CheckData(checked, step);
  }

  absl::Status CheckStep(std::uint64_t step) {
    std::unique_ptr<CheckedStep> checked;
    KEDGE_RETURN_IF_ERROR(Attempts(&checked, [&](CheckedStep* once) {
      return CheckStepOnce(step, once);
    }));
    steps_.erase(step);
    // If a later step needs it, that one misses its base.
    if (checked->directory.state == Directory::State::kGone) {
      return absl::OkStatus();
    }
    const Subject subject = checked->subject();
    StepRecord record;
    record.subject = subject;
    const bool published =
        checked->directory.state != Directory::State::kUnpublished;
    const bool valid = checked->sound && !checked->fenced;
    record.state = !published        ? StepRecord::State::kUnpublished
                   : checked->fenced ? StepRecord::State::kFenced
                   : checked->sound  ? StepRecord::State::kOk
                                     : StepRecord::State::kDamaged;
    if (checked->directory.commit) {
      record.hash = checked->directory.commit->manifest_hash;
    }
    if (checked->sound) record.digest = checked->manifest.digest_after;
    steps_[step] = record;
    if (published) ++report_.steps_checked;
    const bool data_sound = !checked->findings.has_error();
    AddAll(&checked->findings, {subject});

    // The anchor is a transaction of its own; of a step that does not exist for
    // readers it is only looked at by its name.
    std::unique_ptr<CheckedAnchor> anchor;
    if (published && checked->directory.commit) {
      KEDGE_RETURN_IF_ERROR(Attempts(&anchor, [&](CheckedAnchor* once) {
        return CheckAnchorOnce(step, *checked, once);
      }));
    }
    const bool has_anchor =
        anchor != nullptr && anchor->directory.state != Directory::State::kGone;
    if (has_anchor) anchors_seen_.insert(subject.directory);
    if (has_anchor &&
        anchor->directory.state != Directory::State::kUnpublished) {
      ++report_.anchors_checked;
    }
    if (!valid) {
      // Fenced steps are no part of the chain: it goes on around them.
      if (!checked->fenced && published) {
        state_.id.reset();
        EndSegment();
      }
      if (has_anchor) {
        AddAll(&anchor->findings, {subject, anchor->subject()});
      }
      return absl::OkStatus();
    }
    return CheckLinks(step, *checked, data_sound,
                      has_anchor ? anchor.get() : nullptr);
  }

  // -------------------------------------------------------------------- chain
  enum class Link {
    kContinues,  // state_ is the base
    kElsewhere,  // the base is there or was, but its sums are not at hand
    kPruned,     // the base is older than all that is there
    kHole,
    kFork,
  };

  absl::Status CheckLinks(std::uint64_t step, const CheckedStep& checked,
                          bool data_sound, CheckedAnchor* anchor) {
    const StepManifest& manifest = checked.manifest;
    const Subject subject = checked.subject();
    const VersionId id{step, checked.directory.commit->manifest_hash};
    const bool root = manifest.kind == StepKind::kRoot;
    const std::string name =
        absl::StrCat(checked.directory.name, "/", kManifestFileName);
    std::vector<Finding> found;

    if (step == 0 && (manifest.digest_after != info_.v0_digest ||
                      manifest.table_hash != info_.v0_table_hash)) {
      found.push_back(
          MakeFinding(Id::kV0Digest, name,
                      Expected("state digest and table, which STORE has,",
                               absl::StrCat(ToHex(info_.v0_digest), ", ",
                                            ToHex(info_.v0_table_hash)),
                               absl::StrCat(ToHex(manifest.digest_after), ", ",
                                            ToHex(manifest.table_hash)))));
    }

    Link link = Link::kPruned;
    std::optional<Finding> base_finding;
    if (step != 0)
      link = FindBase(step, manifest, subject, name, &base_finding);

    bool chain_sound = true;
    if (root) {
      state_.Forget(checked.table);
      for (std::uint32_t i = 0; i < manifest.l61.size(); ++i) {
        state_.Learn(i, manifest.l61[i]);
      }
      state_.metadata = std::make_shared<const Metadata>(manifest.metadata);
    } else {
      if (link == Link::kContinues &&
          state_.table->hash() != manifest.table_hash) {
        found.push_back(
            MakeFinding(Id::kBaseTable, name,
                        Expected("tensor table", ToHex(state_.table->hash()),
                                 ToHex(manifest.table_hash))));
        chain_sound = false;
      } else if (const auto digest = DigestOf(manifest.base);
                 link != Link::kFork && digest &&
                 *digest != manifest.digest_before) {
        found.push_back(
            MakeFinding(Id::kDigestChain, name,
                        Expected("digest_before",
                                 absl::StrCat(ToHex(*digest), ", that after v",
                                              manifest.base.step),
                                 ToHex(manifest.digest_before))));
        chain_sound = false;
      }
      if (link != Link::kContinues || !chain_sound) {
        state_.Forget(checked.table);
      }
      chain_sound =
          CheckSums(manifest, *checked.table, name, &found) && chain_sound;
      if (manifest.metadata_changed) {
        state_.metadata = std::make_shared<const Metadata>(manifest.metadata);
      }
    }
    state_.id = id;

    bool anchor_sound = false;
    if (anchor != nullptr) {
      if (anchor->sound) CheckAnchorState(manifest, anchor);
      anchor_sound = anchor->sound && !anchor->findings.has_error();
      AddAll(&anchor->findings, {subject, anchor->subject()});
    }

    if (base_finding) {
      // Readers go around the hole.
      if (anchor_sound && link == Link::kHole) {
        base_finding->severity = FindingSeverity::kWarning;
      }
      found.push_back(*std::move(base_finding));
    }
    for (Finding& finding : found) Add(std::move(finding), {subject});

    // Where only the sums are not at hand, the versions still link up.
    if (link == Link::kElsewhere) ReturnTo(manifest.base);
    const bool continues =
        (link == Link::kContinues || link == Link::kElsewhere) && !root &&
        data_sound && chain_sound && segment_ &&
        segment_->last == manifest.base;
    if (!continues) {
      EndSegment();
      segment_.emplace();
      segment_->start = root ? Segment::Start::kRoot
                        : link == Link::kPruned && data_sound && chain_sound
                            ? Segment::Start::kPruned
                            : Segment::Start::kDamage;
      segment_->chain.external_v0 =
          step == 0 && root && info_.external_v0 && data_sound;
      if (link == Link::kElsewhere && !root && data_sound && chain_sound) {
        segment_->base = manifest.base;
        segment_->base_digest = manifest.digest_before;
      }
    }
    segment_->chain.versions.push_back(step);
    segment_->last = id;
    if (anchor_sound) segment_->chain.anchors.push_back(step);
    if (!segment_->chain.anchors.empty() || segment_->chain.external_v0) {
      segment_->last_joinable = id;
    } else {
      segment_->subjects.push_back(subject);
    }
    return absl::OkStatus();
  }

  // Whether the step's own S fit to state_ and to its digest; carries state_
  // over the step.
  bool CheckSums(const StepManifest& manifest, const TensorTable& table,
                 const std::string& name, std::vector<Finding>* found) {
    std::size_t wrong = 0;
    for (const TensorState& tensor : manifest.states) {
      if (state_.known[tensor.tensor] &&
          state_.l61[tensor.tensor] != tensor.l61_before &&
          ++wrong <= kMostStates) {
        found->push_back(MakeFinding(
            Id::kStateSum, name,
            Expected(absl::StrCat("tensor \"", Shown(table[tensor.tensor].name),
                                  "\": L61 before the step"),
                     Hex64(state_.l61[tensor.tensor]),
                     Hex64(tensor.l61_before))));
      }
      state_.Learn(tensor.tensor, tensor.l61_after);
    }
    if (wrong > kMostStates) {
      absl::StrAppend(&found->back().message, " (and ", wrong - kMostStates,
                      " more tensors)");
    }
    if (state_.unknown == 0) {
      const Hash128 digest = table.StateDigest(state_.l61);
      if (digest != manifest.digest_after) {
        found->push_back(MakeFinding(
            Id::kDigestWrong, name,
            Expected("digest_after",
                     absl::StrCat(ToHex(digest), ", that of the sums"),
                     ToHex(manifest.digest_after))));
        return false;
      }
    }
    return wrong == 0;
  }

  // An anchor's S, digest and metadata against those of its version.
  void CheckAnchorState(const StepManifest& step, CheckedAnchor* checked) {
    const AnchorManifest& anchor = checked->manifest;
    const std::string name =
        absl::StrCat(checked->directory.name, "/", kManifestFileName);
    std::size_t wrong = 0;
    for (std::uint32_t i = 0; i < anchor.l61.size(); ++i) {
      if (!state_.known[i] || state_.l61[i] == anchor.l61[i]) continue;
      if (++wrong > kMostStates) continue;
      checked->findings.Add(MakeFinding(
          Id::kAnchorChain, name,
          Expected(absl::StrCat("tensor \"", Shown((*checked->table)[i].name),
                                "\": L61"),
                   absl::StrCat(Hex64(state_.l61[i]),
                                " by the deltas up to this version"),
                   Hex64(anchor.l61[i]))));
    }
    if (wrong == 0 && anchor.digest != step.digest_after) {
      checked->findings.Add(
          MakeFinding(Id::kAnchorChain, name,
                      Expected("state digest", ToHex(step.digest_after),
                               ToHex(anchor.digest))));
      wrong = 1;
    }
    if (wrong == 0) {
      for (std::uint32_t i = 0; i < anchor.l61.size(); ++i) {
        state_.Learn(i, anchor.l61[i]);
      }
    }
    if (state_.metadata == nullptr) {
      state_.metadata = std::make_shared<const Metadata>(anchor.metadata);
    } else if (*state_.metadata != anchor.metadata) {
      checked->findings.Add(MakeFinding(
          Id::kAnchorMetadata, name,
          Expected("metadata",
                   absl::StrCat("the ", state_.metadata->size(),
                                " pairs of the version"),
                   absl::StrCat(anchor.metadata.size(), " other pairs"))));
    }
  }

  // The next lower step that is part of the chain and still there; forgets
  // those that are not.
  const std::pair<const std::uint64_t, StepRecord>* Below(std::uint64_t step,
                                                          bool valid_only) {
    for (auto at = steps_.lower_bound(step); at != steps_.begin();) {
      --at;
      const StepRecord& record = at->second;
      const bool counts =
          record.state == StepRecord::State::kOk ||
          (!valid_only && record.state == StepRecord::State::kDamaged);
      if (!counts) continue;
      if (IsThere(record.subject)) return &*at;
      at = steps_.erase(at);
    }
    return nullptr;
  }

  Link FindBase(std::uint64_t step, const StepManifest& manifest,
                const Subject& subject, const std::string& name,
                std::optional<Finding>* finding) {
    const VersionId& base = manifest.base;
    const auto fork = [&](const std::string& expected) {
      *finding = MakeFinding(Id::kBaseFork, name,
                             Expected("base", expected, ToString(base)));
      return Link::kFork;
    };
    const auto at = steps_.find(base.step);
    if (at != steps_.end() &&
        at->second.state != StepRecord::State::kUnpublished) {
      const StepRecord& record = at->second;
      if (!record.hash) return Link::kElsewhere;  // damaged, and said so
      if (*record.hash == base.manifest_hash) {
        // Nothing else may follow the base.
        const auto* below = Below(step, /*valid_only=*/true);
        if (below != nullptr && below->first > base.step) {
          return fork(
              absl::StrCat(ToString({below->first, *below->second.hash}),
                           ", the newest before it"));
        }
        return state_.id == base ? Link::kContinues : Link::kElsewhere;
      }
      // Another version than this step's base; unless one of them was replaced
      // while we looked.
      if (!IsThere(subject) || !IsThere(record.subject)) {
        return Link::kElsewhere;
      }
      return fork(absl::StrCat(ToString({base.step, *record.hash}),
                               ", which is there"));
    }
    // The base is not there: pruned, if nothing below it is either.
    const std::string base_path = PathOf(StepDirectoryName(base.step));
    std::optional<std::uint64_t> below;
    const bool unpublished = at != steps_.end();
    const bool settled = Settle([&] {
      const auto* found = Below(step, /*valid_only=*/false);
      below = found == nullptr ? std::nullopt : std::optional(found->first);
      return !below || !IsThere(subject) ||
             (!unpublished && CommitKey(*fs_, base_path).value_or(0) != 0);
    });
    if (!below) return Link::kPruned;
    if (settled) return Link::kElsewhere;
    const std::uint64_t first = std::min(*below + 1, base.step);
    *finding = MakeFinding(
        Id::kBaseMissing, name,
        absl::StrCat(
            "base ", ToString(base), ": expected its directory, found a hole: ",
            first == base.step
                ? absl::StrCat("step ", first, " is")
                : absl::StrCat("steps ", first, " to ", base.step, " are"),
            " not there, v", *below, " is the newest before it"));
    return Link::kHole;
  }

  // --------------------------------------------------------------------- HEAD
  void CheckHead() {
    std::optional<Finding> finding;
    Settle([&] {
      finding = JudgeHead();
      return !finding.has_value();
    });
    if (finding) Add(*std::move(finding));
  }

  std::optional<Finding> JudgeHead() {
    const std::string path = PathOf(kHeadFileName);
    const auto bytes = ReadFile(*fs_, path, 2 * kHeadBytes);
    if (absl::IsNotFound(bytes.status())) {
      return MakeFinding(Id::kHeadMissing, kHeadFileName,
                         absl::StrCat("expected a file of ", kHeadBytes,
                                      " bytes, found none"));
    }
    const auto head = bytes.ok() ? ParseHead(kHeadFileName, *bytes)
                                 : absl::StatusOr<Head>(bytes.status());
    if (!head.ok()) {
      return FromStatus(Id::kHeadBad, kHeadFileName, path, head.status());
    }
    if (head->run != info_.run) {
      return MakeFinding(Id::kHeadBad, kHeadFileName,
                         Expected("run id", ToHex(info_.run), ToHex(head->run)),
                         8);
    }
    const VersionId id{head->step, head->manifest_hash};
    if (!ReadEpochs().ok()) return std::nullopt;
    const auto* newest = Below(kMaxStep + 1, /*valid_only=*/true);
    const std::string newest_text =
        newest == nullptr ? "none"
                          : ToString({newest->first, *newest->second.hash});

    // The step that it names, as it is now.
    const std::string commit_path =
        JoinPath(PathOf(StepDirectoryName(head->step)), kCommitFileName);
    const auto commit_bytes = ReadFile(*fs_, commit_path, 2 * kCommitBytes);
    const auto commit =
        commit_bytes.ok() ? ParseCommit("COMMIT", *commit_bytes)
                          : absl::StatusOr<CommitRecord>(commit_bytes.status());
    const auto known = steps_.find(head->step);
    const bool fenced = known != steps_.end() &&
                        known->second.state == StepRecord::State::kFenced;
    const auto behind_epoch = [&] {
      return MakeFinding(
          Id::kHeadBehind, kHeadFileName,
          Expected("epoch", absl::StrCat(NewestEpoch(), ", the newest"),
                   absl::StrCat(head->epoch,
                                "; a writer died while it opened "
                                "the store")),
          32);
    };
    if (absl::IsNotFound(commit.status()) || (commit.ok() && fenced)) {
      // What HEAD names lies above the resume step of a later epoch.
      if (!epochs_bad_ && head->epoch < NewestEpoch() &&
          epochs_.rbegin()->second.resume_step < head->step) {
        return behind_epoch();
      }
      return MakeFinding(
          Id::kHeadAhead, kHeadFileName,
          Expected("version", absl::StrCat(newest_text, ", the newest valid"),
                   absl::StrCat(ToString(id), fenced ? ", which was fenced"
                                                     : ", which is not there")),
          24);
    }
    if (commit.ok()) {
      const VersionId there{head->step, commit->manifest_hash};
      if (there != id) {
        return MakeFinding(
            Id::kHeadOtherVersion, kHeadFileName,
            Expected("version",
                     absl::StrCat(ToString(there), ", which stands there"),
                     ToString(id)),
            40);
      }
      if (head->epoch < commit->epoch) {
        return MakeFinding(
            Id::kHeadOtherVersion, kHeadFileName,
            Expected(
                "epoch",
                absl::StrCat(commit->epoch, ", that of the step, or later"),
                absl::StrCat(head->epoch)),
            32);
      }
    }
    if (!epochs_bad_ && head->epoch != 0 && !epochs_.contains(head->epoch) &&
        (epochs_.empty() || head->epoch > epochs_.begin()->first)) {
      return MakeFinding(
          Id::kEpochMissing, kHeadFileName,
          absl::StrCat("epoch: expected one with a file, found ", head->epoch,
                       "; newest is ", NewestEpoch()),
          32);
    }
    if (newest != nullptr && newest->first > head->step) {
      return MakeFinding(
          Id::kHeadBehind, kHeadFileName,
          Expected("version", absl::StrCat(newest_text, ", the newest valid"),
                   ToString(id)),
          24);
    }
    if (head->epoch < NewestEpoch()) return behind_epoch();
    return std::nullopt;
  }

  // -------------------------------------------------------------------- joins
  void EndSegment() {
    if (segment_) segments_.push_back(*std::move(segment_));
    segment_.reset();
  }

  // Makes the segment of `base` the current one, and `base` its last version:
  // what came after it was given up while we looked.
  void ReturnTo(const VersionId& base) {
    EndSegment();
    if (!DigestOf(base)) return;
    for (auto at = segments_.begin(); at != segments_.end(); ++at) {
      std::vector<std::uint64_t>& versions = at->chain.versions;
      std::vector<std::uint64_t>& anchors = at->chain.anchors;
      if (!std::binary_search(versions.begin(), versions.end(), base.step)) {
        continue;
      }
      versions.erase(
          std::upper_bound(versions.begin(), versions.end(), base.step),
          versions.end());
      anchors.erase(std::upper_bound(anchors.begin(), anchors.end(), base.step),
                    anchors.end());
      at->last = base;
      at->last_joinable.reset();
      if (!anchors.empty() || at->chain.external_v0) at->last_joinable = base;
      at->subjects.resize(std::min(at->subjects.size(), versions.size()));
      segment_ = std::move(*at);
      segments_.erase(at);
      return;
    }
  }

  // What is known of the digest of a version.
  std::optional<Hash128> DigestOf(const VersionId& id) const {
    const auto at = steps_.find(id.step);
    if (at == steps_.end() || at->second.state != StepRecord::State::kOk ||
        *at->second.hash != id.manifest_hash) {
      return std::nullopt;
    }
    return at->second.digest;
  }

  // Steps that came, or came back, while we looked were checked out of order:
  // links up the segments that follow each other after all.
  void LinkSegments() {
    std::stable_sort(segments_.begin(), segments_.end(),
                     [](const Segment& a, const Segment& b) {
                       return a.chain.versions.front() <
                              b.chain.versions.front();
                     });
    std::vector<Segment> linked;
    for (Segment& segment : segments_) {
      if (linked.empty() || !segment.base ||
          *segment.base != linked.back().last ||
          segment.base_digest != DigestOf(*segment.base)) {
        linked.push_back(std::move(segment));
        continue;
      }
      Segment& before = linked.back();
      const auto append = [](auto* to, const auto& from) {
        to->insert(to->end(), from.begin(), from.end());
      };
      if (before.last_joinable) {
        before.last_joinable = segment.last;
      } else {
        before.last_joinable = segment.last_joinable;
        append(&before.subjects, segment.subjects);
      }
      append(&before.chain.versions, segment.chain.versions);
      append(&before.chain.anchors, segment.chain.anchors);
      before.last = segment.last;
    }
    segments_ = std::move(linked);
  }

  void CheckJoins() {
    LinkSegments();
    const auto* newest = Below(kMaxStep + 1, /*valid_only=*/true);
    if (newest == nullptr) {
      // A live store may have moved on from all that was there.
      const auto names = fs_->List(root_);
      const bool other =
          names.ok() &&
          std::any_of(names->begin(), names->end(), [&](const auto& name) {
            const auto step = ParseStepDirectoryName(name);
            return step && !steps_.contains(*step);
          });
      if (!other) {
        Add(MakeFinding(Id::kNotJoinable, ".",
                        "expected a valid version, found none"));
      }
      return;
    }
    report_.newest = VersionId{newest->first, *newest->second.hash};
    for (Segment& segment : segments_) {
      const FsckChain& chain = segment.chain;
      if (segment.last_joinable &&
          (!report_.newest_joinable ||
           segment.last_joinable->step > report_.newest_joinable->step)) {
        report_.newest_joinable = segment.last_joinable;
      }
      report_.chains.push_back(chain);
      if (segment.subjects.empty()) continue;
      const std::uint64_t first = chain.versions.front();
      const std::uint64_t last = chain.versions[segment.subjects.size() - 1];
      Finding finding = MakeFinding(
          Id::kNotJoinable, StepDirectoryName(first),
          absl::StrCat(StepRange(first, last),
                       ": expected a sound anchor to join from, "
                       "found none: ",
                       segment.start == Segment::Start::kRoot
                           ? absl::StrCat("v", first,
                                          " has no delta and no sound anchor")
                       : segment.start == Segment::Start::kPruned
                           ? absl::StrCat("the base of v", first, " is pruned")
                           : absl::StrCat("the chain is broken at v", first)));
      const bool newest_one = last >= newest->first;
      if (newest_one) {
        // An anchor may have come since its step was looked at.
        const bool come = std::any_of(
            segment.subjects.begin(), segment.subjects.end(),
            [&](const Subject& subject) {
              return CommitKey(*fs_, JoinPath(PathOf(subject.directory),
                                              kAnchorDirectoryName))
                             .value_or(0) > 1 &&
                     !anchors_seen_.contains(subject.directory);
            });
        if (come) continue;
      } else if (segment.start == Segment::Start::kPruned) {
        finding.severity = FindingSeverity::kInfo;
        finding.advice =
            "nothing to do: they are kept for readers that hold "
            "an older version";
      } else {
        finding.severity = FindingSeverity::kWarning;
        finding.advice =
            "see the other findings about these steps; readers "
            "join newer versions";
      }
      if (segment.start == Segment::Start::kDamage && ReplacedBelow(first)) {
        continue;
      }
      Add(std::move(finding),
          {segment.subjects.front(), segment.subjects.back()});
    }
  }

  // Whether what stands right below `step` is not what was looked at: a resume
  // has replaced it, and a chain that seems to break at `step` need not.
  bool ReplacedBelow(std::uint64_t step) {
    std::uint64_t looked_at = 0;
    if (auto at = steps_.lower_bound(step); at != steps_.begin()) {
      --at;
      if (!IsThere(at->second.subject)) return true;
      looked_at = at->first;
    }
    const auto names = fs_->List(root_);
    return names.ok() &&
           std::any_of(names->begin(), names->end(), [&](const auto& name) {
             const auto found = ParseStepDirectoryName(name);
             return found && *found<step&& * found> looked_at &&
                    !steps_.contains(*found);
           });
  }

  // ------------------------------------------------------------------- rests
  // The epoch in a name like "HEAD.3", "table.3.0", "epoch.3.77".
  static std::optional<std::uint32_t> TemporaryEpoch(absl::string_view name) {
    const std::vector<absl::string_view> parts = absl::StrSplit(name, '.');
    std::uint32_t epoch = 0;
    if (parts.size() < 2 || parts.size() > 3 ||
        (parts[0] != "HEAD" && parts[0] != "table" && parts[0] != "epoch") ||
        !absl::SimpleAtoi(parts[1], &epoch)) {
      return std::nullopt;
    }
    return epoch;
  }

  // Names in one of the directories that readers and writers meet in. Not
  // there, or not a directory: they make it, and that was said.
  std::vector<std::string> NamesIn(const char* directory) {
    const std::string path = PathOf(directory);
    auto names = fs_->List(path);
    if (names.ok()) return *std::move(names);
    if (!absl::IsNotFound(names.status())) {
      Add(FromStatus(Id::kUnreadable, directory, path, names.status()));
    }
    return {};
  }

  static bool IsControlFileName(absl::string_view name) {
    const auto all_of = [](absl::string_view text, absl::string_view allowed) {
      return text.find_first_not_of(allowed) == absl::string_view::npos;
    };
    if (!absl::ConsumePrefix(&name, "rank_") || name.size() < 5 ||
        !all_of(name.substr(0, 5), "0123456789")) {
      return false;
    }
    name.remove_prefix(5);
    if (name.empty()) return true;
    return absl::ConsumePrefix(&name, ".") && name.size() == 16 &&
           all_of(name, "0123456789abcdef");
  }

  // Control files are between the ranks of one writer: what a run that is gone
  // left there harms nobody, and the next one replaces it.
  void CheckRanks() {
    FindingList findings;
    for (const std::string& name : NamesIn(kRanksDirectoryName)) {
      if (IsControlFileName(name)) continue;
      findings.Add(MakeFinding(
          Id::kUnknownName, absl::StrCat(kRanksDirectoryName, "/", Shown(name)),
          "expected the control file of a rank"));
    }
    AddAll(&findings, {});
  }

  void CheckLeases() {
    FindingList findings;
    for (const std::string& name : NamesIn(kLeasesDirectoryName)) {
      if (IsReaderId(name) || ReaderOfLeaseTemporary(name)) continue;
      findings.Add(
          MakeFinding(Id::kUnknownName,
                      absl::StrCat(kLeasesDirectoryName, "/", Shown(name)),
                      "expected the lease of a reader"));
    }
    const auto first = ReadLeases(*fs_, root_, info_.run);
    const auto second = ReadLeases(*fs_, root_, info_.run);
    if (first.ok() && second.ok()) {
      // What a reader writes or gc removes at this moment is no finding.
      for (const LeaseEntry& lease : second->leases) {
        const bool stands =
            std::any_of(first->leases.begin(), first->leases.end(),
                        [&](const LeaseEntry& before) {
                          return before.name == lease.name &&
                                 before.modified_ns == lease.modified_ns &&
                                 before.status.code() == lease.status.code();
                        });
        if (stands) CheckLease(lease, &findings);
      }
      for (const LeaseListing::Temporary& file : second->temporaries) {
        LeaseEntry as_lease;
        as_lease.modified_ns = file.modified_ns;
        if (StateOfLease(as_lease, HostNow(), options_.lease_ttl) !=
            LeaseState::kExpired) {
          continue;
        }
        findings.Add(MakeFinding(
            Id::kLeaseLeftover,
            absl::StrCat(kLeasesDirectoryName, "/", Shown(file.name)),
            absl::StrCat("written at ", file.modified_ns / 1'000'000'000,
                         " (Unix seconds)")));
      }
    }
    AddAll(&findings, {});
  }

  static std::int64_t HostNow() {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(
               std::chrono::system_clock::now().time_since_epoch())
        .count();
  }

  void CheckLease(const LeaseEntry& lease, FindingList* findings) {
    const std::string name =
        absl::StrCat(kLeasesDirectoryName, "/", lease.name);
    const LeaseState state = StateOfLease(lease, HostNow(), options_.lease_ttl);
    if (lease.info) Advance(kLeaseBytes);
    const std::string written = absl::StrCat(
        "written at ", lease.modified_ns / 1'000'000'000, " (Unix seconds)");
    const auto what = [&] {
      return absl::StrCat(
          written, ", needs v", lease.info->oldest_step, " and later, holds ",
          lease.info->held ? ToString(*lease.info->held) : "nothing");
    };
    switch (state) {
      case LeaseState::kLive:
        break;
      case LeaseState::kForeign:
        findings->Add(FromStatus(Id::kLeaseOtherRun, name,
                                 JoinPath(root_, name),
                                 absl::DataLossError(lease.status.message())));
        break;
      case LeaseState::kFuture: {
        // This host and the storage may disagree by less than matters.
        LeaseEntry earlier = lease;
        earlier.modified_ns -= options_.lease_ttl.count() * 1'000'000'000;
        if (StateOfLease(earlier, HostNow(), options_.lease_ttl) ==
            LeaseState::kFuture) {
          findings->Add(MakeFinding(Id::kLeaseFuture, name, what()));
        }
        break;
      }
      case LeaseState::kExpired:
      case LeaseState::kUnreadable: {
        if (lease.info) {
          findings->Add(MakeFinding(Id::kLeaseExpired, name, what()));
          break;
        }
        Finding finding = FromStatus(Id::kLeaseBad, name, JoinPath(root_, name),
                                     lease.status);
        // Old enough that gc does not heed it.
        if (state == LeaseState::kExpired) {
          finding.severity = FindingSeverity::kInfo;
          finding.advice = "nothing to do: it is old, and gc removes it";
        }
        findings->Add(std::move(finding));
        break;
      }
    }
  }

  void CheckStaging() {
    const std::uint32_t newest = NewestEpoch();
    std::vector<std::string> left;
    for (const std::string& name : NamesIn(kStagingDirectoryName)) {
      std::optional<std::uint32_t> epoch = TemporaryEpoch(name);
      if (const auto id = ParseStagingName(name)) epoch = id->epoch;
      if (!epoch || *epoch < newest) left.push_back(name);
    }
    if (!left.empty()) {
      Add(MakeFinding(
          Id::kStagingLeftover, kStagingDirectoryName,
          absl::StrCat(left.size(), " names of writers before epoch ", newest,
                       " or of none, the first ", Shown(left.front()))));
    }
    const auto trash = NamesIn(kTrashDirectoryName);
    if (!trash.empty()) {
      Add(MakeFinding(Id::kTrash, kTrashDirectoryName,
                      absl::StrCat(trash.size(), " names, the first ",
                                   Shown(trash.front()))));
    }
  }

  // ------------------------------------------------------------------- report
  // Drops what is about directories that have changed, sorts, counts.
  absl::Status Judge() {
    std::map<Subject, bool> there;
    std::vector<Finding>& findings = report_.findings;
    for (PendingFinding& pending : pending_) {
      const bool stands = std::all_of(
          pending.subjects.begin(), pending.subjects.end(),
          [&](const Subject& subject) {
            const auto [at, fresh] = there.try_emplace(subject, false);
            if (fresh) at->second = IsThere(subject);
            return at->second;
          });
      if (stands) findings.push_back(std::move(pending.finding));
    }
    pending_.clear();
    const auto key = [](const Finding& finding) {
      // One without an offset comes first.
      return std::make_tuple(
          absl::string_view(finding.file),
          finding.offset ? *finding.offset + 1 : std::uint64_t{0}, finding.id,
          absl::string_view(finding.message));
    };
    std::sort(
        findings.begin(), findings.end(),
        [&](const Finding& a, const Finding& b) { return key(a) < key(b); });
    findings.erase(std::unique(findings.begin(), findings.end(),
                               [&](const Finding& a, const Finding& b) {
                                 return key(a) == key(b);
                               }),
                   findings.end());
    for (const Finding& finding : findings) {
      switch (finding.severity) {
        case FindingSeverity::kInfo:
          ++report_.info_count;
          break;
        case FindingSeverity::kWarning:
          ++report_.warning_count;
          break;
        case FindingSeverity::kError:
          ++report_.error_count;
          break;
      }
    }
    if (findings.size() > options_.max_findings) {
      findings.resize(options_.max_findings);
    }
    if (options_.progress) {
      const std::lock_guard<std::mutex> lock(progress_mutex_);
      options_.progress(total_, total_);
    }
    return absl::OkStatus();
  }

  const FsckOptions& options_;
  FileSystem* fs_;
  std::string root_;
  StoreInfo info_;
  bool network_ = false;
  std::unique_ptr<L61Summer> summer_;
  DataContext data_;
  IoPool pool_;  // stops before what its tasks use goes

  std::map<std::uint32_t, EpochInfo> epochs_;
  bool epochs_bad_ = false;
  FindingList epoch_findings_;
  std::vector<std::shared_ptr<const TensorTable>> tables_;  // newest last
  std::set<Hash128> used_tables_;

  std::map<std::uint64_t, StepRecord> steps_;
  std::set<std::string> anchors_seen_;  // step directories that had one
  ChainState state_;
  std::optional<Segment> segment_;
  std::vector<Segment> segments_;

  std::vector<PendingFinding> pending_;
  FsckReport report_;
  std::atomic<std::uint64_t> bytes_{0};
  std::mutex progress_mutex_;
  std::uint64_t done_ ABSL_GUARDED_BY(progress_mutex_) = 0;
  std::uint64_t total_ = 0;
};

}  // namespace
}  // namespace fsck

absl::StatusOr<FsckReport> Fsck(const FsckOptions& options) {
  return fsck::Run(options).Check();
}

}  // namespace kedge
