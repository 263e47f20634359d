#!/usr/bin/env python3
"""Goal: the demo's judge passes a good run and finds every planted fault.

Method: writes the reports of a run of four steps, spoils one thing at a time,
and runs the judge on them. Usage: demo_report_test.py DEMO_REPORT_PY
"""

import copy
import json
import os
import subprocess
import sys
import tempfile
import unittest

JUDGE = sys.argv.pop(1)
STEPS = 4
LATE = 2
KILL = 2


def good_run():
    def seen(version):
        return {
            "manifest_hash": f"m{version}",
            "loss": 2.5 - version,
            "loss_bits": f"0x{version}",
            "weights_hash": f"w{version}",
        }

    def engine(first, last=STEPS):
        lines = []
        for version in range(first, last + 1):
            joined = version == first
            lines.append({
                "version": version, **seen(version), "joined": joined,
                "deltas": version % 3 if joined else 1,
                "apply_ms": 0.5, "verify_ms": 0.25})
        return lines

    trainer = [{"step": 0, **seen(0)}]
    for step in range(1, STEPS + 1):
        trainer.append({
            "step": step, **seen(step), "elements": 1000, "nnz": 10,
            "density": 0.01, "bytes": 40, "manifest_bytes": 20,
            "anchor_bytes": 2000 if step % 3 == 0 else 0,
            "bits_per_change": 32.0, "entropy_bits_per_change": 9.0,
            "bytes_to_entropy": 32 / 9})
    return {"trainer": trainer, "whole": engine(0, KILL - 1),
            "again": engine(KILL), "tp2": engine(0), "late": engine(LATE)}


class DemoReportTest(unittest.TestCase):

    def judge(self, run, *more):
        with tempfile.TemporaryDirectory() as directory:
            for name, lines in run.items():
                path = os.path.join(directory, f"{name}.jsonl")
                with open(path, "w", encoding="utf-8") as file:
                    for line in lines:
                        file.write(json.dumps(line) + "\n")
            result = subprocess.run(
                [sys.executable, JUDGE, directory, "--steps", str(STEPS),
                 "--anchor-every", "3", "--late-step", str(LATE),
                 "--kill-step", str(KILL), *more],
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                check=False)
        return result.returncode, result.stdout.strip().splitlines()[-1]

    def refused(self, run, text, *more):
        status, last = self.judge(run, *more)
        self.assertEqual(status, 1, last)
        self.assertTrue(last.startswith("NOT OK: "), last)
        self.assertIn(text, last)

    def test_good_run_passes(self):
        status, last = self.judge(good_run())
        self.assertEqual(status, 0, last)
        self.assertTrue(last.startswith("OK: "), last)

    def test_one_bit_of_a_loss_is_found(self):
        for name in ("whole", "again", "tp2", "late"):
            for member in ("loss_bits", "weights_hash", "manifest_hash"):
                run = good_run()
                run[name][-1][member] += "1"
                last = run[name][-1]["version"]
                self.refused(run, f"{name}: v{last}: {member}")

    def test_missing_version_is_found(self):
        for name in ("whole", "again", "tp2", "late"):
            run = good_run()
            del run[name][1]
            self.refused(run, f"{name}: expected v")
        run = good_run()
        del run["trainer"][2]
        self.refused(run, "trainer: expected v0 to v4")

    def test_engine_without_report_is_found(self):
        run = good_run()
        del run["late"]
        self.refused(run, "late.jsonl: cannot be read")

    def test_version_told_twice_is_found(self):
        run = good_run()
        run["tp2"].append(copy.deepcopy(run["tp2"][-1]))
        self.refused(run, "told twice")

    def test_restarted_engine_that_did_not_join_is_found(self):
        run = good_run()
        run["again"][0]["joined"] = False
        self.refused(run, "again: v2: expected a join")

    def test_late_engine_that_did_not_join_late_is_found(self):
        run = good_run()
        run["late"][0]["deltas"] = 0
        self.refused(run, "late: v2: expected a join")
        run = good_run()
        run["late"][0]["joined"] = False
        self.refused(run, "late: v2: expected a join")

    def test_missing_anchor_is_found(self):
        run = good_run()
        run["trainer"][3]["anchor_bytes"] = 0
        self.refused(run, "v3: expected an anchor")

    def test_steps_that_change_nothing_are_found(self):
        run = good_run()
        run["trainer"][1]["nnz"] = 0
        self.refused(run, "v1: no weight changed")

    def test_loss_that_never_changes_is_found(self):
        run = good_run()
        for lines in run.values():
            for line in lines:
                line["loss_bits"] = "0x0"
        self.refused(run, "the loss never changed")

    def test_findings_of_fsck_are_passed_on(self):
        self.refused(good_run(), "kedge fsck --deep", "--fsck-status", "4")


if __name__ == "__main__":
    unittest.main()
