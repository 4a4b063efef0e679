//! global batch = micro-batch × accumulation × ranks, from whichever of the three the configuration gives.

pub(super) const GLOBAL: &str = "train_batch_size";
pub(super) const MICRO: &str = "train_micro_batch_size_per_gpu";
const ACCUMULATION: &str = "gradient_accumulation_steps";

/// The split of one optimizer step's rows; `global == micro * accumulation * world`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Batch {
    /// Rows of one optimizer step, over all ranks (`train_batch_size`).
    pub global: usize,
    /// Rows per rank and micro-batch (`train_micro_batch_size_per_gpu`).
    pub micro: usize,
    /// Micro-batches per optimizer step (`gradient_accumulation_steps`).
    pub accumulation: usize,
}

/// Batch sizes that do not fit together.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum BatchError {
    /// Neither the global nor the micro-batch size is known.
    #[error("no batch size: give {GLOBAL} or {MICRO}, or let the program supply Auto::micro_batch")]
    Unknown,
    /// The global batch cannot be split evenly.
    #[error("{GLOBAL} {global} cannot be split: {by} = {divisor}, and {global} / {divisor} leaves {}; {}",
        global % divisor, nearest(*global, *divisor))]
    Indivisible {
        /// Rows asked for in one step.
        global: usize,
        /// The divisor, in words and numbers.
        by: String,
        /// The divisor.
        divisor: usize,
    },
    /// All three are given, with another product.
    #[error(
        "{MICRO} {micro} × {ACCUMULATION} {accumulation} × {world} ranks = {product}, but {GLOBAL} is {global}; \
        set {GLOBAL} to {product} or remove one of the three"
    )]
    Contradiction {
        /// Rows asked for in one step.
        global: usize,
        /// Rows per rank and micro-batch.
        micro: usize,
        /// Micro-batches per step.
        accumulation: usize,
        /// Number of ranks.
        world: usize,
        /// Product of the other three.
        product: usize,
    },
    /// A product that overflows `usize`.
    #[error("{micro} rows × {accumulation} micro-batches × {world} ranks is too large; use smaller numbers")]
    Overflow {
        /// Rows per rank and micro-batch.
        micro: usize,
        /// Micro-batches per step.
        accumulation: usize,
        /// Number of ranks.
        world: usize,
    },
}

fn nearest(global: usize, divisor: usize) -> String {
    let below = global / divisor * divisor;
    match (below, below.checked_add(divisor)) {
        (0, _) => format!("set {GLOBAL} to at least {divisor} or use fewer ranks"),
        (below, Some(above)) => format!("set {GLOBAL} to {below} or {above}"),
        (below, None) => format!("set {GLOBAL} to {below}"),
    }
}

impl Batch {
    /// Derives missing sizes by DeepSpeed's rules: one missing size is computed; if two are missing, accumulation is 1.
    ///
    /// # Errors
    ///
    /// [`BatchError`]. Returns [`BatchError::Unknown`] if any number is 0.
    pub fn solve(
        global: Option<usize>,
        micro: Option<usize>,
        accumulation: Option<usize>,
        world: usize,
    ) -> Result<Self, BatchError> {
        if [global, micro, accumulation, Some(world)].contains(&Some(0)) {
            return Err(BatchError::Unknown);
        }
        let split = |global: usize, other: Option<(&str, usize)>| {
            let of_ranks = format!("{world} ranks");
            let (by, divisor) = match other {
                Some((name, value)) => (format!("{name} {value} × {of_ranks}"), value.checked_mul(world)),
                None => (of_ranks, Some(world)),
            };
            match divisor {
                Some(divisor) if global.is_multiple_of(divisor) => Ok(global / divisor),
                // A divisor that overflows is larger than any batch.
                divisor => Err(BatchError::Indivisible { global, by, divisor: divisor.unwrap_or(usize::MAX) }),
            }
        };
        let (micro, accumulation) = match (global, micro, accumulation) {
            (_, Some(micro), Some(accumulation)) => (micro, accumulation),
            (Some(global), Some(micro), None) => (micro, split(global, Some((MICRO, micro)))?),
            (Some(global), None, Some(accumulation)) => {
                (split(global, Some((ACCUMULATION, accumulation)))?, accumulation)
            }
            (Some(global), None, None) => (split(global, None)?, 1),
            (None, Some(micro), None) => (micro, 1),
            (None, None, _) => return Err(BatchError::Unknown),
        };
        let product = micro.checked_mul(accumulation).and_then(|rows| rows.checked_mul(world));
        let product = product.ok_or(BatchError::Overflow { micro, accumulation, world })?;
        match global {
            Some(global) if global != product => {
                Err(BatchError::Contradiction { global, micro, accumulation, world, product })
            }
            _ => Ok(Self { global: product, micro, accumulation }),
        }
    }

