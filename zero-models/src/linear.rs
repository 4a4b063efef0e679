//! Linear layers and embedding tables that can have adapters, and modules that contain them.

use burn::module::{Module, Param};
use burn::nn::{Dropout, DropoutConfig};
use burn::tensor::backend::Backend;
use burn::tensor::{Int, Tensor};
use zero_ops::FusedBackend;
use zero_ops::quantized::Quantized;

use crate::attention::is_active;

/// Burn's linear layer, with the same parameter names and optionally a LoRA adapter or a quantized weight.
#[derive(Module, Debug)]
pub struct Linear<B: Backend> {
    /// `[d_in, d_out]`
    pub weight: Param<Tensor<B, 2>>,
    /// `[d_out]`
    pub bias: Option<Param<Tensor<B, 1>>>,
    /// LoRA adapter, which is trained instead of the weight.
    pub adapter: Option<Adapter<B>>,
    /// Format of the weight if it has 8 or 4 bits: its rows are then quantized ([`crate::quantize`]).
    #[module(skip)]
    pub quantized: Option<Quantized>,
}

/// A LoRA adapter of a linear layer, or of an embedding table, `[d_in, d_out]`.
#[derive(Module, Debug)]
pub struct Adapter<B: Backend> {
    /// `[d_in, r]`
    pub a: Param<Tensor<B, 2>>,
    /// `[r, d_out]`
    pub b: Param<Tensor<B, 2>>,
    dropout: Dropout,
    scale: f64,
}

impl<B: Backend> From<burn::nn::Linear<B>> for Linear<B> {
    fn from(layer: burn::nn::Linear<B>) -> Self {
        Self { weight: layer.weight, bias: layer.bias, adapter: None, quantized: None }
    }
}

impl<B: Backend> Adapter<B> {
    pub(super) fn new(a: Param<Tensor<B, 2>>, b: Param<Tensor<B, 2>>, dropout: f64, scale: f64) -> Self {
        Self { a, b, dropout: DropoutConfig::new(dropout).init(), scale }
    }
}

impl<B: Backend> Linear<B> {
    /// Returns `[d_in, d_out]`.
    pub fn sizes(&self) -> [usize; 2] {
        let [d_in, d_out] = self.weight.lazy_shape().dims();
        [d_in, self.quantized.map_or(d_out, |how| how.width)]
    }
}

impl<B: FusedBackend> Linear<B> {
    /// Applies the layer to `[.., d_in]`; returns `[.., d_out]`.
    pub fn forward<const D: usize>(&self, x: Tensor<B, D>) -> Tensor<B, D> {
        over_rows(x, |x_nd| self.product(x_nd, self.bias.as_ref().map(Param::val), None))
    }

    /// Computes `x W + bias + residual`, and adds the adapter's output.
    pub(crate) fn product(
        &self,
        x_nd: Tensor<B, 2>,
        bias_f: Option<Tensor<B, 1>>,
        residual_nf: Option<Tensor<B, 2>>,
    ) -> Tensor<B, 2> {
        let weight = self.weight.val();
        let product = |x_nd| match self.quantized {
            Some(how) => zero_ops::quantized_linear(x_nd, weight, bias_f, residual_nf, how),
            None => zero_ops::linear(x_nd, weight, bias_f, residual_nf),
        };
        let Some(adapter) = &self.adapter else { return product(x_nd) };
        let out_nf = product(x_nd.clone());
        let x_nd = if is_active(&adapter.dropout, &x_nd) { adapter.dropout.forward(x_nd) } else { x_nd };
        let low_nr = zero_ops::linear(x_nd, adapter.a.val(), None, None) * adapter.scale;
        zero_ops::linear(low_nr, adapter.b.val(), None, Some(out_nf))
    }
}

/// Looks up rows of a table `[v, d]` by ids and adds the adapter's output: `[n, d]`.
pub(crate) fn rows<B: FusedBackend>(
    table: &Param<Tensor<B, 2>>,
    adapter: &Option<Adapter<B>>,
    ids_n: Tensor<B, 1, Int>,
) -> Tensor<B, 2> {
    let rows_nd = zero_ops::embedding(table.val(), ids_n.clone());
    let Some(adapter) = adapter else { return rows_nd };
    let low_nr = zero_ops::embedding(adapter.a.val(), ids_n) * adapter.scale;
    zero_ops::linear(low_nr, adapter.b.val(), None, Some(rows_nd))
}

/// Applies a layer of rows to `x` `[.., d_in]`; returns `[.., d_out]`.
pub(crate) fn over_rows<B: Backend, const D: usize>(
    x: Tensor<B, D>,
    layer: impl FnOnce(Tensor<B, 2>) -> Tensor<B, 2>,
) -> Tensor<B, D> {
    let mut shape = x.dims();
    let out = layer(x.reshape([shape[..D - 1].iter().product(), shape[D - 1]]));
    shape[D - 1] = out.dims()[1];
    out.reshape(shape)
}

/// Calls `$each` with each field's path below `$path` and the field.
macro_rules! each_field {
    ($each:ident, $path:expr, $($of:ident.$field:ident),*) => {
        $($each(format!("{}.{}", $path, stringify!($field)), &mut $of.$field);)*
    };
}
pub(crate) use each_field;

/// A callback that takes a table's path, its sizes and the slot of its adapter.
pub type VisitEmbedding<'a, B> = dyn FnMut(&str, [usize; 2], &mut Option<Adapter<B>>) + 'a;

/// A module with linear layers that can have adapters.
pub trait Adaptable<B: Backend>: Module<B> {
    /// Calls `each` with the path of every layer that can have an adapter (Burn's field names from the module down, joined by dots) and
    /// the layer.
    fn linears(&mut self, each: &mut dyn FnMut(String, &mut Linear<B>));

    /// Calls `each` with the path of every embedding table that can have an adapter, its sizes and the slot of its adapter: a field with
    /// the table's name and the suffix `_adapter`.
    fn tables(&mut self, _each: &mut VisitEmbedding<'_, B>) {}
}
