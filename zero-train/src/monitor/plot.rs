//! A plot of the loss, and of the memory below it, over the steps.
//!
//! In: points, in any number. Out: an SVG image, as text or as a file that is replaced whole, so that a viewer never
//! sees half of one. Needs no fonts: the text is left to the viewer.

use std::fs::Permissions;
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use plotters::chart::{ChartBuilder, LabelAreaPosition};
use plotters::coord::Shift;
use plotters::drawing::{DrawingArea, IntoDrawingArea};
use plotters::element::Circle;
use plotters::prelude::SVGBackend;
use plotters::series::LineSeries;
use plotters::style::{BLUE, Color, RED, RGBColor, WHITE};

use super::{MonitorError, io_error};

const WIDTH: u32 = 900;
const PANEL_HEIGHT: u32 = 340;

/// Stretches of steps of which a long series keeps the smallest and the largest value.
const STRETCHES: usize = 1000;

/// Larger values are left out like infinities, smaller ones drawn as 0: there the arithmetic of the axes would
/// overflow.
const LARGEST: f64 = 1e100;
const SMALLEST: f64 = 1e-100;

/// Later steps are left out.
const LAST_STEP: usize = 1 << 49;

/// The points of a plot.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct LossPlot {
    /// The line above the plot.
    pub title: String,
    /// Step and loss. Losses that are NaN, infinite or beyond 10^100 are left out.
    pub loss: Vec<(usize, f64)>,
    /// Step and bytes of memory, drawn in GiB in a panel of its own; without points there is no such panel.
    pub memory_bytes: Vec<(usize, u64)>,
}

impl LossPlot {
    /// The image, as the text of an SVG file. A single point is a dot; a constant series a line in the middle; without
    /// any finite point the panel is empty.
    ///
    /// # Errors
    ///
    /// [`MonitorError::Draw`].
    pub fn svg(&self) -> Result<String, MonitorError> {
        let gib = |&(step, bytes): &(usize, u64)| (step, bytes as f64 / f64::from(1 << 30));
        let memory: Vec<_> = self.memory_bytes.iter().map(gib).collect();
        let mut panels = vec![Panel { name: "loss", color: BLUE, points: &self.loss }];
        if !memory.is_empty() {
            panels.push(Panel { name: "memory, GiB", color: RED, points: &memory });
        }
        let mut text = String::new();
        {
            let size = (WIDTH, PANEL_HEIGHT * panels.len() as u32);
            let root = SVGBackend::with_string(&mut text, size).into_drawing_area();
            root.fill(&WHITE).map_err(draw_error)?;
            for (i, (panel, area)) in panels.iter().zip(root.split_evenly((panels.len(), 1))).enumerate() {
                panel.draw(&area, if i == 0 { &self.title } else { "" })?;
            }
            root.present().map_err(draw_error)?;
        }
        Ok(text)
    }

    /// Writes the image to `path` in place of an earlier one. The folder must be there.
    ///
    /// # Errors
    ///
    /// [`MonitorError::Draw`]; [`MonitorError::Io`], which leaves the earlier image as it was.
    pub fn write(&self, path: &Path) -> Result<(), MonitorError> {
        let svg = self.svg()?;
        let dir = path.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."));
        // What an ordinary new file may be used for (less the process's mask); temporary files are private otherwise.
        let readable = Permissions::from_mode(0o666);
        let file = tempfile::Builder::new().prefix(".plot-").permissions(readable).tempfile_in(dir);
        let mut file = file.map_err(io_error("create a file in", dir))?;
        file.write_all(svg.as_bytes())
            .and_then(|()| file.as_file().sync_all())
            .map_err(io_error("write", file.path()))?;
        file.persist(path).map_err(|error| io_error("write", path)(error.error))?;
        Ok(())
    }
}

fn draw_error(error: impl std::fmt::Display) -> MonitorError {
    MonitorError::Draw { problem: error.to_string() }
}

/// One pair of axes and a line.
struct Panel<'a> {
    name: &'a str,
    color: RGBColor,
    points: &'a [(usize, f64)],
}

