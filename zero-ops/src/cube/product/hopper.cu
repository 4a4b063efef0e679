// A product of 16-bit matrices on the matrix units of Hopper GPUs (`wgmma`), which CubeCL's language does not have: compiled by
// CubeCL's way to NVRTC, see `hopper.rs`, which sets above this text
//   NAME       hopper_product_... and what is said of this variant below
//   ELEMENT    __nv_bfloat16 or __half
//   COLUMNS    of a tile, a multiple of 64 of at most 256
//   STAGES     tiles of A and B for which there is memory
//   MULTIPLY, SUMS_IN_AND_OUT   the instruction, whose operands are so many, and the sums among them
//   A_DOWN     whether A lies with its columns one after another (it is the transpose of a matrix), in place of its rows
//   B_ACROSS   whether B lies with its rows one after another (as a weight does), in place of its columns
//   OUT_FP32   whether the product is stored in fp32, by the units themselves, in place of through the cube's memory
//   BIAS, RESIDUAL   whether a vector, to each row, and a matrix are added to the product
//
// A cube has a warpgroup that asks for tiles of A and B by the tensor memory accelerator, and two that multiply, each 64 rows by
// COLUMNS, with sums in registers. It takes tiles of the product in turn until there are none; memory of a tile is filled while the
// one before is multiplied, and a tile leaves the cube's memory while the next is multiplied. Every sum has one order, so two runs give the same bits.
// PTX ISA 8.0, "Asynchronous Warpgroup Level Matrix Instructions"; the layouts of matrices in shared memory are those of 128-byte swizzle.

constexpr int ROWS = 128, DEPTH = 64;
// Where a tile is stored from.
constexpr int OUT_BYTES = OUT_FP32 ? 0 : ROWS * COLUMNS * 2;
constexpr int A_BYTES = ROWS * DEPTH * 2, B_BYTES = COLUMNS * DEPTH * 2, STAGE_BYTES = A_BYTES + B_BYTES;
// A block of 64 by 64 elements, as the accelerator brings it where the longer side of a tile is contiguous.
constexpr int BLOCK_BYTES = 64 * 64 * 2;
// Tiles of A's rows that are taken together, so that what they read of B is still in the cache.
constexpr int GROUP = 16;
constexpr int SUMS = COLUMNS / 2;

struct alignas(64) Map { unsigned long long opaque[16]; };
// `each`: number of steps of a part. `out` has the products of the parts one after another.
struct Info { unsigned long long rows, columns, depth, out_stride, residual_stride, each; };

__device__ __forceinline__ unsigned address(const void* x) { return (unsigned)__cvta_generic_to_shared(x); }

__device__ __forceinline__ void wait(unsigned barrier, unsigned phase) {
    asm volatile("{\n.reg .pred done;\nAGAIN:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@done bra END;\nbra AGAIN;\nEND:\n}"
                 :: "r"(barrier), "r"(phase) : "memory");
}

__device__ __forceinline__ void arrive(unsigned barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(barrier) : "memory");
}

// Asks for a box of a matrix, from an element of its rows and a row on.
__device__ __forceinline__ void load(unsigned to, const Map& map, unsigned barrier, int element, int row) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];"
                 :: "r"(to), "l"(&map), "r"(barrier), "r"(element), "r"(row) : "memory");
}

// Until the units of this one's warpgroup have come here.
__device__ __forceinline__ void meet_within(int warpgroup) {
    asm volatile("bar.sync %0, 128;" :: "r"(warpgroup) : "memory");
}

// Of a matrix in shared memory with 128-byte swizzle. Rows of 128 bytes lie in groups of eight; `blocks`: bytes from 64 elements of
// the contiguous side to the next 64, where it has more.
__device__ __forceinline__ unsigned long long described(unsigned at, int blocks) {
    return (unsigned long long)((at & 0x3ffff) >> 4) | (unsigned long long)(blocks >> 4) << 16 | (1024ull >> 4) << 32 | 1ull << 62;
}

// `sums` of 64 rows by COLUMNS, plus (or in place of what they were, if not `more`) a product of 16 in depth.
__device__ __forceinline__ void multiply(float (&sums)[SUMS], unsigned long long a, unsigned long long b, int more) {
    asm volatile(MULTIPLY : SUMS_IN_AND_OUT : "l"(a), "l"(b), "r"(more));
}

// A tile: its first row and column, its part of the depth, and the first step and the end of that part.
struct Tile { int row, column, part, begin, end; };

