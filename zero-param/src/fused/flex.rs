//! The kernels on Flex's tensors: each operation forward and backward. Products, GELU, embedding lookups and cross-entropy compute bfloat16
//! directly, and so does attention where the CPU has instructions for it; all other operations widen 16-bit operands to fp32.

use std::sync::Arc;

use burn::backend::Flex;
use burn::backend::TensorMetadata;
use burn::backend::flex::FlexTensor;
use burn::backend::ops::FloatTensorOps;
use burn::tensor::{DType, Element};
use bytemuck::Pod;
use half::{bf16, f16};
use zero_kernels::cpu::attention::{self, Inputs, Results, Rows, RowsMut};
use zero_kernels::cpu::half::{Number, Plain};
use zero_kernels::cpu::parallel::gemm_threads;
use zero_kernels::cpu::product_bf16::{Begin, MatrixBf16, Out, is_native, multiply};
use zero_kernels::cpu::{
    Matrix, Operand, buffer, buffer_of, cross_entropy, cross_entropy::WeightGradient, dropout, embedding, gelu,
    layer_norm, linear, quantized, rms_norm, rotary, swiglu,
};
use zero_kernels::options::{AttentionDropout, AttentionOptions, CrossEntropyOptions, Gelu};

use crate::parameter::Parameter;
use crate::tensors::{Raw, narrow, packed, packed_of, tensor, values, widen};

/// An operation with all its arguments other than operands.
#[derive(Debug, Clone)]
pub(crate) enum Op {
    /// Operands: x, weight unless it is `frozen`, bias if any, residual if any.
    Linear { bias: bool, frozen: Option<Frozen> },
    /// Operands: x, gamma, beta if any.
    LayerNorm { epsilon: f32 },
    /// Operands: x, gamma.
    RmsNorm { epsilon: f32 },
    /// Operands: x, bias if any.
    Gelu(Gelu),
    /// Operands: gate, up.
    SwiGlu,
    /// Operand: x. Cosines and sines of the angles of rows, each `[t, pairs]`.
    Rotary { angles: [Arc<[f32]>; 2], pairs: usize },
    /// Operands: packed rows, or queries, keys and values. `mask`, if any, is added to the scores of keys.
    Attention { options: AttentionOptions, mask: Option<Arc<[f32]>> },
    /// Operand: a table of `rows` rows.
    Embedding { ids: Arc<[i64]>, rows: usize },
    /// Operands: x, weight unless it is `frozen`.
    CrossEntropy { targets: Arc<[i64]>, options: CrossEntropyOptions, frozen: Option<Frozen> },
    /// Operand: x.
    Dropout(AttentionDropout),
}

/// A sharded weight that is not trained. It is gathered when it is read, and is no node of autodiff's graph, so that no gradient of it is
/// computed.
#[derive(Debug, Clone)]
pub(crate) struct Frozen {
    pub(crate) parameter: Arc<Parameter>,
    /// The base that the module holds.
    pub(crate) base: Raw,
}

impl Frozen {
    /// Gathers the weight for a forward pass of `x`: as codes if it is quantized and `x` has few rows, for which reading the weight is the
    /// cost.
    fn load_for(&self, x: &FlexTensor) -> Raw {
        let has_few_rows = x.shape()[0] <= quantized::MAX_ROWS && x.dtype() == DType::F32;
        match self.parameter.quantized.filter(|_| has_few_rows) {
            Some(_) => self.parameter.load_codes(),
            None => self.load(false),
        }
    }

    /// Gathers the weight for a forward pass or, with `again`, for a backward pass.
    pub(crate) fn load(&self, again: bool) -> Raw {
        self.parameter.load::<Flex>(&self.base, &Default::default(), again)
    }
}

fn dims<const D: usize>(x: &FlexTensor) -> [usize; D] {
    x.shape().dims()
}

fn matrix<E: Element + Pod>(x: &FlexTensor) -> Matrix<'_, E> {
    let [rows, columns] = dims(x);
    Matrix::new(values(x), rows, columns)
}

