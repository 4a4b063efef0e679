//! The kernels on Flex's tensors: each operation forward and backward.

use std::sync::Arc;

use burn::backend::Flex;
use burn::backend::TensorMetadata;
use burn::backend::flex::{FlexTensor, Layout};
use burn::backend::ops::FloatTensorOps;
use burn::tensor::{Bytes, DType, Shape};
use zero_kernels::cpu::attention::{self, Rows, RowsMut};
use zero_kernels::cpu::{Matrix, buffer, cross_entropy, dropout, embedding, gelu, layer_norm, linear};
use zero_kernels::options::{AttentionDropout, AttentionOptions, Gelu};

/// An operation with all that it is told beside its operands.
#[derive(Debug, Clone)]
pub(crate) enum Op {
    /// Of x, weight, bias if there is one, residual if there is one.
    Linear { bias: bool },
    /// Of x, gamma, beta if there is one.
    LayerNorm { epsilon: f32 },
    /// Of x, bias if there is one.
    Gelu(Gelu),
    /// Of packed rows, or of queries, keys and values. What is added to the scores of keys, if anything is.
    Attention { options: AttentionOptions, mask: Option<Arc<[f32]>> },
    /// Of a table of so many rows.
    Embedding { ids: Arc<[i64]>, rows: usize },
    /// Of x, weight.
    CrossEntropy { targets: Arc<[i64]>, ignored: Option<i64> },
    /// Of x.
    Dropout(AttentionDropout),
}

/// In row-major order without gaps; a copy only if it is not.
fn packed(x: FlexTensor) -> FlexTensor {
    if x.as_slice::<f32>().is_some() { x } else { x.to_contiguous() }
}

fn values(x: &FlexTensor) -> &[f32] {
    x.as_slice().expect("it was packed")
}

fn tensor<const D: usize>(data: Vec<f32>, shape: [usize; D]) -> FlexTensor {
    FlexTensor::new(Bytes::from_elems(data), Layout::contiguous(Shape::from(shape)), DType::F32)
}

fn dims<const D: usize>(x: &FlexTensor) -> [usize; D] {
    x.shape().dims()
}

fn matrix(x: &FlexTensor) -> Matrix<'_> {
    let [rows, columns] = dims(x);
    Matrix::new(values(x), rows, columns)
}

fn widen(x: FlexTensor) -> FlexTensor {
    packed(if x.dtype() == DType::F32 { x } else { Flex::float_cast(x, DType::F32.into()) })
}

fn narrow(x: FlexTensor, dtype: DType) -> FlexTensor {
    if x.dtype() == dtype { x } else { Flex::float_cast(x, dtype.into()) }
}

