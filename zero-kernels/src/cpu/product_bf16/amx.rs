//! The kernel of `tdpbf16ps` (Intel AMX): four tiles of sums, two of rows and two of columns.
//!
//! The intrinsics are not stable, so the instructions are written in assembly. Intel's Software Developer's Manual, volume
//! 2, defines them under their names; a test runs [`Tiles`] with the same layout that emulate them.

use std::arch::asm;
use std::arch::x86_64::__cpuid_count;
use std::sync::OnceLock;

use pulp::NullaryFnOnce;

use super::MatrixBf16;
use super::avx512::Avx512;
use super::blocks::{Strip, Tiles};
use super::pack::run_in_avx512;

/// Rows and columns of the result: two tiles in each direction.
pub(super) const SIDE: usize = 32;
/// Pairs in depth per tile.
pub(super) const PAIRS: usize = 16;

/// Permission to use the kernel; only [`Amx::detect`] grants it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Amx(());

/// The tile configuration: 16 rows of 64 bytes per tile.
#[repr(C, align(64))]
struct Form {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    bytes_of_row: [u16; 16],
    rows: [u8; 16],
}

static FORM: Form = {
    let (mut bytes_of_row, mut rows, mut tile) = ([0; 16], [0; 16], 0);
    while tile < 8 {
        (bytes_of_row[tile], rows[tile]) = (64, 16);
        tile += 1;
    }
    Form { palette: 1, start_row: 0, reserved: [0; 14], bytes_of_row, rows }
};

/// A thread's tiles, released on drop: the system then need not save them when it switches threads.
struct Begun;

impl Drop for Begun {
    fn drop(&mut self) {
        // SAFETY: this thread has tiles (`Tiles::begin`), which nothing uses after this.
        unsafe { asm!("tilerelease", options(nomem, nostack, preserves_flags)) };
    }
}

impl Amx {
    /// Returns the kernel if this CPU has its instructions, the system lets this process use them, and they give the right result.
    pub(super) fn detect() -> Option<Self> {
        static FOUND: OnceLock<Option<Amx>> = OnceLock::new();
        *FOUND.get_or_init(|| {
            (Avx512::<48>::detect().is_some() && has_tiles() && is_permitted() && Self(()).is_right())
                .then_some(Self(()))
        })
    }

    /// Returns whether a small product, whose sums are exact, is right.
    fn is_right(self) -> bool {
        let number = |at: usize, of: usize| half::bf16::from_f32((at * of % 11) as f32 - 5.0);
        let a: Vec<_> = (0..SIDE * 4 * PAIRS).map(|at| number(at, 3)).collect();
        let b: Vec<_> = (0..SIDE * 4 * PAIRS).map(|at| number(at, 7)).collect();
        let depth = 4 * PAIRS;
        let (rows, columns) = (MatrixBf16::new(&a, SIDE, depth), MatrixBf16::new(&b, SIDE, depth));
        let mut packed = [(); 2].map(|()| vec![0; SIDE * depth / 2]);
        for (from, is_rows) in [(rows, true), (columns, false)] {
            let strip = Strip { from, is_rows, lines: 0..SIDE, depth: 0..depth, pairs: depth / 2 };
            self.pack(strip, &mut packed[usize::from(!is_rows)]);
        }
        let mut sums = [[0f32; SIDE]; SIDE];
        {
            let _begun = self.begin();
            // SAFETY: begun above.
            unsafe { self.multiply(&packed[0], &packed[1], &mut sums, false) };
        }
        let line =
            |of: &'_ [half::bf16], at: usize| of[at * depth..][..depth].iter().map(|x| x.to_f32()).collect::<Vec<_>>();
        (0..SIDE * SIDE).all(|at| {
            let (a, b) = (line(&a, at / SIDE), line(&b, at % SIDE));
            sums[at / SIDE][at % SIDE] == a.iter().zip(&b).map(|(a, b)| a * b).sum::<f32>()
        })
    }
}

/// Returns whether the CPU has tiles and their bfloat16 products, and the system saves them when it switches threads.
fn has_tiles() -> bool {
    const BF16: u32 = 1 << 22;
    const TILE: u32 = 1 << 24;
    const TILE_STATE: u32 = 0b11 << 17;
    // Leaf 7 exists where AVX-512 does.
    let features = __cpuid_count(7, 0).edx;
    let kept: u32;
    // SAFETY: XCR0 may be read where AVX-512 can be used.
    unsafe { asm!("xgetbv", in("ecx") 0, out("eax") kept, out("edx") _, options(nomem, nostack, preserves_flags)) };
    features & (BF16 | TILE) == BF16 | TILE && kept & TILE_STATE == TILE_STATE
}

