//! The rule of propagation: which operations run on pieces.
//!
//! * An elementwise operation whose operands are pieces cut alike (or scalars, or replicated single values) runs on the
//!   pieces and gives a piece. From this follows that Burn's own optimizers keep their state in shards.
//! * A full reduction of a piece is a local reduction and one all-reduce of one number; the result is *replicated*.
//! * Anything else loads its operand, which is correct and counted.
//! * Two combinations would be wrong without a word, because an ordinary tensor differs from rank to rank, and are
//!   refused with a message: a reduced gradient or optimizer state with an ordinary tensor, and a parameter minus an
//!   ordinary tensor of its shape where that is an update (with a gradient that was never reduced), not a loss.

use std::sync::Arc;

use burn_backend::{Backend, Scalar, TensorData, TensorMetadata};
use burn_std::{FloatDType, Shape, Slice};
use zero_core::{Partition, ReduceOp};

use crate::asked;
use crate::birth::{Birth, scope};
use crate::cell::{Cell, Kind, Origin};
use crate::context::Context;
use crate::tensor::{Shard, ZeroTensor};
use crate::trouble::stop;
use crate::values::{of_type, part, read};
use crate::view::{Extent, Views};

/// An elementwise operation of one tensor. It commutes with views: of a parameter it is recorded, of any other piece it
/// is computed.
pub(crate) fn unary<B: Backend>(
    op: &'static str,
    tensor: ZeroTensor<B>,
    f: impl Fn(B::FloatTensorPrimitive) -> B::FloatTensorPrimitive + Send + Sync + 'static,
) -> ZeroTensor<B> {
    asked::computed();
    match tensor {
        ZeroTensor::Dense(_) | ZeroTensor::Activation(_) => ZeroTensor::ordinary([tensor], move |[x]| f(x)),
        ZeroTensor::Replicated(tensor) => ZeroTensor::Replicated(f(tensor)),
        ZeroTensor::Shard(Shard { cell, views }) if cell.is_version() => {
            ZeroTensor::Shard(Shard { cell, views: views.map(Arc::new(move |x, _| f(x))) })
        }
        ZeroTensor::Shard(shard) => piecewise(op, shard, f),
    }
}

/// Computes on the piece of a tensor that is no parameter.
fn piecewise<B: Backend>(
    op: &str,
    Shard { cell, views }: Shard<B>,
    f: impl FnOnce(B::FloatTensorPrimitive) -> B::FloatTensorPrimitive,
) -> ZeroTensor<B> {
    // A gradient that is scaled or clipped is on its way into the optimizer's state or into an update.
    let template = cell.template(Kind::Optimizer, Cell::derivation(op, &[&cell]));
    let cell = Cell::ready(template, f(cell.into_local()));
    let views = views.with_dtype(cell.dtype);
    ZeroTensor::Shard(Shard { cell, views })
}

/// A change of element type.
pub(crate) fn cast<B: Backend>(tensor: ZeroTensor<B>, dtype: FloatDType) -> ZeroTensor<B> {
    if tensor.dtype() == dtype.into() {
        return tensor;
    }
    match unary("float_cast", tensor, move |x| zero_ops::cast::<B>(x, dtype)) {
        ZeroTensor::Shard(Shard { cell, views }) => {
            ZeroTensor::Shard(Shard { cell, views: views.with_dtype(dtype.into()) })
        }
        other => other,
    }
}

