#include "kedge/reader/fsck_directory.h"

#include <algorithm>
#include <array>
#include <map>
#include <memory>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "kedge/format/layout.h"
#include "kedge/format/limits.h"
#include "kedge/format/status.h"

namespace kedge::fsck {
namespace {

constexpr std::uint64_t RoundUp(std::uint64_t value, std::uint64_t alignment) {
  return (value + alignment - 1) / alignment * alignment;
}

std::string Expected(absl::string_view what, absl::string_view expected,
                     absl::string_view found) {
  return absl::StrCat(what, ": expected ", expected, ", found ", found);
}

bool Contains(const std::vector<std::string>& names, absl::string_view name) {
  return std::binary_search(names.begin(), names.end(), std::string(name));
}

std::uint64_t KeyOf(std::span<const std::byte> commit) {
  return std::max<std::uint64_t>(HashBytes64(commit), 2);
}

absl::string_view TypeText(FileType type) {
  return type == FileType::kDirectory ? "a directory"
                                      : "a link, FIFO, socket or device";
}

// Whether another look at the directory is worth it after `status`.
bool IsGone(FileSystem& fs, const std::string& path) {
  return absl::IsNotFound(fs.Stat(path).status());
}

}  // namespace

std::optional<std::uint64_t> CommitKey(FileSystem& fs,
                                       const std::string& path) {
  const auto info = fs.Stat(path);
  if (absl::IsNotFound(info.status())) return std::nullopt;
  // What a link leads to is not looked at here either.
  if (info.ok() && info->type != FileType::kDirectory) return 0;
  const auto commit =
      ReadFile(fs, JoinPath(path, kCommitFileName), 2 * kCommitBytes);
  if (commit.ok()) return KeyOf(*commit);
  if (!absl::IsNotFound(commit.status())) return 1;
  if (IsGone(fs, path)) return std::nullopt;
  return 0;
}

absl::StatusOr<Directory> ReadDirectory(FileSystem& fs, const std::string& root,
                                        const std::string& name,
                                        const RunId& run, std::uint64_t step,
                                        FindingList* findings) {
  Directory directory;
  directory.name = name;
  directory.path = JoinPath(root, name);
  const auto gone = [&] {
    directory.state = Directory::State::kGone;
    return directory;
  };
  directory.state = Directory::State::kBad;

  const auto info = fs.Stat(directory.path);
  if (absl::IsNotFound(info.status())) return gone();
  if (absl::IsResourceExhausted(info.status())) return info.status();
  if (info.ok() && info->type != FileType::kDirectory) {
    findings->Add(MakeFinding(
        Id::kNotADirectory, name,
        Expected("file type", "a directory",
                 info->type == FileType::kRegular ? "a file"
                                                  : TypeText(info->type))));
    return directory;
  }
  auto names = fs.List(directory.path);
  if (absl::IsNotFound(names.status())) return gone();
  if (!names.ok()) {
    if (absl::IsResourceExhausted(names.status())) return names.status();
    // As whoever looks again whether the finding stands will see it.
    directory.commit_key = CommitKey(fs, directory.path).value_or(0);
    findings->Add(
        FromStatus(Id::kUnreadable, name, directory.path, names.status()));
    return directory;
  }
  directory.names = *std::move(names);

  // COMMIT.
  const std::string commit_name = absl::StrCat(name, "/", kCommitFileName);
  const std::string commit_path = JoinPath(directory.path, kCommitFileName);
  const auto commit_bytes = ReadFile(fs, commit_path, 2 * kCommitBytes);
  if (absl::IsNotFound(commit_bytes.status())) {
    if (IsGone(fs, directory.path)) return gone();
    directory.state = Directory::State::kUnpublished;
    // One that was published once had a manifest.
    Finding finding =
        MakeFinding(Id::kCommitMissing, name,
                    absl::StrCat("COMMIT: expected a file, found none among ",
                                 directory.names.size(), " names"));
    const bool had = Contains(directory.names, kManifestFileName);
    findings->Add(had ? finding
                      : WithSeverity(finding, FindingSeverity::kInfo));
    return directory;
  }
  if (!commit_bytes.ok()) {
    if (absl::IsResourceExhausted(commit_bytes.status())) {
      return commit_bytes.status();
    }
    directory.commit_key = 1;
    findings->Add(FromStatus(Id::kCommitBad, commit_name, commit_path,
                             commit_bytes.status()));
    return directory;
  }
  directory.commit_key = KeyOf(*commit_bytes);
  const auto commit = ParseCommit(commit_name, *commit_bytes);
  if (!commit.ok()) {
    findings->Add(
        FromStatus(Id::kCommitBad, commit_name, commit_path, commit.status()));
    return directory;
  }
  if (commit->run != run) {
    findings->Add(
        MakeFinding(Id::kCommitOtherRun, commit_name,
                    Expected("run id", ToHex(run), ToHex(commit->run)), 8));
    return directory;
  }
  if (commit->step != step) {
    findings->Add(MakeFinding(
        Id::kCommitOtherStep, commit_name,
        Expected("step", absl::StrCat(step), absl::StrCat(commit->step)), 24));
    return directory;
  }
  directory.commit = *commit;

  // MANIFEST.
  const std::string manifest_name = absl::StrCat(name, "/", kManifestFileName);
  const std::string manifest_path = JoinPath(directory.path, kManifestFileName);
  const auto bad = [&](Id id, const absl::Status& status,
                       std::optional<Id> missing = std::nullopt) {
    findings->Add(
        FromStatus(id, manifest_name, manifest_path, status, missing));
    return directory;
  };
  const auto file = fs.OpenForRead(manifest_path);
  if (!file.ok()) {
    if (absl::IsResourceExhausted(file.status())) return file.status();
    if (absl::IsNotFound(file.status())) {
      if (IsGone(fs, directory.path)) return gone();
      findings->Add(MakeFinding(
          Id::kManifestMissing, manifest_name,
          absl::StrCat("expected a file of ", commit->manifest_bytes,
                       " bytes, which COMMIT names, found none")));
      return directory;
    }
    return bad(Id::kManifestBad, file.status());
  }
  const auto size = (*file)->Size();
  if (!size.ok()) return bad(Id::kUnreadable, size.status());
  if (*size != commit->manifest_bytes) {
    findings->Add(MakeFinding(
        Id::kManifestSize, manifest_name,
        Expected("size", absl::StrCat(commit->manifest_bytes, " bytes"),
                 absl::StrCat(*size, " bytes"))));
    return directory;
  }
  directory.manifest.resize(*size);
  const absl::Status read = ReadAll(**file, 0, directory.manifest);
  if (!read.ok()) {
    if (absl::IsResourceExhausted(read)) return read;
    return bad(Id::kManifestSize, read);
  }
  const Hash128 hash = HashBytes128(directory.manifest);
  if (hash != commit->manifest_hash) {
    findings->Add(MakeFinding(
        Id::kManifestHash, manifest_name,
        Expected("XXH3-128", ToHex(commit->manifest_hash), ToHex(hash))));
    return directory;
  }
  directory.state = Directory::State::kOk;
  return directory;
}

std::vector<ExpectedFile> ExpectedFiles(const StepManifest& manifest) {
  std::vector<ExpectedFile> expected(manifest.files.size());
  for (const DeltaRecord& record : manifest.records) {
    ++expected[record.file].count;
    expected[record.file].payload_bytes +=
        RoundUp(record.bytes, kRecordAlignment);
  }
  return expected;
}

std::vector<ExpectedFile> ExpectedFiles(const AnchorManifest& manifest) {
  std::vector<ExpectedFile> expected(manifest.files.size());
  for (std::size_t i = 0; i < expected.size(); ++i) {
    expected[i].payload_bytes = manifest.files[i].bytes - kSliceAlignment;
  }
  for (const AnchorSlice& slice : manifest.slices) {
    ++expected[slice.file].count;
  }
  return expected;
}

absl::Status CheckDataFiles(FileSystem& fs, const Directory& directory,
                            const RunId& run, std::uint64_t step,
                            const std::vector<DataFile>& files,
                            const std::vector<ExpectedFile>& expected,
                            const std::function<bool()>& wait,
                            std::vector<bool>* usable, FindingList* findings) {
  usable->assign(files.size(), false);
  std::vector<std::string> known = {kManifestFileName, kCommitFileName};
  const bool is_anchor =
      absl::EndsWith(directory.name, absl::StrCat("/", kAnchorDirectoryName));
  if (!is_anchor) known.push_back(kAnchorDirectoryName);
  for (const DataFile& file : files) known.push_back(DataFileName(file.id));
  std::sort(known.begin(), known.end());
  std::map<std::string, std::string> by_lower;
  for (const std::string& name : known) {
    by_lower.emplace(absl::AsciiStrToLower(name), name);
  }
  for (const std::string& name : directory.names) {
    if (Contains(known, name)) continue;
    const std::string shown = absl::StrCat(directory.name, "/", Shown(name));
    const auto twin = by_lower.find(absl::AsciiStrToLower(name));
    if (twin != by_lower.end()) {
      findings->Add(MakeFinding(Id::kNameCase, shown,
                                Expected("name", twin->second, Shown(name))));
    } else {
      findings->Add(
          MakeFinding(Id::kDataFileExtra, shown,
                      "expected no such name in MANIFEST's directory"));
    }
  }

  for (std::size_t i = 0; i < files.size(); ++i) {
    const DataFile& file = files[i];
    const std::string base = DataFileName(file.id);
    const std::string name = absl::StrCat(directory.name, "/", base);
    const std::string path = JoinPath(directory.path, base);
    auto info = fs.Stat(path);
    while ((absl::IsNotFound(info.status()) ||
            (info.ok() && info->type == FileType::kRegular &&
             info->bytes < file.bytes)) &&
           wait()) {
      info = fs.Stat(path);
    }
    if (absl::IsNotFound(info.status())) {
      findings->Add(MakeFinding(Id::kDataFileMissing, name,
                                absl::StrCat("expected a file of ", file.bytes,
                                             " bytes, found none")));
      continue;
    }
    if (!info.ok()) {
      if (absl::IsResourceExhausted(info.status())) return info.status();
      findings->Add(FromStatus(Id::kUnreadable, name, path, info.status()));
      continue;
    }
    if (info->type != FileType::kRegular) {
      findings->Add(MakeFinding(
          Id::kDataFileNotRegular, name,
          Expected("file type", "a regular file", TypeText(info->type))));
      continue;
    }
    if (info->bytes != file.bytes) {
      findings->Add(
          MakeFinding(Id::kDataFileSize, name,
                      Expected("size", absl::StrCat(file.bytes, " bytes"),
                               absl::StrCat(info->bytes, " bytes"))));
      continue;
    }
    const auto open = fs.OpenForRead(path);
    std::array<std::byte, kDataFileHeaderBytes> bytes;
    absl::Status status = open.status();
    if (status.ok()) status = ReadAll(**open, 0, bytes);
    if (!status.ok()) {
      if (absl::IsResourceExhausted(status)) return status;
      findings->Add(FromStatus(Id::kDataFileNotRegular, name, path, status,
                               Id::kDataFileMissing));
      continue;
    }
    const auto header = ParseDataFileHeader(name, file.id.kind, bytes);
    if (!header.ok()) {
      findings->Add(
          FromStatus(Id::kDataFileHeader, name, path, header.status()));
      // Deep checks say which pieces are wrong beside the header.
      (*usable)[i] = true;
      continue;
    }
    const auto differs = [&](absl::string_view what, std::int64_t offset,
                             const std::string& wanted,
                             const std::string& found) {
      if (wanted == found) return false;
      findings->Add(MakeFinding(Id::kDataFileHeader, name,
                                Expected(what, wanted, found), offset));
      return true;
    };
    const bool other =
        differs("run id", 8, ToHex(run), ToHex(header->run)) ||
        differs("step", 24, absl::StrCat(step), absl::StrCat(header->step)) ||
        differs("file", 32, base, DataFileName(header->file)) ||
        differs("payload_bytes", 40, absl::StrCat(expected[i].payload_bytes),
                absl::StrCat(header->payload_bytes)) ||
        differs("count", 48, absl::StrCat(expected[i].count),
                absl::StrCat(header->count));
    (*usable)[i] = !other;
  }
  return absl::OkStatus();
}

}  // namespace kedge::fsck
