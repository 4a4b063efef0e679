//! Combined outputs of all ranks, so that a metric on rank 0 is the metric of the global batch.

use burn::tensor::backend::Backend;
use burn::tensor::{BasicOps, Int, Tensor, TensorData};
use burn::train::{ClassificationOutput, MultiLabelClassificationOutput, RegressionOutput, SequenceOutput};
use zero_burn::module::ZeroAutodiff;
use zero_burn::stats::all_gather;
use zero_core::collective::threads::Stopped;

/// An output of a training or validation step that can be combined across ranks.
///
/// Implemented for Burn's outputs, which are gathered in full, in rank order. Metrics are then exactly those of the global
/// batch, at a cost of 8 bytes per number of every output on every rank. For a large output, such as the logits of a
/// language model, write your own output with only what its metrics need:
///
/// ```
/// use burn::tensor::{Tensor, backend::Backend};
/// use burn::train::ItemLazy;
/// use zero_train::learner::{AcrossRanks, Ranks};
///
/// struct Loss {
///     mean: f64,
///     rows: usize,
/// }
///
/// impl ItemLazy for Loss {
///     type ItemSync = Self;
///     fn sync(self) -> Self {
///         self
///     }
/// }
///
/// impl AcrossRanks for Loss {
///     fn across_ranks(local: Option<Self>, ranks: &Ranks) -> Self {
///         let (sum, rows) = local.map_or((0.0, 0.0), |local| (local.mean * local.rows as f64, local.rows as f64));
///         let all = ranks.all_gather(&[sum, rows]);
///         let rows: f64 = all.iter().map(|rank| rank[1]).sum();
///         Self { mean: all.iter().map(|rank| rank[0]).sum::<f64>() / rows, rows: rows as usize }
///     }
/// }
/// ```
pub trait AcrossRanks: Sized {
    /// Returns the output of all ranks' batches, given this rank's, or `None` if it had no batch. A collective, on the
    /// rank's thread: ranks make the same calls of `ranks`. At least one rank has a batch. The result is used on rank 0.
    fn across_ranks(local: Option<Self>, ranks: &Ranks) -> Self;
}

/// The ranks of the launch, as seen from one of them.
#[derive(Clone, Copy)]
pub struct Ranks {
    rank: usize,
    world: usize,
    gather: fn(&[f64]) -> Vec<Vec<f64>>,
}

impl Ranks {
    /// Creates this rank's view of the launch. A collective operation.
    pub(super) fn new<A: ZeroAutodiff>(rank: usize) -> Self {
        let gather = all_gather::<A::Base>;
        Self { rank, world: gather(&[0.0]).len(), gather }
    }

    /// Returns this rank.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// Returns the number of ranks.
    pub fn world(&self) -> usize {
        self.world
    }

    /// Gathers every rank's `values`, equally many, in rank order.
    pub fn all_gather(&self, values: &[f64]) -> Vec<Vec<f64>> {
        (self.gather)(values)
    }

    /// Gathers every rank's `values`, of any number, in rank order.
    pub fn all_lists(&self, mut values: Vec<f64>) -> Vec<Vec<f64>> {
        if self.world == 1 {
            return vec![values];
        }
        let lens = self.all_gather(&[values.len() as f64]);
        let longest = lens.iter().map(|len| len[0] as usize).max().unwrap_or(0);
        if longest == 0 {
            return vec![Vec::new(); self.world];
        }
        values.resize(longest, 0.0);
        let mut all = self.all_gather(&values);
        for (values, len) in all.iter_mut().zip(lens) {
            values.truncate(len[0] as usize);
        }
        all
    }

