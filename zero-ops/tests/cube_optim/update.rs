//! Every rule against its formulas.

use burn_backend::tensor::FloatTensor;
use burn_backend::{Backend, DType, TensorMetadata};
use zero_kernels::update::{Kernel, Sweep};
use zero_ops::{GradScale, Rule, UpdateItem, Updated, fused_update};

use crate::{Fused, Plain, TestRuntime, assert_panics, device, numbers, rounded, supports, tensor, values};

/// Runs one step by the formulas, each operation rounded to fp32. For LAMB `p` becomes the direction.
fn reference(kernel: Kernel, scale: f32, p: &mut [f32], g: &[f32], states: &mut [Vec<f32>]) {
    let Kernel { rule, lr, time, fresh, .. } = kernel;
    let (lr_32, time) = (lr as f32, time as i32);
    let kept = |weight_decay: f32| (1.0 - lr * f64::from(weight_decay)) as f32;
    for i in 0..p.len() {
        let g = g[i] * scale;
        let was = |states: &[Vec<f32>], k: usize| if fresh { 0.0 } else { states[k][i] };
        match rule {
            Rule::AdamW { beta_1, beta_2, epsilon, weight_decay, bias_correction }
            | Rule::Adam { beta_1, beta_2, epsilon, weight_decay, bias_correction }
            | Rule::Lamb { beta_1, beta_2, epsilon, weight_decay, bias_correction, .. } => {
                let decoupled = !matches!(rule, Rule::Adam { .. });
                let g = if decoupled { g } else { g + p[i] * weight_decay };
                let m = was(states, 0) * beta_1 + g * (1.0 - beta_1);
                let v = was(states, 1) * beta_2 + g * g * (1.0 - beta_2);
                (states[0][i], states[1][i]) = (m, v);
                let corrected = |x: f32, beta: f32| if bias_correction { x / (1.0 - beta.powi(time)) } else { x };
                let delta = corrected(m, beta_1) / (corrected(v, beta_2).sqrt() + epsilon);
                p[i] = match rule {
                    Rule::AdamW { .. } => p[i] * kept(weight_decay) - delta * lr_32,
                    Rule::Lamb { .. } => delta + p[i] * weight_decay,
                    _ => p[i] - delta * lr_32,
                };
            }
            Rule::Sgd { momentum, nesterov, weight_decay } => {
                let g = g + p[i] * weight_decay;
                let mut step = g;
                if momentum != 0.0 {
                    let b = was(states, 0) * momentum + g;
                    states[0][i] = b;
                    step = if nesterov { g + b * momentum } else { b };
                }
                p[i] -= step * lr_32;
            }
            Rule::Lion { beta_1, beta_2, weight_decay } => {
                let m = was(states, 0);
                let towards = m * beta_1 + g * (1.0 - beta_1);
                let sign = if towards == 0.0 { 0.0 } else { towards.signum() };
                p[i] = p[i] * kept(weight_decay) - sign * lr_32;
                states[0][i] = m * beta_2 + g * (1.0 - beta_2);
            }
            Rule::Muon { .. } => unreachable!("the host computes Muon's updates"),
            Rule::Adagrad { epsilon, weight_decay } => {
                let g = g + p[i] * weight_decay;
                let s = was(states, 0) + g * g;
                states[0][i] = s;
                p[i] -= g / (s.sqrt() + epsilon) * lr_32;
            }
        }
    }
}

const RULES: [Rule; 10] = [
    Rule::AdamW { beta_1: 0.9, beta_2: 0.999, epsilon: 1e-8, weight_decay: 0.01, bias_correction: true },
    Rule::Adam { beta_1: 0.8, beta_2: 0.99, epsilon: 1e-6, weight_decay: 0.1, bias_correction: true },
    Rule::Sgd { momentum: 0.0, nesterov: false, weight_decay: 0.1 },
    Rule::Sgd { momentum: 0.9, nesterov: false, weight_decay: 0.0 },
    Rule::Sgd { momentum: 0.9, nesterov: true, weight_decay: 0.1 },
    Rule::Lion { beta_1: 0.9, beta_2: 0.99, weight_decay: 0.1 },
    Rule::Adagrad { epsilon: 1e-10, weight_decay: 0.1 },
    Rule::AdamW { beta_1: 0.95, beta_2: 0.95, epsilon: 1e-3, weight_decay: 0.0, bias_correction: false },
    LAMB,
    Rule::lamb(),
];

const LAMB: Rule = Rule::Lamb {
    beta_1: 0.9,
    beta_2: 0.999,
    epsilon: 1e-6,
    weight_decay: 0.01,
    bias_correction: false,
    max_coeff: 0.3,
    min_coeff: 0.01,
};

