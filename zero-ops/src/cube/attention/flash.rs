//! Attention in one kernel per pass over keys or queries, with tiles of both in shared memory: FlashAttention-2,
//! <https://arxiv.org/abs/2307.08691>.
//!
//! A cube keeps a tile of rows, its own, and goes through tiles of the rows of the other side, in order. `LANES` units
//! share a row: each makes the scores of every `LANES`th row of the other tile and sums up every `LANES`th column of the
//! result. Sums are made in one order always.

use burn_cubecl::CubeRuntime;
use burn_cubecl::tensor::CubeTensor;
use cubecl::ir::HardwareProperties;
use cubecl::prelude::*;

use super::{Inputs, Rows, Saved, Sizes, address_type, grid};

/// The widest head whose tiles are worth it.
const WIDEST: usize = 128;
/// Units that share a row.
const LANES: usize = 8;
/// Rows of a tile, of which the first that fits is taken.
const TILES: [usize; 3] = [32, 16, 8];
/// Buffers of the kernel that has the most, with the one of its scalars.
const BINDINGS: u32 = 10;

/// Whether the kernels run on a device with heads of width `e`.
pub(super) fn fits(hardware: &HardwareProperties, e: usize) -> bool {
    e <= WIDEST && hardware.max_bindings >= BINDINGS && Tile::of(hardware, e, FORWARD).is_some() && {
        Tile::of(hardware, e, BACKWARD).is_some()
    }
}

/// What a pass keeps in shared memory: tiles of rows and tiles of scores.
type Kept = (usize, usize);
const FORWARD: Kept = (2, 1);
const BACKWARD: Kept = (4, 2);

/// How a cube is laid out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Tile {
    /// Rows of a tile.
    rows: usize,
    /// Width of a head.
    e: usize,
    /// Columns of a unit.
    columns: usize,
    /// From row to row of rows in shared memory: odd, so that rows begin in different banks.
    pitch: usize,
    /// The same of scores.
    score_pitch: usize,
}

impl Tile {
    fn of(hardware: &HardwareProperties, e: usize, (tiles, scores): Kept) -> Option<Self> {
        TILES.into_iter().map(|rows| Self::new(rows, e)).find(|tile| {
            let elems = tile.rows * (tiles * tile.pitch + scores * tile.score_pitch);
            elems * size_of::<f32>() <= hardware.max_shared_memory_size
                && tile.units() as u32 <= hardware.max_units_per_cube.min(hardware.max_cube_dim.0)
        })
    }

    fn new(rows: usize, e: usize) -> Self {
        let columns = e.div_ceil(LANES);
        Self { rows, e, columns, pitch: (columns * LANES) | 1, score_pitch: rows | 1 }
    }

    fn units(&self) -> usize {
        self.rows * LANES
    }
}

/// The sizes of a problem in a kernel.
#[derive(CubeLaunch, CubeType)]
struct Geometry {
    /// Tiles of a sequence.
    tiles: usize,
    /// Cubes that have a tile.
    cubes: usize,
    t: usize,
    heads: usize,
    /// Where the heads of query, key and value begin.
    q_column: usize,
    k_column: usize,
    v_column: usize,
}

fn geometry<R: CubeRuntime>(inputs: &Inputs<R>, tile: Tile) -> (usize, GeometryLaunch<R>) {
    let Sizes { pairs, heads, t, .. } = inputs.sizes;
    let tiles = t.div_ceil(tile.rows);
    let columns = [inputs.q.column, inputs.k.column, inputs.v.column];
    (pairs * tiles, GeometryLaunch::new(tiles, pairs * tiles, t, heads, columns[0], columns[1], columns[2]))
}

fn tile_for<R: CubeRuntime>(inputs: &Inputs<R>, kept: Kept) -> Tile {
    let hardware = &inputs.q.tensor.client.properties().hardware;
    Tile::of(hardware, inputs.sizes.e, kept).expect("the way of tiles is taken where they fit")
}

