//! The operations by Burn's own, where there are no kernels: on devices, and for attention with dropout of probabilities. All compute in
//! fp32 and round once at the end.

use std::f64::consts::FRAC_1_SQRT_2;
use std::sync::Arc;

use burn::backend::TensorMetadata;
use burn::tensor::activation::{gelu_approximate, log_softmax, silu, softmax};
use burn::tensor::{Bool, DType, Int, Tensor, TensorData};
use zero_kernels::options::{AttentionDropout, AttentionOptions, CrossEntropyOptions, Gelu};

use super::{Any, Op};

pub(super) fn run(op: Op, operands: Vec<Any>) -> Any {
    let dtype = operands[0].dtype();
    let mut operands = operands.into_iter();
    let mut next = || operands.next();
    let mut first = || rows(next().expect("an operation has operands"));
    let out = match op {
        Op::Linear { bias, .. } => {
            let out = first().matmul(first());
            let out = if bias { out + column(next().expect("it is there")) } else { out };
            next().map(rows).into_iter().fold(out, |out, residual| out + residual)
        }
        Op::LayerNorm { epsilon } => {
            let (x, gamma) = (first(), column(next().expect("it is there")));
            let (variance, mean) = x.clone().var_mean_bias(1);
            let out = (x - mean) / (variance + epsilon).sqrt() * gamma;
            next().map(column).into_iter().fold(out, |out, beta| out + beta)
        }
        Op::RmsNorm { epsilon } => {
            let (x, gamma) = (first(), column(next().expect("it is there")));
            let mean = x.clone().square().mean_dim(1);
            x / (mean + epsilon).sqrt() * gamma
        }
        Op::SwiGlu => silu(first()) * first(),
        Op::Rotary { angles, pairs } => turned(first(), &angles, pairs),
        Op::Gelu(kind) => {
            let x = first();
            let x = next().map(column).into_iter().fold(x, |x, bias| x + bias);
            match kind {
                // Not Burn's `gelu`, whose gradient is that of the tanh formula on most devices.
                Gelu::Erf => x.clone() * ((x * FRAC_1_SQRT_2).erf() + 1.0) * 0.5,
                Gelu::Tanh => gelu_approximate(x),
            }
        }
        Op::Attention { options, mask } => {
            let q = first();
            let [n, width] = q.dims();
            let parts = match next() {
                Some(k) => [q, rows(k), rows(next().expect("values go with keys"))],
                None => [0, 1, 2].map(|at| q.clone().slice([0..n, at * width / 3..(at + 1) * width / 3])),
            };
            attention(parts, options, mask.as_deref())
        }
        Op::Embedding { ids, .. } => {
            let table = next().expect("an operation has operands");
            embedding(Tensor::from_dispatch(table), &ids).cast(DType::F32)
        }
        Op::CrossEntropy { targets, options, .. } => {
            return cross_entropy(first(), first(), &targets, options).into_dispatch();
        }
        Op::Dropout(dropout) => dropped(first(), dropout),
    };
    out.cast(dtype).into_dispatch()
}

fn rows(x: Any) -> Tensor<2> {
    Tensor::<2>::from_dispatch(x).cast(DType::F32)
}

/// Returns a vector as a row `[1, n]`, which broadcasts over rows.
fn column(x: Any) -> Tensor<2> {
    Tensor::<1>::from_dispatch(x).cast(DType::F32).unsqueeze()
}

/// Returns rows of a table.
pub(crate) fn embedding(table: Tensor<2>, ids: &[i64]) -> Tensor<2> {
    check("embedding", ids, table.dims()[0]);
    let ids = Tensor::<1, Int>::from_data(TensorData::new(ids.to_vec(), [ids.len()]), &table.device());
    table.select(0, ids)
}

fn check(name: &str, ids: &[i64], count: usize) {
    let wrong = ids.iter().find(|id| usize::try_from(**id).map_or(true, |id| id >= count));
    assert!(wrong.is_none(), "{name}: expected ids in 0..{count}, got {wrong:?}");
}

fn turned(x: Tensor<2>, angles: &[Arc<[f32]>; 2], pairs: usize) -> Tensor<2> {
    let ([n, d], device) = (x.dims(), x.device());
    let (rows, heads) = (angles[0].len() / pairs, d / (2 * pairs));
    let [cos, sin] = angles.each_ref().map(|values| {
        let data = TensorData::new(values.to_vec(), [1, rows, 1, pairs]);
        Tensor::<4>::from_data(data, &device)
    });
    let halves: Vec<Tensor<4>> = x.reshape([n / rows, rows, heads, 2 * pairs]).chunk(2, 3);
    let [a, b]: [Tensor<4>; 2] = halves.try_into().expect("two halves");
    let first = a.clone() * cos.clone() - b.clone() * sin.clone();
    Tensor::cat(vec![first, b * cos + a * sin], 3).reshape([n, d])
}

