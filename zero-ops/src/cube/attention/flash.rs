//! Attention in one kernel forward and two backward, whose scores stay in registers: <https://arxiv.org/abs/2307.08691>.
//!
//! A cube takes some queries (forward, and for their gradient) or some keys (for the gradients of keys and values), and iterates over the
//! rows of the other side, which it copies to shared memory in tiles. Each number is computed by one unit, so nothing is added atomically
//! and two runs give the same bits. Each backward kernel recomputes the scores: seven products instead of five.

mod kernels;

use burn_cubecl::CubeRuntime;
use burn_cubecl::tensor::CubeTensor;
use burn_std::DType;
use cubecl::features::MmaConfig;
use cubecl::ir::{ElemType, FloatKind};
use cubecl::prelude::*;

use self::kernels::{forward_kernel, heads, keys_kernel, problem, queries_kernel};
use super::dropped::dropped;
use super::tiles::Cut;
use super::{Inputs, Rows, Saved, grid};
use crate::cube::many::array;
use crate::cube::rows::address_type;
use crate::cube::tensor::launch;

/// Number of elements that a unit copies at a time with matrix units: 16 bytes.
const WIDE: usize = 8;

/// The algorithm with fused kernels.
#[derive(Clone, Copy, Debug)]
pub(super) struct Flash {
    forward: Cut,
    /// Cut of the kernel for the gradients of queries.
    queries: Cut,
    /// Cut of the kernel for the gradients of keys and values.
    keys: Cut,
    /// Number of elements that a unit copies at a time.
    wide: usize,
}

impl Flash {
    /// Returns the algorithm if matrix units multiply the inputs' type and rows are aligned for reads of 16 bytes. Other types, such as
    /// fp32, would lose precision there.
    pub fn on<R: CubeRuntime>(inputs: &Inputs<R>, others: &[&Rows<R>]) -> Option<Self> {
        let properties = inputs.q.tensor.client.properties();
        let kind: StorageType = inputs.dtype().into();
        let sums = ElemType::Float(FloatKind::F32).into();
        let mma = MmaConfig { a_type: kind, b_type: kind, cd_type: sums, m: 16, n: 8, k: 16 };
        let matrices = &properties.features.matmul;
        let e = inputs.sizes.e;
        let fits = inputs.sizes.is_plain()
            && matches!(inputs.dtype(), DType::BF16 | DType::F16)
            && matches!(e, 64 | 128)
            && matrices.mma.contains(&mma)
            && matrices.ldmatrix.contains(&kind);
        let all = [&inputs.q, &inputs.k, &inputs.v];
        (fits && all.iter().chain(others).all(|rows| is_wide(rows))).then(|| Self::of(e, inputs.dropout.is_some()))
    }

    /// Chooses the cuts for matrix units.
    fn of(e: usize, drops: bool) -> Self {
        let cut = |planes, tall, others| Cut { e, planes, tall, others, matrices: true };
        // As many sums per unit as its registers hold: 255 at most, some of which the random numbers need.
        let (forward, backward) = match e {
            64 => (cut(4, if drops { 1 } else { 2 }, 64), cut(4, 1, 64)),
            _ => (cut(4, 1, 64), cut(4, 1, 32)),
        };
        Self { forward, queries: backward, keys: backward, wide: WIDE }
    }

    /// Returns the same kernels with loops instead of matrix units, for tests.
    #[cfg(test)]
    pub fn in_loops(e: usize, planes: usize, tall: usize, others: usize) -> Self {
        let cut = Cut { e, planes, tall, others, matrices: false };
        Self { forward: cut, queries: cut, keys: cut, wide: 1 }
    }

    pub fn forward<R: CubeRuntime>(self, inputs: &Inputs<R>, out: &CubeTensor<R>, lse: &CubeTensor<R>) {
        let Inputs { sizes, q, k, v, mask, .. } = inputs;
        let (blocks, out) = (sizes.t.div_ceil(self.forward.rows()), Rows::new(out.clone(), sizes.t));
        let address = address_type(&[&q.tensor, &k.tensor, &v.tensor, &out.tensor, lse]);
        // SAFETY: a cube beyond the blocks of all pairs stops; rows of a sequence are read and written below `t`, columns below `e`.
        unsafe {
            launch! {
                forward_kernel on lse.client,
                (grid(blocks * sizes.pairs), self.forward.cube_dim(), address, self.wide), [],
                heads(q), heads(k), heads(v), array(mask), heads(&out), array(lse), problem(*sizes, blocks),
                dropped(inputs.dropout), inputs.variant(), self.forward, inputs.dtype().into()
            }
        }
    }

    pub fn backward<R: CubeRuntime>(self, inputs: &Inputs<R>, saved: &Saved<R>, [dq, dk, dv]: &[Rows<R>; 3]) {
        let (Inputs { sizes, q, k, v, mask, .. }, Saved { lse, grad, along }) = (inputs, saved);
        let address = address_type(&[&q.tensor, &k.tensor, &v.tensor, &grad.tensor, &dq.tensor, lse]);
        let [of_keys, of_queries] = [self.keys, self.queries].map(|cut| sizes.t.div_ceil(cut.rows()));
        // SAFETY: as for the forward pass; if one tensor holds all three gradients, each kernel writes its own columns.
        unsafe {
            launch! {
                keys_kernel on lse.client,
                (grid(of_keys * (sizes.pairs / sizes.group)), self.keys.cube_dim(), address, self.wide), [],
                heads(q), heads(k), heads(v), array(mask), heads(grad), array(lse), array(along), heads(dk), heads(dv),
                problem(*sizes, of_keys), dropped(inputs.dropout), inputs.variant(), self.keys, inputs.dtype().into()
            }
            launch! {
                queries_kernel on lse.client,
                (grid(of_queries * sizes.pairs), self.queries.cube_dim(), address, self.wide), [],
                heads(q), heads(k), heads(v), array(mask), heads(grad), array(lse), array(along), heads(dq),
                problem(*sizes, of_queries), dropped(inputs.dropout), inputs.variant(), self.queries, inputs.dtype().into()
            }
        }
    }
}

/// Returns whether every head of every row begins at a multiple of 16 bytes.
fn is_wide<R: CubeRuntime>(rows: &Rows<R>) -> bool {
    let bytes = (WIDE * rows.tensor.elem_size()) as u64;
    let [n, _] = rows.tensor.meta.shape().dims();
    (n <= 1 || rows.tensor.meta.strides()[0].is_multiple_of(WIDE))
        && rows.column.is_multiple_of(WIDE)
        && rows.tensor.handle.offset_start.unwrap_or(0).is_multiple_of(bytes)
}
