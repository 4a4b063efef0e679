//! The optimizer's update of many parameters: one pass over parameter, gradient and state.
//!
//! Every operation is rounded to fp32 separately, as on the CPU, so that a run gives nearly the same numbers on both. Device compilers
//! would contract `a b + c` to one rounding: CUDA's does by default, and CubeCL has no switch for it. So a product that is added to
//! something is a fused multiply-add with a negative zero that the compiler does not know (an argument of the kernel). It rounds to the
//! same value as the product alone, sign of zero included, and cannot be contracted again.

use burn_backend::tensor::FloatTensor;
use burn_backend::{Backend, TensorMetadata};
use burn_cubecl::CubeRuntime;
use burn_cubecl::tensor::CubeTensor;
use burn_std::DType;
use cubecl::prelude::*;

use super::any::{self, Body, elements, has_cube_tensors, is_countable};
use super::many::{
    CHUNK, Layout, TAKES, UNITS, array, chunks, cube_of, flat, launch_groups, overwritten, owned, width,
};
use super::tensor::{empty, is_float, launch};
use zero_kernels::Rule;
pub use zero_kernels::device::{GradScale, Updated};
use zero_kernels::update::{Kernel, Sweep, step_key};

/// Returns the kernel variant of a rule.
fn kind(rule: &Rule) -> Kind {
    match rule {
        Rule::AdamW { .. } => Kind::AdamW,
        Rule::Adam { .. } => Kind::Adam,
        Rule::Lamb { .. } => Kind::Lamb,
        Rule::Sgd { momentum: 0.0, .. } => Kind::Sgd,
        Rule::Sgd { nesterov: false, .. } => Kind::Momentum,
        Rule::Sgd { nesterov: true, .. } => Kind::Nesterov,
        Rule::Lion { .. } => Kind::Lion,
        Rule::Adagrad { .. } => Kind::Adagrad,
        Rule::Muon { .. } => unreachable!("the host computes Muon's updates"),
    }
}

/// The rule and the numbers of one pass.
#[derive(Clone, Copy)]
struct Update {
    rule: Rule,
    lr: f64,
    /// Number of the step, from 1.
    time: usize,
    /// States begin with this step: they are not read.
    fresh: bool,
}

impl From<Kernel> for Update {
    fn from(Kernel { rule, lr, time, fresh, pass }: Kernel) -> Self {
        match pass {
            // Plain descent along the direction of the first pass.
            Sweep::Second { trust } => Self { rule: Rule::sgd(), lr: lr * f64::from(trust), time, fresh: false },
            Sweep::Only | Sweep::First => Self { rule, lr, time, fresh },
        }
    }
}

/// [`zero_kernels::device::UpdateItem`] with Burn's types.
pub type UpdateItem<T> = zero_kernels::device::UpdateItem<T, DType>;