__device__ __forceinline__ Tile tile(int at, int down, int across, int each, int steps) {
    int part = at / (down * across);
    at -= part * down * across;
    int group = at / (GROUP * across), rest = at % (GROUP * across), size = min(down - group * GROUP, GROUP);
    return { (group * GROUP + rest % size) * ROWS, rest / size * COLUMNS, part, part * each, min(part * each + each, steps) };
}

// Among each four neighbouring units: what unit p has at i goes to unit i, at p.
__device__ __forceinline__ void transpose(unsigned (&x)[4], int unit) {
    bool odd = unit & 1, high = unit & 2;
    unsigned first = __shfl_xor_sync(~0u, odd ? x[0] : x[1], 1), second = __shfl_xor_sync(~0u, odd ? x[2] : x[3], 1);
    if (odd) { x[0] = first; x[2] = second; } else { x[1] = first; x[3] = second; }
    first = __shfl_xor_sync(~0u, high ? x[0] : x[2], 2), second = __shfl_xor_sync(~0u, high ? x[1] : x[3], 2);
    if (high) { x[0] = first; x[1] = second; } else { x[2] = first; x[3] = second; }
}

__device__ __forceinline__ float2 widened(unsigned pair) {
    const ELEMENT* x = (const ELEMENT*)&pair;
    return { (float)x[0], (float)x[1] };
}

__device__ __forceinline__ unsigned narrowed(float2 x) {
    ELEMENT pair[2] = { (ELEMENT)x.x, (ELEMENT)x.y };
    return *(unsigned*)pair;
}

extern "C" __global__ void __launch_bounds__(384, 1) NAME(
    const __grid_constant__ Map a, const __grid_constant__ Map b, const __grid_constant__ Map c, const void*, const void*, const void*,
    const void*, const void*, void* out, const ELEMENT* bias, const ELEMENT* residual, const __grid_constant__ Info info
) {
    extern __shared__ unsigned char shared[];
    // Groups of eight rows begin at 1024 bytes.
    unsigned memory = (address(shared) + 1023) & ~1023u, stored = memory + STAGES * STAGE_BYTES;
    unsigned full = stored + OUT_BYTES, empty = full + 8 * STAGES;
    int rows = (int)info.rows, columns = (int)info.columns;
    int down = (rows + ROWS - 1) / ROWS, across = (columns + COLUMNS - 1) / COLUMNS, steps = ((int)info.depth + DEPTH - 1) / DEPTH;
    int each = (int)info.each, tiles = down * across * ((steps + each - 1) / each);
    int warpgroup = threadIdx.x / 128, warp = threadIdx.x / 32 % 4, unit = threadIdx.x % 32;

    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) {
            asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" :: "r"(full + 8 * i));
            // One of each warp that multiplies.
            asm volatile("mbarrier.init.shared::cta.b64 [%0], 8;" :: "r"(empty + 8 * i));
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    }
    __syncthreads();

    int stage = 0;
    unsigned phase = 0;
    if (warpgroup == 0) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        if (threadIdx.x == 0) {
            for (int at = blockIdx.x; at < tiles; at += gridDim.x) {
                Tile here = tile(at, down, across, each, steps);
                for (int step = here.begin; step < here.end; step++) {
                    unsigned is_full = full + 8 * stage, of_a = memory + stage * STAGE_BYTES, of_b = of_a + A_BYTES;
                    wait(empty + 8 * stage, phase ^ 1);
                    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(is_full), "r"(STAGE_BYTES) : "memory");
                    int deep = step * DEPTH;
#if A_DOWN
                    for (int i = 0; i < ROWS / 64; i++) load(of_a + i * BLOCK_BYTES, a, is_full, here.row + 64 * i, deep);
#else
                    load(of_a, a, is_full, deep, here.row);
#endif
#if B_ACROSS
                    for (int i = 0; i < COLUMNS / 64; i++) load(of_b + i * BLOCK_BYTES, b, is_full, here.column + 64 * i, deep);
#else
                    load(of_b, b, is_full, deep, here.column);
#endif
                    if (++stage == STAGES) { stage = 0; phase ^= 1; }
                }
            }
        }
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
        // Bytes to the next 16 in depth: along a row, or down 16 rows of 128 bytes.
        constexpr int A_NEXT = A_DOWN ? 2048 : 32, B_NEXT = B_ACROSS ? 2048 : 32;
        float sums[SUMS];
        for (int at = blockIdx.x; at < tiles; at += gridDim.x) {
            Tile here = tile(at, down, across, each, steps);
            for (int step = here.begin; step < here.end; step++) {
                wait(full + 8 * stage, phase);
                unsigned of_a = memory + stage * STAGE_BYTES, of_b = of_a + A_BYTES;
                // The second half of the rows begins 8192 bytes on, which is 64 rows or a block.
                unsigned long long a_at = described(of_a + (warpgroup - 1) * BLOCK_BYTES, BLOCK_BYTES), b_at = described(of_b, BLOCK_BYTES);
                asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
                for (int i = 0; i < DEPTH / 16; i++)
                    multiply(sums, a_at + (i * A_NEXT >> 4), b_at + (i * B_NEXT >> 4), step + i > here.begin);
                asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
                // What the step before has read may be filled again.
                asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
                if (step > here.begin && unit == 0) arrive(empty + 8 * (stage > 0 ? stage - 1 : STAGES - 1));
                if (++stage == STAGES) { stage = 0; phase ^= 1; }
            }
            asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
            if (unit == 0) arrive(empty + 8 * (stage > 0 ? stage - 1 : STAGES - 1));
#pragma unroll
            for (int i = 0; i < SUMS; i++) asm volatile("" : "+f"(sums[i]) :: "memory");

            int quarter = unit % 4, first = here.row + (warpgroup - 1) * 64;
#if !OUT_FP32
            // The tile before has left this warpgroup's part of the memory.
            if (threadIdx.x % 128 == 0) asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
            meet_within(warpgroup);
            unsigned part = stored + (warpgroup - 1) * (OUT_BYTES / 2);
#endif
#pragma unroll
            for (int four = 0; four < COLUMNS / 32; four++) {
                // Of each eight columns a unit has two.
                int column = here.column + four * 32;
                float2 x[2][4];
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    float2 more = {};
#if BIAS
                    int at = column + 8 * i + 2 * quarter;
                    if (at < columns) more = widened(*(const unsigned*)(bias + at));
#endif
#pragma unroll
                    for (int half = 0; half < 2; half++) {
                        int k = (four * 4 + i) * 4 + 2 * half;
                        x[half][i] = { sums[k] + more.x, sums[k + 1] + more.y };
                    }
                }
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    int row = first + warp * 16 + 8 * half + unit / 4;
#if RESIDUAL
                    // All eight columns of one of the four, which are exchanged with the neighbours.
                    int own = column + 8 * quarter;
                    uint4 given = row < rows && own < columns ? *(const uint4*)(residual + row * info.residual_stride + own) : uint4{};
                    unsigned mine[4] = { given.x, given.y, given.z, given.w };
                    transpose(mine, quarter);
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        float2 more = widened(mine[i]);
                        x[half][i].x += more.x; x[half][i].y += more.y;
                    }
