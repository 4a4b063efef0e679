//! Human-readable times.

use chrono::{DateTime, SecondsFormat, Utc};

/// Formats milliseconds since 1970 as `2026-03-01T12:00:00Z`.
pub(super) fn utc(unix_ms: u64) -> String {
    let moment = i64::try_from(unix_ms).ok().and_then(DateTime::<Utc>::from_timestamp_millis);
    moment.unwrap_or(DateTime::<Utc>::MAX_UTC).to_rfc3339_opts(SecondsFormat::Secs, true)
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
