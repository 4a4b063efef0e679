//! Update rules of optimizers, and the state of each.

use serde::{Deserialize, Serialize};

/// A rule that updates a parameter by its gradient.
///
/// Below, `lr` is the learning rate of the step, `g` the gradient, `p` the parameter and `t` the number of the step, from 1.
/// [`Rule::adamw`] and the like have PyTorch's defaults. Serialized, a rule is DeepSpeed's section `optimizer`, except for the betas.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", content = "params")]
pub enum Rule {
    /// `m = beta_1 m + (1 - beta_1) g`, `v = beta_2 v + (1 - beta_2) g^2`,
    /// `p = p (1 - lr weight_decay) - lr (m / (1 - beta_1^t)) / (sqrt(v / (1 - beta_2^t)) + epsilon)`: *Decoupled Weight
    /// Decay Regularization*, Loshchilov and Hutter 2019, <https://arxiv.org/abs/1711.05101>. Without `bias_correction`
    /// nothing is divided by `1 - beta^t`.
    AdamW {
        /// Decay of the mean of gradients.
        beta_1: f32,
        /// Decay of the mean of squared gradients.
        beta_2: f32,
        /// Added to the square root of the second moment.
        #[serde(rename = "eps")]
        epsilon: f32,
        /// Decoupled weight decay.
        weight_decay: f32,
        /// Divides the means by `1 - beta^t`, to correct their bias in the first steps.
        bias_correction: bool,
    },
    /// Like AdamW, but `weight_decay p` is added to the gradient: *Adam*, Kingma and Ba 2015,
    /// <https://arxiv.org/abs/1412.6980>.
    Adam {
        /// Decay of the mean of gradients.
        beta_1: f32,
        /// Decay of the mean of squared gradients.
        beta_2: f32,
        /// Added to the square root of the second moment.
        #[serde(rename = "eps")]
        epsilon: f32,
        /// L2 penalty.
        weight_decay: f32,
        /// Divides the means by `1 - beta^t`, to correct their bias in the first steps.
        bias_correction: bool,
    },
    /// `m` and `v` as for AdamW, `u = (m / (1 - beta_1^t)) / (sqrt(v / (1 - beta_2^t)) + epsilon) + weight_decay p`,
    /// `p = p - lr r u` with the trust ratio `r = |p| / |u|` of the full parameter, over all ranks, clamped between `min_coeff`
    /// and `max_coeff`; 1 if a norm is 0: *Large Batch Optimization for Deep Learning*, You et al. 2020,
    /// <https://arxiv.org/abs/1904.00962>.
    Lamb {
        /// Decay of the mean of gradients.
        beta_1: f32,
        /// Decay of the mean of squared gradients.
        beta_2: f32,
        /// Added to the square root of the second moment.
        #[serde(rename = "eps")]
        epsilon: f32,
        /// Weight decay, a part of the update.
        weight_decay: f32,
        /// Divides the means by `1 - beta^t`, to correct their bias in the first steps.
        bias_correction: bool,
        /// The largest trust ratio.
        max_coeff: f32,
        /// The smallest trust ratio.
        min_coeff: f32,
    },
    /// `b = momentum b + g` (`b = g` at first), `p = p - lr b`, with Nesterov `p = p - lr (g + momentum b)`; without
    /// momentum `p = p - lr g`. `weight_decay p` is added to the gradient.
    #[serde(rename = "SGD")]
    Sgd {
        /// Decay of the sum of gradients; 0 keeps no state.
        momentum: f32,
        /// Uses Nesterov momentum.
        nesterov: bool,
        /// L2 penalty.
        weight_decay: f32,
    },
    /// `p = p (1 - lr weight_decay) - lr sign(beta_1 m + (1 - beta_1) g)`, then `m = beta_2 m + (1 - beta_2) g`:
    /// *Symbolic Discovery of Optimization Algorithms*, Chen et al. 2023, <https://arxiv.org/abs/2302.06675>.
    Lion {
        /// Weight of the mean in the update.
        beta_1: f32,
        /// Decay of the mean of gradients.
        beta_2: f32,
        /// Decoupled weight decay.
        weight_decay: f32,
    },
    /// `s = s + g^2`, `p = p - lr g / (sqrt(s) + epsilon)`: *Adaptive Subgradient Methods*, Duchi et al. 2011,
    /// <https://jmlr.org/papers/v12/duchi11a.html>. `weight_decay p` is added to the gradient.
    Adagrad {
        /// Added to the square root of the sum.
        #[serde(rename = "eps")]
        epsilon: f32,
        /// L2 penalty.
        weight_decay: f32,
    },
    /// Matrices in the layers of a model: `m = momentum m + (1 - momentum) g`, `u = momentum m + (1 - momentum) g` with Nesterov,
    /// otherwise `u = m`, `p = p (1 - lr weight_decay) - lr s orthogonal(u)`: *Muon*, Jordan et al. 2024,
    /// <https://kellerjordan.github.io/posts/muon/>. For a matrix `[d_in, d_out]`, `s = sqrt(max(1, d_out / d_in))`, or with
    /// `match_rms` `s = 0.2 sqrt(max(d_in, d_out))`, which makes steps as large as AdamW's: Liu et al. 2025,
    /// <https://arxiv.org/abs/2502.16982>.
    ///
    /// All other parameters ([`Rule::of`]): AdamW, with `adam_lr` times the learning rate.
    Muon {
        /// Decay of the mean of gradients.
        momentum: f32,
        /// Uses Nesterov momentum.
        nesterov: bool,
        /// Decoupled weight decay, of all parameters.
        weight_decay: f32,
        /// Scales steps to AdamW's size.
        match_rms: bool,
        /// The variant of the iterations.
        ns_method: NewtonSchulz,
        /// Factor of the learning rate of AdamW.
        adam_lr: f64,
        /// AdamW's decay of the mean of gradients.
        beta_1: f32,
        /// AdamW's decay of the mean of squared gradients.
        beta_2: f32,
        /// Added to the square root of AdamW's second moment.
        #[serde(rename = "eps")]
        epsilon: f32,
    },
}