    /// Concatenates the ranks' tensors along the first dimension, in rank order, on every rank.
    pub fn rows<B: Backend, const D: usize, K: BasicOps<B>>(&self, local: Option<Tensor<B, D, K>>) -> Tensor<B, D, K> {
        let local = match local {
            Some(tensor) if self.world == 1 => return tensor,
            local => local.map(Tensor::into_data),
        };
        let dims = local.as_ref().map_or(Vec::new(), |data| data.shape.iter().map(|&dim| dim as f64).collect());
        let dims = self.all_lists(dims);
        let all = self.all_lists(local.map_or(Vec::new(), |data| data.iter::<f64>().collect()));
        let mut shape = [0; D];
        for dims in dims.iter().filter(|dims| !dims.is_empty()) {
            let rows = shape[0] + dims[0] as usize;
            shape.iter_mut().zip(dims).for_each(|(dim, &of_rank)| *dim = of_rank as usize);
            shape[0] = rows;
        }
        // The thread's rank on the default device of the backend.
        Tensor::from_data(TensorData::new(all.concat(), shape), &B::Device::default())
    }

    /// Combines the ranks' losses. Scalar losses, means over `rows` rows each, give the mean over all rows; losses per row
    /// are concatenated.
    pub fn loss<B: Backend>(&self, local: Option<(Tensor<B, 1>, usize)>) -> Tensor<B, 1> {
        let (values, rows) = match local {
            Some((loss, _)) if self.world == 1 => return loss,
            Some((loss, rows)) => (loss.into_data().iter::<f64>().collect(), rows),
            None => (Vec::new(), 0),
        };
        let rows = self.all_gather(&[rows as f64]);
        let all = self.all_lists(values);
        let joined = if all.iter().all(|values| values.len() <= 1) {
            let sum: f64 = all.iter().zip(&rows).filter_map(|(values, rows)| Some(values.first()? * rows[0])).sum();
            vec![sum / rows.iter().map(|rows| rows[0]).sum::<f64>()]
        } else {
            all.concat()
        };
        let len = joined.len();
        Tensor::from_data(TensorData::new(joined, [len]), &B::Device::default())
    }

    /// Returns rank 0's decision on every rank. `ask` is called only on rank 0.
    pub(super) fn decide(&self, ask: impl FnOnce() -> bool) -> bool {
        let mine = f64::from(u8::from(self.rank == 0 && ask()));
        self.all_gather(&[mine])[0][0] > 0.0
    }

    /// Ends the rank, and with it the launch, whose error is `message`: Burn's interfaces return no errors.
    pub(super) fn stop(&self, message: impl Into<String>) -> ! {
        match self.world {
            // Perhaps outside of a launch, where nobody else would tell.
            1 => panic!("{}", message.into()),
            _ => std::panic::resume_unwind(Box::new(Stopped(message.into()))),
        }
    }
}

impl AcrossRanks for () {
    fn across_ranks(_local: Option<Self>, _ranks: &Ranks) -> Self {}
}

macro_rules! outputs_with_targets {
    ($($output:ident),*) => {$(
        impl<B: Backend> AcrossRanks for $output<B> {
            fn across_ranks(local: Option<Self>, ranks: &Ranks) -> Self {
                let (loss, output, targets) = match local {
                    Some(Self { loss, output, targets }) => (Some((loss, output.dims()[0])), Some(output), Some(targets)),
                    None => (None, None, None),
                };
                Self { loss: ranks.loss(loss), output: ranks.rows(output), targets: ranks.rows(targets) }
            }
        }
    )*};
}

outputs_with_targets!(RegressionOutput, ClassificationOutput, MultiLabelClassificationOutput);

/// Requires sequences of the same length on all ranks: pad them alike.
impl<B: Backend> AcrossRanks for SequenceOutput<B> {
    fn across_ranks(local: Option<Self>, ranks: &Ranks) -> Self {
        let (loss, logits, predictions, targets) = match local {
            Some(Self { loss, logits, predictions, targets }) => {
                (Some((loss, logits.dims()[0])), Some(logits), predictions, Some(targets))
            }
            None => (None, None, None, None),
        };
        let predicted = ranks.all_gather(&[f64::from(u8::from(predictions.is_some()))]);
        let predictions: Option<Tensor<B, 2, Int>> =
            predicted.iter().any(|rank| rank[0] > 0.0).then(|| ranks.rows(predictions));
        Self { loss: ranks.loss(loss), logits: ranks.rows(logits), predictions, targets: ranks.rows(targets) }
    }
}
