//! Formats how long ago something happened.

use std::time::{SystemTime, UNIX_EPOCH};

/// The time since an RFC 3339 instant in UTC, in its largest unit: `5m`. An invalid instant gives `?`.
pub fn since(at: &str) -> String {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    match seconds(at) {
        Some(then) => short(now.saturating_sub(then)),
        None => "?".into(),
    }
}

/// The time since an instant in seconds since 1970.
pub fn since_seconds(then: i64) -> String {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    short(now.saturating_sub(u64::try_from(then).unwrap_or(0)))
}

/// A time in its largest unit: `5m`.
pub fn short(seconds: u64) -> String {
    let units = [("d", 86_400), ("h", 3_600), ("m", 60)];
    match units.iter().find(|(_, unit)| seconds >= *unit) {
        Some((name, unit)) => format!("{}{name}", seconds / unit),
        None => format!("{seconds}s"),
    }
}

/// Parses `2026-01-31T12:34:56.789…Z` into milliseconds since 1970.
pub fn milliseconds(at: &str) -> Option<u64> {
    let part = at.get(20..23).and_then(|digits| digits.parse::<u64>().ok()).unwrap_or(0);
    Some(seconds(at)? * 1000 + part)
}

/// Parses `2026-01-31T12:34:56…Z` into seconds since 1970.
fn seconds(at: &str) -> Option<u64> {
    let number = |from: usize, to: usize| at.get(from..to)?.parse::<u64>().ok();
    let (year, month, day) = (number(0, 4)?, number(5, 7)?, number(8, 10)?);
    let (hour, minute, second) = (number(11, 13)?, number(14, 16)?, number(17, 19)?);
    if year < 1970 || !(1..=12).contains(&month) || !(1..=31).contains(&day) {
        return None;
    }
    Some(days(year, month, day) * 86_400 + hour * 3_600 + minute * 60 + second)
}

/// Days since 1970. Years begin in March, so that the leap day is the last day of a year.
fn days(year: u64, month: u64, day: u64) -> u64 {
    let (year, month) = if month > 2 { (year, month - 3) } else { (year - 1, month + 9) };
    let before = 365 * year + year / 4 - year / 100 + year / 400;
    before + (153 * month + 2) / 5 + day - 1 - 719_468
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn instants_are_read() {
        for (at, expected) in [
            ("1970-01-01T00:00:00Z", Some(0)),
            ("2000-02-29T12:00:00.5Z", Some(951_825_600)),
            ("2026-01-01T00:00:01.000000Z", Some(1_767_225_601)),
            ("soon", None),
            ("2026-13-01T00:00:00Z", None),
            ("", None),
        ] {
            assert_eq!(seconds(at), expected, "{at}");
        }
    }

    #[test]
    fn instants_are_read_to_the_millisecond() {
        assert_eq!(milliseconds("2026-01-01T00:00:01.250123Z"), Some(1_767_225_601_250));
        assert_eq!(milliseconds("2026-01-01T00:00:01Z"), Some(1_767_225_601_000));
        assert_eq!(milliseconds("soon"), None);
    }

    #[test]
    fn ages_are_short() {
        for (seconds, expected) in [(0, "0s"), (59, "59s"), (60, "1m"), (7_300, "2h"), (900_000, "10d")] {
            assert_eq!(short(seconds), expected);
        }
    }
}
