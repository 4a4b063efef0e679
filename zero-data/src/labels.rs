//! Labels of texts, in the form in which a classification head is trained on them.
//!
//! * In: the label of each row, as it is in its file, and the known properties of the head.
//! * Out: the kind of the labels, their names, and numbers for the loss.

use std::collections::{BTreeSet, HashMap};

use zero_models::{ProblemType, unnamed_labels};

use super::documents::Cell;

/// The head that labels are for.
#[derive(Debug, Clone, Copy)]
pub struct KnownHead<'a> {
    /// Names of the labels in the model's `config.json`.
    pub names: &'a [String],
    /// The `problem_type` in the same file.
    pub problem: Option<ProblemType>,
    /// True if the head is fresh: it gets the labels of the data if they differ.
    pub fresh: bool,
    /// The token at which the head reads a text; all texts must have it equally often.
    pub end_token: Option<u32>,
}

/// Unusable labels. `row` is the row with the problem, if it is in a single row.
#[derive(Debug)]
pub(super) struct WrongLabels {
    pub(super) row: Option<usize>,
    pub(super) problem: String,
}

impl<T: Into<String>> From<T> for WrongLabels {
    fn from(problem: T) -> Self {
        Self { row: None, problem: problem.into() }
    }
}

fn of_row(row: usize, problem: String) -> WrongLabels {
    WrongLabels { row: Some(row), problem }
}

type Result<T> = std::result::Result<T, WrongLabels>;

/// The labels of all rows.
#[derive(Debug, PartialEq)]
pub(super) struct Labels {
    pub(super) problem: ProblemType,
    /// Names of the labels.
    pub(super) names: Vec<String>,
    /// Target of each row: its class index; for several classes 1 or 0 for each; or the numbers of a regression.
    pub(super) targets: Vec<Vec<f64>>,
}

/// The common type of some values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Text,
    Whole,
    /// Numbers, some with a fraction.
    Fraction,
    List,
}

impl Kind {
    fn name(self) -> &'static str {
        match self {
            Self::Text => "a string",
            Self::Whole => "a whole number",
            Self::Fraction => "a number",
            Self::List => "a list",
        }
    }
}

/// A value with its row.
type Value<'a> = (usize, &'a Cell);

impl Labels {
    /// Reads the labels of all rows.
    ///
    /// The head's `problem_type` decides the kind, or the head's single label makes it a regression. If neither does, the
    /// labels decide, as in transformers' `run_classification.py`: lists are several classes, numbers with a fraction a
    /// regression, and all others classes.
    pub(super) fn of(cells: &[&Cell], head: KnownHead<'_>) -> Result<Self> {
        let values: Vec<Value<'_>> = cells.iter().copied().enumerate().collect();
        let kind = kind_of(&values)?;
        let of_head = ProblemType::of_head(head.problem, head.names.len());
        match of_head.filter(|_| head.problem.is_some() || !head.fresh || kind != Kind::List) {
            Some(ProblemType::Regression) => Self::numbers(&values, head),
            Some(ProblemType::MultiLabelClassification) => Self::several(&values, kind, head),
            None if kind == Kind::List => Self::several(&values, kind, head),
            None if kind == Kind::Fraction && head.fresh => Self::numbers(&values, head),
            _ => Self::single(&values, kind, head),
        }
    }

    /// Reads the numbers of a regression.
    fn numbers(values: &[Value<'_>], head: KnownHead<'_>) -> Result<Self> {
        let numbers = |cell: &Cell| match cell {
            Cell::List(items) => items.iter().map(number).collect(),
            one => number(one).map(|number| vec![number]),
        };
        let first = values.first().and_then(|(_, cell)| numbers(cell)).map_or(1, |numbers| numbers.len());
        let outputs = if head.fresh { first.max(1) } else { head.names.len() };
        let expected =
            if outputs == 1 { "a finite number".into() } else { format!("a list of {outputs} finite numbers") };
        let target = |(row, cell): &Value<'_>| {
            let fits = |numbers: &Vec<f64>| {
                let is_list = matches!(cell, Cell::List(_));
                // The loss takes them in fp32.
                is_list == (outputs > 1) && numbers.len() == outputs && numbers.iter().all(|&x| (x as f32).is_finite())
            };
            numbers(cell).filter(fits).ok_or_else(|| {
                of_row(*row, format!("has the label {cell}: expected {expected}, because the task is a regression"))
            })
        };
        let targets = values.iter().map(target).collect::<Result<_>>()?;
        Ok(Self { problem: ProblemType::Regression, names: names_for(outputs, head), targets })
    }

