//! Products on the matrix units of NVIDIA's Hopper GPUs (`wgmma`), with a vector and a matrix added before the sums are rounded.
//!
//! CubeCL 0.10 and the kernels that Burn selects from use the instructions of the previous generation, which reach a fifth of these units'
//! rate (ADR 26). The kernel is CUDA C++ in `hopper.cu`, passed to CubeCL as source: CubeCL compiles, caches, orders and launches it like
//! its own.

use std::any::Any;

use burn_cubecl::CubeRuntime;
use burn_cubecl::tensor::CubeTensor;
use burn_std::{DType, Metadata, Shape, Strides};
use cubecl::cuda::{CudaCompiler, CudaRuntime};
use cubecl::prelude::*;
use cubecl::server::{KernelArguments, MetadataBindingInfo, TensorMapBinding, TensorMapMeta};
use cubecl::{CompilationError, Compiler, CubeTask};
use cubecl_cpp::shared::SharedMemory;
use cudarc::driver::sys::CUdevice_attribute;

use super::Added;
use crate::cube::column_sums::total_into;
use crate::cube::many::shaped;
use crate::cube::rows::dims;
use crate::cube::tensor::empty;
use crate::devices::attribute;

type Tensor = CubeTensor<CudaRuntime>;

const SOURCE: &str = include_str!("hopper.cu");
const TEXT: u64 = hash(SOURCE) ^ hash(include_str!("hopper.rs"));

/// Number of rows of a tile, and depth of one step.
const ROWS: usize = 128;
const DEPTH: usize = 64;
/// Maximum shared memory of a cube on a Hopper GPU, and alignment of groups of rows in it.
const SHARED_BYTES: usize = 227 << 10;
const ALIGNMENT: usize = 1024;
/// Number of units: one warpgroup that copies and two that multiply.
const UNITS: u32 = 384;
/// Number of elements in 16 bytes, which the kernel and the tensor memory accelerator access at once.
const WIDE: usize = 8;
/// Number of elements on the side of a box: 128 bytes.
const BOX: usize = 64;

/// Compile-time options of the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Variant {
    /// Number of columns of a tile.
    columns: usize,
    bf16: bool,
    /// The left matrix is a transpose: its columns are contiguous.
    a_down: bool,
    /// The right matrix is not a transpose: its rows are contiguous.
    b_across: bool,
    out_fp32: bool,
    bias: bool,
    residual: bool,
    /// Hash of the source and its definitions, so that a cache on disk does not return the result of older ones.
    text: u64,
}

impl Variant {
    /// Returns the bytes of the buffer from which the product's tile is stored.
    fn stored(self) -> usize {
        if self.out_fp32 { 0 } else { ROWS * self.columns * 2 }
    }

    /// Returns the bytes of a tile of both sides and of two barriers.
    fn stage(self) -> usize {
        (ROWS + self.columns) * DEPTH * 2 + 16
    }

    /// Returns the number of stages that fit into a cube's shared memory.
    fn stages(self) -> usize {
        (SHARED_BYTES - ALIGNMENT - self.stored()) / self.stage()
    }

    fn shared_bytes(self) -> usize {
        ALIGNMENT + self.stages() * self.stage() + self.stored()
    }

    /// Returns the kernel's name, by which a profile distinguishes its variants: as in BLAS a side is `n`, or `t` if transposed.
    fn name(self) -> String {
        let Self { columns, bf16, a_down, b_across, out_fp32, bias, residual, .. } = self;
        let [a, b] = [a_down, !b_across].map(|transposed| if transposed { 't' } else { 'n' });
        let element = if bf16 { "bf16" } else { "f16" };
        let more = [(out_fp32, "_fp32"), (bias, "_bias"), (residual, "_residual")];
        let more: String = more.into_iter().filter_map(|(is, name)| is.then_some(name)).collect();
        format!("hopper_product_{columns}_{element}_{a}{b}{more}")
    }

