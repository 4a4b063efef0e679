//! Metrics of a classification head on held-out rows.

use zero_models::ProblemType;

use crate::trainer::Measured;

/// Returns the classes that one row of logits predicts: the likeliest, or with several labels those with a probability above 0.5.
pub(super) fn predicted(problem: ProblemType, logits: &[f64]) -> Vec<usize> {
    match problem {
        ProblemType::SingleLabelClassification => {
            let likelier = |best: usize, class: usize| if logits[class] > logits[best] { class } else { best };
            vec![(0..logits.len()).fold(0, likelier)]
        }
        ProblemType::MultiLabelClassification => (0..logits.len()).filter(|&class| logits[class] > 0.0).collect(),
        ProblemType::Regression => Vec::new(),
    }
}

/// Returns the classes of a row from its target.
pub(super) fn classes_of(problem: ProblemType, target: &[f64]) -> Vec<usize> {
    match problem {
        ProblemType::SingleLabelClassification => vec![target[0] as usize],
        ProblemType::MultiLabelClassification => (0..target.len()).filter(|&class| target[class] == 1.0).collect(),
        ProblemType::Regression => Vec::new(),
    }
}

/// Returns means over rows, from which [`figures`] computes the metrics.
///
/// - Classes: the fractions of rows that are true positives, that are predicted, and that have the class, each for every
///   class; then the fraction of rows whose predicted classes are exactly theirs.
/// - Regression: prediction, label, their squares and their product, of the first output.
pub(super) fn means(problem: ProblemType, labels: usize, logits: &[f64], targets: &[f64]) -> Vec<f64> {
    let rows = logits.len() / labels.max(1);
    let (regression, width) = (problem == ProblemType::Regression, targets.len() / rows.max(1));
    let mut sums = vec![0.0; if regression { 5 } else { 3 * labels + 1 }];
    for (logits, target) in logits.chunks_exact(labels).zip(targets.chunks_exact(width)) {
        if regression {
            let (x, y) = (logits[0], target[0]);
            sums.iter_mut().zip([x, y, x * x, y * y, x * y]).for_each(|(sum, term)| *sum += term);
            continue;
        }
        let (predicted, of) = (predicted(problem, logits), classes_of(problem, target));
        for class in predicted.iter().filter(|class| of.contains(class)) {
            sums[*class] += 1.0;
        }
        predicted.iter().for_each(|class| sums[labels + class] += 1.0);
        of.iter().for_each(|class| sums[2 * labels + class] += 1.0);
        sums[3 * labels] += f64::from(u8::from(predicted == of));
    }
    sums.into_iter().map(|sum| sum / rows as f64).collect()
}

/// Returns the metrics that follow from the [`means`] over all held-out rows.
///
/// - Classes: accuracy, which is the fraction of rows whose predicted classes are exactly theirs, and F1. For two classes
///   it is the F1 of the second, for more classes the mean over classes (macro), for several labels that of all classes
///   together (micro).
/// - Regression: the mean squared error, which is the loss, and with one output Pearson's correlation.
pub(super) fn figures(problem: ProblemType, labels: usize, loss: f64, means: &[f64]) -> Measured {
    let mut figures = vec![("loss", loss)];
    if problem == ProblemType::Regression {
        figures.push(("mse", loss));
        if labels == 1 {
            let [x, y, xx, yy, xy] = [0, 1, 2, 3, 4].map(|at: usize| means[at]);
            let spread = ((xx - x * x).max(0.0) * (yy - y * y).max(0.0)).sqrt();
            figures.push(("pearson", if spread > 0.0 { (xy - x * y) / spread } else { 0.0 }));
        }
        return figures;
    }
    let [right, predicted, of] = [0, 1, 2].map(|at: usize| &means[at * labels..(at + 1) * labels]);
    let f1 = |right: f64, all: f64| if all == 0.0 { 0.0 } else { 2.0 * right / all };
    let of_class = |class: usize| f1(right[class], predicted[class] + of[class]);
    let sum = |parts: &[f64]| parts.iter().sum::<f64>();
    let f1 = match (problem, labels) {
        (ProblemType::MultiLabelClassification, _) => f1(sum(right), sum(predicted) + sum(of)),
        (_, 2) => of_class(1),
        _ => (0..labels).map(of_class).sum::<f64>() / labels as f64,
    };
    figures.extend([("accuracy", means[3 * labels]), ("f1", f1)]);
    figures
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn measured(problem: ProblemType, labels: usize, logits: &[f64], targets: &[f64], expected: &[(&str, f64)]) {
        let got = figures(problem, labels, 0.25, &means(problem, labels, logits, targets));
        let names: Vec<&str> = got.iter().map(|(name, _)| *name).collect();
        assert_eq!(names, [&["loss"], &expected.iter().map(|(name, _)| *name).collect::<Vec<_>>()[..]].concat());
        for ((name, got), (_, expected)) in got[1..].iter().zip(expected) {
            assert!((got - expected).abs() < 1e-12, "{name}: {got}, {expected}");
        }
    }

    /// Expected values come from numpy's `corrcoef` and sklearn's `f1_score` and `accuracy_score`.
    #[test]
    fn are_those_of_scikit_learn() {
        let single = ProblemType::SingleLabelClassification;
        let two = [1.0, 2.0, 3.0, 0.0, 0.0, 0.5, 0.1, 0.0];
        measured(single, 2, &two, &[1.0, 0.0, 0.0, 1.0], &[("accuracy", 0.5), ("f1", 0.5)]);
        let three = [1.0, 2.0, 0.0, 3.0, 0.0, 0.0, 0.0, 0.5, 1.0, 1.0, 0.0, 0.0];
        measured(single, 3, &three, &[1.0, 0.0, 0.0, 0.0], &[("accuracy", 0.75), ("f1", 0.6)]);
        let several = [0.5, -1.0, 2.0, -0.5, -2.0, 0.1, 1.0, 1.0, -1.0];
        let targets = [1.0, 0.0, 1.0, 1.0, 0.0, 1.0, 0.0, 1.0, 0.0];
        let expected = [("accuracy", 1.0 / 3.0), ("f1", 0.8)];
        measured(ProblemType::MultiLabelClassification, 3, &several, &targets, &expected);
        let regression = ProblemType::Regression;
        let pearson = 0.8660254037844386;
        measured(regression, 1, &[1.0, 2.0, 4.0], &[0.5, 2.5, 3.0], &[("mse", 0.25), ("pearson", pearson)]);
        measured(regression, 1, &[1.0, 1.0], &[0.5, 2.5], &[("mse", 0.25), ("pearson", 0.0)]);
        measured(regression, 2, &[1.0, 1.0], &[0.5, 2.5], &[("mse", 0.25)]);
    }
}