pub(super) fn forward<R: CubeRuntime>(inputs: &Inputs<R>, out: &CubeTensor<R>, lse: &CubeTensor<R>) {
    let tile = tile_for(inputs, FORWARD);
    let (cubes, geometry) = geometry(inputs, tile);
    let mask = inputs.mask.clone();
    let [q, k, v] = [&inputs.q, &inputs.k, &inputs.v].map(|rows| rows.tensor.clone());
    // SAFETY: rows beyond a sequence are neither read nor written; every loop ends before the end of its tile.
    unsafe {
        forward_kernel::launch_unchecked(
            &out.client,
            grid(cubes),
            CubeDim::new_1d(tile.units() as u32),
            address_type([&q, &k, &v, &mask, out, lse]),
            q.into_tensor_arg(),
            k.into_tensor_arg(),
            v.into_tensor_arg(),
            mask.into_tensor_arg(),
            out.clone().into_tensor_arg(),
            lse.clone().into_tensor_arg(),
            geometry,
            inputs.sizes.scale,
            tile,
            inputs.sizes.causal,
            inputs.masked,
            inputs.dtype().into(),
        );
    }
}

/// `along`: as [`along`](super::kernels::along) makes it.
pub(super) fn backward<R: CubeRuntime>(
    inputs: &Inputs<R>,
    saved: &Saved<R>,
    along: &CubeTensor<R>,
    [dq, dk, dv]: &[Rows<R>; 3],
) {
    let tile = tile_for(inputs, BACKWARD);
    let (cubes, _) = geometry(inputs, tile);
    let [q, k, v, grad] = [&inputs.q, &inputs.k, &inputs.v, &saved.grad].map(|rows| rows.tensor.clone());
    let mask = inputs.mask.clone();
    let client = &dq.tensor.client;
    let address_type = address_type([&q, &k, &v, &grad, &mask, along, &dq.tensor, &dk.tensor, &dv.tensor]);
    // One binding for packed gradients: devices may refuse a buffer that is bound for writing twice.
    let dv_arg = if dk.column == dv.column {
        dv.tensor.clone().into_tensor_arg()
    } else {
        dv.tensor.as_tensor_alias(DK_BINDING)
    };
    // SAFETY: rows beyond a sequence are neither read nor written; every loop ends before the end of its tile.
    unsafe {
        of_keys_kernel::launch_unchecked(
            client,
            grid(cubes),
            CubeDim::new_1d(tile.units() as u32),
            address_type,
            q.clone().into_tensor_arg(),
            k.clone().into_tensor_arg(),
            v.clone().into_tensor_arg(),
            grad.clone().into_tensor_arg(),
            mask.clone().into_tensor_arg(),
            saved.lse.clone().into_tensor_arg(),
            along.clone().into_tensor_arg(),
            dk.tensor.clone().into_tensor_arg(),
            dv_arg,
            geometry(inputs, tile).1,
            dk.column,
            dv.column,
            inputs.sizes.scale,
            tile,
            inputs.sizes.causal,
            inputs.masked,
            inputs.dtype().into(),
        );
        of_queries_kernel::launch_unchecked(
            client,
            grid(cubes),
            CubeDim::new_1d(tile.units() as u32),
            address_type,
            q.into_tensor_arg(),
            k.into_tensor_arg(),
            v.into_tensor_arg(),
            grad.into_tensor_arg(),
            mask.into_tensor_arg(),
            saved.lse.clone().into_tensor_arg(),
            along.clone().into_tensor_arg(),
            dq.tensor.clone().into_tensor_arg(),
            geometry(inputs, tile).1,
            dq.column,
            inputs.sizes.scale,
            tile,
            inputs.sizes.causal,
            inputs.masked,
            inputs.dtype().into(),
        );
    }
}

/// Which of the buffers of [`of_keys_kernel`] is that of `dk`.
const DK_BINDING: usize = 7;

/// Fills a tile with rows `first ..` of a sequence whose first row is `base`; rows beyond its `t` are zero.
#[cube]
fn load<E: Float>(
    x: &Tensor<E>,
    into: &mut SharedMemory<f32>,
    base: usize,
    first: usize,
    t: usize,
    column: usize,
    #[comptime] tile: Tile,
) {
    let stride = x.stride(0);
    let mut i = UNIT_POS as usize;
    while i < comptime!(tile.rows * tile.e) {
        let row = i / comptime!(tile.e);
        let c = i % comptime!(tile.e);
        let mut value = f32::new(0.0);
        if first + row < t {
            value = f32::cast_from(x[(base + first + row) * stride + column + c]);
        }
        into[row * comptime!(tile.pitch) + c] = value;
        i += comptime!(tile.units());
    }
}

