#!/usr/bin/env python3
"""What finding the changed weights takes in PyTorch, for comparison with
kedge_encode_bench: mask, nonzero, gather, tensor by tensor.

  scripts/gpu_torch_encode.py [--bytes N] [--rounds R] [--device cuda:0] [--json FILE]

Matrices have the shapes, dtypes and densities of kedge_encode_bench with the
same --bytes. For each matrix:

  index = (old != new).flatten().nonzero()
  difference = new.flatten()[index] - old.flatten()[index]

on raw bits, which is what a codec would start from; nothing is encoded. Prints
one JSON object: seconds for all matrices of a case, and TB/s of old + new.
"""

import argparse
import json
import statistics
import sys


COLS = (2048, 4096, 768, 8192, 2880)
MATRIX_BYTES = 96 << 20


def shapes(total_bytes, unit_bytes):
    """As Plan() of bench/encode_bench.cc."""
    found = []
    done = 0
    while done < total_bytes:
        cols = COLS[len(found) % len(COLS)]
        left = min(MATRIX_BYTES, total_bytes - done) // unit_bytes
        rows = max(1, left // cols)
        found.append((rows, cols))
        done += rows * cols * unit_bytes
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bytes", type=int, default=2 << 30)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--json", default="")
    args = parser.parse_args()
    try:
        import torch
    except ImportError:
        sys.exit("gpu_torch_encode.py: PyTorch is not installed; pip install torch")

    device = torch.device(args.device)
    gpu = device.type == "cuda"
    generator = torch.Generator(device=device).manual_seed(1)
    # Raw bits; PyTorch compares and subtracts no unsigned type wider than u8.
    cases = (("bf16", torch.int16, 2, args.bytes), ("f8_e4m3", torch.uint8, 1, args.bytes // 2),
             ("f32", torch.int32, 4, args.bytes // 2))

    def run(pairs):
        nnz = 0
        for old, new in pairs:
            index = (old != new).flatten().nonzero().squeeze(1)
            difference = new.flatten()[index] - old.flatten()[index]
            nnz += difference.numel()
        return nnz

    def seconds_of(pairs):
        if gpu:
            start = torch.cuda.Event(enable_timing=True)
            stop = torch.cuda.Event(enable_timing=True)
            torch.cuda.synchronize(device)
            start.record()
            run(pairs)
            stop.record()
            torch.cuda.synchronize(device)
            return start.elapsed_time(stop) / 1000
        import time
        begin = time.perf_counter()
        run(pairs)
        return time.perf_counter() - begin

    report = {
        "device": torch.cuda.get_device_name(device) if gpu else "cpu",
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "command": " ".join(sys.argv),
        "rounds": args.rounds,
        "rows": [],
    }
    for dtype, raw, unit_bytes, total in cases:
        for density in (0.001, 0.01, 0.03):
            pairs = []
            changed = 0
            for shape in shapes(total, unit_bytes):
                info = torch.iinfo(raw)
                old = torch.randint(info.min, info.max, shape, dtype=raw, device=device, generator=generator)
                mask = torch.rand(shape, device=device, generator=generator) < density
                pairs.append((old, old + mask.to(raw)))
                changed += int(mask.sum())
                del mask
            if run(pairs) != changed:
                sys.exit(f"gpu_torch_encode.py: {dtype} at {density}: wrong number of changes")
            for _ in range(2):
                seconds_of(pairs)
            seconds = [seconds_of(pairs) for _ in range(args.rounds)]
            total_bytes = 2 * sum(old.numel() * unit_bytes for old, _ in pairs)
            median = statistics.median(seconds)
            report["rows"].append({
                "what": f"mask+nonzero+gather/{dtype}/percent:{100 * density:g}",
                "bytes": total_bytes,
                "nnz": changed,
                "seconds": {"median": median, "min": min(seconds), "max": max(seconds)},
                "tb_per_s": total_bytes / median / 1e12,
            })
            del pairs
            if gpu:
                torch.cuda.empty_cache()

    text = json.dumps(report, indent=1)
    print(text)
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            file.write(text + "\n")


if __name__ == "__main__":
    main()
