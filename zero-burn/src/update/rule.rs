//! The kernels of update rules: one pass over parameter, gradient and state.

use zero_ops::Rule;

/// A rule with the numbers of one step.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Kernel {
    rule: Rule,
    lr: f64,
    /// Number of the step, from 1.
    time: usize,
    /// State is not read: it begins with this step.
    fresh: bool,
}

impl Kernel {
    pub(crate) fn new(rule: Rule, lr: f64, time: usize) -> Self {
        Self { rule, lr, time, fresh: time == 1 }
    }

    /// One pass over equally long slices; `a` and `b` are the rule's state in the order of its names, or empty.
    ///
    /// Every rule rounds operation by operation; AdamW in the order of Burn's, so that both give the same bits.
    #[inline(always)]
    pub(crate) fn apply(self, p: &mut [f32], g: &[f32], a: &mut [f32], b: &mut [f32]) {
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