/// An elementwise operation of two tensors.
pub(crate) fn binary<B: Backend>(
    op: &'static str,
    lhs: ZeroTensor<B>,
    rhs: ZeroTensor<B>,
    f: impl Fn(B::FloatTensorPrimitive, B::FloatTensorPrimitive) -> B::FloatTensorPrimitive + Send + Sync + 'static,
) -> ZeroTensor<B> {
    match (lhs, rhs) {
        (ZeroTensor::Shard(a), ZeroTensor::Shard(b))
            if Arc::ptr_eq(&a.cell, &b.cell) && a.is_parameter() && a.views.only_maps() && b.views.only_maps() =>
        {
            // Two functions of one parameter are one function of it.
            let views = Views::none(a.cell.shape.clone(), a.views.dtype());
            let (of_a, of_b) = (a.views, b.views);
            let both = move |x: B::FloatTensorPrimitive, extent| {
                f(of_a.apply_maps(x.clone(), extent), of_b.apply_maps(x, extent))
            };
            ZeroTensor::Shard(Shard { cell: a.cell, views: views.map(Arc::new(both)) })
        }
        (ZeroTensor::Shard(a), ZeroTensor::Shard(b)) if computes_on_pieces(&a, &b) => {
            // An optimizer updates a parameter, or mixes it into a gradient (weight decay).
            if a.is_parameter() || b.is_parameter() {
                Context::of(&a.cell).before_update();
            }
            let accumulates = op == ADD && a.cell.kind() == Kind::Gradient && b.cell.kind() == Kind::Gradient;
            let kind = if accumulates { Kind::Gradient } else { Kind::Optimizer };
            let origin =
                if op == SUB && a.is_parameter() { Origin::Version } else { Cell::derivation(op, &[&a.cell, &b.cell]) };
            let parent = if a.cell.slot.is_some() { &a.cell } else { &b.cell };
            let template = parent.template(kind, origin);
            // Without other handles on the operands, the inner backend may compute in place.
            let (x, y) = (a.into_piece(), b.into_piece());
            ZeroTensor::Shard(Shard::new(Cell::ready(template, f(x, y))))
        }
        (ZeroTensor::Shard(a), ZeroTensor::Replicated(b)) if is_single(&b) => {
            unary(op, ZeroTensor::Shard(a), move |x| {
                let b = single_beside::<B>(&x, &b);
                f(x, b)
            })
        }
        (ZeroTensor::Replicated(a), ZeroTensor::Shard(b)) if is_single(&a) => {
            unary(op, ZeroTensor::Shard(b), move |y| f(single_beside::<B>(&y, &a), y))
        }
        (ZeroTensor::Replicated(a), ZeroTensor::Replicated(b)) => ZeroTensor::Replicated(f(a, b)),
        (lhs, rhs) => {
            refuse_unreduced(op, &lhs, &rhs);
            ZeroTensor::ordinary([lhs, rhs], move |[x, y]| f(x, y))
        }
    }
}

/// `single` in the type of `x` and of as many dimensions: what is recorded of a parameter in 16 bit is done to its fp32 master too.
fn single_beside<B: Backend>(x: &B::FloatTensorPrimitive, single: &B::FloatTensorPrimitive) -> B::FloatTensorPrimitive {
    let ones = Shape::from(vec![1; x.shape().num_dims()]);
    of_type::<B>(B::float_reshape(single.clone(), ones), x.dtype())
}

/// The operation that accumulates gradients.
const ADD: &str = "float_add";
/// The operation that ends an optimizer's step.
const SUB: &str = "float_sub";

/// `mask_fill`: elements where `mask` holds become `value`.
pub(crate) fn mask_fill<B: Backend>(
    tensor: ZeroTensor<B>,
    mask: B::BoolTensorPrimitive,
    value: Scalar,
) -> ZeroTensor<B> {
    match tensor {
        ZeroTensor::Shard(shard) if shard.views.only_maps() && mask.shape() == shard.cell.shape => {
            let (partition, place) = (shard.cell.partition, shard.cell.place());
            if !shard.is_parameter() {
                let mask = mask_piece::<B>(mask, partition, place);
                return piecewise("float_mask_fill", shard, |x| B::float_mask_fill(x, mask, value));
            }
            let Shard { cell, views } = shard;
            let views = views.map(Arc::new(move |x, extent| {
                let mask = match extent {
                    Extent::Whole => mask.clone(),
                    Extent::Piece(partition, place) => mask_piece::<B>(mask.clone(), partition, place),
                };
                B::float_mask_fill(x, mask, value)
            }));
            ZeroTensor::Shard(Shard { cell, views })
        }
        tensor => ZeroTensor::ordinary([tensor], move |[x]| B::float_mask_fill(x, mask.clone(), value)),
    }
}