fn product(a: MatrixBf16<'_>, b: MatrixBf16<'_>, begin: Option<Begin<'_>>) -> FlexTensor {
    let shape = [a.rows(), b.columns()];
    let mut out = buffer_of::<bf16>(shape[0] * shape[1]);
    multiply(Out::Bf16 { data: &mut out, begin }, a, b, gemm_threads());
    tensor(out, shape)
}

/// Computes `gelu(x + bias)`, with a bias in fp32.
fn gelu_of<T: Number + Element + Pod>(kind: Gelu, x: &FlexTensor, bias: Option<&[f32]>) -> FlexTensor {
    let [n, f] = dims(x);
    let mut out = buffer_of::<T>(n * f);
    gelu::forward(kind, values::<T>(x), bias, &mut out);
    tensor(out, [n, f])
}

/// Returns the gradients of x and, in fp32, of the bias.
fn gelu_backward_of<T: Number + Element + Pod>(
    kind: Gelu,
    x: &FlexTensor,
    bias: Option<&[f32]>,
    gradient: &FlexTensor,
) -> [Option<FlexTensor>; 2] {
    let [n, f] = dims(gradient);
    let mut dx = buffer_of::<T>(n * f);
    let mut d_bias = bias.map(|_| buffer(f));
    gelu::backward(kind, values::<T>(x), bias, values(gradient), &mut dx, d_bias.as_deref_mut());
    [Some(tensor(dx, [n, f])), d_bias.map(|d_bias| tensor(d_bias, [f]))]
}

fn rows_of<T: Plain + Element + Pod>(table: &FlexTensor, ids: &[i64]) -> FlexTensor {
    let ([_, d], n) = (dims(table), ids.len());
    let mut out = buffer_of::<T>(n * d);
    embedding::forward(values(table), ids, &mut out);
    tensor(out, [n, d])
}

/// Returns the loss and, if any gradient is wanted, those of x, in fp32, and of the weight: with the weight's type if the rows are one
/// chunk, otherwise in fp32.
fn cross_entropy_of<T: Operand + Element + Pod>(
    x: &FlexTensor,
    weight: &FlexTensor,
    targets: &[i64],
    options: CrossEntropyOptions,
    wanted: &[bool],
) -> (FlexTensor, Vec<FlexTensor>) {
    let ([rows, width], [vocabulary, _]) = (dims(x), dims(weight));
    let shape = cross_entropy::Shape { rows, width, vocabulary };
    let (x, weight) = (values::<T>(x), values(weight));
    if !wanted.contains(&true) {
        let loss = cross_entropy::forward_backward(shape, x, weight, targets, options, None);
        return (tensor(vec![loss], [1]), Vec::new());
    }
    let mut dx = buffer(rows * width);
    if wanted[1] && cross_entropy::is_one_chunk::<T>(shape) {
        let mut dw = buffer_of::<T>(vocabulary * width);
        let gradients = Some((&mut dx[..], WeightGradient::Rounded(&mut dw)));
        let loss = cross_entropy::forward_backward(shape, x, weight, targets, options, gradients);
        return (tensor(vec![loss], [1]), vec![tensor(dx, [rows, width]), tensor(dw, [vocabulary, width])]);
    }
    // A frozen weight has none.
    let vocabulary = if wanted[1] { vocabulary } else { 0 };
    let mut dw = buffer(vocabulary * width);
    let gradients = Some((&mut dx[..], WeightGradient::Sums(&mut dw)));
    let loss = cross_entropy::forward_backward(shape, x, weight, targets, options, gradients);
    (tensor(vec![loss], [1]), vec![tensor(dx, [rows, width]), tensor(dw, [vocabulary, width])])
}

/// Returns the result of attention, and the log-sum-exp of each query.
fn attention_of<T: Operand + Element + Pod>(
    parts: &[FlexTensor],
    mask: Option<&[f32]>,
    options: &AttentionOptions,
) -> (FlexTensor, FlexTensor) {
    let [n, _] = dims(&parts[0]);
    let parts: Vec<_> = parts.iter().collect();
    let inputs = inputs::<T>(&parts, mask, options);
    let shape = inputs.shape;
    let d = shape.heads * shape.head_width;
    let (mut out, mut lse) = (buffer_of::<T>(n * d), buffer(n * shape.heads));
    attention::forward(inputs, &mut out, &mut lse);
    (tensor(out, [n, d]), tensor(lse, [shape.batch, shape.heads, shape.queries]))
}