/// A variant of the Newton-Schulz iterations that orthogonalize a matrix. Without rounding both have the same result.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum NewtonSchulz {
    /// On the matrix, as in `torch.optim.Muon`.
    Standard,
    /// On the square of the shorter side, for matrices with one side at least twice the other: 0.85 of the multiplications if it is twice the
    /// other, 0.74 if it is four times the other. DeepSpeed computes it in fp16 or fp32, and for every matrix that is not square.
    Gram,
}

/// Names of fields that hold tables of embeddings, or the last layer of a model, apart from those that contain "embed".
const ENDS: [&str; 10] = [
    "wte",
    "wpe",
    "shared",
    "relative_attention_bias",
    "lm_head",
    "head",
    "classification_head",
    "seq_relationship",
    "classifier",
    "score",
];

impl Rule {
    /// Returns AdamW with PyTorch's defaults: 0.9, 0.999, 1e-8, 0.01.
    pub const fn adamw() -> Self {
        Rule::AdamW { beta_1: 0.9, beta_2: 0.999, epsilon: 1e-8, weight_decay: 0.01, bias_correction: true }
    }

    /// Returns Adam with PyTorch's defaults: 0.9, 0.999, 1e-8, no weight decay.
    pub const fn adam() -> Self {
        Rule::Adam { beta_1: 0.9, beta_2: 0.999, epsilon: 1e-8, weight_decay: 0.0, bias_correction: true }
    }

    /// Returns LAMB with DeepSpeed's defaults: 0.9, 0.999, 1e-8, no weight decay, ratios from 0.01 to 10.
    pub const fn lamb() -> Self {
        Rule::Lamb {
            beta_1: 0.9,
            beta_2: 0.999,
            epsilon: 1e-8,
            weight_decay: 0.0,
            bias_correction: true,
            max_coeff: 10.0,
            min_coeff: 0.01,
        }
    }

    /// Returns plain gradient descent.
    pub const fn sgd() -> Self {
        Rule::Sgd { momentum: 0.0, nesterov: false, weight_decay: 0.0 }
    }

    /// Returns Lion with the paper's defaults: 0.9, 0.99, no weight decay.
    pub const fn lion() -> Self {
        Rule::Lion { beta_1: 0.9, beta_2: 0.99, weight_decay: 0.0 }
    }

    /// Returns Adagrad with PyTorch's defaults: 1e-10, no weight decay.
    pub const fn adagrad() -> Self {
        Rule::Adagrad { epsilon: 1e-10, weight_decay: 0.0 }
    }

    /// Returns Muon with PyTorch's defaults: Nesterov momentum 0.95 and weight decay 0.1; and AdamW's, with the same learning rate.
    pub const fn muon() -> Self {
        Rule::Muon {
            momentum: 0.95,
            nesterov: true,
            weight_decay: 0.1,
            match_rms: false,
            ns_method: NewtonSchulz::Standard,
            adam_lr: 1.0,
            beta_1: 0.9,
            beta_2: 0.999,
            epsilon: 1e-8,
        }
    }

