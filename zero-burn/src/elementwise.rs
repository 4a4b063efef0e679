//! The propagation rule: which operations run on shards.
//!
//! * An elementwise operation whose operands are shards with equal partitions (or scalars, or replicated single values) runs on the shards
//!   and returns a shard. As a consequence, Burn's own optimizers keep their state in shards.
//! * An operation on several versions of one parameter is recorded, as in a penalty on its change. Once a module holds none of them any
//!   more, it can only be part of what a program keeps of the past, such as a moving average: it is computed on shards and stays a shard.
//! * A full reduction of a shard is a local reduction and one all-reduce of one number; the result is *replicated*.
//! * Anything else loads its operand, which is correct and counted.
//! * Two combinations would silently be wrong, because an ordinary tensor differs from rank to rank. They are rejected with an error: a
//!   reduced gradient or optimizer state with an ordinary tensor, and a parameter minus an ordinary tensor of its shape if that is an
//!   update (with a gradient that was never reduced) and not a loss.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use burn_backend::{Backend, Scalar, TensorData, TensorMetadata};
use burn_std::{FloatDType, Shape, Slice};
use zero_core::{Partition, ReduceOp};
use zero_engine::cell::slice_shard;
use zero_engine::values::part;

use crate::abort::stop;
use crate::asked;
use crate::birth::{Birth, scope};
use crate::context::Context;
use crate::engine::{Cell, Inner, Kind, Origin, burn_dtype, burn_shape};
use crate::tensor::{Shard, ZeroTensor};
use crate::values::{of_type, read};
use crate::view::{Extent, Views};

/// Applies an elementwise operation to one tensor. It commutes with views: on a parameter it is recorded, on any other shard it is
/// computed.
pub(crate) fn unary<B: Backend>(
    op: &'static str,
    tensor: ZeroTensor<B>,
    f: impl Fn(B::FloatTensorPrimitive) -> B::FloatTensorPrimitive + Send + Sync + 'static,
) -> ZeroTensor<B> {
    asked::computed();
    let tensor = of_the_past(tensor);
    match tensor {
        ZeroTensor::Dense(_) | ZeroTensor::Activation(_) => ZeroTensor::ordinary([tensor], move |[x]| f(x)),
        ZeroTensor::Replicated(tensor) => ZeroTensor::Replicated(f(tensor)),
        ZeroTensor::Shard(Shard { cell, views }) if cell.is_version() => {
            let views = views.map(Arc::new(move |x: B::FloatTensorPrimitive, _| f(x)));
            ZeroTensor::Shard(folded(Shard { cell, views }))
        }
        ZeroTensor::Shard(shard) => piecewise(op, shard, f),
    }
}

/// Creates the next version of a parameter that a program has changed again and again without an optimizer, such as a temperature that it
/// lowers in each step: otherwise every use would repeat all operations.
fn folded<B: Backend>(shard: Shard<B>) -> Shard<B> {
    const MOST: usize = 64;
    if shard.views.len() < MOST || !shard.views.only_maps() || !shard.views.others().is_empty() {
        return shard;
    }
    let template = shard.cell.template(Kind::Parameter, Origin::Version);
    let is_cut = shard.cell.rank.config.stage.shards_parameters() || shard.cell.partition.is_whole();
    Shard::new(match is_cut {
        true => Cell::ready(template, shard.into_piece()),
        false => Cell::full(template, ZeroTensor::Shard(shard).load()),
    })
}

/// Computes on the shard of a tensor that is not a parameter.
fn piecewise<B: Backend>(
    op: &str,
    Shard { cell, views }: Shard<B>,
    f: impl FnOnce(B::FloatTensorPrimitive) -> B::FloatTensorPrimitive,
) -> ZeroTensor<B> {
    // A gradient that is scaled or clipped is on its way into the optimizer's state or into an update.
    let kind = if cell.kind() == Kind::Average { Kind::Average } else { Kind::Optimizer };
    let template = cell.template(kind, Cell::derivation(op, &[&cell]));
    let cell = Cell::ready(template, f(cell.into_local()));
    let views = views.with_dtype(burn_dtype(cell.dtype));
    ZeroTensor::Shard(Shard { cell, views })
}

