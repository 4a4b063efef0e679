#!/usr/bin/env python3
"""Compares the matrix product of zero-ops/src/cube/product/hopper.cu with PyTorch's cuBLAS on a Hopper GPU: results, then TFLOP/s.

    bench/gpu/products.py                      compiles the kernel with NVRTC, as CubeCL does, without the program
    bench/gpu/products.py --compile-only DIR   on a machine without a GPU: writes the PTX of every variant to DIR

Results are compared with products in fp64, for all layouts and additions of a model's passes and for every tile width, at sizes that
tiles do not divide. Rates are for the width and the parts of the depth that `division` in hopper.rs chooses (with PyTorch's sum of the
parts), followed by those of all widths without parts.
Exit codes: 0; 1 when a result is wrong; 2 for bad arguments, or without PyTorch, CUDA or a Hopper GPU.
"""

import argparse
import ctypes as C
import glob
import sys
from pathlib import Path

from common import BadInput, run

SOURCE = Path(__file__).resolve().parents[2] / "zero-ops/src/cube/product/hopper.cu"
ROWS, DEPTH, SHARED, ALIGNMENT, UNITS = 128, 64, 227 << 10, 1024, 384
WIDTHS = {256: 20, 192: 21, 128: 23}
# Whether the left side is a transpose, the right one is none; stored in fp32; bias; residual.
FORWARD, RESIDUAL, OF_ROWS, OF_WEIGHT = (0, 1, 0, 1, 0), (0, 1, 0, 1, 1), (0, 0, 0, 0, 0), (1, 1, 0, 0, 0)
HEAD_ROWS, HEAD_WEIGHT = (0, 1, 1, 0, 0), (1, 1, 1, 0, 0)
SHAPES = [
    ("124M c_attn", FORWARD, 8192, 2304, 768), ("124M c_proj", RESIDUAL, 8192, 768, 768), ("124M c_fc", FORWARD, 8192, 3072, 768),
    ("124M mlp.c_proj", RESIDUAL, 8192, 768, 3072), ("124M c_fc, dx", OF_ROWS, 8192, 768, 3072),
    ("124M c_fc, dw", OF_WEIGHT, 768, 3072, 8192), ("124M c_proj, dw", OF_WEIGHT, 768, 768, 8192),
    ("124M head", OF_ROWS, 2048, 50304, 768), ("124M head, dx", HEAD_ROWS, 2048, 768, 50304),
    ("124M head, dw", HEAD_WEIGHT, 50304, 768, 2048), ("1.5B c_attn", FORWARD, 8192, 4800, 1600),
    ("1.5B c_fc", FORWARD, 8192, 6400, 1600), ("1.5B mlp.c_proj", RESIDUAL, 8192, 1600, 6400),
    ("1.5B c_fc, dx", OF_ROWS, 8192, 1600, 6400), ("1.5B c_fc, dw", OF_WEIGHT, 1600, 6400, 8192), ("8192", OF_ROWS, 8192, 8192, 8192),
]
# The last has more tiles than the GPU has processors, which then take several.
SMALL = [(128, 256, 64), (64, 128, 16), (256, 512, 512), (1000, 776, 200), (136, 1600, 1600), (304, 264, 72), (4232, 3080, 328)]


def checked(code, call):
    if code:
        raise BadInput(f"{call} returned {code}: this needs a Hopper GPU, its driver and CUDA's libraries")


def library(*patterns):
    for pattern in patterns:
        for path in sorted(glob.glob(pattern)) or [pattern]:
            try:
                return C.CDLL(path)
            except OSError:
                pass
    raise BadInput(f"none of {', '.join(patterns)} can be loaded: set LD_LIBRARY_PATH (bench/gpu/env.sh does)")


def shared_bytes(columns, fp32):
    """(stages, bytes), as in hopper.rs."""
    stored, stage = 0 if fp32 else ROWS * columns * 2, (ROWS + columns) * DEPTH * 2 + 16
    stages = (SHARED - ALIGNMENT - stored) // stage
    return stages, ALIGNMENT + stages * stage + stored