    fn source(self) -> String {
        let Self { columns, a_down, b_across, out_fp32, bias, residual, .. } = self;
        let flag = u8::from;
        let [a_down, b_across, out_fp32, bias, residual] = [a_down, b_across, out_fp32, bias, residual].map(flag);
        let (element, name) = if self.bf16 { ("__nv_bfloat16", "bf16") } else { ("__half", "f16") };
        let sums = columns / 2;
        let listed = |one: &dyn Fn(usize) -> String| (0..sums).map(one).collect::<Vec<_>>().join(", ");
        let (operands, in_and_out) = (listed(&|i| format!("%{i}")), listed(&|i| format!("\"+f\"(sums[{i}])")));
        let [a, b, more] = [0, 1, 2].map(|i| sums + i);
        format!(
            "#include <cuda_bf16.h>
#include <cuda_fp16.h>
#define NAME {}
#define ELEMENT {element}
#define COLUMNS {columns}
#define STAGES {}
#define A_DOWN {a_down}
#define B_ACROSS {b_across}
#define OUT_FP32 {out_fp32}
#define BIAS {bias}
#define RESIDUAL {residual}
#define MULTIPLY \"{{\\n.reg .pred more;\\nsetp.ne.b32 more, %{more}, 0;\\n\" \\
    \"wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.{name}.{name} {{{operands}}}, %{a}, %{b}, more, 1, 1, {a_down}, {b_across};\\n}}\"
#define SUMS_IN_AND_OUT {in_and_out}
{SOURCE}",
            self.name(),
            self.stages()
        )
    }
}

/// Computes FNV-1a.
const fn hash(text: &str) -> u64 {
    let (bytes, mut sum, mut i) = (text.as_bytes(), 0xcbf2_9ce4_8422_2325_u64, 0);
    while i < bytes.len() {
        sum = (sum ^ bytes[i] as u64).wrapping_mul(0x0100_0000_01b3);
        i += 1;
    }
    sum
}

struct HopperProduct(Variant);

impl KernelMetadata for HopperProduct {
    fn id(&self) -> KernelId {
        KernelId::new::<Self>().cube_dim(CubeDim::new_1d(UNITS)).info(self.0)
    }

    fn address_type(&self) -> StorageType {
        AddressType::U32.unsigned_type()
    }
}

impl CubeTask<CudaCompiler> for HopperProduct {
    fn compile(
        &self,
        compiler: &mut CudaCompiler,
        options: &<CudaCompiler as Compiler>::CompilationOptions,
        mode: ExecutionMode,
        address_type: StorageType,
    ) -> Result<CompiledKernel<CudaCompiler>, CompilationError> {
        let cube_dim = CubeDim::new_1d(UNITS);
        // An empty kernel of CubeCL's, from which it takes the amount of shared memory to request.
        let nothing = KernelDefinition {
            buffers: Vec::new(),
            tensor_maps: Vec::new(),
            scalars: Vec::new(),
            cube_dim,
            body: Scope::root(false),
            options: KernelOptions::default(),
        };
        let mut repr = compiler.compile(nothing, options, mode, address_type)?;
        let item = repr.body.address_type;
        let length = self.0.shared_bytes().div_ceil(item.size());
        repr.body.shared_memories.push(SharedMemory::new_array(0, item, length, 16));
        Ok(CompiledKernel {
            entrypoint_name: self.0.name(),
            debug_name: Some("hopper_product"),
            source: self.0.source(),
            repr: Some(repr),
            cube_dim,
            debug_info: None,
        })
    }
}

/// A matrix as the accelerator reads it.
#[derive(Clone, Copy)]
struct Stored {
    /// Rows and columns of the memory, not of the matrix.
    shape: [usize; 2],
    stride: usize,
    /// The matrix is the memory's transpose.
    across: bool,
}

/// Returns the layout of a matrix that the kernel can read: one side contiguous, the other at multiples of 16 bytes.
fn stored(x: &Tensor) -> Option<Stored> {
    let ([n, m], strides) = (dims(x), x.meta.strides());
    let (across, [rows, columns], stride) = match [strides[0], strides[1]] {
        [stride, 1] => (false, [n, m], stride),
        [1, stride] => (true, [m, n], stride),
        _ => return None,
    };
    // The stride of a single row is arbitrary.
    let stride = if rows == 1 { columns.next_multiple_of(WIDE) } else { stride };
    (stride.is_multiple_of(WIDE) && stride >= columns && is_wide(x)).then_some(Stored {
        shape: [rows, columns],
        stride,
        across,
    })
}

/// Returns whether memory begins at a multiple of 16 bytes; allocations do.
fn is_wide(x: &Tensor) -> bool {
    x.handle.offset_start.unwrap_or(0).is_multiple_of(16)
}

/// Returns whether rows can be read and written 16 bytes at a time.
fn has_wide_rows(x: &Tensor) -> bool {
    let [n, columns] = dims(x);
    let stride = x.meta.strides()[0];
    x.meta.strides()[1] == 1 && is_wide(x) && columns.is_multiple_of(WIDE) && (n == 1 || stride.is_multiple_of(WIDE))
}