/// The products of row `row` of a tile and the unit's rows of another.
#[cube]
fn products(
    own: &SharedMemory<f32>,
    other: &SharedMemory<f32>,
    row: usize,
    lane: usize,
    #[comptime] tile: Tile,
) -> Array<f32> {
    let mut sums = zeros(comptime!(tile.rows / LANES));
    for c in 0..comptime!(tile.e) {
        let x = own[row * comptime!(tile.pitch) + c];
        #[unroll]
        for i in 0..comptime!(tile.rows / LANES) {
            sums[i] += x * other[(lane + comptime!(i * LANES)) * comptime!(tile.pitch) + c];
        }
    }
    sums
}

/// Adds to the unit's columns of a row's sum the other tile's rows, times the row's weights.
#[cube]
fn add_weighted(
    sums: &mut Array<f32>,
    weights: &SharedMemory<f32>,
    other: &SharedMemory<f32>,
    row: usize,
    lane: usize,
    #[comptime] tile: Tile,
) {
    for j in 0..comptime!(tile.rows) {
        let weight = weights[row * comptime!(tile.score_pitch) + j];
        #[unroll]
        for i in 0..comptime!(tile.columns) {
            sums[i] += weight * other[j * comptime!(tile.pitch) + lane + comptime!(i * LANES)];
        }
    }
}

/// Stores the unit's columns of a row.
#[cube]
fn store<E: Float>(x: &mut Tensor<E>, sums: &Array<f32>, at: usize, lane: usize, #[comptime] tile: Tile) {
    #[unroll]
    for i in 0..comptime!(tile.columns) {
        let c = lane + comptime!(i * LANES);
        if c < comptime!(tile.e) {
            x[at + c] = E::cast_from(sums[i]);
        }
    }
}

#[cube]
fn zeros(#[comptime] len: usize) -> Array<f32> {
    let mut zeros = Array::<f32>::new(len);
    #[unroll]
    for i in 0..len {
        zeros[i] = f32::new(0.0);
    }
    zeros
}

#[cube(launch_unchecked, address_type = "dynamic")]
fn forward_kernel<E: Float>(
    q: &Tensor<E>,
    k: &Tensor<E>,
    v: &Tensor<E>,
    mask: &Tensor<f32>,
    out: &mut Tensor<E>,
    lse: &mut Tensor<f32>,
    geometry: Geometry,
    scale: f32,
    #[comptime] tile: Tile,
    #[comptime] causal: bool,
    #[comptime] masked: bool,
    #[define(E)] _dtype: StorageType,
) {
    let cube = CUBE_POS;
    if cube >= geometry.cubes {
        terminate!();
    }
    let t = geometry.t;
    let pair = cube / geometry.tiles;
    let first = cube % geometry.tiles * comptime!(tile.rows);
    let base = pair / geometry.heads * t;
    let head = pair % geometry.heads * comptime!(tile.e);
    let row = UNIT_POS as usize / LANES;
    let lane = UNIT_POS as usize % LANES;
    let query = first + row;

    let mut queries = SharedMemory::<f32>::new(comptime!(tile.rows * tile.pitch));
    // Keys, then values: a tile of keys is not read any more when its values are needed.
    let mut others = SharedMemory::<f32>::new(comptime!(tile.rows * tile.pitch));
    let mut weights = SharedMemory::<f32>::new(comptime!(tile.rows * tile.score_pitch));
    load::<E>(q, &mut queries, base, first, t, geometry.q_column + head, tile);

    let least = f32::new(comptime!(f32::MIN));
    let mut largest = least;
    let mut sum = f32::new(0.0);
    let mut sums = zeros(tile.columns);
    let mut end = t;
    if causal && first + comptime!(tile.rows) < t {
        end = first + comptime!(tile.rows);
    }
    let mut from = 0usize;
    while from < end {
        load::<E>(k, &mut others, base, from, t, geometry.k_column + head, tile);
        sync_cube();
        let mut scores = products(&queries, &others, row, lane, tile);
        #[unroll]
        for i in 0..comptime!(tile.rows / LANES) {
            let j = lane + comptime!(i * LANES);
            let key = from + j;
            let mut score = least;
            if key < t && (!causal || key <= query) {
                score = scores[i] * scale;
                if masked {
                    score += mask[base + key];
                }
            }
            scores[i] = score;
            weights[row * comptime!(tile.score_pitch) + j] = score;
        }
        sync_cube();
        load::<E>(v, &mut others, base, from, t, geometry.v_column + head, tile);
        let mut new_largest = largest;
        for j in 0..comptime!(tile.rows) {
            new_largest = max(new_largest, weights[row * comptime!(tile.score_pitch) + j]);
        }
        // Before a unit's scores become weights, all lanes of its row have read them.
        sync_cube();
        #[unroll]
        for i in 0..comptime!(tile.rows / LANES) {
            let j = lane + comptime!(i * LANES);
            let key = from + j;
            let mut weight = f32::new(0.0);
            if key < t && (!causal || key <= query) {
                weight = (scores[i] - new_largest).exp();
            }
            weights[row * comptime!(tile.score_pitch) + j] = weight;
        }
        sync_cube();
        let kept = (largest - new_largest).exp();
        largest = new_largest;
        sum *= kept;
        #[unroll]
        for i in 0..comptime!(tile.columns) {
            sums[i] *= kept;
        }
        for j in 0..comptime!(tile.rows) {
            sum += weights[row * comptime!(tile.score_pitch) + j];
        }
        add_weighted(&mut sums, &weights, &others, row, lane, tile);
        sync_cube();
        from += comptime!(tile.rows);
    }

    if query < t {
        #[unroll]
        for i in 0..comptime!(tile.columns) {
            sums[i] /= sum;
        }
        store::<E>(out, &sums, (base + query) * out.stride(0) + head, lane, tile);
        if lane == 0 {
            lse[pair * t + query] = sum.ln() + largest;
        }
    }
}

