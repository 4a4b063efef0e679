//! What a model takes.

/// What a plan needs to know of a model.
#[derive(Debug, Clone, PartialEq)]
pub struct Profile {
    /// Sizes of the parameters that are trained, in elements.
    pub parameters: Vec<usize>,
    /// Sizes of those that are frozen: they have no gradient, no optimizer state, and no place in reductions.
    pub frozen: Vec<usize>,
    /// Bytes that are kept for the backward pass of a micro-batch, in fp32, with the largest of what is made on the way.
    pub activation_bytes: u64,
    /// Floating-point operations of a row, forward and backward.
    pub flops_per_row: f64,
}

impl Profile {
    /// Elements of all parameters.
    pub fn num_params(&self) -> usize {
        self.all().sum()
    }

    /// Elements of the parameters that are trained.
    pub fn num_trained(&self) -> usize {
        self.parameters.iter().sum()
    }

    fn all(&self) -> impl Iterator<Item = usize> {
        self.parameters.iter().chain(&self.frozen).copied()
    }

    /// Elements of the largest parameter.
    pub fn largest(&self) -> usize {
        self.all().max().unwrap_or(0)
    }
}