const LENGTHS: [usize; 8] = [1, 2, 3, 31, 1000, 4097, 70_001, 65_536];

/// Checks agreement up to one rounding of the device's division and square root per operation.
fn assert_close(what: &str, got: &[f32], expected: &[f32]) {
    assert_eq!(got.len(), expected.len(), "{what}");
    for (i, (got, expected)) in got.iter().zip(expected).enumerate() {
        let error = (got - expected).abs();
        assert!(error <= 1e-6 * expected.abs().max(1e-2), "{what}[{i}]: {got}, expected {expected}");
    }
}

/// An item on the device, and its copy in plain Rust.
struct Mirror<B: Backend> {
    rule: Rule,
    /// `None` while an update holds it.
    on_device: Option<Updated<FloatTensor<B>>>,
    p: Vec<f32>,
    states: Vec<Vec<f32>>,
    gradient: DType,
    copy: Option<DType>,
}

impl<B: Backend> Mirror<B> {
    fn new(len: usize, seed: u64, rule: Rule, gradient: DType, copy: Option<DType>) -> Self {
        let p = numbers(len, seed);
        let on_device = Updated {
            parameter: tensor::<B>(p.clone(), DType::F32),
            states: Vec::new(),
            copy: copy.map(|copy| tensor::<B>(vec![7.0; len], copy)),
            direction: None,
        };
        Self { rule, on_device: Some(on_device), states: vec![vec![0.0; len]; rule.states()], p, gradient, copy }
    }
}

/// Steps all items together, and compares everything after each step.
fn steps<B: Backend>(mut all: Vec<Mirror<B>>, scale: f32, by_tensor: bool) {
    for time in 1..=4 {
        let (mut items, before) = (Vec::new(), all.iter().map(|mirror| mirror.p.clone()).collect::<Vec<_>>());
        for (i, mirror) in all.iter_mut().enumerate() {
            let (rule, lr, pass) = (mirror.rule, 1e-2 / time as f64, Sweep::Only);
            let kernel = Kernel { rule, lr, time, fresh: time == 1, pass };
            let g = rounded(&numbers(mirror.p.len(), (100 * time + i) as u64), mirror.gradient);
            let gradient = tensor::<B>(g.clone(), mirror.gradient);
            let Updated { parameter, states, copy, .. } = mirror.on_device.take().unwrap();
            let (state_dtype, first) = (DType::F32, 0);
            items.push(UpdateItem { kernel, parameter, gradient, states, state_dtype, first, copy });
            reference(kernel, scale, &mut mirror.p, &g, &mut mirror.states);
        }
        let scale = match by_tensor {
            true => GradScale::Tensor(tensor::<B>(vec![scale], DType::F32)),
            false => GradScale::Number(scale),
        };
        let updated = fused_update::<B>(items, scale).unwrap_or_else(|_| panic!("the tensors are CubeCL's"));
        assert_eq!(updated.len(), all.len());
        for (i, (mirror, updated)) in all.iter_mut().zip(updated).enumerate() {
            let what =
                |part: &str| format!("step {time}, {part} of item {i}, {} elements, {:?}", mirror.p.len(), mirror.rule);
            let got = values::<B>(updated.parameter.clone());
            assert_eq!(updated.direction.is_some(), matches!(mirror.rule, Rule::Lamb { .. }), "{}", what("direction"));
            match &updated.direction {
                Some(direction) => {
                    assert_close(&what("direction"), &values::<B>(direction.clone()), &mirror.p);
                    assert_eq!(got, before[i], "{}", what("parameter that is to stay"));
                }
                None => assert_close(&what("parameter"), &got, &mirror.p),
            }
            assert_eq!(updated.states.len(), mirror.states.len(), "{}", what("states"));
            for (state, expected) in updated.states.iter().zip(&mirror.states) {
                assert_close(&what("state"), &values::<B>(state.clone()), expected);
            }
            assert_eq!(updated.copy.is_some(), mirror.copy.is_some());
            if let (Some(copy), Some(dtype)) = (&updated.copy, mirror.copy) {
                assert_eq!(copy.dtype(), dtype);
                let ulp = if dtype == DType::F16 { 1e-3 } else { 8e-3 };
                for (copied, exact) in values::<B>(copy.clone()).iter().zip(&got) {
                    assert!((copied - exact).abs() <= ulp * exact.abs().max(1e-4), "{}", what("copy"));
                }
            }
            // Copies the results, so that steps are compared one by one.
            mirror.p = got;
            mirror.states = updated.states.iter().map(|state| values::<B>(state.clone())).collect();
            mirror.on_device = Some(updated);
        }
    }
}

