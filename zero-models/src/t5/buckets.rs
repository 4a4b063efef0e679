//! Buckets of relative positions: maps distances between a query and a key to rows of a table.

/// A mapping of distances to rows of a table, <https://arxiv.org/abs/1910.10683>, section 2.1.
#[derive(Clone, Copy, Debug)]
pub struct Buckets {
    /// Number of rows of the table.
    pub count: usize,
    /// Distance from which all larger ones share the last bucket.
    pub max_distance: usize,
    /// True if keys after the query have their own buckets, instead of the bucket of the query itself.
    pub both_sides: bool,
}

impl Buckets {
    /// Returns the bucket of a key `distance` positions after the query. Small distances have one bucket each. Larger ones share buckets
    /// by their logarithm, which is rounded as torch does on a CPU.
    pub fn of(self, distance: i64) -> usize {
        let (side, count) = match self.both_sides {
            true => (if distance > 0 { self.count / 2 } else { 0 }, self.count / 2),
            false => (0, self.count),
        };
        let distance = if self.both_sides { distance.unsigned_abs() } else { distance.min(0).unsigned_abs() } as usize;
        let exact = count / 2;
        if distance < exact {
            return side + distance;
        }
        let logarithm = (distance as f32 / exact as f32).ln();
        let most = (self.max_distance as f64 / exact as f64).ln() as f32;
        let shared = (logarithm / most * (count - exact) as f32) as usize;
        side + (exact + shared).min(count - 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The fixture holds the buckets that transformers computes for distances from -300 on (`tests/fixtures/make_models_reference.py`).
    #[test]
    fn buckets_are_those_of_transformers() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/fixtures/t5_tiny/buckets.json");
        let cases: Vec<(usize, usize, bool, Vec<usize>)> =
            serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
        for (count, max_distance, both_sides, expected) in &cases {
            let buckets = Buckets { count: *count, max_distance: *max_distance, both_sides: *both_sides };
            for (distance, expected) in (-300..).zip(expected) {
                assert_eq!(buckets.of(distance), *expected, "{buckets:?}, {distance}");
            }
        }
        assert_eq!(cases.len(), 10);
    }
}
