//! Memory and compute of a model.

use zero_kernels::Rule;
use zero_models::{ModelConfig, ModelParam};

/// Properties of a model that a plan needs.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Profile {
    /// Sizes of the trained parameters, in elements.
    pub parameters: Vec<usize>,
    /// Number of elements of the trained matrices that Muon updates by itself ([`Rule::of`]).
    pub matrices: usize,
    /// Sizes of the frozen parameters, which have no gradient and no optimizer state and take no part in reductions.
    pub frozen: Vec<usize>,
    /// Elements and bytes of the frozen parameters that are held in 8 or 4 bit.
    pub quantized: Vec<[usize; 2]>,
    /// Activations that a micro-batch keeps for its backward pass.
    pub activations: Activations,
    /// Floating-point operations of a row, forward and backward.
    pub flops_per_row: f64,
}

/// Bytes kept for the backward pass of a micro-batch, in fp32.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Activations {
    /// Number of blocks that can be checkpointed ([`zero_ops::checkpoint_block`]).
    pub blocks: usize,
    /// Bytes that a block keeps, including its input.
    pub block: u64,
    /// Bytes of a block's input, which is all that a checkpointed block keeps.
    pub input: u64,
    /// Bytes that are kept outside of blocks, including the largest temporary.
    pub rest: u64,
}

impl Activations {
    /// Returns the peak bytes if the first `checkpointed` blocks are checkpointed: at the end of the forward pass, or when the
    /// last of them has been recomputed. Of offloaded inputs the first block's stays; the last's is present together with
    /// the one before it.
    pub fn bytes(&self, checkpointed: usize, is_offloaded: bool) -> u64 {
        let checkpointed = checkpointed.min(self.blocks);
        let inputs = |here: usize| if is_offloaded { checkpointed.min(here) } else { checkpointed } as u64 * self.input;
        let kept = (self.blocks - checkpointed) as u64 * self.block;
        let again = if checkpointed == 0 { 0 } else { self.block - self.input };
        self.rest + (inputs(1) + kept).max(inputs(3) + again)
    }

    /// Returns the bytes of inputs that are offloaded at the end of the forward pass.
    pub fn offloaded(&self, checkpointed: usize) -> u64 {
        checkpointed.min(self.blocks).saturating_sub(1) as u64 * self.input
    }

    /// Returns the fewest blocks to checkpoint so that the peak is at most `bytes`.
    pub fn fewest(&self, bytes: u64, is_offloaded: bool) -> Option<usize> {
        (0..=self.blocks).find(|&checkpointed| self.bytes(checkpointed, is_offloaded) <= bytes)
    }
}

/// Returns the number of elements of those parameters, given by path and shape, that Muon updates by itself.
pub(crate) fn matrices<'a>(parameters: impl Iterator<Item = (&'a str, &'a [usize])>) -> usize {
    let muon = Rule::muon();
    parameters
        .filter(|(path, shape)| muon.of(path, shape).0 == muon)
        .map(|(_, shape)| shape.iter().product::<usize>())
        .sum()
}

impl Profile {
    /// Creates the profile of a model with all parameters trained.
    pub fn of_all(model: &ModelConfig, activations: Activations, flops_per_row: f64) -> Self {
        let parameters = model.parameters();
        let matrices = matrices(parameters.iter().map(|param| (&*param.path, &*param.shape)));
        let parameters = parameters.iter().map(ModelParam::numel).collect();
        Self { parameters, matrices, frozen: Vec::new(), quantized: Vec::new(), activations, flops_per_row }
    }

    /// Returns the number of elements of all parameters.
    pub fn num_params(&self) -> usize {
        self.all().sum()
    }

    /// Returns the number of elements of the trained parameters.
    pub fn num_trained(&self) -> usize {
        self.parameters.iter().sum()
    }

    /// Returns the bytes of the frozen parameters whose number of elements `is_meant` selects. `bytes` gives the bytes of a
    /// parameter that is not quantised.
    pub(super) fn frozen_bytes(&self, bytes: impl Fn(usize) -> usize, is_meant: impl Fn(usize) -> bool) -> u64 {
        // Sharding and gathering treat quantised rows as 16-bit numbers.
        let quantized = self.quantized.iter().filter(|[_, bytes]| is_meant(bytes / 2)).map(|[_, bytes]| bytes);
        let whole = self.frozen.iter().filter(|elements| is_meant(**elements)).map(|&elements| bytes(elements));
        (whole.sum::<usize>() + quantized.sum::<usize>()) as u64
    }

    fn all(&self) -> impl Iterator<Item = usize> {
        self.parameters.iter().chain(&self.frozen).copied().chain(self.quantized.iter().map(|[elements, _]| *elements))
    }

    /// Returns the number of elements of the largest parameter.
    pub fn largest(&self) -> usize {
        self.all().max().unwrap_or(0)
    }
}
