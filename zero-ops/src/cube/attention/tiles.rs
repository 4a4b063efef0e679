//! Products of tiles of 16 rows, 8 columns and a depth of 16: by the instruction `mma` of NVIDIA's matrix units, or by plain loops that
//! hold every number in the same unit and the same place, so that the kernels above are tested without such units.
//!
//! A plane of 32 units takes `tall` vertically adjacent tiles. In a tile, unit `4 g + p` holds, in pairs of neighbours:
//! - of a left operand (16 x 16) the columns `2 p` and `2 p + 8` of row `g`, then of row `g + 8`, in the order of [`left_row`] and
//!   [`left_column`];
//! - of sums (16 x 8) the columns `2 p` of row `g` and of row `g + 8`.
//!
//! So the sums of two neighbouring tiles, once rounded, form a left operand without data movement. Right operands are read from shared
//! memory when used. The layout is that of <https://docs.nvidia.com/cuda/parallel-thread-execution/>, "Matrix Fragments for mma.m16n8k16
//! with floating point type" and "ldmatrix".

use cubecl::cmma::{MatrixIdent, MmaDefinition};
use cubecl::prelude::*;

/// A pair of neighbours in a row.
pub(super) type Two = Const<2>;

/// Number of units of a plane.
pub(super) const PLANE: u32 = 32;

/// Padding of a row in shared memory, in elements: eight rows of a tile are then in different banks.
const APART: usize = 8;

/// Partition of a kernel's work.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Cut {
    /// Width of a head, a multiple of 16.
    pub e: usize,
    /// Number of planes of a cube.
    pub planes: usize,
    /// Number of vertically adjacent tiles of a plane.
    pub tall: usize,
    /// Number of rows of the other side that a cube takes at a time, a multiple of 16.
    pub others: usize,
    /// Multiply with matrix units.
    pub matrices: bool,
}

impl Cut {
    /// Returns the number of rows of a plane.
    pub fn of_plane(self) -> usize {
        16 * self.tall
    }

    /// Returns the number of rows of a cube.
    pub fn rows(self) -> usize {
        self.planes * self.of_plane()
    }

    /// Returns the elements from one row to the next in shared memory.
    pub fn stride(self) -> usize {
        self.e + APART
    }

    /// Returns the elements of shared memory for `rows` rows.
    pub fn memory(self, rows: usize) -> usize {
        rows * self.stride()
    }

    /// Returns the number of elements that units exchange without matrix units.
    pub fn exchanged(self) -> usize {
        if self.matrices { 1 } else { self.planes * 256 }
    }

    pub fn cube_dim(self) -> CubeDim {
        CubeDim::new_2d(PLANE, self.planes as u32)
    }

    fn units(self) -> usize {
        self.planes * PLANE as usize
    }
}

/// Returns the row, relative to the tile, of a left operand's pair `i` of 4 in the units `4 g + ...`.
#[cube]
pub(super) fn left_row(g: usize, i: usize) -> usize {
    g + 8 * (i % 2)
}

/// Returns the first column of a left operand's pair `i` of 4 in the units `... + p`.
#[cube]
pub(super) fn left_column(p: usize, i: usize) -> usize {
    2 * p + 8 * (i / 2)
}

/// Returns the row and column, in a left operand, of the 8 elements whose address unit `lane` passes to `ldmatrix`.
#[cube]
pub(super) fn left_address(lane: usize) -> (usize, usize) {
    (lane % 16, lane / 16 * 8)
}

/// Returns the same for the right operands of two neighbouring tiles: 16 rows of columns or, with `across`, of the depth.
#[cube]
pub(super) fn right_address(lane: usize, #[comptime] across: bool) -> (usize, usize) {
    if comptime!(across) { (lane % 16, lane / 16 * 8) } else { (lane / 16 * 8 + lane % 8, lane / 8 % 2 * 8) }
}

/// Returns two adjacent numbers as a vector.
#[cube]
pub(super) fn pair<E: Float>(first: E, second: E) -> Vector<E, Two> {
    let mut both = Vector::<E, Two>::empty();
    both[0] = first;
    both[1] = second;
    both
}

