//! What a model takes.

use zero_models::{ModelConfig, ModelParam};

/// What a plan needs to know of a model.
#[derive(Debug, Clone, PartialEq)]
pub struct Profile {
    /// Sizes of the parameters that are trained, in elements.
    pub parameters: Vec<usize>,
    /// Sizes of those that are frozen: they have no gradient, no optimizer state, and no place in reductions.
    pub frozen: Vec<usize>,
    /// Elements and bytes of frozen ones that are held in 8 or 4 bit.
    pub quantized: Vec<[usize; 2]>,
    /// What a micro-batch keeps for its backward pass.
    pub activations: Activations,
    /// Floating-point operations of a row, forward and backward.
    pub flops_per_row: f64,
}

/// Bytes that are kept for the backward pass of a micro-batch, in fp32.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Activations {
    /// Blocks that can be checkpointed ([`zero_ops::checkpoint_block`]).
    pub blocks: usize,
    /// What a block keeps, its input included.
    pub block: u64,
    /// A block's input: what it keeps if it is checkpointed.
    pub input: u64,
    /// What is kept besides, with the largest of what is made on the way.
    pub rest: u64,
}

impl Activations {
    /// The most that is there at once if so many of the first blocks are checkpointed: at the end of the forward pass, or when the
    /// last block has been computed again. Of inputs that are offloaded the first block's stays; with the last's, the one before it is
    /// there.
    pub fn bytes(&self, checkpointed: usize, is_offloaded: bool) -> u64 {
        let checkpointed = checkpointed.min(self.blocks);
        let inputs = |here: usize| if is_offloaded { checkpointed.min(here) } else { checkpointed } as u64 * self.input;
        let kept = (self.blocks - checkpointed) as u64 * self.block;
        let again = if checkpointed == 0 { 0 } else { self.block - self.input };
        self.rest + (inputs(1) + kept).max(inputs(3) + again)
    }

    /// Bytes of inputs that are elsewhere at the end of the forward pass.
    pub fn offloaded(&self, checkpointed: usize) -> u64 {
        checkpointed.min(self.blocks).saturating_sub(1) as u64 * self.input
    }

    /// The fewest blocks to checkpoint so that no more than `bytes` are there at once.
    pub fn fewest(&self, bytes: u64, is_offloaded: bool) -> Option<usize> {
        (0..=self.blocks).find(|&checkpointed| self.bytes(checkpointed, is_offloaded) <= bytes)
    }
}

impl Profile {
    /// Of a model that is trained whole.
    pub fn of_all(model: &ModelConfig, activations: Activations, flops_per_row: f64) -> Self {
        let parameters = model.parameters().iter().map(ModelParam::numel).collect();
        Self { parameters, frozen: Vec::new(), quantized: Vec::new(), activations, flops_per_row }
    }

    /// Elements of all parameters.
    pub fn num_params(&self) -> usize {
        self.all().sum()
    }

    /// Elements of the parameters that are trained.
    pub fn num_trained(&self) -> usize {
        self.parameters.iter().sum()
    }

    /// Bytes of the frozen parameters of which `is_meant` says so, by their elements, where `bytes` gives those of so many elements that are
    /// not quantised already.
    pub(super) fn frozen_bytes(&self, bytes: impl Fn(usize) -> usize, is_meant: impl Fn(usize) -> bool) -> u64 {
        // Quantised rows are numbers of 16 bit to what shards and gathers them.
        let quantized = self.quantized.iter().filter(|[_, bytes]| is_meant(bytes / 2)).map(|[_, bytes]| bytes);
        let whole = self.frozen.iter().filter(|elements| is_meant(**elements)).map(|&elements| bytes(elements));
        (whole.sum::<usize>() + quantized.sum::<usize>()) as u64
    }

    fn all(&self) -> impl Iterator<Item = usize> {
        self.parameters.iter().chain(&self.frozen).copied().chain(self.quantized.iter().map(|[elements, _]| *elements))
    }

    /// Elements of the largest parameter.
    pub fn largest(&self) -> usize {
        self.all().max().unwrap_or(0)
    }
}