/// Changes the element type.
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

/// Applies an elementwise operation to two tensors.
pub(crate) fn binary<B: Backend>(
    op: &'static str,
    lhs: ZeroTensor<B>,
    rhs: ZeroTensor<B>,
    f: impl Fn(B::FloatTensorPrimitive, B::FloatTensorPrimitive) -> B::FloatTensorPrimitive + Send + Sync + 'static,
) -> ZeroTensor<B> {
    let (lhs, rhs) = edited_alike(of_the_past(lhs), of_the_past(rhs));
    match (lhs, rhs) {
        (ZeroTensor::Shard(a), ZeroTensor::Shard(b))
            if Arc::ptr_eq(&a.cell, &b.cell) && a.is_parameter() && a.views.only_maps() && b.views.only_maps() =>
        {
            // Two functions of one parameter are one function of it.
            let others = [a.views.others(), b.views.others()].concat();
            let views = Views::none(burn_shape(&a.cell.shape), a.views.dtype()).with_others(others);
            let (of_a, of_b) = (a.views, b.views);
            let both = move |x: B::FloatTensorPrimitive, extent| {
                f(of_a.apply_maps(x.clone(), extent), of_b.apply_maps(x, extent))
            };
            ZeroTensor::Shard(Shard { cell: a.cell, views: views.map(Arc::new(both)) })
        }
        (ZeroTensor::Shard(a), ZeroTensor::Shard(b)) if are_versions(&a, &b) => {
            let others = [a.views.others(), b.views.others(), std::slice::from_ref(&b.cell)].concat();
            let views = Views::none(burn_shape(&a.cell.shape), a.views.dtype()).with_others(others);
            let (of_a, Shard { cell: other, views: of_b }) = (a.views, b);
            let both = move |x: B::FloatTensorPrimitive, extent| {
                let y = match extent {
                    Extent::Whole => Context::load(&other),
                    Extent::Piece(..) => Shard::new(other.clone()).into_piece(),
                };
                f(of_a.apply_maps(x, extent), of_b.apply_maps(y, extent))
            };
            ZeroTensor::Shard(Shard { cell: a.cell, views: views.map(Arc::new(both)) })
        }
        (ZeroTensor::Shard(a), ZeroTensor::Shard(b)) if computes_on_pieces(&a, &b) => {
            let kinds = [&a, &b].map(|shard| shard.cell.kind());
            let is_average = [&a, &b].iter().any(|shard| !shard.is_parameter() && shard.cell.kind() == Kind::Average);
            // An optimizer updates a parameter, or mixes it into a gradient (weight decay).
            if !is_average && (a.is_parameter() || b.is_parameter()) {
                Context::of(&a.cell).before_update();
            }
            let kind = match kinds {
                [Kind::Gradient, Kind::Gradient] if op == ADD => Kind::Gradient,
                [Kind::Average | Kind::Parameter, Kind::Average | Kind::Parameter] => Kind::Average,
                _ => Kind::Optimizer,
            };
            // Weight decay is added to a gradient, and an update to its parameter.
            let updates = op == SUB || op == ADD && a.views.is_empty() && kinds[1] == Kind::Optimizer;
            let origin = match updates && a.is_parameter() && !is_average {
                true => Origin::Version,
                false => Cell::derivation(op, &[&a.cell, &b.cell]),
            };
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
        (lhs, rhs) => match masks(op, lhs, rhs) {
            Ok((Shard { cell, views }, mask, is_first)) => {
                let piece = slice_shard::<Inner<B>>(mask, cell.partition, cell.place());
                piecewise(op, Shard { cell, views }, |x| if is_first { f(x, piece) } else { f(piece, x) })
            }
            Err((lhs, rhs)) => {
                refuse_unreduced(op, &lhs, &rhs);
                ZeroTensor::ordinary([lhs, rhs], move |[x, y]| f(x, y))
            }
        },
    }
}

/// Finds a reduced gradient that is multiplied or divided by an ordinary tensor. That tensor is a mask or a scale, the same on all ranks,
/// because programs do not multiply gradients with each other. Also returns whether the gradient is the first operand. Returns the operands
/// if there is no such gradient.
#[allow(clippy::type_complexity, clippy::result_large_err)] // The operands again.
fn masks<B: Backend>(
    op: &str,
    lhs: ZeroTensor<B>,
    rhs: ZeroTensor<B>,
) -> Result<(Shard<B>, B::FloatTensorPrimitive, bool), (ZeroTensor<B>, ZeroTensor<B>)> {
    let is_collected = |shard: &Shard<B>| !shard.is_parameter() && shard.views.only_maps();
    let fits = |shard: &Shard<B>, mask: &B::FloatTensorPrimitive| {
        let (shape, mask) = (&shard.cell.shape, mask.shape());
        mask.num_dims() == shape.len() && mask.iter().zip(shape.iter()).all(|(of, to)| of == to || *of == 1)
    };
    let whole = |shard: &Shard<B>, mask| B::float_expand(mask, burn_shape(&shard.cell.shape));
    match (lhs, rhs) {
        (ZeroTensor::Shard(shard), ZeroTensor::Dense(mask))
            if [MUL, DIV].contains(&op) && is_collected(&shard) && fits(&shard, &mask) =>
        {
            let mask = whole(&shard, mask);
            Ok((shard, mask, true))
        }
        (ZeroTensor::Dense(mask), ZeroTensor::Shard(shard))
            if op == MUL && is_collected(&shard) && fits(&shard, &mask) =>
        {
            let mask = whole(&shard, mask);
            Ok((shard, mask, false))
        }
        operands => Err(operands),
    }
}

/// Computes, as a shard, an operation recorded on versions of a parameter of which none is the latest any more.
fn of_the_past<B: Backend>(tensor: ZeroTensor<B>) -> ZeroTensor<B> {
    match tensor {
        ZeroTensor::Shard(shard)
            if !shard.views.others().is_empty()
                && shard.views.only_maps()
                && !std::iter::once(&shard.cell).chain(shard.views.others()).any(Cell::is_current) =>
        {
            let cells: Vec<&Cell<B>> =
                std::iter::once(&shard.cell).chain(shard.views.others()).map(|cell| &**cell).collect();
            let template = shard.cell.template(Kind::Average, Cell::derivation("past", &cells));
            ZeroTensor::Shard(Shard::new(Cell::ready(template, shard.into_piece())))
        }
        other => other,
    }
}

/// Turns an ordinary tensor that has replaced a parameter, alike on all ranks ([`Slot::is_edited`]), into a version of the parameter, if it
/// meets the parameter's gradient or update.
///
/// [`Slot::is_edited`]: zero_engine::cell::slot::Reduction::is_edited
fn edited_alike<B: Backend>(lhs: ZeroTensor<B>, rhs: ZeroTensor<B>) -> (ZeroTensor<B>, ZeroTensor<B>) {
    let version = |dense: B::FloatTensorPrimitive, shard: &Shard<B>| {
        let template = shard.cell.template(Kind::Parameter, Origin::Version);
        let sharded = shard.cell.rank.config.stage.shards_parameters() || shard.cell.partition.is_whole();
        ZeroTensor::Shard(Shard::new(match sharded {
            true => Cell::ready(template, slice_shard::<Inner<B>>(dense, shard.cell.partition, shard.cell.place())),
            false => Cell::full(template, dense),
        }))
    };
    let is_edited = |shard: &Shard<B>, dense: &B::FloatTensorPrimitive| {
        let slot = shard.cell.slot.as_ref().filter(|slot| slot.reduction.is_edited.load(Ordering::Relaxed));
        slot.is_some_and(|slot| !shard.is_parameter() && slot.shape[..] == *dense.shape().as_slice())
    };
    match (lhs, rhs) {
        (ZeroTensor::Dense(dense), ZeroTensor::Shard(shard)) if is_edited(&shard, &dense) => {
            (version(dense, &shard), ZeroTensor::Shard(shard))
        }
        (ZeroTensor::Shard(shard), ZeroTensor::Dense(dense)) if is_edited(&shard, &dense) => {
            let dense = version(dense, &shard);
            (ZeroTensor::Shard(shard), dense)
        }
        operands => operands,
    }
}

/// Returns whether these are different versions of one parameter, or functions of such.
fn are_versions<B: Backend>(a: &Shard<B>, b: &Shard<B>) -> bool {
    let slots = a.cell.slot.as_ref().zip(b.cell.slot.as_ref());
    slots.is_some_and(|(one, other)| Arc::ptr_eq(one, other))
        && !Arc::ptr_eq(&a.cell, &b.cell)
        && a.is_parameter()
        && b.is_parameter()
        && a.views.only_maps()
        && b.views.only_maps()
}

/// Returns `single` in the type of `x`, with as many dimensions: an operation recorded on a 16-bit parameter is applied to its fp32 master
/// too.
fn single_beside<B: Backend>(x: &B::FloatTensorPrimitive, single: &B::FloatTensorPrimitive) -> B::FloatTensorPrimitive {
    let ones = Shape::from(vec![1; x.shape().num_dims()]);
    of_type::<B>(B::float_reshape(single.clone(), ones), x.dtype())
}

/// The operation that accumulates gradients.
const ADD: &str = "float_add";
/// The operation that ends an optimizer's step.
const SUB: &str = "float_sub";
/// The operations of a mask and of a scale.
const MUL: &str = "float_mul";
const DIV: &str = "float_div";

/// Sets elements where `mask` holds to `value`.
pub(crate) fn mask_fill<B: Backend>(
    tensor: ZeroTensor<B>,
    mask: B::BoolTensorPrimitive,
    value: Scalar,
) -> ZeroTensor<B> {
    match tensor {
        ZeroTensor::Shard(shard) if shard.views.only_maps() && *mask.shape().as_slice() == shard.cell.shape[..] => {
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

/// Sets elements where `mask` holds to those of `value`.
pub(crate) fn mask_where<B: Backend>(
    tensor: ZeroTensor<B>,
    mask: B::BoolTensorPrimitive,
    value: ZeroTensor<B>,
) -> ZeroTensor<B> {
    match (tensor, value) {
        (ZeroTensor::Shard(a), ZeroTensor::Shard(b))
            if computes_on_pieces(&a, &b) && *mask.shape().as_slice() == a.cell.shape[..] =>
        {
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
    // A rank with an empty shard computes on one filler element; any mask value works.
    let range = if range.is_empty() { 0..1 } else { range };
    B::bool_slice(flat, &[Slice::from(range)])
}

/// Sums all elements. Shards are summed in rank order at every stage, so that stages give the same bits.
pub(crate) fn sum<B: Backend>(tensor: ZeroTensor<B>) -> ZeroTensor<B> {
    reduce(tensor, ReduceOp::Sum, 1.0, B::float_sum, B::float_sum)
}

/// Reduces a tensor fully: an ordinary tensor by `whole`, shards by `sign * op(piece)`.
///
/// A parameter is gathered first, because a forward pass must not wait for another rank to reach the same operation. The result is
/// replicated, because parameters are equal on all ranks.
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

/// Reduces each rank's own shard with `f`, then the numbers in the order of the shards.
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
        // The neutral number changes no bits.
        numbers = Context::of(cell).reduce_scalars(numbers, op);
    }
    let combine = |a: f64, b: f64| if op == ReduceOp::Sum { a + b } else { a.max(b) };
    numbers.into_iter().fold(neutral, combine)
}

/// Returns `number` for the ranks' own shards that this rank holds, each with its place: its own or, at stage 0, every rank's. So the same
/// numbers are added in the same order at every stage. Ranks without elements are left out.
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
        .map(|place| (place, number(part::<Inner<B>>(local.clone(), owners.range(place)))))
        .collect()
}

/// Returns the part of the held shard that is this rank's own, or `None` if it has no elements.
pub(crate) fn own_piece<B: Backend>(cell: &Arc<Cell<B>>) -> Option<B::FloatTensorPrimitive> {
    let own = cell.own();
    (!own.is_empty()).then(|| part::<Inner<B>>(cell.local(), own))
}

fn replicated<B: Backend>(cell: &Cell<B>, value: f64) -> ZeroTensor<B> {
    let data = TensorData::new(vec![value], Shape::new([1])).convert_dtype(burn_dtype(cell.dtype));
    ZeroTensor::Replicated(B::float_from_data(data, &cell.device))
}

/// Returns whether an operation on `a` and `b` runs on their shards: they have equal partitions, only elementwise operations have been
/// recorded on them, and one of them is not a parameter (two parameters meet in a forward pass, not in an update).
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

/// Notes that a tensor's device is queried.
pub(crate) fn asked_for_device<B: Backend>(tensor: &ZeroTensor<B>) {
    match tensor {
        ZeroTensor::Dense(_) | ZeroTensor::Activation(_) => asked::of_dense(tensor.shape()),
        ZeroTensor::Shard(shard) if shard.is_parameter() => {
            asked::of_parameter(shard.views.shape(), shard.cell.key);
        }
        _ => asked::computed(),
    }
}

/// Returns whether a parameter minus an ordinary tensor is an update of it, rather than part of a loss or a moving average: an optimizer
/// has just queried both, or nothing else holds the parameter, as its module does in a forward pass. Returns `false` for a version that an
/// update with a reduced gradient has just created: no backward pass could have given another gradient. Returns `true` for a parameter that
/// was never prepared: its optimizer would leave no other trace.
fn is_update<B: Backend>(shard: &Shard<B>) -> bool {
    let Some(slot) = shard.cell.slot.as_ref().filter(|slot| slot.id.get().is_some()) else { return true };
    let may_be = Arc::strong_count(&shard.cell) == 1 || asked::is_updated(shard.cell.key);
    let reduced = slot.reduction.reduced_version.load(Ordering::Relaxed);
    let is_fresh = reduced > 0 && shard.cell.key.is_some_and(|key| key.version > reduced);
    may_be && shard.cell.is_current() && !is_fresh
}

fn refuse_unreduced<B: Backend>(op: &str, lhs: &ZeroTensor<B>, rhs: &ZeroTensor<B>) {
    if scope() != Birth::Dense {
        // An initializer computes with what it draws (the orthogonal one factorizes), alike on all ranks.
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
    if !shard.is_parameter() && shard.cell.kind() != Kind::Average {
        stop(format!(
            "{op} combines a reduced gradient or optimizer state of shape {:?} with an ordinary tensor, which differs \
             from rank to rank: pass every gradient through zero_burn::module::collect_grads before accumulating or \
             stepping, and load optimizer records inside zero_burn::load_state. A collected gradient is a shard: it \
             supports scalars, masks (a product, mask_fill), clipping and other gradients; for anything else, use \
             ZeroEngine::full_gradient and set_full_gradient",
            shard.views.shape().as_slice()
        ));
    }
    if op == SUB && matches!(lhs, ZeroTensor::Shard(_)) && dense.shape() == *shard.views.shape() && is_update(shard) {
        stop(format!(
            "a parameter of shape {:?} would be updated with a gradient that was never reduced over the ranks: call \
             zero_burn::module::prepare on the model, and zero_burn::module::collect_grads on its gradients, before the \
             optimizer's step",
            &shard.cell.shape[..]
        ));
    }
}