impl Panel<'_> {
    fn draw(&self, area: &DrawingArea<SVGBackend, Shift>, title: &str) -> Result<(), MonitorError> {
        let drawable = |&&(step, value): &&(usize, f64)| step <= LAST_STEP && value.abs() <= LARGEST;
        let cleaned = |&(step, value): &(usize, f64)| (step as u64, if value.abs() < SMALLEST { 0.0 } else { value });
        let points: Vec<(u64, f64)> = self.points.iter().filter(drawable).map(cleaned).collect();
        let points = thinned(&points);
        let (bottom, top, unit) = axis(&points);
        let first = points.iter().map(|point| point.0).min().unwrap_or(0);
        let last = points.iter().map(|point| point.0).max().unwrap_or(1).max(first + 1);
        let line: Vec<(u64, f64)> = points.iter().map(|&(step, value)| (step, value / unit)).collect();
        let mut builder = ChartBuilder::on(area);
        builder.margin(12).set_label_area_size(LabelAreaPosition::Left, 76);
        builder.set_label_area_size(LabelAreaPosition::Bottom, 40);
        if !title.is_empty() {
            builder.caption(title, ("sans-serif", 18));
        }
        let mut chart = builder.build_cartesian_2d(first..last, bottom / unit..top / unit).map_err(draw_error)?;
        chart
            .configure_mesh()
            .x_desc("step")
            .y_desc(self.name)
            .x_label_formatter(&|step: &u64| step.to_string())
            .y_label_formatter(&|value: &f64| label(value * unit))
            .light_line_style(WHITE)
            .draw()
            .map_err(draw_error)?;
        if let [point] = line[..] {
            chart.draw_series([Circle::new(point, 3, self.color.filled())]).map_err(draw_error)?;
        } else {
            chart.draw_series(LineSeries::new(line, &self.color)).map_err(draw_error)?;
        }
        Ok(())
    }
}

/// Ends of the value axis, and a power of ten in units of which its length is between 1 and 10. In that unit the axis
/// is neither tiny nor far from 0 against its length, which the drawing library's ticks cannot do.
fn axis(points: &[(u64, f64)]) -> (f64, f64, f64) {
    let low = points.iter().map(|point| point.1).reduce(f64::min).unwrap_or(0.0);
    let high = points.iter().map(|point| point.1).reduce(f64::max).unwrap_or(1.0);
    let size = low.abs().max(high.abs());
    let margin = if size == 0.0 { 1.0 } else { ((high - low) * 0.05).max(size * 1e-3) };
    let (bottom, top) = (low - margin, high + margin);
    (bottom, top, 10_f64.powf((top - bottom).log10().floor()))
}

/// A long series cut into stretches of equal numbers of points, each shown by its smallest and largest value, so that
/// the image stays small and spikes stay visible.
fn thinned(points: &[(u64, f64)]) -> Vec<(u64, f64)> {
    if points.len() <= 2 * STRETCHES {
        return points.to_vec();
    }
    let by_value = |a: &&(u64, f64), b: &&(u64, f64)| a.1.total_cmp(&b.1);
    let mut kept = Vec::with_capacity(2 * STRETCHES);
    for stretch in points.chunks(points.len().div_ceil(STRETCHES)) {
        let ends = [stretch.iter().min_by(by_value), stretch.iter().max_by(by_value)];
        let mut ends: Vec<(u64, f64)> = ends.into_iter().flatten().copied().collect();
        ends.sort_by_key(|point| point.0);
        kept.extend(ends);
    }
    kept
}