/// Asks the system for permission to use tiles: <https://docs.kernel.org/arch/x86/xstate.html>.
#[cfg(target_os = "linux")]
fn is_permitted() -> bool {
    const ARCH_REQ_XCOMP_PERM: libc::c_long = 0x1023;
    const XFEATURE_XTILEDATA: libc::c_long = 18;
    // SAFETY: the call gives this process the permission, and changes nothing else.
    unsafe { libc::syscall(libc::SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0 }
}

#[cfg(not(target_os = "linux"))]
fn is_permitted() -> bool {
    false
}

// SAFETY: `detect` creates one only where the CPU has the instructions.
unsafe impl Tiles<SIDE, SIDE> for Amx {
    const UNIT: usize = PAIRS;
    // A panel of rows and one of columns, of 16 KiB each, fit a first-level cache with the sums.
    const AT_ONCE: usize = 8 * PAIRS;

    fn run(self, work: impl NullaryFnOnce<Output = ()>) {
        // SAFETY: an `Amx` exists only where the CPU has the features.
        unsafe { run_in_avx512(work) };
    }

    fn pack(self, strip: Strip<'_>, to: &mut [u32]) {
        let Strip { from, is_rows, lines, depth, pairs } = strip;
        // SAFETY: an `Amx` exists only where the CPU has the features.
        unsafe {
            match is_rows {
                true => from.pack::<SIDE, true>(lines, depth, pairs, to),
                false => from.pack::<SIDE, false>(lines, depth, pairs, to),
            }
        }
    }

    fn begin(self) -> impl Sized {
        // SAFETY: the form is 64 bytes that the CPU knows; an `Amx` exists only where it may be used.
        unsafe { asm!("ldtilecfg [{}]", in(reg) &raw const FORM, options(readonly, nostack, preserves_flags)) };
        Begun
    }

    #[inline(always)]
    unsafe fn multiply(self, a: &[u32], b: &[u32], sums: &mut [[f32; SIDE]; SIDE], add: bool) {
        // Both panels consist of consecutive squares of `SIDE` lines and `PAIRS` pairs.
        let steps = a.len() / (SIDE * PAIRS);
        assert!(a.len() == b.len() && a.len().is_multiple_of(SIDE * PAIRS), "panels of whole tiles");
        // SAFETY: `steps` squares are read of each panel, and the sums are written, all as large as the tiles say. The
        // caller guarantees that this thread has tiles of that form and uses them for nothing else.
        unsafe {
            asm!(
                "test {add:e}, {add:e}",
                "jnz 4f",
                "tilezero tmm0",
                "tilezero tmm1",
                "tilezero tmm2",
                "tilezero tmm3",
                "jmp 5f",
                "4:",
                "tileloadd tmm0, [{sums} + {pair}]",
                "tileloadd tmm1, [{sums} + {pair} + 64]",
                "tileloadd tmm2, [{sums} + {pair} + 2048]",
                "tileloadd tmm3, [{sums} + {pair} + 2112]",
                "5:",
                "test {steps}, {steps}",
                "jz 3f",
                "2:",
                // Rows: 16 lines of 64 bytes, twice. Columns: 16 pairs of 32 columns, 64 bytes of each for a tile. Each
                // multiplication runs as soon as its operands are loaded: loading the next tile takes as long.
                "tileloadd tmm4, [{a} + {row}]",
                "tileloadd tmm6, [{b} + {pair}]",
                "tdpbf16ps tmm0, tmm4, tmm6",
                "tileloadd tmm5, [{a} + {row} + 1024]",
                "tdpbf16ps tmm2, tmm5, tmm6",
                "tileloadd tmm7, [{b} + {pair} + 64]",
                "tdpbf16ps tmm1, tmm4, tmm7",
                "tdpbf16ps tmm3, tmm5, tmm7",
                "add {a}, 2048",
                "add {b}, 2048",
                "dec {steps}",
                "jnz 2b",
                "3:",
                "tilestored [{sums} + {pair}], tmm0",
                "tilestored [{sums} + {pair} + 64], tmm1",
                "tilestored [{sums} + {pair} + 2048], tmm2",
                "tilestored [{sums} + {pair} + 2112], tmm3",
                a = inout(reg) a.as_ptr() => _,
                b = inout(reg) b.as_ptr() => _,
                steps = inout(reg) steps => _,
                sums = in(reg) sums.as_mut_ptr(),
                add = in(reg) u32::from(add),
                row = in(reg) 64usize,
                pair = in(reg) 128usize,
                out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                options(nostack),
            );
        }
    }
}