/// Updates all parameters in few launches, in place if nobody else holds a tensor, without waiting for the device. Results are in the order
/// of the items.
///
/// # Errors
///
/// Returns the arguments unchanged if the backend's tensors are not CubeCL's or have types other than those of [`UpdateItem`].
///
/// # Panics
///
/// If the tensors of an item differ in their number of elements, the number of states is not the rule's, or LAMB has a copy.
#[allow(clippy::type_complexity)] // The arguments given back.
pub fn fused_update<B: Backend>(
    items: Vec<UpdateItem<FloatTensor<B>>>,
    scale: GradScale<FloatTensor<B>>,
) -> Result<Vec<Updated<FloatTensor<B>>>, (Vec<UpdateItem<FloatTensor<B>>>, GradScale<FloatTensor<B>>)> {
    if items.is_empty() {
        return Ok(Vec::new());
    }
    if !has_cube_tensors::<B>() || !items.iter().all(is_taken) {
        return Err((items, scale));
    }
    let number = match &scale {
        GradScale::Number(number) => Some(*number),
        GradScale::Tensor(one) if one.dtype() == DType::F32 => {
            assert_eq!(elements(one), 1, "gradients are scaled by one number");
            None
        }
        GradScale::Tensor(_) => return Err((items, scale)),
    };
    items.iter().for_each(check);

    let mut plans = Vec::with_capacity(items.len());
    let mut inputs = Vec::new();
    let mut outputs = Vec::new();
    for UpdateItem { kernel, parameter, gradient, states, state_dtype, first, copy } in items {
        let update = Update::from(kernel);
        let shape = parameter.shape();
        let directed = matches!(update.rule, Rule::Lamb { .. });
        plans.push(Plan { update, made: states.is_empty(), state_dtype, first, copied: copy.is_some(), directed });
        outputs.push((shape.clone(), DType::F32));
        match states.is_empty() {
            true => outputs.extend((0..update.rule.states()).map(|_| (shape.clone(), state_dtype))),
            false => outputs.extend(states.iter().map(|state| (state.shape(), state_dtype))),
        }
        outputs.extend(copy.iter().map(|copy| (copy.shape(), copy.dtype())));
        outputs.extend(directed.then_some((shape, DType::F32)));
        inputs.extend([parameter, gradient].into_iter().chain(states).chain(copy));
    }
    if let GradScale::Tensor(one) = scale {
        inputs.push(one);
    }
    let order = plans.clone();
    let mut made = any::run::<B>("fused update", inputs, outputs, FusedUpdate { plans, number }).into_iter();
    let mut next = || made.next().expect("the kernel returns all outputs");
    let updated = order.into_iter().map(|plan| Updated {
        parameter: next(),
        states: (0..plan.update.rule.states()).map(|_| next()).collect(),
        copy: plan.copied.then(&mut next),
        direction: plan.directed.then(&mut next),
    });
    Ok(updated.collect())
}

/// Returns whether the kernel reads and writes these types.
fn is_taken<T: TensorMetadata>(item: &UpdateItem<T>) -> bool {
    let states = matches!(item.state_dtype, DType::F32 | DType::BF16)
        && item.states.iter().all(|state| state.dtype() == item.state_dtype);
    let copy = item.copy.as_ref().is_none_or(|copy| matches!(copy.dtype(), DType::F16 | DType::BF16));
    item.parameter.dtype() == DType::F32
        && states
        && copy
        && is_float(item.gradient.dtype())
        && is_countable(elements(&item.parameter))
}

fn check<T: TensorMetadata>(item: &UpdateItem<T>) {
    let UpdateItem { kernel, parameter, gradient, states, copy, .. } = item;
    let update = Update::from(*kernel);
    let expected = update.rule.states();
    assert!(
        states.len() == expected || (states.is_empty() && update.fresh),
        "{:?} keeps {expected} states, got {}",
        update.rule,
        states.len()
    );
    assert!(
        copy.is_none() || !matches!(update.rule, Rule::Lamb { .. }),
        "LAMB does not support 16-bit copies of parameters"
    );
    for x in [gradient].into_iter().chain(states).chain(copy) {
        assert_eq!(elements(x), elements(parameter), "a gradient, state or copy differs in size from its parameter");
    }
}

/// Properties of an item that are known before its tensors.
#[derive(Clone)]
struct Plan {
    update: Update,
    /// Its states are allocated here.
    made: bool,
    state_dtype: DType,
    first: usize,
    copied: bool,
    /// The result is the update, not the parameter.
    directed: bool,
}

struct FusedUpdate {
    plans: Vec<Plan>,
    /// Factor of the gradients. If `None`, the last input is the factor.
    number: Option<f32>,
}

/// An item's flat tensors.
struct Tensors<R: CubeRuntime> {
    update: Update,
    parameter: CubeTensor<R>,
    gradient: CubeTensor<R>,
    states: Vec<CubeTensor<R>>,
    /// Rounds states to bfloat16 stochastically.
    rounds: bool,
    first: usize,
    /// The copy, or the direction.
    copy: Option<CubeTensor<R>>,
}