#endif
#if OUT_FP32
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        int at = column + 8 * i + 2 * quarter;
                        if (row < rows && at < columns) *(float2*)((float*)out + (here.part * info.rows + row) * info.out_stride + at) = x[half][i];
                    }
#endif
                }
#if !OUT_FP32
                // Two blocks of 16 by 16; a unit names the memory of a row of eight: rows of 128 bytes, whose chunks of 16 are permuted.
#pragma unroll
                for (int i = 0; i < 4; i += 2) {
                    int row = warp * 16 + unit % 16, chunk = four % 2 * 4 + i + unit / 16;
                    unsigned to = part + four / 2 * BLOCK_BYTES + row * 128 + ((chunk ^ (row & 7)) << 4);
                    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
                                 :: "r"(to), "r"(narrowed(x[0][i])), "r"(narrowed(x[1][i])), "r"(narrowed(x[0][i + 1])), "r"(narrowed(x[1][i + 1]))
                                 : "memory");
                }
#endif
            }
#if !OUT_FP32
            asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
            meet_within(warpgroup);
            // Beyond the matrix nothing is stored.
            if (threadIdx.x % 128 == 0) {
                for (int i = 0; i < COLUMNS / 64; i++)
                    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];"
                                 :: "l"(&c), "r"(part + i * BLOCK_BYTES), "r"(here.column + 64 * i), "r"(first) : "memory");
                asm volatile("cp.async.bulk.commit_group;" ::: "memory");
            }
#endif
        }
#if !OUT_FP32
        if (threadIdx.x % 128 == 0) asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
#endif
    }
}