def ptx(columns, variant, include):
    """What NVRTC makes of the kernel, with the definitions that hopper.rs sets above it."""
    a_down, b_across, fp32, bias, residual = variant
    sums = columns // 2
    operands = ", ".join(f"%{i}" for i in range(sums))
    definitions = {
        "NAME": "hopper_product", "ELEMENT": "__nv_bfloat16", "COLUMNS": columns, "STAGES": shared_bytes(columns, fp32)[0], "A_DOWN": a_down, "B_ACROSS": b_across,
        "OUT_FP32": fp32, "BIAS": bias, "RESIDUAL": residual,
        "MULTIPLY": rf'"{{\n.reg .pred more;\nsetp.ne.b32 more, %{sums + 2}, 0;\n" '
                    f'"wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.bf16.bf16 {{{operands}}}, %{sums}, %{sums + 1}, more, 1, 1, '
                    rf'{a_down}, {b_across};\n}}"',
        "SUMS_IN_AND_OUT": ", ".join(f'"+f"(sums[{i}])' for i in range(sums)),
    }
    text = "#include <cuda_bf16.h>\n" + "".join(f"#define {name} {value}\n" for name, value in definitions.items()) + SOURCE.read_text()
    nvrtc, program, size = library("libnvrtc.so", "libnvrtc.so.13", "libnvrtc.so.12"), C.c_void_p(), C.c_size_t()
    checked(nvrtc.nvrtcCreateProgram(C.byref(program), text.encode(), None, 0, None, None), "nvrtcCreateProgram")
    # With sm_90a, NVRTC would also assemble the PTX and discard the result.
    options = [b"--gpu-architecture=compute_90a", *(f"--include-path={path}".encode() for path in (include, f"{include}/cccl"))]
    if nvrtc.nvrtcCompileProgram(program, len(options), (C.c_char_p * len(options))(*options)):
        nvrtc.nvrtcGetProgramLogSize(program, C.byref(size))
        log = C.create_string_buffer(size.value)
        nvrtc.nvrtcGetProgramLog(program, log)
        raise BadInput(f"{SOURCE.name} does not compile: {log.value.decode()[:2000]}")
    checked(nvrtc.nvrtcGetPTXSize(program, C.byref(size)), "nvrtcGetPTXSize")
    made = C.create_string_buffer(size.value)
    checked(nvrtc.nvrtcGetPTX(program, made), "nvrtcGetPTX")
    return made.value