fn attention(parts: [Tensor<2>; 3], options: AttentionOptions, mask: Option<&[f32]>) -> Tensor<2> {
    let AttentionOptions { batch, heads, causal, window, scale, cap, dropout } = options;
    let [n, d] = parts[0].dims();
    let (t, device) = (n / batch, parts[0].device());
    let width = d / heads;
    let u = parts[1].dims()[0] / batch;
    let [q, k, v] = parts.map(|part| {
        let [rows, own] = part.dims();
        let (rows, own) = (rows / batch, own / width);
        let part = part.reshape([batch, rows, own, width]).swap_dims(1, 2);
        if own == heads {
            return part;
        }
        // Neighbouring query heads share a key head.
        let shared = part.reshape([batch, own, 1, rows, width]).repeat_dim(2, heads / own);
        shared.reshape([batch, heads, rows, width])
    });
    let mut scores = capped((q * scale).matmul(k.transpose()), cap);
    if let Some(mask) = mask {
        scores = scores + Tensor::from_data(TensorData::new(mask.to_vec(), [batch, 1, 1, u]), &device);
    }
    if causal {
        let hide = |scores: Tensor<2>, keys| scores.mask_fill(keys, f32::NEG_INFINITY);
        let seen = hide(Tensor::zeros([t, t], &device), Tensor::<2, Bool>::tril_mask([t, t], 0, &device));
        let seen = window.into_iter().fold(seen, |seen, window| {
            hide(seen, Tensor::<2, Bool>::triu_mask([t, t], 1 - window.min(t) as i64, &device))
        });
        scores = scores + seen.unsqueeze();
    }
    let probabilities = softmax(scores, 3);
    let probabilities = dropout.into_iter().fold(probabilities, dropped);
    probabilities.matmul(v).swap_dims(1, 2).reshape([n, d])
}

/// Applies a soft cap, if there is one: `cap * tanh(x / cap)`.
pub(crate) fn capped<const D: usize>(x: Tensor<D>, cap: Option<f64>) -> Tensor<D> {
    cap.into_iter().fold(x, |x, cap| (x / cap).tanh() * cap)
}

/// Applies dropout with a mask that is drawn on the host and copied to the device.
fn dropped<const D: usize>(x: Tensor<D>, dropout: AttentionDropout) -> Tensor<D> {
    let shares: Vec<f32> = (0..x.shape().num_elements() as u64).map(|place| dropout.share(place)).collect();
    let shares = Tensor::from_data(TensorData::new(shares, x.shape()), &x.device());
    x * shares
}

fn cross_entropy(x: Tensor<2>, weight: Tensor<2>, targets: &[i64], options: CrossEntropyOptions) -> Tensor<1> {
    let CrossEntropyOptions { ignored, cap } = options;
    let (device, [vocabulary, _], n) = (x.device(), weight.dims(), targets.len());
    let counts = |target: &i64| ignored != Some(*target);
    let read: Vec<i64> = targets.iter().map(|target| if counts(target) { *target } else { 0 }).collect();
    check("cross-entropy", &read, vocabulary);
    let counted = targets.iter().filter(|target| counts(target)).count().max(1) as f32;
    let shares: Vec<f32> = targets.iter().map(|target| if counts(target) { -1.0 / counted } else { 0.0 }).collect();
    let read = Tensor::<2, Int>::from_data(TensorData::new(read, [n, 1]), &device);
    let shares = Tensor::<2>::from_data(TensorData::new(shares, [n, 1]), &device);
    // (w xᵀ)ᵀ rather than x wᵀ: a view of a gathered weight would keep the full parameter.
    let logits = capped(weight.matmul(x.transpose()).transpose(), cap);
    (log_softmax(logits, 1).gather(1, read) * shares).sum()
}

#[cfg(test)]
mod tests {
    use burn::tensor::Device;

    use super::*;
    use crate::fused::packed_attention;

    #[test]
    fn rows_whose_keys_are_all_masked_see_no_others() {
        let (batch, t, heads, width) = (2, 4, 2, 3);
        let (n, d) = (batch * t, heads * width);
        let values: Vec<f32> = (0..n * 3 * d).map(|at| ((at * 37) % 61) as f32 / 31.0 - 1.0).collect();
        let qkv = || Tensor::<2>::from_data(TensorData::new(values.clone(), [n, 3 * d]), &Device::flex());
        // The only keys that the first rows of the second sequence can see.
        for masked in [-3e4, -1e9] {
            let mask: Vec<f32> = (0..n).map(|at| if (t..t + 2).contains(&at) { masked } else { 0.0 }).collect();
            for window in [None, Some(2)] {
                let options =
                    AttentionOptions { batch, heads, causal: true, window, scale: 0.5, dropout: None, cap: None };
                let op = Op::Attention { options, mask: Some(mask.clone().into()) };
                let plain = Tensor::<2>::from_dispatch(run(op, vec![qkv().into_dispatch()]));
                let mask = Tensor::from_data(TensorData::new(mask.clone(), [batch, t]), &Device::flex());
                let kernel = packed_attention(qkv(), Some(mask), options);
                let apart = (plain - kernel).abs().max().into_scalar::<f32>();
                // Scores as low as the mask keep few significant digits.
                assert!(apart < 1e-5, "masked by {masked}, {window:?}: {apart}");
            }
        }
    }
}
