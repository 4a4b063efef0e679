//! The data set: short scenes of plays with one name masked. The task is to tell who says the line.

use std::collections::BTreeMap;

use zero_core::random::Draws;

/// Token that replaces a masked name: the tokenizer's mask token.
pub const GAP: &str = "[MASK]";

/// Speeches per part. A part is trained on, held out or tested as a unit, so tested speeches were never close to
/// trained ones. One in ten parts is held out, and one is the test.
const PART: usize = 40;
const HELD_OUT: usize = 4;
const TEST: usize = 9;

/// Number of speeches before and after the line.
const BEFORE: usize = 2;
const AFTER: usize = 1;

/// Maximum words of the line, and of a speech around it.
const LINE: usize = 12;
const AROUND: usize = 6;

/// A scene with a masked name, and the expected answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Row {
    /// The scene.
    pub text: String,
    /// The masked name.
    pub label: String,
}

/// All rows.
#[derive(Debug, Default)]
pub struct Lines {
    /// Scenes of all speakers with any name masked, to train the base.
    pub gaps: Vec<Row>,
    /// Scenes in which the line's name, one of the most frequent speakers, is masked.
    pub train: Vec<Row>,
    /// The same, held out.
    pub held_out: Vec<Row>,
    /// The same, to predict without labels.
    pub test: Vec<Row>,
}

struct Speech<'a> {
    speaker: &'a str,
    words: Vec<&'a str>,
}

/// A scene: the index, speaker and truncated words of each speech.
type Scene<'a> = Vec<(usize, &'a str, &'a [&'a str])>;

impl Lines {
    /// Builds rows from plays: a name with a colon, a speech, an empty line. Labels are the `speakers` most frequent
    /// names. The result is deterministic.
    pub fn of(plays: &str, speakers: usize) -> Self {
        let speeches: Vec<Speech<'_>> = plays.split("\n\n").filter_map(Speech::of).collect();
        let mut count: BTreeMap<&str, usize> = BTreeMap::new();
        let trained = speeches.iter().enumerate().filter(|(at, _)| ![HELD_OUT, TEST].contains(&part(*at)));
        trained.for_each(|(_, speech)| *count.entry(speech.speaker).or_default() += 1);
        let mut frequent: Vec<(&str, usize)> = count.into_iter().collect();
        frequent.sort_by_key(|&(speaker, count)| (std::cmp::Reverse(count), speaker));
        frequent.truncate(speakers);

        let (mut lines, mut draws) = (Self::default(), Draws::new(0));
        for at in 0..speeches.len() {
            let scene = scene(&speeches, at);
            let is_frequent = frequent.iter().any(|(speaker, _)| *speaker == speeches[at].speaker);
            let rows = match part(at) {
                HELD_OUT => &mut lines.held_out,
                TEST => &mut lines.test,
                _ => {
                    lines.gaps.extend(gaps(&scene, at, &mut draws));
                    &mut lines.train
                }
            };
            rows.extend(is_frequent.then(|| without_name(&scene, at)));
        }
        draws.shuffle(&mut lines.gaps);
        draws.shuffle(&mut lines.train);
        lines
    }
}

impl<'a> Speech<'a> {
    fn of(text: &'a str) -> Option<Self> {
        let (speaker, speech) = text.trim().split_once(":\n")?;
        Some(Self { speaker, words: speech.split_whitespace().collect() })
    }
}

fn part(at: usize) -> usize {
    at / PART % 10
}

/// Returns the speech at index `at` and those around it, within its part.
fn scene<'a>(speeches: &'a [Speech<'a>], at: usize) -> Scene<'a> {
    let first = at.saturating_sub(BEFORE).max(at / PART * PART);
    let end = (at + AFTER + 1).min((at / PART + 1) * PART).min(speeches.len());
    let cut = |near: usize| {
        let Speech { speaker, words } = &speeches[near];
        (near, *speaker, &words[..words.len().min(if near == at { LINE } else { AROUND })])
    };
    (first..end).map(cut).collect()
}

fn without_name(scene: &Scene<'_>, gap: usize) -> Row {
    let speech = |&(at, speaker, words): &(usize, &str, &[&str])| {
        format!("{}: {}", if at == gap { GAP } else { speaker }, words.join(" "))
    };
    let text = scene.iter().map(speech).collect::<Vec<_>>().join(" / ");
    let label = scene.iter().find(|(at, ..)| *at == gap).map(|(_, speaker, _)| speaker.to_string());
    Row { text, label: label.expect("the gap is in the scene") }
}

/// Masks the name of the line in one row, and a random name of the scene in two more.
fn gaps(scene: &Scene<'_>, at: usize, draws: &mut Draws) -> Vec<Row> {
    let any = (0..2).map(|_| scene[draws.below(scene.len())].0);
    [at].into_iter().chain(any).map(|gap| without_name(scene, gap)).collect()
}