/// `mask_where`: elements where `mask` holds become those of `value`.
pub(crate) fn mask_where<B: Backend>(
    tensor: ZeroTensor<B>,
    mask: B::BoolTensorPrimitive,
    value: ZeroTensor<B>,
) -> ZeroTensor<B> {
    match (tensor, value) {
        (ZeroTensor::Shard(a), ZeroTensor::Shard(b)) if computes_on_pieces(&a, &b) && mask.shape() == a.cell.shape => {
            let mask = mask_piece::<B>(mask, a.cell.partition, a.cell.place());
            binary("float_mask_where", ZeroTensor::Shard(a), ZeroTensor::Shard(b), move |x, y| {
                B::float_mask_where(x, mask.clone(), y)
            })
        }
        (tensor, value) => {
            refuse_unreduced("float_mask_where", &tensor, &value);
            ZeroTensor::ordinary([tensor, value], move |[x, y]| B::float_mask_where(x, mask.clone(), y))
        }
    }
}

fn mask_piece<B: Backend>(mask: B::BoolTensorPrimitive, partition: Partition, place: usize) -> B::BoolTensorPrimitive {
    let range = partition.range(place);
    let flat = B::bool_reshape(mask, Shape::new([partition.numel()]));
    // A rank without a piece computes on one element of filler; any mask value serves.
    let range = if range.is_empty() { 0..1 } else { range };
    B::bool_slice(flat, &[Slice::from(range)])
}

/// The sum of all elements. Of a piece it is added in rank order at every stage, so that stages give the same bits.
pub(crate) fn sum<B: Backend>(tensor: ZeroTensor<B>) -> ZeroTensor<B> {
    reduce(tensor, ReduceOp::Sum, 1.0, B::float_sum, B::float_sum)
}

/// A full reduction: `whole` of an ordinary tensor, `sign * op(piece)` of pieces.
///
/// A parameter is gathered for it, because a forward pass must not wait for another rank to come to the same operation;
/// the result is replicated, as parameters are alike on all ranks.
pub(crate) fn reduce<B: Backend>(
    tensor: ZeroTensor<B>,
    op: ReduceOp,
    sign: f64,
    whole: impl FnOnce(B::FloatTensorPrimitive) -> B::FloatTensorPrimitive,
    piece: impl Fn(B::FloatTensorPrimitive) -> B::FloatTensorPrimitive,
) -> ZeroTensor<B> {
    match tensor {
        ZeroTensor::Dense(_) | ZeroTensor::Activation(_) => ZeroTensor::Dense(whole(tensor.load())),
        ZeroTensor::Shard(shard)
            if shard.views.is_empty() && !shard.is_parameter() && !shard.cell.partition.is_empty() =>
        {
            let neutral = if op == ReduceOp::Sum { 0.0 } else { f64::NEG_INFINITY };
            replicated(&shard.cell, sign * reduce_pieces(&shard.cell, op, neutral, piece))
        }
        alike => ZeroTensor::Replicated(whole(alike.load())),
    }
}

/// Reduces each rank's own piece with `f`, then the numbers in the order of the pieces.
fn reduce_pieces<B: Backend>(
    cell: &Arc<Cell<B>>,
    op: ReduceOp,
    neutral: f64,
    f: impl Fn(B::FloatTensorPrimitive) -> B::FloatTensorPrimitive,
) -> f64 {
    let number = |tensor| read::<B>(f(tensor)).iter::<f64>().next().expect("a full reduction gives one number");
    let mut numbers = vec![neutral; cell.rank.world];
    piece_numbers(cell, number).into_iter().for_each(|(place, number)| numbers[place] = number);
    if !cell.partition.is_whole() {
        // The neutral number changes no bit.
        numbers = Context::of(cell).reduce_scalars(numbers, op);
    }
    let combine = |a: f64, b: f64| if op == ReduceOp::Sum { a + b } else { a.max(b) };
    numbers.into_iter().fold(neutral, combine)
}