fn all_rules_and_lengths<B: Backend>() {
    for (r, rule) in RULES.into_iter().enumerate() {
        let items = LENGTHS.iter().enumerate().map(|(i, &len)| Mirror::new(len, i as u64, rule, DType::F32, None));
        steps::<B>(items.collect(), if r % 2 == 0 { 1.0 } else { 0.37 }, r % 3 == 0);
    }
}

#[test]
fn every_rule_at_every_length() {
    all_rules_and_lengths::<Plain>();
}

#[test]
fn every_rule_at_every_length_with_fusion() {
    all_rules_and_lengths::<Fused>();
}

/// From 1 to 40 items, of several rules in one call: groups of every size.
#[test]
fn few_and_many_items() {
    for count in [1, 2, 5, 17, 40] {
        let items = (0..count).map(|i| {
            let rule = if count == 40 { RULES[i % RULES.len()] } else { RULES[0] };
            Mirror::new(LENGTHS[i % 6] + i / 6, i as u64, rule, DType::F32, None)
        });
        steps::<Fused>(items.collect(), 0.5, count % 2 == 0);
    }
}

fn in_16_bit<B: Backend>(dtype: DType) {
    if !supports::<B>(dtype) {
        return;
    }
    for (gradient, copy) in [(dtype, None), (dtype, Some(dtype)), (DType::F32, Some(dtype))] {
        let items = LENGTHS.iter().enumerate().map(|(i, &len)| Mirror::new(len, i as u64, RULES[0], gradient, copy));
        steps::<B>(items.collect(), 0.25, true);
    }
}

#[test]
fn gradients_and_copies_in_f16() {
    in_16_bit::<Plain>(DType::F16);
    in_16_bit::<Fused>(DType::F16);
}

#[test]
fn gradients_and_copies_in_bf16() {
    in_16_bit::<Plain>(DType::BF16);
    in_16_bit::<Fused>(DType::BF16);
}

fn item<B: Backend>(len: usize, fresh: bool) -> UpdateItem<FloatTensor<B>> {
    let of = |seed| tensor::<B>(numbers(len, seed), DType::F32);
    UpdateItem {
        state_dtype: DType::F32,
        first: 0,
        kernel: Kernel { rule: RULES[0], lr: 0.1, time: 3, fresh, pass: Sweep::Only },
        parameter: of(1),
        gradient: of(2),
        // Positive, as second moments are.
        states: vec![of(3), tensor::<B>(numbers(len, 4).iter().map(|x| x.abs()).collect(), DType::F32)],
        copy: None,
    }
}

fn shared_tensors_stay<B: Backend>() {
    for (len, fresh) in [(1000, false), (4097, true)] {
        let given = item::<B>(len, fresh);
        let expected: Vec<Vec<f32>> = [&given.parameter, &given.gradient, &given.states[0], &given.states[1]]
            .map(|x| values::<B>(x.clone()))
            .to_vec();
        let kept = given.clone();
        let [first] = fused_update::<B>(vec![given], GradScale::Number(1.0)).ok().unwrap().try_into().unwrap();
        let [second] = fused_update::<B>(vec![kept.clone()], GradScale::Number(1.0)).ok().unwrap().try_into().unwrap();
        let changed = values::<B>(first.parameter.clone());
        assert_ne!(changed, expected[0], "the parameter was updated");
        for (x, expected) in [kept.parameter, kept.gradient].into_iter().chain(kept.states).zip(expected) {
            assert_eq!(values::<B>(x), expected, "what another holds is not changed");
        }
        let bits = |x: FloatTensor<B>| values::<B>(x).iter().map(|x| x.to_bits()).collect::<Vec<_>>();
        assert_eq!(bits(first.parameter), bits(second.parameter), "the same step gives the same bits");
    }
}

#[test]
fn what_others_hold_is_not_changed() {
    shared_tensors_stay::<Plain>();
    shared_tensors_stay::<Fused>();
}

#[test]
fn what_nobody_else_holds_is_updated_in_place() {
    let memory = |x: &FloatTensor<Plain>| {
        // The device's thread assigns the handle's memory.
        <Plain as Backend>::sync(&device::<Plain>()).unwrap();
        format!("{:?}", x.handle.memory)
    };
    let given = item::<Plain>(4097, false);
    let before = [&given.parameter, &given.states[0], &given.states[1]].map(memory);
    let shared = item::<Plain>(4097, false);
    let (held, shared_before) = (shared.parameter.clone(), memory(&shared.parameter));
    let [updated, other] =
        fused_update::<Plain>(vec![given, shared], GradScale::Number(1.0)).ok().unwrap().try_into().unwrap();
    assert_eq!([&updated.parameter, &updated.states[0], &updated.states[1]].map(memory), before);
    assert_ne!(memory(&other.parameter), shared_before, "a parameter that another holds moves");
    drop(held);
}

