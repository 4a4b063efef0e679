//! Update rules and their kernels: one pass over parameter, gradient and state.

/// How a parameter is updated by its gradient.
///
/// `lr` below is the learning rate of the step, `g` the gradient, `p` the parameter, `t` the number of the step from 1.
/// Defaults of [`Rule::adamw`] and the like are PyTorch's.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Rule {
    /// `m = beta_1 m + (1 - beta_1) g`, `v = beta_2 v + (1 - beta_2) g^2`,
    /// `p = p (1 - lr weight_decay) - lr (m / (1 - beta_1^t)) / (sqrt(v / (1 - beta_2^t)) + epsilon)`: *Decoupled Weight
    /// Decay Regularization*, Loshchilov and Hutter 2019, <https://arxiv.org/abs/1711.05101>.
    AdamW {
        /// Decay of the mean of gradients.
        beta_1: f32,
        /// Decay of the mean of squared gradients.
        beta_2: f32,
        /// Added to the square root of the second moment.
        epsilon: f32,
        /// Decoupled weight decay.
        weight_decay: f32,
    },
    /// As AdamW, with `weight_decay p` added to the gradient instead: *Adam*, Kingma and Ba 2015,
    /// <https://arxiv.org/abs/1412.6980>.
    Adam {
        /// Decay of the mean of gradients.
        beta_1: f32,
        /// Decay of the mean of squared gradients.
        beta_2: f32,
        /// Added to the square root of the second moment.
        epsilon: f32,
        /// L2 penalty.
        weight_decay: f32,
    },
    /// `b = momentum b + g` (`b = g` at first), `p = p - lr b`, with Nesterov `p = p - lr (g + momentum b)`; without
    /// momentum `p = p - lr g`. `weight_decay p` is added to the gradient.
    Sgd {
        /// Decay of the sum of gradients; 0 keeps no state.
        momentum: f32,
        /// Looks ahead by one step of the momentum.
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
        epsilon: f32,
        /// L2 penalty.
        weight_decay: f32,
    },
}

impl Rule {
    /// AdamW with PyTorch's defaults: 0.9, 0.999, 1e-8, 0.01.
    pub const fn adamw() -> Self {
        Rule::AdamW { beta_1: 0.9, beta_2: 0.999, epsilon: 1e-8, weight_decay: 0.01 }
    }

    /// Adam with PyTorch's defaults: 0.9, 0.999, 1e-8, no weight decay.
    pub const fn adam() -> Self {
        Rule::Adam { beta_1: 0.9, beta_2: 0.999, epsilon: 1e-8, weight_decay: 0.0 }
    }

    /// Plain gradient descent.
    pub const fn sgd() -> Self {
        Rule::Sgd { momentum: 0.0, nesterov: false, weight_decay: 0.0 }
    }

    /// Lion with the paper's defaults: 0.9, 0.99, no weight decay.
    pub const fn lion() -> Self {
        Rule::Lion { beta_1: 0.9, beta_2: 0.99, weight_decay: 0.0 }
    }

    /// Adagrad with PyTorch's defaults: 1e-10, no weight decay.
    pub const fn adagrad() -> Self {
        Rule::Adagrad { epsilon: 1e-10, weight_decay: 0.0 }
    }

    /// The same rule with another weight decay.
    #[must_use]
    pub fn with_weight_decay(mut self, value: f32) -> Self {
        match &mut self {
            Rule::AdamW { weight_decay, .. }
            | Rule::Adam { weight_decay, .. }
            | Rule::Sgd { weight_decay, .. }
            | Rule::Lion { weight_decay, .. }
            | Rule::Adagrad { weight_decay, .. } => *weight_decay = value,
        }
        self
    }

    /// Its name, as DeepSpeed's configuration has it but in lower case.
    pub fn name(&self) -> &'static str {
        match self {
            Rule::AdamW { .. } => "adamw",
            Rule::Adam { .. } => "adam",
            Rule::Sgd { .. } => "sgd",
            Rule::Lion { .. } => "lion",
            Rule::Adagrad { .. } => "adagrad",
        }
    }

    /// Names of the state kept for each parameter, each with one fp32 number an element, as PyTorch and DeepSpeed name
    /// it.
    pub fn state_names(&self) -> &'static [&'static str] {
        match self {
            Rule::AdamW { .. } | Rule::Adam { .. } => &["exp_avg", "exp_avg_sq"],
            Rule::Sgd { momentum: 0.0, .. } => &[],
            Rule::Sgd { .. } => &["momentum_buffer"],
            Rule::Lion { .. } => &["exp_avg"],
            Rule::Adagrad { .. } => &["sum"],
        }
    }
}

/// A rule with the numbers of one step.
#[derive(Debug, Clone, Copy)]
pub(super) struct Kernel {
    rule: Rule,
    lr: f64,
    /// Number of the step, from 1.
    time: usize,
    /// State is not read: it begins with this step.
    fresh: bool,
}

impl Kernel {
    pub(super) fn new(rule: Rule, lr: f64, time: usize) -> Self {
        Self { rule, lr, time, fresh: time == 1 }
    }