    /// Splits the same rows over another number of ranks. Picks the largest micro-batch, up to the current one, that
    /// divides the rows evenly. If `world` does not divide the rows, keeps the micro-batch size and rounds the rows up.
    pub fn on(self, world: usize) -> Self {
        let Self { global, micro, .. } = self;
        let micro = (1..=micro).rev().find(|micro| global.is_multiple_of(micro * world)).unwrap_or(micro);
        let accumulation = global.div_ceil(micro * world);
        Self { global: micro * accumulation * world, micro, accumulation }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn other_ranks_take_the_same_rows() {
        let on = |global, micro, world| {
            let Batch { global, micro, accumulation } = Batch { global, micro, accumulation: 1 }.on(world);
            (global, micro, accumulation)
        };
        assert_eq!(on(8, 2, 1), (8, 2, 4));
        assert_eq!(on(8, 2, 8), (8, 1, 1));
        assert_eq!(on(24, 4, 3), (24, 4, 2));
        assert_eq!(on(12, 4, 2), (12, 3, 2));
        assert_eq!(on(8, 2, 3), (12, 2, 2));
        assert_eq!(on(4, 2, 5), (10, 2, 1));
    }

    #[test]
    fn any_one_or_two_determine_the_rest() {
        let batch = |global, micro, accumulation| Batch { global, micro, accumulation };
        for (given, world, expected) in [
            ((None, Some(4), None), 2, batch(8, 4, 1)),
            ((None, Some(4), Some(3)), 2, batch(24, 4, 3)),
            ((Some(8), None, None), 2, batch(8, 4, 1)),
            ((Some(24), None, Some(3)), 2, batch(24, 4, 3)),
            ((Some(24), Some(4), None), 2, batch(24, 4, 3)),
            ((Some(24), Some(4), Some(3)), 2, batch(24, 4, 3)),
        ] {
            assert_eq!(Batch::solve(given.0, given.1, given.2, world), Ok(expected), "{given:?}");
        }
    }

    #[test]
    fn errors_print_the_arithmetic() {
        let message = |global, micro, accumulation, world| {
            Batch::solve(global, micro, accumulation, world).unwrap_err().to_string()
        };
        insta::assert_snapshot!(message(Some(10), Some(4), None, 2), @"train_batch_size 10 cannot be split: train_micro_batch_size_per_gpu 4 × 2 ranks = 8, and 10 / 8 leaves 2; set train_batch_size to 8 or 16");
        insta::assert_snapshot!(message(Some(3), None, None, 4), @"train_batch_size 3 cannot be split: 4 ranks = 4, and 3 / 4 leaves 3; set train_batch_size to at least 4 or use fewer ranks");
        insta::assert_snapshot!(message(Some(16), Some(2), Some(2), 2), @"train_micro_batch_size_per_gpu 2 × gradient_accumulation_steps 2 × 2 ranks = 8, but train_batch_size is 16; set train_batch_size to 8 or remove one of the three");
        insta::assert_snapshot!(message(None, None, Some(2), 2), @"no batch size: give train_batch_size or train_micro_batch_size_per_gpu, or let the program supply Auto::micro_batch");
        assert!(matches!(Batch::solve(None, Some(usize::MAX), Some(2), 1), Err(BatchError::Overflow { .. })));
        assert_eq!(Batch::solve(Some(8), Some(0), None, 1), Err(BatchError::Unknown));
    }

    proptest! {
        #[test]
        fn a_solution_satisfies_the_equation(
            global in proptest::option::of(any::<usize>()),
            micro in proptest::option::of(any::<usize>()),
            accumulation in proptest::option::of(0_usize..9),
            world in 0_usize..9,
        ) {
            if let Ok(batch) = Batch::solve(global, micro, accumulation, world) {
                prop_assert_eq!(batch.micro * batch.accumulation * world, batch.global);
                prop_assert!(batch.global > 0);
                prop_assert_eq!(global.unwrap_or(batch.global), batch.global);
                prop_assert_eq!(micro.unwrap_or(batch.micro), batch.micro);
                prop_assert_eq!(accumulation.unwrap_or(batch.accumulation), batch.accumulation);
            }
        }
    }
}