class Kernels:
    def __init__(self, torch, include):
        self.torch, self.include, self.cuda, self.known = torch, include, library("libcuda.so.1"), {}

    def kernel(self, columns, variant):
        if (columns, variant) not in self.known:
            module, function = C.c_void_p(), C.c_void_p()
            checked(self.cuda.cuModuleLoadData(C.byref(module), ptx(columns, variant, self.include)), "cuModuleLoadData")
            checked(self.cuda.cuModuleGetFunction(C.byref(function), module, b"hopper_product"), "cuModuleGetFunction")
            checked(self.cuda.cuFuncSetAttribute(function, 8, shared_bytes(columns, variant[2])[1]), "cuFuncSetAttribute")
            self.known[columns, variant] = function
        return self.known[columns, variant]

    def map(self, x, rows_of_box):
        memory = (C.c_ubyte * 192)()
        at = (C.addressof(memory) + 63) // 64 * 64
        size, stride = (C.c_uint64 * 2)(x.shape[1], x.shape[0]), (C.c_uint64 * 1)(x.stride(0) * 2)
        box, step = (C.c_uint32 * 2)(64, rows_of_box), (C.c_uint32 * 2)(1, 1)
        code = self.cuda.cuTensorMapEncodeTiled(C.c_void_p(at), 9, 2, C.c_void_p(x.data_ptr()), size, stride, box, step, 0, 3, 3, 0)
        checked(code, "cuTensorMapEncodeTiled")
        return memory, at

    def product(self, columns, variant, a, b, out, bias, residual, parts=1):
        """Returns a function that launches the kernel and, if there are several parts, their sum."""
        whole, (rows, width) = out, out.shape
        steps = -(-a.shape[0 if variant[0] else 1] // DEPTH)
        if parts > 1:
            variant, out = (*variant[:2], 1, 0, 0), self.torch.full((parts, rows, width), float("nan"), device="cuda")
        a_down, b_across, fp32, *_ = variant
        kernel, shared = self.kernel(columns, variant), shared_bytes(columns, fp32)[1]
        maps = [self.map(a, 64 if a_down else ROWS), self.map(b, 64 if b_across else columns)]
        maps.append(maps[0] if fp32 else self.map(out, 64))
        pointers = [C.c_void_p(x.data_ptr() if x is not None else 0) for x in (a, b, out, a, b, out, bias, residual)]
        strides = whole.stride(0), residual.stride(0) if residual is not None else 0
        info = (C.c_uint64 * 6)(rows, width, a.shape[0 if a_down else 1], *strides, -(-steps // parts))
        arguments = (C.c_void_p * 12)(*(at for _, at in maps), *map(C.addressof, pointers), C.addressof(info))
        processors = self.torch.cuda.get_device_properties(0).multi_processor_count
        cubes = min(-(-rows // ROWS) * -(-width // columns) * parts, processors)
        stream, kept = C.c_void_p(self.torch.cuda.current_stream().cuda_stream), (maps, pointers, info)

        def launch():
            checked(self.cuda.cuLaunchKernel(kernel, cubes, 1, 1, UNITS, 1, 1, shared, stream, arguments, None) if kept else 0, "cuLaunchKernel")
            if parts > 1:
                whole.copy_(out.sum(0))

        return launch

    def operands(self, variant, m, n, k):
        a_down, b_across, fp32, bias, residual = variant
        make = lambda *shape: self.torch.randn(*shape, device="cuda").to(self.torch.bfloat16)
        out = self.torch.full((m, n), float("nan"), device="cuda", dtype=self.torch.float32 if fp32 else self.torch.bfloat16)
        return (make(k, m) if a_down else make(m, k), make(k, n) if b_across else make(n, k), out, make(n) if bias else None,
                make(m, n) if residual else None)


def matrices(variant, a, b):
    return a.t() if variant[0] else a, b if variant[1] else b.t()


def milliseconds(torch, launch, rounds=20):
    for _ in range(3):
        launch()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(rounds):
        launch()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / rounds


def division(m, n, k, processors, may_part):
    """Columns of a tile, and parts: as in hopper.rs."""
    steps, choices = -(-k // DEPTH), []
    for width, cost in WIDTHS.items():
        tiles = -(-m // ROWS) * -(-n // width)
        for parts in range(1, (max(1, min(processors // tiles, 16)) if may_part else 1) + 1):
            each = -(-steps // parts)
            parts = -(-steps // each)
            second = 20_000 + m * n * parts // 50 if parts > 1 else 0
            choices.append((-(-tiles * parts // processors) * width * cost * (each + 2) + second, width, parts))
    return min(choices, key=lambda choice: choice[0])[1:]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--include", default="/usr/local/cuda/include", metavar="DIR", help="CUDA's headers (default: %(default)s)")
    parser.add_argument("--compile-only", type=Path, metavar="DIR")
    args = parser.parse_args()
    variants = [FORWARD, RESIDUAL, OF_ROWS, OF_WEIGHT, HEAD_ROWS, HEAD_WEIGHT]
    if args.compile_only:
        args.compile_only.mkdir(parents=True, exist_ok=True)
        for columns in WIDTHS:
            for variant in variants:
                (args.compile_only / f"{columns}-{''.join(map(str, variant))}.ptx").write_bytes(ptx(columns, variant, args.include))
        return 0
    try:
        import torch
    except ImportError as error:
        raise BadInput(f"PyTorch is missing ({error}): run this with a Python that has it") from None
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        raise BadInput("this kernel is for GPUs of compute capability 9 (H100, H200), and PyTorch sees none")
    kernels, wrong, worst = Kernels(torch, args.include), 0, {}
    for columns in WIDTHS:
        for variant in variants:
            for m, n, k, parts in [(*shape, 1) for shape in SMALL] + [(1000, 776, 1000, parts) for parts in (2, 3, 16) if variant == OF_WEIGHT]:
                a, b, out, bias, residual = kernels.operands(variant, m, n, k)
                kernels.product(columns, variant, a, b, out, bias, residual, parts)()
                x, y = matrices(variant, a, b)
                expected = x.double() @ y.double() + sum(more.double() for more in (bias, residual) if more is not None)
                # The largest of all elements, beside the size of a typical sum.
                apart = ((out.double() - expected).abs() / expected.abs().clamp_min(k**0.5)).max().item()
                bound = 1e-4 if variant[2] else 2**-8
                worst[variant[2]] = max(worst.get(variant[2], 0.0), apart)
                if not apart < bound:
                    wrong += 1
                    print(f"WRONG: tiles of {columns}, {variant}, [{m}, {k}] by [{k}, {n}] in {parts} part(s): {apart:.1e} from fp64, at most {bound:g} expected")
    print(f"{torch.cuda.get_device_name()}; from products in fp64: {worst[0]:.1e} stored in bf16, {worst[1]:.1e} in fp32\n")
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    # Rows are printed one at a time, so that a run that is stopped early shows those it has measured.
    print("| product | rows x columns x depth | ours, TFLOP/s | cuBLAS | ratio | tiles of " + " / ".join(map(str, WIDTHS)) + " |\n|---|---|---|---|---|---|")
    for name, variant, m, n, k in SHAPES:
        a, b, out, bias, residual = kernels.operands(variant, m, n, k)
        times = {columns: milliseconds(torch, kernels.product(columns, variant, a, b, out, bias, residual)) for columns in WIDTHS}
        (x, y), into = matrices(variant, a, b), torch.empty(m, n, device="cuda", dtype=torch.bfloat16)
        call = (lambda: torch.addmm(bias, x, y, out=into)) if bias is not None else (lambda: torch.mm(x, y, out=into))
        peer, rate = milliseconds(torch, call), lambda time: 2 * m * n * k / time / 1e9
        columns, parts = division(m, n, k, processors, bool(variant[0]))
        ours = times[columns] if parts == 1 else milliseconds(torch, kernels.product(columns, variant, a, b, out, bias, residual, parts))
        rates = " / ".join(f"{rate(times[columns]):.0f}" for columns in WIDTHS)
        print(f"| {name}{f', {parts} parts' if parts > 1 else ''} | {m} x {n} x {k} | {rate(ours):.0f} | {rate(peer):.0f} | {peer / ours:.2f} | {rates} |", flush=True)
    print("Ours adds the residual too where there is one, and stores the head's gradients in fp32; cuBLAS adds the bias and stores bf16.")
    return int(wrong > 0)


if __name__ == "__main__":
    run(main)