/// Returns zeroed sums of `tiles` horizontally adjacent tiles: pair `i` of 2 of tile `n` in the `m`th row of tiles is at
/// `2 (m * tiles + n) + i`.
#[cube]
pub(super) fn no_sums(#[comptime] tiles: usize, #[comptime] cut: Cut) -> Array<Vector<f32, Two>> {
    let count = comptime!(cut.tall * tiles * 2);
    let mut sums = Array::<Vector<f32, Two>>::new(count);
    #[unroll(cut.matrices)]
    for i in 0..count {
        sums[i] = pair::<f32>(0.0f32, 0.0f32);
    }
    sums
}

/// Copies `count` rows of a head, from row `first` on, to shared memory, with zeros beyond the last row.
///
/// `at`: index of row 0, `stride`: distance between rows, both in vectors; `t`: number of rows.
#[cube]
pub(super) fn stage<E: Float, N: Size>(
    rows: &Array<Vector<E, N>>,
    at: usize,
    stride: usize,
    first: usize,
    t: usize,
    into: &mut SharedMemory<Vector<E, N>>,
    #[comptime] count: usize,
    #[comptime] cut: Cut,
) {
    let width = N::value().comptime();
    let per_row = comptime!(cut.e / width);
    let unit = UNIT_POS as usize;
    #[unroll(cut.matrices)]
    for i in 0..comptime!((count * per_row).div_ceil(cut.units())) {
        let which = unit + i * comptime!(cut.units());
        let row = which / per_row;
        // With matrix units the number of vectors of the rows is a multiple of the units.
        if comptime!(cut.matrices) || row < count {
            let column = which % per_row;
            let mut value = Vector::<E, N>::new(E::from_int(0));
            if first + row < t {
                value = rows[at + (first + row) * stride + column];
            }
            into[row * comptime!(cut.stride() / width) + column] = value;
        }
    }
}

/// Returns the left operand of a plane's tiles, from shared memory: rows from `first` on, 16 columns from `column`. Pair `i` of the `m`th
/// tile is at `4 m + i`.
#[cube]
pub(super) fn left<E: Float, N: Size>(
    rows: &SharedMemory<Vector<E, N>>,
    first: usize,
    column: usize,
    #[comptime] cut: Cut,
) -> Array<Vector<E, Two>> {
    let mut operand = Array::<Vector<E, Two>>::new(comptime!(4 * cut.tall));
    let lane = UNIT_POS_X as usize;
    let stride = comptime!(cut.stride()).runtime();
    #[unroll(cut.matrices)]
    for m in 0..comptime!(cut.tall) {
        if comptime!(cut.matrices) {
            let product = MmaDefinition::<E, E, f32>::new(16usize, 8usize, 16usize);
            let (row, of_eight) = left_address(lane);
            let at = ((first + 16 * m + row) * stride + column + of_eight) / N::value();
            let pairs =
                product.load_matrix::<Vector<E, N>, Two>(&rows.slice(at, at + 1), MatrixIdent::A, 4usize, false);
            #[unroll]
            for i in 0..4usize {
                operand[4 * m + i] = pairs[i];
            }
        } else {
            for i in 0..4usize {
                let at = (first + 16 * m + left_row(lane / 4, i)) * stride + column + left_column(lane % 4, i);
                operand[4 * m + i] = pair::<E>(rows[at][0], rows[at + 1][0]);
            }
        }
    }
    operand
}

