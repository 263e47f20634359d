#!/usr/bin/env python3
"""The fp8 rule of spec/fp8.md in PyTorch, numpy and plain Python, and a
comparison of files that kedge's own forms wrote.

    KEDGE_FP8_DUMP=/tmp/fp8 build/tests/engine/cuda/engine_cuda_gpu_test \
        --gtest_filter='QuantiseGpuTest.*'
    scripts/quantise_reference.py /tmp/fp8 --backend torch --device cuda

A file is: kind (0 exact, 1 power of two), rows, cols as u64; the bf16 units;
the e4m3fn values; the f32 scales. Blocks that hold a NaN or an infinity have no
quantised form and are not compared. Exit status 1 if anything differs.
"""

import argparse
import bisect
import pathlib
import struct
import sys

BLOCK = 128
FLOOR = struct.unpack("<f", struct.pack("<f", 1e-12))[0]


def quantise_torch(torch, x, power_of_two, device):
    """[rows, cols] bf16 -> uint8 values, f32 scales; NaN scales where a block
    is not finite."""
    x = x.to(device).float()
    rows, cols = x.shape
    grid = -(-rows // BLOCK), -(-cols // BLOCK)
    padded = torch.zeros(grid[0] * BLOCK, grid[1] * BLOCK, device=device)
    padded[:rows, :cols] = x
    blocks = padded.view(grid[0], BLOCK, grid[1], BLOCK)
    amax = blocks.abs().amax(dim=(1, 3))
    # Divisors are tensors: by a Python number PyTorch multiplies with the
    # reciprocal on a GPU.
    scales = torch.clamp(amax, min=FLOOR) / torch.full_like(amax, 448.0)
    if power_of_two:
        bits = scales.view(torch.int32)
        scales = ((bits + 0x007FFFFF) & 0x7F800000).view(torch.float32)
    scales = torch.where(torch.isfinite(amax), scales, torch.nan)
    y = (blocks / scales[:, None, :, None].expand_as(blocks)).reshape(padded.shape)
    q = y[:rows, :cols].clamp(-448.0, 448.0).to(torch.float8_e4m3fn)
    return q.contiguous().view(torch.uint8).cpu(), scales.cpu()


def value_of(code):
    exponent, fraction = code >> 3, code & 7
    if exponent == 0:
        return fraction * 2.0**-9
    return (8 + fraction) * 2.0 ** (exponent - 10)


VALUES = [value_of(code) for code in range(0x7F)]
MIDDLES = [(low + high) / 2 for low, high in zip(VALUES, VALUES[1:])]


def quantise_numpy(np, x, power_of_two):
    """[rows, cols] f32 (from bf16) -> uint8 values, f32 scales."""
    rows, cols = x.shape
    grid = -(-rows // BLOCK), -(-cols // BLOCK)
    padded = np.zeros((grid[0] * BLOCK, grid[1] * BLOCK), np.float32)
    padded[:rows, :cols] = x
    blocks = padded.reshape(grid[0], BLOCK, grid[1], BLOCK)
    amax = np.abs(blocks).max(axis=(1, 3))
    scales = np.maximum(amax, np.float32(FLOOR)) / np.float32(448)
    if power_of_two:
        bits = (scales.view(np.uint32) + 0x007FFFFF) & 0x7F800000
        scales = bits.astype(np.uint32).view(np.float32)
    scales = np.where(np.isfinite(amax), scales, np.float32("nan"))
    y = (blocks / scales[:, None, :, None]).reshape(padded.shape)[:rows, :cols]
    magnitude = np.abs(y).astype(np.float64)
    middles = np.array(MIDDLES)
    code = np.searchsorted(middles, magnitude, side="left")
    tie = (code < len(MIDDLES)) & (middles[np.minimum(code, len(MIDDLES) - 1)] == magnitude)
    code = np.where(tie & (code % 2 == 1), code + 1, code)
    return (code | np.where(np.signbit(y), 0x80, 0)).astype(np.uint8), scales


def f32(x):
    return struct.unpack("<f", struct.pack("<f", x))[0]


def code_of(y):
    magnitude = abs(y)
    code = bisect.bisect_left(MIDDLES, magnitude)
    if code < len(MIDDLES) and MIDDLES[code] == magnitude and code % 2 == 1:
        code += 1
    return code


def scale_of(amax, power_of_two):
    # A quotient in double, rounded to f32, is the f32 quotient.
    scale = f32(max(amax, FLOOR) / 448.0)
    if power_of_two:
        (bits,) = struct.unpack("<I", struct.pack("<f", scale))
        scale = struct.unpack("<f", struct.pack("<I", (bits + 0x007FFFFF) & 0x7F800000))[0]
    return scale


def quantise_plain(units, rows, cols, power_of_two):
    """Row-major u16 bf16 -> bytearray of values, list of scales."""
    values = bytearray(rows * cols)
    scales = []
    for top in range(0, rows, BLOCK):
        for left in range(0, cols, BLOCK):
            right = min(cols, left + BLOCK)
            bottom = min(rows, top + BLOCK)
            largest = max(max(u & 0x7FFF for u in units[r * cols + left : r * cols + right]) for r in range(top, bottom))
            if largest >= 0x7F80:
                scales.append(float("nan"))
                continue
            scale = scale_of(struct.unpack("<f", struct.pack("<I", largest << 16))[0], power_of_two)
            scales.append(scale)
            known = {}
            for r in range(top, bottom):
                for i in range(r * cols + left, r * cols + right):
                    unit = units[i]
                    if unit not in known:
                        x = struct.unpack("<f", struct.pack("<I", (unit & 0x7FFF) << 16))[0]
                        known[unit] = code_of(f32(x / scale)) | (unit >> 8 & 0x80)
                    values[i] = known[unit]
    return values, scales


def reference(args, units, rows, cols, power_of_two):
    """bytes of values, list of scales."""
    if args.backend == "torch":
        import torch

        x = torch.frombuffer(bytearray(units), dtype=torch.int16).view(torch.bfloat16)
        values, scales = quantise_torch(torch, x.view(rows, cols), power_of_two, args.device)
        return bytes(values.flatten().tolist()), scales.flatten().tolist()
    if args.backend == "numpy":
        import numpy as np

        x = np.frombuffer(units, np.uint16).astype(np.uint32) << 16
        with np.errstate(all="ignore"):
            values, scales = quantise_numpy(np, x.view(np.float32).reshape(rows, cols), power_of_two)
        return values.tobytes(), scales.flatten().tolist()
    return quantise_plain(struct.unpack(f"<{rows * cols}H", units), rows, cols, power_of_two)


def compare(args, path):
    data = path.read_bytes()
    kind, rows, cols = struct.unpack_from("<3Q", data)
    at = 24
    units = data[at : at + 2 * rows * cols]
    at += 2 * rows * cols
    values = data[at : at + rows * cols]
    at += rows * cols
    across = -(-cols // BLOCK)
    blocks = -(-rows // BLOCK) * across
    scales = struct.unpack_from(f"<{blocks}f", data, at)
    expected_values, expected_scales = reference(args, units, rows, cols, kind == 1)
    wrong = 0
    for block, (found, expected) in enumerate(zip(scales, expected_scales)):
        if expected != expected:
            continue
        left = block % across * BLOCK
        right = min(cols, left + BLOCK)
        top = block // across * BLOCK
        if found != expected:
            print(f"{path.name}: block {block}: scale: expected {expected!r}, found {found!r}")
            wrong += 1
        for r in range(top, min(rows, top + BLOCK)):
            begin, end = r * cols + left, r * cols + right
            if values[begin:end] != bytes(expected_values[begin:end]):
                print(f"{path.name}: row {r}, columns {left} to {right - 1}: values differ")
                wrong += 1
    return rows * cols, wrong


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--backend", choices=["torch", "numpy", "plain"], default="plain")
    parser.add_argument("--device", default="cpu", help="for torch")
    args = parser.parse_args()
    files = sorted(args.folder.glob("*.fp8"))
    if not files:
        print(f"{args.folder}: no .fp8 files", file=sys.stderr)
        return 2
    elements = wrong = 0
    for path in files:
        count, bad = compare(args, path)
        elements += count
        wrong += bad
    print(f"{len(files)} matrices, {elements} values by {args.backend}: {wrong} differences")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