/// Returns whether this is a GPU of compute capability 9, the only one with these instructions.
pub(super) fn is_here<R: CubeRuntime>(x: &CubeTensor<R>) -> bool {
    tensor(x).is_some_and(is_hopper)
}

fn is_hopper(x: &Tensor) -> bool {
    const MAJOR: CUdevice_attribute = CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR;
    attribute(x.device.index as i32, MAJOR).is_ok_and(|major| major == 9)
}

/// A product in tiles of so many columns, whose depth is in parts of so many steps.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Division {
    columns: usize,
    each: usize,
    parts: usize,
}

/// Returns the division with the least estimated time. Narrow tiles read more memory per product. If `may_part`, the parts of the depth have
/// tiles of their own as long as there are multiprocessors for them, and a second kernel adds their sums.
///
/// The unit of time is a twentieth of what a step takes for one column of a tile of 256 columns. The costs of a column are measured
/// (`bench/gpu/products.py`, H200). The second kernel's is an estimate for an H100, where 7,000 units are about 1 us: 3 us, and the traffic.
fn division([rows, columns, depth]: [usize; 3], processors: usize, may_part: bool) -> Division {
    /// Time to store a tile, in steps.
    const STORE: usize = 2;
    const SECOND_KERNEL: usize = 20_000;
    const ELEMENTS_PER_UNIT: usize = 50;
    let steps = depth.div_ceil(DEPTH);
    let tiles = |width: usize| rows.div_ceil(ROWS) * columns.div_ceil(width);
    let all = [(256, 20), (192, 21), (128, 23)].into_iter().flat_map(|(width, cost)| {
        let most = if may_part { (processors / tiles(width)).clamp(1, 16) } else { 1 };
        (1..=most).map(move |parts| {
            let each = steps.div_ceil(parts);
            // No part is empty.
            (Division { columns: width, each, parts: steps.div_ceil(each) }, cost)
        })
    });
    let time = |(of, cost): &(Division, usize)| {
        let second = if of.parts > 1 { SECOND_KERNEL + rows * columns * of.parts / ELEMENTS_PER_UNIT } else { 0 };
        (tiles(of.columns) * of.parts).div_ceil(processors) * of.columns * cost * (of.each + STORE) + second
    };
    all.min_by_key(time).expect("there are widths").0
}

/// Maps boxes of `rows_of_box` rows by [`BOX`], stored or read in place in the matrix.
fn map(x: &Tensor, of: Stored, rows_of_box: usize) -> TensorMapBinding {
    let map = TensorMapMeta {
        format: TensorMapFormat::Tiled(TiledArgs { tile_size: Shape::from([rows_of_box, BOX]) }),
        metadata: Metadata::new(Shape::from(of.shape), Strides::from(&[of.stride, 1][..])),
        elem_stride: Strides::from(&[1, 1][..]),
        interleave: TensorMapInterleave::None,
        swizzle: TensorMapSwizzle::B128,
        prefetch: TensorMapPrefetch::B256,
        oob_fill: OobFill::Zero,
        storage_ty: x.dtype.into(),
    };
    TensorMapBinding { binding: x.handle.clone().binding(), map }
}

fn tensor<R: CubeRuntime>(x: &CubeTensor<R>) -> Option<&Tensor> {
    (x as &dyn Any).downcast_ref()
}