impl<R: CubeRuntime> Tensors<R> {
    /// Returns the compile-time options of the item's kernel.
    fn family(&self) -> Family {
        Family {
            kind: kind(&self.update.rule),
            gradient: self.gradient.dtype,
            state: self.states.first().map_or(DType::F32, |state| state.dtype),
            rounds: self.rounds,
            copy: self.copy.as_ref().map(|copy| copy.dtype),
            width: width([&self.parameter, &self.gradient].into_iter().chain(&self.states).chain(&self.copy)),
        }
    }
}

#[derive(Clone, Copy, PartialEq)]
struct Family {
    kind: Kind,
    gradient: DType,
    state: DType,
    rounds: bool,
    copy: Option<DType>,
    width: usize,
}

impl Body for FusedUpdate {
    fn run<R: CubeRuntime>(&self, inputs: Vec<CubeTensor<R>>) -> Vec<CubeTensor<R>> {
        let mut inputs = inputs.into_iter();
        let mut items = Vec::with_capacity(self.plans.len());
        for plan in &self.plans {
            let mut next = || flat(inputs.next().expect("all inputs are passed on"));
            let (parameter, gradient) = (owned(next()), next());
            let states = (0..plan.update.rule.states()).map(|_| match plan.made {
                true => empty(&parameter, parameter.meta.shape().clone(), plan.state_dtype),
                // Values that are not read need not be copied.
                false if plan.update.fresh => overwritten(next()),
                false => owned(next()),
            });
            let states = states.collect();
            let copy = match plan.directed {
                true => Some(empty(&parameter, parameter.meta.shape().clone(), DType::F32)),
                // If the factor may be NaN, the copy must keep its elements.
                false => plan.copied.then(|| if self.number.is_some() { overwritten(next()) } else { owned(next()) }),
            };
            let (rounds, first) = (plan.state_dtype == DType::BF16, plan.first);
            items.push(Tensors { update: plan.update, parameter, gradient, states, rounds, first, copy });
        }
        let factor = match self.number {
            Some(_) => None,
            None => Some(flat(inputs.next().expect("the factor is the last input"))),
        };
        launch(&items, self.number.unwrap_or(1.0), factor.as_ref());
        items.into_iter().flat_map(|item| [item.parameter].into_iter().chain(item.states).chain(item.copy)).collect()
    }
}

/// Launches the kernels for all items, grouped by kernel.
fn launch<R: CubeRuntime>(items: &[Tensors<R>], number: f32, factor: Option<&CubeTensor<R>>) {
    let client = &items[0].parameter.client;
    launch_groups(
        client,
        items.iter().filter(|item| item.parameter.meta.num_elements() > 0).collect(),
        |item| item.family(),
        |item| 2 + item.states.len() + usize::from(item.copy.is_some()),
        |family, item| chunks(item.parameter.meta.num_elements() / family.width),
        |family, group, Layout { count, dim, ends }| {
            let types: [StorageType; 3] =
                [family.gradient.into(), family.copy.unwrap_or(DType::F32).into(), family.state.into()];
            // SAFETY: a unit reads and writes below the arrays' length, which `check` has found to be the same for all of an item, and its
            // loops end with the chunk.
            unsafe {
                launch! {
                    update_kernel on client, (count, dim, family.width), [],
                    group.iter().map(|item| array(&item.parameter)).collect(),
                    group.iter().map(|item| array(&item.gradient)).collect(),
                    group.iter().filter_map(|item| item.states.first()).map(array).collect(),
                    group.iter().filter_map(|item| item.states.get(1)).map(array).collect(),
                    group.iter().filter_map(|item| item.copy.as_ref()).map(array).collect(),
                    factor.into_iter().map(array).collect(),
                    group.iter().map(|item| numbers(item, number)).collect(), ends, family.kind, family.rounds, types
                }
            }
        },
    );
}