/// The probability of a key for a query and the gradient of their product, from product and gradient of the probability.
#[cube]
#[allow(clippy::too_many_arguments)]
fn gradient_of(
    product: f32,
    d_probability: f32,
    query: usize,
    key: usize,
    base: usize,
    pair: usize,
    t: usize,
    scale: f32,
    mask: &Tensor<f32>,
    lse: &Tensor<f32>,
    along: &Tensor<f32>,
    #[comptime] causal: bool,
    #[comptime] masked: bool,
) -> (f32, f32) {
    let mut probability = f32::new(0.0);
    let mut gradient = f32::new(0.0);
    if query < t && key < t && (!causal || key <= query) {
        let mut score = product * scale;
        if masked {
            score += mask[base + key];
        }
        probability = (score - lse[pair * t + query]).exp();
        gradient = probability * (d_probability - along[pair * t + query]) * scale;
    }
    (probability, gradient)
}

#[cube(launch_unchecked, address_type = "dynamic")]
fn of_keys_kernel<E: Float>(
    q: &Tensor<E>,
    k: &Tensor<E>,
    v: &Tensor<E>,
    grad: &Tensor<E>,
    mask: &Tensor<f32>,
    lse: &Tensor<f32>,
    along: &Tensor<f32>,
    dk: &mut Tensor<E>,
    dv: &mut Tensor<E>,
    geometry: Geometry,
    dk_column: usize,
    dv_column: usize,
    scale: f32,
    #[comptime] tile: Tile,
    #[comptime] causal: bool,
    #[comptime] masked: bool,
    #[define(E)] _dtype: StorageType,
) {
    let cube = CUBE_POS;
    if cube >= geometry.cubes {
        terminate!();
    }
    let t = geometry.t;
    let pair = cube / geometry.tiles;
    let first = cube % geometry.tiles * comptime!(tile.rows);
    let base = pair / geometry.heads * t;
    let head = pair % geometry.heads * comptime!(tile.e);
    let row = UNIT_POS as usize / LANES;
    let lane = UNIT_POS as usize % LANES;
    let key = first + row;

    let mut keys = SharedMemory::<f32>::new(comptime!(tile.rows * tile.pitch));
    let mut values = SharedMemory::<f32>::new(comptime!(tile.rows * tile.pitch));
    let mut queries = SharedMemory::<f32>::new(comptime!(tile.rows * tile.pitch));
    let mut grads = SharedMemory::<f32>::new(comptime!(tile.rows * tile.pitch));
    let mut probabilities = SharedMemory::<f32>::new(comptime!(tile.rows * tile.score_pitch));
    let mut gradients = SharedMemory::<f32>::new(comptime!(tile.rows * tile.score_pitch));
    load::<E>(k, &mut keys, base, first, t, geometry.k_column + head, tile);
    load::<E>(v, &mut values, base, first, t, geometry.v_column + head, tile);

    let mut of_k = zeros(tile.columns);
    let mut of_v = zeros(tile.columns);
    let mut from = 0usize;
    if causal {
        from = first;
    }
    while from < t {
        load::<E>(q, &mut queries, base, from, t, geometry.q_column + head, tile);
        load::<E>(grad, &mut grads, base, from, t, head, tile);
        sync_cube();
        let scores = products(&keys, &queries, row, lane, tile);
        let d_probabilities = products(&values, &grads, row, lane, tile);
        #[unroll]
        for i in 0..comptime!(tile.rows / LANES) {
            let j = lane + comptime!(i * LANES);
            let (probability, gradient) = gradient_of(
                scores[i],
                d_probabilities[i],
                from + j,
                key,
                base,
                pair,
                t,
                scale,
                mask,
                lse,
                along,
                causal,
                masked,
            );
            probabilities[row * comptime!(tile.score_pitch) + j] = probability;
            gradients[row * comptime!(tile.score_pitch) + j] = gradient;
        }
        sync_cube();
        add_weighted(&mut of_v, &probabilities, &grads, row, lane, tile);
        add_weighted(&mut of_k, &gradients, &queries, row, lane, tile);
        sync_cube();
        from += comptime!(tile.rows);
    }

    if key < t {
        store::<E>(dk, &of_k, (base + key) * dk.stride(0) + dk_column + head, lane, tile);
        store::<E>(dv, &of_v, (base + key) * dv.stride(0) + dv_column + head, lane, tile);
    }
}

