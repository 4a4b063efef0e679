//! Products of tiles of 16 rows, 8 columns and 16 of what is summed over: by the instruction `mma` of NVIDIA's matrix units, or by
//! plain loops that hold every number in the same unit and the same place, so that the kernels above are tested without such units.
//!
//! A plane of 32 units takes `tall` tiles above one another. In a tile, unit `4 g + p` holds, in pairs of neighbours:
//! - of a left operand (16 x 16) the columns `2 p` and `2 p + 8` of row `g`, then of row `g + 8`, in the order of
//!   [`left_row`] and [`left_column`];
//! - of sums (16 x 8) the columns `2 p` of row `g` and of row `g + 8`.
//!
//! So the sums of two neighbouring tiles, rounded, are a left operand, without a move. Right operands are read from the cube's
//! memory as they are used. The layout is that of <https://docs.nvidia.com/cuda/parallel-thread-execution/>, "Matrix Fragments for
//! mma.m16n8k16 with floating point type" and "ldmatrix".

use cubecl::cmma::{MatrixIdent, MmaDefinition};
use cubecl::prelude::*;

/// A pair of neighbours of a row.
pub(super) type Two = Const<2>;

/// Units of a plane.
pub(super) const PLANE: u32 = 32;

/// Elements between two rows in the cube's memory beyond a row's own: eight rows of a tile then lie in different banks.
const APART: usize = 8;

/// How a kernel is cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Cut {
    /// Width of a head, a multiple of 16.
    pub e: usize,
    /// Planes of a cube.
    pub planes: usize,
    /// Tiles that a plane has above one another.
    pub tall: usize,
    /// Rows of the other side that a cube takes at a time, a multiple of 16.
    pub others: usize,
    /// Whether matrix units multiply.
    pub matrices: bool,
}

impl Cut {
    /// Rows of a plane.
    pub fn of_plane(self) -> usize {
        16 * self.tall
    }

    /// Rows of a cube.
    pub fn rows(self) -> usize {
        self.planes * self.of_plane()
    }

    /// Elements from row to row in the cube's memory.
    pub fn stride(self) -> usize {
        self.e + APART
    }

    /// What `rows` rows take of the cube's memory, in elements.
    pub fn memory(self, rows: usize) -> usize {
        rows * self.stride()
    }

    /// Numbers that units exchange where there are no matrix units.
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

/// The row of a left operand's pair `i` of 4, of those of the units `4 g + ...`.
#[cube]
pub(super) fn left_row(g: usize, i: usize) -> usize {
    g + 8 * (i % 2)
}

/// The column where a left operand's pair `i` of 4 begins, of those of the units `... + p`.
#[cube]
pub(super) fn left_column(p: usize, i: usize) -> usize {
    2 * p + 8 * (i / 2)
}

/// The row and the column, in a left operand, of the 8 elements whose address unit `lane` gives to `ldmatrix`.
#[cube]
pub(super) fn left_address(lane: usize) -> (usize, usize) {
    (lane % 16, lane / 16 * 8)
}

/// The same in the right operands of two neighbouring tiles, 16 rows of columns or (`across`) of what is summed over.
#[cube]
pub(super) fn right_address(lane: usize, #[comptime] across: bool) -> (usize, usize) {
    if comptime!(across) { (lane % 16, lane / 16 * 8) } else { (lane / 16 * 8 + lane % 8, lane / 8 % 2 * 8) }
}

/// Two numbers side by side.
#[cube]
pub(super) fn pair<E: Float>(first: E, second: E) -> Vector<E, Two> {
    let mut both = Vector::<E, Two>::empty();
    both[0] = first;
    both[1] = second;
    both
}

/// Sums of `tiles` tiles beside one another, all 0: pair `i` of 2 of tile `n` of the `m`th row of tiles is at
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

/// Copies `count` rows of a head to the cube's memory, those from `first`, with zeros where there are no rows.
///
/// `at`: where row 0 begins, `stride`: from row to row, in vectors; `t`: how many there are.
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
        // With matrix units the rows' vectors are a multiple of the units.
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

/// The left operand of a plane's tiles from the cube's memory, where its rows begin at `first`: 16 columns from `column`. Pair `i` of
/// the `m`th tile is at `4 m + i`.
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

/// Adds to the sums of `tiles` tiles beside one another, an even number, the products of a plane's left operand with right
/// operands in the cube's memory: their columns are rows of it, from `row` on, of which 16 elements from `column`; or (`across`)
/// 16 rows from `row` are what is summed over, and their columns are those from `column`.
///
/// All units of the cube come here together.
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
                        // The two columns' elements lie side by side, or a row apart.
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

/// The left operand that sums are, rounded: of the tiles `2 j` and `2 j + 1` of `tiles`.
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

/// The largest of the four units that hold a row (or their sum), in each of them. All units of the cube come here together.
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
