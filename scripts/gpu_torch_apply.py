#!/usr/bin/env python3
"""What PyTorch takes for the work of kedge_apply_verify.

The same tensors (one rank of two of a model like Qwen3-30B-A3B, in the same
packed buffers) and the same density, on one GPU, timed by CUDA events:

  apply   index_copy_ from indices and values that are decoded already: int64
          indices into the flat tensor, new bf16 values; tensor by tensor, and
          also with one call for each packed buffer
  verify  (w.view(int32).to(int64) * weights).sum(), tensor by tensor in blocks
          that fit memory; weights are random int64

    scripts/gpu_torch_apply.py [--scale 1.0] [--density 0.008]
        [--repetitions 9] [--bench apply_verify.json] [--json FILE]

--bench: what kedge_apply_verify wrote on the same machine; ratios are printed.
"""

import argparse
import json
import math
import statistics
import sys

import torch

BLOCK = 1 << 25  # int32 words of one block of a weighted sum


def scaled(value, factor, step):
    """As ScaledQwen3 in bench/qwen3_shapes.cc rounds."""
    return max(1, math.floor(value * factor / step + 0.5)) * step


def half_of(scale):
    """(buffer, elements) of every tensor that rank 0 of 2 holds, in order."""
    layers, hidden, heads, kv, head = 48, 2048, 32, 4, 128
    experts, expert_hidden, vocab = 128, 768, 151936
    of_layers = layers * scale
    if scale != 1:
        layers = scaled(layers, scale, 1)
        vocab = scaled(vocab, scale, 256)
    if of_layers < 1:
        experts = scaled(experts, of_layers, 2)
        hidden = scaled(hidden, math.sqrt(of_layers), 256)
        heads = scaled(heads, math.sqrt(of_layers), 4)
        kv, expert_hidden = 2, 256
    tensors = [("embed", vocab // 2 * hidden)]
    for layer in range(layers):
        tensors += [(f"{layer}.qkv", heads * head // 2 * hidden)]
        tensors += [(f"{layer}.qkv", kv * head // 2 * hidden)] * 2
        tensors += [(f"{layer}.o", hidden * heads * head // 2)]
        tensors += [(f"{layer}.q_norm", head), (f"{layer}.k_norm", head)]
        tensors += [(f"{layer}.norm{i}", hidden) for i in range(2)]
        tensors += [(f"{layer}.gate", experts * hidden)]
        for _ in range(experts):
            tensors += [(f"{layer}.gate_up", expert_hidden // 2 * hidden)] * 2
            tensors += [(f"{layer}.down", expert_hidden // 2 * hidden)]
    tensors += [("norm", hidden), ("lm_head", vocab // 2 * hidden)]
    return tensors


class Clock:
    def __init__(self, cuda):
        self.cuda = cuda

    def time(self, work):
        """Milliseconds of `work()` on the device."""
        if not self.cuda:
            import time

            start = time.perf_counter()
            work()
            return (time.perf_counter() - start) * 1e3
        torch.cuda.synchronize()
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        stop.record()
        torch.cuda.synchronize()
        return start.elapsed_time(stop)


def stats(samples):
    seconds = [s / 1e3 for s in samples]
    return {
        "median": statistics.median(seconds),
        "min": min(seconds),
        "max": max(seconds),
        "all": seconds,
    }


def positions(count, density, device):
    """Ascending positions, each chosen with probability `density`."""
    chosen = []
    for begin in range(0, count, 1 << 26):
        n = min(1 << 26, count - begin)
        chosen.append(
            torch.nonzero(torch.rand(n, device=device) < density).flatten() + begin
        )
    return torch.cat(chosen)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--density", type=float, default=0.008)
    parser.add_argument("--repetitions", type=int, default=9)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--bench")
    parser.add_argument("--json")
    options = parser.parse_args()
    device = torch.device(options.device)
    cuda = device.type == "cuda"
    torch.manual_seed(1)

    shapes = half_of(options.scale)
    sizes = {}
    for name, elements in shapes:
        sizes[name] = sizes.get(name, 0) + elements
    buffers = {
        name: torch.empty(elements, dtype=torch.bfloat16, device=device).normal_(0, 0.02)
        for name, elements in sizes.items()
    }
    tensors, at = [], {name: 0 for name in sizes}
    for name, elements in shapes:
        tensors.append(buffers[name][at[name] : at[name] + elements])
        at[name] += elements
    indices = [positions(t.numel(), options.density, device) for t in tensors]
    # One bit of each changed weight flips, so that values are other values.
    values = [
        (t[i].view(torch.int16) ^ 1).view(torch.bfloat16) for t, i in zip(tensors, indices)
    ]
    packed = {}
    begin = {name: 0 for name in sizes}
    for (name, elements), index, value in zip(shapes, indices, values):
        packed.setdefault(name, ([], []))
        packed[name][0].append(index + begin[name])
        packed[name][1].append(value)
        begin[name] += elements
    packed = {n: (torch.cat(i), torch.cat(v)) for n, (i, v) in packed.items()}
    words = min(BLOCK, max(t.numel() // 2 for t in tensors))
    weights = torch.randint(1, 1 << 61, (words,), dtype=torch.int64, device=device)

    def apply_tensors():
        for tensor, index, value in zip(tensors, indices, values):
            tensor.index_copy_(0, index, value)

    def apply_buffers():
        for name, (index, value) in packed.items():
            buffers[name].index_copy_(0, index, value)

    def verify():
        sums = []
        for tensor in tensors:
            flat = tensor.view(torch.int32)
            for begin in range(0, flat.numel(), words):
                block = flat[begin : begin + words]
                sums.append((block.to(torch.int64) * weights[: block.numel()]).sum())
        return torch.stack(sums)

    clock = Clock(cuda)
    rows = {"apply": apply_tensors, "apply_packed": apply_buffers, "verify": verify}
    samples = {name: [] for name in rows}
    for repetition in range(options.repetitions + 1):  # the first one warms up
        for name, work in rows.items():
            taken = clock.time(work)
            if repetition > 0:
                samples[name].append(taken)

    weight_bytes = 2 * sum(sizes.values())
    report = {
        "benchmark": "gpu_torch_apply",
        "device": torch.cuda.get_device_name() if cuda else "cpu",
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "command": " ".join(sys.argv),
        "tensors": len(tensors),
        "buffers": len(buffers),
        "weight_bytes": weight_bytes,
        "changed": sum(i.numel() for i in indices),
        "apply_seconds": stats(samples["apply"]),
        "apply_packed_seconds": stats(samples["apply_packed"]),
        "verify_seconds": stats(samples["verify"]),
    }
    if options.bench:
        with open(options.bench, encoding="utf-8") as file:
            kedge = json.load(file)["bf16"]["rank_0_of_2"]
        if abs(kedge["weight_bytes"] / weight_bytes - 1) > 0.001:
            sys.exit(
                f"{options.bench}: {kedge['weight_bytes']} bytes of weights,"
                f" here are {weight_bytes}: give both the same --scale"
            )
        report["ratios"] = {
            name: report[f"{name}_seconds"]["median"]
            / kedge[f"{name.split('_')[0]}_seconds"]["median"]
            for name in rows
        }

    print(
        f"{report['device']}, PyTorch {report['torch']}: {weight_bytes / 1e9:.3f} GB,"
        f" {report['tensors']} tensors in {report['buffers']} buffers,"
        f" {report['changed']} changes"
    )
    for name, what in (
        ("apply", "index_copy_, tensor by tensor"),
        ("apply_packed", "index_copy_, buffer by buffer"),
        ("verify", "weighted int64 sum"),
    ):
        s = report[f"{name}_seconds"]
        line = (
            f"  {what:30} {s['median'] * 1e3:.3f} ({s['min'] * 1e3:.3f} to"
            f" {s['max'] * 1e3:.3f}) ms"
        )
        if "ratios" in report:
            line += f" = {report['ratios'][name]:.1f}x kedge's"
        print(line)
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(report, file, indent=1)
            file.write("\n")


if __name__ == "__main__":
    main()
