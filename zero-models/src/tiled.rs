//! A linear layer in tiles that are gathered one at a time (memory-centric tiling, Rajbhandari et al. 2021, section 5.1.3,
//! <https://arxiv.org/abs/2104.07857>).

use burn::module::{Module, Param};
use burn::nn::{Linear, LinearConfig};
use burn::tensor::Tensor;
use burn::tensor::backend::Backend;
use zero_ops::FusedBackend;

use crate::linear::over_rows;

/// A linear layer from `[.., d_in]` to `[.., d_out]` whose weight is split along `d_out` into separate parameters. At stage 3, each tile
/// is gathered for its part of the result and released before the next, forward and backward. Its gradient is reduced and offloaded
/// before the next tile's is computed. A layer larger than memory can be trained this way, with state on a disk
/// (`zero_burn::config::Offload`), on two or more ranks.
///
/// Results and the gradients of weights and biases are bitwise equal to those of a single layer, as far as the backend computes a column
/// of a product independently of the others. The gradient of the input is a sum over tiles, which a single product adds in another
/// order.
///
/// ```
/// use burn::tensor::Tensor;
/// use burn_flex::Flex;
/// use zero_models::TiledLinear;
///
/// let device = Default::default();
/// let layer = TiledLinear::<Flex>::new([64, 100], 3, true, &device);
/// assert_eq!(layer.tiles.len(), 3);
/// assert_eq!(layer.forward(Tensor::<Flex, 3>::ones([2, 5, 64], &device)).dims(), [2, 5, 100]);
/// ```
#[derive(Module, Debug)]
pub struct TiledLinear<B: Backend> {
    /// Tiles `[d_in, ..]`, in the order of the result's columns.
    pub tiles: Vec<Linear<B>>,
}

/// Returns the columns of each of `tiles` tiles of `d_out`: as equal as possible, none empty.
fn widths(d_out: usize, tiles: usize) -> impl Iterator<Item = usize> {
    let tiles = tiles.clamp(1, d_out.max(1));
    (0..tiles).map(move |tile| d_out * (tile + 1) / tiles - d_out * tile / tiles)
}

impl<B: Backend> TiledLinear<B> {
    /// Creates a layer `[d_in, d_out]` of `tiles` tiles (at most `d_out`), with Burn's initial values of a linear layer, which depend on
    /// `d_in` alone.
    pub fn new([d_in, d_out]: [usize; 2], tiles: usize, bias: bool, device: &B::Device) -> Self {
        let tile = |width| LinearConfig::new(d_in, width).with_bias(bias).init(device);
        Self { tiles: widths(d_out, tiles).map(tile).collect() }
    }

    /// Splits `layer` into `tiles` tiles. The full weight is read once.
    pub fn from_linear(layer: Linear<B>, tiles: usize) -> Self {
        let (weight, bias) = (layer.weight.val(), layer.bias.map(|bias| bias.val()));
        let [d_in, d_out] = weight.dims();
        let mut begin = 0;
        let mut tile = |width| {
            let columns = begin..begin + width;
            begin += width;
            let weight = weight.clone().slice([0..d_in, columns.clone()]).detach();
            let bias = bias.clone().map(|bias| Param::from_tensor(bias.slice([columns]).detach()));
            Linear { weight: Param::from_tensor(weight), bias }
        };
        Self { tiles: widths(d_out, tiles).map(&mut tile).collect() }
    }
}

impl<B: FusedBackend> TiledLinear<B> {
    /// Applies the layer to `[.., d_in]`; returns `[.., d_out]`.
    ///
    /// # Panics
    ///
    /// If the last dimension is not `d_in`.
    pub fn forward<const D: usize>(&self, x: Tensor<B, D>) -> Tensor<B, D> {
        over_rows(x, |x_nd| {
            let part = |tile: &Linear<B>| {
                zero_ops::linear(x_nd.clone(), tile.weight.val(), tile.bias.as_ref().map(Param::val), None)
            };
            Tensor::cat(self.tiles.iter().map(part).collect(), 1)
        })
    }
}
