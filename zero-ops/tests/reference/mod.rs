//! The operations as plain loops in f64.

use zero_ops::{CrossEntropyOptions, Gelu};

use crate::shared::{erf, wide};

pub struct LayerNorm {
    pub out: Vec<f64>,
    pub mean: Vec<f64>,
    pub rstd: Vec<f64>,
}

pub fn layer_norm(x: &[f32], gamma: &[f32], beta: Option<&[f32]>, d: usize, epsilon: f64) -> LayerNorm {
    layer_norm_of(&wide(x), &wide(gamma), beta.map(wide).as_deref(), d, epsilon)
}

pub fn layer_norm_of(x: &[f64], gamma: &[f64], beta: Option<&[f64]>, d: usize, epsilon: f64) -> LayerNorm {
    let mut made = LayerNorm { out: vec![], mean: vec![], rstd: vec![] };
    for row in x.chunks(d) {
        let mean = row.iter().sum::<f64>() / d as f64;
        let variance = row.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / d as f64;
        let rstd = 1.0 / (variance + epsilon).sqrt();
        made.out.extend((0..d).map(|i| (row[i] - mean) * rstd * gamma[i] + beta.map_or(0.0, |beta| beta[i])));
        made.mean.push(mean);
        made.rstd.push(rstd);
    }
    made
}

pub struct LayerNormGradients {
    pub dx: Vec<f64>,
    pub d_gamma: Vec<f64>,
    pub d_beta: Vec<f64>,
}

pub fn layer_norm_backward(x: &[f32], gamma: &[f32], grad: &[f32], d: usize, epsilon: f64) -> LayerNormGradients {
    let (gamma, grad) = (wide(gamma), wide(grad));
    let normed = layer_norm_of(&wide(x), &vec![1.0; d], None, d, epsilon);
    let mut made = LayerNormGradients { dx: vec![], d_gamma: vec![0.0; d], d_beta: vec![0.0; d] };
    for ((normed, grad), rstd) in normed.out.chunks(d).zip(grad.chunks(d)).zip(&normed.rstd) {
        let inner: Vec<f64> = grad.iter().zip(&gamma).map(|(grad, gamma)| grad * gamma).collect();
        let mean = inner.iter().sum::<f64>() / d as f64;
        let along = inner.iter().zip(normed).map(|(inner, normed)| inner * normed).sum::<f64>() / d as f64;
        for i in 0..d {
            made.dx.push((inner[i] - mean - normed[i] * along) * rstd);
            made.d_gamma[i] += grad[i] * normed[i];
            made.d_beta[i] += grad[i];
        }
    }
    made
}

/// Returns the function's value and slope.
fn gelu_at(kind: Gelu, x: f64) -> (f64, f64) {
    match kind {
        Gelu::Tanh => {
            let root = (2.0 / std::f64::consts::PI).sqrt();
            let tanh = (root * (x + 0.044715 * x.powi(3))).tanh();
            let slope = root * (1.0 + 3.0 * 0.044715 * x * x);
            (0.5 * x * (1.0 + tanh), 0.5 * (1.0 + tanh) + 0.5 * x * (1.0 - tanh * tanh) * slope)
        }
        Gelu::Erf => {
            let below = 0.5 * (1.0 + erf(x * std::f64::consts::FRAC_1_SQRT_2));
            let density = (-0.5 * x * x).exp() / (2.0 * std::f64::consts::PI).sqrt();
            (x * below, below + x * density)
        }
    }
}

fn biased(x: &[f64], bias: Option<&[f64]>, f: usize) -> Vec<f64> {
    x.iter().enumerate().map(|(i, x)| x + bias.map_or(0.0, |bias| bias[i % f])).collect()
}

pub fn gelu(kind: Gelu, x: &[f32], bias: Option<&[f32]>, f: usize) -> Vec<f64> {
    gelu_of(kind, &wide(x), bias.map(wide).as_deref(), f)
}