/// Returns the numbers of a step as the kernel reads them; those that its rule lacks are 0.
fn numbers<R: CubeRuntime>(item: &Tensors<R>, scale: f32) -> NumbersLaunch<R> {
    let update = &item.update;
    let (beta_1, beta_2, epsilon, weight_decay, bias_correction) = match update.rule {
        Rule::AdamW { beta_1, beta_2, epsilon, weight_decay, bias_correction }
        | Rule::Adam { beta_1, beta_2, epsilon, weight_decay, bias_correction }
        | Rule::Lamb { beta_1, beta_2, epsilon, weight_decay, bias_correction, .. } => {
            (beta_1, beta_2, epsilon, weight_decay, bias_correction)
        }
        Rule::Sgd { momentum, weight_decay, .. } => (momentum, 0.0, 0.0, weight_decay, false),
        Rule::Lion { beta_1, beta_2, weight_decay } => (beta_1, beta_2, 0.0, weight_decay, false),
        Rule::Adagrad { epsilon, weight_decay } => (0.0, 0.0, epsilon, weight_decay, false),
        Rule::Muon { .. } => unreachable!("the host computes Muon's updates"),
    };
    let time = i32::try_from(update.time).unwrap_or(i32::MAX);
    // A division by 1 changes no bit.
    let correction = |beta: f32| if bias_correction { 1.0 - beta.powi(time) } else { 1.0 };
    NumbersLaunch::new(
        scale,
        update.lr as f32,
        (1.0 - update.lr * f64::from(weight_decay)) as f32,
        weight_decay,
        beta_1,
        1.0 - beta_1,
        beta_2,
        1.0 - beta_2,
        correction(beta_1),
        correction(beta_2),
        epsilon,
        -0.0,
        u32::from(update.fresh),
        item.first as u32,
        step_key(update.time),
    )
}

/// Formulas for which the kernel is compiled.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, CubeType)]
enum Kind {
    AdamW,
    Adam,
    Lamb,
    Sgd,
    Momentum,
    Nesterov,
    Lion,
    Adagrad,
}

/// See [`numbers`].
// Arguments of a launch.
#[derive(CubeType, CubeLaunch)]
struct Numbers {
    scale: f32,
    lr: f32,
    /// Factor that decoupled weight decay applies to a parameter.
    keep: f32,
    weight_decay: f32,
    /// Also the momentum.
    beta_1: f32,
    rest_1: f32,
    beta_2: f32,
    rest_2: f32,
    correction_1: f32,
    correction_2: f32,
    epsilon: f32,
    minus_zero: f32,
    fresh: u32,
    /// Index of the first element.
    first: u32,
    /// Key of the step.
    step: u32,
}

/// Returns a product that is rounded before any further use; see the module's documentation.
#[cube]
fn times<N: Size>(a: Vector<f32, N>, b: f32, minus_zero: f32) -> Vector<f32, N> {
    fma(a, Vector::new(b), Vector::new(minus_zero))
}

/// Returns a state, or 0 if it begins with this step: its memory is then undefined.
#[cube]
fn old<S: Float, N: Size>(state: &Array<Vector<S, N>>, at: usize, fresh: u32) -> Vector<f32, N> {
    let mut old = Vector::<f32, N>::new(0.0);
    if fresh == 0 {
        old = Vector::cast_from(state[at]);
    }
    old
}

/// Returns the random bits for elements from vector `at` on: those of `zero_kernels::update::State`.
#[cube]
fn chances<N: Size>(at: usize, n: &Numbers, #[comptime] rounds: bool) -> Vector<u32, N> {
    let mut chance = Vector::<u32, N>::new(0u32);
    if comptime![rounds] {
        let lanes = N::value();
        let mut place = Vector::<u32, N>::new(0u32);
        #[unroll]
        for lane in 0..lanes {
            place[lane] = n.first + u32::cast_from(at * lanes + lane);
        }
        let x = place ^ Vector::new(n.step);
        let x = (x ^ (x >> Vector::new(16u32))) * Vector::new(0x21f0_aaadu32);
        let x = (x ^ (x >> Vector::new(15u32))) * Vector::new(0xd35a_2d97u32);
        chance = x ^ (x >> Vector::new(15u32));
    }
    chance
}

