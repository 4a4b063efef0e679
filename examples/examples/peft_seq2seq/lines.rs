//! The data: who says this line? Short scenes of the plays, in which a name is left out.

use std::collections::BTreeMap;

use zero_core::random::Draws;

/// What stands for a name that is left out: the tokenizer's own token for that.
pub const GAP: &str = "[MASK]";

/// Speeches that follow one another are trained on, held out or tested together: what is tested was never near what was trained
/// on. Of ten such parts, one is held out and one is the test.
const PART: usize = 40;
const HELD_OUT: usize = 4;
const TEST: usize = 9;

/// Speeches before the line and after it.
const BEFORE: usize = 2;
const AFTER: usize = 1;

/// Most words of the line, and of a speech around it.
const LINE: usize = 12;
const AROUND: usize = 6;

/// A scene with a gap, and what is to be made of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Row {
    /// The scene.
    pub text: String,
    /// What was left out.
    pub label: String,
}

/// All rows.
#[derive(Debug, Default)]
pub struct Lines {
    /// Any name is left out, in scenes of all speakers: for the base.
    pub gaps: Vec<Row>,
    /// Who says the line? One of the most frequent speakers does.
    pub train: Vec<Row>,
    /// The same, held out.
    pub held_out: Vec<Row>,
    /// The same, to be told without labels.
    pub test: Vec<Row>,
}

struct Speech<'a> {
    speaker: &'a str,
    words: Vec<&'a str>,
}

/// A scene: the numbers of its speeches, with their words cut.
type Scene<'a> = Vec<(usize, &'a str, &'a [&'a str])>;

impl Lines {
    /// Of plays: a name with a colon, a speech, an empty line. `speakers` says among how many is asked. The same text gives the
    /// same rows.
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

/// The speech at a place and those around it, of its own part.
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

/// The scene without the name of its line, and twice without any name.
fn gaps(scene: &Scene<'_>, at: usize, draws: &mut Draws) -> Vec<Row> {
    let any = (0..2).map(|_| scene[draws.below(scene.len())].0);
    [at].into_iter().chain(any).map(|gap| without_name(scene, gap)).collect()
}