    /// Reads any number of classes per row: lists of their names or indices, or of a 0.0 or 1.0 for each class.
    fn several(values: &[Value<'_>], kind: Kind, head: KnownHead<'_>) -> Result<Self> {
        let problem = ProblemType::MultiLabelClassification;
        if kind != Kind::List {
            let (row, cell) = values[0];
            let problem = format!(
                "has the label {cell}: expected a list of classes, because the head predicts several classes per text \
                 (multi_label_classification)"
            );
            return Err(of_row(row, problem));
        }
        let lists: Vec<(usize, &[Cell])> = values.iter().filter_map(|(row, cell)| Some((*row, list(cell)?))).collect();
        let all: Vec<Value<'_>> = lists.iter().flat_map(|(row, items)| items.iter().map(|item| (*row, item))).collect();
        let Some(kind) = all.first().map(|_| kind_of(&all)).transpose()? else {
            return Err("has an empty list as the label of every row: expected at least one class".into());
        };
        if kind == Kind::Fraction {
            let classes = if head.fresh { lists[0].1.len() } else { head.names.len() };
            let target = |(row, items): &(usize, &[Cell])| {
                let target: Vec<f64> = items.iter().filter_map(number).filter(|&x| x == 0.0 || x == 1.0).collect();
                if target.len() == classes && items.len() == classes {
                    return Ok(target);
                }
                let list = Cell::List(items.to_vec());
                let problem = format!("has the label {list}: expected 0.0 or 1.0 for each of the {classes} classes");
                Err(of_row(*row, problem))
            };
            let targets = lists.iter().map(target).collect::<Result<_>>()?;
            return Ok(Self { problem, names: names_for(classes, head), targets });
        }
        let (names, numbers) = classes(&all, kind, head)?;
        if kind == Kind::Whole && names.len() == 2 && lists.iter().all(|(_, items)| items.len() == 2) {
            return Err("has lists of two whole numbers as labels, and two classes, so 0 and 1 are ambiguous (class \
                        numbers, or a flag for each class): write flags as 0.0 and 1.0, or classes by name"
                .into());
        }
        let target = |(row, items): &(usize, &[Cell])| {
            let mut target = vec![0.0; names.len()];
            for item in *items {
                let class = &mut target[numbers[text(item)]];
                if *class == 1.0 && kind == Kind::Whole {
                    let problem = format!(
                        "has the class {item} twice: expected each class number at most once; if these are flags for \
                         each class, write them as 0.0 and 1.0"
                    );
                    return Err(of_row(*row, problem));
                }
                *class = 1.0;
            }
            Ok(target)
        };
        let targets = lists.iter().map(target).collect::<Result<_>>()?;
        Ok(Self { problem, names, targets })
    }

    /// Reads one class per row.
    fn single(values: &[Value<'_>], kind: Kind, head: KnownHead<'_>) -> Result<Self> {
        let other = |(_, cell): &&Value<'_>| !matches!(cell, Cell::Text(_) | Cell::Whole(_) | Cell::Untyped(_));
        // In a table without types whose labels are numbers with a fraction, only `problem_type` makes them classes.
        let fractions = values.first().filter(|_| kind == Kind::Fraction && head.problem.is_none());
        if let Some((row, cell)) = values.iter().find(other).or(fractions) {
            let problem = format!(
                "has the label {cell}, but the head predicts one of the classes {:?}: expected the name or number of \
                 one of them, or another problem_type in the model's config.json",
                head.names
            );
            return Err(of_row(*row, problem));
        }
        let (names, numbers) = classes(values, kind, head)?;
        let targets = values.iter().map(|(_, cell)| vec![numbers[text(cell)] as f64]).collect();
        Ok(Self { problem: ProblemType::SingleLabelClassification, names, targets })
    }
}

fn list(cell: &Cell) -> Option<&[Cell]> {
    if let Cell::List(items) = cell { Some(items) } else { None }
}

/// Returns the known names if their number matches.
fn names_for(labels: usize, head: KnownHead<'_>) -> Vec<String> {
    if head.names.len() == labels { head.names.to_vec() } else { unnamed_labels(labels) }
}

fn number(cell: &Cell) -> Option<f64> {
    match cell {
        Cell::Fraction(number) => Some(*number),
        Cell::Whole(text) | Cell::Untyped(text) => text.trim().parse().ok(),
        Cell::Text(_) | Cell::List(_) => None,
    }
}

/// Returns the text of a value that is not a list and has no fraction.
fn text(cell: &Cell) -> &str {
    match cell {
        Cell::Text(text) | Cell::Whole(text) | Cell::Untyped(text) => text,
        Cell::Fraction(_) | Cell::List(_) => "",
    }
}

/// Returns the common kind of all these values.
fn kind_of(values: &[Value<'_>]) -> Result<Kind> {
    // A column of a table without types has numbers if all cells are numbers.
    let is_whole = |(_, cell): &Value<'_>| matches!(cell, Cell::Untyped(text) if text.trim().parse::<i64>().is_ok());
    let is_number = |(_, cell): &Value<'_>| matches!(cell, Cell::Untyped(_)) && number(cell).is_some();
    if values.iter().all(is_number) && !values.iter().all(is_whole) {
        return Ok(Kind::Fraction);
    }
    let own = |cell: &Cell| match cell {
        Cell::Text(_) | Cell::Untyped(_) => Kind::Text,
        Cell::Whole(_) => Kind::Whole,
        Cell::Fraction(_) => Kind::Fraction,
        Cell::List(_) => Kind::List,
    };
    let (_, first) = values.first().ok_or("has no rows")?;
    let mut kind = own(first);
    for (row, cell) in values {
        kind = match (kind, own(cell)) {
            (all, own) if all == own => all,
            (Kind::Whole | Kind::Fraction, Kind::Whole | Kind::Fraction) => Kind::Fraction,
            (all, own) => {
                let kinds = [own.name(), all.name()];
                let problem = format!(
                    "has the label {cell}, which is {}, but an earlier label is {}: expected labels of one type",
                    kinds[0], kinds[1]
                );
                return Err(of_row(*row, problem));
            }
        };
    }
    Ok(kind)
}

/// Returns the classes of these labels, and the class index of each label. Labels that are numbers in their file are indices
/// of the known classes. Labels that are texts are names of known classes, or else their indices. If they are neither, and
/// the head is fresh, they become the classes, sorted as numbers or as texts.
fn classes<'a>(
    values: &[Value<'a>],
    kind: Kind,
    head: KnownHead<'_>,
) -> Result<(Vec<String>, HashMap<&'a str, usize>)> {
    let (known, are_numbers) = (head.names, kind == Kind::Whole);
    let labels: BTreeSet<&'a str> = values.iter().map(|(_, cell)| text(cell)).collect();
    let row = |label: &str| values.iter().find(|(_, cell)| text(cell) == label).map_or(0, |(row, _)| *row);
    // A table has no numbers, only texts.
    let are_whole = are_numbers || labels.iter().all(|label| label.parse::<i64>().is_ok());
    if let Some(label) = labels.iter().find(|label| are_whole && label.starts_with('-')) {
        let problem = format!("has the label {label}: expected class numbers from 0; remove rows without a label");
        return Err(of_row(row(label), problem));
    }
    let named = |label: &str| known.iter().position(|class| class == label);
    let is_plain = |number: &usize, label: &str| *number < known.len() && number.to_string() == label;
    let numbered = |label: &str| label.parse::<usize>().ok().filter(|number| is_plain(number, label));
    let of_all = |number: &dyn Fn(&str) -> Option<usize>| -> Option<HashMap<&'a str, usize>> {
        labels.iter().map(|label| Some((*label, number(label)?))).collect()
    };
    // A number is never a name: a file may name its classes by other numbers.
    let by_name = if are_numbers { None } else { of_all(&named) };
    if let Some(numbers) = by_name.or_else(|| of_all(&numbered)) {
        return Ok((known.to_vec(), numbers));
    }
    if head.fresh {
        let mut classes: Vec<&'a str> = labels.into_iter().collect();
        classes.sort_by_key(|label| (label.parse::<i64>().unwrap_or(i64::MAX), label.to_string()));
        return match classes.len() {
            1 => Err(format!("has the label {:?} in all rows: expected at least 2 classes", classes[0]).into()),
            _ => {
                let names = classes.iter().map(ToString::to_string).collect();
                Ok((names, classes.into_iter().zip(0..).collect()))
            }
        };
    }
    let is_other = |label: &&&str| (are_numbers || named(label).is_none()) && numbered(label).is_none();
    let other = labels.iter().find(is_other).or(labels.first()).expect("there is a label");
    let problem = format!(
        "has the label {other:?}, but the model's classes are {known:?}: expected a class name, or a class number from \
         0"
    );
    Err(of_row(row(other), problem))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn texts(labels: &[&str]) -> Vec<Cell> {
        labels.iter().map(|label| Cell::Text(label.to_string())).collect()
    }

    fn table(labels: &[&str]) -> Vec<Cell> {
        labels.iter().map(|label| Cell::Untyped(label.to_string())).collect()
    }

    fn wholes(labels: &[i64]) -> Vec<Cell> {
        labels.iter().map(|label| Cell::Whole(label.to_string())).collect()
    }

    fn fractions(labels: &[f64]) -> Vec<Cell> {
        labels.iter().map(|&label| Cell::Fraction(label)).collect()
    }

    fn lists<const N: usize>(rows: [Vec<Cell>; N]) -> Vec<Cell> {
        rows.into_iter().map(Cell::List).collect()
    }

    /// Reads labels for a head with these names.
    fn of(cells: &[Cell], names: &[&str], fresh: bool) -> Result<Labels> {
        for_problem(cells, names, fresh, None)
    }

    fn for_problem(cells: &[Cell], names: &[&str], fresh: bool, problem: Option<ProblemType>) -> Result<Labels> {
        let names: Vec<String> = names.iter().map(ToString::to_string).collect();
        let cells: Vec<&Cell> = cells.iter().collect();
        Labels::of(&cells, KnownHead { names: &names, problem, fresh, end_token: None })
    }

    #[track_caller]
    fn same(got: Result<Labels>, problem: ProblemType, names: &[&str], targets: &[&[f64]]) {
        let names = names.iter().map(ToString::to_string).collect();
        let targets = targets.iter().map(|target| target.to_vec()).collect();
        assert_eq!(got.unwrap(), Labels { problem, names, targets });
    }

    #[track_caller]
    fn single(got: Result<Labels>, names: &[&str], classes: &[usize]) {
        let targets: Vec<Vec<f64>> = classes.iter().map(|&class| vec![class as f64]).collect();
        let targets: Vec<&[f64]> = targets.iter().map(Vec::as_slice).collect();
        same(got, ProblemType::SingleLabelClassification, names, &targets);
    }

    #[track_caller]
    fn told(got: Result<Labels>, expected: &str) {
        let told = told_of(got);
        assert!(told.contains(expected), "{told}");
    }

    fn told_of(got: Result<Labels>) -> String {
        let WrongLabels { row, problem } = got.unwrap_err();
        row.map_or(problem.clone(), |row| format!("row {row} {problem}"))
    }

    #[test]
    fn labels_are_a_models_classes_or_become_them() {
        let three = &["no", "so-so", "yes"];
        single(of(&texts(&["yes", "no"]), three, false), three, &[2, 0]);
        single(of(&texts(&["0", "2"]), three, false), three, &[0, 2]);
        single(of(&wholes(&[0, 2]), three, false), three, &[0, 2]);
        single(of(&texts(&["10", "9", "no"]), &["a", "b"], true), &["9", "10", "no"], &[1, 0, 2]);
        single(of(&wholes(&[7, 3]), &["a", "b"], true), &["3", "7"], &[1, 0]);
        single(of(&table(&["7", "3"]), &[], true), &["3", "7"], &[1, 0]);
        single(of(&texts(&["b", "a"]), &[], true), &["a", "b"], &[1, 0]);
        // Texts in JSON that look like numbers with a fraction.
        single(of(&texts(&["0.5", "1.5"]), &[], true), &["0.5", "1.5"], &[0, 1]);
        told(of(&texts(&["b", "b"]), &[], true), "expected at least 2 classes");
        let other = told_of(of(&texts(&["yes", "maybe"]), &["no", "yes"], false));
        assert!(other.contains("row 1 has the label \"maybe\"") && other.contains("[\"no\", \"yes\"]"), "{other}");
        told(of(&wholes(&[0, 2]), &["no", "yes"], false), "row 1 has the label \"2\"");
    }

    /// Classes whose names are numbers, and not their own.
    #[test]
    fn a_number_is_no_name() {
        let stars = &["1", "2", "3"];
        single(of(&wholes(&[0, 1, 2]), stars, false), stars, &[0, 1, 2]);
        single(of(&wholes(&[1, 2]), stars, false), stars, &[1, 2]);
        single(of(&texts(&["1", "2"]), stars, false), stars, &[0, 1]);
        single(of(&table(&["1", "2"]), stars, false), stars, &[0, 1]);
        single(of(&texts(&["0", "1"]), stars, false), stars, &[0, 1]);
        told(of(&texts(&["0", "01"]), stars, false), "has the label \"01\"");
    }

    #[test]
    fn rows_without_a_label_and_labels_of_two_kinds_are_refused() {
        told(of(&wholes(&[0, -1]), &["a", "b"], true), "row 1 has the label -1");
        told(of(&table(&["-1", "0"]), &["a", "b"], true), "row 0 has the label -1");
        let [a, list] = [wholes(&[0]), lists([wholes(&[0])])];
        let mixed = |more: Vec<Cell>| of(&[&a[..], &more].concat(), &[], true);
        told(
            mixed(texts(&["no"])),
            "row 1 has the label \"no\", which is a string, but an earlier label is a whole number",
        );
        told(mixed(list.clone()), "row 1 has the label [0], which is a list, but an earlier label is a whole number");
        let nested = lists([[a.clone(), texts(&["no"])].concat()]);
        told(
            of(&nested, &[], true),
            "row 0 has the label \"no\", which is a string, but an earlier label is a whole number",
        );
    }

    #[test]
    fn numbers_with_a_fraction_are_a_regression() {
        let regression = ProblemType::Regression;
        let scores = [fractions(&[0.5]), wholes(&[3]), fractions(&[-1.0])].concat();
        same(of(&scores, &[], true), regression, &["LABEL_0"], &[&[0.5], &[3.0], &[-1.0]]);
        same(of(&table(&["0.5", "3", " -1"]), &["a", "b"], true), regression, &["LABEL_0"], &[&[0.5], &[3.0], &[-1.0]]);
        // A single label makes it a regression, for integers too.
        same(of(&wholes(&[3, 5]), &["score"], false), regression, &["score"], &[&[3.0], &[5.0]]);
        same(of(&table(&["3", "5"]), &["score"], false), regression, &["score"], &[&[3.0], &[5.0]]);
        // Several numbers need problem_type.
        let pairs = lists([fractions(&[0.0, 1.0]), wholes(&[2, 3])]);
        let given = Some(regression);
        let names = ["LABEL_0", "LABEL_1"];
        same(for_problem(&pairs, &[], true, given), regression, &names, &[&[0.0, 1.0], &[2.0, 3.0]]);
        same(for_problem(&pairs, &["x", "y"], false, given), regression, &["x", "y"], &[&[0.0, 1.0], &[2.0, 3.0]]);
        told(of(&pairs, &[], true), "row 1 has the label [2, 3]: expected 0.0 or 1.0 for each of the 2 classes");
        told(of(&pairs, &["score"], false), "row 0 has the label [0.0, 1.0]: expected a finite number");
        told(for_problem(&pairs, &["x", "y", "z"], false, given), "expected a list of 3 finite numbers");
        told(
            for_problem(&fractions(&[1.0]), &["x", "y"], false, given),
            "row 0 has the label 1.0: expected a list of 2",
        );
        for odd in [f64::NAN, f64::INFINITY, 1e39] {
            told(
                of(&fractions(&[0.5, odd]), &[], true),
                &format!("row 1 has the label {odd:?}: expected a finite number"),
            );
        }
        told(of(&table(&["0.5", "nan"]), &[], true), "row 1 has the label \"nan\": expected a finite number");
        told(for_problem(&texts(&["a"]), &[], true, given), "row 0 has the label \"a\": expected a finite number");
        // The head has classes.
        told(
            of(&fractions(&[0.5]), &["a", "b"], false),
            "row 0 has the label 0.5, but the head predicts one of the classes",
        );
        told(of(&table(&["0.5"]), &["a", "b"], false), "another problem_type in the model's config.json");
    }

    #[test]
    fn lists_are_several_classes() {
        let several = ProblemType::MultiLabelClassification;
        let by_name = lists([texts(&["b", "a"]), texts(&[]), texts(&["b", "b"])]);
        let rows: [&[f64]; 3] = [&[1.0, 1.0], &[0.0, 0.0], &[0.0, 1.0]];
        same(of(&by_name, &[], true), several, &["a", "b"], &rows);
        same(of(&by_name, &["a", "b"], false), several, &["a", "b"], &rows);
        same(
            for_problem(&by_name, &["b", "a", "c"], false, Some(several)),
            several,
            &["b", "a", "c"],
            &[&[1.0, 1.0, 0.0], &[0.0; 3], &[1.0, 0.0, 0.0]],
        );
        let by_number = lists([wholes(&[2]), wholes(&[0, 1])]);
        let rows: [&[f64]; 2] = [&[0.0, 0.0, 1.0], &[1.0, 1.0, 0.0]];
        same(of(&by_number, &["x", "y", "z"], false), several, &["x", "y", "z"], &rows);
        same(of(&by_number, &[], true), several, &["0", "1", "2"], &rows);
        let flags = lists([fractions(&[0.0, 0.0, 1.0]), [fractions(&[1.0, 1.0]), wholes(&[0])].concat()]);
        same(of(&flags, &["x", "y", "z"], false), several, &["x", "y", "z"], &rows);
        same(of(&flags, &[], true), several, &["LABEL_0", "LABEL_1", "LABEL_2"], &rows);
        // A fresh head with one label gets those of the lists.
        same(of(&by_number, &["score"], true), several, &["0", "1", "2"], &rows);

        told(of(&by_name, &["a", "c"], false), "row 0 has the label \"b\", but the model's classes are");
        told(
            of(&flags, &["x", "y"], false),
            "row 0 has the label [0.0, 0.0, 1.0]: expected 0.0 or 1.0 for each of the 2",
        );
        told(of(&lists([fractions(&[0.0, 0.5])]), &[], true), "row 0 has the label [0.0, 0.5]: expected 0.0 or 1.0");
        // Integers that look like flags.
        told(of(&lists([wholes(&[0, 1, 1])]), &[], true), "row 0 has the class 1 twice");
        told(of(&lists([wholes(&[0, 1]), wholes(&[1, 0])]), &[], true), "write flags as 0.0 and 1.0");
        told(of(&lists([texts(&[])]), &[], true), "has an empty list as the label of every row");
        told(
            for_problem(&texts(&["a"]), &["a", "b"], false, Some(several)),
            "row 0 has the label \"a\": expected a list",
        );
        let given = Some(ProblemType::SingleLabelClassification);
        told(
            for_problem(&by_name, &["a", "b"], false, given),
            "row 0 has the label [\"b\", \"a\"], but the head predicts one",
        );
    }
}