pub fn gelu_of(kind: Gelu, x: &[f64], bias: Option<&[f64]>, f: usize) -> Vec<f64> {
    biased(x, bias, f).into_iter().map(|x| gelu_at(kind, x).0).collect()
}

pub struct GeluGradients {
    pub dx: Vec<f64>,
    pub d_bias: Option<Vec<f64>>,
}

pub fn gelu_backward(kind: Gelu, x: &[f32], bias: Option<&[f32]>, grad: &[f32], f: usize) -> GeluGradients {
    let x = biased(&wide(x), bias.map(wide).as_deref(), f);
    let dx: Vec<f64> = x.iter().zip(wide(grad)).map(|(x, grad)| grad * gelu_at(kind, *x).1).collect();
    let d_bias = bias.map(|_| sums_of(&dx, f));
    GeluGradients { dx, d_bias }
}

/// `x`: rows of `d`, `weight`: `[d, f]`.
pub fn linear(x: &[f32], weight: &[f32], bias: Option<&[f32]>, residual: Option<&[f32]>, d: usize) -> Vec<f64> {
    let f = weight.len() / d;
    let at = |i: usize| {
        let (row, column) = (i / f, i % f);
        let product: f64 = (0..d).map(|k| f64::from(x[row * d + k]) * f64::from(weight[k * f + column])).sum();
        let more = [bias.map(|bias| bias[column]), residual.map(|residual| residual[i])];
        product + more.into_iter().flatten().map(f64::from).sum::<f64>()
    };
    (0..x.len() / d * f).map(at).collect()
}

pub fn column_sums(x: &[f32], f: usize) -> Vec<f64> {
    sums_of(&wide(x), f)
}

fn sums_of(x: &[f64], f: usize) -> Vec<f64> {
    (0..f).map(|column| x.iter().skip(column).step_by(f).sum()).collect()
}

pub struct Gradients {
    pub loss: f64,
    pub dx: Vec<f64>,
    pub d_weight: Vec<f64>,
}

pub fn cross_entropy(x: &[f32], weight: &[f32], ids: &[i64], options: CrossEntropyOptions, d: usize) -> Gradients {
    cross_entropy_of(&wide(x), &wide(weight), ids, options, d)
}

pub fn cross_entropy_of(x: &[f64], weight: &[f64], ids: &[i64], options: CrossEntropyOptions, d: usize) -> Gradients {
    let CrossEntropyOptions { ignored, cap } = options;
    let mut made = Gradients { loss: 0.0, dx: vec![0.0; x.len()], d_weight: vec![0.0; weight.len()] };
    let counted = ids.iter().filter(|id| Some(**id) != ignored).count().max(1) as f64;
    for ((x, dx), id) in x.chunks(d).zip(made.dx.chunks_mut(d)).zip(ids) {
        if Some(*id) == ignored {
            continue;
        }
        let target = usize::try_from(*id).unwrap();
        let logits: Vec<f64> =
            weight.chunks(d).map(|weight| weight.iter().zip(x).map(|(weight, x)| weight * x).sum()).collect();
        let tanh: Vec<f64> = logits.iter().map(|logit| cap.map_or(0.0, |cap| (logit / cap).tanh())).collect();
        let logits = cap.map_or(logits, |cap| tanh.iter().map(|tanh| cap * tanh).collect());
        let largest = logits.iter().fold(f64::NEG_INFINITY, |largest, logit| largest.max(*logit));
        let lse = logits.iter().map(|logit| (logit - largest).exp()).sum::<f64>().ln() + largest;
        made.loss += (lse - logits[target]) / counted;
        for (column, logit) in logits.iter().enumerate() {
            let share = ((logit - lse).exp() - f64::from(u8::from(column == target))) / counted;
            let share = share * (1.0 - tanh[column] * tanh[column]);
            for i in 0..d {
                dx[i] += share * weight[column * d + i];
                made.d_weight[column * d + i] += share * x[i];
            }
        }
    }
    made
}