#[cube(launch_unchecked, address_type = "dynamic")]
fn of_queries_kernel<E: Float>(
    q: &Tensor<E>,
    k: &Tensor<E>,
    v: &Tensor<E>,
    grad: &Tensor<E>,
    mask: &Tensor<f32>,
    lse: &Tensor<f32>,
    along: &Tensor<f32>,
    dq: &mut Tensor<E>,
    geometry: Geometry,
    dq_column: usize,
    scale: f32,
    #[comptime] tile: Tile,
    #[comptime] causal: bool,
    #[comptime] masked: bool,
    #[define(E)] _dtype: StorageType,
) {
    let cube = CUBE_POS;
    if cube >= geometry.cubes {
        terminate!();
    }
    let t = geometry.t;
    let pair = cube / geometry.tiles;
    let first = cube % geometry.tiles * comptime!(tile.rows);
    let base = pair / geometry.heads * t;
    let head = pair % geometry.heads * comptime!(tile.e);
    let row = UNIT_POS as usize / LANES;
    let lane = UNIT_POS as usize % LANES;
    let query = first + row;

    let mut queries = SharedMemory::<f32>::new(comptime!(tile.rows * tile.pitch));
    let mut grads = SharedMemory::<f32>::new(comptime!(tile.rows * tile.pitch));
    let mut keys = SharedMemory::<f32>::new(comptime!(tile.rows * tile.pitch));
    let mut values = SharedMemory::<f32>::new(comptime!(tile.rows * tile.pitch));
    let mut gradients = SharedMemory::<f32>::new(comptime!(tile.rows * tile.score_pitch));
    load::<E>(q, &mut queries, base, first, t, geometry.q_column + head, tile);
    load::<E>(grad, &mut grads, base, first, t, head, tile);

    let mut of_q = zeros(tile.columns);
    let mut end = t;
    if causal && first + comptime!(tile.rows) < t {
        end = first + comptime!(tile.rows);
    }
    let mut from = 0usize;
    while from < end {
        load::<E>(k, &mut keys, base, from, t, geometry.k_column + head, tile);
        load::<E>(v, &mut values, base, from, t, geometry.v_column + head, tile);
        sync_cube();
        let scores = products(&queries, &keys, row, lane, tile);
        let d_probabilities = products(&grads, &values, row, lane, tile);
        #[unroll]
        for i in 0..comptime!(tile.rows / LANES) {
            let j = lane + comptime!(i * LANES);
            let (_, gradient) = gradient_of(
                scores[i],
                d_probabilities[i],
                query,
                from + j,
                base,
                pair,
                t,
                scale,
                mask,
                lse,
                along,
                causal,
                masked,
            );
            gradients[row * comptime!(tile.score_pitch) + j] = gradient;
        }
        sync_cube();
        add_weighted(&mut of_q, &gradients, &keys, row, lane, tile);
        sync_cube();
        from += comptime!(tile.rows);
    }

    if query < t {
        store::<E>(dq, &of_q, (base + query) * dq.stride(0) + dq_column + head, lane, tile);
    }
}