/// Computes `out` from `lhs`, `rhs` and `added`. Returns false if the device lacks the units or the memory layout does not suit them.
pub(super) fn product<R: CubeRuntime>(
    lhs: &CubeTensor<R>,
    rhs: &CubeTensor<R>,
    out: &CubeTensor<R>,
    added: &Added<R>,
) -> bool {
    let Some([lhs, rhs, out]) = tensor(lhs).zip(tensor(rhs)).zip(tensor(out)).map(|((a, b), c)| [a, b, c]) else {
        return false;
    };
    let [bias, residual] = [&added.bias, &added.residual].map(|x| x.as_ref().and_then(tensor));
    let dtype = lhs.dtype;
    let is_empty = [lhs, rhs].iter().any(|x| x.meta.num_elements() == 0);
    let is_16_bit = matches!(dtype, DType::BF16 | DType::F16) && rhs.dtype == dtype;
    let fits = [lhs, rhs, out].iter().all(|x| x.meta.shape().num_dims() == 2)
        && is_16_bit
        && !is_empty
        && (out.dtype == dtype || out.dtype == DType::F32)
        && has_wide_rows(out)
        && bias.is_none_or(|bias| bias.dtype == dtype && bias.is_contiguous() && is_wide(bias))
        && residual.is_none_or(|residual| residual.dtype == dtype && out.dtype == dtype && has_wide_rows(residual))
        && is_hopper(out);
    let matrices = || stored(lhs).zip(stored(rhs)).zip(stored(out));
    let Some(((a, b), c)) = fits.then(matrices).flatten().filter(|(_, c)| !c.across) else { return false };

    let ([rows, columns], [_, depth]) = (dims(out), dims(lhs));
    let processors = out.client.properties().hardware.num_streaming_multiprocessors.unwrap_or(1) as usize;
    // Only if the left side is a transpose, as in the gradient of a weight: in other products a row's bits do not depend on the number of rows.
    let may_part = a.across && bias.is_none() && residual.is_none() && out.is_contiguous();
    let Division { columns: of_tile, each, parts } = division([rows, columns, depth], processors, may_part);
    let whole = out;
    let partial = (parts > 1).then(|| empty(out, [parts, rows * columns], DType::F32));
    let out = partial.as_ref().unwrap_or(out);
    let variant = Variant {
        columns: of_tile,
        bf16: dtype == DType::BF16,
        a_down: a.across,
        b_across: !b.across,
        out_fp32: out.dtype == DType::F32,
        bias: bias.is_some(),
        residual: residual.is_some(),
        text: TEXT,
    };
    let tiles = rows.div_ceil(ROWS) * columns.div_ceil(of_tile) * parts;
    let stride = |x: &Tensor| x.meta.strides()[0] as u64;
    let data = [rows, columns, depth].map(|size| size as u64).into_iter();
    let data = data.chain([stride(whole), residual.map_or(0, stride), each as u64]).collect::<Vec<_>>();
    // The matrices once more: CubeCL waits for buffers of other streams, but not for those of maps.
    let buffers = [lhs, rhs, out, bias.unwrap_or(out), residual.unwrap_or(out)].map(|x| x.handle.clone().binding());
    let [of_a, of_b] = [
        map(lhs, a, if variant.a_down { BOX } else { ROWS }),
        map(rhs, b, if variant.b_across { BOX } else { of_tile }),
    ];
    // In fp32 a box would exceed the accelerator's limit, so the units store the result, and the kernel gets a map that it does not use.
    let of_c = if variant.out_fp32 { map(lhs, a, BOX) } else { map(out, c, BOX) };
    let arguments = KernelArguments {
        buffers: buffers.into(),
        info: MetadataBindingInfo { dynamic_metadata_offset: data.len(), data },
        tensor_maps: vec![of_a, of_b, of_c],
    };
    // SAFETY: the accelerator reads inside the maps and zeros outside; the kernel stores `parts` products of `rows` by `columns`, for which
    // `out` has memory, and reads `added` only below `rows` and `columns`, which it has; every wait is for a copy or a product that was
    // requested before, and no part is without steps.
    unsafe {
        let count = CubeCount::new_1d(tiles.min(processors) as u32);
        out.client.launch_unchecked(Box::new(HopperProduct(variant)), count, arguments);
    }
    if let Some(partial) = partial {
        total_into(partial, shaped(whole.clone(), Shape::from([1, rows * columns])));
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn depth_is_divided_if_multiprocessors_are_idle() {
        let of = |shape: [usize; 3]| division(shape, 132, true);
        assert_eq!(of([768, 768, 8192]), Division { columns: 128, each: 43, parts: 3 });
        assert_eq!(of([896, 128, 8192]), Division { columns: 128, each: 10, parts: 13 });
        // Every multiprocessor has a tile; steps are few; it is not asked for.
        assert_eq!(of([4864, 896, 8192]).parts, 1);
        assert_eq!(of([128, 128, 256]).parts, 1);
        assert_eq!(division([768, 768, 8192], 132, false), Division { columns: 128, each: 128, parts: 1 });
        for depth in (8..20_000).step_by(56) {
            for processors in [1, 78, 114, 132] {
                let Division { each, parts, .. } = division([136, 72, depth], processors, true);
                let steps = depth.div_ceil(DEPTH);
                assert!(
                    each * (parts - 1) < steps && steps <= each * parts,
                    "{depth} on {processors}: {each} by {parts}"
                );
            }
        }
    }
}