impl Op {
    pub(crate) fn name(&self) -> &'static str {
        match self {
            Op::Linear { .. } => "linear",
            Op::LayerNorm { .. } => "layer norm",
            Op::Gelu(_) => "gelu",
            Op::Attention { .. } => "attention",
            Op::Embedding { .. } => "embedding",
            Op::CrossEntropy { .. } => "cross-entropy",
            Op::Dropout(_) => "dropout",
        }
    }

    /// Whether the backward pass reads the operand of number `index`, if the gradients of those `wanted` are.
    pub(crate) fn reads(&self, index: usize, wanted: &[bool]) -> bool {
        match (self, index) {
            (Op::Linear { .. }, 0) => wanted[1],
            (Op::Linear { .. }, 1) => wanted[0],
            (Op::LayerNorm { .. }, 0 | 1) | (Op::Gelu(_) | Op::Attention { .. }, _) => true,
            _ => false,
        }
    }

    /// The result, and what is kept of it for a backward pass that makes the gradients of operands that are `wanted`.
    pub(crate) fn forward(&self, operands: Vec<FlexTensor>, wanted: &[bool]) -> (FlexTensor, Vec<FlexTensor>) {
        let dtype = operands[0].dtype();
        let operands: Vec<FlexTensor> = operands.into_iter().map(widen).collect();
        let (out, mut kept) = self.forward_in_32(&operands, wanted);
        if let Op::CrossEntropy { .. } = self {
            return (out, kept);
        }
        let out = narrow(out, dtype);
        if let Op::Attention { .. } = self {
            kept.push(out.clone());
        }
        (out, kept)
    }

    fn forward_in_32(&self, x: &[FlexTensor], wanted: &[bool]) -> (FlexTensor, Vec<FlexTensor>) {
        let optional = |index: usize| x.get(index).map(values);
        match self {
            Op::Linear { bias } => {
                let (w, [n, _]) = (matrix(&x[1]), dims(&x[0]));
                let mut out = buffer(n * w.columns());
                let residual = 2 + usize::from(*bias);
                let bias = optional(2).filter(|_| *bias);
                linear::forward(values(&x[0]), w, bias, optional(residual), &mut out);
                (tensor(out, [n, w.columns()]), Vec::new())
            }
            Op::LayerNorm { epsilon } => {
                let [n, d] = dims(&x[0]);
                let (mut out, mut mean, mut rstd) = (buffer(n * d), buffer(n), buffer(n));
                let [x, gamma] = [0, 1].map(|index| values(&x[index]));
                layer_norm::forward(x, gamma, optional(2), *epsilon, &mut out, &mut mean, &mut rstd);
                (tensor(out, [n, d]), vec![tensor(mean, [n]), tensor(rstd, [n])])
            }
            Op::Gelu(kind) => {
                let [n, f] = dims(&x[0]);
                let mut out = buffer(n * f);
                gelu::forward(*kind, values(&x[0]), optional(1), &mut out);
                (tensor(out, [n, f]), Vec::new())
            }
            Op::Attention { options, mask } => {
                let [n, _] = dims(&x[0]);
                let (shape, [q, k, v]) = heads(&x.iter().collect::<Vec<_>>(), options);
                let d = shape.heads * shape.head_width;
                let (mut out, mut lse) = (buffer(n * d), buffer(n * shape.heads));
                attention::forward(shape, q, k, v, mask.as_deref(), &mut out, &mut lse);
                (tensor(out, [n, d]), vec![tensor(lse, [shape.batch, shape.heads, shape.queries])])
            }
            Op::Embedding { ids, .. } => {
                let ([_, d], n) = (dims(&x[0]), ids.len());
                let mut out = buffer(n * d);
                embedding::forward(values(&x[0]), ids, &mut out);
                (tensor(out, [n, d]), Vec::new())
            }
            Op::CrossEntropy { targets, ignored } => {
                let ([rows, width], [vocabulary, _]) = (dims(&x[0]), dims(&x[1]));
                let shape = cross_entropy::Shape { rows, width, vocabulary };
                let [x, w] = [0, 1].map(|index| values(&x[index]));
                if !wanted.contains(&true) {
                    let loss = cross_entropy::forward_backward(shape, x, w, targets, *ignored, None);
                    return (tensor(vec![loss], [1]), Vec::new());
                }
                // A frozen weight has none.
                let vocabulary = if wanted[1] { vocabulary } else { 0 };
                let (mut dx, mut dw) = (buffer(rows * width), buffer(vocabulary * width));
                let gradients = Some((&mut dx[..], &mut dw[..]));
                let loss = cross_entropy::forward_backward(shape, x, w, targets, *ignored, gradients);
                (tensor(vec![loss], [1]), vec![tensor(dx, [rows, width]), tensor(dw, [vocabulary, width])])
            }
            Op::Dropout(dropout) => (dropped(*dropout, &x[0]), Vec::new()),
        }
    }

    /// The gradients of operands that are `wanted`, in their type, from the operands that were [read](Self::reads).
    pub(crate) fn backward(
        &self,
        read: Vec<Option<FlexTensor>>,
        kept: Vec<FlexTensor>,
        gradient: FlexTensor,
        dtype: DType,
        wanted: &[bool],
    ) -> Vec<Option<FlexTensor>> {
        let read = read.into_iter().map(|operand| operand.map(widen)).collect();
        let kept = kept.into_iter().map(widen).collect();
        let gradients = self.backward_in_32(read, kept, widen(gradient), wanted);
        gradients.into_iter().map(|gradient| gradient.map(|gradient| narrow(gradient, dtype))).collect()
    }

    fn backward_in_32(
        &self,
        read: Vec<Option<FlexTensor>>,
        kept: Vec<FlexTensor>,
        gradient: FlexTensor,
        wanted: &[bool],
    ) -> Vec<Option<FlexTensor>> {
        let operand = |index: usize| read[index].as_ref().expect("it is read");
        let g = values(&gradient);
        match self {
            Op::Linear { bias } => {
                let [n, m] = dims(&gradient);
                let dw = wanted[1].then(|| {
                    let [_, k] = dims(operand(0));
                    let mut dw = buffer(k * m);
                    linear::backward_w(values(operand(0)), g, k, &mut dw);
                    tensor(dw, [k, m])
                });
                let dx = wanted[0].then(|| {
                    let w = matrix(operand(1));
                    let mut dx = buffer(n * w.rows());
                    linear::backward_x(g, w, &mut dx);
                    tensor(dx, [n, w.rows()])
                });
                let mut gradients = vec![dx, dw];
                if *bias {
                    gradients.push(wanted[2].then(|| {
                        let mut db = buffer(m);
                        linear::backward_bias(g, &mut db);
                        tensor(db, [m])
                    }));
                }
                // Of the residual, if there is one.
                gradients.push(Some(gradient));
                gradients
            }
            Op::LayerNorm { .. } => {
                let [n, d] = dims(&gradient);
                let (mut dx, mut d_gamma, mut d_beta) = (buffer(n * d), buffer(d), buffer(d));
                let [x, gamma] = [0, 1].map(|index| values(operand(index)));
                let [mean, rstd] = [0, 1].map(|index| values(&kept[index]));
                layer_norm::backward(x, gamma, mean, rstd, g, &mut dx, &mut d_gamma, Some(&mut d_beta));
                vec![Some(tensor(dx, [n, d])), Some(tensor(d_gamma, [d])), Some(tensor(d_beta, [d]))]
            }
            Op::Gelu(kind) => {
                let [n, f] = dims(&gradient);
                let bias = read.get(1).map(|_| values(operand(1)));
                let mut dx = buffer(n * f);
                let mut d_bias = bias.map(|_| buffer(f));
                gelu::backward(*kind, values(operand(0)), bias, g, &mut dx, d_bias.as_deref_mut());
                vec![Some(tensor(dx, [n, f])), d_bias.map(|d_bias| tensor(d_bias, [f]))]
            }
            Op::Attention { options, mask } => {
                let [n, width] = dims(operand(0));
                let parts: Vec<_> = (0..read.len()).map(operand).collect();
                let (shape, [q, k, v]) = heads(&parts, options);
                let [lse, out] = [0, 1].map(|index| values(&kept[index]));
                let mut gradients: Vec<_> = parts.iter().map(|_| buffer(n * width)).collect();
                let [dq, dk, dv] = match &mut gradients[..] {
                    [packed] => RowsMut::split_qkv(packed, width / 3),
                    [dq, dk, dv] => [dq, dk, dv].map(|part| RowsMut::new(part, width)),
                    _ => unreachable!("packed rows are one part, others three"),
                };
                attention::backward(shape, q, k, v, mask.as_deref(), out, lse, g, dq, dk, dv);
                gradients.into_iter().map(|part| Some(tensor(part, [n, width]))).collect()
            }
            Op::Embedding { ids, rows } => {
                let [_, d] = dims(&gradient);
                let mut table = vec![0.0; rows * d];
                embedding::backward(ids, g, d, &mut table);
                vec![Some(tensor(table, [*rows, d]))]
            }
            Op::CrossEntropy { .. } => {
                let factor = g[0];
                // The usual factor: nothing was done to the loss.
                let scaled = |x| if factor == 1.0 { x } else { Flex::float_mul_scalar(x, factor.into()) };
                kept.into_iter().map(|made| Some(scaled(made))).collect()
            }
            Op::Dropout(dropout) => vec![Some(dropped(*dropout, &gradient))],
        }
    }
}

fn dropped(dropout: AttentionDropout, x: &FlexTensor) -> FlexTensor {
    let [n, d] = dims(x);
    let mut out = buffer(n * d);
    dropout::apply(dropout, values(x), &mut out);
    tensor(out, [n, d])
}

/// The sizes, and where queries, keys and values lie: in packed rows, or each by itself.
fn heads<'a>(parts: &[&'a FlexTensor], options: &AttentionOptions) -> (attention::Shape, [Rows<'a>; 3]) {
    let AttentionOptions { batch, heads, causal, window, scale, .. } = *options;
    let [n, width] = dims(parts[0]);
    let (d, length) = (if parts.len() == 1 { width / 3 } else { width }, n / batch);
    let shape = attention::Shape {
        batch,
        heads,
        kv_heads: heads,
        head_width: d / heads,
        queries: length,
        keys: length,
        causal,
        window: window.filter(|&window| window < length),
        scale: scale as f32,
    };
    let data = |index: usize| match parts {
        [packed] => values(packed).get(index * d..).unwrap_or_default(),
        parts => values(parts[index]),
    };
    let part = |index: usize| Rows { data: data(index), stride: width };
    (shape, [0, 1, 2].map(part))
}
