//! The kernels of update rules: one pass over parameter, gradient and state.

use crate::rule::Rule;

/// A rule with the parameters of one step.
#[derive(Debug, Clone, Copy)]
pub struct Kernel {
    /// The rule.
    pub rule: Rule,
    /// The learning rate of the step.
    pub lr: f64,
    /// Number of the step, from 1.
    pub time: usize,
    /// If set, the state is not read: it starts with this step.
    pub fresh: bool,
    /// The next pass.
    pub pass: Sweep,
}

/// A kind of pass over memory. LAMB and Muon take two, since their steps depend on the full parameter.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Sweep {
    /// Does everything.
    Only,
    /// Updates the states. LAMB sums squares; Muon writes the matrix to be orthogonalized.
    First,
    /// Takes a step in the direction of the states, or of the orthogonalized matrix.
    Second {
        /// Factor of the learning rate: the trust ratio, or [`Rule::scale`].
        trust: f32,
    },
}

impl Kernel {
    /// Creates the kernel of step `time`, from 1.
    pub fn new(rule: Rule, lr: f64, time: usize) -> Self {
        let pass = if matches!(rule, Rule::Lamb { .. } | Rule::Muon { .. }) { Sweep::First } else { Sweep::Only };
        Self { rule, lr, time, fresh: time == 1, pass }
    }

    /// Returns whether the rule orthogonalizes matrices between its passes.
    pub fn is_muon(&self) -> bool {
        matches!(self.rule, Rule::Muon { .. })
    }

    /// Runs Muon's second pass: a step along the orthogonalized matrix `o`.
    #[inline(always)]
    pub fn step_along(self, trust: f32, p: &mut [f32], o: &[f32]) {
        let keep = (1.0 - self.lr * f64::from(self.rule.weight_decay())) as f32;
        let lr = (self.lr * f64::from(trust)) as f32;
        for (p, &o) in p.iter_mut().zip(o) {
            *p = *p * keep - o * lr;
        }
    }

    /// Sets the second pass, given the norms of the full parameter and of its update.
    pub fn trust(&mut self, parameter: f64, update: f64) {
        let Rule::Lamb { max_coeff, min_coeff, .. } = self.rule else { return };
        let trust = match (parameter / update) as f32 {
            _ if parameter == 0.0 || update == 0.0 => 1.0,
            // Compared, since `min` and `max` would turn a NaN into a number.
            above if above > max_coeff => max_coeff,
            below if below < min_coeff => min_coeff,
            between => between,
        };
        self.pass = Sweep::Second { trust };
    }

    /// Writes LAMB's update of `p` before the trust ratio, from the states `m` and `v`, to `u`.
    #[inline(always)]
    pub fn direction(self, p: &[f32], m: &[f32], v: &[f32], u: &mut [f32]) {
        let Rule::Lamb { beta_1, beta_2, epsilon, weight_decay, bias_correction, .. } = self.rule else { return };
        let adam = Adam::new(beta_1, beta_2, epsilon, bias_correction, self.time);
        for ((u, &p), (&m, &v)) in u.iter_mut().zip(p).zip(m.iter().zip(v)) {
            *u = adam.direction(m, v) + p * weight_decay;
        }
    }

    /// Runs the second pass: a step along `u`.
    #[inline(always)]
    pub fn step(self, trust: f32, p: &mut [f32], u: &[f32]) {
        let lr = (self.lr * f64::from(trust)) as f32;
        for (p, &u) in p.iter_mut().zip(u) {
            *p -= u * lr;
        }
    }