/// Returns a state as it is stored: in fp32, or rounded to a number that bfloat16 represents.
#[cube]
fn kept<N: Size>(x: Vector<f32, N>, chance: Vector<u32, N>, #[comptime] rounds: bool) -> Vector<f32, N> {
    let mut kept = x;
    if comptime![rounds] {
        let upper = Vector::<u32, N>::new(0xffff_0000u32);
        let bits = Vector::<u32, N>::reinterpret(x);
        let rounded = (bits + chance) & upper;
        // NaN stays NaN, whatever bits are cut off.
        let none = (bits & upper) | Vector::new(0x0040_0000u32);
        let is_none = (bits & Vector::new(0x7fff_ffffu32)).greater_than(Vector::new(0x7f80_0000u32));
        kept = Vector::<f32, N>::reinterpret(select_many(is_none, none, rounded));
    }
    kept
}

/// Returns a rule's only state as it is stored.
#[cube]
fn one<N: Size>(x: Vector<f32, N>, at: usize, n: &Numbers, #[comptime] rounds: bool) -> Vector<f32, N> {
    kept(x, chances(at, n, rounds) & Vector::new(0xffffu32), rounds)
}

/// Updates both means and returns the direction of the step.
#[cube]
fn adam<S: Float, N: Size>(
    g: Vector<f32, N>,
    first: &mut Array<Vector<S, N>>,
    second: &mut Array<Vector<S, N>>,
    at: usize,
    n: &Numbers,
    #[comptime] rounds: bool,
    #[comptime] of_kept: bool,
) -> Vector<f32, N> {
    let z = n.minus_zero;
    let mut m = times(old(first, at, n.fresh), n.beta_1, z) + times(g, n.rest_1, z);
    let mut v = times(old(second, at, n.fresh), n.beta_2, z) + times(g * g, n.rest_2, z);
    let chance = chances(at, n, rounds);
    let (kept_m, kept_v) =
        (kept(m, chance & Vector::new(0xffffu32), rounds), kept(v, chance >> Vector::new(16u32), rounds));
    first[at] = Vector::cast_from(kept_m);
    second[at] = Vector::cast_from(kept_v);
    // LAMB's second pass on the CPU has only the stored states.
    if comptime![of_kept] {
        m = kept_m;
        v = kept_v;
    }
    let root = Vector::sqrt(v / Vector::new(n.correction_2));
    (m / Vector::new(n.correction_1)) / (root + Vector::new(n.epsilon))
}

#[cube]
fn sign<N: Size>(x: Vector<f32, N>) -> Vector<f32, N> {
    let zero = Vector::<f32, N>::new(0.0);
    let one = Vector::<f32, N>::new(1.0);
    let sign = select_many(x.greater_than(zero), one, zero) - select_many(x.less_than(zero), one, zero);
    let bits = Vector::<u32, N>::reinterpret(x) & Vector::new(0x7fff_ffffu32);
    select_many(bits.greater_than(Vector::new(0x7f80_0000u32)), x, sign)
}