/// A value with up to five significant digits.
fn label(value: f64) -> String {
    let size = value.abs();
    if size < 1e-12 {
        return "0".to_string();
    }
    if !(1e-3..1e5).contains(&size) {
        return format!("{value:.4e}");
    }
    let decimals = (4 - size.log10().floor() as i32).clamp(0, 7) as usize;
    let text = format!("{value:.decimals$}");
    if decimals == 0 { text } else { text.trim_end_matches('0').trim_end_matches('.').to_string() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plot(loss: &[(usize, f64)]) -> String {
        LossPlot { title: "a < b".to_string(), loss: loss.to_vec(), memory_bytes: Vec::new() }.svg().unwrap()
    }

    /// The line, which alone has the loss's color; the axes are polylines too.
    fn line_points(svg: &str) -> Option<usize> {
        let line = svg.lines().find(|line| line.contains("<polyline") && line.contains("#0000FF"))?;
        Some(line.split("points=\"").nth(1)?.split('"').next()?.split_whitespace().count())
    }

    #[test]
    fn two_panels_with_labels() {
        let loss: Vec<_> = (1..=100).map(|step| (step, 8.0 / step as f64)).collect();
        let memory_bytes = (1..=100).map(|step| (step, (step as u64) << 27)).collect();
        let svg = LossPlot { title: "run 1".to_string(), loss, memory_bytes }.svg().unwrap();
        for text in ["run 1", "loss", "memory, GiB", "step"] {
            assert!(svg.contains(text), "{text}");
        }
        assert!(svg.starts_with("<svg") && svg.trim_end().ends_with("</svg>"));
        assert_eq!(line_points(&svg), Some(100));
        assert!(!svg.contains("NaN") && !svg.contains("inf"));
    }

    #[test]
    fn nothing_and_one_point() {
        assert_eq!(line_points(&plot(&[])), None);
        let one = plot(&[(7, 2.5)]);
        assert!(one.contains("<circle") && one.contains("a &lt; b"));
        assert!(plot(&[(1, f64::NAN), (2, 3.0)]).contains("<circle"));
        assert!(!plot(&[(1, f64::NAN)]).contains("<circle"));
    }

    #[test]
    fn odd_series_are_drawn() {
        let all = |values: &[f64]| plot(&values.iter().copied().enumerate().collect::<Vec<_>>());
        assert_eq!(line_points(&all(&[1.0, f64::NAN, 2.0, f64::INFINITY, f64::NEG_INFINITY, 3.0])), Some(3));
        for value in [0.0, 5.0, -5.0, 1e16, 1e99, -1e99, 1e-99, 1e-320, 1e-15] {
            let svg = all(&[value; 3]);
            assert_eq!(line_points(&svg), Some(3), "{value}");
            assert!(svg.len() < 100_000, "{value}: {} bytes", svg.len());
        }
        assert_eq!(line_points(&all(&[1e16, 1e16 + 2.0])), Some(2));
        assert_eq!(line_points(&all(&[-1e99, 1e99])), Some(2));
        assert_eq!(line_points(&all(&[1e300, f64::MAX, 1.0, 2.0])), Some(2));
        assert_eq!(line_points(&plot(&[(usize::MAX, 1.0), (1, 1.0), (LAST_STEP, 2.0)])), Some(2));
        assert_eq!(line_points(&plot(&[(LAST_STEP - 1, 1.0), (LAST_STEP, 2.0)])), Some(2));
    }

    #[test]
    fn a_long_series_keeps_its_spikes() {
        let mut points: Vec<(u64, f64)> = (0..100_001).map(|step| (step, 1.0)).collect();
        points[54_321].1 = 9.0;
        points[77_777].1 = -9.0;
        let kept = thinned(&points);
        assert!(kept.len() <= 2 * STRETCHES && kept.is_sorted_by_key(|point| point.0));
        assert!(kept.contains(&(54_321, 9.0)) && kept.contains(&(77_777, -9.0)));
    }

    #[test]
    fn labels_are_short() {
        let cases = [
            (0.0, "0"),
            (2.5, "2.5"),
            (0.30000000000000004, "0.3"),
            (1234.56, "1234.6"),
            (1.0002, "1.0002"),
            (10.0, "10"),
        ];
        for (value, expected) in cases {
            assert_eq!(label(value), expected);
        }
        assert_eq!((label(1e-4).as_str(), label(-2e7).as_str()), ("1.0000e-4", "-2.0000e7"));
    }

    #[test]
    fn the_file_is_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("loss.svg");
        let mut plot = LossPlot { title: "one".to_string(), loss: vec![(1, 2.0), (2, 1.0)], memory_bytes: vec![] };
        plot.write(&path).unwrap();
        plot.title = "two".to_string();
        plot.write(&path).unwrap();
        assert_eq!(std::fs::read_to_string(&path).unwrap(), plot.svg().unwrap());
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1);
        let error = plot.write(&dir.path().join("none/loss.svg")).unwrap_err();
        assert!(matches!(error, MonitorError::Io { .. }), "{error}");
    }
}