    /// Runs one pass over equally long slices; `a` and `b` are the rule's state in the order of its names, or empty.
    ///
    /// Every rule rounds each operation. AdamW has the order of Burn's, so that both give the same bits.
    #[inline(always)]
    pub fn apply(self, p: &mut [f32], g: &[f32], a: &mut [f32], b: &mut [f32]) {
        let fresh = self.fresh;
        let lr = self.lr as f32;
        let decayed = |weight_decay: f32| (1.0 - self.lr * f64::from(weight_decay)) as f32;
        match self.rule {
            Rule::AdamW { beta_1, beta_2, epsilon, weight_decay, bias_correction } => {
                let adam = Adam::new(beta_1, beta_2, epsilon, bias_correction, self.time);
                let keep = decayed(weight_decay);
                for ((p, &g), (m, v)) in p.iter_mut().zip(g).zip(a.iter_mut().zip(b)) {
                    let delta = adam.delta(g, m, v, fresh);
                    *p = *p * keep - delta * lr;
                }
            }
            Rule::Adam { beta_1, beta_2, epsilon, weight_decay, bias_correction } => {
                let adam = Adam::new(beta_1, beta_2, epsilon, bias_correction, self.time);
                for ((p, &g), (m, v)) in p.iter_mut().zip(g).zip(a.iter_mut().zip(b)) {
                    let delta = adam.delta(g + *p * weight_decay, m, v, fresh);
                    *p -= delta * lr;
                }
            }
            // Its first pass.
            Rule::Lamb { beta_1, beta_2, epsilon, bias_correction, .. } => {
                let adam = Adam::new(beta_1, beta_2, epsilon, bias_correction, self.time);
                for (&g, (m, v)) in g.iter().zip(a.iter_mut().zip(b)) {
                    adam.moments(g, m, v, fresh);
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
            // The first pass writes the matrix to be orthogonalized to `b`. The means are computed like PyTorch's `lerp`.
            Rule::Muon { momentum, nesterov, .. } => {
                let rest = 1.0 - momentum;
                let lerp = |from: f32, to: f32, weight: f32| match weight < 0.5 {
                    true => from + weight * (to - from),
                    false => to - (to - from) * (1.0 - weight),
                };
                for (&g, (m, u)) in g.iter().zip(a.iter_mut().zip(b)) {
                    *m = lerp(if fresh { 0.0 } else { *m }, g, rest);
                    *u = if nesterov { lerp(g, *m, momentum) } else { *m };
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

/// The common part of Adam, AdamW and LAMB.
#[derive(Clone, Copy)]
struct Adam {
    beta_1: f32,
    beta_2: f32,
    correction_1: f32,
    correction_2: f32,
    epsilon: f32,
}

impl Adam {
    fn new(beta_1: f32, beta_2: f32, epsilon: f32, bias_correction: bool, time: usize) -> Self {
        // A division by 1 changes no bit.
        let correction = |beta: f32| if bias_correction { 1.0 - beta.powi(time as i32) } else { 1.0 };
        Self { beta_1, beta_2, correction_1: correction(beta_1), correction_2: correction(beta_2), epsilon }
    }

    #[inline(always)]
    fn delta(self, g: f32, m: &mut f32, v: &mut f32, fresh: bool) -> f32 {
        self.moments(g, m, v, fresh);
        self.direction(*m, *v)
    }

    #[inline(always)]
    fn moments(self, g: f32, m: &mut f32, v: &mut f32, fresh: bool) {
        let square = g * g;
        if fresh {
            *m = g * (1.0 - self.beta_1);
            *v = square * (1.0 - self.beta_2);
        } else {
            *m = *m * self.beta_1 + g * (1.0 - self.beta_1);
            *v = *v * self.beta_2 + square * (1.0 - self.beta_2);
        }
    }

    #[inline(always)]
    fn direction(self, m: f32, v: f32) -> f32 {
        (m / self.correction_1) / ((v / self.correction_2).sqrt() + self.epsilon)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn trust_ratios_are_held_between_their_bounds() {
        for (parameter, update, expected) in [
            (3.0, 2.0, 1.5),
            (0.0, 2.0, 1.0),
            (3.0, 0.0, 1.0),
            (0.0, 0.0, 1.0),
            (30.0, 2.0, 10.0),
            (0.01, 2.0, 0.01),
            (f64::INFINITY, 2.0, 10.0),
            (1.0, f64::INFINITY, 0.01),
        ] {
            let mut kernel = Kernel::new(Rule::lamb(), 1e-3, 1);
            assert_eq!(kernel.pass, Sweep::First);
            kernel.trust(parameter, update);
            assert_eq!(kernel.pass, Sweep::Second { trust: expected }, "{parameter}, {update}");
        }
        for (parameter, update) in [(f64::NAN, 1.0), (1.0, f64::NAN)] {
            let mut kernel = Kernel::new(Rule::lamb(), 1e-3, 1);
            kernel.trust(parameter, update);
            assert!(matches!(kernel.pass, Sweep::Second { trust } if trust.is_nan()), "what is no number stays none");
        }
        let mut other = Kernel::new(Rule::adamw(), 1e-3, 1);
        other.trust(3.0, 2.0);
        assert_eq!(other.pass, Sweep::Only);
    }
}