#[cube(launch_unchecked)]
fn update_kernel<G: Float, C: Float, S: Float, N: Size>(
    parameters: &mut Sequence<Array<Vector<f32, N>>>,
    gradients: &Sequence<Array<Vector<G, N>>>,
    firsts: &mut Sequence<Array<Vector<S, N>>>,
    seconds: &mut Sequence<Array<Vector<S, N>>>,
    copies: &mut Sequence<Array<Vector<C, N>>>,
    factor: &Sequence<Array<f32>>,
    numbers: &Sequence<Numbers>,
    ends: &Sequence<usize>,
    #[comptime] kind: Kind,
    #[comptime] rounds: bool,
    #[define(G, C, S)] _types: [StorageType; 3],
) {
    #[unroll]
    for i in 0..comptime![parameters.len()] {
        let (is_own, cube) = cube_of(ends, i);
        if is_own {
            let n = numbers.index(i);
            let z = n.minus_zero;
            let mut scale = n.scale;
            let p_all = parameters.index_mut(i);
            let mut len = p_all.len();
            if comptime![factor.len() == 1] {
                scale = factor.index(0usize)[0];
                if (u32::reinterpret(scale) & 0x7fff_ffffu32) > 0x7f80_0000u32 {
                    len = 0usize;
                }
            }
            let first_at = cube * CHUNK as usize + UNIT_POS as usize;
            for k in 0..TAKES as usize {
                let at = first_at + k * UNITS as usize;
                if at < len {
                    let g = times(Vector::<f32, N>::cast_from(gradients.index(i)[at]), scale, z);
                    let p = p_all[at];
                    let new = match kind {
                        Kind::AdamW => {
                            let delta = adam(g, firsts.index_mut(i), seconds.index_mut(i), at, n, rounds, false);
                            times(p, n.keep, z) - times(delta, n.lr, z)
                        }
                        Kind::Adam => {
                            let g = g + times(p, n.weight_decay, z);
                            let delta = adam(g, firsts.index_mut(i), seconds.index_mut(i), at, n, rounds, false);
                            p - times(delta, n.lr, z)
                        }
                        // The direction that is subtracted from the parameter.
                        Kind::Lamb => {
                            let delta = adam(g, firsts.index_mut(i), seconds.index_mut(i), at, n, rounds, true);
                            delta + times(p, n.weight_decay, z)
                        }
                        Kind::Sgd => {
                            let g = g + times(p, n.weight_decay, z);
                            p - times(g, n.lr, z)
                        }
                        Kind::Momentum | Kind::Nesterov => {
                            let g = g + times(p, n.weight_decay, z);
                            let states = firsts.index_mut(i);
                            let m = times(old(states, at, n.fresh), n.beta_1, z) + g;
                            states[at] = Vector::cast_from(one(m, at, n, rounds));
                            let along = if comptime![kind == Kind::Nesterov] { g + times(m, n.beta_1, z) } else { m };
                            p - times(along, n.lr, z)
                        }
                        Kind::Lion => {
                            let states = firsts.index_mut(i);
                            let m = old(states, at, n.fresh);
                            let towards = times(m, n.beta_1, z) + times(g, n.rest_1, z);
                            let new = times(m, n.beta_2, z) + times(g, n.rest_2, z);
                            states[at] = Vector::cast_from(one(new, at, n, rounds));
                            times(p, n.keep, z) - times(sign(towards), n.lr, z)
                        }
                        Kind::Adagrad => {
                            let g = g + times(p, n.weight_decay, z);
                            let states = firsts.index_mut(i);
                            let square = fma(g, g, Vector::new(z));
                            let s = old(states, at, n.fresh) + square;
                            states[at] = Vector::cast_from(one(s, at, n, rounds));
                            p - times(g / (Vector::sqrt(s) + Vector::new(n.epsilon)), n.lr, z)
                        }
                    };
                    if comptime![kind != Kind::Lamb] {
                        p_all[at] = new;
                    }
                    if comptime![copies.len() == gradients.len()] {
                        copies.index_mut(i)[at] = Vector::cast_from(new);
                    }
                }
            }
        }
    }
}

compiled! {
    use crate::cube::many::GROUP;

    let [beta_1, beta_2, epsilon, weight_decay, momentum] = [0.9, 0.999, 1e-8, 0.01, 0.9];
    let bias_correction = true;
    let rules = [
        Rule::AdamW { beta_1, beta_2, epsilon, weight_decay, bias_correction },
        Rule::Adam { beta_1, beta_2, epsilon, weight_decay, bias_correction },
        Rule::Lamb { beta_1, beta_2, epsilon, weight_decay, bias_correction, max_coeff: 10.0, min_coeff: 0.01 },
        Rule::Sgd { momentum: 0.0, nesterov: false, weight_decay },
        Rule::Sgd { momentum, nesterov: false, weight_decay },
        Rule::Sgd { momentum, nesterov: true, weight_decay },
        Rule::Lion { beta_1, beta_2, weight_decay },
        Rule::Adagrad { epsilon, weight_decay },
    ];
    let factor = tensor([1], DType::F32);
    let run = |rule: Rule, gradient, copy: Option<DType>, numel, items, factor, state| {
        let item = |_| Tensors {
            update: Update { rule, lr: 0.1, time: 1, fresh: false },
            parameter: tensor([numel], DType::F32),
            gradient: tensor([numel], gradient),
            states: (0..rule.states()).map(|_| tensor([numel], state)).collect(),
            rounds: state == DType::BF16,
            first: 0,
            copy: copy.map(|copy| tensor([numel], copy)),
        };
        launch(&(0..items).map(item).collect::<Vec<_>>(), 1.0, factor);
    };
    for (gradient, copy) in TYPES.into_iter().flat_map(|g| [None, Some(DType::F16), Some(DType::BF16)].map(|c| (g, c)))
    {
        rules.iter().for_each(|rule| run(*rule, gradient, copy, 4096, 1, None, DType::F32));
        // A group of the maximum size, and elements one by one.
        run(rules[0], gradient, copy, 4096, GROUP, Some(&factor), DType::F32);
        run(rules[0], gradient, copy, 4097, 1, Some(&factor), DType::F32);
    }
    for gradient in TYPES {
        rules.iter().for_each(|rule| run(*rule, gradient, None, 4096, 1, None, DType::BF16));
        run(rules[0], gradient, Some(DType::BF16), 4096, GROUP, Some(&factor), DType::BF16);
    }
}