/// Returns the gradients of the parts, from the result, the log-sum-exp and the result's gradient.
fn attention_backward_of<T: Operand + Element + Pod>(
    parts: &[&FlexTensor],
    mask: Option<&[f32]>,
    options: &AttentionOptions,
    [out, lse, g]: [&FlexTensor; 3],
) -> Vec<Option<FlexTensor>> {
    let sizes: Vec<[usize; 2]> = parts.iter().map(|part| dims(part)).collect();
    let inputs = inputs::<T>(parts, mask, options);
    let mut gradients: Vec<_> = sizes.iter().map(|[n, width]| buffer_of::<T>(n * width)).collect();
    let grads = match &mut gradients[..] {
        [packed] => RowsMut::split_qkv(packed, sizes[0][1] / 3),
        [dq, dk, dv] => [RowsMut::new(dq, sizes[0][1]), RowsMut::new(dk, sizes[1][1]), RowsMut::new(dv, sizes[2][1])],
        _ => unreachable!("packed rows are one part, others three"),
    };
    attention::backward(inputs, Results { out: values(out), lse: values(lse), g: values(g) }, grads);
    gradients.into_iter().zip(sizes).map(|(part, sizes)| Some(tensor(part, sizes))).collect()
}

impl Op {
    pub(crate) fn name(&self) -> &'static str {
        match self {
            Op::Linear { .. } => "linear",
            Op::LayerNorm { .. } => "layer norm",
            Op::RmsNorm { .. } => "RMS norm",
            Op::Gelu(_) => "gelu",
            Op::SwiGlu => "swiglu",
            Op::Rotary { .. } => "rotary",
            Op::Attention { .. } => "attention",
            Op::Embedding { .. } => "embedding",
            Op::CrossEntropy { .. } => "cross-entropy",
            Op::Dropout(_) => "dropout",
        }
    }

    fn frozen(&self) -> Option<&Frozen> {
        match self {
            Op::Linear { frozen, .. } | Op::CrossEntropy { frozen, .. } => frozen.as_ref(),
            _ => None,
        }
    }

    /// Adds what `of` returns for the operation's frozen weight, if it has one, to a list by operand in the graph.
    pub(crate) fn with_frozen<T>(&self, mut by_operand: Vec<T>, of: impl FnOnce(&Frozen) -> T) -> Vec<T> {
        if let Some(frozen) = self.frozen() {
            by_operand.insert(1, of(frozen));
        }
        by_operand
    }

    /// Adds the frozen weight, if there is one, to the operands of a forward pass.
    pub(crate) fn with_weight(&self, operands: Vec<FlexTensor>) -> Vec<FlexTensor> {
        let x = operands[0].clone();
        let is_linear = matches!(self, Op::Linear { .. });
        self.with_frozen(operands, |frozen| match is_linear {
            true => frozen.load_for(&x),
            false => frozen.load(false),
        })
    }

    /// Inverts [`Op::with_frozen`].
    pub(crate) fn without_frozen<T>(&self, mut by_operand: Vec<T>) -> Vec<T> {
        if self.frozen().is_some() {
            by_operand.remove(1);
        }
        by_operand
    }

    /// Returns whether the backward pass reads operand `index`, given which operands' gradients are `wanted`.
    pub(crate) fn reads(&self, index: usize, wanted: &[bool]) -> bool {
        match (self, index) {
            (Op::Linear { .. }, 0) => wanted[1],
            (Op::Linear { .. }, 1) => wanted[0],
            (Op::LayerNorm { .. } | Op::RmsNorm { .. }, 0 | 1) => true,
            (Op::Gelu(_) | Op::SwiGlu | Op::Attention { .. }, _) => true,
            _ => false,
        }
    }

    /// Returns the result, and the tensors kept for a backward pass that computes the gradients of the operands that are `wanted`.
    pub(crate) fn forward(&self, operands: Vec<FlexTensor>, wanted: &[bool]) -> (FlexTensor, Vec<FlexTensor>) {
        let dtype = operands[0].dtype();
        if dtype == DType::BF16 && self.is_in_bf16() {
            return self.forward_in_bf16(operands.into_iter().map(packed_of::<bf16>).collect(), wanted);
        }
        if let Op::Linear { bias, frozen: Some(Frozen { parameter, .. }) } = self
            && let Some(how) = parameter.quantized.filter(|_| dtype == DType::F32 && operands[1].dtype() == DType::F16)
        {
            let mut operands = operands.into_iter();
            let (x, codes) = (operands.next().map(packed), operands.next().map(packed_of::<f16>));
            let rest: Vec<FlexTensor> = operands.map(packed).collect();
            let (x, codes) = x.zip(codes).expect("a product has two operands");
            let optional = |index: usize| rest.get(index).map(values);
            let [n, _] = dims(&x);
            let mut out = buffer(n * how.width);
            let codes = bytemuck::cast_slice(values::<f16>(&codes));
            let (bias, residual) = (optional(0).filter(|_| *bias), optional(usize::from(*bias)));
            quantized::forward(how, values(&x), codes, bias, residual, &mut out);
            return (tensor(out, [n, how.width]), Vec::new());
        }
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

    /// Returns whether bfloat16 operands are computed without widening.
    fn is_in_bf16(&self) -> bool {
        match self {
            Op::Linear { .. } | Op::Gelu(_) | Op::Embedding { .. } | Op::CrossEntropy { .. } => true,
            Op::Attention { .. } => is_native(),
            _ => false,
        }
    }

    fn forward_in_bf16(&self, x: Vec<FlexTensor>, wanted: &[bool]) -> (FlexTensor, Vec<FlexTensor>) {
        match self {
            Op::Linear { bias, .. } => {
                let residual = x.get(2 + usize::from(*bias)).map(values);
                let bias = x.get(2).filter(|_| *bias).map(values);
                (product(matrix(&x[0]), matrix(&x[1]), Some(Begin { bias, residual })), Vec::new())
            }
            Op::Gelu(kind) => {
                let bias = x.get(1).cloned().map(widen);
                (gelu_of::<bf16>(*kind, &x[0], bias.as_ref().map(values)), Vec::new())
            }
            Op::Attention { options, mask } => {
                let (out, lse) = attention_of::<bf16>(&x, mask.as_deref(), options);
                (out.clone(), vec![lse, out])
            }
            Op::Embedding { ids, .. } => (rows_of::<bf16>(&x[0], ids), Vec::new()),
            Op::CrossEntropy { targets, options, .. } => {
                cross_entropy_of::<bf16>(&x[0], &x[1], targets, *options, wanted)
            }
            other => unreachable!("{} is widened", other.name()),
        }
    }

    fn forward_in_32(&self, x: &[FlexTensor], wanted: &[bool]) -> (FlexTensor, Vec<FlexTensor>) {
        let optional = |index: usize| x.get(index).map(values);
        match self {
            Op::Linear { bias, .. } => {
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
            Op::RmsNorm { epsilon } => {
                let [n, d] = dims(&x[0]);
                let (mut out, mut rrms) = (buffer(n * d), buffer(n));
                rms_norm::forward(values(&x[0]), values(&x[1]), *epsilon, &mut out, &mut rrms);
                (tensor(out, [n, d]), vec![tensor(rrms, [n])])
            }
            Op::Gelu(kind) => (gelu_of::<f32>(*kind, &x[0], optional(1)), Vec::new()),
            Op::SwiGlu => {
                let [n, f] = dims(&x[0]);
                let mut out = buffer(n * f);
                swiglu::forward(values(&x[0]), values(&x[1]), &mut out);
                (tensor(out, [n, f]), Vec::new())
            }
            Op::Rotary { angles, pairs } => (turned(&x[0], angles, *pairs, false), Vec::new()),
            Op::Attention { options, mask } => {
                let (out, lse) = attention_of::<f32>(x, mask.as_deref(), options);
                (out, vec![lse])
            }
            Op::Embedding { ids, .. } => (rows_of::<f32>(&x[0], ids), Vec::new()),
            Op::CrossEntropy { targets, options, .. } => {
                cross_entropy_of::<f32>(&x[0], &x[1], targets, *options, wanted)
            }
            Op::Dropout(dropout) => (dropped(*dropout, &x[0]), Vec::new()),
        }
    }

    /// Returns the gradients of the operands that are `wanted`, in their type, from the operands that were [read](Self::reads).
    pub(crate) fn backward(
        &self,
        read: Vec<Option<FlexTensor>>,
        kept: Vec<FlexTensor>,
        gradient: FlexTensor,
        dtype: DType,
        wanted: &[bool],
    ) -> Vec<Option<FlexTensor>> {
        if let Op::CrossEntropy { .. } = self {
            let factor = values::<f32>(&widen(gradient))[0];
            return kept.into_iter().map(|made| Some(scaled(made, factor, dtype))).collect();
        }
        if dtype == DType::BF16 && self.is_in_bf16() {
            return self.backward_in_bf16(&read, &kept, gradient, wanted);
        }
        let read = read.into_iter().map(|operand| operand.map(widen)).collect();
        let kept = kept.into_iter().map(widen).collect();
        let gradients = self.backward_in_32(read, kept, widen(gradient), wanted);
        gradients.into_iter().map(|gradient| gradient.map(|gradient| narrow(gradient, dtype))).collect()
    }

    fn backward_in_bf16(
        &self,
        read: &[Option<FlexTensor>],
        kept: &[FlexTensor],
        gradient: FlexTensor,
        wanted: &[bool],
    ) -> Vec<Option<FlexTensor>> {
        let operand = |index: usize| read[index].clone().map(packed_of::<bf16>).expect("it is read");
        let g = packed_of::<bf16>(gradient);
        let rounded = |gradient: FlexTensor| narrow(gradient, DType::BF16);
        match self {
            Op::Linear { bias, .. } => {
                let dw = wanted[1].then(|| product(matrix(&operand(0)).transposed(), matrix(&g), None));
                let dx = wanted[0].then(|| product(matrix(&g), matrix(&operand(1)).transposed(), None));
                let mut gradients = vec![dx, dw];
                if *bias {
                    gradients.push(wanted[2].then(|| rounded(sum_of_rows(&widen(g.clone())))));
                }
                // The residual's gradient, if there is a residual.
                gradients.push(Some(g));
                gradients
            }
            Op::Gelu(kind) => {
                let bias = read.get(1).map(|_| widen(operand(1)));
                let [dx, d_bias] = gelu_backward_of::<bf16>(*kind, &operand(0), bias.as_ref().map(values), &g);
                vec![dx, d_bias.map(rounded)]
            }
            Op::Attention { options, mask } => {
                let parts: Vec<_> = (0..read.len()).map(operand).collect();
                let parts: Vec<_> = parts.iter().collect();
                let out = packed_of::<bf16>(kept[1].clone());
                attention_backward_of::<bf16>(&parts, mask.as_deref(), options, [&out, &kept[0], &g])
            }
            Op::Embedding { ids, rows } => {
                let ([_, d], g) = (dims(&g), widen(g));
                let mut table = vec![bf16::ZERO; rows * d];
                embedding::backward_of(ids, values(&g), d, &mut table);
                vec![Some(tensor(table, [*rows, d]))]
            }
            other => unreachable!("{} is widened, or made already", other.name()),
        }
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
            Op::Linear { bias, .. } => {
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
                    gradients.push(wanted[2].then(|| sum_of_rows(&gradient)));
                }
                // The residual's gradient, if there is a residual.
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
            Op::RmsNorm { .. } => {
                let [n, d] = dims(&gradient);
                let (mut dx, mut d_gamma) = (buffer(n * d), buffer(d));
                let [x, gamma] = [0, 1].map(|index| values(operand(index)));
                rms_norm::backward(x, gamma, values(&kept[0]), g, &mut dx, &mut d_gamma);
                vec![Some(tensor(dx, [n, d])), Some(tensor(d_gamma, [d]))]
            }
            Op::Gelu(kind) => {
                let bias = read.get(1).map(|_| values(operand(1)));
                gelu_backward_of::<f32>(*kind, operand(0), bias, &gradient).into()
            }
            Op::SwiGlu => {
                let [n, f] = dims(&gradient);
                let (mut d_gate, mut d_up) = (buffer(n * f), buffer(n * f));
                let [gate, up] = [0, 1].map(|index| values(operand(index)));
                swiglu::backward(gate, up, g, &mut d_gate, &mut d_up);
                [d_gate, d_up].map(|part| Some(tensor(part, [n, f]))).into()
            }
            Op::Rotary { angles, pairs } => vec![Some(turned(&gradient, angles, *pairs, true))],
            Op::Attention { options, mask } => {
                let parts: Vec<_> = (0..read.len()).map(operand).collect();
                attention_backward_of::<f32>(&parts, mask.as_deref(), options, [&kept[1], &kept[0], &gradient])
            }
            Op::Embedding { ids, rows } => {
                let [_, d] = dims(&gradient);
                let mut table = vec![0.0; rows * d];
                embedding::backward(ids, g, d, &mut table);
                vec![Some(tensor(table, [*rows, d]))]
            }
            Op::CrossEntropy { .. } => unreachable!("its gradients are computed in the forward pass"),
            Op::Dropout(dropout) => vec![Some(dropped(*dropout, &gradient))],
        }
    }
}

