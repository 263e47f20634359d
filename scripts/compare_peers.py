#!/usr/bin/env python3
"""Compares kedge's codec with numpy XOR + zstd level 1, one thread each.

Makes two steps of synthetic Adam-like bf16 weights (f32 masters N(0, 0.02),
updates 0.5e-6 and 1.5e-6 times a normal, rounded to nearest even), then takes
turns: numpy XOR and zstd, kedge's diff + encode (with its checksum); zstd
decompression and XOR in place, kedge's decode + apply; and what memory allows.
Times are of each program's own thread, the best of the repetitions, so that
other programs on the machine count little on either side.

Needs numpy and zstandard (Debian: apt install python3-numpy python3-zstandard;
elsewhere: pip install numpy zstandard) and a built kedge_peer_bench
(scripts/build). Exit status 1 if a weight did not come back.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time

try:
    import numpy
    import zstandard
except ImportError as error:
    sys.exit(
        f"compare_peers.py: {error}; install with `apt install python3-numpy "
        "python3-zstandard` (Debian, run as /usr/bin/python3) or `pip install "
        "numpy zstandard`")

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
BLOCK = 1 << 20  # elements made at a time


def to_bf16(values):
    """The bits of finite f32 `values` rounded to nearest even bf16."""
    bits = values.view(numpy.uint32)
    rounded = bits + numpy.uint32(0x7FFF) + ((bits >> 16) & numpy.uint32(1))
    return (rounded >> 16).astype(numpy.uint16)


def make_weights(elements, update, seed):
    """Old and new bf16 bits of one step of `update` times a normal."""
    rng = numpy.random.default_rng(seed)
    old = numpy.empty(elements, numpy.uint16)
    new = numpy.empty(elements, numpy.uint16)
    for begin in range(0, elements, BLOCK):
        size = min(BLOCK, elements - begin)
        master = rng.standard_normal(size, numpy.float32)
        master *= numpy.float32(0.02)
        step = rng.standard_normal(size, numpy.float32)
        step *= numpy.float32(update)
        old[begin:begin + size] = to_bf16(master)
        new[begin:begin + size] = to_bf16(master + step)
    return old, new


def entropy_bits(old, new):
    """Order-0 entropy of (changed?, difference), in bits an element."""
    total = old.size
    counts = numpy.zeros(1 << 17, numpy.int64)
    for begin in range(0, total, BLOCK):
        part = slice(begin, begin + BLOCK)
        difference = new[part].astype(numpy.int32) - old[part]
        counts += numpy.bincount(difference + (1 << 16), minlength=1 << 17)
    p = counts[counts > 0] / total
    return float(-(p * numpy.log2(p)).sum())


class Kedge:
    """A kedge_peer_bench that does one repetition when asked."""

    def __init__(self, program, old_path, new_path, rows):
        self.process = subprocess.Popen(
            [program, old_path, new_path, "--rows", str(rows), "--serve"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, task):
        self.process.stdin.write(task + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        if not answer:
            sys.exit("compare_peers.py: kedge_peer_bench stopped")
        return json.loads(answer)

    def close(self):
        self.process.stdin.close()
        self.process.wait()


class Peer:
    """numpy XOR + zstd level 1."""

    def __init__(self, old, new):
        self.old, self.new = old, new
        self.weights = old.copy()
        self.difference = numpy.empty_like(old)
        self.compressor = zstandard.ZstdCompressor(level=1)
        self.decompressor = zstandard.ZstdDecompressor()
        self.blob = b""

    def diff_encode(self):
        start = time.thread_time()
        numpy.bitwise_xor(self.old, self.new, out=self.difference)
        self.blob = self.compressor.compress(self.difference)
        return time.thread_time() - start

    def apply(self):
        """The inverse as programs write it: one call, then XOR in place."""
        self.weights[:] = self.old
        start = time.thread_time()
        difference = numpy.frombuffer(
            self.decompressor.decompress(self.blob), numpy.uint16)
        numpy.bitwise_xor(self.weights, difference, out=self.weights)
        seconds = time.thread_time() - start
        if not numpy.array_equal(self.weights, self.new):
            sys.exit("compare_peers.py: XOR + zstd did not give the weights")
        return seconds

    def apply_streaming(self):
        """The inverse into memory that is used again, without page faults."""
        self.weights[:] = self.old
        start = time.thread_time()
        with self.decompressor.stream_reader(self.blob) as reader:
            view = memoryview(self.difference).cast("B")
            at = 0
            while at < len(view):
                at += reader.readinto(view[at:])
        numpy.bitwise_xor(self.weights, self.difference, out=self.weights)
        seconds = time.thread_time() - start
        if not numpy.array_equal(self.weights, self.new):
            sys.exit("compare_peers.py: XOR + zstd did not give the weights")
        return seconds


def compare(program, elements, rows, update, repeat, directory):
    old, new = make_weights(elements, update, seed=1)
    old_path = os.path.join(directory, "old.bf16")
    new_path = os.path.join(directory, "new.bf16")
    old.tofile(old_path)
    new.tofile(new_path)
    peer = Peer(old, new)
    kedge = Kedge(program, old_path, new_path, rows)
    sizes = kedge.ask("sizes")
    times = {}

    def note(name, seconds):
        times.setdefault(name, []).append(seconds)

    for _ in range(repeat):
        note("peer_diff_encode", peer.diff_encode())
        note("diff_encode", kedge.ask("diff_encode"))
        note("peer_apply", peer.apply())
        note("peer_apply_streaming", peer.apply_streaming())
        note("apply", kedge.ask("apply"))
        for task in ("l61", "read", "read_two", "copy"):
            note(task, kedge.ask(task))
    kedge.close()

    side = 2 * elements
    best = {name: min(all_times) for name, all_times in times.items()}
    rate = {name: side / seconds / 1e9 for name, seconds in best.items()}
    bits = 8 * sizes["bytes"] / elements
    entropy = entropy_bits(old, new)
    return {
        "update": update,
        "elements": elements,
        "density": sizes["nnz"] / elements,
        "diff_encode_ratio": best["peer_diff_encode"] / best["diff_encode"],
        "apply_ratio": best["peer_apply"] / best["apply"],
        "apply_ratio_to_streaming":
            best["peer_apply_streaming"] / best["apply"],
        "bits_per_param": bits,
        "entropy_bits_per_param": entropy,
        "size_to_entropy": bits / entropy if entropy else None,
        "peer_bits_per_param": 8 * len(peer.blob) / elements,
        "diff_encode_gb_per_s": rate["diff_encode"],
        "apply_gb_per_s": rate["apply"],
        "l61_gb_per_s": rate["l61"],
        "peer_diff_encode_gb_per_s": rate["peer_diff_encode"],
        "peer_apply_gb_per_s": rate["peer_apply"],
        "peer_apply_streaming_gb_per_s": rate["peer_apply_streaming"],
        "ceilings_gb_per_s": {
            "read": rate["read"],
            "read_two_arrays": rate["read_two"],
            "copy": rate["copy"],
        },
        "spread": {name: max(all_times) / min(all_times)
                   for name, all_times in times.items()},
    }


def main():
    parser = argparse.ArgumentParser(
        description="kedge against numpy XOR + zstd level 1, one thread each")
    parser.add_argument("--json", action="store_true", help="print JSON only")
    parser.add_argument("--elements", type=int, default=1 << 26)
    parser.add_argument("--rows", type=int, default=8192,
                        help="rows of the tensor; 1 makes it a vector")
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--update", type=float, action="append",
                        help="size of the updates (default 0.5e-6 and 1.5e-6)")
    parser.add_argument(
        "--program",
        default=os.path.join(ROOT, "build/release/bench/kedge_peer_bench"))
    options = parser.parse_args()
    if not os.access(options.program, os.X_OK):
        sys.exit(f"compare_peers.py: {options.program}: not built; run "
                 "scripts/build first, or give --program")
    with tempfile.TemporaryDirectory() as directory:
        cases = [
            compare(options.program, options.elements, options.rows, update,
                    options.repeat, directory)
            for update in options.update or [0.5e-6, 1.5e-6]
        ]
    # The worst of the cases speaks for all.
    largest = max(cases, key=lambda case: case["size_to_entropy"] or 0)
    result = {
        "diff_encode_ratio": min(c["diff_encode_ratio"] for c in cases),
        "apply_ratio": min(c["apply_ratio"] for c in cases),
        "bits_per_param": largest["bits_per_param"],
        "entropy_bits_per_param": largest["entropy_bits_per_param"],
        "l61_gb_per_s": min(c["l61_gb_per_s"] for c in cases),
        "ceilings_gb_per_s": cases[0]["ceilings_gb_per_s"],
        "cases": cases,
    }
    if options.json:
        print(json.dumps(result, indent=2))
        return
    for case in cases:
        ceilings = case["ceilings_gb_per_s"]
        print(f"update {case['update']:g}, density "
              f"{100 * case['density']:.3f} %, {case['elements']} elements")
        print(f"  diff + encode  {case['diff_encode_gb_per_s']:6.2f} GB/s   "
              f"{case['diff_encode_ratio']:5.1f}x XOR + zstd -1   "
              f"(reading both: {ceilings['read_two_arrays']:.2f})")
        print(f"  decode + apply {case['apply_gb_per_s']:6.2f} GB/s   "
              f"{case['apply_ratio']:5.1f}x zstd + XOR      "
              f"(streaming: {case['apply_ratio_to_streaming']:.1f}x; "
              f"copy: {ceilings['copy']:.2f})")
        print(f"  L61            {case['l61_gb_per_s']:6.2f} GB/s   "
              f"(read: {ceilings['read']:.2f})")
        print(f"  size           {case['bits_per_param']:.5f} bits a parameter, "
              f"{case['size_to_entropy']:.4f} of entropy; XOR + zstd -1 "
              f"{case['peer_bits_per_param']:.5f}")


if __name__ == "__main__":
    main()