#[cfg(all(test, any(feature = "vulkan", feature = "cuda")))]
mod tests {
    use burn::tensor::{Tensor, TensorData, TensorPrimitive};
    use half::bf16;
    use zero_kernels::update::{Chunk, Elements, State, update_chunk};

    use super::*;
    use crate::cube::tested::{Plain, TestRuntime};

    fn on(values: &[f32]) -> CubeTensor<TestRuntime> {
        let data = TensorData::new(values.to_vec(), [values.len()]);
        Tensor::<Plain, 1>::from_data(data, &Default::default()).into_primitive().tensor()
    }

    fn values(x: &CubeTensor<TestRuntime>) -> Vec<f32> {
        Tensor::<Plain, 1>::from_primitive(TensorPrimitive::Float(x.clone())).into_data().to_vec().unwrap()
    }

    /// Stochastically rounded states have the CPU's bits. Uses fp32 here, so that a device without bfloat16 checks it too.
    #[test]
    fn rounding_by_chance_is_the_cpus() {
        let rules = [Rule::adamw(), Rule::Lion { beta_1: 0.9, beta_2: 0.99, weight_decay: 0.1 }];
        for (rule, len) in rules.into_iter().flat_map(|rule| [4096, 4097].map(|len| (rule, len))) {
            let number = |i: usize| ((i * 7919 % 10_007) as f32 - 5000.0) * 1e-4;
            let (mut p, first) = ((0..len).map(number).collect::<Vec<_>>(), 12_345);
            let mut kept: Vec<Vec<bf16>> = vec![vec![bf16::ZERO; len]; rule.states()];
            let (mut parameter, mut states) = (on(&p), vec![on(&vec![0.0; len]); rule.states()]);
            for time in 1..=3 {
                let g: Vec<f32> = (0..len).map(|i| number(i + time * 31)).collect();
                let update = Update { rule, lr: 1e-3, time, fresh: time == 1 };
                let states_now = states.drain(..).map(owned).collect();
                let item = Tensors {
                    update,
                    parameter: owned(parameter),
                    gradient: on(&g),
                    states: states_now,
                    rounds: true,
                    first,
                    copy: None,
                };
                let items = [item];
                launch(&items, 1.0, None);
                let [item] = items;
                (parameter, states) = (item.parameter, item.states);
                let mut halves = kept.iter_mut().map(|kept| State::Bf16(kept));
                let (a, b) = (halves.next().unwrap(), halves.next().unwrap_or(State::Bf16(&mut [])));
                let stretch = Chunk { p: &mut p, g: Elements::F32(&g), a, b, copy: None, average: None, first };
                update_chunk(Kernel::new(rule, 1e-3, time), 1.0, stretch, 0..0);
                for (state, kept) in states.iter().zip(&kept) {
                    let kept: Vec<f32> = kept.iter().map(|kept| kept.to_f32()).collect();
                    assert!(values(state) == kept, "states of step {time} of {rule:?}, {len} elements");
                }
                p = values(&parameter);
            }
        }
    }
}