/// Adds to the sums of `tiles` horizontally adjacent tiles, an even number, the products of a plane's left operand with right operands in
/// shared memory. The operands' columns are its rows from `row` on, with a depth of 16 elements from `column`. With `across`, the depth is
/// 16 rows from `row`, and the columns are those from `column`.
///
/// All units of the cube must call this together.
#[cube]
pub(super) fn multiply<E: Float, N: Size>(
    sums: &mut Array<Vector<f32, Two>>,
    operand: &Array<Vector<E, Two>>,
    rows: &SharedMemory<Vector<E, N>>,
    row: usize,
    column: usize,
    exchange: &mut SharedMemory<f32>,
    #[comptime] tiles: usize,
    #[comptime] across: bool,
    #[comptime] cut: Cut,
) {
    let lane = UNIT_POS_X as usize;
    let stride = comptime!(cut.stride()).runtime();
    if comptime!(cut.matrices) {
        let product = MmaDefinition::<E, E, f32>::new(16usize, 8usize, 16usize);
        let (of_row, of_column) = right_address(lane, across);
        #[unroll]
        for n in 0..comptime!(tiles / 2) {
            let (mut row, mut column) = (row + of_row, column + of_column);
            if comptime!(across) {
                column += 16 * n;
            } else {
                row += 16 * n;
            }
            let at = (row * stride + column) / N::value();
            let pairs =
                product.load_matrix::<Vector<E, N>, Two>(&rows.slice(at, at + 1), MatrixIdent::B, 4usize, across);
            #[unroll]
            for half in 0..2usize {
                let mut right = Array::<Vector<E, Two>>::new(2usize);
                right[0] = pairs[2 * half];
                right[1] = pairs[2 * half + 1];
                #[unroll]
                for m in 0..comptime!(cut.tall) {
                    let mut left = Array::<Vector<E, Two>>::new(4usize);
                    #[unroll]
                    for i in 0..4usize {
                        left[i] = operand[4 * m + i];
                    }
                    let at = 2 * (m * tiles + 2 * n + half);
                    let mut tile = Array::<Vector<f32, Two>>::new(2usize);
                    tile[0] = sums[at];
                    tile[1] = sums[at + 1];
                    product.execute_inplace(&left, &right, &mut tile);
                    sums[at] = tile[0];
                    sums[at + 1] = tile[1];
                }
            }
        }
    } else {
        let (g, p) = (lane / 4, lane % 4);
        let of_plane = UNIT_POS_Y as usize * 256;
        for m in 0..comptime!(cut.tall) {
            sync_cube();
            for i in 0..4usize {
                let at = of_plane + left_row(g, i) * 16 + left_column(p, i);
                let both = operand[4 * m + i];
                exchange[at] = f32::cast_from(both[0]);
                exchange[at + 1] = f32::cast_from(both[1]);
            }
            sync_cube();
            for n in 0..comptime!(tiles) {
                for i in 0..2usize {
                    let of_left = of_plane + (g + 8 * i) * 16;
                    let of_sums = 8 * n + 2 * p;
                    let mut both = sums[2 * (m * tiles + n) + i];
                    for k in 0..16usize {
                        let left = exchange[of_left + k];
                        // The two columns' elements are adjacent, or a row apart.
                        let mut at = (row + of_sums) * stride + column + k;
                        let mut next = at + stride;
                        if comptime!(across) {
                            at = (row + k) * stride + column + of_sums;
                            next = at + 1;
                        }
                        both += pair::<f32>(left * f32::cast_from(rows[at][0]), left * f32::cast_from(rows[next][0]));
                    }
                    sums[2 * (m * tiles + n) + i] = both;
                }
            }
        }
    }
}

/// Returns the left operand that consists of the rounded sums of tiles `2 j` and `2 j + 1` of `tiles`.
#[cube]
pub(super) fn rounded<E: Float>(
    sums: &Array<Vector<f32, Two>>,
    j: usize,
    #[comptime] tiles: usize,
    #[comptime] cut: Cut,
) -> Array<Vector<E, Two>> {
    let mut operand = Array::<Vector<E, Two>>::new(comptime!(4 * cut.tall));
    #[unroll(cut.matrices)]
    for m in 0..comptime!(cut.tall) {
        #[unroll(cut.matrices)]
        for i in 0..4usize {
            operand[4 * m + i] = Vector::cast_from(sums[2 * (m * tiles + 2 * j + i / 2) + i % 2]);
        }
    }
    operand
}

/// Returns, in each of the four units that hold a row, their largest value (or their sum). All units of the cube must call this together.
#[cube]
pub(super) fn over_row(
    value: f32,
    exchange: &mut SharedMemory<f32>,
    #[comptime] largest: bool,
    #[comptime] cut: Cut,
) -> f32 {
    let mut all = value;
    if comptime!(cut.matrices) {
        #[unroll]
        for i in 0..2u32 {
            let other = plane_shuffle_xor(all, 1 + i);
            if comptime!(largest) {
                all = max(all, other);
            } else {
                all += other;
            }
        }
    } else {
        sync_cube();
        exchange[UNIT_POS as usize] = value;
        sync_cube();
        for i in 0..3u32 {
            let other = exchange[(UNIT_POS ^ (1 + i)) as usize];
            if comptime!(largest) {
                all = max(all, other);
            } else {
                all += other;
            }
        }
    }
    all
}