/// Multiplies a gradient, which cross-entropy has computed in the forward pass, by the gradient of the loss, and converts it.
fn scaled(made: FlexTensor, factor: f32, dtype: DType) -> FlexTensor {
    // Usually 1: the loss was not scaled.
    if factor == 1.0 && made.dtype() == dtype {
        return made;
    }
    let made = widen(made);
    narrow(if factor == 1.0 { made } else { Flex::float_mul_scalar(made, factor.into()) }, dtype)
}

fn turned(x: &FlexTensor, [cos, sin]: &[Arc<[f32]>; 2], pairs: usize, back: bool) -> FlexTensor {
    let [n, d] = dims(x);
    let mut out = buffer(n * d);
    rotary::turn(values(x), [cos, sin], pairs, d, back, &mut out);
    tensor(out, [n, d])
}

fn sum_of_rows(x: &FlexTensor) -> FlexTensor {
    let [_, m] = dims(x);
    let mut sum = buffer(m);
    linear::backward_bias(values(x), &mut sum);
    tensor(sum, [m])
}

fn dropped(dropout: AttentionDropout, x: &FlexTensor) -> FlexTensor {
    let [n, d] = dims(x);
    let mut out = buffer(n * d);
    dropout::apply(dropout, values(x), &mut out);
    tensor(out, [n, d])
}

/// Returns the sizes, and where queries, keys and values are: in packed rows, or in a tensor each.
fn inputs<'a, T: Element + Pod>(
    parts: &[&'a FlexTensor],
    key_mask: Option<&'a [f32]>,
    options: &AttentionOptions,
) -> Inputs<'a, T> {
    let AttentionOptions { batch, heads, causal, window, scale, cap, .. } = *options;
    let [n, width] = dims(parts[0]);
    let (d, length) = (if parts.len() == 1 { width / 3 } else { width }, n / batch);
    let [m, c] = parts.get(1).map_or([n, d], |keys| dims(keys));
    let shape = attention::Shape {
        batch,
        heads,
        kv_heads: c / (d / heads),
        head_width: d / heads,
        queries: length,
        keys: m / batch,
        causal,
        window: window.filter(|&window| window < length),
        scale: scale as f32,
        cap: cap.map(|cap| cap as f32),
    };
    let [q, k, v] = [0, 1, 2].map(|index| match parts {
        [packed] => Rows { data: values(packed).get(index * d..).unwrap_or_default(), stride: width },
        parts => Rows { data: values(parts[index]), stride: dims::<2>(parts[index])[1] },
    });
    Inputs { shape, q, k, v, key_mask }
}