    /// Returns the rule of a parameter, and the factor of its learning rate: this rule and 1, but AdamW for parameters that Muon does not
    /// apply to. These are vectors, tensors of more than two dimensions, and the tables and heads of a model: a field in the path is named
    /// `wte`, `wpe`, `shared`, `relative_attention_bias`, `lm_head`, `head`, `classification_head`, `seq_relationship`, `classifier` or
    /// `score`, possibly with the suffix `_adapter`, or contains `embed`.
    pub fn of(self, path: &str, shape: &[usize]) -> (Self, f64) {
        let Rule::Muon { weight_decay, adam_lr, beta_1, beta_2, epsilon, .. } = self else { return (self, 1.0) };
        let is_end = |name: &str| ENDS.contains(&name.trim_end_matches("_adapter")) || name.contains("embed");
        match shape.len() == 2 && !path.split('.').any(is_end) {
            true => (self, 1.0),
            false => (Rule::AdamW { beta_1, beta_2, epsilon, weight_decay, bias_correction: true }, adam_lr),
        }
    }

    /// Returns the factor of an orthogonalized update of a matrix `[d_in, d_out]`; 1 for other rules than Muon.
    pub fn scale(self, [d_in, d_out]: [usize; 2]) -> f32 {
        let Rule::Muon { match_rms, .. } = self else { return 1.0 };
        match match_rms {
            true => 0.2 * (d_in.max(d_out) as f64).sqrt() as f32,
            false => (d_out as f64 / d_in as f64).max(1.0).sqrt() as f32,
        }
    }

    /// Returns the weight decay.
    pub fn weight_decay(mut self) -> f32 {
        *self.decay()
    }

    /// Returns the same rule with another weight decay.
    #[must_use]
    pub fn with_weight_decay(mut self, value: f32) -> Self {
        *self.decay() = value;
        self
    }

    fn decay(&mut self) -> &mut f32 {
        match self {
            Rule::AdamW { weight_decay, .. }
            | Rule::Adam { weight_decay, .. }
            | Rule::Lamb { weight_decay, .. }
            | Rule::Sgd { weight_decay, .. }
            | Rule::Lion { weight_decay, .. }
            | Rule::Adagrad { weight_decay, .. }
            | Rule::Muon { weight_decay, .. } => weight_decay,
        }
    }

    /// Sets the momentum (the first beta of Adam, LAMB and Lion, the momentum of Muon) and, for Adam and LAMB, the second beta. Has no
    /// effect on a rule without momentum.
    pub fn set_momentum(&mut self, momentum: f32, second_beta: f32) {
        match self {
            Rule::AdamW { beta_1, beta_2, .. }
            | Rule::Adam { beta_1, beta_2, .. }
            | Rule::Lamb { beta_1, beta_2, .. } => {
                (*beta_1, *beta_2) = (momentum, second_beta);
            }
            Rule::Sgd { momentum: own, .. } if *own != 0.0 => *own = momentum,
            Rule::Muon { momentum: own, .. } => *own = momentum,
            Rule::Lion { beta_1, .. } => *beta_1 = momentum,
            Rule::Sgd { .. } | Rule::Adagrad { .. } => {}
        }
    }

    /// Returns the rule's name: DeepSpeed's, in lower case.
    pub fn name(&self) -> &'static str {
        match self {
            Rule::AdamW { .. } => "adamw",
            Rule::Adam { .. } => "adam",
            Rule::Lamb { .. } => "lamb",
            Rule::Sgd { .. } => "sgd",
            Rule::Lion { .. } => "lion",
            Rule::Adagrad { .. } => "adagrad",
            Rule::Muon { .. } => "muon",
        }
    }

    /// Returns PyTorch's and DeepSpeed's names of the states kept for each parameter, or for each matrix of Muon. Each has one fp32 number
    /// per element.
    pub fn state_names(&self) -> &'static [&'static str] {
        match self {
            Rule::AdamW { .. } | Rule::Adam { .. } | Rule::Lamb { .. } => &["exp_avg", "exp_avg_sq"],
            Rule::Sgd { momentum: 0.0, .. } => &[],
            Rule::Sgd { .. } | Rule::Muon { .. } => &["momentum_buffer"],
            Rule::Lion { .. } => &["exp_avg"],
            Rule::Adagrad { .. } => &["sum"],
        }
    }

    /// Returns the number of states that the rule keeps per parameter; of Muon, that of AdamW's parameters.
    pub fn states(&self) -> usize {
        if matches!(self, Rule::Muon { .. }) { 2 } else { self.state_names().len() }
    }
}
