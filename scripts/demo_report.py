#!/usr/bin/env python3
"""Judges what a demo reported, and prints it as a table.

Reads trainer.jsonl, whole.jsonl, again.jsonl, tp2.jsonl and late.jsonl in a
directory; again is the engine whole after it was killed. Every engine must have seen every version that it was there for, under the
trainer's manifest hash, with the trainer's loss and weights to the bit. The
last line says OK, or NOT OK and what is off; the exit status says it too.
"""

import argparse
import json
import os
import statistics
import sys

ENGINES = ("whole", "again", "tp2", "late")
MUST_EQUAL = ("manifest_hash", "loss_bits", "weights_hash")


def read_lines(path, key, problems):
    """The JSON lines of a file by their member `key`."""
    lines = {}
    try:
        with open(path, encoding="utf-8") as file:
            for number, text in enumerate(file, 1):
                line = json.loads(text)
                if line[key] in lines:
                    problems.append(
                        f"{path}:{number}: v{line[key]} is told twice")
                lines[line[key]] = line
    except (OSError, ValueError, KeyError, TypeError) as error:
        problems.append(f"{path}: cannot be read: {error!r}")
    return lines


def check_engine(name, engine, trainer, versions, problems):
    """Whether the engine saw exactly `versions`, each as the trainer's."""
    if sorted(engine) != versions:
        missing = [v for v in versions if v not in engine]
        extra = [v for v in engine if v not in versions]
        problems.append(f"{name}: expected v{versions[0]} to v{versions[-1]}, "
                        f"missing {missing}, extra {extra}")
    for version in versions:
        if version not in engine or version not in trainer:
            continue
        for member in MUST_EQUAL:
            expected = trainer[version].get(member)
            found = engine[version].get(member)
            if expected is None or found != expected:
                problems.append(f"{name}: v{version}: {member}: expected "
                                f"{expected}, the trainer's, found {found}")


def check_join(name, engine, version, deltas, problems):
    """Whether the first version came from an anchor and `deltas` deltas."""
    line = engine.get(version, {})
    found = (line.get("joined"), line.get("deltas"))
    if found != (True, deltas):
        problems.append(f"{name}: v{version}: expected a join of an anchor and "
                        f"{deltas} deltas, found joined, deltas = {found}")


def check_trainer(trainer, options, problems):
    versions = list(range(options.steps + 1))
    if sorted(trainer) != versions:
        problems.append(f"trainer: expected v0 to v{options.steps}, found "
                        f"{sorted(trainer)}")
    for version in versions[1:]:
        line = trainer.get(version, {})
        if line.get("nnz", 0) == 0:
            problems.append(f"trainer: v{version}: no weight changed")
        has_anchor = line.get("anchor_bytes", 0) > 0
        if has_anchor != (version % options.anchor_every == 0):
            problems.append(f"trainer: v{version}: expected an anchor every "
                            f"{options.anchor_every} steps, found anchor = "
                            f"{has_anchor}")
    losses = {trainer[v].get("loss_bits") for v in versions if v in trainer}
    if len(losses) < 2 <= len(versions):
        problems.append("trainer: the loss never changed: it proves nothing")


def number(line, member, form):
    value = line.get(member)
    return format("-", f">{form.split('.')[0]}") if value is None else format(
        value, form + "f")


def print_table(trainer, engines, steps):
    print("                                bits a change          trainer, ms   "
          "           engines, apply / verify ms")
    print("step  density     bytes    kedge  entropy  ratio   encode  commit  "
          "anchor        whole        again          tp2         late    loss")
    for step in range(1, steps + 1):
        line = trainer.get(step, {})
        anchor = line.get("anchor_ms", 0)
        cells = [
            f"{step:4d}",
            f"{100 * line.get('density', 0):7.3f}%",
            f"{line.get('bytes', 0):9d}",
            number(line, "bits_per_change", "8.3"),
            number(line, "entropy_bits_per_change", "8.3"),
            number(line, "bytes_to_entropy", "6.3"),
            number(line, "encode_ms", "8.1"),
            number(line, "commit_ms", "7.1"),
            f"{anchor:7.1f}" if line.get("anchor_bytes") else "      -",
        ]
        row = " ".join(cells)
        for name in ENGINES:
            seen = engines[name].get(step, {})
            if "apply_ms" in seen:
                mark = "*" if seen.get("joined") else " "
                row += (f"{number(seen, 'apply_ms', '6.1')} /"
                        f"{number(seen, 'verify_ms', '5.1')}{mark}")
            else:
                row += "      -       "
        print(f"{row} {number(line, 'loss', '9.6')}")
    print("bytes are all files of a step but its anchor's; * joined there, "
          "from an anchor")


