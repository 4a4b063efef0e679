//! Moments as people read them.

/// Milliseconds since 1970 as `2026-03-01T12:00:00Z`.
pub(super) fn utc(unix_ms: u64) -> String {
    let seconds = unix_ms / 1000;
    let (day, second) = (seconds / 86_400, seconds % 86_400);
    // Days from March 1 of year 0, so that the leap day is the last of its year; years of 365.2425 days.
    let day = day + 719_468;
    let (era, of_era) = (day / 146_097, day % 146_097);
    let year_of_era = (of_era - of_era / 1460 + of_era / 36_524 - of_era / 146_096) / 365;
    let of_year = of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    // Months from March: 153 days in five.
    let from_march = (5 * of_year + 2) / 153;
    let day_of_month = of_year - (153 * from_march + 2) / 5 + 1;
    let month = if from_march < 10 { from_march + 3 } else { from_march - 9 };
    let year = 400 * era + year_of_era + u64::from(month <= 2);
    let (hour, minute, second) = (second / 3600, second / 60 % 60, second % 60);
    format!("{year:04}-{month:02}-{day_of_month:02}T{hour:02}:{minute:02}:{second:02}Z")
}

#[cfg(test)]
mod tests {
    use super::utc;

    #[test]
    fn moments() {
        assert_eq!(utc(0), "1970-01-01T00:00:00Z");
        assert_eq!(utc(951_782_399_999), "2000-02-28T23:59:59Z");
        assert_eq!(utc(951_782_400_000), "2000-02-29T00:00:00Z");
        assert_eq!(utc(1_709_251_199_000), "2024-02-29T23:59:59Z");
        assert_eq!(utc(1_767_225_600_000), "2026-01-01T00:00:00Z");
        assert_eq!(utc(4_107_542_400_000), "2100-03-01T00:00:00Z");
        assert!(utc(u64::MAX).ends_with('Z'));
    }
}