/// `number` of each rank's own piece, with its place among them, of those that this rank holds: its own, or, at stage 0, every
/// rank's, so that the same numbers are added in the same order at every stage. Ranks without elements are left out.
fn piece_numbers<B: Backend>(
    cell: &Arc<Cell<B>>,
    number: impl Fn(B::FloatTensorPrimitive) -> f64,
) -> Vec<(usize, f64)> {
    let (owners, place) = cell.rank.owners(cell.partition.numel());
    if !cell.partition.is_whole() {
        return own_piece(cell).map(|piece| (place, number(piece))).into_iter().collect();
    }
    let local = cell.local();
    (0..owners.world())
        .filter(|&place| owners.len(place) > 0)
        .map(|place| (place, number(part::<B>(local.clone(), owners.range(place)))))
        .collect()
}

/// This rank's own piece of what it holds. `None` if it has no elements.
pub(crate) fn own_piece<B: Backend>(cell: &Arc<Cell<B>>) -> Option<B::FloatTensorPrimitive> {
    let own = cell.own();
    (!own.is_empty()).then(|| part::<B>(cell.local(), own))
}

fn replicated<B: Backend>(cell: &Cell<B>, value: f64) -> ZeroTensor<B> {
    let data = TensorData::new(vec![value], Shape::new([1])).convert_dtype(cell.dtype);
    ZeroTensor::Replicated(B::float_from_data(data, &cell.device))
}

/// Whether an operation of `a` and `b` runs on their pieces: they are cut alike, nothing but elementwise operations has
/// been recorded of them, and one of them is not a parameter (two parameters meet in a forward pass, not in an update).
fn computes_on_pieces<B: Backend>(a: &Shard<B>, b: &Shard<B>) -> bool {
    a.cell.partition == b.cell.partition
        && a.cell.shape == b.cell.shape
        && a.views.only_maps()
        && b.views.only_maps()
        && !(a.is_parameter() && b.is_parameter())
}

fn is_single<T: TensorMetadata>(tensor: &T) -> bool {
    tensor.shape().num_elements() == 1
}

/// Notes that a tensor's device is asked for.
pub(crate) fn asked_for_device<B: Backend>(tensor: &ZeroTensor<B>) {
    match tensor {
        ZeroTensor::Dense(_) | ZeroTensor::Activation(_) => asked::of_dense(tensor.shape()),
        ZeroTensor::Shard(shard) if shard.is_parameter() => {
            asked::of_parameter(shard.views.shape(), shard.cell.key);
        }
        _ => asked::computed(),
    }
}

/// Whether a parameter minus an ordinary tensor is an update of it, rather than part of a loss: an optimizer has just asked
/// for both, or nobody else holds the parameter, as its module does in a forward pass. One that was never prepared may not
/// be in such a loss either: its optimizer would leave no other trace.
fn is_update<B: Backend>(shard: &Shard<B>) -> bool {
    let is_prepared = shard.cell.slot.as_ref().is_some_and(|slot| slot.id.get().is_some());
    !is_prepared || Arc::strong_count(&shard.cell) == 1 || asked::is_updated(shard.cell.key)
}

fn refuse_unreduced<B: Backend>(op: &str, lhs: &ZeroTensor<B>, rhs: &ZeroTensor<B>) {
    if scope() != Birth::Dense {
        // An initialiser computes with what it draws (the orthogonal one factorises), alike on all ranks.
        return;
    }
    let (shard, dense) = match (lhs, rhs) {
        (ZeroTensor::Shard(shard), ZeroTensor::Dense(dense)) | (ZeroTensor::Dense(dense), ZeroTensor::Shard(shard)) => {
            (shard, dense)
        }
        _ => return,
    };
    if shard.cell.rank.world == 1 {
        return;
    }
    if !shard.is_parameter() {
        stop(format!(
            "a reduced gradient or optimizer state of shape {:?} meets an ordinary tensor, which differs from rank to \
             rank: pass every gradient through zero_burn::module::collect_grads before accumulating or stepping, and \
             load optimizer records inside zero_burn::load_state",
            shard.views.shape().as_slice()
        ));
    }
    if op == SUB && matches!(lhs, ZeroTensor::Shard(_)) && dense.shape() == *shard.views.shape() && is_update(shard) {
        stop(format!(
            "a parameter of shape {:?} would be updated with a gradient that was never reduced over the ranks: call \
             zero_burn::module::prepare on the model, and zero_burn::module::collect_grads on its gradients, before the \
             optimizer's step",
            shard.cell.shape.as_slice()
        ));
    }
}