def print_sums(trainer, steps):
    lines = [trainer[s] for s in range(1, steps + 1) if s in trainer]
    elements = sum(line.get("elements", 0) for line in lines)
    if elements == 0:
        return
    bits = 8 * sum(line["bytes"] for line in lines)
    manifests = 8 * sum(line["manifest_bytes"] for line in lines)
    entropy = sum(
        line.get("entropy_bits_per_change", 0) * line["nnz"] for line in lines)
    if entropy == 0:
        return
    print(f"all steps: {bits / elements:.5f} bits a parameter, "
          f"{bits / entropy:.3f} of entropy ({(bits - manifests) / entropy:.3f}"
          " without the manifests: the model is small)")


def print_medians(trainer, engines, steps):
    """One line without the spikes that a busy machine puts into the table."""

    def median(lines, member):
        values = [
            line[member] for version, line in lines.items()
            if 1 <= version <= steps and not line.get("joined") and
            member in line
        ]
        return f"{statistics.median(values):.1f}" if values else "-"

    with_anchor = {
        step: line for step, line in trainer.items()
        if line.get("anchor_bytes", 0) > 0
    }
    parts = [
        f"encode {median(trainer, 'encode_ms')}, "
        f"commit {median(trainer, 'commit_ms')}, "
        f"anchor {median(with_anchor, 'anchor_ms')}"
    ]
    for name in ENGINES:
        lines = engines[name]
        parts.append(f"{name}: read {median(lines, 'read_ms')}, apply "
                     f"{median(lines, 'apply_ms')}, verify "
                     f"{median(lines, 'verify_ms')}")
    print("medians in ms: " + "; ".join(parts))


def main():
    parser = argparse.ArgumentParser(
        description="Judges what a demo reported, and prints it as a table.")
    parser.add_argument("directory")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--anchor-every", type=int, default=3)
    parser.add_argument("--late-step", type=int, default=11)
    parser.add_argument("--kill-step", type=int, default=8)
    parser.add_argument("--fsck-status", type=int, default=0)
    parser.add_argument("--seconds", type=int, help="how long the run took")
    options = parser.parse_args()

    problems = []
    trainer = read_lines(os.path.join(options.directory, "trainer.jsonl"),
                         "step", problems)
    engines = {
        name: read_lines(os.path.join(options.directory, f"{name}.jsonl"),
                         "version", problems)
        for name in ENGINES
    }
    check_trainer(trainer, options, problems)
    for name in ENGINES:
        first = {"late": options.late_step,
                 "again": options.kill_step}.get(name, 0)
        last = options.kill_step - 1 if name == "whole" else options.steps
        check_engine(name, engines[name], trainer,
                     list(range(first, last + 1)), problems)
        check_join(name, engines[name], first, first % options.anchor_every,
                   problems)
    for name, step in (("late", options.late_step),
                       ("again", options.kill_step)):
        if step % options.anchor_every == 0:
            problems.append(f"{name}: v{step} has an anchor: choose a step "
                            "without one")
    if options.fsck_status != 0:
        problems.append(
            f"kedge fsck --deep: exit status: expected 0, found "
            f"{options.fsck_status}; see "
            f"{os.path.join(options.directory, 'fsck.log')}")

    print_table(trainer, engines, options.steps)
    print_sums(trainer, options.steps)
    print_medians(trainer, engines, options.steps)
    for problem in problems[:20]:
        print(problem)
    if problems:
        print(f"NOT OK: {len(problems)} problems; the first: {problems[0]}")
        return 1
    took = "" if options.seconds is None else f" ({options.seconds} s)"
    print(f"OK: whole (killed in the update to v{options.kill_step} and "
          f"started again) and tp2 at v0 to v{options.steps} and late from "
          f"v{options.late_step} on have the trainer's loss and weights, bit "
          f"for bit; fsck --deep is clean{took}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