/// Handles are not accessible with fusion, but the device's memory usage is.
#[test]
fn in_place_with_fusion_too() {
    let in_use = || {
        <Fused as Backend>::sync(&device::<Fused>()).unwrap();
        let client = <TestRuntime as burn_cubecl::cubecl::Runtime>::client(&device::<Fused>());
        client.memory_usage().unwrap().bytes_in_use
    };
    const LEN: usize = 1 << 20;
    let mut given = item::<Fused>(LEN, false);
    let gradient = given.gradient.clone();
    let before = in_use();
    assert!(before >= 4 * 4 * LEN as u64, "{before} bytes are in use on this thread's stream");
    for _ in 0..3 {
        let kernel = given.kernel;
        let [Updated { parameter, states, copy, .. }] =
            fused_update::<Fused>(vec![given], GradScale::Number(1.0)).ok().unwrap().try_into().unwrap();
        let (state_dtype, first) = (DType::F32, 0);
        given = UpdateItem { kernel, parameter, gradient: gradient.clone(), states, state_dtype, first, copy };
        assert!(in_use() <= before + 4 * LEN as u64 / 2, "no tensor was made: {} bytes, {before} before", in_use());
    }
}

/// Checks that a NaN factor updates nothing, whether others hold the tensors or not.
fn nothing_is_updated<B: Backend>(copy: Option<DType>) {
    for (rule, is_held) in RULES.into_iter().flat_map(|rule| [(rule, false), (rule, true)]) {
        let mut given = item::<B>(4097, false);
        given.kernel.rule = rule;
        given.states.truncate(rule.states());
        let is_lamb = matches!(rule, Rule::Lamb { .. });
        given.copy = copy.filter(|_| !is_lamb).map(|copy| tensor::<B>(rounded(&numbers(4097, 1), copy), copy));
        let held = is_held.then(|| given.clone());
        let all = |parameter: &FloatTensor<B>, states: &[FloatTensor<B>], copy: &Option<FloatTensor<B>>| {
            let tensors = [parameter].into_iter().chain(states).chain(copy);
            tensors.map(|x| values::<B>(x.clone())).collect::<Vec<_>>()
        };
        let expected = all(&given.parameter, &given.states, &given.copy);
        let none = GradScale::Tensor(tensor::<B>(vec![f32::NAN], DType::F32));
        let [updated] = fused_update::<B>(vec![given], none).ok().unwrap().try_into().unwrap();
        assert_eq!(all(&updated.parameter, &updated.states, &updated.copy), expected, "{rule:?}, held: {is_held}");
        drop(held);
    }
}

#[test]
fn a_factor_of_no_update_leaves_everything() {
    nothing_is_updated::<Plain>(None);
    nothing_is_updated::<Fused>(supports::<Fused>(DType::F16).then_some(DType::F16));
}

#[test]
fn nothing_and_tensors_of_no_elements() {
    assert!(fused_update::<Plain>(Vec::new(), GradScale::Number(1.0)).ok().unwrap().is_empty());
    let items = vec![item::<Plain>(0, false), item::<Plain>(5, false)];
    let updated = fused_update::<Plain>(items, GradScale::Number(1.0)).ok().unwrap();
    assert_eq!(updated.iter().map(|one| one.parameter.shape().num_elements()).collect::<Vec<_>>(), [0, 5]);
}

#[test]
fn other_types_are_given_back() {
    let mut of_integers = item::<Plain>(5, false);
    of_integers.parameter.dtype = DType::F64;
    assert!(fused_update::<Plain>(vec![of_integers], GradScale::Number(1.0)).is_err());
}

#[test]
#[cfg(feature = "flex")]
fn tensors_of_other_backends_are_given_back() {
    type Flex = burn_flex::Flex;
    let expected = values::<Flex>(item::<Flex>(9, false).parameter);
    let (items, _) = fused_update::<Flex>(vec![item::<Flex>(9, false)], GradScale::Number(1.0)).unwrap_err();
    assert_eq!(values::<Flex>(items[0].parameter.clone()), expected);
}

#[test]
fn lengths_that_differ_are_refused() {
    let mut item = item::<Plain>(5, false);
    item.gradient = tensor::<Plain>(vec![0.0; 6], DType::F32);
    assert_panics("a gradient, state or copy differs in size", || {
        drop(fused_update::<Plain>(vec![item], GradScale::Number(1.0)))
    });
}

#[test]
fn a_copy_of_what_stays_is_refused() {
    let mut item = item::<Plain>(5, false);
    (item.kernel.rule, item.copy) = (LAMB, Some(tensor::<Plain>(vec![0.0; 5], DType::F16)));
    assert_panics("LAMB does not support 16-bit copies", || {
        drop(fused_update::<Plain>(vec![item], GradScale::Number(1.0)))
    });
}