    /// Whether state begins with this step.
    #[cfg(feature = "cubecl")]
    pub(super) fn is_fresh(self) -> bool {
        self.fresh
    }

    /// One pass over equally long slices; `a` and `b` are the rule's state in the order of its names, or empty.
    ///
    /// Every rule rounds operation by operation; AdamW in the order of Burn's, so that both give the same bits.
    #[inline(always)]
    pub(super) fn apply(self, p: &mut [f32], g: &[f32], a: &mut [f32], b: &mut [f32]) {
        let fresh = self.fresh;
        let lr = self.lr as f32;
        let decayed = |weight_decay: f32| (1.0 - self.lr * f64::from(weight_decay)) as f32;
        match self.rule {
            Rule::AdamW { beta_1, beta_2, epsilon, weight_decay } => {
                let adam = Adam::new(beta_1, beta_2, epsilon, self.time);
                let keep = decayed(weight_decay);
                for ((p, &g), (m, v)) in p.iter_mut().zip(g).zip(a.iter_mut().zip(b)) {
                    let delta = adam.delta(g, m, v, fresh);
                    *p = *p * keep - delta * lr;
                }
            }
            Rule::Adam { beta_1, beta_2, epsilon, weight_decay } => {
                let adam = Adam::new(beta_1, beta_2, epsilon, self.time);
                for ((p, &g), (m, v)) in p.iter_mut().zip(g).zip(a.iter_mut().zip(b)) {
                    let delta = adam.delta(g + *p * weight_decay, m, v, fresh);
                    *p -= delta * lr;
                }
            }
            Rule::Sgd { momentum: 0.0, weight_decay, .. } => {
                for (p, &g) in p.iter_mut().zip(g) {
                    *p -= (g + *p * weight_decay) * lr;
                }
            }
            Rule::Sgd { momentum, nesterov, weight_decay } => {
                for ((p, &g), m) in p.iter_mut().zip(g).zip(a) {
                    let g = g + *p * weight_decay;
                    *m = if fresh { g } else { *m * momentum + g };
                    *p -= if nesterov { g + *m * momentum } else { *m } * lr;
                }
            }
            Rule::Lion { beta_1, beta_2, weight_decay } => {
                let keep = decayed(weight_decay);
                for ((p, &g), m) in p.iter_mut().zip(g).zip(a) {
                    let old = if fresh { 0.0 } else { *m };
                    let update = old * beta_1 + g * (1.0 - beta_1);
                    let sign = f32::from(u8::from(update > 0.0)) - f32::from(u8::from(update < 0.0));
                    let sign = if update.is_nan() { update } else { sign };
                    *p = *p * keep - sign * lr;
                    *m = old * beta_2 + g * (1.0 - beta_2);
                }
            }
            Rule::Adagrad { epsilon, weight_decay } => {
                for ((p, &g), s) in p.iter_mut().zip(g).zip(a) {
                    let g = g + *p * weight_decay;
                    *s = if fresh { g * g } else { *s + g * g };
                    *p -= g / (s.sqrt() + epsilon) * lr;
                }
            }
        }
    }
}

/// The same for devices.
#[cfg(feature = "cubecl")]
impl From<Kernel> for zero_ops::Update {
    fn from(Kernel { rule, lr, time, fresh }: Kernel) -> Self {
        use zero_ops::UpdateRule;

        let rule = match rule {
            Rule::AdamW { beta_1, beta_2, epsilon, weight_decay } => {
                UpdateRule::AdamW { beta_1, beta_2, epsilon, weight_decay }
            }
            Rule::Adam { beta_1, beta_2, epsilon, weight_decay } => {
                UpdateRule::Adam { beta_1, beta_2, epsilon, weight_decay }
            }
            Rule::Sgd { momentum, nesterov, weight_decay } => UpdateRule::Sgd { momentum, nesterov, weight_decay },
            Rule::Lion { beta_1, beta_2, weight_decay } => UpdateRule::Lion { beta_1, beta_2, weight_decay },
            Rule::Adagrad { epsilon, weight_decay } => UpdateRule::Adagrad { epsilon, weight_decay },
        };
        Self { rule, lr, time, fresh }
    }
}

/// What Adam and AdamW share.
#[derive(Clone, Copy)]
struct Adam {
    beta_1: f32,
    beta_2: f32,
    correction_1: f32,
    correction_2: f32,
    epsilon: f32,
}

impl Adam {
    fn new(beta_1: f32, beta_2: f32, epsilon: f32, time: usize) -> Self {
        let time = time as i32;
        Self { beta_1, beta_2, correction_1: 1.0 - beta_1.powi(time), correction_2: 1.0 - beta_2.powi(time), epsilon }
    }

    #[inline(always)]
    fn delta(self, g: f32, m: &mut f32, v: &mut f32, fresh: bool) -> f32 {
        let square = g * g;
        if fresh {
            *m = g * (1.0 - self.beta_1);
            *v = square * (1.0 - self.beta_2);
        } else {
            *m = *m * self.beta_1 + g * (1.0 - self.beta_1);
            *v = *v * self.beta_2 + square * (1.0 - self.beta_2);
        }
        (*m / self.correction_1) / ((*v / self.correction_2).sqrt() + self.epsilon)
    }
}
