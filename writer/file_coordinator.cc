#include "kedge/writer/file_coordinator.h"

#include <algorithm>
#include <array>
#include <map>
#include <thread>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "kedge/format/fixed_files.h"
#include "kedge/format/layout.h"
#include "kedge/format/limits.h"
#include "kedge/format/status.h"

namespace kedge {
namespace {

constexpr absl::string_view kReopen =
    "look whether these processes live, then open again on all ranks";

// Pauses of 1, 2, 4, ... 50 ms, never beyond the deadline.
class BackOff {
 public:
  using Clock = std::chrono::steady_clock;

  explicit BackOff(Clock::time_point until) : until_(until) {}

  // False when the time is up.
  bool Wait() {
    const auto now = Clock::now();
    if (now >= until_) return false;
    std::this_thread::sleep_for(
        std::min<Clock::duration>(pause_, until_ - now));
    pause_ = std::min(2 * pause_, std::chrono::milliseconds(50));
    return true;
  }
  void Restart() { pause_ = std::chrono::milliseconds(1); }

 private:
  Clock::time_point until_;
  std::chrono::milliseconds pause_{1};
};

std::uint64_t FreshNonce() {
  while (true) {
    if (const std::uint64_t nonce = RandomSeed(); nonce != 0) return nonce;
  }
}

std::string HeaderText(const ControlHeader& header) {
  std::string text = std::string(ControlKindName(header.kind));
  if (header.session != 0) {
    absl::StrAppend(&text, " of session ", Hex64(header.session));
  }
  if (header.round != 0) absl::StrAppend(&text, ", round ", header.round);
  return text;
}

}  // namespace

FileCoordinator::FileCoordinator(const FileCoordinatorOptions& options,
                                 FileSystem* fs)
    : options_(options),
      fs_(fs),
      directory_(JoinPath(options.store_path, kRanksDirectoryName)),
      nonce_(FreshNonce()),
      nonces_(options.world_size, 0) {
  nonces_[options.rank] = nonce_;
}

absl::StatusOr<std::unique_ptr<FileCoordinator>> FileCoordinator::Open(
    const FileCoordinatorOptions& options) {
  if (options.world_size == 0 || options.world_size > kMaxRanks ||
      options.rank >= options.world_size) {
    return absl::InvalidArgumentError(
        absl::StrCat("FileCoordinatorOptions: rank ", options.rank, " of ",
                     options.world_size, ": expected a world size of 1 to ",
                     kMaxRanks, " and a rank below it"));
  }
  FileSystem* fs = options.fs != nullptr ? options.fs : PosixFileSystem();
  auto coordinator =
      std::unique_ptr<FileCoordinator>(new FileCoordinator(options, fs));
  KEDGE_RETURN_IF_ERROR(EnsureDirectory(*fs, options.store_path));
  KEDGE_RETURN_IF_ERROR(EnsureDirectory(*fs, coordinator->directory_));
  KEDGE_RETURN_IF_ERROR(coordinator->LearnRun());
  KEDGE_RETURN_IF_ERROR(options.rank == 0 ? coordinator->Welcome()
                                          : coordinator->Join());
  return coordinator;
}

absl::Status FileCoordinator::LearnRun() {
  if (options_.run) {
    run_ = *options_.run;
    return absl::OkStatus();
  }
  // Listed, not opened: a file system remembers names that were missed.
  KEDGE_ASSIGN_OR_RETURN(const std::vector<std::string> names,
                         fs_->List(options_.store_path));
  if (std::find(names.begin(), names.end(), kStoreFileName) == names.end()) {
    return absl::OkStatus();
  }
  const std::string path = JoinPath(options_.store_path, kStoreFileName);
  KEDGE_ASSIGN_OR_RETURN(const std::vector<std::byte> bytes,
                         ReadFile(*fs_, path, 2 * kStoreBytes));
  KEDGE_ASSIGN_OR_RETURN(const StoreInfo info, ParseStore(path, bytes));
  run_ = info.run;
  return absl::OkStatus();
}

std::string FileCoordinator::PathOf(std::uint32_t rank) const {
  return JoinPath(directory_, ControlFileName(rank));
}

absl::Status FileCoordinator::Write(ControlKind kind, std::uint64_t round,
                                    std::span<const std::byte> payload) {
  if (payload.size() > kMaxControlPayloadBytes) {
    return absl::InvalidArgumentError(absl::StrCat(
        PathOf(options_.rank), ": payload: expected at most ",
        kMaxControlPayloadBytes, " bytes, found ", payload.size()));
  }
  ControlHeader header;
  header.run = run_;
  header.rank = options_.rank;
  header.world_size = options_.world_size;
  header.session = kind == ControlKind::kHello ? 0 : session_;
  header.nonce = nonce_;
  header.round = round;
  header.kind = kind;
  const std::vector<std::byte> bytes = SerializeControlFile(header, payload);
  const std::string temporary =
      JoinPath(directory_, ControlTemporaryName({options_.rank, nonce_}));
  // Not synced: nothing here has to outlive a crash of the host, after which
  // all ranks open again. Tried again, since nothing else is lost by it; rank 0
  // of another session may have taken the temporary file for a leftover.
  constexpr int kTries = 3;
  for (int attempt = 1;; ++attempt) {
    if (attempt > 1) fs_->RemoveFile(temporary).IgnoreError();
    absl::Status status = [&]() -> absl::Status {
      KEDGE_ASSIGN_OR_RETURN(const std::unique_ptr<File> file,
                             fs_->CreateExclusive(temporary));
      KEDGE_RETURN_IF_ERROR(WriteAll(*file, 0, bytes));
      KEDGE_RETURN_IF_ERROR(file->Close());
      return fs_->Rename(temporary, PathOf(options_.rank));
    }();
    if (status.ok()) return status;
    if (attempt == kTries || absl::IsResourceExhausted(status) ||
        absl::IsPermissionDenied(status)) {
      fs_->RemoveFile(temporary).IgnoreError();
      return status;
    }
  }
}

absl::StatusOr<std::optional<FileCoordinator::ControlFile>>
FileCoordinator::Read(
    std::uint32_t rank,
    const std::function<bool(const ControlHeader&)>& unchanged) const {
  const std::string path = PathOf(rank);
  KEDGE_ASSIGN_OR_RETURN(const std::unique_ptr<File> file,
                         fs_->OpenForRead(path));
  KEDGE_ASSIGN_OR_RETURN(const std::uint64_t size, file->Size());
  if (size < kControlHeaderBytes ||
      size > kControlHeaderBytes + kMaxControlPayloadBytes) {
    return DataLoss({.where = path,
                     .what = "size",
                     .expected = absl::StrCat(
                         kControlHeaderBytes, " to ",
                         kControlHeaderBytes + kMaxControlPayloadBytes),
                     .found = absl::StrCat(size),
                     .advice = "start all ranks again"});
  }
  std::array<std::byte, kControlHeaderBytes> head;
  KEDGE_RETURN_IF_ERROR(ReadAll(*file, 0, head));
  KEDGE_ASSIGN_OR_RETURN(const ControlHeader peeked,
                         PeekControlHeader(path, head));
  if (unchanged(peeked)) return std::optional<ControlFile>();
  std::vector<std::byte> bytes(size);
  std::copy(head.begin(), head.end(), bytes.begin());
  KEDGE_RETURN_IF_ERROR(ReadAll(*file, kControlHeaderBytes,
                                std::span(bytes).subspan(kControlHeaderBytes)));
  ControlFile found;
  KEDGE_ASSIGN_OR_RETURN(found.header, ParseControlFile(path, bytes));
  if (found.header.rank != rank) {
    return DataLoss({.where = path,
                     .what = "rank",
                     .expected = absl::StrCat(rank),
                     .found = absl::StrCat(found.header.rank),
                     .advice = "the file was renamed; start all ranks again"});
  }
  found.payload.assign(bytes.begin() + kControlHeaderBytes, bytes.end());
  return std::optional<ControlFile>(std::move(found));
}

absl::Status FileCoordinator::Welcome() {
  session_ = FreshNonce();
  KEDGE_RETURN_IF_ERROR(Write(ControlKind::kWelcome, 0, {}));
  const auto until = Clock::now() + options_.deadline;
  BackOff back_off(until);
  std::map<std::uint32_t, std::uint64_t> welcomed;
  while (true) {
    std::map<std::uint32_t, std::string> notes;  // why a rank is not ready
    std::uint32_t ready = 1;
    bool changed = false;
    const absl::StatusOr<std::vector<std::string>> names =
        fs_->List(directory_);
    if (!names.ok()) {
      // Storage may come back; until the deadline that is a pause like others.
      notes[0] = std::string(names.status().message());
    } else {
      for (const std::string& name : *names) {
        const auto rank = ParseControlFileName(name);
        if (!rank || *rank == 0 || *rank >= kMaxRanks) continue;
        const auto file = Read(*rank, [&](const ControlHeader& header) {
          return header.kind != ControlKind::kHello &&
                 header.session != session_;
        });
        if (!file.ok()) {
          notes[*rank] = std::string(file.status().message());
          continue;
        }
        if (!file->has_value()) {
          notes[*rank] = "its control file is of another session";
          continue;
        }
        const ControlHeader& header = (*file)->header;
        if (header.kind == ControlKind::kHello) {
          std::uint64_t& nonce = welcomed[*rank];
          changed |= nonce != header.nonce;
          nonce = header.nonce;
          notes[*rank] = "it has said hello, and not yet answered the welcome";
        } else if (header.kind == ControlKind::kRefused) {
          const auto& text = (*file)->payload;
          return absl::FailedPreconditionError(absl::StrCat(
              directory_, ": rank ", *rank, " refused: ",
              absl::CHexEscape(absl::string_view(
                  reinterpret_cast<const char*>(text.data()), text.size()))));
        } else if (*rank < options_.world_size &&
                   welcomed[*rank] == header.nonce) {
          // Ready, or in its first Gather already.
          nonces_[*rank] = header.nonce;
          ++ready;
        }
      }
    }
    if (ready == options_.world_size) {
      if (names.ok()) RemoveLeftovers(*names);
      return absl::OkStatus();
    }
    if (changed) {
      std::vector<ControlPeer> peers;
      for (const auto& [rank, nonce] : welcomed) {
        if (nonce != 0) peers.push_back({rank, nonce});
      }
      KEDGE_RETURN_IF_ERROR(
          Write(ControlKind::kWelcome, 0, SerializeWelcome(peers)));
      back_off.Restart();
    }
    if (!back_off.Wait()) {
      std::vector<std::uint32_t> missing;
      std::string why;
      for (std::uint32_t rank = 1; rank < options_.world_size; ++rank) {
        if (nonces_[rank] != 0 && welcomed[rank] == nonces_[rank] &&
            notes.count(rank) == 0) {
          continue;
        }
        missing.push_back(rank);
        if (notes.count(rank) != 0 && missing.size() <= 4) {
          absl::StrAppend(&why, "; rank ", rank, ": ", notes[rank]);
        }
      }
      if (notes.count(0) != 0) absl::StrAppend(&why, "; ", notes[0]);
      return absl::UnavailableError(absl::StrCat(
          directory_, ": opening: waited ", options_.deadline.count(),
          " ms for ranks ", absl::StrJoin(missing, ", "), " of ",
          options_.world_size, why, "; ", kReopen));
    }
  }
}

void FileCoordinator::RemoveLeftovers(const std::vector<std::string>& names) {
  for (const std::string& name : names) {
    const auto rank = ParseControlFileName(name);
    const auto temporary = ParseControlTemporaryName(name);
    const bool of_a_larger_run = rank && *rank >= options_.world_size;
    const bool of_a_dead_rank =
        temporary && (temporary->rank >= options_.world_size ||
                      temporary->nonce != nonces_[temporary->rank]);
    if (of_a_larger_run || of_a_dead_rank) {
      fs_->RemoveFile(JoinPath(directory_, name)).IgnoreError();
    }
  }
}

absl::Status FileCoordinator::Join() {
  KEDGE_RETURN_IF_ERROR(Write(ControlKind::kHello, 0, {}));
  const auto until = Clock::now() + options_.deadline;
  BackOff back_off(until);
  bool exists = false;
  std::string seen = "it has no control file";
  while (true) {
    if (!exists) {
      const absl::StatusOr<std::vector<std::string>> names =
          fs_->List(directory_);
      if (!names.ok()) {
        seen = std::string(names.status().message());
      } else {
        exists = std::find(names->begin(), names->end(), ControlFileName(0)) !=
                 names->end();
      }
    }
    if (exists) {
      const auto file = Read(0, [&](const ControlHeader& header) {
        return header.kind != ControlKind::kWelcome;
      });
      if (absl::IsNotFound(file.status())) {
        exists = false;
      } else if (!file.ok()) {
        seen = std::string(file.status().message());
      } else if (!file->has_value()) {
        seen =
            "its control file is that of a dead run, or of one that has "
            "begun without this rank";
      } else {
        const ControlHeader& header = (*file)->header;
        KEDGE_ASSIGN_OR_RETURN(const std::vector<ControlPeer> peers,
                               ParseWelcome(PathOf(0), (*file)->payload));
        seen = absl::StrCat("its control file, a ", HeaderText(header),
                            ", does not name this process");
        for (const ControlPeer& peer : peers) {
          if (peer.rank != options_.rank) continue;
          if (peer.nonce != nonce_) {
            seen = absl::StrCat("its welcome names another process as rank ",
                                options_.rank, "; is that rank started twice?");
            continue;
          }
          session_ = header.session;
          nonces_[0] = header.nonce;
          std::string differs;
          if (header.world_size != options_.world_size) {
            differs =
                absl::StrCat("world size: expected ", options_.world_size,
                             " as rank ", options_.rank, " was told, found ",
                             header.world_size, " at rank 0");
          } else if (header.run != run_) {
            differs = absl::StrCat(
                "run id: expected ", ToHex(run_), " as rank ", options_.rank,
                " was told, found ", ToHex(header.run), " at rank 0");
          }
          if (differs.empty()) return Write(ControlKind::kReady, 0, {});
          Write(ControlKind::kRefused, 0,
                std::as_bytes(std::span(differs.data(), differs.size())))
              .IgnoreError();
          return absl::FailedPreconditionError(
              absl::StrCat(directory_, ": ", differs,
                           "; start all ranks of one job with the same"));
        }
      }
    }
    if (!back_off.Wait()) {
      return absl::UnavailableError(
          absl::StrCat(directory_, ": opening: rank ", options_.rank,
                       " waited ", options_.deadline.count(),
                       " ms for a welcome by rank 0: ", seen, "; ", kReopen));
    }
  }
}

absl::StatusOr<std::vector<std::byte>> FileCoordinator::Await(
    std::uint32_t rank, ControlKind kind, Clock::time_point until,
    std::string* last_seen) {
  BackOff back_off(until);
  *last_seen = "its control file cannot be seen";
  do {
    auto file = Read(rank, [&](const ControlHeader& header) {
      return header.session == session_ && header.nonce == nonces_[rank] &&
             header.round < round_;
    });
    if (file.ok() && !file->has_value()) {
      *last_seen = "its control file is of an earlier round";
      continue;
    }
    if (!file.ok()) {
      // Storage may come back, and a name may be between two others.
      if (!absl::IsUnavailable(file.status()) &&
          !absl::IsNotFound(file.status())) {
        return file.status();
      }
      *last_seen = std::string(file.status().message());
      continue;
    }
    const ControlHeader& header = (*file)->header;
    if (header.nonce != nonces_[rank] || header.session != session_) {
      return absl::UnavailableError(absl::StrCat(
          PathOf(rank), ": rank ", rank,
          " was started again: expected session ", Hex64(session_),
          " and nonce ", Hex64(nonces_[rank]), ", found a ", HeaderText(header),
          " with nonce ", Hex64(header.nonce), "; open again on all ranks"));
    }
    if (header.round == round_ && header.kind == kind) {
      return std::move((*file)->payload);
    }
    return absl::UnavailableError(
        absl::StrCat(PathOf(rank), ": expected a ", ControlKindName(kind),
                     " of round ", round_, ", found a ", HeaderText(header),
                     ": the ranks are out of step; open again on all ranks"));
  } while (back_off.Wait());
  return absl::DeadlineExceededError(*last_seen);
}

absl::StatusOr<std::vector<std::vector<std::byte>>> FileCoordinator::Gather(
    absl::string_view what, std::span<const std::byte> bytes) {
  ++round_;
  if (options_.rank != 0) {
    KEDGE_RETURN_IF_ERROR(Write(ControlKind::kGather, round_, bytes));
    return std::vector<std::vector<std::byte>>();
  }
  const auto until = Clock::now() + options_.deadline;
  std::vector<std::vector<std::byte>> pieces(options_.world_size);
  pieces[0].assign(bytes.begin(), bytes.end());
  std::vector<std::uint32_t> missing;
  std::string why;
  for (std::uint32_t rank = 1; rank < options_.world_size; ++rank) {
    std::string last_seen;
    auto piece = Await(rank, ControlKind::kGather, until, &last_seen);
    if (absl::IsDeadlineExceeded(piece.status())) {
      // The time is up for the others too, but they may be there already.
      missing.push_back(rank);
      if (missing.size() <= 4) {
        absl::StrAppend(&why, "; rank ", rank, ": ", last_seen);
      }
      continue;
    }
    if (!piece.ok()) {
      return Annotate(piece.status(), absl::StrCat("gather of ", what));
    }
    pieces[rank] = *std::move(piece);
  }
  if (!missing.empty()) {
    return absl::UnavailableError(
        absl::StrCat(directory_, ": gather of ", what, " (round ", round_,
                     "): waited ", options_.deadline.count(), " ms for ranks ",
                     absl::StrJoin(missing, ", "), " of ", options_.world_size,
                     why, "; ", kReopen));
  }
  return pieces;
}

absl::StatusOr<std::vector<std::byte>> FileCoordinator::Broadcast(
    absl::string_view what, std::span<const std::byte> bytes) {
  if (options_.rank == 0) {
    KEDGE_RETURN_IF_ERROR(Write(ControlKind::kBroadcast, round_, bytes));
    return std::vector<std::byte>(bytes.begin(), bytes.end());
  }
  std::string last_seen;
  auto piece = Await(0, ControlKind::kBroadcast,
                     Clock::now() + options_.deadline, &last_seen);
  if (absl::IsDeadlineExceeded(piece.status())) {
    return absl::UnavailableError(absl::StrCat(
        directory_, ": broadcast of ", what, " (round ", round_, "): rank ",
        options_.rank, " waited ", options_.deadline.count(),
        " ms for rank 0: ", last_seen, "; ", kReopen));
  }
  if (!piece.ok()) {
    return Annotate(piece.status(), absl::StrCat("broadcast of ", what));
  }
  return piece;
}

}  // namespace kedge
